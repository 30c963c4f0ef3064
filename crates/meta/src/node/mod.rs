//! The shell that runs the partitions of one node.

pub mod snapshot_file;
pub mod snapshot_store;
