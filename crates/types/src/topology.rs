//! Nodes, disks, partitions and volumes, as the manager describes them to everybody else.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{ClusterId, DiskId, Epoch, MetaSlot, NodeId, PartitionId, VolumeId};

/// The zone (leaf switch) of a node that declares none.
pub const DEFAULT_ZONE: &str = "default";

/// What a process is. The handshake states it, and every service checks who may call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// One of the replicas that know who, where and what policy.
    Manager,
    /// Holds meta partitions.
    Meta,
    /// Holds data partitions.
    Data,
    /// A mount or another user of one volume.
    Client,
    /// An operator's command, with the cluster's secret.
    Admin,
}

impl Role {
    /// The word used in logs, on command lines and in config files.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Manager => "manager",
            Role::Meta => "meta",
            Role::Data => "data",
            Role::Client => "client",
            Role::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a node takes part, as the manager sees it. The transitions are in the manager's core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeState {
    /// Its heartbeats arrive.
    Active,
    /// No heartbeat for a while; partitions go on without it, nothing is moved yet.
    Silent,
    /// Its heartbeats arrive, and an operator wants it empty: it serves what it holds, takes
    /// nothing new, and its replicas move to other nodes.
    Draining,
    /// Silent for so long, or removed by an operator: its replicas are replaced on other nodes.
    Dead,
}

impl NodeState {
    /// Whether its heartbeats arrive: it serves what it holds.
    #[must_use]
    pub fn is_heard(self) -> bool {
        match self {
            NodeState::Active | NodeState::Draining => true,
            NodeState::Silent | NodeState::Dead => false,
        }
    }

    /// The word used in tables, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Active => "active",
            NodeState::Silent => "silent",
            NodeState::Draining => "draining",
            NodeState::Dead => "dead",
        }
    }
}

/// One disk of a data node, or the directory of a meta node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its number, unique on the node, written into the directory when it was first used.
    pub id: DiskId,
    /// The directory.
    pub path: String,
    /// Bytes that MilpaFS may use there.
    pub capacity_bytes: u64,
    /// Bytes that are free there.
    pub free_bytes: u64,
    /// Bytes that MilpaFS has allocated there (blocks, not lengths).
    pub used_bytes: u64,
    /// Identifies the file system below, so that replicas on one physical disk can be told.
    pub device: u64,
    /// Why it is out of service, if it is.
    pub fenced: Option<String>,
}

/// A server process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Given by the manager at the first registration.
    pub id: NodeId,
    /// What it serves.
    pub role: Role,
    /// Where it listens.
    pub address: SocketAddr,
    /// Where its metrics are.
    pub http_address: SocketAddr,
    /// Leaf switch.
    pub zone: String,
    /// Fault domain; empty means a region of its own (DESIGN.md section 6).
    pub region: String,
    /// Whether the manager hears it.
    pub state: NodeState,
    /// Disks of a data node; the one log directory of a meta node.
    pub disks: Vec<Disk>,
    /// Bytes of memory in use by the process, for the placement of directories.
    pub memory_bytes: u64,
    /// Disks that an operator wants empty.
    pub disks_draining: Vec<DiskId>,
}

/// Bytes that are free on the data disks in service. Directories on one physical disk of a server share
/// what is free there: it counts once.
pub fn free_bytes<'a>(nodes: impl Iterator<Item = &'a Node>) -> u64 {
    let mut devices = BTreeMap::new();
    for node in nodes.filter(|node| node.role == Role::Data) {
        for disk in node.disks.iter().filter(|disk| disk.fenced.is_none()) {
            let free: &mut u64 = devices.entry((node.address.ip(), disk.device)).or_default();
            *free = disk.free_bytes.max(*free);
        }
    }
    devices.into_values().fold(0, u64::saturating_add)
}

/// A meta partition, as clients route to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPartition {
    /// Id and Raft group.
    pub id: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// Which inode ids it owns.
    pub slot: MetaSlot,
    /// Replicas; the first is asked first while no leader is known.
    pub members: Vec<NodeId>,
    /// Last leader that the manager heard of: a hint.
    pub leader: Option<NodeId>,
    /// False once a split has cut off its range: it takes no new inodes.
    pub takes_inodes: bool,
    /// Inodes held, for the placement of directories.
    pub inodes: u64,
    /// Dentries held.
    pub dentries: u64,
    /// The highest inode id given so far (CFS's maxInodeID).
    pub inode_highest: u64,
}

/// A data partition, as clients route to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPartition {
    /// Id and Raft group.
    pub id: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// The version of the members below.
    pub epoch: Epoch,
    /// Replicas that take part in this epoch.
    pub members: Vec<NodeId>,
    /// The member that orders appends.
    pub primary: NodeId,
    /// The replicas that the volume should have: members, and those that are away.
    pub replicas: Vec<NodeId>,
    /// False when it is full or has fewer than two members: existing bytes can still be read,
    /// overwritten and deleted.
    pub takes_extents: bool,
    /// Bytes allocated on the primary.
    pub used_bytes: u64,
    /// Extents on the primary.
    pub extents: u64,
}

/// When a metadata operation or an fsync is acknowledged (DESIGN.md sections 4 and 5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// On disk: in the synced logs of a majority, on the disks of all members.
    #[default]
    Synced,
    /// In the memory of a majority, of all members. A power cut may lose it. Never the default.
    Memory,
}

/// What a volume's owner may choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeOptions {
    /// Bytes that `df` shows and that writes may fill; 0 for as much as the disks hold.
    pub capacity_bytes: u64,
    /// Copies of each data partition: 2 to 7.
    pub replicas: u8,
    /// When an operation is acknowledged.
    pub durability: Durability,
    /// Files up to this many bytes live in their inode: 0 to 4096.
    pub inline_bytes_max: u32,
    /// Files up to this many bytes share extents: 0 to 131,072.
    pub small_file_bytes_max: u32,
    /// Inodes and dentries after which a meta partition is split: 1,000 or more.
    pub meta_partition_entries_max: u64,
}

impl Default for VolumeOptions {
    /// The values that `milpa volume create` starts from; none of them weakens a promise.
    fn default() -> VolumeOptions {
        VolumeOptions {
            capacity_bytes: 0,
            replicas: 3,
            durability: Durability::Synced,
            inline_bytes_max: 512,
            small_file_bytes_max: crate::PACKET_BYTES as u32,
            meta_partition_entries_max: 20_000_000,
        }
    }
}

impl VolumeOptions {
    /// The most bytes of a file that an inode may hold, whatever the option says: an inode has to fit into
    /// a message and a piece of a snapshot.
    pub const INLINE_BYTES_MAX: u32 = 4096;

    /// How many bytes of a file its inode may hold.
    #[must_use]
    pub fn inline_bytes(&self) -> u32 {
        self.inline_bytes_max.min(VolumeOptions::INLINE_BYTES_MAX)
    }

    /// Returns every violated bound, one line each, as `field: value is …, allowed …`.
    ///
    /// # Errors
    ///
    /// The lines, when there are any.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let mut bound = |field: &str, value: u64, low: u64, high: u64| {
            if value < low || value > high {
                problems.push(format!("{field}: value is {value}, allowed {low} to {high}"));
            }
        };
        bound("replicas", u64::from(self.replicas), 2, 7);
        let inline_max = u64::from(VolumeOptions::INLINE_BYTES_MAX);
        bound("inline_bytes_max", u64::from(self.inline_bytes_max), 0, inline_max);
        bound("small_file_bytes_max", u64::from(self.small_file_bytes_max), 0, 131_072);
        bound("meta_partition_entries_max", self.meta_partition_entries_max, 1000, 1 << 40);
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// A volume without its partitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Given by the manager, never reused.
    pub id: VolumeId,
    /// Chosen by its owner: 1 to 64 of `a-z 0-9 - _`, unique in the cluster.
    pub name: String,
    /// Its owner's choices.
    pub options: VolumeOptions,
}

/// All that a client needs to reach a volume: CFS 2.4's cached partition table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeView {
    /// The cluster.
    pub cluster: ClusterId,
    /// Raised at every change of what follows, loads excepted.
    pub version: u64,
    /// The volume.
    pub volume: Volume,
    /// Its meta partitions by slot.
    pub meta: Vec<MetaPartition>,
    /// Its data partitions.
    pub data: Vec<DataPartition>,
    /// The nodes that hold them.
    pub nodes: Vec<Node>,
}

/// Names follow DNS labels, plus the underscore: they appear in paths, logs and metrics.
#[must_use]
pub fn is_volume_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_on_a_physical_disk_counts_once() {
        let disk = |device, free_bytes, fenced: Option<&str>| Disk {
            id: DiskId(1),
            path: String::new(),
            capacity_bytes: 1000,
            free_bytes,
            used_bytes: 0,
            device,
            fenced: fenced.map(str::to_owned),
        };
        let node = |role, address: &str, disks| Node {
            id: NodeId(1),
            role,
            address: address.parse().unwrap(),
            http_address: address.parse().unwrap(),
            zone: String::new(),
            region: String::new(),
            state: NodeState::Active,
            disks,
            memory_bytes: 0,
            disks_draining: Vec::new(),
        };
        let nodes = [
            node(Role::Data, "10.0.0.1:1", vec![disk(1, 100, None), disk(2, 30, None)]),
            node(Role::Data, "10.0.0.1:2", vec![disk(1, 99, None)]),
            node(Role::Data, "10.0.0.2:1", vec![disk(1, 7, None), disk(3, 500, Some("EIO"))]),
            node(Role::Meta, "10.0.0.3:1", vec![disk(1, 1000, None)]),
        ];
        assert_eq!(free_bytes(nodes.iter()), 137);
    }
}
