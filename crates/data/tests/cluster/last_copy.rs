//! A block is good at one replica only, which is away or behind: it keeps it, and gives it to the others.

use milpa_types::ExtentId;
use milpa_wire::data::AppendTarget;

use super::nodes::{self, configuration, learning, pattern};
use super::run;

/// Simulation, seed 424210: a block had rotted on one of three. The second one came back, copied a snapshot, and could not vouch for its
/// own block; the third one came back, had to copy a snapshot for a few entries of the log, and gave up the last good one.
#[test]
fn a_block_that_is_damaged_survives_that_all_others_are_away_for_a_while() {
    run(async |cluster| {
        let (extent, bytes) = leave_the_last_copy_at_node_3(cluster).await;
        cluster.overwrite_until_trimmed(&[1, 2], 1, extent).await;
        cluster.start_node(3).await;
        all_have_block_48(cluster, extent, &bytes).await;
    });
}

/// The same when the two that go on are started again meanwhile.
#[test]
fn a_node_that_is_started_again_knows_what_is_damaged_there() {
    run(async |cluster| {
        let (extent, bytes) = leave_the_last_copy_at_node_3(cluster).await;
        cluster.overwrite_until_trimmed(&[1, 2], 1, extent).await;
        cluster.kill_nodes(&[1, 2]).await;
        for node in [1, 2] {
            cluster.start_node_without_scrub(node).await;
        }
        cluster.overwrite_in_vain_until_trimmed(&[1, 2], 1, extent).await;
        cluster.start_node(3).await;
        all_have_block_48(cluster, extent, &bytes).await;
    });
}

/// Simulation, seed 452847: a block had rotted at the members, and a third one came back for which the log was too short. It
/// copied a snapshot, and gave up the last good copy, though nothing had been overwritten while it was away.
#[test]
fn who_has_missed_no_overwrite_keeps_a_block_that_nobody_gives() {
    run(async |cluster| {
        let members = [1, 2];
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..3_000]).await;
        // All have written down that they have applied it.
        let epoch = cluster.configure_until_trimmed(&[1, 2, 3], 1).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        cluster.configure(configuration(epoch + 1, &members), &members).await;
        cluster.kill_nodes(&[1, 2, 3]).await;
        for node in members {
            cluster.start_node_without_scrub(node).await;
        }
        let epoch = cluster.configure_until_trimmed(&members, epoch + 1).await;
        for node in members {
            cluster.rot_extent(node, extent, 200_000);
        }
        cluster.start_node(3).await;
        cluster.configure(learning(epoch + 1, &members, 3), &members).await;
        all_have_block_48(cluster, extent, &bytes).await;
    });
}

/// Found by a reader: what it had applied and not flushed was applied again when it came back, and the snapshot came sooner.
#[test]
fn who_has_to_apply_its_log_again_keeps_such_a_block_too() {
    run(async |cluster| {
        let members = [1, 2];
        let bytes = pattern(1, 300_000);
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
        cluster.kill_node(3).await;
        cluster.start_node_with_long_log(3).await;
        cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..3_000]).await;
        cluster.equal_digests(&[1, 2, 3], 1).await;
        // With this entry node 3 writes down that the one before it is committed: else it would not be sure, after
        // it was killed, that it has missed no overwrite.
        cluster.configure(configuration(2, &[1, 2, 3]), &[1, 2, 3]).await;
        cluster.configure(configuration(3, &members), &members).await;
        cluster.kill_nodes(&[1, 2, 3]).await;
        for node in members {
            cluster.start_node_without_scrub(node).await;
        }
        let epoch = cluster.configure_until_trimmed(&members, 3).await;
        for node in members {
            cluster.rot_extent(node, extent, 200_000);
        }
        cluster.configure(learning(epoch + 1, &members, 3), &members).await;
        cluster.start_node_with_long_log(3).await;
        all_have_block_48(cluster, extent, &bytes).await;
    });
}

/// An extent of which block 48 has rotted at node 1. Node 2 is back, and has missed overwrites of other blocks; node 3 is away.
async fn leave_the_last_copy_at_node_3(cluster: &mut nodes::Cluster) -> (ExtentId, Vec<u8>) {
    let bytes = pattern(1, 300_000);
    let new = AppendTarget::New { token: 1 };
    let (extent, ..) = cluster.append_patiently(1, 1, new, &bytes).await;
    loop {
        let leader = cluster.leader(&[1, 2, 3]).await;
        if leader == 1 {
            break;
        }
        cluster.kill_node(leader).await;
        cluster.start_node(leader).await;
    }
    // All mark it as overwritten: whoever leads without that asks them to.
    cluster.overwrite(&[1, 2, 3], 1, extent, 0, &bytes[..1_000]).await;
    cluster.kill_node(2).await;
    cluster.overwrite_until_trimmed(&[1, 3], 1, extent).await;
    cluster.kill_node(3).await;
    cluster.rot_extent(1, extent, 200_000);
    cluster.start_node(2).await;
    (extent, bytes)
}

async fn all_have_block_48(cluster: &nodes::Cluster, extent: ExtentId, bytes: &[u8]) {
    cluster.equal_digests(&[1, 2, 3], 1).await;
    for node in [1, 2, 3] {
        let held = std::fs::read(cluster.extent_file(node, extent)).unwrap();
        assert!(held.get(196_608..200_704) == Some(&bytes[196_608..200_704]), "{node}");
    }
}
