//! One extent in memory, and its locks.
//!
//! Locks, in the order in which they are taken; each may be skipped:
//!
//! | lock | who holds it | how long |
//! |---|---|---|
//! | turn | flush, seal, mark: whoever writes the header | a flush |
//! | writer | append, overwrite, cut: whoever changes the end or the bytes | a few writes |
//! | content | shared: reads; exclusive: overwrite, punch, cut, repair | a few reads or writes |
//! | the store's freed log | free, cut | a flush of that log |
//! | state, sums | everybody | no I/O, except that a missing chunk is read under `sums` |

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_types::{BLOCK_BYTES, Epoch, ExtentId, InodeId, PartitionId, SessionId};

use super::disk::{OpenFile, StoreDisk};
use super::format::{HEADER_OFFSET, HEADER_STRIDE, Header, Place, Slot, Sum};
use super::ranges::Ranges;
use super::sums::SumTable;
use super::{StoreError, lock};

/// How long a caller waits for another thread's flush of the same extent. A disk that needs longer
/// is as good as dead; the caller answers "busy" and the thread in the flush stays with it.
const TURN_WAIT: Duration = Duration::from_secs(30);

/// One extent.
pub(super) struct Extent {
    pub(super) id: ExtentId,
    pub(super) partition: PartitionId,
    pub(super) place: Place,
    pub(super) epoch: Epoch,
    pub(super) inode: InodeId,
    pub(super) session: SessionId,
    /// The how-manieth creation in its directory this was; see `Entries`.
    pub(super) entry: u64,
    state: Mutex<State>,
    pub(super) writer: Mutex<Writer>,
    pub(super) content: RwLock<()>,
    pub(super) sums: Mutex<SumTable>,
    turn: Mutex<Turn>,
    turned: Condvar,
    removed: AtomicBool,
}

/// What is known of an extent. Changed only after the file was.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Bytes held.
    pub(super) length: u64,
    /// What is known of the last block if it is partial; else of no meaning. Chosen never to match if that
    /// block does not verify, so that neither reads nor further appends can hide it.
    pub(super) tail: Sum,
    /// Bytes that were there when the last completed flush began.
    pub(super) flushed: u64,
    /// The floor in the last flushed header: at most `flushed`.
    pub(super) floor: u64,
    /// Bytes that all members have, as far as known.
    pub(super) committed: u64,
    pub(super) sealed: bool,
    pub(super) overwritten: bool,
    /// Bytes that no file refers to any more.
    pub(super) dead: Ranges,
    /// How often bytes died, and others that were written with them (of a piece, if it has any) lived
    /// on, since the node's start.
    pub(super) part_frees: u64,
    /// What the slots of doubtful blocks said before the log was repeated.
    pub(super) torn: BTreeMap<u64, Slot>,
    /// Counts changes of the file; compared with `flushed_writes`.
    pub(super) writes: u64,
    pub(super) flushed_writes: u64,
    /// Bytes allocated on disk as last asked, and the two counters at that time.
    pub(super) allocated: Option<(u64, (u64, u64))>,
}

impl State {
    pub(super) fn is_dirty(&self) -> bool {
        self.writes != self.flushed_writes
    }

    /// Bytes allocated on disk, if nothing has changed since they were asked for.
    pub(super) fn known_allocated(&self) -> Option<u64> {
        let (bytes, counters) = self.allocated?;
        (counters == (self.writes, self.flushed_writes)).then_some(bytes)
    }

    /// A copy of everything that a header says.
    pub(super) fn clone_for_header(&self) -> State {
        State { dead: Ranges::default(), torn: BTreeMap::new(), ..*self }
    }

    /// The slot of the last block, if it is partial.
    pub(super) fn tail(&self) -> Option<(u64, Slot)> {
        let within = self.length % BLOCK_BYTES;
        (within != 0).then(|| (self.length / BLOCK_BYTES, self.tail.slot(within as u16)))
    }

    /// Whether all bytes of a block are dead, and no more will be added to it.
    pub(super) fn is_freed(&self, block: u64) -> bool {
        let is_full = (block + 1) * BLOCK_BYTES <= self.length;
        (is_full || self.sealed) && self.is_dead(block)
    }

    /// Whether all bytes of a block are dead.
    pub(super) fn is_dead(&self, block: u64) -> bool {
        let (start, end) = (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
        !self.dead.is_empty() && self.dead.covers(start, end.min(self.length))
    }

    /// The first block from `block` on that is not freed; `end` if all below it are.
    pub(super) fn skip_freed(&self, mut block: u64, end: u64) -> u64 {
        while block < end && self.is_freed(block) {
            // By runs: an extent has 65,536 blocks.
            let run_end = self.dead.run_at(block * BLOCK_BYTES).map_or(0, |(_, end)| end);
            block = (run_end / BLOCK_BYTES).clamp(block + 1, end);
        }
        block
    }
}

/// What only appends, overwrites and cuts touch.
#[derive(Default)]
pub(super) struct Writer {
    /// Slots beyond the end may be left from appends that failed or were lost in part. They are
    /// cleared and flushed before the next append.
    pub(super) needs_cut: bool,
    /// Encoded slots of the append at work; kept so that appends do not allocate.
    pub(super) slots: Vec<u8>,
}

/// Whose turn it is to write the header, and where.
#[derive(Default)]
struct Turn {
    running: bool,
    /// Flushes begun, and the last one that succeeded.
    started: u64,
    done: u64,
    sequence: u64,
    /// The slot with the last flushed header: not to be written.
    pinned: u32,
    /// Whether the other slot was written since the last flush.
    written: bool,
    /// The headers were read from a file that a process left behind: perhaps they are in the
    /// system's memory only. Flush before the first write, so that the pin means something.
    unsettled: bool,
}

/// The right to write the header and to flush.
pub(super) struct TurnGuard<'a> {
    extent: &'a Extent,
    /// The number of this flush, if it is one.
    flush: Option<u64>,
}

/// What a new [`Extent`] starts with.
pub(super) struct ExtentParts {
    pub(super) header: Header,
    /// The slot that is not to be written next.
    pub(super) slot: u32,
    pub(super) entry: u64,
    pub(super) state: State,
    /// Read from disk, as opposed to new.
    pub(super) recovered: bool,
    /// See [`Writer::needs_cut`].
    pub(super) needs_cut: bool,
}

impl Extent {
    pub(super) fn new(parts: ExtentParts) -> Extent {
        let header = parts.header;
        Extent {
            id: header.extent,
            partition: header.partition,
            place: Place::new(header.partition, header.extent),
            epoch: header.epoch,
            inode: header.inode,
            session: header.session,
            entry: parts.entry,
            state: Mutex::new(parts.state),
            writer: Mutex::new(Writer { needs_cut: parts.needs_cut, slots: Vec::new() }),
            content: RwLock::default(),
            sums: Mutex::default(),
            turn: Mutex::new(Turn {
                sequence: header.sequence,
                pinned: parts.slot,
                unsettled: parts.recovered,
                ..Turn::default()
            }),
            turned: Condvar::new(),
            removed: AtomicBool::new(false),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Refuses once the extent is removed. Checked by writers under their lock.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        if self.removed.load(Ordering::SeqCst) { Err(StoreError::Removed) } else { Ok(()) }
    }

    pub(super) fn set_removed(&self) {
        self.removed.store(true, Ordering::SeqCst);
    }

    /// Whether a flush has completed since the extent was created or read from disk.
    pub(super) fn is_settled(&self) -> bool {
        !lock(&self.turn).unsettled
    }

    /// Waits for the turn.
    pub(super) fn take_turn(&self) -> Result<TurnGuard<'_>, StoreError> {
        let mut turn = lock(&self.turn);
        let deadline = Instant::now() + TURN_WAIT;
        while turn.running {
            turn = self.wait(turn, deadline)?;
        }
        turn.running = true;
        Ok(TurnGuard { extent: self, flush: None })
    }

    /// Waits for a flush that begins after this call: another caller's (`None`), or one's own.
    pub(super) fn take_flush_turn(
        &self,
        disk: &StoreDisk,
    ) -> Result<Option<TurnGuard<'_>>, StoreError> {
        let mut turn = lock(&self.turn);
        let deadline = Instant::now() + TURN_WAIT;
        // A flush that has begun may have missed our bytes; the next one cannot.
        let ticket = turn.started + 1;
        loop {
            disk.check()?;
            if turn.done >= ticket {
                return Ok(None);
            }
            if !turn.running {
                turn.running = true;
                turn.started += 1;
                return Ok(Some(TurnGuard { extent: self, flush: Some(turn.started) }));
            }
            turn = self.wait(turn, deadline)?;
        }
    }

    fn wait<'a>(
        &self,
        turn: MutexGuard<'a, Turn>,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, Turn>, StoreError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StoreError::Busy);
        }
        let waited = self.turned.wait_timeout(turn, left);
        Ok(waited.unwrap_or_else(std::sync::PoisonError::into_inner).0)
    }

    /// A header that says what `state` says.
    fn header(&self, state: &State, sequence: u64, cut_pending: bool) -> Header {
        Header {
            sequence,
            partition: self.partition,
            extent: self.id,
            epoch: self.epoch,
            inode: self.inode,
            session: self.session,
            sealed: state.sealed,
            overwritten: state.overwritten,
            cut_pending,
            tail: state.tail,
            length: state.length,
            floor: state.flushed.min(state.length),
            committed: state.committed,
        }
    }
}

impl TurnGuard<'_> {
    /// Writes a header to the slot that is not pinned. Durable with the next [`TurnGuard::sync`].
    pub(super) fn write_header(
        &self,
        disk: &StoreDisk,
        file: &OpenFile,
        state: &State,
        cut_pending: bool,
    ) -> Result<(), StoreError> {
        if lock(&self.extent.turn).unsettled {
            self.sync(disk, file)?;
        }
        let mut turn = lock(&self.extent.turn);
        turn.sequence += 1;
        turn.written = true;
        let slot = 1 - turn.pinned.min(1);
        let header = self.extent.header(state, turn.sequence, cut_pending);
        drop(turn);
        let offset = HEADER_OFFSET + u64::from(slot) * HEADER_STRIDE;
        file.write_at(&header.encode(slot), offset).map_err(|e| disk.write_failed("pwrite", &e))
    }

    /// Flushes the file and with it the header written before, which is then pinned.
    pub(super) fn sync(&self, disk: &StoreDisk, file: &OpenFile) -> Result<(), StoreError> {
        disk.check()?;
        file.sync().map_err(|e| disk.sync_failed(&e))?;
        let mut turn = lock(&self.extent.turn);
        turn.unsettled = false;
        if std::mem::take(&mut turn.written) {
            turn.pinned = 1 - turn.pinned.min(1);
        }
        Ok(())
    }

    /// Tells those who wait that this flush covered them.
    pub(super) fn flush_done(&self) {
        if let Some(number) = self.flush {
            lock(&self.extent.turn).done = number;
        }
    }
}

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        lock(&self.extent.turn).running = false;
        self.extent.turned.notify_all();
    }
}

/// Creations in the partition's directory, and how many of them are durable. One fsync of the directory
/// covers all creations before it.
#[derive(Default)]
pub(super) struct Entries {
    created: std::sync::atomic::AtomicU64,
    durable: Mutex<u64>,
}

impl Entries {
    pub(super) fn created(&self) -> u64 {
        self.created.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Makes the creation number `entry` durable, if it is not.
    pub(super) fn sync(
        &self,
        entry: u64,
        disk: &StoreDisk,
        directory: &std::path::Path,
    ) -> Result<(), StoreError> {
        let mut durable = lock(&self.durable);
        if *durable >= entry {
            return Ok(());
        }
        let created = self.created.load(Ordering::SeqCst);
        disk.files().sync_directory(directory).map_err(|e| disk.sync_failed(&e))?;
        *durable = created;
        Ok(())
    }
}
