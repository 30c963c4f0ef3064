//! cut_lost: bytes that no replica has any more leave the file (DESIGN.md section 5).
//!
//! Only bytes that were never flushed get lost in a power cut. What was marked flushed stays: that it
//! cannot be read is damage, and has to show. A file that ended with what is lost ends earlier; what
//! lies behind it, or was extended by truncation, keeps its place behind a hole: it may have been written since.

use std::collections::BTreeMap;
use std::ops::Range;

use milpa_types::{
    Columns, ExtentId, FileKind, InodeId, MetaError, PartitionId, Segment, SessionId, Timestamp,
};
use milpa_wire::meta::{LOST_RANGES_MAX, LostRange, MetaAnswer, MetaReply};

use super::super::Partition;

/// Of extents, in order, none over another one.
type Ranges = BTreeMap<(PartitionId, ExtentId), Vec<Range<u64>>>;

impl Partition {
    pub(crate) fn cut_lost(
        &mut self,
        session: SessionId,
        id: InodeId,
        lost: Vec<LostRange>,
        now: Timestamp,
    ) -> MetaReply {
        let mut inode = self.writable(id, session)?;
        if inode.kind != FileKind::File || lost.len() > LOST_RANGES_MAX {
            return Err(MetaError::Invalid);
        }
        let ranges = by_extent(lost);
        let unflushed = self.segments(id).filter(|segment| !segment.flushed);
        let lost: Vec<Segment> =
            unflushed.flat_map(|segment| lost_parts(&segment, &ranges)).collect();
        if lost.is_empty() {
            return Ok(MetaAnswer::Attributes(inode.attributes(id)));
        }
        for part in lost.iter().rev() {
            self.drop_segment(id, &mut inode, part);
            if inode.size == part.end() {
                inode.size = part.offset;
            }
        }
        inode.content_version += 1;
        // As a truncation: a publish on its way must not bring the size back.
        inode.truncation += 1;
        (inode.modified, inode.changed) = (now, now);
        self.tables.inodes.insert(&id, &inode);
        Ok(MetaAnswer::Attributes(inode.attributes(id)))
    }
}

fn by_extent(mut lost: Vec<LostRange>) -> Ranges {
    lost.sort_unstable_by_key(|lost| lost.from);
    let mut ranges = Ranges::new();
    for LostRange { partition, extent, from, until } in lost {
        let earlier = ranges.entry((partition, extent)).or_default();
        let from = earlier.last().map_or(from, |last| last.end.max(from));
        if from < until {
            earlier.push(from..until);
        }
    }
    ranges
}

/// The parts of a segment that lie where its extent has no bytes any more.
fn lost_parts(segment: &Segment, ranges: &Ranges) -> Vec<Segment> {
    let Columns::One(column) = segment.columns else { return Vec::new() };
    let within = |at: u64| segment.offset + at.saturating_sub(column.offset).min(segment.length);
    let lost = ranges.get(&(column.partition, column.extent)).into_iter().flatten();
    lost.filter_map(|range| segment.clip(within(range.start), within(range.end))).collect()
}
