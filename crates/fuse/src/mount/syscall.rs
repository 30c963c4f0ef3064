//! mount(2) and umount2(2), for root.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{MountError, MountOptions, Unmount};

/// The kernel's side of FUSE.
pub(super) const DEVICE: &str = "/dev/fuse";

/// Type in the mount table: the kernel takes what follows the dot as the subtype.
const KIND: &str = "fuse.milpa";

/// Whether the process may mount by itself.
pub(super) fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn open_device() -> Result<OwnedFd, MountError> {
    let opened = File::options().read(true).write(true).open(DEVICE);
    opened.map(OwnedFd::from).map_err(|source| match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            MountError::PermissionDenied { what: "open /dev/fuse", source }
        }
        _ => MountError::NoDevice { source },
    })
}

/// Opens the device and mounts it on `path`.
pub(super) fn mount(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let refused = |source| MountError::Refused { path: path.to_owned(), source };
    let device = open_device()?;
    let root_mode = fs::metadata(path).map_err(refused)?.mode() & libc::S_IFMT;
    let mut words = vec![
        format!("fd={}", device.as_raw_fd()),
        format!("rootmode={root_mode:o}"),
        "user_id=0".to_owned(),
        "group_id=0".to_owned(),
    ];
    words.extend(options.kernel_words());
    mount_raw(path, &options.fsname, flags(options), &words.join(",")).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                MountError::PermissionDenied { what: "mount (needs CAP_SYS_ADMIN)", source }
            }
            Some(libc::ENODEV) => MountError::NoDevice { source },
            _ => refused(source),
        }
    })?;
    Ok(device)
}

fn flags(options: &MountOptions) -> libc::c_ulong {
    let chosen = [
        (libc::MS_RDONLY, options.read_only),
        (libc::MS_NOSUID, options.no_suid),
        (libc::MS_NODEV, options.no_devices),
        (libc::MS_NOEXEC, options.no_exec),
        (libc::MS_NOATIME, options.no_atime),
    ];
    chosen.iter().filter(|(_, on)| *on).fold(0, |flags, (flag, _)| flags | flag)
}

fn mount_raw(path: &Path, source: &str, flags: libc::c_ulong, data: &str) -> io::Result<()> {
    let source = CString::new(source)?;
    let target = CString::new(path.as_os_str().as_bytes())?;
    let kind = CString::new(KIND)?;
    let data = CString::new(data)?;
    // SAFETY: four NUL-terminated strings that live until the call returns.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes the topmost mount at `path` away. Never follows a symbolic link.
pub(super) fn unmount(path: &Path, how: Unmount) -> io::Result<()> {
    let flags = match how {
        Unmount::Clean => 0,
        Unmount::Detach => libc::MNT_DETACH,
        Unmount::Abort => libc::MNT_FORCE | libc::MNT_DETACH,
    };
    let target = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: one NUL-terminated string that lives until the call returns.
    let result = unsafe { libc::umount2(target.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
