//! Reads snapshots again, within a period, and writes those anew that have rotted.
//!
//! The state is in memory, and other replicas have it: what a snapshot is for is that all of them start again. One
//! of a partition that nobody changes is not written again, and lies for as long as the disk keeps it. (Logs do not:
//! what is in them is in the next snapshot some minutes later.) One partition at a time, and as fast as the disk
//! gives it: snapshots are written so as well, and more often.
//! Those of a leader are read at once when a follower could not take what it was offered.

use std::rc::Rc;

use milpa_host::clock::now_ms;
use milpa_host::{entropy, jobs};
use milpa_raft::LogPosition;
use milpa_types::PartitionId;
use tracing::warn;

use super::context::Context;
use super::inbox::Event;
use super::metrics::Metrics;
use super::replica::Replica;
use super::shell::Shell;
use super::snapshot_store::SnapshotStore;
use super::snapshots::{JOBS_MAX, RETRY_MS, SnapshotJob};

impl Context {
    /// When the snapshots of a replica that has just been read are read again: some time within a period, by lot. The
    /// start has read the newest only, and from the page cache perhaps; it need not be all at once, nor on
    /// nodes alone that run for a whole period.
    pub(super) fn first_scrub_ms(&self, now: u64) -> u64 {
        let share = entropy::u64().unwrap_or_default();
        self.scrub_period_ms().map_or(u64::MAX, |period_ms| now + share % period_ms)
    }

    /// When they are read again after that.
    pub(super) fn next_scrub_ms(&self, now: u64) -> u64 {
        self.scrub_period_ms().map_or(u64::MAX, |period_ms| now.saturating_add(period_ms))
    }

    /// `None` if they are not.
    fn scrub_period_ms(&self) -> Option<u64> {
        Some(self.config.scrub_period_s.saturating_mul(1_000)).filter(|period_ms| *period_ms > 0)
    }
}

impl Shell {
    /// Begins the next partition when it is due, and no snapshot has to be written.
    pub(super) fn run_scrub(&mut self, now: u64) {
        let is_scrubbing = self.snapshot_jobs.values().any(|job| *job == SnapshotJob::Scrub);
        if is_scrubbing || self.disk_jobs() >= JOBS_MAX {
            return;
        }
        let is_due = |replica: &&Replica| {
            let log = &replica.log;
            let is_free = !self.snapshot_jobs.contains_key(&replica.id()) && !log.wanted;
            is_free && log.newest.is_some() && now >= log.scrub_due_ms
        };
        // One that a follower could not take comes first.
        let due = self.replicas.values().filter(is_due);
        let Some(replica) = due.min_by_key(|replica| replica.log.scrub_due_ms) else { return };
        let Some(newest) = &replica.log.newest else { return };
        let (partition, identity) = (replica.id(), Rc::clone(&replica.identity));
        let newest = newest.position;
        self.snapshot_jobs.insert(partition, SnapshotJob::Scrub);
        let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
        tokio::task::spawn_local(async move {
            let scrubbed = jobs::run("scrub", move || scrub(&store, partition, newest)).await;
            let rotten = scrubbed.ok().flatten();
            inbox.push(Event::SnapshotsScrubbed { partition, identity, rotten });
        });
    }

    /// Another snapshot is written for the newest that has rotted, which stays until then: a disk that refused to read
    /// it once may give it again.
    pub(super) fn snapshots_scrubbed(
        &mut self,
        partition: PartitionId,
        identity: &Rc<()>,
        rotten: Option<Vec<LogPosition>>,
    ) {
        let now = now_ms();
        let next_ms = self.ctx.next_scrub_ms(now);
        let Some(replica) = self.job_ended(partition, identity) else { return };
        let log = &mut replica.log;
        log.trusted_until_ms = now + RETRY_MS;
        log.scrub_due_ms = log.trusted_until_ms;
        let Some(rotten) = rotten else { return };
        Metrics::get().snapshots_scrubbed.inc();
        log.scrub_due_ms = next_ms;
        if !rotten.is_empty() {
            log.wanted = true;
            log.newest.take_if(|newest| rotten.contains(&newest.position));
            log.rotten = rotten;
        }
    }
}

/// Gives what has rotted and cannot be spared; what can is set aside, as the one at `newest`, which peers may ask for and
/// the log begins behind, is good. `None` if not all could be looked at. Blocking.
fn scrub(
    store: &SnapshotStore,
    partition: PartitionId,
    newest: LogPosition,
) -> Option<Vec<LogPosition>> {
    let verified = store.verify(partition);
    let verified = verified
        .inspect_err(|error| warn!(%partition, %error, "snapshots cannot be read again now"))
        .ok()?;
    let newest_is_good = verified.iter().any(|(at, result)| *at == newest && result.is_ok());
    let (mut rotten, mut is_complete) = (Vec::new(), true);
    if !verified.iter().any(|(at, _)| *at == newest) {
        warn!(%partition, position = ?newest, "a snapshot is missing");
        rotten.push(newest);
    }
    for (position, result) in verified {
        let Err(error) = result else { continue };
        let source = std::error::Error::source(&error);
        if !error.is_rot() {
            is_complete = false;
            warn!(%partition, ?position, %error, ?source, "a snapshot cannot be read again now");
            continue;
        }
        Metrics::get().snapshots_failed.inc();
        warn!(%partition, ?position, %error, ?source, "a snapshot has rotted");
        if !newest_is_good {
            rotten.push(position);
        } else if let Err(error) = store.set_aside(partition, position) {
            warn!(%partition, ?position, %error, "cannot set a rotten snapshot aside");
        }
    }
    (is_complete || !rotten.is_empty()).then_some(rotten)
}

#[cfg(test)]
mod tests {
    use milpa_raft::{Members, SnapshotDescriptor};
    use milpa_types::{MetaSlot, NodeId, VolumeId, VolumeOptions};
    use milpa_wire::meta::CreateMetaPartition;

    use super::*;
    use crate::core::{Partition, PartitionSetup};
    use crate::node::snapshot_file::{self, FileHeader};

    const PARTITION: PartitionId = PartitionId(3);

    fn at(index: u64) -> LogPosition {
        LogPosition { term: 2, index }
    }

    fn write(store: &SnapshotStore, index: u64) {
        let definition = CreateMetaPartition {
            joins: false,
            partition: PARTITION,
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(0),
            members: vec![NodeId(1)],
        };
        store.define(&definition).unwrap();
        let mut state = Partition::new(PartitionSetup::from(&definition));
        state.skip(index);
        let members = Members::new(&[NodeId(1)], &[]);
        let descriptor = SnapshotDescriptor { position: at(index), members };
        let path = store.writing_path(PARTITION);
        snapshot_file::write(
            &path,
            &FileHeader { definition, descriptor },
            state.begin_snapshot(2),
        )
        .unwrap();
        store.publish(PARTITION, at(index), &path).unwrap();
    }

    /// Found by the simulation (seed 100074): a disk that refused once to read a good snapshot, the only one, had it
    /// set aside, and to write another one it refused too.
    #[test]
    fn what_has_rotted_stays_until_there_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().join("partitions")).unwrap();
        write(&store, 5);
        write(&store, 40);
        let path = |index| {
            let name = format!("partitions/3/{index:020}-{:020}.snapshot", 2);
            directory.path().join(name)
        };
        let flip = |index| {
            let mut bytes = std::fs::read(path(index)).unwrap();
            bytes[20] ^= 1;
            std::fs::write(path(index), bytes).unwrap();
        };
        let scrub = |newest| super::scrub(&store, PARTITION, at(newest));
        assert_eq!(scrub(40), Some(vec![]));
        flip(40);
        assert_eq!(scrub(40), Some(vec![at(40)]));
        assert!(path(40).exists() && path(5).exists());
        flip(5);
        assert_eq!(scrub(40), Some(vec![at(40), at(5)]));
        write(&store, 300);
        assert_eq!(
            scrub(200),
            Some(vec![at(200), at(40), at(5)]),
            "not the one that is counted on"
        );
        assert_eq!(scrub(300), Some(vec![]));
        assert!(!path(40).exists() && !path(5).exists(), "nobody needs them");
        assert_eq!(store.inspect(PARTITION).unwrap().snapshots, [at(300)]);
    }
}
