//! The meta node: the namespace of volumes, in partitions that are Raft groups.
//!
//! [`core`] is the state machine of one partition, sans-IO. Everything else here is the shell that
//! runs hundreds of them on one thread ([`run`]): one shared Raft log, one frame per peer node and
//! turn, snapshots beside the work.
//!
//! # What is deliberately absent
//!
//! Placement (the manager's), caches and retries of clients (`milpa-client`), file content. Meta
//! nodes know data nodes only to have freed bytes deleted there.

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod access;
pub mod config;
pub mod core;
#[cfg(any(test, feature = "decoders"))]
pub mod decoders;
mod node;

pub use config::MetaNodeConfig;
pub use node::{NodeError, Started, run, run_announced};
