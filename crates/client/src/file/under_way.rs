//! Who is about to use a file, and who is about to remove a name of it.
//!
//! What is unlinked while it is open is kept by the servers, if the removal says so (`held`), until they are told
//! that nobody uses it here any more. So each removal has to know of all uses, those whose open has no answer yet
//! among them; a use that begins while a removal is under way that knows of none waits for that; and the word
//! that the file may go follows the removal. It says nothing of which removal it follows: while it is on its way no
//! other one may have the servers keep the file, and it is not sent for a file that is in use again.

use std::collections::BTreeMap;
use std::sync::Arc;

use milpa_types::InodeId;

use super::{FileState, Files};
use crate::core::lock;
use crate::inner::Inner;

/// Opens of one file that have no handle yet, and removals of its name and words that it may go that have no answer.
#[derive(Default)]
pub(super) struct Opening {
    count: u32,
    /// As [`Shared::held`], for who comes to have a handle, or else for the last of them to let go.
    pub(super) held: bool,
    /// Removals of a file that nobody used when they began: the servers are not to keep it, and who opens it
    /// waits for them.
    removals: u32,
    /// Words that it may go: a removal that has the servers keep it waits for them.
    releases: u32,
}

impl Opening {
    fn is_over(&self) -> bool {
        self.count == 0 && self.removals == 0 && self.releases == 0
    }
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

    pub(crate) async fn removal(inner: &Arc<Inner>, inode: InodeId) -> UnderWay {
        let is_use = inner.files.begin_removal(inode).await;
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

/// The word that a file may go, on its way. Who gives up waiting for the answer does not know whether it was heard:
/// it is said again.
pub(super) struct Releasing<'a> {
    files: &'a Files,
    inode: InodeId,
    pub(super) is_to_repeat: bool,
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        self.files.end_release(self.inode, self.is_to_repeat);
    }
}

impl Files {
    /// Counts an open that has no handle yet. Waits no longer than a removal may take.
    async fn begin_open(&self, inode: InodeId) {
        loop {
            let mut answered = std::pin::pin!(self.answered.notified());
            answered.as_mut().enable();
            {
                let mut openings = lock(&self.opening);
                let opening = openings.entry(inode).or_default();
                if opening.removals == 0 {
                    opening.count += 1;
                    return;
                }
            }
            answered.await;
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
        let held = std::mem::take(&mut opening.held);
        if opening.is_over() {
            openings.remove(&inode);
        }
        match states.get(&inode).filter(|file| held && file.is_open()) {
            Some(file) => {
                file.shared().held = true;
                false
            }
            None => held,
        }
    }

    /// Before a file's name is removed: whether it is in use here, and the servers are to keep it. Waits no longer
    /// than a word that it may go may take.
    async fn begin_removal(&self, inode: InodeId) -> bool {
        loop {
            let mut answered = std::pin::pin!(self.answered.notified());
            answered.as_mut().enable();
            if let Some(is_use) = self.try_removal(inode) {
                return is_use;
            }
            answered.await;
        }
    }

    /// Who uses the file last lets it go, and not before the removal is over: it counts as an open. `None` while an
    /// earlier word that it may go would undo that.
    fn try_removal(&self, inode: InodeId) -> Option<bool> {
        let states = lock(&self.states);
        let mut openings = lock(&self.opening);
        let opening = openings.entry(inode).or_default();
        if !is_used(&states, opening, inode) {
            opening.removals += 1;
            return Some(false);
        }
        if opening.releases > 0 {
            return None;
        }
        opening.count += 1;
        leave_to_users(&states, opening, inode);
        Some(true)
    }

    /// A removal is over that was not to hold the file.
    fn end_removal(&self, inode: InodeId) {
        let mut openings = lock(&self.opening);
        if let Some(opening) = openings.get_mut(&inode) {
            opening.removals = opening.removals.saturating_sub(1);
            if opening.is_over() {
                openings.remove(&inode);
            }
        }
        drop(openings);
        self.answered.notify_waiters();
    }

    /// Before the servers are told that a file may go. `None` if it is in use again: that is left to who uses it.
    pub(super) fn begin_release(&self, inode: InodeId) -> Option<Releasing<'_>> {
        let states = lock(&self.states);
        let mut openings = lock(&self.opening);
        let opening = openings.entry(inode).or_default();
        let is_used = is_used(&states, opening, inode);
        if is_used {
            leave_to_users(&states, opening, inode);
        } else {
            opening.releases += 1;
        }
        if opening.is_over() {
            openings.remove(&inode);
        }
        (!is_used).then(|| Releasing { files: self, inode, is_to_repeat: true })
    }

    /// They have been told, or are to be told again: by who uses the file by now, or else later.
    fn end_release(&self, inode: InodeId, is_to_repeat: bool) {
        let states = lock(&self.states);
        let mut openings = lock(&self.opening);
        let Some(opening) = openings.get_mut(&inode) else { return };
        opening.releases = opening.releases.saturating_sub(1);
        if is_to_repeat && is_used(&states, opening, inode) {
            leave_to_users(&states, opening, inode);
        } else if is_to_repeat {
            lock(&self.unreleased).insert(inode);
        }
        if opening.is_over() {
            openings.remove(&inode);
        }
        drop(openings);
        self.answered.notify_waiters();
    }
}

type States = BTreeMap<InodeId, Arc<FileState>>;

fn is_used(states: &States, opening: &Opening, inode: InodeId) -> bool {
    opening.count > 0 || states.get(&inode).is_some_and(|file| file.is_open())
}

/// Who uses the file last lets it go: who has it open, or whose open has no handle yet.
fn leave_to_users(states: &States, opening: &mut Opening, inode: InodeId) {
    if let Some(file) = states.get(&inode).filter(|file| file.is_open()) {
        file.shared().held = true;
    }
    opening.held |= opening.count > 0;
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
        assert!(files.begin_release(inode).is_none(), "an open is under way");
        assert!(!files.end_open(inode), "it is open");
        assert!(file.shared().held);
        assert!(files.opening.lock().unwrap().is_empty());
    }

    /// A word whose answer nobody waits for any more is said again, and stands in no removal's way.
    #[tokio::test]
    async fn a_release_that_was_given_up_is_repeated() {
        let files = Files::new(Stats::shared());
        let inode = attributes().inode;
        drop(files.begin_release(inode));
        assert!(files.unreleased.lock().unwrap().contains(&inode));
        assert!(files.opening.lock().unwrap().is_empty());
    }
}
