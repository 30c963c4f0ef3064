//! How a client's change of the namespace is carried out, in one entry or across partitions.
//!
//! Every such change is *planned* and *committed*. Planning only reads: it finds the errno, or what
//! another partition must prepare first, or that all is ready. Committing only writes, to this
//! partition, in one entry, and cannot fail. A change that needs nobody else is planned and
//! committed in the entry that brought it. One that does becomes an [`Operation`]:
//!
//! | stage | entered by | the leader sends | left by |
//! |---|---|---|---|
//! | preparing | the client's entry, or a prepared step that needs another | the prepare | its outcome: plan again |
//! | finishing | the commit | `Finish` to each participant, in turn | the last one's answer: forgotten |
//! | aborting | a refusal, or the shell's giving up | `Abort` to each participant asked | the last one's answer, or giving up again: forgotten |
//!
//! The commit is the entry that changes the dentry, in this partition. Until it, the names involved
//! are locked; a lock is never waited for (`Locked` goes back at once), so there is no deadlock.
//! All of this is in the state: a new leader finds each unfinished operation with its next step and
//! asks again. Steps are idempotent at the participant; answers carry the step's number, so that
//! one that was asked by two leaders counts once.

use milpa_types::{InodeId, MetaError, MetaSlot, Name, Next, Timestamp};
use milpa_wire::meta::{
    MetaAnswer, MetaReply, MetaWrite, OperationId, RequestId, Step, StepOutcome,
};
use serde::{Deserialize, Serialize};

use super::Partition;
use super::command::{Applied, Finished, Outcome, PendingStep};

/// Unfinished operations that one partition coordinates, at most: above it clients are told
/// `Busy`.
const OPERATIONS_MAX: u64 = 4096;

/// A client's change and its circumstances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub id: RequestId,
    pub now: Timestamp,
    pub write: MetaWrite,
}

/// A change that other partitions take part in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Operation {
    request: Request,
    /// Of the present step; rises with each.
    number: u32,
    /// What participants have prepared so far, in the order of asking.
    prepared: Vec<StepOutcome>,
    /// Every participant asked so far, once.
    asked: Vec<MetaSlot>,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    Preparing {
        slot: MetaSlot,
        step: Step,
    },
    Finishing {
        left: Vec<MetaSlot>,
        /// Given to the client at the end: of those operations whose effect in another partition
        /// the client may look at next.
        reply: Option<MetaReply>,
    },
    Aborting {
        left: Vec<MetaSlot>,
    },
}

/// What planning finds, when it finds no errno.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Another partition must prepare this first.
    Prepare(MetaSlot, Step),
    /// All is ready.
    Commit,
    /// There is nothing to change.
    Nothing(MetaAnswer),
}

/// A request being planned or committed.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub request: &'a Request,
    /// What was prepared for it.
    pub prepared: &'a [StepOutcome],
    /// The operation that it became, whose own locks do not stand in its way.
    pub operation: Option<OperationId>,
}

/// The reply that a prepared step of the wrong kind deserves: nothing happened, ask again.
pub(crate) const BAD_OUTCOME: MetaError = MetaError::Busy;

/// Whether a repeat of the request is executed anew: nothing was changed and time may help.
pub(crate) fn is_retried(reply: &MetaReply) -> bool {
    reply.as_ref().is_err_and(|error| error.next() == Next::RetrySame)
}

impl Partition {
    /// Executes a change of the namespace, or begins it.
    pub(crate) fn begin(&mut self, index: u64, request: &Request) -> Outcome {
        let context = Context { request, prepared: &[], operation: None };
        match self.plan(context) {
            Err(error) => Outcome::Reply(Err(error)),
            Ok(Plan::Nothing(answer)) => Outcome::Reply(Ok(answer)),
            Ok(Plan::Commit) => Outcome::Reply(self.commit(context)),
            Ok(Plan::Prepare(..)) if self.tables.operations.count() >= OPERATIONS_MAX => {
                Outcome::Reply(Err(MetaError::Busy))
            }
            Ok(Plan::Prepare(slot, step)) => {
                let id = OperationId { partition: self.setup.partition, index };
                for name in self.names(&request.write) {
                    self.tables.locked_names.insert(&name, &id);
                }
                let operation = Operation {
                    request: request.clone(),
                    number: 0,
                    prepared: Vec::new(),
                    asked: vec![slot],
                    stage: Stage::Preparing { slot, step },
                };
                self.tables.operations.insert(&id, &operation);
                Outcome::Deferred(id)
            }
        }
    }

    /// Takes a participant's answer in.
    pub(crate) fn advance(
        &mut self,
        id: OperationId,
        number: u32,
        outcome: &Result<StepOutcome, MetaError>,
    ) -> Applied {
        let done = Applied::reply(Ok(MetaAnswer::Done));
        let Some(mut operation) = self.tables.operations.get(&id) else {
            return done;
        };
        if operation.number != number {
            return done;
        }
        let finished = match (&mut operation.stage, outcome) {
            (Stage::Preparing { .. }, Ok(prepared)) => {
                operation.prepared.push(prepared.clone());
                self.proceed(id, operation)
            }
            (Stage::Preparing { .. }, Err(error)) if is_definite(error) => {
                self.roll_back(id, operation, Err(error.clone()))
            }
            (Stage::Finishing { left, reply }, Ok(_)) => {
                left.pop();
                let reply = if left.is_empty() { reply.take() } else { None };
                let finished = reply.map(|reply| self.finish(id, &operation, reply));
                self.next_participant(id, operation);
                finished
            }
            (Stage::Aborting { left }, Ok(_)) => {
                left.pop();
                self.next_participant(id, operation);
                None
            }
            // Past the commit or the abort there is no other way: the step is sent again.
            (_, Err(_)) => None,
        };
        Applied { finished, ..done }
    }

    /// Rolls an operation back that is not committed; forgets one that is being rolled back.
    pub(crate) fn abort(&mut self, id: OperationId) -> Applied {
        let mut applied = Applied::reply(Ok(MetaAnswer::Done));
        let Some(operation) = self.tables.operations.get(&id) else {
            return applied;
        };
        match operation.stage {
            Stage::Preparing { .. } => {
                applied.finished = self.roll_back(id, operation, Err(MetaError::Busy));
            }
            // A participant that has an intent all the same will inquire, and abort it.
            Stage::Aborting { .. } => {
                self.tables.operations.remove(&id);
            }
            Stage::Finishing { .. } => {}
        }
        applied
    }

    /// Plans again with what is prepared now.
    fn proceed(&mut self, id: OperationId, mut operation: Operation) -> Option<Finished> {
        let context = Context {
            request: &operation.request,
            prepared: &operation.prepared,
            operation: Some(id),
        };
        match self.plan(context) {
            Err(error) => self.roll_back(id, operation, Err(error)),
            Ok(Plan::Nothing(answer)) => self.roll_back(id, operation, Ok(answer)),
            Ok(Plan::Prepare(slot, step)) => {
                if !operation.asked.contains(&slot) {
                    operation.asked.push(slot);
                }
                operation.number += 1;
                operation.stage = Stage::Preparing { slot, step };
                self.tables.operations.insert(&id, &operation);
                None
            }
            Ok(Plan::Commit) => {
                let reply = self.commit(context);
                self.unlock(&operation);
                let left = operation.asked.clone();
                operation.number += 1;
                let finished;
                if is_answered_at_end(&operation.request.write) {
                    operation.stage = Stage::Finishing { left, reply: Some(reply) };
                    finished = None;
                } else {
                    operation.stage = Stage::Finishing { left, reply: None };
                    finished = Some(self.finish(id, &operation, reply));
                }
                self.tables.operations.insert(&id, &operation);
                finished
            }
        }
    }

    fn roll_back(
        &mut self,
        id: OperationId,
        mut operation: Operation,
        reply: MetaReply,
    ) -> Option<Finished> {
        self.unlock(&operation);
        let finished = self.finish(id, &operation, reply);
        operation.number += 1;
        operation.stage = Stage::Aborting { left: operation.asked.clone() };
        self.tables.operations.insert(&id, &operation);
        Some(finished)
    }

    /// Tells the client.
    fn finish(&mut self, id: OperationId, operation: &Operation, reply: MetaReply) -> Finished {
        self.record_answer(&operation.request.id, &reply);
        Finished { operation: id, id: operation.request.id, reply }
    }

    /// Goes on to the next participant, or forgets the operation after the last.
    fn next_participant(&mut self, id: OperationId, mut operation: Operation) {
        operation.number += 1;
        match &operation.stage {
            Stage::Finishing { left, .. } | Stage::Aborting { left } if left.is_empty() => {
                self.tables.operations.remove(&id);
            }
            _ => self.tables.operations.insert(&id, &operation),
        }
    }

    fn unlock(&mut self, operation: &Operation) {
        for name in self.names(&operation.request.write) {
            self.tables.locked_names.remove(&name);
        }
    }

    /// The names of this partition that a change involves.
    fn names(&self, write: &MetaWrite) -> Vec<(InodeId, Name)> {
        match write {
            MetaWrite::Create { parent, name, .. }
            | MetaWrite::Link { parent, name, .. }
            | MetaWrite::Unlink { parent, name, .. }
            | MetaWrite::RemoveDirectory { parent, name } => vec![(*parent, name.clone())],
            MetaWrite::Rename {
                source_parent, source_name, target_parent, target_name, ..
            } => {
                let mut names = vec![(*target_parent, target_name.clone())];
                if self.owns(*source_parent) {
                    names.push((*source_parent, source_name.clone()));
                }
                names
            }
            _ => Vec::new(),
        }
    }

    /// The step that `operation` waits for.
    pub(crate) fn pending_step(&self, id: OperationId, operation: &Operation) -> PendingStep {
        let (slot, step, committed) = match &operation.stage {
            Stage::Preparing { slot, step } => (Some(*slot), step.clone(), false),
            Stage::Finishing { left, .. } => (left.last().copied(), Step::Finish, true),
            Stage::Aborting { left } => (left.last().copied(), Step::Abort, false),
        };
        PendingStep {
            operation: id,
            number: operation.number,
            // `left` is never empty in the state.
            slot: slot.unwrap_or(self.setup.slot),
            now: operation.request.now,
            step,
            committed,
        }
    }
}

/// Whether the client learns the outcome only when every participant has finished: it may look at
/// the link count or the old name right after.
fn is_answered_at_end(write: &MetaWrite) -> bool {
    matches!(write, MetaWrite::Unlink { .. } | MetaWrite::Rename { .. })
}

/// Whether a participant's error is its word on the step, and not on its health or the route.
fn is_definite(error: &MetaError) -> bool {
    *error == MetaError::Locked || !matches!(error.next(), Next::RetrySame | Next::RefreshRoute)
}
