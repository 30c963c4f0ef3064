//! Meta partitions are led by nodes that have room.
//!
//! A meta node whose disk or memory is full goes on as a member, and as a leader for all that needs
//! no room; files are created where another member leads (RELIABILITY.md, F8).

use std::collections::BTreeMap;

use milpa_types::NodeId;

use super::members::leader_report;
use super::{Plan, Step, View};
use crate::core::MetaRecord;

/// Plans that leaderships leave full nodes, for the members with room that lead least.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    let mut led: BTreeMap<NodeId, usize> = BTreeMap::new();
    for leader in view.state.meta_partitions().filter_map(|r| view.loads.meta_leader(r)) {
        *led.entry(leader).or_default() += 1;
    }
    for record in view.state.meta_partitions() {
        let Some((from, report)) = leader_report(view, record) else { continue };
        if !report.is_full {
            continue;
        }
        let takes = |node: &&NodeId| {
            **node != from && report.current.contains(node) && has_room(view, record, **node)
        };
        let members = report.voters.iter().filter(takes).copied();
        let least = |node: &NodeId| (view.loads.declines_leads(*node), led.get(node).copied());
        let Some(to) = members.min_by_key(least) else { continue };
        *led.entry(to).or_default() += 1;
        plan.steps.push(Step::TransferLeader { partition: record.id, from, to });
    }
}

/// Whether a member said that it could make inodes of this partition.
pub(super) fn has_room(view: View<'_>, record: &MetaRecord, node: NodeId) -> bool {
    let report = view.loads.report(node).and_then(|load| load.meta.get(&record.id));
    report.is_some_and(|report| !report.is_full)
}
