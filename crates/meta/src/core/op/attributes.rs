//! setattr: mode, owner, times, and the size.

use milpa_types::{AttributeChanges, FileKind, InodeId, MetaError, SessionId, Timestamp};
use milpa_wire::meta::{MetaAnswer, MetaReply};

use super::super::Partition;
use super::super::inode::{Body, Inode};

/// The largest file: `off_t` is signed.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;

impl Partition {
    pub(crate) fn set_attributes(
        &mut self,
        session: SessionId,
        id: InodeId,
        changes: &AttributeChanges,
        now: Timestamp,
    ) -> MetaReply {
        let mut inode = self.writable(id, session)?;
        let before = inode.content_version;
        if let Some(size) = changes.size {
            match inode.kind {
                FileKind::File if size > SIZE_MAX => return Err(MetaError::TooLarge),
                FileKind::File => self.set_size(id, &mut inode, size, now),
                FileKind::Directory => return Err(MetaError::IsDirectory),
                _ => return Err(MetaError::Invalid),
            }
        }
        inode.uid = changes.uid.unwrap_or(inode.uid);
        inode.gid = changes.gid.unwrap_or(inode.gid);
        if changes.clear_set_id && inode.kind != FileKind::Directory {
            inode.clear_set_id();
        }
        inode.mode = changes.mode.map_or(inode.mode, |mode| mode & 0o7777);
        inode.accessed = changes.accessed.unwrap_or(inode.accessed);
        inode.modified = changes.modified.unwrap_or(inode.modified);
        inode.changed = now;
        self.tables.inodes.insert(&id, &inode);
        Ok(MetaAnswer::Changed { attributes: inode.attributes(id), before })
    }

    /// Truncates or extends. The truncation generation rises in any case: a publish that was on
    /// its way must not bring a size back that was set before it arrived.
    fn set_size(&mut self, id: InodeId, inode: &mut Inode, size: u64, now: Timestamp) {
        self.cut_segments(id, inode, size);
        if let Body::Inline(content) = &inode.body {
            let mut content = content.clone();
            // A cut and a later extension must not bring old bytes back; a small extension is
            // filled at once, a large one is a hole behind the content.
            if size <= u64::from(self.setup.options.inline_bytes()) || size < content.len() as u64 {
                content.resize(size as usize, 0);
            }
            self.set_inline(inode, (!content.is_empty()).then_some(content));
        }
        if inode.size != size {
            inode.content_version += 1;
        }
        inode.size = size;
        inode.truncation += 1;
        inode.modified = now;
    }
}
