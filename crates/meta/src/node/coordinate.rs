//! Driving cross-partition operations, and asking after forgotten intents.
//!
//! The core decides what the next step of an operation is and logs it; here the step is carried to
//! the other partition's leader, again and again, and its answer is proposed
//! ([`Command::Advance`]). A step repeated by two leaders is harmless: steps are idempotent, and an
//! answer to another step than the present one is ignored.
//!
//! # When an intent may be dropped
//!
//! An intent exists only after its operation was committed and applied at the coordinator. A
//! coordinator's leader that has applied an entry of its own term and is proven to lead therefore
//! knows every unfinished operation. If it does not know this one, the operation has ended, so no
//! commit can follow: the intent is a late repeat of a step, and undoing it loses nothing. No
//! answer, or one from a deposed leader, proves nothing, and nothing is done.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::now_ms;
use milpa_raft::MultiRaft;
use milpa_types::{MetaError, PartitionId, Timestamp, VolumeId};
use milpa_wire::meta::{MetaAnswer, MetaRequest, OperationId, Step, StepOutcome};
use tracing::{info, warn};

use super::context::{Context, Target};
use super::inbox::Event;
use super::replica::{Driven, IntentWatch};
use super::shell::Shell;
use crate::core::{Command, PendingStep};

/// Operations of one partition that are driven at once; the others wait their turn.
const DRIVEN_MAX: usize = 256;
/// One task asks for one step this long, then looks again whether it still must.
const STEP_WAIT: Duration = Duration::from_secs(2);
/// An operation that is not committed after this time is given up: its client has gone away or
/// would rather be told.
const GIVE_UP_MS: u64 = 8_000;
/// An intent of this age makes its participant ask.
const INTENT_OLD_MS: u64 = 15_000;
/// Intents of one partition that are watched at once.
const INTENTS_MAX: usize = 256;
/// One question about an intent.
const INQUIRY_WAIT: Duration = Duration::from_secs(2);

impl Shell {
    /// Drives every unfinished operation of a partition led here, as far as the bound allows.
    pub(crate) fn drive_all(&mut self, partition: PartitionId) {
        let Some(replica) = self.replicas.get(&partition) else { return };
        if replica.ready {
            for step in replica.state.next_steps(DRIVEN_MAX) {
                self.start_step(partition, step);
            }
        }
    }

    /// Carries an operation's next step out, if there is one and nobody is at it.
    pub(crate) fn drive(&mut self, partition: PartitionId, operation: OperationId) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        match replica.state.operation_step(operation) {
            Some(step) if replica.ready => self.start_step(partition, step),
            Some(_) => {}
            None => drop(replica.driven.remove(&operation)),
        }
    }

    /// An answer was applied: the next step goes out at once; the same one again, where the core
    /// wants it repeated, only with the next tick.
    pub(crate) fn advanced(&mut self, partition: PartitionId, operation: OperationId) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        if let Some(driven) = replica.driven.get_mut(&operation) {
            driven.asking = false;
            let next = replica.state.operation_step(operation);
            if next.is_some_and(|step| step.number == driven.number) {
                return;
            }
        }
        self.drive(partition, operation);
    }

    fn start_step(&mut self, partition: PartitionId, step: PendingStep) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let since_ms = match replica.driven.get(&step.operation) {
            Some(driven) if driven.number == step.number && driven.asking => return,
            Some(driven) => driven.since_ms,
            None if replica.driven.len() >= DRIVEN_MAX => return,
            None => now_ms(),
        };
        let driven = Driven { number: step.number, since_ms, asking: true };
        replica.driven.insert(step.operation, driven);
        let volume = replica.volume();
        tokio::task::spawn_local(ask_step(Rc::clone(&self.ctx), partition, volume, step));
    }

    /// A participant answered, or could not be asked for a while.
    pub(crate) fn step_answered(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        operation: OperationId,
        number: u32,
        outcome: Option<Result<StepOutcome, MetaError>>,
    ) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let Some(driven) = replica.driven.get_mut(&operation) else { return };
        if driven.number != number {
            return;
        }
        driven.asking = false;
        if let Some(outcome) = outcome {
            let command = Command::Advance { operation, number, outcome };
            if Shell::propose_for_itself(multi, partition, &command) {
                // Until the entry is applied nothing else is to be done.
                driven.asking = true;
            }
            return;
        }
        let waited_ms = now_ms().saturating_sub(driven.since_ms);
        let Some(step) = replica.state.operation_step(operation) else { return };
        if !step.committed && waited_ms >= GIVE_UP_MS {
            warn!(%partition, ?operation, waited_ms, "a participant is silent: giving up");
            Shell::propose_for_itself(multi, partition, &Command::AbortOperation { operation });
            driven_anew(replica.driven.get_mut(&operation));
        }
    }

    /// Once a tick: takes up operations that nobody is at.
    pub(crate) fn resume_operations(&mut self, partition: PartitionId) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let state = &replica.state;
        replica.driven.retain(|operation, _| state.operation_step(*operation).is_some());
        if replica.ready && replica.state.statistics().operations > 0 {
            self.drive_all(partition);
        }
    }

    /// Notes the intents of other partitions' operations, and asks after the old ones.
    pub(crate) fn watch_intents(&mut self, partition: PartitionId, now: u64) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        if !replica.ready {
            return;
        }
        let present = replica.state.intents(INTENTS_MAX);
        replica.intents.retain(|operation, _| present.contains(operation));
        let volume = replica.volume();
        for operation in present {
            let watch = replica
                .intents
                .entry(operation)
                .or_insert(IntentWatch { since_ms: now, asking: false });
            if !watch.asking && now.saturating_sub(watch.since_ms) >= INTENT_OLD_MS {
                watch.asking = true;
                let ctx = Rc::clone(&self.ctx);
                tokio::task::spawn_local(inquire(ctx, partition, volume, operation));
            }
        }
    }

    /// A coordinator was asked after an intent.
    pub(crate) fn inquired(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        operation: OperationId,
        known: Option<bool>,
    ) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let Some(watch) = replica.intents.get_mut(&operation) else { return };
        watch.asking = false;
        watch.since_ms = now_ms();
        if known == Some(false) {
            info!(%partition, ?operation, "undoing an intent whose operation has ended");
            let step = Step::Abort;
            let command = Command::Participate { operation, now: Timestamp(0), step };
            Shell::propose_for_itself(multi, partition, &command);
        }
    }
}

/// The abort that was proposed gets its own time before it is proposed again.
fn driven_anew(driven: Option<&mut Driven>) {
    if let Some(driven) = driven {
        driven.since_ms = now_ms();
    }
}

async fn ask_step(ctx: Rc<Context>, partition: PartitionId, volume: VolumeId, step: PendingStep) {
    let PendingStep { operation, number, slot, now, step, .. } = step;
    let request =
        |partition| MetaRequest::Participate { partition, operation, now, step: step.clone() };
    let answer = ctx.ask(volume, Target::Slot(slot), request, STEP_WAIT).await;
    let outcome = match answer {
        Some(Ok(MetaAnswer::Step(outcome))) => Some(Ok(outcome)),
        Some(Ok(MetaAnswer::Done)) => Some(Ok(StepOutcome::Done)),
        Some(Ok(other)) => {
            warn!(?operation, ?other, "a participant gave another answer than a step's");
            None
        }
        Some(Err(error)) => Some(Err(error)),
        None => None,
    };
    ctx.inbox.push(Event::StepAnswered { partition, operation, number, outcome });
}

async fn inquire(
    ctx: Rc<Context>,
    partition: PartitionId,
    volume: VolumeId,
    operation: OperationId,
) {
    let step = Step::Inquire;
    let request = |partition| MetaRequest::Participate {
        partition,
        operation,
        now: Timestamp(0),
        step: step.clone(),
    };
    let target = Target::Partition(operation.partition);
    let known = match ctx.ask(volume, target, request, INQUIRY_WAIT).await {
        Some(Ok(MetaAnswer::Step(StepOutcome::Known(known)))) => Some(known),
        _ => None,
    };
    ctx.inbox.push(Event::Inquired { partition, operation, known });
}
