//! Bytes that were never synced, and that a power failure of all replicas took.
//!
//! Who reads finds the file's end there, at once, and changes nothing: somebody may have written these
//! bytes, and is to be told. That is what fsync does: it fails, once, and has them leave the file; until then a
//! write over lost bytes fails too. So no fsync ever succeeds over bytes that are gone. What lies behind them in
//! the same extent, and can be read, stays: it may have been written over since.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use milpa_types::{Column, Columns, DataError, ExtentId, PartitionId, Segment};
use milpa_wire::meta::{LOST_RANGES_MAX, LostRange, MetaAnswer, MetaWrite};

use super::FileState;
use crate::core::Retry;
use crate::data::flush::Reached;
use crate::error::FsError;
use crate::inner::Inner;

/// Cuts for one fsync at most: of ends, of what is torn before them, and once more for what was lost meanwhile.
const CUTS_MAX: usize = 3;

/// Extents of which nothing is left.
pub(super) type Gone = BTreeSet<(PartitionId, ExtentId)>;

/// Where in extents bytes of a file are that no member has: at least one range of each.
pub(super) type Torn = BTreeMap<(PartitionId, ExtentId), Vec<Range<u64>>>;

impl Inner {
    /// Has bytes that no replica has any more leave the file, whose content was just loaded. Gives whether there were
    /// any.
    pub(crate) async fn cut_lost(&self, file: &FileState) -> Result<bool, FsError> {
        let mut is_cut = false;
        // Where the end of an extent is lost, members say nothing of blocks before it.
        for _ in 0..CUTS_MAX {
            let lost = self.lost_ranges(file).await;
            if lost.is_empty() {
                break;
            }
            self.cut(file, &lost).await?;
            is_cut = true;
        }
        Ok(is_cut)
    }

    async fn cut(&self, file: &FileState, lost: &[LostRange]) -> Result<(), FsError> {
        for LostRange { partition, extent, from, until } in lost {
            tracing::error!(
                inode = %file.inode, %partition, %extent, from, until,
                "bytes that were never synced are on no replica any more; they leave the file"
            );
        }
        // The last ones come first: behind a cut nothing is left that would keep the size.
        for lost in lost.chunks(LOST_RANGES_MAX) {
            let write = MetaWrite::CutLostRanges { inode: file.inode, lost: lost.to_vec() };
            if let MetaAnswer::Attributes(cut) = self.meta.write(file.inode, write).await? {
                self.attributes.put(file.inode, cut, tokio::time::Instant::now());
            }
        }
        self.reload(file).await
    }

    /// What extents lack of what the file believes them to have: ends, the last ones of the file first, then what is
    /// torn.
    async fn lost_ranges(&self, file: &FileState) -> Vec<LostRange> {
        let unflushed = file.shared().content.unflushed_segments();
        let gone = self.gone_extents(file).await;
        // Not known while members are away.
        let torn = self.flush_but_lost(file).await.unwrap_or_default();
        let mut ends = BTreeMap::new();
        for (key, bytes) in last_bytes(&unflushed) {
            let length = match gone.contains(&key) {
                true => Some(0),
                false => self.data.lost(&bytes).await,
            };
            ends.extend(length.map(|length| (key, length)));
        }
        let mut lost = Vec::new();
        for Column { partition, extent, offset } in unflushed.iter().rev().filter_map(last_byte) {
            let key = (partition, extent);
            if let Some(from) = ends.get(&key).copied().filter(|from| *from <= offset) {
                ends.remove(&key);
                lost.push(LostRange { partition, extent, from, until: u64::MAX });
            }
        }
        for ((partition, extent), ranges) in torn {
            let of_file = |range: Range<u64>| {
                let Range { start: from, end: until } = range;
                LostRange { partition, extent, from, until }
            };
            lost.extend(ranges.into_iter().map(of_file));
        }
        lost
    }

    /// Has all members flush what was appended before and they may not have on disk. Gives where bytes of the file
    /// are, [`LOST_RANGES_MAX`] ranges at most, that were never synced and that power left on no member. Not while a
    /// member says so of bytes that another one has: they are on all members soon.
    pub(super) async fn flush_but_lost(&self, file: &FileState) -> Result<Torn, FsError> {
        let mut retry = Retry::new(&self.core, "flush");
        loop {
            let unflushed = file.shared().content.unflushed();
            let flushed = self.data.flush(unflushed.clone()).await?;
            let Some(torn) = self.torn(file, flushed.lost.clone()).await? else {
                retry.note("a member lacks bytes that another one has");
                retry.pause().await?;
                continue;
            };
            if torn.is_empty() && flushed.reached == Reached::Disks {
                let news = file.shared().content.flushed(unflushed, &flushed.lost);
                self.marks.add(file.inode, news);
            }
            return Ok(torn);
        }
    }

    /// Of blocks that members say are lost, each perhaps several of them. None if one can be read.
    async fn torn(
        &self,
        file: &FileState,
        mut blocks: Vec<Column>,
    ) -> Result<Option<Torn>, FsError> {
        blocks.sort_unstable_by_key(|block| (block.partition, block.extent, block.offset));
        blocks.dedup();
        let (mut torn, mut found) = (Torn::new(), 0);
        for block in blocks {
            let key = (block.partition, block.extent);
            let pieces = file.shared().content.unflushed_in(block);
            let (mut ranges, mut is_there) = (Vec::new(), false);
            for (piece, length) in pieces {
                match self.data.read(piece, length).await {
                    Ok(_) => is_there = true,
                    Err(FsError::Data(DataError::Corrupt { .. } | DataError::Lost { .. })) => {
                        ranges.push(piece.offset..piece.offset.saturating_add(u64::from(length)));
                    }
                    Err(error) => return Err(error),
                }
            }
            if ranges.is_empty() {
                if is_there {
                    return Ok(None);
                }
                continue;
            }
            found += ranges.len();
            torn.entry(key).or_default().append(&mut ranges);
            // The next cut takes the others.
            if found >= LOST_RANGES_MAX {
                break;
            }
        }
        Ok(Some(torn))
    }

    /// Extents that the file, as it was just loaded, refers to with bytes that were never synced, and
    /// that were removed everywhere: all else of them was freed, so what power left was of no use.
    pub(super) async fn gone_extents(&self, file: &FileState) -> Gone {
        let unflushed = file.shared().content.unflushed_segments();
        let mut gone = Gone::new();
        for (extent, columns) in last_bytes(&unflushed) {
            let mut is_gone = true;
            for column in columns {
                is_gone = is_gone && self.data.is_gone(column).await;
            }
            if is_gone {
                gone.insert(extent);
            }
        }
        gone
    }

    /// Where the file, whose content was just loaded, ends without what is lost of it at its end: not before
    /// what was written here since.
    pub(super) async fn end_without_lost(&self, file: &FileState) -> u64 {
        let gone = self.gone_extents(file).await;
        let (mut end, written, unflushed) = {
            let content = &file.shared().content;
            (content.size(), content.written_end(), content.unflushed_segments())
        };
        for segment in unflushed.iter().rev() {
            if segment.end() != end {
                break;
            }
            let Some(last) = last_byte(segment) else { break };
            let length = match gone.contains(&(last.partition, last.extent)) {
                true => Some(0),
                false => self.data.lost(&[last]).await,
            };
            let Some(length) = length else { break };
            let first = (last.offset + 1).saturating_sub(segment.length);
            let there = length.saturating_sub(first).min(segment.length);
            end = segment.offset + there;
            if there > 0 {
                break;
            }
        }
        end.max(written)
    }
}

/// Where the last bytes of segments are, by their extents, those at its end first.
fn last_bytes(segments: &[Segment]) -> BTreeMap<(PartitionId, ExtentId), Vec<Column>> {
    let mut extents: BTreeMap<_, Vec<Column>> = BTreeMap::new();
    for column in segments.iter().filter_map(last_byte) {
        extents.entry((column.partition, column.extent)).or_default().push(column);
    }
    for bytes in extents.values_mut() {
        bytes.sort_unstable_by_key(|column| std::cmp::Reverse(column.offset));
    }
    extents
}

/// Where the last byte of a segment is.
fn last_byte(segment: &Segment) -> Option<Column> {
    match &segment.columns {
        Columns::One(column) => {
            Some(Column { offset: column.offset + segment.length.checked_sub(1)?, ..*column })
        }
        Columns::Striped { .. } => None,
    }
}
