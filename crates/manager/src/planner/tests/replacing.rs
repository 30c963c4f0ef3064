//! Goal: what is lost for good, or has to go, is replaced without a copy too few at any moment; what
//! comes back in the middle of it does no harm; and the limits hold. Of replicas of meta partitions alone:
//! [`super::meta_replicas`].

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{
    Deletion, DiskId, ManagerError, NodeId, NodeState, PartitionId, Role, VolumeId, VolumeOptions,
};

use super::{World, nodes};
use crate::core::tests::{disk, registration};
use crate::core::{Applied, NewDataPartition, NewMetaPartition, Registration, Replica, TaskReason};
use crate::planner::health::Place;
use crate::planner::*;

/// The volume "home": meta partitions 1 to 3 on the first three meta nodes (101 to 103), data
/// partitions 4 to 9 on the first three data nodes, and more nodes of both kinds.
pub(super) fn roomy(meta: u32, data: u32) -> World {
    let mut world = World::new(meta, data);
    world.policy.dead_after_ms = 10_000;
    world.log.volume("home", 3, 6);
    world.settle();
    world
}

fn first_data(world: &World) -> NodeId {
    world.log.state.nodes().find(|node| node.role == Role::Data).unwrap().id
}

#[track_caller]
pub(super) fn check_whole_without(world: &World, gone: NodeId) {
    for record in world.log.state.data_partitions() {
        let configuration = &record.configuration;
        assert_eq!(configuration.members.len(), 3, "partition {}", record.id);
        assert!(!record.is_configured(gone) && record.disk_of(gone).is_none());
        assert_eq!(record.replicas.len(), 3);
    }
    for record in world.log.state.meta_partitions() {
        assert_eq!((record.members.len(), record.joining), (3, None), "partition {}", record.id);
        assert!(!record.members.contains(&gone));
    }
    assert_eq!(world.log.state.tasks().count(), 0);
}

#[test]
fn a_silent_node_is_waited_for_and_a_dead_one_is_replaced() {
    let mut world = roomy(3, 5);
    let lost = first_data(&world);
    world.down.insert(lost);
    world.wait(8_000);
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Silent);
    assert_eq!(world.log.state.tasks().count(), 0, "it may come back");
    world.wait(4_000);
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Dead);
    world.settle();
    check_whole_without(&world, lost);
    // Back with what it held: its places are taken, so its bytes go.
    world.down.clear();
    world.settle();
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Active);
    assert!(world.data[&lost].is_empty());
}

#[test]
fn a_new_replica_is_a_learner_before_it_is_a_member() {
    let mut world = roomy(3, 5);
    let lost = first_data(&world);
    world.down.insert(lost);
    let mut learned = BTreeSet::new();
    for _ in 0..200 {
        world.pass();
        for record in world.log.state.data_partitions() {
            let founders = nodes(&[104, 105, 106]);
            let configuration = &record.configuration;
            learned.extend(configuration.learners.iter().map(|node| (record.id, *node)));
            for member in configuration.members.iter().filter(|node| !founders.contains(node)) {
                assert!(learned.contains(&(record.id, *member)), "{member} was not filled");
            }
        }
    }
    assert_eq!(learned.len(), 6);
}

#[test]
fn a_learner_is_no_member_before_it_is_filled() {
    let mut world = roomy(3, 4);
    world.policy.repairs_per_node_max = 8;
    let lost = first_data(&world);
    world.down.insert(lost);
    let unfilled = |world: &mut World| {
        for report in world.data.values_mut().flat_map(|held| held.values_mut()) {
            report.unaligned = u64::from(report.configuration.learners == [NodeId(107)]);
        }
    };
    for _ in 0..200 {
        world.pass();
        unfilled(&mut world);
    }
    for record in world.log.state.data_partitions() {
        assert_eq!(record.configuration.members.len(), 2);
        assert_eq!(record.configuration.learners, nodes(&[107]));
        assert!(record.disk_of(lost).is_some(), "the old place stays until the new one is good");
    }
    world.down.clear();
    for _ in 0..50 {
        world.pass();
        unfilled(&mut world);
    }
    // The node is back before the copy was done: it is taken back, and the copy is dropped.
    for record in world.log.state.data_partitions() {
        assert_eq!(record.configuration.members.len(), 3);
        assert!(record.configuration.members.contains(&lost));
        assert_eq!(record.replicas.len(), 3);
    }
    assert!(world.data[&NodeId(107)].is_empty(), "half a copy is not kept");
}

/// Found by a reader: a damaged replica was in no report. When its partition had been made whole elsewhere, or deleted,
/// nobody had it deleted: its files stayed, and the log of its disk was never cut again.
#[test]
fn a_damaged_data_replica_is_deleted_when_it_is_not_needed() {
    let mut world = roomy(3, 4);
    let (node, partition) = (first_data(&world), PartitionId(4));
    let is_deletion = |step: &Step| matches!(step, Step::Delete { node: at, .. } if *at == node);
    world.down.insert(node);
    world.wait(world.policy.dead_after_ms + world.policy.silence_period_ms);
    let held = world.data.remove(&node).unwrap_or_default();
    world.damaged_at(node).extend(held.into_keys());
    assert!(world.damaged_at(node).contains(&partition));
    world.down.clear();
    for _ in 0..100 {
        let record = world.log.state.data_partition(partition).unwrap();
        let holds = |node: &NodeId| world.data[node].contains_key(&partition);
        let is_whole = record.configuration.members.iter().filter(|it| holds(it)).count() >= 3;
        let is_deleted = world.pass().steps.iter().any(is_deletion);
        assert!(is_whole || !is_deleted, "it may hold the only copy");
    }
    world.settle();
    assert_eq!(*world.damaged_at(node), [].into());

    let other = world.data_record(4).configuration.members[0];
    world.data.get_mut(&other).unwrap().remove(&partition);
    world.damaged_at(other).insert(partition);
    world.log.apply(CommandV1::DeleteVolume { volume: VolumeId(1) });
    world.settle();
    assert_eq!(*world.damaged_at(other), [].into());
    assert_eq!(world.log.state.removals().count(), 0);
}

/// Simulation, seed 806530: a founder was damaged before the managers had noted that it was there. It was to be created
/// again and again, which its node refuses, as it may hold the only copy; and nobody went on without it.
#[test]
fn a_founder_that_is_damaged_at_once_is_made_again() {
    let mut world = World::new(3, 3);
    world.log.volume("home", 3, 6);
    let partition = PartitionId(4);
    let node = world.data_record(4).configuration.members[1];
    while !world.data.get(&node).is_some_and(|held| held.contains_key(&partition)) {
        world.pass();
    }
    assert!(!world.data_record(4).created.contains(&node));
    world.data.get_mut(&node).unwrap().remove(&partition);
    world.damaged_at(node).insert(partition);
    world.settle();
    assert_eq!(*world.damaged_at(node), [].into());
    assert_eq!(world.data_record(4).configuration.members.len(), 3);
    assert!(world.data[&node].contains_key(&partition));
}

/// What is left on a disk that was out, of a replica that was made again on another one of the same node.
#[test]
fn a_second_replica_on_one_node_is_deleted_once_its_partition_is_whole() {
    let mut world = roomy(3, 4);
    let (node, partition) = (first_data(&world), PartitionId(4));
    let other = world.data_record(4).configuration.members[1];
    world.down.insert(other);
    world.wait(2 * world.policy.silence_period_ms);
    world.damaged_at(node).insert(partition);
    let second = Deletion::Leftover { log_end: None };
    let deletes = |plan: Plan| {
        let deletion = |step: &Step| match step {
            Step::Delete { node: at, deletion, .. } if *at == node => Some(*deletion),
            _ => None,
        };
        plan.steps.iter().filter_map(deletion).collect::<Vec<_>>()
    };
    assert_eq!(deletes(world.pass()), []);
    world.down.clear();
    let mut deleted = Vec::new();
    for _ in 0..100 {
        deleted.extend(deletes(world.pass()));
    }
    assert_eq!(deleted, [second]);
    assert_eq!(*world.damaged_at(node), [].into());
    assert!(world.data[&node].contains_key(&partition));
}

#[test]
fn fewest_copies_come_first_and_the_limits_hold() {
    let mut world = World::new(3, 6);
    world.policy.dead_after_ms = 10_000;
    (world.policy.repairs_max, world.policy.repairs_per_node_max) = (3, 2);
    world.log.volume("home", 1, 12);
    world.settle();
    let lost = first_data(&world);
    world.down.insert(lost);
    let mut most = 0;
    for _ in 0..400 {
        world.pass();
        let mut by_node: BTreeMap<NodeId, usize> = BTreeMap::new();
        for task in world.log.state.tasks() {
            *by_node.entry(task.place.node).or_default() += 1;
        }
        most = most.max(world.log.state.tasks().count());
        assert!(by_node.values().all(|count| *count <= 2), "{by_node:?}");
    }
    assert_eq!(most, 3);
    check_whole_without(&world, lost);
}

/// The story: two of the four replicas that a dead node had held were made on one of four nodes that
/// had less to keep than the others, and who wrote there had a p99 of 2.4 times the quiet one.
#[test]
fn replicas_are_made_where_fewest_are_being_made() {
    let mut world = World::new(3, 5);
    world.policy.dead_after_ms = 10_000;
    world.log.volume("home", 1, 2);
    let replicas: Vec<Replica> =
        nodes(&[105, 106, 107]).into_iter().map(|node| Replica { node, disk: DiskId(1) }).collect();
    world.log.apply(CommandV1::CreateVolume {
        name: "other".to_owned(),
        options: VolumeOptions::default(),
        meta: vec![NewMetaPartition { members: nodes(&[101, 102, 103]) }],
        data: vec![NewDataPartition { replicas }; 3],
    });
    world.settle();
    let lost = first_data(&world);
    world.down.insert(lost);
    let mut made_on = BTreeSet::new();
    for _ in 0..200 {
        world.pass();
        let (replicas, owners): (Vec<_>, BTreeSet<_>) =
            world.log.state.tasks().map(|task| (task.id, task.place.node)).unzip();
        assert_eq!(replicas.len(), owners.len(), "two are made on one of {owners:?}");
        made_on.extend(owners);
    }
    assert_eq!(made_on, nodes(&[107, 108]).into_iter().collect());
    check_whole_without(&world, lost);
}

/// The story: of four replicas that a lost node had, the last found only nodes that made one already, while
/// one made none; the cluster took twice as long to be whole.
#[test]
fn what_a_lost_node_had_is_made_by_all_others_alike() {
    let mut world = World::new(3, 5);
    world.policy.dead_after_ms = 10_000;
    let held = [[104, 105, 106], [104, 105, 107], [104, 106, 108], [104, 107, 108]];
    let on = |nodes: [u32; 3]| NewDataPartition {
        replicas: nodes.map(|n| Replica { node: NodeId(n), disk: DiskId(1) }).to_vec(),
    };
    world.log.apply(CommandV1::CreateVolume {
        name: "home".to_owned(),
        options: VolumeOptions::default(),
        meta: vec![NewMetaPartition { members: nodes(&[101, 102, 103]) }],
        data: held.map(on).to_vec(),
    });
    world.settle();
    world.down.insert(NodeId(104));
    while world.log.state.tasks().count() == 0 {
        world.pass();
    }
    let makers: BTreeSet<NodeId> = world.log.state.tasks().map(|task| task.place.node).collect();
    assert_eq!(makers, nodes(&[105, 106, 107, 108]).into_iter().collect());
    world.settle();
    check_whole_without(&world, NodeId(104));
}

#[test]
fn a_drained_node_serves_until_it_is_empty_and_can_then_be_removed() {
    let mut world = roomy(4, 4);
    for leaving in [first_data(&world), NodeId(101)] {
        let drain = CommandV1::DrainNode { node: leaving, drains: true, begun_unix_ms: 1 };
        drain::check(world.view(), leaving, None).unwrap();
        world.log.apply(drain);
        let refused = world.log.apply(CommandV1::RemoveNode { node: leaving });
        assert!(matches!(refused, Applied::Refused(_)), "it still holds replicas");
        for _ in 0..200 {
            world.pass();
            for record in world.log.state.data_partitions() {
                assert!(record.configuration.members.len() >= 3, "a copy too few");
            }
        }
        check_whole_without(&world, leaving);
        assert!(world.data.get(&leaving).is_none_or(BTreeMap::is_empty));
        assert!(world.meta.get(&leaving).is_none_or(BTreeMap::is_empty));
        assert_eq!(world.log.apply(CommandV1::RemoveNode { node: leaving }), Applied::Done);
        assert!(world.log.state.node(leaving).is_none());
    }
    world.down.extend(nodes(&[101, 105]));
    world.settle();
}

#[test]
fn who_is_lost_is_replaced_before_who_still_serves() {
    let mut world = roomy(5, 3);
    world.down.insert(NodeId(102));
    world.wait(4_000);
    world.log.apply(CommandV1::DrainNode { node: NodeId(101), drains: true, begun_unix_ms: 1 });
    world.log.apply(CommandV1::SetNodeState { node: NodeId(102), state: NodeState::Dead });
    for _ in 0..200 {
        world.pass();
        for record in world.log.state.meta_partitions() {
            let has = |node| record.members.contains(&NodeId(node));
            assert!(has(101) || !has(102), "{:?}", record.members);
        }
    }
    check_whole_without(&world, NodeId(101));
    check_whole_without(&world, NodeId(102));
}

/// The story (seeds 732, 739, 753 of the simulation): one of two members got a new disk and joined as another
/// node. What it had been counted as silent for minutes, the third one was back, and the partition stood still.
#[test]
fn a_node_whose_server_was_set_up_anew_is_lost_at_once() {
    let mut world = roomy(3, 3);
    world.policy.dead_after_ms = 1_000_000;
    let (away, lost) = (NodeId(104), NodeId(105));
    let address = world.log.state.node(lost).unwrap().address;
    let anew = Registration { address, ..registration(Role::Data, 77) };
    assert!(matches!(world.log.apply(CommandV1::RegisterNode(anew)), Applied::Registered(_)));
    world.pass();
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Active, "it is heard");
    world.down.insert(away);
    world.wait(4_000);
    assert_eq!(world.data_record(4).configuration.members, nodes(&[105, 106]));
    world.down.insert(lost);
    world.wait(4_000);
    assert_eq!(world.log.state.node(lost).unwrap().state, NodeState::Dead);
    assert_eq!(world.data_record(4).configuration.members.first(), Some(&NodeId(106)));
    world.down.remove(&away);
    world.settle();
    check_whole_without(&world, lost);
}

#[test]
fn a_drain_that_cannot_end_is_refused_with_the_rule() {
    let world = roomy(3, 3);
    let node = first_data(&world);
    let refused = drain::check(world.view(), node, None).unwrap_err();
    assert!(matches!(refused, ManagerError::NoPlacement { .. }));
    let text = refused.to_string();
    assert!(text.contains("never two replicas on one node"), "{text}");
    let meta = drain::check(world.view(), NodeId(101), None).unwrap_err().to_string();
    assert!(meta.contains("another replica of meta partition 1"), "{meta}");
    let stranger = drain::check(world.view(), NodeId(7), None).unwrap_err().to_string();
    assert!(stranger.contains("there is no node 7"), "{stranger}");
    let no_disk = drain::check(world.view(), node, Some(DiskId(9))).unwrap_err().to_string();
    assert_eq!(no_disk, "refused: node 104 has no disk 9");
}

#[test]
fn no_node_is_removed_that_the_copies_need() {
    let mut world = roomy(3, 4);
    let remove = |world: &mut World, node| world.log.apply(CommandV1::RemoveNode { node });
    let check = |applied: Applied, part: &str| match applied {
        Applied::Refused(error) => assert!(error.to_string().contains(part), "{error}"),
        other => panic!("{other:?}"),
    };
    world.down.extend(nodes(&[104, 105, 101, 102]));
    world.wait(4_000);
    check(remove(&mut world, NodeId(104)), "never goes below 2");
    check(remove(&mut world, NodeId(101)), "has no majority without node 101");
    check(remove(&mut world, NodeId(106)), "is in service and holds 6 replicas");
    check(remove(&mut world, NodeId(99)), "there is no node 99");
    world.down.remove(&NodeId(105));
    world.wait(4_000);
    // One that is gone for good, and is not waited for: repaired at once, then forgotten.
    assert_eq!(remove(&mut world, NodeId(104)), Applied::Done);
    world.pass();
    world.pass();
    assert!(
        world.log.state.tasks().all(|task| task.reason == TaskReason::NodeRemoved(NodeId(104)))
    );
    assert!(world.log.state.tasks().count() > 0);
    world.settle();
    assert!(world.log.state.node(NodeId(104)).is_none(), "nothing refers to it any more");
    // Its process starts again with the old directory.
    let again = Registration { node: Some(NodeId(104)), ..registration(Role::Data, 1000) };
    check(world.log.apply(CommandV1::RegisterNode(again)), "it was removed");
}

#[test]
fn a_failed_disk_is_replaced_at_once_and_a_drained_one_is_emptied() {
    let mut world = roomy(3, 5);
    let mut failed = disk(1);
    failed.fenced = Some("flush failed: EIO".to_owned());
    world.log.register(Registration {
        node: Some(NodeId(106)),
        disks: vec![failed],
        ..registration(Role::Data, 1002)
    });
    world.settle();
    check_whole_without(&world, NodeId(106));
    world.log.apply(CommandV1::DrainDisk {
        node: NodeId(105),
        disk: DiskId(1),
        drains: true,
        begun_unix_ms: 1,
    });
    world.settle();
    check_whole_without(&world, NodeId(105));
    assert_eq!(world.log.state.node(NodeId(105)).unwrap().state, NodeState::Active);
}

/// Found by a reader: a node whose disk had failed counted as a copy, as it was heard, and the node that was removed, and
/// is refused for ever, was half of the majority.
#[test]
fn a_node_is_not_removed_that_is_needed_beside_one_whose_disk_has_failed() {
    let mut world = roomy(3, 3);
    let stopped = NodeId(106);
    world.down.insert(stopped);
    world.heartbeats();
    let mut failed = disk(1);
    failed.fenced = Some("flush failed: EIO".to_owned());
    let node = Some(NodeId(105));
    world.log.register(Registration {
        node,
        disks: vec![failed],
        ..registration(Role::Data, 1001)
    });
    world.wait(4_000);
    let refused = removal::check(world.view(), stopped).unwrap_err().to_string();
    assert!(refused.contains("in service without node 106"), "{refused}");
}

/// Found by a reader: partitions that had lost two of three copies counted as room, and the volume took nothing though
/// there were nodes with room.
#[test]
fn a_volume_whose_partitions_all_stand_still_gets_others_and_not_without_end() {
    let mut world = roomy(3, 3);
    for address in 2_000..2_003 {
        world.log.register(registration(Role::Data, address));
    }
    world.down = nodes(&[105, 106]).into_iter().collect();
    world.wait(world.policy.dead_after_ms + 4_000);
    world.settle();
    let takes = |world: &World| {
        let record = world.log.state.volume_by_name("home").unwrap();
        let view = crate::view::volume(world.view(), record);
        view.data.iter().map(|partition| partition.takes_extents).collect::<Vec<bool>>()
    };
    let before = takes(&world);
    assert_eq!(before.iter().filter(|takes| !**takes).count(), 6, "those stand still");
    assert!(before.len() > 6);
    world.wait(20_000);
    assert_eq!(takes(&world), before);
}

/// Found by a reader: the copy that a node still had was filled, and it was written down that it was on another disk: when
/// its own failed, nobody noticed.
#[test]
fn an_old_copy_is_made_whole_on_the_disk_where_it_is() {
    let mut world = World::new(3, 4);
    world.policy.dead_after_ms = 10_000;
    for id in [104, 105, 106, 107].map(NodeId) {
        let address = 1000 + id.0 - 104;
        let disks = vec![disk(1), disk(2)];
        world.log.register(Registration {
            node: Some(id),
            disks,
            ..registration(Role::Data, address)
        });
    }
    world.log.volume("home", 3, 6);
    world.settle();
    let lost = NodeId(104);
    let before = world.data[&lost].clone();
    assert!(!before.is_empty());
    world.down.insert(lost);
    world.wait(14_000);
    world.settle();
    check_whole_without(&world, lost);
    // A node that it was replaced by dies, and it is back with what it had.
    world.down.insert(NodeId(107));
    world.wait(14_000);
    world.data.insert(lost, before.clone());
    world.down.remove(&lost);
    world.settle();
    let mut checked = 0;
    for record in world.log.state.data_partitions() {
        let (Some(at), Some(report)) = (record.disk_of(lost), before.get(&record.id)) else {
            continue;
        };
        assert_eq!(at, report.disk, "partition {}", record.id);
        checked += 1;
    }
    assert!(checked > 0);
}

#[test]
fn a_task_that_is_late_or_whose_node_dies_is_given_up_and_planned_anew() {
    let mut world = roomy(3, 5);
    world.down.insert(NodeId(104));
    world.wait(14_000);
    world.settle();
    let target = NodeId(107);
    let holders = world.log.state.data_partitions().filter(|r| r.disk_of(target).is_some()).count();
    assert!(holders > 0);
    // Both newcomers die while the first is gone: what is left has two copies, and waits.
    world.down.insert(target);
    world.wait(14_000);
    world.settle();
    check_whole_without(&world, target);
}

#[test]
fn primaries_and_leaders_move_back_to_a_node_that_returns() {
    let mut world = roomy(3, 3);
    world.policy.balances = true;
    world.settle();
    let lost = first_data(&world);
    for gone in [lost, NodeId(101)] {
        world.down.insert(gone);
    }
    world.wait(4_000);
    world.down.clear();
    world.settle();
    let mut primaries: BTreeMap<NodeId, usize> = BTreeMap::new();
    for record in world.log.state.data_partitions() {
        *primaries.entry(record.configuration.primary).or_default() += 1;
    }
    assert_eq!(primaries, nodes(&[104, 105, 106]).into_iter().map(|node| (node, 2)).collect());
    let leaders: BTreeSet<NodeId> = (world.log.state.meta_partitions())
        .map(|record| world.loads.meta_leader(record).unwrap())
        .collect();
    assert_eq!(leaders.len(), 3);
}

/// Else the lead would go back and forth: the managers even out who leads, and who is slow leads least.
#[test]
fn who_was_relieved_of_a_lead_is_not_given_it_back_at_once() {
    let mut world = roomy(3, 3);
    world.policy.balances = true;
    world.settle();
    let slow = NodeId(101);
    world.down.insert(slow);
    world.wait(4_000);
    world.down.clear();
    // It is slow for the others too, and was found so in one.
    let first = world.log.state.meta_partitions().next().unwrap().id;
    world.declining.insert((slow, first));
    world.settle();
    let led = |world: &World| {
        let leaders = world.log.state.meta_partitions().map(|r| world.loads.meta_leader(r));
        leaders.filter(|leader| *leader == Some(slow)).count()
    };
    assert_eq!(led(&world), 0);
    world.declining.clear();
    world.settle();
    assert_eq!(led(&world), 1);
}

#[test]
fn a_place_is_what_its_node_and_disk_are() {
    let mut world = roomy(3, 3);
    let place = |world: &World| health::data_place(world.view(), world.data_record(4), NodeId(104));
    assert_eq!(place(&world), Place::Good);
    world.down.insert(NodeId(104));
    world.wait(4_000);
    assert_eq!(place(&world), Place::Away);
    world.wait(10_000);
    assert_eq!(place(&world), Place::Bad(TaskReason::NodeDead(NodeId(104))));
    world.down.clear();
    world.wait(4_000);
    world.log.apply(CommandV1::DrainNode { node: NodeId(104), drains: true, begun_unix_ms: 1 });
    assert_eq!(place(&world), Place::Bad(TaskReason::NodeDraining(NodeId(104))));
    world.log.apply(CommandV1::DrainNode { node: NodeId(104), drains: false, begun_unix_ms: 2 });
    assert_eq!(place(&world), Place::Good);
}
