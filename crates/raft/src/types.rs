//! The words of the interface: positions, roles, members, snapshots, and what a turn delivers.

use bytes::Bytes;
use milpa_types::{LogEnd, NodeId, PartitionId};
use serde::{Deserialize, Serialize};

/// Where an entry stands in a group's log. Two entries with the same position are the same entry.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LogPosition {
    /// The leader's term that wrote it.
    pub term: u64,
    /// Its place in the log; the first entry has 1.
    pub index: u64,
}

/// What a replica currently is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Follows a leader, or waits for one. Learners stay here.
    Follower,
    /// Asks whether an election could be won, without disturbing anybody (pre-vote).
    PreCandidate,
    /// Asks for votes.
    Candidate,
    /// Takes proposals.
    Leader,
}

/// The configuration of a group. While `outgoing` is not empty the group is in joint consensus:
/// decisions need a majority of `voters` and one of `outgoing`.
///
/// The lists are sets: sorted wherever one is made or read, so that equal configurations are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Members {
    /// Nodes that vote.
    pub voters: Vec<NodeId>,
    /// Nodes that receive the log but do not vote.
    pub learners: Vec<NodeId>,
    /// Voters of the old configuration, only while a change is under way.
    pub outgoing: Vec<NodeId>,
    /// Nodes of `outgoing` that become learners when the change completes.
    pub learners_next: Vec<NodeId>,
    /// Whether the leader completes the change by itself. It always does here.
    pub auto_leave: bool,
}

impl Members {
    /// A plain configuration, with no change under way.
    #[must_use]
    pub fn new(voters: &[NodeId], learners: &[NodeId]) -> Members {
        Members { voters: voters.to_vec(), learners: learners.to_vec(), ..Members::default() }
            .sorted()
    }

    /// The same configuration, with its lists in order: for what was read from a disk.
    #[must_use]
    pub fn sorted(mut self) -> Members {
        let Members { voters, learners, outgoing, learners_next, .. } = &mut self;
        for nodes in [voters, learners, outgoing, learners_next] {
            nodes.sort_unstable();
        }
        self
    }

    /// Whether `node` takes part in any way.
    #[must_use]
    pub fn contains(&self, node: NodeId) -> bool {
        [&self.voters, &self.learners, &self.outgoing, &self.learners_next]
            .iter()
            .any(|list| list.contains(&node))
    }

    /// Whether a change is under way.
    #[must_use]
    pub fn is_joint(&self) -> bool {
        !self.outgoing.is_empty()
    }
}

/// The configuration a group shall have. What differs from the present one is worked out here;
/// more than one voter that comes or goes is a matter of joint consensus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberChange {
    /// All nodes that shall vote. Never empty.
    pub voters: Vec<NodeId>,
    /// All nodes that shall receive the log without voting.
    pub learners: Vec<NodeId>,
}

/// One committed entry, as the state machine gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Where it stands.
    pub position: LogPosition,
    /// What it says.
    pub payload: Payload,
}

/// What a committed entry says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A new leader's first entry, or a refused proposal. Count its index, do nothing.
    Empty,
    /// A proposal.
    Data(Bytes),
    /// The configuration that now holds, and the context given to `propose_change` (empty when
    /// the leader completed a joint change by itself).
    Members {
        /// The configuration from this index on.
        members: Members,
        /// The proposer's bytes.
        context: Bytes,
    },
}

/// A replica's role, term or leader changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleChange {
    /// The group.
    pub group: PartitionId,
    /// What this node is now.
    pub role: Role,
    /// In which term.
    pub term: u64,
    /// Who leads, as far as known. A hint for redirecting, never a licence.
    pub leader: Option<NodeId>,
}

/// A read asked for with `read_index` may be served once `index` is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadReady {
    /// The group.
    pub group: PartitionId,
    /// The number given to `read_index`.
    pub context: u64,
    /// Serve when this index has been applied.
    pub index: u64,
}

/// What a snapshot is, without its contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDescriptor {
    /// The last entry it contains.
    pub position: LogPosition,
    /// The configuration at that entry.
    pub members: Members,
}

/// Leader: a follower needs entries that are gone from the log, and no snapshot was set. Make one
/// and call `set_snapshot`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotWanted {
    /// The group.
    pub group: PartitionId,
    /// Who needs it.
    pub follower: NodeId,
}

/// Follower: fetch this snapshot from `from`, make it durable and active, then call
/// `snapshot_installed`; or call `snapshot_failed`. Until then the group delivers nothing and asks
/// for no other snapshot, so an end must come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallSnapshot {
    /// The group.
    pub group: PartitionId,
    /// The leader that offered it.
    pub from: NodeId,
    /// What to fetch.
    pub snapshot: SnapshotDescriptor,
}

/// How far a group's state machine had come when the process starts again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupStart {
    /// The last entry whose effect the state machine has durably. Entries after it come again.
    pub applied: u64,
    /// The state machine's own durable snapshot, if it keeps any. Needed when a snapshot had been
    /// fetched and activated but `snapshot_installed` had not reached the log before a crash.
    pub snapshot: Option<SnapshotDescriptor>,
    /// An entry that the owner has seen come out of the log, if it remembers one beyond `applied`. The log may have
    /// forgotten that it is committed, and a group that waits for a lost member is told by nobody.
    pub delivered: Option<LogPosition>,
}

/// Why a proposal was not taken. Nothing was written in any of these cases.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProposeError {
    /// Another node leads, or nobody does. Ask `leader`, or wait.
    #[error("not the leader of group {group}")]
    NotLeader {
        /// The group.
        group: PartitionId,
        /// Who leads, as far as known.
        leader: Option<NodeId>,
    },
    /// Too many uncommitted bytes, a leader transfer, or a configuration change under way. Retry
    /// a little later.
    #[error("group {group} is busy")]
    Busy {
        /// The group.
        group: PartitionId,
    },
    /// This node has no such group.
    #[error("no group {group} on this node")]
    NoGroup {
        /// The group.
        group: PartitionId,
    },
    /// The proposal can never be taken. The caller has a bug.
    #[error("entry of {length_bytes} bytes exceeds the limit of {limit_bytes}")]
    TooLarge {
        /// Its size.
        length_bytes: usize,
        /// The configured limit.
        limit_bytes: usize,
    },
    /// The wanted configuration is the present one, or has no voter, or names a node twice.
    #[error("group {group} cannot change its members: {reason}")]
    BadChange {
        /// The group.
        group: PartitionId,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The log failed. This node takes no proposals until it is restarted on a good disk.
    #[error("the log has failed; nothing is accepted any more")]
    LogFailed,
}

/// How the leader sees one other replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowerState {
    /// Its log end is being looked for, or it does not answer.
    Probe,
    /// It follows.
    Replicate,
    /// It is fetching a snapshot.
    Snapshot,
}

/// How far one other replica has come. Only the leader knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FollowerStatus {
    /// The replica.
    pub node: NodeId,
    /// The last entry it has durably, as far as the leader knows.
    pub matched: u64,
    /// How many entries it lacks.
    pub lag: u64,
    /// Whether it answered within the last election timeout.
    pub is_active: bool,
    /// Whether it fetches a snapshot, as it says itself. It applies nothing meanwhile, whatever it has of the log.
    pub is_installing: bool,
    /// How it is being served.
    pub state: FollowerState,
}

/// A follower that lacks no more entries than this is current: it has them within a heartbeat or two.
const CURRENT_LAG: u64 = 256;

impl FollowerStatus {
    /// Whether the replica answers, has all of the log or nearly so, and can apply it: it could lead.
    #[must_use]
    pub fn is_current(&self) -> bool {
        // In a group where nothing happens, one that has just got a snapshot is still probed.
        let follows = self.state == FollowerState::Replicate && self.lag <= CURRENT_LAG;
        self.is_active && !self.is_installing && self.matched > 0 && (self.lag == 0 || follows)
    }
}

/// A group at a glance: for requests about status, and for policies such as compaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStatus {
    /// What this node is.
    pub role: Role,
    /// In which term.
    pub term: u64,
    /// Who leads, as far as known.
    pub leader: Option<NodeId>,
    /// The last committed entry known here.
    pub commit: u64,
    /// The last entry the owner reported as applied.
    pub applied: u64,
    /// The first entry still in the log.
    pub first_index: u64,
    /// The last entry in the log.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// The last entry durable here.
    pub persisted: u64,
    /// The first entry in memory: a follower that needs earlier ones gets a snapshot.
    pub tail_first: u64,
    /// About how much memory its entries take.
    pub tail_bytes: usize,
    /// The configuration in force.
    pub members: Members,
    /// The other replicas, if this node leads; else empty.
    pub followers: Vec<FollowerStatus>,
}

impl GroupStatus {
    /// The last entry in the log.
    #[must_use]
    pub fn log_end(&self) -> LogEnd {
        LogEnd { term: self.last_term, index: self.last_index }
    }

    /// The others, members and learners, that are [current](FollowerStatus::is_current), if this node leads.
    #[must_use]
    pub fn current(&self) -> Vec<NodeId> {
        let current = self.followers.iter().filter(|follower| follower.is_current());
        current.map(|follower| follower.node).collect()
    }
}
