//! Three data nodes over real sockets and files, killed and started again.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
// Clippy knows functions marked as tests only, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod alone;
mod damage;
mod gaps;
mod lost;
mod nodes;
mod speed;
mod stand_ins;

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use bytes::Bytes;
use milpa_types::{DataError, Deletion, Epoch, FreedRange};
use milpa_wire::data::{AppendTarget, DataRequest, Overwrite, Read};
use nodes::{Cluster, PARTITION, checksums, configuration, learning, pattern};
use tokio::task::LocalSet;

/// Three nodes with one partition, of which all are members and node 1 is the primary.
fn run(test: impl AsyncFnOnce(&mut Cluster)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let mut cluster = Cluster::start().await;
        cluster.create_partition().await;
        cluster.leader(&[1, 2, 3]).await;
        test(&mut cluster).await;
        cluster.stop().await;
    });
}

/// Goal: what was acknowledged is on every member, whatever happened to one of them meanwhile.
/// Method: appends, small pieces and overwrites; one node dies, the others go on in a new epoch;
/// it returns and must become equal; all restart, and nothing is missing.
#[test]
fn a_node_dies_and_comes_back_and_the_replicas_are_equal() {
    run(async |cluster| {
        // A large extent, appended in two packets; its repeat is the same extent.
        let (a, b) = (pattern(1, 100_000), pattern(2, 50_000));
        let new = AppendTarget::New { token: 1 };
        let (large, offset, committed) = cluster.append_patiently(1, 1, new, &a).await;
        assert_eq!((offset, committed), (0, 100_000));
        let more = AppendTarget::Extent { extent: large, offset: 100_000 };
        assert_eq!(cluster.append(1, 1, more, &b).await, Ok((large, 100_000, 150_000)));
        assert_eq!(cluster.append(1, 1, new, &a).await, Ok((large, 0, 150_000)));
        for node in [1, 2, 3] {
            let read = cluster.read(node, large, 0..100_000, false).await;
            assert_eq!(read, Ok(a.clone()), "node {node}");
        }
        let stale = cluster.append(1, 0, new, &a).await.unwrap_err();
        assert!(matches!(stale, DataError::StaleEpoch { .. }), "{stale:?}");
        let elsewhere = cluster.append(2, 1, new, &a).await.unwrap_err();
        assert!(matches!(elsewhere, DataError::NotPrimary { .. }), "{elsewhere:?}");

        // An overwrite is read at the leader, and the others send readers there.
        let over = pattern(3, 10_000);
        cluster.overwrite(&[1, 2, 3], 1, large, 5_000, &over).await;
        let leader = cluster.leader(&[1, 2, 3]).await;
        let read = cluster.read(leader, large, 5_000..15_000, true).await;
        assert_eq!(read, Ok(over.clone()));
        for follower in [1, 2, 3].into_iter().filter(|node| *node != leader) {
            let refused = cluster.read(follower, large, 0..100, false).await;
            assert!(matches!(refused, Err(DataError::NotPrimary { .. })), "{refused:?}");
        }
        cluster.equal_digests(&[1, 2, 3], 1).await;

        // A backup dies: the extent is sealed at what is committed.
        cluster.kill_node(3).await;
        let more = AppendTarget::Extent { extent: large, offset: 150_000 };
        let sealed = cluster.append(1, 1, more, &b).await;
        assert_eq!(sealed, Err(DataError::Sealed { length: 150_000 }));

        // The other two go on in a new epoch.
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let new = AppendTarget::New { token: 2 };
        let (second, ..) = cluster.append_patiently(1, 2, new, &b).await;
        let late = cluster.append(1, 2, more, &b).await;
        assert!(matches!(late, Err(DataError::Sealed { .. })), "{late:?}");
        let small = AppendTarget::Small { token: 3 };
        let (shared, at, _) = cluster.append_patiently(1, 2, small, &a[..999]).await;
        let again = pattern(4, 4_096);
        cluster.overwrite(&[1, 2], 2, large, 8_192, &again).await;
        cluster.overwrite(&[1, 2], 2, second, 0, &again).await;
        cluster.equal_digests(&[1, 2], 3).await;

        // It returns, lacks all that, and is made equal.
        cluster.start_node(3).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        let digests = cluster.equal_digests(&[1, 2, 3], 3).await;
        let read = cluster.read(3, shared, at..at + 999, false).await;
        assert_eq!(read, Ok(a[..999].to_vec()));

        // Everything restarts.
        for node in [1, 2, 3] {
            cluster.kill_node(node).await;
        }
        for node in [1, 2, 3] {
            cluster.start_node(node).await;
        }
        assert_eq!(cluster.equal_digests(&[1, 2, 3], 3).await, digests);
        let leader = cluster.leader(&[1, 2, 3]).await;
        let read = cluster.read(leader, large, 0..100_000, true).await.unwrap();
        assert_eq!(read[8_192..12_288], again[..]);
        assert_eq!(read[5_000..8_192], over[..3_192]);
        let new = AppendTarget::New { token: 9 };
        let (fresh, ..) = cluster.append_patiently(1, 4, new, &b).await;
        assert!(fresh > second, "an extent id was given again");
    });
}

/// Story: a slow link held a copy of an overwrite back that its client had repeated elsewhere, and put
/// newer bytes over, when the first leader led again.
#[test]
fn a_copy_of_an_overwrite_is_not_carried_out_in_a_later_term() {
    run(async |cluster| {
        let all = [1, 2, 3];
        let (old, newer) = (pattern(2, 3_000), pattern(3, 3_000));
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &pattern(1, 10_000)).await;
        let leader = cluster.leader(&all).await;
        let (partition, epoch) = (PARTITION, Epoch(1));
        let mut late =
            Overwrite { partition, epoch, extent, offset: 0, term: 0, checksums: checksums(&old) };
        let asked = cluster.overwrite_at(leader, &late, &old).await;
        let Err(DataError::OtherTerm { term }) = asked else { panic!("{asked:?}") };
        late.term = term;
        cluster.overwrite(&all, 1, extent, 0, &old).await;
        cluster.kill_node(leader).await;
        cluster.start_node(leader).await;
        cluster.overwrite(&all, 1, extent, 0, &newer).await;
        for node in all {
            let refused = cluster.overwrite_at(node, &late, &old).await;
            let expected =
                matches!(refused, Err(DataError::OtherTerm { .. } | DataError::NotPrimary { .. }));
            assert!(expected, "{refused:?}");
        }
        let leader = cluster.leader(&all).await;
        assert_eq!(cluster.read(leader, extent, 0..3_000, true).await, Ok(newer));
    });
}

/// Managers are not on the data path: data nodes find each other again without them.
#[test]
fn everything_restarts_while_the_managers_are_away() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.restart_without_managers().await;
        cluster.leader(&[1, 2, 3]).await;
        cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[5_000..]).await;
        let new = AppendTarget::New { token: 2 };
        cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.equal_digests(&[1, 2, 3], 2).await;
    });
}

/// Story: a backup lost its power, and with it what was acknowledged and not yet flushed. The extent
/// was closed, so no append met the gap: for ten minutes there was a copy less than anybody thought.
#[test]
fn a_member_that_lost_unflushed_bytes_is_filled_when_it_returns() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let extent = cluster.closed_extent(&bytes).await;
        cluster.kill_node(3).await;
        cluster.lose_extent(3, extent);
        cluster.start_node(3).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        assert_eq!(cluster.read(3, extent, 0..10_000, false).await, Ok(bytes));
    });
}

/// Story: the same with an extent that was still open. Alignment leaves those alone, because an append
/// that meets the gap breaks them; but the writer waited for its fsync, which failed after a minute.
#[test]
fn an_open_extent_is_made_whole_when_a_member_returns() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.kill_node(3).await;
        cluster.lose_extent(3, extent);
        cluster.start_node(3).await;
        let (partition, epoch, extents) = (PARTITION, Epoch(1), vec![(extent, 10_000)]);
        let flush = DataRequest::Flush { partition, epoch, extents };
        nodes::until("the member can flush it", async || {
            cluster.ask(&cluster.as_client, 3, &flush, Bytes::new()).await.ok()
        })
        .await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Story: power failed everywhere and took an extent's bytes from all replicas; one kept the file. The
/// primary had nothing to make even and sealed nothing, so that replica answered overwrites with
/// "busy" for as long as it led: the file's writers hung, one deadline after the other.
#[test]
fn an_extent_that_is_empty_where_it_is_left_is_sealed_there() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        for node in [1, 2, 3] {
            cluster.kill_node(node).await;
        }
        cluster.lose_extent(1, extent);
        for node in [2, 3] {
            cluster.empty_extent(node, extent);
            cluster.start_node(node).await;
        }
        // One of these two leads when the primary comes.
        cluster.leader(&[2, 3]).await;
        cluster.start_node(1).await;
        let answer = nodes::until("the leader knows what became of the bytes", async || {
            let all = [1, 2, 3];
            match cluster.try_overwrite(&all, 1, extent, 0, &bytes[..100]).await {
                Err(DataError::Busy) => None,
                other => Some(other),
            }
        })
        .await;
        assert_eq!(answer, Err(DataError::Lost { length: 0 }));
    });
}

/// Found by power cuts on real processes: what power had left of a small extent was dead, so it was removed;
/// the flush that came after that, for the bytes that power had taken, succeeded, and so did an fsync.
#[test]
fn bytes_of_an_extent_that_was_removed_cannot_be_flushed() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let range = FreedRange { partition: PARTITION, extent, offset: 0, length: u64::MAX };
        cluster.ask_all(&cluster.as_meta, &DataRequest::Free { ranges: vec![range] }).await;
        let (partition, epoch, extents) = (PARTITION, Epoch(1), vec![(extent, 10_000)]);
        let flush = DataRequest::Flush { partition, epoch, extents };
        for node in [1, 2, 3] {
            let flushed = cluster.ask(&cluster.as_client, node, &flush, Bytes::new()).await;
            assert_eq!(flushed.unwrap_err(), DataError::NoExtent, "node {node}");
        }
    });
}

/// Story: the extents that were open when a primary ceased to be one were noted there as broken. No
/// run looked at them any more, and the node reported them as unaligned for ever.
#[test]
fn a_former_primary_has_nothing_to_align() {
    run(async |cluster| {
        let bytes = pattern(1, 10_000);
        let new = AppendTarget::New { token: 1 };
        cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[2, 1, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Small files from many clients at once share one extent, each at its own place.
#[test]
fn pieces_of_many_writers_share_an_extent() {
    run(async |cluster| {
        let first = AppendTarget::Small { token: 0 };
        cluster.append_patiently(1, 1, first, &pattern(0, 100)).await;
        let cluster_ref = &cluster;
        let appends = (1..=200u64).map(|token| async move {
            let bytes = pattern(token, 100 + token as usize);
            let target = AppendTarget::Small { token };
            let placed = cluster_ref.append(1, 1, target, &bytes).await.unwrap();
            (placed, bytes)
        });
        let placed = join_all(appends).await;
        let extents: BTreeSet<_> = placed.iter().map(|((extent, ..), _)| *extent).collect();
        assert_eq!(extents.len(), 1);
        for ((extent, offset, _), bytes) in &placed {
            let read = cluster.read(2, *extent, *offset..offset + bytes.len() as u64, false).await;
            assert_eq!(read.as_ref(), Ok(bytes));
        }
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// A replica that lost everything joins again, blank: it has no say, and gets every byte.
#[test]
fn a_blank_replica_is_filled() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let mut extents = Vec::new();
        for token in 0..5 {
            let new = AppendTarget::New { token };
            extents.push(cluster.append_patiently(1, 1, new, &bytes).await.0);
        }
        cluster.overwrite(&[1, 2, 3], 1, extents[0], 1_000, &pattern(2, 3_000)).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.overwrite(&[1, 2], 2, extents[1], 1_000, &pattern(3, 3_000)).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 5).await;
        assert_eq!(cluster.read(3, extents[4], 0..300_000, false).await, Ok(bytes));
        // It never saw these overwrites, but it knows that others may have newer bytes.
        for extent in &extents[..2] {
            let leader = cluster.leader(&[1, 2, 3]).await;
            let read = cluster.read(3, *extent, 0..300_000, false).await;
            match leader {
                3 => assert!(read.is_ok(), "{read:?}"),
                _ => assert!(matches!(read, Err(DataError::NotPrimary { .. })), "{read:?}"),
            }
        }
    });
}

/// What was copied for the sake of one more copy must not push out what clients read.
#[test]
fn what_was_filled_leaves_the_page_cache() {
    run(async |cluster| {
        const LENGTH: usize = 300_000;
        let (target, bytes) = (AppendTarget::New { token: 1 }, pattern(1, LENGTH));
        let (extent, ..) = cluster.append_patiently(1, 1, target, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        nodes::until("the third is filled", async || {
            (cluster.report(1).await?.unaligned == 0).then_some(())
        })
        .await;
        let cached = |node| cluster.cached_bytes(node, extent);
        assert!(cached(3) < LENGTH / 4 && cached(2) >= LENGTH, "{}, {}", cached(3), cached(2));
        assert_eq!(cluster.read(3, extent, 0..LENGTH as u64, false).await, Ok(bytes));
    });
}

/// Nor must the memory of a long extent be held until its end: the next copy would be made in fresh pages,
/// which cost a fifth of the CPU of a repair.
#[test]
fn a_fill_gives_memory_back_behind_itself() {
    run(async |cluster| {
        const PIECE: usize = 128 << 10;
        const LENGTH: usize = 64 << 20;
        let bytes = pattern(1, PIECE);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        for offset in (PIECE..LENGTH).step_by(PIECE) {
            let target = AppendTarget::Extent { extent, offset: offset as u64 };
            cluster.append_patiently(1, 1, target, &bytes).await;
        }
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.start_slow_filling_node(3, 24 << 20).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        let (mut cached_max, mut written) = (0, 0);
        nodes::until("the third is filled", async || {
            if cluster.report(1).await?.unaligned == 0 {
                return Some(());
            }
            let file = std::fs::metadata(cluster.extent_file(3, extent)).ok()?;
            written = file.blocks() as usize * 512;
            cached_max = cached_max.max(cluster.cached_bytes(3, extent));
            None
        })
        .await;
        assert!(written > LENGTH * 3 / 4, "it was not seen filling: {written}");
        assert!((1..LENGTH * 3 / 4).contains(&cached_max), "{cached_max} of {LENGTH}");
    });
}

/// A restored backup has forgotten votes and bytes that its node promised: nobody hears of it. Method: a backup is
/// made while the node runs, which only goes on running; the backup is put back, and started twice.
#[test]
fn a_node_whose_backup_is_put_back_does_not_serve() {
    run(async |cluster| {
        let backup = tempfile::tempdir().unwrap();
        cluster.kill_node(3).await;
        cluster.start_short_lived_node(3).await;
        cluster.copy_directory(3, backup.path());
        let before = cluster.renewals();
        nodes::until("another life has begun", async || {
            (cluster.renewals() >= before + 2).then_some(())
        })
        .await;
        cluster.kill_node(3).await;
        cluster.put_back(3, backup.path());
        for _ in 0..2 {
            let refused = cluster.start_in_vain(3).await;
            assert!(refused.contains("an older copy"), "{refused}");
        }
    });
}

/// Simulation, seed 490403: members were asked for a mark in an epoch that was over, for three seconds each, and fsync waited.
#[test]
fn an_overwrite_that_waits_for_a_mark_is_answered_when_its_epoch_is_over() {
    run(async |cluster| {
        let bytes = pattern(1, 100_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let leader = cluster.leader(&[1, 2, 3]).await;
        let others: Vec<u32> = [1, 2, 3].into_iter().filter(|node| *node != leader).collect();
        cluster.kill_node(others[0]).await;
        let left = [leader, others[1]];
        let before = cluster.report(leader).await.unwrap().overwritten;
        let first = cluster.try_overwrite(&left, 1, extent, 0, &bytes[..3_000]);
        let next = async {
            nodes::until("it is applied", async || {
                let report = cluster.report(leader).await?;
                (before < report.overwritten && report.overwritten <= report.applied).then_some(())
            })
            .await;
            cluster.configure(configuration(2, &left), &left).await;
            std::time::Instant::now()
        };
        let answered = async { (first.await, std::time::Instant::now()) };
        let ((first, answered), over) = tokio::join!(answered, next);
        let waited = answered.saturating_duration_since(over);
        assert!(waited < std::time::Duration::from_secs(1), "{first:?} after {waited:?}");
        cluster.overwrite(&left, 2, extent, 0, &bytes[..3_000]).await;
    });
}

/// Simulation, seed 378659 (there of a meta partition): the managers' word to delete what was left of a replica came late, or for
/// the second time, and took a member.
#[test]
fn a_leftover_that_has_joined_again_is_not_deleted_by_a_late_word() {
    run(async |cluster| {
        let bytes = pattern(1, 100_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let log_end = cluster.report(3).await.unwrap().log_end;
        assert!(log_end.is_some());
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        let late = cluster.delete_replica(3, Deletion::Leftover { log_end }).await;
        assert_eq!(late, Err(DataError::Busy));
        assert_eq!(cluster.read(3, extent, 0..100_000, false).await, Ok(bytes));
        cluster.configure(configuration(5, &[1, 2]), &[1, 2]).await;
        let log_end = cluster.report(3).await.unwrap().log_end;
        assert_eq!(cluster.delete_replica(3, Deletion::Leftover { log_end }).await, Ok(()));
    });
}

/// What is written while a replica learns reaches it: it becomes a member by a comparison of before.
#[test]
fn a_learner_gets_what_is_closed_while_it_learns() {
    run(async |cluster| {
        let bytes = pattern(1, 300_000);
        let first = AppendTarget::New { token: 1 };
        cluster.append_patiently(1, 1, first, &bytes).await;
        cluster.configure(learning(2, &[1, 2], 3), &[1, 2, 3]).await;
        nodes::until("all are compared", async || {
            (cluster.report(1).await?.unaligned == 0).then_some(())
        })
        .await;
        let new = AppendTarget::New { token: 2 };
        let (extent, ..) = cluster.append_patiently(1, 2, new, &bytes).await;
        cluster.close(extent).await;
        nodes::until("the learner has it", async || {
            let held = std::fs::read(cluster.extent_file(3, extent)).ok()?;
            (held.get(..300_000) == Some(&bytes[..])).then_some(())
        })
        .await;
    });
}

/// Deleted, and wanted again before its files are gone: none is made that goes with them.
#[test]
fn a_replica_is_made_again_when_the_files_of_the_former_are_gone() {
    run(async |cluster| {
        let new = AppendTarget::New { token: 1 };
        cluster.append_patiently(1, 1, new, &pattern(1, 300_000)).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        for _ in 0..20 {
            let made = nodes::until("it is made again", async || {
                cluster.try_create_replica(3, configuration(2, &[1, 2])).await.ok()
            });
            tokio::join!(cluster.drop_replica(3), made);
        }
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        cluster.kill_node(3).await;
        cluster.start_node(3).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// The primary dies with appends under way. Another one takes over; what was acknowledged is there.
#[test]
fn the_primary_dies_in_the_middle_of_a_stream() {
    run(async |cluster| {
        let bytes = pattern(1, 128 << 10);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let mut acknowledged = bytes.len() as u64;
        let stream = async {
            loop {
                let more = AppendTarget::Extent { extent, offset: acknowledged };
                match cluster.append(1, 1, more, &bytes).await {
                    Ok((.., committed)) => acknowledged = committed,
                    Err(_) => return,
                }
                if acknowledged > 20 * bytes.len() as u64 {
                    return;
                }
            }
        };
        stream.await;
        // What is sent now may or may not arrive anywhere.
        let more = AppendTarget::Extent { extent, offset: acknowledged };
        let lost = tokio::time::timeout(
            std::time::Duration::from_micros(300),
            cluster.append(1, 1, more, &bytes),
        );
        drop(lost.await);
        cluster.kill_node(1).await;
        cluster.leader(&[2, 3]).await;
        cluster.configure(configuration(2, &[2, 3]), &[2, 3]).await;
        let digests = cluster.equal_digests(&[2, 3], 1).await;
        assert!(digests[0].length >= acknowledged, "{digests:?} lacks {acknowledged}");
        for node in [2, 3] {
            let last = acknowledged - bytes.len() as u64;
            let read = cluster.read(node, extent, last..acknowledged, false).await;
            assert_eq!(read.as_ref(), Ok(&bytes));
        }
        cluster.append_patiently(2, 2, AppendTarget::New { token: 2 }, &bytes).await;
        cluster.start_node(1).await;
        cluster.join(1, configuration(4, &[2, 3, 1]), &[2, 3, 1]).await;
        cluster.equal_digests(&[2, 3, 1], 2).await;
    });
}

/// What a file's life needs besides appends: flush, close, free.
#[test]
fn extents_are_flushed_closed_and_freed() {
    run(async |cluster| {
        let bytes = pattern(1, 20_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let flush = |length| DataRequest::Flush {
            partition: PARTITION,
            epoch: Epoch(1),
            extents: vec![(extent, length)],
        };
        cluster.ask_all(&cluster.as_client, &flush(20_000)).await;
        let more = cluster.ask(&cluster.as_client, 2, &flush(20_001), Bytes::new()).await;
        assert_eq!(more.map(|_| ()), Err(DataError::NotHere));
        cluster.close(extent).await;
        let late = AppendTarget::Extent { extent, offset: 20_000 };
        let sealed = cluster.append(1, 1, late, &bytes).await;
        assert_eq!(sealed, Err(DataError::Sealed { length: 20_000 }));
        cluster.equal_digests(&[1, 2, 3], 1).await;
        // What lies behind the end of a sealed extent is on no replica: nobody needs to wait.
        let lost = DataError::Lost { length: 20_000 };
        let beyond =
            nodes::until("the leader has heard that the extent is sealed", async || match cluster
                .try_overwrite(&[1, 2, 3], 1, extent, 19_999, &bytes[..2])
                .await
            {
                Err(DataError::Busy) => None,
                told => Some(told),
            });
        assert_eq!(beyond.await, Err(lost.clone()));
        let beyond = cluster.read(3, extent, 19_999..20_001, false).await;
        assert_eq!(beyond, Err(lost.clone()));
        // A client may ask for anything: this range has no end that can be counted.
        let (offset, partition) = (u64::MAX - 10, PARTITION);
        let endless = Read { partition, extent, offset, length: 100, at_leader: false };
        assert_eq!(cluster.read_as_said(3, endless).await, Err(lost.clone()));
        let more = cluster.ask(&cluster.as_client, 2, &flush(20_001), Bytes::new()).await;
        assert_eq!(more.map(|_| ()), Err(lost));
        let range = FreedRange { partition: PARTITION, extent, offset: 0, length: u64::MAX };
        let free = DataRequest::Free { ranges: vec![range] };
        for _ in 0..2 {
            cluster.ask_all(&cluster.as_meta, &free).await;
        }
        cluster.equal_digests(&[1, 2, 3], 0).await;
        let gone = cluster.read(3, extent, 0..10, false).await;
        assert_eq!(gone, Err(DataError::NoExtent));
        let gone = cluster.try_overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..2]).await;
        assert_eq!(gone, Err(DataError::NoExtent));
        let not_allowed = cluster.ask(&cluster.as_client, 1, &free, Bytes::new()).await;
        assert_eq!(not_allowed.map(|_| ()), Err(DataError::Invalid));
    });
}

/// All bytes of a sealed extent are committed, also if the process that knew it ended: who
/// restarts knows no more than the header says, and equal replicas are not told again.
#[test]
fn a_sealed_extent_takes_overwrites_after_everything_restarted() {
    run(async |cluster| {
        let bytes = pattern(1, 20_000);
        let extent = cluster.closed_extent(&bytes).await;
        for node in [1, 2, 3] {
            cluster.kill_node(node).await;
        }
        // Led by one that was not the primary.
        for node in [2, 3] {
            cluster.start_node(node).await;
        }
        cluster.leader(&[2, 3]).await;
        cluster.start_node(1).await;
        let digests = cluster.equal_digests(&[1, 2, 3], 1).await;
        assert_eq!(digests[0].length, 20_000, "a comparison leaves bytes out");
        cluster.overwrite(&[1, 2, 3], 1, extent, 15_000, &bytes[..5_000]).await;
    });
}

/// What was freed while a member was out of the configuration is freed there too when it is back:
/// nobody else will tell it.
#[test]
fn frees_that_a_member_missed_reach_it() {
    run(async |cluster| {
        let bytes = pattern(1, 20_000);
        let mut extents = Vec::new();
        for token in 1..=3 {
            let new = AppendTarget::New { token };
            extents.push(cluster.append_patiently(1, 1, new, &bytes).await.0);
        }
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let range = |extent: usize, offset, length| {
            let (partition, extent) = (PARTITION, extents[extent]);
            FreedRange { partition, extent, offset, length }
        };
        // A whole extent, whole blocks of the second, a part of a block of the third.
        let ranges = vec![range(0, 0, u64::MAX), range(1, 0, 9_000), range(2, 0, 4_000)];
        for node in [1, 2] {
            let free = DataRequest::Free { ranges: ranges.clone() };
            cluster.ask(&cluster.as_meta, node, &free, Bytes::new()).await.unwrap();
        }
        cluster.start_node(3).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 2).await;
        let free = DataRequest::Free { ranges: vec![range(2, 4_000, 96)] };
        cluster.ask_all(&cluster.as_meta, &free).await;
        cluster.equal_digests(&[1, 2, 3], 2).await;
    });
}

/// Story: all bytes of an extent were freed while it was open. Alignment sealed it at the primary,
/// which removed it there and then, and took that for the word that the others had too; they had only
/// heard of the bytes, and kept an extent that was never sealed.
#[test]
fn an_extent_that_dies_open_is_removed_everywhere() {
    run(async |cluster| {
        let bytes = pattern(1, 20_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        let range = FreedRange { partition: PARTITION, extent, offset: 0, length: 20_000 };
        cluster.ask_all(&cluster.as_meta, &DataRequest::Free { ranges: vec![range] }).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        // Not the leader: everybody has adopted the epoch when its first alignment begins, and answers.
        cluster.configure(configuration(2, &[2, 1, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 0).await;
    });
}

/// Bytes that no file got are deleted on the word of the inode's partition, and only those.
#[test]
fn unpublished_bytes_are_deleted_on_the_partitions_word() {
    run(async |cluster| {
        let bytes = pattern(1, 50_000);
        let new = |token| AppendTarget::New { token };
        let (kept, ..) = cluster.append_patiently(1, 1, new(1), &bytes).await;
        let unwanted = cluster.append_for(nodes::UNWANTED, 1, 1, new(2), &bytes).await.unwrap().0;
        cluster.equal_digests(&[1, 2, 3], 2).await;
        let left = cluster.equal_digests(&[1, 2, 3], 1).await;
        assert_eq!(left[0].extent, kept);
        for node in [1, 2, 3] {
            let gone = cluster.read(node, unwanted, 0..10, false).await;
            assert_eq!(gone, Err(DataError::NoExtent), "node {node}");
            assert_eq!(cluster.read(node, kept, 0..50_000, false).await.as_ref(), Ok(&bytes));
        }
    });
}

/// Story: a primary that had lost an extent got it back from a backup, but not the word whose it was.
/// When nobody had published it the others asked, and deleted theirs; the primary had nobody to ask.
#[test]
fn a_replica_that_was_filled_knows_whose_bytes_it_holds() {
    run(async |cluster| {
        let bytes = pattern(1, 50_000);
        let new = |token| AppendTarget::New { token };
        let (kept, ..) = cluster.append_patiently(1, 1, new(1), &bytes).await;
        let unwanted = cluster.append_for(nodes::UNWANTED, 1, 1, new(2), &bytes).await.unwrap().0;
        cluster.kill_node(1).await;
        cluster.lose_extent(1, unwanted);
        cluster.start_node(1).await;
        let left = cluster.equal_digests(&[1, 2, 3], 1).await;
        assert_eq!(left[0].extent, kept);
    });
}

/// Runs futures concurrently, in order of their results.
async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<T>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, result) in pending.iter_mut().zip(&mut results) {
            if result.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *result = Some(value);
            }
        }
        match results.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    results.into_iter().flatten().collect()
}
