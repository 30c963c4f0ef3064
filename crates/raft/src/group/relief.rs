//! A leader that holds its group up is relieved by one who would not.
//!
//! The leader asks the other voters ([`Burden`](super::burden::Burden) says when). Who is asked finds out whether a majority
//! answers it quickly, counting those only whose disks are quick too, as its own has to be: an election takes a flush
//! of each. If so it says so. Then the leader falls silent as a follower, the others elect as if it had
//! died, and it does not stand for election itself for some time.
//!
//! Why it asks: where all are slow nothing would be won, and nobody elected: a vote would take longer than an election may.
//!
//! Why it does not hand over: who is to lead would have to catch up over the same slow links, and meanwhile nothing
//! could be proposed.
//!
//! Safety does not rest on any of this: a leader may stop leading at any time.

use milpa_types::NodeId;

use super::burden::Look;
use super::{Group, Setting};
use crate::message::{Body, Message, ReliefWord};

/// Who is answered by a majority later than that would lead no better, nor who needs as long for a flush.
pub(crate) const QUICK_MS: u64 = 200;

/// The question whether this voter could lead better, while others have not answered.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    round: u64,
    begun_ms: u64,
    /// Other voters that have answered.
    answered: Vec<NodeId>,
}

impl Group {
    /// Leader: asks for relief if it holds the group up. True if it does. Of two voters neither can do without
    /// the other, and there the lead is kept.
    pub(crate) fn ask_for_relief(&mut self, lease_ms: u64, now_ms: u64) -> bool {
        if !self.is_leader() || !self.burden.is_due(now_ms) {
            return false;
        }
        let is_needed =
            self.present.voters.len() < 3 || self.present.is_joint() || self.alone.is_some();
        // One that hands over is as good as gone.
        if is_needed || self.lease.is_barred() {
            return false;
        }
        let log = &self.raw.raft.raft_log;
        let look = Look {
            now_ms,
            has_lease: self.lease.is_valid(&self.present, self.node, lease_ms, now_ms),
            committed: log.committed,
            persisted: log.persisted,
        };
        let asks = self.burden.asks(look);
        if asks {
            self.tell_voters(&[], now_ms, ReliefWord::Asked);
        }
        asks
    }

    /// Whether this replica held the group up as its leader, not long ago.
    pub(crate) fn declines_lead(&self, now_ms: u64) -> bool {
        self.burden.declines(now_ms)
    }

    /// To all other voters but some.
    fn tell_voters(&mut self, but: &[NodeId], round: u64, word: ReliefWord) {
        let others = self.present.voters.iter().copied();
        for to in others.filter(|node| *node != self.node && !but.contains(node)) {
            let message = Message::new(self.raw.raft.term, Body::Relief { round, word });
            self.notices.push((to, message));
        }
    }

    pub(super) fn hear_of_relief(
        &mut self,
        from: NodeId,
        term: u64,
        round: u64,
        word: ReliefWord,
        setting: &Setting,
        now_ms: u64,
    ) {
        let is_voter = |node| self.present.voters.contains(&node);
        if term != self.raw.raft.term || !is_voter(from) || !is_voter(self.node) {
            return;
        }
        let could_vote = setting.is_disk_quick && !self.is_rejoining();
        match word {
            // Who may not stand could not lead better.
            ReliefWord::Asked if self.leader() == Some(from) && self.install.is_none() => {
                self.trial = Some(Trial { round, begun_ms: now_ms, answered: Vec::new() });
                self.tell_voters(&[from], round, ReliefWord::Echo);
            }
            ReliefWord::Echo if could_vote => {
                let body = Body::Relief { round, word: ReliefWord::Echoed };
                self.notices.push((from, Message::new(term, body)));
            }
            ReliefWord::Echoed if could_vote => self.count_echo(from, round, now_ms),
            ReliefWord::Able if self.is_leader() && self.burden.is_relieved(round) => {
                self.give_up_lead(from, now_ms);
            }
            _ => {}
        }
    }

    /// Who was asked says that it could lead, if a majority has answered.
    fn count_echo(&mut self, from: NodeId, round: u64, now_ms: u64) {
        let Some(trial) = self.trial.as_mut().filter(|trial| trial.round == round) else { return };
        if !trial.answered.contains(&from) {
            trial.answered.push(from);
        }
        // With itself more than half.
        let is_answered = (trial.answered.len() + 1) * 2 > self.present.voters.len();
        let is_quick = now_ms <= trial.begun_ms.saturating_add(QUICK_MS);
        if is_answered && is_quick {
            self.trial = None;
            let body = Body::Relief { round, word: ReliefWord::Able };
            let message = Message::new(self.raw.raft.term, body);
            self.notices.extend(self.leader().map(|leader| (leader, message)));
        }
    }

    fn give_up_lead(&mut self, to: NodeId, now_ms: u64) {
        let term = self.raw.raft.term;
        tracing::warn!(group = self.id.0, term, %to,
            "the lead is given up: this node's disk or links hold the group up");
        self.burden.end(now_ms);
        // They would go when the disk has what was written until now, and hold up the election: as if lost on the way.
        self.raw.raft.msgs.clear();
        self.raw.raft.become_follower(term, raft::INVALID_ID);
        self.settle();
    }
}
