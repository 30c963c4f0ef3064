//! Three data nodes over real sockets and files, killed and started again.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
// Clippy knows functions marked as tests only, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod alone;
mod damage;
mod disks;
mod filling;
mod freeing;
mod gaps;
mod last_copy;
mod lost;
mod news;
mod nodes;
mod speed;
mod stand_ins;

use std::collections::BTreeSet;

use milpa_types::{DataError, Deletion, Epoch};
use milpa_wire::data::{AppendTarget, Overwrite};
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
