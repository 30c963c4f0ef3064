//! What is on all disks, told to the inodes a little later.
//!
//! An fsync publishes and flushes at once, so what it publishes is not yet known to be on disk. The
//! mark that says so follows here, for many files in one request: it is needed only to tell bytes
//! that rotted away from bytes that were never synced, and nobody waits for it. Marks that a crash
//! takes away come back with the next fsync.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use milpa_types::{InodeId, MetaSlot, Segment};
use milpa_wire::meta::{FlushedFile, MARKS_MAX, MetaWrite};

use crate::core::lock;
use crate::inner::Inner;
use crate::segments::SegmentMap;

/// Files that may wait. Beyond it marks are dropped.
const FILES_MAX: usize = 65_536;

/// Marks that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    files: Mutex<BTreeMap<InodeId, SegmentMap>>,
}

impl Marks {
    /// These segments of a file are on all disks.
    pub(crate) fn add(&self, inode: InodeId, segments: Vec<Segment>) {
        if segments.is_empty() {
            return;
        }
        let mut files = lock(&self.files);
        if files.len() >= FILES_MAX && !files.contains_key(&inode) {
            tracing::debug!(%inode, "too many marks wait: dropped those of a file");
            return;
        }
        let known = files.entry(inode).or_default();
        segments.into_iter().for_each(|segment| known.overlay(segment));
    }

    /// All that wait, in requests of at most [`MARKS_MAX`] segments, each for one partition.
    fn take(&self) -> Vec<(InodeId, MetaWrite)> {
        let files = std::mem::take(&mut *lock(&self.files));
        let mut slots: BTreeMap<MetaSlot, Vec<(InodeId, Segment)>> = BTreeMap::new();
        for (inode, segments) in files {
            let of_slot = slots.entry(inode.slot()).or_default();
            of_slot.extend(segments.iter().map(|segment| (inode, segment.clone())));
        }
        let mut requests = Vec::new();
        for segments in slots.into_values() {
            for chunk in segments.chunks(MARKS_MAX) {
                let Some((first, _)) = chunk.first() else { continue };
                let of_file = chunk.chunk_by(|a, b| a.0 == b.0).filter_map(|run| {
                    let inode = run.first()?.0;
                    let segments = run.iter().map(|(_, segment)| segment.clone()).collect();
                    Some(FlushedFile { inode, segments })
                });
                requests.push((*first, MetaWrite::MarkFlushed { files: of_file.collect() }));
            }
        }
        requests
    }
}

impl Inner {
    /// Tells the inodes what was flushed of late.
    pub(crate) async fn send_marks(self: &Arc<Self>) {
        for (inode, write) in self.marks.take() {
            if let Err(error) = self.meta.write(inode, write).await {
                tracing::debug!(%error, "what was flushed could not be marked");
            }
        }
    }
}
