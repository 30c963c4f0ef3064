//! A block of inode ids for a session, and CFS's split (Algorithm 1).

use milpa_types::{InodeId, MetaError};
use milpa_wire::meta::{MetaAnswer, MetaReply};

use super::super::Partition;

/// Ids in one grant, at most.
const GRANT_MAX: u32 = 65_536;

impl Partition {
    pub(crate) fn grant_inodes(&mut self, count: u32) -> MetaReply {
        if !(1..=GRANT_MAX).contains(&count) {
            return Err(MetaError::Invalid);
        }
        let first = self.counters.next_inode;
        let next = InodeId(first.0.saturating_add(u64::from(count)));
        if next > self.counters.end_inode {
            return Err(MetaError::PartitionFull);
        }
        self.counters.next_inode = next;
        Ok(MetaAnswer::Granted { first })
    }

    /// Cuts the id range off after `end`. Ids that were given stay; a range is never widened, so
    /// that a repeat of an older task is harmless.
    pub(crate) fn split(&mut self, end: InodeId) -> MetaReply {
        let end = InodeId(end.0.saturating_add(1)).max(self.counters.next_inode);
        self.counters.end_inode = self.counters.end_inode.min(end);
        Ok(MetaAnswer::Done)
    }
}
