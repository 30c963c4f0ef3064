//! Reading bytes of extents, from the replica that is likely the fastest, with another one at hand.

use std::time::Duration;

use bytes::Bytes;
use milpa_types::{Column, DataError, DataPartition, Next, NodeId};
use milpa_wire::data::{DataAnswer, DataRequest, Read};
use tokio::time::Instant;

use super::{DataClient, Trouble, checksums};
use crate::core::Retry;
use crate::error::FsError;
use crate::flights::Flights;
use crate::view::View;

/// One try with one member.
const TRY_WAIT: Duration = Duration::from_secs(3);
/// A second member is asked at the earliest after this long: a disk may need to move its head.
const HEDGE_AFTER_MIN: Duration = Duration::from_millis(20);
/// And at the latest after this long, however slow reads have been.
const HEDGE_AFTER_MAX: Duration = Duration::from_secs(1);
/// Bytes that no member has may be on their way to one for so long, before the caller must look whether
/// the file still has them.
pub(super) const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Leaders' names followed within one round.
const REDIRECTS_MAX: u32 = 3;

impl DataClient {
    /// Reads `length` bytes, at most a transfer's worth, that a key says are there. `NoExtent` and
    /// `NotHere` mean that the key may be out of date.
    pub(crate) async fn read(&self, column: Column, length: u32) -> Result<Bytes, FsError> {
        let mut retry = Retry::new(&self.core, "read");
        loop {
            let view = self.core.views.current();
            let trouble = match view.data(column.partition) {
                None => Trouble::NoRoute("the data partition is not in the view"),
                Some(partition) => match self.try_members(&view, partition, column, length).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(trouble) => trouble,
                },
            };
            retry.note(&trouble);
            match trouble.answer() {
                Some(DataError::NoExtent) => return Err(DataError::NoExtent.into()),
                Some(DataError::NotHere) if retry.elapsed() >= LOOK_AFTER => {
                    return Err(DataError::NotHere.into());
                }
                Some(
                    error @ (DataError::Corrupt { .. }
                    | DataError::Invalid
                    | DataError::Lost { .. }),
                ) => {
                    return Err(error.clone().into());
                }
                _ => {}
            }
            if trouble.next() != Next::RetrySame {
                self.core.views.refresh(&*self.core.transport).await;
            }
            retry.pause().await?;
        }
    }

    /// How much of an extent there is, if some of these bytes of it, the last ones first, are on no replica any more.
    pub(crate) async fn lost(&self, bytes: &[Column]) -> Option<u64> {
        for column in bytes {
            let view = self.core.views.current();
            let partition = view.data(column.partition)?;
            match self.try_members(&view, partition, *column, 1).await.err()?.answer()? {
                DataError::Lost { length } => return Some(*length),
                // Freed, which says nothing of those before it.
                DataError::NoExtent => {}
                _ => return None,
            }
        }
        None
    }

    /// Whether all members say that the extent of `column` was removed, or the byte there freed.
    pub(crate) async fn is_gone(&self, column: Column) -> bool {
        let view = self.core.views.current();
        let Some(partition) = view.data(column.partition) else { return false };
        let asked = self.try_members(&view, partition, column, 1).await;
        asked.is_err_and(|trouble| trouble.answer() == Some(&DataError::NoExtent))
    }

    /// Asks members until one gives the bytes; all have failed otherwise.
    async fn try_members(
        &self,
        view: &View,
        partition: &DataPartition,
        column: Column,
        length: u32,
    ) -> Result<Bytes, Trouble> {
        let mut at_leader = self.is_overwritten(column.partition, column.extent);
        let mut waiting = self.order(partition, column, at_leader);
        let mut flights = Flights::new();
        let mut refusals = Refusals::default();
        let mut hedge_at = Instant::now();
        let (mut redirects, mut asks_others) = (0, false);
        let Column { partition: id, extent, offset } = column;
        let read = |at_leader| Read { partition: id, extent, offset, length, at_leader };
        loop {
            if flights.is_empty() {
                if waiting.is_empty() {
                    return Err(refusals.verdict());
                }
                let node = waiting.remove(0);
                hedge_at = Instant::now() + self.hedge_after(node);
                flights.launch(Box::pin(self.read_one(view, node, read(at_leader)))).await;
            }
            let hedge = !waiting.is_empty() && !at_leader && flights.len() < 2;
            let landed = tokio::select! {
                biased;
                landed = flights.next() => landed,
                () = tokio::time::sleep_until(hedge_at), if hedge => None,
            };
            match landed {
                Some(Ok(bytes)) => return Ok(bytes),
                // The leader's word, as nobody else answers so when the leader is asked for.
                Some(Err((trouble, true)))
                    if matches!(
                        trouble.answer(),
                        Some(
                            DataError::NoExtent
                                | DataError::Corrupt { .. }
                                | DataError::Lost { .. }
                        )
                    ) =>
                {
                    return Err(trouble);
                }
                // The leader has nothing of the extent: whether others have, they may say themselves.
                Some(Err((Trouble::Answered { node, error: DataError::NotHere }, true)))
                    if !asks_others =>
                {
                    (asks_others, at_leader, refusals) = (true, false, Refusals::default());
                    refusals.note(Trouble::Answered { node, error: DataError::NotHere });
                    waiting = self.order(partition, column, at_leader);
                    waiting.retain(|other| *other != node);
                }
                Some(Err((trouble, _))) => {
                    if let Trouble::Answered { error: DataError::NotPrimary { hint }, .. } =
                        &trouble
                    {
                        // A marked extent: only the leader may answer, whoever else we asked.
                        self.set_overwritten(column.partition, column.extent);
                        at_leader = true;
                        // Two members that name each other must not be asked for ever.
                        redirects += 1;
                        let leader = hint.filter(|l| partition.members.contains(l));
                        if let Some(leader) = leader.filter(|_| redirects <= REDIRECTS_MAX) {
                            self.set_leader(partition.id, leader);
                            waiting.retain(|node| *node != leader);
                            waiting.insert(0, leader);
                        }
                    }
                    refusals.note(trouble);
                }
                None if hedge => {
                    self.core.stats.hedged_reads.inc();
                    let node = waiting.remove(0);
                    flights.launch(Box::pin(self.read_one(view, node, read(at_leader)))).await;
                }
                None => {}
            }
        }
    }

    /// One member's answer, or what was wrong with it and whether only the leader was to answer.
    async fn read_one(
        &self,
        view: &View,
        node: NodeId,
        read: Read,
    ) -> Result<Bytes, (Trouble, bool)> {
        let at_leader = read.at_leader;
        self.checked(view, node, read).await.map_err(|trouble| (trouble, at_leader))
    }

    async fn checked(&self, view: &View, node: NodeId, read: Read) -> Result<Bytes, Trouble> {
        let Read { partition, extent, offset, length, .. } = read;
        let request = DataRequest::Read(read);
        let started = Instant::now();
        let (answer, bytes) = self.call(view, node, &request, Bytes::new(), TRY_WAIT).await?;
        let DataAnswer::Bytes { checksums, .. } = answer else {
            return Err(Trouble::Nonsense { node });
        };
        if bytes.len() != length as usize {
            return Err(Trouble::Nonsense { node });
        }
        if !checksums::match_read(offset, &bytes, &checksums) {
            self.core.stats.corrupt_reads.inc();
            tracing::warn!(
                %node, %partition, %extent, offset, length,
                "bytes do not match their checksums; asking another replica"
            );
            return Err(Trouble::Answered { node, error: DataError::DamagedInTransit });
        }
        self.core.health.read_took(node, started.elapsed());
        Ok(bytes)
    }

    /// Members in the order to ask. An extent is usually read at the same member, whose page cache
    /// then has it, unless another one has been twice as fast.
    fn order(&self, partition: &DataPartition, column: Column, at_leader: bool) -> Vec<NodeId> {
        let mut order = partition.members.clone();
        if order.is_empty() {
            return order;
        }
        if at_leader {
            let leader = self.leader(partition);
            order.retain(|node| *node != leader);
            order.insert(0, leader);
            return order;
        }
        let home = (column.extent.0 % order.len() as u64) as usize;
        order.rotate_left(home);
        if order.len() > 1 {
            let other = 1 + self.core.chance.below(order.len() - 1);
            let latency =
                |at: usize| order.get(at).map(|node| self.core.health.read_latency(*node));
            let margin = Duration::from_millis(1);
            if latency(0) > latency(other).map(|l| l * 2 + margin) {
                order.swap(0, other);
            }
        }
        order.sort_by_key(|node| self.core.health.is_suspect(*node));
        order
    }

    fn hedge_after(&self, node: NodeId) -> Duration {
        self.core.health.read_is_slow_after(node).clamp(HEDGE_AFTER_MIN, HEDGE_AFTER_MAX)
    }
}

/// What the members said that did not give the bytes.
struct Refusals {
    /// The one that tells most, of all but those of a loss.
    worst: Trouble,
    /// Who says that the extent was removed.
    removed: Option<NodeId>,
    /// The word that no replica has the bytes, and how much there is of the extent.
    lost: Option<(Trouble, u64)>,
    /// Somebody may have them: one that is busy or silent, or has them damaged.
    may_be_there: bool,
}

impl Default for Refusals {
    fn default() -> Refusals {
        let worst = Trouble::NoRoute("the partition has no members");
        Refusals { worst, removed: None, lost: None, may_be_there: false }
    }
}

impl Refusals {
    fn note(&mut self, trouble: Trouble) {
        match trouble.answer() {
            Some(DataError::Lost { length }) => {
                let (length, known) = (*length, self.lost.as_ref().map(|(_, length)| *length));
                if known.is_none_or(|known| known <= length) {
                    self.lost = Some((trouble, length));
                }
                return;
            }
            Some(DataError::NoExtent) => {
                if let Trouble::Answered { node, .. } = trouble {
                    self.removed = Some(node);
                }
            }
            Some(DataError::NotHere) => {}
            _ => self.may_be_there = true,
        }
        if rank(&trouble) >= rank(&self.worst) {
            self.worst = trouble;
        }
    }

    /// What all of them together say.
    fn verdict(self) -> Trouble {
        match (self.lost, self.removed) {
            // One that knows is enough, but only if all others lack the bytes.
            (Some((lost, _)), _) if !self.may_be_there => lost,
            // Who has nothing of the extent need not have heard that it was removed: one who has is enough.
            (_, Some(node)) if self.worst.answer() == Some(&DataError::NotHere) => {
                Trouble::Answered { node, error: DataError::NoExtent }
            }
            _ => self.worst,
        }
    }
}

/// How much a failure tells: what may pass outweighs an answer that all replicas must give before it is
/// believed.
fn rank(trouble: &Trouble) -> u8 {
    match trouble {
        Trouble::NoRoute(_) => 0,
        Trouble::Answered { error: DataError::NoExtent | DataError::Invalid, .. } => 1,
        Trouble::Answered { error: DataError::Corrupt { .. }, .. } => 2,
        _ => 3,
    }
}
