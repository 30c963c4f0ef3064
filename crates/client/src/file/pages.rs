//! Which pages the kernel may keep over an open.
//!
//! It may if they are of the version that the open finds. For another version the answer says that they are
//! to be dropped, and the kernel does so later, in the process that opens. Until then pages of the version
//! before may be there, so nobody else keeps any either: that they are gone is known from the next read or
//! release of one of the handles that were answered so, which come after it.

use std::sync::{Mutex, OnceLock};

use milpa_types::InodeId;

use crate::cache::Bounded;
use crate::core::lock;
use crate::handle::HandleId;

/// What the kernel's pages are of, by inode.
pub(crate) struct Pages {
    known: Mutex<Bounded<InodeId, Known>>,
    on_stale: OnceLock<OnStale>,
}

/// Whom to tell that the kernel is to forget the pages of an inode, from this byte on.
type OnStale = Box<dyn Fn(InodeId, u64) + Send + Sync>;

#[derive(Clone, Copy)]
struct Known {
    version: u64,
    drop: Drop,
    is_dropped: bool,
}

/// Names the dropping of an inode's pages: by the first of the handles whose opens were answered with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drop(HandleId);

impl Pages {
    pub(crate) fn new(entries: usize) -> Pages {
        Pages { known: Mutex::new(Bounded::new(entries)), on_stale: OnceLock::new() }
    }

    /// An open found this version. `None` if the pages are of it, and may be kept.
    pub(crate) fn opened(&self, inode: InodeId, version: u64, handle: HandleId) -> Option<Drop> {
        let mut pages = lock(&self.known);
        match pages.get(&inode).filter(|known| known.version == version) {
            Some(known) if known.is_dropped => None,
            Some(known) => Some(known.drop),
            None => {
                let drop = Drop(handle);
                pages.insert(inode, Known { version, drop, is_dropped: false });
                Some(drop)
            }
        }
    }

    /// Whether it was opened here before.
    pub(crate) fn knows(&self, inode: InodeId) -> bool {
        lock(&self.known).get(&inode).is_some()
    }

    /// The kernel has done what an open was answered with.
    pub(crate) fn dropped(&self, inode: InodeId, drop: Drop) {
        let mut pages = lock(&self.known);
        if let Some(known) = pages.get(&inode).filter(|known| known.drop == drop) {
            pages.insert(inode, Known { is_dropped: true, ..known });
        }
    }

    /// Our own change made this version: pages stay good if they are of the one that it found.
    pub(crate) fn advance(&self, inode: InodeId, before: u64, version: u64) {
        let mut pages = lock(&self.known);
        if let Some(known) = pages.get(&inode).filter(|known| known.version == before) {
            pages.insert(inode, Known { version, ..known });
        }
    }

    pub(crate) fn on_stale(&self, tell: OnStale) {
        // The first one stays.
        let _ = self.on_stale.set(tell);
    }

    /// Bytes in the pages were given up: who has the file open is not to read them any more.
    pub(crate) fn are_stale(&self, inode: InodeId) {
        self.are_stale_from(inode, 0);
    }

    /// The same, of what the pages have from there on.
    pub(crate) fn are_stale_from(&self, inode: InodeId, from: u64) {
        self.forget(inode);
        if let Some(tell) = self.on_stale.get() {
            tell(inode, from);
        }
    }

    /// The pages are of no version.
    pub(crate) fn forget(&self, inode: InodeId) {
        lock(&self.known).remove(&inode);
    }
}
