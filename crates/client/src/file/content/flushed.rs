//! What of a file's content is known to be on disks, and what an fsync has to ask for.

use std::collections::BTreeMap;

use milpa_types::{BLOCK_BYTES, Column, Columns, ExtentId, PartitionId, Segment};

use super::Content;
use crate::data::flush::Extents;

impl Content {
    /// The segments that may not be on disk, in the file's order.
    pub(crate) fn unflushed_segments(&self) -> Vec<Segment> {
        self.segments.iter().filter(|segment| !self.has_flushed(segment)).cloned().collect()
    }

    fn has_flushed(&self, segment: &Segment) -> bool {
        segment.flushed || is_on_disk(&self.flushed, segment)
    }

    /// Where a block of an extent holds bytes of the file that were never flushed, and how many.
    pub(crate) fn unflushed_in(&self, block: Column) -> Vec<(Column, u32)> {
        let unflushed = self.segments.iter().filter(|segment| !self.has_flushed(segment));
        unflushed.filter_map(|segment| common(segment, block, BLOCK_BYTES)).collect()
    }

    /// Whether the file counts on these bytes to be on disk.
    pub(crate) fn is_flushed(&self, lost: Column, length: u64) -> bool {
        self.segments.iter().any(|s| overlaps(s, lost, length) && self.has_flushed(s))
    }

    /// Whether some of these bytes were written here, and the servers do not show them to anybody else yet.
    pub(crate) fn is_own(&self, lost: Column, length: u64) -> bool {
        self.unpublished.iter().any(|segment| overlaps(segment, lost, length))
    }

    /// What an fsync must have flushed by all members.
    pub(crate) fn unflushed(&self) -> BTreeMap<PartitionId, Extents> {
        let mut partitions: BTreeMap<PartitionId, Extents> = BTreeMap::new();
        for (&(partition, extent), &length) in &self.unflushed {
            partitions.entry(partition).or_default().push((extent, length));
        }
        partitions
    }

    /// All members have these on disk, but for lost blocks. Gives what the servers do not know of it.
    pub(crate) fn flushed(
        &mut self,
        extents: BTreeMap<PartitionId, Extents>,
        lost: &[Column],
    ) -> Vec<Segment> {
        if extents.is_empty() {
            return Vec::new();
        }
        // Of these not all bytes are there: what the file is known to have of them, and not what it may come to be known
        // to have.
        let mut in_part = BTreeMap::new();
        for (partition, extents) in extents {
            for (extent, length) in extents {
                let key = (partition, extent);
                if lost.iter().any(|block| (block.partition, block.extent) == key) {
                    in_part.insert(key, length);
                    continue;
                }
                if self.unflushed.get(&key).is_some_and(|needed| *needed <= length) {
                    self.unflushed.remove(&key);
                }
                let known = self.flushed.entry(key).or_default();
                *known = length.max(*known);
            }
        }
        let is_lost = |s: &Segment| lost.iter().any(|b| common(s, *b, BLOCK_BYTES).is_some());
        let is_there =
            |s: &Segment| is_on_disk(&self.flushed, s) || (is_on_disk(&in_part, s) && !is_lost(s));
        let news = |s: &&Segment| !s.flushed && is_there(s);
        let news: Vec<Segment> = self.segments.iter().filter(news).cloned().collect();
        for segment in &news {
            self.segments.overlay(Segment { flushed: true, ..segment.clone() });
        }
        if !in_part.is_empty() {
            self.find_unflushed();
        }
        // What is not published yet will say so itself.
        let is_published = |s: &Segment| self.unpublished.parts(s.offset, s.end()).len() == 1;
        news.into_iter().filter(|s| self.unpublished.is_empty() || is_published(s)).collect()
    }

    /// Looks through the whole map, after it was loaded or cut.
    pub(super) fn find_unflushed(&mut self) {
        let mut unflushed = BTreeMap::new();
        for segment in self.segments.iter().filter(|segment| !segment.flushed) {
            note(&mut unflushed, segment);
        }
        unflushed.retain(|key, length| self.flushed.get(key).is_none_or(|done| done < length));
        self.unflushed = unflushed;
    }
}

/// Whether a segment has some of these bytes.
fn overlaps(segment: &Segment, bytes: Column, length: u64) -> bool {
    common(segment, bytes, length).is_some()
}

/// Those of these bytes that a segment has.
fn common(segment: &Segment, bytes: Column, length: u64) -> Option<(Column, u32)> {
    let its = segment.column()?;
    if (its.partition, its.extent) != (bytes.partition, bytes.extent) {
        return None;
    }
    let start = its.offset.max(bytes.offset);
    let end = (its.offset + segment.length).min(bytes.offset.saturating_add(length));
    let length = end.checked_sub(start).filter(|length| *length > 0)?;
    Some((Column { offset: start, ..bytes }, u32::try_from(length).unwrap_or(u32::MAX)))
}

/// Whether all of a segment is below what is flushed of its extent.
pub(super) fn is_on_disk(
    flushed: &BTreeMap<(PartitionId, ExtentId), u64>,
    segment: &Segment,
) -> bool {
    let Columns::One(column) = &segment.columns else { return false };
    let known = flushed.get(&(column.partition, column.extent));
    known.is_some_and(|known| column.offset + segment.length <= *known)
}

/// Notes that a segment's bytes are to be flushed, unless they are said to be.
pub(super) fn note(unflushed: &mut BTreeMap<(PartitionId, ExtentId), u64>, segment: &Segment) {
    if let Columns::One(column) = &segment.columns {
        let needed = unflushed.entry((column.partition, column.extent)).or_default();
        *needed = (*needed).max(column.offset + segment.length);
    }
}
