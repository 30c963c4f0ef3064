//! Appends by primary-backup (CFS 2.2.4), as two pure state machines.
//!
//! The [`Primary`] gives every append its extent and its offset, has it written here and on all
//! other members at once, and acknowledges it when all of them have it: the *commit offset* of an
//! extent is the end of the longest run of acknowledged operations. The [`Backup`] accepts bytes
//! only at its end of the extent, only from the primary of its own epoch.
//!
//! Small files share extents: pieces that arrive while an operation of the shared extent is under
//! way are gathered into the next one.
//!
//! # Invariants
//!
//! * An extent is appended in one epoch only, by that epoch's primary; its id carries the epoch,
//!   so that ids given by different primaries can never meet.
//! * An id is used only after a higher bound for it is on disk ([`Effect::ReserveIds`]): also
//!   after a power cut nobody gives it out again, and no published key ever finds another file's
//!   bytes.
//! * After the first failure of an extent nothing is added to it (its replicas may differ above
//!   the commit offset); the writer goes on in another one, and alignment makes it whole.
//! * A repeat is recognized by (session, token) or by its offset, and answered, not applied.
//!
//! # What is deliberately absent
//!
//! Bytes: the cores see lengths and the shell's request numbers. Clocks, sockets, files: time
//! comes with the events, and [`Effect`]s are performed by the shell, in order.

mod backup;
mod primary;
#[cfg(test)]
mod tests;
mod tokens;

pub use backup::{Backup, BackupEffect, Replica, ReplicateHead};
pub use primary::Primary;

use milpa_types::{DataError, Epoch, ExtentId, InodeId, NodeId, SessionId};
use milpa_wire::data::AppendTarget;

/// The shell's name for one client request: it holds the payload and the way to answer.
pub type RequestNumber = u64;
/// Names one operation of a primary: bytes on their way to all members.
pub type OperationNumber = u64;

/// Bounds of one partition's primary.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests under way; above it they are answered `Busy`.
    pub requests_max: usize,
    /// Open extents; above it a new one is answered `Busy`.
    pub extents_max: usize,
    /// A shared extent of this many bytes is closed.
    pub small_extent_bytes_max: u64,
    /// Bytes of one batch of pieces, headers included.
    pub batch_bytes_max: u64,
    /// Bytes that precede each piece.
    pub piece_header_bytes: u64,
    /// A member that has not answered for this long breaks the extent; four times as long when
    /// it has to flush.
    pub member_silent_ms: u64,
    /// An extent that nobody appended to for this long is closed.
    pub idle_ms: u64,
    /// Tokens that are remembered for repeats.
    pub tokens_max: usize,
}

/// What the primary needs to know of an append.
#[derive(Clone, Copy, Debug)]
pub struct AppendHead {
    /// The client's epoch.
    pub epoch: Epoch,
    /// For which file.
    pub inode: InodeId,
    /// By whom.
    pub session: SessionId,
    /// Where to.
    pub target: AppendTarget,
    /// Bytes.
    pub length: u64,
    /// Answer when they are on all members' disks.
    pub sync: bool,
}

/// Where acknowledged bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The extent.
    pub extent: ExtentId,
    /// Where the payload's first byte went.
    pub offset: u64,
    /// Bytes below this are on all members.
    pub committed: u64,
}

/// Bytes to be written here and on other members, at a place that they must all agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Its name, for the reports of how it went.
    pub operation: OperationNumber,
    /// The extent; made at offset 0.
    pub extent: ExtentId,
    /// Where.
    pub offset: u64,
    /// Whose bytes, in order. In a shared extent each is preceded by its header. Empty for a
    /// barrier, which only flushes.
    pub requests: Vec<RequestNumber>,
    /// The writer of an extent of its own.
    pub owner: (InodeId, SessionId),
    /// Flush before answering.
    pub sync: bool,
    /// Commit offset as of now, for the backups.
    pub committed: u64,
    /// The other members.
    pub backups: Vec<NodeId>,
}

/// An order to the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write here and send to the backups, in parallel; report each by [`Primary::member_done`].
    Start(Start),
    /// Answer the client, and forget the request.
    Answer {
        /// Which request.
        request: RequestNumber,
        /// How it went.
        result: Result<Placed, DataError>,
    },
    /// Note the commit offset here, and tell the backups: no operation will.
    Announce {
        /// The extent.
        extent: ExtentId,
        /// Its commit offset.
        committed: u64,
    },
    /// Nothing more is added, and all members have exactly `length` bytes: it may be sealed.
    Closed {
        /// The extent.
        extent: ExtentId,
        /// Its length.
        length: u64,
    },
    /// Nothing more is added, and members may differ above `committed`: it must be aligned.
    Broken {
        /// The extent.
        extent: ExtentId,
        /// Bytes that all members have.
        committed: u64,
    },
    /// Make durable that ids below this may have been given, then call
    /// [`Primary::ids_reserved`].
    ReserveIds {
        /// The bound.
        until: u32,
    },
}
