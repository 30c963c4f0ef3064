//! Deleted bytes: every replica frees them, and then they are forgotten.

use milpa_types::{Column, ExtentId, InodeId, PartitionId, Segment, Timestamp};
use milpa_wire::meta::{MetaAnswer, MetaWrite, Publish};

use crate::cluster::client::{Client, name};
use crate::cluster::fakes::DataNode;
use crate::cluster::{Cluster, eventually};
use crate::{FIRST, statistics};

const PARTITION: PartitionId = PartitionId(500);

/// Both hold these data partitions.
fn with_two_data_nodes(partitions: &[PartitionId]) -> (Cluster, Vec<DataNode>, Client) {
    let cluster = Cluster::start(1, |_| {});
    let data_nodes = cluster.data_nodes(2);
    let ids: Vec<_> = data_nodes.iter().map(|node| node.id).collect();
    partitions.iter().for_each(|partition| cluster.manager.add_data_partition(*partition, &ids));
    let mut client = cluster.client();
    client.open_session(&cluster, 1);
    (cluster, data_nodes, client)
}

/// A file of these columns, 4 KiB in each, that is removed again.
fn delete_a_file(cluster: &Cluster, client: &mut Client, columns: &[Column]) {
    let file = client.create(cluster, "f");
    let segment = |(n, column): (usize, &Column)| Segment::plain(n as u64 * 4096, 4096, *column);
    let publish = MetaWrite::Publish(Publish {
        inode: file.inode,
        truncation: 0,
        base: None,
        segments: columns.iter().enumerate().map(segment).collect(),
        size: columns.len() as u64 * 4096,
        inline: None,
        overwritten: Vec::new(),
        may_replace: true,
        modified: Timestamp(2),
        clear_set_id: false,
    });
    let published = client.write(cluster, FIRST, publish);
    assert!(published.is_ok(), "{published:?}");
    let unlink = MetaWrite::Unlink { parent: InodeId::ROOT, name: name("f"), held: false };
    let removed = client.write(cluster, FIRST, unlink);
    assert!(matches!(removed, Ok(MetaAnswer::Removed { .. })), "{removed:?}");
}

fn column(partition: PartitionId, extent: u64) -> Column {
    Column { partition, extent: ExtentId(extent), offset: 0 }
}

fn wait_for_freed(cluster: &Cluster, client: &mut Client, waiting: u64) {
    eventually(&format!("{waiting} orders wait"), || {
        (statistics(cluster, client, 0).freed_waiting == waiting).then_some(())
    });
}

#[test]
fn bytes_are_forgotten_when_every_replica_has_freed_them() {
    let (cluster, data_nodes, mut client) = with_two_data_nodes(&[PARTITION]);
    data_nodes[1].refuse(&[PARTITION]);
    delete_a_file(&cluster, &mut client, &[column(PARTITION, 7)]);

    eventually("the willing replica frees", || (!data_nodes[0].freed().is_empty()).then_some(()));
    // The other one is away: the order waits.
    assert_eq!(statistics(&cluster, &mut client, 0).freed_waiting, 1);
    data_nodes[1].refuse(&[]);
    wait_for_freed(&cluster, &mut client, 0);
    let freed = data_nodes[1].freed();
    assert!(freed.iter().all(|r| r.partition == PARTITION && r.extent == ExtentId(7)), "{freed:?}");
}

/// Found by a reader: one replica that could not free kept all orders of its round unconfirmed, those
/// of other data partitions too.
#[test]
fn a_replica_that_cannot_free_keeps_no_other_partition_waiting() {
    let partitions = [PARTITION, PartitionId(501)];
    let (cluster, data_nodes, mut client) = with_two_data_nodes(&partitions);
    data_nodes[1].refuse(&partitions[..1]);
    let columns = partitions.map(|partition| column(partition, 7));
    delete_a_file(&cluster, &mut client, &columns);
    wait_for_freed(&cluster, &mut client, 1);
    data_nodes[1].refuse(&[]);
    wait_for_freed(&cluster, &mut client, 0);
}

/// Found by a reader: while one data node was away, each thousand orders were followed by a pause, all
/// were sent to the others again and again, and what was deleted last came last. The disks filled up
/// although files were deleted.
#[test]
fn a_data_node_that_is_away_delays_nothing_at_the_others() {
    let (cluster, data_nodes, mut client) = with_two_data_nodes(&[PARTITION]);
    data_nodes[1].refuse(&[PARTITION]);
    for file in 0..5 {
        let columns: Vec<Column> =
            (0..4_000).map(|n| column(PARTITION, 1 + file * 4_000 + n)).collect();
        delete_a_file(&cluster, &mut client, &columns);
    }
    let reaches = |count: usize| {
        eventually("the living node is told", || {
            (data_nodes[0].freed().len() >= count).then_some(())
        });
    };
    reaches(20_000);
    assert_eq!(statistics(&cluster, &mut client, 0).freed_waiting, 20_000);
    delete_a_file(&cluster, &mut client, &[column(PARTITION, 20_001)]);
    reaches(20_001);
    data_nodes[1].refuse(&[]);
    wait_for_freed(&cluster, &mut client, 0);
    for node in &data_nodes {
        let mut freed: Vec<u64> = node.freed().iter().map(|range| range.extent.0).collect();
        freed.sort_unstable();
        assert_eq!(freed, (1..=20_001).collect::<Vec<_>>(), "each once");
    }
}
