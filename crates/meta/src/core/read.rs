//! Reads: they look, and change nothing, not even access times.

use milpa_types::{Attributes, FileKind, InodeId, MetaError, Name, SessionId};
use milpa_wire::meta::{
    Content, Entry, LAYOUT_SEGMENTS_MAX, MetaAnswer, MetaRead, MetaReply, MetaStatistics,
    READDIR_ENTRIES_MAX,
};

use super::Partition;
use super::inode::{Body, Inode};
use super::table::Dentry;

/// A readdir page ends after about this many bytes, so that an answer fits a frame and takes the
/// node's thread a millisecond.
const PAGE_BYTES_MAX: usize = 1 << 20;
/// Bytes of an encoded entry besides its name, at most.
const ENTRY_BYTES: usize = 160;

impl Partition {
    pub(crate) fn answer(&self, reader: Option<SessionId>, read: &MetaRead) -> MetaReply {
        match read {
            MetaRead::Lookup { parent, name } => {
                self.lookup(*parent, name).map(|dentry| MetaAnswer::Entry(self.entry(name, dentry)))
            }
            MetaRead::GetAttributes { inode } => {
                let record = self.visible(reader, *inode)?;
                Ok(MetaAnswer::Attributes(record.attributes(*inode)))
            }
            MetaRead::GetAttributesBatch { inodes } => self.attributes_batch(reader, inodes),
            MetaRead::ReadLink { inode } => match self.visible(reader, *inode)?.body {
                Body::Target(target) => Ok(MetaAnswer::Target(target)),
                Body::None | Body::Inline(_) => Err(MetaError::Invalid),
            },
            MetaRead::ReadDirectory { parent, after, limit, with_attributes } => {
                self.directory(*parent)?;
                Ok(self.page(*parent, after.as_ref(), *limit, *with_attributes))
            }
            MetaRead::GetLayout { inode, from } => {
                let record = self.visible(reader, *inode)?;
                let attributes = record.attributes(*inode);
                let (content, end) =
                    self.content(*inode, record, *from).ok_or(MetaError::Invalid)?;
                Ok(MetaAnswer::Layout { attributes, content, end })
            }
            MetaRead::LookupLayout { parent, name } => {
                let dentry = self.lookup(*parent, name)?;
                let entry = self.entry(name, dentry);
                let record = self.tables.inodes.get(&dentry.inode);
                let content = record.and_then(|record| self.content(dentry.inode, record, 0));
                // One that does not fit is asked for by itself.
                let content = content.and_then(|(content, end)| end.then_some(content));
                Ok(MetaAnswer::EntryLayout { entry, content })
            }
            MetaRead::Statistics => Ok(MetaAnswer::Statistics(self.statistics())),
        }
    }

    /// An inode as `reader` may see it: an unlinked one only if that session holds it open. Without
    /// a known reader, anybody may.
    fn visible(&self, reader: Option<SessionId>, inode: InodeId) -> Result<Inode, MetaError> {
        match reader {
            Some(session) => self.writable(inode, session),
            None => self.inode(inode),
        }
    }

    fn lookup(&self, parent: InodeId, name: &Name) -> Result<Dentry, MetaError> {
        self.directory(parent)?;
        self.tables.dentries.get(&(parent, name.clone())).ok_or(MetaError::NotFound)
    }

    /// A dentry as clients see it.
    pub(crate) fn entry(&self, name: &Name, dentry: Dentry) -> Entry {
        let record = self.tables.inodes.get(&dentry.inode);
        Entry {
            name: name.clone(),
            inode: dentry.inode,
            kind: dentry.kind,
            attributes: record.map(|record| record.attributes(dentry.inode)),
            directory: None,
        }
    }

    fn attributes_batch(&self, reader: Option<SessionId>, inodes: &[InodeId]) -> MetaReply {
        if inodes.len() > READDIR_ENTRIES_MAX as usize {
            return Err(MetaError::Invalid);
        }
        let attributes = |inode: &InodeId| -> Option<Attributes> {
            Some(self.visible(reader, *inode).ok()?.attributes(*inode))
        };
        Ok(MetaAnswer::AttributesBatch(inodes.iter().filter_map(attributes).collect()))
    }

    fn page(
        &self,
        parent: InodeId,
        after: Option<&Name>,
        limit: u32,
        with_attributes: bool,
    ) -> MetaAnswer {
        let limit = limit.clamp(1, READDIR_ENTRIES_MAX) as usize;
        let records = match after {
            None => self.tables.dentries.range(&parent),
            Some(name) => self.tables.dentries.range(&(parent, name.clone())),
        };
        let mut records = records
            .take_while(|((directory, _), _)| *directory == parent)
            .skip_while(|((_, name), _)| Some(name) == after)
            .peekable();
        let mut entries = Vec::new();
        let mut bytes = 0;
        while entries.len() < limit && bytes < PAGE_BYTES_MAX {
            let Some(((_, name), dentry)) = records.next() else { break };
            bytes += name.as_bytes().len() + ENTRY_BYTES;
            entries.push(if with_attributes {
                self.entry(&name, dentry)
            } else {
                let (inode, kind) = (dentry.inode, dentry.kind);
                Entry { name, inode, kind, attributes: None, directory: None }
            });
        }
        MetaAnswer::Page { entries, end: records.peek().is_none() }
    }

    /// The content map of a file from a place on, and whether it ends there.
    fn content(&self, inode: InodeId, record: Inode, from: u64) -> Option<(Content, bool)> {
        match (record.kind, record.body) {
            (FileKind::File, Body::Inline(content)) => Some((Content::Inline(content), true)),
            (FileKind::File, _) => {
                // One that was joined since with what the part before ended with begins there.
                let rest = self.overlapping(inode, from, u64::MAX);
                let mut rest = rest.filter_map(|segment| segment.clip(from, u64::MAX));
                let segments = rest.by_ref().take(LAYOUT_SEGMENTS_MAX).collect();
                Some((Content::Segments(segments), rest.next().is_none()))
            }
            _ => None,
        }
    }

    pub(crate) fn count(&self) -> MetaStatistics {
        let tables = &self.tables;
        MetaStatistics {
            inodes: tables.inodes.count(),
            dentries: tables.dentries.count(),
            allocated_bytes: self.counters.allocated_bytes,
            inode_highest: InodeId(self.counters.next_inode.0.saturating_sub(1)),
            freed_waiting: tables.freed.count(),
            held: tables.held.count(),
            operations: tables.operations.count(),
        }
    }
}
