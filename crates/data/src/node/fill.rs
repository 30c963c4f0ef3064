//! The receiving side of alignment and repair: bytes that this replica lacks come from another.
//!
//! A chunk is fetched only from a replica that has applied at least as much of the log as this
//! one had when it asked; and if an overwrite of the extent arrived here meanwhile, the chunk is
//! fetched again. So an overwrite that found its bytes missing here is in the chunk, and one that
//! comes later finds them.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::rpc::Reply;
use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, FreedRange, NodeId, PartitionId};
use milpa_wire::data::{DataAnswer, DataRequest, TRANSFER_BYTES_MAX};

use crate::store::{Checksums, ExtentStore, Freed, NewExtent, StoreError};

use super::disk::Disk;
use super::freed;
use super::metrics::Metrics;
use super::partition::answer_done;
use super::shared::Shared;

/// One fetch may take this long.
const FETCH_WAIT: Duration = Duration::from_secs(10);
/// A source that is behind is asked again after this pause, and so many times.
const BEHIND_PAUSE: Duration = Duration::from_millis(50);
const BEHIND_MAX: u32 = 200;
/// After a failed repair the block is left alone for so long: two replicas that both have it damaged
/// would otherwise set each other to work without end.
const REPAIR_PAUSE: Duration = Duration::from_millis(500);
/// Blocks of one partition that are repaired at the same time.
const REPAIRS_MAX: usize = 64;

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

/// A chunk on its way from another replica to its place.
struct Chunk {
    hole: u64,
    bytes: Bytes,
    checksums: Vec<u32>,
    /// Bytes, of one block, that no member has whole: they take the place of `bytes`.
    lost: u64,
    /// What this replica had applied when it asked.
    fence: u64,
}

impl Filling {
    /// Makes this replica of the extent `length` bytes long, with the bytes of `source`, and seals
    /// it. What is there is kept; a run that was cut short goes on where it ended.
    pub async fn fill(&self, new: NewExtent, length: u64, source: NodeId) -> Result<(), DataError> {
        let extent = new.id;
        let mut held = self.on_extent(extent, move |store| prepare(store, new)).await?;
        let mut is_mark_known = false;
        while held < length {
            let wanted = (length - held).min(TRANSFER_BYTES_MAX as u64);
            let turn = self.shared.repair_turn(self.disk).await;
            let chunk = match self.fetch_from_any(extent, held, wanted, &[source], 0).await {
                Err(DataError::Doubtful { block }) => {
                    self.fetch_at_damage(extent, (held, wanted), block, source).await?
                }
                fetched => fetched?,
            };
            let got = chunk.hole + chunk.bytes.len() as u64 + chunk.lost;
            if got == 0 {
                return Err(DataError::NotHere);
            }
            if !is_mark_known {
                self.copy_mark(extent, source).await?;
                is_mark_known = true;
            }
            let fence = chunk.fence;
            let land = move |store: &ExtentStore| append_chunk(store, extent, held, &chunk);
            // None: an overwrite came between, the chunk may lack it.
            if let Some(now_held) = self.unless_overwritten(extent, fence, land).await? {
                held = now_held;
            }
            drop(turn);
            self.shared.throttle_repair(self.disk, got).await;
        }
        self.copy_freed(extent, source).await?;
        self.on_extent(extent, move |store| {
            store.seal(extent, length)?;
            store.set_commit(extent, length)
        })
        .await?;
        let store = Arc::clone(&self.store);
        let flushed =
            self.shared.run_slow(self.disk, move || store.flush(&[(extent, length)])).await;
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
            return self.fetch_from_any(extent, held, before, &[source], 0).await;
        }
        let length = wanted.min(BLOCK_BYTES - held % BLOCK_BYTES);
        self.fetch_or_lose(extent, (held, length), source, 0).await
    }

    /// Bytes of one block that are damaged at the source: from another member, or the word that they are
    /// lost. `Doubtful` while that is not known: a member may have them, or take for right what a crash
    /// left of them.
    async fn fetch_or_lose(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        source: NodeId,
        applied: u64,
    ) -> Result<Chunk, DataError> {
        let members = self.other_members().await?;
        // Before they are asked: an overwrite may make the block whole meanwhile.
        let fence = self.fence(extent, applied).await?;
        let mut is_lost = members.contains(&source);
        for member in members {
            match self.fetch(extent, offset, length, member, applied).await {
                Ok(chunk) => return Ok(chunk),
                Err(DataError::Corrupt { .. }) => {}
                Err(DataError::NotHere | DataError::NoExtent) if member != source => {}
                Err(_) => is_lost = false,
            }
        }
        if !is_lost {
            return Err(DataError::Doubtful { block: offset / BLOCK_BYTES });
        }
        Metrics::get().lost_bytes.inc_by(length);
        tracing::error!(partition = %self.partition, %extent, offset, length,
            "bytes are damaged on every replica; the others of the extent are copied");
        let (bytes, checksums) = (Bytes::new(), Vec::new());
        Ok(Chunk { hole: 0, bytes, checksums, lost: length, fence })
    }

    async fn other_members(&self) -> Result<Vec<NodeId>, DataError> {
        let (partition, node) = (self.partition, self.shared.node);
        let members = move |disk: &mut Disk| Some(disk.partitions.get(&partition)?.others(node));
        let members = self.shared.ask_disk(self.disk, members).await.flatten();
        members.ok_or(DataError::WrongPartition)
    }

    /// An extent that is read at the leader there is read at the leader here too: before there is
    /// a byte of it to read. Called after a fetch, when the source has applied all that found the
    /// extent missing here; later overwrites find it, and mark it.
    async fn copy_mark(&self, extent: ExtentId, source: NodeId) -> Result<(), DataError> {
        let (partition, epoch) = (self.partition, self.epoch().await?);
        let extents = vec![extent];
        let request = DataRequest::ExtentInfo { partition, epoch, extents, after: None };
        let answer = self.shared.ask_node(source, &request, Bytes::new(), FETCH_WAIT).await?;
        let (DataAnswer::Extents(states), _) = answer else { return Err(DataError::Invalid) };
        if states.iter().any(|state| state.extent == extent && state.overwritten) {
            self.on_extent(extent, move |store| store.mark_overwritten(extent)).await?;
        }
        Ok(())
    }

    /// Frees what the source had freed when it sent its holes: these are whole blocks, and dead bytes
    /// begin and end within blocks.
    async fn copy_freed(&self, extent: ExtentId, source: NodeId) -> Result<(), DataError> {
        let epoch = self.epoch().await?;
        let ranges = freed::of_member(self, epoch, source, vec![extent]).await?;
        let freed = |range: FreedRange| {
            let FreedRange { extent, offset, length, .. } = range;
            Freed { extent, offset, length }
        };
        let ranges: Vec<Freed> =
            ranges.into_iter().filter(|range| range.extent == extent).map(freed).collect();
        self.on_extent(extent, move |store| store.free(&ranges)).await
    }

    async fn epoch(&self) -> Result<Epoch, DataError> {
        let partition = self.partition;
        let epoch =
            move |disk: &mut Disk| Some(disk.partitions.get(&partition)?.configuration.epoch);
        let epoch = self.shared.ask_disk(self.disk, epoch).await.flatten();
        epoch.ok_or(DataError::WrongPartition)
    }

    /// Replaces the blocks of a range by those of another replica.
    pub async fn replace(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        sources: &[NodeId],
        applied: u64,
    ) -> Result<(), DataError> {
        let held = self.on_extent(extent, move |store| held_bytes(store, extent)).await?;
        let end = offset.saturating_add(length).next_multiple_of(BLOCK_BYTES).min(held);
        let mut at = offset / BLOCK_BYTES * BLOCK_BYTES;
        while at < end {
            let wanted = (end - at).min(TRANSFER_BYTES_MAX as u64);
            let chunk = self.fetch_from_any(extent, at, wanted, sources, applied).await?;
            let (hole, fence) = (chunk.hole, chunk.fence);
            let got = hole + chunk.bytes.len() as u64;
            if got == 0 {
                return Err(DataError::NotHere);
            }
            let place = at + hole;
            let land = move |store: &ExtentStore| replace_chunk(store, extent, place, &chunk);
            if self.unless_overwritten(extent, fence, land).await?.is_some() {
                at += got;
            }
            self.shared.throttle_repair(self.disk, got).await;
        }
        Ok(())
    }

    /// As [`replace`](Filling::replace), of a whole extent by those of the leader as of a log index. A block
    /// that no member has whole is damaged here too: what was here may lack overwrites.
    pub async fn replace_all(
        &self,
        extent: ExtentId,
        length: u64,
        leader: NodeId,
        applied: u64,
    ) -> Result<(), DataError> {
        let mut from = 0;
        while from < length {
            let rest = (from, length - from);
            let block = match self.replace(extent, rest, &[leader], applied).await {
                Err(DataError::Doubtful { block }) => block,
                replaced => return replaced,
            };
            let damaged = block.saturating_mul(BLOCK_BYTES);
            if damaged > from {
                let before = (from, damaged - from);
                self.replace(extent, before, &[leader], applied).await?;
            }
            let place = (damaged, BLOCK_BYTES.min(length.saturating_sub(damaged)));
            let chunk = self.fetch_or_lose(extent, place, leader, applied).await?;
            let fence = chunk.fence;
            let land = move |store: &ExtentStore| match chunk.lost {
                0 => replace_chunk(store, extent, damaged + chunk.hole, &chunk),
                _ => store.distrust(extent, block),
            };
            // None: an overwrite came between; the block is looked at again.
            let landed = self.unless_overwritten(extent, fence, land).await?;
            from = if landed.is_some() { damaged + BLOCK_BYTES } else { damaged };
        }
        Ok(())
    }

    /// Makes a damaged block whole again: from another member, or, if none has it whole, by accepting
    /// what a crash left of it here.
    async fn repair(
        &self,
        extent: ExtentId,
        block: u64,
        sources: &[NodeId],
    ) -> Result<(), DataError> {
        let offset = block.saturating_mul(BLOCK_BYTES);
        let replaced = self.replace(extent, (offset, 1), sources, 0).await;
        if let Err(DataError::Doubtful { .. }) = replaced {
            let accept = move |store: &ExtentStore| store.accept_doubtful(extent, block);
            match self.on_extent(extent, accept).await {
                Err(DataError::Corrupt { .. }) => {}
                accepted => return accepted,
            }
        }
        if self.is_whole(extent, block).await? {
            return Ok(());
        }
        // Freed there, and the word of it did not come here: the block of its header could not be
        // read then, or the disk has lost it.
        let mut asked = Ok(());
        for source in sources {
            asked = asked.and(self.copy_freed(extent, *source).await);
        }
        let is_whole = self.is_whole(extent, block).await?;
        if is_whole { Ok(()) } else { replaced.and(asked).and(Err(DataError::Corrupt { block })) }
    }

    /// Whether a block can be read; one that is no more needs no repair.
    async fn is_whole(&self, extent: ExtentId, block: u64) -> Result<bool, DataError> {
        let verify = move |store: &ExtentStore| match store.verify(extent, block, 1) {
            Ok(found) => Ok(found.damaged.is_empty()),
            Err(StoreError::NoExtent | StoreError::Removed) => Ok(true),
            Err(error) => Err(error),
        };
        self.on_extent(extent, verify).await
    }

    /// From the first that has the bytes. Who is behind is asked again, but nobody else waits for it.
    /// `Doubtful` if all have answered and none has the bytes whole, so that this node may accept what a
    /// crash left here: of those who are in doubt the lowest goes first, and the others wait for it.
    async fn fetch_from_any(
        &self,
        extent: ExtentId,
        offset: u64,
        length: u64,
        sources: &[NodeId],
        applied: u64,
    ) -> Result<Chunk, DataError> {
        let (mut left, mut last) = (sources.to_vec(), DataError::NotHere);
        let (mut without, mut gone, mut damaged) = (0, 0, offset / BLOCK_BYTES);
        for _ in 0..BEHIND_MAX {
            let mut behind = Vec::new();
            for source in left {
                match self.fetch(extent, offset, length, source, applied).await {
                    Ok(chunk) => return Ok(chunk),
                    Err(DataError::Busy) => behind.push(source),
                    Err(DataError::Doubtful { .. }) if source < self.shared.node => {
                        behind.push(source);
                    }
                    Err(error) => {
                        let has_it_not = matches!(
                            error,
                            DataError::Corrupt { .. }
                                | DataError::Doubtful { .. }
                                | DataError::NotHere
                                | DataError::NoExtent
                        );
                        without += usize::from(has_it_not);
                        gone += usize::from(error == DataError::NoExtent);
                        if let DataError::Corrupt { block } | DataError::Doubtful { block } = error
                        {
                            damaged = block;
                        }
                        last = error;
                    }
                }
            }
            if behind.is_empty() {
                let is_nowhere = without == sources.len() && gone < sources.len();
                let nowhere = DataError::Doubtful { block: damaged };
                return Err(if is_nowhere { nowhere } else { last });
            }
            left = behind;
            tokio::time::sleep(BEHIND_PAUSE).await;
        }
        Err(DataError::Busy)
    }

    /// One try.
    async fn fetch(
        &self,
        extent: ExtentId,
        offset: u64,
        length: u64,
        source: NodeId,
        applied: u64,
    ) -> Result<Chunk, DataError> {
        let (partition, fence) = (self.partition, self.fence(extent, applied).await?);
        let request = DataRequest::Fetch { partition, extent, offset, length, applied: fence };
        let answer = self.shared.ask_node(source, &request, Bytes::new(), FETCH_WAIT).await?;
        let (DataAnswer::Bytes { checksums, hole }, bytes) = answer else {
            return Err(DataError::Invalid);
        };
        if hole.saturating_add(bytes.len() as u64) > length {
            return Err(DataError::Invalid);
        }
        Metrics::get().fetched_bytes.inc_by(bytes.len() as u64);
        Ok(Chunk { hole, bytes, checksums, lost: 0, fence })
    }

    /// How much of the log a source must have applied: all that was handed to the extent here, applied
    /// or waiting. Older bytes would not land.
    async fn fence(&self, extent: ExtentId, applied: u64) -> Result<u64, DataError> {
        let partition = self.partition;
        let handed = move |disk: &mut Disk| {
            let applying = disk.partitions.get(&partition)?.applying.borrow();
            Some(applying.applied().max(applying.last_of(extent)))
        };
        let here = self.shared.ask_disk(self.disk, handed).await;
        Ok(here.flatten().ok_or(DataError::WrongPartition)?.max(applied))
    }

    async fn on_extent<T: Send + 'static>(
        &self,
        extent: ExtentId,
        job: impl FnOnce(&ExtentStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, DataError> {
        let store = Arc::clone(&self.store);
        let done =
            self.shared.run_ordered(self.disk, (self.partition, extent), move || job(&store)).await;
        done.ok_or(DataError::Busy)?.map_err(DataError::from)
    }

    /// Runs the job behind all overwrites handed to the extent so far, unless one of them is newer
    /// than `fence`. The look and the hand-over happen in one step of the disk's task.
    async fn unless_overwritten<T: Send + 'static>(
        &self,
        extent: ExtentId,
        fence: u64,
        job: impl FnOnce(&ExtentStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<Option<T>, DataError> {
        let (partition, store) = (self.partition, Arc::clone(&self.store));
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let start = move |disk: &mut Disk| {
            let Some(replica) = disk.partitions.get(&partition) else { return };
            if replica.applying.borrow().last_of(extent) > fence {
                drop(sender.send(Ok(None)));
                return;
            }
            let run = move || drop(sender.send(job(&store).map(Some)));
            disk.workers.ordered((partition, extent), run, |_, ()| {});
        };
        self.shared.ask_disk(self.disk, start).await.ok_or(DataError::Busy)?;
        receiver.await.map_err(|_| DataError::WrongPartition)?.map_err(DataError::from)
    }
}

/// Makes the extent if it is missing and opens it if it is sealed; returns how long it is.
fn prepare(store: &ExtentStore, new: NewExtent) -> Result<u64, StoreError> {
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
    if store.states(&[new.id]).first().is_some_and(|state| state.sealed) {
        store.reopen_for_repair(new.id)?;
    }
    held_bytes(store, new.id)
}

fn held_bytes(store: &ExtentStore, extent: ExtentId) -> Result<u64, StoreError> {
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
        let start = end;
        end = store.append(extent, start, &chunk.bytes, checksums)?;
        store.start_write_back(extent, start, chunk.bytes.len() as u64)?;
    }
    if chunk.lost > 0 {
        end = store.append_lost(extent, end, chunk.lost)?;
    }
    Ok(end)
}

fn replace_chunk(
    store: &ExtentStore,
    extent: ExtentId,
    at: u64,
    chunk: &Chunk,
) -> Result<(), StoreError> {
    if chunk.bytes.is_empty() {
        return Ok(());
    }
    let checksums = Checksums::of_blocks(&chunk.checksums, at);
    store.repair_blocks(extent, at, &chunk.bytes, checksums)?;
    let blocks = (chunk.bytes.len() as u64).div_ceil(BLOCK_BYTES);
    Metrics::get().repaired_blocks.inc_by(blocks);
    Ok(())
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
        if let Some(waiting) = partition.filling.get_mut(&extent) {
            return waiting.push(reply);
        }
        let store = Arc::clone(&partition.store);
        let new = NewExtent { id: extent, epoch: appended, inode, session };
        self.workers.ordered(
            (id, extent),
            move || store.seal(extent, length).and_then(|()| store.set_commit(extent, length)),
            move |disk, sealed| match sealed {
                Err(StoreError::NoExtent) if length == 0 => answer_done(reply, Ok(())),
                Err(StoreError::Shorter { .. } | StoreError::NoExtent) => {
                    disk.start_fill(id, new, length, source, reply);
                }
                other => answer_done(reply, other.map_err(DataError::from)),
            },
        );
    }

    fn start_fill(
        &mut self,
        id: PartitionId,
        new: NewExtent,
        length: u64,
        source: NodeId,
        reply: Reply,
    ) {
        let Some(filling) = self.filling(id) else { return };
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let waiting = partition.filling.entry(new.id).or_default();
        waiting.push(reply);
        if waiting.len() > 1 {
            return;
        }
        tokio::task::spawn_local(async move {
            let result = filling.fill(new, length, source).await;
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
        for reply in partition.filling.remove(&extent).unwrap_or_default() {
            answer_done(reply, result.clone());
        }
    }

    /// Repairs a block that was found damaged. False if so many are being repaired that this one has
    /// to be found again.
    pub fn repair_block(&mut self, id: PartitionId, extent: ExtentId, block: u64) -> bool {
        let Some(partition) = self.partitions.get_mut(&id) else { return true };
        if partition.repairing.contains(&(extent, block)) {
            return true;
        }
        if partition.repairing.len() >= REPAIRS_MAX {
            return false;
        }
        let Some(filling) = self.filling(id) else { return true };
        let Some(partition) = self.partitions.get_mut(&id) else { return true };
        partition.repairing.insert((extent, block));
        let sources = partition.others(self.shared.node);
        tokio::task::spawn_local(async move {
            let repaired = filling.repair(extent, block, &sources).await;
            let is_lost = matches!(repaired, Err(DataError::Doubtful { .. }));
            let note = move |disk: &mut Disk| {
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.note_lost(extent, block, is_lost);
                }
            };
            filling.shared.ask_disk(filling.disk, note).await;
            match repaired {
                Ok(()) => tracing::info!(partition = %id, %extent, block, "block repaired"),
                Err(error) => {
                    tracing::warn!(partition = %id, %extent, block, %error, "block not repaired");
                    tokio::time::sleep(REPAIR_PAUSE).await;
                }
            }
            let ended = move |disk: &mut Disk| {
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.repairing.remove(&(extent, block));
                }
            };
            filling.shared.ask_disk(filling.disk, ended).await;
        });
        true
    }

    /// Replaces a range by another member's bytes, as of log index `applied` or later.
    pub fn repair_then(
        &mut self,
        id: PartitionId,
        extent: ExtentId,
        range: (u64, u64),
        applied: u64,
        then: impl FnOnce(&mut Disk, Result<(), DataError>) + Send + 'static,
    ) {
        let Some(filling) = self.filling(id) else { return };
        let Some(partition) = self.partitions.get(&id) else { return };
        let sources = partition.others(self.shared.node);
        tokio::task::spawn_local(async move {
            let result = filling.replace(extent, range, &sources, applied).await;
            filling.shared.ask_disk(filling.disk, move |disk| then(disk, result)).await;
        });
    }
}
