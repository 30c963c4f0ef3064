//! The client of a volume: what FUSE, the command line and every gateway stand on.
//!
//! [`Client`] is a low-level VFS: operations take inode ids and handles, not paths, so that a FUSE
//! adapter is a translation and nothing more. [`path`] adds paths on top, for commands and tests.
//!
//! # How a file is written
//!
//! write(2) puts bytes into a bounded buffer and returns. What is buffered is *pushed*: cut into
//! packets of 128 KiB and appended to an extent (primary-backup), or, where the file already has
//! committed bytes, replaced in place (Raft). Pushed bytes become part of the file when they are
//! *published* to the inode's partition. `flush` (close) pushes and publishes; `fsync` also has
//! every member of every unflushed extent flush its disk. Bytes leave the buffer only when all
//! members have acknowledged them, so whatever fails before that is sent again elsewhere.
//!
//! Per inode there is one `file` state in this client, shared by all its handles: what one handle
//! wrote, every other reads at once. Between clients the promise is close-to-open.
//!
//! # Cancellation
//!
//! Every future may be dropped at any point. Reads simply stop. Changes go on in the background
//! until their outcome is known or their deadline passes, because a half-forgotten request could
//! otherwise be carried out after a later one (see `detach`).
//!
//! # What is deliberately absent
//!
//! The kernel's protocol and its caches (`milpa-fuse`), and any server's belief: partitions, epochs
//! and leaders in the caches here are hints which the servers check with every request.

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod config;
pub mod error;
pub mod handle;
pub mod path;
pub mod transport;

mod cache;
mod call;
mod client;
mod core;
mod data;
mod directory;
mod file;
mod flights;
mod inner;
mod marks;
mod meta;
mod names;
mod placement;
mod ranges;
mod segments;
mod session;
mod stats;
mod view;
mod window;

pub use client::Client;
pub use config::{ClientConfig, ConnectError};
pub use error::FsError;
pub use handle::{
    Creation, DirectoryEntry, DirectoryPage, FileLocation, HandleId, OpenFile, OpenFlags,
    SegmentLocation, Statfs, Timeouts,
};
