//! What the kernel is to forget of files that others change.
//!
//! An open drops pages, if its answer says so, but never attributes: the kernel would go on with a size that
//! is up to a second old, read no further than that, and put what is appended there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::runtime::Handle;

use crate::{Notifier, NotifyError};

/// Tells the kernel what it knows wrongly.
pub(super) struct Stale {
    runtime: Handle,
    notifier: OnceLock<Notifier>,
    pages: Mutex<Pages>,
}

/// Pages to be forgotten, from an offset on. One thread does it, as the kernel waits there for requests that
/// have pages locked; and one entry for an inode bounds what waits.
#[derive(Default)]
struct Pages {
    waiting: BTreeMap<u64, u64>,
    is_running: bool,
}

impl Stale {
    pub(super) fn new(runtime: Handle) -> Stale {
        Stale { runtime, notifier: OnceLock::new(), pages: Mutex::default() }
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

    /// Call after the answer, which unlocks the pages. They are forgotten some time later.
    pub(super) fn pages(self: &Arc<Self>, nodeid: u64, offset: u64) {
        let mut pages = self.lock();
        let from = pages.waiting.entry(nodeid).or_insert(offset);
        *from = offset.min(*from);
        if !std::mem::replace(&mut pages.is_running, true) {
            let stale = Arc::clone(self);
            drop(self.runtime.spawn_blocking(move || stale.forget_pages()));
        }
    }

    fn forget_pages(&self) {
        while let Some((nodeid, offset)) = self.next() {
            self.invalidate(nodeid, i64::try_from(offset).unwrap_or(0));
        }
    }

    fn next(&self) -> Option<(u64, u64)> {
        let mut pages = self.lock();
        let next = pages.waiting.pop_first();
        pages.is_running = next.is_some();
        next
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
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
