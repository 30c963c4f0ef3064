//! One file of a disk: its content as readers see it, as it is durable, and the changes between.

use std::collections::BTreeSet;
use std::ops::Range;

use super::content::{BLOCK, Content, SECTOR, is_zero};
use super::platter::DiskCounts;
use crate::random::Random;

/// Above this much unsynced in one file, it is written back without a sync.
const DIRTY_BYTES_MAX: u64 = 64 << 20;
const DIRTY_CHANGES_MAX: usize = 1 << 16;
/// Of so many writes that a power cut tears, one leaves a block that cannot be read (F9).
const UNREADABLE_IN: u64 = 8;

/// An unsynced change of a file's content.
#[derive(Clone, Debug)]
pub enum Change {
    Write(Vec<u8>, u64),
    /// A write of nothing but zeros, as preallocation makes them in bulk: offset and length.
    Zeros(u64, u64),
    Punch(u64, u64),
    Truncate(u64),
}

impl Change {
    fn apply(&self, content: &mut Content) {
        match self {
            Change::Write(bytes, offset) => content.write(bytes, *offset),
            Change::Zeros(offset, length) => content.write(&vec![0; *length as usize], *offset),
            Change::Punch(offset, length) => content.punch(*offset, *length),
            Change::Truncate(length) => content.truncate(*length),
        }
    }

    fn range(&self) -> (u64, u64) {
        match self {
            Change::Write(bytes, offset) => (*offset, bytes.len() as u64),
            Change::Zeros(offset, length) | Change::Punch(offset, length) => (*offset, *length),
            Change::Truncate(_) => (0, 0),
        }
    }

    fn blocks(&self) -> u64 {
        self.range().1.div_ceil(BLOCK)
    }
}

/// One file.
#[derive(Clone, Debug, Default)]
pub struct FileNode {
    pub current: Content,
    pub durable: Content,
    unsynced: Vec<Change>,
    /// What `unsynced` holds in memory.
    dirty_bytes: u64,
    /// A sync has failed: `current` has what neither is durable nor will be.
    is_unwritten: bool,
    /// Blocks that cannot be read until all of one is written or punched: the power went while they were written.
    pub unreadable: BTreeSet<u64>,
}

/// What a power cut does to the unsynced writes of one file.
#[derive(Clone, Copy)]
enum Fate {
    Kept,
    Lost,
    /// Each write by itself.
    Some,
    /// Each sector by itself.
    Torn,
}

impl FileNode {
    /// One of which nothing is unsynced.
    pub fn durable(content: Content) -> FileNode {
        FileNode { current: content.clone(), durable: content, ..FileNode::default() }
    }

    pub fn write(&mut self, bytes: &[u8], offset: u64) {
        let length = bytes.len() as u64;
        self.current.write(bytes, offset);
        self.can_be_read(offset, length);
        let is_bulk = length > BLOCK && is_zero(bytes);
        if is_bulk {
            self.unsynced.push(Change::Zeros(offset, length));
        } else {
            self.unsynced.push(Change::Write(bytes.to_vec(), offset));
            self.dirty_bytes += length;
        }
        self.write_back();
    }

    /// Punches or truncates.
    pub fn reshape(&mut self, change: Change) {
        change.apply(&mut self.current);
        let (offset, length) = change.range();
        match change {
            Change::Truncate(length) => self.can_be_read(length, u64::MAX - length),
            _ => self.can_be_read(offset, length),
        }
        self.unsynced.push(change);
    }

    /// What a kernel does when too much of a file is dirty; it also bounds our memory.
    fn write_back(&mut self) {
        if self.dirty_bytes > DIRTY_BYTES_MAX || self.unsynced.len() > DIRTY_CHANGES_MAX {
            self.sync();
        }
    }

    pub fn sync(&mut self) {
        if self.unsynced.is_empty() {
            return;
        }
        if self.is_unwritten {
            self.unsynced.iter().for_each(|change| change.apply(&mut self.durable));
            self.unsynced.clear();
            self.dirty_bytes = 0;
            return;
        }
        let blocks: u64 = self.unsynced.iter().map(Change::blocks).sum();
        // What is less work: both give the same.
        if blocks > 256.max(self.current.allocated() / BLOCK / 8)
            || self.unsynced.iter().any(|c| matches!(c, Change::Truncate(_)))
        {
            self.durable = self.current.clone();
        } else {
            for change in &self.unsynced {
                let (offset, length) = change.range();
                for number in offset / BLOCK..(offset + length).div_ceil(BLOCK) {
                    self.durable.copy_block(&self.current, number);
                }
            }
            self.durable.length = self.current.length;
        }
        self.unsynced.clear();
        self.dirty_bytes = 0;
    }

    /// As Linux does: the pages are clean, readers see them, and no later sync writes them.
    pub fn sync_failed(&mut self) {
        self.is_unwritten |= !self.unsynced.is_empty();
        self.unsynced.clear();
        self.dirty_bytes = 0;
    }

    pub fn release(&mut self) {
        if std::mem::take(&mut self.is_unwritten) {
            self.current = self.durable.clone();
            self.unsynced.iter().for_each(|change| change.apply(&mut self.current));
        }
    }

    /// Whether the disk can write or punch so many bytes: of a block of which they are a part it has to read the rest.
    pub fn is_changeable(&self, offset: u64, length: u64) -> bool {
        let whole = whole_blocks_of(offset, length);
        self.unreadable.range(blocks_of(offset, length)).all(|block| whole.contains(block))
    }

    /// What covers a whole block makes it readable.
    fn can_be_read(&mut self, offset: u64, length: u64) {
        self.unreadable.retain(|block| !whole_blocks_of(offset, length).contains(block));
    }

    /// Gives a block in which the disk was interrupted, if it is one that then cannot be read.
    pub fn cut_power(&mut self, random: &mut Random, counts: &mut DiskCounts) -> Option<u64> {
        self.release();
        if self.unsynced.is_empty() {
            return None;
        }
        let mut interrupted = None;
        let fate = [Fate::Kept, Fate::Lost, Fate::Some, Fate::Torn];
        let fate = random.pick(&fate).copied().unwrap_or(Fate::Lost);
        for change in std::mem::take(&mut self.unsynced) {
            let is_kept = match fate {
                Fate::Kept => true,
                Fate::Lost => false,
                Fate::Some | Fate::Torn => random.chance(1, 2),
            };
            match &change {
                Change::Write(bytes, offset) if matches!(fate, Fate::Torn) => {
                    counts.torn_writes += 1;
                    // What was there before stays: disks write a sector or do not. A new one may hold nothing.
                    let is_new = self.durable.missing_blocks(*offset, 1) > 0;
                    if is_new && random.chance(1, UNREADABLE_IN) {
                        interrupted = Some(offset / BLOCK);
                    }
                    write_some_sectors(&mut self.durable, bytes, *offset, random);
                }
                _ if is_kept => change.apply(&mut self.durable),
                _ => counts.lost_writes += 1,
            }
        }
        self.dirty_bytes = 0;
        self.current = self.durable.clone();
        interrupted
    }
}

/// The blocks that so many bytes lie in.
pub fn blocks_of(offset: u64, length: u64) -> Range<u64> {
    offset / BLOCK..offset.saturating_add(length).div_ceil(BLOCK)
}

/// The blocks of which nothing lies outside of so many bytes.
fn whole_blocks_of(offset: u64, length: u64) -> Range<u64> {
    offset.div_ceil(BLOCK)..offset.saturating_add(length) / BLOCK
}

fn write_some_sectors(content: &mut Content, bytes: &[u8], offset: u64, random: &mut Random) {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let count = (SECTOR - at % SECTOR).min(rest.len() as u64);
        let (sector, more) = rest.split_at(count as usize);
        if random.chance(1, 2) {
            content.write(sector, at);
        }
        (rest, at) = (more, at + count);
    }
}
