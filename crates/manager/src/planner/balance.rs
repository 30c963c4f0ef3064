//! Primaries and leaders move back to nodes that were away, one after the other.
//!
//! Planned only when nothing else is: a change of the primary ends the open extents of a partition,
//! so it waits until every partition is whole, and the next one until the last is whole again.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use milpa_types::{Epoch, NodeId, NodeState, Role};
use milpa_wire::data::Configuration;

use super::health::{Place, data_place, is_aligned};
use super::members;
use super::replace::target;
use super::room::has_room;
use super::{Plan, Step, View};
use crate::core::{CommandV1, DataRecord, MetaRecord};

/// Plans at most one move of a primary, and one of a leader.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    plan.commands.extend(primary(view));
    plan.steps.extend(leader(view));
}

/// Nodes of a role that have been in service for a while, with nothing counted yet.
fn settled(view: View<'_>, role: Role) -> Option<BTreeMap<NodeId, u64>> {
    let mut counts = BTreeMap::new();
    for node in view.state.nodes().filter(|node| node.role == role) {
        if node.state != NodeState::Active {
            continue;
        }
        // One that has just started may not have opened all its replicas.
        if view.loads.report(node.id)?.reporting_ms() < view.policy.silence_period_ms {
            return None;
        }
        counts.insert(node.id, 0);
    }
    Some(counts)
}

/// By how much one is ahead of another, if a move from it to there makes them more even.
fn lead(from: u64, to: u64) -> Option<u64> {
    from.checked_sub(to).filter(|lead| *lead >= 2)
}

fn primary(view: View<'_>) -> Option<CommandV1> {
    let mut counts = settled(view, Role::Data)?;
    for record in view.state.data_partitions() {
        if !is_settled(view, record) {
            return None;
        }
        *counts.get_mut(&record.configuration.primary)? += 1;
    }
    let move_of = |record: &&DataRecord| {
        let present = &record.configuration;
        let from = counts.get(&present.primary).copied()?;
        let least = present.members.iter().filter_map(|node| Some((*counts.get(node)?, *node)));
        let (least, to) = least.min()?;
        Some((lead(from, least)?, Reverse(record.id), to))
    };
    let best = view.state.data_partitions().filter_map(|record| move_of(&record)).max()?;
    let (_, Reverse(partition), primary) = best;
    let present = &view.state.data_partition(partition)?.configuration;
    let epoch = Epoch(present.epoch.0 + 1);
    let configuration = Configuration { epoch, primary, ..present.clone() };
    Some(CommandV1::SetConfiguration { partition, configuration })
}

/// Whether a partition has all its copies in the configuration decided, adopted by all of them.
fn is_settled(view: View<'_>, record: &DataRecord) -> bool {
    let members = &record.configuration.members;
    let has_adopted = |(_, report): (NodeId, &milpa_wire::data::DataPartitionReport)| {
        report.configuration == record.configuration
    };
    members.len() == target(view, record)
        && record.replicas.len() == members.len()
        && record.configuration.learners.is_empty()
        && members.iter().all(|node| data_place(view, record, *node) == Place::Good)
        && view.loads.data_reports(record).all(has_adopted)
        && is_aligned(view, record)
}

fn leader(view: View<'_>) -> Option<Step> {
    let mut counts = settled(view, Role::Meta)?;
    for record in view.state.meta_partitions() {
        if !members::is_whole(view, record) {
            return None;
        }
        *counts.get_mut(&view.loads.meta_leader(record)?)? += 1;
    }
    let moves = view.state.meta_partitions().filter_map(|record| {
        let from = view.loads.meta_leader(record)?;
        let fit = record.members.iter().filter(|node| is_fit(view, record, **node));
        let (least, to) = fit.filter_map(|node| Some((*counts.get(node)?, *node))).min()?;
        let led = counts.get(&from).copied()?;
        Some((lead(led, least)?, Reverse(record.id), from, to))
    });
    let (_, Reverse(partition), from, to) = moves.max()?;
    Some(Step::TransferLeader { partition, from, to })
}

/// Whether a member that leads little may be given the lead: it has room, and is quick.
fn is_fit(view: View<'_>, record: &MetaRecord, node: NodeId) -> bool {
    has_room(view, record, node) && !view.loads.declines_leads(node)
}
