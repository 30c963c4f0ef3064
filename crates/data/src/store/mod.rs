//! The extent store: the storage engine of one replica of one data partition (CFS 2.2.1 to 2.2.3).
//!
//! A partition is a directory with one file for each extent (`format`: data, checksums and header
//! together), a log of freed ranges (`freed_log`) and a label. Large extents belong to
//! one inode and start at offset zero; small extents hold pieces of many files ([`piece`]).
//!
//! The store is synchronous and `Send + Sync`: the data node calls it on disk threads. Appends to different extents,
//! and reads, run in parallel.
//!
//! # Invariants
//!
//! * A byte is served only after its block matched its checksum, on every read.
//! * What [`ExtentStore::flush`] reported stays, whatever is lost or torn afterwards (the argument
//!   is in `format`).
//! * What is there after a crash is a prefix of what was appended.
//! * Space inside an extent is never used again; extent ids are never used again.
//! * After a failed write or flush the whole disk is fenced: no flush is repeated in hope.
//!
//! # What is deliberately absent
//!
//! No network, no replication, no epochs (they are stored, not checked), no clock, no threads, no
//! decision about repair. The commit offset is kept for reports and recovery only.
//!
//! | module | what |
//! |---|---|
//! | `format` | the extent file byte by byte, and why a crash cannot hurt it |
//! | [`files`], [`memory_files`] | the only way to the disk, real and hostile |
//! | [`disk`] | what the partitions of one disk share: fence, descriptors, checksum memory |
//! | `extent` | one extent in memory, its locks |
//! | `append`, `read`, `overwrite`, `flush`, `seal`, `free`, `scrub` | the operations |
//! | `recover` | what is found when a partition is opened |
//! | `freed_log`, `ranges` | dead ranges and removed extents |
//! | [`piece`] | records in small extents |

mod append;
mod checksums;
mod create;
#[cfg(any(test, feature = "decoders"))]
pub(crate) mod decoders;
pub mod disk;
mod error;
mod extent;
pub mod files;
mod flush;
mod format;
mod free;
mod freed_log;
pub mod memory_files;
mod overwrite;
pub mod piece;
mod ranges;
mod read;
mod recover;
mod scrub;
mod seal;
mod sums;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bytes::Bytes;
use milpa_types::{Epoch, ExtentId, InodeId, PartitionId, SessionId};
use milpa_wire::data::{ExtentDigest, ExtentState};

use crate::offers::Held;

pub use checksums::{Checksums, block_checksums, checksums_of};
use disk::{OpenFile, StoreNumber, Way};
pub use disk::{StoreDisk, StoreLimits};
pub use error::{OpenError, StoreError};
use extent::{Entries, Extent};
pub use free::HeaderBlocks;
use freed_log::{FreedLog, Unlogged};
pub use recover::{ExtentRecovery, RecoveryReport};
pub use scrub::Verified;

/// What a new extent is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewExtent {
    /// Its id; one that was never used before.
    pub id: ExtentId,
    /// The epoch in which it will be appended.
    pub epoch: Epoch,
    /// The inode that owns it; 0 for a small extent.
    pub inode: InodeId,
    /// The session that writes it; 0 for a small extent.
    pub session: SessionId,
}

/// An extent's state, with what its header knows besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentDetails {
    /// As it travels.
    pub state: ExtentState,
    /// Bytes that are on the disk.
    pub flushed: u64,
}

/// Verified bytes of an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBytes {
    /// The bytes.
    pub bytes: Bytes,
    /// As `DataAnswer::Bytes` wants them: the first covers bytes up to the next 4 KiB boundary of
    /// the extent, the following ones a block each.
    pub checksums: Vec<u32>,
}

/// Bytes for a replica that lacks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairBytes {
    /// Bytes within freed blocks before the first byte: skip them ([`ExtentStore::append_hole`]).
    pub hole: u64,
    /// What follows the hole; empty if the hole fills the range.
    pub stored: StoredBytes,
}

/// A range of an extent that no file refers to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Which extent.
    pub extent: ExtentId,
    /// First byte.
    pub offset: u64,
    /// Bytes; `u64::MAX` removes the extent.
    pub length: u64,
}

/// Whether an overwrite is new or repeated from the Raft log after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwriting {
    /// A damaged block that is covered in part stays damaged; all others take the new bytes.
    New,
    /// A block of an overwritten extent that a crash left torn is completed: bytes that the
    /// overwrite does not cover are taken as they are, and the block is doubtful (see `format`). Serve nothing of the extent
    /// before the log has been repeated to its end: on the way, blocks mix old and new bytes.
    Repeated,
}

/// The extent store of one partition.
pub struct ExtentStore {
    partition: PartitionId,
    directory: PathBuf,
    disk: Arc<StoreDisk>,
    number: StoreNumber,
    /// The partition is being deleted.
    is_closed: AtomicBool,
    /// Ordered, so that reports are. Held only to look up.
    extents: RwLock<BTreeMap<ExtentId, Arc<Extent>>>,
    /// Dead ranges on disk, and the removed extents.
    freed: Mutex<FreedLog>,
    /// Who has yet to tell the log what memory knows.
    unlogged: Unlogged,
    /// Which creations the directory holds durably.
    entries: Entries,
    /// Files without a readable header, found at the opening.
    unreadable: Vec<ExtentId>,
}

impl ExtentStore {
    /// Opens a partition's directory, or makes it, and recovers every extent in it.
    ///
    /// Reads all bytes that were perhaps not flushed, to find the longest valid prefix of each
    /// extent. Damage among flushed bytes is reported and kept, never cut.
    ///
    /// # Errors
    ///
    /// The directory is unreadable or belongs to another partition.
    pub fn open(
        disk: &Arc<StoreDisk>,
        directory: &Path,
        partition: PartitionId,
    ) -> Result<(ExtentStore, RecoveryReport), OpenError> {
        recover::open(disk, directory, partition)
    }

    /// Ends the use of the store, as its partition is deleted: whoever still has it, and calls it
    /// later, is refused, and does not touch the files of the partition that is made anew at the same
    /// place. Not with `Removed`: that word is passed on to the other members.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// The partition.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Makes an empty extent. Durable with its first flush.
    ///
    /// # Errors
    ///
    /// `Exists`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn create_extent(&self, new: NewExtent) -> Result<(), StoreError> {
        create::create_extent(self, new)
    }

    /// Adds bytes at the end of an extent and returns the new length. In memory of the system,
    /// not on disk: see [`ExtentStore::flush`].
    ///
    /// # Errors
    ///
    /// `OutOfOrder` unless `offset` is the end; `Full`; `Sealed`; `DamagedInTransit` if bytes and
    /// checksums differ; `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`.
    pub fn append(
        &self,
        id: ExtentId,
        offset: u64,
        bytes: &[u8],
        checksums: Checksums<'_>,
    ) -> Result<u64, StoreError> {
        append::append(self, id, offset, bytes, checksums, Way::Kept)
    }

    /// As [`ExtentStore::append`], for a copy that nobody reads soon: past the system's memory, so that nothing is
    /// pushed out of it.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::append`].
    pub fn append_copy(
        &self,
        id: ExtentId,
        offset: u64,
        bytes: &[u8],
        checksums: Checksums<'_>,
    ) -> Result<u64, StoreError> {
        append::append(self, id, offset, bytes, checksums, Way::Unkept)
    }

    /// Adds bytes of one block at the end of an extent that no replica has whole, so that what follows
    /// them can be kept on more than one. The block reads as `Corrupt`, until a replica is found that
    /// has it.
    ///
    /// # Errors
    ///
    /// `Invalid` unless the bytes are of one block; else as [`ExtentStore::append`].
    pub fn append_lost(&self, id: ExtentId, offset: u64, length: u64) -> Result<u64, StoreError> {
        append::append_lost(self, id, offset, length)
    }

    /// Adds bytes that are freed at the end of an extent: repair of a replica whose peers punched them. Whole blocks
    /// are holes here, too.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::append`], and `Invalid`.
    pub fn append_hole(&self, id: ExtentId, offset: u64, length: u64) -> Result<u64, StoreError> {
        append::append_hole(self, id, offset, length)
    }

    /// Reads at most 1 MiB. Every block touched is verified. Freed blocks read as zeros.
    ///
    /// # Errors
    ///
    /// `Shorter` if the range ends beyond the replica's end; `Corrupt`, `ReadFailed`: repair the
    /// block and read elsewhere; `NoExtent`, `Removed`, `Invalid`.
    pub fn read(&self, id: ExtentId, offset: u64, length: u32) -> Result<StoredBytes, StoreError> {
        read::read(self, id, offset, length)
    }

    /// As [`ExtentStore::read`], for a reader who takes every byte to be part of a file: freed ones
    /// are refused with `Removed`, as those of a removed extent are.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::read`].
    pub fn read_live(
        &self,
        id: ExtentId,
        offset: u64,
        length: u32,
    ) -> Result<StoredBytes, StoreError> {
        let stored = self.read(id, offset, length)?;
        // After the read: what it saw punched had been marked before.
        let end = offset.saturating_add(u64::from(length));
        if self.is_partly_freed(id, offset, end) { Err(StoreError::Removed) } else { Ok(stored) }
    }

    /// Whether a part of a range is freed: no file refers to it any more.
    #[must_use]
    pub fn is_partly_freed(&self, id: ExtentId, start: u64, end: u64) -> bool {
        self.extent(id).is_ok_and(|extent| extent.state().dead.overlaps(start, end))
    }

    /// As [`ExtentStore::read`], but skips freed blocks at the front and stops before the next
    /// ones. The range is cut at the replica's end.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::read`].
    pub fn read_for_repair(
        &self,
        id: ExtentId,
        offset: u64,
        length: u64,
    ) -> Result<RepairBytes, StoreError> {
        read::read_for_repair(self, id, offset, length)
    }

    /// Replaces bytes in place, below the length. Before the first one the extent is durably
    /// marked overwritten and its bytes are flushed. Freed blocks in the range are skipped. Gives the
    /// blocks that are covered in part and whose other bytes do not verify: damaged or doubtful, they
    /// are to be repaired.
    ///
    /// # Errors
    ///
    /// `Shorter`, `DamagedInTransit`, `ReadFailed`, `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn overwrite(
        &self,
        id: ExtentId,
        offset: u64,
        bytes: &[u8],
        checksums: Checksums<'_>,
        overwriting: Overwriting,
    ) -> Result<Vec<u64>, StoreError> {
        overwrite::overwrite(self, id, offset, bytes, checksums, overwriting)
    }

    /// Removes what is left of an extent whose headers cannot be read, as all of it comes from another
    /// replica. Not to be called for anything else: nothing else of it is lost without a copy.
    ///
    /// # Errors
    ///
    /// `Exists` if it can be read, or nothing is known of such a file; `DiskFailed`.
    pub fn discard_unreadable(&self, id: ExtentId) -> Result<(), StoreError> {
        create::discard_unreadable(self, id)
    }

    /// The bytes of a doubtful block: what the log made of it after a crash. `None` if it is whole.
    ///
    /// # Errors
    ///
    /// `Corrupt` if it is damaged; `Shorter`, `ReadFailed`, `NoExtent`, `Removed`, `DiskFailed`.
    pub fn doubtful_bytes(&self, id: ExtentId, block: u64) -> Result<Option<Vec<u8>>, StoreError> {
        overwrite::doubtful_bytes(self, id, block)
    }

    /// Takes a doubtful block for what it should be, if it is what one of these others made of it. True if the
    /// block is whole then.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::settle_doubtful`].
    pub fn accept_doubtful(
        &self,
        id: ExtentId,
        block: u64,
        others: &[Bytes],
    ) -> Result<bool, StoreError> {
        overwrite::accept_doubtful(self, id, block, others)
    }

    /// As [`ExtentStore::accept_doubtful`]; a block that nobody confirms is damaged from now on.
    ///
    /// # Errors
    ///
    /// `Corrupt` if it is damaged; `Shorter`, `ReadFailed`, `NoExtent`, `Removed`, `DiskFailed`.
    pub fn settle_doubtful(
        &self,
        id: ExtentId,
        block: u64,
        others: &[Bytes],
    ) -> Result<(), StoreError> {
        overwrite::settle_doubtful(self, id, block, others)
    }

    /// Takes a block for damaged from now on, whatever its checksum says. Its bytes stay on the disk, unless that
    /// cannot read them: then there are zeros, which it can.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::settle_doubtful`].
    pub fn distrust(&self, id: ExtentId, block: u64) -> Result<(), StoreError> {
        overwrite::distrust(self, id, block)
    }

    /// Takes all blocks of a range for damaged if there is one among them that the disk cannot read. Gives
    /// them, or none.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::settle_doubtful`].
    pub fn lose_unreadable(
        &self,
        id: ExtentId,
        offset: u64,
        length: u64,
    ) -> Result<Vec<u64>, StoreError> {
        overwrite::lose_unreadable(self, id, offset, length)
    }

    /// Marks an extent overwritten, durably, so that its reads go to the leader (DESIGN.md
    /// section 5: on all members, before the first overwrite). Idempotent.
    ///
    /// # Errors
    ///
    /// `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn mark_overwritten(&self, id: ExtentId) -> Result<(), StoreError> {
        overwrite::mark_overwritten(self, id)
    }

    /// Replaces damaged blocks by a peer's bytes, from `offset`. Of the last block, what lies behind
    /// them stays, as the peer may be shorter; then it must not be damaged itself.
    ///
    /// # Errors
    ///
    /// `Invalid` unless a block begins at `offset`; else as [`ExtentStore::overwrite`].
    pub fn repair_blocks(
        &self,
        id: ExtentId,
        offset: u64,
        bytes: &[u8],
        checksums: Checksums<'_>,
    ) -> Result<(), StoreError> {
        overwrite::repair_blocks(self, id, offset, bytes, checksums)
    }

    /// Notes how many bytes all members have. Never goes back. Written down with the next flush.
    ///
    /// # Errors
    ///
    /// `NoExtent`, `Removed`.
    pub fn set_commit(&self, id: ExtentId, offset: u64) -> Result<(), StoreError> {
        let extent = self.extent(id)?;
        let mut state = extent.state();
        state.committed = state.committed.max(offset.min(state.length));
        Ok(())
    }

    /// Ends the life of an extent as a target of appends: cuts it to `length`, if longer. A cut is
    /// durable on return; a seal without a cut becomes durable with the next flush. Repeating it
    /// is fine; a sealed extent may be cut again.
    ///
    /// # Errors
    ///
    /// `Shorter` if the replica lacks bytes (fill it first); `Corrupt` if the block in which it is
    /// to be cut is damaged; `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn seal(&self, id: ExtentId, length: u64) -> Result<(), StoreError> {
        seal::seal(self, id, length)
    }

    /// Takes a block away, and all that is behind it, to be filled again up to the peers' length. Durable on
    /// return. The extent is open then.
    ///
    /// # Errors
    ///
    /// `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn cut_for_repair(&self, id: ExtentId, block: u64) -> Result<(), StoreError> {
        seal::cut_for_repair(self, id, block)
    }

    /// Opens a sealed extent again to be filled up to its peers' length; seal it afterwards.
    ///
    /// # Errors
    ///
    /// `NoExtent`, `Removed`, `NoSpace`, `DiskFailed`, `Busy`.
    pub fn reopen_for_repair(&self, id: ExtentId) -> Result<(), StoreError> {
        seal::reopen_for_repair(self, id)
    }

    /// Returns when at least so many bytes of each extent are on the disk, with everything
    /// overwritten before the call. Callers that meet share one fdatasync. Removed extents are skipped.
    ///
    /// # Errors
    ///
    /// `Shorter`, `NoExtent`, `NoSpace`, `Busy` if another flush takes too long;
    /// `DiskFailed`: nothing is known of the unflushed bytes; never repeat it in hope.
    pub fn flush(&self, extents: &[(ExtentId, u64)]) -> Result<(), StoreError> {
        flush::flush(self, extents)
    }

    /// Gives back the memory that the system keeps of an extent. Who uses it next hears what is wrong with it.
    pub fn release(&self, id: ExtentId) {
        let Ok(extent) = self.extent(id) else { return };
        if let Ok(file) = self.file(&extent) {
            file.release(0, 0);
        }
    }

    /// Whether at least so many bytes of each extent are here, on the disk or in memory. Removed
    /// extents are skipped.
    ///
    /// # Errors
    ///
    /// `Shorter`, `NoExtent`, `DiskFailed`.
    pub fn check_held(&self, extents: &[(ExtentId, u64)]) -> Result<(), StoreError> {
        flush::check_held(self, extents)
    }

    /// Flushes every extent that needs it: before a clean stop, and in the background.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::flush`].
    pub fn flush_all(&self) -> Result<(), StoreError> {
        let dirty: Vec<_> = self.unflushed().into_iter().map(|id| (id, 0)).collect();
        flush::flush(self, &dirty)
    }

    /// Extents with bytes that no flush has covered yet. Flush them in the background: what was
    /// never flushed can be cut by a power failure, and must be read when the partition is opened.
    #[must_use]
    pub fn unflushed(&self) -> Vec<ExtentId> {
        let all = self.all_extents();
        all.iter().filter(|extent| extent.state().is_dirty()).map(|extent| extent.id).collect()
    }

    /// Gives back the disk space of ranges that no file refers to any more. Durable on return
    /// (one flush of the partition's freed log for all of them); idempotent; unknown extents are
    /// no error. A sealed extent that is dead in all its bytes is removed. Adds to `headers` the blocks that
    /// are to be repaired, whatever else fails: the headers in them go when they can be read.
    ///
    /// # Errors
    ///
    /// `DiskFailed`, `NoSpace`, `Busy`, `ReadFailed`: to be asked for again. What else was asked for is freed.
    pub fn free(&self, ranges: &[Freed], headers: &mut HeaderBlocks) -> Result<(), StoreError> {
        free::free(self, ranges, headers)
    }

    /// The pieces of a small extent that are not freed, from `from` (0, or where the last call
    /// ended), at most `limit`. Returns them and where to go on; `None` at the end.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::read`], and `Invalid` for a large extent.
    pub fn live_pieces(
        &self,
        id: ExtentId,
        from: u64,
        limit: usize,
    ) -> Result<(Vec<piece::Piece>, Option<u64>), StoreError> {
        piece::live_pieces(self, id, from, limit)
    }

    /// State of these extents, or of all if empty. Unknown ones are left out.
    #[must_use]
    pub fn states(&self, ids: &[ExtentId]) -> Vec<ExtentState> {
        self.details(ids).into_iter().map(|details| details.state).collect()
    }

    /// As [`ExtentStore::states`], with the owners.
    #[must_use]
    pub fn details(&self, ids: &[ExtentId]) -> Vec<ExtentDetails> {
        scrub::details(self, ids)
    }

    /// Whether the extent was here and its removal was ordered: it comes back nowhere.
    #[must_use]
    pub fn is_removed(&self, id: ExtentId) -> bool {
        lock(&self.freed).is_removed(id)
    }

    /// What is freed of these extents, in their order, at most `limit` ranges: of a removed one,
    /// all of it.
    #[must_use]
    pub fn freed(&self, ids: &[ExtentId], limit: usize) -> Vec<Freed> {
        let mut freed = Vec::new();
        for extent in ids.iter().copied() {
            let ranges: Vec<(u64, u64)> = match self.present(extent) {
                Some(present) => present.state().dead.iter().take(limit).collect(),
                None if self.is_removed(extent) => vec![(0, u64::MAX)],
                None => lock(&self.freed)
                    .absent(extent)
                    .into_iter()
                    .flat_map(ranges::Ranges::iter)
                    .collect(),
            };
            let range = |(offset, end)| Freed { extent, offset, length: end - offset };
            freed.extend(ranges.into_iter().map(range));
            if freed.len() >= limit {
                break;
            }
        }
        freed.truncate(limit);
        freed
    }

    /// Number of extents.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        read_lock(&self.extents).len() as u64
    }

    /// Highest id ever used among large (`false`) or small (`true`) extents, removed ones
    /// included: the next extent gets a higher one.
    #[must_use]
    pub fn highest_id(&self, small: bool) -> Option<ExtentId> {
        scrub::highest_id(self, small)
    }

    /// What is held of each extent, in order. From memory.
    #[must_use]
    pub fn held(&self) -> Vec<Held> {
        let extents = read_lock(&self.extents);
        let held = |(id, extent): (&ExtentId, &Arc<Extent>)| {
            let state = extent.state();
            Held { extent: *id, length: state.length, part_frees: state.part_frees }
        };
        extents.iter().map(held).collect()
    }

    /// The first extent from `from` on.
    #[must_use]
    pub fn next_extent(&self, from: ExtentId) -> Option<ExtentId> {
        read_lock(&self.extents).range(from..).next().map(|(id, _)| *id)
    }

    /// Bytes allocated on disk by the partition's extents. One stat(2) for each that has changed.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.all_extents().iter().map(|extent| scrub::allocated_of(self, extent)).sum()
    }

    /// A hash over the checksums of an extent's blocks up to `length`, or to the commit offset if
    /// `None`; freed bytes count as zeros, given back already or not. Equal extents of two replicas have equal digests.
    ///
    /// # Errors
    ///
    /// As [`ExtentStore::read`].
    pub fn digest(&self, id: ExtentId, length: Option<u64>) -> Result<ExtentDigest, StoreError> {
        scrub::digest(self, id, length)
    }

    /// Re-reads blocks and verifies them: at most `blocks_max` that are not freed, from block `from` on.
    ///
    /// # Errors
    ///
    /// `NoExtent`, `Removed`, `Busy`. Damage is a result, not an error.
    pub fn verify(&self, id: ExtentId, from: u64, blocks_max: u64) -> Result<Verified, StoreError> {
        scrub::verify(self, id, from, blocks_max)
    }

    fn present(&self, id: ExtentId) -> Option<Arc<Extent>> {
        read_lock(&self.extents).get(&id).cloned()
    }

    fn check_open(&self) -> Result<(), StoreError> {
        if self.is_closed.load(Ordering::SeqCst) { Err(StoreError::Closed) } else { Ok(()) }
    }

    fn extent(&self, id: ExtentId) -> Result<Arc<Extent>, StoreError> {
        self.check_open()?;
        if let Some(extent) = self.present(id) {
            return Ok(extent);
        }
        let removed = lock(&self.freed).is_removed(id);
        Err(if removed { StoreError::Removed } else { StoreError::NoExtent })
    }

    /// The extent's file, opened if it is not.
    fn file(&self, extent: &Extent) -> Result<Arc<OpenFile>, StoreError> {
        let path = || extent_path(&self.directory, extent.id);
        let opened = self.disk.open_file(self.number, extent.id, path);
        opened.map_err(|error| match error.kind() {
            // Removed by another thread since it was looked up.
            std::io::ErrorKind::NotFound if extent.check().is_err() => StoreError::Removed,
            std::io::ErrorKind::NotFound if self.check_open().is_err() => StoreError::Closed,
            _ => self.disk.open_failed(&error),
        })
    }

    /// Makes the extent's name durable, if it is not.
    fn sync_entry(&self, extent: &Extent) -> Result<(), StoreError> {
        self.entries.sync(extent.entry, &self.disk, &self.directory)
    }

    fn all_extents(&self) -> Vec<Arc<Extent>> {
        read_lock(&self.extents).values().cloned().collect()
    }
}

impl Drop for ExtentStore {
    fn drop(&mut self) {
        self.disk.close_files(self.number, *self.is_closed.get_mut());
    }
}

/// The file of an extent.
fn extent_path(directory: &Path, id: ExtentId) -> PathBuf {
    directory.join(format!("{:016x}.extent", id.0))
}

/// Locks; a thread that panicked while it held the lock left plain data behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_lock<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write_lock<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
