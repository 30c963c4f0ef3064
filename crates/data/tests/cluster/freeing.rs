//! What a file's life needs besides appends, up to the end of its bytes.

use bytes::Bytes;
use milpa_types::{DataError, Epoch, FreedRange};
use milpa_wire::data::{AppendTarget, DataRequest, Read};

use super::nodes::{self, PARTITION, configuration, pattern};
use super::run;

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
