//! Bytes that are damaged, lost or gone on the servers: who says so, and what is written over them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_client::{Client, FsError, HandleId, OpenFlags};
use milpa_types::{DataError, InodeId};
use milpa_wire::data::DataRequest;
use tokio::time::Instant;

use crate::cluster::{Call, Cluster, DATA, Fault, create, pattern, read, write};
use crate::failures::is_read;

#[tokio::test(start_paused = true)]
async fn damaged_bytes_are_fetched_from_another_replica() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 300_000)).await;
    cluster.once(Fault::Damaged, is_read);
    assert!(read(&client, "/f").await == pattern(1, 300_000));
}

/// What a reader of overwritten bytes is told when the leader says this of them, and the others only that
/// they do not lead.
async fn told_when_the_leader_says(word: DataError) -> FsError {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 100_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    client.fsync(handle, false).await.unwrap();
    cluster.rule(move |call| match call {
        Call::Data(node, DataRequest::Read(read)) => Some(Fault::Data(match *node == DATA[1] {
            true if read.at_leader => word.clone(),
            _ => DataError::NotPrimary { hint: Some(DATA[1]) },
        })),
        _ => None,
    });
    let started = Instant::now();
    let error = client.read(handle, 0, 100_000).await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    error
}

/// The story: the reader went on asking for a minute. That the file itself was not deleted makes it a loss.
#[tokio::test(start_paused = true)]
async fn the_leaders_word_that_overwritten_bytes_are_gone_is_enough() {
    let error = told_when_the_leader_says(DataError::NoExtent).await;
    assert!(matches!(error, FsError::Lost(_)), "{error}");
    assert_eq!(error.errno(), libc::EIO);
}

/// No member has a block whole, as the leader has found out.
#[tokio::test(start_paused = true)]
async fn the_leaders_word_that_overwritten_bytes_are_damaged_is_enough() {
    let error = told_when_the_leader_says(DataError::Corrupt { block: 3 }).await;
    assert_eq!(error.errno(), libc::EIO);
}

/// The others cannot say more than that they do not lead, which is not that they may have the bytes.
#[tokio::test(start_paused = true)]
async fn the_leaders_word_that_overwritten_bytes_are_on_no_replica_is_enough() {
    let error = told_when_the_leader_says(DataError::Lost { length: 0 }).await;
    assert!(matches!(error, FsError::Lost(_)), "{error}");
}

/// Simulation, seed 390099: power had taken an extent everywhere that had been overwritten. The leader had nothing of it, and
/// was not the primary, which knew; asked for the leader's word, all others said no more than that they do not lead.
#[tokio::test(start_paused = true)]
async fn who_overwrote_what_the_leader_lacks_asks_the_others_whether_it_is_lost() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 100_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    client.write(handle, 0, pattern(2, 50_000), false).await.unwrap();
    client.fsync(handle, false).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Overwrite(_)) => Some(Fault::Data(match *node == DATA[1] {
            true => DataError::NotHere,
            false => DataError::NotPrimary { hint: Some(DATA[1]) },
        })),
        Call::Data(node, DataRequest::Read(read)) => Some(Fault::Data(match read.at_leader {
            _ if *node == DATA[1] => DataError::NotHere,
            true => DataError::NotPrimary { hint: Some(DATA[1]) },
            false if *node == DATA[0] => DataError::Lost { length: 0 },
            false => DataError::NotHere,
        })),
        _ => None,
    });
    let started = Instant::now();
    let error = client.read(handle, 0, 100_000).await.unwrap_err();
    assert!(matches!(error, FsError::Lost(_)), "{error}");
    client.write(handle, 0, pattern(3, 50_000), false).await.unwrap();
    assert_eq!(client.fsync(handle, false).await.unwrap_err().errno(), libc::EIO);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// What close published and no fsync flushed may be lost. Readers then find the file's end there, at
/// once; the next fsync tells that something is lost, and the file is as good as any other.
#[tokio::test(start_paused = true)]
async fn a_file_ends_where_power_took_bytes_that_were_never_synced() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "log").await;
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    client.write(opened.handle, 300_000, pattern(2, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    assert_eq!(other.getattr(opened.attributes.inode).await.unwrap().size, 500_000);
    cluster.lock().data.cut_power();
    let started = Instant::now();
    assert!(read(&other, "/log").await == pattern(1, 300_000));
    assert!(started.elapsed() < Duration::from_secs(1), "nothing is waited for");
    // Whoever syncs next is told, on any descriptor, though he has nothing to send.
    let later = client.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
    assert_eq!(client.fsync(later.handle, false).await.unwrap_err().errno(), 5);
    assert_eq!(client.getattr(opened.attributes.inode).await.unwrap().size, 300_000);
    client.write(later.handle, 300_000, pattern(3, 1_000), false).await.unwrap();
    client.fsync(later.handle, false).await.unwrap();
    assert!(read(&other, "/log").await == [pattern(1, 300_000), pattern(3, 1_000)].concat());
}

/// Found by power cuts on real processes (seed 29639): no member had a block whole, and all had the bytes behind it, so
/// that an fsync succeeded over bytes that were gone.
#[tokio::test(start_paused = true)]
async fn an_fsync_fails_over_a_block_that_power_tore_on_every_member_and_takes_it_from_the_file() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let (inode, _) = unsynced_log(&client).await;
    cluster.lock().data.tear(12);
    let others = other.open(inode, OpenFlags::read_write()).await.unwrap();
    assert_eq!(other.fsync(others.handle, false).await.unwrap_err().errno(), libc::EIO);
    assert_eq!(other.getattr(inode).await.unwrap().size, 300_000);
    other.write(others.handle, 49_152, pattern(3, 1_000), false).await.unwrap();
    other.fsync(others.handle, false).await.unwrap();
    let mut there = torn(&pattern(1, 300_000));
    there[49_152..50_152].copy_from_slice(&pattern(3, 1_000));
    assert!(read(&cluster.client().await, "/log").await == there);
}

/// Of a log whose block 12 power tore on every member: a hole.
fn torn(log: &[u8]) -> Vec<u8> {
    let mut log = log.to_vec();
    log[49_152..53_248].fill(0);
    log
}

/// Found by the simulation (seed 755893): what had been written over the end of an extent since was cut off with the
/// block before it.
#[tokio::test(start_paused = true)]
async fn what_is_written_behind_a_lost_block_stays_when_the_file_is_cut() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let (inode, handle) = unsynced_log(&client).await;
    cluster.lock().data.tear(12);
    client.write(handle, 100_000, pattern(2, 5_000), false).await.unwrap();
    client.flush(handle).await.unwrap();
    let others = other.open(inode, OpenFlags::read_only()).await.unwrap();
    assert_eq!(other.fsync(others.handle, false).await.unwrap_err().errno(), libc::EIO);
    let mut there = torn(&pattern(1, 300_000));
    there[100_000..105_000].copy_from_slice(&pattern(2, 5_000));
    assert!(read(&cluster.client().await, "/log").await == there);
}

/// Found by a power cut (seed 20261128): a member that lacks the end of an extent says nothing of blocks before it, and
/// the file was cut at that end only, and read as EIO before it.
#[tokio::test(start_paused = true)]
async fn an_fsync_cuts_a_file_where_power_tore_a_block_though_the_end_of_its_extent_is_lost_too() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let (_, handle) = unsynced_log(&client).await;
    {
        let data = &mut cluster.lock().data;
        data.tear(12);
        data.keep(200_000);
    }
    assert_eq!(client.fsync(handle, false).await.unwrap_err().errno(), libc::EIO);
    client.fsync(handle, false).await.unwrap();
    assert!(read(&cluster.client().await, "/log").await == torn(&pattern(1, 300_000)[..200_000]));
}

/// Found by a reader: one member called a block lost of which the others had all that was needed, and synced bytes were
/// cut from the file.
#[tokio::test(start_paused = true)]
async fn an_fsync_waits_for_a_member_that_lacks_what_another_one_has() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let (_, handle) = unsynced_log(&client).await;
    for extent in cluster.lock().data.extents.values_mut() {
        extent.believed_torn = Some((12, 10));
    }
    client.fsync(handle, false).await.unwrap();
    for extent in cluster.lock().data.extents.values() {
        assert_eq!(extent.believed_torn, None, "it was asked again");
    }
    assert!(read(&cluster.client().await, "/log").await == pattern(1, 300_000));
}

/// What was lost after it had been synced, or is of another file, is nothing that this fsync is about.
#[tokio::test(start_paused = true)]
async fn an_fsync_is_not_about_blocks_that_were_lost_after_they_had_been_synced() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let (inode, handle) = synced_log(&client).await;
    client.write(handle, 300_000, pattern(2, 200_000), false).await.unwrap();
    client.flush(handle).await.unwrap();
    for extent in cluster.lock().data.extents.values_mut() {
        extent.torn.insert(12);
    }
    client.fsync(handle, false).await.unwrap();
    assert_eq!(client.getattr(inode).await.unwrap().size, 500_000);
    let error = client.read(handle, 49_152, 4096).await.map(|read| read.concat().len());
    assert_eq!(error.unwrap_err().errno(), libc::EIO, "they are not zeros, and no end");
}

/// A file of 300,000 bytes that nobody has synced, open for more.
async fn unsynced_log(client: &Client) -> (InodeId, HandleId) {
    let opened = create(client, "log").await;
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    (opened.attributes.inode, opened.handle)
}

/// A file of 300,000 bytes that are on disk, open for more.
async fn synced_log(client: &Client) -> (InodeId, HandleId) {
    write(client, "/log", &pattern(1, 300_000)).await;
    let inode = client.resolve(b"/log", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    client.fsync(handle, false).await.unwrap();
    (inode, handle)
}

/// Found by the simulation (seed 5182): behind the bytes of one client lay those of another, and both left
/// zeros that nobody had written.
#[tokio::test(start_paused = true)]
async fn a_file_ends_where_power_took_what_several_clients_wrote_in_turn() {
    let cluster = Cluster::new();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (inode, _) = synced_log(&one).await;
    for (client, offset) in [(&one, 300_000), (&two, 320_000), (&one, 340_000)] {
        let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
        client.write(handle, offset, pattern(2, 20_000), false).await.unwrap();
        client.flush(handle).await.unwrap();
    }
    cluster.lock().data.cut_power();
    let handle = two.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    assert_eq!(two.fsync(handle, false).await.unwrap_err().errno(), libc::EIO);
    assert_eq!(two.getattr(inode).await.unwrap().size, 300_000);
    assert!(read(&one, "/log").await == pattern(1, 300_000));
}

/// Found by the simulation (seed 340): a file that was lost as a whole had no end, and what had been
/// written since could not be read.
#[tokio::test(start_paused = true)]
async fn what_is_written_over_lost_bytes_can_be_read() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    write(&client, "/f", &pattern(1, 300_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    cluster.lock().data.cut_power();
    let handle = other.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    other.write(handle, 100_000, pattern(2, 5_000), false).await.unwrap();
    let there: Vec<u8> = other.read(handle, 0, 1 << 20).await.unwrap().concat();
    assert!(there == [vec![0; 100_000], pattern(2, 5_000).to_vec()].concat(), "{}", there.len());
}

/// 300,000 bytes of one client are synced, and another one, which had opened the file before, has written over
/// the middle third: its handle.
async fn written_over_synced(client: &Client, other: &Client) -> HandleId {
    let opened = create(client, "f").await;
    let early = other.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    other.write(early.handle, 100_000, pattern(2, 100_000), false).await.unwrap();
    early.handle
}

/// Found by the simulation (seed 195): a writer that had opened the file before another one's bytes were
/// there put its own over them, unsynced, and power took these: the synced ones were gone as well.
#[tokio::test(start_paused = true)]
async fn synced_bytes_are_not_replaced_by_others_that_power_may_take() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let early = written_over_synced(&client, &other).await;
    other.flush(early).await.unwrap();
    cluster.lock().data.cut_power();
    let (old, new) = (pattern(1, 300_000), pattern(2, 100_000));
    let there = read(&client, "/f").await;
    assert!(there == [&old[..100_000], &new[..], &old[200_000..]].concat());
}

/// Found by the simulation (seed 8810): what power took of such a writer's bytes, before they could be
/// published, he himself saw as zeros over the synced ones.
#[tokio::test(start_paused = true)]
async fn who_wrote_over_synced_bytes_what_power_took_reads_no_zeros() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let early = written_over_synced(&client, &other).await;
    let is_busy = Arc::new(AtomicBool::new(true));
    let is_busy_now = Arc::clone(&is_busy);
    cluster.rule(move |call| match call {
        Call::Data(_, DataRequest::Flush { .. }) if is_busy_now.load(Ordering::Relaxed) => {
            Some(Fault::Data(DataError::Busy))
        }
        _ => None,
    });
    let read_meanwhile = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.lock().data.cut_power();
        other.read(early, 90_000, 20_000).await
    };
    let (closed, there) = tokio::join!(other.flush(early), read_meanwhile);
    assert!(matches!(there, Err(FsError::Lost(_))), "{there:?}");
    closed.unwrap_err();
    is_busy.store(false, Ordering::Relaxed);
    other.fsync(early, false).await.unwrap_err();
    let there = read(&other, "/f").await;
    assert!(there == pattern(1, 300_000), "{} bytes", there.len());
}

/// A write over bytes that are lost fails, and tells so; after that they are written anew.
#[tokio::test(start_paused = true)]
async fn lost_bytes_are_told_and_then_written_anew() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.lock().data.cut_power();
    client.write(opened.handle, 0, pattern(2, 200_000), false).await.unwrap();
    assert_eq!(client.fsync(opened.handle, false).await.unwrap_err().errno(), 5);
    client.write(opened.handle, 0, pattern(2, 200_000), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    assert!(read(&client, "/f").await == pattern(2, 200_000));
}

/// Found by the simulation (seed 20): the leader was a replica that had been made after somebody had deleted the
/// file, so it knew nothing of the bytes; the writer asked it for a minute.
#[tokio::test(start_paused = true)]
async fn a_writer_over_bytes_that_the_leader_never_had_looks_at_the_file() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    write(&client, "/f", &pattern(1, 300_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    let emptied = milpa_types::AttributeChanges { size: Some(0), ..Default::default() };
    other.setattr(inode, emptied).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Overwrite(_)) => Some(Fault::Data(DataError::NotHere)),
        _ => None,
    });
    let started = Instant::now();
    client.write(handle, 1_000, pattern(2, 2_000), false).await.unwrap();
    client.fsync(handle, false).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    let there = read(&other, "/f").await;
    assert!(
        there == [vec![0; 1_000], pattern(2, 2_000).to_vec()].concat(),
        "{} bytes",
        there.len()
    );
}

/// Found by the simulation (seed 106) and by power cuts on real processes: what power had left of an
/// extent was dead, so the data nodes removed it, and the whole file was ESTALE for ever.
#[tokio::test(start_paused = true)]
async fn a_file_whose_lost_bytes_took_their_extent_along_is_cut_like_others() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    let empty = milpa_types::AttributeChanges { size: Some(0), ..Default::default() };
    client.setattr(opened.attributes.inode, empty).await.unwrap();
    client.write(opened.handle, 0, pattern(2, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Read(_) | DataRequest::Flush { .. }) => {
            Some(Fault::Data(DataError::NoExtent))
        }
        _ => None,
    });
    let started = Instant::now();
    assert!(read(&other, "/f").await.is_empty(), "the file ends before what is lost");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(client.fsync(opened.handle, false).await.unwrap_err().errno(), libc::EIO);
    client.fsync(opened.handle, false).await.unwrap();
    assert_eq!(client.getattr(opened.attributes.inode).await.unwrap().size, 0);
}

/// Found by the simulation (seed 1264): a read that ended within the lost bytes gave zeros, as nobody had asked
/// for the extent behind them, of which nothing was left.
#[tokio::test(start_paused = true)]
async fn a_file_ends_before_lost_bytes_though_the_extent_behind_them_is_gone() {
    let cluster = Cluster::new();
    let (one, two) = (cluster.client().await, cluster.client().await);
    let (inode, handle) = synced_log(&one).await;
    one.write(handle, 300_000, pattern(2, 20_000), false).await.unwrap();
    one.flush(handle).await.unwrap();
    let others = two.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    two.write(others, 320_000, pattern(3, 20_000), false).await.unwrap();
    two.flush(others).await.unwrap();
    let behind = Arc::new(Mutex::new(BTreeSet::new()));
    let noted = Arc::clone(&behind);
    cluster.rule(move |call| {
        if let Call::Data(_, DataRequest::Read(read)) = call {
            noted.lock().unwrap().insert(read.extent);
        }
        None
    });
    let looking = cluster.client().await;
    let handle = looking.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    looking.read(handle, 320_000, 10).await.unwrap();
    let behind = behind.lock().unwrap().clone();
    cluster.lock().data.cut_power();
    cluster.rule(move |call| {
        let is_gone = match call {
            Call::Data(_, DataRequest::Read(read)) => behind.contains(&read.extent),
            Call::Data(_, DataRequest::Flush { extents, .. }) => {
                extents.iter().any(|(extent, _)| behind.contains(extent))
            }
            _ => false,
        };
        is_gone.then_some(Fault::Data(DataError::NoExtent))
    });
    let fresh = cluster.client().await;
    let handle = fresh.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    let read = fresh.read(handle, 0, 310_000).await.unwrap().concat();
    assert_eq!(read.len(), 300_000, "it ends where the lost bytes begin");
    assert!(read == pattern(1, 300_000));
}

/// Found by power cuts on real processes (seed 204): one of the members never had the extent that the
/// others removed, so that nobody told it; a reader waited a minute for its bytes, again and again.
#[tokio::test(start_paused = true)]
async fn who_never_had_an_extent_does_not_keep_its_removal_from_being_believed() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(2, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Read(_)) if *node == DATA[1] => {
            Some(Fault::Data(DataError::NotHere))
        }
        Call::Data(_, DataRequest::Read(_)) => Some(Fault::Data(DataError::NoExtent)),
        _ => None,
    });
    let started = Instant::now();
    assert!(read(&other, "/f").await.is_empty(), "the file ends before what is lost");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// Found by power cuts on real processes: of the members that had lost an extent only the primary knows
/// that nobody has it. Its word came after that of another one, and fsync waited a minute to fail.
#[tokio::test(start_paused = true)]
async fn one_member_that_knows_of_a_loss_is_enough_for_fsync() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.lock().data.cut_power();
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Flush { .. }) if *node != DATA[2] => {
            Some(Fault::Data(DataError::NotHere))
        }
        _ => None,
    });
    let started = Instant::now();
    assert_eq!(client.fsync(opened.handle, false).await.unwrap_err().errno(), libc::EIO);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(client.getattr(opened.attributes.inode).await.unwrap().size, 0);
}

/// A truncation is durable: lost bytes below the length that it gave are zeros, not the end.
#[tokio::test(start_paused = true)]
async fn lost_bytes_do_not_take_back_a_truncation() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    let longer = milpa_types::AttributeChanges { size: Some(70_000), ..Default::default() };
    client.setattr(opened.attributes.inode, longer).await.unwrap();
    client.write(opened.handle, 20_000, pattern(1, 2_000), false).await.unwrap();
    client.write(opened.handle, 70_000, pattern(2, 300), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.lock().data.cut_power();
    assert!(read(&other, "/f").await == vec![0; 70_000]);
    assert!(client.fsync(opened.handle, false).await.is_err());
    assert!(read(&other, "/f").await == vec![0; 70_000]);
}

/// The story: all replicas had lost a file that had been synced, and it was read as zeros, as if its bytes
/// had been written and not synced. Who had loaded the file's map before it was synced is told the same.
#[tokio::test(start_paused = true)]
async fn synced_bytes_that_are_lost_are_an_error_and_no_zeros() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    let inode = opened.attributes.inode;
    let early = other.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    client.fsync(opened.handle, false).await.unwrap();
    // By then the inode knows.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let late = cluster.client().await;
    let handle = late.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    cluster.rule(|call| is_read(call).then_some(Fault::Data(DataError::Lost { length: 0 })));
    for (reader, handle) in [(&client, opened.handle), (&other, early), (&late, handle)] {
        let there = reader.read(handle, 0, 200_000).await.map(|bytes| bytes.len());
        assert_eq!(there.map_err(|error| error.errno()), Err(libc::EIO));
    }
    cluster.heal();
    assert!(late.read(handle, 0, 200_000).await.unwrap().concat() == pattern(1, 200_000));
}

/// The story: one member had lost an extent, and its word was believed while those that had the bytes were
/// busy or silent.
#[tokio::test(start_paused = true)]
async fn a_member_that_cannot_answer_just_then_may_have_what_another_has_lost() {
    for fault in [Fault::Data(DataError::Busy), Fault::Unreachable] {
        let cluster = Cluster::new();
        let (client, other) = (cluster.client().await, cluster.client().await);
        write(&client, "/f", &pattern(1, 200_000)).await;
        let others = fault.clone();
        cluster.rule(move |call| match call {
            Call::Data(node, DataRequest::Read(_)) => Some(match *node == DATA[1] {
                true => Fault::Data(DataError::Lost { length: 0 }),
                false => others.clone(),
            }),
            _ => None,
        });
        let later = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            cluster.heal();
        };
        let (there, ()) = tokio::join!(read(&other, "/f"), later);
        assert!(there == pattern(1, 200_000), "{fault:?}");
    }
}

/// Found by a reader: to find out what was lost, members were asked once for each piece of the file.
#[tokio::test(start_paused = true)]
async fn what_is_lost_is_asked_once_for_each_extent() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    for at in (0..300).map(|piece| piece * 8192) {
        client.write(opened.handle, at, pattern(1, 1000), false).await.unwrap();
    }
    client.flush(opened.handle).await.unwrap();
    cluster.lock().data.keep(100_000);
    let asked = Arc::new(Mutex::new(0));
    let asks = Arc::clone(&asked);
    cluster.rule(move |call| {
        *asks.lock().unwrap() += u32::from(is_read(call));
        None
    });
    assert!(client.fsync(opened.handle, false).await.is_err());
    client.fsync(opened.handle, false).await.unwrap();
    let left = cluster.lock().meta.inodes[&opened.attributes.inode].segments.len();
    assert_eq!(left, 100);
    let asked = *asked.lock().unwrap();
    assert!(asked < 20, "{asked} reads");
}
