//! The first members of a group: the order they are named in, and how one of them leaves.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use super::world::world;
use crate::types::Role;

/// The story (simulation, seed 203): the founder led, was taken out of the group at once, and went on
/// asking for votes, as a founder does. The others had not heard of the removal and gave them; the
/// library panics when somebody wins who is no member.
#[test]
fn a_founder_that_is_removed_at_once_asks_for_no_votes() {
    let group = PartitionId(1);
    let mut removed_in_time = 0;
    for seed in 0..300 {
        let mut world = world(seed, 3);
        world.flush_ms_max = 1;
        world.found(1, &[0, 1, 2]);
        world.until("a leader", |world| world.leader(1) == Some(0));
        let led_ms = world.now_ms;
        let change = MemberChange { voters: vec![NodeId(1), NodeId(2)], learners: vec![] };
        world.until("it may propose", |world| {
            let multi = world.multi(0);
            multi.groups.get_mut(&group).unwrap().hand_over_no_more();
            multi.propose_change(group, &change, &[], Bytes::new()).is_ok()
        });
        world.until("the removal", |world| {
            !world.multi(0).status(group).unwrap().members.contains(NodeId(0))
        });
        let left_ms = world.now_ms;
        // The first tick of a leader ends its founding; the world's first step was one.
        let tick = |ms: u64| (ms - 1001) / RaftConfig::default().tick_ms;
        removed_in_time += u64::from(tick(led_ms) == tick(left_ms));
        while world.now_ms < left_ms + 300 {
            world.step();
            let role = world.multi(0).status(group).unwrap().role;
            assert!(
                matches!(role, Role::Leader | Role::Follower),
                "seed {seed}: {role:?} {} ms after it was removed",
                world.now_ms - left_ms
            );
        }
    }
    assert!(removed_in_time > 3, "{removed_in_time}");
}

/// The story (simulation, seeds 178 and 185): the manager names members in any order, the library
/// in that of its sets. A follower was offered a snapshot with sorted members, found the founders'
/// order in its file, and took it for another one, for ever.
#[test]
fn a_snapshot_is_described_with_the_members_it_is_offered_with() {
    let mut world = world(5, 3);
    world.keep_entries = 20;
    world.found(1, &[2, 0, 1]);
    world.run(300);
    let group = PartitionId(1);
    assert_eq!(world.leader(1), Some(2));
    world.crash(1, 3000);
    for n in 0..60 {
        world.propose(1, format!("{n}"));
        world.run(5);
    }
    let index = world.nodes[2].machines[&group].index;
    let described = world.multi(2).describe(group, index).unwrap();
    assert_eq!(described.members, Members::new(&[NodeId(0), NodeId(1), NodeId(2)], &[]));
    world.until("a snapshot is offered", |world| {
        world.nodes[1].fetching.iter().any(|(_, install, _)| {
            assert_eq!(install.snapshot.members, described.members);
            true
        })
    });
}

/// The story (simulation, seed 6356): a leader took itself out while more of its entries were on their
/// way; the library panics when one who is no member commits. Nothing is put behind such a change.
#[test]
fn nothing_is_put_behind_a_change_that_has_not_taken_effect() {
    let group = PartitionId(1);
    for seed in 0..50 {
        let mut world = world(seed, 3);
        world.found(1, &[0, 1, 2]);
        world.until("a leader", |world| world.leader(1) == Some(0));
        world.run(50);
        let change = MemberChange { voters: vec![NodeId(1), NodeId(2)], learners: vec![] };
        world.multi(0).propose(group, Bytes::from_static(b"before")).unwrap();
        world.multi(0).groups.get_mut(&group).unwrap().hand_over_no_more();
        world.multi(0).propose_change(group, &change, &[], Bytes::new()).unwrap();
        for _ in 0..200 {
            if world.multi(0).status(group).unwrap().members.contains(NodeId(0)) {
                let behind = world.multi(0).propose(group, Bytes::from_static(b"behind"));
                assert!(behind.is_err(), "seed {seed}: {behind:?}");
            }
            world.step();
        }
        assert!(!world.multi(0).status(group).unwrap().members.contains(NodeId(0)));
    }
}

/// The story (simulation, seed 2680 with lying disks): a learner had become a voter, and its log was the
/// newest when the leader was lost; after a restart it took itself for a learner, as the commit index was
/// not on its disk, and stood for no election. The third one could not win one.
#[test]
fn a_new_voter_knows_after_a_restart_that_it_is_one() {
    let group = PartitionId(1);
    for seed in 0..20 {
        let mut world = world(seed, 3);
        world.found(1, &[0, 1]);
        world.until("a leader", |world| world.leader(1) == Some(0));
        world.multi(2).create_group(group, &[], &[], false);
        world.nodes[2].machines.entry(group).or_default();
        let nodes = |list: &[u32]| list.iter().map(|&i| NodeId(i)).collect::<Vec<_>>();
        let mut before = None;
        for (voters, learners) in [(&[0, 1][..], &[2][..]), (&[0, 1, 2], &[])] {
            before = world.nodes[2].machines.get(&group).cloned();
            let change = MemberChange { voters: nodes(voters), learners: nodes(learners) };
            let wanted = Members::new(&change.voters, &change.learners);
            world.multi(0).propose_change(group, &change, &[], Bytes::new()).unwrap();
            world.until("the change", |world| {
                let members =
                    |i: usize| world.nodes[i].multi.as_ref()?.status(group).map(|s| s.members);
                [0, 2].iter().all(|&i| members(i).as_ref() == Some(&wanted))
            });
        }
        world.run(50);
        world.crash(2, 10);
        // Its state machine had not been flushed since.
        world.nodes[2].machines.insert(group, before.unwrap());
        world.run(20);
        let members = world.multi(2).status(group).unwrap().members;
        assert!(members.voters.contains(&NodeId(2)), "seed {seed}: {members:?}");
    }
}
