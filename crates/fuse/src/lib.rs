//! The kernel's FUSE protocol, and the transport that carries it, without libfuse.
//!
//! Implement [`Filesystem`], choose [`MountOptions`], call [`mount()`]; dropping the [`Session`]
//! unmounts. This page first teaches the words, because most errors in FUSE file systems are
//! misunderstandings of the kernel's caches, not of this interface.
//!
//! # Nodeids, lookup counts, generations
//!
//! The kernel never sends paths. It walks a path one name at a time: LOOKUP of a name in a
//! directory answers a *nodeid*, and every later request names the inode by it. [`ROOT_ID`] is the
//! root and needs no lookup. Nodeids are chosen by the file system; inode numbers do well.
//!
//! The kernel remembers each nodeid that it was told, so the file system must be ready to serve it,
//! also after the last name is unlinked. How long, the *lookup count* says: every answer that
//! carries an [`Entry`] (lookup, create, mknod, mkdir, symlink, link, tmpfile, and each full entry
//! of readdirplus but "." and "..") adds one; FORGET subtracts. At 0 the kernel holds nothing, and
//! the file system may drop its state for the inode. An answer counts only if it was delivered
//! ([`Delivery`]): count before you answer and take it back if it was dropped, because a FORGET may
//! arrive before the answering call returns. At unmount the kernel does not send forgets for what
//! it still holds.
//!
//! If nodeids are reused, (nodeid, generation) must not be: NFS file handles are made of both.
//!
//! # Timeouts
//!
//! An entry answer has two: `entry_timeout`, how long the name may be resolved without asking
//! (also the fact that there is no such name: [`Entry::negative`]), and `attr_timeout`, how long
//! stat may be answered from the cache. Within them the kernel does not ask: changes by other
//! clients stay invisible unless a [`Notifier`] says so. Zero means: ask every time, which is what
//! strong consistency costs. Changes made through this mount update the kernel's caches at once.
//!
//! # The page cache and `keep_cache`
//!
//! What read answered stays in the kernel's page cache, and read(2) is served from there. It is
//! dropped
//!
//! * at open, unless the answer has [`KEEP_CACHE`](flags::open::KEEP_CACHE). Close-to-open consistency
//!   is exactly this decision: keep if the content version is the one last seen, else drop;
//! * with [`DataInvalidation::Auto`], when an attribute answer shows another size or mtime;
//! * by [`Notifier::inval_inode`].
//!
//! Writes go through the cache to the file system before write(2) returns, in requests of up to
//! `max_write`. Dirty pages of shared mappings come later, without a process
//! ([`Write::from_page_cache`]). With [`DIRECT_IO`](flags::open::DIRECT_IO) a file has no cache, and a
//! request is as large as the program's own, up to `max_write`; cached reads are as large as the
//! read-ahead.
//!
//! # Locks
//!
//! Without `posix_locks` and `flock_locks` in [`Config`] the kernel keeps locks by itself, for this
//! mount only. With them [`Filesystem::setlk`] gets both kinds, told apart by [`Lock::is_flock`];
//! the two kinds never conflict. POSIX locks end when *any* descriptor of the file is closed by
//! their owner: that is [`Filesystem::flush`] with its `lock_owner`. A flock ends with
//! [`Release::flock_unlock`]. A waiting lock ([`Lock::wait`]) must watch for its interrupt.
//!
//! # Answers, threads, interrupts
//!
//! A method gets a reply handle and must not block. It answers at once or moves the handle to
//! where the work is done; handles are `Send`. Answering consumes the handle; a handle that is
//! dropped unanswered answers EIO and logs an error, so that no process hangs on our mistakes. A
//! panic in a method does the same.
//!
//! Each thread has one buffer. Names and the data of a write are borrowed from it and end with the
//! method. The data is page-aligned.
//!
//! When the waiting process gets a signal, the kernel sends INTERRUPT. A request that may take long
//! asks for a watch (`watch()` on every reply handle): a future, a flag and a callback in one. It
//! must still be answered, with EINTR (or with success, if it is done). A process that is killed
//! stays until then. Requests that never watch pay nothing.
//!
//! # Known deadlocks
//!
//! * **Blocking in a method.** All threads wait, nobody reads the request that would wake them.
//! * **Notifying while answering.** See [`Notifier`]: the kernel takes the inode's locks, which the
//!   process waiting for your answer may hold. Answer first, notify from another thread.
//! * **Using the own mount.** A file system that opens a path below its own mount point waits for
//!   itself. The same by detour: a log file there, a mapped binary there, a backing directory that
//!   the mount covers.
//! * **Memory pressure.** To reclaim memory the kernel may wait for dirty pages of this mount to be
//!   written, in any allocation of this process. Without a writeback cache only shared mappings make
//!   such pages; keep `max_background` bounded.
//! * **Dropping the [`Session`] in a FUSE thread.** It waits for those threads.
//! * **fork without exec** while mounted: the child keeps the device open and the mount outlives us.
//!
//! # Safety of what the kernel sends
//!
//! Decoding is total: cut-off structs, names without NUL, overlong ones or with a slash are
//! answered EINVAL, unknown opcodes ENOSYS. Name *length* is the file system's matter: the kernel
//! passes names of up to 4,095 bytes (1,024 before 6.15), POSIX programs expect ENAMETOOLONG above 255.
//!
//! # What is deliberately absent
//!
//! No path-based interface, no inode table, no caches, no async runtime: those belong to the
//! file system. No writeback cache, because two clients' kernels would diverge. No DAX
//! (`setupmapping`), CUSE, passthrough, `retrieve` and unrestricted ioctls. No io_uring yet: a
//! reply handle only knows a sink, so that transport can be added behind the same handles.
//! Nothing of ours is imported.
//!
//! Tests: beside the code for decoding and answers; `tests/mount.rs` on real mounts.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod abi;
pub mod adapter;
mod attr;
mod decode;
#[cfg(feature = "decoders")]
pub mod decoders;
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
