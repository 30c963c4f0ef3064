//! Mounting and unmounting: from a directory to an open `/dev/fuse`, and back.

mod error;
mod fusermount;
mod mountinfo;
mod options;
mod syscall;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub use error::{MountError, UnmountError};
pub use options::MountOptions;

use mountinfo::MountEntry;

/// How to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// Refuses while files are open or a process has its directory there.
    Clean,
    /// Takes the mount out of the tree at once; what is open works on until it is closed.
    Detach,
    /// As `Detach`, and aborts the connection: what is open fails with ENOTCONN from now on.
    Abort,
}

/// A mount that this process made. Dropping it aborts what is still there.
#[derive(Debug)]
pub(crate) struct MountPoint {
    path: PathBuf,
    /// `major:minor` of the mounted file system: proves that what we unmount is ours.
    device: String,
    is_privileged: bool,
}

/// Mounts, and returns the device on which the kernel's INIT waits.
pub(crate) fn mount(
    path: &Path,
    options: &MountOptions,
) -> Result<(MountPoint, OwnedFd), MountError> {
    let problems = options.problems();
    if !problems.is_empty() {
        return Err(MountError::InvalidOptions { problems });
    }
    let path = check_mount_point(path)?;
    let is_privileged = syscall::is_root();
    let device_file = if is_privileged {
        syscall::mount(&path, options)?
    } else {
        check_device_exists()?;
        fusermount::mount(fusermount::PROGRAM, &path, options)?
    };
    // From here on a failure must unmount again, which dropping the mount point does.
    let mut mount_point = MountPoint { path, device: String::new(), is_privileged };
    let entry = mount_point.find_newest().map_err(MountError::MountTable)?;
    mount_point.device = entry.device;
    Ok((mount_point, device_file))
}

/// The canonical path, if a file system can be mounted there.
fn check_mount_point(path: &Path) -> Result<PathBuf, MountError> {
    let refuse = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT) => MountError::MountPointMissing { path: path.to_owned() },
        Some(libc::ENOTCONN) => MountError::StaleMount { path: path.to_owned() },
        Some(libc::ENOTDIR) => MountError::NotADirectory { path: path.to_owned() },
        _ => MountError::MountPointUnusable { path: path.to_owned(), source },
    };
    let canonical = fs::canonicalize(path).map_err(refuse)?;
    let table = mountinfo::read().map_err(MountError::MountTable)?;
    // The table before stat: it names what is mounted there, even if its server does not answer.
    let mounted = table.into_iter().rfind(|entry| entry.mount_point == canonical);
    if let Some(entry) = mounted {
        return Err(match fs::metadata(&canonical).map_err(refuse) {
            Err(stale @ MountError::StaleMount { .. }) => stale,
            _ => MountError::AlreadyMounted { path: canonical, kind: entry.kind },
        });
    }
    if !fs::metadata(&canonical).map_err(refuse)?.is_dir() {
        return Err(MountError::NotADirectory { path: path.to_owned() });
    }
    Ok(canonical)
}

/// fusermount3 says the same in many words; ours are clearer.
fn check_device_exists() -> Result<(), MountError> {
    match fs::symlink_metadata(syscall::DEVICE) {
        Ok(_) => Ok(()),
        Err(source) => Err(MountError::NoDevice { source }),
    }
}

impl MountPoint {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The kernel's number of the connection (a directory in `/sys/fs/fuse/connections`).
    pub(crate) fn connection(&self) -> Option<&str> {
        self.device.strip_prefix("0:")
    }

    /// Sets the read-ahead of cached files; only after INIT, which sets it too.
    pub(crate) fn set_read_ahead(&self, bytes: u32) {
        let path = format!("/sys/class/bdi/{}/read_ahead_kb", self.device);
        if let Err(error) = fs::write(&path, (bytes / 1024).to_string()) {
            tracing::info!(path, %error, "read-ahead stays at the kernel's default");
        }
    }

    fn find_newest(&self) -> io::Result<MountEntry> {
        let entry = mountinfo::read()?
            .into_iter()
            .rfind(|entry| entry.mount_point == self.path && entry.kind.starts_with("fuse"));
        entry.ok_or_else(|| io::Error::other("the new mount is not in /proc/self/mountinfo"))
    }

    /// Whether our file system is still mounted at our path.
    pub(crate) fn is_mounted(&self) -> io::Result<bool> {
        let table = mountinfo::read()?;
        Ok(table.iter().any(|entry| entry.mount_point == self.path && entry.device == self.device))
    }

    /// Takes the mount away; success if it is gone already.
    pub(crate) fn unmount(&self, how: Unmount) -> Result<(), UnmountError> {
        let is_mounted = self.is_mounted().map_err(|source| self.failed(source))?;
        if !is_mounted {
            return Ok(());
        }
        if !self.is_privileged {
            let is_lazy = how != Unmount::Clean;
            return fusermount::unmount(fusermount::PROGRAM, &self.path, is_lazy);
        }
        syscall::unmount(&self.path, how).map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => UnmountError::Busy { path: self.path.clone() },
            _ => self.failed(source),
        })
    }

    fn failed(&self, source: io::Error) -> UnmountError {
        UnmountError::Failed { path: self.path.clone(), source }
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        if let Err(error) = self.unmount(Unmount::Abort) {
            tracing::error!(path = %self.path.display(), %error, "mount stays behind");
        }
    }
}
