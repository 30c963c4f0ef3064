//! Nodes that answer, but slowly.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_client::OpenFlags;
use milpa_types::{DataError, PartitionId};
use milpa_wire::data::DataRequest;
use tokio::time::Instant;

use crate::cluster::{Call, Cluster, DATA, Fault, create, pattern, read, write};

#[tokio::test(start_paused = true)]
async fn a_slow_replica_does_not_slow_a_read() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/f", &pattern(1, 300_000)).await;
    for node in DATA {
        cluster.heal();
        cluster.rule(move |call| match call {
            Call::Data(at, DataRequest::Read(_)) if *at == node => {
                Some(Fault::Slow(Duration::from_secs(2)))
            }
            _ => None,
        });
        let started = Instant::now();
        assert!(read(&client, "/f").await == pattern(1, 300_000));
        assert!(started.elapsed() < Duration::from_millis(300), "{:?}", started.elapsed());
    }
}

/// 13 is slow, so every append to a partition of which it is a member is.
#[tokio::test(start_paused = true)]
async fn new_bytes_go_where_no_member_is_slow() {
    let cluster = Cluster::new();
    for (k, partition) in cluster.lock().view.data.iter_mut().enumerate() {
        partition.members = vec![DATA[k], DATA[(k + 1) % 3]];
    }
    let client = cluster.client().await;
    let appends: Arc<Mutex<BTreeMap<u64, u32>>> = Arc::default();
    let rule = |is_slow: bool| {
        let appends = Arc::clone(&appends);
        cluster.heal();
        cluster.rule(move |call| {
            let Call::Data(_, DataRequest::Append(append)) = call else { return None };
            *appends.lock().unwrap().entry(append.partition.0).or_default() += 1;
            let is_slow = is_slow && append.partition != PartitionId(200);
            is_slow.then_some(Fault::Slow(Duration::from_millis(500)))
        });
    };
    rule(true);
    for number in 0..100 {
        write(&client, &format!("/f{number}"), &pattern(number as u8, 10_000)).await;
    }
    let fast = appends.lock().unwrap().get(&200).copied().unwrap_or_default();
    assert!(fast > 80, "{appends:?}");

    // Another try now and then: it may be well again.
    rule(false);
    appends.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(6)).await;
    for number in 100..200 {
        write(&client, &format!("/f{number}"), &pattern(number as u8, 10_000)).await;
    }
    let tried = appends.lock().unwrap().values().filter(|n| **n > 15).count();
    assert_eq!(tried, 3, "{appends:?}");
}

/// A stream leaves a partition that has become slow.
#[tokio::test(start_paused = true)]
async fn an_extent_is_left_when_a_member_becomes_slow() {
    let cluster = Cluster::new();
    for partition in &mut cluster.lock().view.data {
        partition.members.retain(|node| (*node == DATA[0]) == (partition.primary == DATA[0]));
    }
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let slow: Mutex<Option<bool>> = Mutex::default();
    cluster.rule(move |call| {
        let Call::Data(node, DataRequest::Append(_)) = call else { return None };
        let is_first = *node == DATA[0];
        let is_slow = *slow.lock().unwrap().get_or_insert(is_first) == is_first;
        is_slow.then_some(Fault::Slow(Duration::from_secs(2)))
    });
    let started = Instant::now();
    for number in 0..20 {
        // So much is sent in the background.
        let bytes = pattern(number as u8, 600_000);
        client.write(opened.handle, number * 600_000, bytes, false).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    client.fsync(opened.handle, false).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

/// A node that refuses at once is not a fast one.
#[tokio::test(start_paused = true)]
async fn a_quick_refusal_does_not_clear_a_slow_member() {
    let cluster = Cluster::new();
    for partition in &mut cluster.lock().view.data {
        partition.members.retain(|node| (*node == DATA[0]) == (partition.primary == DATA[0]));
    }
    let client = cluster.client().await;
    let tries: Arc<Mutex<u32>> = Arc::default();
    let counted = Arc::clone(&tries);
    // Every second try at 11 is refused at once, the others take half a second.
    cluster.rule(move |call| {
        let Call::Data(node, DataRequest::Append(_)) = call else { return None };
        if *node != DATA[0] {
            return None;
        }
        let mut tries = counted.lock().unwrap();
        *tries += 1;
        Some(match tries.is_multiple_of(2) {
            true => Fault::Data(DataError::Busy),
            false => Fault::Slow(Duration::from_millis(500)),
        })
    });
    for number in 0..240 {
        write(&client, &format!("/f{number}"), &pattern(number, 10_000)).await;
        tokio::time::sleep(Duration::from_millis(350)).await;
    }
    // In 84 seconds: one every five, and the refusal after it, for which it is avoided for two.
    assert!(*tries.lock().unwrap() <= 26, "{tries:?}");
}

/// Found by a reader: whoever sent a stream of a file kept the file's place as long as there was more of it, and
/// another one's close of that file waited without end.
#[tokio::test(start_paused = true)]
async fn a_close_does_not_wait_for_the_end_of_anothers_stream() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|config| config.buffer_bytes = 8 << 20).await;
    let opened = create(&client, "f").await;
    let other = client.open(opened.attributes.inode, OpenFlags::read_write()).await.unwrap();
    cluster.rule(|call| match call {
        Call::Data(_, DataRequest::Append(_)) => Some(Fault::Slow(Duration::from_millis(100))),
        _ => None,
    });
    let streaming = async {
        for at in (0..).step_by(1 << 20) {
            client.write(opened.handle, at, pattern(1, 1 << 20), false).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let closing = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.write(other.handle, 0, pattern(2, 1), false).await.unwrap();
        client.flush(other.handle).await
    };
    let closing = tokio::time::timeout(Duration::from_secs(6), closing);
    let closed = tokio::select! {
        closed = closing => closed,
        () = streaming => unreachable!("it never ends"),
    };
    closed.expect("its turn comes").unwrap();
    assert!(read(&cluster.client().await, "/f").await.starts_with(&pattern(2, 1)));
}
