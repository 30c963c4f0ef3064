//! cut_lost: bytes that no replica has any more leave the file (DESIGN.md section 5).
//!
//! Only bytes that were never flushed get lost in a power cut. What was marked flushed stays: that it
//! cannot be read is damage, and has to show. A file that ended with what is lost ends earlier; what
//! was written behind it later, or extended by truncation, keeps its place behind a hole.

use milpa_types::{
    Columns, ExtentId, FileKind, InodeId, MetaError, PartitionId, Segment, SessionId, Timestamp,
};
use milpa_wire::meta::{MetaAnswer, MetaReply};

use super::super::Partition;

impl Partition {
    pub(crate) fn cut_lost(
        &mut self,
        session: SessionId,
        id: InodeId,
        extent: (PartitionId, ExtentId),
        length: u64,
        now: Timestamp,
    ) -> MetaReply {
        let mut inode = self.writable(id, session)?;
        if inode.kind != FileKind::File {
            return Err(MetaError::Invalid);
        }
        let unflushed = self.segments(id).filter(|segment| !segment.flushed);
        let lost: Vec<Segment> =
            unflushed.filter_map(|segment| lost_part(&segment, extent, length)).collect();
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

/// The part of a segment that lies in this extent at or above `length`.
fn lost_part(
    segment: &Segment,
    (partition, extent): (PartitionId, ExtentId),
    length: u64,
) -> Option<Segment> {
    let Columns::One(column) = segment.columns else { return None };
    if (column.partition, column.extent) != (partition, extent) {
        return None;
    }
    let there = length.saturating_sub(column.offset).min(segment.length);
    segment.clip(segment.offset + there, segment.end())
}
