//! MultiRaft: many Raft groups on one node, one write-ahead log, one frame per pair of nodes and
//! turn.
//!
//! The consensus itself is tikv's `raft` 0.7; no type of it appears in this interface. Everything
//! else is ours: the log on disk ([`wal`]), the wire format ([`message`]), the node-level core
//! that ties hundreds of groups together ([`MultiRaft`]), and a thin shell with the one thread
//! that flushes ([`shell`]).
//!
//! # How a node uses it
//!
//! 1. Open the log: [`Wal::open`] returns the log and [`Recovered`], what it held.
//! 2. Make a [`MultiRaft`], hand it the recovered groups with [`MultiRaft::recover`], and say how
//!    far each state machine had come ([`GroupStart`]).
//! 3. Start a [`LogWriter`] on the log, and put both into a [`RaftDriver`].
//! 4. Loop: wait for a frame, a request, the clock or the log; tell the core; `pump`.
//!
//! ```no_run
//! use std::time::Instant;
//! use milpa_raft::{
//!     Committed, FileStorage, Frame, LogWriter, MultiRaft, Outbox, Payload, RaftConfig,
//!     RaftDriver, Turn, Wal, WalOptions,
//! };
//! use milpa_types::{NodeId, PartitionId};
//!
//! struct Node { /* connections, state machines */ }
//!
//! impl Outbox for Node {
//!     fn send(&mut self, to: NodeId, frame: Frame) {
//!         // Queue `frame.encode_parts()` on the one ordered connection to `to`. If there is
//!         // none, drop it and call `MultiRaft::report_unreachable`.
//!         let _ = (to, frame);
//!     }
//!     fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
//!         for entry in &entries {
//!             if let Payload::Data(_bytes) = &entry.payload { /* apply, answer the client */ }
//!         }
//!         let _ = group;
//!         // The index up to which the state machine has come, if it applies at once.
//!         entries.last().map(|entry| entry.position.index)
//!     }
//!     fn perform(&mut self, turn: Turn) {
//!         // Role changes, finished reads, snapshot requests.
//!         let _ = turn;
//!     }
//! }
//!
//! # async fn frames_from_the_network() -> (NodeId, bytes::Bytes) { std::future::pending().await }
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let storage = FileStorage::open(std::path::Path::new("/var/lib/milpa/raft"))?;
//! let (wal, recovered) = Wal::open(storage, WalOptions::new([7; 16], 0x5eed))?;
//! let start = Instant::now();
//! let clock = || u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
//!
//! let mut multi = MultiRaft::new(NodeId(1), RaftConfig::default(), 0x5eed)?;
//! let refused = multi.recover(recovered, &Default::default(), clock());
//! assert!(refused.is_empty(), "report each to the manager; see RecoverError");
//! let mut driver = RaftDriver::new(multi, LogWriter::spawn(wal)?);
//! let mut node = Node {};
//! let mut ticks = tokio::time::interval(driver.multi.tick_interval());
//! loop {
//!     tokio::select! {
//!         (from, bytes) = frames_from_the_network() => {
//!             // Read the clock after the frame has arrived, never before: see `step_frame`.
//!             driver.multi.step_frame(from, bytes, clock())?;
//!         }
//!         _ = ticks.tick() => driver.multi.tick(clock()),
//!         progress = driver.writer.progressed() => driver.on_log(progress, clock()),
//!     }
//!     driver.pump(clock(), &mut node)?;
//! }
//! # }
//! ```
//!
//! A leader's proposals go in with [`MultiRaft::propose`], which answers with a [`LogPosition`];
//! the client is answered when that position comes out of the state machine *with the same term*
//! (another term means that the proposal was lost).
//!
//! Replicas are created with [`MultiRaft::create_group`]; tell the manager so when
//! [`MultiRaft::is_durable`] says it. The owner decides when to compact
//! ([`MultiRaft::describe`], make a snapshot, [`MultiRaft::set_snapshot`],
//! [`MultiRaft::compact`]); a group that never compacts holds the log's old segments.
//!
//! # Invariants
//!
//! * No message that promises durability leaves before the flush it promises has returned.
//! * Committed entries come out once, in order, and only when this node's own log has them
//!   durably.
//! * At equal seeds and equal calls, two runs produce equal output.
//!
//! # What is deliberately absent
//!
//! The core has no clock, socket, file, thread or randomness of its own. Sockets and the loop
//! belong to the meta, data and manager shells. Snapshot contents never pass through here: only
//! their descriptors do. Proposals are not forwarded: a follower answers `NotLeader`.

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod config;
mod convert;
#[cfg(any(test, feature = "decoders"))]
pub mod decoders;
mod group;
mod lease;
mod memlog;
pub mod message;
pub mod multi;
pub mod shell;
pub mod types;
pub mod wal;

pub use config::RaftConfig;
pub use group::word_of_term;
pub use message::{Frame, FrameError};
pub use multi::{MultiRaft, RecoverError, Turn};
pub use shell::{DriveError, LogProgress, LogWriter, Outbox, RaftDriver};
pub use types::{
    Committed, FollowerState, FollowerStatus, GroupStart, GroupStatus, InstallSnapshot,
    LogPosition, MemberChange, Members, Payload, ProposeError, ReadReady, Role, RoleChange,
    SnapshotDescriptor, SnapshotWanted,
};
pub use wal::{
    Damage, FileStorage, LogBatch, LogStorage, Record, Recovered, RecoveredGroup, Wal, WalError,
    WalOptions,
};
