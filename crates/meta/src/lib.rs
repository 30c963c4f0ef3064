//! The meta node: the namespace of volumes, in partitions that are Raft groups.
//!
//! The core is the state machine of one partition, sans-IO. Everything else here is the shell that
//! runs hundreds of them on one thread: one shared Raft log, one frame per peer node and turn,
//! snapshots beside the work.

pub mod access;
pub mod config;
pub mod core;
pub mod node;

pub use config::MetaNodeConfig;
