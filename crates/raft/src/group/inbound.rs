//! What comes in: messages of other nodes, and snapshots.

use milpa_types::NodeId;
use raft::eraftpb::{Message as Raw, MessageType};
use raft::{ProgressState, SnapshotStatus, StateRole};

use super::{Group, Install, Setting};
use crate::convert::{raft_id, raft_snapshot, to_raft};
use crate::message::{Body, Message};
use crate::types::SnapshotDescriptor;

/// How long a leader waits for a follower to say that it is fetching the snapshot it was offered.
const SNAPSHOT_ANSWER_MS: u64 = 1000;

impl Group {
    /// Takes a message.
    pub(crate) fn step(&mut self, from: NodeId, message: Message, setting: &Setting, now_ms: u64) {
        self.step_down_if_removed();
        if self.is_of_the_past(from, &message) {
            return;
        }
        if self.leads_in() == Some(message.term) {
            self.lease.heard(from, now_ms);
        }
        let raft = &self.raw.raft;
        let is_current = message.term >= raft.term;
        match &message.body {
            Body::Vote { .. } | Body::TimeoutNow if self.is_rejoining() => return,
            Body::Vote { is_transfer, .. } if !is_transfer && !self.may_vote(setting, now_ms) => {
                return;
            }
            Body::Vote { last, is_transfer: false, .. } => {
                self.stand_instead(from, message.term, *last)
            }
            Body::Append { .. } | Body::Heartbeat { .. } if is_current => {
                self.leader_heard_ms = Some(now_ms);
                self.tell_lost(from, &message);
                self.tell_rejoining(from, message.term, now_ms);
                if self.has_no_room_for(&message, setting) {
                    return;
                }
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
            Body::LogLost { last } => {
                if self.is_leader() && message.term == raft.term {
                    self.send_again(from, *last);
                }
                return;
            }
            Body::Rejoining { nonce } => {
                self.append_barrier(from, message.term, *nonce);
                return;
            }
            Body::Barrier { nonce, index } => {
                self.set_barrier(from, message.term, *nonce, *index);
                return;
            }
            Body::Relief { round, word } => {
                self.hear_of_relief(from, message.term, *round, *word, setting, now_ms);
                return;
            }
            Body::SnapshotFailed => {
                let is_known = raft.prs().get(raft_id(from)).is_some();
                if self.is_leader() && message.term == raft.term && is_known {
                    self.raw.report_snapshot(raft_id(from), SnapshotStatus::Failure);
                    self.is_snapshot_doubted = true;
                }
                return;
            }
            _ => {}
        }
        let Some(raw) = to_raft(from, self.node, message) else { return };
        if let Some(mut raw) = self.sanitize(raw) {
            self.hold_acknowledgement(&mut raw);
            // Refusals (a peer that is no member, a proposal dropped) need no answer.
            let _ = self.raw.step(raw);
            self.settle();
        }
    }

    /// Nothing is delivered while a snapshot is fetched, so all that comes in stays in memory. When that is
    /// enough, entries count as lost on the way: the leader sends them again, and its heartbeats are answered.
    fn has_no_room_for(&self, message: &Message, setting: &Setting) -> bool {
        matches!(&message.body, Body::Append { entries, .. } if !entries.is_empty())
            && self.install.is_some()
            && self.tail_bytes() >= setting.config.uncommitted_bytes_max
    }

    /// Whether the promise to the last leader, and to the one before a restart, has run out.
    pub(super) fn may_vote(&self, setting: &Setting, now_ms: u64) -> bool {
        self.leader_heard_ms
            .is_none_or(|heard| now_ms >= heard.saturating_add(setting.config.election_min_ms))
            && !self.is_rejoining()
    }

    /// The leader believes that we have more than we do: our log lost entries that were durable, or the leader
    /// is not one. The library takes no word for that, and would wait until the leader has trimmed its log.
    fn tell_lost(&mut self, leader: NodeId, message: &Message) {
        let Body::Heartbeat { commit, .. } = message.body else { return };
        if self.is_rejoining() {
            return;
        }
        let log = &self.raw.raft.raft_log;
        let (last, committed) = (log.last_index(), log.committed);
        if commit > last {
            tracing::error!(group = self.id.0, commit, last, %leader,
                "leader counts on entries that are not in this log");
            // What was lost may have cut off what stands here behind that.
            let message = Message::new(message.term, Body::LogLost { last: committed });
            self.notices.push((leader, message));
        }
    }

    /// Leader: a follower has lost what it had. From there on it is sent again; nothing that was committed is
    /// less so by that.
    fn send_again(&mut self, follower: NodeId, last: u64) {
        self.forget_acknowledgement(follower);
        let Some(progress) = self.raw.raft.mut_prs().get_mut(raft_id(follower)) else { return };
        if last < progress.matched && progress.state != ProgressState::Snapshot {
            progress.matched = last;
            progress.become_probe();
        }
    }

    /// Keeps from the library what it would panic on, and what trips its known defects.
    fn sanitize(&self, mut raw: Raw) -> Option<Raw> {
        let raft = &self.raw.raft;
        let last = raft.raft_log.last_index();
        match raw.get_msg_type() {
            // What it says is committed here rests on what we acknowledged, and may have forgotten.
            MessageType::MsgHeartbeat if self.is_rejoining() => raw.commit = 0,
            MessageType::MsgHeartbeat if raw.term >= raft.term && raw.commit > last => {
                // What we have in its place may be of another leader (`tell_lost`).
                raw.commit = raft.raft_log.committed;
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
            MessageType::MsgTimeoutNow if !self.may_stand() => return None,
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
            // One at a time: a newer one is offered again when this one has ended.
            self.install.get_or_insert(Install { from, snapshot, is_announced: false });
        } else {
            raw.set_msg_type(MessageType::MsgSnapshot);
            raw.set_snapshot(raft_snapshot(&snapshot));
        }
        let _ = self.raw.step(raw);
        self.settle();
    }

    /// Leader: a follower says which snapshot it fetches, if any. One that was offered a snapshot must.
    fn watch_snapshot(&mut self, from: NodeId, installing: u64, now_ms: u64) {
        let id = raft_id(from);
        let Some(progress) = self.raw.raft.prs().get(id) else { return };
        match installing {
            0 => self.installing.remove(&from),
            _ => self.installing.insert(from),
        };
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
            let message = Message::new(self.raw.raft.term, Body::SnapshotFailed);
            self.notices.push((install.from, message));
        }
    }

    pub(crate) fn set_snapshot(&mut self, snapshot: SnapshotDescriptor) {
        self.asked_ms.clear();
        self.raw.mut_store().snapshot = Some(snapshot);
    }
}
