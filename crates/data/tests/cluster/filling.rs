//! A replica gets from others what it lacks.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_types::{DataError, Epoch};
use milpa_wire::data::{AppendTarget, DataRequest};

use super::nodes::{self, PARTITION, configuration, learning, pattern};
use super::run;

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

/// A fill leaves the disk and the network to those who work: it takes no more bytes a second than it may.
#[test]
fn a_fill_keeps_to_its_rate() {
    run(async |cluster| {
        let bytes = pattern(1, 1 << 20);
        for token in 0..3 {
            cluster.append_patiently(1, 1, AppendTarget::New { token }, &bytes).await;
        }
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.start_slow_filling_node(3, 1 << 20).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        let began = Instant::now();
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 3).await;
        assert!(began.elapsed() >= Duration::from_millis(2_500), "{:?}", began.elapsed());
    });
}

/// Found by a reader: a new replica was filled past the reserve of its disk, and the limit that an operator had set.
#[test]
fn a_new_replica_is_not_filled_on_a_full_disk() {
    run(async |cluster| {
        let bytes = pattern(1, 1 << 20);
        let (extent, ..) =
            cluster.append_patiently(1, 1, AppendTarget::New { token: 1 }, &bytes).await;
        cluster.close(extent).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.start_full_node(3).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        nodes::until("all are compared", async || {
            let unaligned = cluster.report(1).await?.unaligned;
            (unaligned == 1).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(cluster.report(1).await.unwrap().unaligned, 1);
        assert!(cluster.report(3).await.unwrap().allocated_bytes < 1 << 19);
        cluster.kill_node(3).await;
        cluster.start_node(3).await;
        nodes::until("it is filled", async || {
            (cluster.report(1).await?.unaligned == 0).then_some(())
        })
        .await;
    });
}

/// Found by a reader: a member that had been away while the disks became full was never made whole again: the reserve was
/// kept from it, as from a new one.
#[test]
fn one_that_is_back_is_made_whole_on_a_full_disk() {
    run(async |cluster| {
        let bytes = pattern(1, 1 << 20);
        let new = |token| AppendTarget::New { token };
        cluster.append_patiently(1, 1, new(1), &bytes).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        let (extent, ..) = cluster.append_patiently(1, 2, new(2), &bytes).await;
        cluster.close(extent).await;
        cluster.start_full_node(3).await;
        cluster.join(3, configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 2).await;
    });
}

/// Found by a reader: each piece of a fill was given up if any block of its extent was overwritten while it was on its way,
/// so that a file that is overwritten all the time stayed one copy short. Now what was overwritten is laid over it.
#[test]
fn an_extent_that_is_overwritten_all_the_time_is_filled() {
    run(async |cluster| {
        let bytes = pattern(1, 1_000_000);
        let (extent, ..) =
            cluster.append_patiently(1, 1, AppendTarget::New { token: 1 }, &bytes).await;
        let mut expected = bytes;
        for piece in 1..8_u64 {
            let bytes = pattern(piece, 1_000_000);
            let target = AppendTarget::Extent { extent, offset: piece * 1_000_000 };
            cluster.append_patiently(1, 1, target, &bytes).await;
            expected.extend(bytes);
        }
        cluster.close(extent).await;
        cluster.kill_node(3).await;
        cluster.configure(configuration(2, &[1, 2]), &[1, 2]).await;
        cluster.start_slow_filling_node(3, 2 << 20).await;
        cluster.drop_replica(3).await;
        cluster.create_replica(3, configuration(2, &[1, 2])).await;
        cluster.configure(learning(3, &[1, 2], 3), &[1, 2]).await;
        let (expected, is_filled) = (RefCell::new(expected), Cell::new(false));
        let (cluster, extents) = (&*cluster, (&expected, &is_filled));
        let overwrite = async |writer: u64| {
            let (expected, is_filled) = extents;
            for round in 0.. {
                if is_filled.get() {
                    break;
                }
                // Each byte once, as nothing else would show that one is missing.
                let at = writer * 250_000 + round % 500 * 500;
                let bytes = pattern(writer * 1_000 + round, 500);
                cluster.overwrite(&[1, 2], 3, extent, at, &bytes).await;
                expected.borrow_mut()[at as usize..][..500].copy_from_slice(&bytes);
            }
        };
        let fill = async {
            nodes::until("it is filled", async || {
                std::fs::metadata(cluster.extent_file(3, extent)).ok()?;
                (cluster.report(1).await?.unaligned == 0).then_some(())
            })
            .await;
            is_filled.set(true);
        };
        tokio::join!(super::join_all((0..32).map(overwrite)), fill);
        let expected = expected.into_inner();
        // The members acknowledge: a learner applies the last of them a little later.
        nodes::until("the learner holds every byte", async || {
            let held = std::fs::read(cluster.extent_file(3, extent)).ok()?;
            (held.get(..8_000_000) == Some(&expected[..])).then_some(())
        })
        .await;
        cluster.configure(configuration(4, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
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
