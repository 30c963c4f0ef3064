//! The ports to the outside world and their real implementations: connections, keys, data
//! directories, clocks, logs and metrics.
//!
//! Shells use this crate; cores never do. It knows how bytes travel and who may speak, and nothing
//! of inodes, extents or policy.

pub mod address_book;
pub mod clock;
mod connection;
mod handshake;
pub mod keys;
pub mod managers;
pub mod node_directory;
pub mod rpc;
pub mod telemetry;
