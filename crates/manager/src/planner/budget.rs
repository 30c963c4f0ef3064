//! How many replicas may be made at the same time, of all kinds: in the cluster, and on each node.

use std::collections::BTreeMap;

use milpa_types::NodeId;

use super::View;

/// How much may be under way.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) cluster: usize,
    pub(super) by_node: BTreeMap<NodeId, usize>,
    pub(super) node_max: usize,
}

impl Budget {
    pub(super) fn of(view: View<'_>) -> Budget {
        let mut by_node: BTreeMap<NodeId, usize> = BTreeMap::new();
        for task in view.state.tasks() {
            *by_node.entry(task.place.node).or_default() += 1;
        }
        let running = view.state.tasks().count();
        let cluster = (view.policy.repairs_max as usize).saturating_sub(running);
        Budget { cluster, by_node, node_max: view.policy.repairs_per_node_max as usize }
    }

    pub(super) fn has_room(&self) -> bool {
        self.cluster > 0
    }

    /// Whether the node may do one more, whatever the others do.
    pub(super) fn has_room_at(&self, node: NodeId) -> bool {
        self.by_node.get(&node).copied().unwrap_or(0) < self.node_max
    }

    pub(super) fn allows(&self, node: NodeId) -> bool {
        self.has_room() && self.has_room_at(node)
    }

    pub(super) fn take(&mut self, node: NodeId) {
        self.cluster = self.cluster.saturating_sub(1);
        *self.by_node.entry(node).or_default() += 1;
    }

    pub(super) fn give_back(&mut self, node: NodeId) {
        self.cluster = self.cluster.saturating_add(1);
        self.by_node.entry(node).and_modify(|count| *count = count.saturating_sub(1));
    }
}
