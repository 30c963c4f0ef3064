//! `milpa partition …`: where replicas lie, and whether they are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::managers::Managers;
use milpa_host::rpc::Pool;
use milpa_types::{DataPartition, ExtentId, MetaPartition, NodeId, Role};
use milpa_wire::data::{DataAnswer, DataReply, DataRequest, ExtentDigest};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{MetaAnswer, MetaReply, MetaRequest};
use serde::Serialize;

use super::{MANAGERS_WAIT, ask_managers, block_on, print_json, unexpected};
use crate::arguments::PartitionCommand;
use crate::cluster::Cluster;
use crate::failure::{Failure, Outcome};
use crate::size::show_bytes;
use crate::table::Table;

/// A replica reads all of its bytes for a comparison.
const DIGEST_WAIT: Duration = Duration::from_secs(300);
/// Meta replicas are compared at the same log index: a busy partition may take a few tries.
const HASH_TRIES: usize = 50;
const HASH_PAUSE: Duration = Duration::from_millis(20);

/// Carries out one of the commands.
pub fn run(cluster: &Cluster, command: PartitionCommand, json: bool) -> Outcome {
    block_on(async {
        let managers = cluster.managers()?;
        match command {
            PartitionCommand::List { volume } => list(&managers, volume, json).await,
            PartitionCommand::Compare { volume } => compare(&managers, volume, json).await,
        }
    })
}

async fn partitions(
    managers: &Managers,
    volume: Option<String>,
) -> Outcome<(Vec<MetaPartition>, Vec<DataPartition>)> {
    let request = ManagerRequest::ListPartitions { volume };
    match ask_managers(managers, &request, MANAGERS_WAIT).await? {
        ManagerAnswer::Partitions { meta, data } => Ok((meta, data)),
        other => Err(unexpected(&other)),
    }
}

async fn list(managers: &Managers, volume: Option<String>, json: bool) -> Outcome {
    let (meta, data) = partitions(managers, volume).await?;
    if json {
        return print_json(&ManagerAnswer::Partitions { meta, data });
    }
    let mut table = Table::new(&[
        "meta",
        "volume",
        "slot",
        "leader",
        "nodes",
        "inodes",
        "dentries",
        "new inodes",
    ]);
    for partition in &meta {
        table.row(vec![
            partition.id.to_string(),
            partition.volume.to_string(),
            partition.slot.to_string(),
            partition.leader.map_or("?".to_owned(), |node| node.to_string()),
            words(&partition.members),
            partition.inodes.to_string(),
            partition.dentries.to_string(),
            yes_no(partition.takes_inodes),
        ]);
    }
    println!("{}", table.render());
    let mut table = Table::new(&[
        "data", "volume", "epoch", "primary", "nodes", "away", "used", "extents", "writable",
    ]);
    for partition in &data {
        let away: Vec<NodeId> =
            partition.replicas.iter().filter(|n| !partition.members.contains(n)).copied().collect();
        table.row(vec![
            partition.id.to_string(),
            partition.volume.to_string(),
            partition.epoch.to_string(),
            partition.primary.to_string(),
            words(&partition.members),
            if away.is_empty() { "-".to_owned() } else { words(&away) },
            show_bytes(partition.used_bytes),
            partition.extents.to_string(),
            yes_no(partition.takes_extents),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

fn words(nodes: &[NodeId]) -> String {
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn yes_no(flag: bool) -> String {
    if flag { "yes" } else { "no" }.to_owned()
}

/// What a comparison found.
#[derive(Default, Serialize)]
struct Comparison {
    meta_partitions: usize,
    data_partitions: usize,
    extents: usize,
    bytes: u64,
    differences: Vec<String>,
}

async fn compare(managers: &Managers, volume: Option<String>, json: bool) -> Outcome {
    let (meta, data) = partitions(managers, volume).await?;
    let addresses = addresses(managers).await?;
    let pool = managers.pool();
    let mut found = Comparison::default();
    for partition in &meta {
        compare_meta(pool, &addresses, partition, &mut found).await?;
    }
    for partition in &data {
        compare_data(pool, &addresses, partition, &mut found).await?;
    }
    if json {
        print_json(&found)?;
    } else {
        print(&found);
    }
    if found.differences.is_empty() {
        return Ok(());
    }
    Err(Failure::cluster(format!("{} differences between replicas", found.differences.len())))
}

fn print(found: &Comparison) {
    for difference in &found.differences {
        println!("differs: {difference}");
    }
    println!(
        "compared {} meta partitions by state hash and {} data partitions byte by byte: {} extents, {} in each replica: {}",
        found.meta_partitions,
        found.data_partitions,
        found.extents,
        show_bytes(found.bytes),
        if found.differences.is_empty() { "all equal" } else { "DIFFERENT" }
    );
}

async fn addresses(managers: &Managers) -> Outcome<BTreeMap<NodeId, SocketAddr>> {
    match ask_managers(managers, &ManagerRequest::GetNodes, MANAGERS_WAIT).await? {
        ManagerAnswer::Nodes(nodes) => Ok(nodes.iter().map(|n| (n.id, n.address)).collect()),
        other => Err(unexpected(&other)),
    }
}

async fn compare_data(
    pool: &Pool,
    addresses: &BTreeMap<NodeId, SocketAddr>,
    partition: &DataPartition,
    found: &mut Comparison,
) -> Outcome {
    found.data_partitions += 1;
    let (id, primary) = (partition.id, partition.primary);
    let Some(expected) = digests(pool, addresses, partition, primary, Vec::new(), found).await?
    else {
        return Ok(());
    };
    found.extents += expected.len();
    found.bytes += expected.values().map(|digest| digest.length).sum::<u64>();
    let lengths: Vec<_> = expected.values().map(|digest| (digest.extent, digest.length)).collect();
    for node in partition.members.iter().filter(|node| **node != primary) {
        let held = digests(pool, addresses, partition, *node, lengths.clone(), found).await?;
        let Some(held) = held else { continue };
        let all: BTreeSet<_> = expected.keys().chain(held.keys()).collect();
        for extent in all {
            let (here, there) = (expected.get(extent), held.get(extent));
            if !are_equal(here, there) {
                found.differences.push(format!(
                    "data partition {id} extent {extent}: primary {primary} {}, node {node} {}",
                    shown(here),
                    shown(there)
                ));
            }
        }
    }
    Ok(())
}

/// An extent without committed bytes need not exist everywhere.
fn are_equal(here: Option<&ExtentDigest>, there: Option<&ExtentDigest>) -> bool {
    match (here, there) {
        (Some(only), None) | (None, Some(only)) => only.length == 0,
        (here, there) => here == there,
    }
}

fn shown(digest: Option<&ExtentDigest>) -> String {
    match digest {
        Some(digest) => format!("{} bytes with hash {:08x}", digest.length, digest.hash),
        None => "does not have it".to_owned(),
    }
}

/// The digests of one replica; `None`, noted as a difference, if it cannot make them.
async fn digests(
    pool: &Pool,
    addresses: &BTreeMap<NodeId, SocketAddr>,
    partition: &DataPartition,
    node: NodeId,
    lengths: Vec<(ExtentId, u64)>,
    found: &mut Comparison,
) -> Outcome<Option<BTreeMap<ExtentId, ExtentDigest>>> {
    let request = DataRequest::Digest { partition: partition.id, lengths };
    match call::<_, DataReply>(pool, addresses, node, Role::Data, &request).await? {
        Ok(DataAnswer::Digest(digests)) => {
            Ok(Some(digests.into_iter().map(|digest| (digest.extent, digest)).collect()))
        }
        Ok(_) => Err(Failure::cluster(format!("node {node} answered something else"))),
        Err(error) => {
            found
                .differences
                .push(format!("data partition {}: node {node}: {error}", partition.id));
            Ok(None)
        }
    }
}

async fn compare_meta(
    pool: &Pool,
    addresses: &BTreeMap<NodeId, SocketAddr>,
    partition: &MetaPartition,
    found: &mut Comparison,
) -> Outcome {
    found.meta_partitions += 1;
    let mut last = String::new();
    for _ in 0..HASH_TRIES {
        let mut hashes = BTreeMap::new();
        for node in &partition.members {
            let request = MetaRequest::StateHash { partition: partition.id };
            let answer: MetaReply = call(pool, addresses, *node, Role::Meta, &request).await?;
            match answer {
                Ok(MetaAnswer::StateHash { index, hash }) => hashes.insert(*node, (index, hash)),
                Ok(_) => {
                    return Err(Failure::cluster(format!("node {node} answered something else")));
                }
                Err(error) => {
                    let text = format!("meta partition {}: node {node}: {error}", partition.id);
                    found.differences.push(text);
                    return Ok(());
                }
            };
        }
        let mut values = hashes.values();
        let reference = values.next().copied();
        if values.all(|value| Some(*value) == reference) {
            return Ok(());
        }
        last = format!("{hashes:?}");
        tokio::time::sleep(HASH_PAUSE).await;
    }
    found
        .differences
        .push(format!("meta partition {}: (index, hash) by node: {last}", partition.id));
    Ok(())
}

async fn call<Q: Serialize, A: serde::de::DeserializeOwned>(
    pool: &Pool,
    addresses: &BTreeMap<NodeId, SocketAddr>,
    node: NodeId,
    role: Role,
    request: &Q,
) -> Outcome<A> {
    let unknown = || Failure::cluster(format!("the managers do not know where node {node} is"));
    let address = addresses.get(&node).ok_or_else(unknown)?;
    let called = pool.call(*address, role, request, Bytes::new(), DIGEST_WAIT).await;
    let (answer, _) =
        called.map_err(|e| Failure::cluster(format!("node {node} did not answer")).because(&e))?;
    Ok(answer)
}
