//! Bodies of the HTTP interface. Their own types, so that it can stay as it is when the wire
//! format changes; ids of 128 bits are hexadecimal text, as JSON numbers cannot hold them.

use milpa_types::{
    DataPartition, Disk, Durability, MetaPartition, Node, Volume, VolumeOptions, VolumeView,
};
use milpa_wire::manager::{ClusterStatus, ManagerRequest, Task, TaskKind, VolumeSummary};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why something was not done.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorBody {
    /// One line for a person.
    pub(super) error: String,
}

/// Whether a node or a disk is to be emptied.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DrainBody {
    /// False takes a drain back.
    pub(super) drains: bool,
}

/// Work that takes a while.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TaskBody {
    /// Unique; 0 for a drain.
    id: u64,
    /// `data_replica`, `meta_replica` or `drain`.
    kind: &'static str,
    /// The partition that gets a replica.
    partition: Option<u64>,
    /// The node that does it.
    owner: u32,
    /// Why.
    reason: String,
    /// When it began, in milliseconds since 1970.
    begun_unix_ms: u64,
    /// When a replica is given up, or a drain is late.
    deadline_unix_ms: u64,
    /// Bytes of a data replica, log entries of a meta replica, replicas of a drain.
    done: u64,
    /// Out of how much.
    total: u64,
    /// At the speed so far.
    left_ms: Option<u64>,
}

impl From<Task> for TaskBody {
    fn from(task: Task) -> TaskBody {
        TaskBody {
            id: task.id,
            kind: match task.kind {
                TaskKind::DataReplica => "data_replica",
                TaskKind::MetaReplica => "meta_replica",
                TaskKind::Drain => "drain",
            },
            partition: task.partition.map(|partition| partition.0),
            owner: task.owner.0,
            reason: task.reason,
            begun_unix_ms: task.begun_unix_ms,
            deadline_unix_ms: task.deadline_unix_ms,
            done: task.done,
            total: task.total,
            left_ms: task.left_ms,
        }
    }
}

/// The cluster in one look.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StatusBody {
    /// The cluster's id, hexadecimal.
    cluster: String,
    /// The managers.
    managers: Vec<ManagerBody>,
    /// The id of the manager that leads.
    leader: u32,
    /// Meta and data nodes.
    nodes: Vec<NodeBody>,
    /// Volumes with their use.
    volumes: Vec<VolumeBody>,
    /// What an operator should know, the worst first.
    warnings: Vec<String>,
}

/// A manager.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ManagerBody {
    /// Its id.
    id: u32,
    /// Where it listens.
    address: String,
}

/// A meta or data node.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct NodeBody {
    /// Its id.
    id: u32,
    /// `meta` or `data`.
    role: &'static str,
    /// `active`, `silent`, `draining` or `dead`.
    state: &'static str,
    /// Where it listens.
    address: String,
    /// Where its metrics are.
    http_address: String,
    /// Leaf switch.
    zone: String,
    /// Fault domain; empty for one of its own.
    region: String,
    /// Bytes of memory in use.
    memory_bytes: u64,
    /// Its disks.
    disks: Vec<DiskBody>,
    /// Disks that an operator wants empty.
    disks_draining: Vec<u32>,
}

/// A disk.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DiskBody {
    /// Its number on the node.
    id: u32,
    /// The directory.
    path: String,
    /// Bytes that may be used.
    capacity_bytes: u64,
    /// Bytes that are free.
    free_bytes: u64,
    /// Bytes that are allocated.
    used_bytes: u64,
    /// Why it is out of service, if it is.
    fenced: Option<String>,
}

/// What a volume's owner chose.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OptionsBody {
    /// Bytes that may be written; 0 for as much as the disks hold.
    capacity_bytes: u64,
    /// Copies of each data partition.
    replicas: u8,
    /// `synced` or `memory`.
    durability: &'static str,
    /// Files up to this many bytes live in their inode.
    inline_bytes_max: u32,
    /// Files up to this many bytes share extents.
    small_file_bytes_max: u32,
    /// Inodes and dentries after which a meta partition is split.
    meta_partition_entries_max: u64,
}

/// A volume with its use.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VolumeBody {
    /// Its id.
    id: u32,
    /// Its name.
    name: String,
    /// Its options.
    options: OptionsBody,
    /// Inodes in it.
    inodes: u64,
    /// Bytes in its files, one copy counted.
    used_bytes: u64,
    /// Its meta partitions.
    meta_partitions: u32,
    /// Its data partitions.
    data_partitions: u32,
}

/// A volume that has just been created.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CreatedBody {
    /// Its id.
    id: u32,
    /// Its name.
    name: String,
    /// Its options.
    options: OptionsBody,
}

/// A volume with its partitions.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct VolumeDetailBody {
    /// Its id.
    id: u32,
    /// Its name.
    name: String,
    /// Its options.
    options: OptionsBody,
    /// The version of its routes.
    version: u64,
    /// Its partitions.
    partitions: PartitionsBody,
}

/// Partitions.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct PartitionsBody {
    /// Meta partitions.
    meta: Vec<MetaPartitionBody>,
    /// Data partitions.
    data: Vec<DataPartitionBody>,
}

/// A meta partition.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MetaPartitionBody {
    /// Its id.
    id: u64,
    /// Its volume's id.
    volume: u32,
    /// Which range of inode ids it owns.
    slot: u32,
    /// Nodes that hold it.
    members: Vec<u32>,
    /// The member that leads, as last heard.
    leader: Option<u32>,
    /// Whether it takes new inodes.
    takes_inodes: bool,
    /// Inodes held.
    inodes: u64,
    /// Dentries held.
    dentries: u64,
}

/// A data partition.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DataPartitionBody {
    /// Its id.
    id: u64,
    /// Its volume's id.
    volume: u32,
    /// The version of its members.
    epoch: u64,
    /// Nodes that take part.
    members: Vec<u32>,
    /// The member that orders appends.
    primary: u32,
    /// Nodes that should take part.
    replicas: Vec<u32>,
    /// Whether it takes new extents.
    takes_extents: bool,
    /// Bytes allocated on its primary.
    used_bytes: u64,
    /// Extents on its primary.
    extents: u64,
}

/// A volume to be created. Only the name is needed.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewVolumeBody {
    /// 1 to 64 of `a-z 0-9 - _`.
    name: String,
    /// Bytes that may be written; 0 for as much as the disks hold.
    capacity_bytes: Option<u64>,
    /// Copies of each data partition: 2 to 7.
    replicas: Option<u8>,
    /// `synced` (the default) or `memory`.
    durability: Option<DurabilityBody>,
    /// Files up to this many bytes live in their inode.
    inline_bytes_max: Option<u32>,
    /// Files up to this many bytes share extents.
    small_file_bytes_max: Option<u32>,
    /// Inodes and dentries after which a meta partition is split.
    meta_partition_entries_max: Option<u64>,
    /// Meta partitions at the start; 0 for one for each meta node, at least 3.
    #[serde(default)]
    meta_partitions: u32,
    /// Data partitions at the start; 0 for the managers' default.
    #[serde(default)]
    data_partitions: u32,
}

/// When an operation is acknowledged.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum DurabilityBody {
    /// On disks.
    Synced,
    /// In memories. A power cut may lose it.
    Memory,
}

impl From<NewVolumeBody> for ManagerRequest {
    fn from(new: NewVolumeBody) -> ManagerRequest {
        let default = VolumeOptions::default();
        let durability = match new.durability {
            None | Some(DurabilityBody::Synced) => Durability::Synced,
            Some(DurabilityBody::Memory) => Durability::Memory,
        };
        let options = VolumeOptions {
            capacity_bytes: new.capacity_bytes.unwrap_or(default.capacity_bytes),
            replicas: new.replicas.unwrap_or(default.replicas),
            durability,
            inline_bytes_max: new.inline_bytes_max.unwrap_or(default.inline_bytes_max),
            small_file_bytes_max: new.small_file_bytes_max.unwrap_or(default.small_file_bytes_max),
            meta_partition_entries_max: (new.meta_partition_entries_max)
                .unwrap_or(default.meta_partition_entries_max),
        };
        ManagerRequest::CreateVolume {
            name: new.name,
            options,
            meta_partitions: new.meta_partitions,
            data_partitions: new.data_partitions,
        }
    }
}

impl From<VolumeOptions> for OptionsBody {
    fn from(options: VolumeOptions) -> OptionsBody {
        OptionsBody {
            capacity_bytes: options.capacity_bytes,
            replicas: options.replicas,
            durability: match options.durability {
                Durability::Synced => "synced",
                Durability::Memory => "memory",
            },
            inline_bytes_max: options.inline_bytes_max,
            small_file_bytes_max: options.small_file_bytes_max,
            meta_partition_entries_max: options.meta_partition_entries_max,
        }
    }
}

impl From<Volume> for CreatedBody {
    fn from(volume: Volume) -> CreatedBody {
        CreatedBody { id: volume.id.0, name: volume.name, options: volume.options.into() }
    }
}

impl From<VolumeSummary> for VolumeBody {
    fn from(summary: VolumeSummary) -> VolumeBody {
        VolumeBody {
            id: summary.volume.id.0,
            name: summary.volume.name,
            options: summary.volume.options.into(),
            inodes: summary.inodes,
            used_bytes: summary.used_bytes,
            meta_partitions: summary.meta_partitions,
            data_partitions: summary.data_partitions,
        }
    }
}

impl From<VolumeView> for VolumeDetailBody {
    fn from(view: VolumeView) -> VolumeDetailBody {
        VolumeDetailBody {
            id: view.volume.id.0,
            name: view.volume.name,
            options: view.volume.options.into(),
            version: view.version,
            partitions: (view.meta, view.data).into(),
        }
    }
}

impl From<(Vec<MetaPartition>, Vec<DataPartition>)> for PartitionsBody {
    fn from((meta, data): (Vec<MetaPartition>, Vec<DataPartition>)) -> PartitionsBody {
        PartitionsBody {
            meta: meta.into_iter().map(MetaPartitionBody::from).collect(),
            data: data.into_iter().map(DataPartitionBody::from).collect(),
        }
    }
}

impl From<MetaPartition> for MetaPartitionBody {
    fn from(partition: MetaPartition) -> MetaPartitionBody {
        MetaPartitionBody {
            id: partition.id.0,
            volume: partition.volume.0,
            slot: partition.slot.0,
            members: partition.members.iter().map(|node| node.0).collect(),
            leader: partition.leader.map(|node| node.0),
            takes_inodes: partition.takes_inodes,
            inodes: partition.inodes,
            dentries: partition.dentries,
        }
    }
}

impl From<DataPartition> for DataPartitionBody {
    fn from(partition: DataPartition) -> DataPartitionBody {
        DataPartitionBody {
            id: partition.id.0,
            volume: partition.volume.0,
            epoch: partition.epoch.0,
            members: partition.members.iter().map(|node| node.0).collect(),
            primary: partition.primary.0,
            replicas: partition.replicas.iter().map(|node| node.0).collect(),
            takes_extents: partition.takes_extents,
            used_bytes: partition.used_bytes,
            extents: partition.extents,
        }
    }
}

impl From<Node> for NodeBody {
    fn from(node: Node) -> NodeBody {
        NodeBody {
            id: node.id.0,
            role: node.role.as_str(),
            state: node.state.as_str(),
            address: node.address.to_string(),
            http_address: node.http_address.to_string(),
            zone: node.zone,
            region: node.region,
            memory_bytes: node.memory_bytes,
            disks: node.disks.into_iter().map(DiskBody::from).collect(),
            disks_draining: node.disks_draining.iter().map(|disk| disk.0).collect(),
        }
    }
}

impl From<Disk> for DiskBody {
    fn from(disk: Disk) -> DiskBody {
        DiskBody {
            id: disk.id.0,
            path: disk.path,
            capacity_bytes: disk.capacity_bytes,
            free_bytes: disk.free_bytes,
            used_bytes: disk.used_bytes,
            fenced: disk.fenced,
        }
    }
}

impl From<ClusterStatus> for StatusBody {
    fn from(status: ClusterStatus) -> StatusBody {
        let manager = |(id, address): (milpa_types::NodeId, std::net::SocketAddr)| ManagerBody {
            id: id.0,
            address: address.to_string(),
        };
        StatusBody {
            cluster: status.cluster.to_string(),
            managers: status.managers.into_iter().map(manager).collect(),
            leader: status.leader.0,
            nodes: status.nodes.into_iter().map(NodeBody::from).collect(),
            volumes: status.volumes.into_iter().map(VolumeBody::from).collect(),
            warnings: status.warnings,
        }
    }
}
