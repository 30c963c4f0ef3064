//! The node's state on its one thread, and what it does with each event.
//!
//! The loop ([`super::run`]) drains the inbox into [`Shell::handle`], then lets Raft take its turns
//! with the shell as their outbox ([`super::apply`]). No method here waits: what takes time is a
//! task or a thread that comes back through the inbox.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_raft::{InstallSnapshot, MultiRaft, ProposeError};
use milpa_types::{MetaError, NodeId, PartitionId};
use milpa_wire::meta::OperationId;
use tracing::{debug, error, warn};

use super::context::Context;
use super::inbox::{Asker, Event};
use super::partitions::Removal;
use super::replica::{Proposal, Replica};
use super::responder::Responder;
use super::snapshots::SnapshotJob;
use crate::access;
use crate::core::Command;

/// Everything that the loop owns, but Raft.
pub(crate) struct Shell {
    /// What tasks share.
    pub ctx: Rc<Context>,
    /// The replicas held here, by partition.
    pub replicas: BTreeMap<PartitionId, Replica>,
    /// Partitions held here that cannot take part, and why: reported, never answered for.
    pub damaged: BTreeMap<PartitionId, String>,
    /// Partitions whose definition is being written.
    pub creating: BTreeSet<PartitionId>,
    /// Partitions whose group is not yet durable here, with the manager that waits for it.
    pub founding: BTreeMap<PartitionId, Responder>,
    /// Partitions that were made to join their group, and have not caught up yet.
    pub joining: BTreeSet<PartitionId>,
    /// Those that have, until that is noted.
    pub joined: BTreeSet<PartitionId>,
    /// Partitions whose deletion is being noted, or whose files are about to go.
    pub deleting: BTreeSet<PartitionId>,
    /// Those among them whose files go, and how far that has come.
    pub removable: BTreeMap<PartitionId, Removal>,
    /// Snapshots to fetch, in the order Raft asked for them.
    pub installs: Vec<InstallSnapshot>,
    /// Partitions whose snapshots are written, fetched or read now: one job at a time works in a directory.
    pub snapshot_jobs: BTreeMap<PartitionId, SnapshotJob>,
    /// One owner more for each question of `milpa fsck` that is being answered.
    pub checks: Rc<()>,
    /// Numbers for reads that wait for heartbeats; unique in this process.
    pub next_read: u64,
    /// The next number for a replica that catches up with its group; the first one was drawn by lot.
    pub next_nonce: u64,
    /// Memory in use is above the limit, or the disk is full: no new inodes.
    pub is_full: bool,
    /// The node is about to stop: it leads as little as it can.
    pub leaving: bool,
    /// The partition that was first to send its free orders in the last tick.
    pub freed_first: PartitionId,
}

impl Shell {
    /// With nothing yet. `seed` is another one for each process.
    pub(crate) fn new(ctx: Rc<Context>, seed: u64) -> Shell {
        Shell {
            ctx,
            replicas: BTreeMap::new(),
            damaged: BTreeMap::new(),
            creating: BTreeSet::new(),
            founding: BTreeMap::new(),
            joining: BTreeSet::new(),
            joined: BTreeSet::new(),
            deleting: BTreeSet::new(),
            removable: BTreeMap::new(),
            installs: Vec::new(),
            snapshot_jobs: BTreeMap::new(),
            checks: Rc::default(),
            next_read: 1,
            next_nonce: seed,
            is_full: false,
            leaving: false,
            freed_first: PartitionId::default(),
        }
    }

    /// Acts on one event.
    pub(crate) fn handle(&mut self, multi: &mut MultiRaft, event: Event) {
        match event {
            Event::Request { asker, request, responder } => {
                self.request(multi, asker, request, responder);
            }
            Event::Frame { from, bytes } => step_frame(multi, from, bytes),
            Event::StepAnswered { partition, operation, number, outcome } => {
                self.step_answered(multi, partition, operation, number, outcome);
            }
            Event::Inquired { partition, operation, known } => {
                self.inquired(multi, partition, operation, known);
            }
            Event::ReplicasFound { partition, view } => self.replicas_found(partition, view),
            Event::Freed { partition, batch, answers } => {
                self.freed(multi, partition, &batch, &answers);
            }
            Event::Defined { definition, result, responder } => {
                self.defined(multi, definition, result, responder);
            }
            Event::JoinNoted { partition } => {
                self.joined.remove(&partition);
            }
            Event::DeletionNoted { partition, result, responder } => {
                self.deletion_noted(multi, partition, result, responder);
            }
            Event::Leave => {
                self.leaving = true;
                self.hand_over(multi);
            }
            Event::DirectoryEmptied { partition, is_empty } => {
                self.directory_emptied(partition, is_empty);
            }
            Event::DirectoryRemoved { partition } => {
                self.deleting.remove(&partition);
            }
            Event::SnapshotWritten { partition, identity, written } => {
                self.snapshot_written(multi, partition, &identity, written);
            }
            Event::SnapshotsScrubbed { partition, identity, rotten } => {
                self.snapshots_scrubbed(partition, &identity, rotten);
            }
            Event::SnapshotFetched { partition, identity, fetched } => {
                self.snapshot_fetched(multi, partition, &identity, fetched);
            }
        }
    }

    /// The replica, if it is here and the asker may touch its volume.
    pub(crate) fn replica(
        &mut self,
        asker: Asker,
        partition: PartitionId,
    ) -> Result<&mut Replica, MetaError> {
        let replica = self.replicas.get_mut(&partition).ok_or(MetaError::WrongPartition)?;
        if !access::may_touch(asker.role, asker.volume, replica.volume()) {
            return Err(MetaError::NotPermitted);
        }
        Ok(replica)
    }

    /// The replica, if it also leads as far as it knows.
    pub(crate) fn leading(
        &mut self,
        asker: Asker,
        partition: PartitionId,
    ) -> Result<&mut Replica, MetaError> {
        let replica = self.replica(asker, partition)?;
        if replica.leads() {
            Ok(replica)
        } else {
            Err(MetaError::NotLeader { leader: replica.leader })
        }
    }

    /// Proposes a command for somebody who waits for its outcome.
    pub(crate) fn propose(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        command: &Command,
        responder: Responder,
    ) {
        let proposals_max = self.ctx.config.proposals_max;
        let Some(replica) = self.replicas.get_mut(&partition) else {
            return responder.fail(MetaError::WrongPartition);
        };
        if replica.proposals.len() >= proposals_max {
            return responder.fail(MetaError::Busy);
        }
        match multi.propose(partition, command.encode().into()) {
            Ok(position) => {
                let proposal = Proposal { term: position.term, responder };
                if let Some(old) = replica.proposals.insert(position.index, proposal) {
                    old.responder.fail(MetaError::OutcomeUnknown);
                }
            }
            Err(error) => responder.fail(refusal(&error)),
        }
    }

    /// Proposes a command for nobody but the partition itself; false when it was not taken. Whoever
    /// calls tries again at a later tick.
    pub(crate) fn propose_for_itself(
        multi: &mut MultiRaft,
        partition: PartitionId,
        command: &Command,
    ) -> bool {
        match multi.propose(partition, command.encode().into()) {
            Ok(_) => true,
            Err(error) => {
                debug!(%partition, %error, "the partition's own proposal was not taken");
                false
            }
        }
    }

    /// The request became a cross-partition operation: its answer comes with its end.
    pub(crate) fn defer(
        &mut self,
        partition: PartitionId,
        operation: OperationId,
        responder: Responder,
    ) {
        match self.replicas.get_mut(&partition) {
            Some(replica) => replica.deferred.entry(operation).or_default().push(responder),
            None => responder.fail(MetaError::OutcomeUnknown),
        }
    }

    /// A replica must not go on: its state or log cannot be trusted, or cannot be read by this
    /// build. It answers nothing from here on; how long its group runs on, see
    /// [`Shell::retire_damaged`].
    pub(crate) fn give_up_replica(&mut self, partition: PartitionId, reason: String) {
        error!(%partition, reason, "a replica cannot take part any more");
        if let Some(mut replica) = self.replicas.remove(&partition) {
            replica.step_down();
        }
        self.damaged.insert(partition, reason);
    }
}

/// Hands a frame to Raft; the clock is read after the frame has arrived, as leases demand.
fn step_frame(multi: &mut MultiRaft, from: NodeId, bytes: Bytes) {
    if let Err(error) = multi.step_frame(from, bytes, now_ms()) {
        warn!(%from, %error, "a meta node sent a bad frame");
    }
}

/// What a client is told when Raft did not take a proposal.
pub(crate) fn refusal(error: &ProposeError) -> MetaError {
    match error {
        ProposeError::NotLeader { leader, .. } => MetaError::NotLeader { leader: *leader },
        ProposeError::NoGroup { .. } => MetaError::WrongPartition,
        ProposeError::TooLarge { .. } => MetaError::TooLarge,
        ProposeError::LogFailed => MetaError::DiskFailed,
        _ => MetaError::Busy,
    }
}
