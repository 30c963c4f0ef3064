//! Partitions: where their replicas are, and the two-step split.
//!
//! ```text
//! SplitState   event                                    next
//! Open         BeginSplit (entries above the threshold) Cutting   tell the partition its end
//! Cutting      FinishSplit (the partition has agreed)   Cut       the next slot is open
//! Cut          (stays: it takes no new inodes for ever)
//! ```

use std::collections::BTreeSet;

use milpa_types::{DiskId, Epoch, InodeId, ManagerError, MetaSlot, NodeId, PartitionId, VolumeId};
use milpa_wire::data::Configuration;
use serde::{Deserialize, Serialize};

use super::command::{Applied, NewMetaPartition};
use super::state::State;
use super::volume::VolumeRecord;

/// Writing needs two copies: no configuration has fewer members, but that of a survivor, which takes no
/// writes.
pub const MEMBERS_MIN: usize = 2;

/// A place for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Replica {
    /// On which node.
    pub node: NodeId,
    /// On which of its disks.
    pub disk: DiskId,
}

/// How far Algorithm 1 has come with a meta partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SplitState {
    /// It takes new inodes.
    Open,
    /// The intent is committed; the partition may not know yet. To be told until it agrees.
    Cutting {
        /// The last inode id it may give.
        end: InodeId,
    },
    /// It has agreed, and the next slot is open.
    Cut {
        /// The last inode id it may give.
        end: InodeId,
    },
}

/// A meta partition as it shall be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaRecord {
    /// Id and Raft group.
    pub id: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// Which inode ids it owns.
    pub slot: MetaSlot,
    /// Its replicas; the first campaigned at the start.
    pub members: Vec<NodeId>,
    /// A new replica that learns what the members know, to become one of them.
    pub joining: Option<NodeId>,
    /// Replicas that were reported once. One that is missing later was lost.
    pub created: BTreeSet<NodeId>,
    /// Whether it was split.
    pub split: SplitState,
}

/// A data partition as it shall be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRecord {
    /// Id and Raft group.
    pub id: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// All places for copies; members or not.
    pub replicas: Vec<Replica>,
    /// Replicas that were reported once.
    pub created: BTreeSet<NodeId>,
    /// The newest configuration decided. The partition's group may be one step behind.
    pub configuration: Configuration,
}

impl DataRecord {
    /// The disk of this node's replica.
    #[must_use]
    pub fn disk_of(&self, node: NodeId) -> Option<DiskId> {
        self.replicas.iter().find(|replica| replica.node == node).map(|replica| replica.disk)
    }

    /// Whether a node is a member or learner of the newest configuration decided.
    #[must_use]
    pub fn is_configured(&self, node: NodeId) -> bool {
        let Configuration { members, learners, .. } = &self.configuration;
        members.contains(&node) || learners.contains(&node)
    }
}

/// Whose partition a replica is, for its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PartitionKind {
    /// Held by meta nodes.
    Meta,
    /// Held by data nodes.
    Data,
}

/// A partition that is no more, and where replicas of it may still be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Which kind of node holds it.
    pub kind: PartitionKind,
    /// Nodes that have not yet confirmed. One that is away confirms when it is back.
    pub nodes: BTreeSet<NodeId>,
}

impl State {
    pub(super) fn add_meta_partition(
        &mut self,
        volume: VolumeId,
        slot: MetaSlot,
        new: &NewMetaPartition,
    ) -> PartitionId {
        let id = self.take_partition_id();
        let members = new.members.clone();
        let (created, split) = (BTreeSet::new(), SplitState::Open);
        let joining = None;
        self.meta.insert(id, MetaRecord { id, volume, slot, members, joining, created, split });
        if let Some(record) = self.volumes.get_mut(&volume) {
            record.meta.push(id);
        }
        id
    }

    pub(super) fn begin_split(&mut self, partition: PartitionId, end: InodeId) -> Applied {
        let Some(record) = self.meta.get_mut(&partition) else { return stale("partition is gone") };
        match record.split {
            SplitState::Open if end.slot() == record.slot => {
                record.split = SplitState::Cutting { end };
                Applied::Done
            }
            SplitState::Open => stale("the end lies outside the partition's range"),
            SplitState::Cutting { .. } | SplitState::Cut { .. } => stale("already split"),
        }
    }

    pub(super) fn finish_split(
        &mut self,
        partition: PartitionId,
        next: &NewMetaPartition,
    ) -> Applied {
        let Some(record) = self.meta.get(&partition) else { return stale("partition is gone") };
        let volume = record.volume;
        let SplitState::Cutting { end } = record.split else { return stale("not being split") };
        if let Err(reason) = self.check_new_members(next) {
            return stale(&reason);
        }
        let Some(last) = self.meta_of(volume).map(|other| other.slot).max() else {
            return stale("no slots");
        };
        if let Some(record) = self.meta.get_mut(&partition) {
            record.split = SplitState::Cut { end };
        }
        let id = self.add_meta_partition(volume, MetaSlot(last.0 + 1), next);
        Applied::Partitions(vec![id])
    }

    pub(super) fn set_configuration(
        &mut self,
        partition: PartitionId,
        configuration: &Configuration,
    ) -> Applied {
        self.decide(partition, configuration, None)
    }

    /// `adopted` is given for a configuration that is decided instead of others: the epoch that the group has. Who may
    /// go on alone is the planner's to say: two managers need not have noted the same of who has what, as they came to a
    /// new program at different points of their log.
    fn decide(
        &mut self,
        partition: PartitionId,
        configuration: &Configuration,
        adopted: Option<Epoch>,
    ) -> Applied {
        let Some(record) = self.data.get(&partition) else { return stale("partition is gone") };
        let members: BTreeSet<NodeId> = configuration.members.iter().copied().collect();
        let holds = |node: &NodeId| record.replicas.iter().any(|replica| replica.node == *node);
        if configuration.epoch.0 != record.configuration.epoch.0 + 1 {
            return stale("another configuration came first");
        }
        let learners = &configuration.learners;
        let present = &record.configuration.members;
        let is_survivor = members.iter().all(|node| present.contains(node));
        let goes_on_instead = (present.len(), members.len()) == (1, 1);
        if members.len() != configuration.members.len()
            || members.len() < MEMBERS_MIN && !is_survivor && !goes_on_instead
            || learners.len() > 1
            || !members.contains(&configuration.primary)
            || !members.iter().chain(learners).all(holds)
            || learners.iter().any(|learner| members.contains(learner))
        {
            return stale("not a configuration of this partition");
        }
        let before = record.configuration.clone();
        self.note_other_of_two(partition, &before, configuration);
        self.note_holders(partition, before, configuration, adopted);
        if let Some(record) = self.data.get_mut(&partition) {
            record.configuration = configuration.clone();
        }
        if self.replaced.remove(&partition).is_some() {
            // Which the group may have taken, with a third one in it.
            self.other_of_two.remove(&partition);
        }
        if let Some(adopted) = adopted {
            self.replaced.insert(partition, adopted);
        }
        Applied::Done
    }

    /// The word for a survivor of two stands: the other one must not go on as well (docs/decisions/0007).
    pub(super) fn replace_configuration(
        &mut self,
        partition: PartitionId,
        configuration: &Configuration,
        adopted: Epoch,
    ) -> Applied {
        let decided = self.data.get(&partition).map(|record| &record.configuration);
        if decided.is_none_or(|decided| decided.members.len() < MEMBERS_MIN) {
            return stale("no configuration that can be replaced");
        }
        self.decide(partition, configuration, Some(adopted))
    }

    /// Whether the newest configuration was decided instead of others, which some may have taken.
    #[must_use]
    pub fn has_replaced(&self, record: &DataRecord) -> bool {
        self.replaced.contains_key(&record.id)
    }

    /// What the group of a data partition had when its newest configuration was decided. Reports of older ones are
    /// of members that have not heard of it, and say nothing of the group.
    #[must_use]
    pub fn decided_upon(&self, record: &DataRecord) -> Epoch {
        let before = Epoch(record.configuration.epoch.0.saturating_sub(1));
        self.replaced.get(&record.id).copied().unwrap_or(before)
    }

    pub(super) fn replicas_created(&mut self, replicas: &[(PartitionId, NodeId)]) -> Applied {
        for (partition, node) in replicas {
            if let Some(record) = self.meta.get_mut(partition)
                && (record.members.contains(node) || record.joining == Some(*node))
            {
                record.created.insert(*node);
            }
            if let Some(record) = self.data.get_mut(partition)
                && record.disk_of(*node).is_some()
            {
                record.created.insert(*node);
            }
        }
        Applied::Done
    }

    pub(super) fn replicas_removed(&mut self, replicas: &[(PartitionId, NodeId)]) -> Applied {
        for (partition, node) in replicas {
            let Some(removal) = self.removals.get_mut(partition) else { continue };
            removal.nodes.remove(node);
            if removal.nodes.is_empty() {
                self.removals.remove(partition);
            }
        }
        Applied::Done
    }

    /// Moves a volume's partitions to the removals.
    pub(super) fn remove_partitions(&mut self, volume: &VolumeRecord) {
        for id in &volume.meta {
            let Some(record) = self.meta.remove(id) else { continue };
            self.end_tasks_of(*id);
            let nodes = record.members.into_iter().chain(record.joining).collect();
            self.removals.insert(*id, Removal { kind: PartitionKind::Meta, nodes });
        }
        for id in &volume.data {
            let Some(record) = self.data.remove(id) else { continue };
            self.forget_holders(*id);
            self.replaced.remove(id);
            self.end_tasks_of(*id);
            let nodes = record.replicas.into_iter().map(|replica| replica.node).collect();
            self.removals.insert(*id, Removal { kind: PartitionKind::Data, nodes });
        }
        self.forget_removed();
    }

    /// A node that is no more confirms nothing.
    pub(super) fn forget_removals_on(&mut self, node: NodeId) {
        for removal in self.removals.values_mut() {
            removal.nodes.remove(&node);
        }
        self.removals.retain(|_, removal| !removal.nodes.is_empty());
    }
}

pub(super) fn stale(reason: &str) -> Applied {
    let problems = vec![format!("the decision is out of date: {reason}")];
    Applied::Refused(ManagerError::Invalid { problems })
}
