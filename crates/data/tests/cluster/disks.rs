//! Disks of a node that fail, and are back later.

use milpa_types::{DataError, Deletion};
use milpa_wire::data::AppendTarget;
use milpa_wire::manager::Heartbeat;

use super::nodes::{self, Cluster, PARTITION, configuration, other_disk_of, pattern};
use super::run;

/// Found by a reader: one rotten byte in the label of one disk, or one bad sector in its log, and none of a node's disks
/// was served any more.
#[test]
fn a_disk_that_has_failed_costs_no_other_disk() {
    run(async |cluster| {
        let bytes = pattern(1, 100_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        let (with, without) = cluster.disk_labels(3);
        for (label, is_served) in [(without, true), (with, false)] {
            cluster.kill_node(3).await;
            let whole = std::fs::read(&label).unwrap();
            std::fs::write(&label, &whole[1..]).unwrap();
            cluster.forget_heard(3);
            cluster.start_node(3).await;
            let heard = nodes::until("it is heard", async || cluster.heard(3)).await;
            let fenced: Vec<_> = heard.disks.iter().map(|disk| disk.fenced.is_some()).collect();
            assert_eq!(fenced, [false, true]);
            assert_eq!(heard.data.len(), usize::from(is_served));
            let read = cluster.read(3, extent, 0..100_000, false).await;
            let expected = is_served.then_some(bytes.clone()).ok_or(DataError::WrongPartition);
            assert_eq!(read, expected);
            std::fs::write(&label, whole).unwrap();
        }
        cluster.kill_node(3).await;
        cluster.start_node(3).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
    });
}

/// Found by a reader: a disk was out, its replica was made again on another disk of the node, and when it was back both took
/// part, under one name: the node could vote twice, and what one of them had promised the other one did not know.
#[test]
fn a_disk_that_is_back_does_not_serve_what_was_made_again_on_another_one() {
    // Their replicas are on the first disk and on the second.
    for (node, other) in [(2, 3), (3, 2)] {
        run(async |cluster| {
            let bytes = pattern(1, 100_000);
            let new = AppendTarget::New { token: 1 };
            let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
            let (old, with) = cluster.disk_labels(node);
            let whole = std::fs::read(&old).unwrap();
            cluster.kill_node(node).await;
            std::fs::write(&old, &whole[1..]).unwrap();
            cluster.start_node(node).await;
            cluster.configure(configuration(2, &[1, other]), &[1, other]).await;
            let made = configuration(2, &[1, other]);
            cluster.try_create_replica_on(node, other_disk_of(node), made).await.unwrap();
            cluster.join(node, configuration(4, &[1, other, node]), &[1, 2, 3]).await;
            cluster.equal_digests(&[1, 2, 3], 1).await;
            // Nor while the other one is out.
            let newer = std::fs::read(&with).unwrap();
            std::fs::write(&old, &whole).unwrap();
            std::fs::write(&with, &newer[1..]).unwrap();
            let heard = restarted(cluster, node).await;
            assert_eq!((heard.data, heard.data_damaged), (Vec::new(), vec![PARTITION]));
            let read = cluster.read(node, extent, 0..100_000, false).await;
            assert_eq!(read, Err(DataError::DiskFailed));
            std::fs::write(&with, &newer).unwrap();
            let heard = restarted(cluster, node).await;
            let disks: Vec<_> = heard.data.iter().map(|report| report.disk).collect();
            assert_eq!(disks, [other_disk_of(node)]);
            assert_eq!(heard.data_damaged, [PARTITION]);
            assert_eq!(cluster.read(node, extent, 0..100_000, false).await, Ok(bytes));
            let leftover = Deletion::Leftover { log_end: None };
            assert_eq!(cluster.delete_replica(node, leftover).await, Ok(()));
            let is_gone =
                async || cluster.heard(node).filter(|heard| heard.data_damaged.is_empty());
            let heard = nodes::until("what is left of the old one is deleted", is_gone).await;
            assert_eq!(heard.data.len(), 1);
            assert_eq!(cluster.delete_replica(node, leftover).await, Err(DataError::Busy));
            cluster.equal_digests(&[1, 2, 3], 1).await;
        });
    }
}

/// What is heard from a node that was started again.
async fn restarted(cluster: &mut Cluster, node: u32) -> Heartbeat {
    cluster.kill_node(node).await;
    cluster.forget_heard(node);
    cluster.start_node(node).await;
    nodes::until("it is heard", async || cluster.heard(node)).await
}
