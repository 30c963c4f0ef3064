//! How long other data nodes take to write what this one sends them, and this one what it orders itself. Who is slow
//! is told to the managers.

use std::collections::BTreeMap;
use std::time::Duration;

use milpa_types::{DataError, NodeId};
use milpa_wire::manager::SlowPeer;

/// Writes older than this say nothing of today.
const FRESH_MS: u64 = 10_000;
/// A node is slow that takes longer than this…
const SLOW_US: u64 = 100_000;
/// …for longer than one stall…
const SLOW_FOR_MS: u64 = 2_000;
/// …and so many times as long as the fastest: when all are slow, it may be us.
const TIMES_THE_FASTEST: u64 = 4;
/// The part of each measurement in the average: a change shows after some ten writes…
const SHARE: u64 = 8;
/// …or after some three that are this far apart.
const SHARE_OF_FEW: u64 = 2;
const FEW_MS: u64 = 250;
/// One that has answered nothing for this long is asked more rarely, but often enough to be fresh…
const RARELY_AFTER_MS: u64 = 60_000;
const RARELY_MS: u64 = 5_000;
/// …and after an hour no more.
const FORGOTTEN_MS: u64 = 3_600_000;

/// The nodes that have taken writes, this one among them.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Compared with others, and no measure for them: its own writes take no way.
    me: NodeId,
    by_node: BTreeMap<NodeId, Peer>,
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    average_us: u64,
    /// When it was last measured, and when it last answered.
    at_ms: u64,
    answered_ms: u64,
    /// Since when the average is more than a node may take.
    slow_since_ms: Option<u64>,
}

impl Peer {
    fn is_slow(&self) -> bool {
        self.slow_since_ms.is_some_and(|since| self.at_ms.saturating_sub(since) >= SLOW_FOR_MS)
    }

    fn is_fresh(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.at_ms) < FRESH_MS
    }

    fn measured(&mut self, us: u64, now_ms: u64) {
        if !self.is_fresh(now_ms) {
            (self.average_us, self.slow_since_ms) = (us, None);
        }
        let is_one_of_few = now_ms.saturating_sub(self.at_ms) >= FEW_MS;
        let share = if is_one_of_few { SHARE_OF_FEW } else { SHARE };
        self.average_us = (self.average_us * (share - 1) + us.min(60_000_000)) / share;
        self.at_ms = now_ms;
        let since_ms = self.slow_since_ms.unwrap_or(now_ms);
        self.slow_since_ms = (self.average_us > SLOW_US).then_some(since_ms);
    }
}

impl Peers {
    /// Nothing is known yet.
    pub fn of(me: NodeId) -> Peers {
        Peers { me, by_node: BTreeMap::new() }
    }

    /// How a write went that was sent there. One that was refused says nothing, nor does a node that cannot be reached.
    pub fn note(
        &mut self,
        node: NodeId,
        result: &Result<(), DataError>,
        took_us: u64,
        now_ms: u64,
    ) {
        match result {
            Ok(()) => self.took(node, took_us, now_ms),
            Err(DataError::MemberSilent { .. }) if took_us >= SLOW_US => {
                self.gave_up(node, took_us, now_ms);
            }
            Err(_) => {}
        }
    }

    /// A write was taken.
    fn took(&mut self, node: NodeId, us: u64, now_ms: u64) {
        self.gave_up(node, us, now_ms);
        if let Some(peer) = self.by_node.get_mut(&node) {
            peer.answered_ms = now_ms;
        }
    }

    /// A write was not waited for any longer: it would have taken more than that.
    fn gave_up(&mut self, node: NodeId, us: u64, now_ms: u64) {
        let new = Peer { average_us: us, at_ms: now_ms, answered_ms: now_ms, slow_since_ms: None };
        self.by_node.entry(node).or_insert(new).measured(us, now_ms);
    }

    /// Who may be slow, and has not been measured for a while.
    pub fn suspects(&self, now_ms: u64, pause: Duration) -> Vec<NodeId> {
        let is_due = |node: NodeId, peer: &Peer| {
            let unanswered_ms = now_ms.saturating_sub(peer.answered_ms);
            let rarely = Duration::from_millis(RARELY_MS);
            let pause = if unanswered_ms < RARELY_AFTER_MS { pause } else { rarely };
            peer.slow_since_ms.is_some()
                && self.is_much_slower(node, peer)
                && u128::from(now_ms.saturating_sub(peer.at_ms)) >= pause.as_millis()
                && unanswered_ms < FORGOTTEN_MS
        };
        let due = self.by_node.iter().filter(|(node, peer)| is_due(**node, peer));
        due.map(|(node, _)| *node).collect()
    }

    /// Whether a node is much slower than another one was when it was last measured, however long ago: while
    /// nobody writes, only who is slow is.
    fn is_much_slower(&self, node: NodeId, peer: &Peer) -> bool {
        let is_measure = |other: NodeId| ![node, self.me].contains(&other);
        let others = self.by_node.iter().filter(|(other, _)| is_measure(**other));
        let fastest = others.map(|(_, other)| other.average_us).min();
        fastest.is_some_and(|us| peer.average_us > us.saturating_mul(TIMES_THE_FASTEST))
    }

    /// Who is slow, compared with the others.
    pub fn slow(&self, now_ms: u64) -> Vec<SlowPeer> {
        let is_slow = |node: NodeId, peer: &Peer| {
            peer.is_fresh(now_ms) && peer.is_slow() && self.is_much_slower(node, peer)
        };
        let slow = self.by_node.iter().filter(|(node, peer)| is_slow(**node, peer));
        let told = |(node, peer): (&NodeId, &Peer)| SlowPeer {
            node: *node,
            took_ms: u32::try_from(peer.average_us / 1000).unwrap_or(u32::MAX),
        };
        slow.map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(9);

    #[test]
    fn who_is_much_slower_than_another_is_told_until_nothing_is_known() {
        let mut peers = Peers::of(ME);
        for at in 0..20 {
            assert!(peers.slow(at * 200).is_empty(), "it may be one stall");
            peers.took(NodeId(1), 2_000, at * 200);
            peers.took(NodeId(2), 250_000, at * 100);
        }
        peers.took(NodeId(2), 250_000, SLOW_FOR_MS);
        let slow: Vec<NodeId> = peers.slow(4_000).iter().map(|peer| peer.node).collect();
        assert_eq!(slow, [NodeId(2)]);
        assert!(peers.slow(FRESH_MS + 4_000).is_empty());
        for at in 4_000..4_040 {
            peers.took(NodeId(2), 2_000, at);
        }
        assert!(peers.slow(4_100).is_empty());
    }

    #[test]
    fn who_may_be_slow_is_asked_until_it_is_fast_again() {
        let (mut peers, pause) = (Peers::of(ME), Duration::from_millis(500));
        peers.took(NodeId(1), 2_000, 0);
        peers.took(NodeId(2), 900_000, 0);
        assert!(peers.suspects(400, pause).is_empty(), "just measured");
        // One stall, and nothing was written after it.
        for at in [500, 1_000, 1_500, 2_000] {
            assert_eq!(peers.suspects(at, pause), [NodeId(2)]);
            peers.took(NodeId(2), 5_000, at);
        }
        assert!(peers.suspects(2_500, pause).is_empty());
        // It answers no more: it stays slow for an hour, and nobody asks after that.
        peers.took(NodeId(2), 900_000, 3_000);
        let (mut asked, mut told) = (0, 0);
        for at in (3_500..).step_by(2_500).take(1_600) {
            told += peers.slow(at).len();
            if peers.suspects(at, pause) == [NodeId(2)] {
                asked += 1;
                peers.gave_up(NodeId(2), 2_000_000, at);
            }
        }
        assert!((700..760).contains(&asked), "{asked}");
        assert!(told > 1_400, "{told}");
    }

    #[test]
    fn who_was_away_for_long_begins_anew_and_who_cannot_be_reached_is_not_fast() {
        let mut peers = Peers::of(ME);
        let silent = Err(DataError::MemberSilent { node: NodeId(2) });
        peers.note(NodeId(1), &Ok(()), 2_000, 0);
        for at in [0, 1_000, 2_000, 3_000] {
            peers.note(NodeId(2), &silent, 1_000_000, at);
        }
        assert_eq!(peers.slow(3_000).len(), 1);
        for at in 3_000..3_020 {
            peers.note(NodeId(2), &silent, 300, at);
        }
        assert_eq!(peers.slow(3_100).len(), 1, "it was refused at once");
        peers.note(NodeId(2), &Ok(()), 5_000, 120_000);
        assert!(peers.slow(120_000).is_empty());
    }

    /// The story (a landing that failed): the slow one had ordered the appends itself, and nobody knew.
    #[test]
    fn who_is_slow_itself_knows_it_by_the_others_and_is_no_measure_for_them() {
        let mut peers = Peers::of(ME);
        for at in [0, 1_000, 2_000] {
            peers.took(ME, 400_000, at);
        }
        assert!(peers.slow(2_000).is_empty(), "nobody to compare with");
        peers.took(NodeId(1), 4_000, 2_000);
        assert_eq!(peers.slow(2_000).first().map(|slow| slow.node), Some(ME));
        assert_eq!(peers.suspects(2_500, Duration::from_millis(500)), [ME]);
        let mut peers = Peers::of(ME);
        for at in [0, 1_000, 2_000] {
            peers.took(ME, 1_000, at);
            peers.took(NodeId(1), 400_000, at);
            peers.took(NodeId(2), 400_000, at);
        }
        assert!(peers.slow(2_000).is_empty(), "it may be the link");
    }

    #[test]
    fn nobody_is_told_when_all_are_slow_alike() {
        let mut peers = Peers::of(ME);
        for at in [0, 4_000] {
            for node in [1, 2, 3] {
                peers.took(NodeId(node), 300_000 + u64::from(node), at);
            }
        }
        assert!(peers.slow(4_000).is_empty());
    }
}
