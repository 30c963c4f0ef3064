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
        let done = match (leaving.node, leaving.is_taken_back) {
            (None, true) => Ok(true),
            (None, false) => self.choose(leaving).await.map(|()| false),
            (Some(node), true) => self.stay(node).await.map(|()| true),
            (Some(node), false) if !leaving.is_drained => self.drain(node).await.map(|()| false),
            (Some(node), false) => self.leave(leaving, node).await,
        };
        match done {
            Ok(true) => self.watch.borrow_mut().leaving = None,
            Ok(false) => {}
            Err(missing) => trace::note(&format!("{leaving:?}: {missing}")),
        }
    }

    async fn choose(&self, leaving: Leaving) -> Missing<()> {
        let node = self.newest_at(leaving.address).await?;
        if let Some(leaving) = &mut self.watch.borrow_mut().leaving {
            leaving.node = node;
        }
        Ok(())
    }

    /// Refused while there is no place for what it holds.
    async fn drain(&self, node: NodeId) -> Missing<()> {
        self.ask(&ManagerRequest::DrainNode { node, drains: true }).await?;
        trace::note(&format!("node {node} is drained"));
        if let Some(leaving) = &mut self.watch.borrow_mut().leaving {
            leaving.is_drained = true;
        }
        Ok(())
    }

    async fn stay(&self, node: NodeId) -> Missing<()> {
        if self.is_known(node).await? {
            self.ask(&ManagerRequest::DrainNode { node, drains: false }).await?;
            trace::note(&format!("node {node} stays"));
        }
        Ok(())
    }

    /// Removes it if it holds nothing. (A silent one can be removed with all that it holds. That costs a copy,
    /// and is not what is tried here.) Says whether it has left.
    async fn leave(&self, leaving: Leaving, node: NodeId) -> Missing<bool> {
        if self.is_known(node).await? {
            let (meta, data) = self.partitions().await?;
            let holds_meta = meta.iter().any(|held| held.members.contains(&node));
            let holds_data = data
                .iter()
                .any(|held| held.members.contains(&node) || held.replicas.contains(&node));
            if holds_meta || holds_data {
                return Ok(false);
            }
            self.ask(&ManagerRequest::RemoveNode { node }).await?;
        }
        let other = self.newest_at(leaving.address).await?;
        trace::note(&format!("node {node} has left; after it came {other:?}"));
        let mut watch = self.watch.borrow_mut();
        watch.nodes_left += 1;
        // A node that came after it is not empty.
        watch.has_left = other.is_none().then_some(leaving.address);
        Ok(true)
    }

    async fn is_known(&self, node: NodeId) -> Missing<bool> {
        Ok(self.nodes().await?.iter().any(|known| known.id == node))
    }

    async fn newest_at(&self, address: SocketAddr) -> Missing<Option<NodeId>> {
        let nodes = self.nodes().await?;
        Ok(nodes.iter().filter(|node| node.address == address).map(|node| node.id).max())
    }
}
