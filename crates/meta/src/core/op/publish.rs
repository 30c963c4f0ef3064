//! publish: written bytes become part of a file (DESIGN.md sections 4 and 5).
//!
//! Size takes the maximum; of overlapping segments the last published wins; the loser's bytes go to
//! the free list. Publishing the same bytes again, to mark them flushed or because an answer was
//! lost, frees nothing and changes no content version. Content in the inode is replaced whole, by a
//! client that has seen all of it, and what was overwritten in place must still be part of the file:
//! [`MetaError::StaleContent`] sends back a client that did not see another one's change. Bytes that power
//! may still take do not replace others, which may have been synced: [`MetaError::ReplacesBytes`].

use milpa_types::{
    Columns, FileKind, InodeId, MetaError, Segment, SessionId, Timestamp, VolumeOptions,
};
use milpa_wire::meta::{FlushedFile, MARKS_MAX, MetaAnswer, MetaReply, Publish};

use super::super::Partition;
use super::super::inode::{Body, Inode};
use super::attributes::SIZE_MAX;

/// Segments in one publish, at most: applying one entry stays a matter of milliseconds.
const SEGMENTS_MAX: usize = 4096;

impl Partition {
    pub(crate) fn publish(
        &mut self,
        session: SessionId,
        publish: &Publish,
        now: Timestamp,
    ) -> MetaReply {
        let id = publish.inode;
        let mut inode = self.writable(id, session)?;
        if inode.kind != FileKind::File {
            return Err(MetaError::Invalid);
        }
        if publish.truncation != inode.truncation {
            return Err(MetaError::StaleTruncation { current: inode.truncation });
        }
        check_base(&inode, publish)?;
        self.check_publish(&inode, publish)?;
        if !publish.overwritten.iter().all(|place| self.has_at(id, place)) {
            return Err(MetaError::StaleContent { current: inode.content_version });
        }
        if !publish.may_replace && self.replaces(id, &inode, &publish.segments) {
            return Err(MetaError::ReplacesBytes);
        }
        let (old_size, before) = (inode.size, inode.content_version);
        let mut is_changed = !publish.overwritten.is_empty();
        if let Some(content) = &publish.inline {
            is_changed |= self.publish_inline(id, &mut inode, content);
        }
        if !publish.segments.is_empty() {
            self.set_inline(&mut inode, None);
        }
        for segment in &publish.segments {
            is_changed |= self.put_segment(id, &mut inode, segment);
            inode.size = inode.size.max(segment.end());
        }
        inode.size = inode.size.max(publish.size);
        is_changed |= inode.size != old_size;
        note_write(&mut inode, publish, is_changed, now);
        self.tables.inodes.insert(&id, &inode);
        Ok(MetaAnswer::Changed { attributes: inode.attributes(id), before })
    }

    /// Marks bytes that are on all disks by now.
    pub(crate) fn mark_flushed(&mut self, files: &[FlushedFile]) -> MetaReply {
        let segments: usize = files.iter().map(|file| file.segments.len()).sum();
        if files.len().max(segments) > MARKS_MAX {
            return Err(MetaError::Invalid);
        }
        files.iter().flat_map(|file| &file.segments).try_for_each(check_segment)?;
        for file in files {
            for segment in &file.segments {
                self.mark_segment(file.inode, segment);
            }
        }
        Ok(MetaAnswer::Done)
    }

    /// Whole small content: all segments go. Returns whether anything changed.
    fn publish_inline(&mut self, id: InodeId, inode: &mut Inode, content: &[u8]) -> bool {
        if matches!(&inode.body, Body::Inline(old) if old == content) {
            return false;
        }
        self.cut_segments(id, inode, 0);
        self.set_inline(inode, (!content.is_empty()).then(|| content.to_vec()));
        inode.size = inode.size.max(content.len() as u64);
        true
    }

    fn check_publish(&self, inode: &Inode, publish: &Publish) -> Result<(), MetaError> {
        if publish.size > SIZE_MAX {
            return Err(MetaError::TooLarge);
        }
        if publish.segments.len().max(publish.overwritten.len()) > SEGMENTS_MAX {
            return Err(MetaError::Invalid);
        }
        publish.segments.iter().chain(&publish.overwritten).try_for_each(check_segment)?;
        if let Some(content) = &publish.inline {
            // Not the volume's option: the writer may not have heard of another one yet, and would give its bytes up.
            let fits = content.len() <= VolumeOptions::INLINE_BYTES_MAX as usize;
            return if fits && publish.segments.is_empty() {
                Ok(())
            } else {
                Err(MetaError::Invalid)
            };
        }
        match &inode.body {
            // Inline content cannot stay beside segments: who adds these has rewritten it.
            Body::Inline(content)
                if !publish.segments.is_empty() && !covers(&publish.segments, content.len()) =>
            {
                Err(MetaError::Invalid)
            }
            _ => Ok(()),
        }
    }
}

/// Whoever replaces the content as a whole must have seen all of it.
fn check_base(inode: &Inode, publish: &Publish) -> Result<(), MetaError> {
    let leaves_inode = matches!(inode.body, Body::Inline(_)) && !publish.segments.is_empty();
    let current = inode.content_version;
    let replaces_all = publish.inline.is_some() || leaves_inode;
    match publish.base {
        Some(base) if base == current => Ok(()),
        None if !replaces_all => Ok(()),
        _ => Err(MetaError::StaleContent { current }),
    }
}

/// A change of content shows in version and times; a flush mark alone does not: it may arrive
/// after a utimensat(2). Content of the inode comes with a write only, which shows in the times even if the
/// bytes are the same.
fn note_write(inode: &mut Inode, publish: &Publish, is_changed: bool, now: Timestamp) {
    inode.content_version += u64::from(is_changed);
    if is_changed || publish.inline.is_some() {
        inode.modified = publish.modified;
        inode.changed = now;
    }
    if publish.clear_set_id {
        inode.clear_set_id();
    }
}

fn check_segment(segment: &Segment) -> Result<(), MetaError> {
    let Columns::One(column) = &segment.columns else {
        return Err(MetaError::Invalid);
    };
    let end = segment.offset.checked_add(segment.length).ok_or(MetaError::TooLarge)?;
    let extent_end = column.offset.checked_add(segment.length).ok_or(MetaError::Invalid)?;
    match (segment.length, end, extent_end) {
        (0, _, _) => Err(MetaError::Invalid),
        (_, end, _) if end > SIZE_MAX => Err(MetaError::TooLarge),
        (_, _, extent_end) if extent_end > SIZE_MAX => Err(MetaError::Invalid),
        _ => Ok(()),
    }
}

/// Whether the segments together cover the file's first `length` bytes.
fn covers(segments: &[Segment], length: usize) -> bool {
    let mut ranges: Vec<_> = segments.iter().map(|s| (s.offset, s.end())).collect();
    ranges.sort_unstable();
    let mut covered = 0;
    for (start, end) in ranges {
        if start > covered {
            break;
        }
        covered = covered.max(end);
    }
    covered >= length as u64
}
