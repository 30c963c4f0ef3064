//! Which replica a manager has deleted.

use serde::{Deserialize, Serialize};

/// The last entry of a replica's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEnd {
    /// Its Raft term.
    pub term: u64,
    /// Its index.
    pub index: u64,
}

/// Which replica is to be deleted.
///
/// What its group does not need may join it again before the word arrives, late or for the second time: then it is
/// another one, which may be needed for what it acknowledges from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Deletion {
    /// Whatever there is: the partition is deleted.
    Any,
    /// One that its group does not need, if it is as it was reported.
    Leftover {
        /// The last entry of its log; none if it takes no part.
        log_end: Option<LogEnd>,
    },
}

impl Deletion {
    /// Whether it is meant for a replica with this end of its log.
    #[must_use]
    pub fn is_of(self, log_end: Option<LogEnd>) -> bool {
        match self {
            Deletion::Any => true,
            Deletion::Leftover { log_end: reported } => reported == log_end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_got_an_entry_or_takes_part_again_is_not_meant() {
        let of = |log_end| Deletion::Leftover { log_end };
        let at = |term, index| Some(LogEnd { term, index });
        assert!(of(at(3, 7)).is_of(at(3, 7)) && of(None).is_of(None));
        let others =
            [(at(3, 7), at(3, 8)), (at(3, 7), at(4, 7)), (None, at(1, 1)), (at(3, 7), None)];
        for (reported, found) in others {
            assert!(!of(reported).is_of(found), "{reported:?} {found:?}");
            assert!(Deletion::Any.is_of(found));
        }
    }
}
