//! What a turn delivers, how messages become frames, and why a group is not started.

use std::collections::BTreeMap;

use milpa_types::{NodeId, PartitionId};

use crate::group::Collected;
use crate::message::{Frame, Message};
use crate::types::{Committed, InstallSnapshot, ReadReady, RoleChange, SnapshotWanted};
use crate::wal::{Damage, LogBatch};

/// Messages in one frame, below what a decoder accepts.
const FRAME_MESSAGES_MAX: usize = 1 << 14;

/// What the owner has to do, in this order: hand `batch` to the log writer, send `messages`,
/// apply `committed`, then the rest. Messages that need the batch to be durable are not in here;
/// they come out of a later turn, after [`MultiRaft::persisted`](crate::MultiRaft::persisted).
#[derive(Debug, Default)]
pub struct Turn {
    /// To the log. At most one each turn; numbers rise.
    pub batch: Option<LogBatch>,
    /// To other nodes, at once.
    pub messages: Vec<(NodeId, Frame)>,
    /// To the state machines, in order. Report back with [`MultiRaft::applied`](crate::MultiRaft::applied).
    pub committed: Vec<(PartitionId, Vec<Committed>)>,
    /// Roles, terms and leaders that changed.
    pub roles: Vec<RoleChange>,
    /// Reads that may be served as soon as their index is applied.
    pub reads: Vec<ReadReady>,
    /// Leader: snapshots to make.
    pub snapshots_wanted: Vec<SnapshotWanted>,
    /// Leader: groups of which a follower could not take the snapshot that it was offered. It is offered again; whether it is
    /// as it was written only the owner can find out.
    pub snapshots_doubted: Vec<PartitionId>,
    /// Follower: snapshots to fetch.
    pub installs: Vec<InstallSnapshot>,
    /// Groups that were refused: the leader has another entry where one was committed here. That happens to
    /// who was away while the group went on without a majority of those it knew
    /// ([`MultiRaft::go_alone`](crate::MultiRaft::go_alone)). Nothing of it can be kept.
    pub contradicted: Vec<PartitionId>,
}

/// Why a recovered group was not started. The group is left alone: it neither votes nor answers,
/// and its log stays on disk until the owner calls [`MultiRaft::remove_group`](crate::MultiRaft::remove_group).
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

impl Turn {
    pub(crate) fn add(&mut self, group: PartitionId, collected: Collected) {
        if !collected.committed.is_empty() {
            self.committed.push((group, collected.committed));
        }
        self.roles.extend(collected.role);
        self.reads.extend(collected.reads);
        self.snapshots_wanted.extend(collected.snapshots_wanted);
        self.snapshots_doubted.extend(collected.is_snapshot_doubted.then_some(group));
        self.installs.extend(collected.install);
    }
}

/// The frames of a turn: one for each node, or several when one would be too large.
#[derive(Default)]
pub(crate) struct Frames {
    open: BTreeMap<NodeId, (Frame, usize)>,
    full: Vec<(NodeId, Frame)>,
}

impl Frames {
    pub(crate) fn add(
        &mut self,
        to: NodeId,
        group: PartitionId,
        message: Message,
        bytes_max: usize,
    ) {
        let more = message.approximate_bytes();
        let (frame, bytes) = self.open.entry(to).or_default();
        let is_full = *bytes + more > bytes_max || frame.messages.len() >= FRAME_MESSAGES_MAX;
        if is_full && !frame.messages.is_empty() {
            self.full.push((to, std::mem::take(frame)));
            *bytes = 0;
        }
        frame.messages.push((group, message));
        *bytes += more;
    }

    pub(crate) fn finish(self) -> Vec<(NodeId, Frame)> {
        let mut frames = self.full;
        frames.extend(self.open.into_iter().map(|(to, (frame, _))| (to, frame)));
        frames
    }
}
