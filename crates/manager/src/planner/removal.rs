//! Whether a node can be removed: what the agreed state says, and what the groups of meta partitions do. They
//! are told of other members, and count on the old ones until they have taken them over.

use milpa_types::{ManagerError, NodeId, PartitionId, Role};
use milpa_wire::meta::MetaPartitionReport;

use super::View;
use super::members::leader_report;
use super::repair::{can_serve, holds};
use crate::core::MEMBERS_MIN;

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
    for record in view.state.data_partitions() {
        let members = &view.loads.configuration(record).members;
        let serves = |other: NodeId| holds(view, record, other) && can_serve(view, record, other);
        let left = members.iter().filter(|other| **other != node && serves(**other)).count();
        let is_too_few = left < MEMBERS_MIN || left * 2 <= members.len();
        if members.contains(&node) && is_too_few {
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
