//! What operators watch: how many bytes are lost. A process of its own, as its counter is.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
// Clippy knows functions marked as tests only, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "cluster/nodes.rs"]
#[allow(dead_code)]
mod nodes;

use milpa_host::telemetry;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId};
use milpa_wire::data::AppendTarget;
use nodes::{Cluster, configuration, pattern};
use tokio::task::LocalSet;

const ALL: [u32; 3] = [1, 2, 3];

/// Blocks that the three nodes, together, have called lost.
fn told() -> u64 {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &telemetry::registry()).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("milpa_data_lost_bytes_total "));
    line.map_or(0, |bytes| bytes.parse::<u64>().unwrap() / BLOCK_BYTES)
}

/// Blocks that their disks say were told of.
fn noted(cluster: &Cluster, extent: ExtentId) -> u64 {
    let of_node = |node| {
        let file = cluster.extent_file(node, extent);
        let text = std::fs::read_to_string(file.ancestors().nth(3).unwrap().join("lost"));
        text.map_or(0, |text| text.lines().skip(1).count() as u64)
    };
    ALL.into_iter().map(of_node).sum()
}

async fn reads_as_lost(cluster: &Cluster, extent: ExtentId) {
    nodes::until("the leader says that the block is lost", async || {
        let leader = cluster.leader(&ALL).await;
        let read = cluster.read(leader, extent, 49_152..53_248, true).await;
        (read == Err(DataError::Corrupt { block: 12 })).then_some(())
    })
    .await;
}

/// A block that is lost was forgotten as that with every configuration and every start: it was looked for, found
/// nowhere, and counted again, with an ERROR line each time.
#[test]
fn a_lost_block_is_counted_once_by_each_node_over_epochs_and_restarts() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let mut cluster = Cluster::start().await;
        cluster.create_partition().await;
        cluster.leader(&ALL).await;
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.overwrite(&ALL, 1, extent, 0, &bytes[..3_000]).await;
        cluster.equal_digests(&ALL, 1).await;
        for node in ALL {
            cluster.rot_extent(node, extent, 50_000);
        }
        reads_as_lost(&cluster, extent).await;
        for epoch in 2..6 {
            cluster.configure(configuration(epoch, &ALL), &ALL).await;
            reads_as_lost(&cluster, extent).await;
        }
        assert!((1..=3).contains(&told()), "{} times", told());
        for _ in 0..3 {
            nodes::until("all that was told is noted", async || {
                (noted(&cluster, extent) == told()).then_some(())
            })
            .await;
            cluster.kill_nodes(&ALL).await;
            for node in ALL {
                cluster.start_node(node).await;
            }
            reads_as_lost(&cluster, extent).await;
        }
        assert!((1..=3).contains(&told()), "{} times", told());
        cluster.stop().await;
    });
}
