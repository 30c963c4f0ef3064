//! Replicas of a meta partition whose states differ at the same log index.
//!
//! They applied the same entries, so they should be the same; that one is not is a bug, or its memory
//! or disk lies. Every replica reports hashes of its state ([`StateMark`]). One that differs from what
//! more than half of the members say is refused: it serves no more, and is replaced like one that is
//! lost ([`members`](super::members)). Without such a majority nobody knows who is right: then nothing
//! is done, and the operator hears of it.

use std::collections::BTreeMap;

use milpa_types::NodeId;
use milpa_wire::meta::StateMark;

use super::{Plan, Step, View};
use crate::core::MetaRecord;

/// Plans who is refused.
pub fn plan(view: View<'_>, plan: &mut Plan) {
    for record in view.state.meta_partitions() {
        let Some((index, said)) = disagreement(view, record) else { continue };
        let id = record.id;
        let majority = said.iter().find(|(_, nodes)| {
            let members = nodes.iter().filter(|(node, _)| record.members.contains(node));
            members.count() * 2 > record.members.len()
        });
        let Some((right, _)) = majority else {
            let nodes: Vec<String> =
                said.values().flatten().map(|(node, _)| node.to_string()).collect();
            plan.problems.push(format!(
                "meta partition {id}: its replicas on nodes {} DIFFER at log index {index}, and no \
                 majority agrees: nobody knows which is right; stop writing to the volume",
                nodes.join(", ")
            ));
            continue;
        };
        for (node, mark) in said.iter().filter(|(hash, _)| *hash != right).flat_map(|(_, n)| n) {
            plan.problems.push(format!(
                "meta partition {id}: the replica on node {node} DIFFERS from the others at log \
                 index {index}: it is refused, and made again"
            ));
            let (node, partition, mark) = (*node, id, *mark);
            plan.steps.push(Step::Refuse { node, partition, mark });
        }
    }
}

/// Who said which hash.
type Said = BTreeMap<u64, Vec<(NodeId, StateMark)>>;

/// The lowest log index at which replicas differ. States that are kept in different formats cannot be
/// compared.
fn disagreement(view: View<'_>, record: &MetaRecord) -> Option<(u64, Said)> {
    let mut marks: BTreeMap<(u64, u16), Said> = BTreeMap::new();
    for (node, report) in view.loads.meta_reports(record) {
        for mark in &report.marks {
            let said = marks.entry((mark.index, mark.format)).or_default();
            let nodes = said.entry(mark.hash).or_default();
            if !nodes.iter().any(|(known, _)| *known == node) {
                nodes.push((node, *mark));
            }
        }
    }
    let differing = marks.into_iter().find(|(_, said)| said.len() > 1);
    differing.map(|((index, _), said)| (index, said))
}
