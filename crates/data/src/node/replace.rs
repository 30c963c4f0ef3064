//! Blocks that are here and not right: damaged ones, and those that missed overwrites. They are replaced by
//! another replica's.

use std::time::Duration;

use milpa_host::clock;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId, PartitionId};
use milpa_wire::data::TRANSFER_BYTES_MAX;

use crate::store::{Checksums, ExtentStore, StoreError};

use super::disk::Disk;
use super::fetch::{Chunk, Doubt, is_lacked};
use super::fill::{Filling, held_bytes};
use super::metrics::Metrics;
use super::partition::Partition;
use super::readable::promised;

/// What came of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repaired {
    /// The block can be read.
    Whole,
    /// Nobody else has all of it, and nobody needs it: the extent ends before it, or others have as much of it as there
    /// is to be.
    Needless,
}

/// What those who learn have of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Learners {
    /// It came from one of them.
    Gave,
    /// One of them is silent, behind or in doubt: it may have been a member before, and be the last one who has it.
    MayHave,
    Lack,
}

/// After a failed repair the block is left alone for so long.
const REPAIR_PAUSE: Duration = Duration::from_millis(500);
/// Blocks of one partition that are repaired at the same time.
const REPAIRS_MAX: usize = 64;

impl Filling {
    /// Replaces the blocks of a range by those of another replica.
    pub async fn replace(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        sources: &[NodeId],
        applied: u64,
        doubt: Doubt,
    ) -> Result<(), DataError> {
        let held = self.on_extent(extent, move |store| held_bytes(store, extent)).await?;
        let until = offset.saturating_add(length).min(held);
        let end = until.next_multiple_of(BLOCK_BYTES).min(held);
        let mut at = offset / BLOCK_BYTES * BLOCK_BYTES;
        // What lies in the last block behind the range need not be there: a part lands on a whole block only.
        while at < until {
            let wanted = (end - at).min(TRANSFER_BYTES_MAX as u64);
            let chunk =
                self.fetch_from_any(extent, (at, wanted), 1, sources, applied, doubt).await?;
            let got = chunk.length();
            let place = at + chunk.hole;
            let replace = move |store: &ExtentStore, chunk: &Chunk| {
                replace_chunk(store, extent, place, chunk)
            };
            if self.land(extent, at, chunk, replace).await?.is_some() {
                at += got;
            }
            self.shared.throttle_repair(self.disk, got).await;
        }
        Ok(())
    }

    /// As [`replace`](Filling::replace), of what is here of an extent's first `length` bytes, by the leader's as of
    /// a log index. A block that nobody can give now stays as it is, or is damaged here too if this replica may lack
    /// overwrites: what makes it whole at the leader may be in the log behind the snapshot, and the log may not
    /// go on without this replica. Gives those that are damaged; they are to be repaired.
    pub async fn replace_all(
        &self,
        extent: ExtentId,
        length: u64,
        (leader, applied): (NodeId, u64),
        may_lack: bool,
    ) -> Result<Vec<u64>, DataError> {
        let held = self.on_extent(extent, move |store| held_bytes(store, extent)).await?;
        let length = length.min(held);
        let mut from = 0;
        let (mut left, mut end) = (Vec::new(), length);
        while from < length {
            let range = (from, end - from);
            let refused =
                match self.replace(extent, range, &[leader], applied, Doubt::Refuses).await {
                    Err(refused) => refused,
                    Ok(()) => {
                        (from, end) = (end, length);
                        continue;
                    }
                };
            // Corrupt: it is damaged here, and the leader ends within it.
            let (DataError::Doubtful { block }
            | DataError::Unsettled { block }
            | DataError::Corrupt { block }) = refused
            else {
                return Err(refused);
            };
            let damaged = block.saturating_mul(BLOCK_BYTES);
            if damaged > from && damaged < end {
                // Before it there may be another one, to which the leader has not come.
                end = damaged;
                continue;
            }
            if damaged != from {
                return Err(refused);
            }
            end = length;
            let place = (damaged, BLOCK_BYTES.min(held.saturating_sub(damaged)));
            let chunk = self.fetch_or_leave(extent, place, applied).await?;
            let replace = move |store: &ExtentStore, chunk: &Chunk| match chunk.lost {
                0 => replace_chunk(store, extent, damaged + chunk.hole, chunk).map(|()| None),
                _ if may_lack => store.distrust(extent, block).map(|()| Some(block)),
                _ => is_whole(store, extent, block).map(|is_whole| (!is_whole).then_some(block)),
            };
            // None: an overwrite came between; the block is looked at again.
            if let Some(is_damaged) = self.land(extent, damaged, chunk, replace).await? {
                left.extend(is_damaged);
                from = damaged + BLOCK_BYTES;
            }
        }
        Ok(left)
    }

    /// Makes a damaged block whole again: from another member, or, if none has it whole, by finding that
    /// the log has made the same of it here and elsewhere.
    async fn repair(
        &self,
        extent: ExtentId,
        block: u64,
        sources: &[NodeId],
        (learners, lackers): (&[NodeId], &[NodeId]),
    ) -> Result<Repaired, DataError> {
        let replaced = self.replace_block(extent, block, sources).await;
        if let Err(DataError::Doubtful { .. }) = replaced {
            let by_learners = self.replace_by_learners(extent, block, learners, lackers).await?;
            if by_learners == Learners::Gave {
                return Ok(Repaired::Whole);
            }
            match self.settle_doubt(extent, block, sources).await {
                Err(DataError::Corrupt { .. }) => {}
                settled => return settled.map(|()| Repaired::Whole),
            }
            if self.is_behind_an_end(extent, block, sources).await?
                || self.is_had_in_part(extent, block, sources).await?
            {
                return Ok(Repaired::Needless);
            }
            if by_learners == Learners::MayHave {
                return Err(DataError::Unsettled { block });
            }
        }
        if self.is_whole(extent, block).await? {
            return Ok(Repaired::Whole);
        }
        match self.is_freed_by(extent, block, sources).await {
            Ok(true) => Ok(Repaired::Whole),
            asked => replaced.and(asked).and(Err(DataError::Corrupt { block })),
        }
    }

    /// Whether a member ends before what is here of a block, and nobody knows a byte of it to be acknowledged:
    /// then it is not lost. The primary makes them equal ([`super::readable`]).
    pub(super) async fn is_behind_an_end(
        &self,
        extent: ExtentId,
        block: u64,
        members: &[NodeId],
    ) -> Result<bool, DataError> {
        let (offset, length) = self.held_of(extent, block).await?;
        let own = self.on_extent(extent, move |store| Ok(store.states(&[extent]))).await?;
        let (mut is_behind, mut acknowledged) = (false, own.first().map_or(0, promised));
        for member in members {
            let Some(state) = self.state_at(extent, *member).await? else { continue };
            is_behind |= state.length < offset + length;
            acknowledged = acknowledged.max(promised(&state));
        }
        Ok(is_behind && acknowledged <= offset)
    }

    /// Whether a member has the beginning of a block whole, and ends within it: that is all there is to be of it, and
    /// the primary cuts the rest here ([`super::readable`]). `Unsettled` if one is in doubt about its own: it decides
    /// without this one, which is in doubt no more, and may have the block then.
    async fn is_had_in_part(
        &self,
        extent: ExtentId,
        block: u64,
        members: &[NodeId],
    ) -> Result<bool, DataError> {
        let (offset, length) = self.held_of(extent, block).await?;
        for member in members {
            match self.fetch(extent, offset, length, *member, 0).await {
                Ok(_) => return Ok(true),
                Err(DataError::Doubtful { .. }) => return Err(DataError::Unsettled { block }),
                Err(error) if is_lacked(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// By a member that has all of the block that is here: of a part of it there is no checksum.
    async fn replace_block(
        &self,
        extent: ExtentId,
        block: u64,
        sources: &[NodeId],
    ) -> Result<(), DataError> {
        loop {
            let place = self.held_of(extent, block).await?;
            if place.1 == 0 {
                return Ok(());
            }
            let chunk =
                self.fetch_from_any(extent, place, place.1, sources, 0, Doubt::Waits).await?;
            if self.land_block(extent, place, chunk).await? {
                return Ok(());
            }
        }
    }

    /// Takes the block from one of those who learn. Who is a moment behind in the log is asked again, for a while.
    /// Who lacked the block once is not waited for.
    async fn replace_by_learners(
        &self,
        extent: ExtentId,
        block: u64,
        learners: &[NodeId],
        lackers: &[NodeId],
    ) -> Result<Learners, DataError> {
        let place = self.held_of(extent, block).await?;
        let mut may_have = false;
        for learner in learners {
            match self.fetch_patiently(extent, place, *learner).await {
                Ok(chunk) if chunk.length() >= place.1 => {
                    self.land_block(extent, place, chunk).await?;
                    let is_there = self.is_whole(extent, block).await?
                        || self.is_freed_by(extent, block, learners).await?;
                    return Ok(if is_there { Learners::Gave } else { Learners::MayHave });
                }
                // It ends within the block.
                Ok(_) => {}
                Err(error) if is_lacked(&error) => {}
                // It has not heard of the partition yet.
                Err(DataError::WrongPartition) => {}
                Err(_) => may_have |= !lackers.contains(learner),
            }
        }
        Ok(if may_have { Learners::MayHave } else { Learners::Lack })
    }

    /// Whether others have freed what makes a block one that is freed here too, of which the word did not come here: the
    /// block of its header could not be read then, or the disk has lost it.
    async fn is_freed_by(
        &self,
        extent: ExtentId,
        block: u64,
        others: &[NodeId],
    ) -> Result<bool, DataError> {
        let mut asked = Ok(());
        for other in others {
            asked = asked.and(self.copy_freed(extent, *other).await);
        }
        let is_freed = self.is_whole(extent, block).await?;
        if is_freed { Ok(true) } else { asked.map(|()| false) }
    }

    /// The bytes of a block that are here.
    async fn held_of(&self, extent: ExtentId, block: u64) -> Result<(u64, u64), DataError> {
        let held = self.on_extent(extent, move |store| held_bytes(store, extent)).await?;
        let offset = block.saturating_mul(BLOCK_BYTES);
        Ok((offset, BLOCK_BYTES.min(held.saturating_sub(offset))))
    }

    /// False if an overwrite came between.
    async fn land_block(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        chunk: Chunk,
    ) -> Result<bool, DataError> {
        let place = offset + chunk.hole;
        let replace =
            move |store: &ExtentStore, chunk: &Chunk| replace_chunk(store, extent, place, chunk);
        let landed = self.land(extent, offset, chunk, replace).await?;
        self.shared.throttle_repair(self.disk, length).await;
        Ok(landed.is_some())
    }

    /// Whether a block can be read; one that is no more needs no repair.
    async fn is_whole(&self, extent: ExtentId, block: u64) -> Result<bool, DataError> {
        self.on_extent(extent, move |store| is_whole(store, extent, block)).await
    }
}

/// Whether a block can be read, or is none any more.
fn is_whole(store: &ExtentStore, extent: ExtentId, block: u64) -> Result<bool, StoreError> {
    match store.verify(extent, block, 1) {
        // Of one that is freed, the next one was looked at.
        Ok(found) => Ok(!found.damaged.contains(&block)),
        Err(StoreError::NoExtent | StoreError::Removed) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Those of some blocks that can be read, or are none any more. One of which that cannot be said is not among them.
pub(super) fn whole_of(store: &ExtentStore, blocks: Vec<(ExtentId, u64)>) -> Vec<(ExtentId, u64)> {
    let is_whole = |place: &(ExtentId, u64)| is_whole(store, place.0, place.1).unwrap_or(false);
    blocks.into_iter().filter(is_whole).collect()
}

pub(super) fn replace_chunk(
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
    /// Repairs a block that was found damaged. False if so many are being repaired that this one has
    /// to wait for its turn.
    pub fn repair_block(&mut self, id: PartitionId, extent: ExtentId, block: u64) -> bool {
        let Some(partition) = self.partitions.get_mut(&id) else { return true };
        partition.lost.find(extent, block);
        if partition.repairing.contains(&(extent, block))
            || partition.lost.rests(extent, block, clock::now_ms())
        {
            return true;
        }
        if partition.repairing.len() >= REPAIRS_MAX {
            return false;
        }
        let Some(filling) = self.filling(id) else { return true };
        let Some(partition) = self.partitions.get_mut(&id) else { return true };
        partition.repairing.insert((extent, block));
        let sources = partition.others(self.shared.node);
        let learners = partition.other_learners(self.shared.node);
        let lackers = partition.lost.lackers(extent, block);
        tokio::task::spawn_local(async move {
            let repaired = filling.repair(extent, block, &sources, (&learners, &lackers)).await;
            let asked = [sources, learners].concat();
            let found = repaired.clone();
            let note = move |disk: &mut Disk| {
                let Some(partition) = disk.partitions.get_mut(&id) else { return };
                let mut is_found_lost = false;
                match found {
                    Ok(Repaired::Whole) => partition.lost.remove(extent, block),
                    // So that others hear that it is damaged: while a disk might read it yet, they are told to wait.
                    Ok(Repaired::Needless) => {
                        partition.lost.add_needless(extent, block, clock::now_ms());
                    }
                    // Of this replica's own there may be more in the log.
                    Err(DataError::Doubtful { .. }) if partition.is_repeating(clock::now_ms()) => {
                        partition.lost.doubt(extent, block);
                    }
                    Err(DataError::Doubtful { .. }) => {
                        is_found_lost = partition.lost.add(extent, block, &asked, clock::now_ms());
                    }
                    Err(DataError::Unsettled { .. }) => {
                        partition.lost.wait(extent, block, clock::now_ms());
                    }
                    Err(_) => partition.lost.doubt(extent, block),
                }
                if is_found_lost {
                    let bytes = (block.saturating_mul(BLOCK_BYTES), BLOCK_BYTES);
                    disk.tell_lost(id, extent, bytes);
                }
            };
            filling.shared.ask_disk(filling.disk, note).await;
            match repaired {
                Ok(Repaired::Whole) => {
                    tracing::info!(partition = %id, %extent, block, "block repaired");
                }
                Ok(Repaired::Needless) => {
                    tracing::debug!(partition = %id, %extent, block, "block not needed");
                }
                Err(error) => {
                    tracing::debug!(partition = %id, %extent, block, %error, "block not repaired yet");
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

    /// Repairs blocks that were found damaged until they are whole or lost.
    pub fn tick_repairs(&mut self) {
        if self.is_fenced() {
            return;
        }
        let now = clock::now_ms();
        let open = |partition: &mut Partition| {
            let free = REPAIRS_MAX.saturating_sub(partition.repairing.len());
            let due = partition.lost.due(now, free, |place| partition.repairing.contains(place));
            due.into_iter().map(|(extent, block)| (partition.id, extent, block)).collect::<Vec<_>>()
        };
        let due: Vec<_> = self.partitions.values_mut().flat_map(open).collect();
        for (id, extent, block) in due {
            self.repair_block(id, extent, block);
        }
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
            let result = filling.replace(extent, range, &sources, applied, Doubt::Waits).await;
            filling.shared.ask_disk(filling.disk, move |disk| then(disk, result)).await;
        });
    }
}
