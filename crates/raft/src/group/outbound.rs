//! What goes out: records to the log, messages when they may go, committed entries to the owner.

use raft::eraftpb::{ConfState, Entry, EntryType, Message as Raw, MessageType};

use super::{Collected, Group, Pending, Setting, role_of};
use crate::convert::{Change, Sending, from_raft, log_entry, members, node_of, some_node};
use crate::types::{
    Committed, InstallSnapshot, LogPosition, Payload, ReadReady, Role, RoleChange,
    SnapshotDescriptor, SnapshotWanted,
};
use crate::wal::Record;

/// How long before an owner that set no snapshot is asked again.
const SNAPSHOT_ASK_AGAIN_MS: u64 = 5000;

impl Group {
    /// The batch, and all before it, is durable. True if there is something to collect.
    pub(crate) fn persisted(&mut self, batch: u64) -> bool {
        let mut is_any = self.step_down_if_removed();
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
            || !self.notices.is_empty()
            || self.may_deliver_held()
    }

    fn may_deliver_held(&self) -> bool {
        self.install.is_none() && !self.held.is_empty()
    }

    /// Everything there is to do. `batch` is the number the records will go under.
    pub(crate) fn collect(&mut self, batch: u64, setting: &Setting, now_ms: u64) -> Collected {
        let mut out = Collected::default();
        let mut ready_messages = Vec::new();
        self.end_rejoining();
        if self.may_deliver_held() {
            let held = std::mem::take(&mut self.held).into_iter();
            out.committed.extend(held.filter(|entry| entry.position.index > self.floor));
        }
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
        self.trim(setting.tail_bytes);
        self.report_role(&mut out);
        self.ask_for_snapshots(&mut out, now_ms);
        out.is_snapshot_doubted = std::mem::take(&mut self.is_snapshot_doubted);
        if let Some(install) = self.install.as_mut().filter(|install| !install.is_announced) {
            install.is_announced = true;
            let (from, snapshot) = (install.from, install.snapshot.clone());
            out.install = Some(InstallSnapshot { group: self.id, from, snapshot });
        }
        out
    }

    /// What the library has said, and what is to be written first. Words alone make no turn of the library: it remembers each
    /// one until the disk has it, and heartbeats come for as long as a disk stands still.
    fn take_ready(&mut self, batch: u64, out: &mut Collected, now: &mut Vec<Raw>) {
        let is_leader = self.is_leader();
        let said = std::mem::take(&mut self.raw.raft.msgs);
        let reads = std::mem::take(&mut self.raw.raft.read_states).into_iter();
        out.reads.extend(reads.filter_map(|read| {
            let context = read.request_ctx.as_slice().try_into().ok()?;
            let context = u64::from_le_bytes(context);
            Some(ReadReady { group: self.id, context, index: read.index })
        }));
        // Nothing goes before what is queued.
        if self.raw.has_ready() || !self.queued.is_empty() {
            self.take_changes(batch, out);
        }
        self.sort(said, is_leader, now);
    }

    fn take_changes(&mut self, batch: u64, out: &mut Collected) {
        let mut ready = self.raw.ready();
        let number = ready.number();
        let before = out.records.len();
        self.write_hard_state(&ready, out);
        let snapshot = self.write_snapshot(&ready, out);
        self.write_entries(ready.take_entries(), out);
        let committed = ready.take_committed_entries();
        self.raw.advance_append_async(ready);
        let hard = self.said_hard();
        let is_written = out.records.len() > before || !self.queued.is_empty();
        match self.pending.back_mut() {
            Some(back) if !is_written || back.batch == batch => {
                (back.ready, back.hard) = (number, hard);
                back.snapshot = back.snapshot.max(snapshot);
            }
            None if !is_written => self.raw.on_persist_ready(number),
            _ => {
                let messages = Vec::new();
                self.pending.push_back(Pending { batch, ready: number, messages, hard, snapshot });
            }
        }
        self.deliver(committed, out);
    }

    /// Term and vote on which what is said now rests.
    fn said_hard(&self) -> (u64, u64) {
        let hard = &self.raw.store().hard_state;
        (hard.term, hard.vote)
    }

    /// Who leads may speak before its disk has what it speaks of (Raft thesis, 10.2.1), others may not; nobody in a term
    /// that is not on its disk.
    fn sort(&mut self, said: Vec<Raw>, is_leader: bool, now: &mut Vec<Raw>) {
        let is_known = self.said_hard() == self.durable_hard;
        // These promise nothing about the log, so they need not wait for the disk; a disk
        // that stalls for a moment must not cost the leader its majority.
        let is_answer = |raw: &Raw| raw.get_msg_type() == MessageType::MsgHeartbeatResponse;
        for raw in said {
            let may_go = is_known && (is_leader || is_answer(&raw));
            match self.pending.back_mut().filter(|_| !may_go) {
                Some(back) => keep_newest(&mut back.messages, raw),
                None => now.push(raw),
            }
        }
    }

    /// Writes what is committed, if nothing that is on its way to the log takes it along. True if there is something to
    /// collect.
    pub(crate) fn note_commit(&mut self) -> bool {
        let is_due = self.is_commit_unwritten && !self.has_undurable_log();
        if is_due {
            let record = self.hard_state();
            self.is_commit_unwritten = self.writable_commit() < self.raw.store().hard_state.commit;
            self.queued.push(record);
        }
        is_due
    }

    /// A new commit index alone is worth no flush: it goes with the next records, or when there have been none for
    /// a while.
    fn write_hard_state(&mut self, ready: &raft::Ready, out: &mut Collected) {
        if let Some(hard) = ready.hs() {
            self.raw.mut_store().hard_state = hard.clone();
            self.is_commit_unwritten = true;
        }
        let hard = &self.raw.store().hard_state;
        let is_due = (hard.term, hard.vote) != self.written_hard
            || self.is_commit_unwritten && (!ready.entries().is_empty() || !self.queued.is_empty());
        if is_due {
            self.written_hard = (hard.term, hard.vote);
            let record = self.hard_state();
            self.is_commit_unwritten = self.writable_commit() < hard.commit;
            out.records.push(record);
        }
    }

    fn hard_state(&self) -> Record {
        let hard = &self.raw.store().hard_state;
        let (term, vote) = (hard.term, some_node(hard.vote));
        Record::HardState { group: self.id, term, vote, commit: self.writable_commit() }
    }

    /// The commit index as far as it may be written. What is committed beyond what is durable here stands
    /// behind this record in the log, and a crash may leave the record without it: then it would name the
    /// entries as committed that stood there before (found by
    /// `what_a_batch_that_was_cut_in_two_leaves_is_never_taken_for_committed`).
    fn writable_commit(&self) -> u64 {
        self.raw.store().hard_state.commit.min(self.raw.raft.raft_log.persisted)
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
        self.alone = None;
        self.stagger();
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
            self.forget_replaced_third();
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
            self.leaving.take_if(|leaving| leaving.index <= position.index);
            if position.index <= self.floor {
                continue;
            }
            let entry = Committed { position, payload };
            match self.install {
                Some(_) => self.held.push(entry),
                None => out.committed.push(entry),
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
        let before = self.before_change(&change);
        let parts = change.in_parts(&self.present);
        let taken =
            parts.iter().try_fold(ConfState::default(), |_, part| self.raw.apply_conf_change(part));
        match taken {
            Ok(state) => {
                let members = self.as_logged(members(&state), &change);
                self.present = members.clone();
                self.after_change(before);
                self.stagger();
                self.history.push_back((index, members.clone()));
                self.write_commit();
                Payload::Members { members, context: change.context.into() }
            }
            Err(error) => {
                tracing::warn!(group = self.id.0, index, %error, "configuration change refused");
                self.after_change(before);
                Payload::Empty
            }
        }
    }

    /// Has the commit index written with this batch. After a restart the members are those of the log as
    /// far as it is known to be committed: a voter that took itself for a learner again would not stand
    /// for election, though nobody else may have its newest entries.
    fn write_commit(&mut self) {
        let record = self.hard_state();
        self.queued.push(record);
    }

    fn send(&mut self, raws: Vec<Raw>, out: &mut Collected, setting: &Setting, now_ms: u64) {
        let installing = self.install.as_ref().map_or(0, |install| install.snapshot.position.index);
        let message_bytes_max = setting.config.message_bytes_max;
        let sending = Sending { now_ms, installing, message_bytes_max };
        for mut raw in raws {
            self.hold_back(&mut raw);
            self.anchor(&mut raw);
            self.promise_nothing(&mut raw);
            let to = node_of(raw.to);
            if raw.get_msg_type() == MessageType::MsgSnapshot {
                self.offered_ms.insert(to, now_ms);
            }
            out.messages.extend(from_raft(raw, &sending).into_iter().map(|message| (to, message)));
        }
        out.messages.append(&mut self.notices);
        let epoch = self.epoch();
        out.messages.iter_mut().for_each(|(_, message)| message.epoch = epoch);
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
            if role.role == Role::Leader {
                // The simulation compares all that are elected.
                let (group, term, node) = (self.id.0, role.term, self.node.0);
                tracing::debug!(target: "milpa_raft::elected", group, term, node);
            }
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
}

/// Adds to what waits for one batch, for as long as a full disk takes: of each kind to each node only the newest. The others
/// are as if lost on the way, and an acknowledgement covers those before it. Entries are kept: of them a leader sends no
/// more than fits between two answers, and nobody answers what was not sent.
fn keep_newest(waiting: &mut Vec<Raw>, mut raw: Raw) {
    let kind = |raw: &Raw| (raw.to, raw.get_msg_type(), raw.reject);
    let is_kept = |raw: &Raw| !raw.get_entries().is_empty();
    let earlier = waiting.iter().position(|it| kind(it) == kind(&raw) && !is_kept(it));
    if let Some(earlier) = earlier.filter(|_| !is_kept(&raw)).map(|at| waiting.remove(at)) {
        let is_acknowledgement = raw.get_msg_type() == MessageType::MsgAppendResponse;
        if is_acknowledgement && !raw.reject && raw.term == earlier.term {
            // A later answer may be one to an earlier append.
            raw.index = raw.index.max(earlier.index);
            raw.commit = raw.commit.max(earlier.commit);
        }
    }
    waiting.push(raw);
}
