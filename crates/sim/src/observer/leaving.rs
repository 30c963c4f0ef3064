//! A server leaves in use, as an operator has it do: its node is drained, and removed when it holds nothing
//! (F21). It comes back empty, as a new node.

use std::net::SocketAddr;

use milpa_types::NodeId;
use milpa_wire::manager::ManagerRequest;

use super::{Missing, Observer};
use crate::trace;

/// One that is on its way out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    /// Of its node.
    pub address: SocketAddr,
    node: Option<NodeId>,
    /// The managers know that it leaves.
    is_drained: bool,
    /// It is to stay after all.
    pub is_taken_back: bool,
}

impl Leaving {
    pub fn new(address: SocketAddr) -> Leaving {
        Leaving { address, node: None, is_drained: false, is_taken_back: false }
    }
}

impl Observer {
    /// The next step for who leaves.
    pub(super) async fn see_off(&self) {
        let Some(leaving) = self.watch.borrow().leaving else { return };
        let next = match self.next_of(leaving).await {
            Ok(next) => next,
            Err(missing) => {
                trace::note(&format!("{leaving:?}: {missing}"));
                return;
            }
        };
        let mut watch = self.watch.borrow_mut();
        // It may have been taken back meanwhile.
        let is_taken_back = watch.leaving.is_some_and(|now| now.is_taken_back);
        watch.leaving = next.map(|next| Leaving { is_taken_back, ..next });
    }

    /// What is known of it after one step; `None` when it has left, or stays.
    async fn next_of(&self, leaving: Leaving) -> Missing<Option<Leaving>> {
        let Some(node) = leaving.node else {
            let node = if leaving.is_taken_back { None } else { self.newest_at(leaving).await? };
            return Ok(node.map(|_| Leaving { node, ..leaving }));
        };
        if !self.nodes().await?.iter().any(|known| known.id == node) {
            self.has_left(leaving).await?;
            return Ok(None);
        }
        if leaving.is_taken_back {
            self.ask(&ManagerRequest::DrainNode { node, drains: false }).await?;
            trace::note(&format!("node {node} stays"));
            return Ok(None);
        }
        if !leaving.is_drained {
            // Refused while there is no place for what it holds.
            self.ask(&ManagerRequest::DrainNode { node, drains: true }).await?;
            trace::note(&format!("node {node} is drained"));
        } else if !self.holds(node).await? {
            self.ask(&ManagerRequest::RemoveNode { node }).await?;
        }
        Ok(Some(Leaving { is_drained: true, ..leaving }))
    }

    /// Whether it is to have any replica. (A silent one can be removed with all that it holds. That costs a
    /// copy, and is not what is tried here.)
    async fn holds(&self, node: NodeId) -> Missing<bool> {
        let (meta, data) = self.partitions().await?;
        let is_in = |nodes: &[NodeId]| nodes.contains(&node);
        Ok(meta.iter().any(|held| is_in(&held.members))
            || data.iter().any(|held| is_in(&held.members) || is_in(&held.replicas)))
    }

    async fn has_left(&self, leaving: Leaving) -> Missing<()> {
        let next = self.newest_at(leaving).await?.filter(|newest| Some(*newest) > leaving.node);
        trace::note(&format!("{leaving:?} has left; after it came {next:?}"));
        let mut watch = self.watch.borrow_mut();
        watch.nodes_left += 1;
        // A node that came after it is not empty.
        watch.has_left = next.is_none().then_some(leaving.address);
        Ok(())
    }

    async fn newest_at(&self, leaving: Leaving) -> Missing<Option<NodeId>> {
        let nodes = self.nodes().await?;
        let there = nodes.iter().filter(|node| node.address == leaving.address);
        Ok(there.map(|node| node.id).max())
    }
}
