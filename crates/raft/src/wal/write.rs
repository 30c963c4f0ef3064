//! Puts records into one buffer that becomes one write.

use std::collections::BTreeMap;

use super::format::{BATCH_HEADER_BYTES, BLOCK_BYTES, BatchHeader};
use super::record::{self, Place, Record, Stored, TRACE_SHAPE, TRACE_VOTE, TraceLine};

/// A batch being put together, for one place in one segment.
#[derive(Debug)]
pub(crate) struct BatchBuilder {
    bytes: Vec<u8>,
    salt: u64,
    number: u64,
    offset: u64,
    records: u32,
    lines: BTreeMap<u64, TraceLine>,
    /// How large it may become.
    limit: usize,
}

impl BatchBuilder {
    /// `buffer` is reused from batch to batch. The trace of the batch before comes first.
    pub(crate) fn new(
        mut buffer: Vec<u8>,
        place: Place,
        limit: u64,
        trace: Vec<TraceLine>,
    ) -> BatchBuilder {
        buffer.clear();
        buffer.resize(BATCH_HEADER_BYTES, 0);
        let mut builder = BatchBuilder {
            bytes: buffer,
            salt: place.salt,
            number: place.number,
            offset: place.offset,
            records: 0,
            lines: BTreeMap::new(),
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
        };
        if !trace.is_empty() && record::trace_bytes(trace.len()) < builder.room() {
            builder.put(&Stored::Trace(trace));
        }
        builder
    }

    fn room(&self) -> usize {
        self.limit.saturating_sub(self.bytes.len())
    }

    pub(crate) fn has_room_for(&self, record: &Record) -> bool {
        record::encoded_bytes(record) <= self.room()
    }

    /// Appends a record and returns the bytes it took.
    pub(crate) fn put(&mut self, stored: &Stored) -> u64 {
        let before = self.bytes.len();
        let offset = self.offset + before as u64;
        let place = Place { salt: self.salt, number: self.number, offset };
        record::encode(stored, place, &mut self.bytes);
        self.records += 1;
        note_line(&mut self.lines, stored);
        (self.bytes.len() - before) as u64
    }

    /// The finished bytes, padded to whole blocks; the length without padding; and what the
    /// next batch's trace will say.
    pub(crate) fn finish(mut self, seq: u64, chain: u64) -> (Vec<u8>, usize, Vec<TraceLine>) {
        let length = self.bytes.len();
        let header = BatchHeader {
            number: self.number,
            seq,
            offset: self.offset,
            length: length as u32,
            records: self.records,
            chain,
        };
        let head = header.encode(self.salt);
        self.bytes.iter_mut().zip(head).for_each(|(to, from)| *to = from);
        self.bytes.resize(length.next_multiple_of(BLOCK_BYTES as usize), 0);
        (self.bytes, length, self.lines.into_values().collect())
    }

    /// Gives the buffer back unused.
    pub(crate) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }
}

fn note_line(lines: &mut BTreeMap<u64, TraceLine>, stored: &Stored) {
    let (Stored::Record(record) | Stored::Carried(record)) = stored else { return };
    let group = record.group().0;
    let empty = TraceLine { group, first: u64::MAX, last: 0, flags: 0 };
    let line = lines.entry(group).or_insert(empty);
    let mut widen = |index: u64| {
        line.first = line.first.min(index);
        line.last = line.last.max(index);
    };
    match record {
        Record::Entry { entry, .. } => widen(entry.position.index),
        Record::Truncated { from, .. } => widen(*from),
        Record::HardState { .. } => line.flags |= TRACE_VOTE,
        Record::GroupCreated { .. }
        | Record::GroupRemoved { .. }
        | Record::Compacted { .. }
        | Record::Snapshot { .. } => line.flags |= TRACE_SHAPE,
    }
}

/// What the batch after one with these records will say of it.
pub(crate) fn trace_of<'a>(records: impl Iterator<Item = &'a Stored>) -> Vec<TraceLine> {
    let mut lines = BTreeMap::new();
    records.for_each(|stored| note_line(&mut lines, stored));
    lines.into_values().collect()
}
