//! The state machine of one meta partition: namespace, sessions, cross-partition operations.
//!
//! Pure and deterministic: [`Partition::apply`] takes the entries of the partition's Raft log in
//! order and every replica that applied the same entries holds the same state (compare
//! [`Partition::hash`]).

mod command;
mod snapshot;

use milpa_types::{MetaError, MetaSlot, PartitionId, SessionId, VolumeId, VolumeOptions};
use milpa_wire::meta::{
    CreateMetaPartition, ExtentOffer, MetaRead, MetaReply, MetaStatistics, OperationId, RequestId,
    Verdict,
};

pub use command::{Applied, Command, Finished, FreeOrder, Outcome, PendingStep};
pub use snapshot::{RestoreError, Snapshot, SnapshotHeader, restore};

/// What a partition is, given at its creation and the same on all replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionSetup {
    /// Id and Raft group.
    pub partition: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// Which inode ids it owns.
    pub slot: MetaSlot,
    /// The volume's options.
    pub options: VolumeOptions,
}

impl From<&CreateMetaPartition> for PartitionSetup {
    fn from(create: &CreateMetaPartition) -> PartitionSetup {
        PartitionSetup {
            partition: create.partition,
            volume: create.volume,
            slot: create.slot,
            options: create.options.clone(),
        }
    }
}

/// The state of one replica of a meta partition.
pub struct Partition {
    setup: PartitionSetup,
    applied: u64,
}

impl Partition {
    /// An empty partition at log index 0. The volume's first one holds the root directory.
    #[must_use]
    pub fn new(setup: PartitionSetup) -> Partition {
        Partition { setup, applied: 0 }
    }

    /// What it is. Its options are the latest that were applied.
    #[must_use]
    pub fn setup(&self) -> &PartitionSetup {
        &self.setup
    }

    /// Log index of the last entry in the state.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Applies the entry at `index`. Never applies an index twice: one at or below
    /// [`applied`](Partition::applied) changes nothing and yields `OutcomeUnknown`.
    pub fn apply(&mut self, index: u64, command: &Command) -> Applied {
        let _ = command;
        self.applied = index;
        Applied::reply(Err(MetaError::Busy))
    }

    /// Passes over an entry that is not a command (Raft's empty and configuration entries).
    pub fn skip(&mut self, index: u64) {
        self.applied = self.applied.max(index);
    }

    /// Answers a read. Linearizable if the caller is a leader whose lease holds when the answer
    /// leaves. `reader` is the asking session where known: an unlinked inode that another session
    /// holds open is then `Stale` to it.
    #[must_use]
    pub fn read(&self, reader: Option<SessionId>, read: &MetaRead) -> MetaReply {
        let _ = (reader, read);
        Err(MetaError::Busy)
    }

    /// Whether the request was applied already, so that a repeat needs no entry of its own.
    /// `None`: propose it (also when the session is unknown).
    #[must_use]
    pub fn answered(&self, id: &RequestId) -> Option<Outcome> {
        let _ = id;
        None
    }

    /// The next step of each unfinished operation that this partition coordinates, oldest first,
    /// at most `limit`. A new leader sends them all; later ones come from
    /// [`operation_step`](Partition::operation_step) after each `Advance`.
    #[must_use]
    pub fn next_steps(&self, limit: usize) -> Vec<PendingStep> {
        let _ = limit;
        Vec::new()
    }

    /// The next step of one operation; `None` when nothing of it is left to do.
    #[must_use]
    pub fn operation_step(&self, operation: OperationId) -> Option<PendingStep> {
        let _ = operation;
        None
    }

    /// Answers `Step::Inquire`: whether this partition coordinates the operation and has not
    /// finished it. Ask a leader whose lease holds.
    #[must_use]
    pub fn knows_operation(&self, operation: OperationId) -> bool {
        let _ = operation;
        false
    }

    /// Operations of other partitions that have intents here, at most `limit`. The shell asks the
    /// coordinator of an old one (`Step::Inquire`), and proposes `Participate` with `Step::Abort`
    /// if it is not known there.
    #[must_use]
    pub fn intents(&self, limit: usize) -> Vec<OperationId> {
        let _ = limit;
        Vec::new()
    }

    /// Bytes to free with order numbers above `after`, lowest first, at most `limit`.
    #[must_use]
    pub fn free_orders(&self, after: u64, limit: usize) -> Vec<FreeOrder> {
        let _ = (after, limit);
        Vec::new()
    }

    /// What would become of offered bytes. `Keep` and `Wait` may be sent as they are; before a
    /// `Delete` is sent it must be decided by an entry, [`Command::JudgeOffers`].
    #[must_use]
    pub fn verdict(&self, offer: &ExtentOffer) -> Verdict {
        let _ = offer;
        Verdict::Wait
    }

    /// The sessions that live, for the leader's lease timers.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        Vec::new()
    }

    /// Whether the session lives here.
    #[must_use]
    pub fn has_session(&self, session: SessionId) -> bool {
        let _ = session;
        false
    }

    /// Counts.
    #[must_use]
    pub fn statistics(&self) -> MetaStatistics {
        MetaStatistics::default()
    }

    /// Hash of the whole state: equal on replicas that applied the same entries.
    #[must_use]
    pub fn hash(&self) -> u64 {
        0
    }

    /// Freezes the state at [`applied`](Partition::applied), whose Raft term the caller knows.
    /// Takes microseconds whatever the size.
    #[must_use]
    pub fn begin_snapshot(&self, term: u64) -> Snapshot {
        snapshot::freeze(SnapshotHeader {
            format: 1,
            partition: self.setup.partition,
            volume: self.setup.volume,
            slot: self.setup.slot,
            options: self.setup.options.clone(),
            index: self.applied,
            term,
            counts: Vec::new(),
        })
    }
}
