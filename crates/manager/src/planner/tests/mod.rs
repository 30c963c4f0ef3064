//! A small world for the planners, and what they do in it.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{Deletion, NodeId, PartitionId};
use milpa_wire::data::DataPartitionReport;
use milpa_wire::manager::{Heartbeat, SlowPeer};
use milpa_wire::meta::{MetaPartitionReport, MetaStatistics};

use super::*;
use crate::core::tests::Log;
use crate::core::{Applied, DataRecord};

mod data_walk;
mod divergence;
mod losses;
mod meta_replicas;
mod meta_walk;
mod passes;
mod placement;
mod replacing;
mod slow;

/// A small cluster: agreed state, nodes that obey at once, and a clock.
pub(crate) struct World {
    pub(crate) log: Log,
    pub(crate) loads: Loads,
    pub(crate) policy: Policy,
    pub(crate) now_ms: u64,
    /// What each node holds and will report.
    pub(crate) meta: BTreeMap<NodeId, BTreeMap<PartitionId, MetaPartitionReport>>,
    pub(crate) data: BTreeMap<NodeId, BTreeMap<PartitionId, DataPartitionReport>>,
    /// What is damaged there.
    pub(crate) data_damaged: BTreeMap<NodeId, BTreeSet<PartitionId>>,
    /// Nodes that are down.
    pub(crate) down: BTreeSet<NodeId>,
    /// Nodes without room.
    pub(crate) full: BTreeSet<NodeId>,
    /// Nodes whose disks are out of service.
    pub(crate) fenced: BTreeSet<NodeId>,
    /// Meta nodes that were relieved of a partition that they led.
    pub(crate) declining: BTreeSet<(NodeId, PartitionId)>,
    /// Who is slow, for all others that are up.
    pub(crate) slow: BTreeSet<NodeId>,
    /// They know it themselves, and nobody else does.
    pub(crate) slow_know_alone: bool,
    /// Groups that take over no members.
    pub(crate) stuck: BTreeSet<PartitionId>,
}

impl World {
    pub(crate) fn new(meta: u32, data: u32) -> World {
        World {
            log: Log::with_nodes(meta, data),
            loads: Loads::new(0),
            // Tests of epochs count them; those of the balance turn it on.
            policy: Policy { balances: false, ..Policy::default() },
            now_ms: 0,
            meta: BTreeMap::new(),
            data: BTreeMap::new(),
            data_damaged: BTreeMap::new(),
            down: BTreeSet::new(),
            full: BTreeSet::new(),
            fenced: BTreeSet::new(),
            declining: BTreeSet::new(),
            slow: BTreeSet::new(),
            slow_know_alone: false,
            stuck: BTreeSet::new(),
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            state: &self.log.state,
            loads: &self.loads,
            policy: &self.policy,
            now_ms: self.now_ms,
            unix_ms: 1_700_000_000_000 + self.now_ms,
            seed: self.now_ms + 1,
        }
    }

    /// Groups whose leader is down elect another one, if a majority is up.
    fn elections(&mut self) {
        let groups: BTreeSet<PartitionId> =
            self.meta.values().flat_map(|held| held.keys().copied()).collect();
        for group in groups {
            let newest = self.meta.values().filter_map(|held| held.get(&group));
            let Some(newest) = newest.max_by_key(|report| report.term).cloned() else { continue };
            let has_leader = newest.leader.filter(|leader| !self.down.contains(leader));
            let up: Vec<NodeId> =
                newest.voters.iter().copied().filter(|n| !self.down.contains(n)).collect();
            if up.len() * 2 <= newest.voters.len() {
                continue;
            }
            let learners = newest.learners.iter().filter(|node| !self.down.contains(node));
            let everybody: Vec<NodeId> = up.iter().chain(learners).copied().collect();
            for node in &everybody {
                let Some(report) = self.meta.get_mut(node).and_then(|held| held.get_mut(&group))
                else {
                    continue;
                };
                if has_leader.is_none() {
                    (report.leader, report.term) = (up.first().copied(), newest.term + 1);
                    report.voters.clone_from(&newest.voters);
                }
                let leader = report.leader;
                report.current = others(&everybody, leader);
            }
        }
    }

    /// Data partitions of which a node has what is left of a replica.
    pub(crate) fn damaged_at(&mut self, node: NodeId) -> &mut BTreeSet<PartitionId> {
        self.data_damaged.entry(node).or_default()
    }

    fn slow_peers(&self, by: NodeId) -> Vec<SlowPeer> {
        let is_known = |node: &NodeId| (*node == by) == self.slow_know_alone;
        let known = self.slow.iter().copied().filter(is_known);
        known.map(|node| SlowPeer { node, took_ms: 200 }).collect()
    }

    /// Every node that is up sends a heartbeat.
    pub(crate) fn heartbeats(&mut self) {
        self.elections();
        let nodes: Vec<_> = self.log.state.nodes().cloned().collect();
        for mut node in nodes.into_iter().filter(|node| !self.down.contains(&node.id)) {
            let is_full = self.full.contains(&node.id);
            if is_full && node.role == milpa_types::Role::Data {
                node.disks.iter_mut().for_each(|disk| disk.free_bytes = 0);
            }
            if self.fenced.contains(&node.id) {
                node.disks.iter_mut().for_each(|disk| disk.fenced = Some("broken".into()));
            }
            for report in self.meta.entry(node.id).or_default().values_mut() {
                report.is_full = is_full;
                report.declines_lead = self.declining.contains(&(node.id, report.partition));
            }
            let heartbeat = Heartbeat {
                node: node.id,
                incarnation: node.incarnation,
                disks: node.disks,
                memory_bytes: 1 << 20,
                meta: self.meta.entry(node.id).or_default().values().cloned().collect(),
                slow_peers: self.slow_peers(node.id),
                data: self.data.entry(node.id).or_default().values().cloned().collect(),
                data_damaged: self
                    .data_damaged
                    .entry(node.id)
                    .or_default()
                    .iter()
                    .copied()
                    .collect(),
            };
            self.loads.hear(heartbeat, self.now_ms);
        }
    }

    /// Time passes, nodes are heard, one pass runs, its commands are applied and its steps taken.
    pub(crate) fn pass(&mut self) -> Plan {
        self.pass_where(|_| true)
    }

    /// The same, and of the steps only some are taken.
    pub(crate) fn pass_where(&mut self, mut is_taken: impl FnMut(&Step) -> bool) -> Plan {
        self.now_ms += 200;
        self.heartbeats();
        self.loads.judge(self.now_ms, self.policy.silence_period_ms);
        let plan = plan(self.view());
        for command in plan.commands.clone() {
            let applied = self.log.apply(command.clone());
            assert!(!matches!(applied, Applied::Refused(_)), "{command:?}: {applied:?}");
        }
        for step in plan.steps.iter().filter(|step| is_taken(step)) {
            self.take(step);
        }
        plan
    }

    /// Passes until nothing is left to do.
    #[track_caller]
    pub(crate) fn settle(&mut self) {
        for _ in 0..200 {
            if is_quiet(&self.pass()) && self.now_ms > self.policy.silence_period_ms * 2 {
                return;
            }
        }
        panic!("still planning: {:?}", self.pass());
    }

    pub(crate) fn wait(&mut self, ms: u64) {
        for _ in 0..ms / 200 {
            self.pass();
        }
    }

    /// The node does it, if it is up.
    fn take(&mut self, step: &Step) {
        if step.target().is_none_or(|node| self.down.contains(&node)) {
            return;
        }
        match step {
            Step::CreateMeta { node, create } => {
                // Of what is there nothing is overwritten.
                if self.meta.get(node).is_some_and(|held| held.contains_key(&create.partition)) {
                    return;
                }
                let leads = self.meta.values().find_map(|held| held.get(&create.partition));
                let leader = leads.and_then(|report| report.leader);
                let voters = if create.joins { Vec::new() } else { create.members.clone() };
                let report = MetaPartitionReport {
                    partition: create.partition,
                    leader: leader.or(create.members.first().copied()),
                    term: 1,
                    applied: 1,
                    log_end: None,
                    current: others(&voters, leader.or(create.members.first().copied())),
                    voters,
                    learners: Vec::new(),
                    is_full: false,
                    is_damaged: false,
                    declines_lead: false,
                    marks: Vec::new(),
                    statistics: MetaStatistics {
                        inode_highest: create.slot.first_inode(),
                        ..MetaStatistics::default()
                    },
                };
                self.meta.entry(*node).or_default().insert(create.partition, report);
            }
            Step::CreateData { node, create } => {
                let report = DataPartitionReport {
                    partition: create.partition,
                    disk: create.disk,
                    configuration: create.configuration.clone(),
                    leader: Some(create.configuration.primary),
                    term: 1,
                    allocated_bytes: 0,
                    extents: 0,
                    unaligned: 0,
                    log_end: None,
                    applied: 0,
                    overwritten: 0,
                    lacks_overwritten: false,
                    is_given_rest: false,
                    lost_blocks: 0,
                    current: Vec::new(),
                };
                let makes_member = create.configuration.members.contains(node);
                if makes_member && self.damaged_at(*node).contains(&create.partition) {
                    return;
                }
                self.damaged_at(*node).remove(&create.partition);
                self.data.entry(*node).or_default().insert(create.partition, report);
            }
            Step::Configure { partition, configuration, ask, .. } => {
                // Whoever is asked, stays, and can lead the group there does.
                let stays = |node: &&NodeId| configuration.members.contains(*node);
                let asked = ask.iter().filter(stays).filter(|node| !self.down.contains(node));
                let mut asked = asked.filter_map(|node| self.data.get(node)?.get(partition));
                let is_taken = asked.any(|report| configuration.follows(&report.configuration));
                let is_stuck = self.stuck.contains(partition);
                let replicas = self.data.values_mut().filter_map(|held| held.get_mut(partition));
                for report in replicas {
                    if !is_stuck && is_taken {
                        report.configuration = configuration.clone();
                        report.leader = ask.iter().find(stays).copied();
                        report.current =
                            others(&configuration.holders().collect::<Vec<_>>(), report.leader);
                        report.term += 1;
                    }
                }
            }
            Step::Split { partition, end, .. } => {
                let finish = growth::finish_split(self.view(), *partition).unwrap();
                assert!(matches!(self.log.apply(finish), Applied::Partitions(_)), "{end}");
            }
            Step::SetMembers { partition, .. } if self.stuck.contains(partition) => {}
            Step::SetMembers { partition, voters, learners, .. } => {
                // The lowest of the voters that are up leads; whoever is up is current.
                let up = |node: &&NodeId| !self.down.contains(node);
                let leader = voters.iter().find(up).copied();
                let current: Vec<NodeId> =
                    voters.iter().chain(learners).filter(up).copied().collect();
                for (_, held) in self.meta.iter_mut().filter(|(node, _)| current.contains(node)) {
                    let Some(report) = held.get_mut(partition) else { continue };
                    (report.voters, report.learners) = (voters.clone(), learners.clone());
                    (report.leader, report.current) = (leader, others(&current, leader));
                    report.term += 1;
                }
            }
            Step::TransferLeader { partition, to, .. } => {
                for report in self.meta.values_mut().filter_map(|held| held.get_mut(partition)) {
                    report.leader = Some(*to);
                    report.term += 1;
                }
            }
            Step::SetOptions { node, volume, version, .. } => {
                let (node, volume, version) = (*node, *volume, *version);
                self.log.apply(CommandV1::OptionsTaken { volume, node, version });
            }
            Step::Refuse { node, partition, .. } => {
                self.meta.entry(*node).or_default().remove(partition);
            }
            Step::Delete { node, partition, deletion, .. } => {
                let is_second = *deletion == Deletion::Leftover { log_end: None };
                if self.damaged_at(*node).remove(partition) && is_second {
                    return;
                }
                // One of the two maps holds it.
                self.meta.entry(*node).or_default().remove(partition);
                self.data.entry(*node).or_default().remove(partition);
            }
        }
    }

    pub(crate) fn data_record(&self, id: u64) -> &DataRecord {
        self.log.state.data_partition(PartitionId(id)).unwrap()
    }
}

/// Whether nothing is left to do, though an operator may have to hear of something.
pub(crate) fn is_quiet(plan: &Plan) -> bool {
    plan.commands.is_empty() && plan.steps.is_empty()
}

/// Draws for the walks: the same ones each time.
struct Chance(u64);

impl Chance {
    /// A number below `bound` (Knuth's linear congruential generator).
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A leader says who else is current.
fn others(nodes: &[NodeId], leader: Option<NodeId>) -> Vec<NodeId> {
    nodes.iter().copied().filter(|node| Some(*node) != leader).collect()
}

pub(super) fn nodes(ids: &[u32]) -> Vec<NodeId> {
    ids.iter().map(|id| NodeId(*id)).collect()
}

/// A world with the volume "home": meta partitions 1 to 3, data partitions 4 to 9, all there.
pub(super) fn settled() -> World {
    let mut world = World::new(3, 3);
    world.log.volume("home", 3, 6);
    world.settle();
    world
}
