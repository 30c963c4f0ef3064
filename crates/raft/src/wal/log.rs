//! The log itself: append, change segments, free old ones.

use std::collections::{BTreeSet, VecDeque};
use std::io;

use milpa_host::disk;
use milpa_types::PartitionId;

use super::format::{BLOCK_BYTES, SEGMENT_HEADER_BYTES, SegmentHeader, chain_of, mix};
use super::live::{LiveIndex, SegmentLoad};
use super::record::{LogBatch, Place, Record, Stored, TraceLine};
use super::room::{self, Need};
use super::scan::{self, Scan};
use super::write::BatchBuilder;
use super::{LogStorage, Recovered, WalError, WalOptions, spare_id, spare_name};
use super::{TEMPORARY_NAME, segment_name, segment_seq};

/// One write carries at most this much; more waits for the next flush of the same call.
pub(crate) const BATCH_BYTES_MAX: u64 = 16 << 20;
/// How much is zeroed, and synced, in one step while preparing a segment: a few milliseconds.
const PREPARE_STEP_BYTES: u64 = 1 << 20;
/// Freed segment files kept for reuse.
const SPARES_MAX: usize = 2;

/// Counters of one log since it was opened. For monitoring only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalStats {
    /// Writes, each with one flush.
    pub flushes: u64,
    /// Records written.
    pub records: u64,
    /// Bytes written, with headers and padding.
    pub bytes: u64,
    /// Segment files in use.
    pub segments: u64,
    /// Records copied forward to free a segment.
    pub carried: u64,
}

/// The segment that is written to.
#[derive(Debug)]
struct Current {
    seq: u64,
    salt: u64,
    position: u64,
    bytes: u64,
}

/// How far a file for the next segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prepared {
    Partly,
    Whole,
    NoRoom,
}

/// A write-ahead log of many groups. Owned by one thread; every call may block on the disk.
pub struct Wal {
    storage: Box<dyn LogStorage>,
    options: WalOptions,
    /// Older segments and their sizes, ascending. The current one is not among them.
    older: VecDeque<(u64, u64)>,
    current: Current,
    next_number: u64,
    chain: u64,
    trace: Vec<TraceLine>,
    /// The last batch of the last call holds a new vote.
    ends_with_vote: bool,
    live: LiveIndex,
    /// Files for the next segments and their sizes, ascending.
    spares: Vec<(String, u64)>,
    next_spare: u64,
    /// How much of the temporary file is zeroed. It stays as it is while freed segments serve instead.
    prepared_bytes: Option<u64>,
    /// The next segment is not prepared before the current one is written so far: the disk was full, or the log was opened
    /// there.
    prepare_from: u64,
    /// Groups whose damage a freed segment could hide.
    damaged: BTreeSet<PartitionId>,
    is_collection_due: bool,
    is_fenced: bool,
    buffer: Vec<u8>,
    stats: WalStats,
}

impl std::fmt::Debug for Wal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wal").field("current", &self.current).finish_non_exhaustive()
    }
}

impl Wal {
    /// Reads the log, or starts one in an empty directory, and makes it ready to append.
    ///
    /// # Errors
    ///
    /// [`WalError::WrongOwner`] if the log belongs to another node or cluster; [`WalError::Io`].
    /// Damage is not an error: it is in [`Recovered::damaged`].
    pub fn open(
        storage: impl LogStorage,
        options: WalOptions,
    ) -> Result<(Wal, Recovered), WalError> {
        options.validate()?;
        let mut storage: Box<dyn LogStorage> = Box::new(storage);
        let mut scan = scan::scan(storage.as_mut(), &options)?;
        let mut wal = Wal::from_scan(storage, options, &mut scan);
        wal.adopt_spares()?;
        match &scan.tail {
            Some(tail) => wal.continue_at(tail)?,
            None => wal.rotate()?,
        }
        let (groups, damaged) = scan.replay.finish();
        wal.damaged = damaged.iter().map(|damage| damage.group).collect();
        let has_torn_tail = scan.tail.is_some_and(|tail| tail.is_torn);
        let recovered = Recovered { groups, damaged, has_torn_tail, batches: scan.batches };
        Ok((wal, recovered))
    }

    fn from_scan(storage: Box<dyn LogStorage>, options: WalOptions, scan: &mut Scan) -> Wal {
        let newest = scan.segments.last().map_or(0, |&(seq, _)| seq);
        let mut older: VecDeque<_> = scan.segments.iter().copied().collect();
        if scan.tail.is_some() {
            older.pop_back();
        }
        Wal {
            storage,
            older,
            current: Current { seq: newest, salt: 0, position: 0, bytes: 0 },
            next_number: scan.next_number.max(1),
            chain: scan.chain,
            trace: std::mem::take(&mut scan.trace),
            ends_with_vote: false,
            live: std::mem::take(&mut scan.live),
            spares: Vec::new(),
            next_spare: 0,
            prepared_bytes: None,
            prepare_from: 0,
            damaged: BTreeSet::new(),
            is_collection_due: true,
            is_fenced: false,
            buffer: Vec::new(),
            stats: WalStats::default(),
            options,
        }
    }

    /// Keeps reusable files of the right size, and removes the leftovers of a crash.
    fn adopt_spares(&mut self) -> Result<(), WalError> {
        for name in self.storage.list()? {
            if let Some(id) = spare_id(&name) {
                self.next_spare = self.next_spare.max(id + 1);
                let mut end = [0; 2];
                let last_byte = self.options.segment_bytes - 1;
                let has_size = self.storage.read(&name, last_byte, &mut end)? == 1;
                if has_size && self.spares.len() < SPARES_MAX {
                    self.spares.push((name, self.options.segment_bytes));
                    continue;
                }
            } else if name != TEMPORARY_NAME {
                continue;
            }
            self.storage.remove(&name)?;
        }
        Ok(())
    }

    /// What was read may only be in the page cache, left by a process that died between write and
    /// flush; or, after a failed flush, be there and never reach the disk, if the system did not let go
    /// of it when asked. Only the last batch can be in that state, so it is written again and flushed
    /// before anything is built on it.
    ///
    /// What was not read because a crash had torn it must not be read later: the next batch goes to the
    /// same place, and if that one is torn too, its tail may be what the one before lacked.
    fn continue_at(&mut self, tail: &scan::Tail) -> Result<(), WalError> {
        self.current = Current {
            seq: tail.header.seq,
            salt: tail.header.salt,
            position: tail.position,
            bytes: tail.header.segment_bytes,
        };
        self.prepare_from = tail.position;
        let name = segment_name(self.current.seq);
        if let Some((offset, bytes)) = &tail.last_batch {
            self.storage.write_at(&name, *offset, bytes)?;
        }
        if tail.is_torn {
            self.storage.write_at(&name, tail.position, &[0; BLOCK_BYTES as usize])?;
        }
        self.storage.sync(&name)?;
        self.storage.sync_dir()?;
        Ok(())
    }

    /// Writes all records of all batches, in order, and returns when they are durable. Usually
    /// that is one write and one flush.
    ///
    /// # Errors
    ///
    /// After any error the log is fenced: what the disk holds of these batches is unknown, and
    /// every later call fails with [`WalError::Fenced`].
    pub fn append(&mut self, batches: &[LogBatch]) -> Result<(), WalError> {
        let mut records = batches.iter().flat_map(|batch| &batch.records).peekable();
        while records.peek().is_some() {
            self.ends_with_vote = false;
            let mut builder = self.begin()?;
            let mut count = 0;
            while let Some(record) = records.next_if(|record| builder.has_room_for(record)) {
                self.ends_with_vote |= self.live.is_new_vote(record);
                let bytes = builder.put(&Stored::Record(record.clone()));
                self.note(record, bytes, false);
                count += 1;
            }
            self.finish_or_rotate(builder, count)?;
        }
        self.collect()
    }

    /// How many of the batches can be written with what the log has of the disk. If not all, it takes more; where there is no
    /// room for all, it is made for half of them, and so on. None while there is none, and nothing has failed then: somebody
    /// else may fill the disk, and what this log acknowledges no others need wait for.
    ///
    /// # Errors
    ///
    /// As [`Wal::append`].
    pub fn make_room(&mut self, batches: &[LogBatch]) -> Result<usize, WalError> {
        let mut count = batches.len();
        while count > 0 {
            let mut need = Need::behind(self.trace.len());
            let records = batches.iter().take(count).flat_map(|batch| &batch.records);
            records.for_each(|record| need.add(record));
            if self.make_room_for(&need)? {
                break;
            }
            count /= 2;
        }
        Ok(count)
    }

    /// Takes what is missing if all of it can be had.
    fn make_room_for(&mut self, need: &Need) -> Result<bool, WalError> {
        let here = self.current.bytes.saturating_sub(self.current.position);
        let missing = need.missing(here, self.spares.iter().map(|(_, bytes)| *bytes));
        let full = self.options.segment_bytes;
        // Nothing can be done for a record that fits into no segment.
        if self.is_fenced || missing == 0 || need.share_of(full) == 0 {
            return Ok(true);
        }
        let Some(sizes) = room::segments(need, missing, self.free_bytes(), full) else {
            self.fence_on_error(Wal::drop_prepared)?;
            return Ok(false);
        };
        for bytes in sizes {
            if self.prepared_bytes.is_some_and(|done| done > bytes) {
                self.fence_on_error(Wal::drop_prepared)?;
            }
            let prepared = loop {
                match self.prepare(bytes)? {
                    Prepared::Partly => {}
                    ended => break ended,
                }
            };
            if prepared == Prepared::NoRoom {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What the next segments may have of the disk, with what is prepared. Who cannot be asked is tried.
    fn free_bytes(&self) -> u64 {
        let free = self.storage.free_bytes().unwrap_or(u64::MAX);
        let free = free.saturating_add(self.prepared_bytes.unwrap_or(0));
        free.saturating_sub(room::SPARED_BYTES)
    }

    fn note(&mut self, record: &Record, bytes: u64, is_carried: bool) {
        self.live.note(record, self.current.seq, bytes, is_carried);
        self.stats.records += 1;
        match record {
            Record::GroupRemoved { group } => {
                self.damaged.remove(group);
                self.is_collection_due = true;
            }
            Record::Compacted { .. } | Record::Snapshot { .. } => self.is_collection_due = true,
            _ => {}
        }
    }

    fn begin(&mut self) -> Result<BatchBuilder, WalError> {
        if self.is_fenced {
            return Err(WalError::Fenced);
        }
        let place = Place {
            salt: self.current.salt,
            number: self.next_number,
            offset: self.current.position,
        };
        let limit = (self.current.bytes - self.current.position).min(BATCH_BYTES_MAX);
        let buffer = std::mem::take(&mut self.buffer);
        Ok(BatchBuilder::new(buffer, place, limit, self.trace.clone()))
    }

    /// Flushes what was put in; or, if nothing fitted, goes on in a new segment.
    fn finish_or_rotate(&mut self, builder: BatchBuilder, count: usize) -> Result<(), WalError> {
        if count > 0 {
            return self.fence_on_error(|wal| wal.flush(builder));
        }
        self.buffer = builder.into_buffer();
        if self.current.position == SEGMENT_HEADER_BYTES
            && self.current.bytes >= self.options.segment_bytes
        {
            self.is_fenced = true;
            return Err(WalError::RecordTooLarge { segment_bytes: self.options.segment_bytes });
        }
        self.fence_on_error(Wal::rotate)
    }

    fn fence_on_error(
        &mut self,
        operation: impl FnOnce(&mut Wal) -> Result<(), WalError>,
    ) -> Result<(), WalError> {
        let result = operation(self);
        self.is_fenced |= result.is_err();
        result
    }

    fn flush(&mut self, builder: BatchBuilder) -> Result<(), WalError> {
        let (bytes, length, lines) = builder.finish(self.current.seq, self.chain);
        let name = segment_name(self.current.seq);
        self.storage.write_at(&name, self.current.position, &bytes)?;
        self.storage.sync(&name)?;
        self.chain = chain_of(bytes.get(..length).unwrap_or_default());
        self.trace = lines;
        self.next_number += 1;
        self.current.position += bytes.len() as u64;
        self.stats.flushes += 1;
        self.stats.bytes += bytes.len() as u64;
        self.buffer = bytes;
        Ok(())
    }

    /// Opens the next segment. Its header is durable before the file gets its name, and it is
    /// only made when everything before is durable: so its existence proves that.
    fn rotate(&mut self) -> Result<(), WalError> {
        let is_first = self.current.seq == 0;
        let (spare, bytes) = match self.spares.pop() {
            Some(spare) => spare,
            None => {
                let full = match is_first {
                    true => self.options.first_segment_bytes,
                    false => self.options.segment_bytes,
                };
                (TEMPORARY_NAME.to_owned(), room::largest_segment(self.free_bytes(), full))
            }
        };
        if spare == TEMPORARY_NAME {
            if self.prepared_bytes.is_some_and(|done| done > bytes) {
                self.drop_prepared()?;
            }
            while !self.zero_step(bytes)? {}
            self.prepared_bytes = None;
        }
        let seq = self.current.seq + 1;
        let salt = mix(self.options.nonce ^ mix(seq) ^ mix(!self.next_number));
        let header = SegmentHeader {
            seq,
            owner: self.options.owner,
            first_batch: self.next_number,
            chain: self.chain,
            salt,
            segment_bytes: bytes,
        };
        self.storage.write_at(&spare, 0, &header.encode())?;
        self.storage.sync(&spare)?;
        self.storage.rename(&spare, &segment_name(seq))?;
        self.storage.sync_dir()?;
        if self.current.bytes > 0 {
            self.older.push_back((self.current.seq, self.current.bytes));
        }
        self.current = Current { seq, salt, position: SEGMENT_HEADER_BYTES, bytes };
        self.prepare_from = 0;
        self.is_collection_due = true;
        Ok(())
    }

    /// Zeroes and syncs the next piece of the temporary file. True when it has `bytes`. Blocks
    /// that were once written and synced need no journal commit when they are written again.
    fn zero_step(&mut self, bytes: u64) -> Result<bool, WalError> {
        let done = match self.prepared_bytes {
            Some(done) => done,
            None => {
                self.storage.create(TEMPORARY_NAME)?;
                0
            }
        };
        if done < bytes {
            let step = (bytes - done).min(PREPARE_STEP_BYTES);
            let zeros = vec![0; usize::try_from(step).unwrap_or(0)];
            self.storage.write_at(TEMPORARY_NAME, done, &zeros)?;
            self.storage.sync(TEMPORARY_NAME)?;
        }
        let done = (done + PREPARE_STEP_BYTES).min(bytes);
        self.prepared_bytes = Some(done);
        Ok(done == bytes)
    }

    /// Does a little of what the next segment change will need, when the writer has nothing else
    /// to do and it is due. Returns true if more of it is due. On a full disk it gives back what it
    /// took, and comes back to it later: nothing needs it yet.
    ///
    /// # Errors
    ///
    /// As [`Wal::append`].
    pub fn prepare_step(&mut self) -> Result<bool, WalError> {
        if self.is_fenced || !self.spares.is_empty() || !self.is_step_due() {
            return Ok(false);
        }
        let prepared = self.prepare(self.options.segment_bytes)?;
        if prepared == Prepared::NoRoom {
            self.prepare_from = self.current.position + self.current.bytes / 64;
        }
        Ok(prepared == Prepared::Partly && self.is_step_due())
    }

    /// The steps are spread over the second and third quarter of the current segment: in the first one an old segment may
    /// still be freed, which is used again, and the last one is for a writer that was busy. Replicas fill their logs at the
    /// same time, so steps at a stretch would keep the disks of all of them busy at once.
    fn is_step_due(&self) -> bool {
        let quarter = self.current.bytes / 4;
        let from = self.prepare_from.max(quarter);
        let steps = self.options.segment_bytes.div_ceil(PREPARE_STEP_BYTES);
        let apart = (3 * quarter).saturating_sub(from) / steps;
        let done = self.prepared_bytes.unwrap_or(0) / PREPARE_STEP_BYTES;
        self.current.position >= from + done * apart
    }

    fn drop_prepared(&mut self) -> Result<(), WalError> {
        self.prepared_bytes = None;
        match self.storage.remove(TEMPORARY_NAME) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Does a little for the next segment, of so many bytes. Nothing is written before there is room for all of it; where
    /// somebody else was quicker, what was taken is given back.
    fn prepare(&mut self, bytes: u64) -> Result<Prepared, WalError> {
        let step = match self.free_bytes() >= bytes {
            true => self.prepare_some(bytes),
            false => Ok(Prepared::NoRoom),
        };
        let prepared = match step {
            Err(WalError::Io(error)) if disk::is_full(&error) || disk::is_shortage(&error) => {
                Ok(Prepared::NoRoom)
            }
            step => step,
        };
        self.is_fenced |= prepared.is_err();
        if matches!(prepared, Ok(Prepared::NoRoom)) {
            self.fence_on_error(Wal::drop_prepared)?;
        }
        prepared
    }

    fn prepare_some(&mut self, bytes: u64) -> Result<Prepared, WalError> {
        if !self.zero_step(bytes)? {
            return Ok(Prepared::Partly);
        }
        let spare = self.new_spare_name();
        self.storage.rename(TEMPORARY_NAME, &spare)?;
        self.storage.sync_dir()?;
        self.prepared_bytes = None;
        self.add_spare(spare, bytes);
        Ok(Prepared::Whole)
    }

    fn add_spare(&mut self, name: String, bytes: u64) {
        self.spares.push((name, bytes));
        self.spares.sort_by_key(|(_, bytes)| *bytes);
    }

    fn new_spare_name(&mut self) -> String {
        self.next_spare += 1;
        spare_name(self.next_spare)
    }

    /// Frees old segments as far as nothing live is in them. Few live records are copied forward,
    /// so that one idle group cannot hold a whole segment.
    fn collect(&mut self) -> Result<(), WalError> {
        // While damage is known, the segment that proves it stays.
        if !std::mem::take(&mut self.is_collection_due) || !self.damaged.is_empty() {
            return Ok(());
        }
        // Only what is there now: copying forward may itself make segments old.
        for _ in 0..self.older.len() {
            let Some(&(seq, bytes)) = self.older.front() else { break };
            let load = self.live.load(seq);
            if !load.is_empty() {
                let Some(records) = self.read_load(seq, bytes, load)? else { return Ok(()) };
                self.carry(records)?;
                // A rotten last batch would pass for a torn tail, and the originals will be gone.
                // With one behind it, it is known to have been durable.
                self.seal()?;
            }
            self.fence_on_error(|wal| wal.free(seq, bytes))?;
        }
        Ok(())
    }

    /// What has to be copied before segment `seq` can be freed. `None` if that is too much, cannot be read, or has no room.
    fn read_load(
        &mut self,
        seq: u64,
        bytes: u64,
        load: SegmentLoad,
    ) -> Result<Option<Vec<Record>>, WalError> {
        let is_crowded = self.older.len() >= self.options.segments_max;
        // Less than a quarter, or copying could write more than it frees.
        let light_bytes = self.options.carry_bytes_max.min(bytes / 4);
        let is_light = is_crowded && load.entry_bytes <= light_bytes;
        if !load.entries.is_empty() && !is_light {
            return Ok(None);
        }
        // How many bytes the entries have may be an estimate: it spares reading them in vain, and no more.
        let mut need = Need::behind(self.trace.len());
        load.count(&mut need);
        if !self.has_room_to_carry(&need)? {
            return Ok(None);
        }
        let mut records = load.anchors;
        if !load.entries.is_empty() {
            let entries = self.read_entries(seq, &load.entries, light_bytes)?;
            let Some(entries) = entries else { return Ok(None) };
            records.extend(entries);
        }
        let mut need = Need::behind(self.trace.len());
        records.iter().for_each(|record| need.add(record));
        Ok(self.has_room_to_carry(&need)?.then_some(records))
    }

    /// If not, the segment is freed when there is room again.
    fn has_room_to_carry(&mut self, need: &Need) -> Result<bool, WalError> {
        let has_room = self.make_room_for(need)?;
        self.is_collection_due |= !has_room;
        Ok(has_room)
    }

    /// Copies records of an old segment to the end of the log.
    fn carry(&mut self, records: Vec<Record>) -> Result<(), WalError> {
        let mut records = records.into_iter().peekable();
        while records.peek().is_some() {
            let mut builder = self.begin()?;
            let mut count = 0;
            while let Some(record) = records.next_if(|record| builder.has_room_for(record)) {
                let stored = Stored::Carried(record.clone());
                let bytes = builder.put(&stored);
                self.note(&record, bytes, true);
                self.stats.carried += 1;
                count += 1;
            }
            self.finish_or_rotate(builder, count)?;
        }
        Ok(())
    }

    /// Whether a disk that lost the last batch could do so unnoticed (docs/decisions/0012), and there is room to end that.
    pub(crate) fn is_end_open(&self) -> bool {
        let is_first = self.current.position == SEGMENT_HEADER_BYTES;
        let has_room = self.current.bytes - self.current.position >= BLOCK_BYTES;
        let would_matter =
            || self.ends_with_vote || self.trace.iter().any(TraceLine::is_more_than_hard_state);
        !self.is_fenced && !is_first && has_room && would_matter()
    }

    /// Whether the end that is open holds a vote: nobody else tells this replica of one that it has forgotten.
    pub(crate) fn ends_with_vote(&self) -> bool {
        self.ends_with_vote
    }

    /// Makes it provable that the last batch was durable, if that is of use. When the writer has nothing else to do.
    ///
    /// # Errors
    ///
    /// As [`Wal::append`].
    pub(crate) fn seal_end(&mut self) -> Result<(), WalError> {
        match self.is_end_open() {
            true => {
                self.ends_with_vote = false;
                self.seal()
            }
            false => Ok(()),
        }
    }

    /// Makes it provable that the last batch was durable: by a batch of nothing behind it, or by
    /// the header of a new segment.
    fn seal(&mut self) -> Result<(), WalError> {
        let has_room = self.current.bytes - self.current.position >= BLOCK_BYTES;
        let builder = self.begin()?;
        self.finish_or_rotate(builder, usize::from(has_room))
    }

    /// Reads live entries, and notes how many bytes they have. `None` if those are more than `bytes_max`, or one cannot
    /// be read.
    fn read_entries(
        &mut self,
        seq: u64,
        wanted: &[(PartitionId, u64, u64)],
        bytes_max: u64,
    ) -> Result<Option<Vec<Record>>, WalError> {
        let next_seq = self.older.get(1).map_or(self.current.seq, |&(seq, _)| seq);
        let storage = self.storage.as_mut();
        let result =
            scan::read_live_entries(storage, &self.options, seq, next_seq, wanted, bytes_max);
        self.is_fenced |= result.is_err();
        let Some(entries) = result? else {
            tracing::warn!(segment = seq, "log segment has unreadable live entries; kept");
            return Ok(None);
        };
        for (&(group, first, _), &bytes) in wanted.iter().zip(&entries.bytes) {
            self.live.measured(group, first, bytes);
        }
        Ok(entries.records)
    }

    /// The directory is synced before the file can get new contents, or a crash could leave the
    /// old name on them.
    fn free(&mut self, seq: u64, bytes: u64) -> Result<(), WalError> {
        let name = segment_name(seq);
        if bytes == self.options.segment_bytes && self.spares.len() < SPARES_MAX {
            let spare = self.new_spare_name();
            self.storage.rename(&name, &spare)?;
            self.storage.sync_dir()?;
            self.add_spare(spare, bytes);
        } else {
            self.storage.remove(&name)?;
            self.storage.sync_dir()?;
        }
        self.older.pop_front();
        debug_assert!(segment_seq(&name).is_some());
        Ok(())
    }

    /// Counters since the log was opened.
    #[must_use]
    pub fn stats(&self) -> WalStats {
        WalStats { segments: self.older.len() as u64 + 1, ..self.stats }
    }

    /// Whether a write or flush has failed.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.is_fenced
    }
}
