//! The disk port on the operating system: plain positioned system calls, one each.

// fallocate(2) with FALLOC_FL_PUNCH_HOLE, posix_fadvise(2) and statvfs(3) are not in
// the standard library.
#![allow(unsafe_code, clippy::disallowed_methods)]

use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::{Open, Space, Status};

/// Others close what they have open.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(20);
const DESCRIPTOR_WAIT_MAX: Duration = Duration::from_secs(10);

pub(super) fn open(path: &Path, how: Open) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(how != Open::Read);
    match how {
        Open::Read | Open::Existing => &mut options,
        Open::New => options.create_new(true),
        Open::Private => options.create_new(true).mode(0o600),
        Open::Empty => options.create(true).truncate(true),
    };
    options.open(path)
}

pub(super) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

pub(super) fn release(file: &File, offset: u64, length: u64) {
    let (Ok(offset), Ok(length)) = (offset.try_into(), length.try_into()) else { return };
    // SAFETY: the descriptor is open as long as `file` lives; no memory is passed. It refuses nothing but a wrong
    // descriptor.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_DONTNEED) };
}

pub(super) fn punch(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let bad = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let (offset, length) = (offset.try_into().map_err(bad)?, length.try_into().map_err(bad)?);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: the descriptor is open as long as `file` lives; no memory is passed.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(super) fn status(metadata: &Metadata) -> Status {
    Status { length: metadata.len(), allocated: metadata.blocks() * 512, device: metadata.dev() }
}

pub(super) fn status_of(path: &Path) -> io::Result<Status> {
    Ok(status(&fs::metadata(path)?))
}

pub(super) fn lock(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

pub(super) fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)
}

pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    fs::remove_dir_all(path)
}

pub(super) fn rename(source: &Path, target: &Path) -> io::Result<()> {
    fs::rename(source, target)
}

pub(super) fn create_directory(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)
}

pub(super) fn list(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.extend(entry?.file_name().into_string());
    }
    Ok(names)
}

/// A directory has to be opened for that, and what was done in it cannot be undone when there is no descriptor: that
/// is no failure of the disk, and passes.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    let mut waited = Duration::ZERO;
    loop {
        match File::open(directory) {
            Err(error) if is_out_of_descriptors(&error) && waited < DESCRIPTOR_WAIT_MAX => {
                std::thread::sleep(DESCRIPTOR_PAUSE);
                waited += DESCRIPTOR_PAUSE;
            }
            opened => return opened?.sync_all(),
        }
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

pub(super) fn space(path: &Path) -> io::Result<Space> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: statvfs is plain numbers, for which zeros are valid.
    let mut raw: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with NUL and lives through the call; `raw` is ours to be written.
    if unsafe { libc::statvfs(path.as_ptr(), &raw mut raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes = |blocks: u64| blocks.saturating_mul(raw.f_frsize);
    Ok(Space {
        total: bytes(raw.f_blocks),
        free: bytes(raw.f_bavail),
        used: bytes(raw.f_blocks.saturating_sub(raw.f_bfree)),
    })
}
