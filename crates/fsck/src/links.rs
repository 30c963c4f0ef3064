//! How many names each inode has: counted for a window of inodes at a time.

use milpa_types::{FileKind, InodeId};
use milpa_wire::check::CheckedInode;

/// Inodes of one window: 12 MiB.
pub(crate) const INODES_MAX: usize = 1 << 19;

/// The inodes from `first` on, up to the last one that fits, with the names found for each.
pub(crate) struct Window {
    first: InodeId,
    inodes: Vec<Counted>,
    limit: usize,
}

struct Counted {
    inode: InodeId,
    wanted: u32,
    names: u32,
    kind: FileKind,
}

/// What the name of an inode says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// It was counted.
    Known,
    /// It has to be looked at: there is no such inode, or it is of another type.
    Suspect,
}

impl Window {
    /// An empty window that begins with `first` and holds `limit` inodes.
    pub(crate) fn new(first: InodeId, limit: usize) -> Window {
        Window { first, inodes: Vec::new(), limit: limit.max(1) }
    }

    /// Adds an inode; they come in the order of their ids. Whether it had room.
    pub(crate) fn push(&mut self, inode: &CheckedInode) -> bool {
        if self.inodes.len() >= self.limit {
            return false;
        }
        let (inode, wanted, kind) = (inode.inode, inode.names, inode.kind);
        self.inodes.push(Counted { inode, wanted, names: 0, kind });
        true
    }

    /// The highest inode in it.
    pub(crate) fn last(&self) -> Option<InodeId> {
        self.inodes.last().map(|counted| counted.inode)
    }

    /// Whose names are to be counted. `end` of the volume: also the names of ids above the last.
    pub(crate) fn range(&self, is_end: bool) -> (InodeId, InodeId) {
        let last = self.last().filter(|_| !is_end);
        (self.first, last.unwrap_or(InodeId(u64::MAX)))
    }

    /// Counts a name of an inode in the range.
    pub(crate) fn count(&mut self, inode: InodeId, kind: FileKind) -> Named {
        let place = self.inodes.binary_search_by_key(&inode, |counted| counted.inode);
        let Some(counted) = place.ok().and_then(|place| self.inodes.get_mut(place)) else {
            return Named::Suspect;
        };
        counted.names = counted.names.saturating_add(1);
        if counted.kind == kind { Named::Known } else { Named::Suspect }
    }

    /// The inodes that have more or fewer names than they should.
    pub(crate) fn wrong(&self) -> impl Iterator<Item = InodeId> + '_ {
        self.inodes.iter().filter(|it| it.names != it.wanted).map(|it| it.inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Counts as the walk does: window after window, each over all names.
    fn by_windows(
        inodes: &BTreeMap<u64, u32>,
        names: &[u64],
        limit: usize,
    ) -> (BTreeSet<u64>, usize) {
        let (mut suspects, mut windows, mut first) = (BTreeSet::new(), 0, InodeId(0));
        let mut left = inodes.iter().peekable();
        loop {
            let mut window = Window::new(first, limit);
            while let Some((id, wanted)) = left.peek() {
                let kind = FileKind::File;
                if !window.push(&CheckedInode { inode: InodeId(**id), kind, names: **wanted }) {
                    break;
                }
                left.next();
            }
            let (low, high) = window.range(left.peek().is_none());
            for name in names.iter().filter(|name| (low.0..=high.0).contains(name)) {
                if window.count(InodeId(*name), FileKind::File) == Named::Suspect {
                    suspects.insert(*name);
                }
            }
            suspects.extend(window.wrong().map(|inode| inode.0));
            windows += 1;
            if left.peek().is_none() {
                return (suspects, windows);
            }
            first = InodeId(high.0 + 1);
        }
    }

    proptest! {
        /// Whatever the window holds, the same inodes are suspected as by one map of everything.
        #[test]
        fn windows_find_what_one_map_finds(
            inodes in proptest::collection::btree_map(0_u64..60, 0_u32..4, 0..40),
            names in proptest::collection::vec(0_u64..64, 0..80),
            limit in 1_usize..50,
        ) {
            let mut counts: BTreeMap<u64, u32> = inodes.keys().map(|id| (*id, 0)).collect();
            let mut expected = BTreeSet::new();
            for name in &names {
                match counts.get_mut(name) {
                    Some(count) => *count += 1,
                    None => drop(expected.insert(*name)),
                }
            }
            expected.extend(counts.iter().filter(|(id, n)| inodes[id] != **n).map(|(id, _)| *id));
            let (found, windows) = by_windows(&inodes, &names, limit);
            prop_assert_eq!(found, expected);
            prop_assert_eq!(windows, inodes.len().div_ceil(limit).max(1));
        }
    }

    #[test]
    fn a_name_of_another_type_is_suspect() {
        let mut window = Window::new(InodeId(0), 10);
        window.push(&CheckedInode { inode: InodeId(5), kind: FileKind::File, names: 1 });
        assert_eq!(window.count(InodeId(5), FileKind::Directory), Named::Suspect);
        assert_eq!(window.wrong().count(), 0);
    }
}
