//! How long is an extent after a failure (CFS 2.2.5, DESIGN.md section 5).
//!
//! The primary asks every member what it holds and decides with [`decide`]; then it makes itself
//! whole, and tells the others. A member that is longer cuts, one that is shorter fetches first.
//!
//! # Invariants
//!
//! * The length is that of the longest checksum-valid prefix among those who hold the extent. A
//!   replica that holds nothing of it (blank, new, or never reached) has no say.
//! * Nothing is decided before every member has answered. What was acknowledged is on all members, but
//!   one that lost its power may hold less, and no longer know what was; who does not answer for long
//!   is dropped from the configuration.
//! * Only answers of members that have adopted the present epoch count: an older epoch's primary
//!   could still collect an acknowledgement from the others (`ExtentInfo` carries the epoch).
//!
//! # What is deliberately absent
//!
//! The transfer of bytes, and what was overwritten in place: the Raft log repairs that, after the
//! lengths are right.

use milpa_types::NodeId;
use milpa_wire::data::ExtentState;

/// What one member says of one extent.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The member.
    pub node: NodeId,
    /// What it holds, if anything.
    pub state: Option<ExtentState>,
}

/// What is to be done with one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// All members are sealed at the same length.
    Even,
    /// Every member shall have exactly this many bytes; `source` has them.
    Seal {
        /// The length.
        length: u64,
        /// Who has it.
        source: NodeId,
        /// Bytes below this had been acknowledged, and nobody has them any more: power was cut
        /// everywhere before a flush, or worse. 0 if nothing is missing.
        lost_to: u64,
    },
    /// Somebody who may have acknowledged bytes has not answered.
    Wait,
}

/// Decides from the members' `claims`. `committed` is what the asking node itself knows to be
/// acknowledged; `complete` says that every member of the configuration answered. `prefer` is the
/// source among equals: the node that asks.
#[must_use]
pub fn decide(claims: &[Claim], committed: u64, complete: bool, prefer: NodeId) -> Decision {
    if !complete {
        return Decision::Wait;
    }
    let states = || claims.iter().filter_map(|claim| Some((claim.node, claim.state?)));
    let Some(length) = states().map(|(_, state)| state.length).max() else {
        return Decision::Even;
    };
    let known = states().map(|(_, state)| state.committed).max().unwrap_or(0).max(committed);
    let even = states().all(|(_, state)| state.sealed && state.length == length);
    if even && states().count() == claims.len() {
        return Decision::Even;
    }
    let mut holders = states().filter(|(_, state)| state.length == length).map(|(node, _)| node);
    let first = holders.next();
    let source = holders.chain(first).find(|node| *node == prefer).or(first);
    let lost_to = if known > length { known } else { 0 };
    match source {
        Some(source) => Decision::Seal { length, source, lost_to },
        None => Decision::Wait,
    }
}

/// Who can send `length` bytes to a member that lacks some of them: all that have as many, and the node that leads the
/// alignment, which was made whole first.
pub fn sources(member: NodeId, own: NodeId, claims: &[Claim], length: u64) -> Vec<NodeId> {
    let has_all = |claim: &&Claim| claim.state.is_some_and(|state| state.length >= length);
    let others = claims.iter().filter(has_all).map(|claim| claim.node);
    others.filter(|node| ![member, own].contains(node)).chain([own]).collect()
}

#[cfg(test)]
mod tests {
    use milpa_types::{Epoch, ExtentId, InodeId, SessionId};
    use proptest::prelude::*;

    use super::*;

    fn state(length: u64, committed: u64, sealed: bool) -> ExtentState {
        ExtentState {
            extent: ExtentId(1),
            epoch: Epoch(1),
            inode: InodeId(5),
            session: SessionId(9),
            length,
            committed,
            sealed,
            overwritten: false,
        }
    }

    fn claims(states: &[Option<ExtentState>]) -> Vec<Claim> {
        let nodes = (1..).map(NodeId);
        nodes.zip(states).map(|(node, state)| Claim { node, state: *state }).collect()
    }

    /// A replica is made from all others that have what it lacks, and from none that has less.
    #[test]
    fn all_that_have_as_much_send_what_one_lacks() {
        let claims = claims(&[
            Some(state(900, 0, true)),
            Some(state(900, 0, true)),
            Some(state(899, 0, true)),
            Some(state(1_000, 0, false)),
            None,
        ]);
        let to = |member| sources(NodeId(member), NodeId(1), &claims, 900);
        assert_eq!(to(5), [2, 4, 1].map(NodeId));
        assert_eq!(to(2), [4, 1].map(NodeId));
        assert_eq!(sources(NodeId(5), NodeId(3), &claims[2..3], 900), [NodeId(3)]);
    }

    #[track_caller]
    fn check(states: &[Option<ExtentState>], complete: bool, expected: Decision) {
        assert_eq!(decide(&claims(states), 0, complete, NodeId(2)), expected, "{states:?}");
    }

    #[test]
    fn decisions_table() {
        let seal = |length, source| Decision::Seal { length, source: NodeId(source), lost_to: 0 };
        let sealed = |length| Some(state(length, length, true));
        let open = |length, committed| Some(state(length, committed, false));
        check(&[sealed(9), sealed(9), sealed(9)], true, Decision::Even);
        check(&[sealed(9), sealed(9)], true, Decision::Even);
        check(&[open(9, 9), sealed(9)], true, seal(9, 2));
        // The longest wins, not the shortest; the asking node is the source among equals.
        check(&[open(9, 5), open(7, 5), open(5, 5)], true, seal(9, 1));
        check(&[open(9, 5), open(9, 5)], true, seal(9, 2));
        // A blank replica has no say, and must be filled.
        check(&[sealed(9), sealed(9), None], true, seal(9, 2));
        check(&[None, None], true, Decision::Even);
        // The story: one that had lost its power, and with it the only live bytes of an extent, was the
        // first to answer. It was sealed there, all of it was dead, and so it was removed everywhere.
        check(&[open(4, 4)], false, Decision::Wait);
        check(&[sealed(9), sealed(9)], false, Decision::Wait);
        // Acknowledged bytes that nobody has any more.
        let lost = Decision::Seal { length: 4, source: NodeId(1), lost_to: 8 };
        check(&[open(4, 8), None], true, lost);
    }

    proptest! {
        /// Whatever the members hold: the length is somebody's, nobody reachable has more, and
        /// acknowledged bytes are cut off only when every member has answered and lacks them.
        #[test]
        fn the_seal_length_never_loses_what_somebody_has(
            held in proptest::collection::vec(
                proptest::option::of((0u64..50, 0u64..50, any::<bool>())), 1..6),
            committed in 0u64..50,
            complete in any::<bool>(),
        ) {
            let states: Vec<_> = held
                .iter()
                .map(|held| held.map(|(length, committed, sealed)| state(length, committed, sealed)))
                .collect();
            let longest = states.iter().flatten().map(|s| s.length).max();
            let known = states.iter().flatten().map(|s| s.committed).max().unwrap_or(0).max(committed);
            match decide(&claims(&states), committed, complete, NodeId(1)) {
                Decision::Seal { length, source, lost_to } => {
                    prop_assert_eq!(Some(length), longest);
                    let at_source = states[source.0 as usize - 1].map(|s| s.length);
                    prop_assert_eq!(at_source, Some(length));
                    prop_assert!(complete);
                    prop_assert_eq!(lost_to, if known > length { known } else { 0 });
                }
                Decision::Even => {
                    let all_equal = states.iter().all(|s| s.is_some_and(|s| s.sealed && Some(s.length) == longest));
                    prop_assert!(complete && (longest.is_none() || all_equal));
                }
                Decision::Wait => prop_assert!(!complete),
            }
        }

        /// Acknowledged means: every old member has the bytes. Then any non-empty subset of them
        /// that survives, as the members of the next epoch, finds a length that keeps them.
        #[test]
        fn acknowledged_bytes_survive_with_any_one_old_member(
            acknowledged in 1u64..100,
            extra in proptest::collection::vec(0u64..20, 1..6),
            blank in 0usize..3,
        ) {
            let mut states: Vec<_> =
                extra.iter().map(|more| Some(state(acknowledged + more, 0, false))).collect();
            states.extend(std::iter::repeat_n(None, blank));
            match decide(&claims(&states), acknowledged, true, NodeId(1)) {
                Decision::Seal { length, lost_to, .. } => {
                    prop_assert!(length >= acknowledged && lost_to == 0);
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
