//! Voters leave: not before those who stay can go on without them.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use super::world::{World, world};
use crate::message::{Body, Message};
use crate::types::{LogPosition, MemberChange};

const GROUP: PartitionId = PartitionId(1);

/// A group of so many nodes that the first one leads.
fn led(seed: u64, nodes: u32) -> World {
    let mut world = world(seed, nodes);
    world.found(1, &(0..nodes).collect::<Vec<_>>());
    world.until("a leader", |world| world.leader(1) == Some(0));
    world
}

/// Entries that take longer than who is only slow is behind.
fn propose_slowly(world: &mut World) {
    for i in 0..5 {
        world.propose(1, format!("{i}")).unwrap();
        world.run(500);
    }
}

/// The story (simulation, seed 37737): of three members one was behind when another one was to leave. The
/// change was committed by the one that left and the third one, whose disk lost it: nobody who stayed had
/// it, and who had it had left.
#[test]
fn nobody_leaves_before_a_majority_of_those_who_stay_have_what_is_committed() {
    let mut world = led(23, 3);
    let links =
        |i| [0, 1].into_iter().flat_map(move |j| [(NodeId(i), NodeId(j)), (NodeId(j), NodeId(i))]);
    world.cut.extend(links(2));
    propose_slowly(&mut world);
    let without = |left: u32| MemberChange {
        voters: [0, 1, 2].into_iter().filter(|i| *i != left).map(NodeId).collect(),
        learners: vec![],
    };
    let refused = world.multi(0).propose_change(GROUP, &without(1), &[], Bytes::new());
    assert!(matches!(refused, Err(ProposeError::Busy { .. })), "{refused:?}");
    world.cut.clear();
    world.until("the one behind has it all", |world| {
        world.multi(0).propose_change(GROUP, &without(1), &[], Bytes::new()).is_ok()
    });
    world.until("it has left", |world| {
        world.multi(2).status(GROUP).unwrap().members.voters == [NodeId(0), NodeId(2)]
    });
    world.check();
}

/// The one who stays is waited for however long it takes (simulation, seed 100074: after a few seconds it was not, and
/// who had the change was lost). If it is lost for good, it is not that one for whom another one leaves (seed 220751).
#[test]
fn who_leaves_waits_for_who_stays_and_does_not_go_for_who_is_lost() {
    let mut world = led(25, 3);
    world.crash(2, 1 << 40);
    propose_slowly(&mut world);
    let change = MemberChange { voters: vec![NodeId(0), NodeId(2)], learners: vec![] };
    for lost in [&[][..], &[NodeId(2)]].repeat(10) {
        let refused = world.multi(0).propose_change(GROUP, &change, lost, Bytes::new());
        assert!(matches!(refused, Err(ProposeError::Busy { .. })), "{refused:?}");
        world.run(1_000);
    }
}

/// It may be known as lost when it had all until then.
#[test]
fn nobody_leaves_for_who_is_known_to_be_lost_though_it_had_everything() {
    let mut world = led(29, 3);
    propose_slowly(&mut world);
    let change = MemberChange { voters: vec![NodeId(0), NodeId(2)], learners: vec![] };
    let refused = world.multi(0).propose_change(GROUP, &change, &[NodeId(2)], Bytes::new());
    assert!(matches!(refused, Err(ProposeError::Busy { .. })), "{refused:?}");
    world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
}

/// Found by a reader: of a group where nothing happened two of those who were to stay died together, and were still taken for
/// having all, as nothing had come since. The change stood in the leader's log, nobody who stayed could take it, and what
/// the leader and the one who was to leave could have gone on with waited behind it.
#[test]
fn nobody_leaves_before_a_majority_of_those_who_stay_are_heard() {
    let mut world = world(30, 4);
    world.found(1, &[0, 1, 2]);
    world.until("a leader", |world| world.leader(1) == Some(0));
    world.multi(3).create_group(GROUP, &[], &[], false);
    world.nodes[3].machines.entry(GROUP).or_default();
    let change = |voters: [u32; 3], learners: &[u32]| MemberChange {
        voters: voters.map(NodeId).to_vec(),
        learners: learners.iter().map(|&i| NodeId(i)).collect(),
    };
    world.multi(0).propose_change(GROUP, &change([0, 1, 2], &[3]), &[], Bytes::new()).unwrap();
    world.run(3_000);
    for node in [1, 3] {
        world.crash(node, 1 << 40);
    }
    world.run(1_200);
    let wanted = change([0, 1, 3], &[]);
    for _ in 0..10 {
        let refused = world.multi(0).propose_change(GROUP, &wanted, &[], Bytes::new());
        assert!(matches!(refused, Err(ProposeError::Busy { .. })), "{refused:?}");
        world.run(130);
    }
    let position = world.propose(1, "goes on".to_owned()).unwrap();
    world.until("it goes on", |world| world.acknowledged.contains_key(&(GROUP, position)));
    world.nodes[3].restart_ms = world.now_ms;
    world.until("with one of them it is begun", |world| {
        world.multi(0).propose_change(GROUP, &wanted, &[], Bytes::new()).is_ok()
    });
    world.until("the change", |world| {
        world.multi(0).status(GROUP).unwrap().members == Members::new(&wanted.voters, &[])
    });
    world.check();
}

/// Who is behind may leave at once, and does not keep others: of four one is lost for good, and any one leaves
/// (simulation, seed 50604: each was to leave before the other one).
#[test]
fn who_is_away_may_leave_and_keeps_nobody() {
    for left in [2, 3] {
        let mut world = led(24, 4);
        world.crash(3, 1 << 40);
        propose_slowly(&mut world);
        let voters = (0..4).filter(|i| *i != left).map(NodeId).collect();
        let change = MemberChange { voters, learners: vec![] };
        world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
        world.until("it has left", |world| {
            world.multi(1).status(GROUP).unwrap().members.voters == change.voters
        });
        world.check();
    }
}

/// The story (simulation, seeds 220534 and 220751): one of those who were to stay did not hear of the change, which was
/// committed by the leader and the one who left. The leader's disk lost it, and the one who left was not there any more.
#[test]
fn who_leaves_is_needed_until_a_majority_of_those_who_stay_have_the_change() {
    let mut world = led(26, 3);
    propose_slowly(&mut world);
    let links = [(0, 2), (2, 0)].map(|(from, to)| (NodeId(from), NodeId(to)));
    world.cut.extend(links);
    let change = MemberChange { voters: vec![NodeId(0), NodeId(2)], learners: vec![] };
    world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
    world.run(1_000);
    world.crash(0, 1 << 40);
    world.cut.clear();
    world.until("another leader", |world| matches!(world.leader(1), Some(1 | 2)));
    world.propose(1, "more".to_owned()).unwrap();
    world.run(1_000);
    world.check();
}

/// A leader that is to leave does not count itself among those who have the change.
#[test]
fn who_is_to_leave_hands_over_first() {
    let mut world = led(27, 3);
    propose_slowly(&mut world);
    let change = MemberChange { voters: vec![NodeId(1), NodeId(2)], learners: vec![] };
    let refused = world.multi(0).propose_change(GROUP, &change, &[], Bytes::new());
    assert!(matches!(refused, Err(ProposeError::Busy { .. })), "{refused:?}");
    world.until("another leader", |world| matches!(world.leader(1), Some(1 | 2)));
    world.until("it has left", |world| {
        let leader = world.leader(1).unwrap_or(1);
        let _ = world.multi(leader).propose_change(GROUP, &change, &[], Bytes::new());
        world.multi(1).status(GROUP).unwrap().members.voters == change.voters
    });
    world.check();
}

/// The story (simulation, seed 824209): nobody took over from a leader that was to leave. It committed that with one of the
/// two who stay, whose log was lost then: the other one waited for that one's vote, and who had the change had left.
#[test]
fn a_leader_that_leaves_commits_that_with_a_majority_of_those_who_stay() {
    for is_lost in [false, true] {
        let mut world = led(29, 3);
        propose_slowly(&mut world);
        let links = [(0, 2), (2, 0), (1, 2), (2, 1)];
        world.cut.extend(links.map(|(from, to)| (NodeId(from), NodeId(to))));
        let change = MemberChange { voters: vec![NodeId(1), NodeId(2)], learners: vec![] };
        world.multi(0).groups.get_mut(&GROUP).unwrap().hand_over_no_more();
        world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
        world.run(5_000);
        assert_eq!(world.leader(1), Some(0));
        assert_eq!(world.multi(1).status(GROUP).unwrap().members.voters.len(), 3, "it waits");
        if is_lost {
            world.multi(0).do_not_wait_for(GROUP, &[NodeId(2)]);
        } else {
            world.cut.clear();
        }
        world.until("it has left", |world| {
            world.multi(1).status(GROUP).unwrap().members.voters == change.voters
        });
        world.check();
    }
}

/// Who acknowledged the change and rejects it later has lost it, and does not count as one who has it.
#[test]
fn a_rejection_takes_back_what_was_acknowledged() {
    let mut world = led(30, 3);
    propose_slowly(&mut world);
    world.cut.extend([(0, 2), (2, 0)].map(|(from, to)| (NodeId(from), NodeId(to))));
    let change = MemberChange { voters: vec![NodeId(1), NodeId(2)], learners: vec![] };
    world.multi(0).groups.get_mut(&GROUP).unwrap().hand_over_no_more();
    world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
    world.run(1_000);
    world.cut = [(0, 1), (1, 0)].map(|(from, to)| (NodeId(from), NodeId(to))).into();
    world.network.clear();
    let status = world.multi(0).status(GROUP).unwrap();
    let hint = LogPosition { term: 0, index: status.commit };
    let rejected = Body::AppendRejected { index: status.last_index, hint, commit: status.commit };
    world.deliver(1, 0, Message::new(status.term, rejected));
    world.run(5_000);
    assert_eq!(world.leader(1), Some(0));
    assert_eq!(world.multi(0).status(GROUP).unwrap().members.voters.len(), 3, "it waits");
    world.cut.clear();
    world.until("it has left", |world| {
        world.multi(1).status(GROUP).unwrap().members.voters == change.voters
    });
    world.check();
}

/// Of three one is lost for good after the change was sent: the one who leaves is needed to commit it.
#[test]
fn who_is_lost_meanwhile_is_not_waited_for() {
    let mut world = led(28, 3);
    propose_slowly(&mut world);
    world.crash(2, 1 << 40);
    let change = MemberChange { voters: vec![NodeId(0), NodeId(2)], learners: vec![] };
    world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
    world.run(5_000);
    assert_eq!(world.multi(0).status(GROUP).unwrap().members.voters.len(), 3, "it waits");
    world.multi(0).do_not_wait_for(GROUP, &[NodeId(2)]);
    world.until("it has left", |world| {
        world.multi(0).status(GROUP).unwrap().members.voters == change.voters
    });
    world.check();
}

/// Found by a reader: a voter that had been away for a moment took both halves of a change with one flush, and all power
/// went before the next one. It came back into the configuration before the change, and was elected there by the one who
/// had left: what the others had acknowledged since was replaced.
#[test]
fn who_left_elects_nobody_who_has_seen_it_leave() {
    for seed in 0..20 {
        let mut world = world(seed, 4);
        world.found(1, &[0, 1, 2]);
        world.until("a leader", |world| world.leader(1) == Some(0));
        world.multi(3).create_group(GROUP, &[], &[], false);
        world.nodes[3].machines.entry(GROUP).or_default();
        let nodes = |list: &[u32]| list.iter().map(|&i| NodeId(i)).collect::<Vec<_>>();
        let members =
            |world: &mut World, i| world.multi(i).status(GROUP).map(|status| status.members);
        let joins = MemberChange { voters: nodes(&[0, 1, 2]), learners: nodes(&[3]) };
        world.multi(0).propose_change(GROUP, &joins, &[], Bytes::new()).unwrap();
        world.until("it learns", |world| {
            (0..4).all(|i| members(world, i).is_some_and(|it| it.learners == [NodeId(3)]))
        });
        world.run(600);
        let before = world.nodes[1].machines[&GROUP].clone();
        world.nodes[1].paused_until_ms = u64::MAX;
        let change = MemberChange { voters: nodes(&[0, 1, 3]), learners: vec![] };
        let wanted = Members::new(&change.voters, &[]);
        world.multi(0).propose_change(GROUP, &change, &[], Bytes::new()).unwrap();
        world.until("the change", |world| members(world, 0).as_ref() == Some(&wanted));
        let left = world.multi(0).status(GROUP).unwrap().last_index;
        world.cut.insert((NodeId(0), NodeId(1)));
        let position = world.propose(1, "acknowledged".into()).unwrap();
        world.until("it is acknowledged", |world| {
            world.acknowledged.contains_key(&(GROUP, position))
        });
        // Nobody is heard any more but by what is on its way.
        for other in [0, 2, 3] {
            world.crash(other, 1 << 40);
        }
        world.nodes[1].paused_until_ms = 0;
        world.until("one flush", |world| world.multi(1).status(GROUP).unwrap().persisted == left);
        world.crash(1, 10);
        // Its state machine had not been flushed since.
        world.nodes[1].machines.insert(GROUP, before);
        world.nodes[2].restart_ms = world.now_ms;
        world.cut.clear();
        world.run(3_000);
        assert_eq!(world.leader(1), None, "seed {seed}");
        world.nodes[3].restart_ms = world.now_ms;
        world.until("one leads who has it all", |world| world.leader(1) == Some(3));
        world.run(1_000);
        world.check();
        assert_eq!(members(&mut world, 1), Some(wanted));
    }
}
