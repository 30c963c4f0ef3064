//! Replicas whose states differ.

use milpa_wire::meta::StateMark;

use super::*;

const FIRST: PartitionId = PartitionId(1);

/// What the replicas of the first partition report, by node.
fn report(world: &mut World, marks: [&[(u64, u64)]; 3]) {
    let members = world.log.state.meta_partition(FIRST).unwrap().members.clone();
    for (node, marks) in members.iter().zip(marks) {
        let report = world.meta.get_mut(node).unwrap().get_mut(&FIRST).unwrap();
        let mark = |(index, hash): &(u64, u64)| StateMark { format: 1, index: *index, hash: *hash };
        report.marks = marks.iter().map(mark).collect();
    }
    world.now_ms += 200;
    world.heartbeats();
}

/// The members that are refused, by their place, and whether an operator hears of it.
fn refused(world: &World) -> (Vec<usize>, bool) {
    let plan = plan(world.view());
    let members = &world.log.state.meta_partition(FIRST).unwrap().members;
    let refused = plan.steps.iter().filter_map(|step| match step {
        Step::Refuse { node, partition: FIRST, .. } => members.iter().position(|m| m == node),
        _ => None,
    });
    (refused.collect(), plan.problems.iter().any(|problem| problem.contains("DIFFER")))
}

#[track_caller]
fn check(marks: [&[(u64, u64)]; 3], expected: (&[usize], bool)) {
    let mut world = settled();
    report(&mut world, marks);
    let (found, is_told) = refused(&world);
    assert_eq!((found.as_slice(), is_told), expected);
}

#[test]
fn who_differs_from_most_is_refused() {
    // Equal, or not comparable: another index each.
    check([&[(8, 1), (9, 2)], &[(8, 1)], &[(8, 1), (12, 3)]], (&[], false));
    check([&[(8, 1)], &[(9, 2)], &[(10, 3)]], (&[], false));
    // One against two.
    check([&[(8, 1)], &[(8, 1)], &[(8, 7)]], (&[2], true));
    check([&[(8, 1), (9, 5)], &[(8, 6), (10, 5)], &[(8, 1)]], (&[1], true));
    // One against one, or three ways: nobody knows.
    check([&[(8, 1)], &[(8, 2)], &[(9, 3)]], (&[], true));
    check([&[(8, 1)], &[(8, 2)], &[(8, 3)]], (&[], true));
}

#[test]
fn states_in_different_formats_are_not_compared() {
    let mut world = settled();
    report(&mut world, [&[(8, 1)], &[(8, 1)], &[(8, 2)]]);
    assert_eq!(refused(&world), (vec![2], true));
    let node = world.log.state.meta_partition(FIRST).unwrap().members[2];
    world.meta.get_mut(&node).unwrap().get_mut(&FIRST).unwrap().marks[0].format = 2;
    world.heartbeats();
    assert_eq!(refused(&world), (vec![], false));
}

/// The refused replica is gone from its node's report; it is made again on another node.
#[test]
fn a_refused_replica_is_replaced() {
    let mut world = World::new(4, 3);
    world.log.volume("home", 3, 6);
    world.settle();
    report(&mut world, [&[(8, 1)], &[(8, 1)], &[(8, 2)]]);
    let before = world.log.state.meta_partition(FIRST).unwrap().members.clone();
    world.settle();
    let after = &world.log.state.meta_partition(FIRST).unwrap().members;
    assert!(after.len() == 3 && !after.contains(&before[2]), "{before:?} {after:?}");
}
