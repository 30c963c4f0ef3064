//! Nodes that die, hang, lose answers and change their minds.

use std::time::Duration;

use milpa_client::{FsError, OpenFlags};
use milpa_types::{DataError, Epoch, InodeId, Node, NodeId, NodeState, PartitionId};
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

pub fn is_read(call: &Call<'_>) -> bool {
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

/// Found by the simulation (seed 18411): the longer an election took, the longer the client waited for the node
/// that was cut off, and not for the leader.
#[tokio::test(start_paused = true)]
async fn who_is_cut_off_is_not_waited_for_longer_while_others_elect() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let elected = Instant::now() + Duration::from_secs(8);
    cluster.rule(move |call| match call {
        Call::Meta(node, _) if *node == META[0] => Some(Fault::Hangs),
        Call::Meta(..) if Instant::now() < elected => {
            Some(Fault::Meta(milpa_types::MetaError::NotLeader { leader: None }))
        }
        _ => None,
    });
    cluster.lock().meta.leaders.insert(PartitionId(100), META[2]);
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
    assert!(elected.elapsed() < Duration::from_millis(1_500), "{:?}", elected.elapsed());
}

/// One that is slow, and leads as far as the others know, has its time.
#[tokio::test(start_paused = true)]
async fn a_slow_leader_is_waited_for() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    cluster.rule(|call| match call {
        Call::Meta(node, MetaRequest::Write { .. }) if *node == META[0] => {
            Some(Fault::Slow(Duration::from_millis(3_500)))
        }
        _ => None,
    });
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
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
    assert_eq!(client.getattr(opened.attributes.inode).await.unwrap().size, 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_full_disk_does_not_take_over_its_bytes_goes_elsewhere() {
    goes_elsewhere(DataError::NoSpace).await;
}

/// Found by a reader: it was acknowledged, and as unreadable as the rest of its block.
#[tokio::test(start_paused = true)]
async fn what_is_written_into_a_lost_block_goes_elsewhere() {
    goes_elsewhere(DataError::Corrupt { block: 30 }).await;
}

/// Found by a reader: a member whose disk had failed said that it was busy, and those that went on without it, that the view
/// is old. The view was renewed ten seconds later, when it would have been anyway.
#[tokio::test(start_paused = true)]
async fn an_fsync_hears_who_knows_a_newer_view_before_who_is_busy() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    client.flush(opened.handle).await.unwrap();
    {
        let mut state = cluster.lock();
        state.view.version += 1;
        for partition in &mut state.view.data {
            partition.epoch = Epoch(2);
            partition.members.retain(|node| *node != DATA[0]);
            partition.primary = DATA[1];
        }
    }
    cluster.rule(|call| match call {
        Call::Data(node, DataRequest::Flush { .. }) if *node == DATA[0] => {
            Some(Fault::Data(DataError::Busy))
        }
        _ => None,
    });
    let started = Instant::now();
    client.fsync(opened.handle, false).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

/// Of what is refused over old bytes.
async fn goes_elsewhere(refusal: DataError) {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let (old, new) = (pattern(1, 500_000), pattern(2, 200_000));
    client.write(opened.handle, 0, old.clone(), false).await.unwrap();
    client.fsync(opened.handle, false).await.unwrap();
    cluster.rule(move |call| match call {
        Call::Data(_, DataRequest::Overwrite(_)) => Some(Fault::Data(refusal.clone())),
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

/// The story: a process was killed in an open that truncates. Its handle had been made, and nobody was told of it: the
/// file was never let go.
#[tokio::test(start_paused = true)]
async fn an_interrupted_open_leaves_no_handle_behind() {
    for after in [1, 5, 20] {
        let cluster = Cluster::new();
        let client = cluster.client().await;
        write(&client, "/f", &pattern(1, 200_000)).await;
        let inode = client.resolve(b"/f", true).await.unwrap().inode;
        cluster.rule(|call| match call {
            Call::Meta(_, MetaRequest::Write { write: MetaWrite::SetAttributes { .. }, .. }) => {
                Some(Fault::Slow(Duration::from_millis(10)))
            }
            _ => None,
        });
        let opened = client.open(inode, OpenFlags { truncate: true, ..OpenFlags::read_write() });
        let opened = tokio::time::timeout(Duration::from_millis(after), opened).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(client.getattr(inode).await.unwrap().size, 0, "finished without its caller");
        if let Ok(opened) = opened {
            client.release(opened.unwrap().handle).await.unwrap();
        }
        client.unlink(InodeId::ROOT, &name("f")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!cluster.lock().meta.inodes.contains_key(&inode), "held after {after} ms");
    }
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

/// Once without an answer it was never sent again, and the file stayed as long as the mount.
#[tokio::test(start_paused = true)]
async fn a_deleted_file_is_let_go_after_its_partition_was_away() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.unlink(InodeId::ROOT, &name("f")).await.unwrap();
    cluster.rule(|call| match call {
        Call::Meta(_, MetaRequest::Write { write: MetaWrite::Release { .. }, .. }) => {
            Some(Fault::Unreachable)
        }
        _ => None,
    });
    client.release(opened.handle).await.unwrap();
    tokio::time::sleep(Duration::from_secs(100)).await;
    let inode = opened.attributes.inode;
    assert!(cluster.lock().meta.inodes.contains_key(&inode));
    cluster.heal();
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(!cluster.lock().meta.inodes.contains_key(&inode));
}

fn is_release(call: &Call<'_>) -> bool {
    let Call::Meta(_, MetaRequest::Write { write, .. }) = call else { return false };
    matches!(write, MetaWrite::Release { .. })
}

/// Found by a reader: the word that a deleted file may go was late, and took a file away that had been opened by
/// another name, and unlinked, since.
#[tokio::test(start_paused = true)]
async fn a_late_release_does_not_take_what_is_open_again() {
    // The word is not heard for long, or is on its way just then.
    for seconds in [0, 100] {
        let cluster = Cluster::new();
        let client = cluster.client().await;
        let opened = create(&client, "f").await;
        let inode = opened.attributes.inode;
        client.write(opened.handle, 0, pattern(1, 5000), false).await.unwrap();
        client.flush(opened.handle).await.unwrap();
        client.link(inode, InodeId::ROOT, &name("g")).await.unwrap();
        client.unlink(InodeId::ROOT, &name("f")).await.unwrap();
        match seconds {
            0 => cluster.once(Fault::Hangs, is_release),
            _ => cluster.rule(|call| is_release(call).then_some(Fault::Unreachable)),
        }
        client.release(opened.handle).await.unwrap();
        tokio::time::sleep(Duration::from_secs(seconds) + Duration::from_millis(1)).await;
        let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
        client.unlink(InodeId::ROOT, &name("g")).await.unwrap();
        client.write(handle, 5000, pattern(2, 5000), false).await.unwrap();
        client.flush(handle).await.unwrap();
        cluster.heal();
        tokio::time::sleep(Duration::from_secs(100)).await;
        client.fsync(handle, false).await.unwrap();
        assert_eq!(client.getattr(inode).await.unwrap().size, 10_000, "{seconds}");
        let got = client.read(handle, 0, 20_000).await.unwrap().concat();
        assert!(got == [pattern(1, 5000), pattern(2, 5000)].concat(), "{seconds}");
        client.release(handle).await.unwrap();
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert!(!cluster.lock().meta.inodes.contains_key(&inode), "let go in the end, {seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_lease_lives_until_a_shutdown_has_saved_all() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    client.write(opened.handle, 0, pattern(1, 300_000), false).await.unwrap();
    cluster.rule(|call| matches!(call, Call::Data(..)).then_some(Fault::Unreachable));
    let shutting_down = tokio::spawn({
        let client = client.clone();
        async move { client.shutdown().await }
    });
    let before = cluster.lock().meta.keep_alives;
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert!(
        cluster.lock().meta.keep_alives > before,
        "the session ended before its bytes were saved"
    );
    cluster.heal();
    shutting_down.await.unwrap().unwrap();
    assert!(read(&cluster.client().await, "/f").await == pattern(1, 300_000));
}

/// Found by a reader: overwrites of a file that somebody had deleted stayed in the buffer, which all files share,
/// until the last close.
#[tokio::test(start_paused = true)]
async fn overwrites_of_a_deleted_file_leave_the_buffer() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 4 << 20)).await;
    let client = cluster.client_with(|config| config.buffer_bytes = 4 << 20).await;
    let inode = client.resolve(b"/f", true).await.unwrap().inode;
    let handle = client.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Overwrite(_)) => Some(Fault::Data(DataError::NoExtent)),
        _ => None,
    });
    client.write(handle, 0, pattern(2, 4 << 20), false).await.unwrap();
    cluster.lock().meta.inodes.remove(&inode);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let began = Instant::now();
    write(&client, "/g", &pattern(3, 4 << 20)).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(client.fsync(handle, false).await.is_err(), "it is told");
}

/// Found by a reader: who waited for room in the buffer went to the end of the queue twice a second, and gave up
/// after a while whether or not it emptied.
#[tokio::test(start_paused = true)]
async fn who_waits_for_room_has_it_in_the_order_of_asking_as_long_as_there_is_any() {
    let cluster = Cluster::new();
    let client = cluster
        .client_with(|config| {
            config.buffer_bytes = 4 << 20;
            config.io_deadline = Some(Duration::from_secs(10));
        })
        .await;
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Slow(Duration::from_secs(2))),
        _ => None,
    });
    let mut writers = tokio::task::JoinSet::new();
    for i in 0..40 {
        let handle = create(&client, &format!("f{i}")).await.handle;
        let client = client.clone();
        writers.spawn(async move { client.write(handle, 0, pattern(1, 1 << 20), false).await });
    }
    let began = Instant::now();
    let written = writers.join_all().await;
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    assert!(began.elapsed() > Duration::from_secs(12), "{:?}", began.elapsed());
}

/// Found by a reader: after five minutes without two of three data nodes, bytes that had waited all the time were
/// given up within a second, as the partitions had all their members on paper.
#[tokio::test(start_paused = true)]
async fn bytes_wait_for_members_that_are_away_however_many_are_on_paper() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let handle = create(&client, "f").await.handle;
    let set = |state: NodeState| {
        let view = &mut cluster.lock().view;
        let is_away = |node: &&mut Node| DATA[1..].contains(&node.id);
        view.nodes.iter_mut().filter(is_away).for_each(|node| node.state = state);
        view.data.iter_mut().for_each(|it| it.takes_extents = state == NodeState::Active);
        view.version += 1;
    };
    set(NodeState::Dead);
    tokio::time::sleep(Duration::from_secs(30)).await;
    client.write(handle, 0, pattern(1, 100_000), false).await.unwrap();
    let healing = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        set(NodeState::Active);
    };
    let (flushed, ()) = tokio::join!(client.flush(handle), healing);
    flushed.unwrap();
    assert!(read(&client, "/f").await == pattern(1, 100_000));
}

/// Found by a reader: the time that a silent member had taken counted against the first partition that was full.
#[tokio::test(start_paused = true)]
async fn one_full_partition_after_a_silent_member_ends_no_append() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let handle = create(&client, "f").await.handle;
    let mut faults = vec![Fault::Data(DataError::NoSpace), Fault::Hangs];
    cluster.rule(move |call| match call {
        Call::Data(_, DataRequest::Append(_)) => faults.pop(),
        _ => None,
    });
    client.write(handle, 0, pattern(1, 50_000), false).await.unwrap();
    client.flush(handle).await.unwrap();
}
