//! Whether a node can be removed: what the agreed state says, and what the groups of meta partitions do. They
//! are told of other members, and count on the old ones until they have taken them over.

use milpa_types::{ManagerError, NodeId, PartitionId, Role};
use milpa_wire::meta::MetaPartitionReport;

use super::View;
use super::health::{Place, data_place};
use super::members::leader_report;
use crate::core::{DataRecord, MEMBERS_MIN, TaskReason};

/// Meta partitions that are to have other members than this node, and whose groups may not know it yet.
pub fn counted_on(view: View<'_>, node: NodeId) -> impl Iterator<Item = PartitionId> {
    let may_count = move |partition| {
        let record = view.state.meta_partition(partition)?;
        let is_decided = record.joining.is_none() && !record.members.contains(&node);
        let says_no = |(_, report): (NodeId, &MetaPartitionReport)| !report.voters.contains(&node);
        (is_decided && !leader_report(view, record).is_some_and(says_no)).then_some(partition)
    };
    let is_meta = view.state.node(node).is_some_and(|known| known.role == Role::Meta);
    // The task of a partition ends when its group has the members decided. One is taken out without a task.
    let target = usize::from(view.policy.meta_replicas);
    let changing = view.state.meta_partitions().filter(move |record| {
        is_meta && (record.members.len() < target || view.state.task(record.id).is_some())
    });
    changing.filter_map(move |record| may_count(record.id))
}

/// Whether a member has its replica, on a disk that works, whether or not it is to stay.
fn serves(view: View<'_>, record: &DataRecord, node: NodeId) -> bool {
    let is_draining =
        |reason| matches!(reason, TaskReason::NodeDraining(_) | TaskReason::DiskDraining(..));
    let (load, known) = (view.loads.report(node), view.state.node(node));
    let is_there = load.is_some_and(|load| load.data.contains_key(&record.id))
        && known.is_some_and(|known| known.state.is_heard());
    is_there
        && match data_place(view, record, node) {
            Place::Good => true,
            Place::Bad(reason) => is_draining(reason),
            Place::Coming | Place::Away | Place::Missing => false,
        }
}

/// Refuses to let go of a node that a group may need to make its change. The state is asked now too, not only
/// when the command is applied: a change of members that is decided in between would hide the node from it.
///
/// # Errors
///
/// [`ManagerError::Refused`] with what to do, or to wait for.
pub fn check(view: View<'_>, node: NodeId) -> Result<(), ManagerError> {
    if let Some(problem) = view.state.removal_problem(node) {
        return Err(problem);
    }
    for record in view.state.data_partitions().filter(|record| record.disk_of(node).is_some()) {
        let members = &view.loads.configuration(record).members;
        let stays = |other: &&NodeId| **other != node && serves(view, record, **other);
        let left = members.iter().filter(stays).count();
        if left < MEMBERS_MIN || left * 2 <= members.len() {
            return Err(ManagerError::Refused {
                reason: format!(
                    "data partition {} has {left} of {} copies in service without node {node}, and needs {}: bring \
                     back one of its nodes first, or wait until it is repaired",
                    record.id,
                    members.len(),
                    MEMBERS_MIN.max(members.len() / 2 + 1),
                ),
            });
        }
    }
    match counted_on(view, node).next() {
        None => Ok(()),
        Some(partition) => Err(ManagerError::Refused {
            reason: format!(
                "meta partition {partition} has not taken over its new members yet and may still \
                 count on node {node}: repeat this when `milpa task list` shows no task for it"
            ),
        }),
    }
}
