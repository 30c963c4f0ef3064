//! Inodes that look wrong: judged by what all partitions say of them, several times.

use milpa_types::{FileKind, InodeId, Name};
use milpa_wire::check::{Looked, LookedInode};

/// So many looks in a row have to be the same.
const LOOKS: u32 = 3;

/// What all partitions say of an inode, put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// Whether there is a partition of its slot, and it was asked: only that one can say that the inode
    /// is not there.
    pub has_home: bool,
    /// The inode, if its partition has it.
    pub inode: Option<LookedInode>,
    /// Its names.
    pub names: u64,
    digest: u64,
    is_locked: bool,
    /// Some of the names.
    pub examples: Vec<(InodeId, Name, FileKind)>,
}

impl Look {
    /// Nobody was asked yet.
    pub(crate) fn new(has_home: bool) -> Look {
        Look { has_home, ..Look::default() }
    }

    /// Adds what one partition says.
    pub(crate) fn add(&mut self, looked: Looked) {
        self.inode = self.inode.or(looked.inode);
        self.names += looked.names;
        self.digest = self.digest.wrapping_add(looked.digest);
        self.is_locked |= looked.is_locked;
        self.examples.extend(looked.examples);
    }

    /// Whether nothing can be concluded from it: an operation that is not over has to do with the inode
    /// or a name of it, or its own partition was not asked.
    pub(crate) fn is_unsure(&self) -> bool {
        !self.has_home || self.is_locked || self.inode.is_some_and(|inode| inode.is_in_operation)
    }

    /// What is wrong, if this is all there is to know.
    pub(crate) fn judge(&self, id: InodeId) -> Option<Wrong> {
        let Some(inode) = self.inode else {
            return (self.names > 0).then_some(Wrong::Missing);
        };
        let wanted = u64::from(inode.names(id));
        if self.examples.iter().any(|(_, _, kind)| *kind != inode.kind) {
            Some(Wrong::OtherKind)
        } else if self.names == wanted {
            None
        } else if self.names == 0 {
            Some(Wrong::Nameless)
        } else if inode.kind == FileKind::Directory {
            Some(Wrong::ManyNames)
        } else {
            Some(Wrong::Links)
        }
    }
}

/// What is wrong with an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// Names name it, and it is not there.
    Missing,
    /// No name names it.
    Nameless,
    /// A directory with several names.
    ManyNames,
    /// Its link count is not the number of its names.
    Links,
    /// A name says another type.
    OtherKind,
}

/// What further looks say of a suspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing is wrong.
    Sound,
    /// It has to be looked at again.
    Unsteady,
    /// This is wrong.
    Wrong(Wrong),
}

/// An inode that is being looked at.
pub(crate) struct Suspect {
    /// Which.
    pub id: InodeId,
    /// The last look.
    pub last: Look,
    same: u32,
}

impl Suspect {
    pub(crate) fn new(id: InodeId) -> Suspect {
        Suspect { id, last: Look::default(), same: 0 }
    }

    /// Takes another look in.
    pub(crate) fn look(&mut self, look: Look) -> Verdict {
        let is_same = self.same > 0 && look == self.last;
        self.same = if look.is_unsure() {
            0
        } else if is_same {
            self.same + 1
        } else {
            1
        };
        self.last = look;
        match self.last.judge(self.id) {
            None => Verdict::Sound,
            Some(wrong) if self.same >= LOOKS => Verdict::Wrong(wrong),
            Some(_) => Verdict::Unsteady,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::Timestamp;

    const ID: InodeId = InodeId(7);

    fn inode(kind: FileKind, link_count: u32) -> LookedInode {
        let (size, changed) = (0, Timestamp(1));
        LookedInode { kind, link_count, size, changed, is_in_operation: false, is_held: false }
    }

    fn look(inode: Option<LookedInode>, names: u64) -> Look {
        Look { has_home: true, inode, names, digest: names * 31, ..Look::default() }
    }

    #[track_caller]
    fn check(inode: Option<LookedInode>, names: u64, expected: Option<Wrong>) {
        assert_eq!(look(inode, names).judge(ID), expected);
    }

    #[test]
    fn verdicts_table() {
        let file = |links| Some(inode(FileKind::File, links));
        let directory = Some(inode(FileKind::Directory, 5));
        check(None, 0, None);
        check(None, 1, Some(Wrong::Missing));
        check(file(1), 1, None);
        check(file(0), 0, None);
        check(file(1), 0, Some(Wrong::Nameless));
        check(file(2), 1, Some(Wrong::Links));
        check(file(0), 1, Some(Wrong::Links));
        check(directory, 1, None);
        check(directory, 0, Some(Wrong::Nameless));
        check(directory, 2, Some(Wrong::ManyNames));
        assert_eq!(look(directory, 0).judge(InodeId::ROOT), None);
        let name = Name::new(b"n").unwrap();
        let examples = vec![(InodeId(1), name, FileKind::Symlink)];
        let other = Look { examples, ..look(file(1), 1) };
        assert_eq!(other.judge(ID), Some(Wrong::OtherKind));
    }

    #[test]
    fn only_a_look_that_stays_is_believed() {
        let wrong = look(Some(inode(FileKind::File, 2)), 1);
        let mut suspect = Suspect::new(ID);
        assert_eq!(suspect.look(wrong.clone()), Verdict::Unsteady);
        assert_eq!(suspect.look(wrong.clone()), Verdict::Unsteady);
        assert_eq!(suspect.look(wrong.clone()), Verdict::Wrong(Wrong::Links));

        // The same count of other names is another look; so is a changed inode.
        let mut suspect = Suspect::new(ID);
        for digest in 0..10 {
            let moved = Look { digest, ..wrong.clone() };
            assert_eq!(suspect.look(moved), Verdict::Unsteady);
        }
        assert_eq!(suspect.look(look(Some(inode(FileKind::File, 1)), 1)), Verdict::Sound);

        // In the middle of an operation nothing is believed, nor when the inode's own partition is unknown.
        let busy = Look { is_locked: true, ..wrong };
        let homeless = Look { has_home: false, ..look(None, 1) };
        for unsure in [busy, homeless] {
            let mut suspect = Suspect::new(ID);
            for _ in 0..10 {
                assert_eq!(suspect.look(unsure.clone()), Verdict::Unsteady);
            }
        }
    }
}
