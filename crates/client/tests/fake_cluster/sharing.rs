//! Two clients on one file: close-to-open, truncation under one another, expired leases.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_client::{FsError, OpenFlags};
use milpa_types::{AttributeChanges, InodeId, MetaError, MetaSlot, NodeId, PartitionId};
use milpa_wire::data::DataRequest;
use milpa_wire::meta::{MetaRead, MetaRequest, MetaWrite};
use tokio::sync::Notify;

use crate::cluster::{Call, Cluster, Fault, META, OWNER, create, name, pattern, read, write};

#[tokio::test(start_paused = true)]
async fn pages_stay_over_an_open_only_if_nobody_else_wrote() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    write(&one, "/f", &pattern(1, 5000)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    let open = async |client: &milpa_client::Client| {
        let opened = client.open(inode, OpenFlags::read_write()).await.unwrap();
        client.release(opened.handle).await.unwrap();
        opened.keep_cache
    };
    assert!(open(&one).await, "only we wrote");
    assert!(!open(&other).await, "never seen");
    assert!(open(&other).await, "unchanged");
    write(&one, "/f", &pattern(2, 5000)).await;
    assert!(!open(&other).await, "changed by somebody else");
    assert!(open(&one).await, "changed by ourselves");
    assert!(read(&other, "/f").await == pattern(2, 5000));
    // Its own change of the mode comes back with somebody else's version, one above the known one.
    let handle = one.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    one.write(handle, 0, pattern(3, 5000), false).await.unwrap();
    one.flush(handle).await.unwrap();
    let mode = AttributeChanges { mode: Some(0o600), ..AttributeChanges::default() };
    other.setattr(inode, mode).await.unwrap();
    assert!(!open(&other).await, "changed by somebody else, and then by ourselves");
}

fn is_creation(call: &Call<'_>) -> bool {
    let Call::Meta(_, MetaRequest::Write { write, .. }) = call else { return false };
    matches!(write, MetaWrite::Create { .. })
}

/// Found by the simulation (seed 100158): a creation that found the file was answered late, as of before its
/// writer's close, and the file was empty for who had opened it so.
#[tokio::test(start_paused = true)]
async fn who_opens_by_a_creation_reads_what_was_closed_here_before_its_answer() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let writer = create(&client, "f").await.handle;
    cluster.once(Fault::Slow(Duration::from_millis(100)), is_creation);
    let writing = async {
        client.write(writer, 0, pattern(1, 5000), false).await.unwrap();
        client.flush(writer).await.unwrap();
        client.release(writer).await.unwrap();
    };
    let (opened, ()) = tokio::join!(create(&client, "f"), writing);
    let got = client.read(opened.handle, 0, 10_000).await.unwrap().concat();
    assert!(got == pattern(1, 5000), "{} bytes", got.len());
}

/// As an answer that is lost is given again when the call is repeated, it may be as old as a call may take. With
/// O_TRUNC, too, only what there was when the file was made is cut: nothing.
#[tokio::test(start_paused = true)]
async fn who_creates_reads_what_others_closed_long_before_the_answer() {
    for exclusive in [true, false] {
        let cluster = Cluster::new();
        let (one, other) = (cluster.client().await, cluster.client().await);
        cluster.once(Fault::Slow(Duration::from_secs(3)), is_creation);
        let writing = async {
            while other.resolve(b"/f", true).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            write(&other, "/f", &pattern(1, 5000)).await;
        };
        let flags = OpenFlags { exclusive, truncate: true, ..OpenFlags::read_write() };
        let file = name("f");
        let creating = one.create(InodeId::ROOT, &file, OWNER, flags);
        let (opened, ()) = tokio::join!(creating, writing);
        let opened = opened.unwrap();
        let got = one.read(opened.handle, 0, 10_000).await.unwrap().concat();
        assert!(got == pattern(1, 5000), "{} bytes", got.len());
        assert_eq!(one.getattr(opened.attributes.inode).await.unwrap().size, 5000);
    }
}

/// A lock file that is made, and whose maker is told that it is not, is nobody's.
#[tokio::test(start_paused = true)]
async fn a_creation_of_which_no_more_can_be_heard_has_succeeded() {
    let cluster = Cluster::new();
    let set = |config: &mut milpa_client::ClientConfig| {
        config.io_deadline = Some(Duration::from_secs(5));
    };
    let client = cluster.client_with(set).await;
    cluster.once(Fault::Slow(Duration::from_secs(2)), is_creation);
    cluster.rule(|call| is_meta_read(call).then_some(Fault::Unreachable));
    let flags = OpenFlags { exclusive: true, ..OpenFlags::read_write() };
    let opened = client.create(InodeId::ROOT, &name("lock"), OWNER, flags).await.unwrap();
    cluster.heal();
    client.write(opened.handle, 0, pattern(1, 10), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    assert!(read(&cluster.client().await, "/lock").await == pattern(1, 10));
}

fn is_meta_read(call: &Call<'_>) -> bool {
    matches!(call, Call::Meta(_, MetaRequest::Read { .. }))
}

/// The kernel drops an inode's pages after the answer to an open, in the process that opens. Another one's open
/// may come in between: its pages may be of the version before.
#[tokio::test(start_paused = true)]
async fn pages_that_are_being_dropped_do_not_stay_for_the_next_open() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    write(&other, "/f", &pattern(1, 5000)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    let open = async || one.open(inode, OpenFlags::read_only()).await.unwrap();
    let first = open().await;
    assert!(!first.keep_cache, "never seen");
    one.read(first.handle, 0, 5000).await.unwrap();
    assert!(open().await.keep_cache, "who reads has had them dropped");
    write(&other, "/f", &pattern(2, 5000)).await;
    let changed = open().await;
    let next = open().await;
    assert!(!changed.keep_cache && !next.keep_cache, "nobody knows how far the first has come");
    one.read(first.handle, 0, 5000).await.unwrap();
    assert!(!open().await.keep_cache, "a read through an older handle says nothing");
    one.release(next.handle).await.unwrap();
    assert!(open().await.keep_cache);
    one.release(changed.handle).await.unwrap();
    one.forget_pages(inode);
    assert!(!open().await.keep_cache);
}

#[tokio::test(start_paused = true)]
async fn a_publish_behind_somebodys_truncation_is_redone() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&one, "f").await;
    one.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    one.flush(opened.handle).await.unwrap();
    one.write(opened.handle, 200_000, pattern(2, 1000), false).await.unwrap();
    let cut = AttributeChanges { size: Some(100), ..AttributeChanges::default() };
    other.setattr(opened.attributes.inode, cut).await.unwrap();
    one.fsync(opened.handle, false).await.unwrap();
    let mut model = vec![0; 201_000];
    model[..100].copy_from_slice(&pattern(1, 200_000)[..100]);
    model[200_000..].copy_from_slice(&pattern(2, 1000));
    assert!(read(&other, "/f").await == model);
    let seen = one.read(opened.handle, 0, 1 << 20).await.unwrap().concat();
    assert!(seen == model, "we see it too");
}

/// A regression: small files live in their inodes and are published whole. The second of two
/// writers took the first one's bytes away.
#[tokio::test(start_paused = true)]
async fn two_writers_of_a_small_file_keep_each_others_bytes() {
    for length in [100, 3000] {
        let cluster = Cluster::new();
        let (one, other) = (cluster.client().await, cluster.client().await);
        let opened = create(&one, "f").await;
        let there = other.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
        one.write(opened.handle, 0, pattern(1, 50), false).await.unwrap();
        other.write(there.handle, 200, pattern(2, length), false).await.unwrap();
        one.flush(opened.handle).await.unwrap();
        other.flush(there.handle).await.unwrap();
        one.write(opened.handle, 60, pattern(3, 20), false).await.unwrap();
        one.fsync(opened.handle, false).await.unwrap();
        let mut model = vec![0; 200 + length];
        model[..50].copy_from_slice(&pattern(1, 50));
        model[60..80].copy_from_slice(&pattern(3, 20));
        model[200..].copy_from_slice(&pattern(2, length));
        assert!(read(&cluster.client().await, "/f").await == model, "{length} bytes");
        for (client, file) in [(&one, &opened), (&other, &there)] {
            client.release(file.handle).await.unwrap();
            assert!(read(client, "/f").await == model, "{length} bytes, seen by a writer");
        }
    }
}

/// The truncation takes the extent away that a buffered write was to replace bytes of.
#[tokio::test(start_paused = true)]
async fn a_write_over_bytes_that_somebody_deleted_goes_elsewhere() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&one, "f").await;
    one.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    one.flush(opened.handle).await.unwrap();
    let cut = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
    other.setattr(opened.attributes.inode, cut).await.unwrap();
    cluster.lock().data.extents.clear();
    one.write(opened.handle, 1000, pattern(2, 5000), false).await.unwrap();
    one.fsync(opened.handle, false).await.unwrap();
    let mut model = vec![0; 6000];
    model[1000..].copy_from_slice(&pattern(2, 5000));
    assert!(read(&other, "/f").await == model);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_file_is_stale_for_others() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    write(&one, "/f", &pattern(1, 5000)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    other.unlink(InodeId::ROOT, &name("f")).await.unwrap();
    let error = one.open(inode, OpenFlags::read_only()).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
}

/// The story: git refs and config files are replaced by rename. An open of the one that is gone was stale, as it
/// must be; the kernel then looks the name up again, and was told of the same inode for another second.
#[tokio::test(start_paused = true)]
async fn who_is_told_that_a_file_is_gone_finds_the_new_one() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    let (f, g) = (name("f"), name("g"));
    for round in 0..4 {
        write(&one, "/f", &pattern(1, 5000)).await;
        let inode = one.lookup(InodeId::ROOT, &f).await.unwrap().inode;
        write(&other, "/g", &pattern(2, 5000)).await;
        other.rename(InodeId::ROOT, &g, InodeId::ROOT, &f, false).await.unwrap();
        let write = OpenFlags { truncate: true, ..OpenFlags::read_write() };
        let error = match round {
            0 => one.open(inode, OpenFlags::read_only()).await.unwrap_err(),
            1 => one.open(inode, write).await.unwrap_err(),
            2 => one.setattr(inode, AttributeChanges::default()).await.unwrap_err(),
            _ => one.readlink(inode).await.unwrap_err(),
        };
        assert!(matches!(error, FsError::Stale(_)), "{round}: {error}");
        let found = one.lookup(InodeId::ROOT, &f).await.unwrap().inode;
        assert_ne!(found, inode, "{round}");
        assert!(read(&one, "/f").await == pattern(2, 5000));
        other.unlink(InodeId::ROOT, &f).await.unwrap();
        assert!(one.open(found, OpenFlags::read_only()).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_makes_open_files_stale_and_nothing_else() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 1000), false).await.unwrap();
    cluster.lock().meta.sessions.clear();
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
    let error = client.read(opened.handle, 0, 1000).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "bytes that nobody will ever see: {error}");
    let error = client.fsync(opened.handle, false).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    let error = client.write(opened.handle, 0, pattern(1, 10), false).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    let error = client.read(opened.handle, 0, 10).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    let cut = AttributeChanges { size: Some(7), ..AttributeChanges::default() };
    let error = client.setattr_through(opened.handle, cut).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    client.release(opened.handle).await.unwrap();
    write(&client, "/f", &pattern(2, 1000)).await;
    assert!(read(&client, "/f").await == pattern(2, 1000), "a new open writes again");
}

/// Found by a reader: a truncation through a descriptor whose session had expired was carried out, over what others
/// had written since.
#[tokio::test(start_paused = true)]
async fn a_truncation_through_a_descriptor_is_not_carried_out_under_a_later_session() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 1000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let cut = |size| AttributeChanges { size: Some(size), ..AttributeChanges::default() };
    assert_eq!(client.setattr_through(handle, cut(900)).await.unwrap().size, 900);
    cluster.lock().meta.sessions.clear();
    let error = client.setattr_through(handle, cut(7)).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "it hears of it by this: {error}");
    assert!(read(&cluster.client().await, "/f").await == pattern(1, 1000)[..900]);
    assert_eq!(client.setattr(inode, cut(7)).await.unwrap().size, 7, "by its path");
}

/// Found by the simulation (seeds 17, 197): the lease ran out between the append and the publish, which was
/// sent again under the new session and taken. The data nodes had asked meanwhile whose the bytes were, and
/// had deleted them: a file without its bytes.
#[tokio::test(start_paused = true)]
async fn what_an_expired_session_appended_is_not_published_by_the_next() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    cluster.once(Fault::Meta(MetaError::UnknownSession), |call| {
        matches!(call, Call::Meta(_, MetaRequest::Write { write: MetaWrite::Publish(_), .. }))
    });
    let error = client.fsync(opened.handle, false).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    assert_eq!(read(&cluster.client().await, "/f").await, [0u8; 0], "nothing refers to them");
}

/// The story: a file was held open whose inode was in a partition that this client had never changed anything
/// in; its name, elsewhere, was unlinked. The inode's partition knew the holder from then on, but on a node
/// that heard no sign of life of it: after 30 s the file was gone, and with the next change the session.
#[tokio::test(start_paused = true)]
async fn who_holds_a_file_open_keeps_alive_where_the_inode_is() {
    let cluster = Cluster::new();
    let elsewhere = NodeId(4);
    cluster.add_meta_node(elsewhere, PartitionId(101));
    let (client, other) = (cluster.client().await, cluster.client().await);
    cluster.lock().meta.full.insert(MetaSlot(0));
    let inode = create(&other, "f").await.attributes.inode;
    assert_eq!(inode.slot(), MetaSlot(1));
    let opened = client.open(inode, OpenFlags::read_only()).await.unwrap();
    client.unlink(InodeId::ROOT, &name("f")).await.unwrap();
    assert!(!cluster.lock().meta.inodes[&inode].held.is_empty());
    other.shutdown().await.unwrap();
    let heard: Arc<Mutex<BTreeSet<NodeId>>> = Arc::default();
    let hears = Arc::clone(&heard);
    cluster.rule(move |call| {
        if let Call::Meta(node, MetaRequest::KeepAlive { .. }) = call {
            hears.lock().unwrap().insert(*node);
        }
        None
    });
    tokio::time::sleep(Duration::from_secs(29)).await;
    let everyone = META.into_iter().chain([elsewhere]).collect();
    assert_eq!(*heard.lock().unwrap(), everyone, "any of them may lead");
    client.release(opened.handle).await.unwrap();
}

/// The kernel truncates its pages when it hears that the file is: who is killed before leaves them behind.
#[tokio::test(start_paused = true)]
async fn a_truncation_whose_caller_is_gone_keeps_no_pages() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 5000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let flags = OpenFlags::read_only();
    let first = client.open(inode, flags).await.unwrap();
    client.read(first.handle, 0, 5000).await.unwrap();
    assert!(client.open(inode, flags).await.unwrap().keep_cache);
    cluster.once(Fault::Slow(Duration::from_millis(50)), |call| {
        let Call::Meta(_, MetaRequest::Write { write, .. }) = call else { return false };
        matches!(write, MetaWrite::SetAttributes { .. })
    });
    let truncating = OpenFlags { truncate: true, ..OpenFlags::read_write() };
    let killed = client.open(inode, truncating);
    assert!(tokio::time::timeout(Duration::from_millis(5), killed).await.is_err());
    let meanwhile = client.open(inode, flags).await.unwrap();
    client.read(meanwhile.handle, 0, 5000).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!client.open(inode, flags).await.unwrap().keep_cache);
}

/// Found by a reader: a publish told the length of all that was written, sent or not. Others read zeros up to there,
/// for good if the writer came to its end.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_being_written_ends_for_others_where_its_bytes_do() {
    let cluster = Cluster::new();
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let handle = create(&writer, "f").await.handle;
    let whole = pattern(1, 800_000);
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Slow(Duration::from_secs(1))),
        _ => None,
    });
    writer.write(handle, 0, whole.slice(..400_000), false).await.unwrap();
    let writing = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        writer.write(handle, 400_000, whole.slice(400_000..), false).await.unwrap();
    };
    let (flushed, ()) = tokio::join!(writer.flush(handle), writing);
    flushed.unwrap();
    let got = read(&reader, "/f").await;
    assert!(got.len() >= 400_000 && got == whole[..got.len()], "{} bytes", got.len());
    let inode = writer.resolve(b"/f", true).await.unwrap().inode;
    assert_eq!(writer.getattr(inode).await.unwrap().size, 800_000, "the writer knows better");
    writer.flush(handle).await.unwrap();
    assert!(read(&reader, "/f").await == whole);
}

/// Found by a reader: attributes that were asked for before a publish, and answered after it, took from the writer
/// what it had just published.
#[tokio::test(start_paused = true)]
async fn attributes_that_a_publish_has_overtaken_do_not_take_it_back() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let inode = opened.attributes.inode;
    tokio::time::sleep(Duration::from_secs(3)).await;
    client.write(opened.handle, 0, pattern(1, 5000), false).await.unwrap();
    cluster.once(Fault::Slow(Duration::from_millis(100)), move |call| {
        let attributes = MetaRead::GetAttributes { inode };
        matches!(call, Call::Meta(_, MetaRequest::Read { read, .. }) if *read == attributes)
    });
    let publishing = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        client.flush(opened.handle).await.unwrap();
    };
    let (seen, ()) = tokio::join!(client.getattr(inode), publishing);
    assert_eq!(seen.unwrap().size, 5000);
}

/// Found by two readers: who opened a file while it was being truncated through its path, and was answered as of
/// before, appended where it had ended.
#[tokio::test(start_paused = true)]
async fn who_opens_a_file_while_its_path_is_truncated_appends_at_its_end() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 5000)).await;
    let client = cluster.client().await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    cluster.once(Fault::Slow(Duration::from_millis(100)), move |call| {
        let layout = MetaRead::GetLayout { inode, from: 0 };
        matches!(call, Call::Meta(_, MetaRequest::Read { read, .. }) if *read == layout)
    });
    let truncating = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let empty = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
        client.setattr(inode, empty).await.unwrap();
    };
    let (opened, ()) = tokio::join!(client.open(inode, OpenFlags::read_write()), truncating);
    let handle = opened.unwrap().handle;
    client.append(handle, pattern(2, 10), false).await.unwrap();
    client.flush(handle).await.unwrap();
    assert!(read(&cluster.client().await, "/f").await == pattern(2, 10));
}

/// The answer to the next truncation takes long; this tells when it was asked for.
fn slow_truncation(cluster: &Cluster) -> Arc<Notify> {
    let began = Arc::new(Notify::new());
    let tell = Arc::clone(&began);
    cluster.once(Fault::Slow(Duration::from_millis(100)), move |call| {
        let Call::Meta(_, MetaRequest::Write { write, .. }) = call else { return false };
        let is_meant = matches!(write, MetaWrite::SetAttributes { .. });
        if is_meant {
            tell.notify_one();
        }
        is_meant
    });
    began
}

/// Found by a reader: who was killed while it waited for a truncation kept its room in the buffer for ever.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_killed_during_a_truncation_leaves_its_room_to_others() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|config| config.buffer_bytes = 4 << 20).await;
    let opened = create(&client, "f").await;
    let (inode, handle) = (opened.attributes.inode, opened.handle);
    for _ in 0..8 {
        let began = slow_truncation(&cluster);
        let empty = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
        let killed = async {
            began.notified().await;
            let write = client.write(handle, 0, pattern(1, 1 << 20), false);
            assert!(tokio::time::timeout(Duration::from_millis(10), write).await.is_err());
        };
        let (truncated, ()) = tokio::join!(client.setattr(inode, empty), killed);
        truncated.unwrap();
    }
    client.write(handle, 0, pattern(2, 1 << 20), false).await.unwrap();
    client.flush(handle).await.unwrap();
    assert!(read(&cluster.client().await, "/f").await == pattern(2, 1 << 20));
}

/// As in write(2): the end is where the file ends when the bytes are written.
#[tokio::test(start_paused = true)]
async fn an_append_that_waited_for_a_truncation_goes_to_the_end_that_it_left() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 5000)).await;
    let client = cluster.client().await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let began = slow_truncation(&cluster);
    let shorter = AttributeChanges { size: Some(100), ..AttributeChanges::default() };
    let appending = async {
        began.notified().await;
        client.append(handle, pattern(2, 10), false).await.unwrap();
    };
    let (truncated, ()) = tokio::join!(client.setattr(inode, shorter), appending);
    truncated.unwrap();
    client.flush(handle).await.unwrap();
    let content = read(&cluster.client().await, "/f").await;
    assert!(content == [&pattern(1, 5000)[..100], &pattern(2, 10)].concat());
}

/// Simulation, seed 248237: what was written while the answer to an own truncation was on its way was cut by it, and so
/// bytes came to light that somebody else had written after the truncation, and before.
#[tokio::test(start_paused = true)]
async fn what_is_written_during_an_own_truncation_comes_after_it() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 5000)).await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let began = slow_truncation(&cluster);
    let shorter = AttributeChanges { size: Some(100), ..AttributeChanges::default() };
    let writing = async {
        began.notified().await;
        let opened = other.open(inode, OpenFlags::read_write()).await.unwrap();
        other.write(opened.handle, 2000, pattern(2, 1000), false).await.unwrap();
        other.release(opened.handle).await.unwrap();
        client.write(handle, 2000, pattern(3, 1000), false).await.unwrap();
    };
    let (truncated, ()) = tokio::join!(client.setattr(inode, shorter), writing);
    truncated.unwrap();
    client.flush(handle).await.unwrap();
    let content = read(&cluster.client().await, "/f").await;
    assert!(content[2000..] == pattern(3, 1000), "{} bytes", content.len());
    assert!(content[..100] == pattern(1, 5000)[..100] && content[100..2000] == [0; 1900]);
}

/// Found by a reader: the map of a file came in one answer, and one that no frame could hold was never opened again.
#[tokio::test(start_paused = true)]
async fn a_map_that_comes_in_parts_is_of_one_version() {
    let cluster = Cluster::new();
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let handle = create(&writer, "f").await.handle;
    let mut whole = vec![0; 100_000];
    let mut write_at = async |at: usize, seed: u8| {
        let bytes = pattern(seed, 1000);
        whole[at..at + 1000].copy_from_slice(&bytes);
        writer.write(handle, at as u64, bytes, false).await.unwrap();
        writer.flush(handle).await.unwrap();
        whole.clone()
    };
    for i in 0..10 {
        write_at(99_000 - i * 5_000, i as u8).await;
    }
    let inode = reader.resolve(b"/f", true).await.unwrap().inode;
    assert!(cluster.lock().meta.inodes[&inode].segments.len() > 6, "several parts");
    cluster.once(Fault::Slow(Duration::from_millis(100)), move |call| {
        let Call::Meta(_, MetaRequest::Read { read, .. }) = call else { return false };
        matches!(read, MetaRead::GetLayout { from, .. } if *from > 50_000)
    });
    let changing = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        write_at(1_000, 99).await
    };
    let (opened, whole) = tokio::join!(reader.open(inode, OpenFlags::read_only()), changing);
    let got = reader.read(opened.unwrap().handle, 0, 200_000).await.unwrap().concat();
    assert!(got == whole, "the newest, in one piece");
}

fn asks_for_map(call: &Call<'_>) -> bool {
    let Call::Meta(_, MetaRequest::Read { read, .. }) = call else { return false };
    matches!(read, MetaRead::GetLayout { .. })
}

/// Bytes are to be laid over what somebody else made of the file, and its map cannot be had within the deadline: they
/// are safe in the buffer until it can.
#[tokio::test(start_paused = true)]
async fn bytes_wait_for_a_map_that_cannot_be_had_now() {
    let cluster = Cluster::new();
    let other = cluster.client().await;
    let client = cluster.client_with(|it| it.io_deadline = Some(Duration::from_secs(2))).await;
    write(&client, "/f", &pattern(1, 300_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let shorter = AttributeChanges { size: Some(1000), ..AttributeChanges::default() };
    other.setattr(inode, shorter).await.unwrap();
    client.write(handle, 0, pattern(2, 10), false).await.unwrap();
    client.flush(handle).await.unwrap();

    cluster.rule(|call| asks_for_map(call).then_some(Fault::Meta(MetaError::Busy)));
    client.write(handle, 10, pattern(3, 10), false).await.unwrap();
    client.flush(handle).await.unwrap_err();
    cluster.heal();
    client.flush(handle).await.unwrap();
    let got = read(&other, "/f").await;
    assert!(got[..10] == pattern(2, 10) && got[10..20] == pattern(3, 10), "{} bytes", got.len());
}

/// Found by a reader: a publish that had nothing left to publish told how long the file was to be, and undid another
/// client's truncation.
#[tokio::test(start_paused = true)]
async fn a_truncation_is_not_undone_by_a_publish_of_what_was_cut_before() {
    for length in [100, 200_000] {
        let cluster = Cluster::new();
        let (one, other) = (cluster.client().await, cluster.client().await);
        write(&other, "/f", &pattern(1, length)).await;
        let inode = one.resolve(b"/f", true).await.unwrap().inode;
        let handle = one.open(inode, OpenFlags::read_write()).await.unwrap().handle;
        one.write(handle, length as u64, pattern(2, 100), false).await.unwrap();
        let cut = |size| AttributeChanges { size: Some(size), ..AttributeChanges::default() };
        one.setattr_through(handle, cut(50)).await.unwrap();
        other.setattr(inode, cut(10)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(20)).await;
        one.fsync(handle, false).await.unwrap();
        let got = read(&cluster.client().await, "/f").await;
        assert!(got == pattern(1, length)[..10], "{length}: {} bytes", got.len());
    }
}
