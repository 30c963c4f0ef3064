//! Bytes replaced in place: overwrites from the Raft log, and repair of damaged blocks.

use std::sync::Arc;

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, ExtentId};
use milpa_wire::data::TRANSFER_BYTES_MAX;
use milpa_wire::frame::crc32c;

use super::disk::{OpenFile, Way};
use super::extent::{Extent, State, Writer};
use super::format::{BLOCK, Mark, Slot, Sum, block_count, slot_offset};
use super::{Checksums, ExtentStore, Overwriting, StoreError, flush, free, lock, read, write_lock};

/// New bytes and where they go.
struct Patch<'a> {
    offset: u64,
    bytes: &'a [u8],
    checksums: Checksums<'a>,
    unverified: Unverified,
}

/// What becomes of a block that a patch covers in part, when its other bytes do not verify.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unverified {
    /// The whole patch is refused.
    Refused,
    /// It is patched, and stays damaged.
    Damaged,
    /// It is patched, and doubtful: a crash may have left it so.
    Doubtful,
}

impl From<Overwriting> for Unverified {
    fn from(overwriting: Overwriting) -> Unverified {
        match overwriting {
            Overwriting::New => Unverified::Damaged,
            Overwriting::Repeated => Unverified::Doubtful,
        }
    }
}

impl Patch<'_> {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes.len() as u64)
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.bytes.is_empty() || self.bytes.len() > TRANSFER_BYTES_MAX {
            return Err(StoreError::Invalid("an overwrite has 1 byte to 1 MiB"));
        }
        self.checksums.verify(self.bytes)
    }
}

pub(super) fn overwrite(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    bytes: &[u8],
    checksums: Checksums<'_>,
    overwriting: Overwriting,
) -> Result<Vec<u64>, StoreError> {
    let patch = Patch { offset, bytes, checksums, unverified: overwriting.into() };
    patch.check()?;
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    if !is_ready(&extent.state(), patch.end()) {
        // The turn comes before the writer lock.
        drop(writer);
        let turn = extent.take_turn()?;
        writer = lock(&extent.writer);
        extent.check()?;
        if !is_ready(&extent.state(), patch.end()) {
            flush::run(store, &extent, &turn)?;
            mark(store, &extent, &turn, &file)?;
        }
    }
    extent.check()?;
    replace(store, &extent, &file, &mut writer, &patch)
}

/// Whether the extent is durably marked, and all blocks up to `end` are durably below the floor.
fn is_ready(state: &State, end: u64) -> bool {
    let blocks_end = end.next_multiple_of(BLOCK_BYTES);
    state.overwritten && state.floor >= blocks_end.min(state.length)
}

/// Flushes a header that says overwritten, and how far the extent is on disk.
fn mark(
    store: &ExtentStore,
    extent: &Extent,
    turn: &super::extent::TurnGuard<'_>,
    file: &OpenFile,
) -> Result<(), StoreError> {
    let mut marked = extent.state().clone_for_header();
    marked.overwritten = true;
    turn.write_header(&store.disk, file, &marked, false)?;
    turn.sync(&store.disk, file)?;
    store.sync_entry(extent)?;
    let mut state = extent.state();
    state.overwritten = true;
    state.floor = marked.flushed;
    Ok(())
}

pub(super) fn mark_overwritten(store: &ExtentStore, id: ExtentId) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let turn = extent.take_turn()?;
    extent.check()?;
    if extent.state().overwritten {
        return Ok(());
    }
    let file = store.file(&extent)?;
    mark(store, &extent, &turn, &file)
}

pub(super) fn repair_blocks(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    bytes: &[u8],
    checksums: Checksums<'_>,
) -> Result<(), StoreError> {
    let patch = Patch { offset, bytes, checksums, unverified: Unverified::Refused };
    patch.check()?;
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    if !offset.is_multiple_of(BLOCK_BYTES) {
        return Err(StoreError::Invalid("a repair begins with a block"));
    }
    replace(store, &extent, &file, &mut writer, &patch)?;
    drop(writer);
    free::after_repair(store, &extent, (offset, patch.end()))
}

pub(super) fn doubtful_bytes(
    store: &ExtentStore,
    id: ExtentId,
    block: u64,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut found = None;
    judge_block(store, id, block, |slot, bytes| {
        if read::is_doubtful(slot, bytes) {
            found = Some(bytes.to_vec());
            return Ok(None);
        }
        let is_whole = read::serve(slot, &mut bytes.to_vec()).is_some();
        if is_whole { Ok(None) } else { Err(StoreError::Corrupt { block }) }
    })?;
    Ok(found)
}

/// A crash leaves of a block what the log makes whole; rot leaves something else, and not the same on two
/// disks. Alone one cannot be told from the other.
pub(super) fn accept_doubtful(
    store: &ExtentStore,
    id: ExtentId,
    block: u64,
    others: &[Bytes],
) -> Result<bool, StoreError> {
    let Some(own) = doubtful_bytes(store, id, block)? else { return Ok(true) };
    if !others.iter().any(|other| other.starts_with(&own)) {
        return Ok(false);
    }
    judge_block(store, id, block, |slot, bytes| {
        let is_same = read::is_doubtful(slot, bytes) && bytes == own;
        Ok(is_same.then(|| Sum::whole(crc32c(bytes))))
    })?;
    tracing::info!(extent = id.0, block, "two replicas made the same of a torn block");
    Ok(true)
}

pub(super) fn settle_doubtful(
    store: &ExtentStore,
    id: ExtentId,
    block: u64,
    others: &[Bytes],
) -> Result<(), StoreError> {
    if accept_doubtful(store, id, block, others)? {
        return Ok(());
    }
    distrust(store, id, block)?;
    Err(StoreError::Corrupt { block })
}

pub(super) fn distrust(store: &ExtentStore, id: ExtentId, block: u64) -> Result<(), StoreError> {
    let judged = judge_block(store, id, block, |slot, bytes| {
        let damaged = || Sum { crc: crc32c(bytes), mark: Some(Mark::Damaged) };
        Ok((!matches!(slot, Slot::Freed { .. })).then(damaged))
    });
    match judged {
        Err(StoreError::ReadFailed { .. }) => write_lost(store, id, block),
        judged => judged,
    }
}

/// Zeros over a block that the disk cannot read, marked as damaged: what is written can be read again.
fn write_lost(store: &ExtentStore, id: ExtentId, block: u64) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let _writer = lock(&extent.writer);
    extent.check()?;
    let _content = write_lock(&extent.content);
    if extent.state().is_freed(block) {
        return Ok(());
    }
    let length = extent.state().length;
    let start = block.saturating_mul(BLOCK_BYTES);
    let held = length.saturating_sub(start).min(BLOCK_BYTES) as usize;
    let Some(zeros) = [0; BLOCK].get(..held).filter(|zeros| !zeros.is_empty()) else {
        return Err(StoreError::Shorter { length });
    };
    let lost = Sum { crc: crc32c(zeros), mark: Some(Mark::Damaged) };
    let raw = lost.slot(held as u16).encode(extent.place, block).to_le_bytes();
    let written = write_data(&file, zeros, start, length);
    let written = written.and_then(|()| file.write_at(&raw, slot_offset(block)));
    extent.state().writes += 1;
    written.map_err(|error| store.disk.write_failed("pwrite", &error))?;
    extent.slots_written(&store.disk, block, &raw, false);
    let mut state = extent.state();
    state.torn.remove(&block);
    if start + BLOCK_BYTES > length {
        state.tail = lost;
    }
    Ok(())
}

pub(super) fn lose_unreadable(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    length: u64,
) -> Result<Vec<u64>, StoreError> {
    let held = store.extent(id)?.state().length;
    let end = offset.saturating_add(length).min(held);
    let blocks = offset / BLOCK_BYTES..block_count(end);
    let is_unreadable = |block: u64| {
        let read = judge_block(store, id, block, |_, _| Ok(None));
        matches!(read, Err(StoreError::ReadFailed { .. }))
    };
    if !blocks.clone().any(is_unreadable) {
        return Ok(Vec::new());
    }
    blocks.map(|block| distrust(store, id, block).map(|()| block)).collect()
}

/// Gives a block the slot that is found for what its slot says and the disk holds; none: it stays.
fn judge_block(
    store: &ExtentStore,
    id: ExtentId,
    block: u64,
    find: impl FnOnce(Slot, &[u8]) -> Result<Option<Sum>, StoreError>,
) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let _writer = lock(&extent.writer);
    extent.check()?;
    let _content = write_lock(&extent.content);
    let length = extent.state().length;
    if block >= block_count(length) {
        return Err(StoreError::Shorter { length });
    }
    let (slots, bytes) = read::read_blocks(store, &extent, &file, (block, 1), Way::Kept)?;
    let slot = slots.first().copied().unwrap_or(Slot::Damaged);
    let Some(judged) = find(slot, &bytes)? else { return Ok(()) };
    extent.state().torn.remove(&block);
    let raw = judged.slot(bytes.len() as u16).encode(extent.place, block).to_le_bytes();
    let written = file.write_at(&raw, slot_offset(block));
    extent.state().writes += 1;
    written.map_err(|error| store.disk.write_failed("pwrite", &error))?;
    extent.slots_written(&store.disk, block, &raw, false);
    let mut state = extent.state();
    if (block + 1) * BLOCK_BYTES > length {
        state.tail = judged;
    }
    Ok(())
}

/// Replaces bytes run by run of blocks that are not freed. The writer lock keeps the length.
fn replace(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    writer: &mut Writer,
    patch: &Patch<'_>,
) -> Result<Vec<u64>, StoreError> {
    let _content = write_lock(&extent.content);
    let length = extent.state().length;
    if patch.end() > length {
        return Err(StoreError::Shorter { length });
    }
    let mut unverified = Vec::new();
    let last = block_count(patch.end());
    let mut block = patch.offset / BLOCK_BYTES;
    while block < last {
        let end = {
            let state = extent.state();
            let is_freed = state.is_freed(block);
            let end = (block..last).find(|next| state.is_freed(*next) != is_freed).unwrap_or(last);
            if is_freed {
                block = end;
                continue;
            }
            end
        };
        unverified.extend(replace_run(store, extent, file, writer, patch, block..end)?);
        block = end;
    }
    Ok(unverified)
}

fn replace_run(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    writer: &mut Writer,
    patch: &Patch<'_>,
    blocks: std::ops::Range<u64>,
) -> Result<Vec<u64>, StoreError> {
    let length = extent.state().length;
    writer.slots.clear();
    let (mut last, mut unverified) = (Sum::default(), Vec::new());
    for block in blocks.clone() {
        let (sum, length) = patched(store, extent, file, patch, block, length)?;
        let slot = sum.slot(length);
        writer.slots.extend_from_slice(&slot.encode(extent.place, block).to_le_bytes());
        unverified.extend(sum.mark.map(|_| block));
        last = sum;
    }
    let start = patch.offset.max(blocks.start * BLOCK_BYTES);
    let end = patch.end().min(blocks.end * BLOCK_BYTES);
    let written = write_data(file, part(patch, start, end), start, length)
        .and_then(|()| file.write_at(&writer.slots, slot_offset(blocks.start)));
    // Not before: a flush that runs meanwhile would count what it has not seen. Also if it failed.
    extent.state().writes += 1;
    written.map_err(|error| store.disk.write_failed("pwrite", &error))?;
    extent.slots_written(&store.disk, blocks.start, &writer.slots, false);
    let mut state = extent.state();
    if blocks.end * BLOCK_BYTES > length {
        state.tail = last;
    }
    Ok(unverified)
}

/// Writes over bytes of an extent of so many. The extent's last block is written whole if what it holds is replaced:
/// else the disk would have to read the rest of it, and cannot if it is to be repaired for that. What is behind the end is
/// of no consequence.
fn write_data(file: &OpenFile, bytes: &[u8], start: u64, length: u64) -> std::io::Result<()> {
    let last = length / BLOCK_BYTES * BLOCK_BYTES;
    let replaces_last = start <= last && last < length && start + bytes.len() as u64 == length;
    let before = if replaces_last { last - start } else { bytes.len() as u64 };
    let (before, end) = bytes.split_at_checked(before as usize).unwrap_or((bytes, &[]));
    if !before.is_empty() {
        file.write_at(before, start)?;
    }
    let mut block = [0; BLOCK];
    match block.get_mut(..end.len()) {
        Some(held) if !end.is_empty() => {
            held.copy_from_slice(end);
            file.write_at(&block, last)
        }
        _ => Ok(()),
    }
}

/// The part of the new bytes that lies in `[start, end)` of the extent.
fn part<'a>(patch: &Patch<'a>, start: u64, end: u64) -> &'a [u8] {
    let (low, high) = (start - patch.offset, end - patch.offset);
    patch.bytes.get(low as usize..high as usize).unwrap_or(&[])
}

/// What the slot of a block will say: the sum of its bytes, and how many there are.
fn patched(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    patch: &Patch<'_>,
    block: u64,
    length: u64,
) -> Result<(Sum, u16), StoreError> {
    let block_start = block * BLOCK_BYTES;
    let block_end = length.min(block_start + BLOCK_BYTES);
    let length = (block_end - block_start) as u16;
    let (start, end) = (patch.offset.max(block_start), patch.end().min(block_end));
    let piece = part(patch, start, end);
    if piece.len() == usize::from(length) {
        extent.state().torn.remove(&block);
        return Ok((Sum::whole(crc32c(piece)), length));
    }
    let (slots, mut bytes) = read::read_blocks(store, extent, file, (block, 1), Way::Kept)?;
    let slot = slots.first().copied().unwrap_or(Slot::Damaged);
    let was_whole = read::serve(slot, &mut bytes).is_some();
    let was_doubtful = read::is_doubtful(slot, &bytes);
    if !was_whole && patch.unverified == Unverified::Refused {
        return Err(StoreError::Corrupt { block });
    }
    debug_assert!(bytes.len() <= BLOCK, "one block was read");
    let was_damaged = matches!(slot, Slot::Marked { mark: Mark::Damaged, .. });
    let within = (start - block_start) as usize;
    let target = bytes.get_mut(within..within + piece.len());
    target.ok_or(StoreError::Corrupt { block })?.copy_from_slice(piece);
    let crc = crc32c(&bytes);
    // The checksum of what the overwrite left, before a crash, proves all of it. So does that of what a
    // later one left, once the log has come to that one.
    let found = Slot::Live { crc, length };
    let may_be_torn = patch.unverified == Unverified::Doubtful;
    let was_left_so = may_be_torn && extent.state().torn.get(&block) == Some(&found);
    if was_whole || slot == found || was_left_so {
        extent.state().torn.remove(&block);
        return Ok((Sum::whole(crc), length));
    }
    let is_doubtful = was_doubtful || (may_be_torn && !was_damaged);
    if is_doubtful && !was_doubtful {
        extent.state().torn.insert(block, slot);
    }
    if !was_doubtful {
        tracing::info!(
            extent = extent.id.0,
            block,
            is_doubtful,
            "an overwrite found a damaged block"
        );
    }
    let mark = if is_doubtful { Mark::Doubtful } else { Mark::Damaged };
    Ok((Sum { crc, mark: Some(mark) }, length))
}
