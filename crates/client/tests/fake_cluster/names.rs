//! Names and directories.

use std::sync::Arc;
use std::time::Duration;

use milpa_client::{Client, DirectoryEntry, FsError, OpenFlags};
use milpa_types::{InodeId, MetaError, MetaSlot};
use milpa_wire::meta::{MetaRead, MetaRequest, MetaWrite};
use tokio::sync::Notify;

use crate::cluster::{Call, Cluster, Fault, OWNER, create, name, pattern, read, write};

#[tokio::test(start_paused = true)]
async fn an_unlinked_file_lives_until_its_last_close() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "temporary").await;
    let inode = opened.attributes.inode;
    client.write(opened.handle, 0, pattern(1, 200_000), false).await.unwrap();
    client.unlink(InodeId::ROOT, &name("temporary")).await.unwrap();
    assert!(client.lookup(InodeId::ROOT, &name("temporary")).await.unwrap_err().is_not_found());
    client.fsync(opened.handle, false).await.unwrap();
    let seen = client.read(opened.handle, 0, 1 << 20).await.unwrap().concat();
    assert!(seen == pattern(1, 200_000));
    assert!(cluster.lock().meta.inodes.contains_key(&inode), "held");
    client.release(opened.handle).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    assert!(!cluster.lock().meta.inodes.contains_key(&inode), "let go");
    assert_eq!(cluster.lock().meta.count("release"), 1);
}

#[tokio::test(start_paused = true)]
async fn rename_replaces_and_keeps_what_is_open() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/new", &pattern(1, 1000)).await;
    write(&client, "/old", &pattern(2, 1000)).await;
    let old = client.resolve(b"/old", true).await.unwrap().inode;
    let opened = client.open(old, OpenFlags::read_only()).await.unwrap();
    let (new_name, old_name) = (name("new"), name("old"));
    let root = InodeId::ROOT;
    let refused = client.rename(root, &new_name, root, &old_name, true).await;
    assert_eq!(refused.unwrap_err().errno(), libc_errno("EEXIST"));
    client.rename(root, &new_name, root, &old_name, false).await.unwrap();
    assert!(read(&client, "/old").await == pattern(1, 1000));
    assert!(client.lookup(root, &new_name).await.unwrap_err().is_not_found());
    let seen = client.read(opened.handle, 0, 4096).await.unwrap().concat();
    assert!(seen == pattern(2, 1000), "the replaced file is still open");
    client.release(opened.handle).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    assert!(!cluster.lock().meta.inodes.contains_key(&old));
}

/// The story: whether an unlinked file is held for us was decided by the handles that there were. One process of the
/// mount opened the file while another removed it, or replaced it: the handle was stale as soon as it was there.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_removed_while_it_is_opened_lives_until_its_close() {
    let (root, f, g) = (InodeId::ROOT, name("f"), name("g"));
    for (is_renamed, is_given_up) in [(false, false), (true, false), (false, true)] {
        let cluster = Cluster::new();
        write(&cluster.client().await, "/f", &pattern(1, 200_000)).await;
        let client = cluster.client().await;
        let inode = client.lookup(root, &f).await.unwrap().inode;
        write(&client, "/g", &pattern(2, 10)).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        client.lookup(root, &f).await.unwrap();
        cluster.once(Fault::Slow(Duration::from_millis(50)), move |call| {
            let layout = MetaRead::GetLayout { inode, from: 0 };
            matches!(call, Call::Meta(_, MetaRequest::Read { read, .. }) if *read == layout)
        });
        let opener = client.clone();
        let opening = tokio::spawn(async move { opener.open(inode, OpenFlags::read_only()).await });
        tokio::time::sleep(Duration::from_millis(10)).await;
        match is_renamed {
            true => client.rename(root, &g, root, &f, false).await.unwrap(),
            false => client.unlink(root, &f).await.unwrap(),
        }
        assert!(!opening.is_finished());
        if is_given_up {
            opening.abort();
        } else {
            let handle = opening.await.unwrap().unwrap().handle;
            let seen = client.read(handle, 0, 1 << 20).await.unwrap().concat();
            assert!(seen == pattern(1, 200_000));
            assert!(cluster.lock().meta.inodes.contains_key(&inode), "held");
            client.release(handle).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(!cluster.lock().meta.inodes.contains_key(&inode), "let go");
    }
}

fn libc_errno(name: &str) -> i32 {
    match name {
        "EEXIST" => 17,
        _ => 116,
    }
}

#[tokio::test(start_paused = true)]
async fn directories_spread_and_are_listed_with_all_attributes() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    for i in 0..10 {
        client.mkdir(InodeId::ROOT, &name(&format!("d{i}")), OWNER).await.unwrap();
    }
    let page = client.readdir(InodeId::ROOT, None, 4, true).await.unwrap();
    assert!(page.entries.len() == 4 && !page.end);
    let all = client.list(InodeId::ROOT).await.unwrap();
    assert_eq!(all.len(), 10);
    assert!(all.iter().all(|entry| entry.attributes.is_some_and(|a| a.inode == entry.inode)));
    let elsewhere = all.iter().filter(|e| e.inode.slot() == MetaSlot(1)).count();
    assert!((4..=6).contains(&elsewhere), "{elsewhere} of 10 in the other partition");
    let statfs = client.statfs().await.unwrap();
    assert_eq!(statfs.inodes, 11);
}

#[tokio::test(start_paused = true)]
async fn a_change_of_a_directory_tells_what_became_of_it() {
    let cluster = Cluster::new();
    let (client, other) = (cluster.client().await, cluster.client().await);
    let d = client.mkdir(InodeId::ROOT, &name("d"), OWNER).await.unwrap().inode;
    let reads = cluster.lock().meta.count("read");
    for i in 0..20 {
        let file = name(&format!("f{i}"));
        let opened = client.create(d, &file, OWNER, OpenFlags::read_write()).await.unwrap();
        client.release(opened.handle).await.unwrap();
        let seen = client.getattr(d).await.unwrap();
        assert_eq!(seen, cluster.lock().meta.inodes[&d].attributes, "as the servers have it");
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    }
    assert_eq!(cluster.lock().meta.count("read"), reads, "nothing was asked");
    client.mkdir(d, &name("sub"), OWNER).await.unwrap();
    client.rmdir(d, &name("sub")).await.unwrap();
    let seen = client.getattr(d).await.unwrap();
    assert_eq!(seen, cluster.lock().meta.inodes[&d].attributes);
    client.unlink(d, &name("f0")).await.unwrap();
    let seen = client.getattr(d).await.unwrap();
    assert_eq!(seen, cluster.lock().meta.inodes[&d].attributes);
    other.create(d, &name("theirs"), OWNER, OpenFlags::read_write()).await.unwrap();
    assert!(client.lookup(d, &name("theirs")).await.is_ok(), "others' names are seen at once");
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let seen = client.getattr(d).await.unwrap();
    assert_eq!(seen, cluster.lock().meta.inodes[&d].attributes, "and their changes in time");
}

#[tokio::test(start_paused = true)]
async fn files_are_born_beside_their_names_unless_the_partition_is_full() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let first = create(&client, "a").await;
    assert_eq!(first.attributes.inode.slot(), MetaSlot(0));
    cluster.lock().meta.full.insert(MetaSlot(0));
    let second = create(&client, "b").await;
    assert_eq!(second.attributes.inode.slot(), MetaSlot(1));
    cluster.lock().meta.full.insert(MetaSlot(1));
    let flags = OpenFlags::read_write();
    let third = client.create(InodeId::ROOT, &name("c"), OWNER, flags).await;
    assert_eq!(third.unwrap_err(), FsError::Meta(MetaError::NoSpace));
}

#[tokio::test(start_paused = true)]
async fn paths_follow_links_and_refuse_loops() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    client.make_directories(b"/a/b/c", OWNER).await.unwrap();
    write(&client, "/a/b/c/file", &pattern(1, 10)).await;
    client.symlink(InodeId::ROOT, &name("short"), b"a/b", OWNER).await.unwrap();
    client.symlink(InodeId::ROOT, &name("loop"), b"/loop", OWNER).await.unwrap();
    assert!(read(&client, "/short/c/file").await == pattern(1, 10));
    assert_eq!(client.resolve(b"/loop", true).await.unwrap_err(), FsError::LinkLoop);
    assert!(client.resolve(b"/loop", false).await.is_ok());
    client.remove_tree(b"/a").await.unwrap();
    assert!(client.resolve(b"/a", true).await.unwrap_err().is_not_found());
}

#[tokio::test(start_paused = true)]
async fn location_tells_partitions_and_members() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    write(&client, "/big", &pattern(1, 300_000)).await;
    let inode = client.resolve(b"/big", true).await.unwrap().inode;
    let location = client.locate(inode).await.unwrap();
    assert_eq!(location.segments.iter().map(|s| s.length).sum::<u64>(), 300_000);
    assert!(location.segments.iter().all(|s| s.members.len() == 3));
    write(&client, "/tiny", &pattern(1, 100)).await;
    let inode = client.resolve(b"/tiny", true).await.unwrap().inode;
    assert_eq!(client.locate(inode).await.unwrap().inline_bytes, 100);
}

/// Removes the file `f`. The request is on its way, and carried out a second later.
async fn begin_to_remove_f(
    cluster: &Cluster,
    client: &Client,
) -> tokio::task::JoinHandle<Result<(), FsError>> {
    let sent = Arc::new(Notify::new());
    let sending = Arc::clone(&sent);
    cluster.once(Fault::Hangs, move |call| {
        let is_removal = matches!(
            call,
            Call::Meta(_, MetaRequest::Write { write: MetaWrite::Unlink { .. }, .. })
        );
        if is_removal {
            sending.notify_one();
        }
        is_removal
    });
    let client = client.clone();
    let removing = tokio::spawn(async move { client.unlink(InodeId::ROOT, &name("f")).await });
    sent.notified().await;
    removing
}

/// The last close came before the removal, told the servers to keep the file no longer, and then they were told to.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_closed_while_it_is_removed_is_let_go_after_that() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    let opened = create(&client, "f").await;
    let removing = begin_to_remove_f(&cluster, &client).await;
    client.release(opened.handle).await.unwrap();
    removing.await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!cluster.lock().meta.inodes.contains_key(&opened.attributes.inode));
}

/// An open that began while a removal was under way was answered before it, and was stale as soon as it was there.
#[tokio::test(start_paused = true)]
async fn who_opens_a_file_while_it_is_removed_is_told_or_reads_it() {
    let cluster = Cluster::new();
    write(&cluster.client().await, "/f", &pattern(1, 200_000)).await;
    let client = cluster.client().await;
    let inode = client.lookup(InodeId::ROOT, &name("f")).await.unwrap().inode;
    let removing = begin_to_remove_f(&cluster, &client).await;
    let opened = client.open(inode, OpenFlags::read_only()).await;
    removing.await.unwrap().unwrap();
    assert!(matches!(opened, Err(FsError::Stale(_))), "{opened:?}");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!cluster.lock().meta.inodes.contains_key(&inode));
}

/// Found by a reader: what a directory page had said of an entry was told to the kernel minutes later.
#[tokio::test(start_paused = true)]
async fn of_an_entry_of_a_page_is_told_what_is_known_when_it_is_told() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    for file in ["/a", "/b", "/c"] {
        write(&client, file, &pattern(1, 10)).await;
    }
    let root = InodeId::ROOT;
    let page = client.readdir(root, None, 10, true).await.unwrap();
    let [a, b, _c] = &page.entries[..] else { panic!("{page:?}") };
    let size = |entry: &DirectoryEntry| {
        client.remembered(root, &entry.name, entry.inode).map(|attributes| attributes.size)
    };
    assert_eq!([size(a), size(b)], [Some(10), Some(10)]);
    let handle = client.open(a.inode, OpenFlags::read_write()).await.unwrap().handle;
    client.write(handle, 10, pattern(2, 10), false).await.unwrap();
    assert_eq!(size(a), Some(20));
    client.rename(root, &b.name, root, &name("d"), false).await.unwrap();
    assert_eq!(size(b), None, "it names nothing any more");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(size(a), None, "it may have been changed by others");
}

/// Found by a reader: a partition that did not answer made the listing of each directory fail that names anything in it.
#[tokio::test(start_paused = true)]
async fn a_directory_is_listed_though_some_of_what_it_names_does_not_answer() {
    let cluster = Cluster::new();
    let client = cluster.client().await;
    for i in 0..10 {
        client.mkdir(InodeId::ROOT, &name(&format!("d{i}")), OWNER).await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    cluster.rule(|call| match call {
        Call::Meta(_, MetaRequest::Read { read: MetaRead::GetAttributesBatch { .. }, .. }) => {
            Some(Fault::Unreachable)
        }
        _ => None,
    });
    let began = tokio::time::Instant::now();
    let page = client.readdir(InodeId::ROOT, None, 20, true).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(page.entries.len(), 10);
    let bare = page.entries.iter().filter(|entry| entry.attributes.is_none());
    assert!(bare.clone().count() >= 4 && bare.clone().all(|it| it.inode.slot() == MetaSlot(1)));
}
