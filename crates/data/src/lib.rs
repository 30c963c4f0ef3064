//! Data nodes: where file content lies.
//!
//! A data partition is an extent store that is replicated in two ways (CFS 2.2.4): appends by
//! primary-backup ([`append`]), overwrites in place by Raft. Who takes part is decided by the
//! manager and committed in the partition's own Raft group, which is thereby the fence for both
//! (DESIGN.md section 5).
//!
//! | module | what it is | what it does not know |
//! |---|---|---|
//! | [`store`] | extents on one disk: blocks, checksums, holes, flushes | replication, network |
//! | [`append`] | core: who gets which bytes, when is an append acknowledged | bytes, sockets, files, clocks |
//! | [`alignment`] | core: how long is an extent after a failure, who must fetch or cut | the same |
//! | [`overwrite`] | what a Raft entry of a data partition says; what waits to be applied | the same |
//! | [`offers`] | core: which unpublished bytes are offered to the inode's partition, when | the same |
//! | [`scrub`] | core: what is read again next, and when | the same |
//! | [`node`] | the shell: one task for each disk, its threads, requests, heartbeats | file names, inodes |

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod alignment;
pub mod append;
pub mod config;
#[cfg(any(test, feature = "decoders"))]
pub mod decoders;
pub mod node;
pub mod offers;
pub mod overwrite;
pub mod scrub;
pub mod store;

pub use config::{DataNodeConfig, DiskConfig};
pub use node::{NodeError, Started, run, run_announced};
