//! Messages to and between managers.

use std::net::SocketAddr;

use milpa_types::{
    ClusterId, DataPartition, Disk, DiskId, Life, ManagerError, MetaPartition, Node, NodeId,
    PartitionId, Role, Volume, VolumeId, VolumeOptions, VolumeView,
};
use serde::{Deserialize, Serialize};

use crate::data::DataPartitionReport;
use crate::meta::MetaPartitionReport;

/// Everything that a manager answers. Only the leader answers; a follower names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ManagerRequest {
    /// A node starts: who am I?
    Register(Register),
    /// Every 200 ms from every node.
    Heartbeat(Heartbeat),
    /// A client or operator: how to reach a volume.
    GetVolume {
        /// Its name.
        name: String,
        /// The version that the caller has; if it is still the newest, `Unchanged` is answered.
        known_version: u64,
    },
    /// A server: how to reach a volume's partitions.
    GetVolumeById {
        /// Which.
        volume: VolumeId,
    },
    /// An operator: all volumes.
    ListVolumes,
    /// An operator: a new volume.
    CreateVolume {
        /// Unique name.
        name: String,
        /// Its options.
        options: VolumeOptions,
        /// Meta partitions at the start; 0 for one for each meta node, at least 3.
        meta_partitions: u32,
        /// Data partitions at the start; 0 for 6.
        data_partitions: u32,
    },
    /// An operator: change a volume's options.
    SetVolume {
        /// Its name.
        name: String,
        /// All options, changed ones among them.
        options: VolumeOptions,
    },
    /// An operator: delete a volume and all its bytes.
    DeleteVolume {
        /// Its name.
        name: String,
    },
    /// An operator: all nodes.
    ListNodes,
    /// An operator: partitions of one volume or of all.
    ListPartitions {
        /// Volume's name; `None` for all.
        volume: Option<String>,
    },
    /// An operator: the cluster in one look.
    Status,
    /// A server: where everybody listens.
    GetNodes,
    /// An operator: the key that mounts a volume.
    GetVolumeKey {
        /// Its name.
        name: String,
    },
    /// Another manager: a piece of the state, for a replica too far behind.
    FetchSnapshot {
        /// Log index of the snapshot.
        index: u64,
        /// First byte.
        offset: u64,
    },
    /// An operator: add partitions to a volume now, or split its last meta partition.
    GrowVolume {
        /// Its name.
        name: String,
        /// Meta partitions to add, each by a split (Algorithm 1).
        meta_partitions: u32,
        /// Data partitions to add.
        data_partitions: u32,
    },
    /// An operator: move everything off a node, or stop doing so.
    DrainNode {
        /// Which.
        node: NodeId,
        /// False to take it back.
        drains: bool,
    },
    /// An operator: forget a node that is empty, or that will not come back.
    RemoveNode {
        /// Which.
        node: NodeId,
    },
    /// An operator: move everything off one disk of a data node, or stop doing so.
    DrainDisk {
        /// Of which node.
        node: NodeId,
        /// Which.
        disk: DiskId,
        /// False to take it back.
        drains: bool,
    },
    /// An operator: what is being repaired and moved.
    ListTasks,
    /// A node that stops cleanly: go on without me at once.
    Leave {
        /// Who.
        node: NodeId,
        /// As at registration.
        incarnation: u128,
    },
    /// An operator: how many replicas should a meta partition have?
    GetMetaReplicas,
    /// Another manager, whose directory is empty: was the group of the managers founded already? Everybody
    /// answers for itself.
    IsFounded,
    /// A node that lives on: what its directory held until now is old from here on.
    RenewLife {
        /// Who.
        node: NodeId,
        /// As at registration.
        incarnation: u128,
        /// Its last life, and the one that goes on.
        life: Life,
    },
}

/// A node that starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// The id in its data directory; `None` in a fresh one.
    pub node: Option<NodeId>,
    /// Drawn at random when its data directory was created: tells a copy from the original.
    pub incarnation: u128,
    /// Tells an old copy from the directory as it was last.
    pub life: Life,
    /// What it serves.
    pub role: Role,
    /// Where it listens.
    pub address: SocketAddr,
    /// Where its metrics are.
    pub http_address: SocketAddr,
    /// Leaf switch.
    pub zone: String,
    /// Fault domain; may be empty.
    pub region: String,
    /// Its disks.
    pub disks: Vec<Disk>,
}

/// A node that lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Who.
    pub node: NodeId,
    /// As at registration.
    pub incarnation: u128,
    /// Its disks as they are now.
    pub disks: Vec<Disk>,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its meta partitions.
    pub meta: Vec<MetaPartitionReport>,
    /// Its data partitions, but those of which the replica takes no part.
    pub data: Vec<DataPartitionReport>,
    /// Those: log, state or extents are damaged, and what is left of them takes room.
    pub data_damaged: Vec<PartitionId>,
    /// Data nodes that take long to write what it sends them, as far as it knows; itself, if it takes long itself.
    pub slow_peers: Vec<SlowPeer>,
}

/// A data node that is slow for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowPeer {
    /// Who is slow.
    pub node: NodeId,
    /// How long a write takes there, with the way there and back, in milliseconds.
    pub took_ms: u32,
}

/// Answers to requests, by request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ManagerAnswer {
    /// Done; nothing to tell.
    Done,
    /// Register.
    Registered {
        /// The cluster.
        cluster: ClusterId,
        /// The node's id, to be kept in its data directory.
        node: NodeId,
    },
    /// Heartbeat: where every node listens, when that changed since the version the node last saw.
    Alive {
        /// Raised whenever a node joins or moves.
        nodes_version: u64,
    },
    /// GetVolume, GetVolumeById.
    Volume(Box<VolumeView>),
    /// GetVolume: the caller's view is the newest.
    Unchanged,
    /// ListVolumes.
    Volumes(Vec<VolumeSummary>),
    /// CreateVolume, SetVolume.
    VolumeCreated(Volume),
    /// ListNodes, GetNodes.
    Nodes(Vec<Node>),
    /// ListPartitions.
    Partitions {
        /// Meta partitions.
        meta: Vec<MetaPartition>,
        /// Data partitions.
        data: Vec<DataPartition>,
    },
    /// Status.
    Status(Box<ClusterStatus>),
    /// GetVolumeKey: hexadecimal.
    Key(String),
    /// FetchSnapshot: the bytes are the payload.
    SnapshotPiece {
        /// Bytes of the whole.
        total: u64,
    },
    /// ListTasks.
    Tasks(Vec<Task>),
    /// GetMetaReplicas.
    MetaReplicas {
        /// As the managers' policy says.
        wanted: u8,
    },
    /// IsFounded: whether this manager knows of a group in which a term has begun.
    Founded(bool),
    /// IsFounded: it is making up for what it lost of the group, and has not caught up.
    CatchesUp,
}

/// The reply body of every manager.
pub type ManagerReply = Result<ManagerAnswer, ManagerError>;

/// A volume with its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSummary {
    /// The volume.
    pub volume: Volume,
    /// Inodes in it.
    pub inodes: u64,
    /// Bytes in its files, one copy counted.
    pub used_bytes: u64,
    /// Its meta partitions.
    pub meta_partitions: u32,
    /// Its data partitions.
    pub data_partitions: u32,
}

/// What kind of work a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskKind {
    /// A data partition gets a new replica.
    DataReplica,
    /// A meta partition gets a new replica.
    MetaReplica,
    /// Everything moves off a node or a disk; done when nothing is left there.
    Drain,
}

/// Work that takes a while, as `milpa task list` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Unique in the cluster. 0 for a drain, which is known by its node.
    pub id: u64,
    /// What kind of work.
    pub kind: TaskKind,
    /// The partition that gets a replica; `None` for a drain.
    pub partition: Option<PartitionId>,
    /// The node that does it: where the new replica is made, or that is drained.
    pub owner: NodeId,
    /// Why.
    pub reason: String,
    /// When it began, in milliseconds since 1970.
    pub begun_unix_ms: u64,
    /// A replica is given up at this time and planned anew; a drain that is not done then is warned of.
    pub deadline_unix_ms: u64,
    /// How much is done: bytes of a replica; replicas of a drain.
    pub done: u64,
    /// Out of how much, as far as known.
    pub total: u64,
    /// How long it will take at the speed so far, once that can be told.
    pub left_ms: Option<u64>,
}

/// The cluster in one look.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The cluster.
    pub cluster: ClusterId,
    /// Managers and where they listen.
    pub managers: Vec<(NodeId, SocketAddr)>,
    /// Which of them leads.
    pub leader: NodeId,
    /// All meta and data nodes.
    pub nodes: Vec<Node>,
    /// All volumes.
    pub volumes: Vec<VolumeSummary>,
    /// What an operator should know: silent nodes, partitions with too few copies, replicas that
    /// share a physical disk.
    pub warnings: Vec<String>,
}
