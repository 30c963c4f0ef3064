//! What a file holds: 4 KiB blocks, shared between the volatile and the durable version until one
//! of them changes.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// Bytes that a crash keeps or loses together, at most.
pub(super) const BLOCK: u64 = 4096;
/// Bytes that no crash splits.
pub(super) const SECTOR: u64 = 512;

type Block = [u8; BLOCK as usize];

static ZEROS: LazyLock<Arc<Block>> = LazyLock::new(|| Arc::new([0; BLOCK as usize]));

/// A sparse file.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    pub length: u64,
    blocks: BTreeMap<u64, Arc<Block>>,
}

/// Whether there is nothing but zeros here: logs are prepared by the megabyte, so this has to be fast.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK as usize).all(|part| ZEROS.get(..part.len()) == Some(part))
}

/// Where a range of bytes touches one block: block number, offset within it, bytes.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (number, start) = (at / BLOCK, at % BLOCK);
        let count = (BLOCK - start).min(end - at);
        at += count;
        Some((number, start as usize, count as usize))
    })
}

impl Content {
    pub fn allocated(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }

    /// Blocks that a write of this range would add.
    pub fn missing_blocks(&self, offset: u64, length: u64) -> u64 {
        pieces(offset, length).filter(|(number, ..)| !self.blocks.contains_key(number)).count()
            as u64
    }

    /// Bytes read; short only at the end.
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> usize {
        let count = self.length.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let mut rest = buffer.get_mut(..count).unwrap_or_default();
        for (number, start, count) in pieces(offset, count as u64) {
            let (target, more) = rest.split_at_mut(count);
            match self.blocks.get(&number).and_then(|block| block.get(start..start + count)) {
                Some(bytes) => target.copy_from_slice(bytes),
                None => target.fill(0),
            }
            rest = more;
        }
        count
    }

    pub fn write(&mut self, bytes: &[u8], offset: u64) {
        let mut rest = bytes;
        for (number, start, count) in pieces(offset, bytes.len() as u64) {
            let (source, more) = rest.split_at(count);
            rest = more;
            let block = self.blocks.entry(number).or_insert_with(|| Arc::clone(&ZEROS));
            if count == BLOCK as usize && is_zero(source) {
                *block = Arc::clone(&ZEROS);
            } else if let Some(target) = Arc::make_mut(block).get_mut(start..start + count) {
                target.copy_from_slice(source);
            }
        }
        self.length = self.length.max(offset + bytes.len() as u64);
    }

    /// Makes a hole; the length stays.
    pub fn punch(&mut self, offset: u64, length: u64) {
        let length = length.min(self.length.next_multiple_of(BLOCK).saturating_sub(offset));
        for (number, start, count) in pieces(offset, length) {
            if count == BLOCK as usize {
                self.blocks.remove(&number);
            } else if let Some(block) = self.blocks.get_mut(&number)
                && let Some(range) = Arc::make_mut(block).get_mut(start..start + count)
            {
                range.fill(0);
            }
        }
    }

    pub fn truncate(&mut self, length: u64) {
        if length < self.length {
            let first_gone = length.div_ceil(BLOCK);
            self.punch(length, first_gone * BLOCK - length);
            self.blocks.split_off(&first_gone);
        }
        self.length = length;
    }

    /// Takes one block over from another version, and the other's length.
    pub fn copy_block(&mut self, from: &Content, number: u64) {
        match from.blocks.get(&number) {
            Some(block) => drop(self.blocks.insert(number, Arc::clone(block))),
            None => drop(self.blocks.remove(&number)),
        }
    }

    /// The numbers of the blocks that are there.
    pub fn block_numbers(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_see_writes_holes_and_cuts() {
        let mut content = Content::default();
        content.write(&[7; 5000], 4000);
        let mut buffer = vec![1; 10_000];
        assert_eq!(content.read(&mut buffer, 0), 9000);
        assert!(buffer[..4000].iter().all(|byte| *byte == 0));
        assert!(buffer[4000..9000].iter().all(|byte| *byte == 7));
        content.truncate(4100);
        content.truncate(8192);
        assert_eq!(content.read(&mut buffer, 4000), 4192);
        assert!(buffer[..100].iter().all(|byte| *byte == 7));
        assert!(buffer[100..4192].iter().all(|byte| *byte == 0));
        content.punch(0, 8192);
        assert_eq!((content.allocated(), content.length), (0, 8192));
    }
}
