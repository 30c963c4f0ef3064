//! Whether a node or a disk can be emptied, before an operator's word is taken.

use milpa_types::{DiskId, ManagerError, NodeId, Role};

use super::View;
use super::health::{data_place, meta_place};
use super::place::{Topology, offers};
use crate::core::unknown_node;

/// Looks for a place for every replica that would have to move.
///
/// # Errors
///
/// [`ManagerError::Refused`] for a node or disk that is not there, [`ManagerError::NoPlacement`]
/// with the rule and the shortage.
pub fn check(view: View<'_>, node: NodeId, disk: Option<DiskId>) -> Result<(), ManagerError> {
    let refuse = |reason: String| Err(ManagerError::Refused { reason });
    let Some(known) = view.state.node(node) else {
        return Err(unknown_node(node));
    };
    if let Some(disk) = disk
        && (known.role != Role::Data || !known.disks.iter().any(|found| found.id == disk))
    {
        return refuse(format!("node {node} has no disk {disk}"));
    }
    let mut topology = Topology::of(view, known.role);
    topology.candidates.retain(|candidate| candidate.node != node);
    topology.excluded.push(format!("node {node} is to be emptied"));
    let choices = view.policy.choices as usize;
    let mut place = |what: String, held: &[NodeId], kept: &[NodeId], seed: u64| match offers(
        &topology,
        (held, kept),
        choices,
        seed,
        |_| true,
    ) {
        Ok(offers) => {
            let best = offers.first().map(|best| best.place);
            topology.count(best.as_slice(), None);
            Ok(best.map(|best| best.node))
        }
        Err(shortage) => Err(ManagerError::NoPlacement {
            wanted: format!("another replica of {what}"),
            shortage: shortage.to_string(),
        }),
    };
    for record in view.state.data_partitions() {
        if record.disk_of(node).is_none_or(|there| disk.is_some_and(|disk| disk != there)) {
            continue;
        }
        let held: Vec<NodeId> = record.replicas.iter().map(|place| place.node).collect();
        let stays = |other: &&NodeId| **other != node && data_place(view, record, **other).counts();
        let kept: Vec<NodeId> = held.iter().filter(stays).copied().collect();
        place(format!("data partition {}", record.id), &held, &kept, record.id.0)?;
    }
    for record in view.state.meta_partitions().filter(|record| record.members.contains(&node)) {
        // Who joins is one more, and takes nobody's place, if there are too few.
        let mut held: Vec<NodeId> = record.members.iter().copied().chain(record.joining).collect();
        let stays = |other: &&NodeId| **other != node && meta_place(view, record, **other).counts();
        let mut kept: Vec<NodeId> = held.iter().filter(stays).copied().collect();
        while kept.len() < usize::from(view.policy.meta_replicas) {
            let what = format!("meta partition {}", record.id);
            let Some(found) = place(what, &held, &kept, record.id.0)? else { break };
            held.push(found);
            kept.push(found);
        }
    }
    Ok(())
}
