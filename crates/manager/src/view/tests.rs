//! Goal: what clients are told, and when they are told that it changed.

use milpa_types::{NodeId, PartitionId};

use super::*;
use crate::core::CommandV1;
use crate::planner::tests::World;

fn settled() -> World {
    let mut world = World::new(3, 3);
    world.log.volume("home", 3, 6);
    world.settle();
    world
}

fn home(world: &World) -> VolumeView {
    let record = world.log.state.volume_by_name("home").unwrap();
    volume(world.view(), record)
}

#[test]
fn the_version_rises_with_routes_and_not_with_loads() {
    let mut world = settled();
    let mut versions = Versions::new(3);
    let mut stamp = |world: &World| {
        let mut view = home(world);
        versions.stamp(&mut view);
        view.version
    };
    let first = stamp(&world);
    assert_eq!(first, (3 << 32) | 1);
    for report in world.data.values_mut().flat_map(|held| held.values_mut()) {
        (report.allocated_bytes, report.extents) = (1000, 10);
    }
    world.wait(400);
    assert_eq!(stamp(&world), first, "loads do not count");
    for report in world.meta.values_mut().flat_map(|held| held.values_mut()) {
        (report.leader, report.term) = (Some(NodeId(103)), 9);
    }
    world.wait(400);
    assert_eq!(stamp(&world), first + 1, "a leader does");
    world.down.insert(NodeId(104));
    world.wait(4000);
    assert_eq!(stamp(&world), first + 2, "an epoch does");
    let mut later = Versions::new(4);
    let mut view = home(&world);
    later.stamp(&mut view);
    assert!(view.version > first + 2, "another leader's versions are higher");
}

#[test]
fn a_partition_takes_extents_while_two_members_and_room_are_there() {
    let mut world = settled();
    assert!(home(&world).data.iter().all(|partition| partition.takes_extents));
    let target = world.policy.data_partition_bytes;
    for held in world.data.values_mut() {
        held.entry(PartitionId(4)).and_modify(|report| report.allocated_bytes = target);
    }
    world.wait(400);
    let taking = |world: &World| home(world).data.iter().filter(|p| p.takes_extents).count();
    assert_eq!(taking(&world), 5, "one is full");
    world.policy.disk_free_bytes_min = u64::MAX;
    let keep = world.loads.clone();
    for node in world.log.state.nodes().cloned().collect::<Vec<_>>() {
        let mut disks = node.disks.clone();
        disks[0].free_bytes = 1;
        let load = keep.node(node.id).unwrap();
        world.loads.hear(
            milpa_wire::manager::Heartbeat {
                node: node.id,
                incarnation: node.incarnation,
                disks,
                memory_bytes: 0,
                meta: load.meta.values().cloned().collect(),
                data_damaged: Vec::new(),
                slow_peers: Vec::new(),
                data: load.data.values().cloned().collect(),
            },
            world.now_ms,
        );
    }
    assert_eq!(taking(&world), 0, "the disks are full");
}

#[test]
fn full_partitions_go_on_while_no_other_can_be_had() {
    let mut world = settled();
    world.down.insert(NodeId(104));
    world.wait(4000);
    for report in world.data.values_mut().flat_map(|held| held.values_mut()) {
        report.allocated_bytes = world.policy.data_partition_bytes;
    }
    world.wait(400);
    assert!(home(&world).data.iter().all(|partition| partition.takes_extents));
}

#[test]
fn the_status_warns_of_what_an_operator_should_know() {
    let mut world = settled();
    world.down.insert(NodeId(104));
    world.wait(4000);
    let warnings = warnings(world.view(), &["a problem".to_owned()]);
    let has = |part: &str| warnings.iter().any(|warning| warning.contains(part));
    assert!(has("data node 104 at 127.0.0.1:11000 is silent"), "{warnings:?}");
    assert!(has("data partition 4 has 2 of 3 copies"), "{warnings:?}");
    assert!(has("a problem"), "{warnings:?}");
    assert!(
        has("nodes 104, 105, 106 share one physical disk and hold copies of the same 6"),
        "{warnings:?}"
    );
    assert_eq!(partitions_below_target(world.view()), 6);
    let rotten = world.data.get_mut(&NodeId(105)).and_then(|held| held.get_mut(&PartitionId(4)));
    rotten.expect("it has a replica").lost_blocks = 2;
    world.wait(400);
    let warnings = super::warnings(world.view(), &[]);
    let first = "data partition 4 has 2 blocks of 4 KiB that are whole on no replica";
    assert!(warnings.first().is_some_and(|warning| warning.starts_with(first)), "{warnings:?}");
    world.log.apply(CommandV1::DrainNode { node: NodeId(105), drains: true, begun_unix_ms: 1 });
    let drain_is_late = |world: &World| {
        let warnings = super::warnings(world.view(), &[]);
        warnings.iter().any(|warning| warning.starts_with("node 105 is drained, longer than"))
    };
    assert!(drain_is_late(&world));
    world.policy.drain_deadline_ms = 31_536_000_000_000;
    assert!(!drain_is_late(&world));
}
