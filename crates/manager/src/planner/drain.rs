//! Whether a node or a disk can be emptied, before an operator's word is taken.

use milpa_types::{DiskId, ManagerError, NodeId, Role};

use super::View;
use super::health::{data_place, meta_place};
use super::place::{Topology, offers};
use super::replace::target;
use crate::core::unknown_node;

/// Looks for places until every partition has as many without the node as it should have: who is being made already is
/// one of them, and takes nobody's place.
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
    let mut fill = |what: String, mut held: Vec<NodeId>, mut kept: Vec<NodeId>, target, seed| {
        while kept.len() < target {
            let offers = offers(&topology, (&held, &kept), choices, seed, |_| true);
            let offers = offers.map_err(|shortage| ManagerError::NoPlacement {
                wanted: format!("another replica of {what}"),
                shortage: shortage.to_string(),
            })?;
            let Some(best) = offers.first().map(|best| best.place) else { break };
            topology.count(&[best], None);
            held.push(best.node);
            kept.push(best.node);
        }
        Ok(())
    };
    for record in view.state.data_partitions() {
        if record.disk_of(node).is_none_or(|there| disk.is_some_and(|disk| disk != there)) {
            continue;
        }
        let held: Vec<NodeId> = record.replicas.iter().map(|place| place.node).collect();
        let stays = |other: &&NodeId| **other != node && data_place(view, record, **other).counts();
        let kept = held.iter().filter(stays).copied().collect();
        let what = format!("data partition {}", record.id);
        fill(what, held, kept, target(view, record), record.id.0)?;
    }
    for record in view.state.meta_partitions().filter(|record| record.members.contains(&node)) {
        let held: Vec<NodeId> = record.members.iter().copied().chain(record.joining).collect();
        let stays = |other: &&NodeId| **other != node && meta_place(view, record, **other).counts();
        let kept = held.iter().filter(stays).copied().collect();
        let what = format!("meta partition {}", record.id);
        fill(what, held, kept, usize::from(view.policy.meta_replicas), record.id.0)?;
    }
    Ok(())
}
