//! What the operations of a client take and give.

use std::time::Duration;

use milpa_types::{
    Attributes, Epoch, ExtentId, FileKind, InodeId, MetaSlot, Name, NodeId, PartitionId,
};

/// An open file of this client. Never reused within its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleId(pub u64);

/// How a file is opened (open(2)). O_APPEND is not among it: fcntl(2) changes that at any time, so each
/// write says whether it appends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// O_TRUNC: cut to nothing first.
    pub truncate: bool,
    /// Who truncates is not privileged (`FUSE_OPEN_KILL_SUIDGID`).
    pub clear_set_id: bool,
    /// O_EXCL: create must not find the name taken.
    pub exclusive: bool,
    /// O_SYNC, O_DSYNC or O_DIRECT: a write returns when its bytes and its metadata are on disk.
    pub sync: bool,
}

impl OpenFlags {
    /// From the `flags` of open(2).
    #[must_use]
    pub fn from_bits(flags: i32) -> OpenFlags {
        let access = flags & libc::O_ACCMODE;
        OpenFlags {
            read: access != libc::O_WRONLY,
            write: access != libc::O_RDONLY,
            truncate: flags & libc::O_TRUNC != 0,
            clear_set_id: false,
            exclusive: flags & libc::O_EXCL != 0,
            sync: flags & (libc::O_DSYNC | libc::O_SYNC | libc::O_DIRECT) != 0,
        }
    }

    /// For reading only.
    #[must_use]
    pub fn read_only() -> OpenFlags {
        OpenFlags { read: true, ..OpenFlags::default() }
    }

    /// For reading and writing.
    #[must_use]
    pub fn read_write() -> OpenFlags {
        OpenFlags { read: true, write: true, ..OpenFlags::default() }
    }
}

/// What an open gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// To use the file by, until `release`.
    pub handle: HandleId,
    /// Attributes as of the open.
    pub attributes: Attributes,
    /// Nobody but this client changed the content since the last open here: pages and attributes that the
    /// kernel cached may stay (FUSE's `FOPEN_KEEP_CACHE`).
    pub keep_cache: bool,
}

/// Who a new inode belongs to and what may be done with it. The umask is already applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creation {
    /// Permission bits, set-id and sticky bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The name.
    pub name: Name,
    /// What it names.
    pub inode: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// Its attributes, when asked for and the inode still existed.
    pub attributes: Option<Attributes>,
}

/// A run of a directory's names, in name order. `.` and `..` are not among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryPage {
    /// The names.
    pub entries: Vec<DirectoryEntry>,
    /// Whether the directory ends here.
    pub end: bool,
}

/// What statfs(2) shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statfs {
    /// Bytes of the volume, one copy counted.
    pub capacity_bytes: u64,
    /// Bytes that can still be written.
    pub free_bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

/// Where a file lies: `milpa info PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLocation {
    /// The inode.
    pub attributes: Attributes,
    /// Which of the volume's meta partitions has the inode.
    pub meta_slot: MetaSlot,
    /// That partition.
    pub meta_partition: PartitionId,
    /// Its replicas.
    pub meta_members: Vec<NodeId>,
    /// Bytes that live in the inode itself.
    pub inline_bytes: u64,
    /// The extents; what they leave out are holes.
    pub segments: Vec<SegmentLocation>,
}

/// A run of a file's bytes and the nodes that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLocation {
    /// First byte within the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The data partition.
    pub partition: PartitionId,
    /// The extent in it.
    pub extent: ExtentId,
    /// First byte within the extent.
    pub extent_offset: u64,
    /// Whether the inode knows that it is on all members' disks: within a second or so of an fsync.
    pub flushed: bool,
    /// The partition's epoch as this client knows it.
    pub epoch: Epoch,
    /// The member that orders appends.
    pub primary: NodeId,
    /// All members.
    pub members: Vec<NodeId>,
}

/// How long the kernel may keep what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// A name and what it names.
    pub entry: Duration,
    /// Attributes.
    pub attributes: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_table() {
        let flags = OpenFlags::from_bits(libc::O_WRONLY | libc::O_DSYNC);
        assert!(flags.write && !flags.read && flags.sync && !flags.truncate);
        assert_eq!(OpenFlags::from_bits(libc::O_RDONLY), OpenFlags::read_only());
        assert_eq!(OpenFlags::from_bits(libc::O_RDWR), OpenFlags::read_write());
    }
}
