//! One name of one directory: it names an inode, or nothing.
//!
//! Names are judged one by one (P-compositionality): a rename is a removal at one name and an
//! appearance at the other, each linearizable by itself. That both happen at one instant is not
//! judged here.

use std::collections::BTreeSet;

use milpa_types::InodeId;

use crate::linear::Object;

/// What a name names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Named {
    /// Nothing.
    Nothing,
    /// This inode.
    Inode(InodeId),
    /// Some inode that nobody has seen under this name yet.
    Something,
}

/// A call on one name, with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The name was looked up, or listed or not listed.
    Saw(Option<InodeId>),
    /// A new name for this inode; `None` if its outcome is unknown.
    Made(Option<InodeId>),
    /// A file was opened under this name and created if it was missing.
    MadeOrFound(Option<InodeId>),
    /// Something could not be done because the name was taken.
    WasTaken,
    /// Something could not be done because there was no such name.
    WasMissing,
    /// The name was removed, or its outcome is unknown.
    Removed,
    /// The name was moved away, or its outcome is unknown.
    MovedAway,
    /// Another name was moved here, or its outcome is unknown.
    MovedHere,
    /// Another name was moved here, which must not have been taken.
    MovedHereNew,
}

/// The judge of one name.
#[derive(Clone, Debug, Default)]
pub struct Dentry {
    /// Inodes that ever had more than one name: a rename onto another name of the same inode does
    /// nothing (rename(2)).
    pub linked: BTreeSet<InodeId>,
}

impl Object for Dentry {
    type State = Named;
    type Call = Call;

    fn after(&self, state: &Named, call: &Call) -> Vec<Named> {
        use Named::{Inode, Nothing, Something};
        let if_nothing = |next| if *state == Nothing { vec![next] } else { vec![] };
        let if_something = |next| if *state == Nothing { vec![] } else { vec![next] };
        let is = |inode| *state == Inode(inode) || *state == Something;
        match *call {
            Call::Saw(Some(inode)) => {
                if is(inode) {
                    vec![Inode(inode)]
                } else {
                    vec![]
                }
            }
            Call::Saw(None) | Call::WasMissing => if_nothing(Nothing),
            Call::Made(Some(inode)) => if_nothing(Inode(inode)),
            Call::Made(None) => if_nothing(Something),
            Call::MadeOrFound(Some(inode)) if is(inode) => vec![Inode(inode)],
            Call::MadeOrFound(Some(inode)) => if_nothing(Inode(inode)),
            Call::MadeOrFound(None) => if_nothing(Something),
            Call::WasTaken => if_something(*state),
            Call::Removed => if_something(Nothing),
            Call::MovedAway => match *state {
                Nothing => vec![],
                Inode(inode) if !self.linked.contains(&inode) => vec![Nothing],
                _ => vec![Nothing, *state],
            },
            Call::MovedHere => vec![Something],
            Call::MovedHereNew => if_nothing(Something),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::{Timed, Verdict, check};

    fn verdict(calls: &[Call]) -> Verdict {
        let timed = calls.iter().enumerate().map(|(place, call)| {
            let begin = 2 * place as u64;
            Timed { begin, end: Some(begin + 1), call: *call }
        });
        check(&Dentry::default(), Named::Nothing, &timed.collect::<Vec<_>>())
    }

    #[test]
    fn a_name_has_one_inode_at_a_time() {
        let (one, two) = (InodeId(5), InodeId(6));
        let good = [Call::Made(Some(one)), Call::WasTaken, Call::Removed, Call::Made(Some(two))];
        assert_eq!(verdict(&good), Verdict::Linearizable);
        let twice = [Call::Made(Some(one)), Call::Made(Some(two))];
        assert_eq!(verdict(&twice), Verdict::Violated { explained: 1 });
        let back = [Call::Made(Some(one)), Call::MovedAway, Call::Saw(Some(one))];
        assert_eq!(verdict(&back), Verdict::Violated { explained: 2 });
        let moved = [Call::MovedHere, Call::Saw(Some(one)), Call::Saw(Some(two))];
        assert_eq!(verdict(&moved), Verdict::Violated { explained: 2 });
    }
}
