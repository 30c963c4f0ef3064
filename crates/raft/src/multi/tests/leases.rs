//! Who may answer reads: leases, what ends them, and reads that ask a majority.

use milpa_types::{NodeId, PartitionId};

use super::super::*;
use super::world::world;
use crate::types::{ReadReady, Role};

#[test]
fn a_paused_leader_does_not_serve_reads_when_it_wakes() {
    let mut world = world(4, 3);
    let group = PartitionId(1);
    world.found(1, &[0, 1, 2]);
    world.run(400);
    let now_ms = world.now_ms;
    assert!(world.multi(0).lease_valid(group, now_ms));
    world.nodes[0].paused_until_ms = u64::MAX;
    world.until("another leader", |world| world.leader(1).is_some_and(|leader| leader != 0));
    // It has seen nothing yet, neither a tick nor a message: only the clock tells it.
    assert_eq!(world.multi(0).status(group).unwrap().role, Role::Leader);
    let now_ms = world.now_ms;
    assert!(!world.multi(0).lease_valid(group, now_ms));
    let leader = world.leader(1).unwrap();
    world.run(300);
    let now_ms = world.now_ms;
    assert!(world.multi(leader).lease_valid(group, now_ms));
}

/// Goal: at no moment do two nodes hold the lease of a group. Method: cut, pause and restart at
/// random, and ask all nodes each millisecond.
#[test]
fn never_two_leases() {
    let mut served = 0;
    for seed in 0..20 {
        let mut world = world(100 + seed, 3);
        world.loss_percent = 5;
        world.found(1, &[0, 1, 2]);
        world.run(200);
        for ms in 0..6000_u64 {
            world.step();
            if ms % 700 == 0 {
                world.cut.clear();
                let (a, b) = (world.draw(3) as u32, world.draw(3) as u32);
                world.cut.insert((NodeId(a), NodeId(b)));
                let i = world.draw(3) as usize;
                match world.draw(3) {
                    0 if world.nodes[i].multi.is_some() => world.crash(i, 20),
                    1 => world.nodes[i].paused_until_ms = world.now_ms + 600,
                    _ => {
                        if let Some(leader) = world.leader(1) {
                            world.multi(leader).transfer_leader(PartitionId(1), NodeId(i as u32));
                        }
                    }
                }
            }
            let now_ms = world.now_ms;
            let holders = world.nodes.iter().filter(|node| {
                node.multi.as_ref().is_some_and(|m| m.lease_valid(PartitionId(1), now_ms))
            });
            let count = holders.count();
            assert!(count <= 1, "seed {seed} at {now_ms}");
            served += count;
        }
    }
    // A leader that failed to hand over has none for the rest of its term.
    assert!(served > 20 * 1500, "{served}");
}

#[test]
fn a_lease_ends_with_a_transfer_and_reads_go_on_by_index() {
    let mut world = world(5, 3);
    let group = PartitionId(1);
    world.found(1, &[0, 1, 2]);
    world.run(400);
    assert!(world.multi(0).transfer_leader(group, NodeId(2)));
    let now_ms = world.now_ms;
    assert!(!world.multi(0).lease_valid(group, now_ms));
    world.until("the transfer", |world| world.leader(1) == Some(2));
    world.run(100);
    assert!(matches!(
        world.multi(0).read_index(group, 7),
        Err(ProposeError::NotLeader { leader: Some(NodeId(2)), .. })
    ));
    world.multi(2).read_index(group, 7).unwrap();
    world.run(50);
    let commit = world.multi(2).status(group).unwrap().commit;
    assert_eq!(world.reads, [(NodeId(2), ReadReady { group, context: 7, index: commit })]);
}

/// The story (simulation, seed 502796): a leader was to hand over, and the disk of who was to lead failed. It went on
/// without a lease, and no reader was answered any more.
#[test]
fn a_leader_that_could_not_hand_over_has_a_lease_again() {
    for seed in 0..20 {
        let mut world = world(200 + seed, 3);
        let group = PartitionId(1);
        world.found(1, &[0, 1, 2]);
        world.run(400);
        world.crash(2, 1 << 40);
        // A flush may take longer than the attempt, and the disk has always something to write.
        world.flush_ms_max = 1_500;
        world.propose(1, "before".to_owned()).unwrap();
        world.step();
        assert!(world.multi(0).transfer_leader(group, NodeId(2)));
        world.flush_ms_max = 20;
        let term = world.multi(0).status(group).unwrap().term;
        world.until("a lease", |world| {
            let now_ms = world.now_ms;
            let _ = world.propose(1, format!("{now_ms}"));
            world.multi(0).lease_valid(group, now_ms)
        });
        assert_eq!(world.multi(0).status(group).unwrap().term, term + 1, "of another term");
        world.propose(1, "more".to_owned()).unwrap();
        world.run(3_000);
        assert_eq!(world.multi(0).status(group).unwrap().term, term + 1, "and of no third one");
        world.check();
    }
}
