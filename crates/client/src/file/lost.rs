//! Bytes that were never synced, and that a power failure of all replicas took.
//!
//! Who reads finds the file's end there, at once, and changes nothing: somebody may have written these
//! bytes, and is to be told. That is what fsync does: it fails, once, and cuts the file; until then a
//! write over lost bytes fails too. So no fsync ever succeeds over bytes that are gone.

use milpa_types::{Column, Columns, Segment};
use milpa_wire::meta::{MetaAnswer, MetaWrite};

use super::FileState;
use crate::error::FsError;
use crate::inner::Inner;

impl Inner {
    /// Has the file cut where bytes are missing that no replica has any more. The last ones come
    /// first: behind a cut nothing is left that would keep the size.
    pub(crate) async fn cut_lost(&self, file: &FileState) -> Result<(), FsError> {
        let unflushed = file.shared().content.unflushed_segments();
        for column in unflushed.iter().rev().filter_map(last_byte) {
            let Some(length) = self.data.lost(column).await else { continue };
            let Column { partition, extent, .. } = column;
            tracing::error!(
                inode = %file.inode, %partition, %extent, length,
                "bytes that were never synced are on no replica any more; the file is cut there"
            );
            let write = MetaWrite::CutLost { inode: file.inode, partition, extent, length };
            if let MetaAnswer::Attributes(cut) = self.meta.write(file.inode, write).await? {
                self.attributes.put(file.inode, cut, tokio::time::Instant::now());
            }
        }
        self.reload(file).await
    }

    /// Where the file ends without what is lost of it at its end.
    pub(super) async fn end_without_lost(&self, file: &FileState) -> u64 {
        let (mut end, unflushed) = {
            let content = &file.shared().content;
            (content.size(), content.unflushed_segments())
        };
        for segment in unflushed.iter().rev() {
            if segment.end() != end {
                break;
            }
            let Some(last) = last_byte(segment) else { break };
            let Some(length) = self.data.lost(last).await else { break };
            let first = (last.offset + 1).saturating_sub(segment.length);
            let there = length.saturating_sub(first).min(segment.length);
            end = segment.offset + there;
            if there > 0 {
                break;
            }
        }
        end
    }
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
