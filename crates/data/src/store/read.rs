//! Reading: one read of the blocks that are touched, each verified, every time.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use milpa_host::disk::page_aligned;
use milpa_types::{BLOCK_BYTES, ExtentId};
use milpa_wire::data::TRANSFER_BYTES_MAX;
use milpa_wire::frame::crc32c;

use super::disk::{OpenFile, Way};
use super::extent::Extent;
use super::format::{BLOCK, Mark, Slot, block_count};
use super::{ExtentStore, RepairBytes, StoreError, StoredBytes, read_lock};

pub(super) fn read(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    length: u32,
) -> Result<StoredBytes, StoreError> {
    if length as usize > TRANSFER_BYTES_MAX {
        return Err(StoreError::Invalid("a read has at most 1 MiB"));
    }
    let extent = store.extent(id)?;
    let file = store.file(&extent)?;
    let _content = read_lock(&extent.content);
    extent.check()?;
    read_range(store, &extent, &file, (offset, length as usize), Way::Kept)
}

pub(super) fn read_for_repair(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    length: u64,
) -> Result<RepairBytes, StoreError> {
    let extent = store.extent(id)?;
    let file = store.file(&extent)?;
    let _content = read_lock(&extent.content);
    extent.check()?;
    let (start, end) = {
        let state = extent.state();
        if offset > state.length {
            return Err(StoreError::Shorter { length: state.length });
        }
        let end = state.length.min(offset.saturating_add(length));
        // Also a part of such a block: as zeros it would be taken for bytes, by who has not freed it yet.
        let is_hole = |block: &u64| state.is_freed(*block);
        let blocks = offset / BLOCK_BYTES..block_count(end);
        let live = blocks.clone().find(|block| !is_hole(block)).unwrap_or(blocks.end);
        let start = (live * BLOCK_BYTES).clamp(offset, end);
        let cap = end.min(start + TRANSFER_BYTES_MAX as u64);
        let hole = (live..block_count(cap)).find(is_hole);
        (start, hole.map_or(cap, |block| block * BLOCK_BYTES).max(start))
    };
    let range = (start, (end - start) as usize);
    let stored = read_range(store, &extent, &file, range, Way::Unkept)?;
    Ok(RepairBytes { hole: start - offset, stored })
}

/// The caller holds the content lock.
fn read_range(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    (offset, length): (u64, usize),
    way: Way,
) -> Result<StoredBytes, StoreError> {
    let held = extent.state().length;
    let end = offset.checked_add(length as u64).filter(|end| *end <= held);
    let end = end.ok_or(StoreError::Shorter { length: held })?;
    if length == 0 {
        return Ok(StoredBytes { bytes: Bytes::new(), checksums: Vec::new() });
    }
    let first = offset / BLOCK_BYTES;
    let count = block_count(end) - first;
    let (slots, mut buffer) = read_blocks(store, extent, file, (first, count), way)?;
    for ((block, slot), bytes) in (first..).zip(&slots).zip(buffer.chunks_mut(BLOCK)) {
        serve(*slot, bytes).ok_or_else(|| not_served(*slot, bytes, block))?;
    }

    let start = (offset - first * BLOCK_BYTES) as usize;
    let whole = buffer.freeze();
    let available = whole.len();
    if start + length > available {
        // The last block is shorter on disk than the extent is long.
        return Err(StoreError::Corrupt { block: first + count - 1 });
    }
    let mut checksums = Vec::with_capacity(slots.len());
    for (index, slot) in slots.iter().enumerate() {
        let block = index * BLOCK..available.min((index + 1) * BLOCK);
        let piece = block.start.max(start)..block.end.min(start + length);
        let known = match slot {
            Slot::Live { crc, .. } if piece == block => Some(*crc),
            _ => None,
        };
        let bytes = || whole.get(piece.clone()).unwrap_or(&[]);
        checksums.push(known.unwrap_or_else(|| crc32c(bytes())));
    }
    Ok(StoredBytes { bytes: whole.slice(start..start + length), checksums })
}

/// Finds out which block it is that the disk cannot read: that one is to be repaired, and no other. Freed ones may be
/// unreadable.
fn read_one_by_one(
    file: &OpenFile,
    first: u64,
    (buffer, way): (&mut [u8], Way),
    freed: &[u64],
) -> Result<(), StoreError> {
    for (block, bytes) in (first..).zip(buffer.chunks_mut(BLOCK)) {
        if freed.contains(&block) {
            continue;
        }
        let read = file.read(bytes, block * BLOCK_BYTES, way);
        read.map_err(|source| StoreError::ReadFailed { block, source })?;
    }
    Ok(())
}

/// Reads blocks, not yet verified, and what is known of them.
pub(super) fn read_blocks(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    (first, count): (u64, u64),
    way: Way,
) -> Result<(Vec<Slot>, BytesMut), StoreError> {
    // The state before the slots: it names the one slot that may change meanwhile.
    let (tail, length, freed) = {
        let state = extent.state();
        let blocks = first..first + count;
        let freed: Vec<u64> = match state.dead.is_empty() {
            true => Vec::new(),
            false => blocks.filter(|block| state.is_freed(*block)).collect(),
        };
        (state.tail(), state.length, freed)
    };
    let failed = |source| StoreError::ReadFailed { block: first, source };
    let mut slots = extent.slots(&store.disk, file, first, count).map_err(failed)?;
    // Freed, and the record of it is lost: a repair learns it from others. Looked at anew, as what is freed meanwhile
    // is dead before its slots say so.
    for (block, slot) in (first..).zip(&mut slots) {
        if let Slot::Freed { length } = *slot
            && !extent.state().is_dead(block)
        {
            // Not only unreadable: what the log made of it again would be the same zeros at all who lost the record.
            *slot = Slot::Marked { mark: Mark::Damaged, crc: !0, length };
        }
    }
    let mut put = |block: u64, slot: Slot| {
        let index = block.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        if let Some(target) = index.and_then(|index| slots.get_mut(index)) {
            *target = slot;
        }
    };
    if let Some((block, slot)) = tail {
        put(block, slot);
    }
    for block in freed.iter().copied() {
        let block_length = (length - block * BLOCK_BYTES).min(BLOCK_BYTES);
        put(block, Slot::Freed { length: block_length as u16 });
    }
    let end = length.min((first + count) * BLOCK_BYTES);
    let bytes = end.saturating_sub(first * BLOCK_BYTES) as usize;
    let mut buffer = match way {
        Way::Kept => BytesMut::zeroed(bytes),
        Way::Unkept | Way::Direct => page_aligned(bytes),
    };
    match file.read(&mut buffer, first * BLOCK_BYTES, way) {
        Err(_) if count > 1 || !freed.is_empty() => {
            read_one_by_one(file, first, (&mut buffer, way), &freed)?;
        }
        read => read.map_err(failed)?,
    }
    Ok((slots, buffer))
}

/// Whether a block's bytes are what its slot says; those of a freed one become zeros.
pub(super) fn serve(slot: Slot, bytes: &mut [u8]) -> Option<()> {
    match slot {
        Slot::Live { crc, length } if usize::from(length) == bytes.len() => {
            (crc32c(bytes) == crc).then_some(())
        }
        Slot::Freed { .. } => {
            bytes.fill(0);
            Some(())
        }
        _ => None,
    }
}

/// Whether a block was torn by a crash and completed by the log, and nobody knows its other bytes.
pub(super) fn is_doubtful(slot: Slot, bytes: &[u8]) -> bool {
    matches!(slot, Slot::Marked { mark: Mark::Doubtful, crc, length }
        if usize::from(length) == bytes.len() && crc == crc32c(bytes))
}

/// Why a block is not served.
fn not_served(slot: Slot, bytes: &[u8], block: u64) -> StoreError {
    if is_doubtful(slot, bytes) {
        StoreError::Doubtful { block }
    } else {
        StoreError::Corrupt { block }
    }
}

/// The valid bytes of one block.
pub(super) fn verified_block(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    block: u64,
) -> Result<BytesMut, StoreError> {
    let (slots, mut buffer) = read_blocks(store, extent, file, (block, 1), Way::Kept)?;
    let slot = slots.first().copied().unwrap_or(Slot::Damaged);
    serve(slot, &mut buffer).ok_or_else(|| not_served(slot, &buffer, block))?;
    Ok(buffer)
}
