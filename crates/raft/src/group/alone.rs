//! The survivor of a pair: one of two voters goes on when the other one is gone for good.
//!
//! Raft gives no way: a change of the members needs a majority of them, and of two that is both. But
//! each of two has everything that was ever committed, if the change that made them two has taken
//! effect *here* and none that gives another voter follows in this log. What stands before that change
//! is in this log; and nothing was put behind it before it had taken effect at the leader
//! ([`Group::propose`]), who from then on commits nothing without both. So nothing can be lost. What
//! must not happen is that both go on:
//!
//! * Whoever gives the word (the managers, in their own log) gives it to one of them only; to the other one as well
//!   if this one is lost before it has acknowledged anything. Words are numbered.
//! * The other one, should it come back, cannot lead. It needs the vote of this one, whose log begins,
//!   before anything is acknowledged, a term that is far above any in which the other one can have led,
//!   with a word before this one or with none. Nobody stands for election in the terms of a word that was not given to it before its
//!   own log has something of them.
//!
//! If a change that gives another voter follows in this log, the two may be three already: then it
//! takes effect at once, as in Raft's thesis, and this one goes on with that third one, and not without. The third one may
//! have more of the log, as this one has lost the end of it: then it gives no vote, and stands for election itself, with this
//! one's vote and not without it. Who needs both has a voter in common with all whom the old two, the three, or this one
//! alone would elect.
//!
//! Nothing is written for it. The library is told of it in memory, one of these wins the
//! elections, and the owner proposes the removal as a change like any other, which commits by the usual
//! rules: to the library it removes nobody, to whoever reads the log it is the change. After a crash on
//! the way the group has two voters again, and the word must be repeated; the third one stands again when it is asked again.

use milpa_types::NodeId;
use raft::GetEntriesContext;
use raft::eraftpb::{ConfChangeV2, EntryType};

use super::{Group, Setting};
use crate::convert::{Change, LEARNER, REMOVED, VOTER};
use crate::types::{LogPosition, Members, ProposeError};

/// The terms of a word. Each term takes an election, so nobody gets to the next one's.
const TERMS_OF_WORD: u64 = 1 << 21;

/// The number of the word in whose terms a leader leads: of the last one in its log; 0 before there was any.
#[must_use]
pub const fn word_of_term(term: u64) -> u64 {
    term / TERMS_OF_WORD
}

/// What the library was told that the log does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alone {
    /// This voter is gone.
    without: NodeId,
    /// A change that stands in the log, and makes that node a voter, has taken effect.
    third: Option<NodeId>,
}

impl Alone {
    pub(super) fn is_without(&self, node: NodeId) -> bool {
        self.without == node
    }

    pub(super) fn is_with(&self, node: NodeId) -> bool {
        self.third == Some(node)
    }
}

impl Group {
    /// Lets this voter lead without the other one. Repeats change nothing.
    pub(crate) fn go_alone(
        &mut self,
        without: NodeId,
        word: u64,
        setting: &Setting,
        now_ms: u64,
    ) -> Result<(), ProposeError> {
        let group = self.id;
        let voters = &self.present.voters;
        if *voters == [self.node] && !self.present.is_joint() {
            return Ok(());
        }
        let is_pair = voters.len() == 2 && voters.contains(&self.node) && voters.contains(&without);
        if !is_pair || without == self.node || self.present.is_joint() {
            return Err(ProposeError::BadChange { group, reason: "not one of two voters" });
        }
        if self.alone.is_none() {
            // A leader that this one has just answered may still serve reads on the strength of it.
            let may_be_led = !self.is_leader() && !self.may_vote(setting, now_ms);
            if may_be_led || self.install.is_some() || self.has_undurable_log() {
                return Err(ProposeError::Busy { group });
            }
            self.leave(without, word)?;
            tracing::warn!(group = group.0, %without, "going on alone: the other voter is lost");
        }
        self.campaign();
        Ok(())
    }

    /// The third one: the survivor asks for its vote, in the terms of a word that is newer than all that is known here, and
    /// lacks what this one has of the log. So this one stands for election.
    pub(super) fn stand_instead(&mut self, survivor: NodeId, term: u64, last: LogPosition) {
        let lacks = !self.raw.raft.raft_log.is_up_to_date(last.index, last.term);
        let is_word = word_of_term(term) > self.epoch().0;
        let is_free = self.alone.is_none() && self.install.is_none() && !self.has_undurable_log();
        if !lacks || !is_word || !is_free || self.present.is_joint() {
            return;
        }
        let lost = match self.present.voters[..] {
            [one, other] if one == survivor => other,
            [other, one] if one == survivor => other,
            _ => return,
        };
        if self.new_voter() == Some(Some(self.node))
            && self.tell(Alone { without: lost, third: Some(self.node) })
        {
            tracing::warn!(group = self.id.0, %survivor, "standing for election: the survivor has less of the log");
            self.campaign();
        }
    }

    /// Whether others are in the terms of a word of which nothing is in this log, and that was not given here. It may have
    /// passed on from this one, which needs nobody's vote by its own log: it would lead in the same term as the one to whom
    /// it was given, and a third one could not tell their entries apart (simulation, seed 830794).
    pub(super) fn is_below_word(&self) -> bool {
        let raft = &self.raw.raft;
        self.alone.is_none() && word_of_term(raft.term) > word_of_term(raft.raft_log.last_term())
    }

    fn leave(&mut self, without: NodeId, word: u64) -> Result<(), ProposeError> {
        if word < word_of_term(self.raw.raft.term) {
            let (group, reason) = (self.id, "a later word was given");
            return Err(ProposeError::BadChange { group, reason });
        }
        let busy = ProposeError::Busy { group: self.id };
        let third = self.new_voter().ok_or(busy)?;
        if !self.tell(Alone { without, third }) {
            return Err(ProposeError::BadChange { group: self.id, reason: "refused" });
        }
        let term = word.saturating_mul(TERMS_OF_WORD).max(self.raw.raft.term.saturating_add(1));
        self.raw.raft.become_follower(term, raft::INVALID_ID);
        self.settle();
        Ok(())
    }

    /// Tells the library what the log does not say, if nothing hinders that. At no time does this one need fewer others
    /// than before or after.
    fn tell(&mut self, alone: Alone) -> bool {
        let joins = alone.third.is_none_or(|third| self.take_step(VOTER, third));
        let is_told = joins && self.take_step(REMOVED, alone.without);
        self.alone = Some(alone);
        if !is_told {
            self.take_back();
        }
        is_told
    }

    /// Tells the library what the log says. It refuses that only between the two halves of a change, where it had refused to be
    /// told anything else.
    fn take_back(&mut self) -> Option<Alone> {
        let alone = self.alone.take()?;
        self.take_step(VOTER, alone.without);
        if let Some(third) = alone.third {
            let learns = self.present.learners.contains(&third);
            self.take_step(if learns { LEARNER } else { REMOVED }, third);
        }
        Some(alone)
    }

    /// A change is about to come out of the log. If the one that makes the third a voter has yet to follow, the library is
    /// told what the log says; and the rest again when the change has taken effect ([`after_change`](Group::after_change)).
    pub(super) fn before_change(&mut self, change: &Change) -> Option<Alone> {
        let third = self.alone.and_then(|alone| alone.third)?;
        let is_third = change.steps.contains(&(VOTER, third.0));
        if is_third { None } else { self.take_back() }
    }

    /// See [`before_change`](Group::before_change).
    pub(super) fn after_change(&mut self, before: Option<Alone>) {
        if let Some(alone) = before.filter(|it| self.present.voters.contains(&it.without)) {
            self.tell(alone);
        }
    }

    /// The members by the log after a change, of which the library made `members`: with the one that this
    /// voter goes on without, until a change removes it.
    pub(super) fn as_logged(&mut self, mut members: Members, change: &Change) -> Members {
        let Some(Alone { without, .. }) = self.alone else { return members };
        let is_removed = change.takes_out(without);
        self.alone = (!is_removed).then_some(Alone { without, third: None });
        if !is_removed {
            members.voters.push(without);
        }
        members.sorted()
    }

    /// The end of the log was replaced, perhaps with the change that made a third voter.
    pub(super) fn forget_replaced_third(&mut self) {
        let third = self.alone.and_then(|alone| alone.third);
        if third.is_some() && self.new_voter() != Some(third) {
            self.take_back();
        }
    }

    fn take_step(&mut self, kind: u8, node: NodeId) -> bool {
        let change = Change { steps: vec![(kind, node.0)], context: Vec::new() };
        let raw: ConfChangeV2 = change.to_raft();
        self.raw.apply_conf_change(&raw).is_ok()
    }

    /// The voter given by a change that follows in the log and has not taken effect here. `None` if more
    /// happens to the voters, or this one is to leave.
    fn new_voter(&self) -> Option<Option<NodeId>> {
        let log = &self.raw.raft.raft_log;
        let (first, end) = (self.delivered + 1, log.last_index() + 1);
        if first >= end {
            return Some(None);
        }
        let entries = log.slice(first, end, None, GetEntriesContext::empty(false)).ok()?;
        let mut changes = entries.iter().filter(|e| e.get_entry_type() != EntryType::EntryNormal);
        let mut found = None;
        changes.try_for_each(|entry| {
            let change = postcard::from_bytes::<Change>(&entry.context).ok()?;
            if change.takes_out(self.node) {
                // It may have been committed: the other one went on alone.
                return None;
            }
            if change.steps.iter().any(|(kind, _)| *kind == VOTER) {
                let is_first = found.is_none();
                found = Some(change.new_voter(&self.present).filter(|_| is_first)?);
            }
            Some(())
        })?;
        Some(found)
    }
}
