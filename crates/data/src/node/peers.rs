//! How long other data nodes take to write what this one sends them. Who is slow is told to the
//! managers: a node cannot know that of itself.

use std::collections::BTreeMap;

use milpa_types::NodeId;
use milpa_wire::manager::SlowPeer;

/// Writes older than this say nothing of today.
const FRESH_MS: u64 = 10_000;
/// A node is slow that takes longer than this…
const SLOW_US: u64 = 100_000;
/// …and so many times as long as the fastest: when all are slow, it may be us.
const TIMES_THE_FASTEST: u64 = 4;
/// The part of each measurement in the average: a change shows after some ten writes.
const SHARE: u64 = 8;

/// The nodes that have taken writes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_node: BTreeMap<NodeId, Peer>,
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    average_us: u64,
    at_ms: u64,
}

impl Peers {
    /// A write was taken.
    pub fn took(&mut self, node: NodeId, us: u64, now_ms: u64) {
        let peer = self.by_node.entry(node).or_insert(Peer { average_us: us, at_ms: now_ms });
        peer.average_us = (peer.average_us * (SHARE - 1) + us.min(60_000_000)) / SHARE;
        peer.at_ms = now_ms;
    }

    /// Who is slow, compared with the others.
    pub fn slow(&self, now_ms: u64) -> Vec<SlowPeer> {
        let is_fresh = |peer: &&Peer| now_ms.saturating_sub(peer.at_ms) < FRESH_MS;
        let fastest = self.by_node.values().filter(is_fresh).map(|peer| peer.average_us).min();
        let limit = fastest.unwrap_or(0).saturating_mul(TIMES_THE_FASTEST).max(SLOW_US);
        let fresh = self.by_node.iter().filter(|(_, peer)| is_fresh(peer));
        let slow = fresh.filter(|(_, peer)| peer.average_us > limit);
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

    #[test]
    fn who_is_much_slower_than_another_is_told_until_nothing_is_known() {
        let mut peers = Peers::default();
        for at in 0..20 {
            peers.took(NodeId(1), 2_000, at);
            peers.took(NodeId(2), 250_000, at);
        }
        let slow: Vec<NodeId> = peers.slow(100).iter().map(|peer| peer.node).collect();
        assert_eq!(slow, [NodeId(2)]);
        assert!(peers.slow(FRESH_MS + 100).is_empty());
        for at in 0..40 {
            peers.took(NodeId(2), 2_000, at);
        }
        assert!(peers.slow(100).is_empty());
    }

    #[test]
    fn nobody_is_told_when_all_are_slow_alike() {
        let mut peers = Peers::default();
        for node in [1, 2, 3] {
            peers.took(NodeId(node), 300_000 + u64::from(node), 0);
        }
        assert!(peers.slow(1).is_empty());
    }
}
