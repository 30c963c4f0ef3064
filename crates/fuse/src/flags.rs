//! Flag bits of the protocol that a file system sees or answers with.
//!
//! They are plain integers as in the kernel's header, because the kernel adds bits with every
//! release and a file system must be able to pass on one that this crate has never heard of.

/// Flags of an answer to open, opendir and create.
pub mod open {
    /// Reads and writes of this file bypass the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Cached pages stay valid across this open. Without it the kernel drops them.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// lseek answers ESPIPE.
    pub const NONSEEKABLE: u32 = 1 << 2;
    /// The kernel may cache the entries that readdir returns (opendir only).
    pub const CACHE_DIR: u32 = 1 << 3;
    /// The file has no position at all.
    pub const STREAM: u32 = 1 << 4;
    /// No FLUSH is sent at close.
    pub const NOFLUSH: u32 = 1 << 5;
    /// Direct writes to one inode may run in parallel; else the kernel serialises them.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    /// Reads and writes go to a backing file in the kernel.
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Bits of INIT: what the kernel offers and what was agreed.
pub mod init {
    /// Several reads of one file may be under way at once.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// POSIX record locks are asked from the file system.
    pub const POSIX_LOCKS: u64 = 1 << 1;
    /// fstat carries a file handle (never used by the kernel).
    pub const FILE_OPS: u64 = 1 << 2;
    /// O_TRUNC arrives in the flags of open instead of a setattr before it.
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    /// Lookups of "." and ".." are handled (needed by NFS export).
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    /// Writes above 4 KiB. Kernels since 4.20 always do it.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// The file system applies the umask itself.
    pub const DONT_MASK: u64 = 1 << 6;
    /// Splice to the device works.
    pub const SPLICE_WRITE: u64 = 1 << 7;
    /// Splice may move pages.
    pub const SPLICE_MOVE: u64 = 1 << 8;
    /// Splice from the device works.
    pub const SPLICE_READ: u64 = 1 << 9;
    /// flock(2) locks are asked from the file system.
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    /// ioctl works on directories.
    pub const HAS_IOCTL_DIR: u64 = 1 << 11;
    /// The kernel drops cached pages when size or mtime in an attribute answer changed.
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    /// READDIRPLUS is understood.
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    /// The kernel chooses between READDIR and READDIRPLUS.
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    /// Direct I/O is submitted asynchronously.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Writes are gathered in the page cache. This crate never asks for it.
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    /// open may answer ENOSYS: "succeed always, ask no more".
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    /// Lookups and readdir of one directory may run in parallel.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// The file system drops suid, sgid and capabilities on write, chown and truncate.
    pub const HANDLE_KILLPRIV: u64 = 1 << 19;
    /// POSIX ACLs are enforced by the kernel from the file system's xattrs.
    pub const POSIX_ACL: u64 = 1 << 20;
    /// Reading the device after an abort gives ECONNABORTED.
    pub const ABORT_ERROR: u64 = 1 << 21;
    /// `max_pages` in the answer counts.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// Targets of symbolic links are cached.
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    /// opendir may answer ENOSYS.
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    /// Cached pages are dropped on the file system's request only.
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    /// DAX mappings have an alignment.
    pub const MAP_ALIGNMENT: u64 = 1 << 26;
    /// Submounts are created by the kernel.
    pub const SUBMOUNTS: u64 = 1 << 27;
    /// As HANDLE_KILLPRIV with the rules of local file systems; the kernel flags each case.
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// setxattr carries a second flags word.
    pub const SETXATTR_EXT: u64 = 1 << 29;
    /// INIT has a second flags word.
    pub const INIT_EXT: u64 = 1 << 30;
    /// A security context is sent with creations.
    pub const SECURITY_CTX: u64 = 1 << 32;
    /// DAX per inode.
    pub const HAS_INODE_DAX: u64 = 1 << 33;
    /// The supplementary group that matches the parent's group is sent with creations.
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    /// Entries can be expired instead of invalidated.
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    /// Shared mmap of files opened with [`open::DIRECT_IO`](super::open::DIRECT_IO) is allowed.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    /// Passthrough to backing files.
    pub const PASSTHROUGH: u64 = 1 << 37;
    /// The file system cannot be exported.
    pub const NO_EXPORT_SUPPORT: u64 = 1 << 38;
    /// Unanswered requests can be sent again.
    pub const HAS_RESEND: u64 = 1 << 39;
    /// Idmapped mounts.
    pub const ALLOW_IDMAP: u64 = 1 << 40;
    /// Requests through io_uring.
    pub const OVER_IO_URING: u64 = 1 << 41;
    /// The kernel aborts the connection when a request takes too long.
    pub const REQUEST_TIMEOUT: u64 = 1 << 42;
}

/// Bits of `valid` in setattr.
pub mod setattr {
    /// `mode` counts.
    pub const MODE: u32 = 1 << 0;
    /// `uid` counts.
    pub const UID: u32 = 1 << 1;
    /// `gid` counts.
    pub const GID: u32 = 1 << 2;
    /// `size` counts.
    pub const SIZE: u32 = 1 << 3;
    /// `atime` counts.
    pub const ATIME: u32 = 1 << 4;
    /// `mtime` counts.
    pub const MTIME: u32 = 1 << 5;
    /// `fh` counts.
    pub const FH: u32 = 1 << 6;
    /// Set the access time to the server's now.
    pub const ATIME_NOW: u32 = 1 << 7;
    /// Set the modification time to the server's now.
    pub const MTIME_NOW: u32 = 1 << 8;
    /// `lock_owner` counts.
    pub const LOCKOWNER: u32 = 1 << 9;
    /// `ctime` counts (writeback cache only).
    pub const CTIME: u32 = 1 << 10;
    /// Drop suid and sgid as the new size demands.
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Bits of the small flag words of single requests.
pub mod request {
    /// write: data comes from the page cache, the handle is a guess.
    pub const WRITE_CACHE: u32 = 1 << 0;
    /// write: the lock owner counts.
    pub const WRITE_LOCKOWNER: u32 = 1 << 1;
    /// write: drop suid and sgid.
    pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
    /// read: the lock owner counts.
    pub const READ_LOCKOWNER: u32 = 1 << 1;
    /// getattr and statx: the file handle counts.
    pub const GETATTR_FH: u32 = 1 << 0;
    /// locks: this is flock(2), not fcntl(2).
    pub const LK_FLOCK: u32 = 1 << 0;
    /// release: flush first.
    pub const RELEASE_FLUSH: u32 = 1 << 0;
    /// release: drop the flock of this handle.
    pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
    /// fsync: data only.
    pub const FSYNC_FDATASYNC: u32 = 1 << 0;
    /// open: drop suid and sgid if the file is truncated.
    pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
    /// setxattr: drop sgid, an ACL was set by someone outside the group.
    pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
    /// poll: wake me when something happens.
    pub const POLL_SCHEDULE_NOTIFY: u32 = 1 << 0;
    /// ioctl: a 32-bit process on a 64-bit kernel.
    pub const IOCTL_COMPAT: u32 = 1 << 0;
    /// ioctl: not restricted to well-formed commands (CUSE).
    pub const IOCTL_UNRESTRICTED: u32 = 1 << 1;
    /// ioctl: the file is a directory.
    pub const IOCTL_DIR: u32 = 1 << 4;
}

/// Bits of an attribute answer.
pub mod attr {
    /// The inode is the root of a submount.
    pub const SUBMOUNT: u32 = 1 << 0;
    /// The inode uses DAX.
    pub const DAX: u32 = 1 << 1;
}

/// A request that the kernel sends for the second time has this bit in its unique id.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// Flag of an entry invalidation: expire the entry, do not drop it.
pub(crate) const EXPIRE_ONLY: u32 = 1 << 0;
