//! What the leader heard: who lives, how full disks are, what each replica reports.
//!
//! Kept in the leader's memory only. A new leader starts empty and hears everything again within
//! one heartbeat; until then it judges nobody ([`Loads::heard_ms`]).

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Disk, NodeId, PartitionId};
use milpa_wire::data::{Configuration, DataPartitionReport};
use milpa_wire::manager::{Heartbeat, SlowPeer};
use milpa_wire::meta::MetaPartitionReport;

use crate::avoided::{Avoided, Heard};
use crate::core::{DataRecord, MetaRecord, NodeRecord};

/// The last heartbeat of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeLoad {
    /// When it came, on the leader's monotonic clock; later, if the leader was not listening since.
    pub heard_ms: u64,
    /// When it came.
    reported_ms: u64,
    /// When the first of an unbroken row of heartbeats came; `None` while none came since the
    /// registration, which counts as heard but reports nothing.
    pub reporting_since_ms: Option<u64>,
    /// Its disks as they are now.
    pub disks: Vec<Disk>,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its meta partitions, but the damaged ones.
    pub meta: BTreeMap<PartitionId, MetaPartitionReport>,
    /// Meta partitions of which it has a replica that takes no part: lost to its group, and still to
    /// be deleted.
    pub meta_damaged: BTreeSet<PartitionId>,
    /// It was relieved of a meta partition that it led, not long ago: its disk or its links are slow, and not only for
    /// that one (docs/decisions/0016).
    pub declines_leads: bool,
    /// Its data partitions, but the damaged ones.
    pub data: BTreeMap<PartitionId, DataPartitionReport>,
    /// Data partitions of which it has a replica that takes no part, and that is still to be deleted.
    pub data_damaged: BTreeSet<PartitionId>,
    /// Data nodes that are slow for it.
    pub slow_peers: Vec<SlowPeer>,
}

impl NodeLoad {
    /// For how long it had reported without a break when it reported last: what it said just after its start is no
    /// older for that nothing came since (simulation, seed 730495).
    #[must_use]
    pub fn reporting_ms(&self) -> u64 {
        self.reporting_since_ms.map_or(0, |since| self.reported_ms.saturating_sub(since))
    }

    /// Meta partitions of which it has a replica, damaged or not.
    pub fn meta_held(&self) -> impl Iterator<Item = PartitionId> {
        self.meta.keys().chain(&self.meta_damaged).copied()
    }

    /// Data partitions of which it has a replica, damaged or not.
    pub fn data_held(&self) -> impl Iterator<Item = PartitionId> {
        self.data.keys().chain(&self.data_damaged).copied()
    }

    /// What decisions may be waiting for.
    fn decisive(&self) -> impl Iterator<Item = impl PartialEq> {
        self.data.values().map(DataPartitionReport::decisive)
    }
}

/// The last heartbeats of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loads {
    since_ms: u64,
    nodes: BTreeMap<NodeId, NodeLoad>,
    avoided: Avoided,
}

impl Loads {
    /// Nothing heard yet, listening since `now_ms`.
    #[must_use]
    pub fn new(now_ms: u64) -> Loads {
        Loads { since_ms: now_ms, ..Loads::default() }
    }

    /// The leader itself was not listening for `by_ms` (it was stopped, or its machine was, or it had
    /// something else to do): that time counts against nobody. What was silent before stays silent:
    /// a leader that is late again and again would otherwise never find anybody dead.
    pub fn postpone(&mut self, by_ms: u64, now_ms: u64) {
        let later = |heard_ms: u64| heard_ms.saturating_add(by_ms).min(now_ms);
        self.since_ms = later(self.since_ms);
        for load in self.nodes.values_mut() {
            load.heard_ms = later(load.heard_ms);
        }
    }

    /// A node registered: it lives, but has reported nothing.
    pub fn register(&mut self, node: NodeId, now_ms: u64) {
        self.nodes.insert(node, NodeLoad { heard_ms: now_ms, ..NodeLoad::default() });
    }

    /// A node said that it leaves: it is not heard until it comes back.
    pub fn leave(&mut self, node: NodeId) {
        self.nodes.remove(&node);
    }

    /// A heartbeat of a node that the state knows. Whether it tells of something that a decision may be waiting for.
    pub fn hear(&mut self, heartbeat: Heartbeat, now_ms: u64) -> bool {
        let before = self.nodes.get(&heartbeat.node).and_then(|load| load.reporting_since_ms);
        let (damaged, meta): (Vec<_>, Vec<_>) =
            heartbeat.meta.into_iter().partition(|report| report.is_damaged);
        let load = NodeLoad {
            heard_ms: now_ms,
            reported_ms: now_ms,
            reporting_since_ms: before.or(Some(now_ms)),
            disks: heartbeat.disks,
            memory_bytes: heartbeat.memory_bytes,
            declines_leads: meta.iter().any(|report| report.declines_lead),
            meta: meta.into_iter().map(|report| (report.partition, report)).collect(),
            meta_damaged: damaged.into_iter().map(|report| report.partition).collect(),
            data: heartbeat.data.into_iter().map(|report| (report.partition, report)).collect(),
            data_damaged: heartbeat.data_damaged.into_iter().collect(),
            slow_peers: heartbeat.slow_peers,
        };
        let known = self.nodes.get(&heartbeat.node);
        let is_news = !known.is_some_and(|known| known.decisive().eq(load.decisive()));
        self.nodes.insert(heartbeat.node, load);
        is_news
    }

    /// Finds out who is to be avoided, from what was heard within `period_ms`. Before each pass.
    pub fn judge(&mut self, now_ms: u64, period_ms: u64) {
        let is_heard = |node: NodeId| self.is_heard(node, now_ms, period_ms);
        // Who is held off itself may have a bad link to all others: it speaks of itself only.
        let speaks_of = |by: NodeId, node| by == node || self.avoided_ms(by, now_ms).is_none();
        let mut heard: BTreeMap<NodeId, Heard> = BTreeMap::new();
        for (by, load) in self.nodes.iter().filter(|(by, _)| is_heard(**by)) {
            let told = load.slow_peers.iter().filter(|peer| speaks_of(*by, peer.node));
            for SlowPeer { node, .. } in told {
                let about = heard.entry(*node).or_default();
                about.callers += 1;
                about.is_silent = !is_heard(*node);
            }
        }
        let data_nodes = self.nodes.values().filter(|load| !load.data.is_empty()).count();
        self.avoided.judge(&heard, data_nodes, now_ms);
    }

    /// For how long at the least partitions go on without a data node that was slow, in milliseconds, if
    /// they do.
    #[must_use]
    pub fn avoided_ms(&self, id: NodeId, now_ms: u64) -> Option<u64> {
        self.avoided.held_ms(id, now_ms)
    }

    /// What a node last said, if it said anything to this leader.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeLoad> {
        self.nodes.get(&id)
    }

    /// What a node last reported; `None` before its first heartbeat.
    #[must_use]
    pub fn report(&self, id: NodeId) -> Option<&NodeLoad> {
        self.nodes.get(&id).filter(|load| load.reporting_since_ms.is_some())
    }

    /// Whether others are to lead meta partitions rather than this node.
    #[must_use]
    pub fn declines_leads(&self, id: NodeId) -> bool {
        self.report(id).is_some_and(|load| load.declines_leads)
    }

    /// Whether a node has a damaged replica of a meta partition.
    #[must_use]
    pub fn has_damaged_meta(&self, id: NodeId, partition: PartitionId) -> bool {
        self.report(id).is_some_and(|load| load.meta_damaged.contains(&partition))
    }

    /// Whether a node has a damaged replica of a data partition.
    #[must_use]
    pub fn has_damaged_data(&self, id: NodeId, partition: PartitionId) -> bool {
        self.report(id).is_some_and(|load| load.data_damaged.contains(&partition))
    }

    /// When a node was last heard. Nobody counts as unheard before this leader listened.
    #[must_use]
    pub fn heard_ms(&self, id: NodeId) -> u64 {
        self.nodes.get(&id).map_or(0, |load| load.heard_ms).max(self.since_ms)
    }

    /// Whether a heartbeat or registration came since the leader listens, within `period_ms`.
    #[must_use]
    pub fn is_heard(&self, id: NodeId, now_ms: u64, period_ms: u64) -> bool {
        self.nodes.get(&id).is_some_and(|load| now_ms.saturating_sub(load.heard_ms) < period_ms)
    }

    /// A node's disks: as last reported, else as registered.
    #[must_use]
    pub fn disks<'a>(&'a self, node: &'a NodeRecord) -> &'a [Disk] {
        self.report(node.id).map_or(&node.disks, |load| &load.disks)
    }

    /// Who says that a data node is slow, and how long a write takes there at the most, in
    /// milliseconds. Only who was heard within `period_ms` counts; `None` if only one says so and
    /// nothing follows from it yet: that may be its own link.
    #[must_use]
    pub fn slow(&self, id: NodeId, now_ms: u64, period_ms: u64) -> Option<(Vec<NodeId>, u32)> {
        let heard = self.nodes.iter().filter(|(by, _)| self.is_heard(**by, now_ms, period_ms));
        let told = heard.flat_map(|(by, load)| {
            let about = load.slow_peers.iter().filter(|peer| peer.node == id);
            about.map(|peer| (*by, peer.took_ms))
        });
        let (by, took_ms): (Vec<NodeId>, Vec<u32>) = told.unzip();
        let most = took_ms.into_iter().max()?;
        let needed = if self.avoided_ms(id, now_ms).is_some() { 1 } else { 2 };
        (by.len() >= needed).then_some((by, most))
    }

    /// Reports of a meta partition's replicas.
    pub fn meta_reports<'a>(
        &'a self,
        record: &'a MetaRecord,
    ) -> impl Iterator<Item = (NodeId, &'a MetaPartitionReport)> {
        let report = |id: &NodeId| Some((*id, self.report(*id)?.meta.get(&record.id)?));
        record.members.iter().chain(&record.joining).filter_map(report)
    }

    /// Reports of a data partition's replicas, members or not.
    pub fn data_reports<'a>(
        &'a self,
        record: &'a DataRecord,
    ) -> impl Iterator<Item = (NodeId, &'a DataPartitionReport)> {
        let report = |node: NodeId| Some((node, self.report(node)?.data.get(&record.id)?));
        record.replicas.iter().filter_map(move |replica| report(replica.node))
    }

    /// The leader of a meta partition, as the replica with the highest term knows it.
    #[must_use]
    pub fn meta_leader(&self, record: &MetaRecord) -> Option<NodeId> {
        let led = self.meta_reports(record).filter_map(|(_, r)| Some((r.term, r.leader?)));
        led.max_by_key(|(term, _)| *term).map(|(_, leader)| leader)
    }

    /// The report of a meta partition's leader, or else of the replica that has applied most.
    #[must_use]
    pub fn meta_newest<'a>(&'a self, record: &'a MetaRecord) -> Option<&'a MetaPartitionReport> {
        self.meta_reports(record).map(|(_, report)| report).max_by_key(|report| report.applied)
    }

    /// The Raft leader of a data partition, as the replica with the highest term knows it.
    #[must_use]
    pub fn data_leader(&self, record: &DataRecord) -> Option<NodeId> {
        let led = self.data_reports(record).filter_map(|(_, r)| Some((r.term, r.leader?)));
        led.max_by_key(|(term, _)| *term).map(|(_, leader)| leader)
    }

    /// The newest configuration that a replica has adopted. It was committed in the group, since
    /// nobody adopts another; `None` before the first report.
    #[must_use]
    pub fn adopted<'a>(&'a self, record: &'a DataRecord) -> Option<&'a Configuration> {
        let adopted = self.data_reports(record).map(|(_, report)| &report.configuration);
        adopted.max_by_key(|configuration| configuration.epoch)
    }

    /// The configuration to send clients to: the adopted one, or the intent while nothing is known.
    #[must_use]
    pub fn configuration<'a>(&'a self, record: &'a DataRecord) -> &'a Configuration {
        self.adopted(record).unwrap_or(&record.configuration)
    }

    /// Bytes and extents of a data partition: on its primary, else the largest reported.
    #[must_use]
    pub fn data_filling(&self, record: &DataRecord) -> (u64, u64) {
        let primary = self.configuration(record).primary;
        let fillings = self
            .data_reports(record)
            .map(|(node, report)| (node == primary, report.allocated_bytes, report.extents));
        fillings.max().map_or((0, 0), |(_, bytes, extents)| (bytes, extents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(node: NodeId) -> Heartbeat {
        Heartbeat {
            node,
            incarnation: 1,
            disks: Vec::new(),
            memory_bytes: 0,
            meta: Vec::new(),
            data: Vec::new(),
            data_damaged: Vec::new(),
            slow_peers: Vec::new(),
        }
    }

    #[test]
    fn nobody_is_unheard_before_the_leader_listened() {
        let mut loads = Loads::new(5_000);
        assert_eq!(loads.heard_ms(NodeId(101)), 5_000);
        assert!(!loads.is_heard(NodeId(101), 5_000, 2_000), "not heard, but not silent either");
        loads.register(NodeId(101), 6_000);
        assert!(loads.is_heard(NodeId(101), 7_999, 2_000));
        assert!(!loads.is_heard(NodeId(101), 8_000, 2_000));
    }

    /// Story: the first heartbeat after a start was on its way before the node had opened its replicas. The next ones were
    /// lost for two seconds, and the managers took every replica of the node for lost.
    #[test]
    fn what_a_node_said_as_it_started_does_not_count_for_more_with_time() {
        let mut loads = Loads::new(0);
        loads.hear(heartbeat(NodeId(101)), 1_000);
        loads.postpone(3_000, 5_000);
        assert_eq!(loads.report(NodeId(101)).unwrap().reporting_ms(), 0);
        loads.hear(heartbeat(NodeId(101)), 5_200);
        assert_eq!(loads.report(NodeId(101)).unwrap().reporting_ms(), 4_200);
    }

    #[test]
    fn a_heartbeat_is_news_when_a_decision_may_wait_for_it() {
        let report = DataPartitionReport {
            partition: PartitionId(7),
            disk: milpa_types::DiskId(1),
            configuration: Configuration {
                epoch: milpa_types::Epoch(2),
                members: vec![NodeId(101), NodeId(102)],
                primary: NodeId(101),
                learners: Vec::new(),
            },
            leader: None,
            term: 1,
            allocated_bytes: 0,
            extents: 3,
            unaligned: 3,
            log_end: None,
            applied: 0,
            overwritten: 0,
            current: Vec::new(),
            lacks_overwritten: false,
            is_given_rest: false,
            lost_blocks: 0,
        };
        let mut loads = Loads::new(0);
        let mut is_news = |data: &[DataPartitionReport]| {
            loads.hear(Heartbeat { data: data.to_vec(), ..heartbeat(NodeId(101)) }, 1_000)
        };
        assert!(is_news(&[]), "it is heard for the first time");
        assert!(!is_news(&[]));
        assert!(is_news(std::slice::from_ref(&report)), "a replica was made");
        let filled = DataPartitionReport { allocated_bytes: 4096, unaligned: 2, ..report.clone() };
        assert!(!is_news(std::slice::from_ref(&filled)));
        let aligned = DataPartitionReport { unaligned: 0, ..report.clone() };
        assert!(is_news(std::slice::from_ref(&aligned)));
        let current = DataPartitionReport { current: vec![NodeId(102)], ..aligned.clone() };
        assert!(is_news(&[current]));
        assert!(is_news(&[aligned]));
        assert!(is_news(&[]), "it was deleted");
    }

    #[test]
    fn only_the_time_not_listened_is_forgiven() {
        let mut loads = Loads::new(5_000);
        loads.register(NodeId(101), 6_000);
        loads.register(NodeId(102), 8_900);
        loads.postpone(2_000, 9_000);
        assert_eq!(loads.heard_ms(NodeId(101)), 8_000);
        assert_eq!(loads.heard_ms(NodeId(102)), 9_000, "not in the time to come");
        assert_eq!(loads.heard_ms(NodeId(103)), 7_000, "never heard");
    }
}
