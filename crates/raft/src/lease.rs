//! The leader's lease: until when nobody else can have become leader.
//!
//! A follower that answered a heartbeat gives no vote for `election_min_ms` after it received it,
//! by its own clock ([`Group`](crate::group) enforces that itself, also across a restart; the
//! library's own check counts ticks and forgets the leader when the term changes). The heartbeat
//! was received after it was sent. So within a little less than `election_min_ms` of the *sending*
//! of a heartbeat that a majority answered no other leader can be elected, and the lease takes
//! `lease_ms` of that; the difference covers drift and the grain of ticks.
//!
//! Why not the library's lease: it counts ticks, and a process that was paused has counted none.
//! This one compares the clock at the moment of use.
//!
//! Handing over leadership makes the target campaign without regard to leases, whenever the
//! request reaches it. So a lease ends with the first attempt, and does not return in that term; a leader
//! that was not relieved takes a new one ([`Group`](crate::group), `renew_term`).

use std::collections::BTreeMap;

use milpa_types::NodeId;

use crate::types::Members;

/// What the leader knows about the answers to its heartbeats, in its present term.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    /// The sending time of the last heartbeat each node answered.
    answered_ms: BTreeMap<NodeId, u64>,
    /// When each node was heard last. The lease does not rest on that.
    heard_ms: BTreeMap<NodeId, u64>,
    is_barred: bool,
}

impl Lease {
    pub(crate) fn answered(&mut self, node: NodeId, sent_ms: u64) {
        let last = self.answered_ms.entry(node).or_insert(sent_ms);
        *last = sent_ms.max(*last);
    }

    pub(crate) fn heard(&mut self, node: NodeId, now_ms: u64) {
        self.heard_ms.insert(node, now_ms);
    }

    pub(crate) fn is_heard(&self, node: NodeId, since_ms: u64) -> bool {
        self.heard_ms.get(&node).is_some_and(|heard_ms| *heard_ms >= since_ms)
    }

    /// No lease for the rest of the term.
    pub(crate) fn bar(&mut self) {
        self.is_barred = true;
    }

    pub(crate) fn is_barred(&self) -> bool {
        self.is_barred
    }

    pub(crate) fn is_valid(
        &self,
        members: &Members,
        me: NodeId,
        lease_ms: u64,
        now_ms: u64,
    ) -> bool {
        let holds = |voters: &[NodeId]| match self.majority_ms(voters, me) {
            Some(sent_ms) => now_ms < sent_ms.saturating_add(lease_ms),
            None => false,
        };
        !self.is_barred
            && holds(&members.voters)
            && (members.outgoing.is_empty() || holds(&members.outgoing))
    }

    /// The latest time such that a majority of `voters` answered a heartbeat sent then or later.
    /// We ourselves follow no other leader at any time.
    fn majority_ms(&self, voters: &[NodeId], me: NodeId) -> Option<u64> {
        let mut times: Vec<u64> = voters
            .iter()
            .filter_map(|node| {
                if *node == me { Some(u64::MAX) } else { self.answered_ms.get(node).copied() }
            })
            .collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        times.get(voters.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lease_runs_from_the_sending_of_what_a_majority_answered() {
        let nodes: Vec<NodeId> = (0..5).map(NodeId).collect();
        let me = NodeId(0);
        let members = Members::new(&nodes, &[NodeId(9)]);
        let mut lease = Lease::default();
        lease.answered(NodeId(1), 1000);
        lease.answered(NodeId(9), 2000);
        assert!(!lease.is_valid(&members, me, 400, 1001), "a learner does not count");
        lease.answered(NodeId(2), 1100);
        assert!(lease.is_valid(&members, me, 400, 1399));
        assert!(!lease.is_valid(&members, me, 400, 1400));
        let joint = Members { outgoing: vec![NodeId(3), NodeId(4)], ..members.clone() };
        assert!(!lease.is_valid(&joint, me, 400, 1399), "both majorities count");
        assert!(lease.is_valid(&Members::new(&[me], &[]), me, 400, u64::MAX - 1));
        lease.bar();
        assert!(!lease.is_valid(&members, me, 400, 1399));
    }
}
