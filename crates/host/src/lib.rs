//! The ports to the outside world and their real implementations, and what all servers build on
//! them: connections with proven peers, keys, data directories, logs and metrics.
//!
//! | port | what it reaches |
//! |---|---|
//! | [`net`] | byte streams |
//! | [`disk`] | files and directories |
//! | [`clock`] | time |
//! | [`jobs`] | threads, for what blocks |
//! | [`entropy`] | randomness |
//! | [`world`] | the switch: whether this thread's ports are real or simulated |
//!
//! Shells use this crate; cores never do. It knows how bytes travel and who may speak, and nothing
//! of inodes, extents or policy.

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod address_book;
pub mod clock;
mod connection;
#[cfg(any(test, feature = "decoders"))]
pub mod decoders;
pub mod descriptors;
mod detour;
pub mod disk;
pub mod entropy;
mod handshake;
pub mod jobs;
pub mod keys;
pub mod lives;
pub mod managers;
pub mod net;
pub mod node_directory;
pub mod rpc;
pub mod telemetry;
pub mod world;
