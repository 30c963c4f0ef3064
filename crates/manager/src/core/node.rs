//! Nodes: registration, whether they are heard, and what operators want of them.
//!
//! ```text
//! state     event                                          next
//! (none)    registers                                      Active
//! Active    registers again (restart, new address)         Active
//! Active    silent for the silence period, or leaves       Silent
//! Active    an operator drains it                          Draining
//! Draining  the operator takes that back                   Active
//! Draining  silent for the silence period, or leaves       Silent, and still marked as drained
//! Silent    heard, or registers                            Active; Draining if it is marked
//! Silent    silent for the dead period, or removed         Dead
//! Dead      heard, or registers                            Active; Draining if it is marked
//! Dead      removed, and nothing refers to it any more     (forgotten)
//! any       removed, and it holds nothing                  (forgotten)
//! ```
//!
//! A node that was removed is not heard any more. Its id stands for the replicas that it held, so
//! it is forgotten only when no partition has a place on it, and it is never given again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use milpa_types::{DEFAULT_ZONE, Disk, DiskId, Life, ManagerError, Node, NodeId, NodeState, Role};
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
    /// An operator wants it empty.
    pub drain: Option<Drain>,
    /// An operator has removed it: it is forgotten when nothing refers to it any more.
    pub is_removed: bool,
    /// Disks that an operator wants empty.
    pub disks_draining: BTreeMap<DiskId, Drain>,
}

/// Since when a node or a disk is being emptied, and from what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// The leader's wall clock in milliseconds since 1970. For operators.
    pub begun_unix_ms: u64,
    /// Replicas that were there then. For operators.
    pub replicas: u64,
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
            disks_draining: self.disks_draining.keys().copied().collect(),
        }
    }

    fn take_over(&mut self, registration: &Registration) {
        self.address = registration.address;
        self.http_address = registration.http_address;
        self.zone = zone_or_default(&registration.zone);
        self.region.clone_from(&registration.region);
        self.disks.clone_from(&registration.disks);
        self.happens(NodeEvent::Heard);
    }

    /// Changes the state as the table of this module says.
    fn happens(&mut self, event: NodeEvent) {
        if let Some(next) = transition(self.state, event, self.drain.is_some()) {
            self.state = next;
        }
    }
}

/// What happens to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeEvent {
    /// It registers, or its heartbeat arrives.
    Heard,
    /// It was not heard for the silence period, or said that it leaves.
    Missed,
    /// It was not heard for the dead period, or was removed.
    GivenUp,
    /// An operator wants it empty, or takes that back.
    Marked,
}

/// The table of this module. `None` if nothing changes.
fn transition(present: NodeState, event: NodeEvent, drains: bool) -> Option<NodeState> {
    use NodeEvent as E;
    use NodeState as S;
    let in_service = if drains { S::Draining } else { S::Active };
    match (present, event) {
        (S::Active | S::Draining, E::Heard | E::Marked) | (S::Silent | S::Dead, E::Heard) => {
            (present != in_service).then_some(in_service)
        }
        (S::Active | S::Draining, E::Missed) => Some(S::Silent),
        (S::Silent, E::GivenUp) => Some(S::Dead),
        (S::Active | S::Draining, E::GivenUp)
        | (S::Silent | S::Dead, E::Missed | E::Marked)
        | (S::Dead, E::GivenUp) => None,
    }
}

fn zone_or_default(zone: &str) -> String {
    if zone.is_empty() { DEFAULT_ZONE.to_owned() } else { zone.to_owned() }
}

fn refused(reason: String) -> Applied {
    Applied::Refused(ManagerError::NodeRefused { reason })
}

impl State {
    pub(super) fn register_node(
        &mut self,
        registration: &Registration,
        life: Option<Life>,
    ) -> Applied {
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
        if let Err(reason) = known.map_or(Ok(()), |id| self.check_life(id, life)) {
            return refused(reason);
        }
        let id = match known {
            Some(id) => self.register_again(id, registration),
            None if self.nodes.len() >= NODES_MAX => {
                return refused(format!("the cluster has {NODES_MAX} nodes already"));
            }
            None => self.register_new(registration),
        };
        self.lives.extend(life.map(|life| (id, life.next)));
        Applied::Registered(id)
    }

    /// A node lives on. Changes nothing but what is known of its lives.
    pub(super) fn renew_life(&mut self, id: NodeId, incarnation: u128, life: Life) -> Applied {
        let is_it = |node: &NodeRecord| node.incarnation == incarnation && !node.is_removed;
        if !self.nodes.get(&id).is_some_and(is_it) {
            return refused(format!("node {id} is not registered"));
        }
        match self.check_life(id, Some(life)) {
            Ok(()) => {
                self.lives.insert(id, life.next);
                Applied::Done
            }
            Err(reason) => refused(reason),
        }
    }

    /// Whether a directory is the node's newest. An older one has lost what was written since: the vote
    /// it gave, the bytes it acknowledged.
    fn check_life(&self, id: NodeId, life: Option<Life>) -> Result<(), String> {
        match (life, self.lives.get(&id)) {
            (Some(life), Some(newest)) if !life.follows(*newest) => Err(format!(
                "the directory of node {id} is an older copy (a restored backup or image?) and lacks what \
                 the node has promised since; start with the newest one, or with an empty one to join as a \
                 new node"
            )),
            _ => Ok(()),
        }
    }

    fn node_by_incarnation(&self, role: Role, incarnation: u128) -> Option<NodeId> {
        let same = |node: &&NodeRecord| {
            node.role == role && node.incarnation == incarnation && !node.is_removed
        };
        self.nodes.values().find(same).map(|node| node.id)
    }

    /// Whether a registration that claims `id` may have it. Another incarnation is refused even
    /// when the old one is silent: its blank replicas would vote a second time under an old vote.
    fn check_identity(&self, id: NodeId, registration: &Registration) -> Result<(), String> {
        let Some(node) = self.nodes.get(&id) else {
            return Err(format!(
                "node {id} is not of this cluster: it was removed, or the directory belongs to \
                 another one; start with an empty directory to join as a new node"
            ));
        };
        if node.is_removed {
            return Err(format!(
                "node {id} was removed from the cluster; start with an empty directory to join \
                 as a new node"
            ));
        }
        if node.role != registration.role {
            return Err(format!(
                "node {id} is a {} node, not a {} node",
                node.role, registration.role
            ));
        }
        if node.incarnation != registration.incarnation {
            let heard = if node.state.is_heard() { "is running" } else { "was last seen" };
            return Err(format!(
                "another node with the id {id} {heard} at {}; \
                 start with an empty directory to join as a new node",
                node.address
            ));
        }
        Ok(())
    }

    fn register_again(&mut self, id: NodeId, registration: &Registration) -> NodeId {
        if let Some(node) = self.nodes.get_mut(&id) {
            let before = (node.address, node.http_address);
            node.take_over(registration);
            if before != (node.address, node.http_address) {
                self.nodes_version += 1;
            }
        }
        id
    }

    fn register_new(&mut self, registration: &Registration) -> NodeId {
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
            drain: None,
            is_removed: false,
            disks_draining: BTreeMap::new(),
        };
        node.take_over(registration);
        self.nodes.insert(id, node);
        id
    }

    pub(super) fn set_node_state(&mut self, id: NodeId, wanted: NodeState) -> Applied {
        let event = match wanted {
            NodeState::Active | NodeState::Draining => NodeEvent::Heard,
            NodeState::Silent => NodeEvent::Missed,
            NodeState::Dead => NodeEvent::GivenUp,
        };
        if let Some(node) = self.nodes.get_mut(&id).filter(|node| !node.is_removed) {
            node.happens(event);
        }
        Applied::Done
    }

    pub(super) fn drain_node(&mut self, id: NodeId, drains: bool, begun_unix_ms: u64) -> Applied {
        let replicas = self.replicas_on(id, None) as u64;
        let Some(node) = self.nodes.get_mut(&id).filter(|node| !node.is_removed) else {
            return no_node(id);
        };
        node.drain = drains.then_some(node.drain.unwrap_or(Drain { begun_unix_ms, replicas }));
        node.happens(NodeEvent::Marked);
        Applied::Done
    }

    pub(super) fn drain_disk(
        &mut self,
        id: NodeId,
        disk: DiskId,
        drains: bool,
        begun_unix_ms: u64,
    ) -> Applied {
        let replicas = self.replicas_on(id, Some(disk)) as u64;
        let Some(node) = self.nodes.get_mut(&id) else { return no_node(id) };
        if node.role != Role::Data || !node.disks.iter().any(|known| known.id == disk) {
            let reason = format!("node {id} has no disk {disk}");
            return Applied::Refused(ManagerError::Refused { reason });
        }
        if drains {
            node.disks_draining.entry(disk).or_insert(Drain { begun_unix_ms, replicas });
        } else {
            node.disks_draining.remove(&disk);
        }
        Applied::Done
    }

    pub(super) fn remove_node(&mut self, id: NodeId) -> Applied {
        if let Some(problem) = self.removal_problem(id) {
            return Applied::Refused(problem);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.happens(NodeEvent::Missed);
            node.happens(NodeEvent::GivenUp);
            node.is_removed = true;
        }
        self.forget_removed();
        Applied::Done
    }
}

fn no_node(id: NodeId) -> Applied {
    Applied::Refused(unknown_node(id))
}

/// What an operator is told who names a node that is not there.
pub(crate) fn unknown_node(id: NodeId) -> ManagerError {
    ManagerError::Refused {
        reason: format!("there is no node {id}; `milpa node list` shows the nodes"),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The module's table, line by line.
    #[test]
    fn the_transition_table() {
        use NodeEvent as E;
        use NodeState as S;
        let rows = [
            (S::Active, E::Heard, false, S::Active),
            (S::Active, E::Missed, false, S::Silent),
            (S::Active, E::Marked, true, S::Draining),
            (S::Active, E::GivenUp, false, S::Active),
            (S::Draining, E::Heard, true, S::Draining),
            (S::Draining, E::Marked, false, S::Active),
            (S::Draining, E::Missed, true, S::Silent),
            (S::Draining, E::GivenUp, true, S::Draining),
            (S::Silent, E::Heard, false, S::Active),
            (S::Silent, E::Heard, true, S::Draining),
            (S::Silent, E::GivenUp, false, S::Dead),
            (S::Silent, E::Marked, true, S::Silent),
            (S::Silent, E::Missed, false, S::Silent),
            (S::Dead, E::Heard, false, S::Active),
            (S::Dead, E::Heard, true, S::Draining),
            (S::Dead, E::Missed, false, S::Dead),
            (S::Dead, E::GivenUp, false, S::Dead),
            (S::Dead, E::Marked, true, S::Dead),
        ];
        for (present, event, drains, expected) in rows {
            let next = transition(present, event, drains).unwrap_or(present);
            assert_eq!(next, expected, "{present:?}, {event:?}, drains: {drains}");
        }
    }
}
