//! The inode as it is kept.

use milpa_types::{Attributes, FileKind, InodeId, Timestamp};
use serde::{Deserialize, Serialize};

/// Most links of an inode that is not a directory. POSIX asks for 8; 65,000 is ext4's.
pub(crate) const LINKS_MAX: u32 = 65_535;

/// One inode; its id is its key. What is rare costs one byte where it is absent: records are
/// encoded with variable-length integers, a file of one link and no content takes 45 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Packed", into = "Packed")]
pub(crate) struct Inode {
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u16,
    /// Dentries that name it, in any partition; 0 while unlinked and held.
    pub link_count: u32,
    pub uid: u32,
    pub gid: u32,
    pub device: u32,
    pub size: u64,
    /// Bytes covered by segments, or the inline content's length.
    pub allocated: u64,
    pub accessed: Timestamp,
    pub modified: Timestamp,
    pub changed: Timestamp,
    pub content_version: u64,
    pub truncation: u64,
    /// Of a directory: the one it lies in, if that is in the same partition, else 0. Another
    /// partition may move a name of this inode without telling, so a parent there is not known.
    pub parent: InodeId,
    pub body: Body,
}

/// What lies in the inode itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Body {
    /// Nothing: the content, if any, is in segments.
    #[default]
    None,
    /// The content of a small file. It may be shorter than the size: the rest is a hole. There
    /// are no segments beside it.
    Inline(Vec<u8>),
    /// A symlink's target.
    Target(Vec<u8>),
}

impl Inode {
    /// A new inode of `kind`, not yet in any directory.
    pub(crate) fn new(kind: FileKind, mode: u16, uid: u32, gid: u32, now: Timestamp) -> Inode {
        Inode {
            kind,
            mode: mode & 0o7777,
            link_count: if kind == FileKind::Directory { 2 } else { 1 },
            uid,
            gid,
            device: 0,
            size: 0,
            allocated: 0,
            accessed: now,
            modified: now,
            changed: now,
            content_version: 0,
            truncation: 0,
            parent: InodeId(0),
            body: Body::None,
        }
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Clears the set-id bits as a write or chown by an unprivileged process must.
    pub(crate) fn clear_set_id(&mut self) {
        self.mode = milpa_types::without_set_id(self.mode);
    }

    /// As clients see it.
    pub(crate) fn attributes(&self, inode: InodeId) -> Attributes {
        Attributes {
            inode,
            kind: self.kind,
            mode: self.mode,
            link_count: self.link_count,
            uid: self.uid,
            gid: self.gid,
            device: self.device,
            size: self.size,
            allocated: self.allocated,
            accessed: self.accessed,
            modified: self.modified,
            changed: self.changed,
            content_version: self.content_version,
            truncation: self.truncation,
        }
    }
}

/// The encoded form. Times other than `changed` are kept as their distance to it, which is mostly
/// 0 or small.
#[derive(Serialize, Deserialize)]
struct Packed {
    kind: FileKind,
    mode: u16,
    link_count: u32,
    uid: u32,
    gid: u32,
    device: u32,
    size: u64,
    allocated: u64,
    changed: i64,
    modified: i64,
    accessed: i64,
    content_version: u64,
    truncation: u64,
    parent: InodeId,
    body: Body,
}

impl From<Packed> for Inode {
    fn from(packed: Packed) -> Inode {
        Inode {
            kind: packed.kind,
            mode: packed.mode,
            link_count: packed.link_count,
            uid: packed.uid,
            gid: packed.gid,
            device: packed.device,
            size: packed.size,
            allocated: packed.allocated,
            accessed: Timestamp(packed.changed.wrapping_add(packed.accessed)),
            modified: Timestamp(packed.changed.wrapping_add(packed.modified)),
            changed: Timestamp(packed.changed),
            content_version: packed.content_version,
            truncation: packed.truncation,
            parent: packed.parent,
            body: packed.body,
        }
    }
}

impl From<Inode> for Packed {
    fn from(inode: Inode) -> Packed {
        Packed {
            kind: inode.kind,
            mode: inode.mode,
            link_count: inode.link_count,
            uid: inode.uid,
            gid: inode.gid,
            device: inode.device,
            size: inode.size,
            allocated: inode.allocated,
            changed: inode.changed.0,
            modified: inode.modified.0.wrapping_sub(inode.changed.0),
            accessed: inode.accessed.0.wrapping_sub(inode.changed.0),
            content_version: inode.content_version,
            truncation: inode.truncation,
            parent: inode.parent,
            body: inode.body,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_small_and_whole() {
        let now = Timestamp(1_760_000_000_000_000_000);
        let mut inode = Inode::new(FileKind::File, 0o644, 1000, 1000, now);
        assert!(milpa_wire::encode(&inode).len() <= 32);
        inode.accessed = Timestamp(i64::MIN);
        inode.modified = Timestamp(i64::MAX);
        inode.body = Body::Inline(vec![1, 2, 3]);
        let bytes = milpa_wire::encode(&inode);
        assert_eq!(milpa_wire::decode::<Inode>(&bytes).ok(), Some(inode));
    }

    #[test]
    fn set_group_id_stays_where_the_group_may_not_execute() {
        let mode = |mode| {
            let mut inode = Inode::new(FileKind::File, mode, 0, 0, Timestamp(0));
            inode.clear_set_id();
            inode.mode
        };
        assert_eq!(mode(0o6755), 0o0755);
        assert_eq!(mode(0o2745), 0o2745, "mandatory locking, not set-group-id");
    }
}
