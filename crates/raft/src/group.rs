//! One group: the Raft library's node, and what it lacks.
//!
//! # Known defects of raft 0.7.0, and what is done about them
//!
//! * Fixed on its master only: #557 (a stale rejection can set a follower's next index below what
//!   it has matched, which resends what it has, or a snapshot): [`Group::sanitize`] drops or
//!   corrects such rejections. #543 and #537 (applying entries before they are persisted, and the
//!   bound for it): a feature of master; 0.7.0 delivers entries only when they are durable here,
//!   which is what we want, and [`Group::applied`] never reports more. #530 (an election scans all
//!   unapplied entries at once): ours are in memory and shared, so the scan copies no bodies. #561
//!   belongs to #537; #579 concerns the codec that we do not use.
//! * A leader of a one-voter group sends to learners, in its new term, before that term is
//!   durable; after a crash the same term and index could stand for another entry. Messages wait
//!   here until term and vote are durable ([`Group::collect`]).
//! * With `batch_append` it appends entries to a waiting empty append of another position (found
//!   by `storms_lose_nothing`: a follower took entry 28 for entry 26): [`Group::anchor`].
//! * It panics on messages that no correct node sends: [`Group::sanitize`].
//! * A follower that crashes while it fetches a snapshot would never be offered another one:
//!   [`Group::watch_snapshot`].
//! * A node that is paused or restarts forgets that it promised its leader not to vote for others:
//!   [`Group::may_vote`].
//! * Its election timeouts come from a thread-local generator. [`Group::settle`] replaces them
//!   by a function of seed, group, term and role; the library draws only when one of the latter
//!   two changes.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};
use raft::eraftpb::{ConfChangeV2, Entry, EntryType, Message as Raw, MessageType};
use raft::{ProgressState, RawNode, SnapshotStatus, StateRole};

use crate::config::RaftConfig;
use crate::convert::{
    Change, Sending, from_raft, log_entry, members, node_of, raft_id, raft_snapshot, some_node,
    to_raft,
};
use crate::lease::Lease;
use crate::memlog::MemLog;
use crate::message::{Body, Message};
use crate::types::{
    Committed, FollowerState, FollowerStatus, GroupStatus, InstallSnapshot, LogPosition,
    MemberChange, Members, Payload, ProposeError, ReadReady, Role, RoleChange, SnapshotDescriptor,
    SnapshotWanted,
};
use crate::wal::{Record, mix};

/// How long a leader waits for a follower to say that it is fetching the snapshot it was offered.
const SNAPSHOT_ANSWER_MS: u64 = 1000;
/// How long before an owner that set no snapshot is asked again.
const SNAPSHOT_ASK_AGAIN_MS: u64 = 5000;

/// What the group needs to know of its node.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) node: NodeId,
    pub(crate) seed: u64,
    pub(crate) config: RaftConfig,
}

/// What one group adds to a turn.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) records: Vec<Record>,
    pub(crate) messages: Vec<(NodeId, Message)>,
    pub(crate) committed: Vec<Committed>,
    pub(crate) role: Option<RoleChange>,
    pub(crate) reads: Vec<ReadReady>,
    pub(crate) snapshots_wanted: Vec<SnapshotWanted>,
    pub(crate) install: Option<InstallSnapshot>,
}

/// Output of the library that waits for a batch to become durable.
#[derive(Debug)]
struct Pending {
    batch: u64,
    ready: u64,
    messages: Vec<Raw>,
    hard: (u64, u64),
    snapshot: Option<u64>,
}

/// A snapshot being fetched by the owner.
#[derive(Debug)]
struct Install {
    from: NodeId,
    snapshot: SnapshotDescriptor,
    is_announced: bool,
}

pub(crate) struct Group {
    id: PartitionId,
    node: NodeId,
    seed: u64,
    /// Bounds of the election timeout in ticks; the second is exclusive.
    timeouts: (usize, usize),
    raw: RawNode<MemLog>,
    /// Term and role for which the election timeout was set.
    settled: (u64, StateRole),
    reported: Option<RoleChange>,
    /// The owner has everything up to here, though the library delivers it again.
    floor: u64,
    /// The last entry the library delivered.
    delivered: u64,
    pending: VecDeque<Pending>,
    /// Messages that may go.
    released: Vec<Raw>,
    /// Term and vote on disk.
    durable_hard: (u64, u64),
    /// Term and vote in the last batch.
    written_hard: (u64, u64),
    is_commit_unwritten: bool,
    queued: Vec<Record>,
    /// Configurations since the mark, by index.
    history: VecDeque<(u64, Members)>,
    present: Members,
    leader_heard_ms: Option<u64>,
    lease: Lease,
    install: Option<Install>,
    /// Leader: when a snapshot was last offered to a follower.
    offered_ms: BTreeMap<NodeId, u64>,
    /// Leader: when the owner was last asked for a snapshot.
    asked_ms: BTreeMap<NodeId, u64>,
    failures: Vec<(NodeId, Message)>,
}

fn role_of(state: StateRole) -> Role {
    match state {
        StateRole::Follower => Role::Follower,
        StateRole::PreCandidate => Role::PreCandidate,
        StateRole::Candidate => Role::Candidate,
        StateRole::Leader => Role::Leader,
    }
}

/// The library's settings for one group whose log starts at `mark`.
fn library_config(setting: &Setting, mark: LogPosition) -> raft::Config {
    let config = &setting.config;
    let ticks = |ms| config.ticks(ms);
    raft::Config {
        id: raft_id(setting.node),
        election_tick: ticks(config.election_min_ms),
        heartbeat_tick: ticks(config.heartbeat_ms),
        min_election_tick: ticks(config.election_min_ms),
        max_election_tick: ticks(config.election_max_ms).max(ticks(config.election_min_ms) + 1),
        applied: mark.index,
        max_size_per_msg: config.message_bytes_max as u64,
        max_inflight_msgs: config.inflight_max,
        check_quorum: true,
        pre_vote: true,
        batch_append: true,
        max_uncommitted_size: config.uncommitted_bytes_max as u64,
        max_committed_size_per_ready: config.committed_bytes_max as u64,
        ..raft::Config::default()
    }
}

impl Group {
    /// A group over a log that is durable as it stands.
    pub(crate) fn new(
        id: PartitionId,
        setting: &Setting,
        log: MemLog,
        floor: u64,
    ) -> Result<Group, String> {
        let (mark, present) = (log.mark, log.members.clone());
        let hard = (log.hard_state.term, log.hard_state.vote);
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let config = library_config(setting, mark);
        let timeouts = (config.min_election_tick, config.max_election_tick);
        let raw = RawNode::new(&config, log, &logger).map_err(|error| error.to_string())?;
        let mut group = Group {
            id,
            node: setting.node,
            seed: setting.seed,
            timeouts,
            settled: (u64::MAX, StateRole::Follower),
            raw,
            reported: None,
            floor: floor.max(mark.index),
            delivered: mark.index,
            pending: VecDeque::new(),
            released: Vec::new(),
            durable_hard: hard,
            written_hard: hard,
            is_commit_unwritten: false,
            queued: Vec::new(),
            history: VecDeque::new(),
            present,
            leader_heard_ms: None,
            lease: Lease::default(),
            install: None,
            offered_ms: BTreeMap::new(),
            asked_ms: BTreeMap::new(),
            failures: Vec::new(),
        };
        group.settle();
        Ok(group)
    }

    /// Records to write with the next batch, before anything else of the group. Nothing the group
    /// says is sent before they are durable.
    pub(crate) fn queue(&mut self, record: Record) {
        self.queued.push(record);
    }

    /// The term and vote are not on disk yet: a new group.
    pub(crate) fn set_undurable(&mut self) {
        self.durable_hard = (0, 0);
    }

    /// Counts as having heard a leader just now: gives no vote for a while.
    pub(crate) fn hold_votes(&mut self, now_ms: u64) {
        self.leader_heard_ms = Some(now_ms);
    }

    /// After every call into the library: its election timeout must not be random.
    fn settle(&mut self) {
        let raft = &mut self.raw.raft;
        let state = (raft.term, raft.state);
        if self.settled == state {
            return;
        }
        if self.settled.0 != state.0 || state.1 != StateRole::Leader {
            self.lease = Lease::default();
            self.offered_ms.clear();
            self.asked_ms.clear();
        }
        self.settled = state;
        let (min, max) = self.timeouts;
        let drawn = mix(self.seed ^ mix(self.id.0 ^ mix(state.0 ^ mix(state.1 as u64))));
        let span = (max - min).max(1) as u64;
        raft.set_randomized_election_timeout(min + (drawn % span) as usize);
    }

    fn is_leader(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    fn leader(&self) -> Option<NodeId> {
        some_node(self.raw.raft.leader_id)
    }

    fn not_leader(&self) -> ProposeError {
        let leader = self.leader().filter(|&leader| leader != self.node);
        ProposeError::NotLeader { group: self.id, leader }
    }

    fn check_leader(&self) -> Result<(), ProposeError> {
        if !self.is_leader() {
            return Err(self.not_leader());
        }
        if self.raw.raft.lead_transferee.is_some() || !self.raw.raft.promotable() {
            return Err(ProposeError::Busy { group: self.id });
        }
        Ok(())
    }

    fn append(&mut self, kind: EntryType, data: Bytes, context: Bytes) -> Result<(), ProposeError> {
        let mut entry = Entry::default();
        entry.set_entry_type(kind);
        (entry.data, entry.context) = (data, context);
        let mut message = Raw::default();
        message.set_msg_type(MessageType::MsgPropose);
        message.from = raft_id(self.node);
        message.set_entries(vec![entry].into());
        self.raw.raft.step(message).map_err(|_| ProposeError::Busy { group: self.id })
    }

    fn last(&self) -> LogPosition {
        let log = &self.raw.raft.raft_log;
        LogPosition { term: self.raw.raft.term, index: log.last_index() }
    }

    pub(crate) fn propose(&mut self, data: Bytes) -> Result<LogPosition, ProposeError> {
        self.check_leader()?;
        self.append(EntryType::EntryNormal, data, Bytes::new())?;
        Ok(self.last())
    }

    pub(crate) fn propose_change(
        &mut self,
        change: &MemberChange,
        context: &[u8],
    ) -> Result<LogPosition, ProposeError> {
        self.check_leader()?;
        check_change(self.id, change)?;
        if self.raw.raft.has_pending_conf() || self.present.is_joint() {
            return Err(ProposeError::Busy { group: self.id });
        }
        let change = Change::between(&self.present, change, context);
        if change.steps.is_empty() {
            return Err(ProposeError::BadChange { group: self.id, reason: "nothing to change" });
        }
        let bytes = postcard::to_stdvec(&change)
            .map_err(|_| ProposeError::BadChange { group: self.id, reason: "not encodable" })?;
        // The library takes the change from its own encoding in `data`, and hands both out again.
        self.raw
            .propose_conf_change(bytes, change.to_raft())
            .map_err(|_| ProposeError::Busy { group: self.id })?;
        Ok(self.last())
    }

    pub(crate) fn read_index(&mut self, context: u64) -> Result<(), ProposeError> {
        if !self.is_leader() {
            return Err(self.not_leader());
        }
        if !self.raw.raft.commit_to_current_term() {
            return Err(ProposeError::Busy { group: self.id });
        }
        self.raw.read_index(context.to_le_bytes().to_vec());
        Ok(())
    }

    pub(crate) fn transfer_leader(&mut self, to: NodeId) -> bool {
        if !self.is_leader() || to == self.node || !self.present.voters.contains(&to) {
            return false;
        }
        self.lease.bar();
        self.raw.transfer_leader(raft_id(to));
        true
    }

    pub(crate) fn campaign(&mut self) -> bool {
        let may = !self.is_leader() && self.raw.raft.promotable() && !self.has_undurable_log();
        may && self.raw.campaign().is_ok_and(|()| {
            self.settle();
            true
        })
    }

    /// A new group has nothing on disk that an election could depend on, so it need not wait for
    /// the flush of its creation; its messages do.
    pub(crate) fn campaign_on_founding(&mut self) {
        let _ = self.raw.campaign();
        self.settle();
    }

    pub(crate) fn lease_valid(&self, lease_ms: u64, now_ms: u64) -> bool {
        self.is_leader()
            && self.raw.raft.apply_to_current_term()
            && self.lease.is_valid(&self.present, self.node, lease_ms, now_ms)
    }

    fn has_undurable_log(&self) -> bool {
        !self.pending.is_empty() || !self.queued.is_empty()
    }

    /// Lets one tick pass. True if there is something to collect.
    pub(crate) fn tick(&mut self) -> bool {
        let raft = &self.raw.raft;
        if self.is_leader() {
            if !raft.promotable() && !self.present.voters.is_empty() {
                // Removed from the configuration. What committed the removal was sent before.
                let term = raft.term;
                self.raw.raft.become_follower(term, raft::INVALID_ID);
                self.settle();
                return true;
            }
        } else if self.has_undurable_log()
            && raft.election_elapsed + 1 >= raft.randomized_election_timeout()
        {
            // A node whose disk stalls is no good leader; and the library requires that all of
            // the log is durable when an election is won.
            return false;
        }
        let has_ready = self.raw.tick();
        self.settle();
        has_ready
    }

    pub(crate) fn report_unreachable(&mut self, node: NodeId) -> bool {
        let is_known = self.is_leader() && self.raw.raft.prs().get(raft_id(node)).is_some();
        if is_known {
            self.raw.report_unreachable(raft_id(node));
        }
        is_known
    }

    /// Takes a message.
    pub(crate) fn step(&mut self, from: NodeId, message: Message, setting: &Setting, now_ms: u64) {
        let raft = &self.raw.raft;
        let is_current = message.term >= raft.term;
        match &message.body {
            Body::Vote { is_transfer, .. } if !is_transfer && !self.may_vote(setting, now_ms) => {
                return;
            }
            Body::Append { .. } | Body::Heartbeat { .. } if is_current => {
                self.leader_heard_ms = Some(now_ms);
            }
            Body::HeartbeatAnswer { stamp_ms, installing, .. }
                if self.is_leader() && message.term == raft.term =>
            {
                // A stamp from the future was not ours.
                if *stamp_ms <= now_ms {
                    self.lease.answered(from, *stamp_ms);
                }
                self.watch_snapshot(from, *installing, now_ms);
            }
            Body::Snapshot(snapshot) => {
                let snapshot = snapshot.clone();
                self.offer(from, message.term, snapshot, now_ms);
                return;
            }
            Body::SnapshotFailed => {
                if self.is_leader() && message.term == raft.term {
                    self.raw.report_snapshot(raft_id(from), SnapshotStatus::Failure);
                }
                return;
            }
            _ => {}
        }
        let Some(raw) = to_raft(from, self.node, message) else { return };
        if let Some(raw) = self.sanitize(raw) {
            // Refusals (a peer that is no member, a proposal dropped) need no answer.
            let _ = self.raw.step(raw);
            self.settle();
        }
    }

    /// Whether the promise to the last leader, and to the one before a restart, has run out.
    fn may_vote(&self, setting: &Setting, now_ms: u64) -> bool {
        self.leader_heard_ms
            .is_none_or(|heard| now_ms >= heard.saturating_add(setting.config.election_min_ms))
    }

    /// Keeps from the library what it would panic on, and what trips its known defects.
    fn sanitize(&self, mut raw: Raw) -> Option<Raw> {
        let raft = &self.raw.raft;
        let last = raft.raft_log.last_index();
        match raw.get_msg_type() {
            MessageType::MsgHeartbeat if raw.term >= raft.term && raw.commit > last => {
                // The leader believes that we have more than we do: our log lost entries that
                // were durable, or the leader is not one. We cannot commit what we do not have.
                tracing::error!(
                    group = self.id.0,
                    commit = raw.commit,
                    last,
                    "leader counts on entries that are not in this log"
                );
                raw.commit = last;
            }
            MessageType::MsgAppendResponse if raw.term == raft.term && self.is_leader() => {
                if !raw.reject {
                    return (raw.index <= last).then_some(raw);
                }
                let matched = raft.prs().get(raw.from)?.matched;
                if raw.index <= matched {
                    return None;
                }
                if raw.reject_hint < matched {
                    (raw.reject_hint, raw.log_term) = (matched, 0);
                }
            }
            MessageType::MsgTimeoutNow if self.has_undurable_log() => return None,
            _ => {}
        }
        Some(raw)
    }

    /// Follower: the leader offers a snapshot. The library sees it when the owner has it.
    fn offer(&mut self, from: NodeId, term: u64, snapshot: SnapshotDescriptor, now_ms: u64) {
        if term < self.raw.raft.term {
            return;
        }
        self.leader_heard_ms = Some(now_ms);
        let log = &self.raw.raft.raft_log;
        let is_needed = snapshot.position.index > log.committed
            && !log.match_term(snapshot.position.index, snapshot.position.term)
            && snapshot.members.contains(self.node);
        let mut raw = Raw::default();
        (raw.from, raw.to, raw.term) = (raft_id(from), raft_id(self.node), term);
        if is_needed {
            // For the library this was a heartbeat: it keeps us loyal while we fetch.
            raw.set_msg_type(MessageType::MsgHeartbeat);
            let index = snapshot.position.index;
            let is_newer =
                self.install.as_ref().is_none_or(|known| known.snapshot.position.index < index);
            if is_newer {
                self.install = Some(Install { from, snapshot, is_announced: false });
            }
        } else {
            raw.set_msg_type(MessageType::MsgSnapshot);
            raw.set_snapshot(raft_snapshot(&snapshot));
        }
        let _ = self.raw.step(raw);
        self.settle();
    }

    /// Leader: a follower that was offered a snapshot must say that it fetches it.
    fn watch_snapshot(&mut self, from: NodeId, installing: u64, now_ms: u64) {
        let id = raft_id(from);
        let Some(progress) = self.raw.raft.prs().get(id) else { return };
        if progress.state != ProgressState::Snapshot || installing >= progress.pending_snapshot {
            return;
        }
        let offered = self.offered_ms.get(&from).copied().unwrap_or(0);
        if now_ms >= offered.saturating_add(SNAPSHOT_ANSWER_MS) {
            self.raw.report_snapshot(id, SnapshotStatus::Failure);
        }
    }

    pub(crate) fn snapshot_installed(&mut self, index: u64) {
        let Some(install) = self.install.take() else { return };
        if install.snapshot.position.index != index {
            self.install = Some(install);
            return;
        }
        // Whatever the library makes of it, the owner's state is there now.
        self.floor = self.floor.max(index);
        let raft = &mut self.raw.raft;
        if raft.state != StateRole::Follower {
            if raft.state == StateRole::Leader {
                return;
            }
            let term = raft.term;
            raft.become_follower(term, raft::INVALID_ID);
        }
        raft.restore(raft_snapshot(&install.snapshot));
        if raft.leader_id != raft::INVALID_ID {
            let mut answer = Raw::default();
            answer.set_msg_type(MessageType::MsgAppendResponse);
            (answer.from, answer.to, answer.term) = (raft.id, raft.leader_id, raft.term);
            answer.index = raft.raft_log.committed;
            raft.msgs.push(answer);
        }
        self.settle();
    }

    pub(crate) fn snapshot_failed(&mut self) {
        if let Some(install) = self.install.take() {
            let message = Message { term: self.raw.raft.term, body: Body::SnapshotFailed };
            self.failures.push((install.from, message));
        }
    }

    pub(crate) fn set_snapshot(&mut self, snapshot: SnapshotDescriptor) {
        self.asked_ms.clear();
        self.raw.mut_store().snapshot = Some(snapshot);
    }

    /// The owner has applied up to `index`. More than was delivered is not believed.
    pub(crate) fn applied(&mut self, index: u64) {
        let log = &self.raw.raft.raft_log;
        let index = index.min(self.delivered).min(log.committed).min(log.persisted);
        if index > log.applied {
            self.raw.advance_apply_to(index);
        }
    }

    fn members_at(&self, index: u64) -> Members {
        let entry = self.history.iter().rev().find(|(since, _)| *since <= index);
        entry.map_or_else(|| self.raw.store().members.clone(), |(_, members)| members.clone())
    }

    pub(crate) fn describe(&self, index: u64) -> Option<SnapshotDescriptor> {
        let log = &self.raw.raft.raft_log;
        if index > log.applied.max(self.floor.min(self.delivered)) {
            return None;
        }
        let term = self.raw.store().term_at(index)?;
        Some(SnapshotDescriptor {
            position: LogPosition { term, index },
            members: self.members_at(index),
        })
    }

    pub(crate) fn compact(&mut self, index: u64) {
        let index = index.min(self.raw.raft.raft_log.applied);
        if index <= self.raw.store().mark.index
            || self.raw.raft.raft_log.unstable.snapshot.is_some()
        {
            return;
        }
        let Some(term) = self.raw.store().term_at(index) else { return };
        let (mark, members) = (LogPosition { term, index }, self.members_at(index));
        self.raw.mut_store().compact(mark, members.clone());
        self.history.retain(|(since, _)| *since > index);
        self.queued.push(Record::Compacted { group: self.id, mark, members });
    }

    /// The batch, and all before it, is durable. True if there is something to collect.
    pub(crate) fn persisted(&mut self, batch: u64) -> bool {
        let mut is_any = false;
        while let Some(pending) = self.pending.pop_front_if(|pending| pending.batch <= batch) {
            self.raw.on_persist_ready(pending.ready);
            self.durable_hard = pending.hard;
            self.released.extend(pending.messages);
            if let Some(index) = pending.snapshot {
                self.applied(index);
            }
            is_any = true;
        }
        is_any
    }

    pub(crate) fn has_work(&self) -> bool {
        self.raw.has_ready()
            || !self.released.is_empty()
            || !self.queued.is_empty()
            || !self.failures.is_empty()
    }

    /// Everything there is to do. `batch` is the number the records will go under.
    pub(crate) fn collect(&mut self, batch: u64, setting: &Setting, now_ms: u64) -> Collected {
        let mut out = Collected::default();
        let mut ready_messages = Vec::new();
        // A configuration that takes effect may give rise to more at once.
        for _ in 0..4 {
            if !self.raw.has_ready() {
                break;
            }
            self.take_ready(batch, &mut out, &mut ready_messages);
        }
        self.take_queued(batch, &mut out);
        ready_messages.append(&mut self.released);
        self.send(ready_messages, &mut out, setting, now_ms);
        self.applied(self.floor.min(self.delivered));
        self.report_role(&mut out);
        self.ask_for_snapshots(&mut out, now_ms);
        if let Some(install) = self.install.as_mut().filter(|install| !install.is_announced) {
            install.is_announced = true;
            let (from, snapshot) = (install.from, install.snapshot.clone());
            out.install = Some(InstallSnapshot { group: self.id, from, snapshot });
        }
        out
    }

    fn take_ready(&mut self, batch: u64, out: &mut Collected, now: &mut Vec<Raw>) {
        let mut ready = self.raw.ready();
        let number = ready.number();
        let mut messages = ready.take_messages();
        let mut waiting = ready.take_persisted_messages();
        let before = out.records.len();
        self.write_hard_state(&ready, out);
        let snapshot = self.write_snapshot(&ready, out);
        self.write_entries(ready.take_entries(), out);
        out.reads.extend(ready.take_read_states().iter().filter_map(|read| {
            let context = read.request_ctx.as_slice().try_into().ok()?;
            let context = u64::from_le_bytes(context);
            Some(ReadReady { group: self.id, context, index: read.index })
        }));
        let committed = ready.take_committed_entries();
        self.raw.advance_append_async(ready);
        let hard = (self.raw.store().hard_state.term, self.raw.store().hard_state.vote);
        if hard != self.durable_hard {
            waiting.append(&mut messages);
        } else {
            // These promise nothing about the log, so they need not wait for the disk; a disk
            // that stalls for a moment must not cost the leader its majority.
            let is_answer = |raw: &Raw| raw.get_msg_type() == MessageType::MsgHeartbeatResponse;
            let (answers, rest) = waiting.into_iter().partition(is_answer);
            (waiting, messages) = (rest, [messages, answers].concat());
        }
        let is_written = out.records.len() > before || !self.queued.is_empty();
        match self.pending.back_mut() {
            Some(back) if !is_written || back.batch == batch => {
                (back.ready, back.hard) = (number, hard);
                back.snapshot = back.snapshot.max(snapshot);
                back.messages.append(&mut waiting);
            }
            None if !is_written => {
                self.raw.on_persist_ready(number);
                messages.append(&mut waiting);
            }
            _ => {
                let pending = Pending { batch, ready: number, messages: waiting, hard, snapshot };
                self.pending.push_back(pending);
            }
        }
        now.append(&mut messages);
        self.deliver(committed, out);
    }

    /// A new commit index alone is worth no flush: it goes with the next records.
    fn write_hard_state(&mut self, ready: &raft::Ready, out: &mut Collected) {
        if let Some(hard) = ready.hs() {
            self.raw.mut_store().hard_state = hard.clone();
            self.is_commit_unwritten = true;
        }
        let hard = &self.raw.store().hard_state;
        let is_due = (hard.term, hard.vote) != self.written_hard
            || self.is_commit_unwritten && (!ready.entries().is_empty() || !self.queued.is_empty());
        if is_due {
            let (term, vote, commit) = (hard.term, some_node(hard.vote), hard.commit);
            self.written_hard = (term, hard.vote);
            self.is_commit_unwritten = false;
            out.records.push(Record::HardState { group: self.id, term, vote, commit });
        }
    }

    fn write_snapshot(&mut self, ready: &raft::Ready, out: &mut Collected) -> Option<u64> {
        let meta = ready.snapshot().get_metadata();
        if meta.index == 0 {
            return None;
        }
        let mark = LogPosition { term: meta.term, index: meta.index };
        let members = members(meta.get_conf_state());
        let snapshot = SnapshotDescriptor { position: mark, members: members.clone() };
        self.raw.mut_store().restore(snapshot);
        self.history.clear();
        self.present = members.clone();
        self.delivered = mark.index;
        out.records.push(Record::Snapshot { group: self.id, mark, members });
        Some(mark.index)
    }

    fn write_entries(&mut self, entries: Vec<Entry>, out: &mut Collected) {
        let start = out.records.len();
        let group = self.id;
        let records = entries.iter().map(|raw| Record::Entry { group, entry: log_entry(raw) });
        out.records.extend(records);
        if let Some(from) = self.raw.mut_store().append(entries) {
            out.records.insert(start, Record::Truncated { group, from });
        }
    }

    /// Records that are not the library's: they come first in the group's part of the batch.
    fn take_queued(&mut self, batch: u64, out: &mut Collected) {
        if self.queued.is_empty() {
            return;
        }
        let queued = std::mem::take(&mut self.queued);
        out.records.splice(0..0, queued);
        if self.pending.back().is_none_or(|back| back.batch != batch) {
            let hard = &self.raw.store().hard_state;
            let hard = (hard.term, hard.vote);
            let ready = 0;
            let pending = Pending { batch, ready, messages: Vec::new(), hard, snapshot: None };
            self.pending.push_back(pending);
        }
    }

    fn deliver(&mut self, entries: Vec<Entry>, out: &mut Collected) {
        for entry in entries {
            let position = LogPosition { term: entry.term, index: entry.index };
            let payload = match entry.get_entry_type() {
                EntryType::EntryNormal if entry.data.is_empty() => Payload::Empty,
                EntryType::EntryNormal => Payload::Data(entry.data),
                _ => self.change_members(position.index, &entry.context, entry.data.is_empty()),
            };
            self.delivered = position.index;
            if position.index > self.floor {
                out.committed.push(Committed { position, payload });
            }
        }
    }

    /// A configuration takes effect. One that is refused is refused by every member, as it
    /// depends on nothing but the log.
    fn change_members(&mut self, index: u64, context: &[u8], is_leave: bool) -> Payload {
        let change = if is_leave && context.is_empty() {
            Some(Change::default())
        } else {
            postcard::from_bytes::<Change>(context).ok()
        };
        let Some(change) = change else { return Payload::Empty };
        let raw: ConfChangeV2 = change.to_raft();
        match self.raw.apply_conf_change(&raw) {
            Ok(state) => {
                let members = members(&state);
                self.present = members.clone();
                self.history.push_back((index, members.clone()));
                Payload::Members { members, context: change.context.into() }
            }
            Err(error) => {
                tracing::warn!(group = self.id.0, index, %error, "configuration change refused");
                Payload::Empty
            }
        }
    }

    fn send(&mut self, raws: Vec<Raw>, out: &mut Collected, setting: &Setting, now_ms: u64) {
        let installing = self.install.as_ref().map_or(0, |install| install.snapshot.position.index);
        let message_bytes_max = setting.config.message_bytes_max;
        let sending = Sending { now_ms, installing, message_bytes_max };
        for mut raw in raws {
            self.anchor(&mut raw);
            let to = node_of(raw.to);
            if raw.get_msg_type() == MessageType::MsgSnapshot {
                self.offered_ms.insert(to, now_ms);
            }
            out.messages.extend(from_raft(raw, &sending).into_iter().map(|message| (to, message)));
        }
        out.messages.append(&mut self.failures);
    }

    /// Batching puts entries into an append that waits to be sent. If that one was empty (it only
    /// told the commit index), the library does not check that they follow its position, and they
    /// may not when the follower's progress was reset in between.
    fn anchor(&self, raw: &mut Raw) {
        let Some(first) = raw.get_entries().first().map(|entry| entry.index) else { return };
        if raw.get_msg_type() != MessageType::MsgAppend || raw.index + 1 == first {
            return;
        }
        let log = &self.raw.raft.raft_log;
        match log.term(first - 1) {
            Ok(term) if first >= log.first_index() => {
                (raw.index, raw.log_term) = (first - 1, term);
            }
            _ => raw.mut_entries().clear(),
        }
    }

    fn report_role(&mut self, out: &mut Collected) {
        let raft = &self.raw.raft;
        let role = RoleChange {
            group: self.id,
            role: role_of(raft.state),
            term: raft.term,
            leader: some_node(raft.leader_id),
        };
        if self.reported.as_ref() != Some(&role) {
            self.reported = Some(role.clone());
            out.role = Some(role);
        }
    }

    fn ask_for_snapshots(&mut self, out: &mut Collected, now_ms: u64) {
        let wanted = self.raw.store().wanted.take();
        for follower in wanted {
            let asked = self.asked_ms.get(&follower).copied();
            if asked.is_none_or(|asked| now_ms >= asked.saturating_add(SNAPSHOT_ASK_AGAIN_MS)) {
                self.asked_ms.insert(follower, now_ms);
                out.snapshots_wanted.push(SnapshotWanted { group: self.id, follower });
            }
        }
    }

    pub(crate) fn status(&self) -> GroupStatus {
        let raft = &self.raw.raft;
        let log = &raft.raft_log;
        GroupStatus {
            role: role_of(raft.state),
            term: raft.term,
            leader: self.leader(),
            commit: log.committed,
            applied: log.applied,
            first_index: self.raw.store().mark.index + 1,
            last_index: log.last_index(),
            persisted: log.persisted,
            members: self.present.clone(),
            followers: if self.is_leader() { self.followers() } else { Vec::new() },
        }
    }

    fn followers(&self) -> Vec<FollowerStatus> {
        let last = self.raw.raft.raft_log.last_index();
        let others = self.raw.raft.prs().iter().filter(|(id, _)| **id != raft_id(self.node));
        let mut followers: Vec<FollowerStatus> = others
            .map(|(&id, progress)| FollowerStatus {
                node: node_of(id),
                matched: progress.matched,
                lag: last.saturating_sub(progress.matched),
                is_active: progress.recent_active,
                state: match progress.state {
                    ProgressState::Probe => FollowerState::Probe,
                    ProgressState::Replicate => FollowerState::Replicate,
                    ProgressState::Snapshot => FollowerState::Snapshot,
                },
            })
            .collect();
        followers.sort_unstable_by_key(|follower| follower.node);
        followers
    }
}

fn check_change(group: PartitionId, change: &MemberChange) -> Result<(), ProposeError> {
    let bad = |reason| Err(ProposeError::BadChange { group, reason });
    let mut all: Vec<NodeId> = change.voters.iter().chain(&change.learners).copied().collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    if change.voters.is_empty() {
        return bad("no voter");
    }
    if all.len() != count {
        return bad("a node is named twice");
    }
    Ok(())
}
