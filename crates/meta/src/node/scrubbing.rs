//! Reads snapshots again, within a period, and writes those anew that have rotted.
//!
//! The state is in memory, and other replicas have it: what a snapshot is for is that all of them start again. One
//! of a partition that nobody changes is not written again, and lies for as long as the disk keeps it. (Logs do not:
//! what is in them is in the next snapshot some minutes later.) One partition at a time, and as fast as the disk
//! gives it: snapshots are written so as well, and more often.

use std::rc::Rc;

use milpa_host::clock::now_ms;
use milpa_host::jobs;
use milpa_raft::LogPosition;
use milpa_types::PartitionId;
use tracing::{debug, warn};

use super::inbox::Event;
use super::metrics::Metrics;
use super::replica::Replica;
use super::shell::Shell;
use super::snapshot_store::SnapshotStore;
use super::snapshots::{JOBS_MAX, RETRY_MS};

impl Shell {
    /// Begins the next partition when it is due, and no snapshot has to be written.
    pub(super) fn run_scrub(&mut self, now: u64) {
        let period_ms = self.ctx.config.scrub_period_s.saturating_mul(1_000);
        if period_ms == 0 || self.is_scrubbing || self.snapshot_jobs >= JOBS_MAX {
            return;
        }
        let is_due = |replica: &&mut Replica| {
            let log = &replica.log;
            let is_free = !log.is_busy && !replica.installing && log.newest.is_some();
            is_free && now.saturating_sub(log.verified_ms) >= period_ms
        };
        let Some(replica) = self.replicas.values_mut().find(is_due) else { return };
        replica.log.is_busy = true;
        self.is_scrubbing = true;
        self.snapshot_jobs += 1;
        let partition = replica.id();
        let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
        tokio::task::spawn_local(async move {
            let scrubbed = jobs::run("scrub", move || scrub(&store, partition)).await;
            let damaged = scrubbed.ok().flatten();
            inbox.push(Event::SnapshotsScrubbed { partition, damaged });
        });
    }

    /// A snapshot that was damaged is written anew as soon as may be.
    pub(super) fn snapshots_scrubbed(
        &mut self,
        partition: PartitionId,
        damaged: Option<&[LogPosition]>,
    ) {
        self.is_scrubbing = false;
        self.snapshot_jobs = self.snapshot_jobs.saturating_sub(1);
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let log = &mut replica.log;
        log.is_busy = false;
        let Some(damaged) = damaged else {
            let period_ms = self.ctx.config.scrub_period_s.saturating_mul(1_000);
            log.verified_ms = (now_ms() + RETRY_MS).saturating_sub(period_ms);
            return;
        };
        Metrics::get().snapshots_scrubbed.inc();
        log.verified_ms = now_ms();
        log.wanted |= !damaged.is_empty();
        log.newest.take_if(|newest| damaged.contains(&newest.position));
    }
}

/// Gives what was damaged; `None` if not all could be looked at. Blocking.
fn scrub(store: &SnapshotStore, partition: PartitionId) -> Option<Vec<LogPosition>> {
    match store.scrub(partition) {
        Ok(damaged) => {
            for (position, error) in &damaged {
                Metrics::get().snapshots_failed.inc();
                warn!(%partition, ?position, %error, source = ?std::error::Error::source(error),
                    "a snapshot has rotted: it is set aside, and another one is written");
            }
            Some(damaged.into_iter().map(|(position, _)| position).collect())
        }
        Err(error) => {
            debug!(%partition, %error, "snapshots could not be read again now");
            None
        }
    }
}
