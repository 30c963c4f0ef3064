//! What a program sees of its files while all goes well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use milpa_client::{ConnectError, OpenFlags};
use milpa_types::{AttributeChanges, InodeId, Timestamp};

use milpa_wire::data::DataRequest;
use milpa_wire::meta::{MetaRead, MetaRequest, MetaWrite};

use crate::cluster::{
    Call, Cluster, DATA, Fault, OWNER, config, create, name, pattern, read, write,
};

#[tokio::test(start_paused = true)]
async fn files_of_all_sizes_read_as_written_here_and_elsewhere() {
    let cluster = Cluster::new();
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    for length in [0, 1, 512, 513, 4096, 131_072, 131_073, 3_000_001] {
        let file = format!("/f{length}");
        let content = pattern(length as u8, length);
        write(&writer, &file, &content).await;
        assert!(read(&writer, &file).await == content, "{length} bytes, same client");
        assert!(read(&reader, &file).await == content, "{length} bytes, another client");
    }
    let state = cluster.lock();
    let small = state.data.extents.keys().filter(|(_, extent)| extent.is_small()).count();
    assert!((1..=3).contains(&small), "small files share extents");
    assert_eq!(state.data.count("flush"), 0, "close does not flush disks");
}

#[tokio::test(start_paused = true)]
async fn fsync_returns_when_every_member_has_every_byte_on_disk() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "log").await;
    for length in [100_000, 700_000, 10] {
        let end = client.getattr(opened.attributes.inode).await.unwrap().size;
        client.write(opened.handle, end, pattern(1, length), false).await.unwrap();
        client.fsync(opened.handle, false).await.unwrap();
        let state = cluster.lock();
        for segment in &state.meta.inodes[&opened.attributes.inode].segments {
            let milpa_types::Columns::One(column) = segment.columns else { panic!("striped") };
            let extent = &state.data.extents[&(column.partition, column.extent)];
            for node in DATA {
                let on_disk = extent.on_disk.get(&node).copied().unwrap_or(0);
                assert!(on_disk >= column.offset + segment.length, "{node} has {on_disk}");
            }
        }
    }
    let flushes = cluster.lock().data.count("flush");
    client.fsync(opened.handle, false).await.unwrap();
    assert_eq!(cluster.lock().data.count("flush"), flushes, "nothing new: nothing to flush");
}

#[tokio::test(start_paused = true)]
async fn what_was_flushed_is_marked_in_one_request_for_many_files() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let mut files = Vec::new();
    for i in 0..5 {
        let opened = create(&client, &format!("f{i}")).await;
        for _ in 0..3 {
            let end = client.getattr(opened.attributes.inode).await.unwrap().size;
            client.write(opened.handle, end, pattern(i, 4096), false).await.unwrap();
            client.fsync(opened.handle, false).await.unwrap();
        }
        files.push(opened.attributes.inode);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let state = cluster.lock();
    for inode in &files {
        let segments = &state.meta.inodes[inode].segments;
        assert!(segments.iter().all(|segment| segment.flushed), "{segments:?}");
    }
    assert_eq!(state.meta.count("mark_flushed"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_synchronous_write_is_on_disk_when_it_returns() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let flags = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let opened = client.create(InodeId::ROOT, &name("wal"), OWNER, flags).await.unwrap();
    client.write(opened.handle, 0, pattern(1, 600_000), false).await.unwrap();
    client.write(opened.handle, 600_000, pattern(2, 4096), false).await.unwrap();
    let state = cluster.lock();
    assert_eq!(state.meta.inodes[&opened.attributes.inode].attributes.size, 604_096);
    for extent in state.data.extents.values() {
        assert!(DATA.iter().all(|node| extent.on_disk[node] == extent.bytes.len() as u64));
    }
}

#[tokio::test(start_paused = true)]
async fn random_writes_replace_in_place_and_are_read_at_the_leader() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let mut model = pattern(3, 1_000_000).to_vec();
    write(&client, "/db", &model.clone().into()).await;
    let inode = client.resolve(b"/db", true).await.unwrap().inode;
    let opened = client.open(inode, OpenFlags::read_write()).await.unwrap();
    let appended = cluster.lock().data.count("append");
    for i in 0..20u64 {
        let at = (i * 48_611 % 990_000) as usize;
        let data = pattern(i as u8, 5000);
        model[at..at + 5000].copy_from_slice(&data);
        client.write(opened.handle, at as u64, data, false).await.unwrap();
    }
    client.fsync(opened.handle, true).await.unwrap();
    assert!(read(&client, "/db").await == model);
    assert!(read(&cluster.client().await, "/db").await == model, "told by the members");
    let state = cluster.lock();
    assert_eq!(state.data.count("append"), appended, "nothing was appended");
    assert!(state.data.count("overwrite") >= 16);
}

#[tokio::test(start_paused = true)]
async fn holes_and_cuts_are_exact_while_bytes_wait_in_the_buffer() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "sparse").await;
    let inode = opened.attributes.inode;
    let cut = |size| AttributeChanges { size: Some(size), ..AttributeChanges::default() };
    client.write(opened.handle, 1_000_000, pattern(1, 1000), false).await.unwrap();
    assert_eq!(client.getattr(inode).await.unwrap().size, 1_001_000, "not published yet");
    assert_eq!(client.setattr(inode, cut(1_000_500)).await.unwrap().size, 1_000_500);
    client.write(opened.handle, 10, pattern(2, 5), false).await.unwrap();
    assert_eq!(client.setattr(inode, cut(2_000_000)).await.unwrap().size, 2_000_000);
    client.flush(opened.handle).await.unwrap();
    let mut model = vec![0; 2_000_000];
    model[10..15].copy_from_slice(&pattern(2, 5));
    model[1_000_000..1_000_500].copy_from_slice(&pattern(1, 1000)[..500]);
    assert!(read(&client, "/sparse").await == model);
    assert!(read(&cluster.client().await, "/sparse").await == model);
    let segments = &cluster.lock().meta.inodes[&inode].segments;
    assert_eq!(segments.iter().map(|s| s.length).sum::<u64>(), 505, "holes take no space");
}

#[tokio::test(start_paused = true)]
async fn appending_handles_and_readers_share_what_is_not_published() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "shared").await;
    let other = client.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
    client.write(opened.handle, 0, Bytes::from_static(b"one "), false).await.unwrap();
    assert_eq!(client.append(other.handle, Bytes::from_static(b"two "), false).await, Ok(8));
    client.write(opened.handle, 8, Bytes::from_static(b"three"), false).await.unwrap();
    let seen = client.read(other.handle, 0, 100).await.unwrap().concat();
    assert_eq!(seen, b"one two three");
}

#[tokio::test(start_paused = true)]
async fn a_large_stream_passes_through_a_small_buffer() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|config| config.buffer_bytes = 4 << 20).await;
    let opened = create(&client, "stream").await;
    let whole = pattern(5, 40 << 20);
    for at in (0..whole.len()).step_by(1 << 20) {
        let piece = whole.slice(at..at + (1 << 20));
        client.write(opened.handle, at as u64, piece, false).await.unwrap();
    }
    client.flush(opened.handle).await.unwrap();
    let attributes = cluster.lock().meta.inodes[&opened.attributes.inode].attributes;
    assert_eq!(attributes.size, 40 << 20);
    assert!(read(&client, "/stream").await == whole);
}

#[tokio::test(start_paused = true)]
async fn what_is_written_reaches_the_servers_by_itself_after_a_while() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "lazy").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(read(&cluster.client().await, "/lazy").await == pattern(1, 200_000));
    assert!(cluster.lock().meta.keep_alives == 0, "too early for a keep-alive");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(cluster.lock().meta.keep_alives > 0);
}

#[tokio::test(start_paused = true)]
async fn a_time_set_after_a_write_is_not_undone_by_the_write() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "copied").await;
    client.write(opened.handle, 0, pattern(1, 3000), false).await.unwrap();
    let changes =
        AttributeChanges { modified: Some(Timestamp(1234)), ..AttributeChanges::default() };
    client.setattr(opened.attributes.inode, changes).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    client.release(opened.handle).await.unwrap();
    assert_eq!(client.resolve(b"/copied", true).await.unwrap().modified, Timestamp(1234));
    let seen = cluster.lock().meta.inodes[&opened.attributes.inode].attributes;
    assert_eq!(seen.modified, Timestamp(1234));
}

#[tokio::test(start_paused = true)]
async fn an_empty_file_that_is_truncated_shows_when() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/stamp", &Bytes::new()).await;
    let inode = client.resolve(b"/stamp", true).await.unwrap().inode;
    let past = AttributeChanges { modified: Some(Timestamp(1234)), ..AttributeChanges::default() };
    client.setattr(inode, past).await.unwrap();
    let flags = OpenFlags { truncate: true, ..OpenFlags::read_write() };
    client.open(inode, flags).await.unwrap();
    let after = client.resolve(b"/stamp", true).await.unwrap();
    assert!(after.modified > Timestamp(1234));
}

/// Who writes without privileges takes the set-id bits away, and sees it at once.
#[tokio::test(start_paused = true)]
async fn set_id_bits_do_not_survive_a_write_or_a_truncation() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    for (mode, left) in [(0o4755, 0o755), (0o6755, 0o755), (0o2644, 0o2644)] {
        let opened = create(&client, &format!("f{mode:o}")).await;
        let inode = opened.attributes.inode;
        let set = AttributeChanges { mode: Some(mode), ..AttributeChanges::default() };
        client.setattr(inode, set).await.unwrap();
        let mode_now = async || client.getattr(inode).await.unwrap().mode;
        client.write(opened.handle, 0, pattern(1, 100), false).await.unwrap();
        client.flush(opened.handle).await.unwrap();
        assert_eq!(mode_now().await, mode, "by root");
        client.write(opened.handle, 0, pattern(2, 100), true).await.unwrap();
        assert_eq!(mode_now().await, left, "not published yet");
        client.flush(opened.handle).await.unwrap();
        assert_eq!(mode_now().await, left);
        client.setattr(inode, set).await.unwrap();
        let truncate = OpenFlags { truncate: true, ..OpenFlags::read_write() };
        client.open(inode, truncate).await.unwrap();
        assert_eq!(mode_now().await, mode, "by root");
        client.open(inode, OpenFlags { clear_set_id: true, ..truncate }).await.unwrap();
        assert_eq!(mode_now().await, left);
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_saves_everything_and_ends_the_session() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "last").await;
    client.write(opened.handle, 0, pattern(9, 300_000), false).await.unwrap();
    client.shutdown().await.unwrap();
    assert!(client.getattr(InodeId::ROOT).await.is_err(), "shut is shut");
    assert!(cluster.lock().meta.sessions.is_empty());
    assert!(read(&cluster.client().await, "/last").await == pattern(9, 300_000));
}

#[tokio::test(start_paused = true)]
async fn a_wrong_volume_or_cluster_is_one_clear_line() {
    let cluster = Cluster::new();
    let network = || std::sync::Arc::new(crate::cluster::Network(std::sync::Arc::clone(&cluster)));
    let mut wrong = config();
    wrong.volume = "meadow".to_owned();
    let error = milpa_client::Client::connect_over(network(), wrong).await.unwrap_err();
    assert!(error.to_string().contains("milpa volume list"), "{error}");
    let mut wrong = config();
    wrong.cluster = Some(milpa_types::ClusterId(8));
    let error = milpa_client::Client::connect_over(network(), wrong).await.unwrap_err();
    assert!(matches!(error, ConnectError::OtherCluster { .. }), "{error}");
}

/// Bytes that no file refers to are deleted once their writer's session is unknown in the inode's
/// partition: a long append to an old file was, under its writer.
#[tokio::test(start_paused = true)]
async fn a_session_is_open_where_a_file_is_before_bytes_are_sent_for_it() {
    let cluster = Cluster::new();
    let inode = create(&cluster.client().await, "old").await.attributes.inode;
    let client = cluster.client().await;
    let opened = client.open(inode, OpenFlags::read_write()).await.unwrap();
    let is_known = Arc::new(AtomicBool::new(false));
    let known = Arc::clone(&is_known);
    cluster.rule(move |call| {
        match call {
            Call::Meta(_, MetaRequest::Write { write: MetaWrite::OpenSession, .. }) => {
                known.store(true, Ordering::Relaxed);
            }
            Call::Data(_, DataRequest::Append(_)) => assert!(known.load(Ordering::Relaxed)),
            _ => {}
        }
        None
    });
    client.write(opened.handle, 0, pattern(1, 2_000_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    assert!(is_known.load(Ordering::Relaxed) && cluster.lock().data.count("append") > 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_writer_that_never_rests_wrote_is_part_of_the_file_in_time() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|config| config.buffer_bytes = 4 << 20).await;
    let opened = create(&client, "stream").await;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Slow(Duration::from_secs(1))),
        _ => None,
    });
    let (began, mut at) = (tokio::time::Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(30) {
        client.write(opened.handle, at, pattern(1, 1 << 18), false).await.unwrap();
        at += 1 << 18;
    }
    let published = cluster.lock().meta.inodes[&opened.attributes.inode].attributes.size;
    assert!(published > at / 2, "{published} of {at} bytes");
}

/// An open asks for what a read needs, and nothing is asked for again. (With a clock that runs: an answer passed for
/// overtaken by itself.)
#[tokio::test]
async fn an_open_and_a_read_ask_for_the_map_once() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 300_000)).await;
    let client = cluster.client().await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    for _ in 0..2 {
        let reads = cluster.lock().meta.count("read");
        let handle = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
        client.getattr(inode).await.unwrap();
        client.read(handle, 0, 1000).await.unwrap();
        client.release(handle).await.unwrap();
        assert_eq!(cluster.lock().meta.count("read"), reads + 1);
    }
}

/// Found by a reader: of a file of many segments nothing is kept when it is closed, and who opened it at that moment
/// had only been told that it had not changed. It was told `EIO`.
#[tokio::test(start_paused = true)]
async fn a_file_of_many_segments_is_opened_while_it_is_closed() {
    let cluster = Cluster::new();
    let writer = cluster.client().await;
    let opened = create(&writer, "f").await;
    for at in (0..300).rev() {
        writer.write(opened.handle, at * 10_000, pattern(at as u8, 5000), false).await.unwrap();
        writer.flush(opened.handle).await.unwrap();
    }
    let inode = opened.attributes.inode;
    assert!(cluster.lock().meta.inodes[&inode].segments.len() > 256);
    let client = cluster.client().await;
    let first = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    cluster.once(Fault::Slow(Duration::from_millis(100)), |call| {
        let Call::Meta(_, MetaRequest::Read { read, .. }) = call else { return false };
        matches!(read, MetaRead::GetAttributes { .. })
    });
    let closing = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        client.release(first).await.unwrap();
    };
    let (second, ()) = tokio::join!(client.open(inode, OpenFlags::read_only()), closing);
    let got = client.read(second.unwrap().handle, 2_990_000, 5000).await.unwrap().concat();
    assert!(got == pattern(299_u64 as u8, 5000));
}
