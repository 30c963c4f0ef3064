//! What the kernel is to forget of files that others change.
//!
//! An open drops pages, if its answer says so, but never attributes: the kernel would go on with a size that
//! is up to a second old, read no further than that, and put what is appended there.
//!
//! A file that is open is another matter: its pages stay, and the one in which it ended has zeros behind the end,
//! which the kernel shows as soon as it knows that the file goes on. So it is to forget that page first. (An answer
//! that was under way meanwhile tells it no size, as it may be older; it asks again when it is read from there.)

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use milpa_client::FsError;
use milpa_types::Attributes;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::{Notifier, NotifyError};

/// Tells the kernel what it knows wrongly.
pub(super) struct Stale {
    runtime: Handle,
    notifier: OnceLock<Notifier>,
    /// Inodes whose pages the kernel is being told to forget, and from where on it is to be told so again.
    pages: Mutex<BTreeMap<u64, Option<u64>>>,
    /// Told when the kernel has forgotten those of one.
    forgotten: Notify,
}

impl Stale {
    pub(super) fn new(runtime: Handle) -> Stale {
        let (notifier, pages) = (OnceLock::new(), Mutex::default());
        Stale { runtime, notifier, pages, forgotten: Notify::new() }
    }

    /// The mount can be told from now on.
    pub(super) fn begin(&self, notifier: Notifier) {
        // Set once: a file system is mounted once.
        let _ = self.notifier.set(notifier);
    }

    /// Call before the answer to an open of `nodeid`, which keeps the inode in use: then it waits for nothing.
    pub(super) fn attributes(&self, nodeid: u64) {
        self.invalidate(nodeid, -1);
    }

    /// Pages are forgotten from `offset` on, some time later. A thread for each inode does it, as the kernel waits
    /// there for requests that have pages locked: those of one file are not to hold up others.
    pub(super) fn pages(self: &Arc<Self>, nodeid: u64, offset: u64) {
        let mut pages = self.lock();
        if let Some(from) = pages.get_mut(&nodeid) {
            *from = Some(from.map_or(offset, |from| from.min(offset)));
            return;
        }
        pages.insert(nodeid, Some(offset));
        let stale = Arc::clone(self);
        drop(self.runtime.spawn_blocking(move || stale.forget_pages(nodeid)));
    }

    /// Attributes whose size may be told to the kernel: it has forgotten by now what it was to forget before. That
    /// waits for reads and writes of these pages, and they for no attributes: no longer than a read may take.
    pub(super) async fn sized(&self, attributes: Attributes) -> Result<Attributes, FsError> {
        let nodeid = attributes.inode.0;
        while self.is_forgetting(nodeid) {
            let forgotten = self.forgotten.notified();
            if self.is_forgetting(nodeid) {
                forgotten.await;
            }
        }
        Ok(attributes)
    }

    /// Whether the kernel has yet to forget pages of the inode.
    pub(super) fn is_forgetting(&self, nodeid: u64) -> bool {
        self.lock().contains_key(&nodeid)
    }

    fn forget_pages(&self, nodeid: u64) {
        while let Some(offset) = self.next(nodeid) {
            self.invalidate(nodeid, i64::try_from(offset).unwrap_or(0));
        }
        self.forgotten.notify_waiters();
    }

    fn next(&self, nodeid: u64) -> Option<u64> {
        let mut pages = self.lock();
        let next = pages.get_mut(&nodeid)?.take();
        if next.is_none() {
            pages.remove(&nodeid);
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Option<u64>>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn invalidate(&self, nodeid: u64, offset: i64) {
        let Some(notifier) = self.notifier.get() else { return };
        match notifier.inval_inode(nodeid, offset, 0) {
            Ok(_) | Err(NotifyError::Unmounted) => {}
            Err(error) => tracing::warn!(nodeid, %error, "the kernel keeps what is out of date"),
        }
    }
}
