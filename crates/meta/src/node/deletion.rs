//! The deletion worker: bytes that no file refers to any more are freed on every replica of their
//! data partition, and only then forgotten.
//!
//! Idempotent from end to end: bytes of an extent are never used twice, so freeing them twice is
//! harmless. A replica that is away keeps its orders waiting; nothing is confirmed for it. Who is sent
//! what is decided in [`super::freeing`].

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_raft::MultiRaft;
use milpa_types::{DataError, NodeId, PartitionId, Role, VolumeId, VolumeView};
use milpa_wire::data::{DataReply, DataRequest};
use tokio::task::JoinSet;
use tracing::debug;

use super::context::Context;
use super::freeing::{Answer, Batch, VIEW_AGE_MS};
use super::inbox::Event;
use super::shell::Shell;
use crate::core::{Command, FreeOrder};

/// Replicas that one batch asks at once. Their node frees on the threads that also flush for clients.
const REPLICAS_AT_ONCE: usize = 8;
/// One request to one replica.
const FREE_WAIT: Duration = Duration::from_secs(5);

impl Shell {
    /// Once a tick: sends what there is to free of each partition led here.
    pub(crate) fn start_freeing(&mut self, now: u64) {
        let mut under_way: BTreeMap<NodeId, usize> = BTreeMap::new();
        for node in self.replicas.values().flat_map(|replica| replica.freeing.under_way()) {
            *under_way.entry(node).or_default() += 1;
        }
        // Each in its turn: a data node takes a few batches at once.
        let mut turns: Vec<PartitionId> = self.replicas.keys().copied().collect();
        let next = turns.partition_point(|partition| *partition <= self.freed_first);
        let before = next % turns.len().max(1);
        turns.rotate_left(before);
        self.freed_first = turns.first().copied().unwrap_or_default();
        for partition in turns {
            let Some(replica) = self.replicas.get_mut(&partition) else { continue };
            let (state, freeing) = (&replica.state, &mut replica.freeing);
            if !replica.ready || state.free_orders_above(0).next().is_none() {
                continue;
            }
            if freeing.start_asking(now) {
                let (ctx, volume) = (Rc::clone(&self.ctx), replica.definition.volume);
                tokio::task::spawn_local(find_replicas(ctx, partition, volume));
            }
            if !freeing.is_current(now) {
                continue;
            }
            let above = |after| state.free_orders_above(after);
            for batch in freeing.batches(now, above, &mut under_way) {
                tokio::task::spawn_local(free(Rc::clone(&self.ctx), partition, batch));
            }
        }
    }

    /// Somebody said where the replicas are.
    pub(crate) fn replicas_found(&mut self, partition: PartitionId, view: Option<Rc<VolumeView>>) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let highest = replica.state.last_free_order();
        replica.freeing.learn(view.as_deref(), highest, now_ms());
    }

    /// A data node was asked.
    pub(crate) fn freed(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        batch: &Batch,
        answers: &BTreeMap<PartitionId, Answer>,
    ) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let highest = replica.state.last_free_order();
        let confirmed = replica.freeing.answered(batch, answers, highest, now_ms());
        if replica.ready && !confirmed.is_empty() {
            let command = Command::ConfirmFreed { orders: confirmed };
            if !Shell::propose_for_itself(multi, partition, &command) {
                replica.freeing.repeat(batch);
            }
        }
    }
}

async fn find_replicas(ctx: Rc<Context>, partition: PartitionId, volume: VolumeId) {
    let view = ctx.view(volume, Duration::from_millis(VIEW_AGE_MS)).await;
    ctx.inbox.push(Event::ReplicasFound { partition, view });
}

async fn free(ctx: Rc<Context>, partition: PartitionId, batch: Batch) {
    let answers = free_on(&ctx, &batch).await;
    ctx.inbox.push(Event::Freed { partition, batch, answers });
}

/// What the node's replicas say; nothing, if none of the first ones says anything.
async fn free_on(ctx: &Rc<Context>, batch: &Batch) -> BTreeMap<PartitionId, Answer> {
    let mut answers = BTreeMap::new();
    if ctx.address(batch.node).is_none() {
        ctx.refresh_addresses().await;
        return answers;
    }
    let mut waiting: Vec<(&PartitionId, &Vec<FreeOrder>)> = batch.orders.iter().collect();
    // Each time others first: those on a disk that hangs do not make the node seem silent for ever.
    let turn = batch.number % (waiting.len() as u64).max(1);
    waiting.rotate_left(turn as usize);
    let mut waiting = waiting.into_iter();
    let (mut asking, mut ended) = (JoinSet::new(), 0);
    loop {
        while asking.len() < REPLICAS_AT_ONCE
            && let Some((partition, orders)) = waiting.next()
        {
            let request = request(orders);
            let (ctx, node, partition) = (Rc::clone(ctx), batch.node, *partition);
            asking.spawn_local(async move { (partition, ask(&ctx, node, request).await) });
        }
        match asking.join_next().await {
            Some(Ok((partition, Some(answer)))) => drop(answers.insert(partition, answer)),
            Some(_) => {}
            None => return answers,
        }
        ended += 1;
        if ended >= REPLICAS_AT_ONCE && answers.is_empty() {
            return answers;
        }
    }
}

fn request(orders: &[FreeOrder]) -> DataRequest {
    DataRequest::Free { ranges: orders.iter().map(|order| order.range).collect() }
}

/// What a replica says, if anything.
async fn ask(ctx: &Context, node: NodeId, request: DataRequest) -> Option<Answer> {
    let address = ctx.address(node)?;
    let called =
        ctx.pool.call::<_, DataReply>(address, Role::Data, &request, Bytes::new(), FREE_WAIT).await;
    let reply = match called {
        Ok((reply, _)) => reply,
        Err(error) => {
            debug!(%node, %error, "a data node could not be asked to free bytes");
            return None;
        }
    };
    Some(match reply {
        Ok(_) | Err(DataError::NoExtent) => Answer::Done,
        Err(error) => {
            debug!(%node, %error, "a replica did not free bytes");
            match error {
                DataError::Corrupt { .. } | DataError::Doubtful { .. } => Answer::Partly,
                _ => Answer::Refused,
            }
        }
    })
}
