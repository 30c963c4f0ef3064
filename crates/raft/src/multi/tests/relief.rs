//! Leaders that are slow, and do not fail.

use milpa_types::{NodeId, PartitionId};

use super::world::{World, world};

const GROUP: PartitionId = PartitionId(1);

/// Three voters, of which the first leads and is made slow; something is proposed each 20 ms. Gives the world
/// after so many milliseconds, and for how many of them somebody had a lease.
fn run(seed: u64, ms: u64, make_slow: impl FnOnce(&mut World)) -> (World, u64) {
    let mut world = world(seed, 3);
    world.found(1, &[0, 1, 2]);
    world.run(1_000);
    assert_eq!(world.leader(1), Some(0));
    make_slow(&mut world);
    let mut served = 0;
    for at in 0..ms {
        if at % 20 == 0 {
            let _ = world.propose(1, format!("{at}"));
        }
        world.step();
        let now_ms = world.now_ms;
        let serves = |node: &super::world::Node| {
            node.multi.as_ref().is_some_and(|multi| multi.lease_valid(GROUP, now_ms))
        };
        served += u64::from(world.nodes.iter().any(serves));
    }
    (world, served)
}

/// Found by a reader: no follower misses a leader whose heartbeats arrive, if late. It had no lease any more, and
/// led on: leading managers answered nobody. (And a second one: where an answer took longer than the next question,
/// it counted for nothing.)
#[test]
fn a_leader_behind_a_slow_link_is_relieved() {
    for seed in 0..20 {
        let (slow, ms) = (NodeId(0), if seed % 2 == 0 { 250 } else { 600 });
        let (world, served) = run(seed, 20_000, |world| world.slow_links = [(slow, ms)].into());
        assert_ne!(world.leader(1), Some(0), "seed {seed}");
        // It takes three seconds to be sure, and one to elect.
        assert!(served > 14_500, "seed {seed}: {served}");
        world.check();
    }
}

/// The library hands out what is on the leader's own disk.
#[test]
fn a_leader_with_a_slow_disk_is_relieved() {
    for seed in 0..20 {
        let slow = NodeId(0);
        let (mut world, _) = run(seed, 10_000, |world| world.slow_disks = [(slow, 600)].into());
        assert_ne!(world.leader(1), Some(0), "seed {seed}");
        let at = world.propose(1, "quick".to_owned()).unwrap();
        world.run(200);
        let leader = world.leader(1).unwrap();
        let applied = world.multi(leader).status(GROUP).unwrap().applied;
        assert!(applied >= at.index, "seed {seed}: {applied} of {at:?}");
        world.check();
    }
}

/// Nothing would be won, and perhaps nobody elected: a vote takes as long as an election may.
#[test]
fn where_all_are_slow_the_lead_stays() {
    for seed in 0..5 {
        let all = |world: &mut World| {
            world.slow_links = (0..3).map(|node| (NodeId(node), 110)).collect();
        };
        let (mut world, served) = run(seed, 30_000, all);
        assert_eq!((world.leader(1), served < 2_000), (Some(0), true), "seed {seed}");
        assert_eq!(world.multi(0).status(GROUP).unwrap().term, 2, "seed {seed}");
        world.check();
    }
}

/// Links alone do not tell: an election takes a flush of each, and longer than a candidate waits.
#[test]
fn where_all_disks_are_slow_somebody_leads() {
    for seed in 0..5 {
        let all = |world: &mut World| {
            world.slow_disks = [900, 600, 600]
                .into_iter()
                .enumerate()
                .map(|(i, ms)| (NodeId(i as u32), ms))
                .collect();
        };
        let (world, served) = run(seed, 30_000, all);
        assert_eq!((world.leader(1), served), (Some(0), 30_000), "seed {seed}");
        world.check();
    }
}

/// Where nothing is written no flush comes that would be quick: a slow one of long ago does not count for ever.
#[test]
fn a_slow_flush_of_long_ago_keeps_nobody_from_relieving() {
    let mut world = world(8, 3);
    world.found(1, &[0, 1, 2]);
    world.run(1_000);
    world.slow_disks = (1..3).map(|node| (NodeId(node), 600)).collect();
    world.propose(1, "slowly".to_owned()).unwrap();
    world.run(5_000);
    assert_eq!(world.leader(1), Some(0));
    world.slow_disks.clear();
    // Not at once: nobody is to miss a heartbeat.
    for ms in (50..=250).step_by(50) {
        world.slow_links = [(NodeId(0), ms)].into();
        world.run(1_000);
    }
    world.until("another leader", |world| world.leader(1).is_some_and(|leader| leader != 0));
    world.check();
}

/// A node that is as slow as a busy disk makes it keeps the lead.
#[test]
fn a_leader_that_is_a_little_slower_leads_on() {
    let (mut world, served) = run(7, 30_000, |world| {
        world.slow_links.insert(NodeId(0), 50);
        world.slow_disks.insert(NodeId(0), 60);
    });
    assert_eq!((world.leader(1), served), (Some(0), 30_000));
    assert_eq!(world.multi(0).status(GROUP).unwrap().term, 2);
}
