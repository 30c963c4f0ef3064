//! Bytes at the end of an extent: one write of data, one small write of checksum slots, no read.

use std::sync::Arc;

use milpa_types::{BLOCK_BYTES, EXTENT_BYTES_MAX, ExtentId};
use milpa_wire::data::TRANSFER_BYTES_MAX;
use milpa_wire::frame::crc32c;

use super::checksums::{extend_crc, pieces};
use super::disk::{OpenFile, Way};
use super::extent::{Extent, State, Writer};
use super::format::{BLOCK, Mark, Place, Slot, Sum, slot_offset};
use super::freed_log::Record;
use super::{Checksums, ExtentStore, StoreError, checksums_of, lock, seal};

pub(super) fn append(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    bytes: &[u8],
    checksums: Checksums<'_>,
    way: Way,
) -> Result<u64, StoreError> {
    if bytes.is_empty() || bytes.len() > TRANSFER_BYTES_MAX {
        return Err(StoreError::Invalid("an append has 1 byte to 1 MiB"));
    }
    checksums.verify(bytes)?;
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    let tail = admit(&extent.state(), offset, bytes.len() as u64)?;
    seal::clear_beyond_end(store, &extent, &file, &mut writer)?;

    let first = offset / BLOCK_BYTES;
    let mut slots = std::mem::take(&mut writer.slots);
    let last = encode_slots(&mut slots, extent.place, offset, tail, bytes, checksums);
    let written = write(store, &file, (offset, bytes, way), &slots, &mut writer);
    if written.is_ok() {
        extent.slots_written(&store.disk, first, &slots, true);
        let mut state = extent.state();
        state.length = offset + bytes.len() as u64;
        state.tail = last;
        state.writes += 1;
    }
    writer.slots = slots;
    written.map(|()| offset + bytes.len() as u64)
}

/// Adds a block, or the rest of one, that no replica has whole: zeros, marked as damaged.
pub(super) fn append_lost(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    length: u64,
) -> Result<u64, StoreError> {
    let within = (offset % BLOCK_BYTES) as usize;
    let zeros = usize::try_from(length).ok().and_then(|length| [0; BLOCK].get(..length));
    let Some(zeros) = zeros.filter(|zeros| !zeros.is_empty() && within + zeros.len() <= BLOCK)
    else {
        return Err(StoreError::Invalid("lost bytes are of one block"));
    };
    let extent = store.extent(id)?;
    store.disk.check()?;
    let file = store.file(&extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    let tail = admit(&extent.state(), offset, length)?;
    seal::clear_beyond_end(store, &extent, &file, &mut writer)?;

    let block = offset / BLOCK_BYTES;
    let crc = extend_crc(if within == 0 { 0 } else { tail.crc }, zeros);
    let lost = Sum { crc, mark: Some(Mark::Damaged) };
    let slot = lost.slot((within + zeros.len()) as u16);
    let raw = slot.encode(extent.place, block).to_le_bytes();
    write(store, &file, (offset, zeros, Way::Kept), &raw, &mut writer)?;
    extent.slots_written(&store.disk, block, &raw, true);
    let mut state = extent.state();
    state.length = offset + length;
    state.tail = lost;
    state.writes += 1;
    Ok(offset + length)
}

/// Whether the extent takes `length` bytes at `offset`; returns what is known of its partial block.
fn admit(state: &State, offset: u64, length: u64) -> Result<Sum, StoreError> {
    if state.sealed {
        return Err(StoreError::Sealed { length: state.length });
    }
    if offset != state.length {
        return Err(StoreError::OutOfOrder { expected: state.length });
    }
    if EXTENT_BYTES_MAX - state.length < length {
        return Err(StoreError::Full { length: state.length });
    }
    Ok(state.tail)
}

/// Encodes the slots of all blocks that `bytes` touch, and returns what is known of the last.
fn encode_slots(
    slots: &mut Vec<u8>,
    place: Place,
    offset: u64,
    tail: Sum,
    bytes: &[u8],
    checksums: Checksums<'_>,
) -> Sum {
    slots.clear();
    let within = (offset % BLOCK_BYTES) as usize;
    // Aligned with blocks, the verified checksums are those of the blocks: no second pass.
    let mut known = checksums.as_blocks(offset).unwrap_or(&[]).iter();
    let mut last = Sum::default();
    let blocks = (offset / BLOCK_BYTES)..;
    for (index, (block, piece)) in blocks.zip(pieces(bytes, BLOCK - within)).enumerate() {
        let known = known.next();
        let joins = index == 0 && within > 0;
        last = match known {
            // A mark stays: what follows makes nothing of the rest whole.
            _ if joins => Sum { crc: extend_crc(tail.crc, piece), ..tail },
            Some(crc) => Sum::whole(*crc),
            None => Sum::whole(crc32c(piece)),
        };
        let length = if joins { within + piece.len() } else { piece.len() };
        let slot = last.slot(length as u16);
        slots.extend_from_slice(&slot.encode(place, block).to_le_bytes());
    }
    last
}

/// Data first. Whatever fails, bytes beyond the end are of no consequence; slots beyond it are,
/// and are cleared before the next append.
fn write(
    store: &ExtentStore,
    file: &OpenFile,
    (offset, bytes, way): (u64, &[u8], Way),
    slots: &[u8],
    writer: &mut Writer,
) -> Result<(), StoreError> {
    let failed = |error| store.disk.write_failed("pwrite", &error);
    file.write(bytes, offset, way).map_err(|error| match read_before(file, offset) {
        // Nothing is wrong with writing: the block is to be repaired.
        Err(source) => StoreError::ReadFailed { block: offset / BLOCK_BYTES, source },
        Ok(()) => failed(error),
    })?;
    file.write_at(slots, slot_offset(offset / BLOCK_BYTES)).map_err(|error| {
        writer.needs_cut = true;
        failed(error)
    })
}

/// Whether the disk can read what its block holds before `offset`: it has to for a write that begins there.
fn read_before(file: &OpenFile, offset: u64) -> std::io::Result<()> {
    let within = offset % BLOCK_BYTES;
    let mut block = [0; BLOCK];
    let before = block.get_mut(..within as usize).unwrap_or(&mut []);
    if before.is_empty() { Ok(()) } else { file.read_at(before, offset - within) }
}

pub(super) fn append_hole(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
    length: u64,
) -> Result<u64, StoreError> {
    if length == 0 {
        return Err(StoreError::Invalid("a hole of no bytes"));
    }
    let extent = store.extent(id)?;
    store.disk.check()?;
    admit(&extent.state(), offset, length)?;
    let until = offset + length;
    note_hole(store, &extent, offset, until)?;
    let first = offset.next_multiple_of(BLOCK_BYTES).min(until);
    let last = (until / BLOCK_BYTES * BLOCK_BYTES).max(first);
    for (start, end) in [(offset, first), (first, last), (last, until)] {
        match end - start {
            0 => {}
            part if part < BLOCK_BYTES => {
                // Zeros that nobody reads.
                let zeros = vec![0; part as usize];
                let sums = checksums_of(&zeros);
                append(store, id, start, &zeros, Checksums::of_payload(&sums), Way::Kept)?;
            }
            _ => append_freed_blocks(store, &extent, start, end)?,
        }
    }
    Ok(until)
}

/// The range is dead, whatever becomes of its blocks, and before there is anything of it to read.
fn note_hole(store: &ExtentStore, extent: &Extent, start: u64, end: u64) -> Result<(), StoreError> {
    // In memory first: the freed log takes its compacted form from there.
    let _noting = store.unlogged.begin();
    extent.state().dead.insert(start, end);
    lock(&store.freed).append(store, &[Record::Dead { extent: extent.id, start, end }])
}

fn append_freed_blocks(
    store: &ExtentStore,
    extent: &Arc<Extent>,
    offset: u64,
    end: u64,
) -> Result<(), StoreError> {
    let file = store.file(extent)?;
    let mut writer = lock(&extent.writer);
    extent.check()?;
    admit(&extent.state(), offset, end - offset)?;
    seal::clear_beyond_end(store, extent, &file, &mut writer)?;

    // If it fails, the next append begins with a cut.
    writer.needs_cut = true;
    let (first, slot) = (offset / BLOCK_BYTES, Slot::Freed { length: BLOCK as u16 });
    let raw = (first..end / BLOCK_BYTES).map(|block| slot.encode(extent.place, block));
    let slots: Vec<u8> = raw.flat_map(u64::to_le_bytes).collect();
    file.write_at(&slots, slot_offset(first)).map_err(|e| store.disk.write_failed("pwrite", &e))?;
    extent.slots_written(&store.disk, first, &slots, true);
    writer.needs_cut = false;
    let mut state = extent.state();
    state.length = end;
    state.writes += 1;
    Ok(())
}
