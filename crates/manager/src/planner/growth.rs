//! Volumes that are nearly full: more data partitions (CFS 2.3.1), splits of meta partitions
//! (CFS 2.3.2, Algorithm 1).
//!
//! In CFS only the last meta partition of a volume takes new inodes. Here several do, each in its
//! own range of 2^40 ids (DESIGN.md section 4), so each open one is watched: past the threshold it
//! is cut off and one new slot opens, which keeps the number of open ones.

use milpa_types::{Disk, InodeId, ManagerError, MetaSlot, NodeId, NodeState, PartitionId, Role};

use super::place::{has_room, place_many};
use super::{Plan, View};
use crate::core::{
    CommandV1, DataRecord, MEMBERS_MIN, MetaRecord, NewDataPartition, NewMetaPartition, SplitState,
    VolumeRecord, VolumeState,
};

/// Plans new data partitions and splits for all volumes.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    for volume in view.state.volumes() {
        match volume.state {
            VolumeState::Ready => {}
            VolumeState::Creating => continue,
        }
        if needs_data_partitions(view, volume) {
            let count = view.policy.data_partitions_growth as usize;
            match add_data_partitions(view, volume, count) {
                Ok(command) => plan.commands.push(command),
                Err(error) => {
                    plan.problems.push(format!(
                        "volume {:?} or its disks are nearly full, or lost: {error}",
                        volume.name
                    ));
                }
            }
        }
        plan.commands.extend(next_split(view, volume));
    }
}

/// Whether all partitions of a volume are nearly full, on a disk that is, or lost, and none is on its way.
fn needs_data_partitions(view: View<'_>, volume: &VolumeRecord) -> bool {
    view.state.data_of(volume.id).all(|record| {
        let is_filled = || is_filled_to(view, record, view.policy.nearly_full_percent);
        let is_there = || view.loads.adopted(record).is_some();
        stands_still(view, record) || is_there() && (is_filled() || is_on_full_disk(view, record))
    })
}

/// Whether too many members are dead for a data partition to take anything: it is none that a volume has room in.
#[must_use]
pub fn stands_still(view: View<'_>, record: &DataRecord) -> bool {
    let members = &view.loads.configuration(record).members;
    let is_alive = |node: &&NodeId| {
        view.state
            .node(**node)
            .is_some_and(|node| !node.is_removed && node.state != NodeState::Dead)
    };
    let alive = members.iter().filter(is_alive).count();
    alive < MEMBERS_MIN || alive * 2 <= members.len()
}

/// Whether a data partition is filled to this share of its target, in bytes or in extents.
#[must_use]
pub fn is_filled_to(view: View<'_>, record: &DataRecord, percent: u8) -> bool {
    let (bytes, extents) = view.loads.data_filling(record);
    let reached =
        |used: u64, limit: u64| u128::from(used) * 100 >= u128::from(limit) * u128::from(percent);
    reached(bytes, view.policy.data_partition_bytes)
        || reached(extents, view.policy.data_partition_extents_max)
}

/// Whether a disk that serves has no room for more of a data partition. (One that failed is replaced.)
fn is_on_full_disk(view: View<'_>, record: &DataRecord) -> bool {
    disks_of(view, record).any(|disk| disk.fenced.is_none() && !has_room(view.policy, disk))
}

/// Whether a data partition's disks all have room.
#[must_use]
pub fn has_disk_room(view: View<'_>, record: &DataRecord) -> bool {
    disks_of(view, record).all(|disk| has_room(view.policy, disk))
}

/// The members' disks, as last reported.
fn disks_of<'a>(view: View<'a>, record: &'a DataRecord) -> impl Iterator<Item = &'a Disk> {
    view.loads.configuration(record).members.iter().filter_map(move |member| {
        let disk = record.disk_of(*member)?;
        let disks = view.loads.disks(view.state.node(*member)?);
        disks.iter().find(|candidate| candidate.id == disk)
    })
}

/// A command that adds data partitions to a volume.
///
/// # Errors
///
/// [`ManagerError::NoPlacement`].
pub fn add_data_partitions(
    view: View<'_>,
    volume: &VolumeRecord,
    count: usize,
) -> Result<CommandV1, ManagerError> {
    let replicas = usize::from(volume.options.replicas);
    let placed = place_many(view, Role::Data, replicas, count)?;
    let data = placed.into_iter().map(|replicas| NewDataPartition { replicas }).collect();
    Ok(CommandV1::AddDataPartitions { volume: volume.id, data })
}

/// Places the meta partitions of a new volume, or the next one of a split.
///
/// # Errors
///
/// [`ManagerError::NoPlacement`].
pub fn new_meta_partitions(
    view: View<'_>,
    count: usize,
) -> Result<Vec<NewMetaPartition>, ManagerError> {
    let replicas = usize::from(view.policy.meta_replicas);
    let placed = place_many(view, Role::Meta, replicas, count)?;
    let members = |replicas: Vec<crate::core::Replica>| NewMetaPartition {
        members: replicas.iter().map(|replica| replica.node).collect(),
    };
    Ok(placed.into_iter().map(members).collect())
}

/// The open partition to cut next, if one is past the threshold and no other is being cut.
fn next_split(view: View<'_>, volume: &VolumeRecord) -> Option<CommandV1> {
    let mut fullest: Option<(u64, &MetaRecord)> = None;
    for record in view.state.meta_of(volume.id) {
        match record.split {
            SplitState::Cutting { .. } => return None,
            SplitState::Cut { .. } => continue,
            SplitState::Open => {}
        }
        let Some(report) = view.loads.meta_newest(record) else { continue };
        let entries = report.statistics.inodes.saturating_add(report.statistics.dentries);
        if entries > volume.options.meta_partition_entries_max
            && fullest.is_none_or(|(most, _)| entries > most)
        {
            fullest = Some((entries, record));
        }
    }
    let (_, record) = fullest?;
    Some(begin_split(view, record))
}

/// Cuts a meta partition off above the highest id heard of, plus a generous delta.
#[must_use]
pub fn begin_split(view: View<'_>, record: &MetaRecord) -> CommandV1 {
    let highest = (view.loads.meta_reports(record))
        .map(|(_, report)| report.statistics.inode_highest)
        .max()
        .unwrap_or_default()
        .max(record.slot.first_inode());
    let last = InodeId(record.slot.end_inode().0 - 1);
    let end = InodeId(highest.0.saturating_add(view.policy.split_delta_inodes)).min(last);
    CommandV1::BeginSplit { partition: record.id, end }
}

/// The open meta partitions of a volume, the last slot first: what an operator may have split.
#[must_use]
pub fn open_partitions(view: View<'_>, volume: &VolumeRecord) -> Vec<PartitionId> {
    let mut open: Vec<(MetaSlot, PartitionId)> = view
        .state
        .meta_of(volume.id)
        .filter(|record| record.split == SplitState::Open)
        .map(|record| (record.slot, record.id))
        .collect();
    open.sort_unstable_by(|a, b| b.cmp(a));
    open.into_iter().map(|(_, id)| id).collect()
}

/// The second step of a split, once the partition has agreed to its end.
///
/// # Errors
///
/// [`ManagerError::NoPlacement`]; the split stays half done and is tried again.
pub fn finish_split(view: View<'_>, partition: PartitionId) -> Result<CommandV1, ManagerError> {
    let mut placed = new_meta_partitions(view, 1)?;
    let next = placed.pop().unwrap_or(NewMetaPartition { members: Vec::new() });
    Ok(CommandV1::FinishSplit { partition, next })
}
