//! Checksum slots in memory: chunks of 512, loaded when needed, evicted by the disk's clock.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::disk::{OpenFile, StoreDisk};
use super::extent::Extent;
use super::format::{BLOCKS_MAX, SLOT_BYTES, Slot, slot_offset};
use super::lock;

/// Slots in a chunk: 4 KiB of them.
const CHUNK_SLOTS: u64 = 512;

/// The cached chunks of one extent.
#[derive(Default)]
pub(super) struct SumTable {
    chunks: BTreeMap<u32, Chunk>,
}

struct Chunk {
    raw: Box<[u64]>,
    /// Used since the clock last passed.
    touched: bool,
}

impl SumTable {
    /// Drops a chunk that was not used since the last look. Returns whether it is gone.
    pub(super) fn evict(&mut self, chunk: u32) -> bool {
        match self.chunks.get_mut(&chunk) {
            Some(cached) if cached.touched => {
                cached.touched = false;
                false
            }
            _ => {
                self.chunks.remove(&chunk);
                true
            }
        }
    }

    fn get(&mut self, block: u64) -> Option<&mut u64> {
        let cached = self.chunks.get_mut(&((block / CHUNK_SLOTS) as u32))?;
        cached.touched = true;
        cached.raw.get_mut((block % CHUNK_SLOTS) as usize)
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        self.chunks.clear();
    }
}

impl Extent {
    /// The slots of `count` blocks from `first` on, as stored. The last, partial block of an
    /// extent is described by its state instead: the caller replaces that one.
    pub(super) fn slots(
        self: &Arc<Extent>,
        disk: &StoreDisk,
        file: &OpenFile,
        first: u64,
        count: u64,
    ) -> io::Result<Vec<Slot>> {
        debug_assert!(first + count <= BLOCKS_MAX, "callers stay below the length");
        let mut slots = Vec::with_capacity(count as usize);
        let mut block = first;
        while block < first + count {
            let chunk_end = (block / CHUNK_SLOTS + 1) * CHUNK_SLOTS;
            self.load_chunk(disk, file, block)?;
            let mut sums = lock(&self.sums);
            for block in block..chunk_end.min(first + count) {
                // Evicted again already: an empty slot would look like damage, so read it alone.
                let raw = match sums.get(block) {
                    Some(raw) => *raw,
                    None => read_slot(file, block)?,
                };
                slots.push(Slot::decode(raw, self.place, block));
            }
            drop(sums);
            block = chunk_end;
        }
        Ok(slots)
    }

    /// Brings the chunk of `block` into memory. Read and insertion are one under the lock, and
    /// writers update memory after the file: no update is missed.
    fn load_chunk(
        self: &Arc<Extent>,
        disk: &StoreDisk,
        file: &OpenFile,
        block: u64,
    ) -> io::Result<()> {
        let chunk = block / CHUNK_SLOTS;
        let mut sums = lock(&self.sums);
        if sums.chunks.contains_key(&(chunk as u32)) {
            return Ok(());
        }
        let mut bytes = [0; CHUNK_SLOTS as usize * SLOT_BYTES];
        file.read_at(&mut bytes, slot_offset(chunk * CHUNK_SLOTS))?;
        let raw = bytes.as_chunks().0.iter().map(|raw| u64::from_le_bytes(*raw)).collect();
        sums.chunks.insert(chunk as u32, Chunk { raw, touched: true });
        drop(sums);
        disk.chunk_cached(self, chunk as u32);
        Ok(())
    }

    /// Takes slots over into memory after they were written to the file.
    ///
    /// With `appended`, nothing was stored at and above `first` before, so a chunk that begins there is
    /// known without reading it.
    pub(super) fn slots_written(
        self: &Arc<Extent>,
        disk: &StoreDisk,
        first: u64,
        written: &[u8],
        appended: bool,
    ) {
        let mut fresh = Vec::new();
        let mut sums = lock(&self.sums);
        for (block, raw) in (first..).zip(written.as_chunks().0) {
            let chunk = (block / CHUNK_SLOTS) as u32;
            if appended && block % CHUNK_SLOTS == 0 && !sums.chunks.contains_key(&chunk) {
                let raw = vec![0; CHUNK_SLOTS as usize].into();
                sums.chunks.insert(chunk, Chunk { raw, touched: true });
                fresh.push(chunk);
            }
            if let Some(slot) = sums.get(block) {
                *slot = u64::from_le_bytes(*raw);
            }
        }
        drop(sums);
        for chunk in fresh {
            disk.chunk_cached(self, chunk);
        }
    }
}

fn read_slot(file: &OpenFile, block: u64) -> io::Result<u64> {
    let mut raw = [0; SLOT_BYTES];
    file.read_at(&mut raw, slot_offset(block))?;
    Ok(u64::from_le_bytes(raw))
}
