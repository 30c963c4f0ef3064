//! A voter that has forgotten everything catches up before it counts again.
//!
//! Its disk was lost and its id is still a voter's. Raft's safety rests on what voters remember: of the
//! entries that this one acknowledged another majority may know nothing, it may have voted in terms that
//! it does not know of, and it may have promised a leader not to vote for others. So until it has caught
//! up it does nothing on which a majority could rest:
//!
//! * It gives no vote and no pre-vote, and does not stand for election, whatever configuration the log or
//!   a snapshot has brought.
//! * It takes entries and snapshots, but acknowledges only what it knows to be committed. More would be
//!   true, and unsafe all the same: who has voted in term T must not acknowledge anything to the leader
//!   of an earlier one, and it does not know its T.
//! * Its answers to heartbeats carry no stamp and no read: they count neither for a lease nor for a read.
//! * It does not take a heartbeat's word for what is committed: that word rests on what it had acknowledged
//!   (found by `an_emptied_voter_is_not_counted_by_a_leader_it_had_deposed`).
//!
//! # When it ends
//!
//! It asks the leader it hears, of term S, who appends an empty entry, the *barrier*, and says where. When
//! the barrier is committed, and durable here with all before it, the vote of term S is recorded as given
//! to that leader, and when that is durable too it is a voter as any other.
//!
//! Why that is enough. The barrier was committed by a majority M of *others*: this one acknowledged it only
//! afterwards, and whatever else the leader counts it for is below, as the barrier was appended last.
//!
//! * No leader of a term above S can lack the barrier: each needs a vote from M, of somebody who had
//!   acknowledged the barrier before (or it could not have acknowledged it). A vote that was given here and
//!   forgotten was given before the barrier was appended, because the leader was asked after the loss. Who
//!   holds it has no barrier in its log, so it has not won and never will.
//! * Hence nothing was acknowledged here in a term above S. What was in S is below the barrier, and in this log
//!   again; what was in earlier terms is in the log of every leader of S (the votes for it were given by those
//!   who still remembered), and so below the barrier.
//! * In S itself nobody else gets a vote from here.
//!
//! The number in question and answer is drawn by each process: an answer that the network held back may be
//! one to the process that still remembered.
//!
//! It needs a majority without this voter. If there is none, nothing is elected and nothing committed until
//! there is.

use bytes::Bytes;
use milpa_types::NodeId;
use raft::eraftpb::{Message as Raw, MessageType};

use super::Group;
use crate::convert::raft_id;
use crate::message::{Body, Message};

/// What a leader has to know is told it again after this time: messages are lost, and an acknowledgement
/// from before the loss may come late.
const TELL_AGAIN_MS: u64 = 1000;
/// A leader takes no stamp from the future for its own.
const NO_STAMP_MS: u64 = u64::MAX;

/// How far a voter without memory has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rejoining {
    /// Of this process.
    nonce: u64,
    /// The term whose leader was told last, and when.
    told: Option<(u64, u64)>,
    barrier: Option<Barrier>,
}

/// An entry that a leader appended after it was asked.
#[derive(Clone, Copy, Debug)]
struct Barrier {
    leader: NodeId,
    term: u64,
    index: u64,
}

impl Group {
    pub(crate) fn rejoin(&mut self, nonce: u64) {
        self.rejoining = Some(Rejoining { nonce, told: None, barrier: None });
    }

    pub(crate) fn is_rejoining(&self) -> bool {
        self.rejoining.is_some()
    }

    /// A leader of this term was heard: it learns that it has to send again what was acknowledged and is
    /// forgotten, and is asked for a barrier.
    pub(super) fn tell_rejoining(&mut self, leader: NodeId, term: u64, now_ms: u64) {
        let last = self.raw.raft.raft_log.committed;
        let Some(rejoining) = &mut self.rejoining else { return };
        let is_told = rejoining.told.is_some_and(|(told, at_ms)| {
            told == term && now_ms < at_ms.saturating_add(TELL_AGAIN_MS)
        });
        if is_told {
            return;
        }
        rejoining.told = Some((term, now_ms));
        self.notices.push((leader, Message::new(term, Body::LogLost { last })));
        if rejoining.barrier.is_none_or(|barrier| barrier.term != term) {
            let body = Body::Rejoining { nonce: rejoining.nonce };
            self.notices.push((leader, Message::new(term, body)));
        }
    }

    /// Leader: a voter asks. If nothing can be appended now, it asks again.
    pub(super) fn append_barrier(&mut self, from: NodeId, term: u64, nonce: u64) {
        if self.leads_in() != Some(term) || self.raw.raft.prs().get(raft_id(from)).is_none() {
            return;
        }
        if let Ok(position) = self.propose(Bytes::new()) {
            let body = Body::Barrier { nonce, index: position.index };
            self.notices.push((from, Message::new(term, body)));
        }
    }

    pub(super) fn set_barrier(&mut self, leader: NodeId, term: u64, nonce: u64, index: u64) {
        let is_current = term == self.raw.raft.term;
        if let Some(rejoining) =
            self.rejoining.as_mut().filter(|own| own.nonce == nonce && is_current)
        {
            rejoining.barrier = Some(Barrier { leader, term, index });
        }
    }

    /// Ends it when there is nothing left to catch up with.
    pub(super) fn end_rejoining(&mut self) {
        let Some(barrier) = self.rejoining.as_ref().and_then(|own| own.barrier) else { return };
        let raft = &mut self.raw.raft;
        let log = &raft.raft_log;
        let has_all = log.committed >= barrier.index && log.persisted >= barrier.index;
        if !has_all || raft.term != barrier.term {
            return;
        }
        raft.vote = raft_id(barrier.leader);
        if self.durable_hard == (raft.term, raft.vote) {
            self.rejoining = None;
            tracing::info!(group = self.id.0, ?barrier, "caught up: takes part in elections again");
        }
    }

    /// Of a message that goes out: what it must not promise.
    pub(super) fn promise_nothing(&self, raw: &mut Raw) {
        if self.rejoining.is_none() {
            return;
        }
        match raw.get_msg_type() {
            MessageType::MsgAppendResponse if !raw.reject => {
                raw.index = raw.index.min(self.raw.raft.raft_log.committed);
            }
            MessageType::MsgHeartbeatResponse => {
                raw.context = NO_STAMP_MS.to_le_bytes().to_vec().into();
            }
            _ => {}
        }
    }

    /// A tick without a candidacy at the end. True if a leader was given up.
    pub(super) fn tick_quietly(&mut self) -> bool {
        let raft = &mut self.raw.raft;
        raft.election_elapsed += 1;
        if raft.election_elapsed < raft.randomized_election_timeout() {
            return false;
        }
        raft.election_elapsed = 0;
        std::mem::replace(&mut raft.leader_id, raft::INVALID_ID) != raft::INVALID_ID
    }
}
