//! Members that are slow: who goes on without them, and when they are tried again (docs/decisions/0014).

use milpa_types::{NodeId, PartitionId};

use super::losses::adopt_unaligned;
use super::{World, nodes, settled};
use crate::core::CommandV1;
use crate::planner::health::{Place, data_place};

const SLOW: NodeId = NodeId(106);

/// How many of the partitions 4 to 9 have a member there.
fn memberships(world: &World, node: NodeId) -> usize {
    (4..=9).filter(|id| world.data_record(*id).configuration.members.contains(&node)).count()
}

fn warnings(world: &World) -> String {
    crate::view::warnings(world.view(), &[]).join("; ")
}

#[test]
fn partitions_go_on_without_a_slow_member_and_take_it_back() {
    let mut world = settled();
    assert_eq!(memberships(&world, SLOW), 6);
    world.slow.insert(SLOW);
    world.wait(4_000);
    assert_eq!(memberships(&world, SLOW), 0);
    let record = world.data_record(4);
    assert_eq!(record.configuration.members, nodes(&[104, 105]));
    assert_eq!(data_place(world.view(), record, SLOW), Place::Away, "nothing is made instead");
    assert_eq!(world.log.state.tasks().count(), 0);
    assert!(
        warnings(&world).contains("up to 200 ms, several times as long as elsewhere; partitions")
    );
    world.wait(60_000);
    assert_eq!(memberships(&world, SLOW), 0, "as long as it is slow");
    world.slow.clear();
    world.wait(2_000);
    assert_eq!(memberships(&world, SLOW), 6, "and no longer");
    assert!(!warnings(&world).contains("slow"), "{}", warnings(&world));
    // It is slow whenever it is written to.
    world.slow.insert(SLOW);
    world.wait(4_000);
    world.slow.clear();
    world.wait(7_000);
    assert_eq!(memberships(&world, SLOW), 0);
    assert!(warnings(&world).contains("was slow: partitions go on without it"));
    world.wait(4_000);
    assert_eq!(memberships(&world, SLOW), 6);
}

/// It orders all appends itself, so nobody else has measured it.
#[test]
fn a_slow_member_that_only_itself_knows_of_is_gone_on_without_as_long_as_it_says_so() {
    let mut world = settled();
    world.slow_know_alone = true;
    world.slow.insert(SLOW);
    world.wait(4_000);
    assert_eq!(memberships(&world, SLOW), 0);
    world.wait(60_000);
    assert_eq!(memberships(&world, SLOW), 0, "as long as it is slow");
    world.slow.clear();
    world.wait(2_000);
    assert_eq!(memberships(&world, SLOW), 6, "and no longer");
}

#[test]
fn when_two_of_three_are_slow_all_stay() {
    let mut world = settled();
    world.slow.extend(nodes(&[105, 106]));
    world.wait(60_000);
    assert_eq!((memberships(&world, NodeId(105)), memberships(&world, SLOW)), (6, 6));
}

/// A node is silent when another one becomes slow.
#[test]
fn a_slow_member_stays_where_it_is_needed() {
    let mut world = settled();
    world.down.insert(NodeId(104));
    world.wait(4_000);
    world.slow.insert(SLOW);
    world.wait(10_000);
    assert_eq!(world.data_record(4).configuration.members, nodes(&[105, 106]));
    world.down.clear();
    world.wait(4_000);
    assert_eq!(world.data_record(4).configuration.members, nodes(&[104, 105]));
}

/// Simulation, seed 801888: one had joined 0.2 s before and had still to be filled when a slow one went, and the disk of
/// the only one that had everything failed then.
#[test]
fn a_slow_member_stays_until_the_others_are_known_to_have_everything() {
    let mut world = settled();
    let record = |world: &World| world.data_record(4).configuration.members.clone();
    adopt_unaligned(&mut world, 4, 2, &[105, 106]);
    adopt_unaligned(&mut world, 4, 3, &[104, 105, 106]);
    world.slow.insert(SLOW);
    world.wait(10_000);
    assert_eq!((record(&world), memberships(&world, SLOW)), (nodes(&[104, 105, 106]), 1));
    let replicas = world.data.values_mut().filter_map(|held| held.get_mut(&PartitionId(4)));
    replicas.for_each(|report| report.unaligned = 0);
    world.wait(2_000);
    assert_eq!(record(&world), nodes(&[104, 105]));
}

/// It is out, and one of the two that went on dies and is lost.
#[test]
fn a_slow_node_comes_back_at_once_where_it_is_needed() {
    let mut world = settled();
    world.slow.insert(SLOW);
    world.wait(4_000);
    world.data.get_mut(&NodeId(105)).unwrap().remove(&PartitionId(4));
    let members = |world: &World| world.data_record(4).configuration.members.clone();
    let mut seen = vec![members(&world)];
    while seen.last() != Some(&nodes(&[104, 105, 106])) && world.now_ms < 60_000 {
        world.pass();
        seen.push(members(&world));
    }
    seen.dedup();
    let steps: [&[u32]; 4] = [&[104, 105], &[104], &[104, 106], &[104, 105, 106]];
    assert_eq!(seen, steps.map(nodes));
    world.wait(2_000);
    assert_eq!(members(&world), nodes(&[104, 105]), "and goes again");
    assert_eq!(memberships(&world, SLOW), 0);
}

/// One of four data nodes is slow, and held off.
fn slow_among_four() -> World {
    let mut world = World::new(3, 4);
    world.log.volume("home", 3, 6);
    world.settle();
    world.slow.insert(SLOW);
    world.wait(4_000);
    world
}

/// Found by a reader: with the slow one out, the drained one was needed for ever.
#[test]
fn a_drain_ends_though_another_node_is_slow() {
    let mut world = slow_among_four();
    world.log.apply(CommandV1::DrainNode { node: NodeId(104), drains: true, begun_unix_ms: 1 });
    world.wait(60_000);
    assert_eq!(memberships(&world, NodeId(104)), 0);
    assert!((4..=9).all(|id| world.data_record(id).configuration.members.len() >= 2));
}

#[test]
fn what_a_slow_node_held_is_made_elsewhere_when_it_dies() {
    let mut world = slow_among_four();
    assert_eq!(memberships(&world, SLOW), 0);
    world.down.insert(SLOW);
    world.wait(world.policy.dead_after_ms + 60_000);
    assert!((4..=9).all(|id| world.data_record(id).configuration.members.len() == 3));
    assert_eq!(memberships(&world, SLOW), 0);
}
