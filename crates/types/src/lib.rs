//! The words of MilpaFS as Rust types: ids, inodes, dentries, extent keys, topology and errors.
//!
//! Everything here is plain data. The crate imports nothing of ours, does no I/O and knows no
//! protocol: what travels between processes is composed of these types in `milpa-wire`.

mod ids;

pub use ids::{
    ClusterId, DiskId, Epoch, ExtentId, INODES_PER_PARTITION, InodeId, MetaSlot, NodeId,
    PartitionId, SessionId, VolumeId,
};
