//! What a manager can commit. The encoding of these enums is the format of the Raft log: variants
//! and fields are only ever appended, and a changed meaning is a new version.

use std::net::SocketAddr;

use milpa_types::{
    Disk, DiskId, Epoch, InodeId, Life, ManagerError, NodeId, NodeState, PartitionId, Role,
    VolumeId, VolumeOptions,
};
use milpa_wire::data::Configuration;
use serde::{Deserialize, Serialize};

use super::partition::Replica;
use super::task::NewTask;

/// One entry of the managers' log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// The first version.
    V1(CommandV1),
}

/// Commands of the first version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandV1 {
    /// A new leader's first command. When it is applied in the term in which it was proposed, the
    /// leader has seen all that was committed before it, and may answer.
    Lead {
        /// The new leader.
        manager: NodeId,
    },
    /// A node started.
    RegisterNode(Registration),
    /// The leader hears a node, or has not heard it for the silence period.
    SetNodeState {
        /// Which.
        node: NodeId,
        /// What it is from now on.
        state: NodeState,
    },
    /// A new volume and where its partitions go.
    CreateVolume {
        /// Its name.
        name: String,
        /// Its options.
        options: VolumeOptions,
        /// Its meta partitions, by slot.
        meta: Vec<NewMetaPartition>,
        /// Its data partitions.
        data: Vec<NewDataPartition>,
    },
    /// All partitions of a new volume exist and are led.
    VolumeReady {
        /// Which.
        volume: VolumeId,
    },
    /// Other options.
    SetVolumeOptions {
        /// Which.
        volume: VolumeId,
        /// All of them.
        options: VolumeOptions,
    },
    /// A meta node has taken over a volume's options.
    OptionsTaken {
        /// Which volume.
        volume: VolumeId,
        /// Which node.
        node: NodeId,
        /// The version of the options that it was sent.
        version: u64,
    },
    /// A volume and all its partitions go. Their replicas are removed in the background.
    DeleteVolume {
        /// Which.
        volume: VolumeId,
    },
    /// More data partitions for a volume.
    AddDataPartitions {
        /// Which volume.
        volume: VolumeId,
        /// Where they go.
        data: Vec<NewDataPartition>,
    },
    /// Algorithm 1, first step: cut off a meta partition's inode range.
    BeginSplit {
        /// Which.
        partition: PartitionId,
        /// The last inode id that it may ever give.
        end: InodeId,
    },
    /// Algorithm 1, second step: the partition has agreed; open the volume's next slot.
    FinishSplit {
        /// The partition that was cut.
        partition: PartitionId,
        /// The next one.
        next: NewMetaPartition,
    },
    /// Another replica set for a data partition: the intent. The partition's own group commits it.
    SetConfiguration {
        /// Which.
        partition: PartitionId,
        /// Its epoch is one above the present one.
        configuration: Configuration,
    },
    /// Nodes reported replicas for the first time. From now on a replica that is missing was lost,
    /// and must never be created blank under its old vote.
    ReplicasCreated {
        /// Which replicas.
        replicas: Vec<(PartitionId, NodeId)>,
    },
    /// Nodes have dropped replicas of partitions that are no more.
    ReplicasRemoved {
        /// Which replicas.
        replicas: Vec<(PartitionId, NodeId)>,
    },
    /// An operator wants a node empty, or takes that back.
    DrainNode {
        /// Which.
        node: NodeId,
        /// Whether it is to be emptied.
        drains: bool,
        /// The leader's wall clock.
        begun_unix_ms: u64,
    },
    /// The same for one disk of a node.
    DrainDisk {
        /// Of which node.
        node: NodeId,
        /// Which.
        disk: DiskId,
        /// Whether it is to be emptied.
        drains: bool,
        /// The leader's wall clock.
        begun_unix_ms: u64,
    },
    /// An operator gives a node up for good.
    RemoveNode {
        /// Which.
        node: NodeId,
    },
    /// A partition gets another replica.
    BeginTask(NewTask),
    /// It has it, or the attempt is given up.
    EndTask {
        /// Which partition.
        partition: PartitionId,
        /// Which task.
        id: u64,
        /// Whether the replica is a member now.
        done: bool,
    },
    /// A data partition has a place too many.
    DropReplica {
        /// Which.
        partition: PartitionId,
        /// Which of its places.
        node: NodeId,
    },
    /// Other members for a meta partition: the intent. The partition's own group commits it.
    SetMembers {
        /// Which.
        partition: PartitionId,
        /// All of them.
        members: Vec<NodeId>,
    },
    /// The members of data partitions were seen to hold the same: from then on each of them has every
    /// acknowledged byte as long as it is a member, and if two are left, it could go on alone
    /// (docs/decisions/0007).
    MembersWhole {
        /// Which partitions, and in which epoch.
        partitions: Vec<(PartitionId, Epoch)>,
    },
    /// A node started, and says which life of it this is. Takes the place of `RegisterNode`, which stays
    /// for what older programs have written.
    StartNode {
        /// Who.
        registration: Registration,
        /// Refused if it does not follow on the newest one.
        life: Life,
    },
    /// A node lives on: copies of its directory from before are old from here on.
    RenewLife {
        /// Who.
        node: NodeId,
        /// As at registration.
        incarnation: u128,
        /// Refused if it does not follow on the newest one.
        life: Life,
    },
    /// Another configuration instead of one that was decided and that the partition's group has not taken.
    ReplaceConfiguration {
        /// Which.
        partition: PartitionId,
        /// Its epoch is one above the present one.
        configuration: Configuration,
        /// The epoch that the group was seen to have.
        adopted: Epoch,
    },
}

/// A node that starts: `milpa_wire::manager::Register`, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The id in its data directory; `None` in a fresh one.
    pub node: Option<NodeId>,
    /// Drawn at random when its data directory was created.
    pub incarnation: u128,
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

/// Where a new meta partition goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewMetaPartition {
    /// Its replicas; the first campaigns at once.
    pub members: Vec<NodeId>,
}

/// Where a new data partition goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewDataPartition {
    /// Its replicas; the first is the primary.
    pub replicas: Vec<Replica>,
}

/// What applying a command gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// Done; nothing to tell.
    Done,
    /// StartNode, RegisterNode.
    Registered(NodeId),
    /// CreateVolume.
    Volume(VolumeId),
    /// AddDataPartitions, FinishSplit.
    Partitions(Vec<PartitionId>),
    /// Nothing changed: another command came first, or the caller asked for what cannot be.
    Refused(ManagerError),
}
