//! Messages to the kernel that nobody asked for: it shall forget or learn something.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use crate::abi::{
    NotifyDeleteOut, NotifyInvalEntryOut, NotifyInvalInodeOut, NotifyPollOut, NotifyPruneOut,
    NotifyStoreOut, Plain, notify,
};
use crate::flags::EXPIRE_ONLY;
use crate::transport::Channel;

/// Nodeids in one prune message; the kernel reads them in pieces of its own.
const PRUNE_NODES_MAX: usize = 1024;

/// What a notification did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notified {
    /// The kernel did it.
    Done,
    /// The kernel does not know the inode or the name: nothing to do.
    NotCached,
}

/// Why a notification failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// The session ended. There is no cache left to invalidate.
    #[error("file system is unmounted")]
    Unmounted,
    /// The kernel is too old for this message or the arguments make no sense to it.
    #[error("kernel refused the notification")]
    Refused(#[source] io::Error),
}

/// Sends notifications; cheap to clone, usable from any thread.
///
/// # Deadlocks
///
/// The kernel does what it is told before the call returns, and needs the inode's locks for it. So
/// never notify
///
/// * about an inode from a thread that must first answer a request on it: `inval_inode` waits for
///   pages under read or write, which wait for the answer; `inval_entry` and `delete` wait for the
///   parent directory, which is locked during lookup, create, unlink and rename in it;
/// * from a FUSE thread (inside a method), for the same reason: the request that blocks may be the
///   one that only this thread could read.
///
/// Queue the notification to a thread of its own, and answer first. Only attributes and names may wait for
/// `inval_inode`, if no thread waits with them: nobody asks for them with a page locked. (Not what setattr is
/// answered with: a truncation keeps dirty pages from being written, and they have to be before they go.)
/// `inval_inode` with a negative offset waits for nothing, as long as the inode is in use (a request on it is
/// unanswered): it may come from anywhere.
#[derive(Clone)]
pub struct Notifier {
    channel: Arc<Channel>,
}

impl Notifier {
    pub(crate) fn new(channel: Arc<Channel>) -> Notifier {
        Notifier { channel }
    }

    /// Forgets the attributes of an inode, and cached pages from `offset` on: `length` bytes, all
    /// with 0, none with a negative `offset`.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`].
    pub fn inval_inode(
        &self,
        nodeid: u64,
        offset: i64,
        length: i64,
    ) -> Result<Notified, NotifyError> {
        let out = NotifyInvalInodeOut { ino: nodeid, off: offset, len: length };
        self.send(notify::INVAL_INODE, &[IoSlice::new(out.as_bytes())])
    }

    /// Forgets that `name` is in directory `parent` (or that it is not).
    ///
    /// # Errors
    ///
    /// See [`NotifyError`].
    pub fn inval_entry(&self, parent: u64, name: &OsStr) -> Result<Notified, NotifyError> {
        self.entry(parent, name, 0)
    }

    /// Asks again at the next use of `name`, but keeps what hangs on it, such as mounts below.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`]; refused by kernels before 6.2.
    pub fn expire_entry(&self, parent: u64, name: &OsStr) -> Result<Notified, NotifyError> {
        self.entry(parent, name, EXPIRE_ONLY)
    }

    fn entry(&self, parent: u64, name: &OsStr, flags: u32) -> Result<Notified, NotifyError> {
        let out = NotifyInvalEntryOut { parent, namelen: length_of(name.as_bytes()), flags };
        self.send(notify::INVAL_ENTRY, &with_name(out.as_bytes(), name))
    }

    /// `name` was deleted from `parent` behind the kernel's back. As `inval_entry`, and inotify
    /// watchers hear of it. Only if the name still stands for `child`.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`]; refused when `child` is a directory that the kernel knows to be full.
    pub fn delete(&self, parent: u64, child: u64, name: &OsStr) -> Result<Notified, NotifyError> {
        let namelen = length_of(name.as_bytes());
        let out = NotifyDeleteOut { parent, child, namelen, padding: 0 };
        self.send(notify::DELETE, &with_name(out.as_bytes(), name))
    }

    /// Puts `data` into the page cache of an inode, extending its cached size if needed.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`].
    pub fn store(&self, nodeid: u64, offset: u64, data: &[u8]) -> Result<Notified, NotifyError> {
        let out = NotifyStoreOut { nodeid, offset, size: length_of(data), padding: 0 };
        self.send(notify::STORE, &[IoSlice::new(out.as_bytes()), IoSlice::new(data)])
    }

    /// Wakes the pollers of a file ([`PollArgs::kernel_handle`](crate::PollArgs::kernel_handle)).
    ///
    /// # Errors
    ///
    /// See [`NotifyError`].
    pub fn poll(&self, kernel_handle: u64) -> Result<Notified, NotifyError> {
        let out = NotifyPollOut { kh: kernel_handle };
        self.send(notify::POLL, &[IoSlice::new(out.as_bytes())])
    }

    /// Asks the kernel to send every unanswered request again.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`]; refused before 7.40.
    pub fn resend(&self) -> Result<Notified, NotifyError> {
        self.send(notify::RESEND, &[])
    }

    /// Makes every cached name of the whole mount stale at once.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`]; refused before 7.44.
    pub fn increment_epoch(&self) -> Result<Notified, NotifyError> {
        self.send(notify::INC_EPOCH, &[])
    }

    /// Asks the kernel to give up inodes that nobody uses, so that forgets come for them.
    ///
    /// # Errors
    ///
    /// See [`NotifyError`]; refused before 7.45.
    pub fn prune(&self, nodeids: &[u64]) -> Result<Notified, NotifyError> {
        for nodeids in nodeids.chunks(PRUNE_NODES_MAX) {
            let count = u32::try_from(nodeids.len()).unwrap_or(u32::MAX);
            let out = NotifyPruneOut { count, padding: 0, spare: 0 };
            let ids: Vec<u8> = nodeids.iter().flat_map(|id| id.to_ne_bytes()).collect();
            self.send(notify::PRUNE, &[IoSlice::new(out.as_bytes()), IoSlice::new(&ids)])?;
        }
        Ok(Notified::Done)
    }

    fn send(&self, code: i32, body: &[IoSlice<'_>]) -> Result<Notified, NotifyError> {
        match self.channel.write_message(0, code, body) {
            Ok(()) => Ok(Notified::Done),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Notified::NotCached),
                // EPERM: not mounted yet or no more.
                Some(libc::ENODEV | libc::ENOTCONN | libc::ECONNABORTED | libc::EPERM) => {
                    Err(NotifyError::Unmounted)
                }
                _ => Err(NotifyError::Refused(error)),
            },
        }
    }
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Notifier")
    }
}

fn length_of(bytes: &[u8]) -> u32 {
    // The kernel refuses a message whose length differs, so a wrong value does no harm.
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

fn with_name<'a>(head: &'a [u8], name: &'a OsStr) -> [IoSlice<'a>; 3] {
    [IoSlice::new(head), IoSlice::new(name.as_bytes()), IoSlice::new(b"\0")]
}
