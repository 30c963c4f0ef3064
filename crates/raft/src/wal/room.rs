//! How much room records need in segments, at most, and how large the segments are that the log takes for them.
//!
//! On a disk that is nearly full they are smaller: who frees something there may have to write to the log first, as a
//! meta node does. And a little is left to others, who may have to write something too.

use super::format::{BLOCK_BYTES, SEGMENT_HEADER_BYTES};
use super::log::BATCH_BYTES_MAX;
use super::record::{self, Record};

/// What a record takes in the trace of the next batch, and for its place, at most.
const LINE_BYTES_MAX: u64 = 64;

/// So small a segment is taken where there is no room for a larger one; below, freeing it and making the next one would be
/// most of the work.
const SEGMENT_BYTES_MIN: u64 = 1 << 20;
/// The log leaves so much of a disk to others: what is small, and has to be written where nothing is free else.
pub(crate) const SPARED_BYTES: u64 = 4 << 20;

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

/// The sizes of the segments that take what is missing of the need, of no more bytes than there are in all: of `full` bytes
/// each, or a half of that, and so on. `None` if they do not.
pub(crate) fn segments(need: &Need, missing: u64, free: u64, full: u64) -> Option<Vec<u64>> {
    let (mut missing, mut free, mut sizes) = (missing, free, Vec::new());
    while missing > 0 {
        let bytes = halves(full).find(|bytes| *bytes <= free)?;
        let share = need.share_of(bytes);
        if share == 0 {
            return None;
        }
        (missing, free) = (missing.saturating_sub(share), free - bytes);
        sizes.push(bytes);
    }
    Some(sizes)
}

/// The size of a segment that cannot wait until there is room: the largest one that there is room for, or else the smallest.
pub(crate) fn largest_segment(free: u64, full: u64) -> u64 {
    let fitting = halves(full).find(|bytes| *bytes <= free);
    fitting.or_else(|| halves(full).last()).unwrap_or(full)
}

/// The sizes that a segment can have, descending.
fn halves(full: u64) -> impl Iterator<Item = u64> {
    let half = |bytes: &u64| Some(bytes / 2 / BLOCK_BYTES * BLOCK_BYTES);
    let least = SEGMENT_BYTES_MIN.min(full);
    std::iter::successors(Some(full), half).take_while(move |bytes| *bytes >= least)
}

fn trace_bytes(lines: u64) -> u64 {
    record::trace_bytes(usize::try_from(lines).unwrap_or(usize::MAX / 64)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(bytes: u64, free_mib: u64, expected: Option<&[u64]>) {
        let mut need = Need::default();
        (0..bytes >> 16).for_each(|_| need.add_some(1, 1 << 16));
        let missing = need.missing(0, std::iter::empty());
        let sizes = segments(&need, missing, free_mib << 20, 64 << 20);
        let sizes = sizes.map(|sizes| sizes.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>());
        assert_eq!(sizes.as_deref(), expected, "{bytes} with {free_mib} MiB free");
    }

    #[test]
    fn segments_are_as_large_as_there_is_room_for() {
        check(1 << 16, 1000, Some(&[64]));
        check(100 << 20, 1000, Some(&[64, 64]));
        check(1 << 16, 63, Some(&[32]));
        check(1 << 16, 1, Some(&[1]));
        check(1 << 16, 0, None);
        check(10 << 20, 13, Some(&[8, 4]));
        check(12 << 20, 12, None);
    }

    #[test]
    fn a_segment_that_cannot_wait_has_the_largest_size_that_fits_or_the_smallest() {
        let sizes = [100, 63, 3, 1, 0].map(|mib| largest_segment(mib << 20, 64 << 20) >> 20);
        assert_eq!(sizes, [64, 32, 2, 1, 1]);
        assert_eq!(largest_segment(0, 64 << 10), 64 << 10);
    }
}
