//! Making bytes durable. Callers that meet at one extent share a flush.

use std::sync::Arc;

use milpa_types::ExtentId;

use super::extent::{Extent, TurnGuard};
use super::{ExtentStore, StoreError};

pub(super) fn flush(store: &ExtentStore, extents: &[(ExtentId, u64)]) -> Result<(), StoreError> {
    store.disk.check()?;
    let mut newest_entry = 0;
    for (id, at_least) in extents {
        match flush_one(store, *id, *at_least) {
            Ok(entry) => newest_entry = newest_entry.max(entry),
            // Removed, perhaps just now: no file refers to its bytes any more.
            Err(StoreError::Removed) => {}
            Err(error) => return Err(error),
        }
    }
    // After the files, once for all of them: their names.
    store.entries.sync(newest_entry, &store.disk, &store.directory)
}

pub(super) fn check_held(
    store: &ExtentStore,
    extents: &[(ExtentId, u64)],
) -> Result<(), StoreError> {
    store.disk.check()?;
    for (id, at_least) in extents {
        match held(store, *id, *at_least) {
            Ok(_) | Err(StoreError::Removed) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn held(store: &ExtentStore, id: ExtentId, at_least: u64) -> Result<Arc<Extent>, StoreError> {
    let extent = store.extent(id)?;
    let length = extent.state().length;
    if length < at_least { Err(StoreError::Shorter { length }) } else { Ok(extent) }
}

/// Flushes one extent and returns its entry in the directory.
fn flush_one(store: &ExtentStore, id: ExtentId, at_least: u64) -> Result<u64, StoreError> {
    let extent = held(store, id, at_least)?;
    flush_extent(store, &extent)?;
    Ok(extent.entry)
}

/// Flushes one extent, unless nothing changed since its last flush.
pub(super) fn flush_extent(store: &ExtentStore, extent: &Arc<Extent>) -> Result<(), StoreError> {
    let is_dirty = extent.state().is_dirty();
    if !is_dirty && extent.is_settled() {
        return Ok(());
    }
    let Some(turn) = extent.take_flush_turn(&store.disk)? else { return Ok(()) };
    if is_dirty {
        run(store, extent, &turn)?;
    } else {
        // Left behind by a process that died: whole, but perhaps not yet on the disk.
        turn.sync(&store.disk, &*store.file(extent)?)?;
    }
    turn.flush_done();
    Ok(())
}

/// One flush: the header that describes the end, everything with it to the disk, then the header
/// that says so. The latter needs no flush of its own: without it, recovery only verifies more.
pub(super) fn run(
    store: &ExtentStore,
    extent: &Extent,
    turn: &TurnGuard<'_>,
) -> Result<(), StoreError> {
    let file = store.file(extent)?;
    let before = extent.state().clone_for_header();
    turn.write_header(&store.disk, &file, &before, false)?;
    turn.sync(&store.disk, &file)?;
    let mut after = before;
    {
        let mut state = extent.state();
        state.flushed = after.length;
        state.floor = after.flushed;
        state.flushed_writes = after.writes;
    }
    after.flushed = after.length;
    turn.write_header(&store.disk, &file, &after, false)
}
