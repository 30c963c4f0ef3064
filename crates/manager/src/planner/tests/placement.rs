//! Goal: the placement rules hold for any topology, and what can be placed is placed.

use std::collections::BTreeSet;

use milpa_types::{DiskId, NodeId, Role};
use milpa_wire::manager::{Heartbeat, SlowPeer};
use proptest::prelude::*;

use super::{World, nodes};
use crate::core::tests::disk;
use crate::planner::place::DiskChoice;
use crate::planner::*;

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
        disks: vec![DiskChoice { id: DiskId(1), utilization: 0, replicas: 0, making: 0 }],
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
        let topology = Topology { candidates, excluded: Vec::new(), ..Topology::empty(Role::Data) };
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
            Topology { candidates: candidates.collect(), excluded: Vec::new(), ..Topology::empty(Role::Meta) };
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
    let topology = Topology { candidates, excluded, ..Topology::empty(Role::Data) };
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
    let topology = Topology { candidates, excluded: Vec::new(), ..Topology::empty(Role::Data) };
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
        DiskChoice { id: DiskId(1), utilization: 300, replicas: 0, making: 0 },
        DiskChoice { id: DiskId(2), utilization: 100, replicas: 0, making: 0 },
    ];
    let topology = Topology { candidates, excluded: Vec::new(), ..Topology::empty(Role::Data) };
    let policy = PlacementPolicy { replicas: 3, zone: ZoneRule::Spread, choices: 8 };
    let replicas = place(&policy, &topology, 1).unwrap();
    assert!(replicas.iter().all(|replica| replica.node != NodeId(101)));
    assert_eq!(replicas[0], crate::core::Replica { node: NodeId(100), disk: DiskId(2) });
}

#[test]
fn what_is_being_made_weighs_when_more_is_placed() {
    let candidates: Vec<Candidate> = (100..104).map(|id| candidate(id, "", "x")).collect();
    let mut topology = Topology { candidates, excluded: Vec::new(), ..Topology::empty(Role::Data) };
    let second = DiskChoice { id: DiskId(2), utilization: 40, replicas: 0, making: 0 };
    topology.candidates[3].disks.push(second);
    let held = nodes(&[100, 101]);
    // Node 102 has less to keep, and so is the first; then 103 has two disks for two.
    topology.candidates[3].replicas = 3;
    let mut made = Vec::new();
    for _ in 0..4 {
        let one = place::offers(&topology, (&held, &[]), 8, 1, |_| true).unwrap()[0].place;
        topology.count(&[one], None);
        topology.count_making(one);
        made.push((one.node.0, one.disk.0));
    }
    assert_eq!(made, [(102, 1), (103, 1), (103, 2), (102, 1)]);
    // One that is empty at first is no work for anybody.
    let policy = PlacementPolicy { replicas: 3, zone: ZoneRule::Spread, choices: 8 };
    let mut idle = topology.clone();
    idle.candidates.iter_mut().flat_map(|c| &mut c.disks).for_each(|disk| disk.making = 0);
    assert_eq!(place::place(&policy, &topology, 1), place::place(&policy, &idle, 1));
}

#[test]
fn tasks_that_are_under_way_count_as_being_made() {
    let mut world = World::new(3, 4);
    world.policy.dead_after_ms = 10_000;
    world.log.volume("home", 1, 2);
    world.settle();
    world.down.insert(NodeId(104));
    while world.log.state.tasks().count() < 2 {
        world.pass();
    }
    let topology = Topology::of(world.view(), Role::Data);
    let making: Vec<(u32, u64)> =
        topology.candidates.iter().map(|c| (c.node.0, c.disks[0].making)).collect();
    assert_eq!(making, [(105, 0), (106, 0), (107, 2)]);
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
            data_damaged: Vec::new(),
            slow_peers: Vec::new(),
            data: Vec::new(),
        };
        world.loads.hear(heartbeat, 1);
        let error = place::place_many(world.view(), Role::Data, 3, 1).unwrap_err().to_string();
        assert!(error.contains("node 104 has no disk with room"), "{error}");
    }
}

/// Two say that a third one is slow: it gets new partitions last. One alone may have a bad link.
#[test]
fn a_slow_node_takes_new_partitions_last() {
    let mut world = World::new(3, 4);
    let chosen = |world: &World| {
        let placed = place::place_many(world.view(), Role::Data, 3, 1).unwrap();
        placed[0].iter().any(|replica| replica.node == NodeId(104))
    };
    let mut say = |by: &[u32]| {
        world.heartbeats();
        for by in by {
            let node = world.log.state.node(NodeId(*by)).unwrap().clone();
            let slow_peers = vec![SlowPeer { node: NodeId(104), took_ms: 200 }];
            world.loads.hear(
                Heartbeat {
                    node: node.id,
                    incarnation: node.incarnation,
                    disks: node.disks,
                    memory_bytes: 0,
                    meta: Vec::new(),
                    data: Vec::new(),
                    data_damaged: Vec::new(),
                    slow_peers,
                },
                world.now_ms,
            );
        }
        let mut often = 0;
        for _ in 0..50 {
            world.now_ms += 1;
            often += u32::from(chosen(&world));
        }
        (often, crate::view::warnings(world.view(), &[]).join("; "))
    };
    let (usually, warnings) = say(&[105]);
    assert!(usually > 20 && warnings.is_empty(), "{usually} of 50; {warnings}");
    let (slow, warnings) = say(&[105, 106]);
    assert!(slow < usually / 2, "{slow}, else {usually} of 50");
    assert!(warnings.contains("node 104 at"), "{warnings}");
    assert!(
        warnings.contains("is slow: writes there take nodes 105, 106 up to 200 ms"),
        "{warnings}"
    );
}
