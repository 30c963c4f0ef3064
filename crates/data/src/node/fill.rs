//! The receiving side of alignment: bytes that this replica lacks come from another (`fetch`).
//!
//! If an overwrite of the extent arrives here while a chunk is on its way, the chunk may lack it: the overwrite is
//! laid over the chunk if it is still at hand (`recent`), or else that is fetched again. So an overwrite that found
//! its bytes missing here is in what lands, and one that comes later finds them.

use std::rc::Rc;
use std::sync::Arc;

use milpa_host::rpc::Reply;
use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, FreedRange, NodeId, PartitionId};
use milpa_wire::data::DataRequest;

use crate::store::{Checksums, ExtentStore, Freed, HeaderBlocks, NewExtent, StoreError};

use super::disk::Disk;
use super::fetch::{Chunk, Doubt};
use super::freed;
use super::partition::{Partition, answer_done};
use super::shared::Shared;
use super::usage::Usage;

/// Bytes fetched at once. What clients ask for goes through the same threads and connections, and waits
/// for as long as one such chunk takes.
const FILL_BYTES_MAX: u64 = 512 << 10;
/// How often a block is read before it counts as unreadable.
const READS_MAX: u32 = 4;

/// Where fetched bytes go.
#[derive(Clone)]
pub(crate) struct Filling {
    /// What the node's tasks share.
    pub shared: Rc<Shared>,
    /// Which disk.
    pub disk: usize,
    /// Which partition.
    pub partition: PartitionId,
    /// Its extents.
    pub store: Arc<ExtentStore>,
    /// Keeps the replica from forgetting overwrites that a chunk is compared with.
    _fetch: Rc<()>,
}

impl Filling {
    /// Makes this replica of the extent `length` bytes long, with the bytes of `source`, and seals
    /// it. What is there is kept; a run that was cut short goes on where it ended. If the block in which
    /// the extent is to end is damaged here, it is the source's.
    pub async fn fill(
        &self,
        new: NewExtent,
        length: u64,
        epoch: Epoch,
        source: NodeId,
    ) -> Result<(), DataError> {
        let extent = new.id;
        let store = Arc::clone(&self.store);
        let held = self.in_epoch(epoch, extent, move || prepare(&store, new, length)).await??;
        self.copy_bytes(extent, (held, length), epoch, source).await?;
        self.copy_freed(extent, source).await?;
        self.finish(extent, length, epoch).await
    }

    /// The bytes from `held` to `length`, chunk by chunk, as fast as repair may go.
    async fn copy_bytes(
        &self,
        extent: ExtentId,
        (mut held, length): (u64, u64),
        epoch: Epoch,
        source: NodeId,
    ) -> Result<(), DataError> {
        let mut is_mark_known = false;
        while held < length {
            self.may_grow(epoch).await?;
            let wanted = chunk_bytes(held, length);
            let turn = self.shared.repair_turn(self.disk).await;
            let chunk = match self.fetch_from(extent, (held, wanted), source).await {
                Err(DataError::Doubtful { block } | DataError::Unsettled { block }) => {
                    self.fetch_at_damage(extent, (held, wanted), block, source).await?
                }
                fetched => fetched?,
            };
            let got = chunk.hole + chunk.bytes.len() as u64 + chunk.lost;
            if !is_mark_known {
                self.copy_mark(extent, source).await?;
                is_mark_known = true;
            }
            let lost = chunk.lost > 0;
            let append =
                move |store: &ExtentStore, chunk: &Chunk| append_chunk(store, extent, held, chunk);
            if let Some(now_held) = self.land(extent, held, chunk, append).await? {
                if lost {
                    self.look_for(extent, held / BLOCK_BYTES).await;
                }
                held = now_held;
            }
            drop(turn);
            self.shared.throttle_repair(self.disk, got).await;
        }
        Ok(())
    }

    /// A block came as damaged. Who looks for it tells whether it is lost.
    async fn look_for(&self, extent: ExtentId, block: u64) {
        let partition = self.partition;
        let find = move |disk: &mut Disk| {
            if let Some(partition) = disk.partitions.get_mut(&partition) {
                partition.lost.find_anew(extent, block);
            }
        };
        self.shared.ask_disk(self.disk, find).await;
    }

    /// Seals what has all its bytes, and flushes it.
    async fn finish(&self, extent: ExtentId, length: u64, epoch: Epoch) -> Result<(), DataError> {
        let store = Arc::clone(&self.store);
        let seal =
            move || store.seal(extent, length).and_then(|()| store.set_commit(extent, length));
        self.in_epoch(epoch, extent, seal).await??;
        let store = Arc::clone(&self.store);
        let flush = move || {
            // Nobody reads soon what was copied for the sake of one more copy, nor the checksums: kept in memory they
            // would push out what clients read.
            store.flush(&[(extent, length)]).map(|()| store.release(extent))
        };
        let flushed = self.shared.run_slow(self.disk, flush).await;
        flushed.ok_or(DataError::Busy)?.map_err(DataError::from)
    }

    /// What comes next, of a range of which the source has a block damaged: what lies before that, or
    /// the block from another member, or the word that it is lost. One bad block must not keep the
    /// rest of an extent on a single replica.
    async fn fetch_at_damage(
        &self,
        extent: ExtentId,
        (held, wanted): (u64, u64),
        block: u64,
        source: NodeId,
    ) -> Result<Chunk, DataError> {
        let damaged = block.saturating_mul(BLOCK_BYTES);
        if damaged > held {
            let before = wanted.min(damaged - held);
            return self.fetch_from(extent, (held, before), source).await;
        }
        let length = wanted.min(BLOCK_BYTES - held % BLOCK_BYTES);
        self.fetch_or_lose(extent, (held, length), source, 0).await
    }

    async fn fetch_from(
        &self,
        extent: ExtentId,
        range: (u64, u64),
        source: NodeId,
    ) -> Result<Chunk, DataError> {
        self.fetch_from_any(extent, range, 1, &[source], 0, Doubt::Refuses).await
    }

    /// An extent that is read at the leader there is read at the leader here too: before there is
    /// a byte of it to read. Called after a fetch, when the source has applied all that found the
    /// extent missing here; later overwrites find it, and mark it.
    async fn copy_mark(&self, extent: ExtentId, source: NodeId) -> Result<(), DataError> {
        if self.state_at(extent, source).await?.is_some_and(|state| state.overwritten) {
            self.on_extent(extent, move |store| store.mark_overwritten(extent)).await?;
        }
        Ok(())
    }

    /// Frees what the source had freed when it sent its holes: these are whole blocks, and dead bytes
    /// begin and end within blocks.
    pub(super) async fn copy_freed(
        &self,
        extent: ExtentId,
        source: NodeId,
    ) -> Result<(), DataError> {
        let epoch = self.epoch().await?;
        let ranges = freed::of_member(self, epoch, source, vec![extent]).await?;
        let freed = |range: FreedRange| {
            let FreedRange { extent, offset, length, .. } = range;
            Freed { extent, offset, length }
        };
        let ranges: Vec<Freed> =
            ranges.into_iter().filter(|range| range.extent == extent).map(freed).collect();
        // What is here was written just now: damage in it is told by who reads it.
        self.on_extent(extent, move |store| store.free(&ranges, &mut HeaderBlocks::default())).await
    }

    /// Whether more of an extent may come here, as decided in this epoch: another primary may have decided on another
    /// length. A new replica keeps to what a disk is to be filled with, as the managers can take another place; what was a
    /// member once goes on as long as its log has room.
    async fn may_grow(&self, epoch: Epoch) -> Result<(), DataError> {
        let partition = self.partition;
        let checked = move |disk: &mut Disk| {
            let replica = disk.partitions.get(&partition).ok_or(DataError::WrongPartition)?;
            replica.check_epoch(epoch)?;
            let Usage { is_full, is_exhausted, .. } = disk.usage;
            let has_no_room = if replica.state.is_new { is_full } else { is_exhausted };
            if has_no_room { Err(DataError::NoSpace) } else { Ok(()) }
        };
        self.shared.ask_disk(self.disk, checked).await.ok_or(DataError::Busy)?
    }

    pub(super) async fn epoch(&self) -> Result<Epoch, DataError> {
        let partition = self.partition;
        let epoch =
            move |disk: &mut Disk| Some(disk.partitions.get(&partition)?.configuration.epoch);
        let epoch = self.shared.ask_disk(self.disk, epoch).await.flatten();
        epoch.ok_or(DataError::WrongPartition)
    }

    /// Does a thing to an extent here, unless the configuration is another one by now: then somebody else decides.
    pub(super) async fn in_epoch<T: Send + 'static>(
        &self,
        epoch: Epoch,
        extent: ExtentId,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DataError> {
        let id = self.partition;
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let start = move |disk: &mut Disk| -> Result<(), DataError> {
            let partition = disk.partitions.get(&id).ok_or(DataError::WrongPartition)?;
            partition.check_epoch(epoch)?;
            disk.workers.ordered_copy((id, extent), move || drop(sender.send(job())), |_, ()| {});
            Ok(())
        };
        let started = self.shared.ask_disk(self.disk, start).await;
        started.ok_or(DataError::Busy)??;
        receiver.await.map_err(|_| DataError::Busy)
    }

    pub(super) async fn on_extent<T: Send + 'static>(
        &self,
        extent: ExtentId,
        job: impl FnOnce(&ExtentStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, DataError> {
        let store = Arc::clone(&self.store);
        let done =
            self.shared.run_copy(self.disk, (self.partition, extent), move || job(&store)).await;
        done.ok_or(DataError::Busy)?.map_err(DataError::from)
    }

    /// Runs the job behind all overwrites handed to the extent so far, unless one of them is newer
    /// than `fence`.
    pub(super) async fn unless_overwritten<T: Send + 'static>(
        &self,
        extent: ExtentId,
        fence: u64,
        job: impl FnOnce(&ExtentStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<Option<T>, DataError> {
        let admit = move |replica: &Partition| {
            (replica.applying.borrow().last_of(extent) <= fence).then_some(job)
        };
        self.behind_overwrites(extent, admit).await
    }

    /// Lands a chunk at its place, behind all overwrites handed to the extent so far, and with those that are newer than
    /// the chunk. `None` if it is to be fetched anew.
    pub(super) async fn land<T: Send + 'static>(
        &self,
        extent: ExtentId,
        at: u64,
        chunk: Chunk,
        job: impl FnOnce(&ExtentStore, &Chunk) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<Option<T>, DataError> {
        let admit = move |replica: &Partition| {
            let chunk = replica.renewed(extent, at, chunk)?;
            Some(move |store: &ExtentStore| job(store, &chunk))
        };
        self.behind_overwrites(extent, admit).await
    }

    /// Runs the job that the replica admits behind all overwrites handed to the extent so far; `None` if it admits
    /// none. The look and the hand-over happen in one step of the disk's task.
    async fn behind_overwrites<T: Send + 'static, Job>(
        &self,
        extent: ExtentId,
        admit: impl FnOnce(&Partition) -> Option<Job> + Send + 'static,
    ) -> Result<Option<T>, DataError>
    where
        Job: FnOnce(&ExtentStore) -> Result<T, StoreError> + Send + 'static,
    {
        let (partition, store) = (self.partition, Arc::clone(&self.store));
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let start = move |disk: &mut Disk| {
            let Some(replica) = disk.partitions.get(&partition) else { return };
            let Some(job) = admit(replica) else {
                drop(sender.send(Ok(None)));
                return;
            };
            let run = move || drop(sender.send(job(&store).map(Some)));
            disk.workers.ordered_copy((partition, extent), run, |_, ()| {});
        };
        self.shared.ask_disk(self.disk, start).await.ok_or(DataError::Busy)?;
        receiver.await.map_err(|_| DataError::WrongPartition)?.map_err(DataError::from)
    }
}

impl Partition {
    /// What a chunk is now, if that is known.
    fn renewed(&self, extent: ExtentId, at: u64, chunk: Chunk) -> Option<Chunk> {
        let applying = self.applying.borrow();
        if applying.last_of(extent) <= chunk.fence {
            return Some(chunk);
        }
        if applying.covered() > chunk.fence {
            return None;
        }
        let overwrites = self.recent.behind(chunk.fence, extent)?;
        chunk.with(at, &overwrites)
    }
}

/// An extent that is being filled because the primary said so, and who waits for it.
pub(crate) struct Fill {
    epoch: Epoch,
    length: u64,
    waiting: Vec<Reply>,
}

/// How much of an extent of `length` bytes is fetched next, of which `held` are here. What begins within a block goes
/// through memory: the next chunk begins with one.
fn chunk_bytes(held: u64, length: u64) -> u64 {
    length.saturating_sub(held).min(FILL_BYTES_MAX - held % BLOCK_BYTES)
}

/// Makes the extent if it is missing, and opens it if it is sealed. Of one that is longer than it is to be the
/// block goes in which it is to end, if that is damaged. Returns how long it is.
fn prepare(store: &ExtentStore, new: NewExtent, length: u64) -> Result<u64, StoreError> {
    match store.create_extent(new) {
        Ok(()) => return Ok(0),
        // There is a file, and no header in it that could be read.
        Err(StoreError::Exists) if store.states(&[new.id]).is_empty() => {
            store.discard_unreadable(new.id)?;
            return store.create_extent(new).map(|()| 0);
        }
        Err(StoreError::Exists) => {}
        Err(error) => return Err(error),
    }
    if held_bytes(store, new.id)? > length {
        match seal_patiently(store, new.id, length) {
            Err(error) if error.damaged_block().is_some() => {
                store.cut_for_repair(new.id, length / BLOCK_BYTES)?;
            }
            sealed => sealed?,
        }
    }
    if store.states(&[new.id]).first().is_some_and(|state| state.sealed) {
        store.reopen_for_repair(new.id)?;
    }
    held_bytes(store, new.id)
}

/// A disk that failed to read once is asked again.
fn seal_patiently(store: &ExtentStore, id: ExtentId, length: u64) -> Result<(), StoreError> {
    let mut sealed = store.seal(id, length);
    for _ in 1..READS_MAX {
        if !matches!(sealed, Err(StoreError::ReadFailed { .. })) {
            break;
        }
        sealed = store.seal(id, length);
    }
    sealed
}

pub(super) fn held_bytes(store: &ExtentStore, extent: ExtentId) -> Result<u64, StoreError> {
    store.states(&[extent]).first().map(|state| state.length).ok_or(StoreError::NoExtent)
}

fn append_chunk(
    store: &ExtentStore,
    extent: ExtentId,
    at: u64,
    chunk: &Chunk,
) -> Result<u64, StoreError> {
    let mut end = at;
    if chunk.hole > 0 {
        end = store.append_hole(extent, at, chunk.hole)?;
    }
    if !chunk.bytes.is_empty() {
        let checksums = Checksums::of_blocks(&chunk.checksums, end);
        end = store.append_copy(extent, end, &chunk.bytes, checksums)?;
    }
    if chunk.lost > 0 {
        end = store.append_lost(extent, end, chunk.lost)?;
    }
    Ok(end)
}

impl Disk {
    /// What a partition has applied of its log.
    pub fn applied(&self, id: PartitionId) -> Option<u64> {
        self.partitions.get(&id).map(|partition| partition.applying.borrow().applied())
    }

    /// A partition's extents.
    pub fn store_of(&self, id: PartitionId) -> Option<Arc<ExtentStore>> {
        self.partitions.get(&id).map(|partition| Arc::clone(&partition.store))
    }

    /// What a task needs to fetch bytes for a partition.
    pub fn filling(&self, id: PartitionId) -> Option<Filling> {
        let partition = self.partitions.get(&id)?;
        Some(Filling {
            shared: Rc::clone(&self.shared),
            disk: self.index,
            partition: id,
            store: Arc::clone(&partition.store),
            _fetch: Rc::clone(&partition.fetches),
        })
    }

    /// The primary's word: this extent has so many bytes, cut or fetch.
    pub fn seal(&mut self, from: NodeId, request: DataRequest, reply: Reply) {
        let DataRequest::Seal { partition: id, epoch, extent, length, appended, .. } = request
        else {
            return;
        };
        let DataRequest::Seal { inode, session, source, .. } = request else { return };
        let checked = self.partition(id).and_then(|partition| {
            partition.check_epoch(epoch)?;
            let primary = partition.configuration.primary;
            let hint = DataError::NotPrimary { hint: Some(primary) };
            if from == primary { Ok(partition) } else { Err(hint) }
        });
        let partition = match checked {
            Ok(partition) => partition,
            Err(error) => return answer_done(reply, Err(error)),
        };
        partition.backup.forget(extent);
        match partition.filling.get_mut(&extent) {
            Some(fill) if (fill.epoch, fill.length) == (epoch, length) => {
                return fill.waiting.push(reply);
            }
            // It ends when it notices that it is of an epoch that is over.
            Some(_) => return answer_done(reply, Err(DataError::Busy)),
            None => {}
        }
        let store = Arc::clone(&partition.store);
        let new = NewExtent { id: extent, epoch: appended, inode, session };
        self.workers.ordered(
            (id, extent),
            move || store.seal(extent, length).and_then(|()| store.set_commit(extent, length)),
            move |disk, sealed| match sealed {
                Err(StoreError::NoExtent) if length == 0 => answer_done(reply, Ok(())),
                Err(error) if error.is_lack() => {
                    disk.start_fill(id, new, (epoch, length), source, reply);
                }
                other => answer_done(reply, other.map_err(DataError::from)),
            },
        );
    }

    fn start_fill(
        &mut self,
        id: PartitionId,
        new: NewExtent,
        (epoch, length): (Epoch, u64),
        source: NodeId,
        reply: Reply,
    ) {
        let Some(filling) = self.filling(id) else { return };
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        // Another word may have come while this one waited for its turn.
        match partition.filling.get_mut(&new.id) {
            Some(fill) if (fill.epoch, fill.length) == (epoch, length) => {
                return fill.waiting.push(reply);
            }
            Some(_) => return answer_done(reply, Err(DataError::Busy)),
            None => {}
        }
        partition.filling.insert(new.id, Fill { epoch, length, waiting: vec![reply] });
        tokio::task::spawn_local(async move {
            let result = filling.fill(new, length, epoch, source).await;
            if let Err(error) = &result {
                tracing::info!(partition = %id, extent = %new.id, %source, %error,
                    "an extent could not be filled; it is tried again");
            }
            let done = move |disk: &mut Disk| disk.filled(id, new.id, &result);
            filling.shared.ask_disk(filling.disk, done).await;
        });
    }

    fn filled(&mut self, id: PartitionId, extent: ExtentId, result: &Result<(), DataError>) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        for reply in partition.filling.remove(&extent).into_iter().flat_map(|fill| fill.waiting) {
            answer_done(reply, result.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn of_a_copy_only_the_first_chunk_begins_within_a_block(
            held in 0..=1u64 << 20,
            length in 1..=4u64 << 20,
        ) {
            let mut at = held.min(length);
            while at < length {
                let wanted = chunk_bytes(at, length);
                prop_assert!(wanted > 0 && wanted <= FILL_BYTES_MAX);
                at += wanted;
                prop_assert!(at == length || at % BLOCK_BYTES == 0);
            }
            prop_assert_eq!(at, length);
        }
    }
}
