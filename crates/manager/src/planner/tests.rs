//! Goal: the placement rules hold for any topology and what can be placed is placed; and each
//! planner plans exactly the difference, as tables of small situations.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{
    DiskId, Durability, Epoch, InodeId, MetaSlot, NodeId, NodeState, PartitionId, Role, VolumeId,
    VolumeOptions,
};
use milpa_wire::data::{Configuration, DataPartitionReport};
use milpa_wire::manager::Heartbeat;
use milpa_wire::meta::{MetaPartitionReport, MetaStatistics};
use proptest::prelude::*;

use super::place::DiskChoice;
use super::*;
use crate::core::tests::{Log, disk, registration};
use crate::core::{Applied, DataRecord, PartitionKind, Registration, SplitState, VolumeState};

/// A small cluster: agreed state, nodes that obey at once, and a clock.
pub(crate) struct World {
    pub(crate) log: Log,
    pub(crate) loads: Loads,
    pub(crate) policy: Policy,
    pub(crate) now_ms: u64,
    /// What each node holds and will report.
    pub(crate) meta: BTreeMap<NodeId, BTreeMap<PartitionId, MetaPartitionReport>>,
    pub(crate) data: BTreeMap<NodeId, BTreeMap<PartitionId, DataPartitionReport>>,
    /// Nodes that are down.
    pub(crate) down: BTreeSet<NodeId>,
}

impl World {
    pub(crate) fn new(meta: u32, data: u32) -> World {
        World {
            log: Log::with_nodes(meta, data),
            loads: Loads::new(0),
            policy: Policy::default(),
            now_ms: 0,
            meta: BTreeMap::new(),
            data: BTreeMap::new(),
            down: BTreeSet::new(),
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            state: &self.log.state,
            loads: &self.loads,
            policy: &self.policy,
            now_ms: self.now_ms,
            seed: self.now_ms + 1,
        }
    }

    /// Every node that is up sends a heartbeat.
    pub(crate) fn heartbeats(&mut self) {
        let nodes: Vec<_> = self.log.state.nodes().cloned().collect();
        for node in nodes.into_iter().filter(|node| !self.down.contains(&node.id)) {
            let heartbeat = Heartbeat {
                node: node.id,
                incarnation: node.incarnation,
                disks: node.disks,
                memory_bytes: 1 << 20,
                meta: self.meta.entry(node.id).or_default().values().cloned().collect(),
                data: self.data.entry(node.id).or_default().values().cloned().collect(),
            };
            self.loads.hear(heartbeat, self.now_ms);
        }
    }

    /// Time passes, nodes are heard, one pass runs, its commands are applied and its steps taken.
    pub(crate) fn pass(&mut self) -> Plan {
        self.now_ms += 200;
        self.heartbeats();
        let plan = plan(self.view());
        for command in plan.commands.clone() {
            let applied = self.log.apply(command.clone());
            assert!(!matches!(applied, Applied::Refused(_)), "{command:?}: {applied:?}");
        }
        for step in &plan.steps {
            self.take(step);
        }
        plan
    }

    /// Passes until nothing is left to do.
    #[track_caller]
    pub(crate) fn settle(&mut self) {
        for _ in 0..40 {
            if self.pass() == Plan::default() && self.now_ms > self.policy.silence_period_ms * 2 {
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
                let report = MetaPartitionReport {
                    partition: create.partition,
                    leader: create.members.first().copied(),
                    term: 1,
                    applied: 1,
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
                };
                self.data.entry(*node).or_default().insert(create.partition, report);
            }
            Step::Configure { partition, configuration, ask } => {
                let replicas = self.data.values_mut().filter_map(|held| held.get_mut(partition));
                for report in replicas {
                    if report.configuration.epoch.0 + 1 == configuration.epoch.0 {
                        report.configuration = configuration.clone();
                        report.leader = ask.first().copied();
                        report.term += 1;
                    }
                }
            }
            Step::Split { partition, end, .. } => {
                let finish = growth::finish_split(self.view(), *partition).unwrap();
                assert!(matches!(self.log.apply(finish), Applied::Partitions(_)), "{end}");
            }
            Step::SetOptions { node, volume, version, .. } => {
                let (node, volume, version) = (*node, *volume, *version);
                self.log.apply(CommandV1::OptionsTaken { volume, node, version });
            }
            Step::Delete { node, kind, partition } => {
                match kind {
                    PartitionKind::Meta => {
                        drop(self.meta.entry(*node).or_default().remove(partition))
                    }
                    PartitionKind::Data => {
                        drop(self.data.entry(*node).or_default().remove(partition))
                    }
                };
            }
        }
    }

    pub(crate) fn data_record(&self, id: u64) -> &DataRecord {
        self.log.state.data_partition(PartitionId(id)).unwrap()
    }
}

fn nodes(ids: &[u32]) -> Vec<NodeId> {
    ids.iter().map(|id| NodeId(*id)).collect()
}

/// A world with the volume "home": meta partitions 1 to 3, data partitions 4 to 9, all there.
fn settled() -> World {
    let mut world = World::new(3, 3);
    world.log.volume("home", 3, 6);
    world.settle();
    world
}

// ---- placement ----

fn candidate(id: u32, region: &str, zone: &str) -> Candidate {
    Candidate {
        node: NodeId(id),
        zone: zone.to_owned(),
        region: region.to_owned(),
        trusted: region != "untrusted" && region != "spot",
        set: id / 4,
        utilization: 0,
        extents: 0,
        replicas: 0,
        primaries: 0,
        disks: vec![DiskChoice { id: DiskId(1), utilization: 0, replicas: 0 }],
    }
}

/// Whether any choice meets rules 1 and 2: tried one by one.
fn can_be_placed(policy: &PlacementPolicy, candidates: &[Candidate]) -> bool {
    fn extend(policy: &PlacementPolicy, all: &[Candidate], chosen: &mut Vec<usize>) -> bool {
        if chosen.len() == policy.replicas {
            return is_lawful(policy, &chosen.iter().map(|at| &all[*at]).collect::<Vec<_>>());
        }
        (0..all.len()).any(|at| {
            if chosen.contains(&at) {
                return false;
            }
            chosen.push(at);
            let found = extend(policy, all, chosen);
            chosen.pop();
            found
        })
    }
    extend(policy, candidates, &mut Vec::new())
}

/// Rules 1 and 2, written a second time and differently.
fn is_lawful(policy: &PlacementPolicy, chosen: &[&Candidate]) -> bool {
    let distinct_nodes = chosen.iter().map(|c| c.node).collect::<BTreeSet<_>>().len();
    let named: Vec<&str> =
        chosen.iter().map(|c| c.region.as_str()).filter(|region| !region.is_empty()).collect();
    let distinct_regions = named.iter().collect::<BTreeSet<_>>().len();
    let zone_holds = match &policy.zone {
        ZoneRule::Local(home) => chosen.iter().all(|c| c.zone == *home),
        ZoneRule::Primary(home) => chosen[0].zone == *home,
        ZoneRule::Spread => true,
    };
    distinct_nodes == policy.replicas
        && distinct_regions == named.len()
        && chosen.iter().any(|c| c.trusted)
        && zone_holds
}

fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let region = prop_oneof![Just(""), Just("a"), Just("b"), Just("spot"), Just("untrusted")];
    let one = (region, prop_oneof![Just("x"), Just("y")], 0_u64..1000, 0_u64..20);
    proptest::collection::vec(one, 0..7).prop_map(|rows| {
        let rows = (101_u32..).zip(rows);
        rows.map(|(id, (region, zone, utilization, replicas))| Candidate {
            utilization,
            replicas,
            ..candidate(id, region, zone)
        })
        .collect()
    })
}

fn any_policy() -> impl Strategy<Value = PlacementPolicy> {
    let zone = prop_oneof![
        Just(ZoneRule::Spread),
        Just(ZoneRule::Local("x".to_owned())),
        Just(ZoneRule::Primary("x".to_owned()))
    ];
    (1_usize..5, zone, 1_usize..4).prop_map(|(replicas, zone, choices)| PlacementPolicy {
        replicas,
        zone,
        choices,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// What is placed is lawful, what can be placed is placed, and the same seed chooses the same.
    #[test]
    fn placement_is_lawful_and_complete(
        policy in any_policy(), candidates in any_candidates(), seed in any::<u64>()
    ) {
        let topology = Topology { role: Role::Data, candidates, excluded: Vec::new() };
        let placed = place(&policy, &topology, seed);
        prop_assert_eq!(&placed, &place(&policy, &topology, seed));
        prop_assert_eq!(placed.is_ok(), can_be_placed(&policy, &topology.candidates), "{:?}", placed);
        if let Ok(replicas) = placed {
            let chosen: Vec<&Candidate> = replicas.iter()
                .map(|r| topology.candidates.iter().find(|c| c.node == r.node).unwrap())
                .collect();
            prop_assert!(is_lawful(&policy, &chosen), "{:?}", chosen);
        }
    }

    /// Many partitions on equal nodes: no node leads or holds more than one above another.
    #[test]
    fn equal_nodes_get_equal_shares(node_count in 3_u32..8, partitions in 1_usize..40, seed in any::<u64>()) {
        let candidates = (0..node_count).map(|id| Candidate { set: 0, ..candidate(101 + id, "", "x") });
        let mut topology =
            Topology { role: Role::Meta, candidates: candidates.collect(), excluded: Vec::new() };
        let policy = PlacementPolicy { replicas: 3, zone: ZoneRule::Spread, choices: 8 };
        for _ in 0..partitions {
            let replicas = place(&policy, &topology, seed).unwrap();
            topology.count(&replicas, Some(replicas[0].node));
        }
        let spread = |of: fn(&Candidate) -> u64| {
            let counts: Vec<u64> = topology.candidates.iter().map(of).collect();
            counts.iter().max().unwrap() - counts.iter().min().unwrap()
        };
        prop_assert!(spread(|c| c.primaries) <= 1);
        prop_assert!(spread(|c| c.replicas) <= 2);
    }
}

#[track_caller]
fn check_shortage(candidates: Vec<Candidate>, zone: ZoneRule, expected: &str) {
    let policy = PlacementPolicy { replicas: 3, zone, choices: 2 };
    let excluded = vec!["node 104 is silent".to_owned()];
    let topology = Topology { role: Role::Data, candidates, excluded };
    let shortage = place(&policy, &topology, 1).unwrap_err().to_string();
    assert!(shortage.contains(expected), "{shortage}");
}

#[test]
fn a_shortage_names_the_rule_and_what_is_missing() {
    let three = |region| (101..104).map(|id| candidate(id, region, "x")).collect::<Vec<_>>();
    let local = |zone: &str| ZoneRule::Local(zone.to_owned());
    check_shortage(
        three("")[..2].to_vec(),
        ZoneRule::Spread,
        "never two replicas on one node: 3 data nodes are needed, 2 can take one (node 104 is silent)",
    );
    check_shortage(three("a"), ZoneRule::Spread, "3 regions are needed, 1 have room");
    check_shortage(three(""), local("y"), "3 nodes in zone \"y\" are needed, 0 have room");
    check_shortage(three(""), ZoneRule::Primary("y".into()), "1 nodes in zone \"y\"");
    let mut mistrusted = three("");
    mistrusted.iter_mut().for_each(|c| c.trusted = false);
    check_shortage(mistrusted, ZoneRule::Spread, "at least one replica in a trusted region");
}

#[test]
fn replicas_stay_in_one_raft_set_when_it_can_hold_them() {
    let candidates: Vec<Candidate> = (104..116).map(|id| candidate(id, "", "x")).collect();
    let topology = Topology { role: Role::Data, candidates, excluded: Vec::new() };
    let policy = PlacementPolicy { replicas: 3, zone: ZoneRule::Spread, choices: 8 };
    for seed in 0..50 {
        let replicas = place(&policy, &topology, seed).unwrap();
        let sets: BTreeSet<u32> = replicas.iter().map(|r| r.node.0 / 4).collect();
        assert_eq!(sets.len(), 1, "{replicas:?}");
    }
}

#[test]
fn the_least_used_node_and_disk_are_chosen() {
    let mut candidates: Vec<Candidate> = (100..104).map(|id| candidate(id, "", "x")).collect();
    candidates[1].utilization = 500;
    candidates[0].disks = vec![
        DiskChoice { id: DiskId(1), utilization: 300, replicas: 0 },
        DiskChoice { id: DiskId(2), utilization: 100, replicas: 0 },
    ];
    let topology = Topology { role: Role::Data, candidates, excluded: Vec::new() };
    let policy = PlacementPolicy { replicas: 3, zone: ZoneRule::Spread, choices: 8 };
    let replicas = place(&policy, &topology, 1).unwrap();
    assert!(replicas.iter().all(|replica| replica.node != NodeId(101)));
    assert_eq!(replicas[0], crate::core::Replica { node: NodeId(100), disk: DiskId(2) });
}

#[test]
fn the_first_partitions_are_led_by_one_node_each() {
    let world = World::new(3, 3);
    let placed = place::place_many(world.view(), Role::Meta, 3, 3).unwrap();
    let firsts: Vec<NodeId> = placed.iter().map(|replicas| replicas[0].node).collect();
    assert_eq!(firsts, nodes(&[101, 102, 103]));
}

#[test]
fn a_full_or_failed_disk_takes_nothing() {
    let mut world = World::new(3, 3);
    world.heartbeats();
    let full = |d: &mut milpa_types::Disk| d.free_bytes = 1000;
    let fenced = |d: &mut milpa_types::Disk| d.fenced = Some("EIO".to_owned());
    for change in [full as fn(&mut milpa_types::Disk), fenced] {
        let mut changed = disk(1);
        change(&mut changed);
        let node = world.log.state.node(NodeId(104)).unwrap().clone();
        let heartbeat = Heartbeat {
            node: node.id,
            incarnation: node.incarnation,
            disks: vec![changed],
            memory_bytes: 0,
            meta: Vec::new(),
            data: Vec::new(),
        };
        world.loads.hear(heartbeat, 1);
        let error = place::place_many(world.view(), Role::Data, 3, 1).unwrap_err().to_string();
        assert!(error.contains("node 104 has no disk with room"), "{error}");
    }
}

// ---- creation ----

#[test]
fn a_volume_is_ready_when_its_replicas_are_there_and_lead() {
    let mut world = World::new(3, 3);
    let volume = world.log.volume("home", 3, 6);
    world.heartbeats();
    assert_eq!(lacking(world.view(), volume).len(), 9);
    let first = world.pass();
    assert_eq!(first.steps.len(), 9 * 3, "each replica is created once");
    assert!(first.commands.is_empty());
    let second = world.pass();
    let ready = CommandV1::VolumeReady { volume };
    assert!(second.commands.contains(&ready), "{:?}", second.commands);
    assert_eq!(world.log.state.volume(volume).unwrap().state, VolumeState::Ready);
    world.settle();
}

#[test]
fn a_node_that_does_not_do_it_is_named() {
    let mut world = World::new(3, 3);
    let volume = world.log.volume("home", 1, 1);
    world.down.insert(NodeId(105));
    let register = CommandV1::RegisterNode(Registration {
        node: Some(NodeId(105)),
        ..registration(Role::Data, 1001)
    });
    world.log.apply(register);
    world.loads.register(NodeId(105), 0);
    world.wait(1000);
    let lacks = lacking(world.view(), volume);
    assert_eq!(lacks.len(), 1);
    assert_eq!((lacks[0].node, lacks[0].partition), (NodeId(105), PartitionId(2)));
    // After the silence period the volume is usable without it: two members are enough.
    world.wait(4000);
    assert_eq!(world.log.state.volume(volume).unwrap().state, VolumeState::Ready);
}

#[test]
fn memory_durability_reaches_the_data_nodes() {
    let mut world = World::new(3, 3);
    let volume = world.log.volume("home", 1, 1);
    let options = VolumeOptions { durability: Durability::Memory, ..VolumeOptions::default() };
    world.log.apply(CommandV1::SetVolumeOptions { volume, options });
    let plan = world.pass();
    let relaxed = plan
        .steps
        .iter()
        .filter(|step| matches!(step, Step::CreateData { create, .. } if create.relaxed));
    assert_eq!(relaxed.count(), 3);
    assert_eq!(plan.steps.iter().filter(|s| matches!(s, Step::SetOptions { .. })).count(), 3);
    world.settle();
}

// ---- silence and repair ----

#[test]
fn nobody_is_silent_before_a_whole_period_of_this_leader_has_passed() {
    let mut world = settled();
    // Another leader, at a later time of its own clock, hears nobody.
    world.loads = Loads::new(50_000);
    world.now_ms = 50_000 + world.policy.silence_period_ms - 1;
    assert_eq!(plan(world.view()), Plan::default());
    world.now_ms += 1;
    let silent = plan(world.view()).commands;
    assert_eq!(silent.len(), 6, "{silent:?}");
}

#[test]
fn a_silent_node_leaves_every_configuration_and_comes_back() {
    let mut world = settled();
    let lost = NodeId(104);
    world.down.insert(lost);
    world.wait(3000);
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Silent);
    for id in 4..=9 {
        let configuration = &world.data_record(id).configuration;
        assert_eq!(configuration.epoch, Epoch(2));
        assert_eq!(configuration.members, nodes(&[105, 106]), "partition {id}");
        assert!(configuration.members.contains(&configuration.primary));
    }
    // The lost primaries were dealt to both who are left.
    let primaries: BTreeSet<NodeId> =
        (4..=9).map(|id| world.data_record(id).configuration.primary).collect();
    assert_eq!(primaries.len(), 2);

    world.down.clear();
    world.wait(2000);
    for id in 4..=9 {
        let configuration = &world.data_record(id).configuration;
        assert_eq!(configuration.epoch, Epoch(3));
        assert_eq!(configuration.members.len(), 3);
        assert_ne!(configuration.primary, lost, "it lacks bytes: it does not order appends");
    }
    world.settle();
}

#[test]
fn no_configuration_falls_below_two_members() {
    let mut world = settled();
    world.down.extend(nodes(&[104, 105]));
    world.wait(4000);
    for id in 4..=9 {
        // Both fell silent in one pass: one alone has no majority and must not go on.
        assert_eq!(world.data_record(id).configuration.members.len(), 3);
    }
    world.down.remove(&NodeId(105));
    world.wait(2000);
    assert_eq!(world.data_record(4).configuration.members, nodes(&[105, 106]));
}

#[test]
fn the_next_epoch_waits_until_the_one_before_was_adopted() {
    let mut world = settled();
    world.down.insert(NodeId(104));
    world.now_ms += 3000;
    world.heartbeats();
    // Two passes whose steps nobody takes.
    for _ in 0..2 {
        let plan = plan(world.view());
        plan.commands.into_iter().for_each(|command| drop(world.log.apply(command)));
    }
    assert_eq!(world.data_record(4).configuration.epoch, Epoch(2));
    world.down.clear();
    world.heartbeats();
    for _ in 0..2 {
        let plan = plan(world.view());
        plan.commands.into_iter().for_each(|command| drop(world.log.apply(command)));
    }
    assert_eq!(world.data_record(4).configuration.epoch, Epoch(2), "2 is not adopted: no 3 yet");
    let steps = plan(world.view()).steps;
    let configures = steps.iter().filter(|step| matches!(step, Step::Configure { .. }));
    assert_eq!(configures.count(), 6, "epoch 2 is asked for again and again");
    world.settle();
    assert_eq!(world.data_record(4).configuration.epoch, Epoch(3));
}

#[test]
fn a_fenced_disk_leaves_like_a_silent_node() {
    let mut world = settled();
    let mut fenced = disk(1);
    fenced.fenced = Some("flush failed: EIO".to_owned());
    world.log.register(Registration {
        node: Some(NodeId(106)),
        disks: vec![fenced],
        ..registration(Role::Data, 1002)
    });
    world.settle();
    assert_eq!(world.data_record(4).configuration.members, nodes(&[104, 105]));
}

#[test]
fn a_lost_data_replica_leaves_and_joins_again_blank() {
    let mut world = settled();
    world.data.get_mut(&NodeId(105)).unwrap().clear();
    world.settle();
    let record = world.data_record(4);
    assert_eq!((record.configuration.epoch, record.configuration.members.len()), (Epoch(3), 3));
    assert!(world.data[&NodeId(105)].contains_key(&PartitionId(4)));
}

#[test]
fn a_lost_meta_replica_is_reported_and_never_created_a_second_time() {
    let mut world = settled();
    world.meta.get_mut(&NodeId(102)).unwrap().remove(&PartitionId(1));
    world.wait(4000);
    let plan = world.pass();
    assert!(plan.steps.is_empty(), "{:?}", plan.steps);
    assert_eq!(
        plan.problems,
        ["meta partition 1 of volume \"home\" has lost its replica on node 102"]
    );
}

// ---- growth ----

#[test]
fn data_partitions_are_added_when_all_are_nearly_full() {
    let mut world = settled();
    let fill = |world: &mut World, ids: std::ops::RangeInclusive<u64>, bytes: u64, extents: u64| {
        for held in world.data.values_mut() {
            for (_, report) in held.iter_mut().filter(|(id, _)| ids.contains(&id.0)) {
                (report.allocated_bytes, report.extents) = (bytes, extents);
            }
        }
    };
    let target = world.policy.data_partition_bytes;
    fill(&mut world, 4..=8, target / 10 * 9, 0);
    world.settle();
    assert_eq!(world.log.state.data_partitions().count(), 6, "one still has room");
    fill(&mut world, 9..=9, 0, 100_000);
    world.settle();
    assert_eq!(world.log.state.data_partitions().count(), 12);
}

#[test]
fn growth_that_cannot_be_placed_is_a_problem_for_the_operator() {
    let mut world = settled();
    world.down.insert(NodeId(104));
    world.wait(4000);
    for report in world.data.values_mut().flat_map(|held| held.values_mut()) {
        report.allocated_bytes = 1 << 40;
    }
    let plan = world.pass();
    assert_eq!(plan.problems.len(), 1);
    assert!(plan.problems[0].contains("node 104 is silent"), "{:?}", plan.problems);
}

#[test]
fn a_meta_partition_past_its_threshold_is_split_and_the_next_slot_opens() {
    let mut world = settled();
    let statistics = MetaStatistics {
        inodes: 11_000_000,
        dentries: 11_000_000,
        inode_highest: InodeId(12_000_000),
        ..MetaStatistics::default()
    };
    for held in world.meta.values_mut() {
        held.entry(PartitionId(1)).and_modify(|report| report.statistics = statistics);
    }
    world.settle();
    let first = world.log.state.meta_partition(PartitionId(1)).unwrap();
    assert_eq!(first.split, SplitState::Cut { end: InodeId(12_000_000 + (1 << 20)) });
    let slots: Vec<MetaSlot> = world.log.state.meta_partitions().map(|m| m.slot).collect();
    assert_eq!(slots, [0, 1, 2, 3].map(MetaSlot));
    let volume = world.log.state.volume(VolumeId(1)).unwrap();
    let open = growth::open_partitions(world.view(), volume);
    assert_eq!(open, [10, 3, 2].map(PartitionId), "the last slot first");
}

#[test]
fn the_end_of_a_split_stays_inside_the_slot() {
    let world = settled();
    let record = world.log.state.meta_partition(PartitionId(2)).unwrap();
    let CommandV1::BeginSplit { end, .. } = growth::begin_split(world.view(), record) else {
        panic!()
    };
    assert_eq!(end, InodeId(MetaSlot(1).first_inode().0 + (1 << 20)));
    let mut narrow = settled();
    narrow.policy.split_delta_inodes = u64::MAX;
    let record = narrow.log.state.meta_partition(PartitionId(2)).unwrap();
    let CommandV1::BeginSplit { end, .. } = growth::begin_split(narrow.view(), record) else {
        panic!()
    };
    assert_eq!(end, InodeId(MetaSlot(1).end_inode().0 - 1));
}

// ---- removal ----

#[test]
fn a_deleted_volume_disappears_from_all_nodes_also_from_one_that_was_away() {
    let mut world = settled();
    world.down.insert(NodeId(106));
    world.wait(4000);
    world.log.apply(CommandV1::DeleteVolume { volume: VolumeId(1) });
    world.settle();
    assert_eq!(world.log.state.removals().count(), 6, "node 106 has not confirmed");
    world.down.clear();
    world.settle();
    assert_eq!(world.log.state.removals().count(), 0);
    assert!(
        world.data.values().all(BTreeMap::is_empty) && world.meta.values().all(BTreeMap::is_empty)
    );
}

#[test]
fn strays_are_removed_only_when_their_id_was_given_here() {
    let mut world = settled();
    let report = world.data[&NodeId(104)][&PartitionId(4)].clone();
    let held = world.data.get_mut(&NodeId(104)).unwrap();
    held.insert(
        PartitionId(500),
        DataPartitionReport { partition: PartitionId(500), ..report.clone() },
    );
    assert_eq!(world.pass(), Plan::default(), "an unknown id is left alone");
    world.log.apply(CommandV1::DeleteVolume { volume: VolumeId(1) });
    world.settle();
    // A creation that crossed the deletion arrives late.
    world.data.get_mut(&NodeId(104)).unwrap().insert(PartitionId(4), report);
    let plan = world.pass();
    assert_eq!(
        plan.steps,
        [Step::Delete { node: NodeId(104), kind: PartitionKind::Data, partition: PartitionId(4) }]
    );
}

// ---- everything together ----

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Nodes come and go at will: epochs rise by one, nothing is refused (`pass` asserts it), and
    /// when all are back every partition has all its members again.
    #[test]
    fn any_sequence_of_outages_heals(
        outages in proptest::collection::vec((104_u32..109, any::<bool>(), 1_u64..20), 1..30)
    ) {
        let mut world = World::new(3, 5);
        world.log.volume("home", 3, 6);
        world.settle();
        for (node, goes_down, passes) in outages {
            if goes_down {
                world.down.insert(NodeId(node));
            } else {
                world.down.remove(&NodeId(node));
            }
            world.wait(passes * 200);
        }
        world.down.clear();
        world.wait(8000);
        prop_assert_eq!(world.pass(), Plan::default());
        for record in world.log.state.data_partitions() {
            prop_assert_eq!(record.configuration.members.len(), record.replicas.len());
            let adopted: Vec<&Configuration> =
                world.loads.data_reports(record).map(|(_, r)| &r.configuration).collect();
            prop_assert_eq!(adopted, vec![&record.configuration; 3]);
        }
    }
}
