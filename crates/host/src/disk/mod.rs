//! Files and directories: the operating system's, or the simulation's.
//!
//! One low-level port for everything that a node keeps: extents, logs, snapshots, checkpoints,
//! identities. So one simulated disk, with one model of what a power cut takes, stands under all
//! of them. Paths are those of the node's settings.
//!
//! On the real side each call is one system call (pread, pwrite, fdatasync, …), so that a
//! tracer can count and fail them one by one (`system`).
//!
//! # What a caller must assume of the medium
//!
//! What was written and not synced may be there after a power cut, in parts, or not at all. A new name,
//! a rename or a removal counts only after [`sync_directory`]. A failed sync says nothing about what
//! is on the medium, and must not be repeated in hope. Nor does a read: what a failed sync was for stays in
//! the system's memory, and looks written. Who begins where another life ended opens with
//! [`File::open_from_medium`].

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use crate::world;

mod direct;
mod system;

pub(crate) use direct::aligned_behind;
pub use direct::{DIRECT_BYTES_MIN, page_aligned};

/// How often what the disk fails to read is read.
const READS_MAX: u32 = 4;

/// How a file is opened: for reading and writing, but for `Read`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// It must exist, and is only read.
    Read,
    /// It must exist.
    Existing,
    /// It must not exist.
    New,
    /// It must not exist, and nobody but its owner shall read it.
    Private,
    /// Made if need be, and emptied.
    Empty,
}

/// What is known of a file or directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Bytes up to its end.
    pub length: u64,
    /// Bytes that it takes on the medium.
    pub allocated: u64,
    /// The device: files with the same one fail together.
    pub device: u64,
}

/// Room on a file system in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// All of it.
    pub total: u64,
    /// What an unprivileged process can still use.
    pub free: u64,
    /// What is in use.
    pub used: u64,
}

/// The disks of a simulated machine. The errors are those of the system calls that the functions of
/// this module name.
#[allow(missing_docs, clippy::missing_errors_doc)]
pub trait Disk {
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn SimulatedFile>>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, source: &Path, target: &Path) -> io::Result<()>;
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    fn list(&self, directory: &Path) -> io::Result<Vec<String>>;
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;
    fn status(&self, path: &Path) -> io::Result<Status>;
    fn space(&self, path: &Path) -> io::Result<Space>;
    fn lock(&self, path: &Path) -> io::Result<Box<dyn Held>>;
}

/// An open file of a simulated machine. One that outlives its machine's power fails every call.
#[allow(missing_docs, clippy::missing_errors_doc)]
pub trait SimulatedFile: std::fmt::Debug + Send + Sync {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    fn sync(&self) -> io::Result<()>;
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;
    fn truncate(&self, length: u64) -> io::Result<()>;
    fn status(&self) -> io::Result<Status>;
    /// All of it.
    fn release(&self);
}

/// A lock that is held until it is dropped, or its machine loses power.
pub trait Held: std::fmt::Debug + Send + Sync {}

/// An open file. All calls are positioned and may run in parallel.
#[derive(Clone, Debug)]
pub struct File(Kind);

#[derive(Clone, Debug)]
enum Kind {
    System(Arc<std::fs::File>),
    Simulated(Arc<dyn SimulatedFile>),
}

impl File {
    /// Opens a file. The names of new ones are durable after [`sync_directory`].
    ///
    /// # Errors
    ///
    /// As open(2): `NotFound` and `AlreadyExists` as [`Open`] says.
    pub fn open(path: &Path, how: Open) -> io::Result<File> {
        Ok(File(match world::current() {
            Some(world) => Kind::Simulated(world.disk().open(path, how)?),
            None => Kind::System(Arc::new(system::open(path, how)?)),
        }))
    }

    /// Opens a file that an earlier life of the process left, so that reads see what is on the medium, or will
    /// be: Linux keeps what a failed sync was for as if it were written, and lets the next one succeed.
    ///
    /// # Errors
    ///
    /// As [`open`](File::open).
    pub fn open_from_medium(path: &Path) -> io::Result<File> {
        let file = File::open(path, Open::Existing)?;
        file.release(0, 0);
        Ok(file)
    }

    /// Reads until `buffer` is full or the file ends; gives how many bytes there were.
    ///
    /// # Errors
    ///
    /// As pread(2).
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.0 {
            Kind::System(file) => system::read_at(file, buffer, offset),
            Kind::Simulated(file) => file.read_at(buffer, offset),
        }
    }

    /// Writes all of `bytes`, growing the file if need be.
    ///
    /// # Errors
    ///
    /// As pwrite(2); a part may then have been written.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match &self.0 {
            Kind::System(file) => system::write_at(file, bytes, offset),
            Kind::Simulated(file) => file.write_at(bytes, offset),
        }
    }

    /// Makes everything written so far durable, with the metadata needed to read it.
    ///
    /// # Errors
    ///
    /// As fdatasync(2). Not to be called again after one.
    pub fn sync(&self) -> io::Result<()> {
        match &self.0 {
            Kind::System(file) => file.sync_data(),
            Kind::Simulated(file) => file.sync(),
        }
    }

    /// As [`read_at`](File::read_at), from the device: what is read is not kept in memory for the next reader, pushes nothing out
    /// that is, and what is there is not taken for what the device has. From where a page begins, into a buffer from
    /// [`page_aligned`]; elsewhere, and where the file system cannot, as `read_at`.
    ///
    /// # Errors
    ///
    /// As pread(2).
    pub fn read_direct(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.0 {
            Kind::System(file) => direct::read_at(file, buffer, offset),
            Kind::Simulated(file) => file.read_at(buffer, offset),
        }
    }

    /// As [`read_direct`](File::read_direct), but what is in memory comes from there, and what is shorter than
    /// [`DIRECT_BYTES_MIN`] as with `read_at`: for who wants the bytes, and not to know whether the device has them.
    ///
    /// # Errors
    ///
    /// As pread(2).
    pub fn read_unkept(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.0 {
            Kind::System(file) => direct::read_unkept(file, buffer, offset),
            Kind::Simulated(file) => file.read_at(buffer, offset),
        }
    }

    /// As [`write_at`](File::write_at), to the device: nothing of it is kept in memory. No more durable than that before a
    /// [`sync`](File::sync), which finds little to do. Whole pages, of at least [`DIRECT_BYTES_MIN`] together, where
    /// [`read_direct`](File::read_direct) would; the rest as `write_at`.
    ///
    /// # Errors
    ///
    /// As pwrite(2); a part may then have been written.
    pub fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match &self.0 {
            Kind::System(file) => direct::write_at(file, bytes, offset),
            Kind::Simulated(file) => file.write_at(bytes, offset),
        }
    }

    /// Gives back the memory that is kept of a range for the next reader; a length of 0 is all that follows. What is still to
    /// be written stays; what a failed sync was for goes, and reads see what is on the device.
    pub fn release(&self, offset: u64, length: u64) {
        match &self.0 {
            Kind::System(file) => system::release(file, offset, length),
            Kind::Simulated(file) if length == 0 => file.release(),
            Kind::Simulated(_) => {}
        }
    }

    /// Turns a range into a hole that reads as zeros, and gives its blocks back. The length stays.
    ///
    /// # Errors
    ///
    /// As fallocate(2).
    pub fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        match &self.0 {
            Kind::System(file) => system::punch(file, offset, length),
            Kind::Simulated(file) => file.punch(offset, length),
        }
    }

    /// Sets the length; what is added reads as zeros.
    ///
    /// # Errors
    ///
    /// As ftruncate(2).
    pub fn truncate(&self, length: u64) -> io::Result<()> {
        match &self.0 {
            Kind::System(file) => file.set_len(length),
            Kind::Simulated(file) => file.truncate(length),
        }
    }

    /// What is known of it.
    ///
    /// # Errors
    ///
    /// As fstat(2).
    pub fn status(&self) -> io::Result<Status> {
        match &self.0 {
            Kind::System(file) => Ok(system::status(&file.metadata()?)),
            Kind::Simulated(file) => file.status(),
        }
    }

    /// Its length in bytes.
    ///
    /// # Errors
    ///
    /// As fstat(2).
    pub fn length(&self) -> io::Result<u64> {
        self.status().map(|status| status.length)
    }

    /// Reads or writes it from its start, one call after the other.
    #[must_use]
    pub fn stream(self) -> FileStream {
        FileStream { file: self, position: 0 }
    }
}

/// A file with a position. Unbuffered. What the disk fails to read is tried again.
#[derive(Debug)]
pub struct FileStream {
    file: File,
    position: u64,
}

impl FileStream {
    /// The file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Read for FileStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = repeat_failed(|| self.file.read_at(buffer, self.position))?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for FileStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(bytes, self.position)?;
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the disk has failed, or what is on it: not a mistake of who asked, and nothing that others can give back.
/// What the block layer reports of a medium, a link or a target that is gone comes through file systems as it is.
#[must_use]
pub fn is_failure(error: &io::Error) -> bool {
    let errors = [
        libc::EIO,
        libc::EUCLEAN,
        libc::EBADMSG,
        libc::ENXIO,
        libc::ENODEV,
        libc::EROFS,
        libc::ENODATA,
        libc::ETIMEDOUT,
        libc::ENOLINK,
        libc::EREMOTEIO,
        libc::EILSEQ,
        libc::ENOMEDIUM,
    ];
    error.raw_os_error().is_some_and(|error| errors.contains(&error))
}

/// Reads, and again if the disk has failed: what it refuses once it may give the next time, and what cannot be read may cost
/// a whole replica. Not for what changes anything: a failed sync must not be repeated.
fn repeat_failed<T>(mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut done = read();
    for _ in 1..READS_MAX {
        if !done.as_ref().is_err_and(is_failure) {
            break;
        }
        done = read();
    }
    done
}

/// Whether the process or the system has run out of what it needs to open or read any file. Nothing is wrong with the
/// disk, and it passes.
#[must_use]
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whether the disk, or the room that somebody may have on it, is full.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The lock of a directory: one process at a time, until it is dropped or the process dies.
#[derive(Debug)]
pub struct Lock {
    _kind: LockKind,
}

#[derive(Debug)]
#[allow(dead_code)] // Held, not used.
enum LockKind {
    System(std::fs::File),
    Simulated(Box<dyn Held>),
}

/// Takes the exclusive lock of a lock file, which is made if need be.
///
/// # Errors
///
/// `WouldBlock` when another process has it; else as open(2) and flock(2).
pub fn lock(path: &Path) -> io::Result<Lock> {
    let kind = match world::current() {
        Some(world) => LockKind::Simulated(world.disk().lock(path)?),
        None => LockKind::System(system::lock(path)?),
    };
    Ok(Lock { _kind: kind })
}

/// Unlinks a file.
///
/// # Errors
///
/// As unlink(2).
pub fn remove(path: &Path) -> io::Result<()> {
    match world::current() {
        Some(world) => world.disk().remove(path),
        None => system::remove(path),
    }
}

/// Removes a directory and all that is in it.
///
/// # Errors
///
/// As unlink(2) and rmdir(2); a part may then be gone.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match world::current() {
        Some(world) => world.disk().remove_tree(path),
        None => system::remove_tree(path),
    }
}

/// Renames a file over another, atomically.
///
/// # Errors
///
/// As rename(2).
pub fn rename(source: &Path, target: &Path) -> io::Result<()> {
    match world::current() {
        Some(world) => world.disk().rename(source, target),
        None => system::rename(source, target),
    }
}

/// Opens a directory to build upon: creates it and its parents durably if they are missing, and makes durable what an
/// earlier life left in it.
///
/// What is synced in a directory that itself is not in its parent yet is lost with it (found by the simulation: a node
/// came back from a power cut as if it had never been; and again, with seed 214915, where the life that made the
/// directory had ended before its name was synced). So what is there already is synced as well. One level is made after
/// the other, so that only the last one that is there may be without a durable name.
///
/// # Errors
///
/// As mkdir(2) and fsync(2).
pub fn create_directory(path: &Path) -> io::Result<()> {
    let is_missing =
        |path: &&Path| matches!(status(path), Err(e) if e.kind() == io::ErrorKind::NotFound);
    let levels: Vec<&Path> = path.ancestors().filter(|level| *level != Path::new("")).collect();
    let missing = levels.iter().copied().take_while(is_missing).count();
    if let Some(there) = levels.get(missing) {
        sync_name_if_ours(there)?;
    }
    for level in levels.iter().take(missing).rev() {
        make_directory(level)?;
        sync_name(level)?;
    }
    if missing == 0 {
        // Unless it is something else.
        make_directory(path)?;
        sync_directory(path)?;
    }
    Ok(())
}

fn make_directory(path: &Path) -> io::Result<()> {
    match world::current() {
        Some(world) => world.disk().create_directory(path),
        None => system::create_directory(path),
    }
}

fn sync_name(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync_directory(Path::new(".")),
        Some(parent) => sync_directory(parent),
        None => Ok(()),
    }
}

/// A name in a directory that we may not read, or not write, was not made by an earlier life of this process.
fn sync_name_if_ours(path: &Path) -> io::Result<()> {
    match sync_name(path) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

/// The names in a directory, in order. Those that are not UTF-8 are none of ours and left out. What the disk fails to read is
/// tried again.
///
/// # Errors
///
/// As readdir(3).
pub fn list(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = repeat_failed(|| match world::current() {
        Some(world) => world.disk().list(directory),
        None => system::list(directory),
    })?;
    names.sort_unstable();
    Ok(names)
}

/// Makes creations, removals and renames in a directory durable.
///
/// # Errors
///
/// As fsync(2).
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    match world::current() {
        Some(world) => world.disk().sync_directory(directory),
        None => system::sync_directory(directory),
    }
}

/// What is known of a file or directory.
///
/// # Errors
///
/// As stat(2).
pub fn status(path: &Path) -> io::Result<Status> {
    match world::current() {
        Some(world) => world.disk().status(path),
        None => system::status_of(path),
    }
}

/// Room on the file system that holds `path`.
///
/// # Errors
///
/// As statvfs(3).
pub fn space(path: &Path) -> io::Result<Space> {
    match world::current() {
        Some(world) => world.disk().space(path),
        None => system::space(path),
    }
}

/// Reads a whole file. For small ones. What the disk fails to read is tried again.
///
/// # Errors
///
/// As open(2) and pread(2).
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    repeat_failed(|| read_once(path))
}

fn read_once(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path, Open::Read)?;
    let length = usize::try_from(file.length()?).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    let count = file.read_at(&mut bytes, 0)?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Replaces a file so that after a power cut either the old or the new one is there: written beside,
/// flushed, renamed, the directory flushed.
///
/// # Errors
///
/// Those of the calls named; the old file may then still be there or not.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let file = File::open(&beside, Open::Empty)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    rename(&beside, path)?;
    sync_directory(path.parent().unwrap_or(path))
}

#[cfg(test)]
mod tests;
