//! Identifiers. Each is a distinct type, so that an extent can never be passed for an inode.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A server process that the manager has registered. Given once, never reused.
    NodeId(u32)
}
id! {
    /// One directory on one disk of a data node, or the log directory of a meta node.
    DiskId(u32)
}
id! {
    /// A volume: one file system as a client sees it.
    VolumeId(u32)
}
id! {
    /// A meta or data partition, unique in the cluster. It is also the id of the partition's Raft
    /// group. 0 is the manager's own group.
    PartitionId(u64)
}
id! {
    /// An extent within one data partition. Rising, never reused.
    ExtentId(u64)
}
id! {
    /// The version of a partition's replica set. The manager raises it at every change; every
    /// data-path request carries it, and a stale one is refused.
    Epoch(u64)
}

/// How many inode ids one meta partition owns (DESIGN.md section 4): 2^40.
pub const INODES_PER_PARTITION: u64 = 1 << 40;

/// An inode of one volume. Partition `k` of the volume owns the ids `[k·2^40, (k+1)·2^40)`.
/// Ids rise within a partition and are never reused, so the FUSE generation is always 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct InodeId(pub u64);

impl InodeId {
    /// The root directory, in the volume's first meta partition. FUSE requires the number 1.
    pub const ROOT: InodeId = InodeId(1);

    /// Which of the volume's meta partitions owns this inode.
    #[must_use]
    pub fn slot(self) -> MetaSlot {
        MetaSlot((self.0 / INODES_PER_PARTITION) as u32)
    }
}

impl fmt::Display for InodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

id! {
    /// The ordinal of a meta partition within its volume: the `k` that decides its inode ids.
    MetaSlot(u32)
}

impl MetaSlot {
    /// The first inode id of this slot. Slot 0 starts at the root inode, as id 0 means "none".
    #[must_use]
    pub fn first_inode(self) -> InodeId {
        InodeId((u64::from(self.0) * INODES_PER_PARTITION).max(InodeId::ROOT.0))
    }

    /// One past the last inode id of this slot.
    #[must_use]
    pub fn end_inode(self) -> InodeId {
        InodeId((u64::from(self.0) + 1) * INODES_PER_PARTITION)
    }
}

/// A client's lease, drawn at random by the client. It names who may still be holding files open.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct SessionId(pub u128);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Which life of a node this is: a node that starts tells the managers its last one and its next one, both
/// drawn at random by itself. They know the newest. An old copy of a node's directory tells of one that is
/// over, however often it is started, and is refused: it has forgotten what the node has promised since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Life {
    /// The last one that the node knows to have begun.
    pub last: u128,
    /// The one that begins now. The same as `last` if the node had no room to write down another.
    pub next: u128,
}

impl Life {
    /// Whether it follows on the newest life that is known of the node, or is that one: then the answer
    /// to its beginning was lost.
    #[must_use]
    pub fn follows(self, newest: u128) -> bool {
        newest == self.last || newest == self.next
    }
}

/// Drawn at random when a cluster is created. A node or client of another cluster is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClusterId(pub u128);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
