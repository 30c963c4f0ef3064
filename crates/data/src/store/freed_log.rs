//! What a partition remembers of freed ranges: one small file, appended to, compacted when full.
//!
//! ```text
//! offset size field of a record of 32 bytes
//!      0    4 CRC32C of the partition, the record's number, and bytes 4..32
//!      4    4 kind: 1 dead, 2 removed
//!      8    8 extent
//!     16    8 dead: first byte; removed: number of ids from `extent` on
//!     24    8 dead: one past the last byte
//! ```
//!
//! A byte that is freed once is freed for ever: space in an extent is never used twice and ids never
//! return. So a range is noted also where this replica does not hold it (yet): bytes that a peer
//! fills in later are dead when they arrive.
//!
//! A record that does not verify is skipped and counted; records have fixed places, so the next one is
//! found. Losing a record loses the permission to punch blocks that are dead in parts, or lets a
//! removed extent be created again; blocks that were punched count as damaged until another replica, or who
//! freed them once more, tells of it. It never hurts live bytes.
//!
//! The file is written ahead with zeros, so that freeing space works on a full disk.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use milpa_types::{ExtentId, PartitionId};
use milpa_wire::frame::crc32c;

use super::files::{StoreFile, StoreFiles};
use super::format::{u32_at, u64_at};
use super::ranges::Ranges;
use super::{ExtentStore, StoreError};

pub(super) const RECORD_BYTES: usize = 32;
/// Records that a new file has room for: 16 KiB.
const CAPACITY_MIN: u64 = 512;
const NAME: &str = "freed";
const NAME_NEW: &str = "freed.new";

/// One entry of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record {
    Dead { extent: ExtentId, start: u64, end: u64 },
    Removed { first: ExtentId, count: u64 },
}

impl Record {
    pub(super) fn encode(self, partition: PartitionId, number: u64) -> [u8; RECORD_BYTES] {
        let (kind, extent, a, b) = match self {
            Record::Dead { extent, start, end } => (1u32, extent, start, end),
            Record::Removed { first, count } => (2, first, count, 0),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&extent.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&a.to_le_bytes());
        bytes[24..32].copy_from_slice(&b.to_le_bytes());
        let crc = record_crc(&bytes, partition, number);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(
        bytes: &[u8; RECORD_BYTES],
        partition: PartitionId,
        number: u64,
    ) -> Option<Record> {
        if u32_at(bytes, 0) != record_crc(bytes, partition, number) {
            return None;
        }
        let (extent, a, b) = (ExtentId(u64_at(bytes, 8)), u64_at(bytes, 16), u64_at(bytes, 24));
        match u32_at(bytes, 4) {
            1 => Some(Record::Dead { extent, start: a, end: b }),
            2 => Some(Record::Removed { first: extent, count: a }),
            _ => None,
        }
    }
}

pub(super) fn record_crc(bytes: &[u8; RECORD_BYTES], partition: PartitionId, number: u64) -> u32 {
    let mut covered = [0; RECORD_BYTES - 4 + 16];
    covered[..8].copy_from_slice(&partition.0.to_le_bytes());
    covered[8..16].copy_from_slice(&number.to_le_bytes());
    covered[16..].copy_from_slice(&bytes[4..]);
    crc32c(&covered)
}

/// Counts the calls that have noted, or are about to note, dead ranges in memory and have yet to log them.
/// While there are any, what is known to be dead may not be durable.
#[derive(Default)]
pub(super) struct Unlogged(AtomicUsize);

/// One of these calls, from before it notes anything until the log has it.
pub(super) struct Noting<'a>(&'a AtomicUsize);

impl Unlogged {
    pub(super) fn begin(&self) -> Noting<'_> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Noting(&self.0)
    }
}

impl Noting<'_> {
    /// Whether a range that is known to be dead may be so for another call only. Ask after looking it up.
    pub(super) fn has_company(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 1
    }
}

impl Drop for Noting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The log, open.
pub(super) struct FreedLog {
    partition: PartitionId,
    path: PathBuf,
    file: Arc<dyn StoreFile>,
    /// Number of the next record, and how many have room.
    next: u64,
    capacity: u64,
    removed: Ranges,
    /// Records that could not be written; they go first next time.
    pending: Vec<Record>,
    /// Dead ranges of extents that are not here.
    absent: BTreeMap<ExtentId, Ranges>,
}

/// What the log says when a partition is opened.
pub(super) struct Loaded {
    pub(super) log: FreedLog,
    pub(super) damaged_records: u64,
}

impl FreedLog {
    /// Opens the log, or makes an empty one.
    pub(super) fn load(
        files: &dyn StoreFiles,
        directory: &Path,
        partition: PartitionId,
    ) -> io::Result<Loaded> {
        let path = directory.join(NAME);
        let file = match files.open_from_medium(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = files.create(&path)?;
                write_zeros(&*file, 0, CAPACITY_MIN)?;
                file.sync()?;
                files.sync_directory(directory)?;
                file
            }
            opened => opened?,
        };
        let capacity = file.length()? / RECORD_BYTES as u64;
        let removed = Ranges::default();
        let (pending, absent) = (Vec::new(), BTreeMap::new());
        let log = FreedLog { partition, path, file, next: 0, capacity, removed, pending, absent };
        let mut loaded = Loaded { log, damaged_records: 0 };
        loaded.replay()?;
        Ok(loaded)
    }

    /// Whether an extent of this id was removed.
    pub(super) fn is_removed(&self, id: ExtentId) -> bool {
        self.removed.run_at(id.0).is_some()
    }

    /// Adds a dead range of an extent that is not here. False if it was known.
    pub(super) fn note_absent(&mut self, id: ExtentId, start: u64, end: u64) -> bool {
        let ranges = self.absent.entry(id).or_default();
        let is_new = !ranges.covers(start, end);
        ranges.insert(start, end);
        is_new
    }

    /// The dead ranges of an extent that is here from now on: its state keeps them.
    pub(super) fn take_absent(&mut self, id: ExtentId) -> Ranges {
        self.absent.remove(&id).unwrap_or_default()
    }

    /// The dead ranges of an extent that is not here.
    pub(super) fn absent(&self, id: ExtentId) -> Option<&Ranges> {
        self.absent.get(&id)
    }

    /// The highest removed id below `end`.
    pub(super) fn highest_removed(&self, end: u64) -> Option<u64> {
        self.removed.iter().rev().find(|(low, _)| *low < end).map(|(_, high)| high.min(end) - 1)
    }

    /// Adds records, durably. Callers have changed their memory before: compaction reads it.
    ///
    /// # Errors
    ///
    /// `NoSpace`, `Busy`: the records are kept in memory and go first with the next call.
    pub(super) fn append(
        &mut self,
        store: &ExtentStore,
        records: &[Record],
    ) -> Result<(), StoreError> {
        for record in records {
            if let Record::Removed { first, count } = record {
                let end = first.0.saturating_add(*count);
                self.removed.insert(first.0, end);
                self.absent.retain(|id, _| !(first.0..end).contains(&id.0));
            }
        }
        // Also if there is nothing to write: another call may just have failed to write the same.
        store.disk.check()?;
        if records.is_empty() && self.pending.is_empty() {
            return Ok(());
        }
        let mut all = std::mem::take(&mut self.pending);
        // Whoever asked asks again until it is written.
        let fresh = records.iter().filter(|record| !all.contains(record)).copied();
        let fresh: Vec<Record> = fresh.collect();
        all.extend(fresh);
        let written = self.write(store, &all);
        if written.is_err() {
            // In their order before all later ones.
            self.pending = all;
        }
        written
    }

    fn write(&mut self, store: &ExtentStore, records: &[Record]) -> Result<(), StoreError> {
        let failed = |error| store.disk.write_failed("pwrite", &error);
        if self.next + records.len() as u64 > self.capacity {
            self.compact(store, records.len() as u64)?;
        }
        let encoded =
            (self.next..).zip(records).map(|(n, record)| record.encode(self.partition, n));
        let bytes: Vec<u8> = encoded.flatten().collect();
        self.file.write_at(&bytes, self.next * RECORD_BYTES as u64).map_err(failed)?;
        self.file.sync().map_err(|error| store.disk.sync_failed(&error))?;
        self.next += records.len() as u64;
        Ok(())
    }

    /// Writes what counts to a new file with room for as much again, and puts it in place.
    fn compact(&mut self, store: &ExtentStore, extra: u64) -> Result<(), StoreError> {
        let mut records: Vec<Record> = Vec::new();
        for (low, high) in self.removed.iter() {
            records.push(Record::Removed { first: ExtentId(low), count: high - low });
        }
        for extent in store.all_extents() {
            let state = extent.state();
            let dead = |(start, end)| Record::Dead { extent: extent.id, start, end };
            records.extend(state.dead.iter().map(dead));
        }
        for (extent, ranges) in &self.absent {
            let dead = |(start, end)| Record::Dead { extent: *extent, start, end };
            records.extend(ranges.iter().map(dead));
        }
        let capacity = (2 * (records.len() as u64 + extra)).max(CAPACITY_MIN);
        let (files, path_new) = (store.disk.files(), self.path.with_file_name(NAME_NEW));
        let failed = |error| store.disk.write_failed("compaction of the freed log", &error);
        let encoded = (0..).zip(&records).map(|(n, record)| record.encode(self.partition, n));
        let bytes: Vec<u8> = encoded.flatten().collect();

        // Left over from a compaction that a crash ended.
        match files.remove(&path_new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let file = files.create(&path_new).map_err(|error| store.disk.open_failed(&error))?;
        write_zeros(&*file, 0, capacity).map_err(failed)?;
        file.write_at(&bytes, 0).map_err(failed)?;
        file.sync().map_err(|error| store.disk.sync_failed(&error))?;
        files.rename(&path_new, &self.path).map_err(failed)?;
        files.sync_directory(&store.directory).map_err(|error| store.disk.sync_failed(&error))?;
        (self.file, self.next, self.capacity) = (file, records.len() as u64, capacity);
        Ok(())
    }
}

impl Loaded {
    fn replay(&mut self) -> io::Result<()> {
        let mut bytes = [0; RECORD_BYTES * 128];
        for first in (0..self.log.capacity).step_by(128) {
            self.log.file.read_at(&mut bytes, first * RECORD_BYTES as u64)?;
            for (number, record) in (first..self.log.capacity).zip(bytes.as_chunks().0) {
                if *record == [0; RECORD_BYTES] {
                    continue;
                }
                self.log.next = number + 1;
                match Record::decode(record, self.log.partition, number) {
                    Some(record) => self.apply(record),
                    None => self.damaged_records += 1,
                }
            }
        }
        // Those that were dead before they were removed: they never come.
        let FreedLog { removed, absent, .. } = &mut self.log;
        absent.retain(|id, _| removed.run_at(id.0).is_none());
        Ok(())
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Dead { extent, start, end } => {
                self.log.absent.entry(extent).or_default().insert(start, end);
            }
            Record::Removed { first, count } => {
                self.log.removed.insert(first.0, first.0.saturating_add(count));
            }
        }
    }
}

/// Really written, not only reserved: a later write into them needs no space.
fn write_zeros(file: &dyn StoreFile, from: u64, records: u64) -> io::Result<()> {
    let zeros = [0; RECORD_BYTES * 128];
    let end = (from + records) * RECORD_BYTES as u64;
    let mut at = from * RECORD_BYTES as u64;
    while at < end {
        let count = zeros.len().min((end - at) as usize);
        file.write_at(zeros.get(..count).unwrap_or(&zeros), at)?;
        at += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_a_record_is_noticed() {
        let record = Record::Dead { extent: ExtentId(3), start: 100, end: 9_000 };
        let bytes = record.encode(PartitionId(1), 5);
        assert_eq!(Record::decode(&bytes, PartitionId(1), 5), Some(record));
        assert_eq!(Record::decode(&bytes, PartitionId(1), 6), None, "misdirected");
        assert_eq!(Record::decode(&bytes, PartitionId(2), 5), None, "another partition's");
        for bit in 0..RECORD_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&damaged, PartitionId(1), 5), None, "bit {bit}");
        }
    }
}
