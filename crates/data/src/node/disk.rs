//! The task of one disk: the only owner of its partitions, its Raft groups and their log.
//!
//! Requests, frames, the log, the clock and the disk's threads all arrive as events. The task
//! takes everything that is there, then lets Raft have a turn, so that batches form by themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_host::disk as files;
use milpa_host::rpc::{Peer, Reply};
use milpa_raft::{Committed, Frame, LogProgress, Outbox, RaftDriver, Turn};
use milpa_types::{DataError, DiskId, NodeId, PartitionId, Role};
use milpa_wire::data::DataRequest;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::store::StoreDisk;

use super::metrics::Metrics;
use super::partition::Partition;
use super::shared::Shared;
use super::workers::{Continuation, Workers};

/// Grain of deadlines and commit announcements.
const TICK: Duration = Duration::from_millis(20);
/// Events taken before Raft has a turn.
const EVENTS_MAX: usize = 512;
/// Before a partition's state is written again to a disk that was full.
const SAVE_PAUSE_MS: u64 = 500;

/// What arrives at a disk's task.
pub(crate) enum DiskEvent {
    /// A request for one of its partitions.
    Request(Box<Incoming>),
    /// Raft messages from another node. Those of groups that live on other disks are not ours.
    Frame {
        /// Who sent it.
        from: NodeId,
        /// A frame.
        body: Bytes,
    },
    /// A job of a thread or task is done: this is what follows.
    Then(Continuation),
}

/// A request on its way to its partition.
pub(crate) struct Incoming {
    /// Who asks.
    pub peer: Peer,
    /// What.
    pub request: DataRequest,
    /// Its bytes.
    pub payload: Bytes,
    /// The way to answer.
    pub reply: Reply,
    /// When it arrived, in microseconds.
    pub arrived_us: u64,
}

/// One disk.
pub(crate) struct Disk {
    /// Its place in the node's list, and the channel of its Raft frames.
    pub index: usize,
    /// Its id.
    pub id: DiskId,
    /// Its directory.
    pub directory: PathBuf,
    /// Where partition states lie.
    pub states: PathBuf,
    /// Where extents lie.
    pub extents: PathBuf,
    /// What the node's tasks share.
    pub shared: Rc<Shared>,
    /// Its fence and limits.
    pub store_disk: Arc<StoreDisk>,
    /// Its threads.
    pub workers: Workers,
    /// Its Raft groups and their log.
    pub driver: RaftDriver,
    /// Its partitions.
    pub partitions: BTreeMap<PartitionId, Partition>,
    /// The way to this task.
    pub events: UnboundedSender<DiskEvent>,
    /// Numbers the requests that cores decide about.
    pub next_request: u64,
    /// Numbers and space as last counted, see `usage`.
    pub usage: super::usage::Usage,
    /// Reading everything again.
    pub scrubbing: super::scrubbing::Scrubbing,
    /// Which lost blocks the operator was told of, on disk.
    pub lost_note: super::lost_note::LostNote,
    /// When the clock last ticked here: a gap means that the process was stopped.
    pub ticked_ms: u64,
    /// Replicas whose state was damaged when the node started. They take no part; the manager brings a
    /// new one.
    pub damaged: BTreeSet<PartitionId>,
    /// Replicas whose files are being removed.
    pub wiping: BTreeSet<PartitionId>,
    /// The fence is up and everybody here has been told.
    pub is_out_of_service: bool,
    /// When each node's frames last arrived.
    pub heard_ms: BTreeMap<NodeId, u64>,
}

/// What Raft wants done in one pump.
#[derive(Default)]
struct Collected {
    frames: Vec<(NodeId, Frame)>,
    committed: Vec<(PartitionId, Vec<Committed>)>,
    turns: Vec<Turn>,
}

impl Outbox for Collected {
    fn send(&mut self, to: NodeId, frame: Frame) {
        self.frames.push((to, frame));
    }

    fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
        self.committed.push((group, entries));
        None
    }

    fn perform(&mut self, turn: Turn) {
        self.turns.push(turn);
    }
}

impl Disk {
    /// Runs until the node drops its end of the event queue or asks for the end.
    pub async fn run(mut self, mut inbox: UnboundedReceiver<DiskEvent>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.pump();
        loop {
            // Events last: they may never pause, and those that wait are taken below in any case.
            // The log and the clock pause by themselves.
            tokio::select! {
                biased;
                progress = self.driver.writer.progressed() => self.log_progressed(progress),
                _ = ticks.tick() => self.tick(),
                event = inbox.recv() => {
                    let Some(event) = event else { return };
                    self.handle(event);
                }
            }
            let mut taken = 0;
            while taken < EVENTS_MAX
                && let Ok(event) = inbox.try_recv()
            {
                self.handle(event);
                taken += 1;
            }
            self.pump();
            if taken == EVENTS_MAX {
                // A busy disk must not starve the sockets of the same thread.
                tokio::task::yield_now().await;
            }
        }
    }

    fn handle(&mut self, event: DiskEvent) {
        match event {
            DiskEvent::Request(incoming) => {
                self.shared.queued.set(self.shared.queued.get().saturating_sub(1));
                self.request(*incoming);
            }
            DiskEvent::Frame { from, body } => {
                // The clock is read after the frame has arrived: the sender's lease rests on it.
                let now = now_ms();
                self.heard_ms.insert(from, now);
                if let Err(error) = self.driver.multi.step_frame(from, body, now) {
                    tracing::warn!(%from, %error, "a data node sent a malformed Raft frame");
                }
            }
            DiskEvent::Then(then) => then(self),
        }
    }

    fn log_progressed(&mut self, progress: LogProgress) {
        if progress == LogProgress::Fenced {
            let error = std::io::Error::other("the Raft log's writer stopped");
            self.store_disk.fence("raft log", &error);
        }
        self.driver.on_log(progress, now_ms());
    }

    fn tick(&mut self) {
        let now = now_ms();
        if self.is_fenced() && !self.is_out_of_service {
            self.leave_service();
        }
        self.driver.multi.tick(now);
        self.tick_appends(now);
        self.tick_licences(now);
        self.tick_overwrites(now);
        for partition in self.partitions.values_mut() {
            partition.watch_repeating(now);
        }
        self.tick_alignment(now);
        self.tick_returned(now);
        self.tick_repairs();
        self.tick_alone();
        self.tick_usage(now);
        self.tick_leaving();
        self.tick_scrub(now);
        self.tick_lost(now);
        self.tick_saves(now);
        self.ticked_ms = now;
    }

    /// The disk failed: it shall lead no group, order no append, and acknowledge nothing.
    fn leave_service(&mut self) {
        self.is_out_of_service = true;
        tracing::error!(disk = %self.id, directory = %self.directory.display(),
            "the disk is out of service: replace it");
        self.driver.multi.log_failed();
        for partition in self.partitions.values_mut() {
            partition.primary.refuse(Some(DataError::DiskFailed));
            // Raft says nothing any more; the others elect a leader among themselves.
            (partition.role, partition.leader) = (milpa_raft::Role::Follower, None);
        }
    }

    /// Lets Raft have turns until it wants nothing any more, and does what it wants.
    pub fn pump(&mut self) {
        for _ in 0..64 {
            let mut collected = Collected::default();
            if self.driver.pump(now_ms(), &mut collected).is_err() {
                // Fenced: said once when it happened; nothing more will come out of the log.
                return;
            }
            self.perform(collected);
            if !self.driver.multi.has_work() {
                return;
            }
        }
    }

    fn perform(&mut self, collected: Collected) {
        for (to, frame) in collected.frames {
            match self.shared.address(to) {
                Some(address) => {
                    let channel = u16::try_from(self.index).unwrap_or(u16::MAX);
                    self.shared.pool.post(address, Role::Data, channel, frame.encode());
                }
                None => self.driver.multi.report_unreachable(to),
            }
        }
        for (group, entries) in collected.committed {
            for entry in entries {
                self.committed(group, entry);
            }
        }
        for turn in collected.turns {
            for change in turn.roles {
                self.role_changed(&change);
            }
            for wanted in turn.snapshots_wanted {
                self.offer_snapshot(wanted.group);
            }
            for install in turn.installs {
                self.install_snapshot(install);
            }
            for group in turn.contradicted {
                self.retire_replica(group);
            }
        }
    }

    /// Whether writes are refused because the disk failed.
    pub fn is_fenced(&self) -> bool {
        self.store_disk.is_fenced()
    }

    /// The partition, if it is here and in service.
    pub fn partition(&mut self, id: PartitionId) -> Result<&mut Partition, DataError> {
        // Of a replica that could not be opened nothing is known: it may have what others lack.
        let closed = self.damaged.contains(&id);
        let absent = if closed { DataError::DiskFailed } else { DataError::WrongPartition };
        let partition = self.partitions.get_mut(&id).ok_or(absent)?;
        if partition.broken.is_some() { Err(DataError::DiskFailed) } else { Ok(partition) }
    }

    /// Replicas that take no part.
    pub fn out_of_service(&self) -> Vec<PartitionId> {
        let broken = self.partitions.values().filter(|partition| partition.broken.is_some());
        let all: BTreeSet<_> = broken.map(|it| it.id).chain(self.damaged.iter().copied()).collect();
        all.into_iter().collect()
    }

    /// A number for a request that a core decides about.
    pub fn number_request(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    /// Writes a partition's state down, then goes on with `then`. Calls that meet share one write.
    pub fn save_state(&mut self, id: PartitionId, then: Continuation) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        partition.saving.then.push(then);
        if !partition.saving.is_running {
            self.start_save(id);
        }
    }

    fn start_save(&mut self, id: PartitionId) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let then = std::mem::take(&mut partition.saving.then);
        partition.saving.is_running = true;
        let (state, directory) = (partition.state.clone(), self.states.clone());
        self.workers.slow(
            move || state.save(&directory),
            move |disk, result| {
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.saving.is_running = false;
                }
                if let Err(error) = result {
                    // What was to be promised on the strength of this state is not promised.
                    return disk.save_failed(id, then, &error);
                }
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.saving.failures = 0;
                }
                for then in then {
                    then(disk);
                }
                if disk.partitions.get(&id).is_some_and(|p| !p.saving.then.is_empty()) {
                    disk.start_save(id);
                }
            },
        );
    }

    /// A full disk is ordinary, and so is a lack of descriptors: the file is written anew, as a whole, when there is
    /// room. Anything else fences.
    fn save_failed(&mut self, id: PartitionId, mut then: Vec<Continuation>, error: &io::Error) {
        if !files::is_full(error) && !files::is_shortage(error) {
            return self.store_disk.fence("save partition state", error);
        }
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if partition.saving.failures == 0 {
            tracing::error!(partition = %id, %error,
                "no room on the disk, or no descriptor: what this replica has to note waits until there is room");
        }
        partition.saving.failures += 1;
        partition.saving.next_ms = now_ms() + SAVE_PAUSE_MS;
        then.append(&mut partition.saving.then);
        partition.saving.then = then;
    }

    /// Goes on with what found the disk full.
    fn tick_saves(&mut self, now: u64) {
        let waits = |partition: &Partition| {
            let saving = &partition.saving;
            !saving.is_running && !saving.then.is_empty() && saving.next_ms <= now
        };
        let due: Vec<PartitionId> =
            self.partitions.values().filter(|p| waits(p)).map(|p| p.id).collect();
        if !self.is_fenced() {
            due.into_iter().for_each(|id| self.start_save(id));
        }
    }

    /// Counts a refusal for lack of room in a queue.
    pub fn busy(&self) -> DataError {
        Metrics::get().busy.inc();
        DataError::Busy
    }
}
