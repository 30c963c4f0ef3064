//! The volume's partitions and nodes as the manager last described them (CFS 2.4).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use milpa_host::managers::ManagersError;
use milpa_types::{
    DataPartition, MetaPartition, MetaSlot, NodeId, NodeState, PartitionId, VolumeView,
};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use tokio::time::Instant;

use crate::transport::Transport;

/// Refreshes are at least this far apart, however many requests ask for one.
const REFRESH_SPACING: Duration = Duration::from_millis(30);
/// One refresh may take this long; whoever asked for it tries again by itself.
const REFRESH_WAIT: Duration = Duration::from_secs(3);

/// One version of the view, indexed.
pub(crate) struct View {
    pub volume: VolumeView,
    slots: BTreeMap<MetaSlot, usize>,
    data: BTreeMap<PartitionId, usize>,
    nodes: BTreeMap<NodeId, usize>,
}

impl View {
    fn new(volume: VolumeView) -> View {
        let slots = volume.meta.iter().enumerate().map(|(i, p)| (p.slot, i)).collect();
        let data = volume.data.iter().enumerate().map(|(i, p)| (p.id, i)).collect();
        let nodes = volume.nodes.iter().enumerate().map(|(i, n)| (n.id, i)).collect();
        View { volume, slots, data, nodes }
    }

    pub(crate) fn meta(&self, slot: MetaSlot) -> Option<&MetaPartition> {
        self.volume.meta.get(*self.slots.get(&slot)?)
    }

    pub(crate) fn data(&self, partition: PartitionId) -> Option<&DataPartition> {
        self.volume.data.get(*self.data.get(&partition)?)
    }

    pub(crate) fn address(&self, node: NodeId) -> Option<SocketAddr> {
        Some(self.volume.nodes.get(*self.nodes.get(&node)?)?.address)
    }

    pub(crate) fn is_active(&self, node: NodeId) -> bool {
        let found = self.nodes.get(&node).and_then(|at| self.volume.nodes.get(*at));
        found.is_some_and(|node| node.state == NodeState::Active)
    }
}

/// The newest view, and the one way to renew it.
pub(crate) struct Views {
    name: String,
    current: RwLock<Arc<View>>,
    refreshed: tokio::sync::Mutex<Instant>,
}

impl Views {
    pub(crate) fn new(first: VolumeView) -> Views {
        Views {
            name: first.volume.name.clone(),
            current: RwLock::new(Arc::new(View::new(first))),
            refreshed: tokio::sync::Mutex::new(Instant::now()),
        }
    }

    pub(crate) fn current(&self) -> Arc<View> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks the managers for a newer view than ours. Of many callers at once one asks; the others
    /// wait for it. A failure changes nothing: whoever needs the view tries again.
    ///
    /// That the view was renewed since the caller took it does not count: a try that took seconds may
    /// have failed because of what the managers learned after that.
    pub(crate) async fn refresh(&self, transport: &dyn Transport) {
        let asked = Instant::now();
        // Whoever holds it asks the managers, which ends.
        let waited = tokio::time::timeout(REFRESH_WAIT * 2, self.refreshed.lock()).await;
        let Ok(mut refreshed) = waited else {
            tracing::error!("who asks for the volume's view does not come to an end");
            return;
        };
        if *refreshed > asked {
            return;
        }
        tokio::time::sleep_until(*refreshed + REFRESH_SPACING).await;
        self.fetch(transport, self.current().volume.version).await;
        *refreshed = Instant::now();
    }

    /// Fetches the whole view, for the loads in it.
    pub(crate) async fn refresh_loads(&self, transport: &dyn Transport) {
        let waited = tokio::time::timeout(REFRESH_WAIT * 2, self.refreshed.lock()).await;
        let Ok(mut refreshed) = waited else { return };
        self.fetch(transport, 0).await;
        *refreshed = Instant::now();
    }

    async fn fetch(&self, transport: &dyn Transport, known_version: u64) {
        let request = ManagerRequest::GetVolume { name: self.name.clone(), known_version };
        match transport.manager(&request, REFRESH_WAIT).await {
            Ok(ManagerAnswer::Volume(view)) => {
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                // A deposed manager may still answer: its view must not replace a newer one.
                if view.version >= current.volume.version {
                    *current = Arc::new(View::new(*view));
                }
            }
            Ok(_) => {}
            Err(ManagersError::Unreachable { asked, last, .. }) => {
                tracing::warn!(%asked, %last, "no manager answered; going on with the old view");
            }
            Err(error) => tracing::warn!(%error, "the managers did not give the volume's view"),
        }
    }
}
