//! Whom a group listens to, and a log that is not the group's.
//!
//! Raft's log forgets who the members are: what was committed is known after a restart only as far as
//! somebody had written it down. A voter that restarts may so find itself in a configuration of the past and
//! be elected by others who are in it too. With the library's rules that is harmless while it is the last configuration but one that its
//! log knows of (`RecoveredGroup::committed_change` sees to that; those two changes ago need not have anybody in
//! common with those of today). Then it has a voter in common with those who committed what this one lacks, and that voter
//! refuses. But the survivor of two ([`super::alone`]) went on without such a voter. When the lost one is back, and one that
//! had been removed before, the two can elect a leader (simulation, seed 5228); and a follower takes the word of any
//! leader of a higher term.
//!
//! The owner knows better: its configurations are numbered by somebody who gives each number once (the
//! managers), and it notes the last one durably before it acts on it. So each message carries its sender's
//! *epoch*, and who would lead, or stand for election, is heard only if it is a voter of the newest
//! configuration known here (or of the one before, while both count), or knows a newer one; and so is the third one with whom
//! a survivor goes on, who may not have noted that configuration yet. What is not heard is not answered either: an answer
//! would carry the term of those who went on to those who did not.
//!
//! Those have perhaps committed an entry that the group does not have (the empty one with which a leader
//! begins; who is one of three takes no proposals before it knows of the change to two, [`Group::propose`]).
//! Such a replica cannot follow the group's log any more: it is refused, and its owner makes it anew.

use milpa_types::{Epoch, NodeId};

use super::Group;
use crate::message::{Body, Message};
use crate::types::LogPosition;

/// The newest configuration that the owner has noted. Groups whose owner numbers none have no voters here,
/// and epoch 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Roster {
    epoch: Epoch,
    voters: Vec<NodeId>,
}

impl Group {
    pub(crate) fn set_roster(&mut self, epoch: Epoch, voters: &[NodeId]) {
        if epoch > self.roster.epoch {
            self.roster = Roster { epoch, voters: voters.to_vec() };
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.roster.epoch
    }

    /// Whether it comes from one who takes itself for a voter, and is none any more.
    pub(super) fn is_of_the_past(&self, from: NodeId, message: &Message) -> bool {
        let leads = matches!(
            message.body,
            Body::Append { .. }
                | Body::Heartbeat { .. }
                | Body::Snapshot(_)
                | Body::TimeoutNow
                | Body::Vote { .. }
        );
        let is_voter = self.roster.voters.contains(&from)
            || self.present.outgoing.contains(&from)
            || self.alone.is_some_and(|alone| alone.is_with(from));
        let is_given_up = self.alone.is_some_and(|alone| alone.is_without(from));
        leads && (is_given_up || message.epoch < self.roster.epoch && !is_voter)
    }

    /// Whether a message comes from a leader whose log has another entry where one was committed here.
    pub(crate) fn is_contradicted_by(&self, from: NodeId, message: &Message) -> bool {
        let (first, more) = match &message.body {
            Body::Append { prev, entries, .. } => (*prev, &entries[..]),
            Body::Snapshot(snapshot) => (snapshot.position, &[][..]),
            _ => return false,
        };
        let log = &self.raw.raft.raft_log;
        // What is about to take the place of all that the store has contradicts nothing.
        let is_replaced = log.unstable.snapshot.is_some();
        if message.term < self.raw.raft.term || is_replaced || self.is_of_the_past(from, message) {
            return false;
        }
        std::iter::once(first)
            .chain(more.iter().map(|entry| entry.position))
            .take_while(|position| position.index <= log.committed)
            .any(|position| self.has_another_at(position))
    }

    /// Whether the log has, or had before it was compacted, an entry of another term at this index.
    fn has_another_at(&self, LogPosition { term, index }: LogPosition) -> bool {
        let (log, store) = (&self.raw.raft.raft_log, self.raw.store());
        if index < store.mark.index {
            // Which one it was is forgotten, but terms do not fall.
            return term > store.mark.term;
        }
        // The library says 0 of entries that are not in memory any more, and the store does not have yet
        // what came since the last turn.
        let own = match index + 1 >= log.first_index() {
            true => log.term(index).ok(),
            false => store.term_at(index),
        };
        own.is_some_and(|own| own != term)
    }
}
