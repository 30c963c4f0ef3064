//! Content maps: what becomes of segments that are published, overlapped, cut off or deleted.
//!
//! # Invariants
//!
//! * The segments of an inode do not overlap and none reaches past its size.
//! * An inode has segments or inline content, never both.
//! * `allocated` is the sum of the segments' lengths, or the inline content's length.
//! * Bytes go to the free list exactly when a segment that referred to them is dropped or cut, and
//!   never when they are published anew at the same place: publishing is idempotent.
//!
//! Striped segments are refused for now (their columns cannot be cut); formats have room for them.

use std::collections::BTreeSet;

use milpa_types::{FreedRange, InodeId, Segment};

use super::Partition;
use super::inode::{Body, Inode};
use super::table::{Number, SegmentRecord};

/// A segment as its table keeps it.
pub(crate) fn segment_of(end: Number, record: SegmentRecord) -> Segment {
    Segment {
        offset: end.0.saturating_sub(record.length),
        length: record.length,
        columns: record.columns,
        flushed: record.flushed,
    }
}

/// Whether both map the file's bytes to the same bytes of the same extent.
fn is_same_place(a: &Segment, b: &Segment) -> bool {
    let (Some(at), Some(bt)) = (a.column(), b.column()) else {
        return a == b;
    };
    at.partition == bt.partition
        && at.extent == bt.extent
        && at.offset.wrapping_sub(a.offset) == bt.offset.wrapping_sub(b.offset)
}

impl Partition {
    /// The segments of `inode` that overlap the file range `[start, end)`, in order.
    pub(crate) fn overlapping(
        &self,
        inode: InodeId,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = Segment> + '_ {
        // Records are keyed by their end: the first above `start` is the first that overlaps.
        let records = self.tables.segments.range(&(inode, Number(start.saturating_add(1))));
        let of_inode = records.take_while(move |(key, _)| key.0 == inode);
        let segments = of_inode.map(|((_, at), record)| segment_of(at, record));
        segments.take_while(move |segment| segment.offset < end)
    }

    /// All segments of `inode`, in order.
    pub(crate) fn segments(&self, inode: InodeId) -> impl Iterator<Item = Segment> + '_ {
        self.overlapping(inode, 0, u64::MAX)
    }

    fn store(&mut self, inode: InodeId, segment: &Segment) {
        let record = SegmentRecord {
            length: segment.length,
            columns: segment.columns.clone(),
            flushed: segment.flushed,
        };
        self.tables.segments.insert(&(inode, Number(segment.end())), &record);
    }

    fn drop_record(&mut self, inode: InodeId, segment: &Segment) {
        self.tables.segments.remove(&(inode, Number(segment.end())));
    }

    /// Puts the segment's bytes on the free list.
    fn free_bytes(&mut self, segment: &Segment) {
        if let Some(column) = segment.column() {
            let range = FreedRange {
                partition: column.partition,
                extent: column.extent,
                offset: column.offset,
                length: segment.length,
            };
            self.tables.free(&mut self.counters.next_order, range);
        }
    }

    /// Whether any of the segments, which may not be on disk, takes the place of other bytes. So does
    /// one in a hole: its zeros, and with them the file's length, may have been synced.
    pub(crate) fn replaces(&self, id: InodeId, inode: &Inode, segments: &[Segment]) -> bool {
        let has_inline = matches!(inode.body, Body::Inline(_)) && !segments.is_empty();
        let below_end = |new: &Segment| new.clip(0, inode.size);
        let mut unflushed = segments.iter().filter(|new| !new.flushed).filter_map(below_end);
        has_inline || unflushed.any(|new| !self.has_at(id, &new))
    }

    /// Makes a checked, plain segment part of the file: it wins over what it overlaps. Returns
    /// whether the file's bytes changed; marking bytes as flushed does not change them.
    pub(crate) fn put_segment(&mut self, id: InodeId, inode: &mut Inode, new: &Segment) -> bool {
        let mut known = 0;
        let mut flushed = Vec::new();
        let overlapped: Vec<_> = self.overlapping(id, new.offset, new.end()).collect();
        for old in &overlapped {
            self.drop_record(id, old);
            self.add_allocated(inode, 0, old.length);
            let rests = [old.clip(0, new.offset), old.clip(new.end(), u64::MAX)];
            for rest in rests.into_iter().flatten() {
                self.store(id, &rest);
                self.add_allocated(inode, rest.length, 0);
            }
            let Some(lost) = old.clip(new.offset, new.end()) else { continue };
            if !is_same_place(&lost, new) {
                self.free_bytes(&lost);
                continue;
            }
            known += lost.length;
            if lost.flushed {
                flushed.push(lost);
            }
        }
        self.add_allocated(inode, new.length, 0);
        for piece in pieces(new, &flushed) {
            self.store_joined(id, piece);
        }
        known < new.length
    }

    /// Notes that bytes are on all disks, as far as the inode still has them where `flushed` says.
    pub(crate) fn mark_segment(&mut self, id: InodeId, flushed: &Segment) {
        let overlapped: Vec<_> = self.overlapping(id, flushed.offset, flushed.end()).collect();
        for old in overlapped.iter().filter(|old| !old.flushed && is_same_place(old, flushed)) {
            let Some(marked) = old.clip(flushed.offset, flushed.end()) else { continue };
            self.drop_record(id, old);
            let rests = [old.clip(0, marked.offset), old.clip(marked.end(), u64::MAX)];
            for rest in rests.into_iter().flatten() {
                self.store(id, &rest);
            }
            self.store_joined(id, Segment { flushed: true, ..marked });
        }
    }

    /// Stores a segment, as one with those before and after that it continues.
    fn store_joined(&mut self, inode: InodeId, mut segment: Segment) {
        let start = segment.offset;
        let before = self.overlapping(inode, start.saturating_sub(1), start).next();
        if let Some(before) = before.filter(|before| before.is_continued_by(&segment)) {
            self.drop_record(inode, &before);
            segment = Segment { length: before.length + segment.length, ..before };
        }
        let after = self.overlapping(inode, segment.end(), segment.end().saturating_add(1)).next();
        if let Some(after) = after.filter(|after| segment.is_continued_by(after)) {
            self.drop_record(inode, &after);
            segment.length += after.length;
        }
        self.store(inode, &segment);
    }

    /// Drops this part of what the inode has, and frees it.
    pub(crate) fn drop_segment(&mut self, id: InodeId, inode: &mut Inode, part: &Segment) {
        let overlapped: Vec<_> = self.overlapping(id, part.offset, part.end()).collect();
        for old in overlapped.iter().filter(|old| is_same_place(old, part)) {
            self.drop_record(id, old);
            self.add_allocated(inode, 0, old.length);
            let rests = [old.clip(0, part.offset), old.clip(part.end(), u64::MAX)];
            for rest in rests.into_iter().flatten() {
                self.store(id, &rest);
                self.add_allocated(inode, rest.length, 0);
            }
            if let Some(dropped) = old.clip(part.offset, part.end()) {
                self.free_bytes(&dropped);
            }
        }
    }

    /// Drops what lies at or above `size`, and frees it: of a large extent, too, just these bytes,
    /// as its writer may still be adding to it.
    pub(crate) fn cut_segments(&mut self, id: InodeId, inode: &mut Inode, size: u64) {
        let cut: Vec<_> = self.overlapping(id, size, u64::MAX).collect();
        for old in &cut {
            self.drop_record(id, old);
            self.add_allocated(inode, 0, old.length);
            if let Some(kept) = old.clip(0, size) {
                self.store(id, &kept);
                self.add_allocated(inode, kept.length, 0);
            }
            if let Some(lost) = old.clip(size, u64::MAX) {
                self.free_bytes(&lost);
            }
        }
    }

    /// Replaces the inline content.
    pub(crate) fn set_inline(&mut self, inode: &mut Inode, content: Option<Vec<u8>>) {
        if let Body::Inline(old) = &inode.body {
            let old = old.len() as u64;
            self.add_allocated(inode, 0, old);
            inode.body = Body::None;
        }
        if let Some(content) = content {
            self.add_allocated(inode, content.len() as u64, 0);
            inode.body = Body::Inline(content);
        }
    }

    fn add_allocated(&mut self, inode: &mut Inode, more: u64, less: u64) {
        let add = |bytes: &mut u64| *bytes = bytes.saturating_add(more).saturating_sub(less);
        add(&mut inode.allocated);
        add(&mut self.counters.allocated_bytes);
    }

    /// Frees all bytes of an inode that is being deleted: large extents whole, as each belongs to
    /// one inode; pieces of small ones exactly.
    pub(crate) fn free_content(&mut self, inode: InodeId) {
        let segments: Vec<_> = self.segments(inode).collect();
        let mut extents = BTreeSet::new();
        for segment in &segments {
            self.drop_record(inode, segment);
            let Some(column) = segment.column() else { continue };
            if column.extent.is_small() {
                self.free_bytes(segment);
            } else {
                extents.insert((column.partition, column.extent));
            }
        }
        for (partition, extent) in extents {
            let range = FreedRange { partition, extent, offset: 0, length: u64::MAX };
            self.tables.free(&mut self.counters.next_order, range);
        }
    }

    /// Whether the file has all its bytes of this range where `place` says.
    pub(crate) fn has_at(&self, id: InodeId, place: &Segment) -> bool {
        let overlapped = self.overlapping(id, place.offset, place.end());
        let parts = overlapped.filter_map(|segment| segment.clip(place.offset, place.end()));
        let there: u64 = parts.filter(|p| is_same_place(p, place)).map(|part| part.length).sum();
        there == place.length
    }

    /// Whether the content of `inode` refers to a byte of `range`.
    pub(crate) fn refers_to(&self, inode: InodeId, range: &FreedRange) -> bool {
        let end = range.offset.saturating_add(range.length);
        self.segments(inode).any(|segment| {
            segment.column().is_some_and(|column| {
                column.partition == range.partition
                    && column.extent == range.extent
                    && column.offset < end
                    && range.offset < column.offset.saturating_add(segment.length)
            })
        })
    }
}

/// Cuts `new` at the parts that are known to be flushed, whatever it says itself.
fn pieces(new: &Segment, flushed: &[Segment]) -> Vec<Segment> {
    if new.flushed || flushed.is_empty() {
        return vec![new.clone()];
    }
    let mut pieces = Vec::new();
    let mut at = new.offset;
    for part in flushed {
        pieces.extend(new.clip(at, part.offset));
        pieces.extend(new.clip(part.offset, part.end()).map(|p| Segment { flushed: true, ..p }));
        at = part.end();
    }
    pieces.extend(new.clip(at, new.end()));
    pieces
}
