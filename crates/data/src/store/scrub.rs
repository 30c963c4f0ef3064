//! Looking at extents without changing them: states, digests, verification.

use milpa_host::disk::is_shortage;
use milpa_types::{BLOCK_BYTES, ExtentId};
use milpa_wire::data::{ExtentDigest, ExtentState};
use milpa_wire::frame::crc32c;

use super::disk::{OpenFile, Way};
use super::extent::Extent;
use super::format::{BLOCK, Slot, block_count};
use super::{ExtentDetails, ExtentStore, StoreError, extent_path, lock, read, read_lock};

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks looked at, those that are freed not counted: they are holes.
    pub blocks: u64,
    /// Blocks that do not match their checksums, or cannot be read.
    pub damaged: Vec<u64>,
    /// Where to go on, with a block that is not freed; `None` if there is none.
    pub next: Option<u64>,
}

/// Blocks verified with one read: 256 KiB, so that a slow scrub hardly delays others.
const STRIDE: u64 = 64;

pub(super) fn verify(
    store: &ExtentStore,
    id: ExtentId,
    from: u64,
    blocks_max: u64,
) -> Result<Verified, StoreError> {
    let extent = store.extent(id)?;
    let file = store.file(&extent)?;
    let mut found = Verified::default();
    let mut block = from;
    loop {
        let _content = read_lock(&extent.content);
        extent.check()?;
        let left = blocks_max.saturating_sub(found.blocks);
        let (blocks, freed) = {
            let state = extent.state();
            let last = block_count(state.length);
            let first = state.skip_freed(block, last);
            if first >= last {
                return Ok(found);
            }
            let blocks = first..first + STRIDE.min(last - first).min(left);
            (blocks.clone(), blocks.filter(|block| state.is_freed(*block)).count() as u64)
        };
        if left == 0 {
            found.next = Some(blocks.start);
            return Ok(found);
        }
        block = blocks.end;
        found.blocks += blocks.end - blocks.start - freed;
        verify_blocks(store, &extent, &file, blocks, &mut found.damaged)?;
    }
}

/// Verifies blocks; if the disk cannot read them together, one by one.
fn verify_blocks(
    store: &ExtentStore,
    extent: &std::sync::Arc<Extent>,
    file: &OpenFile,
    blocks: std::ops::Range<u64>,
    damaged: &mut Vec<u64>,
) -> Result<(), StoreError> {
    let count = blocks.end - blocks.start;
    // What the system keeps in memory says nothing of the medium.
    match read::read_blocks(store, extent, file, (blocks.start, count), Way::Direct) {
        Ok((slots, mut buffer)) => {
            for ((block, slot), bytes) in blocks.zip(slots).zip(buffer.chunks_mut(BLOCK)) {
                if read::serve(slot, bytes).is_none() {
                    damaged.push(block);
                }
            }
        }
        Err(_) if count > 1 => {
            for block in blocks {
                verify_blocks(store, extent, file, block..block + 1, damaged)?;
            }
        }
        // That says nothing of the disk.
        Err(StoreError::ReadFailed { source, .. }) if is_shortage(&source) => {
            return Err(StoreError::Busy);
        }
        Err(_) => damaged.push(blocks.start),
    }
    Ok(())
}

pub(super) fn digest(
    store: &ExtentStore,
    id: ExtentId,
    length: Option<u64>,
) -> Result<ExtentDigest, StoreError> {
    let extent = store.extent(id)?;
    let file = store.file(&extent)?;
    let _content = read_lock(&extent.content);
    extent.check()?;
    let state = extent.state().clone();
    let length = length.unwrap_or(state.committed);
    if length > state.length {
        return Err(StoreError::Shorter { length: state.length });
    }
    let failed = |source| StoreError::ReadFailed { block: 0, source };
    let count = block_count(length);
    let slots = extent.slots(&store.disk, &file, 0, count).map_err(failed)?;
    let mut hashed = Vec::with_capacity(slots.len() * 4);
    for (block, slot) in (0..).zip(slots) {
        let wanted = (length - block * BLOCK_BYTES).min(BLOCK_BYTES) as usize;
        let slot = match state.tail() {
            Some((tail, slot)) if tail == block => slot,
            _ => slot,
        };
        let start = block * BLOCK_BYTES;
        let end = start + wanted as u64;
        let crc = match slot {
            _ if state.dead.covers(start, end) => zeros_crc(wanted),
            Slot::Freed { .. } => zeros_crc(wanted),
            _ if state.dead.overlaps(start, end) => {
                let mut bytes = read::verified_block(store, &extent, &file, block)?;
                for (low, high) in state.dead.within(start, end) {
                    let dead = (low - start) as usize..(high - start) as usize;
                    bytes.get_mut(dead).ok_or(StoreError::Corrupt { block })?.fill(0);
                }
                crc32c(bytes.get(..wanted).ok_or(StoreError::Corrupt { block })?)
            }
            Slot::Live { crc, length } if usize::from(length) == wanted => crc,
            // As unlike what is whole elsewhere as it must be, and like what is lost elsewhere too.
            Slot::Marked { crc, length, .. } if usize::from(length) == wanted => !crc,
            Slot::Live { .. } | Slot::Marked { .. } => {
                let bytes = read::verified_block(store, &extent, &file, block)?;
                crc32c(bytes.get(..wanted).ok_or(StoreError::Corrupt { block })?)
            }
            Slot::Empty | Slot::Damaged => return Err(StoreError::Corrupt { block }),
        };
        hashed.extend_from_slice(&crc.to_le_bytes());
    }
    Ok(ExtentDigest { extent: id, length, hash: crc32c(&hashed) })
}

/// CRC of that many zeros, at most a block.
fn zeros_crc(length: usize) -> u32 {
    crc32c([0; BLOCK].get(..length).unwrap_or(&[]))
}

pub(super) fn details(store: &ExtentStore, ids: &[ExtentId]) -> Vec<ExtentDetails> {
    let extents = match ids {
        [] => store.all_extents(),
        ids => ids.iter().filter_map(|id| store.extent(*id).ok()).collect(),
    };
    extents.iter().map(|extent| details_of(extent)).collect()
}

fn details_of(extent: &Extent) -> ExtentDetails {
    let state = extent.state();
    ExtentDetails {
        state: ExtentState {
            extent: extent.id,
            epoch: extent.epoch,
            inode: extent.inode,
            session: extent.session,
            length: state.length,
            committed: state.committed,
            sealed: state.sealed,
            overwritten: state.overwritten,
        },
        flushed: state.flushed,
    }
}

/// Bytes allocated on disk. Asked for only when something has changed: a node looks at all its extents
/// every few seconds.
pub(super) fn allocated_of(store: &ExtentStore, extent: &Extent) -> u64 {
    let counters = {
        let state = extent.state();
        if let Some(bytes) = state.known_allocated() {
            return bytes;
        }
        (state.writes, state.flushed_writes)
    };
    let path = extent_path(&store.directory, extent.id);
    // For reports only: a file that vanished meanwhile takes no space.
    let bytes = store.disk.files().allocated(&path).unwrap_or(0);
    extent.state().allocated = Some((bytes, counters));
    bytes
}

pub(super) fn highest_id(store: &ExtentStore, small: bool) -> Option<ExtentId> {
    let (low, high) = match small {
        true => (ExtentId::small(0).0, u64::MAX),
        false => (0, ExtentId::small(0).0),
    };
    let present = {
        let extents = read_lock(&store.extents);
        extents.range(ExtentId(low)..ExtentId(high)).next_back().map(|(id, _)| id.0)
    };
    let removed = lock(&store.freed).highest_removed(high).filter(|id| *id >= low);
    let unreadable = store.unreadable.iter().map(|id| id.0).filter(|id| (low..high).contains(id));
    present.into_iter().chain(removed).chain(unreadable).max().map(ExtentId)
}
