//! One of two members is lost for good, and the other one goes on (docs/decisions/0007).

use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_types::{DataError, Epoch, ExtentId, NodeId};
use milpa_wire::data::{AppendTarget, Configuration, DataRequest};

use super::nodes::{self, Cluster, PARTITION, configuration, learning, pattern};
use super::run;

/// `learner` is made where there is none, and learns from one that is alone until it has all.
async fn learn(cluster: &Cluster, alone: u32, learner: u32, epoch: u64) {
    cluster.create_replica(learner, configuration(epoch, &[alone])).await;
    cluster.configure(learning(epoch + 1, &[alone], learner), &[alone]).await;
    nodes::until("the new one has all", async || {
        let report = cluster.report(alone).await?;
        (report.unaligned == 0 && report.current.contains(&NodeId(learner))).then_some(())
    })
    .await;
}

/// …and becomes a member.
async fn join(cluster: &Cluster, alone: u32, learner: u32, epoch: u64) {
    learn(cluster, alone, learner, epoch).await;
    let members = [alone, learner];
    cluster.configure(configuration(epoch + 2, &members), &members).await;
}

/// Goal: the survivor has what was appended and overwritten, acknowledged by the two; while it is alone
/// nothing is acknowledged, also after it was killed; and a new member has all of it.
#[test]
fn a_survivor_takes_no_writes_until_another_has_joined() {
    run(async |cluster| {
        let mut bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        bytes[50_000..90_000].copy_from_slice(&pattern(2, 40_000));
        cluster.overwrite(&[1, 2], 2, extent, 50_000, &bytes[50_000..90_000]).await;
        cluster.kill_node(2).await;
        cluster.configure(configuration(3, &[1]), &[1]).await;
        for _ in 0..2 {
            assert_eq!(cluster.leader(&[1]).await, 1);
            let read = cluster.read(1, extent, 40_000..100_000, true).await;
            assert!(read.unwrap() == bytes[40_000..100_000]);
            let over = cluster.try_overwrite(&[1], 3, extent, 0, &bytes[..100]).await;
            assert_eq!(over, Err(DataError::ReadOnly));
            let more = cluster.append(1, 3, AppendTarget::New { token: 2 }, &bytes).await;
            assert_eq!(more, Err(DataError::ReadOnly));
            let extents = vec![(extent, 300_000)];
            let flush = DataRequest::Flush { partition: PARTITION, epoch: Epoch(3), extents };
            let flushed = cluster.ask(&cluster.as_client, 1, &flush, Bytes::new()).await;
            assert_eq!(flushed.map(drop), Err(DataError::ReadOnly));
            cluster.kill_node(1).await;
            cluster.start_node(1).await;
        }
        join(cluster, 1, 3, 3).await;
        let held = std::fs::read(cluster.extent_file(3, extent)).unwrap();
        assert!(held.get(..300_000) == Some(&bytes[..]));
        cluster.overwrite(&[1, 3], 5, extent, 0, &bytes[..100]).await;
        cluster.append_patiently(1, 5, AppendTarget::New { token: 3 }, &bytes).await;
    });
}

/// Found by a reader: the group needs one voter as soon as the other one's removal is committed, and that the partition has one
/// member counts when it is written down, for which there may be no room.
#[test]
fn a_survivor_that_cannot_write_down_that_it_is_alone_takes_no_writes_either() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        cluster.overwrite(&[1, 2], 2, extent, 0, &bytes[..100]).await;
        cluster.kill_node(2).await;
        cluster.fill_disk_of_states(1);
        let word = DataRequest::Configure {
            partition: PARTITION,
            configuration: configuration(3, &[1]),
            lost: vec![NodeId(2)],
        };
        let answer = nodes::until("it is alone", async || {
            drop(cluster.ask(&cluster.as_manager, 1, &word, Bytes::new()).await);
            cluster.report(1).await.filter(|report| report.leader == Some(NodeId(1)))?;
            let answer = cluster.try_overwrite(&[1], 2, extent, 0, &bytes[..100]).await;
            matches!(answer, Ok(()) | Err(DataError::ReadOnly)).then_some(answer)
        });
        assert_eq!(answer.await, Err(DataError::ReadOnly));
        assert_eq!(cluster.report(1).await.unwrap().configuration.epoch, Epoch(2));
    });
}

/// A new extent with so many bytes, by the primary of an epoch, node 1.
async fn append(cluster: &Cluster, epoch: u64, bytes: &[u8]) -> ExtentId {
    const PIECE: usize = 500_000;
    let mut target = AppendTarget::New { token: 1 };
    for (number, piece) in (1..).zip(bytes.chunks(PIECE)) {
        let (extent, ..) = cluster.append_patiently(1, epoch, target, piece).await;
        target = AppendTarget::Extent { extent, offset: number * PIECE as u64 };
    }
    match target {
        AppendTarget::Extent { extent, .. } => extent,
        _ => panic!("there are no bytes"),
    }
}

/// Node 1 leaves nodes 2 and 3 with an extent of which node 3, which has just joined, has only the beginning yet.
async fn leave_one_that_lacks(cluster: &mut Cluster) -> (ExtentId, Vec<u8>) {
    cluster.kill_node(3).await;
    cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
    let bytes = pattern(1, 20_000_000);
    let extent = append(cluster, 2, &bytes).await;
    cluster.start_slow_filling_node(3, 1 << 20).await;
    cluster.configure(learning(3, &[1, 2], 3), &[1, 2, 3]).await;
    cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
    cluster.kill_node(1).await;
    cluster.configure(configuration(5, &[2, 3]), &[2, 3]).await;
    (extent, bytes)
}

/// Node 3 goes on alone, and is to be given what it lacks by node 1.
async fn go_on_alone(cluster: &mut Cluster) {
    cluster.kill_nodes(&[2, 3]).await;
    cluster.start_node(3).await;
    let word = learning(6, &[3], 1);
    cluster.configure(word, &[3]).await;
}

/// Node 1 is there again, and both have all bytes.
async fn be_given_the_rest(cluster: &mut Cluster, extent: ExtentId, bytes: &[u8]) {
    cluster.start_node(1).await;
    nodes::until("they hold the same", async || {
        let report = cluster.report(3).await?;
        (report.unaligned == 0 && report.current.contains(&NodeId(1))).then_some(())
    })
    .await;
    for node in [1, 3] {
        let held = std::fs::read(cluster.extent_file(node, extent)).unwrap();
        assert!(held.get(..bytes.len()) == Some(bytes), "node {node}");
    }
    cluster.configure(configuration(7, &[1, 3]), &[1, 3]).await;
    cluster.append_patiently(1, 7, AppendTarget::New { token: 2 }, &bytes[..1_000]).await;
    cluster.equal_digests(&[1, 3], 2).await;
}

/// Simulation, seed 378659: the survivor had just joined, and lacks what was acknowledged before. It is in a replica that has
/// left, and that it learns from: until then it tells nobody that anything is lost, and decides on no extent.
#[test]
fn a_survivor_is_given_what_it_lacks_by_who_left_with_everything() {
    run(async |cluster| {
        let (extent, bytes) = leave_one_that_lacks(cluster).await;
        go_on_alone(cluster).await;
        let read = cluster.read(3, extent, 19_500_000..20_000_000, false).await;
        assert!(matches!(read, Err(DataError::NotHere | DataError::Busy)), "{read:?}");
        assert!(cluster.report(3).await.is_some_and(|report| report.unaligned > 0));
        be_given_the_rest(cluster, extent, &bytes).await;
    });
}

/// Found by a reader: who had what the survivor lacked called it damaged, as he copied a snapshot of the survivor, who
/// could not vouch for it.
#[test]
fn what_the_survivor_never_had_is_believed_though_its_extent_was_overwritten() {
    run(async |cluster| {
        let (extent, mut bytes) = leave_one_that_lacks(cluster).await;
        cluster.overwrite_until_trimmed(&[2, 3], 5, extent).await;
        bytes[1_000..4_000].copy_from_slice(&pattern(2, 3_000));
        assert!(cluster.report(3).await.is_some_and(|report| !report.lacks_overwritten));
        go_on_alone(cluster).await;
        be_given_the_rest(cluster, extent, &bytes).await;
    });
}

/// Found by a reader: what is overwritten of bytes that a member lacks it has in its log alone, for a while; who left has
/// these bytes, and not that. So the managers do not put the two together.
#[test]
fn a_member_says_that_it_lacks_what_was_overwritten_until_it_has_it() {
    run(async |cluster| {
        let (extent, _) = leave_one_that_lacks(cluster).await;
        cluster.overwrite(&[2, 3], 5, extent, 19_000_000, &pattern(3, 1_000)).await;
        for wanted in [true, false] {
            nodes::until("it says so", async || {
                (cluster.report(3).await?.lacks_overwritten == wanted).then_some(())
            })
            .await;
        }
        let held = std::fs::read(cluster.extent_file(3, extent)).unwrap();
        assert!(held.get(19_000_000..19_001_000) == Some(&pattern(3, 1_000)[..]));
    });
}

/// Simulation, seed 378659: the survivor was lost as well, before anybody had joined it. The other one of the two has everything,
/// and leads in terms that the survivor has not had.
#[test]
fn the_other_one_of_two_goes_on_when_the_survivor_is_lost() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        cluster.kill_node(2).await;
        cluster.configure(configuration(3, &[1]), &[1]).await;
        let term = cluster.report(1).await.unwrap().term;
        cluster.kill_node(1).await;
        cluster.start_node(2).await;
        cluster.configure(configuration(4, &[2]), &[2]).await;
        assert!(cluster.report(2).await.unwrap().term > term + 1_000_000);
        join(cluster, 2, 3, 4).await;
        let held = std::fs::read(cluster.extent_file(3, extent)).unwrap();
        assert!(held.get(..300_000) == Some(&bytes[..]));
        cluster.overwrite(&[2, 3], 6, extent, 0, &bytes[..100]).await;
    });
}

/// Node 1 goes on alone with an overwrite of the first extent that node 2 has not heard of. The second one is there to fill the log.
async fn commit_alone(cluster: &mut Cluster, bytes: &[u8]) -> (ExtentId, ExtentId) {
    let new = |token| AppendTarget::New { token };
    let (extent, ..) = cluster.append_patiently(1, 1, new(1), bytes).await;
    let (other, ..) = cluster.append_patiently(1, 1, new(2), bytes).await;
    cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
    cluster.drop_replica(3).await;
    while cluster.leader(&[1, 2]).await != 1 {
        cluster.kill_node(2).await;
        cluster.start_node(2).await;
    }
    cluster.kill_node(2).await;
    let over = cluster.try_overwrite(&[1], 2, extent, 200_000, &bytes[..5_000]);
    assert!(tokio::time::timeout(Duration::from_millis(300), over).await.is_err());
    cluster.configure(configuration(3, &[1]), &[1]).await;
    assert!(has_committed(cluster, 1, extent, bytes));
    (extent, other)
}

fn has_committed(cluster: &Cluster, node: u32, extent: ExtentId, bytes: &[u8]) -> bool {
    let held = std::fs::read(cluster.extent_file(node, extent)).unwrap();
    held.get(200_000..205_000) == Some(&bytes[..5_000])
}

/// A node that is back is out of service when it is to learn, made anew, and has `bytes` then.
async fn is_made_anew(
    cluster: &mut Cluster,
    node: u32,
    learning: Configuration,
    (extent, bytes): (ExtentId, &[u8]),
) {
    cluster.start_node(node).await;
    let members: Vec<u32> = learning.members.iter().map(|node| node.0).collect();
    cluster.configure(learning.clone(), &members).await;
    nodes::until("it is out of service", async || {
        let read = cluster.read(node, extent, 0..1, false).await;
        (read == Err(DataError::DiskFailed)).then_some(())
    })
    .await;
    cluster.create_replica(node, learning).await;
    nodes::until("it has all", async || {
        let held = std::fs::read(cluster.extent_file(node, extent)).ok()?;
        (held.get(..bytes.len()) == Some(bytes)).then_some(())
    })
    .await;
}

/// Found by a reader: the lost survivor comes back with an overwrite that it alone had committed, and the log in which that
/// would be noticed is trimmed.
#[test]
fn a_survivor_that_was_lost_and_comes_back_is_made_anew() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let (extent, other) = commit_alone(cluster, &bytes).await;
        cluster.kill_node(1).await;
        cluster.start_node(2).await;
        cluster.configure(configuration(4, &[2]), &[2]).await;
        join(cluster, 2, 3, 4).await;
        cluster.overwrite_until_trimmed(&[2, 3], 6, other).await;
        is_made_anew(cluster, 1, learning(7, &[2, 3], 1), (extent, &bytes)).await;
    });
}

/// Found by a reader: so does one that had learned from it, when the lost one's node is a member again.
#[test]
fn who_learned_from_a_survivor_that_was_lost_is_made_anew() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let (extent, other) = commit_alone(cluster, &bytes).await;
        learn(cluster, 1, 3, 3).await;
        assert!(has_committed(cluster, 3, extent, &bytes));
        cluster.kill_nodes(&[1, 3]).await;
        cluster.start_node(2).await;
        cluster.configure(configuration(5, &[2]), &[2]).await;
        cluster.start_node(1).await;
        cluster.drop_replica(1).await;
        join(cluster, 2, 1, 5).await;
        cluster.overwrite_until_trimmed(&[1, 2], 7, other).await;
        is_made_anew(cluster, 3, learning(8, &[2, 1], 3), (extent, &bytes)).await;
    });
}

/// Found by a reader: a snapshot stands for what was overwritten, and brings it only where there are bytes.
#[test]
fn a_replica_says_that_it_lacks_what_a_snapshot_stands_for() {
    run(async |cluster| {
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let extent = append(cluster, 2, &pattern(1, 5_000_000)).await;
        cluster.overwrite_until_trimmed(&[1, 2], 2, extent).await;
        cluster.start_slow_filling_node(3, 1 << 20).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        for wanted in [true, false] {
            nodes::until("it says so", async || {
                (cluster.report(3).await?.lacks_overwritten == wanted).then_some(())
            })
            .await;
        }
        let held = |node| std::fs::read(cluster.extent_file(node, extent)).unwrap();
        assert!(held(3).get(..5_000_000) == held(1).get(..5_000_000));
    });
}

/// Story: the log is repeated over nothing. What others have of these bytes may lack what was overwritten.
#[test]
fn a_replica_says_that_it_has_lost_what_was_overwritten_until_the_members_are_compared() {
    run(async |cluster| {
        cluster.kill_node(3).await;
        cluster.start_node_with_long_log(3).await;
        let extent = append(cluster, 1, &pattern(1, 5_000_000)).await;
        // At its end: so much has to come before that, that it is seen to be missing.
        cluster.overwrite(&[1, 2, 3], 1, extent, 4_900_000, &pattern(2, 1_000)).await;
        let lacks = async |cluster: &Cluster, wanted| {
            nodes::until("it says so", async || {
                let report = cluster.report(3).await?;
                (report.lacks_overwritten == wanted).then_some(())
            })
            .await;
        };
        lacks(cluster, false).await;
        cluster.kill_node(3).await;
        cluster.lose_extent(3, extent);
        cluster.start_slow_filling_node_with_long_log(3, 1 << 20).await;
        lacks(cluster, true).await;
        cluster.configure(configuration(2, &[3, 1, 2]), &[1, 2, 3]).await;
        lacks(cluster, false).await;
        let held = |node| std::fs::read(cluster.extent_file(node, extent)).unwrap();
        assert!(held(3).get(..5_000_000) == held(1).get(..5_000_000));
    });
}

/// What the two may have committed that were given up for good and came back together: here node 3 has a
/// history of its own, in the same group. It cannot follow the group's log, leaves, and is made anew.
#[test]
fn who_has_committed_something_else_is_made_anew() {
    run(async |cluster| {
        let (bytes, new) = (pattern(1, 300_000), AppendTarget::New { token: 1 });
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(1, &[3])).await;
        for _ in 0..4 {
            cluster.leader(&[3]).await;
            cluster.kill_node(3).await;
            cluster.start_node(3).await;
        }
        cluster.leader(&[3]).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        nodes::until("it is out of service", async || {
            cluster.report(3).await.is_none().then_some(())
        })
        .await;
        let read = cluster.read(3, extent, 0..1, false).await;
        assert_eq!(read, Err(DataError::DiskFailed));
        cluster.create_replica(3, learning(3, &[1, 2], 3)).await;
        nodes::until("it has all", async || {
            let leader = cluster.report(cluster.leader(&[1, 2]).await).await?;
            let primary = cluster.report(1).await?;
            (primary.unaligned == 0 && leader.current.contains(&NodeId(3))).then_some(())
        })
        .await;
        cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        let held = std::fs::read(cluster.extent_file(3, extent)).unwrap();
        assert!(held.get(..300_000) == Some(&bytes[..]));
    });
}

/// A member that was dropped, and has not heard of it, answers readers of what it was not told to be
/// overwritten, for as long as it takes the leader for one: the first overwrite of an extent waits for that.
#[test]
fn the_first_overwrite_after_a_member_was_dropped_waits_until_it_answers_no_readers() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let began = Instant::now();
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.overwrite(&[1, 2], 2, extent, 0, &bytes[..100]).await;
        assert!(began.elapsed() > Duration::from_millis(1_900), "{:?}", began.elapsed());
        let began = Instant::now();
        cluster.overwrite(&[1, 2], 2, extent, 0, &bytes[..100]).await;
        assert!(began.elapsed() < Duration::from_millis(1_900), "{:?}", began.elapsed());
    });
}
