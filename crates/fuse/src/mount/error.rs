//! Why mounting or unmounting failed, in words for the operator.

use std::io;
use std::path::PathBuf;

/// Failure of [`mount`](crate::mount()). Nothing stays mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// F0101. Every violated bound of the options.
    #[error("mount options are invalid: {}", problems.join("; "))]
    InvalidOptions {
        /// One line per bad option.
        problems: Vec<String>,
    },

    /// F0102. Create the directory first.
    #[error("mount point {} does not exist", path.display())]
    MountPointMissing {
        /// As given.
        path: PathBuf,
    },

    /// F0103. Only a directory can be a mount point.
    #[error("mount point {} is not a directory", path.display())]
    NotADirectory {
        /// As given.
        path: PathBuf,
    },

    /// F0104. Unmount that first, or choose another directory.
    #[error("{} is already a mount point (of type {kind})", path.display())]
    AlreadyMounted {
        /// Canonical.
        path: PathBuf,
        /// Type of the file system that is there.
        kind: String,
    },

    /// F0105. A FUSE process ended without unmounting. `umount` the directory first.
    #[error("{} is a stale mount whose process is gone", path.display())]
    StaleMount {
        /// As given.
        path: PathBuf,
    },

    /// F0106. The mount point cannot be looked at.
    #[error("mount point {} cannot be used", path.display())]
    MountPointUnusable {
        /// As given.
        path: PathBuf,
        /// What stat said.
        source: io::Error,
    },

    /// F0107. Load the module (`modprobe fuse`); in a container pass the device in.
    #[error("no FUSE device: /dev/fuse is missing or its module is not loaded")]
    NoDevice {
        /// What open said.
        source: io::Error,
    },

    /// F0108. Needs root with CAP_SYS_ADMIN, or fusermount3; `allow_other` without root needs
    /// `user_allow_other` in /etc/fuse.conf.
    #[error("permission denied to {what}")]
    PermissionDenied {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },

    /// F0109. Without root, mounting needs the program fusermount3 (package fuse3).
    #[error("not root, and {program} cannot be run")]
    NoFusermount {
        /// What was looked for.
        program: String,
        /// Why it did not start.
        source: io::Error,
    },

    /// F0110. fusermount3 refused.
    #[error("fusermount3 failed: {message}")]
    Fusermount {
        /// What it wrote.
        message: String,
    },

    /// F0111. The kernel refused the mount for another reason.
    #[error("kernel refused to mount on {}", path.display())]
    Refused {
        /// Canonical.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },

    /// F0112. /proc/self/mountinfo cannot be read or lacks the new mount.
    #[error("mount table cannot be read")]
    MountTable(#[source] io::Error),

    /// F0113. The kernel speaks an older protocol than 7.31 (Linux 5.4).
    #[error("kernel speaks FUSE {major}.{minor}, at least 7.31 is needed")]
    KernelTooOld {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },

    /// F0114. The file system's `init` refused.
    #[error("file system refused to start")]
    InitRefused(#[source] io::Error),

    /// F0115. The first exchange with the kernel failed.
    #[error("handshake with the kernel failed")]
    Handshake(#[source] io::Error),

    /// F0116. Threads or their buffers could not be made.
    #[error("session threads cannot be started")]
    Threads(#[source] io::Error),
}

/// Failure of an unmount.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmountError {
    /// F0201. Files are open, or a process has its working directory there. Close them and try
    /// again, or detach.
    #[error("{} is busy", path.display())]
    Busy {
        /// Canonical.
        path: PathBuf,
    },

    /// F0202. Unmounted here, but alive in another mount namespace (a container) or by a bind
    /// mount. The session serves it until that ends.
    #[error("{} is unmounted but still in use elsewhere", path.display())]
    StillReferenced {
        /// Canonical.
        path: PathBuf,
    },

    /// F0203. The kernel or fusermount3 refused for another reason.
    #[error("{} cannot be unmounted", path.display())]
    Failed {
        /// Canonical.
        path: PathBuf,
        /// What was said.
        source: io::Error,
    },
}
