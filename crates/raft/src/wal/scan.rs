//! Reads all segments from the oldest to the newest, and tells the end of the log from a hole.
//!
//! One flush is in flight at a time, so batch n+1 is only written after batch n is durable. A bad
//! place is therefore the end of the log if nothing with a higher number follows it, in this
//! segment or a later one (a segment's header also names the first batch it was made for); and it
//! is corruption if something does.

use std::collections::BTreeMap;
use std::io;

use milpa_types::PartitionId;

use super::format::{
    BATCH_HEADER_BYTES, BLOCK_BYTES, BatchHeader, RECORD_HEADER_BYTES, RecordHeader,
    SEGMENT_HEADER_BYTES, SegmentHeader, body_crc, chain_of, padded_body,
};
use super::live::LiveIndex;
use super::record::{self, Record, Stored, TraceLine};
use super::replay::Replay;
use super::write::trace_of;
use super::{LogStorage, WalError, WalOptions, segment_name, segment_seq};

/// A segment is read in steps of this.
const READ_BYTES: usize = 1 << 20;

/// What a scan found, and where writing goes on.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) replay: Replay,
    pub(crate) live: LiveIndex,
    /// Sequence numbers and sizes of all segments, ascending.
    pub(crate) segments: Vec<(u64, u64)>,
    /// The newest segment, if its header is readable.
    pub(crate) tail: Option<Tail>,
    pub(crate) next_number: u64,
    pub(crate) chain: u64,
    /// What the last batch held.
    pub(crate) trace: Vec<TraceLine>,
    pub(crate) batches: u64,
}

/// The end of the log.
#[derive(Debug)]
pub(crate) struct Tail {
    pub(crate) header: SegmentHeader,
    /// Where the next batch goes.
    pub(crate) position: u64,
    /// The last batch in this segment, as it stands in the file.
    pub(crate) last_batch: Option<(u64, Vec<u8>)>,
    /// At `position` stands a batch that a crash had cut short. It was not taken.
    pub(crate) is_torn: bool,
}

/// One segment in memory.
struct Segment {
    header: SegmentHeader,
    bytes: Vec<u8>,
}

/// A batch that could be read, or what could be read of it.
struct Batch {
    header: BatchHeader,
    /// In order, with their sizes; of records with unreadable bodies the header.
    records: Vec<(Result<Stored, RecordHeader>, u64)>,
    /// Record headers were unreadable too; what followed them is unknown.
    is_cut: bool,
}

/// Where an entry stands in a segment, and its size.
struct EntryPlace {
    /// Its batch.
    number: u64,
    at: u64,
    bytes: u64,
}

impl Batch {
    fn is_whole(&self) -> bool {
        !self.is_cut && self.records.iter().all(|(record, _)| record.is_ok())
    }

    fn trace(&self) -> Option<&[TraceLine]> {
        self.records.iter().find_map(|(stored, _)| match stored {
            Ok(Stored::Trace(lines)) => Some(lines.as_slice()),
            _ => None,
        })
    }
}

impl Segment {
    fn slice(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.bytes.get(start..start.checked_add(length)?)
    }

    fn batch_header(&self, offset: u64) -> Option<BatchHeader> {
        let bytes = self.slice(offset, BATCH_HEADER_BYTES)?;
        let header = BatchHeader::decode(bytes, self.header.salt, self.header.seq, offset)?;
        // Writing goes on behind the last batch: within the segment.
        let end = offset.checked_add(header.padded_bytes())?;
        (end <= self.header.segment_bytes).then_some(header)
    }

    fn batch(&self, header: BatchHeader) -> Batch {
        let (count, number) = (header.records, header.number);
        let end = header.offset + u64::from(header.length);
        let mut at = header.offset + BATCH_HEADER_BYTES as u64;
        let mut batch = Batch { header, records: Vec::new(), is_cut: false };
        for _ in 0..count {
            let Some((stored, bytes)) = self.record(number, at).filter(|_| at < end) else {
                batch.is_cut = true;
                break;
            };
            at += bytes;
            batch.records.push((stored, bytes));
        }
        batch
    }

    /// The record of batch `number` that stands there, and its size; of one with an unreadable body the header.
    fn record(&self, number: u64, at: u64) -> Option<(Result<Stored, RecordHeader>, u64)> {
        let head = self.slice(at, RECORD_HEADER_BYTES)?;
        let head = RecordHeader::decode(head, self.header.salt, number, at)?;
        let body = self.slice(at + RECORD_HEADER_BYTES as u64, head.body_bytes as usize);
        let body = body.filter(|body| body_crc(body) == head.body_crc);
        let bytes = RECORD_HEADER_BYTES + padded_body(head.body_bytes as usize);
        let stored = body.and_then(|body| record::decode(&head, body));
        Some((stored.ok_or(head), bytes as u64))
    }

    fn entry_at(&self, place: &EntryPlace) -> Option<Record> {
        match self.record(place.number, place.at)?.0.ok()? {
            Stored::Record(record) | Stored::Carried(record) => Some(record),
            Stored::Trace(_) => None,
        }
    }

    /// The first readable batch header at or after `offset` with at least this number.
    fn find_batch(&self, mut offset: u64, number: u64) -> Option<BatchHeader> {
        while offset < self.bytes.len() as u64 {
            let header = self.batch_header(offset).filter(|header| header.number >= number);
            if header.is_some() {
                return header;
            }
            offset += BLOCK_BYTES;
        }
        None
    }
}

/// Reads a segment's header. `None` if neither copy of it verifies.
fn read_header(
    storage: &mut dyn LogStorage,
    seq: u64,
    options: &WalOptions,
) -> Result<Option<SegmentHeader>, WalError> {
    let mut head = vec![0; SEGMENT_HEADER_BYTES as usize];
    storage.read(&segment_name(seq), 0, &mut head)?;
    let header = SegmentHeader::decode(&head).filter(|header| header.seq == seq);
    if let Some(found) = header.as_ref().filter(|header| header.owner != options.owner) {
        return Err(WalError::WrongOwner { expected: options.owner, found: found.owner });
    }
    Ok(header)
}

/// Reads one segment whole. `None` if its header is unreadable.
fn read_segment(
    storage: &mut dyn LogStorage,
    seq: u64,
    options: &WalOptions,
) -> Result<Option<Segment>, WalError> {
    let Some(header) = read_header(storage, seq, options)? else { return Ok(None) };
    let size = usize::try_from(header.segment_bytes).unwrap_or(0);
    let bytes = read_up_to(storage, &segment_name(seq), size)?;
    Ok(Some(Segment { header, bytes }))
}

/// The file's first `limit` bytes, or all of them: what is there decides how much memory this takes.
fn read_up_to(storage: &mut dyn LogStorage, name: &str, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < limit {
        let start = bytes.len();
        bytes.resize(limit.min(start + READ_BYTES), 0);
        let rest = bytes.get_mut(start..).unwrap_or_default();
        let count = storage.read(name, start as u64, rest)?;
        if count < rest.len() {
            bytes.truncate(start + count);
            break;
        }
    }
    Ok(bytes)
}

/// Scans the whole log.
pub(crate) fn scan(storage: &mut dyn LogStorage, options: &WalOptions) -> Result<Scan, WalError> {
    let mut seqs: Vec<u64> = storage.list()?.iter().filter_map(|name| segment_seq(name)).collect();
    seqs.sort_unstable();
    let mut scanner = Scanner { scan: Scan::default(), chain: None, unresolved: None };
    for (i, &seq) in seqs.iter().enumerate() {
        let is_last = i + 1 == seqs.len();
        let segment = read_segment(storage, seq, options)?;
        let size = segment.as_ref().map_or(0, |segment| segment.header.segment_bytes);
        scanner.scan.segments.push((seq, size));
        match segment {
            Some(segment) => scanner.segment(&segment, i == 0, is_last),
            None => scanner.unreadable_segment(options),
        }
    }
    Ok(scanner.scan)
}

struct Scanner {
    scan: Scan,
    /// The link that the next batch must carry, if known.
    chain: Option<u64>,
    /// A bad batch at the end of a segment, until the next segment's header tells whether it had
    /// been durable.
    unresolved: Option<(u64, Batch)>,
}

impl Scanner {
    /// The headers are synced before the file gets its name, so this is corruption.
    fn unreadable_segment(&mut self, options: &WalOptions) {
        self.scan.replay.lost_anything();
        self.scan.tail = None;
        self.scan.trace.clear();
        self.chain = None;
        // Numbers must go on rising: skip as many as the segment could have held.
        self.scan.next_number += options.segment_bytes / BLOCK_BYTES + 1;
        self.scan.chain = 0;
    }

    fn segment(&mut self, segment: &Segment, is_first: bool, is_last: bool) {
        let header = &segment.header;
        if !is_first {
            self.join(segment);
        }
        self.scan.next_number = header.first_batch;
        self.chain = Some(header.chain);
        self.scan.chain = header.chain;
        let mut position = SEGMENT_HEADER_BYTES;
        let mut last_batch = None;
        let is_torn = loop {
            let expected = self.scan.next_number;
            let here = segment.batch_header(position).filter(|h| h.number == expected);
            let batch = here.map(|header| segment.batch(header));
            if let Some(whole) = batch.as_ref().filter(|batch| batch.is_whole()) {
                let bytes = self.take(segment, whole);
                last_batch = Some((position, bytes));
                position += whole.header.padded_bytes();
                continue;
            }
            let from = position + if batch.is_some() { BLOCK_BYTES } else { 0 };
            let later = segment.find_batch(from, expected + u64::from(batch.is_some()));
            let Some(later) = later else {
                // The end of the log, if this is the newest segment: a bad batch was never acknowledged, and is
                // dropped whole. If not, the next one's header tells.
                let is_torn = batch.is_some();
                self.unresolved = batch.filter(|_| !is_last).map(|bad| (header.seq, bad));
                break is_torn;
            };
            self.hole(segment, batch, &later);
            position = later.offset;
        };
        self.scan.tail = Some(Tail { header: header.clone(), position, last_batch, is_torn });
    }

    /// The header proves that all batches below its first were durable. Are they all there?
    fn join(&mut self, segment: &Segment) {
        let first = segment.header.first_batch;
        let unresolved = self.unresolved.take().filter(|_| first > self.scan.next_number);
        if let Some((seq, bad)) = unresolved {
            self.apply(seq, &bad);
            if !bad.is_cut {
                self.scan.next_number = bad.header.number + 1;
                self.chain = None;
            }
        }
        let is_other = self.chain.is_some_and(|chain| chain != segment.header.chain);
        if first > self.scan.next_number || is_other {
            let next = segment.batch_header(SEGMENT_HEADER_BYTES);
            let next = next.map(|header| segment.batch(header));
            self.lost_until(first, next.as_ref().and_then(Batch::trace));
        }
    }

    /// Applies a good batch and returns its bytes in the file.
    fn take(&mut self, segment: &Segment, batch: &Batch) -> Vec<u8> {
        let length = batch.header.length as usize;
        let bytes = segment.slice(batch.header.offset, length).unwrap_or_default();
        if self.chain.is_some_and(|chain| chain != batch.header.chain) {
            // Its predecessor on disk is not the batch that it was written after.
            self.lost_until(batch.header.number, batch.trace());
        }
        self.apply(segment.header.seq, batch);
        let link = chain_of(bytes);
        self.chain = Some(link);
        self.scan.chain = link;
        self.scan.next_number = batch.header.number + 1;
        let padded = batch.header.padded_bytes() as usize;
        segment.slice(batch.header.offset, padded).unwrap_or(bytes).to_vec()
    }

    /// Takes what is readable of a batch, and notes what is not.
    fn apply(&mut self, seq: u64, batch: &Batch) {
        for (record, bytes) in &batch.records {
            match record {
                Ok(stored) => self.scan.replay.apply(stored),
                Err(header) => self.scan.replay.lost_record(header),
            }
            match record {
                Ok(Stored::Record(record)) => self.scan.live.note(record, seq, *bytes, false),
                Ok(Stored::Carried(record)) => self.scan.live.note(record, seq, *bytes, true),
                Ok(Stored::Trace(_)) | Err(_) => {}
            }
        }
        self.scan.trace = trace_of(batch.records.iter().filter_map(|(r, _)| r.as_ref().ok()));
        self.scan.batches += 1;
    }

    /// A bad place with a good batch behind it in the same segment: corruption.
    fn hole(&mut self, segment: &Segment, bad: Option<Batch>, later: &BatchHeader) {
        if let Some(bad) = bad {
            self.apply(segment.header.seq, &bad);
            if !bad.is_cut && later.number == bad.header.number + 1 {
                self.scan.next_number = later.number;
                self.chain = None;
                return;
            }
        }
        let next = segment.batch(later.clone());
        self.lost_until(later.number, next.trace());
    }

    /// Batches from the expected one to below `number` were durable and are unreadable. `trace`
    /// tells what the last of them held.
    fn lost_until(&mut self, number: u64, trace: Option<&[TraceLine]>) {
        let count = number.saturating_sub(self.scan.next_number);
        match trace {
            Some(lines) if count <= 1 => self.scan.replay.lost_batch(lines),
            _ => self.scan.replay.lost_anything(),
        }
        self.scan.next_number = number;
        self.chain = None;
    }
}

/// Entries of one segment.
#[derive(Debug)]
pub(crate) struct LiveEntries {
    /// Bytes of those in each wanted range.
    pub(crate) bytes: Vec<u64>,
    /// All of them, if they are not too many.
    pub(crate) records: Option<Vec<Record>>,
}

/// Reads the entries of segment `seq` that lie in `wanted` (group, first and last index), to copy
/// them forward if they have no more than `bytes_max`. `None` if one of them cannot be read.
///
/// The batches are those up to the first one of `next_seq`, the segment after it: behind them may stand what a
/// crash had torn and recovery has dropped. All of them must be whole, as an entry stands only if no later one
/// has taken its place.
pub(crate) fn read_live_entries(
    storage: &mut dyn LogStorage,
    options: &WalOptions,
    seq: u64,
    next_seq: u64,
    wanted: &[(PartitionId, u64, u64)],
    bytes_max: u64,
) -> Result<Option<LiveEntries>, WalError> {
    let Some(next) = read_header(storage, next_seq, options)? else { return Ok(None) };
    let Some(segment) = read_segment(storage, seq, options)? else { return Ok(None) };
    let range_of = |group: PartitionId, index: u64| {
        let is_in = |&(g, first, last): &_| g == group && (first..=last).contains(&index);
        wanted.iter().position(is_in)
    };
    // Where each of them stands. Their contents are taken when it is known how much that is.
    let mut places = BTreeMap::new();
    let mut position = SEGMENT_HEADER_BYTES;
    for number in segment.header.first_batch..next.first_batch {
        let header = segment.batch_header(position).filter(|header| header.number == number);
        let batch = header.map(|header| segment.batch(header)).filter(Batch::is_whole);
        let Some(batch) = batch else { return Ok(None) };
        let mut at = position + BATCH_HEADER_BYTES as u64;
        position += batch.header.padded_bytes();
        for (stored, bytes) in &batch.records {
            let place = EntryPlace { number, at, bytes: *bytes };
            at += bytes;
            let Ok(Stored::Record(record) | Stored::Carried(record)) = stored else { continue };
            let Record::Entry { group, entry } = record else { continue };
            let index = entry.position.index;
            if let Some(range) = range_of(*group, index) {
                places.insert((*group, index), (range, place));
            }
        }
    }
    let count: u64 = wanted.iter().map(|(_, first, last)| last - first + 1).sum();
    if places.len() as u64 != count {
        return Ok(None);
    }
    let mut bytes = vec![0; wanted.len()];
    for (range, place) in places.values() {
        bytes.get_mut(*range).into_iter().for_each(|sum| *sum += place.bytes);
    }
    let is_light = bytes.iter().sum::<u64>() <= bytes_max;
    let records = || places.values().filter_map(|(_, place)| segment.entry_at(place)).collect();
    Ok(Some(LiveEntries { bytes, records: is_light.then(records) }))
}
