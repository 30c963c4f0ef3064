//! Who is about to use a file, and who is about to remove a name of it.
//!
//! What is unlinked while it is open is kept by the servers, if the removal says so (`held`), until they are told
//! that nobody uses it here any more. So each removal has to know of all uses, those whose open has no answer yet
//! among them; a use that begins while a removal is under way that knows of none waits for that; and the word
//! that the file may go follows the removal.

use std::sync::Arc;

use milpa_types::InodeId;

use super::Files;
use crate::core::lock;
use crate::inner::Inner;

/// Opens of one file that have no handle yet, and removals of its name that have no answer.
#[derive(Default)]
pub(super) struct Opening {
    count: u32,
    /// As [`Shared::held`], for who comes to have a handle, or else for the last of them to let go.
    pub(super) held: bool,
    /// Removals of a file that nobody used when they began: the servers are not to keep it, and who opens it
    /// waits for them.
    removals: u32,
}

/// An open that has no handle yet: who removes the file's name meanwhile counts it as open. Or the removal of a
/// name: a file that is in use is let go after that, and who opens one that is not waits for it.
pub(crate) struct UnderWay {
    inner: Arc<Inner>,
    inode: InodeId,
    /// Counted as a use of the file.
    is_use: bool,
}

impl UnderWay {
    pub(super) async fn open(inner: &Arc<Inner>, inode: InodeId) -> UnderWay {
        inner.files.begin_open(inode).await;
        UnderWay { inner: Arc::clone(inner), inode, is_use: true }
    }

    pub(crate) fn removal(inner: &Arc<Inner>, inode: InodeId) -> UnderWay {
        let is_use = inner.files.begin_removal(inode);
        UnderWay { inner: Arc::clone(inner), inode, is_use }
    }

    /// Whether the servers are to keep the file when its last name goes.
    pub(crate) fn holds(&self) -> bool {
        self.is_use
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if !self.is_use {
            self.inner.files.end_removal(self.inode);
        } else if self.inner.files.end_open(self.inode) {
            let (inner, inode) = (Arc::clone(&self.inner), self.inode);
            drop(self.inner.core.runtime.spawn(async move { inner.let_go(inode).await }));
        }
    }
}

impl Files {
    /// Counts an open that has no handle yet. Waits no longer than a removal may take.
    async fn begin_open(&self, inode: InodeId) {
        loop {
            let mut removed = std::pin::pin!(self.removed.notified());
            removed.as_mut().enable();
            {
                let mut openings = lock(&self.opening);
                let opening = openings.entry(inode).or_default();
                if opening.removals == 0 {
                    opening.count += 1;
                    return;
                }
            }
            removed.await;
        }
    }

    /// It has one now, or failed. True if the servers keep the file for nobody else.
    fn end_open(&self, inode: InodeId) -> bool {
        let states = lock(&self.states);
        let mut openings = lock(&self.opening);
        let Some(opening) = openings.get_mut(&inode) else { return false };
        opening.count = opening.count.saturating_sub(1);
        if opening.count > 0 {
            return false;
        }
        let held = opening.held;
        openings.remove(&inode);
        match states.get(&inode).filter(|file| held && file.is_open()) {
            Some(file) => {
                file.shared().held = true;
                false
            }
            None => held,
        }
    }

    /// Before a file's name is removed: whether it is in use here, and the servers are to keep it. Who uses it
    /// last lets it go, and not before the removal is over: it counts as an open.
    fn begin_removal(&self, inode: InodeId) -> bool {
        let states = lock(&self.states);
        let mut openings = lock(&self.opening);
        let file = states.get(&inode).filter(|file| file.is_open());
        let opening = openings.entry(inode).or_default();
        if file.is_none() && opening.count == 0 {
            opening.removals += 1;
            return false;
        }
        if let Some(file) = file {
            file.shared().held = true;
        }
        opening.count += 1;
        opening.held = true;
        true
    }

    /// A removal is over that was not to hold the file.
    fn end_removal(&self, inode: InodeId) {
        let mut openings = lock(&self.opening);
        if let Some(opening) = openings.get_mut(&inode) {
            opening.removals = opening.removals.saturating_sub(1);
            if opening.removals == 0 && opening.count == 0 {
                openings.remove(&inode);
            }
        }
        drop(openings);
        self.removed.notify_waiters();
    }

    /// Leaves the letting go of a closed file to who is opening it.
    pub(super) fn hand_over(&self, inode: InodeId) -> bool {
        match lock(&self.opening).get_mut(&inode).filter(|opening| opening.count > 0) {
            Some(opening) => {
                opening.held = true;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::content::Content;
    use crate::file::content::tests::attributes;
    use crate::segments::SegmentMap;
    use crate::stats::Stats;

    /// Found by a reader: the last close left the file to an open that had a handle by then, and that one's end told
    /// nobody. The servers kept the deleted file for as long as the mount lived.
    #[tokio::test]
    async fn what_is_left_to_an_open_is_let_go_at_its_close() {
        let files = Files::new(Stats::shared());
        let attributes = attributes();
        let inode = attributes.inode;
        files.begin_open(inode).await;
        let empty = || Some(Content::from_parts(attributes, SegmentMap::default(), None));
        let file = files.attach(inode, 1, empty).unwrap();
        assert!(files.hand_over(inode), "an open is under way");
        assert!(!files.end_open(inode), "it is open");
        assert!(file.shared().held);
        assert!(files.opening.lock().unwrap().is_empty());
    }
}
