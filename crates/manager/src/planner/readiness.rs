//! What a volume still lacks before it can be used, and confirmation of what has come.

use milpa_types::{NodeId, PartitionId, VolumeId};

use super::{Plan, REPLICAS_PER_COMMAND, View};
use crate::core::{CommandV1, DataRecord, MetaRecord, SplitState, VolumeState};

/// One thing that a volume lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// Of which partition.
    pub partition: PartitionId,
    /// Who should have done it.
    pub node: NodeId,
    /// What.
    pub what: &'static str,
}

/// Plans the confirmation of new replicas and of volumes that have become usable.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    let created = newly_created(view);
    for replicas in created.chunks(REPLICAS_PER_COMMAND) {
        plan.commands.push(CommandV1::ReplicasCreated { replicas: replicas.to_vec() });
    }
    for volume in view.state.volumes() {
        match volume.state {
            VolumeState::Creating if lacking(view, volume.id).is_empty() => {
                plan.commands.push(CommandV1::VolumeReady { volume: volume.id });
            }
            VolumeState::Creating | VolumeState::Ready => {}
        }
    }
}

fn newly_created(view: View<'_>) -> Vec<(PartitionId, NodeId)> {
    let mut replicas = Vec::new();
    for record in view.state.meta_partitions() {
        let reported = view.loads.meta_reports(record).map(|(node, _)| node);
        replicas.extend(reported.filter(|n| !record.created.contains(n)).map(|n| (record.id, n)));
    }
    for record in view.state.data_partitions() {
        let reported = view.loads.data_reports(record).map(|(node, _)| node);
        replicas.extend(reported.filter(|n| !record.created.contains(n)).map(|n| (record.id, n)));
    }
    replicas
}

/// All that a volume lacks: replicas on nodes that are heard, leaders, splits under way. Empty
/// means that a mount right now works.
#[must_use]
pub fn lacking(view: View<'_>, volume: VolumeId) -> Vec<Lacking> {
    let mut lacking = Vec::new();
    for record in view.state.meta_of(volume) {
        lacking.extend(meta_lacking(view, record));
    }
    for record in view.state.data_of(volume) {
        lacking.extend(data_lacking(view, record));
    }
    lacking
}

fn meta_lacking(view: View<'_>, record: &MetaRecord) -> Option<Lacking> {
    let partition = record.id;
    let has = |node: &NodeId| view.loads.meta_reports(record).any(|(holder, _)| holder == *node);
    let first = record.members.first().copied().unwrap_or_default();
    if let Some(node) = record.members.iter().find(|node| is_active(view, **node) && !has(node)) {
        return Some(Lacking { partition, node: *node, what: "its replica is not there yet" });
    }
    // The leader itself must say so: others may still name one that is gone.
    let is_led = view.loads.meta_reports(record).any(|(node, report)| report.leader == Some(node));
    if !is_led {
        return Some(Lacking { partition, node: first, what: "no replica leads yet" });
    }
    match record.split {
        SplitState::Cutting { .. } => {
            let node = view.loads.meta_leader(record).unwrap_or(first);
            Some(Lacking { partition, node, what: "its range is not cut off yet" })
        }
        SplitState::Open | SplitState::Cut { .. } => None,
    }
}

fn data_lacking(view: View<'_>, record: &DataRecord) -> Option<Lacking> {
    let partition = record.id;
    let has = |node: NodeId| view.loads.data_reports(record).any(|(holder, _)| holder == node);
    let members = &record.configuration.members;
    if let Some(node) = members.iter().find(|node| is_active(view, **node) && !has(**node)) {
        return Some(Lacking { partition, node: *node, what: "its replica is not there yet" });
    }
    let is_led = view.loads.data_reports(record).any(|(node, report)| report.leader == Some(node));
    let node = record.configuration.primary;
    (!is_led).then_some(Lacking { partition, node, what: "no replica leads yet" })
}

fn is_active(view: View<'_>, node: NodeId) -> bool {
    view.state.node(node).is_some_and(|node| node.state.is_heard())
}
