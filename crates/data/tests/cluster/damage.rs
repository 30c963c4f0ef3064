//! Blocks that rot, while replicas are away, behind or in doubt: repaired as long as somebody has them,
//! told of when nobody has, and nobody waits for anybody without end.

use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_types::{DataError, Deletion, Epoch, ExtentId, FreedRange, NodeId};
use milpa_wire::data::{AppendTarget, DataRequest};

use super::nodes::{self, PARTITION, configuration, learning, pattern};
use super::run;

/// Well below what a member that is behind is waited for.
const CATCH_UP_MAX: Duration = Duration::from_secs(5);

/// Damage that no client reads is found all the same, while there are other copies.
#[test]
fn what_rots_unread_is_found_and_repaired() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let extent = cluster.closed_extent(&bytes).await;
        cluster.kill_node(2).await;
        let file = cluster.extent_file(2, extent);
        let whole = std::fs::read(&file).unwrap();
        cluster.start_node(2).await;
        for at in [5_000, 250_000] {
            cluster.rot_extent(2, extent, at);
        }
        nodes::until("the bytes on the disk are as they were", async || {
            let now = std::fs::read(&file).unwrap();
            (now[..300_000] == whole[..300_000]).then_some(())
        })
        .await;
    });
}

/// Found by a reader: what a start found damaged was waited for by nobody. An fsync succeeded on the word of a replica that
/// did not have the bytes, and only the scrub repaired them.
#[test]
fn a_flush_waits_for_what_the_start_found_damaged_and_that_is_repaired_at_once() {
    run(async |cluster| {
        let bytes = pattern(1, 50_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let extents = vec![(extent, 50_000)];
        let flush = DataRequest::Flush { partition: PARTITION, epoch: Epoch(1), extents };
        cluster.ask_all(&cluster.as_client, &flush).await;
        cluster.kill_nodes(&[1, 2, 3]).await;
        cluster.rot_extent(2, extent, 49_900);
        cluster.start_node_without_scrub(2).await;
        let flushed = cluster.ask(&cluster.as_client, 2, &flush, Bytes::new()).await;
        assert_eq!(flushed.err(), Some(DataError::Busy));
        cluster.start_node(1).await;
        cluster.start_node(3).await;
        nodes::until("it is flushed", async || {
            cluster.ask(&cluster.as_client, 2, &flush, Bytes::new()).await.ok()
        })
        .await;
        let read = cluster.read(2, extent, 0..50_000, false).await;
        assert!(read.as_deref() == Ok(&bytes[..]), "{:?}", read.err());
    });
}

/// Found by a reader: pieces of a shared extent are offered in their order, and a header that was damaged was
/// told to nobody. What lay behind it was not offered until the scrub came by.
#[test]
fn a_damaged_header_that_is_in_the_way_of_an_offer_is_repaired() {
    run(async |cluster| {
        let bytes = pattern(1, 9_000);
        let (extent, ..) =
            cluster.append_patiently(1, 1, AppendTarget::Small { token: 1 }, &bytes).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        let flush = DataRequest::Flush {
            partition: PARTITION,
            epoch: Epoch(1),
            extents: vec![(extent, 9_000)],
        };
        cluster.ask_all(&cluster.as_client, &flush).await;
        cluster.kill_node(2).await;
        let file = cluster.extent_file(2, extent);
        let whole = std::fs::read(&file).unwrap();
        cluster.rot_extent(2, extent, 10);
        cluster.start_node_without_scrub(2).await;
        nodes::until("the bytes on the disk are as they were", async || {
            let now = std::fs::read(&file).unwrap();
            (now[..9_000] == whole[..9_000]).then_some(())
        })
        .await;
    });
}

/// Story: a member came back, too far behind for the log. In what had been overwritten the leader had a
/// block that had rotted unread. It refused to send that, and did nothing about it: the member asked
/// ten times a second until the scrub came by, and meanwhile the partition, which counts on all members,
/// took no append and no fsync. When somebody at last repaired the block, he first asked that very member,
/// for ten seconds. Now whoever asks has found the damage, and nobody waits for who is behind.
#[test]
fn a_member_catches_up_though_the_leader_has_a_rotten_block() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        for node in [1, 2] {
            cluster.kill_node(node).await;
        }
        for node in [1, 2] {
            cluster.start_node_without_scrub(node).await;
        }
        cluster.overwrite_until_trimmed(&[1, 2], 2, extent).await;
        cluster.rot_extent(cluster.leader(&[1, 2]).await, extent, 200_000);
        cluster.start_node(3).await;
        let back = Instant::now();
        cluster.join(3, configuration(4, &[3, 1, 2]), &[1, 2, 3]).await;
        assert!(back.elapsed() < CATCH_UP_MAX, "it took {:?}", back.elapsed());
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Story: a file was unlinked by one client while another had it open. Its bytes were freed, and the
/// other read zeros, as if the file had a hole there. Freed bytes are refused now, in a part of an
/// extent as in a whole one: the reader looks at the inode again, and learns that it is gone. Likewise
/// a writer that had not heard of a truncation: its overwrite was acknowledged, in bytes of no file.
#[test]
fn freed_bytes_are_neither_served_as_zeros_nor_overwritten() {
    run(async |cluster| {
        let bytes = pattern(1, 20_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let range = FreedRange { partition: PARTITION, extent, offset: 5_000, length: 10_000 };
        cluster.ask_all(&cluster.as_meta, &DataRequest::Free { ranges: vec![range] }).await;
        for node in [1, 2, 3] {
            for dead in [0..20_000, 4_999..5_001, 9_000..9_100, 14_999..15_000] {
                let read = cluster.read(node, extent, dead.clone(), false).await;
                assert_eq!(read, Err(DataError::NoExtent), "node {node}: {dead:?}");
            }
            for live in [0..5_000, 15_000..20_000] {
                let read = cluster.read(node, extent, live.clone(), false).await;
                let live = live.start as usize..live.end as usize;
                assert_eq!(read.as_deref(), Ok(&bytes[live]), "node {node}");
            }
        }
        let in_dead = cluster.try_overwrite(&[1, 2, 3], 1, extent, 4_999, &bytes[..2]).await;
        assert_eq!(in_dead, Err(DataError::NoExtent));
        cluster.overwrite(&[1, 2, 3], 1, extent, 4_000, &bytes[..1_000]).await;
    });
}

/// Simulation, seed 403688: the end of an extent was damaged on one replica, and freed on the others, who sent zeros for it. They
/// were taken for its bytes; the header of a dead piece among them was gone, and the extent stayed for ever.
#[test]
fn the_end_of_an_extent_that_is_freed_elsewhere_is_not_repaired_with_zeros() {
    run(async |cluster| {
        let extent = cluster.closed_extent(&pattern(1, 10_000)).await;
        free_end_damaged_at(cluster, extent, &[1, 2], &[3]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Found by a reader: no member had it, and the word of one that learns that it is freed was not asked for: it was called lost.
#[test]
fn the_end_of_an_extent_that_a_learner_has_freed_is_not_lost() {
    run(async |cluster| {
        let extent = cluster.closed_extent(&pattern(1, 10_000)).await;
        cluster.configure(learning(2, &[1, 2], 3), &[1, 2]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        free_end_damaged_at(cluster, extent, &[3], &[1, 2]).await;
    });
}

/// Some free the last block of a closed extent of 10,000 bytes, which is damaged at others, who free it instead of repairing it.
async fn free_end_damaged_at(
    cluster: &nodes::Cluster,
    extent: ExtentId,
    free_at: &[u32],
    damaged_at: &[u32],
) {
    let range = FreedRange { partition: PARTITION, extent, offset: 8_192, length: 1_808 };
    for node in free_at {
        let free = DataRequest::Free { ranges: vec![range] };
        cluster.ask(&cluster.as_meta, *node, &free, Bytes::new()).await.unwrap();
    }
    for node in damaged_at {
        cluster.rot_extent(*node, extent, 9_000);
    }
    for node in damaged_at {
        let read = nodes::until("it is not damaged any more", async || {
            let read = cluster.read(*node, extent, 9_000..9_100, false).await;
            (!matches!(read, Err(DataError::Corrupt { .. } | DataError::Busy))).then_some(read)
        });
        assert_eq!(read.await, Err(DataError::NoExtent), "node {node}");
    }
}

/// A flipped bit is never served, and is repaired from another replica.
#[test]
fn a_damaged_block_is_repaired_from_another_replica() {
    run(async |cluster| {
        let bytes = pattern(1, 200_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.damage(2, 50_000);
        let damaged = cluster.read(2, extent, 0..200_000, false).await;
        assert_eq!(damaged, Err(DataError::Corrupt { block: 12 }));
        let repaired = nodes::until("the block is repaired", async || {
            cluster.read(2, extent, 0..200_000, false).await.ok()
        });
        assert_eq!(repaired.await, bytes);
    });
}

/// Found by the simulation (seed 1055): the only whole copy of a block was on a replica that came back, and
/// the members did not ask it.
#[test]
fn a_block_that_only_a_learner_has_is_repaired_from_it() {
    run(async |cluster| {
        let bytes = pattern(1, 200_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(learning(2, &[1, 2], 3), &[1, 2]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        for node in [1, 2] {
            cluster.damage(node, 50_000);
        }
        for node in [1, 2] {
            let repaired = nodes::until("the block is repaired", async || {
                cluster.read(node, extent, 0..200_000, false).await.ok()
            });
            assert_eq!(repaired.await, bytes, "node {node}");
        }
    });
}

/// Blocks that rotted on every member: a reader is told so, and does not wait for a repair that cannot be;
/// what is around them is read, and copied to a member that is made anew.
#[test]
fn a_block_that_no_member_has_is_told_of_and_keeps_nothing_else_from_being_copied() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..3_000]).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        cluster.equal_digests(&[1, 2], 1).await;
        for node in [1, 2] {
            cluster.rot_extent(node, extent, 50_000);
            cluster.rot_extent(node, extent, 250_000);
        }
        let leader = cluster.leader(&[1, 2]).await;
        let told = Instant::now();
        let read = cluster.read(leader, extent, 49_152..53_248, true).await;
        assert_eq!(read, Err(DataError::Corrupt { block: 12 }));
        assert!(told.elapsed() < CATCH_UP_MAX, "{:?}", told.elapsed());

        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        nodes::until("the new replica has all the others", async || {
            let report = cluster.report(cluster.leader(&[1, 2]).await).await?;
            let has_log = report.current.contains(&NodeId(3));
            let held = std::fs::read(cluster.extent_file(3, extent)).ok()?;
            let is_there =
                |range: std::ops::Range<usize>| held.get(range.clone()) == Some(&bytes[range]);
            let all =
                is_there(0..49_152) && is_there(53_248..249_856) && is_there(253_952..300_000);
            (has_log && all).then_some(())
        })
        .await;
    });
}

/// Found by the simulation (`--strict`, seeds 1634 and 11940): the primary's last bytes lay behind the ends
/// of the others, in a block that rotted before they had it. It was asked for them for ever; then the
/// block became lost everywhere, with the acknowledged bytes at its beginning. Nobody was promised what
/// lies behind: the extent ends where the others do.
#[test]
fn an_end_that_one_member_alone_has_and_that_rotted_is_cut() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let bytes = pattern(1, 100_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes[..50_000]).await;
        cluster.kill_nodes(&[2, 3]).await;
        cluster.append_alone(1, extent, 50_000, &bytes[50_000..]).await;
        cluster.rot_extent(1, extent, 51_000);
        cluster.start_node(2).await;
        cluster.start_node(3).await;
        nodes::until("all is aligned", async || {
            let report = cluster.report(1).await?;
            (report.unaligned == 0).then_some(())
        })
        .await;
        cluster.equal_digests(&all, 1).await;
        for node in all {
            let read = cluster.read(node, extent, 0..50_000, false).await;
            assert!(read.as_deref() == Ok(&bytes[..50_000]), "{node}: {:?}", read.err());
            let behind = cluster.read(node, extent, 49_000..51_000, false).await;
            assert!(behind.is_err(), "{node} has more");
        }
    });
}

/// An extent, and what the files of 2 and 3 held when it had so many bytes.
pub async fn grown(
    cluster: &nodes::Cluster,
    bytes: &[u8],
    early: usize,
) -> (ExtentId, [Vec<u8>; 2]) {
    let new = AppendTarget::New { token: 1 };
    let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes[..early]).await;
    let before = [2, 3].map(|node| std::fs::read(cluster.extent_file(node, extent)).unwrap());
    let more = AppendTarget::Extent { extent, offset: early as u64 };
    cluster.append(1, 1, more, &bytes[early..]).await.unwrap();
    (extent, before)
}

/// As if power had taken what came since.
pub fn put_back(cluster: &nodes::Cluster, extent: ExtentId, before: [Vec<u8>; 2]) {
    for (node, before) in [2, 3].into_iter().zip(before) {
        std::fs::write(cluster.extent_file(node, extent), before).unwrap();
    }
}

/// The same, but the bytes were acknowledged: power took them at two members, and the block in which the third
/// one has them rotted. They are lost, and in their place: nothing is cut that somebody was promised.
#[test]
fn an_acknowledged_end_that_rotted_where_it_is_left_is_lost_in_its_place() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let bytes = pattern(1, 60_000);
        let (extent, before) = grown(cluster, &bytes[..50_000], 40_000).await;
        cluster.kill_nodes(&[2, 3]).await;
        cluster.append_alone(1, extent, 50_000, &bytes[50_000..]).await;
        put_back(cluster, extent, before);
        cluster.rot_extent(1, extent, 49_300);
        cluster.start_node(2).await;
        cluster.start_node(3).await;
        for node in all {
            let read = nodes::until("the end is lost", async || {
                let end = cluster.read(node, extent, 49_152..50_000, false).await;
                (end == Err(DataError::Corrupt { block: 12 })).then_some(())?;
                cluster.read(node, extent, 0..49_152, false).await.ok()
            });
            assert!(read.await == bytes[..49_152], "{node}");
        }
    });
}

/// Found by a reader: the same, but the others end within the block that rotted. They were made as long as it had
/// been, and what they had of the block, flushed, was lost with the rest of it.
#[test]
fn what_rots_where_it_is_left_takes_nothing_with_it_that_others_have_of_its_block() {
    for is_sealed in [false, true] {
        run(async |cluster| {
            let bytes = pattern(1, 53_000);
            let (extent, before) = grown(cluster, &bytes, 50_000).await;
            if is_sealed {
                cluster.close(extent).await;
                cluster.equal_digests(&[1, 2, 3], 1).await;
            }
            cluster.kill_nodes(&[2, 3]).await;
            put_back(cluster, extent, before);
            cluster.rot_extent(1, extent, 49_300);
            cluster.start_node(2).await;
            cluster.start_node(3).await;
            nodes::until("all is aligned", async || {
                let report = cluster.report(1).await?;
                (report.unaligned == 0).then_some(())
            })
            .await;
            cluster.equal_digests(&[1, 2, 3], 1).await;
            for node in [1, 2, 3] {
                let read = cluster.read(node, extent, 0..50_000, false).await;
                assert!(read.as_deref() == Ok(&bytes[..50_000]), "{node}: {:?}", read.err());
            }
        });
    }
}

/// Found by a reader: power took the end of an extent at two members, and at the third one tore a block of it that
/// was being overwritten. As others ended before that block, it was the primary's to cut; as it was acknowledged,
/// the primary waited until it was settled. What was acknowledged behind it stayed on one replica.
#[test]
fn an_acknowledged_block_that_one_member_alone_has_and_doubts_is_settled() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let bytes = pattern(1, 60_000);
        let (extent, before) = grown(cluster, &bytes, 40_000).await;
        cluster.kill_nodes(&all).await;
        for node in all {
            cluster.start_node_with_long_log(node).await;
        }
        cluster.equal_digests(&all, 1).await;
        cluster.overwrite(&all, 1, extent, 50_000, &pattern(2, 100)).await;
        cluster.kill_nodes(&all).await;
        put_back(cluster, extent, before);
        cluster.rot_extent(1, extent, 49_300);
        for node in all {
            cluster.start_node_with_long_log(node).await;
        }
        for node in all {
            nodes::until("the rest is there", async || {
                let leader = cluster.leader(&all).await;
                let lost = cluster.read(leader, extent, 49_152..50_000, true).await;
                (lost == Err(DataError::Corrupt { block: 12 })).then_some(())?;
                let held = std::fs::read(cluster.extent_file(node, extent)).ok()?;
                (held.get(53_248..60_000) == Some(&bytes[53_248..])).then_some(())
            })
            .await;
        }
    });
}

/// A member is too far behind for the log, and what was overwritten has a block that no other one has: it
/// gets everything else, and does not serve what it has of that block.
#[test]
fn a_member_catches_up_though_no_other_has_a_block() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        for node in [1, 2] {
            cluster.kill_node(node).await;
        }
        for node in [1, 2] {
            cluster.start_node_without_scrub(node).await;
        }
        cluster.overwrite_until_trimmed(&[1, 2], 2, extent).await;
        for node in [1, 2] {
            cluster.rot_extent(node, extent, 200_000);
        }
        cluster.start_node(3).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        nodes::until("the learner has the log and the overwrites", async || {
            let report = cluster.report(cluster.leader(&[1, 2]).await).await?;
            let has_log = report.current.contains(&NodeId(3));
            let held = std::fs::read(cluster.extent_file(3, extent)).ok()?;
            (has_log && held.get(1_000..4_000) == Some(&pattern(2, 3_000)[..])).then_some(())
        })
        .await;
        cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        // Whoever leads: the one that came back may lack an overwrite of it.
        for node in [3, 1, 2] {
            let read = cluster.read(node, extent, 196_608..200_704, true).await;
            let refused =
                matches!(read, Err(DataError::Corrupt { .. } | DataError::NotPrimary { .. }));
            assert!(refused, "{node}: {read:?}");
        }
    });
}

/// Found by the simulation (seed 3043): of two members one was far behind, and the other one, started again,
/// had a block damaged. That one waited for its log to be repeated before it said that nobody has the block,
/// and its log for the first one, which waited for the block.
#[test]
fn a_log_that_waits_for_a_member_and_a_block_that_waits_for_the_log_do_not_wait_for_ever() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..3_000]).await;
        cluster.kill_node(3).await;
        let early = tempfile::tempdir().unwrap();
        cluster.copy_directory(3, early.path());
        cluster.start_node(3).await;
        cluster.overwrite_until_trimmed(&[1, 2, 3], 1, extent).await;
        cluster.configure(configuration(2, &[1, 3]), &[1, 3]).await;
        for node in [2, 3] {
            cluster.kill_node(node).await;
        }
        // What its disk has promised since then is lost.
        cluster.put_back_disk(3, early.path());
        // In the log, and not committed without the one that is away.
        let patch = bytes[..100].to_vec();
        let waiting = cluster.try_overwrite(&[1], 2, extent, 290_000, &patch);
        let refused = tokio::time::timeout(Duration::from_millis(300), waiting).await;
        assert!(!matches!(refused, Ok(Ok(()))), "{refused:?}");
        cluster.kill_node(1).await;
        cluster.rot_extent(1, extent, 200_000);
        cluster.start_node_without_scrub(1).await;
        cluster.start_node(3).await;
        cluster.configure(configuration(3, &[1, 3]), &[1, 3]).await;
    });
}

/// An extent of which bytes 50,000 to 53,000 were overwritten, and will be again by the log when a node starts.
async fn overwritten(cluster: &mut nodes::Cluster) -> (ExtentId, Vec<u8>) {
    let all = [1, 2, 3];
    let mut bytes = pattern(1, 200_000);
    let new = AppendTarget::New { token: 1 };
    let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
    cluster.kill_nodes(&all).await;
    for node in all {
        cluster.start_node_with_long_log(node).await;
    }
    cluster.equal_digests(&all, 1).await;
    let patch = pattern(2, 3_000);
    cluster.overwrite(&all, 1, extent, 50_000, &patch).await;
    bytes[50_000..53_000].copy_from_slice(&patch);
    cluster.equal_digests(&all, 1).await;
    (extent, bytes)
}

/// The same (see the store's test): after a restart the log repeats an overwrite over a part of the
/// rotten block. It comes from another replica; if nobody has it whole, it is taken as it is.
#[test]
fn a_block_that_rots_does_not_pass_for_one_that_a_crash_left_torn() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let (extent, mut bytes) = overwritten(cluster).await;
        for rotten in [&[3][..], &all] {
            cluster.kill_nodes(rotten).await;
            for node in rotten {
                cluster.rot_extent(*node, extent, 49_200);
                cluster.start_node_with_long_log(*node).await;
            }
            let nobody_has_it = rotten == all;
            if nobody_has_it {
                bytes[49_200] ^= 4;
            }
            cluster.equal_digests(&all, 1).await;
            let read = nodes::until("the leader has the bytes", async || {
                let leader = cluster.leader(&all).await;
                cluster.read(leader, extent, 0..200_000, true).await.ok()
            });
            assert!(read.await == bytes, "{rotten:?}");
        }
    });
}

/// The same, but the replicas do not agree on what the block is: then nobody's is served.
#[test]
fn a_block_that_all_are_in_doubt_about_and_nobody_confirms_is_lost() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let (extent, _) = overwritten(cluster).await;
        cluster.kill_nodes(&all).await;
        for node in all {
            cluster.rot_extent(node, extent, 49_200 + u64::from(node));
            cluster.start_node_with_long_log(node).await;
        }
        let read = nodes::until("the leader is in doubt no more", async || {
            let leader = cluster.leader(&all).await;
            let read = cluster.read(leader, extent, 49_152..50_000, true).await;
            let waits = DataError::Doubtful { block: 12 };
            (!matches!(&read, Err(DataError::NotPrimary { .. })) && read != Err(waits))
                .then_some(read)
        });
        let read = read.await;
        assert!(matches!(read, Err(DataError::Corrupt { block: 12 })), "{read:?}");
    });
}

/// A learner that needs a snapshot, with the highest number, and members that are both in doubt about a block:
/// it does not wait for them to decide, nor they for it.
#[test]
fn members_that_are_in_doubt_and_one_that_copies_from_them_do_not_wait_for_each_other() {
    run(async |cluster| {
        let members = [1, 2];
        let bytes = pattern(1, 200_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.kill_node(3).await;
        cluster.configure(learning(2, &[1, 2], 3), &members).await;
        cluster.overwrite_until_trimmed(&members, 2, extent).await;
        cluster.kill_nodes(&members).await;
        for node in members {
            cluster.start_node_with_long_log(node).await;
        }
        cluster.overwrite(&members, 2, extent, 50_000, &pattern(3, 3_000)).await;
        cluster.kill_nodes(&members).await;
        cluster.start_node(3).await;
        for node in members {
            cluster.rot_extent(node, extent, 49_200);
            cluster.start_node_with_long_log(node).await;
        }
        cluster.equal_digests(&[1, 2, 3], 1).await;
        cluster.configure(configuration(3, &[1, 2, 3]), &[1, 2, 3]).await;
    });
}

/// Found by a reader: what could not be opened at a start, for lack of descriptors perhaps, was taken for deleted, and
/// its Raft log was forgotten: then it voted as one that had never been there.
#[test]
fn a_replica_that_cannot_be_opened_once_keeps_its_log() {
    run(async |cluster| {
        let new = AppendTarget::New { token: 1 };
        cluster.append_patiently(1, 1, new, &pattern(1, 100_000)).await;
        for _ in 0..3 {
            let leader = cluster.leader(&[1, 2, 3]).await;
            cluster.kill_node(leader).await;
            cluster.start_node(leader).await;
        }
        cluster.leader(&[1, 2, 3]).await;
        let before = cluster.report(3).await.unwrap().term;
        cluster.kill_nodes(&[1, 2, 3]).await;
        let (label, aside) = (cluster.label_file(3), cluster.label_file(3).with_extension("aside"));
        std::fs::rename(&label, &aside).unwrap();
        std::fs::create_dir(&label).unwrap();
        cluster.start_node(3).await;
        assert!(cluster.report(3).await.is_none());
        cluster.kill_node(3).await;
        std::fs::remove_dir(&label).unwrap();
        std::fs::rename(&aside, &label).unwrap();
        cluster.start_node(3).await;
        let after = nodes::until("it is there", async || cluster.report(3).await).await.term;
        assert!(after >= before, "term {after}, and {before} before: it has forgotten its votes");
    });
}

/// Found by a reader: a crash while a replica was removed left some of its files, and none could be made in its place.
#[test]
fn a_replica_is_made_where_a_crash_left_part_of_another() {
    run(async |cluster| {
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &pattern(1, 100_000)).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let file = cluster.extent_file(3, extent);
        let bytes = std::fs::read(&file).unwrap();
        cluster.start_node(3).await;
        cluster.drop_replica(3).await;
        let directory = file.parent().unwrap();
        nodes::until("it is removed", async || (!directory.exists()).then_some(())).await;
        std::fs::create_dir(directory).unwrap();
        std::fs::write(&file, bytes).unwrap();
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        cluster.create_replica(3, learning(3, &[1, 2], 3)).await;
        cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Found by a reader: a damaged replica that was replaced elsewhere was in no report, and who was told to delete it said
/// that it was not there. Its files stayed for good, and so did the log of its disk.
#[test]
fn what_is_left_of_a_damaged_replica_is_reported_and_deleted() {
    run(async |cluster| {
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &pattern(1, 100_000)).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let (state, directory) = (cluster.state_file(3), cluster.label_file(3));
        let directory = directory.parent().unwrap();
        let mut bytes = std::fs::read(&state).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&state, bytes).unwrap();
        cluster.forget_heard(3);
        cluster.start_node(3).await;
        let is_told = async || cluster.heard(3).filter(|heard| !heard.data_damaged.is_empty());
        let heard = nodes::until("it is reported", is_told).await;
        assert_eq!((heard.data, heard.data_damaged), (Vec::new(), vec![PARTITION]));
        // Not that it does not have what was asked for: nobody knows.
        let read = cluster.read(3, extent, 0..1, false).await;
        assert_eq!(read, Err(DataError::DiskFailed));
        let leftover = Deletion::Leftover { log_end: None };
        assert_eq!(cluster.delete_replica(3, leftover).await, Ok(()));
        assert!(!directory.exists() && !state.exists());
        let is_gone = async || cluster.heard(3).filter(|heard| heard.data_damaged.is_empty());
        nodes::until("it is not reported any more", is_gone).await;
    });
}
