//! Where a file's bytes lie: layout segments and their columns (DESIGN.md section 5).

use serde::{Deserialize, Serialize};

use crate::{ExtentId, PartitionId};

/// The unit of checksums, of punched holes and of in-place repair, in bytes.
pub const BLOCK_BYTES: u64 = 4096;

/// Bytes of one data packet, and the largest file that shares an extent with others (CFS 2.2.1).
pub const PACKET_BYTES: usize = 128 * 1024;

/// Capacity of one extent in bytes. Past it the writer opens another.
pub const EXTENT_BYTES_MAX: u64 = 256 << 20;

/// Extents with this bit hold pieces of many small files; the others belong to one inode and one
/// writer. The id tells, so that a key needs no flag and no node can confuse them.
const SMALL_EXTENT_BIT: u64 = 1 << 63;

impl ExtentId {
    /// The `ordinal`-th extent for small files of a partition.
    #[must_use]
    pub fn small(ordinal: u64) -> ExtentId {
        ExtentId(ordinal | SMALL_EXTENT_BIT)
    }

    /// Whether the extent is shared by small files.
    #[must_use]
    pub fn is_small(self) -> bool {
        self.0 & SMALL_EXTENT_BIT != 0
    }
}

/// One column of a segment: a run of bytes inside one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Column {
    /// The data partition.
    pub partition: PartitionId,
    /// The extent within it.
    pub extent: ExtentId,
    /// First byte within the extent.
    pub offset: u64,
}

/// The columns of a segment. Striping over a zone comes later; the formats already have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Columns {
    /// W = 1: a plain extent key. Kept apart because nearly every segment of a small file is one,
    /// and a list would cost an allocation each.
    One(Column),
    /// W > 1: `unit` bytes go to each column in turn.
    Striped {
        /// Bytes that go to one column before the next.
        unit: u32,
        /// The columns in order.
        columns: Box<[Column]>,
    },
}

/// A run of a file's bytes and where they lie: CFS's extent key, with columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// First byte within the file.
    pub offset: u64,
    /// Bytes. Never 0.
    pub length: u64,
    /// The extents that hold them.
    pub columns: Columns,
    /// Whether all members had the bytes on disk when this was last published. Conservative: an
    /// unflushed mark on flushed bytes only forgoes a check after a power cut.
    pub flushed: bool,
}

impl Segment {
    /// A plain segment.
    #[must_use]
    pub fn plain(offset: u64, length: u64, column: Column) -> Segment {
        Segment { offset, length, columns: Columns::One(column), flushed: false }
    }

    /// Its one column; `None` for a striped segment.
    #[must_use]
    pub fn column(&self) -> Option<Column> {
        match self.columns {
            Columns::One(column) => Some(column),
            Columns::Striped { .. } => None,
        }
    }

    /// One past the last byte within the file.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// The part of the segment that lies in the file range `[start, end)`, if any. Only plain
    /// segments can be cut; a striped one is kept or dropped whole by its owner.
    #[must_use]
    pub fn clip(&self, start: u64, end: u64) -> Option<Segment> {
        let low = self.offset.max(start);
        let high = self.end().min(end);
        if low >= high {
            return None;
        }
        let columns = match &self.columns {
            Columns::One(column) => {
                Columns::One(Column { offset: column.offset + (low - self.offset), ..*column })
            }
            striped @ Columns::Striped { .. } => striped.clone(),
        };
        Some(Segment { offset: low, length: high - low, columns, flushed: self.flushed })
    }

    /// Whether `next` continues this segment in the file and in the same extent, so that one key
    /// can stand for both.
    #[must_use]
    pub fn is_continued_by(&self, next: &Segment) -> bool {
        let (Columns::One(a), Columns::One(b)) = (&self.columns, &next.columns) else {
            return false;
        };
        next.offset == self.end()
            && a.partition == b.partition
            && a.extent == b.extent
            && b.offset == a.offset + self.length
            && self.flushed == next.flushed
    }
}

/// Bytes that no file refers to any more, to be freed on every member of the partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FreedRange {
    /// The data partition.
    pub partition: PartitionId,
    /// The extent within it.
    pub extent: ExtentId,
    /// First byte within the extent.
    pub offset: u64,
    /// Bytes; `u64::MAX` for the whole extent, which is then removed.
    pub length: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(offset: u64, length: u64, at: u64) -> Segment {
        let column = Column { partition: PartitionId(1), extent: ExtentId(7), offset: at };
        Segment::plain(offset, length, column)
    }

    #[test]
    fn clip_moves_the_extent_offset_with_the_file_offset() {
        let whole = segment(100, 50, 1000);
        assert_eq!(whole.clip(0, 1000), Some(whole.clone()));
        assert_eq!(whole.clip(110, 120), Some(segment(110, 10, 1010)));
        assert_eq!(whole.clip(150, 200), None);
        assert_eq!(whole.clip(0, 100), None);
    }

    #[test]
    fn adjacent_keys_of_one_extent_merge() {
        assert!(segment(0, 10, 0).is_continued_by(&segment(10, 5, 10)));
        assert!(!segment(0, 10, 0).is_continued_by(&segment(10, 5, 11)));
        assert!(!segment(0, 10, 0).is_continued_by(&segment(11, 5, 10)));
    }

    #[test]
    fn small_extents_are_told_by_their_id() {
        assert!(ExtentId::small(3).is_small());
        assert!(!ExtentId(3).is_small());
    }
}
