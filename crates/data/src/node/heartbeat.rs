//! What a data node tells the managers, and what it learns from them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::now_ms;
use milpa_host::jobs;
use milpa_host::managers::{Managers, ManagersError};
use milpa_host::node_directory::NodeDirectory;
use milpa_host::telemetry::memory_bytes;
use milpa_types::{Disk as DiskDescription, Life, ManagerError, NodeId, Role};
use milpa_wire::manager::{Heartbeat, ManagerAnswer, ManagerRequest, Register};

use crate::DataNodeConfig;

use super::shared::Shared;

/// One attempt to register; the managers may just be electing. Then the next attempt.
const REGISTER_WAIT: Duration = Duration::from_secs(5);
/// A heartbeat that nobody took by then is not worth waiting for.
const HEARTBEAT_WAIT: Duration = Duration::from_secs(1);
/// From the first news to the heartbeat that tells them: a burst of news costs one.
const NEWS_GAP: Duration = Duration::from_millis(20);
const NODES_WAIT: Duration = Duration::from_secs(2);

/// Where the node is reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// By other nodes and clients.
    pub listen: SocketAddr,
    /// For its metrics.
    pub http: SocketAddr,
}

/// Tells the managers that the node starts, until one of them answers. A refusal is final.
pub(crate) async fn register(
    managers: &Managers,
    config: &DataNodeConfig,
    directory: &NodeDirectory,
    life: Life,
    addresses: Addresses,
    disks: Vec<DiskDescription>,
) -> Result<NodeId, ManagersError> {
    let request = ManagerRequest::Register(Register {
        node: directory.node(),
        incarnation: directory.incarnation(),
        life,
        role: Role::Data,
        address: addresses.listen,
        http_address: addresses.http,
        zone: config.zone.clone(),
        region: config.region.clone(),
        disks,
    });
    loop {
        match managers.call(&request, REGISTER_WAIT).await {
            Ok(ManagerAnswer::Registered { node, .. }) => return Ok(node),
            Ok(other) => tracing::warn!(?other, "a manager answered something else"),
            Err(error @ (ManagersError::Refused { .. } | ManagersError::Answered(_))) => {
                return Err(error);
            }
            Err(error) => tracing::info!(%error, "no manager registers this node yet"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Sends heartbeats until the node ends, by the clock and when there is news, and keeps the other nodes' addresses.
pub(crate) async fn beat(shared: Rc<Shared>, incarnation: u128) -> Infallible {
    let mut beats = tokio::time::interval(Duration::from_millis(shared.config.heartbeat_ms));
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut known_nodes = None;
    let mut refused = None;
    loop {
        tokio::select! {
            biased;
            _ = beats.tick() => {}
            () = shared.news.notified() => {
                tokio::time::sleep(NEWS_GAP).await;
                beats.reset();
            }
        }
        if shared.is_leaving.get() {
            continue;
        }
        let request = ManagerRequest::Heartbeat(heartbeat(&shared, incarnation));
        match shared.managers.call(&request, HEARTBEAT_WAIT).await {
            Ok(ManagerAnswer::Alive { nodes_version }) => {
                if known_nodes != Some(nodes_version) && refresh_nodes(&shared).await {
                    known_nodes = Some(nodes_version);
                }
            }
            Ok(_) => {}
            Err(ManagersError::Answered(ManagerError::NodeRefused { reason })) => {
                // Once: a node that was removed goes on asking until it is stopped.
                if refused.as_ref() != Some(&reason) {
                    tracing::error!(reason, "the managers refuse this node's heartbeats");
                    refused = Some(reason);
                }
            }
            Err(error) => tracing::debug!(%error, "a heartbeat was not taken"),
        }
    }
}

fn heartbeat(shared: &Shared, incarnation: u128) -> Heartbeat {
    let disks = shared.disks.borrow();
    Heartbeat {
        node: shared.node,
        incarnation,
        disks: shared.describe_disks(),
        memory_bytes: memory_bytes(),
        meta: Vec::new(),
        data: disks.iter().flat_map(|disk| disk.report.partitions.clone()).collect(),
        data_damaged: disks.iter().flat_map(|disk| disk.report.damaged.clone()).collect(),
        slow_peers: shared.peers.borrow().slow(now_ms()),
    }
}

async fn refresh_nodes(shared: &Shared) -> bool {
    match shared.managers.call(&ManagerRequest::GetNodes, NODES_WAIT).await {
        Ok(ManagerAnswer::Nodes(nodes)) => {
            let addresses = nodes.into_iter().map(|node| (node.id, node.address));
            let changed = shared.addresses.borrow_mut().learn(addresses);
            if let Some(save) = changed {
                jobs::run("addresses", save);
            }
            true
        }
        _ => false,
    }
}
