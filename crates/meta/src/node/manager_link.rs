//! The node's side of the managers: register, then tell every 200 ms what is held here.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use milpa_host::disk;
use milpa_host::managers::{Managers, ManagersError};
use milpa_host::telemetry::memory_bytes;
use milpa_types::{Disk, DiskId, Life, NodeId, Role};
use milpa_wire::manager::{Heartbeat, ManagerAnswer, ManagerRequest, Register};
use tracing::{debug, info, warn};

use super::context::Context;
use crate::config::MetaNodeConfig;

/// RELIABILITY.md 4.3: suspect after 1 s, so four may be lost.
const HEARTBEAT_EVERY: Duration = Duration::from_millis(200);
/// One heartbeat.
const HEARTBEAT_WAIT: Duration = Duration::from_secs(1);
/// One attempt to register; the managers may just be electing.
const REGISTER_WAIT: Duration = Duration::from_secs(5);

/// What this node says of itself.
#[derive(Clone, Debug)]
pub(crate) struct SelfDescription {
    /// Drawn when the directory was made.
    pub incarnation: u128,
    /// Which life of the node this is, kept up to date.
    pub life: Rc<Cell<Life>>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Where its metrics are.
    pub http_address: SocketAddr,
}

/// Asks the managers who this node is. `known` is the id in its directory.
///
/// # Errors
///
/// [`ManagersError`]: refused, or nobody answered for a while.
pub(crate) async fn register(
    managers: &Managers,
    config: &MetaNodeConfig,
    me: &SelfDescription,
    known: Option<NodeId>,
) -> Result<NodeId, ManagersError> {
    let request = ManagerRequest::Register(Register {
        node: known,
        incarnation: me.incarnation,
        life: me.life.get(),
        role: Role::Meta,
        address: me.address,
        http_address: me.http_address,
        zone: config.zone.clone(),
        region: config.region.clone(),
        disks: vec![describe_disk(&config.directory)],
    });
    loop {
        match managers.call(&request, REGISTER_WAIT).await? {
            ManagerAnswer::Registered { node, .. } => return Ok(node),
            other => warn!(?other, "the manager gave another answer than a registration"),
        }
        tokio::time::sleep(HEARTBEAT_EVERY).await;
    }
}

/// Registers, then reports for ever. Only a refusal ends it: the directory belongs to somebody
/// else, or another process runs on a copy of it.
pub(crate) async fn report_for_ever(
    ctx: Rc<Context>,
    me: SelfDescription,
    mut registered: bool,
) -> ManagersError {
    let mut nodes_version = None;
    let mut ticks = tokio::time::interval(HEARTBEAT_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !registered {
            match register(&ctx.managers, &ctx.config, &me, Some(ctx.node)).await {
                Ok(_) => registered = true,
                Err(error @ (ManagersError::Answered(_) | ManagersError::Refused { .. })) => {
                    return error;
                }
                Err(error) => {
                    warn!(%error, "cannot register; going on with the id in the directory");
                    continue;
                }
            }
            info!(node = %ctx.node, "registered");
        }
        match ctx.managers.call(&heartbeat(&ctx, &me), HEARTBEAT_WAIT).await {
            Ok(ManagerAnswer::Alive { nodes_version: version }) => {
                if nodes_version != Some(version) && ctx.refresh_addresses().await {
                    nodes_version = Some(version);
                }
            }
            Ok(other) => warn!(?other, "the manager gave another answer than to a heartbeat"),
            Err(ManagersError::Answered(error)) => {
                // It does not know us (any more): introduce ourselves again, and hear why not.
                warn!(%error, "the manager refused a heartbeat");
                registered = false;
            }
            Err(error) => debug!(%error, "a heartbeat was not answered"),
        }
    }
}

fn heartbeat(ctx: &Context, me: &SelfDescription) -> ManagerRequest {
    let report = Rc::clone(&ctx.report.borrow());
    ManagerRequest::Heartbeat(Heartbeat {
        node: ctx.node,
        incarnation: me.incarnation,
        disks: vec![describe_disk(&ctx.config.directory)],
        memory_bytes: memory_bytes(),
        meta: report.as_ref().clone(),
        data: Vec::new(),
        data_damaged: Vec::new(),
        slow_peers: Vec::new(),
    })
}

/// The one directory of a meta node. Numbers that the kernel does not tell are 0.
fn describe_disk(directory: &Path) -> Disk {
    let space = disk::space(directory).unwrap_or_default();
    Disk {
        id: DiskId(0),
        path: directory.display().to_string(),
        capacity_bytes: space.total,
        free_bytes: space.free,
        used_bytes: space.used,
        device: disk::status(directory).map_or(0, |status| status.device),
        fenced: None,
    }
}
