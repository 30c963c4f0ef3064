//! Nodes: registration, and whether they are heard.
//!
//! ```text
//! state    event                                        next
//! (none)   registers                                    Active
//! Active   registers again (restart, new address)       Active
//! Active   silent for the silence period                Silent
//! Silent   heard, or registers                          Active
//! ```
//!
//! A node is never forgotten in this form: its id stands for the replicas it held.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use milpa_types::{DEFAULT_ZONE, Disk, ManagerError, Node, NodeId, NodeState, Role};
use serde::{Deserialize, Serialize};

use super::command::{Applied, Registration};
use super::state::State;

/// Longest zone or region name.
const PLACE_NAME_BYTES_MAX: usize = 64;
/// Most disks of one node.
const DISKS_MAX: usize = 256;
/// Longest path of a disk.
const DISK_PATH_BYTES_MAX: usize = 4096;
/// Most nodes of one cluster: each is one record in the memory of all managers.
const NODES_MAX: usize = 20_000;

/// What is known of a node for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Given here at the first registration.
    pub id: NodeId,
    /// From its data directory: tells who may speak as this node.
    pub incarnation: u128,
    /// What it serves; never changes.
    pub role: Role,
    /// Where it listens, as of its last registration.
    pub address: SocketAddr,
    /// Where its metrics are, as of its last registration.
    pub http_address: SocketAddr,
    /// Leaf switch.
    pub zone: String,
    /// Fault domain; empty for one of its own.
    pub region: String,
    /// Its disks as of its last registration; their filling comes with heartbeats.
    pub disks: Vec<Disk>,
    /// Whether the leader hears it.
    pub state: NodeState,
}

impl NodeRecord {
    /// The record as callers see it, with the disks as they were at registration.
    #[must_use]
    pub fn describe(&self) -> Node {
        Node {
            id: self.id,
            role: self.role,
            address: self.address,
            http_address: self.http_address,
            zone: self.zone.clone(),
            region: self.region.clone(),
            state: self.state,
            disks: self.disks.clone(),
            memory_bytes: 0,
        }
    }

    fn take_over(&mut self, registration: &Registration) {
        self.address = registration.address;
        self.http_address = registration.http_address;
        self.zone = zone_or_default(&registration.zone);
        self.region.clone_from(&registration.region);
        self.disks.clone_from(&registration.disks);
        self.state = NodeState::Active;
    }
}

/// The next state of a node when the leader's judgement is `wanted`; `None` if nothing changes.
fn transition(present: NodeState, wanted: NodeState) -> Option<NodeState> {
    match (present, wanted) {
        (NodeState::Active, NodeState::Active) | (NodeState::Silent, NodeState::Silent) => None,
        (NodeState::Active, NodeState::Silent) => Some(NodeState::Silent),
        (NodeState::Silent, NodeState::Active) => Some(NodeState::Active),
    }
}

fn zone_or_default(zone: &str) -> String {
    if zone.is_empty() { DEFAULT_ZONE.to_owned() } else { zone.to_owned() }
}

fn refused(reason: String) -> Applied {
    Applied::Refused(ManagerError::NodeRefused { reason })
}

impl State {
    pub(super) fn register_node(&mut self, registration: &Registration) -> Applied {
        let problems = registration_problems(registration);
        if !problems.is_empty() {
            return Applied::Refused(ManagerError::Invalid { problems });
        }
        let known = match registration.node {
            Some(id) => match self.check_identity(id, registration) {
                Ok(()) => Some(id),
                Err(reason) => return refused(reason),
            },
            // A repeat of a first registration whose answer was lost.
            None => self.node_by_incarnation(registration.role, registration.incarnation),
        };
        match known {
            Some(id) => self.register_again(id, registration),
            None if self.nodes.len() >= NODES_MAX => {
                refused(format!("the cluster has {NODES_MAX} nodes already"))
            }
            None => self.register_new(registration),
        }
    }

    fn node_by_incarnation(&self, role: Role, incarnation: u128) -> Option<NodeId> {
        let same = |node: &&NodeRecord| node.role == role && node.incarnation == incarnation;
        self.nodes.values().find(same).map(|node| node.id)
    }

    /// Whether a registration that claims `id` may have it. Another incarnation is refused even
    /// when the old one is silent: its blank replicas would vote a second time under an old vote.
    fn check_identity(&self, id: NodeId, registration: &Registration) -> Result<(), String> {
        let Some(node) = self.nodes.get(&id) else {
            return Err(format!(
                "node {id} is not of this cluster: the directory belongs to another one; \
                 start with an empty directory to join as a new node"
            ));
        };
        if node.role != registration.role {
            return Err(format!(
                "node {id} is a {} node, not a {} node",
                node.role, registration.role
            ));
        }
        if node.incarnation != registration.incarnation {
            let heard = match node.state {
                NodeState::Active => "is running",
                NodeState::Silent => "was last seen",
            };
            return Err(format!(
                "another node with the id {id} {heard} at {}; \
                 start with an empty directory to join as a new node",
                node.address
            ));
        }
        Ok(())
    }

    fn register_again(&mut self, id: NodeId, registration: &Registration) -> Applied {
        if let Some(node) = self.nodes.get_mut(&id) {
            let before = (node.address, node.http_address);
            node.take_over(registration);
            if before != (node.address, node.http_address) {
                self.nodes_version += 1;
            }
        }
        Applied::Registered(id)
    }

    fn register_new(&mut self, registration: &Registration) -> Applied {
        let id = NodeId(self.node_next);
        self.node_next += 1;
        self.nodes_version += 1;
        let mut node = NodeRecord {
            id,
            incarnation: registration.incarnation,
            role: registration.role,
            address: registration.address,
            http_address: registration.http_address,
            zone: String::new(),
            region: String::new(),
            disks: Vec::new(),
            state: NodeState::Active,
        };
        node.take_over(registration);
        self.nodes.insert(id, node);
        Applied::Registered(id)
    }

    pub(super) fn set_node_state(&mut self, id: NodeId, wanted: NodeState) -> Applied {
        if let Some(node) = self.nodes.get_mut(&id)
            && let Some(next) = transition(node.state, wanted)
        {
            node.state = next;
        }
        Applied::Done
    }
}

/// Everything wrong with a registration, one line each.
fn registration_problems(registration: &Registration) -> Vec<String> {
    let mut problems = Vec::new();
    match registration.role {
        Role::Meta | Role::Data => {}
        role @ (Role::Manager | Role::Client | Role::Admin) => {
            problems.push(format!("role: a {role} does not register"));
        }
    }
    for (field, name) in [("zone", &registration.zone), ("region", &registration.region)] {
        if name.len() > PLACE_NAME_BYTES_MAX {
            let length = name.len();
            problems.push(format!("{field}: {length} bytes, allowed 0 to {PLACE_NAME_BYTES_MAX}"));
        }
    }
    let disks = &registration.disks;
    if registration.role == Role::Data && disks.is_empty() {
        problems.push("disks: a data node needs one at least".to_owned());
    }
    if disks.len() > DISKS_MAX {
        problems.push(format!("disks: {} of them, allowed 0 to {DISKS_MAX}", disks.len()));
    }
    if disks.iter().any(|disk| disk.path.len() > DISK_PATH_BYTES_MAX) {
        problems.push(format!("disks: a path is longer than {DISK_PATH_BYTES_MAX} bytes"));
    }
    let ids: BTreeSet<_> = disks.iter().map(|disk| disk.id).collect();
    if ids.len() != disks.len() {
        problems.push("disks: two have the same id".to_owned());
    }
    problems
}
