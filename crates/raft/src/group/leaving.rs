//! Voters leave: not before those who stay can go on without them.
//!
//! In Raft's thesis a change of the members counts from when it stands in a log; to the library it counts when it is
//! committed, and the old members commit it. Of three that could be the leader and the one who leaves. If the disk of
//! the leader then loses it, nobody who stays has the change, and who has it has left: the third one waits for the vote
//! of somebody who is not there any more (simulation, seeds 220534 and 220751). So
//!
//! * nothing is proposed before a majority of those who stay have what is committed, and are heard;
//! * a leader that is to leave hands over to one who stays, once in a term; if nobody takes over, it does not count
//!   itself, and the change waits until a majority of those who stay have it on disk (seed 824209);
//! * the change is not sent to who leaves before a majority of those who stay have it on disk. Then it is needed
//!   for the old majority at most.
//!
//! A change that keeps somebody who is lost for good is not begun: the managers, who say so with it, take it back. One
//! that is in the log by then does not wait for who was lost.

use std::collections::BTreeSet;

use milpa_types::NodeId;
use raft::GetEntriesContext;
use raft::eraftpb::{EntryType, Message as Raw, MessageType};

use super::Group;
use crate::convert::{Change, VOTER, node_of, raft_id};

/// A change in the leader's log that takes voters out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaving {
    pub(super) index: u64,
    leave: Vec<NodeId>,
    stay: Vec<NodeId>,
    /// Who stays and acknowledged the change, of which the library has not been told.
    held: BTreeSet<NodeId>,
}

impl Group {
    /// What the change at this index makes of the voters; `None` if none of them leaves.
    pub(super) fn leaving(&self, index: u64, change: &Change) -> Option<Leaving> {
        let step_of = |node: NodeId| {
            let mut steps = change.steps.iter();
            steps.find(|(_, other)| *other == node.0).map(|(kind, _)| *kind)
        };
        let is_voter_then = |node: &NodeId| {
            step_of(*node).map_or(self.present.voters.contains(node), |kind| kind == VOTER)
        };
        let leave: Vec<NodeId> =
            self.present.voters.iter().copied().filter(|node| !is_voter_then(node)).collect();
        // Who is not here yet gets the change with all that is before it.
        let known = self.present.voters.iter().chain(&self.present.learners).copied();
        let stay = known.filter(is_voter_then).collect();
        (!leave.is_empty()).then_some(Leaving { index, leave, stay, held: BTreeSet::new() })
    }

    /// A new leader goes on with the change that stands in its log.
    pub(super) fn inherit_leaving(&mut self) {
        self.leaving =
            self.change_in_log().and_then(|(index, change)| self.leaving(index, &change));
    }

    fn change_in_log(&self) -> Option<(u64, Change)> {
        let log = &self.raw.raft.raft_log;
        let (first, end) = (self.delivered + 1, log.last_index() + 1);
        if first >= end {
            return None;
        }
        let entries = log.slice(first, end, None, GetEntriesContext::empty(false)).ok()?;
        let entry = entries.iter().find(|it| it.get_entry_type() != EntryType::EntryNormal)?;
        Some((entry.index, postcard::from_bytes(&entry.context).ok()?))
    }

    /// These are lost for good: the change that is under way does not wait for them.
    pub(crate) fn do_not_wait_for(&mut self, lost: &[NodeId]) {
        if let Some(leaving) = &mut self.leaving {
            leaving.stay.retain(|node| !lost.contains(node));
        }
    }

    /// Takes the change out of what goes to who leaves, if a majority of those who stay do not have it yet. To the
    /// library it is as if it were lost on the way.
    pub(super) fn hold_back(&self, raw: &mut Raw) {
        let Some(leaving) = &self.leaving else { return };
        let is_concerned = raw.get_msg_type() == MessageType::MsgAppend
            && leaving.leave.contains(&node_of(raw.to));
        if is_concerned && !self.majority_has(leaving) {
            let index = leaving.index;
            raw.mut_entries().retain(|entry| entry.index < index);
        }
    }

    /// A leader that is to leave: that somebody has the change counts when a majority of those who stay have it. Until then
    /// the library hears of what stands before it; who was held back acknowledges again after the next heartbeat.
    pub(super) fn hold_acknowledgement(&mut self, raw: &mut Raw) {
        let Some(leaving) = &mut self.leaving else { return };
        let is_concerned = raw.get_msg_type() == MessageType::MsgAppendResponse
            && raw.term == self.raw.raft.term
            && leaving.leave.contains(&self.node);
        if !is_concerned {
            return;
        }
        if raw.reject {
            // It lacks what stands before, or has lost it.
            leaving.held.remove(&node_of(raw.from));
            return;
        }
        if raw.index < leaving.index {
            return;
        }
        leaving.held.insert(node_of(raw.from));
        let before = leaving.index - 1;
        if self.leaving.as_ref().is_some_and(|leaving| !self.majority_has(leaving)) {
            raw.index = before;
        }
    }

    /// What this one acknowledged is not in its log any more.
    pub(super) fn forget_acknowledgement(&mut self, follower: NodeId) {
        if let Some(leaving) = &mut self.leaving {
            leaving.held.remove(&follower);
        }
    }

    /// Whether more than half of those who stay, or all of none, have the change.
    fn majority_has(&self, leaving: &Leaving) -> bool {
        let matched = |node| self.raw.raft.prs().get(raft_id(node)).map_or(0, |it| it.matched);
        let has = |node: &&NodeId| leaving.held.contains(*node) || matched(**node) >= leaving.index;
        let stay = &leaving.stay;
        stay.is_empty() || stay.iter().filter(has).count() > stay.len() / 2
    }

    /// Whether the lead goes to one of those who stay first: the one who has most, if it was heard of late.
    pub(super) fn hands_over(&mut self, leaving: &Leaving) -> bool {
        let term = self.raw.raft.term;
        if !leaving.leave.contains(&self.node) || self.handed_over == term {
            return false;
        }
        let voters = leaving.stay.iter().filter(|node| self.present.voters.contains(node));
        let progress = |node: &NodeId| {
            let progress = self.raw.raft.prs().get(raft_id(*node))?;
            let could_lead = progress.recent_active && !self.installing.contains(node);
            could_lead.then_some((progress.matched, *node))
        };
        let Some((_, to)) = voters.filter_map(progress).max() else { return false };
        self.handed_over = term;
        self.transfer_leader(to)
    }

    /// As if this leader had tried, and nobody had taken the lead.
    #[cfg(test)]
    pub(crate) fn hand_over_no_more(&mut self) {
        self.handed_over = self.raw.raft.term;
    }
}
