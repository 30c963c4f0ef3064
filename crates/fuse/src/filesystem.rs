//! The trait that a file system implements.

use std::ffi::OsStr;

use crate::init::{Config, KernelInfo, Negotiated};
use crate::notify::Notifier;
use crate::reply::{
    ReplyAttr, ReplyBmap, ReplyCopy, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs,
    ReplyStatx, ReplyWrite, ReplyXattr,
};
use crate::request::{
    CopyFileRange, Create, Fallocate, Flush, Forget, Forgets, Fsync, Ioctl, Lock, Lseek, Mkdir,
    Mknod, Open, PollArgs, Read, Release, Rename, Request, SetAttr, Setxattr, StatxArgs, Write,
};

/// A file system, one method per opcode of the protocol.
///
/// Methods run in a FUSE thread. They must not block: answer at once, or move the reply handle to
/// where the work is done and return. While all threads are blocked no request is read, and an
/// INTERRUPT is a request. Borrowed arguments live in the thread's buffer and end with the method.
///
/// What is not implemented answers ENOSYS. For many opcodes the kernel then does without and never
/// asks again: access (all is allowed), flush, fsync (success), open and opendir (success with
/// fh 0), statx (getattr instead), lseek, fallocate, copy_file_range, xattrs (EOPNOTSUPP), locks
/// (kept by the kernel when they were not negotiated), readdirplus (if it was not negotiated).
#[allow(unused_variables)] // The default methods name the arguments for the documentation only.
pub trait Filesystem: Send + Sync + 'static {
    /// First request: what the kernel offers; `config` holds what to ask for.
    ///
    /// # Errors
    ///
    /// An errno ends the mount; it is in the error of [`mount`](crate::mount()).
    fn init(&self, kernel: &KernelInfo, config: &mut Config) -> Result<(), i32> {
        Ok(())
    }

    /// The mount is up with these terms. Called once, before any other request is served.
    fn ready(&self, negotiated: &Negotiated, notifier: Notifier) {}

    /// The session ended: unmounted or aborted. Called once, after the last request.
    fn destroy(&self) {}

    /// Looks `name` up in a directory. Counts a reference to the inode (see [`Entry`](crate::Entry)).
    fn lookup(&self, request: &Request, name: &OsStr, reply: ReplyEntry) {
        reply.error(libc::ENOSYS);
    }

    /// The kernel dropped references to an inode. There is no answer.
    fn forget(&self, forget: Forget) {}

    /// Many forgets at once.
    fn batch_forget(&self, forgets: Forgets<'_>) {
        for forget in forgets {
            self.forget(forget);
        }
    }

    /// Attributes; `fh` is the open file when the call came through one.
    fn getattr(&self, request: &Request, fh: Option<u64>, reply: ReplyAttr) {
        reply.error(libc::ENOSYS);
    }

    /// Changes attributes and answers them all.
    fn setattr(&self, request: &Request, set: &SetAttr, reply: ReplyAttr) {
        reply.error(libc::ENOSYS);
    }

    /// Target of a symbolic link, at most 4,095 bytes.
    fn readlink(&self, request: &Request, reply: ReplyData) {
        reply.error(libc::ENOSYS);
    }

    /// Creates a symbolic link.
    fn symlink(&self, request: &Request, name: &OsStr, target: &OsStr, reply: ReplyEntry) {
        reply.error(libc::ENOSYS);
    }

    /// Creates a file, pipe, socket or device node.
    fn mknod(&self, request: &Request, node: &Mknod<'_>, reply: ReplyEntry) {
        reply.error(libc::ENOSYS);
    }

    /// Creates a directory.
    fn mkdir(&self, request: &Request, directory: &Mkdir<'_>, reply: ReplyEntry) {
        reply.error(libc::ENOSYS);
    }

    /// Removes a name that is no directory. The inode lives on while it is open or looked up.
    fn unlink(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Removes an empty directory.
    fn rmdir(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Renames (rename and rename2).
    fn rename(&self, request: &Request, rename: &Rename<'_>, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Gives inode `nodeid` one more name in the request's directory.
    fn link(&self, request: &Request, nodeid: u64, new_name: &OsStr, reply: ReplyEntry) {
        reply.error(libc::ENOSYS);
    }

    /// Opens a file.
    fn open(&self, request: &Request, open: &Open, reply: ReplyOpen) {
        reply.error(libc::ENOSYS);
    }

    /// Reads.
    fn read(&self, request: &Request, read: &Read, reply: ReplyData) {
        reply.error(libc::ENOSYS);
    }

    /// Writes. The data lies in the thread's buffer: it must be copied or sent before returning.
    fn write(&self, request: &Request, write: &Write<'_>, reply: ReplyWrite) {
        reply.error(libc::ENOSYS);
    }

    /// Free space.
    fn statfs(&self, request: &Request, reply: ReplyStatfs) {
        reply.error(libc::ENOSYS);
    }

    /// The last descriptor of an open file is closed. Nobody sees an error from here.
    fn release(&self, request: &Request, release: &Release, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Makes a file durable.
    fn fsync(&self, request: &Request, fsync: &Fsync, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Sets an extended attribute.
    fn setxattr(&self, request: &Request, set: &Setxattr<'_>, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Value of an extended attribute; ENODATA if there is none.
    fn getxattr(&self, request: &Request, name: &OsStr, reply: ReplyXattr) {
        reply.error(libc::ENOSYS);
    }

    /// Names of the extended attributes, each followed by a NUL.
    fn listxattr(&self, request: &Request, reply: ReplyXattr) {
        reply.error(libc::ENOSYS);
    }

    /// Removes an extended attribute.
    fn removexattr(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// A descriptor of an open file is closed: close(2) returns this answer. May come several
    /// times for one open.
    fn flush(&self, request: &Request, flush: &Flush, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Opens a directory.
    fn opendir(&self, request: &Request, open: &Open, reply: ReplyOpen) {
        reply.error(libc::ENOSYS);
    }

    /// Entries of a directory from an offset on.
    fn readdir(&self, request: &Request, read: &Read, reply: ReplyDirectory) {
        reply.error(libc::ENOSYS);
    }

    /// Entries of a directory with attributes.
    fn readdirplus(&self, request: &Request, read: &Read, reply: ReplyDirectoryPlus) {
        reply.error(libc::ENOSYS);
    }

    /// An open directory is closed.
    fn releasedir(&self, request: &Request, release: &Release, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Makes a directory's entries durable.
    fn fsyncdir(&self, request: &Request, fsync: &Fsync, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Is a lock in the way? (POSIX locks only.)
    fn getlk(&self, request: &Request, lock: &Lock, reply: ReplyLock) {
        reply.error(libc::ENOSYS);
    }

    /// Takes or gives up a lock (setlk, and with `lock.wait` setlkw).
    fn setlk(&self, request: &Request, lock: &Lock, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// access(2) and chdir(2) with `R_OK`, `W_OK`, `X_OK`; not sent with default_permissions.
    fn access(&self, request: &Request, mask: u32, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Creates and opens a file. Without it the kernel sends mknod and open.
    fn create(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        reply.error(libc::ENOSYS);
    }

    /// The kernel gives up request `unique`. Its watch was woken already
    /// ([`ReplyEmpty::watch`] and the like); this is for statistics. There is no answer.
    fn interrupt(&self, unique: u64) {}

    /// Block on the device (block-device file systems only).
    fn bmap(&self, request: &Request, block: u64, block_bytes: u32, reply: ReplyBmap) {
        reply.error(libc::ENOSYS);
    }

    /// ioctl(2).
    fn ioctl(&self, request: &Request, ioctl: &Ioctl<'_>, reply: ReplyIoctl) {
        reply.error(libc::ENOSYS);
    }

    /// poll(2).
    fn poll(&self, request: &Request, poll: &PollArgs, reply: ReplyPoll) {
        reply.error(libc::ENOSYS);
    }

    /// Allocates space or punches holes.
    fn fallocate(&self, request: &Request, fallocate: &Fallocate, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    /// Finds data or holes.
    fn lseek(&self, request: &Request, lseek: &Lseek, reply: ReplyLseek) {
        reply.error(libc::ENOSYS);
    }

    /// Copies between two files of this mount.
    fn copy_file_range(&self, request: &Request, copy: &CopyFileRange, reply: ReplyCopy) {
        reply.error(libc::ENOSYS);
    }

    /// Creates and opens a file without a name (O_TMPFILE). Answer EOPNOTSUPP, not ENOSYS, to let
    /// programs fall back.
    fn tmpfile(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        reply.error(libc::ENOSYS);
    }

    /// statx(2) for what getattr does not carry, such as the time of birth.
    fn statx(&self, request: &Request, statx: &StatxArgs, reply: ReplyStatx) {
        reply.error(libc::ENOSYS);
    }

    /// syncfs(2). Linux sends it to virtiofs and block-device mounts only, so far.
    fn syncfs(&self, request: &Request, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }
}
