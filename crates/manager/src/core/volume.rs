//! Volumes: creation with all partitions at once, options, growth, deletion.
//!
//! ```text
//! state      event                                      next
//! (none)     CreateVolume                               Creating
//! Creating   all partitions exist and are led           Ready
//! Creating   DeleteVolume                               (none), partitions in removal
//! Ready      DeleteVolume                               (none), partitions in removal
//! ```

use std::collections::BTreeSet;

use milpa_types::{
    Epoch, ManagerError, MetaSlot, NodeId, PartitionId, Role, Volume, VolumeId, VolumeOptions,
    is_volume_name,
};
use milpa_wire::data::Configuration;
use serde::{Deserialize, Serialize};

use super::command::{Applied, NewDataPartition, NewMetaPartition};
use super::partition::{DataRecord, MEMBERS_MIN, stale};
use super::state::State;

/// Most volumes of one cluster.
const VOLUMES_MAX: usize = 10_000;
/// Most partitions of each kind that one command may create: it must fit into a log entry.
pub const PARTITIONS_PER_COMMAND_MAX: usize = 4096;

/// How far a volume has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeState {
    /// Its partitions are being created on the nodes; it cannot be mounted yet.
    Creating,
    /// It can be used.
    Ready,
}

/// A volume as it shall be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Given here, never reused.
    pub id: VolumeId,
    /// Unique among the volumes that exist.
    pub name: String,
    /// Its owner's choices.
    pub options: VolumeOptions,
    /// Raised at every change of the options.
    pub options_version: u64,
    /// Meta and data nodes that have not yet confirmed the newest options.
    pub options_untold: BTreeSet<NodeId>,
    /// How far it has come.
    pub state: VolumeState,
    /// Its meta partitions, by slot.
    pub meta: Vec<PartitionId>,
    /// Its data partitions.
    pub data: Vec<PartitionId>,
}

impl VolumeRecord {
    /// The record as callers see it.
    #[must_use]
    pub fn describe(&self) -> Volume {
        Volume { id: self.id, name: self.name.clone(), options: self.options.clone() }
    }
}

impl State {
    pub(super) fn create_volume(
        &mut self,
        name: &str,
        options: &VolumeOptions,
        meta: &[NewMetaPartition],
        data: &[NewDataPartition],
    ) -> Applied {
        if self.volume_by_name(name).is_some() {
            return Applied::Refused(ManagerError::VolumeExists { name: name.to_owned() });
        }
        let problems = volume_problems(name, options, meta.len(), data.len());
        if !problems.is_empty() {
            return Applied::Refused(ManagerError::Invalid { problems });
        }
        if self.volumes.len() >= VOLUMES_MAX {
            return stale("the cluster has too many volumes");
        }
        let checked = (meta.iter().try_for_each(|new| self.check_new_members(new)))
            .and_then(|()| data.iter().try_for_each(|new| self.check_new_replicas(new)));
        if let Err(reason) = checked {
            return stale(&reason);
        }
        let id = VolumeId(self.volume_next);
        self.volume_next += 1;
        let record = VolumeRecord {
            id,
            name: name.to_owned(),
            options: options.clone(),
            options_version: 1,
            options_untold: BTreeSet::new(),
            state: VolumeState::Creating,
            meta: Vec::new(),
            data: Vec::new(),
        };
        self.volumes.insert(id, record);
        for (slot, new) in (0..).map(MetaSlot).zip(meta) {
            self.add_meta_partition(id, slot, new);
        }
        for new in data {
            self.add_data_partition(id, new);
        }
        Applied::Volume(id)
    }

    pub(super) fn volume_ready(&mut self, volume: VolumeId) -> Applied {
        match self.volumes.get_mut(&volume) {
            Some(record) => {
                record.state = match record.state {
                    VolumeState::Creating | VolumeState::Ready => VolumeState::Ready,
                };
                Applied::Done
            }
            None => stale("the volume is gone"),
        }
    }

    pub(super) fn set_volume_options(
        &mut self,
        volume: VolumeId,
        options: &VolumeOptions,
    ) -> Applied {
        let mut members: BTreeSet<NodeId> =
            self.meta_of(volume).flat_map(|partition| partition.members.iter().copied()).collect();
        let data = self.data.values().filter(|partition| partition.volume == volume);
        members.extend(data.flat_map(|partition| partition.replicas.iter().map(|r| r.node)));
        let Some(record) = self.volumes.get_mut(&volume) else {
            return stale("the volume is gone");
        };
        let mut problems = options.validate().err().unwrap_or_default();
        if options.replicas != record.options.replicas {
            let present = record.options.replicas;
            problems
                .push(format!("replicas: {present} since the volume was created, cannot change"));
        }
        if !problems.is_empty() {
            return Applied::Refused(ManagerError::Invalid { problems });
        }
        if record.options != *options {
            record.options = options.clone();
            record.options_version += 1;
            record.options_untold = members;
        }
        Applied::Volume(volume)
    }

    pub(super) fn options_taken(
        &mut self,
        volume: VolumeId,
        node: NodeId,
        version: u64,
    ) -> Applied {
        if let Some(record) = self.volumes.get_mut(&volume)
            && record.options_version == version
        {
            record.options_untold.remove(&node);
        }
        Applied::Done
    }

    pub(super) fn delete_volume(&mut self, volume: VolumeId) -> Applied {
        let Some(record) = self.volumes.remove(&volume) else { return stale("the volume is gone") };
        self.remove_partitions(&record);
        Applied::Done
    }

    pub(super) fn add_data_partitions(
        &mut self,
        volume: VolumeId,
        data: &[NewDataPartition],
    ) -> Applied {
        if !self.volumes.contains_key(&volume) {
            return stale("the volume is gone");
        }
        if data.is_empty() || data.len() > PARTITIONS_PER_COMMAND_MAX {
            return stale("too many partitions at once, or none");
        }
        if let Err(reason) = data.iter().try_for_each(|new| self.check_new_replicas(new)) {
            return stale(&reason);
        }
        Applied::Partitions(data.iter().map(|new| self.add_data_partition(volume, new)).collect())
    }

    fn add_data_partition(&mut self, volume: VolumeId, new: &NewDataPartition) -> PartitionId {
        let id = self.take_partition_id();
        let members: Vec<NodeId> = new.replicas.iter().map(|replica| replica.node).collect();
        let primary = members.first().copied().unwrap_or_default();
        let configuration =
            Configuration { epoch: Epoch(1), members, primary, learners: Vec::new() };
        let (replicas, created) = (new.replicas.clone(), BTreeSet::new());
        // They take part in every append that is acknowledged, from the first one on.
        self.whole.insert(id, configuration.members.iter().copied().collect());
        self.data.insert(id, DataRecord { id, volume, replicas, created, configuration });
        if let Some(record) = self.volumes.get_mut(&volume) {
            record.data.push(id);
        }
        id
    }

    pub(super) fn check_new_members(&self, new: &NewMetaPartition) -> Result<(), String> {
        self.check_nodes(&new.members, Role::Meta)
    }

    fn check_new_replicas(&self, new: &NewDataPartition) -> Result<(), String> {
        let nodes: Vec<NodeId> = new.replicas.iter().map(|replica| replica.node).collect();
        self.check_nodes(&nodes, Role::Data)?;
        if nodes.len() < MEMBERS_MIN {
            return Err(format!("{} replicas, {MEMBERS_MIN} are needed", nodes.len()));
        }
        for replica in &new.replicas {
            let node = self.nodes.get(&replica.node);
            if !node.is_some_and(|node| node.disks.iter().any(|disk| disk.id == replica.disk)) {
                return Err(format!("node {} has no disk {}", replica.node, replica.disk));
            }
        }
        Ok(())
    }

    fn check_nodes(&self, nodes: &[NodeId], role: Role) -> Result<(), String> {
        let distinct: BTreeSet<&NodeId> = nodes.iter().collect();
        if nodes.is_empty() || distinct.len() != nodes.len() {
            return Err("no replicas, or two on one node".to_owned());
        }
        for id in nodes {
            if self.nodes.get(id).is_none_or(|node| node.role != role) {
                return Err(format!("node {id} is not a {role} node"));
            }
        }
        Ok(())
    }
}

/// Everything wrong with a new volume, one line each.
pub(crate) fn volume_problems(
    name: &str,
    options: &VolumeOptions,
    meta_count: usize,
    data_count: usize,
) -> Vec<String> {
    let mut problems = options.validate().err().unwrap_or_default();
    if !is_volume_name(name) {
        problems.push(format!("name: {name:?}, allowed are 1 to 64 of a-z 0-9 - _"));
    }
    let counts = [("meta_partitions", meta_count), ("data_partitions", data_count)];
    for (field, count) in counts {
        if count == 0 || count > PARTITIONS_PER_COMMAND_MAX {
            let max = PARTITIONS_PER_COMMAND_MAX;
            problems.push(format!("{field}: value is {count}, allowed 1 to {max}"));
        }
    }
    problems
}
