//! Requests of clients, data nodes and other partitions: reads, writes, steps, leases.

use milpa_host::clock::now_ms;
use milpa_raft::{MemberChange, MultiRaft};
use milpa_types::{MetaError, PartitionId, SessionId};
use milpa_wire::meta::{
    ExtentOffer, MetaAnswer, MetaReply, MetaRequest, MetaWrite, OperationId, RequestId, Step,
    StepOutcome, Verdict,
};
use tracing::info;

use super::batch::run_batch;
use super::inbox::{Asker, done};
use super::replica::{Query, Replica, WaitingRead};
use super::responder::Responder;
use super::shell::{Shell, refusal};
use crate::core::{Command, Outcome};

/// Reads of one partition that may wait for heartbeats at once.
const READS_WAITING_MAX: usize = 10_000;

impl Shell {
    /// Acts on a request that its role allows.
    pub(crate) fn request(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        request: MetaRequest,
        responder: Responder,
    ) {
        match request {
            MetaRequest::Read { partition, reader, read } => {
                self.query(multi, asker, partition, Query::Read(reader, read), responder);
            }
            MetaRequest::Write { partition, id, now, write } => {
                let command = Command::Client { id, now, write };
                self.write(multi, asker, partition, command, id, responder);
            }
            MetaRequest::Batch(requests) => {
                tokio::task::spawn_local(run_batch(self.ctx.clone(), asker, requests, responder));
            }
            MetaRequest::KeepAlive { session } => self.keep_alive(asker, session, responder),
            MetaRequest::Participate { partition, operation, step: Step::Inquire, .. } => {
                self.query(multi, asker, partition, Query::Inquire(operation), responder);
            }
            MetaRequest::Participate { partition, operation, now, step } => {
                let command = Command::Participate { operation, now, step };
                self.command(multi, asker, partition, &command, responder);
            }
            MetaRequest::OfferExtents { partition, offers } => {
                self.query(multi, asker, partition, Query::Offers(offers), responder);
            }
            MetaRequest::Split { partition, end } => {
                self.command(multi, asker, partition, &Command::Split { end }, responder);
            }
            MetaRequest::CreatePartition(definition) => {
                self.create_partition(definition, responder);
            }
            MetaRequest::DeletePartition { partition, deletion } => {
                self.delete_partition(multi, partition, deletion, responder);
            }
            MetaRequest::FetchSnapshot { partition, index, offset } => {
                self.serve_snapshot(partition, index, offset, responder);
            }
            MetaRequest::Report => {
                let report = self.report(multi);
                responder.send(&Ok(MetaAnswer::Report(report)));
            }
            MetaRequest::SetVolumeOptions { volume, options } => {
                self.set_volume_options(multi, volume, &options, responder);
            }
            MetaRequest::Configure { partition, voters, learners } => {
                let change = MemberChange { voters, learners };
                self.configure(multi, asker, partition, &change, responder);
            }
            MetaRequest::TransferLeader { partition, to } => {
                self.transfer_leader(multi, asker, partition, to, responder);
            }
            MetaRequest::StateHash { partition } => self.state_hash(partition, responder),
            MetaRequest::RefuseReplica { partition, mark } => {
                self.refuse_replica(partition, mark, responder);
            }
            MetaRequest::Repair { partition, now, repair } => {
                info!(%partition, ?repair, "an operator repairs");
                let command = Command::Repair { now, repair };
                self.command(multi, asker, partition, &command, responder);
            }
            MetaRequest::Check { partition, check } => {
                self.query(multi, asker, partition, Query::Check(check), responder);
            }
        }
    }

    /// A command of a node, proposed as it is.
    fn command(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        partition: PartitionId,
        command: &Command,
        responder: Responder,
    ) {
        match self.leading(asker, partition) {
            Ok(_) => self.propose(multi, partition, command, responder),
            Err(error) => responder.fail(error),
        }
    }

    /// A client's change. A repeated request whose answer is known needs no entry of its own.
    fn write(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        partition: PartitionId,
        command: Command,
        id: RequestId,
        responder: Responder,
    ) {
        let lease_ms = self.ctx.config.session_lease_ms;
        let replica = match self.leading(asker, partition) {
            Ok(replica) => replica,
            Err(error) => return responder.fail(error),
        };
        if replica.state.has_session(id.session) {
            replica.leases.renew(id.session, now_ms(), lease_ms);
        }
        if replica.ready
            && let Some(outcome) = replica.state.answered(&id)
            && multi.lease_valid(partition, now_ms())
        {
            return match outcome {
                Outcome::Reply(reply) => responder.send(&reply),
                Outcome::Deferred(operation) => self.defer(partition, operation, responder),
            };
        }
        // What was done before is not refused now.
        if makes_inodes(&command)
            && let Some(refusal) = replica.lacks_room(now_ms())
            && replica.state.answered(&id).is_none()
        {
            return responder.fail(refusal);
        }
        self.propose(multi, partition, &command, responder);
    }

    /// Something that only a proven leader may answer: at once under the lease, else after a round
    /// of heartbeats.
    fn query(
        &mut self,
        multi: &mut MultiRaft,
        asker: Asker,
        partition: PartitionId,
        query: Query,
        responder: Responder,
    ) {
        let context = self.next_read;
        let replica = match self.leading(asker, partition) {
            Ok(replica) => replica,
            Err(error) => return responder.fail(error),
        };
        if replica.ready && multi.lease_valid(partition, now_ms()) {
            let answer = answer(replica, &query);
            // The clock again, now that the answer stands: this process may have been stopped in
            // between, and another leader elected (RELIABILITY.md F18).
            if multi.lease_valid(partition, now_ms()) {
                return self.respond(multi, partition, query, answer, responder);
            }
        }
        if replica.reads.len() >= READS_WAITING_MAX {
            return responder.fail(MetaError::Busy);
        }
        match multi.read_index(partition, context) {
            Ok(()) => {
                let waiting = WaitingRead { query, responder, index: None };
                replica.reads.insert(context, waiting);
                self.next_read += 1;
            }
            Err(error) => responder.fail(refusal(&error)),
        }
    }

    /// What the turns made possible: groups that are durable, caught up with, or forgotten; reads whose index is
    /// applied.
    pub(crate) fn after_turns(&mut self, multi: &mut MultiRaft) {
        self.answer_founded(multi);
        self.note_joined(multi);
        self.remove_directories(multi);
        let reading = self.replicas.values().filter(|replica| !replica.reads.is_empty());
        let reading: Vec<PartitionId> = reading.map(Replica::id).collect();
        for partition in reading {
            self.serve_reads(multi, partition);
        }
    }

    /// Answers the reads whose index is applied.
    fn serve_reads(&mut self, multi: &mut MultiRaft, partition: PartitionId) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let applied = replica.state.applied();
        let ready: Vec<WaitingRead> = replica
            .reads
            .extract_if(.., |_, read| read.index.is_some_and(|index| index <= applied))
            .map(|(_, read)| read)
            .collect();
        for read in ready {
            let Some(replica) = self.replicas.get(&partition) else { return };
            let answer = answer(replica, &read.query);
            self.respond(multi, partition, read.query, answer, read.responder);
        }
    }

    /// Sends an answer, unless it is one that an entry must decide first, or that takes a while.
    fn respond(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        query: Query,
        answer: MetaReply,
        responder: Responder,
    ) {
        match (query, &answer) {
            (Query::Offers(offers), Ok(MetaAnswer::Verdicts(verdicts)))
                if verdicts.contains(&Verdict::Delete) =>
            {
                let command = Command::JudgeOffers { offers };
                self.propose(multi, partition, &command, responder);
            }
            (Query::Check(check), _) => self.check(partition, check, responder),
            _ => responder.send(&answer),
        }
    }

    /// The client lives: its lease is renewed in every partition of its volume led here.
    fn keep_alive(&mut self, asker: Asker, session: SessionId, responder: Responder) {
        let (now, lease_ms) = (now_ms(), self.ctx.config.session_lease_ms);
        for replica in self.replicas.values_mut() {
            let concerned = replica.leads() && asker.volume == Some(replica.volume());
            if concerned && replica.state.has_session(session) {
                replica.leases.renew(session, now, lease_ms);
            }
        }
        responder.send(&done());
    }
}

fn answer(replica: &Replica, query: &Query) -> MetaReply {
    match query {
        Query::Read(reader, read) => replica.state.read(*reader, read),
        Query::Inquire(operation) => inquire(replica, *operation),
        // Made of a copy of this state, by a thread.
        Query::Check(_) => done(),
        Query::Offers(offers) => {
            let verdict = |offer: &ExtentOffer| replica.state.verdict(offer);
            Ok(MetaAnswer::Verdicts(offers.iter().map(verdict).collect()))
        }
    }
}

fn inquire(replica: &Replica, operation: OperationId) -> MetaReply {
    // An operation that some other partition coordinates is not ours to judge.
    if operation.partition != replica.id() {
        return Err(MetaError::WrongPartition);
    }
    let known = replica.state.knows_operation(operation);
    Ok(MetaAnswer::Step(StepOutcome::Known(known)))
}

/// Whether the command would need memory for a new inode here.
fn makes_inodes(command: &Command) -> bool {
    matches!(command, Command::Client { write: MetaWrite::Create { .. }, .. })
}
