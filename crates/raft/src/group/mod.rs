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
//! * It panics on messages that no correct node sends: those that are wrong in themselves are refused when a
//!   frame is decoded, those that are wrong here by [`Group::sanitize`].
//! * A follower that crashes while it fetches a snapshot would never be offered another one:
//!   [`Group::watch_snapshot`].
//! * A node that is paused or restarts forgets that it promised its leader not to vote for others:
//!   [`Group::may_vote`].
//! * Its election timeouts come from a thread-local generator. [`Group::stagger`] replaces them
//!   by a function of seed, group, voters, term and role; the library draws only when one of the
//!   latter two changes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};
use raft::eraftpb::{Entry, EntryType, Message as Raw, MessageType};
use raft::{ProgressState, RawNode, StateRole};

use crate::config::RaftConfig;
use crate::convert::{Change, node_of, raft_id, some_node};
use crate::lease::Lease;
use crate::memlog::MemLog;
use crate::message::Message;
use crate::types::{
    Committed, FollowerState, FollowerStatus, GroupStatus, InstallSnapshot, LogPosition,
    MemberChange, Members, ProposeError, ReadReady, Role, RoleChange, SnapshotDescriptor,
    SnapshotWanted,
};
use crate::wal::{Record, mix};

mod alone;
mod burden;
mod inbound;
mod leaving;
mod outbound;
mod rejoining;
mod relief;
mod roster;
mod stagger;

use alone::Alone;
pub use alone::word_of_term;
use burden::Burden;
use leaving::Leaving;
use rejoining::Rejoining;
pub(crate) use relief::QUICK_MS;
use relief::Trial;
use roster::Roster;
use stagger::{Slot, timeout};

/// A founding member that was told to campaign asks again after each heartbeat interval, this
/// often: the other replicas may be created a little later than its own.
const FOUNDING_ATTEMPTS: u32 = 20;

/// What the group needs to know of its node.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) node: NodeId,
    pub(crate) seed: u64,
    pub(crate) config: RaftConfig,
    /// Bytes of applied entries that a group may keep in memory.
    pub(crate) tail_bytes: usize,
    /// No flush has taken long lately, and none does now.
    pub(crate) is_disk_quick: bool,
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
    pub(crate) is_snapshot_doubted: bool,
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
    /// Leader: what was committed when the last election timeout but one ended, and when the last one did.
    commits: (u64, u64),
    /// Leader: the change that is in the log and takes voters out.
    leaving: Option<Leaving>,
    /// The term in which this leader tried to hand over, as it is to leave.
    handed_over: u64,
    lease: Lease,
    burden: Burden,
    trial: Option<Trial>,
    install: Option<Install>,
    /// Committed while the owner fetches a snapshot: it gets them when the fetch has ended. Till then
    /// nobody can say which of them the state that takes the place of its own will contain.
    held: Vec<Committed>,
    /// Leader: who fetches a snapshot, also one that was offered by a leader before this one.
    installing: BTreeSet<NodeId>,
    /// Leader: when a snapshot was last offered to a follower.
    offered_ms: BTreeMap<NodeId, u64>,
    /// Leader: when the owner was last asked for a snapshot.
    asked_ms: BTreeMap<NodeId, u64>,
    /// Leader: a follower could not take what it was offered, and the owner has not heard of it yet.
    is_snapshot_doubted: bool,
    notices: Vec<(NodeId, Message)>,
    /// How often this founding member will still ask for votes out of turn.
    founding_attempts: u32,
    founding_ticks: usize,
    /// The library's members differ from those of the log.
    alone: Option<Alone>,
    /// What was promised here is forgotten, and may not be forgotten by the others yet.
    rejoining: Option<Rejoining>,
    roster: Roster,
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
        skip_bcast_commit: !config.announces_commits,
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
            commits: (0, 0),
            leaving: None,
            handed_over: 0,
            lease: Lease::default(),
            burden: Burden::default(),
            trial: None,
            install: None,
            held: Vec::new(),
            installing: BTreeSet::new(),
            offered_ms: BTreeMap::new(),
            asked_ms: BTreeMap::new(),
            is_snapshot_doubted: false,
            notices: Vec::new(),
            founding_attempts: 0,
            founding_ticks: 0,
            alone: None,
            rejoining: None,
            roster: Roster::default(),
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
            self.installing.clear();
            self.offered_ms.clear();
            self.asked_ms.clear();
        }
        self.settled = state;
        // A new leader does not know what is committed: at most all that it has.
        let last = raft.raft_log.last_index();
        self.commits = (last, last);
        self.burden.begin(self.raw.raft.raft_log.committed);
        self.leaving = None;
        if self.is_leader() {
            self.inherit_leaving();
        }
        self.stagger();
    }

    /// Sets the election timeout: for a new term, a new role, or other voters.
    fn stagger(&mut self) {
        let raft = &mut self.raw.raft;
        let (term, role) = (raft.term, raft.state);
        let voters: BTreeSet<NodeId> =
            self.present.voters.iter().chain(&self.present.outgoing).copied().collect();
        let rank = voters.iter().position(|voter| *voter == self.node);
        let turn = mix(self.id.0).wrapping_add(term);
        let slot = rank.map(|rank| Slot::of(rank, voters.len(), turn));
        let drawn = mix(self.seed ^ mix(self.id.0 ^ mix(term ^ mix(role as u64))));
        raft.set_randomized_election_timeout(timeout(self.timeouts, slot, drawn));
    }

    fn is_leader(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    fn leader(&self) -> Option<NodeId> {
        some_node(self.raw.raft.leader_id)
    }

    pub(crate) fn leads_in(&self) -> Option<u64> {
        self.is_leader().then_some(self.raw.raft.term)
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

    /// While a change of the members is in the log and has not taken effect, nothing is put behind it: the
    /// old members could commit that without the new ones ([`go_alone`](Group::go_alone) rests on it).
    /// Nor does anybody commit what only one of two has.
    pub(crate) fn propose(&mut self, data: Bytes) -> Result<LogPosition, ProposeError> {
        self.check_leader()?;
        // A leader that was to hand over comes to an end with what it has first ([`renew_term`](Group::renew_term)).
        let is_to_end = self.lease.is_barred();
        if is_to_end || self.raw.raft.pending_conf_index > self.delivered || self.alone.is_some() {
            return Err(ProposeError::Busy { group: self.id });
        }
        self.append(EntryType::EntryNormal, data, Bytes::new())?;
        Ok(self.last())
    }

    pub(crate) fn propose_change(
        &mut self,
        change: &MemberChange,
        lost: &[NodeId],
        context: &[u8],
        since_ms: u64,
    ) -> Result<LogPosition, ProposeError> {
        self.check_leader()?;
        check_change(self.id, change)?;
        // A change takes effect when it is delivered; the library waits until the owner has applied it.
        if self.raw.raft.pending_conf_index <= self.delivered && !self.present.is_joint() {
            self.raw.raft.pending_conf_index = 0;
        }
        if self.raw.raft.has_pending_conf() || self.present.is_joint() {
            return Err(ProposeError::Busy { group: self.id });
        }
        let leaves = |voter| !change.voters.contains(voter);
        let keeps_lost = change.voters.iter().any(|voter| lost.contains(voter));
        let is_ready = || !keeps_lost && self.majority_has_committed(&change.voters, since_ms);
        if self.present.voters.iter().any(leaves) && !is_ready() {
            return Err(ProposeError::Busy { group: self.id });
        }
        let change = Change::between(&self.present, change, context);
        if change.steps.is_empty() {
            return Err(ProposeError::BadChange { group: self.id, reason: "nothing to change" });
        }
        let leaving = self.leaving(self.last().index + 1, &change);
        if leaving.as_ref().is_some_and(|leaving| self.hands_over(leaving)) {
            return Err(ProposeError::Busy { group: self.id });
        }
        let bytes = postcard::to_stdvec(&change)
            .map_err(|_| ProposeError::BadChange { group: self.id, reason: "not encodable" })?;
        // The library takes the change from its own encoding in `data`, and hands both out again.
        self.raw
            .propose_conf_change(bytes, change.to_raft())
            .map_err(|_| ProposeError::Busy { group: self.id })?;
        self.leaving = leaving;
        Ok(self.last())
    }

    /// Whether a majority of these voters-to-be have what was committed an election timeout ago, or a little earlier (who is
    /// only slow is always behind). If not, those who leave may be needed to commit that they do: what was committed with them, and then
    /// the change itself, would be on fewer disks of those who stay than one that is lost may take with it. And they were heard
    /// since `since_ms`: where nothing happens one that has died has everything too, and cannot take the change.
    fn majority_has_committed(&self, voters: &[NodeId], since_ms: u64) -> bool {
        let raft = &self.raw.raft;
        if !raft.commit_to_current_term() {
            return false;
        }
        let has = |node: &&NodeId| {
            let progress = raft.prs().get(raft_id(**node));
            let has_it = progress.is_some_and(|it| it.matched >= self.commits.0);
            **node == self.node || has_it && self.lease.is_heard(**node, since_ms)
        };
        // Those who learn as well. Who is not here yet gets the change with all that is before it.
        let known: Vec<&NodeId> = voters.iter().filter(|it| self.present.contains(**it)).collect();
        known.is_empty() || known.iter().filter(|node| has(node)).count() > known.len() / 2
    }

    pub(crate) fn read_index(&mut self, context: u64) -> Result<(), ProposeError> {
        // One that was removed has nobody to ask whether it leads still.
        if !self.is_leader() || !self.raw.raft.promotable() {
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
        let may = !self.is_leader() && self.raw.raft.promotable() && self.may_stand();
        may && self.raw.campaign().is_ok_and(|()| {
            self.settle();
            true
        })
    }

    /// A new group has nothing on disk that an election could depend on, so it need not wait for
    /// the flush of its creation; its messages do.
    pub(crate) fn campaign_on_founding(&mut self) {
        if !self.raw.raft.promotable() {
            return;
        }
        self.founding_attempts = FOUNDING_ATTEMPTS;
        let _ = self.raw.campaign();
        self.settle();
    }

    /// Asks for votes again if nobody leads yet. Only with pre-votes, which disturb nobody. Whoever
    /// has no vote does not ask: the library would let it, and panics when it wins.
    fn campaign_again(&mut self) -> bool {
        self.founding_ticks += 1;
        let raft = &self.raw.raft;
        if raft.leader_id != raft::INVALID_ID || !raft.promotable() {
            self.founding_attempts = 0;
        }
        let is_due = self.founding_attempts > 0
            && self.founding_ticks.is_multiple_of(raft.heartbeat_timeout())
            && matches!(raft.state, StateRole::Follower | StateRole::PreCandidate)
            && !self.has_undurable_log();
        if is_due {
            self.founding_attempts -= 1;
            let _ = self.raw.campaign();
            self.settle();
        }
        is_due
    }

    pub(crate) fn lease_valid(&self, lease_ms: u64, now_ms: u64) -> bool {
        self.is_leader()
            && self.raw.raft.apply_to_current_term()
            && self.lease.is_valid(&self.present, self.node, lease_ms, now_ms)
    }

    /// Who fetches a snapshot does not: its log may be of a time that the group has left, and so may be the voters that it
    /// counts, though its owner knows of newer ones, so that others would hear it (simulation, seed 772001). And if it has
    /// got all of it as entries meanwhile, it would still apply nothing before the fetch has ended: a leader that nobody
    /// replaces, and that serves nobody.
    fn may_stand(&self) -> bool {
        !self.has_undurable_log()
            && !self.is_rejoining()
            && self.install.is_none()
            && !self.is_below_word()
    }

    /// What waits for the disk, and what the library has and no turn has taken yet.
    fn has_undurable_log(&self) -> bool {
        let log = &self.raw.raft.raft_log;
        !self.pending.is_empty() || !self.queued.is_empty() || log.persisted < log.last_index()
    }

    /// Whether everything about the group that was decided so far is on disk.
    pub(crate) fn is_durable(&self) -> bool {
        !self.has_undurable_log()
    }

    /// A leader that is removed from the configuration leads no more: the library would panic when it
    /// commits another entry. What committed the removal was sent before. True if it was so.
    fn step_down_if_removed(&mut self) -> bool {
        let raft = &self.raw.raft;
        let is_removed = self.is_leader() && !raft.promotable() && !self.present.voters.is_empty();
        if is_removed {
            let term = raft.term;
            self.raw.raft.become_follower(term, raft::INVALID_ID);
            self.settle();
        }
        is_removed
    }

    /// A leader that was to hand over, and whom nobody relieved within an election timeout, asks for the votes
    /// itself: a request to lead that is still on its way is of the past in a new term, and only so there may be
    /// a lease again. True if it does.
    fn renew_term(&mut self) -> bool {
        let raft = &self.raw.raft;
        let log = &raft.raft_log;
        let is_due = self.is_leader()
            && self.lease.is_barred()
            && raft.lead_transferee.is_none()
            && raft.promotable()
            && self.alone.is_none()
            // The library asks for no votes, or panics when it gets them, otherwise.
            && log.applied == log.committed
            && !self.has_undurable_log();
        if is_due {
            let term = raft.term;
            tracing::info!(group = self.id.0, term, "nobody took over the lead: a new term");
            self.raw.raft.become_follower(term, raft::INVALID_ID);
            let mut request = Raw { term, ..Raw::default() };
            request.set_msg_type(MessageType::MsgTimeoutNow);
            // No vote was asked for yet, so nothing is refused.
            let _ = self.raw.step(request);
            // Who is to leave has tried to hand over.
            if self.handed_over == term {
                self.handed_over = self.raw.raft.term;
            }
            self.settle();
        }
        is_due
    }

    /// Lets one tick pass. True if there is something to collect.
    pub(crate) fn tick(&mut self, now_ms: u64) -> bool {
        if self.step_down_if_removed() {
            return true;
        }
        if self.is_rejoining() || self.install.is_some() {
            return self.tick_quietly();
        }
        let raft = &self.raw.raft;
        if !self.is_leader()
            && (self.has_undurable_log() || self.is_below_word() || self.burden.rests(now_ms))
            && raft.election_elapsed + 1 >= raft.randomized_election_timeout()
        {
            // Who is below a word may not lead. A node whose disk stalls is no good leader, nor one that has just given up; and the library
            // requires that all of the log is durable when an election is won.
            return false;
        }
        let has_asked = self.founding_attempts > 0 && self.campaign_again();
        let has_ready = self.raw.tick() | self.renew_term();
        // So the library begins to count anew.
        if self.is_leader() && self.raw.raft.election_elapsed == 0 {
            self.commits = (self.commits.1, self.raw.raft.raft_log.committed);
        }
        self.settle();
        has_ready || has_asked
    }

    /// How much the group has said that no turn has taken yet.
    pub(crate) fn said(&self) -> (usize, usize) {
        (self.raw.raft.msgs.len(), self.notices.len())
    }

    /// What it said since is as if lost on the way.
    pub(crate) fn forget_after(&mut self, said: (usize, usize)) {
        self.raw.raft.msgs.truncate(said.0);
        self.notices.truncate(said.1);
    }

    pub(crate) fn report_unreachable(&mut self, node: NodeId) -> bool {
        let is_known = self.is_leader() && self.raw.raft.prs().get(raft_id(node)).is_some();
        if is_known {
            self.raw.report_unreachable(raft_id(node));
        }
        is_known
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

    /// Keeps of the applied entries what fits into `bytes_max`. A follower that fetches a snapshot
    /// needs what comes after it, or it would need another one for ever; for it, some more stays.
    pub(crate) fn trim(&mut self, bytes_max: usize) {
        const FETCHING_FACTOR: usize = 8;
        let raft = &self.raw.raft;
        let bytes = self.raw.store().bytes();
        if bytes <= bytes_max {
            return;
        }
        let fetching = raft.prs().iter().filter(|(_, p)| p.state == ProgressState::Snapshot);
        let held = fetching.map(|(_, progress)| progress.pending_snapshot).min();
        let held = held.filter(|_| self.is_leader() && bytes <= bytes_max * FETCHING_FACTOR);
        let index = raft.raft_log.applied.min(held.unwrap_or(u64::MAX));
        self.raw.mut_store().trim(index, bytes_max);
    }

    pub(crate) fn tail_bytes(&self) -> usize {
        self.raw.store().bytes()
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        let (raft, pending) = (&self.raw.raft, &self.pending);
        let readies = pending.iter().map(|pending| pending.ready);
        let readies = readies.clone().max().unwrap_or(0) - readies.min().unwrap_or(0);
        let messages = raft.msgs.len() + self.notices.len() + self.released.len();
        let held_back: usize = pending.iter().map(|pending| pending.messages.len()).sum();
        readies as usize + messages + held_back + raft.raft_log.unstable_entries().len()
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
            last_term: log.last_term(),
            persisted: log.persisted,
            tail_first: log.first_index(),
            tail_bytes: self.tail_bytes(),
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
                is_installing: self.installing.contains(&node_of(id)),
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
