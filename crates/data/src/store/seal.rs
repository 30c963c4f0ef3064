//! The end of an extent: sealing, cutting, clearing what lies beyond it.

use std::sync::Arc;

use milpa_types::{BLOCK_BYTES, ExtentId};
use milpa_wire::frame::crc32c;

use super::disk::OpenFile;
use super::extent::{Extent, TurnGuard, Writer};
use super::format::{
    BLOCKS_MAX, FILE_BYTES_MAX, HEADER_OFFSET, Header, SLOT_BYTES, Sum, block_count, slot_offset,
};
use super::{ExtentStore, StoreError, free, lock, read, write_lock};

pub(super) fn seal(store: &ExtentStore, id: ExtentId, length: u64) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let turn = extent.take_turn()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    let held = extent.state().length;
    if held < length {
        return Err(StoreError::Shorter { length: held });
    }
    if held == length && !writer.needs_cut {
        let mut state = extent.state();
        if state.sealed {
            return Ok(());
        }
        let mut sealed = state.clone_for_header();
        drop(state);
        sealed.sealed = true;
        turn.write_header(&store.disk, &file, &sealed, false)?;
        state = extent.state();
        state.sealed = true;
        state.writes += 1;
    } else {
        let _content = write_lock(&extent.content);
        cut(store, &extent, (&turn, &file), &mut writer, (length, true))?;
    }
    drop((writer, turn));
    free::after_seal(store, &extent)
}

/// No end that anybody decided: nothing is sealed, and nothing is taken for dead as a whole.
pub(super) fn cut_for_repair(
    store: &ExtentStore,
    id: ExtentId,
    block: u64,
) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let turn = extent.take_turn()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    let length = block.saturating_mul(BLOCK_BYTES);
    if extent.state().length <= length {
        return Ok(());
    }
    let _content = write_lock(&extent.content);
    cut(store, &extent, (&turn, &file), &mut writer, (length, false))
}

/// Ends a cut that a crash has interrupted, as it had begun.
pub(super) fn finish_cut(
    store: &ExtentStore,
    id: ExtentId,
    header: &Header,
) -> Result<(), StoreError> {
    if header.sealed {
        return seal(store, id, header.length);
    }
    let extent = store.extent(id)?;
    store.disk.check()?;
    let turn = extent.take_turn()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    let _content = write_lock(&extent.content);
    let length = extent.state().length.min(header.length);
    cut(store, &extent, (&turn, &file), &mut writer, (length, false))
}

/// Cuts an extent, durably, and seals it or opens it.
fn cut(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    (turn, file): (&TurnGuard<'_>, &OpenFile),
    writer: &mut Writer,
    (length, is_sealed): (u64, bool),
) -> Result<(), StoreError> {
    let tail = prefix_sum(store, extent, file, length)?;
    let mut cut = extent.state().clone_for_header();
    (cut.sealed, cut.length, cut.tail) = (is_sealed, length, tail);
    cut.committed = cut.committed.min(length);
    turn.write_header(&store.disk, file, &cut, true)?;
    turn.sync(&store.disk, file)?;
    store.sync_entry(extent)?;
    adopt_length(extent, length, tail, is_sealed);
    writer.needs_cut = true;
    clear_beyond_end(store, extent, file, writer)?;
    cut.flushed = length;
    // Flushed, so that no cut is repeated over later overwrites.
    turn.write_header(&store.disk, file, &cut, false)?;
    turn.sync(&store.disk, file)?;
    let mut state = extent.state();
    (state.flushed, state.floor, state.flushed_writes) = (length, length, state.writes);
    Ok(())
}

fn adopt_length(extent: &Extent, length: u64, tail: Sum, is_sealed: bool) {
    let mut state = extent.state();
    state.sealed = is_sealed;
    (state.length, state.tail) = (length, tail);
    state.committed = state.committed.min(length);
    state.flushed = state.flushed.min(length);
    state.floor = state.floor.min(length);
}

/// What is known of the last block when the extent is cut to `length`; nothing if that is a block boundary.
fn prefix_sum(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    length: u64,
) -> Result<Sum, StoreError> {
    let (block, within) = (length / BLOCK_BYTES, (length % BLOCK_BYTES) as usize);
    let state = extent.state();
    if within == 0 || length == state.length {
        return Ok(if within == 0 { Sum::default() } else { state.tail });
    }
    drop(state);
    let bytes = read::verified_block(store, extent, file, block)?;
    Ok(Sum::whole(crc32c(bytes.get(..within).unwrap_or(&bytes))))
}

/// Clears data and slots beyond the end and rewrites the last slot, all flushed, if need be.
pub(super) fn clear_beyond_end(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &OpenFile,
    writer: &mut Writer,
) -> Result<(), StoreError> {
    if !writer.needs_cut {
        return Ok(());
    }
    let (length, tail) = {
        let state = extent.state();
        (state.length, state.tail())
    };
    let failed = |error| store.disk.write_failed("fallocate", &error);
    // Not the rest of the last block, for which the disk would have to read it: that is of no consequence.
    let beyond = block_count(length);
    let start = beyond * BLOCK_BYTES;
    if start < HEADER_OFFSET {
        file.punch(start, HEADER_OFFSET - start).map_err(failed)?;
    }
    if beyond < BLOCKS_MAX {
        let start = slot_offset(beyond);
        file.punch(start, FILE_BYTES_MAX - start).map_err(failed)?;
    }
    if let Some((block, slot)) = tail {
        let raw: [u8; SLOT_BYTES] = slot.encode(extent.place, block).to_le_bytes();
        file.write_at(&raw, slot_offset(block)).map_err(failed)?;
    }
    extent.state().writes += 1;
    lock(&extent.sums).clear();
    file.sync().map_err(|error| store.disk.sync_failed(&error))?;
    writer.needs_cut = false;
    Ok(())
}

pub(super) fn reopen_for_repair(store: &ExtentStore, id: ExtentId) -> Result<(), StoreError> {
    let extent = store.extent(id)?;
    store.disk.check()?;
    let turn = extent.take_turn()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    if !extent.state().sealed {
        return Ok(());
    }
    let mut open = extent.state().clone_for_header();
    open.sealed = false;
    turn.write_header(&store.disk, &file, &open, false)?;
    turn.sync(&store.disk, &file)?;
    extent.state().sealed = false;
    writer.needs_cut = true;
    Ok(())
}
