//! The node-level core: all groups of one node, without clock, socket, file or thread.
#![allow(unused_variables, clippy::unimplemented, clippy::unused_self)]
use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use crate::config::{ConfigError, RaftConfig};
use crate::message::{Frame, FrameError};
use crate::types::*;
use crate::wal::{Damage, LogBatch, Recovered};

/// All Raft groups of one node.
pub struct MultiRaft {}

/// What the owner has to do, in this order: hand `batch` to the log writer, send `messages`,
/// apply `committed`, then the rest. Messages that need the batch to be durable are not in here;
/// they come out of a later turn, after [`MultiRaft::persisted`].
#[derive(Debug, Default)]
pub struct Turn {
    /// To the log. At most one each turn; numbers rise.
    pub batch: Option<LogBatch>,
    /// To other nodes, at once.
    pub messages: Vec<(NodeId, Frame)>,
    /// To the state machines, in order. Report back with [`MultiRaft::applied`].
    pub committed: Vec<(PartitionId, Vec<Committed>)>,
    /// Roles, terms and leaders that changed.
    pub roles: Vec<RoleChange>,
    /// Reads that may be served as soon as their index is applied.
    pub reads: Vec<ReadReady>,
    /// Leader: snapshots to make.
    pub snapshots_wanted: Vec<SnapshotWanted>,
    /// Follower: snapshots to fetch.
    pub installs: Vec<InstallSnapshot>,
}

/// Why a recovered group was not started. The group is left alone: it neither votes nor answers,
/// and its log stays on disk until the owner calls [`MultiRaft::remove_group`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// Parts of its log that had been durable are unreadable. It may hold the only copy of what
    /// others need, and it may have voted: it must not take part. The manager takes it out of the
    /// group (a committed change), the owner calls `remove_group`, and the replica comes back as
    /// a learner with a snapshot.
    #[error("log damaged: {0:?}")]
    Damaged(Vec<Damage>),
    /// The state machine is behind the start of the log: its own snapshot is missing or older.
    #[error("state machine applied up to {applied}, but the log starts after {first}")]
    StateTooOld {
        /// What the owner said.
        applied: u64,
        /// The log's compaction mark.
        first: u64,
    },
    /// The state machine is ahead of the log, and no snapshot descriptor was given.
    #[error("state machine applied up to {applied}, but the log ends at {last}")]
    LogTooShort {
        /// What the owner said.
        applied: u64,
        /// The last entry in the log.
        last: u64,
    },
    /// The Raft library refused the state.
    #[error("unusable state: {0}")]
    Unusable(String),
}

impl MultiRaft {
    /// An empty node. `seed` decides the election timeouts and nothing else; give each node
    /// process another one (in a simulation: from the simulation's seed).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem of the settings.
    pub fn new(node: NodeId, config: RaftConfig, seed: u64) -> Result<MultiRaft, ConfigError> {
        unimplemented!()
    }

    /// Takes over what the log held. Call once, before anything else. For groups missing in
    /// `starts`, the state machine is taken to stand at the log's compaction mark: everything
    /// after it comes again. For half a second after `now` no vote is given.
    ///
    /// Returns the groups that were not started, and why.
    pub fn recover(
        &mut self,
        recovered: Recovered,
        starts: &BTreeMap<PartitionId, GroupStart>,
        now_ms: u64,
    ) -> Vec<(PartitionId, RecoverError)> {
        unimplemented!()
    }

    /// How often [`MultiRaft::tick`] should be called.
    #[must_use]
    pub fn tick_interval(&self) -> Duration {
        unimplemented!()
    }

    /// Creates this node's replica of a *new* group. Every founding member is created with the
    /// same lists. The one with `campaign` (by convention the first voter) stands for election at
    /// once. A replica that joins an existing group is created with empty `voters` and
    /// `learners`: it waits for the leader's snapshot.
    ///
    /// Returns false, and does nothing, if the group exists.
    pub fn create_group(
        &mut self,
        group: PartitionId,
        voters: &[NodeId],
        learners: &[NodeId],
        campaign: bool,
    ) -> bool {
        unimplemented!()
    }

    /// Forgets a group, here only. Returns false if there is none.
    pub fn remove_group(&mut self, group: PartitionId) -> bool {
        unimplemented!()
    }

    /// Appends `data` at the leader. The position says where it will stand *if* it commits.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: nothing was written.
    pub fn propose(
        &mut self,
        group: PartitionId,
        data: Bytes,
    ) -> Result<LogPosition, ProposeError> {
        unimplemented!()
    }

    /// Starts a change to the configuration named. `context` comes out with it.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: nothing was written. `Busy` while another change is under way.
    pub fn propose_change(
        &mut self,
        group: PartitionId,
        change: &MemberChange,
        context: Bytes,
    ) -> Result<LogPosition, ProposeError> {
        unimplemented!()
    }

    /// Asks the leader, this node, to hand over. The lease ends at once and does not come back in
    /// this term. Returns false if this node does not lead or `to` does not vote.
    pub fn transfer_leader(&mut self, group: PartitionId, to: NodeId) -> bool {
        unimplemented!()
    }

    /// Makes this node stand for election without waiting for a timeout (pre-vote still asks).
    pub fn campaign(&mut self, group: PartitionId) -> bool {
        unimplemented!()
    }

    /// Asks for a linearizable read without lease: one round of heartbeats. The answer comes in
    /// [`Turn::reads`], or never if leadership is lost: give the request a deadline. `context`
    /// must be unique among the reads under way.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: `NotLeader`, or `Busy` before the leader has committed in its term.
    pub fn read_index(&mut self, group: PartitionId, context: u64) -> Result<(), ProposeError> {
        unimplemented!()
    }

    /// Whether this node leads and nobody else can: then applied state may be served. Check it
    /// with a clock reading taken *after* the answer was computed, when it is about to be sent.
    #[must_use]
    pub fn lease_valid(&self, group: PartitionId, now_ms: u64) -> bool {
        unimplemented!()
    }

    /// Takes a frame. `now_ms` must have been read *after* the frame arrived: the lease of the
    /// sender rests on it.
    ///
    /// # Errors
    ///
    /// [`FrameError`]: close the connection. Messages before the bad one were taken.
    pub fn step_frame(
        &mut self,
        from: NodeId,
        bytes: Bytes,
        now_ms: u64,
    ) -> Result<(), FrameError> {
        unimplemented!()
    }

    /// Lets time pass. More often than the tick interval is harmless.
    pub fn tick(&mut self, now_ms: u64) {
        unimplemented!()
    }

    /// A frame to `node` could not be sent.
    pub fn report_unreachable(&mut self, node: NodeId) {
        unimplemented!()
    }

    /// Everything there is to do now. See [`Turn`].
    #[must_use]
    pub fn turn(&mut self, now_ms: u64) -> Turn {
        unimplemented!()
    }

    /// Whether a turn would deliver anything.
    #[must_use]
    pub fn has_work(&self) -> bool {
        unimplemented!()
    }

    /// The log has this batch, and all before it, durably.
    pub fn persisted(&mut self, batch: u64, now_ms: u64) {
        unimplemented!()
    }

    /// The log failed. From here on nothing is sent, committed or accepted.
    pub fn log_failed(&mut self) {
        unimplemented!()
    }

    /// The state machine has applied everything up to `index`.
    pub fn applied(&mut self, group: PartitionId, index: u64) {
        unimplemented!()
    }

    /// Drops the log up to and including `index`, at most up to what is applied. What a follower
    /// still needs comes as a snapshot instead.
    pub fn compact(&mut self, group: PartitionId, index: u64) {
        unimplemented!()
    }

    /// Tells which snapshot the owner can serve to followers. Durable before this call.
    pub fn set_snapshot(&mut self, group: PartitionId, snapshot: SnapshotDescriptor) {
        unimplemented!()
    }

    /// The configuration in force at `index`, for a snapshot taken there. `None` if the group is
    /// unknown, or `index` is not applied or already compacted.
    #[must_use]
    pub fn describe(&self, group: PartitionId, index: u64) -> Option<SnapshotDescriptor> {
        unimplemented!()
    }

    /// The snapshot of an [`InstallSnapshot`] is durable and active.
    pub fn snapshot_installed(&mut self, group: PartitionId, index: u64) {
        unimplemented!()
    }

    /// It could not be fetched. The leader will offer one again.
    pub fn snapshot_failed(&mut self, group: PartitionId) {
        unimplemented!()
    }

    /// A group at a glance.
    #[must_use]
    pub fn status(&self, group: PartitionId) -> Option<GroupStatus> {
        unimplemented!()
    }

    /// All groups, in order.
    pub fn groups(&self) -> impl Iterator<Item = PartitionId> + '_ {
        std::iter::empty()
    }
}
