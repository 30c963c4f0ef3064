//! The state itself, and the one door through which it changes.

use std::collections::{BTreeMap, BTreeSet};

use milpa_types::{ClusterId, Epoch, NodeId, PartitionId, VolumeId};
use serde::{Deserialize, Serialize};

use super::command::{Applied, Command, CommandV1};
use super::holders::Possible;
use super::node::NodeRecord;
use super::partition::{DataRecord, MetaRecord, Removal};
use super::task::Task;
use super::volume::VolumeRecord;
use crate::config::NODE_ID_FIRST;

/// All that the managers have agreed on. Only [`State::apply`] changes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The cluster; the same in all managers from the start.
    pub(super) cluster: ClusterId,
    /// The log index of the last command applied.
    pub(super) applied: u64,
    /// The next node's id.
    pub(super) node_next: u32,
    /// The next volume's id.
    pub(super) volume_next: u32,
    /// The next partition's id. 0 is the managers' own group.
    pub(super) partition_next: u64,
    /// Raised whenever a node joins or moves; nodes compare it to refetch addresses.
    pub(super) nodes_version: u64,
    /// All nodes that ever registered.
    pub(super) nodes: BTreeMap<NodeId, NodeRecord>,
    /// All volumes that exist.
    pub(super) volumes: BTreeMap<VolumeId, VolumeRecord>,
    /// Their meta partitions.
    pub(super) meta: BTreeMap<PartitionId, MetaRecord>,
    /// Their data partitions.
    pub(super) data: BTreeMap<PartitionId, DataRecord>,
    /// Partitions of deleted volumes whose replicas are not all gone.
    pub(super) removals: BTreeMap<PartitionId, Removal>,
    /// The next task's id.
    pub(super) task_next: u64,
    /// Replicas being made, by partition.
    pub(super) tasks: BTreeMap<PartitionId, Task>,
    /// Members of data partitions that have every acknowledged byte, if the group takes the newest configuration decided.
    pub(super) whole: BTreeMap<PartitionId, BTreeSet<NodeId>>,
    /// The newest life of each node; missing for one that has told of none yet.
    pub(super) lives: BTreeMap<NodeId, u128>,
    /// Data partitions whose newest configuration was decided instead of others, and the epoch that their groups
    /// were seen to have then.
    pub(super) replaced: BTreeMap<PartitionId, Epoch>,
    /// Of a data partition, who had every byte that had been acknowledged when others joined it as one of two, member or
    /// not any more; and those others, who are members still, and are not known to have all.
    pub(super) completes: BTreeMap<PartitionId, BTreeMap<NodeId, BTreeSet<NodeId>>>,
    /// Of a data partition whose survivor of two goes on alone: the other one, if it has everything as well. As long as
    /// nobody has joined, nothing is acknowledged.
    pub(super) other_of_two: BTreeMap<PartitionId, NodeId>,
    /// Of a data partition whose configuration has changed: those that its group may have instead of the newest one, the
    /// oldest first.
    pub(super) possible: BTreeMap<PartitionId, Vec<Possible>>,
}

impl State {
    /// The state before the first command.
    #[must_use]
    pub fn new(cluster: ClusterId) -> State {
        State {
            cluster,
            applied: 0,
            node_next: NODE_ID_FIRST,
            volume_next: 1,
            partition_next: 1,
            nodes_version: 0,
            nodes: BTreeMap::new(),
            volumes: BTreeMap::new(),
            meta: BTreeMap::new(),
            data: BTreeMap::new(),
            removals: BTreeMap::new(),
            task_next: 1,
            tasks: BTreeMap::new(),
            whole: BTreeMap::new(),
            lives: BTreeMap::new(),
            replaced: BTreeMap::new(),
            completes: BTreeMap::new(),
            other_of_two: BTreeMap::new(),
            possible: BTreeMap::new(),
        }
    }

    /// Applies the command that was committed at `index`. Commands up to the applied index are
    /// ignored, as after a restart the log offers some a second time.
    pub fn apply(&mut self, index: u64, command: &Command) -> Applied {
        if index <= self.applied {
            return Applied::Done;
        }
        self.applied = index;
        let Command::V1(command) = command;
        match command {
            CommandV1::Lead { .. } => Applied::Done,
            CommandV1::RegisterNode(registration) => self.register_node(registration, None),
            CommandV1::SetNodeState { node, state } => self.set_node_state(*node, *state),
            CommandV1::CreateVolume { name, options, meta, data } => {
                self.create_volume(name, options, meta, data)
            }
            CommandV1::VolumeReady { volume } => self.volume_ready(*volume),
            CommandV1::SetVolumeOptions { volume, options } => {
                self.set_volume_options(*volume, options)
            }
            CommandV1::OptionsTaken { volume, node, version } => {
                self.options_taken(*volume, *node, *version)
            }
            CommandV1::DeleteVolume { volume } => self.delete_volume(*volume),
            CommandV1::AddDataPartitions { volume, data } => {
                self.add_data_partitions(*volume, data)
            }
            CommandV1::BeginSplit { partition, end } => self.begin_split(*partition, *end),
            CommandV1::FinishSplit { partition, next } => self.finish_split(*partition, next),
            CommandV1::SetConfiguration { partition, configuration } => {
                self.set_configuration(*partition, configuration)
            }
            CommandV1::ReplicasCreated { replicas } => self.replicas_created(replicas),
            CommandV1::ReplicasRemoved { replicas } => self.replicas_removed(replicas),
            CommandV1::DrainNode { node, drains, begun_unix_ms } => {
                self.drain_node(*node, *drains, *begun_unix_ms)
            }
            CommandV1::DrainDisk { node, disk, drains, begun_unix_ms } => {
                self.drain_disk(*node, *disk, *drains, *begun_unix_ms)
            }
            CommandV1::RemoveNode { node } => self.remove_node(*node),
            CommandV1::BeginTask(new) => self.begin_task(new),
            CommandV1::EndTask { partition, id, done } => self.end_task(*partition, *id, *done),
            CommandV1::DropReplica { partition, node } => self.drop_replica(*partition, *node),
            CommandV1::SetMembers { partition, members } => self.set_members(*partition, members),
            CommandV1::MembersWhole { partitions } => self.members_whole(partitions),
            CommandV1::StartNode { registration, life } => {
                self.register_node(registration, Some(*life))
            }
            CommandV1::RenewLife { node, incarnation, life } => {
                self.renew_life(*node, *incarnation, *life)
            }
            CommandV1::ReplaceConfiguration { partition, configuration, adopted } => {
                self.replace_configuration(*partition, configuration, *adopted)
            }
        }
    }

    /// Counts an entry that is no command: a new leader's first one, or a change of members.
    pub fn skip(&mut self, index: u64) {
        self.applied = self.applied.max(index);
    }

    pub(super) fn take_partition_id(&mut self) -> PartitionId {
        let id = PartitionId(self.partition_next);
        self.partition_next += 1;
        id
    }

    /// The cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The log index of the last entry applied.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Raised whenever a node joins or moves.
    #[must_use]
    pub fn nodes_version(&self) -> u64 {
        self.nodes_version
    }

    /// Whether this id was ever given to a partition.
    #[must_use]
    pub fn was_given(&self, partition: PartitionId) -> bool {
        (1..self.partition_next).contains(&partition.0)
    }

    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeRecord> {
        self.nodes.get(&id)
    }

    /// All nodes in order of their ids.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.values()
    }

    /// A volume.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<&VolumeRecord> {
        self.volumes.get(&id)
    }

    /// A volume by its name.
    #[must_use]
    pub fn volume_by_name(&self, name: &str) -> Option<&VolumeRecord> {
        self.volumes.values().find(|volume| volume.name == name)
    }

    /// All volumes in order of their ids.
    pub fn volumes(&self) -> impl Iterator<Item = &VolumeRecord> {
        self.volumes.values()
    }

    /// A meta partition.
    #[must_use]
    pub fn meta_partition(&self, id: PartitionId) -> Option<&MetaRecord> {
        self.meta.get(&id)
    }

    /// All meta partitions in order of their ids; within a volume that is the order of slots.
    pub fn meta_partitions(&self) -> impl Iterator<Item = &MetaRecord> {
        self.meta.values()
    }

    /// The meta partitions of one volume, by slot.
    pub fn meta_of(&self, volume: VolumeId) -> impl Iterator<Item = &MetaRecord> {
        let ids = self.volumes.get(&volume).into_iter().flat_map(|volume| &volume.meta);
        ids.filter_map(|id| self.meta.get(id))
    }

    /// The data partitions of one volume.
    pub fn data_of(&self, volume: VolumeId) -> impl Iterator<Item = &DataRecord> {
        let ids = self.volumes.get(&volume).into_iter().flat_map(|volume| &volume.data);
        ids.filter_map(|id| self.data.get(id))
    }

    /// A data partition.
    #[must_use]
    pub fn data_partition(&self, id: PartitionId) -> Option<&DataRecord> {
        self.data.get(&id)
    }

    /// All data partitions in order of their ids.
    pub fn data_partitions(&self) -> impl Iterator<Item = &DataRecord> {
        self.data.values()
    }

    /// Partitions that are no more and whose replicas are not all gone.
    pub fn removals(&self) -> impl Iterator<Item = (PartitionId, &Removal)> {
        self.removals.iter().map(|(id, removal)| (*id, removal))
    }
}
