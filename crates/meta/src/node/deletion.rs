//! The deletion worker: bytes that no file refers to any more are freed on every replica of their
//! data partition, and only then forgotten.
//!
//! Idempotent from end to end: bytes of an extent are never used twice, so freeing them twice is
//! harmless. A replica that is away keeps its orders waiting; nothing is confirmed for it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_raft::MultiRaft;
use milpa_types::{DataError, FreedRange, NodeId, PartitionId, Role, VolumeId, VolumeView};
use milpa_wire::data::{DataReply, DataRequest};
use tracing::{debug, warn};

use super::context::Context;
use super::inbox::Event;
use super::shell::Shell;
use crate::core::{Command, FreeOrder};

/// Orders of one round: a request of some 20 KiB.
const ORDERS_MAX: usize = 1_024;
/// Rounds that run at once on this node: deletion must not crowd out the work.
const ROUNDS_MAX: usize = 8;
/// One request to one data node.
const FREE_WAIT: Duration = Duration::from_secs(5);
/// Pause after a round that left something, and after the last one of a pass.
const PAUSE_MS: u64 = 2_000;
/// Data partitions move seldom; a replica that the view lacks would be missed, so it is young.
const VIEW_AGE: Duration = Duration::from_secs(1);

impl Shell {
    /// Once a tick: starts the next round of each partition led here that has something to free.
    pub(crate) fn start_freeing(&mut self, now: u64) {
        let mut running = self.replicas.values().filter(|replica| replica.freeing.busy).count();
        for (partition, replica) in &mut self.replicas {
            let freeing = &mut replica.freeing;
            if !replica.ready || freeing.busy || now < freeing.not_before_ms {
                continue;
            }
            if running >= ROUNDS_MAX {
                return;
            }
            let orders = replica.state.free_orders(freeing.after, ORDERS_MAX);
            let Some(last) = orders.last() else {
                if freeing.after > 0 {
                    // The pass is over; what it left is tried again after a pause.
                    freeing.after = 0;
                    freeing.not_before_ms = now + PAUSE_MS;
                }
                continue;
            };
            freeing.after = last.order;
            freeing.busy = true;
            running += 1;
            let (ctx, volume) = (Rc::clone(&self.ctx), replica.definition.volume);
            tokio::task::spawn_local(free(ctx, *partition, volume, orders));
        }
    }

    /// A round is over.
    pub(crate) fn freed(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        confirmed: Vec<u64>,
        all: bool,
    ) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        replica.freeing.busy = false;
        if !all {
            replica.freeing.not_before_ms = now_ms() + PAUSE_MS;
        }
        if replica.ready && !confirmed.is_empty() {
            let command = Command::ConfirmFreed { orders: confirmed };
            Shell::propose_for_itself(multi, partition, &command);
        }
    }
}

async fn free(ctx: Rc<Context>, partition: PartitionId, volume: VolumeId, orders: Vec<FreeOrder>) {
    let view = ctx.view(volume, VIEW_AGE).await;
    let plan = view.map(|view| Plan::new(&view, &orders)).unwrap_or_default();
    let mut freed = BTreeSet::new();
    for (node, ranges) in &plan.ranges {
        if free_on(&ctx, *node, ranges).await {
            freed.insert(*node);
        }
    }
    let confirmed = plan.confirmed(&orders, &freed);
    let all = confirmed.len() == orders.len();
    ctx.inbox.push(Event::Freed { partition, confirmed, all });
}

/// Whether the node says that it has freed all of `ranges`.
async fn free_on(ctx: &Context, node: NodeId, ranges: &[FreedRange]) -> bool {
    let Some(address) = ctx.address(node) else {
        ctx.refresh_addresses().await;
        return false;
    };
    let request = DataRequest::Free { ranges: ranges.to_vec() };
    let called =
        ctx.pool.call::<_, DataReply>(address, Role::Data, &request, Bytes::new(), FREE_WAIT).await;
    match called {
        Ok((Ok(_) | Err(DataError::NoExtent), _)) => true,
        Ok((Err(error), _)) => {
            debug!(%node, %error, "a data node did not free bytes");
            false
        }
        Err(error) => {
            debug!(%node, %error, "a data node could not be asked to free bytes");
            false
        }
    }
}

/// Which node has to free what.
#[derive(Debug, Default)]
struct Plan {
    replicas: BTreeMap<PartitionId, Vec<NodeId>>,
    ranges: BTreeMap<NodeId, Vec<FreedRange>>,
}

impl Plan {
    fn new(view: &VolumeView, orders: &[FreeOrder]) -> Plan {
        let mut plan = Plan::default();
        for partition in &view.data {
            let mut replicas = partition.replicas.clone();
            replicas.extend(partition.members.iter().filter(|m| !partition.replicas.contains(m)));
            plan.replicas.insert(partition.id, replicas);
        }
        for order in orders {
            let Some(replicas) = plan.replicas.get(&order.range.partition) else {
                warn!(partition = %order.range.partition, "freed bytes of an unknown data partition");
                continue;
            };
            for node in replicas {
                plan.ranges.entry(*node).or_default().push(order.range);
            }
        }
        plan
    }

    /// The orders that every replica has confirmed. An unknown partition confirms nothing.
    fn confirmed(&self, orders: &[FreeOrder], freed: &BTreeSet<NodeId>) -> Vec<u64> {
        let is_freed = |order: &&FreeOrder| {
            self.replicas.get(&order.range.partition).is_some_and(|replicas| {
                !replicas.is_empty() && replicas.iter().all(|node| freed.contains(node))
            })
        };
        orders.iter().filter(is_freed).map(|order| order.order).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_types::{ClusterId, DataPartition, Epoch, ExtentId, Volume, VolumeOptions};

    fn view() -> VolumeView {
        let partition = |id, members: &[u32], replicas: &[u32]| DataPartition {
            id: PartitionId(id),
            volume: VolumeId(1),
            epoch: Epoch(1),
            members: members.iter().copied().map(NodeId).collect(),
            primary: NodeId(members[0]),
            replicas: replicas.iter().copied().map(NodeId).collect(),
            takes_extents: true,
            used_bytes: 0,
            extents: 0,
        };
        VolumeView {
            cluster: ClusterId(1),
            version: 1,
            volume: Volume {
                id: VolumeId(1),
                name: "v".to_owned(),
                options: VolumeOptions::default(),
            },
            meta: Vec::new(),
            data: vec![partition(10, &[1, 2], &[1, 2, 3]), partition(11, &[1, 2], &[1, 2])],
            nodes: Vec::new(),
        }
    }

    fn order(order: u64, partition: u64) -> FreeOrder {
        let (partition, extent) = (PartitionId(partition), ExtentId(1));
        FreeOrder { order, range: FreedRange { partition, extent, offset: 0, length: 1 } }
    }

    /// Node 3 is away: what it holds a replica of stays on the list, the rest is forgotten.
    #[test]
    fn an_order_is_confirmed_when_every_replica_has_freed() {
        let orders = [order(1, 10), order(2, 11), order(3, 99)];
        let plan = Plan::new(&view(), &orders);
        assert_eq!(plan.ranges.keys().copied().collect::<Vec<_>>(), [1, 2, 3].map(NodeId));
        assert_eq!(plan.ranges[&NodeId(3)], [orders[0].range]);
        let freed = BTreeSet::from([NodeId(1), NodeId(2)]);
        assert_eq!(plan.confirmed(&orders, &freed), [2]);
        let freed = BTreeSet::from([NodeId(1), NodeId(2), NodeId(3)]);
        assert_eq!(plan.confirmed(&orders, &freed), [1, 2]);
    }
}
