//! Whether a node can be removed: what the agreed state says, and what the groups of meta partitions do. They
//! are told of other members, and count on the old ones until they have taken them over.

use milpa_types::{ManagerError, NodeId, PartitionId, Role};
use milpa_wire::meta::MetaPartitionReport;

use super::View;
use super::members::{leader_report, takes_part};
use super::repair::{can_serve, holds};
use crate::core::{MEMBERS_MIN, MetaRecord};

/// Meta partitions that are to have other members than this node, and whose groups may not know it yet: what counts is
/// what the leader says of its voters, and without a leader nobody can say.
pub fn counted_on(view: View<'_>, node: NodeId) -> impl Iterator<Item = PartitionId> {
    let may_count = move |record: &&MetaRecord| {
        let is_decided = record.joining != Some(node) && !record.members.contains(&node);
        let says_no = |(_, report): (NodeId, &MetaPartitionReport)| !report.voters.contains(&node);
        is_decided && !leader_report(view, record).is_some_and(says_no)
    };
    let is_meta = view.state.node(node).is_some_and(|known| known.role == Role::Meta);
    let records = view.state.meta_partitions().filter(move |_| is_meta);
    records.filter(may_count).map(|record| record.id)
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
    for record in view.state.meta_partitions().filter(|record| record.members.contains(&node)) {
        check_voters(view, record, node)?;
    }
    match counted_on(view, node).next() {
        None => Ok(()),
        Some(partition) => Err(ManagerError::Refused {
            reason: format!(
                "meta partition {partition} has not taken over its new members yet, or has no leader to \
                 say so, and may still count on node {node}: repeat this when it has"
            ),
        }),
    }
}

/// Whether a group has a majority without one of its members: what its leader says, of whom is there and has the replica. The
/// state knows only whose node is heard.
fn check_voters(view: View<'_>, record: &MetaRecord, node: NodeId) -> Result<(), ManagerError> {
    let refuse = |reason: String| Err(ManagerError::Refused { reason });
    let Some(lead) = leader_report(view, record) else {
        return refuse(format!(
            "meta partition {} has no leader and may need node {node}: bring back one of its nodes first",
            record.id
        ));
    };
    let voters = &lead.1.voters;
    let serves = |voter: &&NodeId| **voter != node && takes_part(view, record, lead, **voter);
    let (left, all) = (voters.iter().filter(serves).count(), voters.len());
    if left * 2 > all {
        return Ok(());
    }
    refuse(format!(
        "meta partition {} has {left} of {all} voters in service without node {node}, and needs {}: bring back one of its \
         nodes first, or wait until it is repaired",
        record.id,
        all / 2 + 1,
    ))
}
