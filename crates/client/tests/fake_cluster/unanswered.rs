//! Publishes whose answers do not come, or wait, and what others make of the file meanwhile.

use std::sync::Arc;
use std::time::Duration;

use milpa_client::{Client, FsError, HandleId, OpenFlags};
use milpa_types::{AttributeChanges, InodeId};
use milpa_wire::meta::{MetaRequest, MetaWrite};

use crate::cluster::{Call, Cluster, Fault, OWNER, create, name, pattern, read, write};

/// Two clients, of which the first has written this and closed the file; the answer to its publish, which was
/// carried out if the fault is that, did not come in time.
async fn closed_without_an_answer(
    cluster: &Arc<Cluster>,
    fault: Fault,
    bytes: &bytes::Bytes,
) -> [(Client, HandleId, InodeId); 2] {
    let one = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    let other = cluster.client().await;
    let opened = create(&one, "f").await;
    let inode = opened.attributes.inode;
    let early = other.open(inode, OpenFlags::read_write()).await.unwrap();
    one.write(opened.handle, 0, bytes.clone(), false).await.unwrap();
    let mut session = None;
    cluster.rule(move |call| match call {
        Call::Meta(_, MetaRequest::Write { id, write: MetaWrite::Publish(_), .. }) => {
            let first = *session.get_or_insert(id.session);
            (id.session == first).then(|| fault.clone())
        }
        _ => None,
    });
    let error = one.flush(opened.handle).await.unwrap_err();
    assert!(matches!(error, FsError::TimedOut { .. }), "{error}");
    assert_eq!(one.getattr(inode).await.unwrap().size, bytes.len() as u64, "as written here");
    [(one, opened.handle, inode), (other, early.handle, inode)]
}

/// The story: the answer to a publish was lost, and the client published the same bytes again, as something
/// new. Meanwhile somebody had truncated the file, so that they were being freed, and had written and synced
/// others: those were freed too, and the file referred to dead bytes.
#[tokio::test(start_paused = true)]
async fn a_publish_without_an_answer_does_not_undo_a_truncation() {
    for (before, after) in [(200_000, 100_000), (200_000, 100), (300, 200), (300, 20_000)] {
        let cluster = Cluster::new();
        let bytes = pattern(1, before);
        let [(one, handle, inode), (other, its, _)] =
            closed_without_an_answer(&cluster, Fault::AnswerLost, &bytes).await;
        let cut = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
        other.setattr(inode, cut).await.unwrap();
        other.write(its, 0, pattern(2, after), false).await.unwrap();
        other.fsync(its, false).await.unwrap();
        cluster.heal();
        one.fsync(handle, false).await.unwrap();
        for client in [&one, &other, &cluster.client().await] {
            assert!(read(client, "/f").await == pattern(2, after), "{before}, then {after}");
        }
    }
}

/// As above, without a truncation: the others' bytes lie over those whose publish had no answer.
#[tokio::test(start_paused = true)]
async fn a_publish_without_an_answer_does_not_replace_what_came_after_it() {
    let cluster = Cluster::new();
    let bytes = pattern(1, 200_000);
    let [(one, handle, _), (other, its, _)] =
        closed_without_an_answer(&cluster, Fault::AnswerLost, &bytes).await;
    other.write(its, 50_000, pattern(2, 100_000), false).await.unwrap();
    other.fsync(its, false).await.unwrap();
    cluster.heal();
    let (old, new) = (pattern(1, 200_000), pattern(2, 100_000));
    let expected = [&old[..50_000], &new[..], &old[150_000..]].concat();
    // By itself, too.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(read(&other, "/f").await == expected);
    one.fsync(handle, false).await.unwrap();
    assert!(read(&one, "/f").await == expected);
}

/// One that never arrived is carried out when it does, with what was written meanwhile; our own truncation
/// comes after it.
#[tokio::test(start_paused = true)]
async fn a_publish_that_never_arrived_is_made_up_for() {
    for length in [300, 200_000] {
        let cluster = Cluster::new();
        let bytes = pattern(1, length);
        let [(one, handle, inode), _] =
            closed_without_an_answer(&cluster, Fault::Unreachable, &bytes).await;
        let end = length as u64;
        one.write(handle, end, pattern(2, 1_000), false).await.unwrap();
        assert_eq!(one.getattr(inode).await.unwrap().size, end + 1_000);
        cluster.heal();
        one.fsync(handle, false).await.unwrap();
        let other = cluster.client().await;
        assert!(read(&other, "/f").await == [bytes, pattern(2, 1_000)].concat(), "{length}");
    }
    let cluster = Cluster::new();
    let [(one, handle, inode), _] =
        closed_without_an_answer(&cluster, Fault::Unreachable, &pattern(1, 200_000)).await;
    cluster.heal();
    let cut = AttributeChanges { size: Some(7), ..AttributeChanges::default() };
    one.setattr(inode, cut).await.unwrap();
    one.fsync(handle, false).await.unwrap();
    assert!(read(&cluster.client().await, "/f").await == pattern(1, 200_000)[..7]);
}

/// Each of so many files holds the number of a request without an answer, and there are no more numbers: all
/// of them get their answers when there are some again, and calls end in time until then.
#[tokio::test(start_paused = true)]
async fn many_publishes_without_an_answer_do_not_stand_in_each_others_way() {
    let cluster = Cluster::new();
    let client = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    let mut handles = Vec::new();
    for i in 0..400 {
        let opened = create(&client, &format!("f{i}")).await;
        client.write(opened.handle, 0, pattern(i as u8, 2_000), false).await.unwrap();
        handles.push(opened.handle);
    }
    cluster.rule(|call| match call {
        Call::Meta(_, MetaRequest::Write { write: MetaWrite::Publish(_), .. }) => {
            Some(Fault::AnswerLost)
        }
        _ => None,
    });
    let flush = |handle: &HandleId| {
        let (client, handle) = (client.clone(), *handle);
        tokio::spawn(async move { client.flush(handle).await })
    };
    for flushed in handles.iter().map(flush).collect::<Vec<_>>() {
        assert!(flushed.await.unwrap().is_err());
    }
    let started = tokio::time::Instant::now();
    assert!(client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.is_err(), "no number left");
    assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
    cluster.heal();
    tokio::time::sleep(Duration::from_secs(30)).await;
    client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap();
    let other = cluster.client().await;
    for i in 0..400 {
        assert!(read(&other, &format!("/f{i}")).await == pattern(i as u8, 2_000), "{i}");
    }
}
/// Opens the file and reads it whole, as the kernel does for its pages. Gives whether it was to keep those it had.
async fn opened_and_read(client: &Client, inode: InodeId) -> (bool, Vec<u8>) {
    let opened = client.open(inode, OpenFlags::read_only()).await.unwrap();
    let got = client.read(opened.handle, 0, 2_000_000).await.unwrap().concat();
    client.release(opened.handle).await.unwrap();
    (opened.keep_cache, got)
}

/// Found by a reader: bytes of a publish without an answer lay over what others had written after it, and the kernel
/// kept them as the others' version when the answer had come.
#[tokio::test(start_paused = true)]
async fn pages_read_under_a_publish_without_an_answer_do_not_stay_after_it() {
    let cluster = Cluster::new();
    let one = cluster.client_with(|c| c.io_deadline = Some(Duration::from_secs(5))).await;
    let other = cluster.client().await;
    write(&other, "/f", &pattern(1, 200_000)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    let handle = one.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    one.write(handle, 0, pattern(2, 5_000), false).await.unwrap();
    cluster.rule(|call| match call {
        Call::Meta(_, MetaRequest::Write { write: MetaWrite::Publish(_), .. }) => {
            Some(Fault::AnswerLost)
        }
        _ => None,
    });
    one.flush(handle).await.unwrap_err();
    cluster.heal();
    let its = other.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    other.write(its, 0, pattern(3, 5_000), false).await.unwrap();
    other.flush(its).await.unwrap();
    let (_, got) = opened_and_read(&one, inode).await;
    assert!(got[..5_000] == pattern(2, 5_000), "not known to be part of the file yet");
    one.fsync(handle, false).await.unwrap();
    let (keeps, got) = opened_and_read(&one, inode).await;
    assert!(got[..5_000] == pattern(3, 5_000), "written after ours");
    assert!(!keeps, "the kernel has ours");
    assert!(opened_and_read(&one, inode).await.0);
}

/// As above, without any failure: what was overwritten in place waits for its publish, and others overwrite it, too.
#[tokio::test(start_paused = true)]
async fn pages_read_under_bytes_that_wait_for_their_publish_do_not_stay_after_it() {
    let cluster = Cluster::new();
    let (one, other) = (cluster.client().await, cluster.client().await);
    write(&other, "/f", &pattern(1, 1_000_000)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    let handle = one.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    one.write(handle, 0, pattern(2, 1_000_000), false).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let its = other.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    other.write(its, 0, pattern(3, 5_000), false).await.unwrap();
    other.flush(its).await.unwrap();
    let (_, got) = opened_and_read(&one, inode).await;
    assert!(got[..5_000] == pattern(2, 5_000), "not known to be part of the file yet");
    one.flush(handle).await.unwrap();
    let (keeps, got) = opened_and_read(&one, inode).await;
    assert!(got[..5_000] == pattern(3, 5_000), "written after ours");
    assert!(!keeps, "the kernel has ours");
    assert!(opened_and_read(&one, inode).await.0);
}
