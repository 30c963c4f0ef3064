//! What happens by the clock: deadlines, lease timers, retries, reports.

use std::rc::Rc;

use milpa_host::clock::Instant;
use milpa_host::telemetry::{give_back_memory, memory_bytes};
use milpa_host::{disk, jobs};
use milpa_raft::MultiRaft;
use milpa_types::PartitionId;

use super::context::Context;
use super::metrics::Metrics;
use super::shell::Shell;
use crate::core::Command;

/// Raft's own grain is coarser.
const GRAIN_MS: u64 = 5;
/// Between two rounds of slower work.
const ROUND_MS: u64 = 100;
/// Between two looks for sessions without a timer; well below any lease.
const CENSUS_MS: u64 = 1_000;
/// From the start until the log is replayed, and what that took is free again.
const TRIM_AFTER_MS: u64 = 2_000;
/// Between two looks at the disk's free space.
const SPACE_MS: u64 = 500;
/// A tick that comes this late means that the process was stopped.
const STOPPED_MS: u64 = 500;
/// Sessions of one partition ended in one round.
const EXPIRED_MAX: usize = 64;

/// When what is due.
#[derive(Debug, Default)]
pub(crate) struct Upkeep {
    ticked_ms: u64,
    next_round_ms: u64,
    next_census_ms: u64,
    next_space_ms: u64,
    /// When what the start has freed is given back, if it has not been yet.
    trim_ms: Option<u64>,
    memory_limit: u64,
}

impl Upkeep {
    pub(crate) fn new(memory_limit: u64, now: u64) -> Upkeep {
        Upkeep {
            ticked_ms: now,
            next_round_ms: now,
            next_census_ms: now,
            next_space_ms: now,
            trim_ms: Some(now + TRIM_AFTER_MS),
            memory_limit,
        }
    }

    /// Lets time pass. May be called as often as one likes.
    pub(crate) fn tick(&mut self, shell: &mut Shell, multi: &mut MultiRaft, now: u64) {
        let gap = now.saturating_sub(self.ticked_ms);
        if gap < GRAIN_MS {
            return;
        }
        multi.tick(now);
        self.ticked_ms = now;
        if gap >= STOPPED_MS {
            shell.replicas.values_mut().for_each(|replica| replica.leases.postpone(gap));
        }
        let instant = Instant::now();
        shell.replicas.values_mut().for_each(|replica| replica.expire_waiting(instant));
        if now >= self.next_round_ms {
            self.next_round_ms = now + ROUND_MS;
            self.round(shell, multi, now);
        }
    }

    fn round(&mut self, shell: &mut Shell, multi: &mut MultiRaft, now: u64) {
        shell.is_full = memory_bytes() > self.memory_limit || shell.ctx.is_disk_full();
        let is_full = shell.is_full;
        shell.replicas.values_mut().for_each(|replica| replica.note_room(is_full, now));
        if now >= self.next_space_ms {
            self.next_space_ms = now + SPACE_MS;
            ask_space(&shell.ctx);
        }
        if self.trim_ms.is_some_and(|at| at <= now) {
            self.trim_ms = None;
            jobs::run("memory", give_back_memory);
        }
        let ready: Vec<PartitionId> =
            shell.replicas.values().filter(|r| r.ready).map(|r| r.id()).collect();
        if now >= self.next_census_ms {
            self.next_census_ms = now + CENSUS_MS;
            ready.iter().for_each(|partition| shell.adopt_sessions(*partition, now));
        }
        for partition in ready {
            shell.expire_sessions(multi, partition, now);
            shell.resume_operations(partition);
            shell.watch_intents(partition, now);
        }
        shell.start_freeing(now);
        shell.run_snapshots(multi, now);
        shell.note_started();
        shell.retire_damaged(multi);
        if shell.leaving {
            shell.hand_over(multi);
        }
        shell.publish_report(multi);
        shell.measure();
    }
}

impl Shell {
    fn expire_sessions(&mut self, multi: &mut MultiRaft, partition: PartitionId, now: u64) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        for session in replica.leases.expired(now, EXPIRED_MAX) {
            Metrics::get().sessions_expired.inc();
            tracing::info!(%partition, %session, "a session's lease ran out");
            Shell::propose_for_itself(multi, partition, &Command::ExpireSession { session });
        }
    }

    fn adopt_sessions(&mut self, partition: PartitionId, now: u64) {
        let lease_ms = self.ctx.config.session_lease_ms;
        if let Some(replica) = self.replicas.get_mut(&partition) {
            replica.leases.adopt(&replica.state.sessions(), now, lease_ms);
        }
    }

    /// Notes on disk which replicas have begun to take part: for them a missing log is a loss.
    fn note_started(&mut self) {
        for (partition, replica) in &mut self.replicas {
            if !replica.started && replica.has_begun() {
                replica.started = true;
                let (store, partition) = (self.ctx.store.clone(), *partition);
                jobs::run("partitions", move || {
                    if let Err(error) = store.mark_started(partition) {
                        tracing::warn!(%partition, %error, "cannot note that a replica started");
                    }
                });
            }
        }
    }

    pub(crate) fn publish_report(&self, multi: &MultiRaft) {
        *self.ctx.report.borrow_mut() = Rc::new(self.report(multi).partitions);
    }

    fn measure(&self) {
        let metrics = Metrics::get();
        let sum = |of: &dyn Fn(&super::replica::Replica) -> usize| {
            self.replicas.values().map(of).sum::<usize>() as i64
        };
        metrics.partitions.set(self.replicas.len() as i64);
        metrics.partitions_led.set(sum(&|replica| usize::from(replica.leads())));
        metrics.partitions_damaged.set(self.damaged.len() as i64);
        metrics.sessions.set(sum(&|replica| replica.leases.len()));
        metrics.proposals.set(sum(&|replica| replica.proposals.len()));
        metrics.reads_waiting.set(sum(&|replica| replica.reads.len()));
        metrics.operations_driven.set(sum(&|replica| replica.driven.len()));
        let report = self.ctx.report.borrow();
        let statistics = report.iter().map(|partition| partition.statistics);
        let (mut inodes, mut dentries, mut freed) = (0, 0, 0);
        for counts in statistics {
            inodes += counts.inodes;
            dentries += counts.dentries;
            freed += counts.freed_waiting;
        }
        metrics.inodes.set(inodes as i64);
        metrics.dentries.set(dentries as i64);
        metrics.freed_waiting.set(freed as i64);
    }
}

/// Asks how much room the disk has left. statfs(2) may block, so not here.
fn ask_space(ctx: &Rc<Context>) {
    let (ctx, directory) = (Rc::clone(ctx), ctx.config.directory.clone());
    tokio::task::spawn_local(async move {
        if let Ok(Ok(space)) = jobs::run("space", move || disk::space(&directory)).await {
            ctx.free_bytes.set(space.free);
        }
    });
}
