//! Who hears of what failed in the background.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_client::{Client, FsError, HandleId, OpenFlags};
use milpa_types::{DataError, InodeId, MetaError};
use milpa_wire::data::DataRequest;
use milpa_wire::meta::{MetaRequest, MetaWrite};

use crate::cluster::{Call, Cluster, Fault, OWNER, create, name, pattern, read, write};

#[tokio::test(start_paused = true)]
async fn a_failure_in_the_background_is_told_once_to_every_handle() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let one = create(&client, "f").await;
    let two = client.open(one.attributes.inode, OpenFlags::read_write()).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    client.write(one.handle, 0, pattern(1, 100_000), false).await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster.heal();
    for handle in [one.handle, two.handle] {
        assert!(client.fsync(handle, false).await.is_err());
        client.fsync(handle, false).await.unwrap();
    }
}

/// The story: bytes that had been acknowledged and read back were given up in the background, because
/// no partition took them; the program then read what the file had before, as if it had never
/// written. Now reads through each descriptor that nobody has told yet fail for a second.
#[tokio::test(start_paused = true)]
async fn a_reader_is_told_that_acknowledged_bytes_are_lost() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 50_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let writer = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let reader = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    let told = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    let stale = Arc::new(Mutex::new(BTreeSet::new()));
    let told_of = Arc::clone(&stale);
    client.on_stale_pages(move |inode, _| {
        told_of.lock().unwrap().insert(inode);
    });
    client.write(writer, 50_000, pattern(2, 10_000), false).await.unwrap();
    let whole = client.read(writer, 0, 100_000).await.unwrap().concat();
    assert_eq!(whole.len(), 60_000);
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster.heal();
    assert!(client.fsync(told, false).await.is_err());
    let later = client.open(inode, OpenFlags::read_only()).await.unwrap();
    assert!(!later.keep_cache, "the kernel's pages have what was lost");
    assert_eq!(*stale.lock().unwrap(), [inode].into(), "who has it open reads them no more");
    let later = later.handle;
    // The kernel takes the first answer for that to its readahead, and asks again.
    for handle in [writer, reader, writer, reader] {
        let error = client.read(handle, 0, 100_000).await.unwrap_err();
        assert_eq!(error, FsError::Lost(Box::new(FsError::Data(DataError::NoSpace))));
        assert_eq!(error.errno(), libc::EIO);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for handle in [writer, reader, told, later] {
        assert!(client.read(handle, 0, 100_000).await.unwrap().concat() == pattern(1, 50_000));
    }
    assert!(client.write(writer, 0, pattern(3, 10), false).await.is_err(), "still to be told");
    client.write(writer, 0, pattern(3, 10), false).await.expect("a writer hears of it once");
    assert!(client.fsync(writer, false).await.is_err(), "a read does not stand for an fsync");
    client.fsync(writer, false).await.unwrap();
}

/// As above, with a loss that nobody has been told of when the file is opened again.
#[tokio::test(start_paused = true)]
async fn who_opens_a_file_after_a_loss_that_nobody_was_told_of_is_told() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 10_000), false).await.unwrap();
    cluster.lock().meta.sessions.clear();
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    // Found by the simulation (seed 260): the close of a reader passed for somebody who was told.
    let reader = client.open(opened.attributes.inode, OpenFlags::read_only()).await.unwrap().handle;
    client.flush(reader).await.expect("it has lost nothing");
    let mut warned = Vec::new();
    for _ in 0..2 {
        let again = client.open(opened.attributes.inode, OpenFlags::read_only()).await.unwrap();
        warned.push(client.read(again.handle, 0, 10_000).await.map(|there| there.len()));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(client.read(again.handle, 0, 10_000).await.unwrap().is_empty());
    }
    assert!(matches!(warned[..], [Err(FsError::Lost(_)), Ok(0)]), "the first who asks: {warned:?}");
    let mut told = Vec::new();
    for _ in 0..2 {
        let flags = OpenFlags::read_write();
        let again = client.open(opened.attributes.inode, flags).await.unwrap().handle;
        client.write(again, 0, pattern(2, 10), false).await.unwrap();
        told.push([client.flush(again).await.is_err(), client.fsync(again, false).await.is_err()]);
    }
    assert_eq!(told, [[false, true], [false, false]], "fsync tells the first who asks");
    assert!(client.fsync(opened.handle, false).await.is_err());
}

/// What a file that takes no bytes was told: of a full volume, until the cluster is healed.
async fn full(cluster: &Arc<Cluster>) -> (Client, InodeId, HandleId) {
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    client.write(opened.handle, 0, pattern(1, 100_000), false).await.unwrap();
    (client, opened.attributes.inode, opened.handle)
}

/// The story: a program ran another one, whose exec closed its copy of the descriptor. That close lost the
/// bytes and said so, to nobody; the program's own fsync and close succeeded.
#[tokio::test(start_paused = true)]
async fn the_close_of_a_copy_does_not_keep_a_loss_from_fsync_and_close() {
    let cluster = Cluster::new();
    let (client, inode, handle) = full(&cluster).await;
    let lost = Err(FsError::Data(DataError::NoSpace));
    assert_eq!(client.flush(handle).await, lost, "a child has closed its copy");
    cluster.heal();
    // As in Linux: who syncs a file hears of what no fsync has told, whoever wrote it.
    let later = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    assert_eq!(client.fsync(later, false).await, lost);
    assert_eq!(client.flush(handle).await, lost, "another child");
    assert_eq!(client.fsync(handle, false).await, lost);
    client.flush(handle).await.expect("it was told");
    client.fsync(handle, false).await.expect("it was told");
}

/// Who copies a file once more, into the space that has been made, has not failed again.
#[tokio::test(start_paused = true)]
async fn a_close_says_nothing_of_a_loss_that_an_earlier_close_has_told() {
    let cluster = Cluster::new();
    let (client, inode, handle) = full(&cluster).await;
    assert!(client.flush(handle).await.is_err());
    client.release(handle).await.unwrap();
    cluster.heal();
    let again = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    client.write(again, 0, pattern(2, 100_000), false).await.unwrap();
    client.flush(again).await.unwrap();
    assert!(read(&client, "/f").await == pattern(2, 100_000));
    assert!(client.fsync(again, false).await.is_err(), "no fsync has told anybody");
    client.fsync(again, false).await.unwrap();
}

/// What is kept for that is not kept for ever.
#[tokio::test(start_paused = true)]
async fn who_syncs_a_file_long_after_its_last_close_is_told_nothing() {
    for (seconds, is_told) in [(5, true), (60, false)] {
        let cluster = Cluster::new();
        let (client, inode, handle) = full(&cluster).await;
        assert!(client.flush(handle).await.is_err());
        client.release(handle).await.unwrap();
        cluster.heal();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let again = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
        assert_eq!(client.fsync(again, false).await.is_err(), is_told, "after {seconds} s");
    }
}

/// A file of 100,000 bytes whose writer could not send them for some minutes, which are over.
async fn after_an_outage(cluster: &Arc<Cluster>) -> (Client, InodeId, HandleId) {
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 100_000), false).await.unwrap();
    cluster.rule(|call| matches!(call, Call::Data(..)).then_some(Fault::Unreachable));
    tokio::time::sleep(Duration::from_secs(300)).await;
    cluster.heal();
    (client, opened.attributes.inode, opened.handle)
}

/// The story: an outage ended, and nothing was lost. Who copied the file once more heard of it at the close.
#[tokio::test(start_paused = true)]
async fn an_outage_that_cost_nothing_is_not_told_to_who_opens_the_file_later() {
    let cluster = Cluster::new();
    let (client, inode, handle) = after_an_outage(&cluster).await;
    let again = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    client.write(again, 0, pattern(2, 100_000), false).await.unwrap();
    client.flush(again).await.unwrap();
    client.fsync(again, false).await.unwrap();
    assert!(client.fsync(handle, false).await.is_err(), "it was open then");
}

/// The story: a logger lost a line while the volume was full, heard of it at the next one, and went on for days
/// without an fsync. Whoever opened the log got EIO.
#[tokio::test(start_paused = true)]
async fn who_opens_a_file_after_its_writer_was_told_reads_it() {
    let cluster = Cluster::new();
    let (client, inode, handle) = full(&cluster).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster.heal();
    assert!(client.write(handle, 0, pattern(2, 1_000), false).await.is_err());
    client.write(handle, 0, pattern(2, 1_000), false).await.unwrap();
    let reader = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    assert!(client.read(reader, 0, 10_000).await.unwrap().concat() == pattern(2, 1_000));
}

/// A write with O_SYNC stands for an fsync: what it told is not told again, of bytes that are on disk.
#[tokio::test(start_paused = true)]
async fn a_write_with_o_sync_tells_an_earlier_failure_once() {
    let cluster = Cluster::new();
    let (client, inode, handle) = full(&cluster).await;
    let synced = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let synced = client.open(inode, synced).await.unwrap().handle;
    assert!(client.flush(handle).await.is_err());
    cluster.heal();
    assert!(client.write(synced, 0, pattern(2, 100), false).await.is_err());
    client.write(synced, 0, pattern(2, 100), false).await.unwrap();
    client.fsync(synced, false).await.unwrap();
}

/// A page that the kernel sends again is not refused for what failed before: it would drop it.
#[tokio::test(start_paused = true)]
async fn a_page_of_a_mapping_is_taken_after_a_failure() {
    let cluster = Cluster::new();
    let (client, _, handle) = full(&cluster).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster.heal();
    client.write_page(handle, 0, pattern(2, 4096), false).await.unwrap();
    assert!(client.write(handle, 4096, pattern(2, 10), false).await.is_err());
    assert!(client.fsync(handle, false).await.is_err());
    assert!(read(&client, "/f").await == pattern(2, 4096));
}

/// The story: data nodes were away for longer than the deadline. Nothing was lost, and every write of a program
/// that calls no fsync failed from then on.
#[tokio::test(start_paused = true)]
async fn a_writer_is_told_of_an_outage_once() {
    let cluster = Cluster::new();
    let (client, _, handle) = after_an_outage(&cluster).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(client.write(handle, 100_000, pattern(1, 10), false).await.is_err());
    client.write(handle, 100_000, pattern(2, 100_000), false).await.unwrap();
    assert!(client.flush(handle).await.is_err(), "close tells it again");
    assert!(read(&client, "/f").await == [pattern(1, 100_000), pattern(2, 100_000)].concat());
}

/// Found by the simulation (seed 2902): the session expired during a write with O_SYNC; its bytes were given up, a
/// member that had deleted them already had no such extent, and with nothing left to send the write succeeded.
#[tokio::test(start_paused = true)]
async fn a_write_with_o_sync_fails_when_its_bytes_are_given_up() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let flags = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let opened = client.create(InodeId::ROOT, &name("f"), OWNER, flags).await.unwrap();
    cluster.once(Fault::Meta(MetaError::UnknownSession), |call| {
        matches!(call, Call::Meta(_, MetaRequest::Write { write: MetaWrite::Publish(_), .. }))
    });
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Flush { .. }) => Some(Fault::Data(DataError::NoExtent)),
        _ => None,
    });
    let written = client.write(opened.handle, 0, pattern(1, 200_000), false).await;
    assert!(matches!(written, Err(FsError::Stale(_))), "{written:?}");
}

/// One append takes a second, and none succeeds after it.
fn only_the_first_append_fits(cluster: &Arc<Cluster>) {
    let mut appends = 0;
    cluster.rule(move |call| match call {
        Call::Data(_, DataRequest::Append(_)) => {
            appends += 1;
            let is_first = appends == 1;
            let full = Fault::Data(DataError::NoSpace);
            Some(if is_first { Fault::Slow(Duration::from_secs(1)) } else { full })
        }
        _ => None,
    });
}

/// The same when others send the bytes, while the write waits for its turn, and have to give them up.
#[tokio::test(start_paused = true)]
async fn a_write_with_o_sync_fails_when_others_give_its_bytes_up() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let synced = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let opened = client.create(InodeId::ROOT, &name("f"), OWNER, synced).await.unwrap();
    let inode = opened.attributes.inode;
    let other = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    only_the_first_append_fits(&cluster);
    client.write(other, 0, pattern(1, 100_000), false).await.unwrap();
    let (first, second) = (client.flush(other), client.flush(other));
    let write = client.write(opened.handle, 100_000, pattern(2, 50_000), false);
    let (.., written) = tokio::join!(first, second, write);
    assert_eq!(written, Err(FsError::Data(DataError::NoSpace)));
}

/// The same with calls through one descriptor: that one of them has told the failure is of no use to the other.
#[tokio::test(start_paused = true)]
async fn each_of_several_calls_through_one_descriptor_is_told_that_its_bytes_were_given_up() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let synced = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let handle = client.create(InodeId::ROOT, &name("f"), OWNER, synced).await.unwrap().handle;
    only_the_first_append_fits(&cluster);
    let (first, second, third, sync) = tokio::join!(
        client.write(handle, 0, pattern(1, 100_000), false),
        client.write(handle, 100_000, pattern(2, 50_000), false),
        client.write(handle, 150_000, pattern(3, 50_000), false),
        client.fsync(handle, false),
    );
    first.unwrap();
    for result in [second, third, sync] {
        assert_eq!(result, Err(FsError::Data(DataError::NoSpace)));
    }
}
