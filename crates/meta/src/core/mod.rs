//! The state machine of one meta partition: namespace, content maps, sessions, cross-partition
//! operations (CFS 2.1, 2.3.2 and 3; DESIGN.md section 4).
//!
//! Pure and deterministic: [`Partition::apply`] takes the entries of the partition's Raft log in
//! order, and every replica that applied the same entries holds the same state (compare
//! [`Partition::hash`]). The leader's shell adds what a state machine must not have: it proposes
//! entries, tells clients their outcomes, sends the steps of [`Partition::next_steps`] to other
//! partitions, frees what [`Partition::free_orders`] lists, and watches the leases of
//! [`Partition::sessions`].
//!
//! # Map
//!
//! * `command`: what is in an entry, and what it yields.
//! * `op/`: the operations, one file each, made of the moves in `namespace` and `content`.
//! * `engine`: how an operation is planned and committed, in one entry or across partitions;
//!   `participant`: the other side of it.
//! * `sessions`: leases and the request-id table; `offers`: unpublished bytes.
//! * `read`: what changes nothing; `check`: whether all this is so; `repair`: what is done if not.
//! * `table` and `tree`: all state is in copy-on-write trees of bytes; `snapshot` writes them.
//!
//! # Invariants
//!
//! * A dentry of this partition whose inode belongs here has that inode.
//! * An inode's link count is the number of dentries that name it, in any partition (2 and one for
//!   each subdirectory, for a directory), prepared links included.
//! * A directory's size is the number of its dentries.
//! * An inode without links is held by a session that lives.
//! * A request is applied at most once, as long as its session lives; after that, never.
//!
//! # What is deliberately absent
//!
//! Permission checks (the client's kernel makes them, `default_permissions`), access times (clients
//! set them), clocks, leases and leadership (the shell), quotas and locks of files (later), and any
//! isolation of cross-partition operations beyond their locks (with the POSIX work).

mod check;
mod command;
mod content;
mod engine;
mod inode;
mod namespace;
mod offers;
mod op;
mod participant;
mod read;
mod repair;
mod sessions;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod tree;

use milpa_types::{
    InodeId, MetaError, MetaSlot, PartitionId, SessionId, Timestamp, VolumeId, VolumeOptions,
};
use milpa_wire::meta::{
    CreateMetaPartition, ExtentOffer, MetaAnswer, MetaRead, MetaReply, MetaStatistics, MetaWrite,
    OperationId, RequestId, Verdict,
};

pub use command::{Applied, Command, Finished, FreeOrder, Outcome, PendingStep};
use engine::Request;
use inode::Inode;
pub use snapshot::{RestoreError, SNAPSHOT_FORMAT, Snapshot, SnapshotHeader, restore, verify};
use table::{Counters, Number, Tables};

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
    tables: Tables,
    counters: Counters,
}

impl Partition {
    /// An empty partition at log index 0. The volume's first one holds the root directory.
    #[must_use]
    pub fn new(setup: PartitionSetup) -> Partition {
        let counters = Counters {
            next_inode: setup.slot.first_inode(),
            end_inode: setup.slot.end_inode(),
            next_order: 1,
            allocated_bytes: 0,
        };
        let mut partition = Partition { setup, applied: 0, tables: Tables::default(), counters };
        if partition.owns(InodeId::ROOT) {
            let kind = milpa_types::FileKind::Directory;
            let root = Inode::new(kind, 0o755, 0, 0, Timestamp(0));
            partition.tables.inodes.insert(&InodeId::ROOT, &root);
            partition.counters.next_inode = InodeId(InodeId::ROOT.0 + 1);
        }
        partition
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
        if index <= self.applied {
            return Applied::reply(Err(MetaError::OutcomeUnknown));
        }
        self.applied = index;
        let reply = match command {
            Command::Client { id, now, write } => {
                let outcome = self.client(index, *id, *now, write);
                return Applied { outcome, finished: None };
            }
            Command::Advance { operation, number, outcome } => {
                return self.advance(*operation, *number, outcome);
            }
            Command::AbortOperation { operation } => return self.abort(*operation),
            Command::Participate { operation, now, step } => {
                self.participate(index, *operation, *now, step)
            }
            Command::ExpireSession { session } => self.end_session(index, *session),
            Command::ConfirmFreed { orders } => {
                for order in orders {
                    self.tables.freed.remove(&Number(*order));
                }
                Ok(MetaAnswer::Done)
            }
            Command::Split { end } => self.split(*end),
            Command::SetOptions { options } => {
                self.setup.options = options.clone();
                Ok(MetaAnswer::Done)
            }
            Command::JudgeOffers { offers } => self.judge_offers(index, offers),
            Command::Repair { now, repair } => self.repair(*now, repair),
        };
        Applied::reply(reply)
    }

    fn client(&mut self, index: u64, id: RequestId, now: Timestamp, write: &MetaWrite) -> Outcome {
        match write {
            MetaWrite::OpenSession => return Outcome::Reply(self.open_session(id.session, now)),
            MetaWrite::CloseSession => return Outcome::Reply(self.end_session(index, id.session)),
            _ => {}
        }
        if let Some(outcome) = self.refuse(&id) {
            return outcome;
        }
        let outcome = self.execute(index, &Request { id, now, write: write.clone() });
        self.record(&id, &outcome);
        outcome
    }

    /// Passes over an entry that is not a command (Raft's empty and configuration entries).
    pub fn skip(&mut self, index: u64) {
        self.applied = self.applied.max(index);
    }

    /// Answers a read. Linearizable if the caller is a leader whose lease holds when the answer
    /// leaves. `reader` is the asking session where known: an unlinked inode that another session
    /// holds open is then `Stale` to it.
    pub fn read(&self, reader: Option<SessionId>, read: &MetaRead) -> MetaReply {
        self.answer(reader, read)
    }

    /// Whether the request was applied already, so that a repeat needs no entry of its own.
    /// `None`: propose it (also when the session is unknown).
    #[must_use]
    pub fn answered(&self, id: &RequestId) -> Option<Outcome> {
        self.recorded(id)
    }

    /// The next step of each unfinished operation that this partition coordinates, oldest first,
    /// at most `limit`. A new leader sends them all; later ones come from
    /// [`operation_step`](Partition::operation_step) after each `Advance`.
    #[must_use]
    pub fn next_steps(&self, limit: usize) -> Vec<PendingStep> {
        let operations = self.tables.operations.iter().take(limit);
        operations.map(|(id, operation)| self.pending_step(id, &operation)).collect()
    }

    /// The next step of one operation; `None` when nothing of it is left to do.
    #[must_use]
    pub fn operation_step(&self, operation: OperationId) -> Option<PendingStep> {
        let record = self.tables.operations.get(&operation)?;
        Some(self.pending_step(operation, &record))
    }

    /// Answers `Step::Inquire`: whether this partition coordinates the operation and has not
    /// finished it. Ask a leader whose lease holds.
    #[must_use]
    pub fn knows_operation(&self, operation: OperationId) -> bool {
        self.tables.operations.contains(&operation)
    }

    /// Operations of other partitions that have intents here, at most `limit`. The shell asks the
    /// coordinator of an old one (`Step::Inquire`), and proposes `Participate` with `Step::Abort`
    /// if it is not known there.
    #[must_use]
    pub fn intents(&self, limit: usize) -> Vec<OperationId> {
        let mut operations: Vec<_> =
            self.tables.intents.iter().take(limit).map(|((operation, _), _)| operation).collect();
        operations.dedup();
        operations
    }

    /// Bytes to free with order numbers above `after`, lowest first, at most `limit`.
    #[must_use]
    pub fn free_orders(&self, after: u64, limit: usize) -> Vec<FreeOrder> {
        self.free_orders_above(after).take(limit).collect()
    }

    /// Bytes to free with order numbers above `after`, lowest first.
    pub fn free_orders_above(&self, after: u64) -> impl Iterator<Item = FreeOrder> {
        self.tables.free_orders_above(after)
    }

    /// The number of the last free order that was given; 0 for none.
    #[must_use]
    pub fn last_free_order(&self) -> u64 {
        self.counters.next_order.saturating_sub(1)
    }

    /// What would become of offered bytes. `Keep` and `Wait` may be sent as they are; before a
    /// `Delete` is sent it must be decided by an entry, [`Command::JudgeOffers`].
    #[must_use]
    pub fn verdict(&self, offer: &ExtentOffer) -> Verdict {
        self.judge(offer)
    }

    /// The sessions that live, for the leader's lease timers.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        self.tables.sessions.iter().map(|(id, _)| id).collect()
    }

    /// Whether the session lives here.
    #[must_use]
    pub fn has_session(&self, session: SessionId) -> bool {
        self.tables.sessions.contains(&session)
    }

    /// Counts.
    #[must_use]
    pub fn statistics(&self) -> MetaStatistics {
        self.count()
    }

    /// Hash of the whole state: equal on replicas that applied the same entries. Kept up to date
    /// by every change, so asking costs nothing.
    #[must_use]
    pub fn hash(&self) -> u64 {
        let rest = milpa_wire::encode(&(&self.counters, &self.setup.options));
        let trees = self.tables.trees().into_iter();
        trees.fold(tree::hash_bytes(0, &rest), |hash, tree| {
            tree::hash_bytes(hash, &tree.hash().to_le_bytes())
        })
    }
}
