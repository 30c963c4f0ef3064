//! Files that one client has open when another one makes them longer.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_client::{Client, HandleId, OpenFlags};
use milpa_types::InodeId;

use crate::cluster::{Cluster, pattern, read, write};

/// Found by a reader: the kernel has the page in which a file ended, with zeros behind the end. Told of a new size,
/// which another client's bytes had given it, it showed these zeros in their place; and what was appended went to the
/// old end, over them.
#[tokio::test(start_paused = true)]
async fn who_hears_that_others_made_an_open_file_longer_drops_its_end_and_appends_behind_theirs() {
    let cluster = Cluster::new();
    let Outgrown { one, other, inode, handle, wrong } = outgrown(&cluster, 10_000, 100).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    for _ in 0..3 {
        assert_eq!(one.getattr(inode).await.unwrap().size, 10_100);
        assert_eq!(*wrong.lock().unwrap(), [(inode, 10_000)], "once, and before it is told");
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(one.append(handle, pattern(3, 100), false).await.unwrap(), 10_200);
    one.flush(handle).await.unwrap();
    let model = [pattern(1, 10_000), pattern(2, 100), pattern(3, 100)].concat();
    assert!(one.read(handle, 0, 20_000).await.unwrap().concat() == model);
    assert!(read(&other, "/f").await == model);
    assert_eq!(wrong.lock().unwrap().len(), 1, "its own bytes are in the pages");
}

/// As above, but nobody asked before the own bytes were published, in front of the others'.
#[tokio::test(start_paused = true)]
async fn who_hears_by_a_publish_that_others_made_the_file_longer_drops_its_end() {
    let cluster = Cluster::new();
    let Outgrown { one, inode, handle, wrong, .. } = outgrown(&cluster, 200_000, 100).await;
    one.write(handle, 0, pattern(3, 100), false).await.unwrap();
    one.flush(handle).await.unwrap();
    assert_eq!(one.getattr(inode).await.unwrap().size, 200_100);
    assert_eq!(*wrong.lock().unwrap(), [(inode, 200_000)]);
}

/// A file that one client has open and has read whole when another one makes it longer.
struct Outgrown {
    one: Client,
    other: Client,
    inode: InodeId,
    handle: HandleId,
    /// Which pages the first one was told to forget.
    wrong: Arc<Mutex<Vec<(InodeId, u64)>>>,
}

async fn outgrown(cluster: &Arc<Cluster>, length: usize, appended: usize) -> Outgrown {
    let (one, other) = (cluster.client().await, cluster.client().await);
    write(&other, "/f", &pattern(1, length)).await;
    let inode = one.resolve(b"/f", true).await.unwrap().inode;
    let wrong = Arc::new(Mutex::new(Vec::new()));
    let told_of = Arc::clone(&wrong);
    one.on_stale_pages(move |inode, from| told_of.lock().unwrap().push((inode, from)));
    let handle = one.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    one.read(handle, 0, 300_000).await.unwrap();
    let appends = other.open(inode, OpenFlags::read_write()).await.unwrap().handle;
    other.append(appends, pattern(2, appended), false).await.unwrap();
    other.flush(appends).await.unwrap();
    Outgrown { one, other, inode, handle, wrong }
}

/// Found by a reader: bytes written far behind the end hid where the others' began.
#[tokio::test(start_paused = true)]
async fn who_writes_far_out_drops_all_that_others_may_have_written_before_it() {
    for is_published in [true, false] {
        let cluster = Cluster::new();
        let Outgrown { one, inode, handle, wrong, .. } = outgrown(&cluster, 200_000, 100_000).await;
        one.write(handle, 1_000_000, pattern(3, 100), false).await.unwrap();
        if is_published {
            one.flush(handle).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(one.getattr(inode).await.unwrap().size, 1_000_100);
        assert_eq!(*wrong.lock().unwrap(), [(inode, 200_000)], "{is_published}");
    }
}
