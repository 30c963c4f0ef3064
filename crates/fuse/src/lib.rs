//! FUSE.
mod abi;
mod attr;
mod decode;
mod dispatch;
mod filesystem;
pub mod flags;
mod init;
mod interrupt;
mod mount;
mod notify;
mod reply;
mod request;
mod session;
mod transport;

pub use attr::{Attr, Entry, Opened, Statfs, Statx, Time};
pub use filesystem::Filesystem;
pub use init::{Config, DataInvalidation, KernelInfo, KillPrivileges, Negotiated, Readdirplus};
pub use interrupt::InterruptWatch;
pub use mount::{MountError, MountOptions, Unmount, UnmountError};
pub use notify::{Notified, Notifier, NotifyError};
pub use reply::{
    Delivery, ReplyAttr, ReplyBmap, ReplyCopy, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen,
    ReplyPoll, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr,
};
pub use request::{
    CopyFileRange, Create, Fallocate, FileLock, Flush, Forget, Forgets, Fsync, Ioctl, Lock,
    LockKind, Lseek, Mkdir, Mknod, Open, PollArgs, Read, Release, Rename, Request, SetAttr,
    SetTime, Setxattr, StatxArgs, Write,
};
pub use session::{Session, mount};

/// The nodeid of the root directory. The kernel holds it for the life of the mount.
pub const ROOT_ID: u64 = 1;
