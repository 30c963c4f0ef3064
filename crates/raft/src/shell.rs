//! The thread that flushes, and the helper that keeps a node's loop short.
#![allow(unused_variables, clippy::unimplemented)]
use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use crate::message::{Frame, FrameError};
use crate::multi::{MultiRaft, Turn};
use crate::types::Committed;
use crate::wal::{Wal, WalError};

/// What the log writer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogProgress {
    /// This batch and all before it are durable.
    Persisted(u64),
    /// A write or flush failed; nothing more will be written.
    Fenced,
}

/// The one thread that writes a log.
pub struct LogWriter {}

impl LogWriter {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn spawn(wal: Wal) -> Result<LogWriter, WalError> {
        unimplemented!()
    }

    /// Waits until there is progress that this method has not yet reported. Cancel-safe.
    pub async fn progressed(&mut self) -> LogProgress {
        unimplemented!()
    }
}

/// What a node does with a turn.
pub trait Outbox {
    /// Send to another node, or drop.
    fn send(&mut self, to: NodeId, frame: Frame);
    /// Apply. Returns the applied index if it is applied already; else the owner calls
    /// [`MultiRaft::applied`] later.
    fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64>;
    /// The rest of the turn: roles, reads, snapshots. `batch`, `messages`, `committed` are empty.
    fn perform(&mut self, turn: Turn);
}

/// A [`MultiRaft`] with its log writer.
pub struct RaftDriver {
    /// The core.
    pub multi: MultiRaft,
    /// The log.
    pub writer: LogWriter,
}

/// The loop must end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriveError {
    /// The log failed.
    #[error("the log is fenced")]
    Fenced,
    /// A peer sent something else than frames.
    #[error("bad frame")]
    Frame(#[from] FrameError),
}

impl RaftDriver {
    /// Puts the two together.
    #[must_use]
    pub fn new(multi: MultiRaft, writer: LogWriter) -> RaftDriver {
        let _ = Bytes::new();
        RaftDriver { multi, writer }
    }

    /// Tells the core what the log reported.
    pub fn on_log(&mut self, progress: LogProgress, now_ms: u64) {
        unimplemented!()
    }

    /// Performs turns until there is nothing to do.
    ///
    /// # Errors
    ///
    /// [`DriveError::Fenced`] when the log has failed.
    pub fn pump(&mut self, now_ms: u64, outbox: &mut impl Outbox) -> Result<(), DriveError> {
        unimplemented!()
    }
}
