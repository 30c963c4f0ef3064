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

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::now_ms;
use milpa_raft::MultiRaft;
use milpa_types::{MetaError, MetaSlot, PartitionId, Timestamp, VolumeId};
use milpa_wire::meta::{MetaAnswer, MetaRequest, OperationId, Step, StepOutcome};
use tracing::{info, warn};

use super::context::{Context, Target};
use super::inbox::Event;
use super::replica::{Driven, IntentWatch, Replica};
use super::shell::Shell;
use crate::core::{Command, PendingStep};

/// Steps of one partition's operations that are asked for at once; the others wait their turn.
const ASKED_MAX: usize = 1024;
/// So many of them of one participant: one that does not answer holds all of these, for as long as it
/// takes, and the operations of the others go on. Eight such would hold up the rest.
const ASKED_OF_ONE_MAX: usize = ASKED_MAX / 8;
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

/// How many steps are being asked for, and of whom.
#[derive(Default)]
struct Asked {
    all: usize,
    of_one: BTreeMap<MetaSlot, usize>,
}

impl Asked {
    fn of(driven: &BTreeMap<OperationId, Driven>) -> Asked {
        let mut asked = Asked::default();
        for driven in driven.values().filter(|driven| driven.asking) {
            asked.all += 1;
            *asked.of_one.entry(driven.slot).or_default() += 1;
        }
        asked
    }

    /// Counts one more, if the bounds allow it.
    fn take(&mut self, slot: MetaSlot) -> bool {
        let of_one = self.of_one.entry(slot).or_default();
        let has_room = self.all < ASKED_MAX && *of_one < ASKED_OF_ONE_MAX;
        if has_room {
            self.all += 1;
            *of_one += 1;
        }
        has_room
    }
}

/// The steps that nobody asks for and that may be asked for now, oldest first.
fn due_steps(replica: &Replica) -> Vec<PendingStep> {
    let mut asked = Asked::of(&replica.driven);
    let is_asked = |step: &PendingStep| {
        let driven = replica.driven.get(&step.operation);
        driven.is_some_and(|driven| driven.number == step.number && driven.asking)
    };
    // All of them: behind those of a silent participant may be others'. The core bounds their number.
    let mut steps = replica.state.next_steps(usize::MAX);
    steps.retain(|step| !is_asked(step) && asked.take(step.slot));
    steps
}

impl Shell {
    /// Drives every unfinished operation of a partition led here, as far as the bounds allow.
    pub(crate) fn drive_all(&mut self, partition: PartitionId) {
        let Some(replica) = self.replicas.get(&partition) else { return };
        if replica.ready {
            for step in due_steps(replica) {
                self.start_step(partition, step);
            }
        }
    }

    /// Carries an operation's next step out, if there is one and nobody is at it.
    pub(crate) fn drive(&mut self, partition: PartitionId, operation: OperationId) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        match replica.state.operation_step(operation) {
            Some(step) if replica.ready && Asked::of(&replica.driven).take(step.slot) => {
                self.start_step(partition, step);
            }
            // A later tick takes it up.
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
            None => now_ms(),
        };
        let driven = Driven { number: step.number, slot: step.slot, since_ms, asking: true };
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

#[cfg(test)]
mod tests {
    use milpa_types::{FileKind, InodeId, Name, SessionId, VolumeOptions};
    use milpa_wire::meta::{CreateMetaPartition, MetaWrite, NewInode, RequestId};

    use super::*;
    use crate::core::{Applied, Outcome};

    const SILENT: MetaSlot = MetaSlot(1);
    const WELL: MetaSlot = MetaSlot(2);
    /// Operations whose requests one session may have unanswered.
    const OF_ONE_SESSION: u64 = 256;

    fn apply(replica: &mut Replica, session: u64, sequence: u64, write: MetaWrite) -> Applied {
        let session = SessionId(u128::from(session));
        let id = RequestId { session, sequence, unanswered: 1 };
        let index = replica.state.applied() + 1;
        replica.state.apply(index, &Command::Client { id, now: Timestamp(1), write })
    }

    /// Begins operations that make an inode in the partition of `slot`.
    fn begin(replica: &mut Replica, session: u64, slot: MetaSlot, count: u64) {
        apply(replica, session, 1, MetaWrite::OpenSession);
        for number in 0..count {
            let kind = FileKind::File;
            let inode = NewInode { kind, mode: 0o644, uid: 1, gid: 1, device: 0, target: vec![] };
            let write = MetaWrite::Create {
                parent: InodeId::ROOT,
                name: Name::new(format!("{session}-{number}").as_bytes()).unwrap(),
                inode,
                placement: Some(slot),
                open_existing: false,
                content: None,
            };
            let applied = apply(replica, session, 2 + number, write);
            assert!(matches!(applied.outcome, Outcome::Deferred(_)), "{:?}", applied.outcome);
        }
    }

    fn ask(replica: &mut Replica) -> Vec<PendingStep> {
        let steps = due_steps(replica);
        for step in &steps {
            let driven = Driven { number: step.number, slot: step.slot, since_ms: 0, asking: true };
            replica.driven.insert(step.operation, driven);
        }
        steps
    }

    /// The story: the oldest operations held all places. With one participant without a majority
    /// these were soon all its own, and operations between healthy partitions waited for it.
    #[test]
    fn a_silent_participant_does_not_hold_up_the_others() {
        let mut replica = Replica::founded(CreateMetaPartition {
            joins: false,
            partition: PartitionId(1),
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(0),
            members: Vec::new(),
        });
        let sessions = ASKED_MAX as u64 / OF_ONE_SESSION + 1;
        (1..=sessions).for_each(|s| begin(&mut replica, s, SILENT, OF_ONE_SESSION - 1));
        begin(&mut replica, 100, WELL, 10);
        let asked = ask(&mut replica);
        let of = |slot: MetaSlot| asked.iter().filter(|step| step.slot == slot).count();
        assert_eq!((of(SILENT), of(WELL)), (ASKED_OF_ONE_MAX, 10));
        assert_eq!(due_steps(&replica), [], "each is asked for once");

        // One place is free again: the next in turn gets it.
        let answered = asked.iter().find(|step| step.slot == SILENT).unwrap().operation;
        replica.driven.get_mut(&answered).unwrap().asking = false;
        assert_eq!(due_steps(&replica).len(), 1);
    }
}
