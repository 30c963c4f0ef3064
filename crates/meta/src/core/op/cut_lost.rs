//! cut_lost: bytes that no replica has any more leave the file (DESIGN.md section 5).
//!
//! Only bytes that were never flushed get lost in a power cut. What was marked flushed stays: that it
//! cannot be read is damage, and has to show. A file that ended with what is lost ends earlier; what
//! was written behind it later, or extended by truncation, keeps its place behind a hole.

use std::collections::BTreeMap;

use milpa_types::{
    Columns, ExtentId, FileKind, InodeId, MetaError, PartitionId, Segment, SessionId, Timestamp,
};
use milpa_wire::meta::{LOST_EXTENTS_MAX, LostExtent, MetaAnswer, MetaReply};

use super::super::Partition;

/// What is left of extents, in bytes.
type Lengths = BTreeMap<(PartitionId, ExtentId), u64>;

impl Partition {
    pub(crate) fn cut_lost(
        &mut self,
        session: SessionId,
        id: InodeId,
        extents: &[LostExtent],
        now: Timestamp,
    ) -> MetaReply {
        let mut inode = self.writable(id, session)?;
        if inode.kind != FileKind::File || extents.len() > LOST_EXTENTS_MAX {
            return Err(MetaError::Invalid);
        }
        let lengths: Lengths =
            extents.iter().map(|lost| ((lost.partition, lost.extent), lost.length)).collect();
        let unflushed = self.segments(id).filter(|segment| !segment.flushed);
        let lost: Vec<Segment> =
            unflushed.filter_map(|segment| lost_part(&segment, &lengths)).collect();
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

/// The part of a segment that lies where its extent has no bytes any more.
fn lost_part(segment: &Segment, lengths: &Lengths) -> Option<Segment> {
    let Columns::One(column) = segment.columns else { return None };
    let length = lengths.get(&(column.partition, column.extent))?;
    let there = length.saturating_sub(column.offset).min(segment.length);
    segment.clip(segment.offset + there, segment.end())
}
