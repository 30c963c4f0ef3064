//! What the node does with a turn of Raft: send, apply, answer.

use milpa_host::clock::now_ms;
use milpa_raft::{
    Committed, Frame, LogPosition, Outbox, Payload, Role as RaftRole, RoleChange, Turn,
};
use milpa_types::{MetaError, NodeId, PartitionId, Role};
use milpa_wire::meta::MetaWrite;
use tracing::{debug, info};

use super::leases::Leases;
use super::metrics::Metrics;
use super::replica::Proposal;
use super::shell::Shell;
use crate::core::{Applied, Command, Outcome};

/// Raft frames of meta nodes have one channel.
const CHANNEL: u16 = 0;

impl Outbox for Shell {
    fn send(&mut self, to: NodeId, frame: Frame) {
        match self.ctx.address(to) {
            Some(address) => self.ctx.pool.post(address, Role::Meta, CHANNEL, frame.encode()),
            None => {
                debug!(%to, "no address for a meta node yet: a frame was dropped");
                let ctx = self.ctx.clone();
                tokio::task::spawn_local(async move { ctx.refresh_addresses().await });
            }
        }
    }

    fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
        Metrics::get().applied.inc_by(entries.len() as u64);
        for entry in entries {
            if let Err(reason) = self.apply_one(group, entry) {
                self.give_up_replica(group, reason);
                return None;
            }
        }
        self.replicas.get(&group).map(|replica| replica.applied.index)
    }

    fn perform(&mut self, turn: Turn) {
        for change in turn.roles {
            self.change_role(&change);
        }
        for ready in turn.reads {
            let replica = self.replicas.get_mut(&ready.group);
            if let Some(read) = replica.and_then(|r| r.reads.get_mut(&ready.context)) {
                read.index = Some(ready.index);
            }
        }
        for wanted in turn.snapshots_wanted {
            debug!(group = %wanted.group, follower = %wanted.follower, "a follower needs a snapshot");
            if let Some(replica) = self.replicas.get_mut(&wanted.group) {
                replica.log.wanted = true;
            }
        }
        for group in turn.snapshots_doubted {
            if let Some(replica) = self.replicas.get_mut(&group) {
                replica.log.doubt();
            }
        }
        self.installs.extend(turn.installs);
        for group in turn.contradicted {
            self.give_up_replica(group, "its log is not the group's".to_owned());
        }
    }
}

impl Shell {
    /// Applies one entry. The error says why the replica cannot go on: skipping an entry that
    /// others apply would let the replicas drift apart.
    fn apply_one(&mut self, group: PartitionId, entry: Committed) -> Result<(), String> {
        let Some(replica) = self.replicas.get_mut(&group) else {
            // Given up, or deleted between two turns: nobody is answered any more.
            return Ok(());
        };
        let position = entry.position;
        if position.index <= replica.applied.index {
            return Ok(());
        }
        if position.index != replica.applied.index + 1 {
            let expected = replica.applied.index + 1;
            return Err(format!("entry {} came where {expected} was due", position.index));
        }
        match entry.payload {
            Payload::Data(bytes) => {
                let command = Command::decode(&bytes)
                    .map_err(|error| format!("entry {} is unreadable: {error}", position.index))?;
                replica.log.bytes += bytes.len() as u64;
                let applied = replica.state.apply(position.index, &command);
                self.after_apply(group, position, &command, applied);
            }
            Payload::Empty | Payload::Members { .. } => {
                replica.state.skip(position.index);
                let lost = replica.proposals.remove(&position.index);
                if let Some(proposal) = lost {
                    proposal.responder.fail(MetaError::OutcomeUnknown);
                }
            }
        }
        let Some(replica) = self.replicas.get_mut(&group) else { return Ok(()) };
        replica.log.entries += 1;
        replica.applied = position;
        replica.marks.note(&replica.state);
        if replica.leads() && position.term == replica.term && !replica.ready {
            self.become_ready(group);
        }
        Ok(())
    }

    fn after_apply(
        &mut self,
        group: PartitionId,
        position: LogPosition,
        command: &Command,
        applied: Applied,
    ) {
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let waiting = replica.proposals.remove(&position.index);
        if !replica.leads() {
            return;
        }
        self.follow_leases(group, command);
        let deferred = match &applied.outcome {
            Outcome::Deferred(operation) => Some(*operation),
            Outcome::Reply(_) => None,
        };
        if let Some(proposal) = waiting {
            self.answer_proposal(group, position, proposal, applied.outcome);
        }
        // After the waiting one was added: it may wait for this very end.
        let finished = applied.finished.map(|finished| {
            if let Some(replica) = self.replicas.get_mut(&group) {
                replica.finish(finished.operation, &finished.reply);
            }
            finished.operation
        });
        let advanced = match command {
            Command::Advance { operation, .. } | Command::AbortOperation { operation } => {
                Some(*operation)
            }
            _ => None,
        };
        for operation in [deferred, finished].into_iter().flatten() {
            self.drive(group, operation);
        }
        if let Some(operation) = advanced {
            self.advanced(group, operation);
        }
    }

    fn answer_proposal(
        &mut self,
        group: PartitionId,
        position: LogPosition,
        proposal: Proposal,
        outcome: Outcome,
    ) {
        if proposal.term != position.term {
            // Another leader's entry stands where ours was to stand.
            return proposal.responder.fail(MetaError::OutcomeUnknown);
        }
        match outcome {
            Outcome::Reply(reply) => proposal.responder.send(&reply),
            Outcome::Deferred(operation) => self.defer(group, operation, proposal.responder),
        }
    }

    /// Keeps the lease timers in step with the sessions that exist.
    fn follow_leases(&mut self, group: PartitionId, command: &Command) {
        let lease_ms = self.ctx.config.session_lease_ms;
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        let session = match command {
            Command::ExpireSession { session } => *session,
            Command::Client { id, write: MetaWrite::OpenSession, .. }
            | Command::Client { id, write: MetaWrite::CloseSession, .. } => id.session,
            _ => return,
        };
        if replica.state.has_session(session) {
            replica.leases.renew(session, now_ms(), lease_ms);
        } else {
            replica.leases.remove(session);
        }
    }

    fn change_role(&mut self, change: &RoleChange) {
        let Some(replica) = self.replicas.get_mut(&change.group) else { return };
        if change.term != replica.term {
            Metrics::get().term_changes.inc();
        }
        let led_before = replica.leads() && replica.term == change.term;
        let leads_now = change.role == RaftRole::Leader;
        replica.leader = change.leader;
        replica.role = change.role;
        replica.term = change.term;
        if !led_before || !leads_now {
            replica.step_down();
        }
        match (led_before, leads_now) {
            (false, true) => info!(partition = %change.group, term = change.term, "leads"),
            (true, false) => info!(partition = %change.group, term = change.term, "leads no more"),
            _ => {}
        }
        // A group of one may have committed in its term before it was told of its role.
        if leads_now && replica.applied.term == replica.term && !replica.ready {
            self.become_ready(change.group);
        }
    }

    /// This node leads, and its state holds everything that was ever acknowledged.
    fn become_ready(&mut self, group: PartitionId) {
        let (lease_ms, now) = (self.ctx.config.session_lease_ms, now_ms());
        let Some(replica) = self.replicas.get_mut(&group) else { return };
        replica.ready = true;
        replica.leases = Leases::all_anew(&replica.state.sessions(), now, lease_ms);
        self.drive_all(group);
        self.watch_intents(group, now);
    }
}
