//! What a place for a copy is worth now: the table that repair, moves and drops rest on.
//!
//! | place | counts as a copy | what happens |
//! |---|---|---|
//! | [`Good`](Place::Good) | yes | |
//! | [`Coming`](Place::Coming) | will | its node is asked to make the replica |
//! | [`Away`](Place::Away) | once its node is back, or fast again | waited for, until the node counts as dead |
//! | [`Missing`](Place::Missing) | no | made again, at the same place |
//! | [`Bad`](Place::Bad) | no, though it may still serve | replaced at another place, then dropped |

use milpa_types::{DiskId, NodeId, NodeState, PartitionId};

use super::View;
use super::repair::{has_lost_replica, is_spared, was_created};
use crate::core::{DataRecord, MetaRecord, NodeRecord, TaskReason};

/// See the module's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In service, and to stay.
    Good,
    /// Never reported yet.
    Coming,
    /// Its node is silent, or so slow that the partition goes on without it.
    Away,
    /// Its node works, but has lost it.
    Missing,
    /// To be replaced.
    Bad(TaskReason),
}

impl Place {
    /// Whether nothing need be made instead of it.
    #[must_use]
    pub fn counts(self) -> bool {
        matches!(self, Place::Good | Place::Coming | Place::Away)
    }
}

/// The state of one place of a data partition.
#[must_use]
pub fn data_place(view: View<'_>, record: &DataRecord, node: NodeId) -> Place {
    let Some(known) = view.state.node(node) else { return Place::Bad(TaskReason::NodeDead(node)) };
    let disk = record.disk_of(node).unwrap_or_default();
    if let Some(reason) = node_reason(known).or_else(|| disk_reason(view, known, disk)) {
        return Place::Bad(reason);
    }
    match in_service(view, known, record.id, was_created(view, record, node)) {
        Place::Good if is_spared(view, record, node) => Place::Away,
        other => other,
    }
}

/// The state of one replica of a meta partition.
#[must_use]
pub fn meta_place(view: View<'_>, record: &MetaRecord, node: NodeId) -> Place {
    let Some(known) = view.state.node(node) else { return Place::Bad(TaskReason::NodeDead(node)) };
    if let Some(reason) = node_reason(known) {
        return Place::Bad(reason);
    }
    // It may have been damaged before it has said once that it is there.
    if known.state.is_heard() && view.loads.has_damaged_meta(node, record.id) {
        return Place::Bad(TaskReason::ReplicaLost(node));
    }
    match in_service(view, known, record.id, record.created.contains(&node)) {
        // Its vote is lost with it: under the same id it must not come back (RELIABILITY.md 4.6).
        Place::Missing => Place::Bad(TaskReason::ReplicaLost(node)),
        other => other,
    }
}

/// Whether a member is there, and stays: neither its node nor its disk is to go.
pub(super) fn is_to_stay(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let Some(known) = view.state.node(node) else { return false };
    let disk = record.disk_of(node).unwrap_or_default();
    node_reason(known).or_else(|| disk_reason(view, known, disk)).is_none()
}

/// Whether a node's server was set up anew: a newer node serves at its address, and what this one was does not
/// come back.
#[must_use]
pub fn is_replaced(view: View<'_>, node: &NodeRecord) -> bool {
    let is_newer = |other: &NodeRecord| other.id > node.id && other.address == node.address;
    let mut others = view.state.nodes().filter(|other| is_newer(other));
    !node.state.is_heard() && others.any(|other| other.state.is_heard())
}

fn node_reason(known: &NodeRecord) -> Option<TaskReason> {
    let node = known.id;
    if known.is_removed {
        return Some(TaskReason::NodeRemoved(node));
    }
    let drains = known.drain.is_some().then_some(TaskReason::NodeDraining(node));
    match known.state {
        NodeState::Dead => Some(TaskReason::NodeDead(node)),
        NodeState::Draining => Some(TaskReason::NodeDraining(node)),
        NodeState::Active | NodeState::Silent => drains,
    }
}

/// Why nothing is to stay on a disk, if that is so.
pub(super) fn disk_reason(view: View<'_>, known: &NodeRecord, disk: DiskId) -> Option<TaskReason> {
    let node = known.id;
    if known.disks_draining.contains_key(&disk) {
        return Some(TaskReason::DiskDraining(node, disk));
    }
    match view.loads.disks(known).iter().find(|candidate| candidate.id == disk) {
        Some(found) => found.fenced.as_ref().map(|_| TaskReason::DiskFenced(node, disk)),
        None => Some(TaskReason::DiskGone(node, disk)),
    }
}

fn in_service(view: View<'_>, known: &NodeRecord, id: PartitionId, is_created: bool) -> Place {
    if !known.state.is_heard() {
        Place::Away
    } else if !is_created {
        Place::Coming
    } else if has_lost_replica(view, known.id, id, is_created) {
        Place::Missing
    } else {
        Place::Good
    }
}

/// Whether every member holds what every other member holds: the primary, which compares them, says
/// so in the newest configuration decided.
#[must_use]
pub fn is_aligned(view: View<'_>, record: &DataRecord) -> bool {
    let primary = record.configuration.primary;
    let is_heard = view.state.node(primary).is_some_and(|node| node.state.is_heard());
    is_heard
        && view.loads.data_reports(record).any(|(node, report)| {
            node == primary && report.configuration == record.configuration && report.unaligned == 0
        })
}
