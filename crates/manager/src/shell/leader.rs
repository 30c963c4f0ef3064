//! What a manager does while it leads: passes of the planners, steps, waiting callers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use milpa_host::clock::{Instant, now_ms};
use milpa_raft::{MultiRaft, ProposeError};
use milpa_types::{ManagerError, NodeId, VolumeId};
use milpa_wire::manager::ManagerAnswer;
use tracing::{debug, info, warn};

use super::event::{Event, Responder};
use super::metrics::metrics;
use super::replica::{GROUP, Replica, Then};
use super::steps;
use crate::config::Policy;
use crate::core::{CommandV1, VolumeState};
use crate::loads::Loads;
use crate::planner::{self, Step, StepKey, View, growth, lacking};
use crate::view::Versions;

/// Passes on demand are at least this far apart, so that a burst of heartbeats costs one.
const PASS_GAP_MS: u64 = 10;
/// And this many times as far as a pass took: news that never end do not keep a core busy.
const PASS_GAP_FACTOR: u64 = 4;
/// A caller who waits for nodes is answered this long before it stops waiting.
const ANSWER_MARGIN_MS: u64 = 200;
/// Callers who may wait at once.
pub(super) const WAITING_MAX: usize = 256;

/// A caller who waits until a volume's partitions can be used.
pub(super) struct Waiting {
    pub(super) volume: VolumeId,
    pub(super) responder: Responder,
    /// Answer with the volume, not just `Done`.
    pub(super) is_creation: bool,
}

/// When passes were.
struct Pace {
    began_ms: u64,
    ended_ms: u64,
}

impl Pace {
    fn new(now_ms: u64) -> Pace {
        Pace { began_ms: now_ms, ended_ms: now_ms }
    }

    /// Whether it is time for a pass. Measured from the end of the last one: however long passes
    /// take, between two of them the leader listens.
    fn is_due(&self, policy: &Policy, is_wanted: bool, now_ms: u64) -> bool {
        let since_ms = now_ms.saturating_sub(self.ended_ms);
        let took_ms = self.ended_ms.saturating_sub(self.began_ms);
        let gap_ms = PASS_GAP_MS.max(took_ms.saturating_mul(PASS_GAP_FACTOR));
        let interval_ms = policy.pass_interval_ms;
        since_ms >= interval_ms || (is_wanted && since_ms >= gap_ms.min(interval_ms))
    }

    /// For how long before `now_ms` the leader was not listening; zero if it is as usual. Measured
    /// from the beginning of the last pass: during it nobody is heard.
    fn not_listened_ms(&self, policy: &Policy, now_ms: u64) -> u64 {
        let usual_ms = (policy.pass_interval_ms * 2).max(policy.silence_period_ms / 4);
        now_ms.saturating_sub(self.began_ms).saturating_sub(usual_ms)
    }
}

/// The memory of a leader. Gone when it steps down.
pub(super) struct Leadership {
    /// The term led in.
    pub(super) term: u64,
    /// What nodes said since then.
    pub(super) loads: Loads,
    /// Versions of what clients were told since then.
    pub(super) versions: Versions,
    /// Something changed: plan again soon.
    pub(super) pass_wanted: bool,
    /// Callers who wait for nodes.
    pub(super) waiting: Vec<Waiting>,
    /// What the last pass could not do.
    pub(super) problems: Vec<String>,
    pace: Pace,
    passes: u64,
    in_flight: BTreeMap<StepKey, Option<NodeId>>,
    failures: BTreeMap<StepKey, String>,
}

impl Leadership {
    pub(super) fn new(term: u64, now_ms: u64) -> Leadership {
        Leadership {
            term,
            loads: Loads::new(now_ms),
            versions: Versions::new(term),
            pass_wanted: true,
            waiting: Vec::new(),
            problems: Vec::new(),
            pace: Pace::new(now_ms),
            passes: 0,
            in_flight: BTreeMap::new(),
            failures: BTreeMap::new(),
        }
    }
}

impl Leadership {
    /// What cannot be done, and what nodes were asked for and failed to do, for the operator.
    pub(super) fn all_problems(&self) -> Vec<String> {
        let failed = self.failures.iter().map(|(key, said)| match key {
            StepKey::Create(partition, node) => {
                format!("node {node} cannot create partition {partition}: {said}")
            }
            StepKey::Configure(partition) => {
                format!("partition {partition} cannot be configured: {said}")
            }
            StepKey::Split(partition) => format!("partition {partition} cannot be split: {said}"),
            StepKey::SetOptions(volume, node) => {
                format!("node {node} cannot take the options of volume {volume}: {said}")
            }
            StepKey::Delete(partition, node) => {
                format!("node {node} cannot delete partition {partition}: {said}")
            }
            StepKey::SetMembers(partition) => {
                format!("the members of partition {partition} cannot be changed: {said}")
            }
            StepKey::TransferLeader(partition) => {
                format!("the leadership of partition {partition} cannot be moved: {said}")
            }
            StepKey::Refuse(partition, node) => {
                format!("node {node} does not give up partition {partition}: {said}")
            }
        });
        self.problems.iter().cloned().chain(failed).collect()
    }
}

/// What the planners look at now. It borrows two fields only, so that the rest of the replica can
/// be changed while it lives.
pub(super) fn view_of<'a>(
    state: &'a crate::core::State,
    leadership: &'a Leadership,
    policy: &'a Policy,
) -> View<'a> {
    let seed = leadership.term.rotate_left(32) ^ leadership.passes;
    View { state, loads: &leadership.loads, policy, now_ms: now_ms(), unix_ms: unix_ms(), seed }
}

/// The wall clock: for what operators read, and for deadlines of hours.
pub(super) fn unix_ms() -> u64 {
    let since = milpa_host::clock::wall().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

impl Replica {
    /// Runs a pass when its time has come, or something has changed.
    pub(super) fn pass_if_due(&mut self, multi: &mut MultiRaft) {
        let Some(leadership) = &mut self.leadership else { return };
        let (policy, now) = (&self.config.policy, now_ms());
        if !leadership.pace.is_due(policy, leadership.pass_wanted, now) {
            return;
        }
        let not_listened_ms = leadership.pace.not_listened_ms(policy, now);
        if not_listened_ms > 0 {
            warn!(
                not_listened_ms,
                "this manager was stopped or starved; nobody is judged for that time"
            );
            leadership.loads.postpone(not_listened_ms, now);
        }
        leadership.pace.began_ms = now;
        leadership.pass_wanted = false;
        self.answer_waiting();
        // Plans rest on the state: those of the last pass must be in it first, and what another leader has decided
        // since this one was stopped.
        let wait = Duration::from_millis(self.config.policy.task_deadline_ms);
        let deadline = Instant::now() + wait;
        if self.planned_pending == 0 && multi.lease_valid(GROUP, now_ms()) {
            self.pass(multi, deadline);
        }
        if let Some(leadership) = &mut self.leadership {
            leadership.pace.ended_ms = now_ms();
        }
    }

    /// `deadline` is that of its steps.
    fn pass(&mut self, multi: &mut MultiRaft, deadline: Instant) {
        let Some(leadership) = &mut self.leadership else { return };
        leadership.passes += 1;
        leadership.loads.judge(now_ms(), self.config.policy.silence_period_ms);
        let view = view_of(&self.state, leadership, &self.config.policy);
        let plan = planner::plan(view);
        metrics().observe(view, leadership.in_flight.len());
        let wanted: BTreeSet<StepKey> = plan.steps.iter().map(Step::key).collect();
        leadership.failures.retain(|key, _| wanted.contains(key));
        for problem in plan.problems.iter().filter(|p| !leadership.problems.contains(p)) {
            warn!(problem, "needs an operator");
        }
        leadership.problems = plan.problems;
        let state = &self.state;
        leadership.versions.retain(|volume| state.volume(volume).is_some());
        for command in plan.commands {
            if let Err((error, _)) = self.propose(multi, command, Then::Planned) {
                debug!(%error, "a planned command was not taken; it is planned again");
                break;
            }
        }
        for step in plan.steps {
            self.start_step(step, deadline);
        }
    }

    /// Asks a node, unless it is being asked, or too much is under way. What is not started now
    /// is planned again.
    fn start_step(&mut self, step: Step, deadline: Instant) {
        let policy = &self.config.policy;
        let Some(leadership) = &mut self.leadership else { return };
        let (key, target) = (step.key(), step.target());
        let limit = policy.tasks_in_flight_max as usize;
        let same_node = leadership.in_flight.values().filter(|node| **node == target).count();
        // No single node may use up all that is allowed: others still answer.
        if leadership.in_flight.contains_key(&key)
            || leadership.in_flight.len() >= limit
            || same_node >= limit.div_ceil(4)
        {
            return;
        }
        leadership.in_flight.insert(key, target);
        let term = leadership.term;
        let addresses = self.node_addresses(&self.targets(&step));
        let (pool, inbox) = (self.pool.clone(), self.inbox.clone());
        tokio::task::spawn_local(async move {
            let result = steps::perform(pool, addresses, step.clone(), deadline).await;
            // The loop is gone only when the process ends.
            let _ = inbox.send(Event::StepDone { term, step: Box::new(step), result }).await;
        });
    }

    /// All nodes that a step may be sent to, those that others may name among them.
    fn targets(&self, step: &Step) -> BTreeSet<NodeId> {
        match step {
            Step::CreateMeta { node, .. }
            | Step::CreateData { node, .. }
            | Step::SetOptions { node, .. }
            | Step::Refuse { node, .. }
            | Step::Delete { node, .. } => BTreeSet::from([*node]),
            Step::Configure { partition, .. } => {
                let record = self.state.data_partition(*partition);
                record.into_iter().flat_map(|r| r.replicas.iter().map(|r| r.node)).collect()
            }
            Step::Split { partition, .. } => {
                let record = self.state.meta_partition(*partition);
                record.into_iter().flat_map(|r| r.members.iter().copied()).collect()
            }
            Step::SetMembers { partition, ask, .. } => {
                let record = self.state.meta_partition(*partition);
                let members = record.into_iter().flat_map(|r| r.members.iter().copied());
                members.chain(ask.iter().copied()).collect()
            }
            Step::TransferLeader { from, .. } => BTreeSet::from([*from]),
        }
    }

    /// Takes note of a node's answer. The reports count, not this; except where nodes report
    /// nothing of it.
    pub(super) fn step_done(
        &mut self,
        multi: &mut MultiRaft,
        term: u64,
        step: &Step,
        result: Result<(), String>,
    ) {
        metrics().step(step.kind(), result.is_ok());
        let Some(leadership) = self.leadership.as_mut().filter(|l| l.term == term) else { return };
        leadership.in_flight.remove(&step.key());
        if let Err(reason) = result {
            debug!(step = step.kind(), key = ?step.key(), reason, "a step failed; it is planned again");
            leadership.failures.insert(step.key(), reason);
            return;
        }
        leadership.failures.remove(&step.key());
        leadership.pass_wanted = true;
        let next = match step {
            Step::Split { partition, .. } => growth::finish_split(
                view_of(&self.state, leadership, &self.config.policy),
                *partition,
            ),
            Step::SetOptions { node, volume, version, .. } => {
                Ok(CommandV1::OptionsTaken { volume: *volume, node: *node, version: *version })
            }
            Step::CreateMeta { .. }
            | Step::CreateData { .. }
            | Step::Configure { .. }
            | Step::SetMembers { .. }
            | Step::TransferLeader { .. }
            | Step::Refuse { .. }
            | Step::Delete { .. } => return,
        };
        match next {
            Ok(command) => {
                if let Err((error, _)) = self.propose(multi, command, Then::Planned) {
                    debug!(%error, "not taken; the step is planned again");
                }
            }
            Err(error) => warn!(%error, "a split cannot be finished yet"),
        }
    }

    /// Lets a caller wait, or refuses when too many do.
    pub(super) fn wait_for_volume(&mut self, waiting: Waiting) {
        match &mut self.leadership {
            Some(leadership) if leadership.waiting.len() < WAITING_MAX => {
                leadership.pass_wanted = true;
                leadership.waiting.push(waiting);
            }
            _ => waiting.responder.send(Err(ManagerError::Busy)),
        }
    }

    /// Answers those whose volume can be used, or who will not wait much longer.
    fn answer_waiting(&mut self) {
        let Some(leadership) = &mut self.leadership else { return };
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut leadership.waiting) {
            let Some(volume) = self.state.volume(waiting.volume) else {
                let name = "deleted meanwhile".to_owned();
                waiting.responder.send(Err(ManagerError::NoVolume { name }));
                continue;
            };
            let lacks = lacking(view_of(&self.state, leadership, &self.config.policy), volume.id);
            let margin = Duration::from_millis(ANSWER_MARGIN_MS);
            let is_late = Instant::now() + margin >= waiting.responder.deadline();
            match lacks.first() {
                None if volume.state == VolumeState::Ready => {
                    info!(volume = volume.name, id = %volume.id, "all partitions are there and led");
                    let created = ManagerAnswer::VolumeCreated(volume.describe());
                    let done = if waiting.is_creation { created } else { ManagerAnswer::Done };
                    waiting.responder.send(Ok(done));
                }
                Some(lack) if is_late => {
                    let key = StepKey::Create(lack.partition, lack.node);
                    let said = leadership.failures.get(&key).map(|said| format!(": {said}"));
                    let reason = format!(
                        "partition {}: {}{}; the managers keep trying",
                        lack.partition,
                        lack.what,
                        said.unwrap_or_default()
                    );
                    waiting
                        .responder
                        .send(Err(ManagerError::NodeFailed { node: lack.node, reason }));
                }
                None if is_late => waiting.responder.send(Err(ManagerError::Busy)),
                _ => still.push(waiting),
            }
        }
        leadership.waiting = still;
    }

    /// Whether a proposal that was not taken means that another manager leads.
    pub(super) fn refusal(&self, error: &ProposeError) -> ManagerError {
        match error {
            ProposeError::NotLeader { .. } => self.not_leader(),
            ProposeError::TooLarge { .. } => {
                ManagerError::Invalid { problems: vec!["too much in one request".to_owned()] }
            }
            _ => ManagerError::Busy,
        }
    }

    /// Where the leader is, as far as known.
    pub(super) fn not_leader(&self) -> ManagerError {
        let other = self.leader.filter(|leader| *leader != self.own);
        let leader = other.and_then(|leader| self.managers.get(&leader)).copied();
        ManagerError::NotLeader { leader }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEARD: NodeId = NodeId(101);
    const LOST: NodeId = NodeId(102);

    /// Passes of a length, for a minute: one node is heard between any two, another one never. How
    /// long each was silent at the most.
    fn silences(policy: &Policy, pass_ms: u64) -> [u64; 2] {
        let (mut pace, mut loads, mut now) = (Pace::new(0), Loads::new(0), 0);
        loads.register(HEARD, 0);
        loads.register(LOST, 0);
        let mut longest = [0, 0];
        while now < 60_000 {
            now += if pace.is_due(policy, true, now) { 0 } else { PASS_GAP_MS };
            loads.register(HEARD, now);
            loads.postpone(pace.not_listened_ms(policy, now), now);
            pace = Pace { began_ms: now, ended_ms: now + pass_ms };
            for (longest, node) in longest.iter_mut().zip([HEARD, LOST]) {
                *longest = now.saturating_sub(loads.heard_ms(node)).max(*longest);
            }
            now += pass_ms;
        }
        longest
    }

    /// The story: a leader forgave all silence when it was late. One whose passes took longer than
    /// that was always late, so no node ever counted as silent, and nothing was repaired.
    #[test]
    fn the_lost_are_silent_however_long_passes_take() {
        let policy = Policy::default();
        for pass_ms in [0, 100, 600, 3_000] {
            let [heard, lost] = silences(&policy, pass_ms);
            assert!(lost >= policy.silence_period_ms, "passes of {pass_ms} ms: {lost}");
            assert!(heard < policy.silence_period_ms, "passes of {pass_ms} ms: {heard}");
        }
    }

    #[test]
    fn a_stopped_leader_judges_nobody_for_that_time() {
        let (policy, mut loads) = (Policy::default(), Loads::new(0));
        let pace = Pace::new(1_000);
        loads.register(HEARD, 900);
        let now = 3_600_000;
        loads.postpone(pace.not_listened_ms(&policy, now), now);
        assert!(now - loads.heard_ms(HEARD) < policy.silence_period_ms);
    }

    #[test]
    fn between_two_passes_the_leader_listens() {
        let policy = Policy::default();
        // How long a pass took, and when the next one may come that is wanted.
        for (took_ms, gap_ms) in [(0, 10), (2, 10), (20, 80), (5_000, policy.pass_interval_ms)] {
            let pace = Pace { began_ms: 5_000 - took_ms, ended_ms: 5_000 };
            assert!(!pace.is_due(&policy, true, 5_000 + gap_ms - 1));
            assert!(pace.is_due(&policy, true, 5_000 + gap_ms));
            assert!(!pace.is_due(&policy, false, 5_000 + policy.pass_interval_ms - 1));
            assert!(pace.is_due(&policy, false, 5_000 + policy.pass_interval_ms));
        }
    }
}
