//! The words of MilpaFS as Rust types: ids, attributes, layouts, topology and errors.
//!
//! Everything here is plain data. The crate imports nothing of ours, does no I/O and knows no
//! protocol: what travels between processes is composed of these types in `milpa-wire`.

mod attributes;
mod deletion;
mod error;
mod ids;
mod layout;
mod name;
mod topology;

pub use attributes::{AttributeChanges, Attributes, FileKind, NewTime, Timestamp, without_set_id};
pub use deletion::{Deletion, LogEnd};
pub use error::{DataError, ManagerError, MetaError, Next};
pub use ids::{
    ClusterId, DiskId, Epoch, ExtentId, INODES_PER_PARTITION, InodeId, Life, MetaSlot, NodeId,
    PartitionId, SessionId, VolumeId,
};
pub use layout::{
    BLOCK_BYTES, Column, Columns, EXTENT_BYTES_MAX, FreedRange, PACKET_BYTES, Segment,
};
pub use name::{NAME_BYTES_MAX, Name, NameError, SYMLINK_BYTES_MAX};
pub use topology::{
    DEFAULT_ZONE, DataPartition, Disk, Durability, MetaPartition, Node, NodeState, Role, Volume,
    VolumeOptions, VolumeView, free_bytes, is_volume_name,
};
