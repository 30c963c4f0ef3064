//! How much room records need in segments, at most.

use super::format::{BLOCK_BYTES, SEGMENT_HEADER_BYTES};
use super::log::BATCH_BYTES_MAX;
use super::record::{self, Record};

/// What a record takes in the trace of the next batch, and for its place, at most.
const LINE_BYTES_MAX: u64 = 64;

/// What records need that are to be written in one go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Need {
    records: u64,
    bytes: u64,
    largest: u64,
    /// Groups in the trace with which the first batch begins.
    traced: u64,
}

impl Need {
    /// Behind a batch whose trace has so many lines.
    pub(crate) fn behind(trace_lines: usize) -> Need {
        Need { traced: trace_lines as u64, ..Need::default() }
    }

    pub(crate) fn add(&mut self, record: &Record) {
        self.add_some(1, record::encoded_bytes(record) as u64);
    }

    /// So many records of so many bytes in all, of which nobody knows how they share them.
    pub(crate) fn add_some(&mut self, records: u64, bytes: u64) {
        self.records += records;
        self.bytes += bytes;
        self.largest = self.largest.max(bytes);
    }

    /// All of it in one segment. A batch fills whole blocks; and the one of nothing that proves that the last one was
    /// durable takes another.
    fn bytes(&self) -> u64 {
        let bytes = self.bytes + self.records * LINE_BYTES_MAX + trace_bytes(self.traced);
        bytes + (bytes / BATCH_BYTES_MAX + 3) * BLOCK_BYTES
    }

    /// What may stay empty at the end of a segment, where the next record does not fit any more, nor with the trace before it.
    fn unused(&self) -> u64 {
        self.largest + trace_bytes(self.traced.max(self.records)) + 2 * BLOCK_BYTES
    }

    /// What a segment of this size takes of it at least.
    pub(crate) fn share_of(&self, segment_bytes: u64) -> u64 {
        segment_bytes.saturating_sub(SEGMENT_HEADER_BYTES + self.unused())
    }

    /// What does not fit into the rest of a segment, and these whole ones behind it.
    pub(crate) fn missing(&self, rest: u64, segments: impl Iterator<Item = u64>) -> u64 {
        let needed = self.bytes();
        if rest >= needed {
            return 0;
        }
        let shares: u64 = segments.map(|bytes| self.share_of(bytes)).sum();
        needed.saturating_sub(rest.saturating_sub(self.unused()) + shares)
    }
}

fn trace_bytes(lines: u64) -> u64 {
    record::trace_bytes(usize::try_from(lines).unwrap_or(usize::MAX / 64)) as u64
}
