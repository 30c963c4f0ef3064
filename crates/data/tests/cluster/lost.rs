//! What operators watch: which bytes are lost.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, FreedRange};
use milpa_wire::data::{AppendTarget, DataAnswer, DataRequest};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

use crate::damage::{grown, put_back};
use crate::nodes::{self, Cluster, PARTITION, configuration, learning, pattern};
use crate::run;

const ALL: [u32; 3] = [1, 2, 3];

/// Each time the metric grows, which all tests of this process share.
const IS_LOST: &str = "bytes are damaged on every replica";
const IS_NOT_REPAIRED: &str = "block not repaired yet";

/// Counts how often the nodes of a test say a thing.
#[derive(Clone)]
struct Told(&'static str, Arc<AtomicU64>);

impl Told {
    fn count(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" && format!("{value:?}") == self.0 {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Subscriber for Told {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        [Level::ERROR, Level::DEBUG].contains(metadata.level())
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

/// Blocks that their disks say were told of.
fn noted(cluster: &Cluster, extent: ExtentId) -> u64 {
    let of_node = |node| {
        let file = cluster.extent_file(node, extent);
        let text = std::fs::read_to_string(file.ancestors().nth(3).unwrap().join("lost"));
        text.map_or(0, |text| text.lines().skip(1).count() as u64)
    };
    ALL.into_iter().map(of_node).sum()
}

async fn reads_as_lost(cluster: &Cluster, extent: ExtentId) {
    nodes::until("the leader says that the block is lost", async || {
        let leader = cluster.leader(&ALL).await;
        let read = cluster.read(leader, extent, 49_152..53_248, true).await;
        (read == Err(DataError::Corrupt { block: 12 })).then_some(())
    })
    .await;
}

/// An extent of 300,000 bytes whose block 12 has rotted on every member.
async fn rotten_everywhere(cluster: &mut Cluster) -> ExtentId {
    let bytes = pattern(1, 300_000);
    let new = AppendTarget::New { token: 1 };
    let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
    cluster.overwrite(&ALL, 1, extent, 0, &bytes[..3_000]).await;
    cluster.equal_digests(&ALL, 1).await;
    for node in ALL {
        cluster.rot_extent(node, extent, 50_000);
    }
    reads_as_lost(cluster, extent).await;
    extent
}

type Answers = Vec<Result<DataAnswer, DataError>>;

async fn flush(cluster: &Cluster, epoch: u64, extent: ExtentId, length: u64) -> Answers {
    flush_at(&ALL, cluster, epoch, (extent, length)).await
}

async fn flush_at(
    nodes: &[u32],
    cluster: &Cluster,
    epoch: u64,
    extent: (ExtentId, u64),
) -> Answers {
    let (epoch, extents) = (Epoch(epoch), vec![extent]);
    let request = DataRequest::Flush { partition: PARTITION, epoch, extents };
    let mut answers = Vec::new();
    for &node in nodes {
        let asked = cluster.ask(&cluster.as_client, node, &request, Bytes::new());
        answers.push(asked.await.map(|(answer, _)| answer));
    }
    answers
}

/// Waits until a member says that a block is lost. At no time all say that nothing is.
async fn flushes_but_for(cluster: &Cluster, epoch: u64, extent: ExtentId, block: u64) {
    let whole = Ok(DataAnswer::Done);
    let but = Ok(DataAnswer::DoneBut { lost: vec![(extent, block)], in_memory: false });
    nodes::until("a flush says that a block is lost", async || {
        let answers = flush(cluster, epoch, extent, 300_000).await;
        assert!(answers.iter().any(|answer| *answer != whole), "epoch {epoch}");
        answers.contains(&but).then_some(())
    })
    .await;
    let before = flush(cluster, epoch, extent, block * BLOCK_BYTES).await;
    assert!(before.iter().all(|answer| *answer == whole), "{before:?}");
}

/// Found by `make power` (seed 29639): power tore a block on every member that nobody had synced. It was lost, and the
/// next fsync was told that all bytes are on the disks.
#[test]
fn a_flush_says_which_blocks_are_lost() {
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        flushes_but_for(cluster, 1, extent, 12).await;
        cluster.configure(configuration(2, &ALL), &ALL).await;
        flushes_but_for(cluster, 2, extent, 12).await;
        nodes::until("it is noted", async || (noted(cluster, extent) == 3).then_some(())).await;
        cluster.kill_nodes(&ALL).await;
        for node in ALL {
            cluster.start_node_without_scrub(node).await;
        }
        flushes_but_for(cluster, 2, extent, 12).await;
    });
}

/// Simulation, seed 452847: a block had rotted at both members. A learner had it whole, and was not ready to give it: the
/// members called it lost, and the next fsync cut it from its file.
#[test]
fn a_block_is_not_lost_while_a_learner_does_not_say_that_it_lacks_it() {
    let in_vain = Told(IS_NOT_REPAIRED, Arc::default());
    let _guard = tracing::dispatcher::set_default(&Dispatch::new(in_vain.clone()));
    run(async |cluster| {
        let members = [1, 2];
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(learning(2, &members, 3), &members).await;
        cluster.equal_digests(&ALL, 1).await;
        cluster.kill_node(3).await;
        for node in members {
            cluster.rot_extent(node, extent, 50_000);
        }
        nodes::until("both have looked for the block more than twice", async || {
            let flushed = flush_at(&members, cluster, 2, (extent, 300_000)).await;
            let lost = |answer: &_| matches!(answer, Ok(DataAnswer::DoneBut { .. }));
            assert!(!flushed.iter().any(lost), "{flushed:?}");
            (in_vain.count() >= 10).then_some(())
        })
        .await;
        cluster.start_node(3).await;
        nodes::until("the block is whole", async || {
            let flushed = flush_at(&members, cluster, 2, (extent, 300_000)).await;
            flushed.iter().all(|answer| *answer == Ok(DataAnswer::Done)).then_some(())
        })
        .await;
        for node in members {
            let read = cluster.read(node, extent, 0..300_000, false).await;
            assert!(read.as_deref() == Ok(&bytes[..]), "node {node}: {:?}", read.err());
        }
    });
}

/// Found by a reader: what had come back with other bytes of its extent, and not by its own repair, was called lost at
/// the next fsync, and cut from its file.
#[test]
fn a_flush_looks_whether_what_was_lost_is_back() {
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        flushes_but_for(cluster, 1, extent, 12).await;
        for node in ALL {
            cluster.rot_extent(node, extent, 50_000);
        }
        let answers = flush(cluster, 1, extent, 300_000).await;
        assert!(answers.iter().all(|answer| *answer == Ok(DataAnswer::Done)), "{answers:?}");
    });
}

/// Found by a reader: what one member had called lost, and others had again, was never looked for by it, however often a
/// client that could read it there asked for its flush.
#[test]
fn a_flush_has_looked_for_what_was_lost_some_time_ago() {
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        nodes::until("it is noted", async || (noted(cluster, extent) == 3).then_some(())).await;
        cluster.kill_nodes(&ALL).await;
        for node in ALL {
            cluster.start_node_without_scrub(node).await;
        }
        nodes::until("all say that the block is lost", async || {
            let answers = flush(cluster, 1, extent, 300_000).await;
            let is_lost = |answer| matches!(answer, &Ok(DataAnswer::DoneBut { .. }));
            answers.iter().all(is_lost).then_some(())
        })
        .await;
        for node in [2, 3] {
            cluster.rot_extent(node, extent, 50_000);
        }
        nodes::until("all have it", async || {
            let answers = flush(cluster, 1, extent, 300_000).await;
            answers.iter().all(|answer| *answer == Ok(DataAnswer::Done)).then_some(())
        })
        .await;
    });
}

/// Found by a reader: the others had as much of a block as there was to be of it, and the one that had had more, and
/// of which it rotted, called it lost; or said that it had flushed it, while it was being looked for.
#[test]
fn a_block_of_which_others_have_all_that_is_needed_is_not_lost() {
    run(async |cluster| {
        let bytes = pattern(1, 53_000);
        let (extent, before) = grown(cluster, &bytes, 50_000).await;
        cluster.kill_nodes(&ALL).await;
        put_back(cluster, extent, before);
        cluster.rot_extent(1, extent, 49_300);
        for node in ALL {
            cluster.start_node(node).await;
        }
        nodes::until("all have the first bytes", async || {
            let answers = flush(cluster, 1, extent, 50_000).await;
            let is_lost = |answer| matches!(answer, &Ok(DataAnswer::DoneBut { .. }));
            assert!(!answers.iter().any(is_lost), "{answers:?}");
            answers.iter().all(|answer| *answer == Ok(DataAnswer::Done)).then_some(())
        })
        .await;
        for node in ALL {
            let read = cluster.read(node, extent, 0..50_000, false).await;
            assert!(read.as_deref() == Ok(&bytes[..50_000]), "{node}: {:?}", read.err());
        }
    });
}

/// Found by a reader: what was written into a lost block was acknowledged, and then as unreadable as the rest of it.
#[test]
fn a_part_of_a_lost_block_is_not_overwritten() {
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        let leader = cluster.leader(&ALL).await;
        let part = cluster.try_overwrite(&ALL, 1, extent, 50_000, &pattern(3, 100)).await;
        assert_eq!(part, Err(DataError::Corrupt { block: 12 }));
        let block = pattern(4, 4096);
        cluster.overwrite(&ALL, 1, extent, 49_152, &block).await;
        let read = cluster.read(leader, extent, 49_152..53_248, true).await;
        assert!(read.as_deref() == Ok(&block[..]), "{:?}", read.err());
    });
}

/// A block that is lost was forgotten as that with every configuration and every start: it was looked for, found
/// nowhere, and counted again, with an ERROR line each time.
#[test]
fn a_lost_block_is_counted_once_by_each_node_over_epochs_and_restarts() {
    let told = Told(IS_LOST, Arc::default());
    let _guard = tracing::dispatcher::set_default(&Dispatch::new(told.clone()));
    let told = || told.count();
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        for epoch in 2..6 {
            cluster.configure(configuration(epoch, &ALL), &ALL).await;
            reads_as_lost(cluster, extent).await;
        }
        assert!((1..=3).contains(&told()), "{} times", told());
        for _ in 0..3 {
            nodes::until("all that was told is noted", async || {
                (noted(cluster, extent) == told()).then_some(())
            })
            .await;
            cluster.kill_nodes(&ALL).await;
            for node in ALL {
                cluster.start_node(node).await;
            }
            reads_as_lost(cluster, extent).await;
        }
        assert!((1..=3).contains(&told()), "{} times", told());
    });
}

/// Waits until each member says, and reports, that these blocks of an extent are lost.
async fn say_lost(cluster: &Cluster, extent: ExtentId, blocks: &[u64]) {
    let lost = blocks.iter().map(|block| (extent, *block)).collect();
    let answer = Ok(DataAnswer::LostBlocks(lost));
    let expected = [(); 3].map(|()| (answer.clone(), Some(blocks.len() as u64)));
    let request = lost_blocks(1, extent);
    nodes::until("all members say which blocks are lost", async || {
        let mut said = Vec::new();
        for node in ALL {
            let asked = cluster.ask(&cluster.as_admin, node, &request, Bytes::new()).await;
            let reported = cluster.report(node).await.map(|report| report.lost_blocks);
            said.push((asked.map(|(answer, _)| answer), reported));
        }
        (said == expected).then_some(())
    })
    .await;
}

fn lost_blocks(epoch: u64, extent: ExtentId) -> DataRequest {
    let (epoch, extents) = (Epoch(epoch), vec![extent, extent]);
    DataRequest::LostBlocks { partition: PARTITION, epoch, extents }
}

#[test]
fn a_lost_block_is_reported_by_each_member_until_it_is_whole() {
    run(async |cluster| {
        let extent = rotten_everywhere(cluster).await;
        say_lost(cluster, extent, &[12]).await;
        let other = lost_blocks(7, extent);
        let other = cluster.ask(&cluster.as_admin, 1, &other, Bytes::new()).await;
        assert!(other.is_err(), "of another epoch");
        cluster.overwrite(&ALL, 1, extent, 49_152, &pattern(4, 4096)).await;
        say_lost(cluster, extent, &[]).await;
    });
}

/// The operator restores the file from a backup, and deletes what was damaged.
#[test]
fn a_lost_block_is_reported_until_its_bytes_are_freed() {
    for (offset, length) in [(40_000, 20_000), (0, u64::MAX)] {
        run(async |cluster| {
            let extent = rotten_everywhere(cluster).await;
            say_lost(cluster, extent, &[12]).await;
            let free = async |offset, length| {
                let range = FreedRange { partition: PARTITION, extent, offset, length };
                let free = DataRequest::Free { ranges: vec![range] };
                cluster.ask_all(&cluster.as_meta, &free).await;
            };
            free(50_000, 100_000).await;
            say_lost(cluster, extent, &[12]).await;
            free(offset, length).await;
            say_lost(cluster, extent, &[]).await;
        });
    }
}

/// Simulation, seed 390099: power had taken an overwritten extent but for its mark, at one member. Whoever asked there was sent
/// to the leader, which had nothing of it and could not say that it is lost.
#[test]
fn what_lies_behind_the_end_of_an_overwritten_extent_is_lost_whoever_leads() {
    run(async |cluster| {
        let bytes = pattern(1, 100_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.overwrite(&[1, 2], 2, extent, 0, &pattern(2, 1_000)).await;
        let follower = if cluster.leader(&[1, 2]).await == 1 { 2 } else { 1 };
        let read = async |range| cluster.read(follower, extent, range, false).await.unwrap_err();
        nodes::until("its length is decided", async || {
            (cluster.report(1).await?.unaligned == 0).then_some(())
        })
        .await;
        let there = read(99_000..100_000).await;
        assert!(matches!(there, DataError::NotPrimary { .. }), "{there:?}");
        assert_eq!(read(99_000..100_001).await, DataError::Lost { length: 100_000 });
    });
}
