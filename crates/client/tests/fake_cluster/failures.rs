//! Nodes that die, hang, lose answers and change their minds.

use std::time::Duration;

use milpa_client::{FsError, OpenFlags};
use milpa_types::{DataError, Epoch, InodeId, NodeId, PartitionId};
use milpa_wire::data::{AppendTarget, DataRequest};
use milpa_wire::meta::{MetaRequest, MetaWrite};
use tokio::time::Instant;

use crate::cluster::{Call, Cluster, DATA, Fault, META, OWNER, create, name, pattern, read, write};

fn is_create(call: &Call<'_>) -> bool {
    matches!(call, Call::Meta(_, MetaRequest::Write { write: MetaWrite::Create { .. }, .. }))
}

fn is_append_at(call: &Call<'_>, at: u64) -> bool {
    let Call::Data(_, DataRequest::Append(append)) = call else { return false };
    matches!(append.target, AppendTarget::Extent { offset, .. } if offset == at)
}

fn is_read(call: &Call<'_>) -> bool {
    matches!(call, Call::Data(_, DataRequest::Read(_)))
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_asked_for_again_and_nothing_happens_twice() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    cluster.once(Fault::AnswerLost, is_create);
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
    assert_eq!(cluster.lock().meta.count("create"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_partition_that_asks_for_patience_gets_it() {
    use milpa_types::MetaError as E;
    let errors = [E::Busy, E::Locked, E::OutcomeUnknown, E::WrongPartition, E::DiskFailed];
    for error in errors.into_iter().chain([E::NotLeader { leader: None }]) {
        let cluster = Cluster::new();
        let client = cluster.client().await;
        cluster.once(Fault::Meta(error.clone()), is_create);
        let started = Instant::now();
        client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
        assert!(started.elapsed() < Duration::from_millis(100), "{error}");
        assert_eq!(cluster.lock().meta.count("create"), 1, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_leader_costs_little_once_another_is_elected() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/before", &pattern(1, 10)).await;
    cluster.rule(|call| match call {
        Call::Meta(node, _) if *node == META[0] => Some(Fault::Hangs),
        _ => None,
    });
    cluster.lock().meta.leaders.insert(PartitionId(100), META[2]);
    let started = Instant::now();
    write(&client, "/after", &pattern(2, 10)).await;
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let started = Instant::now();
    write(&client, "/later", &pattern(2, 10)).await;
    assert!(started.elapsed() < Duration::from_millis(50), "the new leader is remembered");
}

#[tokio::test(start_paused = true)]
async fn an_outage_longer_than_the_deadline_is_an_error_and_no_hang() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    cluster.rule(|call| matches!(call, Call::Meta(..)).then_some(Fault::Unreachable));
    let started = Instant::now();
    let error = client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap_err();
    assert!(matches!(error, FsError::TimedOut { operation: "create", .. }), "{error}");
    assert!(started.elapsed() <= Duration::from_secs(6));
    cluster.heal();
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
}

/// Found by the simulation: calls on one file wait for each other, and each had a deadline of its own
/// for every part of it. A close waited two minutes.
#[tokio::test(start_paused = true)]
async fn calls_that_wait_for_each_other_end_in_time_all_of_them() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    client.write(opened.handle, 200_000, pattern(2, 200_000), false).await.unwrap();
    cluster.rule(|call| matches!(call, Call::Data(..)).then_some(Fault::Unreachable));
    let started = Instant::now();
    let (handle, inode) = (opened.handle, opened.attributes.inode);
    let times = milpa_types::AttributeChanges { mode: Some(0o600), ..Default::default() };
    let (synced, flushed, changed, again) = tokio::join!(
        client.fsync(handle, false),
        client.flush(handle),
        client.setattr(inode, times),
        client.fsync(handle, false),
    );
    assert!(synced.is_err() && flushed.is_err() && changed.is_err() && again.is_err());
    assert!(started.elapsed() <= Duration::from_secs(6), "{:?}", started.elapsed());
    cluster.heal();
    let _told_of_what_failed_for_setattr = client.fsync(handle, false).await;
    client.fsync(handle, false).await.unwrap();
    let content = [pattern(1, 200_000), pattern(2, 200_000)].concat();
    assert!(read(&cluster.client().await, "/f").await == content, "nothing was given up");
}

/// Those that work in the background and stand before a call in the line each have their own time.
#[tokio::test(start_paused = true)]
async fn a_call_waits_no_longer_for_its_turn_than_for_a_server() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    let handle = create(&client, "f").await.handle;
    client.write(handle, 0, pattern(1, 200_000), false).await.unwrap();
    cluster.rule(|call| matches!(call, Call::Data(..)).then_some(Fault::Unreachable));
    let late = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // So much is sent in the background.
        client.write(handle, 200_000, pattern(2, 600_000), false).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let started = Instant::now();
        let synced = client.fsync(handle, false).await;
        (synced, started.elapsed())
    };
    let (first, (second, took)) = tokio::join!(client.fsync(handle, false), late);
    assert!(first.is_err() && second.is_err());
    assert!(took <= Duration::from_millis(5_500), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_sealed_extent_is_left_and_the_rest_goes_elsewhere() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let packet = 131_072;
    cluster.rule(move |call| {
        let sealed = DataError::Sealed { length: 3 * packet };
        is_append_at(call, 4 * packet).then_some(Fault::Data(sealed))
    });
    let content = pattern(1, 2_000_000);
    write(&client, "/f", &content).await;
    assert!(read(&client, "/f").await == content);
    assert!(read(&cluster.client().await, "/f").await == content);
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    assert!(client.locate(inode).await.unwrap().segments.len() > 1);
}

/// A seal says that all members have the bytes, not that their disks have: a write that was to be
/// on disk is sent again.
#[tokio::test(start_paused = true)]
async fn a_seal_does_not_stand_for_a_flush() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let flags = OpenFlags { sync: true, ..OpenFlags::read_write() };
    let opened = client.create(InodeId::ROOT, &name("wal"), OWNER, flags).await.unwrap();
    client.write(opened.handle, 0, pattern(1, 600_000), false).await.unwrap();
    let sealed = DataError::Sealed { length: 604_096 };
    cluster.once(Fault::Data(sealed), |call| is_append_at(call, 600_000));
    client.write(opened.handle, 600_000, pattern(2, 4096), false).await.unwrap();
    let on_disk = |state: &crate::cluster::State| {
        let extents = state.data.extents.values();
        extents.map(|extent| extent.on_disk.values().min().copied().unwrap_or(0)).sum::<u64>()
    };
    assert_eq!(on_disk(&cluster.lock()), 604_096);
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_append_failure_ends_with_the_right_bytes() {
    let faults = [
        Fault::Unreachable,
        Fault::AnswerLost,
        Fault::Hangs,
        Fault::Data(DataError::Busy),
        Fault::Data(DataError::OutOfOrder { expected: 5 }),
        Fault::Data(DataError::StaleEpoch { current: Epoch(9) }),
        Fault::Data(DataError::NotPrimary { hint: None }),
        Fault::Data(DataError::MemberSilent { node: DATA[1] }),
        Fault::Data(DataError::NoExtent),
        Fault::Data(DataError::DiskFailed),
        Fault::Data(DataError::NoSpace),
    ];
    for (i, fault) in faults.into_iter().enumerate() {
        let cluster = Cluster::new();
        let client = cluster.client().await;
        cluster.once(fault.clone(), |call| is_append_at(call, 2 * 131_072));
        let content = pattern(i as u8, 1_500_000);
        let started = Instant::now();
        write(&client, "/f", &content).await;
        assert!(started.elapsed() < Duration::from_secs(4), "{fault:?}: {:?}", started.elapsed());
        assert!(read(&cluster.client().await, "/f").await == content, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_volume_says_so_to_close_and_frees_the_buffer() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 100_000), false).await.unwrap();
    let started = Instant::now();
    let error = client.flush(opened.handle).await.unwrap_err();
    assert_eq!(error, FsError::Data(DataError::NoSpace));
    assert!(started.elapsed() < Duration::from_secs(3));
    client.flush(opened.handle).await.unwrap();
    assert_eq!(client.getattr(opened.attributes.inode).await.unwrap().size, 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_full_disk_does_not_take_over_its_bytes_goes_elsewhere() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let (old, new) = (pattern(1, 500_000), pattern(2, 200_000));
    client.write(opened.handle, 0, old.clone(), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Overwrite(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    client.write(opened.handle, 100_000, new.clone(), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    let there = read(&client, "/f").await;
    assert!(there == [&old[..100_000], &new[..], &old[300_000..]].concat());
    assert_eq!(cluster.lock().data.count("overwrite"), 0);
}

/// On a real full disk a file of 2 GB that did not fit showed 0 bytes, and deleting it gave back
/// nothing: what the data nodes had taken belonged to no file.
#[tokio::test(start_paused = true)]
async fn a_file_that_does_not_fit_is_as_long_as_what_did() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let whole = pattern(1, 2_000_000);
    client.write(opened.handle, 0, whole[..1_000_000].to_vec().into(), false).await.unwrap();
    // Sent, but not published yet.
    tokio::time::sleep(Duration::from_millis(100)).await;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Data(DataError::NoSpace)),
        _ => None,
    });
    client
        .write(opened.handle, 1_000_000, whole[1_000_000..].to_vec().into(), false)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let full = Err(FsError::Data(DataError::NoSpace));
    let next = client.write(opened.handle, 2_000_000, pattern(2, 10), false).await;
    assert_eq!(next, full, "the writer hears of it at the next write");
    assert_eq!(client.flush(opened.handle).await, full, "and again at close");
    cluster.heal();
    let size = client.getattr(opened.attributes.inode).await.unwrap().size as usize;
    assert!((128 * 1024..2_000_000).contains(&size), "{size} bytes are in the file");
    let read = client.read(opened.handle, 0, 2_000_000).await.unwrap().concat();
    assert!(read == whole[..size]);
}

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
/// written. Now the first read through each descriptor that nobody has told yet fails.
#[tokio::test(start_paused = true)]
async fn a_reader_is_told_once_that_acknowledged_bytes_are_lost() {
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
    client.write(writer, 50_000, pattern(2, 10_000), false).await.unwrap();
    let whole = client.read(writer, 0, 100_000).await.unwrap().concat();
    assert_eq!(whole.len(), 60_000);
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster.heal();
    assert!(client.fsync(told, false).await.is_err());
    let later = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    for handle in [writer, reader] {
        let error = client.read(handle, 0, 100_000).await.unwrap_err();
        assert_eq!(error, FsError::Lost(Box::new(FsError::Data(DataError::NoSpace))));
        assert_eq!(error.errno(), libc::EIO);
    }
    for handle in [writer, reader, told, later] {
        assert!(client.read(handle, 0, 100_000).await.unwrap().concat() == pattern(1, 50_000));
    }
    assert!(client.write(writer, 0, pattern(3, 10), false).await.is_err(), "still to be told");
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
    for flags in [OpenFlags::read_only(), OpenFlags::read_write()] {
        let again = client.open(opened.attributes.inode, flags).await.unwrap().handle;
        let error = client.read(again, 0, 10_000).await.unwrap_err();
        assert!(matches!(error, FsError::Lost(_)), "{error}");
        assert!(client.read(again, 0, 10_000).await.unwrap().is_empty());
    }
    let mut told = Vec::new();
    for _ in 0..2 {
        let flags = OpenFlags::read_write();
        let again = client.open(opened.attributes.inode, flags).await.unwrap().handle;
        client.write(again, 0, pattern(2, 10), false).await.unwrap();
        told.push([client.flush(again).await.is_err(), client.fsync(again, false).await.is_err()]);
    }
    assert_eq!(told, [[true, false], [false, false]], "once, to the first who asks");
    assert!(client.fsync(opened.handle, false).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn damaged_bytes_are_fetched_from_another_replica() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 300_000)).await;
    cluster.once(Fault::Damaged, is_read);
    assert!(read(&client, "/f").await == pattern(1, 300_000));
}

/// The story: another client deleted the file. Its bytes had been overwritten, so only the leader may say
/// what has become of them; it said that they were gone, the others that they were not the leader, and
/// the reader went on asking for a minute.
#[tokio::test(start_paused = true)]
async fn the_leaders_word_that_overwritten_bytes_are_gone_is_enough() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 100_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    client.fsync(handle, false).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Read(read)) => Some(Fault::Data(match *node == DATA[1] {
            true if read.at_leader => DataError::NoExtent,
            _ => DataError::NotPrimary { hint: Some(DATA[1]) },
        })),
        _ => None,
    });
    let started = Instant::now();
    let error = client.read(handle, 0, 100_000).await.unwrap_err();
    assert!(matches!(error, FsError::Stale(_)), "{error}");
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// No member has a block whole, as the leader has found out. The others only say that they do not lead.
#[tokio::test(start_paused = true)]
async fn the_leaders_word_that_overwritten_bytes_are_damaged_is_enough() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 100_000)).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    client.fsync(handle, false).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Read(read)) => Some(Fault::Data(match *node == DATA[1] {
            true if read.at_leader => DataError::Corrupt { block: 3 },
            _ => DataError::NotPrimary { hint: Some(DATA[1]) },
        })),
        _ => None,
    });
    let started = Instant::now();
    assert_eq!(client.read(handle, 0, 100_000).await.unwrap_err().errno(), libc::EIO);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// The story: as above, and what was left of the extent at one member was too short for the read, which
/// might have meant that the rest was on its way. The file, though, was long gone.
#[tokio::test(start_paused = true)]
async fn who_waits_for_bytes_looks_whether_the_file_still_has_them() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let whole = pattern(1, 100_000);
    write(&client, "/f", &whole).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_only()).await.unwrap().handle;
    cluster.rule(|call| is_read(call).then_some(Fault::Data(DataError::NotHere)));
    let (reader, started) = (client.clone(), Instant::now());
    let reading = tokio::spawn(async move { reader.read(handle, 0, 100_000).await });
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(!reading.is_finished(), "the file has them, so they are waited for");
    cluster.heal();
    assert!(reading.await.unwrap().unwrap().concat() == whole);
    assert!(started.elapsed() < Duration::from_secs(21));
    cluster.rule(|call| is_read(call).then_some(Fault::Data(DataError::NotHere)));
    other.open(inode, OpenFlags { truncate: true, ..OpenFlags::read_write() }).await.unwrap();
    let started = Instant::now();
    assert!(client.read(handle, 0, 100_000).await.unwrap().is_empty(), "it has been cut");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

/// See `who_waits_for_several_at_once_lets_all_of_them_go_on`.
#[tokio::test(start_paused = true)]
async fn fsync_of_a_file_in_two_partitions_outlives_an_outage() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    for part in 0..8 {
        client.write(opened.handle, part * 200_000, pattern(1, 200_000), false).await.unwrap();
        client.flush(opened.handle).await.unwrap();
        // The next part goes into another extent.
        let append = move |call: &Call<'_>| is_append_at(call, (part + 1) * 200_000);
        cluster.once(Fault::Data(DataError::ReadOnly), append);
    }
    let partitions: std::collections::BTreeSet<_> =
        cluster.lock().data.extents.keys().map(|(partition, _)| *partition).collect();
    assert!(partitions.len() > 1, "{partitions:?}");
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Flush { .. }) => Some(Fault::Unreachable),
        _ => None,
    });
    let syncing = tokio::spawn(async move { client.fsync(opened.handle, false).await });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!syncing.is_finished());
    cluster.heal();
    tokio::time::timeout(Duration::from_secs(10), syncing).await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn fsync_waits_for_the_members_of_the_new_epoch_when_one_is_dropped() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    let dead: NodeId = DATA[2];
    cluster.rule(move |call| match call {
        Call::Data(node, _) if *node == dead => Some(Fault::Hangs),
        _ => None,
    });
    let syncing = {
        let (client, handle) = (client.clone(), opened.handle);
        tokio::spawn(async move { client.fsync(handle, false).await })
    };
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!syncing.is_finished(), "a member that is silent may not have flushed");
    {
        let mut state = cluster.lock();
        state.view.version += 1;
        for partition in &mut state.view.data {
            partition.epoch = Epoch(2);
            partition.members.retain(|member| *member != dead);
            partition.primary = DATA[0];
        }
    }
    syncing.await.unwrap().unwrap();
    let state = cluster.lock();
    for extent in state.data.extents.values() {
        let length = extent.bytes.len() as u64;
        assert!(DATA[..2].iter().all(|node| extent.on_disk[node] == length));
    }
}

/// Found by faults on real processes (`make soak`): a data node was stopped, and an fsync waited ten
/// seconds. It tried for five, with a view of the partition that was as old; meanwhile the view had been
/// renewed, just before the managers gave the node up, so that nobody asked them again.
#[tokio::test(start_paused = true)]
async fn a_view_that_was_renewed_during_a_try_may_be_too_old_for_the_next() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    let dead = DATA[2];
    cluster.rule(move |call| match call {
        Call::Data(node, _) if *node == dead => Some(Fault::Hangs),
        _ => None,
    });
    // The client looks at the loads every ten seconds.
    tokio::time::sleep(Duration::from_secs(8)).await;
    let started = Instant::now();
    let silent = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let mut state = cluster.lock();
        state.view.version += 1;
        for partition in &mut state.view.data {
            partition.epoch = Epoch(2);
            partition.members.retain(|member| *member != dead);
            partition.primary = DATA[0];
        }
    };
    let (synced, ()) = tokio::join!(client.fsync(opened.handle, false), silent);
    synced.unwrap();
    assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_call_leaks_nothing_and_the_bytes_arrive() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|config| config.buffer_bytes = 4 << 20).await;
    let opened = create(&client, "f").await;
    let content = pattern(1, 3 << 20);
    for round in 0..30 {
        client.write(opened.handle, 0, content.clone(), false).await.unwrap();
        let given_up = Duration::from_millis(round % 12);
        let _ = tokio::time::timeout(given_up, client.fsync(opened.handle, false)).await;
    }
    client.fsync(opened.handle, false).await.unwrap();
    assert!(read(&cluster.client().await, "/f").await == content);
    cluster.once(Fault::Slow(Duration::from_millis(50)), is_create);
    let directory = name("d");
    let made = client.mkdir(InodeId::ROOT, &directory, OWNER);
    assert!(tokio::time::timeout(Duration::from_millis(5), made).await.is_err());
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert!(client.lookup(InodeId::ROOT, &directory).await.is_ok(), "finished without its caller");
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

/// Found by the simulation (seed 195): a writer that had opened the file before another one's bytes were
/// there put its own over them, unsynced, and power took these: the synced ones were gone as well.
#[tokio::test(start_paused = true)]
async fn synced_bytes_are_not_replaced_by_others_that_power_may_take() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    let early = other.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    other.write(early.handle, 100_000, pattern(2, 100_000), false).await.unwrap();
    other.flush(early.handle).await.unwrap();
    cluster.lock().data.cut_power();
    let (old, new) = (pattern(1, 300_000), pattern(2, 100_000));
    let there = read(&client, "/f").await;
    assert!(there == [&old[..100_000], &new[..], &old[200_000..]].concat());
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

/// Found by power cuts on real processes: 80 synced bytes in the inode were gone after a larger write
/// that nobody had synced. The inode had let them go before any disk had them.
#[tokio::test(start_paused = true)]
async fn what_leaves_the_inode_is_on_disks_before() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 80), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    client.write(opened.handle, 80, pattern(2, 200_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    cluster.lock().data.cut_power();
    let found = read(&other, "/f").await;
    assert!(found.starts_with(&pattern(1, 80)), "{} bytes left", found.len());
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
