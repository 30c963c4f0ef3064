//! The node-level core: all groups of one node, without clock, socket, file or thread.
//!
//! Only groups that have something to do are touched in a turn; an idle group costs a counter each
//! tick and one heartbeat each way in the node's frame. See the [crate] doc for the loop around it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{Epoch, NodeId, PartitionId};
use raft::eraftpb::HardState;

use crate::config::{ConfigError, RaftConfig};
use crate::convert::{raft_entry, raft_id};
use crate::group::{Group, QUICK_MS, Setting};
use crate::memlog::MemLog;
use crate::message::{Frame, FrameError};
use crate::types::{
    GroupStart, GroupStatus, LogPosition, MemberChange, Members, ProposeError, SnapshotDescriptor,
};
use crate::wal::{Damage, LogBatch, Record, Recovered, RecoveredGroup};

#[cfg(test)]
mod tests;
mod turn;

pub use turn::{RecoverError, Turn};

use turn::Frames;

/// Where the log of a group starts that is founded here: as if after a snapshot of one entry. A
/// replica that joins later starts at 0, so that it needs a snapshot, which tells it the
/// configuration.
const FOUNDING_MARK: LogPosition = LogPosition { term: 1, index: 1 };

/// So often the log of an idle group hears what is committed.
const COMMITS_NOTED_MS: u64 = 500;
/// A slow flush counts against a disk for so long, if no quick one comes after it.
const SLOW_FLUSH_COUNTS_MS: u64 = 10_000;

/// Those of whom a batch tells.
#[derive(Debug, Default)]
struct Writers {
    groups: Vec<PartitionId>,
    /// No longer there.
    removed: Vec<PartitionId>,
    handed_out_ms: u64,
}

impl Writers {
    /// Whether it is not long ago that the batch was handed out.
    fn is_quick(&self, now_ms: u64) -> bool {
        now_ms <= self.handed_out_ms.saturating_add(QUICK_MS)
    }
}

/// All Raft groups of one node.
pub struct MultiRaft {
    setting: Setting,
    groups: BTreeMap<PartitionId, Group>,
    /// On disk, but not fit to take part.
    refused: BTreeSet<PartitionId>,
    /// Groups that may have something to do.
    dirty: BTreeSet<PartitionId>,
    next_batch: u64,
    /// Who waits for a batch.
    waiting: BTreeMap<u64, Writers>,
    /// When the last flush ended, if it was a slow one.
    slow_flush_ms: Option<u64>,
    /// Groups that were refused, for the next turn.
    contradicted: Vec<PartitionId>,
    /// Records of groups that are no longer there.
    farewells: Vec<Record>,
    ticked_ms: Option<u64>,
    /// When idle groups wrote last what is committed.
    noted_ms: u64,
    has_failed: bool,
    /// No turn is taken, as the log has enough to do.
    is_held: bool,
}

impl std::fmt::Debug for MultiRaft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let groups = self.groups.len();
        f.debug_struct("MultiRaft")
            .field("setting", &self.setting)
            .field("groups", &groups)
            .finish()
    }
}

impl MultiRaft {
    /// An empty node. `seed` decides the election timeouts and nothing else; give each node
    /// process another one (in a simulation: from the simulation's seed).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem of the settings.
    pub fn new(node: NodeId, config: RaftConfig, seed: u64) -> Result<MultiRaft, ConfigError> {
        config.validate()?;
        Ok(MultiRaft {
            setting: Setting {
                node,
                seed,
                tail_bytes: config.tail_bytes(0),
                config,
                is_disk_quick: true,
            },
            groups: BTreeMap::new(),
            refused: BTreeSet::new(),
            dirty: BTreeSet::new(),
            next_batch: 1,
            waiting: BTreeMap::new(),
            slow_flush_ms: None,
            contradicted: Vec::new(),
            farewells: Vec::new(),
            ticked_ms: None,
            noted_ms: 0,
            has_failed: false,
            is_held: false,
        })
    }

    /// Takes over what the log held. Call once, before anything else. For groups missing in
    /// `starts`, the state machine is taken to stand at the log's compaction mark: everything
    /// after it comes again. For `election_min_ms` after `now_ms` no vote is given, because this
    /// node may have promised so before it stopped.
    ///
    /// Returns the groups that were not started, and why.
    pub fn recover(
        &mut self,
        recovered: Recovered,
        starts: &BTreeMap<PartitionId, GroupStart>,
        now_ms: u64,
    ) -> Vec<(PartitionId, RecoverError)> {
        let mut damage: BTreeMap<PartitionId, Vec<Damage>> = BTreeMap::new();
        for damaged in recovered.damaged {
            damage.entry(damaged.group).or_default().push(damaged);
        }
        let mut refused = Vec::new();
        for group in recovered.groups {
            let id = group.group;
            let result = match damage.remove(&id) {
                Some(damaged) => Err(RecoverError::Damaged(damaged)),
                None => self.restart(group, starts.get(&id), now_ms),
            };
            if let Err(error) = result {
                self.refused.insert(id);
                refused.push((id, error));
            }
        }
        refused
    }

    fn restart(
        &mut self,
        recovered: RecoveredGroup,
        start: Option<&GroupStart>,
        now_ms: u64,
    ) -> Result<(), RecoverError> {
        let id = recovered.group;
        let first = recovered.mark.index;
        let applied = start.map_or(first, |start| start.applied);
        if applied < first {
            return Err(RecoverError::StateTooOld { applied, first });
        }
        let last = first + recovered.entries.len() as u64;
        let snapshot = start.and_then(|start| start.snapshot.as_ref());
        // The owner activated a snapshot, and a crash came before the log was told: the log does not
        // reach so far, or has something else there that was never committed.
        let newer = snapshot.filter(|snapshot| {
            let LogPosition { term, index } = snapshot.position;
            (first + 1..=applied).contains(&index) && recovered.term_at(index) != Some(term)
        });
        if applied > newer.map_or(last, |snapshot| snapshot.position.index) {
            return Err(RecoverError::LogTooShort { applied, last });
        }
        let delivered = start.and_then(|start| start.delivered).filter(|delivered| {
            newer.is_none() && recovered.term_at(delivered.index) == Some(delivered.term)
        });
        let delivered = delivered.map_or(0, |delivered| delivered.index);
        let changed = newer.map_or_else(|| recovered.committed_change(), |_| 0);
        let (mark, members) = match newer {
            Some(snapshot) => (snapshot.position, snapshot.members.clone()),
            None => (recovered.mark, recovered.members),
        };
        let entries: VecDeque<_> = match newer {
            Some(_) => VecDeque::new(),
            None => recovered.entries.into_iter().map(raft_entry).collect(),
        };
        // A snapshot of a later term: in that term nothing was voted here.
        let vote = recovered.vote.filter(|_| recovered.term >= mark.term);
        let hard = HardState {
            term: recovered.term.max(mark.term),
            vote: vote.map_or(raft::INVALID_ID, raft_id),
            // What came out of the log had been committed, whether or not the log was told. That all changes of the members
            // but the last are must be known: who left with them would elect a member of two configurations ago.
            commit: recovered.commit.max(applied).max(delivered).max(changed).max(mark.index),
            ..HardState::default()
        };
        let mut log = MemLog::new(mark, members.clone(), hard, entries);
        log.snapshot = snapshot.filter(|snapshot| snapshot.position.index >= mark.index).cloned();
        let mut group =
            Group::new(id, &self.setting, log, applied).map_err(RecoverError::Unusable)?;
        if newer.is_some() {
            group.queue(Record::Snapshot { group: id, mark, members });
        }
        group.hold_votes(now_ms);
        self.groups.insert(id, group);
        self.dirty.insert(id);
        Ok(())
    }

    /// How often [`MultiRaft::tick`] should be called.
    #[must_use]
    pub fn tick_interval(&self) -> Duration {
        Duration::from_millis(self.setting.config.tick_ms)
    }

    /// This node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.setting.node
    }

    /// Creates this node's replica of a *new* group. Every founding member is created with the
    /// same lists. The one with `campaign` (by convention the first voter) stands for election at
    /// once, and again each heartbeat for two seconds while the others may not exist yet. A replica
    /// that joins an existing group is created with empty `voters` and `learners`: it waits for
    /// the leader's snapshot.
    ///
    /// A crash before the next batch is durable forgets the group: tell the manager that it
    /// exists only when [`MultiRaft::is_durable`] says so.
    ///
    /// A group founded here starts with index 1 taken; the first entry is the leader's empty one.
    ///
    /// Returns false, and does nothing, if the group exists or the library refuses the lists.
    pub fn create_group(
        &mut self,
        group: PartitionId,
        voters: &[NodeId],
        learners: &[NodeId],
        campaign: bool,
    ) -> bool {
        if self.groups.contains_key(&group) || self.refused.contains(&group) || self.has_failed {
            return false;
        }
        let mark = if voters.is_empty() { LogPosition::default() } else { FOUNDING_MARK };
        let members = Members::new(voters, learners);
        let mut hard = HardState::default();
        (hard.term, hard.commit) = (mark.term, mark.index);
        let log = MemLog::new(mark, members.clone(), hard, VecDeque::new());
        let Ok(mut created) = Group::new(group, &self.setting, log, mark.index) else {
            return false;
        };
        created.queue(Record::GroupCreated { group, mark, members });
        let (term, commit) = (mark.term, mark.index);
        created.queue(Record::HardState { group, term, vote: None, commit });
        created.set_undurable();
        if campaign {
            created.campaign_on_founding();
        }
        self.groups.insert(group, created);
        self.dirty.insert(group);
        true
    }

    /// Takes part in a group in which this node is a voter by its id, and of which it has forgotten
    /// everything: its disk was lost. The group is made if it is not there, and waits for a leader; it
    /// neither votes nor is counted until it has caught up. The owner keeps a durable note of it, made
    /// before this call, calls again at each start while the note is there, and removes it when
    /// [`MultiRaft::is_rejoining`] says no. `nonce` is drawn at random for each call.
    ///
    /// Returns false if the group was refused, or the log has failed.
    pub fn rejoin_group(&mut self, group: PartitionId, nonce: u64) -> bool {
        if !self.groups.contains_key(&group) && !self.create_group(group, &[], &[], false) {
            return false;
        }
        self.touch(group).is_some_and(|group| {
            group.rejoin(nonce);
            true
        })
    }

    /// Whether the group still catches up after [`MultiRaft::rejoin_group`]. When it does no more, that is
    /// durable.
    #[must_use]
    pub fn is_rejoining(&self, group: PartitionId) -> bool {
        self.groups.get(&group).is_some_and(Group::is_rejoining)
    }

    /// Whether anybody may have promised anything in the group, as far as is known here: a term has begun
    /// since it was founded, or it was founded by others.
    #[must_use]
    pub fn has_begun(&self, group: PartitionId) -> bool {
        self.groups.get(&group).is_some_and(|group| {
            let status = group.status();
            status.term > FOUNDING_MARK.term
                || group.is_rejoining()
                || status.members.voters.is_empty()
        })
    }

    /// Takes a group out of service, here only: its state machine cannot be trusted, so it must not vote,
    /// lead or acknowledge. The log keeps what it has until the group is removed.
    pub fn refuse_group(&mut self, group: PartitionId) {
        if self.groups.remove(&group).is_some() {
            self.dirty.remove(&group);
            self.refused.insert(group);
        }
    }

    /// Tells the newest configuration of the owner's own: at each start the one of which it has a
    /// durable note, and whenever a newer one comes out of the log or a snapshot. Whoever is not one of
    /// its voters, and knows none as new, is not heard any more. Two configurations of a group never
    /// have the same epoch. Older ones change nothing.
    pub fn set_roster(&mut self, group: PartitionId, epoch: Epoch, voters: &[NodeId]) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.set_roster(epoch, voters);
        }
    }

    /// Forgets a group, here only: running or refused. Returns false if there is none.
    pub fn remove_group(&mut self, group: PartitionId) -> bool {
        let is_known = self.groups.remove(&group).is_some() | self.refused.remove(&group);
        if is_known {
            self.dirty.remove(&group);
            self.farewells.push(Record::GroupRemoved { group });
        }
        is_known
    }

    fn leading(&mut self, group: PartitionId) -> Result<&mut Group, ProposeError> {
        if self.has_failed {
            return Err(ProposeError::LogFailed);
        }
        let found = self.groups.get_mut(&group).ok_or(ProposeError::NoGroup { group })?;
        if self.is_held && found.leads_in().is_some() {
            return Err(ProposeError::Busy { group });
        }
        self.dirty.insert(group);
        Ok(found)
    }

    fn touch(&mut self, group: PartitionId) -> Option<&mut Group> {
        let found = self.groups.get_mut(&group)?;
        self.dirty.insert(group);
        Some(found)
    }

    /// Appends `data` at the leader. The position says where it will stand *if* it commits.
    /// (Empty data comes out as [`Payload::Empty`](crate::Payload).)
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: nothing was written.
    pub fn propose(
        &mut self,
        group: PartitionId,
        data: Bytes,
    ) -> Result<LogPosition, ProposeError> {
        let limit_bytes = self.setting.config.entry_bytes_max;
        if data.len() > limit_bytes {
            return Err(ProposeError::TooLarge { length_bytes: data.len(), limit_bytes });
        }
        self.leading(group)?.propose(data)
    }

    /// The term in which this node leads.
    #[must_use]
    pub fn leads_in(&self, group: PartitionId) -> Option<u64> {
        self.groups.get(&group).and_then(Group::leads_in)
    }

    /// Starts a change to the configuration named. `context` comes out with it. One that takes voters out waits
    /// until a majority of those who stay have what is committed, and were heard within an election timeout. It is not begun if one of those is `lost` for good.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: nothing was written. `Busy` while another change is under way, or this one has to wait.
    pub fn propose_change(
        &mut self,
        group: PartitionId,
        change: &MemberChange,
        lost: &[NodeId],
        context: Bytes,
    ) -> Result<LogPosition, ProposeError> {
        let limit_bytes = self.setting.config.entry_bytes_max;
        if context.len() > limit_bytes {
            return Err(ProposeError::TooLarge { length_bytes: context.len(), limit_bytes });
        }
        let now_ms = self.ticked_ms.unwrap_or_default();
        let since_ms = now_ms.saturating_sub(self.setting.config.election_min_ms);
        self.leading(group)?.propose_change(change, lost, &context, since_ms)
    }

    /// These are lost for good: a change that is under way, and takes voters out, waits for them no more.
    pub fn do_not_wait_for(&mut self, group: PartitionId, lost: &[NodeId]) {
        if let Some(group) = self.touch(group) {
            group.do_not_wait_for(lost);
        }
    }

    /// Asks the leader, this node, to hand over. The lease ends at once and does not come back in
    /// this term. Proposals answer `Busy` until it is done or an election timeout has passed.
    /// Returns false if this node does not lead or `to` does not vote.
    pub fn transfer_leader(&mut self, group: PartitionId, to: NodeId) -> bool {
        self.touch(group).is_some_and(|group| group.transfer_leader(to))
    }

    /// Whether this node led the group and was relieved, as its disk or its links held the group up. For a minute the
    /// first time, and for longer each time; it leads all the same if nobody else does.
    #[must_use]
    pub fn declines_lead(&self, group: PartitionId, now_ms: u64) -> bool {
        self.groups.get(&group).is_some_and(|group| group.declines_lead(now_ms))
    }

    /// Lets this node lead a group of two voters without the other one, who is lost for good. Propose
    /// the change to a single voter as soon as this node leads, and call again until it is committed: a
    /// crash forgets the word. It is given to one of the two only; to the other one as well, with a higher number, if
    /// this one is lost for good before it has anything acknowledged.
    ///
    /// # Errors
    ///
    /// [`ProposeError::BadChange`] if this node is not one of two voters; `Busy` while a leader that it
    /// has heard may still be one, or while it fetches a snapshot.
    pub fn go_alone(
        &mut self,
        group: PartitionId,
        without: NodeId,
        word: u64,
        now_ms: u64,
    ) -> Result<(), ProposeError> {
        self.tick(now_ms);
        if self.has_failed {
            return Err(ProposeError::LogFailed);
        }
        let found = self.groups.get_mut(&group).ok_or(ProposeError::NoGroup { group })?;
        self.dirty.insert(group);
        found.go_alone(without, word, &self.setting, now_ms)
    }

    /// Makes this node stand for election without waiting for a timeout (pre-vote still asks).
    pub fn campaign(&mut self, group: PartitionId) -> bool {
        self.touch(group).is_some_and(Group::campaign)
    }

    /// Asks for a linearizable read without lease: one round of heartbeats. The answer comes in
    /// [`Turn::reads`], or never if leadership is lost: give the request a deadline. `context`
    /// must be unique among the reads under way.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]: `NotLeader`, or `Busy` before the leader has committed in its term.
    pub fn read_index(&mut self, group: PartitionId, context: u64) -> Result<(), ProposeError> {
        self.leading(group)?.read_index(context)
    }

    /// Whether this node leads and nobody else can: then applied state may be served. Check it
    /// with a clock reading taken *after* the answer was computed, when it is about to be sent.
    #[must_use]
    pub fn lease_valid(&self, group: PartitionId, now_ms: u64) -> bool {
        let lease_ms = self.setting.config.lease_ms;
        !self.has_failed
            && self.groups.get(&group).is_some_and(|group| group.lease_valid(lease_ms, now_ms))
    }

    /// Takes a frame. `now_ms` must have been read *after* the frame arrived: the lease of the
    /// sender rests on it.
    ///
    /// # Errors
    ///
    /// [`FrameError`]: close the connection. Nothing of the frame was taken.
    pub fn step_frame(
        &mut self,
        from: NodeId,
        bytes: Bytes,
        now_ms: u64,
    ) -> Result<(), FrameError> {
        let frame = Frame::decode(bytes)?;
        // Time that passed before the frame arrived must not count after it.
        self.tick(now_ms);
        if self.has_failed || self.is_held || from == self.setting.node {
            return Ok(());
        }
        self.setting.is_disk_quick = self.is_disk_quick(now_ms);
        for (id, message) in frame.messages {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            if group.is_contradicted_by(from, &message) {
                self.refuse_group(id);
                self.contradicted.push(id);
                continue;
            }
            group.step(from, message, &self.setting, now_ms);
            self.dirty.insert(id);
        }
        Ok(())
    }

    /// Tells whether no turns are taken for now, as the log has enough that waits for the disk. Meanwhile nothing is kept that
    /// would wait for a turn, or all of it would stay in memory for as long as a disk is full: frames that come are lost
    /// on the way, so is what a tick gives rise to, and proposals answer `Busy`.
    ///
    /// What follows from it is what follows from a node that is cut off. A follower answers no heartbeats, so no lease
    /// counts on it, and gives no vote, as it hears of no election. A leader has no lease soon, steps down when an election timeout
    /// has passed without answers, and the others elect: it is not asked whether it wants relief
    /// ([`MultiRaft::declines_lead`]), for which it takes turns. A leader whose log waits has some seconds for that before the
    /// log has enough, unless it writes a lot.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Lets time pass. More often than the tick interval is harmless.
    pub fn tick(&mut self, now_ms: u64) {
        let tick_ms = self.setting.config.tick_ms;
        let ticked_ms = *self.ticked_ms.get_or_insert(now_ms);
        let due = now_ms.saturating_sub(ticked_ms) / tick_ms;
        if due == 0 || self.has_failed {
            return;
        }
        self.ticked_ms = Some(ticked_ms + due * tick_ms);
        // After a long pause one election timeout says all there is to say.
        let count = due.min(self.setting.config.ticks(self.setting.config.election_max_ms) as u64);
        for (id, group) in &mut self.groups {
            let said = group.said();
            for _ in 0..count {
                if group.tick(now_ms) {
                    self.dirty.insert(*id);
                }
            }
            if group.ask_for_relief(self.setting.config.lease_ms, now_ms) {
                self.dirty.insert(*id);
            }
            if self.is_held {
                group.forget_after(said);
            }
        }
        self.note_commits(now_ms);
    }

    /// What an idle group applied it knows to be committed after a restart: docs/guarantees.md, P7, says what of.
    fn note_commits(&mut self, now_ms: u64) {
        if now_ms.saturating_sub(self.noted_ms) < COMMITS_NOTED_MS {
            return;
        }
        self.noted_ms = now_ms;
        for (id, group) in &mut self.groups {
            if group.note_commit() {
                self.dirty.insert(*id);
            }
        }
    }

    /// A frame to `node` could not be sent.
    pub fn report_unreachable(&mut self, node: NodeId) {
        for (id, group) in &mut self.groups {
            if group.report_unreachable(node) {
                self.dirty.insert(*id);
            }
        }
    }

    /// Everything there is to do now. See [`Turn`].
    #[must_use]
    pub fn turn(&mut self, now_ms: u64) -> Turn {
        let contradicted = std::mem::take(&mut self.contradicted);
        let mut turn = Turn { contradicted, ..Turn::default() };
        if self.has_failed {
            return turn;
        }
        self.share_memory();
        let number = self.next_batch;
        let mut records = std::mem::take(&mut self.farewells);
        let mut frames = Frames::default();
        let removed = removed(&records).collect();
        let mut writers = Writers { groups: Vec::new(), removed, handed_out_ms: now_ms };
        for id in std::mem::take(&mut self.dirty) {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            let mut collected = group.collect(number, &self.setting, now_ms);
            if !collected.records.is_empty() {
                records.append(&mut collected.records);
                writers.groups.push(id);
            }
            for (to, message) in collected.messages.drain(..) {
                frames.add(to, id, message, self.setting.config.frame_bytes_max);
            }
            turn.add(id, collected);
            if group.has_work() {
                self.dirty.insert(id);
            }
        }
        turn.messages = frames.finish();
        if !records.is_empty() {
            self.next_batch += 1;
            self.waiting.insert(number, writers);
            turn.batch = Some(LogBatch { number, records });
        }
        turn
    }

    /// More groups, smaller shares: also of those that have nothing to do now.
    fn share_memory(&mut self) {
        let share = self.setting.config.tail_bytes(self.groups.len());
        if std::mem::replace(&mut self.setting.tail_bytes, share) > share {
            self.groups.values_mut().for_each(|group| group.trim(share));
        }
    }

    /// Whether a turn would deliver anything.
    #[must_use]
    pub fn has_work(&self) -> bool {
        let is_told = self.contradicted.is_empty() && self.farewells.is_empty();
        !self.has_failed && (!self.dirty.is_empty() || !is_told)
    }

    /// The log has this batch, and all before it, durably. What was waiting for it comes out of
    /// the next turn.
    pub fn persisted(&mut self, batch: u64, now_ms: u64) {
        self.tick(now_ms);
        if self.has_failed {
            return;
        }
        // Of all that one flush made durable, the first has waited for all of it.
        if let Some((_, first)) = self.waiting.range(..=batch).next() {
            self.slow_flush_ms = (!first.is_quick(now_ms)).then_some(now_ms);
        }
        while let Some(entry) = self.waiting.first_entry() {
            if *entry.key() > batch {
                break;
            }
            let number = *entry.key();
            for id in entry.remove().groups {
                if self.groups.get_mut(&id).is_some_and(|group| group.persisted(number)) {
                    self.dirty.insert(id);
                }
            }
        }
    }

    /// Whether an election would not wait for this node's disk. One slow flush of long ago, with none after it, says
    /// nothing.
    fn is_disk_quick(&self, now_ms: u64) -> bool {
        let was_slow = self.slow_flush_ms.is_some_and(|at| now_ms < at + SLOW_FLUSH_COUNTS_MS);
        !was_slow && self.waiting.values().next().is_none_or(|oldest| oldest.is_quick(now_ms))
    }

    /// The log failed. From here on nothing is sent, committed or accepted: what the disk holds
    /// is unknown, so this node must be silent until it is restarted on a good one.
    pub fn log_failed(&mut self) {
        self.has_failed = true;
    }

    /// The state machine has applied everything up to `index`. Later reports cover earlier ones.
    pub fn applied(&mut self, group: PartitionId, index: u64) {
        if let Some(group) = self.touch(group) {
            group.applied(index);
        }
    }

    /// Drops the log up to and including `index`, at most up to what is applied. What a follower
    /// still needs comes as a snapshot instead.
    pub fn compact(&mut self, group: PartitionId, index: u64) {
        if let Some(group) = self.touch(group) {
            group.compact(index);
        }
    }

    /// Tells which snapshot the owner can serve to followers. Durable before this call. The
    /// descriptor comes from [`MultiRaft::describe`]; keep it with the snapshot.
    pub fn set_snapshot(&mut self, group: PartitionId, snapshot: SnapshotDescriptor) {
        if let Some(group) = self.touch(group) {
            group.set_snapshot(snapshot);
        }
    }

    /// Position and configuration at `index`, for a snapshot taken there. `None` if the group is
    /// unknown, or `index` is not applied or already compacted.
    #[must_use]
    pub fn describe(&self, group: PartitionId, index: u64) -> Option<SnapshotDescriptor> {
        self.groups.get(&group)?.describe(index)
    }

    /// The snapshot of an [`InstallSnapshot`](crate::InstallSnapshot) is durable and active.
    pub fn snapshot_installed(&mut self, group: PartitionId, index: u64) {
        if let Some(group) = self.touch(group) {
            group.snapshot_installed(index);
        }
    }

    /// It could not be fetched. The leader will offer one again, and its owner hears of it ([`Turn::snapshots_doubted`]).
    pub fn snapshot_failed(&mut self, group: PartitionId) {
        if let Some(group) = self.touch(group) {
            group.snapshot_failed();
        }
    }

    /// About how much memory the entries of all groups take.
    #[must_use]
    pub fn tail_bytes(&self) -> usize {
        self.groups.values().map(Group::tail_bytes).sum()
    }

    /// A group at a glance.
    #[must_use]
    pub fn status(&self, group: PartitionId) -> Option<GroupStatus> {
        Some(self.groups.get(&group)?.status())
    }

    /// Whether everything decided about the group so far, its creation included, is on disk.
    #[must_use]
    pub fn is_durable(&self, group: PartitionId) -> bool {
        self.groups.get(&group).is_some_and(Group::is_durable)
    }

    /// Whether no removal of the group is still on its way to the disk: after a restart the log knows nothing of
    /// what it was.
    #[must_use]
    pub fn is_forgotten(&self, group: PartitionId) -> bool {
        let is_told = !removed(&self.farewells).any(|id| id == group);
        is_told && !self.waiting.values().any(|writers| writers.removed.contains(&group))
    }

    /// Messages, entries and turns of the library that wait in a group for the disk, or for the next turn.
    #[cfg(test)]
    pub(crate) fn waiting(&self, group: PartitionId) -> usize {
        self.groups.get(&group).map_or(0, Group::waiting)
    }

    /// All running groups, in order.
    pub fn groups(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.groups.keys().copied()
    }
}

/// The groups that these records take from the log.
fn removed(records: &[Record]) -> impl Iterator<Item = PartitionId> + '_ {
    records.iter().filter_map(|record| match record {
        Record::GroupRemoved { group } => Some(*group),
        _ => None,
    })
}
