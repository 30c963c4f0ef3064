//! One replica of a partition, with everything the shell remembers about it.
//!
//! What only a leader needs (who waits for which entry, lease timers, driven operations) is dropped
//! when leadership is lost, and built anew from the state by the next leader.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use milpa_host::clock::Instant;
use milpa_raft::{LogPosition, Role, SnapshotDescriptor};
use milpa_types::{MetaError, MetaSlot, NodeId, PartitionId, SessionId, VolumeId};
use milpa_wire::check::MetaCheck;
use milpa_wire::meta::{CreateMetaPartition, ExtentOffer, MetaRead, MetaReply, OperationId};

use super::freeing::Freeing;
use super::leases::Leases;
use super::marks::Marks;
use super::responder::Responder;
use crate::core::{Partition, PartitionSetup};

/// Where Raft lets the log of a new group start: as if after a snapshot of one entry.
pub(crate) const FOUNDED: LogPosition = LogPosition { term: 1, index: 1 };

/// One replica.
pub(crate) struct Replica {
    /// As the manager defined it.
    pub definition: CreateMetaPartition,
    /// The state machine.
    pub state: Partition,
    /// The last entry in the state.
    pub applied: LogPosition,
    /// What this node is in the group.
    pub role: Role,
    /// The group's term, as far as known here.
    pub term: u64,
    /// Who leads: a hint.
    pub leader: Option<NodeId>,
    /// Whether this node leads and has applied an entry of its term: only then the state holds all
    /// that was ever acknowledged.
    pub ready: bool,
    /// Whether the disk knows that this replica takes part.
    pub started: bool,
    /// Tells this replica from one that was here before it, and is deleted.
    pub identity: Rc<()>,
    /// Since the last snapshot.
    pub log: LogGrowth,
    /// What the state was at some indexes.
    pub marks: Marks,
    /// Leader: who waits for the entry at an index.
    pub proposals: BTreeMap<u64, Proposal>,
    /// Leader: who waits for a round of heartbeats, by the number given to Raft.
    pub reads: BTreeMap<u64, WaitingRead>,
    /// Leader: who waits for the end of an operation.
    pub deferred: BTreeMap<OperationId, Vec<Responder>>,
    /// Leader: operations that this partition coordinates, with the step under way.
    pub driven: BTreeMap<OperationId, Driven>,
    /// Leader: intents of other partitions' operations, since when this leader has seen them.
    pub intents: BTreeMap<OperationId, IntentWatch>,
    /// Leader: when each session ends.
    pub leases: Leases,
    /// Leader: deletion of freed bytes.
    pub freeing: Freeing,
    /// Leader: since when its node has had no room for new inodes.
    pub full_since_ms: Option<u64>,
}

/// So long the managers have to move a leadership away from a node without room: two heartbeats
/// and two passes of the planners, and as much again.
const HAND_OVER_MS: u64 = 5_000;

/// An entry that somebody waits for.
pub(crate) struct Proposal {
    /// The term in which it was proposed: at its index under another term it was lost.
    pub term: u64,
    /// Who waits.
    pub responder: Responder,
}

/// A read that waits until this node is proven to lead.
pub(crate) struct WaitingRead {
    /// What was asked.
    pub query: Query,
    /// By whom.
    pub responder: Responder,
    /// The index that must be applied, once known.
    pub index: Option<u64>,
}

/// Questions that only a proven leader answers.
#[derive(Clone, Debug)]
pub(crate) enum Query {
    /// A read, and the session that asks.
    Read(Option<SessionId>, MetaRead),
    /// Another partition's question about an operation.
    Inquire(OperationId),
    /// A data node's question about unpublished bytes.
    Offers(Vec<ExtentOffer>),
    /// A question of `milpa fsck`.
    Check(MetaCheck),
}

/// A cross-partition operation that is being driven.
pub(crate) struct Driven {
    /// The step that a task is asking for now.
    pub number: u32,
    /// Whom it asks: the partition of this slot.
    pub slot: MetaSlot,
    /// Since when this leader drives the operation, in milliseconds.
    pub since_ms: u64,
    /// Whether a task is at it; else the next tick starts one.
    pub asking: bool,
}

/// An intent that may have been forgotten by its coordinator.
pub(crate) struct IntentWatch {
    /// Since when this leader has seen it, in milliseconds.
    pub since_ms: u64,
    /// Whether the coordinator is being asked.
    pub asking: bool,
}

/// How much log there is above the last snapshot.
#[derive(Default)]
pub(crate) struct LogGrowth {
    /// Entries.
    pub entries: u64,
    /// Bytes.
    pub bytes: u64,
    /// The newest snapshot on disk.
    pub newest: Option<SnapshotDescriptor>,
    /// Log index of the snapshot before it; 0 for none. The log is kept from here on, so that a
    /// rotten newest snapshot loses nothing.
    pub previous: u64,
    /// When one is written though little has changed, in milliseconds. (Not when the last one was: clocks begin with the process,
    /// and what lies before that cannot be said.)
    pub due_ms: u64,
    /// When all are read again, in milliseconds.
    pub scrub_due_ms: u64,
    /// They have been read, and no follower's word has them read again before this, in milliseconds.
    pub trusted_until_ms: u64,
    /// A follower waits for one, or one has rotted.
    pub wanted: bool,
    /// Those that have rotted and are to be set aside when there is another.
    pub rotten: Vec<LogPosition>,
    /// A peer was given all of the newest, or it could not be read for one: who could not take it may have found that it has
    /// rotted, and not only been busy, or full.
    pub is_given: Rc<Cell<bool>>,
    /// How often one could not be fetched since the last one that was installed.
    pub fetches_failed: u32,
}

impl LogGrowth {
    /// A follower could not take what it was offered: if it has seen it, perhaps that has rotted, and nothing else would ever
    /// be offered.
    pub(crate) fn doubt(&mut self) {
        if self.is_given.take() {
            self.scrub_due_ms = self.scrub_due_ms.min(self.trusted_until_ms);
        }
    }
}

impl Replica {
    pub(crate) fn new(
        definition: CreateMetaPartition,
        state: Partition,
        applied: LogPosition,
    ) -> Replica {
        Replica {
            definition,
            state,
            applied,
            role: Role::Follower,
            term: 0,
            leader: None,
            ready: false,
            started: false,
            identity: Rc::default(),
            log: LogGrowth::default(),
            marks: Marks::default(),
            proposals: BTreeMap::new(),
            reads: BTreeMap::new(),
            deferred: BTreeMap::new(),
            driven: BTreeMap::new(),
            intents: BTreeMap::new(),
            leases: Leases::default(),
            freeing: Freeing::default(),
            full_since_ms: None,
        }
    }

    /// A replica that has applied nothing yet.
    pub(crate) fn founded(definition: CreateMetaPartition) -> Replica {
        let mut state = Partition::new(PartitionSetup::from(&definition));
        state.skip(FOUNDED.index);
        Replica::new(definition, state, FOUNDED)
    }

    /// A replica that waits for the snapshot of a group that exists: it has applied nothing, and
    /// takes no entry before the snapshot.
    pub(crate) fn joining(definition: CreateMetaPartition) -> Replica {
        let state = Partition::new(PartitionSetup::from(&definition));
        Replica::new(definition, state, LogPosition::default())
    }

    /// Whether there is anything of the group's log in the state.
    pub(crate) fn has_begun(&self) -> bool {
        self.applied.index > FOUNDED.index
    }

    pub(crate) fn id(&self) -> PartitionId {
        self.definition.partition
    }

    pub(crate) fn volume(&self) -> VolumeId {
        self.definition.volume
    }

    pub(crate) fn leads(&self) -> bool {
        self.role == Role::Leader
    }

    /// Takes note of whether this node has room for new inodes.
    pub(crate) fn note_room(&mut self, is_full: bool, now: u64) {
        let is_hindered = is_full && self.leads();
        self.full_since_ms = is_hindered.then(|| self.full_since_ms.unwrap_or(now));
    }

    /// Why no inode can be made here, if so. Another member may have room, and the managers move
    /// the leadership there: until they can have done so, the caller is to come again.
    pub(crate) fn lacks_room(&self, now: u64) -> Option<MetaError> {
        let since = self.full_since_ms?;
        let is_hopeless = now.saturating_sub(since) >= HAND_OVER_MS;
        Some(if is_hopeless { MetaError::NoSpace } else { MetaError::Busy })
    }

    /// Tells everybody who waits that this node leads no more, and forgets what only a leader
    /// knows. What was proposed may still come true: the client repeats it with the same id.
    pub(crate) fn step_down(&mut self) {
        self.ready = false;
        for (_, proposal) in std::mem::take(&mut self.proposals) {
            proposal.responder.fail(MetaError::OutcomeUnknown);
        }
        for (_, waiting) in std::mem::take(&mut self.deferred) {
            waiting.into_iter().for_each(|responder| responder.fail(MetaError::OutcomeUnknown));
        }
        let leader = self.leader;
        for (_, read) in std::mem::take(&mut self.reads) {
            read.responder.fail(MetaError::NotLeader { leader });
        }
        self.driven.clear();
        self.intents.clear();
        self.leases = Leases::default();
        self.freeing.forget();
        self.full_since_ms = None;
    }

    /// Answers those whose deadline has come: nobody hangs on a partition without majority.
    pub(crate) fn expire_waiting(&mut self, now: Instant) {
        let late = |responder: &Responder| responder.deadline() <= now;
        for (_, proposal) in self.proposals.extract_if(.., |_, p| late(&p.responder)) {
            proposal.responder.fail(MetaError::OutcomeUnknown);
        }
        for (_, read) in self.reads.extract_if(.., |_, read| late(&read.responder)) {
            read.responder.fail(MetaError::Busy);
        }
        for waiting in self.deferred.values_mut() {
            for responder in waiting.extract_if(.., |responder| late(responder)) {
                responder.fail(MetaError::OutcomeUnknown);
            }
        }
        self.deferred.retain(|_, waiting| !waiting.is_empty());
    }

    /// Ends an operation for everybody who waits for it.
    pub(crate) fn finish(&mut self, operation: OperationId, reply: &MetaReply) {
        for responder in self.deferred.remove(&operation).unwrap_or_default() {
            responder.send(reply);
        }
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::VolumeOptions;

    use super::*;

    #[test]
    fn a_full_leader_has_callers_come_again_until_another_could_lead() {
        let mut replica = Replica::founded(CreateMetaPartition {
            joins: false,
            partition: PartitionId(1),
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(0),
            members: vec![NodeId(1)],
        });
        replica.note_room(true, 100);
        assert_eq!(replica.lacks_room(100_000), None, "it does not lead");
        replica.role = Role::Leader;
        replica.note_room(true, 200);
        replica.note_room(true, 4_000);
        assert_eq!(replica.lacks_room(200 + HAND_OVER_MS - 1), Some(MetaError::Busy));
        assert_eq!(replica.lacks_room(200 + HAND_OVER_MS), Some(MetaError::NoSpace));
        replica.note_room(false, 9_000);
        assert_eq!(replica.lacks_room(9_000), None);
    }
}
