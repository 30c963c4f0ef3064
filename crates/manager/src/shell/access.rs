//! Who may ask what. One row for each request; a new request without a row does not compile.

use milpa_host::rpc::Peer;
use milpa_types::{ManagerError, Role, VolumeId};
use milpa_wire::manager::ManagerRequest;

const SERVERS: &[Role] = &[Role::Meta, Role::Data];
const OPERATORS: &[Role] = &[Role::Admin];

/// The roles that may make a request.
#[must_use]
pub fn allowed_roles(request: &ManagerRequest) -> &'static [Role] {
    use ManagerRequest as R;
    match request {
        R::Register(_) | R::Heartbeat(_) | R::Leave { .. } | R::RenewLife { .. } => SERVERS,
        R::GetVolume { .. } => &[Role::Client, Role::Admin, Role::Meta, Role::Data],
        R::GetVolumeById { .. } | R::GetNodes => &[Role::Meta, Role::Data, Role::Admin],
        R::FetchSnapshot { .. } => &[Role::Manager],
        R::IsFounded => &[Role::Manager, Role::Admin],
        R::ListVolumes
        | R::CreateVolume { .. }
        | R::SetVolume { .. }
        | R::DeleteVolume { .. }
        | R::ListNodes
        | R::ListPartitions { .. }
        | R::Status
        | R::GetVolumeKey { .. }
        | R::GrowVolume { .. }
        | R::DrainNode { .. }
        | R::RemoveNode { .. }
        | R::DrainDisk { .. }
        | R::ListTasks
        | R::GetMetaReplicas => OPERATORS,
    }
}

/// The word for a request in logs and metrics.
#[must_use]
pub fn operation(request: &ManagerRequest) -> &'static str {
    use ManagerRequest as R;
    match request {
        R::Register(_) => "register",
        R::Heartbeat(_) => "heartbeat",
        R::GetVolume { .. } => "get_volume",
        R::GetVolumeById { .. } => "get_volume_by_id",
        R::ListVolumes => "list_volumes",
        R::CreateVolume { .. } => "create_volume",
        R::SetVolume { .. } => "set_volume",
        R::DeleteVolume { .. } => "delete_volume",
        R::ListNodes => "list_nodes",
        R::ListPartitions { .. } => "list_partitions",
        R::Status => "status",
        R::GetNodes => "get_nodes",
        R::GetVolumeKey { .. } => "get_volume_key",
        R::FetchSnapshot { .. } => "fetch_snapshot",
        R::GrowVolume { .. } => "grow_volume",
        R::DrainNode { .. } => "drain_node",
        R::RemoveNode { .. } => "remove_node",
        R::DrainDisk { .. } => "drain_disk",
        R::ListTasks => "list_tasks",
        R::Leave { .. } => "leave",
        R::GetMetaReplicas => "get_meta_replicas",
        R::IsFounded => "is_founded",
        R::RenewLife { .. } => "renew_life",
    }
}

/// Who asks, as far as permission goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// What it proved to be.
    pub role: Role,
    /// Its node id, 0 if it has none yet.
    pub node: milpa_types::NodeId,
    /// The one volume that a client may use.
    pub volume: Option<VolumeId>,
}

impl Caller {
    /// An operator, who came by HTTP or with the cluster's secret.
    pub const ADMIN: Caller =
        Caller { role: Role::Admin, node: milpa_types::NodeId(0), volume: None };
}

impl From<&Peer> for Caller {
    fn from(peer: &Peer) -> Caller {
        Caller { role: peer.role, node: peer.node, volume: peer.volume }
    }
}

/// Checks the caller's role, and that a node speaks only for itself. That a client asks for its
/// own volume only is checked where the name is resolved.
///
/// # Errors
///
/// [`ManagerError::NotAllowed`].
pub fn check(caller: Caller, request: &ManagerRequest) -> Result<(), ManagerError> {
    let refuse = |reason: String| Err(ManagerError::NotAllowed { reason });
    let role = caller.role;
    if !allowed_roles(request).contains(&role) {
        return refuse(format!("a {role} may not ask for {}", operation(request)));
    }
    match request {
        ManagerRequest::Register(register) if register.role != role => {
            refuse(format!("a {role} cannot register as a {}", register.role))
        }
        // A connection made before the node had an id says 0; the incarnation tells who it is.
        ManagerRequest::Heartbeat(heartbeat)
            if caller.node.0 != 0 && heartbeat.node != caller.node =>
        {
            refuse(format!("node {} cannot speak for node {}", caller.node, heartbeat.node))
        }
        ManagerRequest::Leave { node, .. } | ManagerRequest::RenewLife { node, .. }
            if caller.node.0 != 0 && *node != caller.node =>
        {
            refuse(format!("node {} cannot speak for node {node}", caller.node))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::{Life, NodeId, VolumeOptions};
    use milpa_wire::manager::{Heartbeat, Register};

    use super::*;

    fn all_requests() -> Vec<ManagerRequest> {
        use ManagerRequest as R;
        let name = || "home".to_owned();
        let options = VolumeOptions::default;
        let address = ([127, 0, 0, 1], 1).into();
        vec![
            R::Register(Register {
                node: None,
                incarnation: 1,
                life: Life::default(),
                role: Role::Meta,
                address,
                http_address: address,
                zone: String::new(),
                region: String::new(),
                disks: Vec::new(),
            }),
            R::Heartbeat(Heartbeat {
                node: NodeId(101),
                incarnation: 1,
                disks: Vec::new(),
                memory_bytes: 0,
                meta: Vec::new(),
                data_damaged: Vec::new(),
                slow_peers: Vec::new(),
                data: Vec::new(),
            }),
            R::GetVolume { name: name(), known_version: 0 },
            R::GetVolumeById { volume: VolumeId(1) },
            R::ListVolumes,
            R::CreateVolume {
                name: name(),
                options: options(),
                meta_partitions: 0,
                data_partitions: 0,
            },
            R::SetVolume { name: name(), options: options() },
            R::DeleteVolume { name: name() },
            R::ListNodes,
            R::ListPartitions { volume: None },
            R::Status,
            R::GetNodes,
            R::GetVolumeKey { name: name() },
            R::FetchSnapshot { index: 1, offset: 0 },
            R::GrowVolume { name: name(), meta_partitions: 1, data_partitions: 0 },
            R::DrainNode { node: NodeId(101), drains: true },
            R::RemoveNode { node: NodeId(101) },
            R::DrainDisk { node: NodeId(101), disk: milpa_types::DiskId(1), drains: true },
            R::ListTasks,
            R::Leave { node: NodeId(101), incarnation: 1 },
            R::GetMetaReplicas,
            R::IsFounded,
            R::RenewLife { node: NodeId(101), incarnation: 1, life: Life::default() },
        ]
    }

    /// The whole matrix of requests and roles, as one would explain it.
    #[test]
    fn the_matrix_of_requests_and_roles() {
        let of_a_node =
            ["heartbeat", "get_volume", "get_volume_by_id", "get_nodes", "leave", "renew_life"];
        let rows: [(Role, &[&str]); 5] = [
            (Role::Manager, &["fetch_snapshot", "is_founded"]),
            // The registration in the list is a meta node's.
            (Role::Meta, &[&["register"], &of_a_node[..]].concat()),
            (Role::Data, &of_a_node),
            (Role::Client, &["get_volume"]),
            (
                Role::Admin,
                &[
                    "get_volume",
                    "get_volume_by_id",
                    "list_volumes",
                    "create_volume",
                    "set_volume",
                    "delete_volume",
                    "list_nodes",
                    "list_partitions",
                    "status",
                    "get_nodes",
                    "get_volume_key",
                    "grow_volume",
                    "drain_node",
                    "remove_node",
                    "drain_disk",
                    "list_tasks",
                    "get_meta_replicas",
                    "is_founded",
                ],
            ),
        ];
        for (role, expected) in rows {
            let caller = Caller { role, node: NodeId(101), volume: Some(VolumeId(1)) };
            let allowed: Vec<&str> = (all_requests().iter())
                .filter(|request| check(caller, request).is_ok())
                .map(operation)
                .collect();
            assert_eq!(allowed, expected, "{role}");
        }
    }

    #[test]
    fn a_node_speaks_only_for_itself() {
        let other = Caller { role: Role::Meta, node: NodeId(102), volume: None };
        let error = check(other, &all_requests()[1]).unwrap_err().to_string();
        assert_eq!(error, "not allowed: node 102 cannot speak for node 101");
    }
}
