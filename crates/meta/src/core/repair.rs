//! What `milpa fsck --repair` may change: each repair says what it found, and is refused if that is not
//! so any more.
//!
//! Names are spread over partitions, and no partition can see all names of an inode. So the asker's word
//! is taken for how many there are; what it saw of the inode itself has to be as it was, to the time of
//! its last change, and no operation may be about it: then no name of it came or went meanwhile.

use milpa_types::{FileKind, InodeId, MetaError, Name, Timestamp};
use milpa_wire::check::MetaRepair;
use milpa_wire::meta::{MetaAnswer, MetaReply};

use super::Partition;
use super::inode::{Body, Inode};

impl Partition {
    pub(crate) fn repair(&mut self, now: Timestamp, repair: &MetaRepair) -> MetaReply {
        match repair {
            MetaRepair::Recount { inode } => self.recount(*inode)?,
            MetaRepair::SetLinks { inode, changed, links } => {
                let mut record = self.unchanged(*inode, *changed)?;
                if record.is_directory() || *links == 0 {
                    return Err(MetaError::Invalid);
                }
                record.link_count = *links;
                record.changed = now;
                self.tables.inodes.insert(inode, &record);
            }
            MetaRepair::DeleteInode { inode, changed } => {
                let record = self.unchanged(*inode, *changed)?;
                // What has a link and holds something may be wanted: a person decides.
                let is_empty = record.size == 0 && record.allocated == 0;
                if *inode == InodeId::ROOT || self.is_held(*inode) {
                    return Err(MetaError::Invalid);
                }
                if record.link_count > 0 && !is_empty {
                    return Err(MetaError::NotEmpty);
                }
                if record.is_directory() {
                    self.check_removable(*inode, None)?;
                }
                self.delete_inode(*inode);
            }
            MetaRepair::RemoveName { directory, name, inode } => {
                self.remove_dangling(*directory, name, *inode, now)?;
            }
        }
        Ok(MetaAnswer::Done)
    }

    /// The inode, if it is as it was seen and nothing is being done to it.
    fn unchanged(&self, id: InodeId, changed: Timestamp) -> Result<Inode, MetaError> {
        let record = self.inode(id)?;
        let mut prepared = self.tables.intents.iter().filter_map(|(_, intent)| intent.what.inode());
        if prepared.any(|inode| inode == id) || self.tables.locked_directories.contains(&id) {
            return Err(MetaError::Locked);
        }
        if record.changed != changed {
            return Err(MetaError::Stale);
        }
        Ok(record)
    }

    /// Makes an inode's sums what it holds.
    fn recount(&mut self, id: InodeId) -> Result<(), MetaError> {
        let mut record = self.inode(id)?;
        if record.is_directory() {
            let entries = self.tables.dentries.range(&id).take_while(|(key, _)| key.0 == id);
            let (mut size, mut links) = (0, 2);
            for (_, dentry) in entries {
                size += 1;
                links += u32::from(dentry.kind == FileKind::Directory);
            }
            (record.size, record.link_count) = (size, links);
        } else {
            let segments: u64 = self.segments(id).map(|segment| segment.length).sum();
            let allocated = match &record.body {
                Body::Inline(content) => content.len() as u64,
                Body::None | Body::Target(_) => segments,
            };
            let total = self.counters.allocated_bytes.saturating_sub(record.allocated);
            self.counters.allocated_bytes = total.saturating_add(allocated);
            record.allocated = allocated;
        }
        record.content_version += 1;
        self.tables.inodes.insert(&id, &record);
        Ok(())
    }

    /// Removes a name of an inode that is not there. Ids are never reused: it will never be. Of an inode of
    /// another partition the asker has heard so from there; here only our own can be looked up.
    fn remove_dangling(
        &mut self,
        directory: InodeId,
        name: &Name,
        inode: InodeId,
        now: Timestamp,
    ) -> Result<(), MetaError> {
        self.directory(directory)?;
        self.check_unlocked(directory, name, None)?;
        let key = (directory, name.clone());
        let dentry = self.tables.dentries.get(&key).ok_or(MetaError::NotFound)?;
        if dentry.inode != inode || self.tables.inodes.contains(&inode) {
            return Err(MetaError::Stale);
        }
        self.remove_dentry(&key, dentry.kind, now);
        Ok(())
    }
}
