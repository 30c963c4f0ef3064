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
//!   with a word before this one or with none.
//!
//! If a change that gives another voter follows in this log, the two may be three already: then it
//! takes effect here at once, as in Raft's thesis, and this one goes on with the third one's vote. The third one may have
//! more of the log than this one, which has lost the end of it, and gives no vote then: the change takes effect there too,
//! and it is the third one that leads, with this one's vote. Both can only be elected by two of the three, of whom one is
//! needed by whoever the old two would elect.
//!
//! Nothing is written for it. The library is told of the change in memory, this one then wins the
//! elections, and the owner proposes the removal as a change like any other, which commits by the usual
//! rules: to the library it removes nobody, to whoever reads the log it is the change. After a crash on
//! the way the group has two voters again, and the word must be repeated.

use milpa_types::NodeId;
use raft::GetEntriesContext;
use raft::eraftpb::{ConfChangeV2, EntryType};

use super::{Group, Setting};
use crate::convert::{Change, REMOVED, VOTER};
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
pub(super) enum Alone {
    /// This voter is gone.
    Without(NodeId),
    /// A change that stands in the log, and makes this node a voter, has taken effect.
    WithThird(NodeId),
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
        let voters = &self.present.voters;
        let is_third =
            voters.len() == 2 && voters.contains(&survivor) && !voters.contains(&self.node);
        let is_word = word_of_term(term) > self.epoch().0;
        let lacks = !self.raw.raft.raft_log.is_up_to_date(last.index, last.term);
        let is_busy = self.install.is_some() || self.has_undurable_log();
        if !is_third
            || !is_word
            || !lacks
            || is_busy
            || self.present.is_joint()
            || self.alone.is_some()
        {
            return;
        }
        if self.new_voter() == Some(Some(self.node)) && self.take_step((VOTER, self.node.0)) {
            self.alone = Some(Alone::WithThird(self.node));
            tracing::warn!(group = self.id.0, %survivor, "standing for election: the survivor has less of the log");
            self.campaign();
        }
    }

    fn leave(&mut self, without: NodeId, word: u64) -> Result<(), ProposeError> {
        let busy = ProposeError::Busy { group: self.id };
        let (alone, step) = match self.new_voter().ok_or(busy)? {
            Some(third) => (Alone::WithThird(third), (VOTER, third.0)),
            None => (Alone::Without(without), (REMOVED, without.0)),
        };
        if !self.take_step(step) {
            return Err(ProposeError::BadChange { group: self.id, reason: "refused" });
        }
        let term = word.saturating_mul(TERMS_OF_WORD).max(self.raw.raft.term.saturating_add(1));
        self.raw.raft.become_follower(term, raft::INVALID_ID);
        self.settle();
        self.alone = Some(alone);
        Ok(())
    }

    /// Tells the library of a change that has not come out of the log.
    fn take_step(&mut self, step: (u8, u32)) -> bool {
        let change = Change { steps: vec![step], context: Vec::new() };
        let raw: ConfChangeV2 = change.to_raft();
        self.raw.apply_conf_change(&raw).is_ok()
    }

    /// The members by the log after a change, of which the library made `members`: with the one that this
    /// voter goes on without, until a change removes it.
    pub(super) fn as_logged(&mut self, mut members: Members, change: &Change) -> Members {
        match self.alone {
            Some(Alone::Without(lost)) if !change.steps.contains(&(REMOVED, lost.0)) => {
                members.voters.push(lost);
                members.sorted()
            }
            _ => {
                self.alone = None;
                members
            }
        }
    }

    /// The voter given by a change that follows in the log and has not taken effect here. `None` if there
    /// is more than one step to it, or this one is to leave.
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
            if change.steps.contains(&(REMOVED, self.node.0)) {
                // It may have been committed: the other one went on alone.
                return None;
            }
            let gains = change.steps.iter().any(|(kind, _)| *kind == VOTER);
            match change.steps[..] {
                [(VOTER, node)] if found.is_none() => found = Some(NodeId(node)),
                _ if gains => return None,
                _ => {}
            }
            Some(())
        })?;
        Some(found)
    }
}
