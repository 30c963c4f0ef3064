//! Pages of directories, the volume's space, and where a file lies.

use std::collections::BTreeMap;
use std::time::Duration;

use milpa_types::{Attributes, Columns, InodeId, MetaSlot, Name};
use milpa_wire::meta::{Content, MetaAnswer, MetaRead, READDIR_ENTRIES_MAX};
use tokio::time::Instant;

use crate::error::FsError;
use crate::flights::join_all;
use crate::handle::{DirectoryEntry, DirectoryPage, FileLocation, SegmentLocation, Statfs};
use crate::inner::Inner;
use crate::transport::Boxed;

/// How long a directory page waits for attributes that its own partition does not have.
const BATCH_WAIT: Duration = Duration::from_secs(1);

impl Inner {
    pub(crate) async fn readdir(
        &self,
        parent: InodeId,
        after: Option<Name>,
        limit: u32,
        with_attributes: bool,
    ) -> Result<DirectoryPage, FsError> {
        let asked = Instant::now();
        let limit = limit.clamp(1, READDIR_ENTRIES_MAX);
        let read = MetaRead::ReadDirectory { parent, after, limit, with_attributes };
        let MetaAnswer::Page { entries, end } = self.meta.read(parent, read).await? else {
            return Err(FsError::Broken("readdir"));
        };
        let missing = entries.iter().filter(|e| with_attributes && e.attributes.is_none());
        let elsewhere = self.getattr_batch(missing.map(|e| e.inode).collect()).await;
        let complete = entries.into_iter().map(|entry| {
            let attributes = entry.attributes.or_else(|| elsewhere.get(&entry.inode).copied());
            if let Some(attributes) = attributes {
                // A listing is mostly followed by something done to each entry.
                self.attributes.put(entry.inode, attributes, asked);
                self.note_name(parent, entry.name.clone(), entry.inode, entry.kind, asked);
            }
            DirectoryEntry {
                attributes: attributes.map(|a| self.with_buffered(a)),
                name: entry.name,
                inode: entry.inode,
                kind: entry.kind,
            }
        });
        Ok(DirectoryPage { entries: complete.collect(), end })
    }

    /// Attributes of inodes in any partitions, one request for each partition, all at once. What no longer exists is
    /// left out, and what is not answered soon: a listing does not need it, and whoever does asks for it by itself.
    async fn getattr_batch(&self, inodes: Vec<InodeId>) -> BTreeMap<InodeId, Attributes> {
        let mut slots: BTreeMap<MetaSlot, Vec<InodeId>> = BTreeMap::new();
        for inode in inodes {
            slots.entry(inode.slot()).or_default().push(inode);
        }
        let calls = slots.into_iter().map(|(slot, inodes)| -> Boxed<'_, _> {
            let call = self.meta.read_slot(slot, MetaRead::GetAttributesBatch { inodes });
            Box::pin(tokio::time::timeout(BATCH_WAIT, call))
        });
        let mut found = BTreeMap::new();
        for answer in join_all(calls.collect()).await {
            if let Ok(Ok(MetaAnswer::AttributesBatch(batch))) = answer {
                found.extend(batch.into_iter().map(|attributes| (attributes.inode, attributes)));
            }
        }
        found
    }

    pub(crate) async fn statfs(&self) -> Result<Statfs, FsError> {
        let view = self.meta.view();
        let calls = view.volume.meta.iter().map(|partition| -> Boxed<'_, _> {
            Box::pin(self.meta.read_slot(partition.slot, MetaRead::Statistics))
        });
        let (mut inodes, mut inodes_free, mut used) = (0u64, 0u64, 0u64);
        for (answer, partition) in
            join_all(calls.collect()).await.into_iter().zip(&view.volume.meta)
        {
            let MetaAnswer::Statistics(statistics) = answer? else {
                return Err(FsError::Broken("statistics"));
            };
            inodes += statistics.inodes;
            used = used.saturating_add(statistics.allocated_bytes);
            if partition.takes_inodes {
                let end = partition.slot.end_inode().0;
                inodes_free += end.saturating_sub(statistics.inode_highest.0);
            }
        }
        let options = &view.volume.volume.options;
        let copies = u64::from(options.replicas.max(1));
        let free = milpa_types::free_bytes(view.volume.nodes.iter()) / copies;
        let (capacity_bytes, free_bytes) = match options.capacity_bytes {
            0 => (used.saturating_add(free), free),
            capacity => (capacity, capacity.saturating_sub(used).min(free)),
        };
        Ok(Statfs { capacity_bytes, free_bytes, inodes, inodes_free })
    }

    pub(crate) async fn locate(&self, inode: InodeId) -> Result<FileLocation, FsError> {
        let (attributes, content) = self.fetch_layout(inode).await?;
        let view = self.meta.view();
        let slot = inode.slot();
        let partition = view.meta(slot).ok_or(FsError::Stale("no such inode in this volume"))?;
        let (inline_bytes, segments) = match content {
            Content::Inline(bytes) => (bytes.len() as u64, Vec::new()),
            Content::Segments(segments) => (0, segments),
        };
        let mut located = Vec::with_capacity(segments.len());
        for segment in segments {
            let Columns::One(column) = segment.columns else {
                return Err(FsError::Unsupported("striped files need a newer client"));
            };
            let route = view.data(column.partition);
            located.push(SegmentLocation {
                offset: segment.offset,
                length: segment.length,
                partition: column.partition,
                extent: column.extent,
                extent_offset: column.offset,
                flushed: segment.flushed,
                epoch: route.map(|p| p.epoch).unwrap_or_default(),
                primary: route.map(|p| p.primary).unwrap_or_default(),
                members: route.map(|p| p.members.clone()).unwrap_or_default(),
            });
        }
        Ok(FileLocation {
            attributes,
            meta_slot: slot,
            meta_partition: partition.id,
            meta_members: partition.members.clone(),
            inline_bytes,
            segments: located,
        })
    }
}
