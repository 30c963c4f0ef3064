//! Logs and snapshots that have rotted: found out, never trusted, and made good.

use std::collections::BTreeSet;
use std::time::Duration;

use milpa_types::{
    Deletion, FileKind, InodeId, LogEnd, MetaError, MetaSlot, NodeId, Timestamp, VolumeOptions,
};
use milpa_wire::meta::{CreateMetaPartition, MetaAnswer, MetaRequest};

use super::cluster::client::{Client, create};
use super::cluster::{Cluster, VOLUME, eventually};
use super::{FIRST, cluster_with_snapshots, report};

/// A node that does not lead has started with a rotten log.
fn cluster_with_a_damaged_replica() -> (Cluster, Client, usize) {
    let mut cluster = Cluster::start(1, |_| {});
    let mut client = cluster.client();
    client.open_session(&cluster, 1);
    create_in_batches(&cluster, &mut client);
    let rotten = (cluster.index_of(client.leader(FIRST)) + 1) % 3;
    cluster.kill(rotten);
    cluster.rot_log(rotten);
    cluster.restart(rotten);
    let damaged = report(&cluster, rotten).expect("it says that it has it");
    assert!(damaged.is_damaged && damaged.leader.is_none() && damaged.marks.is_empty());
    (cluster, client, rotten)
}

/// F5 on the Raft log of one node: what had been durable is unreadable, which is not a torn tail.
/// The replica takes no part any more, says so, and keeps what it has; the others go on.
#[test]
fn a_replica_with_a_rotten_log_neither_votes_nor_answers() {
    let mut cluster = Cluster::start(1, |_| {});
    let mut client = cluster.client();
    client.open_session(&cluster, 1);
    create_in_batches(&cluster, &mut client);
    let leader = cluster.index_of(client.leader(FIRST));
    let (rotten, other) = ((leader + 1) % 3, (leader + 2) % 3);
    cluster.kill(rotten);
    let log = cluster.rot_log(rotten);
    cluster.restart(rotten);
    let to = cluster.manager.address_of(cluster.nodes[rotten].id);
    let hash = MetaRequest::StateHash { partition: FIRST };
    assert_eq!(cluster.manager.ask(to, &hash), Err(MetaError::WrongPartition));
    client.create(&cluster, "with two of three");

    // It must not help another to a majority: it may have forgotten what it acknowledged.
    cluster.kill(other);
    let id = client.next_id(FIRST);
    let write = create(InodeId::ROOT, "alone", FileKind::File, None);
    let write = MetaRequest::Write { partition: FIRST, id, now: Timestamp(1), write };
    let to = cluster.manager.address_of(cluster.nodes[leader].id);
    let alone = client.try_once(to, &write, Duration::from_secs(2));
    assert!(alone.as_ref().is_err_and(|e| e.next() == milpa_types::Next::RetrySame), "{alone:?}");
    cluster.restart(other);
    assert!(matches!(client.call(&cluster, FIRST, &write), Ok(MetaAnswer::Entry(_))));
    assert_eq!(client.names(&cluster, InodeId::ROOT).len(), 102);
    assert!(log.exists(), "nothing of the rotten log was thrown away");
}

/// The story: a damaged replica was in no report, and deleting it was said to be done and was not. Its
/// log kept the node's log from being cut, long after another replica had taken its place.
#[test]
fn a_damaged_replica_shows_and_can_be_deleted() {
    let (mut cluster, mut client, rotten) = cluster_with_a_damaged_replica();
    let to = cluster.manager.address_of(cluster.nodes[rotten].id);
    let of = |log_end| {
        let deletion = Deletion::Leftover { log_end };
        MetaRequest::DeletePartition { partition: FIRST, deletion }
    };
    assert_eq!(
        cluster.manager.ask(to, &of(Some(LogEnd { term: 3, index: 7 }))),
        Err(MetaError::Busy),
        "of another one"
    );
    assert_eq!(cluster.manager.ask(to, &of(None)), Ok(MetaAnswer::Done));
    assert_eq!(report(&cluster, rotten), None);
    // The log has forgotten it: nothing of it comes back, nor is anything damaged.
    cluster.kill(rotten);
    cluster.restart(rotten);
    assert_eq!(report(&cluster, rotten), None);
    client.create(&cluster, "with two of three");
}

/// What managers do where no other node has room: the damaged one is taken out, deleted, and made again under
/// the id that had voted before. A restart in the middle of it does no harm.
#[test]
fn a_damaged_replica_is_made_again_where_it_was() {
    let (mut cluster, mut client, rotten) = cluster_with_a_damaged_replica();
    let ids: Vec<NodeId> = cluster.nodes.iter().map(|node| node.id).collect();
    let node = ids[rotten];
    let others: Vec<NodeId> = ids.iter().copied().filter(|id| *id != node).collect();
    let configure = |cluster: &Cluster, voters: &[NodeId], learners: &[NodeId]| {
        let (voters, learners) = (voters.to_vec(), learners.to_vec());
        let (of_these, with_these) = (voters.clone(), learners.clone());
        let request = MetaRequest::Configure { partition: FIRST, voters, learners };
        eventually("the members change", || {
            let ask = |id: &NodeId| cluster.manager.ask(cluster.manager.address_of(*id), &request);
            others.iter().any(|id| ask(id).is_ok()).then_some(())
        });
        // All of them know: before that the one that is killed next may be needed.
        let knows = |id: &NodeId| {
            let own = report(cluster, cluster.index_of(*id));
            own.is_some_and(|own| {
                BTreeSet::from_iter(own.voters) == BTreeSet::from_iter(of_these.clone())
                    && own.learners == with_these
            })
        };
        eventually("all know", || of_these.iter().all(knows).then_some(()));
    };
    let order = |cluster: &Cluster, request: &MetaRequest| {
        eventually("the node does it", || {
            cluster.manager.ask(cluster.manager.address_of(node), request).ok()
        });
    };
    configure(&cluster, &others, &[]);
    client.create(&cluster, "with two of two");
    let log_end = report(&cluster, rotten).unwrap().log_end;
    let deletion = Deletion::Leftover { log_end };
    let delete = MetaRequest::DeletePartition { partition: FIRST, deletion };
    order(&cluster, &delete);
    let create = CreateMetaPartition {
        partition: FIRST,
        volume: VOLUME,
        options: VolumeOptions::default(),
        slot: MetaSlot(0),
        members: ids.clone(),
        joins: true,
    };
    order(&cluster, &MetaRequest::CreatePartition(create));
    cluster.kill(rotten);
    cluster.restart(rotten);
    configure(&cluster, &others, &[node]);
    let note = cluster.nodes[rotten].config.directory.join("partitions/100/joining");
    eventually("it has caught up", || (!note.exists()).then_some(()));
    configure(&cluster, &ids, &[]);
    // The simulation, seed 378659: the word that came a second time, late, took a member of three.
    let late = cluster.manager.ask(cluster.manager.address_of(node), &delete);
    assert_eq!(late, Err(MetaError::Busy));
    cluster.equal_hashes(FIRST);

    // It counts: with it there is a majority.
    cluster.kill(cluster.index_of(others[0]));
    client.create(&cluster, "with it and one other");
    cluster.kill(rotten);
    cluster.restart(rotten);
    client.create(&cluster, "and after a restart");
    assert_eq!(client.names(&cluster, InodeId::ROOT).len(), 103);
}

/// F5 on the newest snapshot: the one before it and the log are enough.
#[test]
fn a_rotten_snapshot_is_replaced_by_its_predecessor_and_the_log() {
    let (mut cluster, mut client) = cluster_with_snapshots(350);
    let before = cluster.equal_hashes(FIRST);
    (0..3).for_each(|n| cluster.kill(n));
    for n in 0..3 {
        let newest = cluster.snapshots_of(n, FIRST).pop().unwrap();
        let mut bytes = std::fs::read(&newest).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&newest, bytes).unwrap();
    }
    (0..3).for_each(|n| cluster.restart(n));
    assert_eq!(client.names(&cluster, InodeId::ROOT).len(), 350);
    assert_eq!(cluster.equal_hashes(FIRST), before);
}

/// F5 on all snapshots of all replicas, while nobody reads them: without the scrub it is found when all start again,
/// and what the logs had of it is gone by then.
#[test]
fn snapshots_that_rot_at_rest_are_written_anew() {
    let (mut cluster, mut client) = cluster_with_snapshots(350);
    let before = cluster.equal_hashes(FIRST);
    let mut rotten = BTreeSet::new();
    for path in (0..3).flat_map(|n| cluster.snapshots_of(n, FIRST)) {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        rotten.insert(bytes);
    }
    // One that is being replaced may be gone by the time that it is read.
    let is_good = |path| std::fs::read(path).is_ok_and(|bytes| !rotten.contains(&bytes));
    for n in 0..3 {
        eventually("only good snapshots", || {
            let paths = cluster.snapshots_of(n, FIRST);
            (!paths.is_empty() && paths.into_iter().all(is_good)).then_some(())
        });
    }
    (0..3).for_each(|n| cluster.kill(n));
    (0..3).for_each(|n| cluster.restart(n));
    assert_eq!(client.names(&cluster, InodeId::ROOT).len(), 350);
    assert_eq!(cluster.equal_hashes(FIRST), before);
}

/// Found by a reader: a leader offered a snapshot that had rotted again and again, and in a group where nothing happens there
/// was never another one. Of three replicas two went on.
#[test]
fn a_leader_whose_snapshot_has_rotted_writes_another_for_who_is_behind() {
    let mut cluster = Cluster::start(1, |config| config.snapshot_after_entries = 100);
    let mut client = cluster.client();
    client.open_session(&cluster, 1);
    client.create(&cluster, "before");
    let leader = cluster.index_of(client.leader(FIRST));
    let away = (leader + 1) % 3;
    cluster.kill(away);
    for n in 0..350 {
        client.create(&cluster, &format!("f{n:03}"));
    }
    // On both that are up, whoever leads: with the last snapshot that was due, so that none follows by itself.
    let up = [leader, (leader + 2) % 3];
    for n in up {
        eventually("two snapshots, and no other one due", || {
            let paths = cluster.snapshots_of(n, FIRST);
            let newest =
                paths.last()?.file_name()?.to_str()?.split_once('-')?.0.parse::<u64>().ok()?;
            let applied = report(&cluster, n)?.applied;
            (paths.len() == 2 && applied > 350 && newest + 100 > applied).then_some(())
        });
        for path in cluster.snapshots_of(n, FIRST) {
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
    }
    cluster.restart(away);
    cluster.equal_hashes(FIRST);
    let is_aside = |n: usize| {
        let directory = cluster.nodes[n].config.directory.join("partitions/100");
        let mut names = std::fs::read_dir(directory).unwrap().map(|it| it.unwrap().path());
        names.any(|path| path.extension().is_some_and(|it| it == "damaged"))
    };
    assert!(up.into_iter().any(is_aside), "what has rotted is set aside");
}

/// A hundred files, in ten batches of every log at least: one that lags gets many entries in one.
fn create_in_batches(cluster: &Cluster, client: &mut Client) {
    for n in 0..100 {
        client.create(cluster, &format!("f{n:03}"));
        if n % 10 == 0 {
            cluster.equal_hashes(FIRST);
        }
    }
}
