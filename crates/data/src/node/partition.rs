//! One replica of a data partition, as the node's thread sees it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use milpa_host::rpc::Reply;
use milpa_raft::Role as RaftRole;
use milpa_types::{DataError, ExtentId, NodeId, PartitionId};
use milpa_wire::data::{Append, Configuration, DataAnswer, DataReply, Replicate};

use crate::append::{Backup, Primary, RequestNumber};
use crate::offers::Offers;
use crate::overwrite::Applying;
use crate::store::ExtentStore;

use super::fill::Fill;
use super::handed::Handed;
use super::licence::Licence;
use super::lost::LostBlocks;
use super::recent::Recent;
use super::state::PartitionState;
use super::workers::Continuation;

/// A request that a core decides about: its bytes and the way to answer.
pub(crate) enum Held {
    /// From a client.
    Append {
        /// The request.
        append: Append,
        /// Its bytes.
        payload: Bytes,
        /// The way to answer.
        reply: Reply,
        /// When it arrived, in microseconds.
        arrived_us: u64,
    },
    /// From the primary.
    Replicate {
        /// The request.
        replicate: Replicate,
        /// Its bytes.
        payload: Bytes,
        /// The way to answer.
        reply: Reply,
    },
}

/// Who waits for a log entry.
pub(crate) enum Waiting {
    /// A client's overwrite.
    Overwrite {
        /// The extent.
        extent: ExtentId,
        /// Bytes.
        length: u64,
        /// The way to answer.
        reply: Reply,
        /// When it arrived, in microseconds.
        arrived_us: u64,
    },
    /// The manager's configuration.
    Configure {
        /// What was proposed.
        configuration: Configuration,
        /// The ways to answer: the manager may repeat itself.
        replies: Vec<Reply>,
    },
}

/// A proposal of this node.
pub(crate) struct Proposal {
    /// The term in which it was made: an entry of another term at its index is another entry.
    pub term: u64,
    /// Who waits.
    pub waiting: Waiting,
    /// When it was made.
    pub since_ms: u64,
}

/// Which extents the next alignment looks at.
#[derive(Debug, Default)]
pub(crate) struct Alignment {
    /// One is under way.
    pub is_running: bool,
    /// All extents of all members are to be compared: a new epoch, or this process started.
    pub wants_all: bool,
    /// At the primary: the members have not been compared in this epoch, or since this process or
    /// that of a member started. At another one: the primary does not know yet that it started.
    pub is_unknown: bool,
    /// When all extents of all members were last compared.
    pub compared_ms: u64,
    /// These broke.
    pub broken: BTreeSet<ExtentId>,
    /// Extents whose replicas are not known to be equal, as of the last run.
    pub unaligned: u64,
    /// Not before this time.
    pub next_ms: u64,
    /// Runs without full success since the last one with it.
    pub failures: u32,
}

impl Alignment {
    /// Every extent of every member was compared in this epoch, and none waits for bytes.
    pub fn is_complete(&self) -> bool {
        let is_settled = !self.is_running && !self.wants_all && !self.is_unknown;
        is_settled && self.unaligned == 0 && self.broken.is_empty()
    }
}

/// When the extents were last flushed for the log's sake.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    /// One is under way.
    pub is_running: bool,
    /// Bytes of entries applied since.
    pub bytes: u64,
    /// When.
    pub at_ms: u64,
}

/// Saving the partition's state: one file operation at a time.
#[derive(Default)]
pub(crate) struct Saving {
    /// One is under way.
    pub is_running: bool,
    /// What happens after the next one.
    pub then: Vec<Continuation>,
    /// So many found the disk full since the last that did not.
    pub failures: u32,
    /// After one of them, the next begins then at the latest.
    pub next_ms: u64,
}

/// One replica.
pub(crate) struct Partition {
    /// Its id.
    pub id: PartitionId,
    /// Its extents.
    pub store: Arc<ExtentStore>,
    /// What is or will be written down; see `configuration` for what is in force.
    pub state: PartitionState,
    /// Saving it.
    pub saving: Saving,
    /// The configuration in force: written down.
    pub configuration: Configuration,
    /// Why the replica is out of service: its log is damaged.
    pub broken: Option<String>,
    /// Orders appends, if this node is the primary.
    pub primary: Primary,
    /// Receives them, if it is not.
    pub backup: Backup,
    /// Requests that these two decide about.
    pub held: BTreeMap<RequestNumber, Held>,
    /// Raft role.
    pub role: RaftRole,
    /// Raft term.
    pub term: u64,
    /// Raft leader, as far as known.
    pub leader: Option<NodeId>,
    /// Entries under way to the extents. Shared with the tasks that fill extents.
    pub applying: Rc<RefCell<Applying>>,
    /// Overwrites that are being applied, and those behind one that the disk hinders.
    pub handed: Handed,
    /// Those that were handed to the disk while bytes are being fetched.
    pub recent: Recent,
    /// Entries up to here may have been applied before the process started.
    pub repeated_until: u64,
    /// Where that stands, and since when, if it does not move.
    pub standing: Option<(u64, u64)>,
    /// Whether readers are answered here.
    pub licence: Licence,
    /// Own proposals by index.
    pub proposals: BTreeMap<u64, Proposal>,
    /// Extents that all members of the epoch have marked as overwritten.
    pub marked_everywhere: BTreeSet<ExtentId>,
    /// Extents of which an overwrite found bytes missing, and that are still to get them, as far as this process knows.
    pub lacking: BTreeSet<ExtentId>,
    /// A process before this one knew of some, and not which.
    pub lacked_before: bool,
    /// Flushing for the log.
    pub checkpoint: Checkpoint,
    /// A snapshot is being fetched.
    pub is_installing: bool,
    /// Making replicas equal.
    pub alignment: Alignment,
    /// Extents that are being filled here.
    pub filling: BTreeMap<ExtentId, Fill>,
    /// Blocks that are being repaired here.
    pub repairing: BTreeSet<(ExtentId, u64)>,
    /// Held by every task that fetches bytes for this replica.
    pub fetches: Rc<()>,
    /// Unpublished bytes that are asked about.
    pub offers: Offers,
    /// Damaged blocks, and which of them no member has.
    pub lost: LostBlocks,
    /// Bytes allocated, as last counted.
    pub allocated_bytes: u64,
}

/// So long one entry may take to be repeated, as far as others wait for it.
const REPEATING_MAX_MS: u64 = 15_000;

impl Partition {
    /// Whether this replica can say of extents' first bytes that it has them, but for those that are lost: not while it is
    /// to find out whether others have a block that is damaged here.
    pub fn may_be_flushed(&self, extents: &[(ExtentId, u64)]) -> bool {
        !extents.iter().any(|(extent, length)| self.lost.has_open(*extent, *length))
    }

    /// The blocks of extents' first bytes that no member has.
    pub fn lost_of(&self, extents: &[(ExtentId, u64)]) -> Vec<(ExtentId, u64)> {
        extents.iter().flat_map(|(extent, length)| self.lost.below(*extent, *length)).collect()
    }

    /// Has the next alignment look at an extent, if this node orders it. One that broke as this node
    /// ceased to be the primary is found by the comparison with which the new epoch begins.
    pub fn align_later(&mut self, node: NodeId, extent: ExtentId) {
        if self.configuration.primary == node {
            self.alignment.broken.insert(extent);
        }
    }

    /// Whether entries are being applied that may have been applied before the process started: of what they
    /// change nothing is known before the last one. But if one does not go on for long, it waits, perhaps for
    /// who asks.
    pub fn is_repeating(&self, now_ms: u64) -> bool {
        let applied = self.applying.borrow().applied();
        let stands_still = self.standing.is_some_and(|(at, since_ms)| {
            at == applied && now_ms.saturating_sub(since_ms) >= REPEATING_MAX_MS
        });
        applied < self.repeated_until && !stands_still
    }

    /// Looks whether the log stands still. Without a leader nothing is known of that.
    pub fn watch_repeating(&mut self, now_ms: u64) {
        let applied = self.applying.borrow().applied();
        if self.leader.is_none() || applied >= self.repeated_until {
            self.standing = None;
        } else if self.standing.is_none_or(|(at, _)| at != applied) {
            self.standing = Some((applied, now_ms));
        }
    }

    /// The members but this node.
    pub fn others(&self, node: NodeId) -> Vec<NodeId> {
        let members = self.configuration.members.iter().copied();
        members.filter(|member| *member != node).collect()
    }

    /// The learners but this node: they may give bytes, and nobody waits for them.
    pub fn other_learners(&self, node: NodeId) -> Vec<NodeId> {
        let learners = self.configuration.learners.iter().copied();
        learners.filter(|learner| *learner != node).collect()
    }

    /// Whether this node takes part in the configuration in force.
    pub fn is_member(&self, node: NodeId) -> bool {
        self.configuration.members.contains(&node)
    }

    /// Checks the epoch of a request.
    pub fn check_epoch(&self, epoch: milpa_types::Epoch) -> Result<(), DataError> {
        let current = self.configuration.epoch;
        if epoch == current { Ok(()) } else { Err(DataError::StaleEpoch { current }) }
    }

    /// Whether this node leads the Raft group, as far as it knows.
    pub fn leads(&self) -> bool {
        self.role == RaftRole::Leader
    }

    /// What a request to somebody who is not the leader gets.
    pub fn not_leader(&self) -> DataError {
        DataError::NotPrimary { hint: self.leader }
    }
}

/// Answers without bytes.
pub(crate) fn answer(reply: Reply, result: Result<DataAnswer, DataError>) {
    let body: DataReply = result;
    reply.send(&body, Bytes::new());
}

/// Answers `Done`, or the error.
pub(crate) fn answer_done(reply: Reply, result: Result<(), DataError>) {
    answer(reply, result.map(|()| DataAnswer::Done));
}
