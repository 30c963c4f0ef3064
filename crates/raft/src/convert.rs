//! Between our types and those of the Raft library. Nothing of the library leaves this crate.

use milpa_types::NodeId;
use raft::eraftpb::{
    ConfChangeSingle, ConfChangeType, ConfChangeV2, ConfState, Entry, EntryType, Message as Raw,
    MessageType, Snapshot,
};
use serde::{Deserialize, Serialize};

use crate::message::{Body, Message, approximate_entry_bytes};
use crate::types::{LogPosition, MemberChange, Members, SnapshotDescriptor};
use crate::wal::{EntryKind, LogEntry};

/// The library reserves 0 for "nobody", so its ids are ours plus one.
pub(crate) fn raft_id(node: NodeId) -> u64 {
    u64::from(node.0) + 1
}

/// The node behind an id of the library that is not "nobody".
pub(crate) fn node_of(id: u64) -> NodeId {
    NodeId(u32::try_from(id.saturating_sub(1)).unwrap_or(u32::MAX))
}

/// The node behind an id of the library.
pub(crate) fn some_node(id: u64) -> Option<NodeId> {
    (id != raft::INVALID_ID).then(|| node_of(id))
}

fn ids(nodes: &[NodeId]) -> Vec<u64> {
    nodes.iter().map(|&node| raft_id(node)).collect()
}

fn nodes(ids: &[u64]) -> Vec<NodeId> {
    ids.iter().map(|&id| node_of(id)).collect()
}

pub(crate) fn conf_state(members: &Members) -> ConfState {
    let mut state = ConfState::default();
    state.set_voters(ids(&members.voters));
    state.set_learners(ids(&members.learners));
    state.set_voters_outgoing(ids(&members.outgoing));
    state.set_learners_next(ids(&members.learners_next));
    state.auto_leave = members.auto_leave;
    state
}

pub(crate) fn members(state: &ConfState) -> Members {
    Members {
        voters: nodes(state.get_voters()),
        learners: nodes(state.get_learners()),
        outgoing: nodes(state.get_voters_outgoing()),
        learners_next: nodes(state.get_learners_next()),
        auto_leave: state.auto_leave,
    }
    // The library keeps hash sets.
    .sorted()
}

pub(crate) fn raft_snapshot(snapshot: &SnapshotDescriptor) -> Snapshot {
    let mut raw = Snapshot::default();
    let meta = raw.mut_metadata();
    meta.index = snapshot.position.index;
    meta.term = snapshot.position.term;
    meta.set_conf_state(conf_state(&snapshot.members));
    raw
}

fn descriptor(raw: &Snapshot) -> SnapshotDescriptor {
    let meta = raw.get_metadata();
    SnapshotDescriptor {
        position: LogPosition { term: meta.term, index: meta.index },
        members: members(meta.get_conf_state()),
    }
}

pub(crate) fn raft_entry(entry: LogEntry) -> Entry {
    let mut raw = Entry::default();
    raw.set_entry_type(match entry.kind {
        EntryKind::Normal => EntryType::EntryNormal,
        EntryKind::Change => EntryType::EntryConfChangeV2,
    });
    raw.term = entry.position.term;
    raw.index = entry.position.index;
    raw.data = entry.data;
    raw.context = entry.context;
    raw
}

pub(crate) fn log_entry(raw: &Entry) -> LogEntry {
    LogEntry {
        position: LogPosition { term: raw.term, index: raw.index },
        kind: match raw.get_entry_type() {
            EntryType::EntryNormal => EntryKind::Normal,
            EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => EntryKind::Change,
        },
        context: raw.context.clone(),
        data: raw.data.clone(),
    }
}

/// Kinds of steps of a [`Change`].
pub(crate) const VOTER: u8 = 0;
pub(crate) const LEARNER: u8 = 1;
pub(crate) const REMOVED: u8 = 2;

/// Our own description of a configuration change. It travels in the entry's context, so that
/// nobody parses the library's protobuf in the entry's data (only the proposing leader does, its
/// own). An entry without it is the leader's completion of a joint change.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Change {
    /// Kind and node.
    pub(crate) steps: Vec<(u8, u32)>,
    /// The proposer's bytes.
    pub(crate) context: Vec<u8>,
}

impl Change {
    /// What has to be done to come from `present` to `wanted`.
    pub(crate) fn between(present: &Members, wanted: &MemberChange, context: &[u8]) -> Change {
        let mut steps = Vec::new();
        for node in wanted.voters.iter().filter(|node| !present.voters.contains(node)) {
            steps.push((VOTER, node.0));
        }
        for node in wanted.learners.iter().filter(|node| !present.learners.contains(node)) {
            steps.push((LEARNER, node.0));
        }
        for node in present.voters.iter().chain(&present.learners) {
            if !wanted.voters.contains(node) && !wanted.learners.contains(node) {
                steps.push((REMOVED, node.0));
            }
        }
        Change { steps, context: context.to_vec() }
    }

    /// Whether a voter comes or goes with this step.
    fn changes_voters(present: &Members, (kind, node): (u8, u32)) -> bool {
        present.voters.contains(&NodeId(node)) != (kind == VOTER)
    }

    /// Whether this one is no voter afterwards, whatever it was.
    pub(crate) fn takes_out(&self, node: NodeId) -> bool {
        self.steps.iter().any(|(kind, of)| *of == node.0 && *kind != VOTER)
    }

    /// The voter that comes, if nothing else happens to the voters.
    pub(crate) fn new_voter(&self, present: &Members) -> Option<NodeId> {
        let mut steps = self.steps.iter().filter(|step| Change::changes_voters(present, **step));
        match (steps.next(), steps.next()) {
            (Some((VOTER, node)), None) => Some(NodeId(*node)),
            _ => None,
        }
    }

    /// As the library takes it, one after the other. All majorities before and after have a node in common if one
    /// voter comes or goes at most, whatever happens to those who learn: then it takes no joint change (Raft's thesis, 4.1
    /// and 4.3), which the library makes of more than one step. A joint one has to be ended, by both majorities;
    /// a change that follows on one without that was proposed where it was none (older programs made more changes joint).
    pub(crate) fn in_parts(&self, present: &Members) -> Vec<ConfChangeV2> {
        let is_of_voters = |step: &&(u8, u32)| Change::changes_voters(present, **step);
        let (voters, others): (Vec<_>, Vec<_>) = self.steps.iter().partition(is_of_voters);
        let follows_joint = present.is_joint() && !self.steps.is_empty();
        let mut parts: Vec<ConfChangeV2> =
            follows_joint.then(ConfChangeV2::default).into_iter().collect();
        if voters.len() > 1 || self.steps.is_empty() {
            parts.push(self.to_raft());
            return parts;
        }
        // What may be refused comes first.
        let steps = voters.into_iter().chain(others);
        let alone = |step: &(u8, u32)| Change { steps: vec![*step], context: Vec::new() };
        parts.extend(steps.map(|step| alone(step).to_raft()));
        parts
    }

    pub(crate) fn to_raft(&self) -> ConfChangeV2 {
        let steps = self.steps.iter().map(|&(kind, node)| {
            let node_id = raft_id(NodeId(node));
            let mut single = ConfChangeSingle { node_id, ..ConfChangeSingle::default() };
            single.set_change_type(match kind {
                VOTER => ConfChangeType::AddNode,
                LEARNER => ConfChangeType::AddLearnerNode,
                _ => ConfChangeType::RemoveNode,
            });
            single
        });
        let mut raw = ConfChangeV2::default();
        raw.set_changes(steps.collect::<Vec<_>>().into());
        raw
    }
}

/// A message of ours as the library takes it. `None` for the kinds it does not know.
pub(crate) fn to_raft(from: NodeId, to: NodeId, message: Message) -> Option<Raw> {
    let mut raw = Raw::default();
    (raw.from, raw.to, raw.term) = (raft_id(from), raft_id(to), message.term);
    let kind = match message.body {
        Body::Append { prev, commit, entries, .. } => {
            (raw.log_term, raw.index, raw.commit) = (prev.term, prev.index, commit);
            raw.set_entries(entries.into_iter().map(raft_entry).collect::<Vec<_>>().into());
            MessageType::MsgAppend
        }
        Body::Appended { index, commit } => {
            (raw.index, raw.commit) = (index, commit);
            MessageType::MsgAppendResponse
        }
        Body::AppendRejected { index, hint, commit } => {
            (raw.index, raw.commit, raw.reject) = (index, commit, true);
            (raw.log_term, raw.reject_hint) = (hint.term, hint.index);
            MessageType::MsgAppendResponse
        }
        Body::Heartbeat { commit, stamp_ms, read } => {
            raw.commit = commit;
            raw.context = heartbeat_context(stamp_ms, read).into();
            MessageType::MsgHeartbeat
        }
        Body::HeartbeatAnswer { commit, read, .. } => {
            raw.commit = commit;
            raw.context = read.map(u64::to_le_bytes).map_or_else(Vec::new, Vec::from).into();
            MessageType::MsgHeartbeatResponse
        }
        Body::Vote { is_pre, last, commit, is_transfer } => {
            (raw.index, raw.log_term) = (last.index, last.term);
            (raw.commit, raw.commit_term) = (commit.index, commit.term);
            if is_transfer {
                raw.context = raft::CAMPAIGN_TRANSFER.to_vec().into();
            }
            if is_pre { MessageType::MsgRequestPreVote } else { MessageType::MsgRequestVote }
        }
        Body::VoteAnswer { is_pre, is_granted, commit } => {
            raw.reject = !is_granted;
            (raw.commit, raw.commit_term) = (commit.index, commit.term);
            if is_pre {
                MessageType::MsgRequestPreVoteResponse
            } else {
                MessageType::MsgRequestVoteResponse
            }
        }
        Body::TimeoutNow => MessageType::MsgTimeoutNow,
        // These are handled by `Group`.
        Body::Snapshot(_)
        | Body::SnapshotFailed
        | Body::LogLost { .. }
        | Body::Rejoining { .. }
        | Body::Barrier { .. }
        | Body::Relief { .. } => return None,
    };
    raw.set_msg_type(kind);
    Some(raw)
}

/// The follower's library echoes the context of a heartbeat. Ours carries the leader's clock and
/// the number of the read that waits for the round.
fn heartbeat_context(stamp_ms: u64, read: Option<u64>) -> Vec<u8> {
    let mut context = stamp_ms.to_le_bytes().to_vec();
    context.extend(read.map(u64::to_le_bytes).into_iter().flatten());
    context
}

fn number(bytes: &[u8]) -> Option<u64> {
    bytes.get(..8)?.try_into().ok().map(u64::from_le_bytes)
}

/// What the sender knows besides the library's message.
pub(crate) struct Sending {
    pub(crate) now_ms: u64,
    pub(crate) installing: u64,
    pub(crate) message_bytes_max: usize,
}

/// A message of the library as ours. An append that grew beyond the limit, by batching, becomes
/// several. Nothing for kinds that never travel.
pub(crate) fn from_raft(mut raw: Raw, sending: &Sending) -> Vec<Message> {
    let at = |term, index| LogPosition { term, index };
    let commit = raw.commit;
    let body = match raw.get_msg_type() {
        MessageType::MsgAppend => return split_append(&mut raw, sending.message_bytes_max),
        MessageType::MsgAppendResponse if raw.reject => Body::AppendRejected {
            index: raw.index,
            hint: at(raw.log_term, raw.reject_hint),
            commit,
        },
        MessageType::MsgAppendResponse => Body::Appended { index: raw.index, commit },
        MessageType::MsgHeartbeat => {
            Body::Heartbeat { commit, stamp_ms: sending.now_ms, read: number(&raw.context) }
        }
        MessageType::MsgHeartbeatResponse => Body::HeartbeatAnswer {
            commit,
            stamp_ms: number(&raw.context).unwrap_or(0),
            read: raw.context.get(8..).and_then(number),
            installing: sending.installing,
        },
        kind @ (MessageType::MsgRequestVote | MessageType::MsgRequestPreVote) => Body::Vote {
            is_pre: kind == MessageType::MsgRequestPreVote,
            last: at(raw.log_term, raw.index),
            commit: at(raw.commit_term, commit),
            is_transfer: raw.context.as_ref() == raft::CAMPAIGN_TRANSFER,
        },
        kind @ (MessageType::MsgRequestVoteResponse | MessageType::MsgRequestPreVoteResponse) => {
            Body::VoteAnswer {
                is_pre: kind == MessageType::MsgRequestPreVoteResponse,
                is_granted: !raw.reject,
                commit: at(raw.commit_term, commit),
            }
        }
        MessageType::MsgSnapshot => Body::Snapshot(descriptor(raw.get_snapshot())),
        MessageType::MsgTimeoutNow => Body::TimeoutNow,
        _ => return Vec::new(),
    };
    vec![Message::new(raw.term, body)]
}

fn split_append(raw: &mut Raw, bytes_max: usize) -> Vec<Message> {
    let (term, commit) = (raw.term, raw.commit);
    let mut prev = LogPosition { term: raw.log_term, index: raw.index };
    let mut out = Vec::new();
    let mut entries = Vec::new();
    let mut bytes = 0;
    let append = |prev, entries: Vec<LogEntry>| {
        let count = entries.len() as u32;
        Message::new(term, Body::Append { prev, commit, count, entries })
    };
    for entry in raw.get_entries().iter().map(log_entry) {
        let more = approximate_entry_bytes(&entry);
        if bytes + more > bytes_max && !entries.is_empty() {
            let full: Vec<LogEntry> = std::mem::take(&mut entries);
            let next = full.last().map_or(prev, |entry| entry.position);
            out.push(append(prev, full));
            prev = next;
            bytes = 0;
        }
        bytes += more;
        entries.push(entry);
    }
    out.push(append(prev, entries));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_more_than_one_voter_makes_a_change_joint_and_one_that_follows_on_a_joint_one_ends_that()
    {
        let nodes = |list: &[u32]| list.iter().copied().map(NodeId).collect::<Vec<_>>();
        let pair = Members::new(&nodes(&[1, 2]), &nodes(&[3]));
        let parts = |present: &Members, steps: &[(u8, u32)]| {
            let change = Change { steps: steps.to_vec(), context: Vec::new() };
            let parts = change.in_parts(present);
            parts.iter().map(|part| part.get_changes().len()).collect::<Vec<_>>()
        };
        assert_eq!(parts(&pair, &[(LEARNER, 4), (REMOVED, 3)]), [1, 1]);
        assert_eq!(parts(&pair, &[(VOTER, 3), (LEARNER, 4)]), [1, 1]);
        assert_eq!(parts(&pair, &[(VOTER, 3), (REMOVED, 2)]), [2]);
        assert_eq!(parts(&pair, &[]), [0], "a joint one ends");
        let joint = Members { outgoing: nodes(&[1, 2]), auto_leave: true, ..pair };
        assert_eq!(parts(&joint, &[(LEARNER, 4)]), [0, 1]);
        assert_eq!(parts(&joint, &[]), [0]);
        let change = Change { steps: vec![(REMOVED, 3), (VOTER, 4)], context: Vec::new() };
        let first = change.in_parts(&joint)[1].get_changes()[0].node_id;
        assert_eq!(first, raft_id(NodeId(4)), "the voter's step");
    }
}
