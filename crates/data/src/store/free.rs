//! Giving space back: dead ranges, punched blocks, removed extents.
//!
//! Memory first, then the log, flushed, then the punches. A crash in between is made good when the
//! range is freed again, or simply by memory: whether a block is freed is decided by the dead ranges, the
//! marks in the slots and the holes only follow.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use milpa_types::{BLOCK_BYTES, EXTENT_BYTES_MAX, ExtentId};
use milpa_wire::frame::crc32c;

use super::extent::Extent;
use super::format::{BLOCK, HEADER_OFFSET, Slot, Sum, block_count, slot_offset};
use super::freed_log::{Noting, Record};
use super::piece::{self, PIECE_HEADER_BYTES};
use super::{ExtentStore, Freed, StoreError, extent_path, lock, write_lock};

/// Blocks with headers of pieces that may be dead.
#[derive(Debug, Default)]
pub struct HeaderBlocks {
    /// No replica has these: nobody waits until the disk reads them.
    pub lost: BTreeSet<(ExtentId, u64)>,
    /// These cannot be read, and are to be repaired.
    pub damaged: Vec<(ExtentId, u64)>,
}

/// What is to be done once the log has it.
#[derive(Default)]
struct Plan {
    records: Vec<Record>,
    punches: Vec<(Arc<Extent>, u64, u64)>,
    removals: Vec<ExtentId>,
}

impl Plan {
    fn remove(&mut self, id: ExtentId) {
        self.records.push(Record::Removed { first: id, count: 1 });
        self.removals.push(id);
    }
}

pub(super) fn free(
    store: &ExtentStore,
    ranges: &[Freed],
    headers: &mut HeaderBlocks,
) -> Result<(), StoreError> {
    store.disk.check()?;
    store.check_open()?;
    let noting = store.unlogged.begin();
    let (mut plan, mut unread) = (Plan::default(), Ok(()));
    for range in ranges {
        let noted = match store.extent(range.extent) {
            // Also one that is not here: a late replicate must not make it.
            Ok(_) | Err(StoreError::NoExtent) if range.length == u64::MAX => {
                plan.remove(range.extent);
                Ok(())
            }
            Ok(extent) => note_dead(store, &extent, range, &noting, &mut plan, headers),
            Err(StoreError::NoExtent) => note_absent(store, range, &noting, &mut plan, headers),
            // Removed.
            Err(_) => Ok(()),
        };
        unread = unread.and(noted);
    }
    // What was noted stands all the same; the rest is found when the caller asks again.
    execute(store, &plan, noting).and(unread)
}

fn execute(store: &ExtentStore, plan: &Plan, noting: Noting<'_>) -> Result<(), StoreError> {
    let logged = lock(&store.freed).append(store, &plan.records);
    drop(noting);
    match &logged {
        // A full disk is no reason not to give space back. The records wait in memory, and the
        // caller asks again: nothing is confirmed that a crash could make undone.
        Ok(()) | Err(StoreError::NoSpace) => {}
        Err(_) => return logged,
    }
    for (extent, start, end) in &plan.punches {
        punch(store, extent, *start, *end)?;
    }
    for id in &plan.removals {
        remove(store, *id)?;
    }
    logged
}

/// The bytes of an order. No order ends beyond the longest extent.
fn bounds(range: &Freed) -> (u64, u64) {
    (range.offset, range.offset.saturating_add(range.length).min(EXTENT_BYTES_MAX))
}

/// Leaves word for an extent that is not here, or not yet.
fn note_absent(
    store: &ExtentStore,
    range: &Freed,
    noting: &Noting<'_>,
    plan: &mut Plan,
    headers: &mut HeaderBlocks,
) -> Result<(), StoreError> {
    let (start, end) = bounds(range);
    let mut freed = lock(&store.freed);
    // Looked up again under the lock under which a new extent takes over what is left for it.
    if let Some(extent) = store.present(range.extent) {
        drop(freed);
        return note_dead(store, &extent, range, noting, plan, headers);
    }
    if start < end && (freed.note_absent(range.extent, start, end) || noting.has_company()) {
        plan.records.push(Record::Dead { extent: range.extent, start, end });
    }
    Ok(())
}

/// Adds a range to the extent's dead ones and plans what follows from it. Bytes that this replica
/// has yet to get from a peer count like those that it has.
fn note_dead(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    range: &Freed,
    noting: &Noting<'_>,
    plan: &mut Plan,
    headers: &mut HeaderBlocks,
) -> Result<(), StoreError> {
    let (mut start, end) = bounds(range);
    let mut is_new = note_range(extent, start, end);
    let header = dead_header(store, extent, start);
    if let Ok(Some(header)) = header {
        is_new |= note_range(extent, header, start);
        start = header;
    } else if is_new {
        extent.state().part_frees += 1;
    }
    if is_new {
        plan.records.push(Record::Dead { extent: extent.id, start, end });
    } else if noting.has_company() {
        // With what is dead around it, as a header that died with it.
        let run = extent.state().dead.run_at(start);
        let record = |(start, end)| Record::Dead { extent: extent.id, start, end };
        plan.records.extend(run.map(record));
    }
    // Also if it was known: a crash may have come between the log and what follows.
    if is_all_dead(extent) {
        plan.remove(extent.id);
    } else {
        plan.punches.push((Arc::clone(extent), start, end));
    }
    let Err(error) = header else { return Ok(()) };
    let block = error.damaged_block().map(|block| (extent.id, block));
    headers.damaged.extend(block);
    match error {
        // It goes when the block is repaired, and that waits for no one to ask again.
        StoreError::Corrupt { .. } | StoreError::Doubtful { .. } => Ok(()),
        StoreError::ReadFailed { .. } if block.is_some_and(|it| headers.lost.contains(&it)) => {
            Ok(())
        }
        error => Err(error),
    }
}

/// Whether some of these bytes were not known to be dead.
fn note_range(extent: &Extent, start: u64, end: u64) -> bool {
    let mut state = extent.state();
    let is_new = !state.dead.covers(start, end);
    state.dead.insert(start, end);
    is_new
}

/// Where the header of a piece begins whose bytes are now all dead, `at` being one of them. An error if
/// the disk did not give it, this time or before its block is repaired: left alone, it would stay here and
/// go at the other replicas.
fn dead_header(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    at: u64,
) -> Result<Option<u64>, StoreError> {
    if !extent.id.is_small() {
        return Ok(None);
    }
    let Some((run_start, run_end)) = extent.state().dead.run_at(at) else { return Ok(None) };
    let Some(header_at) = run_start.checked_sub(PIECE_HEADER_BYTES as u64) else {
        return Ok(None);
    };
    // Given back with its block: rot, or a crash while the log was full, may have taken the record.
    if is_punched(store, extent, header_at / BLOCK_BYTES, run_start.div_ceil(BLOCK_BYTES)) {
        return Ok(Some(header_at));
    }
    let header = match piece::read_header(store, extent.id, header_at) {
        Ok(header) => header,
        Err(error) if error.damaged_block().is_some() => return Err(error),
        Err(_) => None,
    };
    let is_dead = |length: u32| run_start + u64::from(length) <= run_end;
    Ok(header.filter(|header| is_dead(header.length)).map(|_| header_at))
}

fn is_all_dead(extent: &Extent) -> bool {
    let state = extent.state();
    state.sealed && state.length > 0 && state.dead.covers(0, state.length)
}

/// Marks and punches the blocks in and around a range that are dead as a whole.
pub(super) fn punch(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    start: u64,
    end: u64,
) -> Result<(), StoreError> {
    let file = match store.file(extent) {
        Err(StoreError::Removed) => return Ok(()),
        file => file?,
    };
    // Nobody opens the extent and adds to its last block meanwhile.
    let _writer = lock(&extent.writer);
    let _content = write_lock(&extent.content);
    if extent.check().is_err() {
        return Ok(());
    }
    let runs = freed_runs(extent, start, end);
    for (first, last) in runs {
        if is_punched(store, extent, first, last) {
            continue;
        }
        let punched = punch_run(store, extent, &file, first, last);
        match punched {
            // Splitting a file's map can need a block. The range is dead all the same.
            Ok(()) | Err(StoreError::NoSpace) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Runs of freed blocks that touch `[start, end)`.
fn freed_runs(extent: &Extent, start: u64, end: u64) -> Vec<(u64, u64)> {
    let state = extent.state();
    let last = block_count(end.min(state.length));
    let mut runs = Vec::new();
    let mut block = start / BLOCK_BYTES;
    while block < last {
        let run_end = (block..last).find(|block| !state.is_freed(*block)).unwrap_or(last);
        if run_end > block {
            runs.push((block, run_end));
        }
        block = run_end + 1;
    }
    runs
}

/// Whether all blocks `[first, last)` are marked as freed already. No, if that cannot be read.
fn is_punched(store: &ExtentStore, extent: &Arc<Extent>, first: u64, last: u64) -> bool {
    let Ok(file) = store.file(extent) else { return false };
    let slots = extent.slots(&store.disk, &file, first, last - first);
    slots.is_ok_and(|slots| slots.iter().all(|slot| matches!(slot, Slot::Freed { .. })))
}

fn punch_run(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    file: &super::disk::OpenFile,
    first: u64,
    last: u64,
) -> Result<(), StoreError> {
    let length = extent.state().length;
    let slots: Vec<u8> = (first..last)
        .flat_map(|block| {
            let block_length = (length - block * BLOCK_BYTES).min(BLOCK_BYTES) as u16;
            Slot::Freed { length: block_length }.encode(extent.place, block).to_le_bytes()
        })
        .collect();
    let failed = |error| store.disk.write_failed("fallocate", &error);
    file.write_at(&slots, slot_offset(first)).map_err(failed)?;
    extent.slots_written(&store.disk, first, &slots, false);
    let end = (last * BLOCK_BYTES).min(HEADER_OFFSET);
    file.punch(first * BLOCK_BYTES, end - first * BLOCK_BYTES).map_err(failed)?;
    let mut state = extent.state();
    if last * BLOCK_BYTES > length {
        // Should the extent be opened again, its last block goes on from zeros.
        let within = (length % BLOCK_BYTES) as usize;
        state.tail = Sum::whole(crc32c([0; BLOCK].get(..within).unwrap_or(&[])));
    }
    state.writes += 1;
    Ok(())
}

/// What a seal makes possible: all bytes are here now, and none will follow. What was freed before
/// it arrived is given back, and the last block, or the whole extent, may have been waiting for it.
pub(super) fn after_seal(store: &ExtentStore, extent: &Arc<Extent>) -> Result<(), StoreError> {
    let runs = extent.state().dead.iter().collect();
    settle(store, extent, runs)
}

/// What the repair of bytes `[start, end)` makes possible: the headers among them, of pieces that are
/// dead, can be read now.
pub(super) fn after_repair(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    (start, end): (u64, u64),
) -> Result<(), StoreError> {
    let headers = start..end + PIECE_HEADER_BYTES as u64;
    let runs = extent.state().dead.iter().filter(|(at, _)| headers.contains(at)).collect();
    settle(store, extent, runs)
}

/// Looks at dead runs again, and gives back what can be.
fn settle(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    runs: Vec<(u64, u64)>,
) -> Result<(), StoreError> {
    let noting = store.unlogged.begin();
    let mut plan = Plan::default();
    for (start, end) in runs {
        // The bytes stand whatever the disk gives.
        let header = dead_header(store, extent, start).unwrap_or(None);
        if let Some(header) = header {
            note_range(extent, header, start);
            plan.records.push(Record::Dead { extent: extent.id, start: header, end });
        }
        plan.punches.push((Arc::clone(extent), header.unwrap_or(start), end));
    }
    if is_all_dead(extent) {
        plan.punches.clear();
        plan.remove(extent.id);
    }
    match execute(store, &plan, noting) {
        // What the log could not take waits in memory.
        Err(StoreError::NoSpace) => Ok(()),
        result => result,
    }
}

/// Removes what a crash kept from being removed: extents that were sealed, and dead as a whole.
pub(super) fn after_recovery(store: &ExtentStore) -> Result<(), StoreError> {
    let mut plan = Plan::default();
    for extent in store.all_extents().iter().filter(|extent| is_all_dead(extent)) {
        plan.remove(extent.id);
    }
    execute(store, &plan, store.unlogged.begin())
}

/// Takes an extent out of memory and its file out of the directory. The log has it already.
pub(super) fn remove(store: &ExtentStore, id: ExtentId) -> Result<(), StoreError> {
    let extent = write_lock(&store.extents).remove(&id);
    if let Some(extent) = extent {
        let _writer = lock(&extent.writer);
        let _content = write_lock(&extent.content);
        extent.set_removed();
        store.disk.discard_file(store.number, id);
        lock(&extent.sums).clear();
    }
    match store.disk.files().remove(&extent_path(&store.directory, id)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(store.disk.write_failed("unlink", &error))
        }
        _ => Ok(()),
    }
}
