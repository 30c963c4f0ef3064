//! The thread that flushes, and the helper that keeps a node's loop short.
//!
//! The only part of the crate with threads, locks and tokio. The writer flushes one write at a
//! time; whatever was submitted meanwhile goes into the next one (group commit), so a slow disk
//! makes writes larger, not queues longer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_host::jobs::{Routine, Step};
use milpa_types::{NodeId, PartitionId};
use tokio::sync::Notify;

use crate::message::{Frame, FrameError};
use crate::multi::{MultiRaft, Turn};
use crate::types::Committed;
use crate::wal::{LogBatch, Record, Wal, WalError, WalStats};

/// Entry bytes that may wait for the writer. Above, the driver takes no more turns.
const QUEUE_BYTES_MAX: usize = 64 << 20;
/// Batches that may wait for the writer.
const QUEUE_BATCHES_MAX: usize = 4096;
/// A full disk is asked for room again after so long, and twice as long each time.
const ROOM_PAUSE: Duration = Duration::from_millis(200);
/// What is acknowledged late then is late by so much at most. That nothing is written before there is room makes asking cheap.
const ROOM_PAUSE_MAX: Duration = Duration::from_secs(2);
/// No log ends with entries for longer, nor with a vote at all if nothing else is to be written: of a batch behind which
/// nothing stands nobody can tell that the disk has lost it.
const SEAL_AFTER: Duration = Duration::from_millis(50);
/// Buckets of the flush histogram: below 2^i microseconds.
const LATENCY_BUCKETS: usize = 24;

/// What the log writer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogProgress {
    /// This batch and all before it are durable.
    Persisted(u64),
    /// A write or flush failed; nothing more will be written.
    Fenced,
}

/// How the writer is doing. For monitoring only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogWriterStats {
    /// Calls of [`Wal::append`]; each is usually one flush.
    pub appends: u64,
    /// Batches in them.
    pub batches: u64,
    /// Time in them.
    pub append_us_total: u64,
    /// The longest one.
    pub append_us_max: u64,
    /// How many took less than 2^i microseconds (and not less than half of that).
    pub append_us_buckets: Vec<u64>,
    /// The log's own counters, as of the last append.
    pub wal: WalStats,
}

#[derive(Debug, Default)]
struct Queue {
    batches: Vec<LogBatch>,
    bytes: usize,
    stats: LogWriterStats,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    persisted: AtomicU64,
    is_fenced: AtomicBool,
    progressed: Notify,
}

impl Shared {
    /// The lock is never held over a panic's reach: all code under it is plain moves.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_batches(&self) -> Vec<LogBatch> {
        let mut queue = self.queue();
        queue.bytes = 0;
        std::mem::take(&mut queue.batches)
    }
}

/// The one thread that writes a log. Dropping it writes what was submitted, waits for that, and closes the log. What
/// there is no room for on a full disk is not written, and in a simulation, where the machine stops, nothing is: it was
/// promised to nobody.
#[derive(Debug)]
pub struct LogWriter {
    shared: Arc<Shared>,
    reported: u64,
    has_reported_fence: bool,
    thread: Routine,
}

impl LogWriter {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn spawn(wal: Wal) -> Result<LogWriter, WalError> {
        let shared = Arc::new(Shared::default());
        let mut writing = Writing::new(wal, Arc::clone(&shared));
        let thread = Routine::spawn("raft-log", move |is_closing| writing.step(is_closing))?;
        Ok(LogWriter { shared, reported: 0, has_reported_fence: false, thread })
    }

    /// Whether a further batch should be submitted. False when the disk does not keep up.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let queue = self.shared.queue();
        queue.bytes < QUEUE_BYTES_MAX && queue.batches.len() < QUEUE_BATCHES_MAX
    }

    /// Hands a batch to the thread. Never blocks on the disk.
    pub fn submit(&self, batch: LogBatch) {
        let mut queue = self.shared.queue();
        queue.bytes += batch.records.iter().map(record_bytes).sum::<usize>();
        queue.batches.push(batch);
        drop(queue);
        self.thread.wake();
    }

    /// Waits until there is progress that this method has not yet reported. Cancel-safe: nothing
    /// is lost when the future is dropped. After `Fenced` it waits for ever.
    pub async fn progressed(&mut self) -> LogProgress {
        loop {
            let persisted = self.shared.persisted.load(Ordering::Acquire);
            if persisted > self.reported {
                self.reported = persisted;
                return LogProgress::Persisted(persisted);
            }
            if self.is_fenced() && !self.has_reported_fence {
                self.has_reported_fence = true;
                return LogProgress::Fenced;
            }
            // A permit is kept if the notice comes between the checks and here.
            self.shared.progressed.notified().await;
        }
    }

    /// Whether a write or flush has failed.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.shared.is_fenced.load(Ordering::Acquire)
    }

    /// How the writer is doing.
    #[must_use]
    pub fn stats(&self) -> LogWriterStats {
        self.shared.queue().stats.clone()
    }
}

fn record_bytes(record: &Record) -> usize {
    match record {
        Record::Entry { entry, .. } => 64 + entry.data.len() + entry.context.len(),
        _ => 64,
    }
}

/// What the writer's thread owns.
struct Writing {
    wal: Wal,
    shared: Arc<Shared>,
    /// The last batch that is durable and was not yet reported.
    unreported: Option<u64>,
    /// Batches that were taken from the queue, and for which there is no room on the disk.
    waiting: Vec<LogBatch>,
    /// The disk is not asked for room again before.
    asks_from: Option<Instant>,
    /// Between this time and the next.
    pause: Duration,
    /// If nothing more is written until then, the end of the log is sealed.
    seals_from: Instant,
}

impl Writing {
    fn new(wal: Wal, shared: Arc<Shared>) -> Writing {
        Writing {
            wal,
            shared,
            unreported: None,
            waiting: Vec::new(),
            asks_from: None,
            pause: ROOM_PAUSE,
            seals_from: Instant::now(),
        }
    }

    /// Reports, writes everything that waits, or with nothing to write does what has time.
    fn step(&mut self, is_closing: bool) -> Step {
        if let Some(last) = self.unreported.take() {
            self.shared.persisted.store(last, Ordering::Release);
            self.shared.progressed.notify_one();
        }
        if self.waiting.is_empty() {
            self.waiting = self.shared.take_batches();
        }
        let done = match self.waiting.is_empty() {
            false => self.write(is_closing),
            true if is_closing => self.wal.seal_end().map(|()| Step::Ended),
            true => self.rest(),
        };
        done.unwrap_or_else(|error| {
            fence(&self.shared, &error);
            Step::Ended
        })
    }

    /// Writes what waits, as far as there is room. On a full disk it goes on waiting: nothing of it was promised to anybody.
    fn write(&mut self, is_closing: bool) -> Result<Step, WalError> {
        let start = Instant::now();
        if let Some(rest) = self.asks_from.and_then(|from| from.checked_duration_since(start))
            && !is_closing
        {
            return Ok(Step::Later(rest));
        }
        let count = self.wal.make_room(&self.waiting)?;
        if count == 0 {
            return Ok(if is_closing { Step::Ended } else { Step::Later(self.ask_later()) });
        }
        (self.asks_from, self.pause) = (None, ROOM_PAUSE);
        let batches: Vec<LogBatch> = self.waiting.drain(..count).collect();
        self.wal.append(&batches)?;
        // What was written is reported first: no election waits for that.
        let rests = if self.wal.ends_with_vote() { Duration::ZERO } else { SEAL_AFTER };
        self.seals_from = Instant::now() + rests;
        let elapsed_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let stats = &mut self.shared.queue().stats;
        note_append(stats, batches.len(), elapsed_us, self.wal.stats());
        self.unreported = batches.last().map(|batch| batch.number);
        Ok(Step::Again)
    }

    /// Seals the end of the log when it has been the end for a while, and prepares the next segment.
    fn rest(&mut self) -> Result<Step, WalError> {
        let rest = self.seals_from.checked_duration_since(Instant::now()).unwrap_or_default();
        if rest.is_zero() {
            self.wal.seal_end()?;
        }
        if self.wal.prepare_step()? {
            return Ok(Step::Again);
        }
        Ok(if self.wal.is_end_open() { Step::Later(rest) } else { Step::Idle })
    }

    /// There is no room. How long until the disk is asked again: counted from now, however long finding that out took.
    fn ask_later(&mut self) -> Duration {
        if self.asks_from.is_none() {
            tracing::error!("the disk is full: the log waits until there is room");
        }
        let pause = self.pause;
        self.pause = (2 * pause).min(ROOM_PAUSE_MAX);
        self.asks_from = Some(Instant::now() + pause);
        pause
    }
}

fn fence(shared: &Shared, error: &WalError) {
    tracing::error!(%error, source = ?std::error::Error::source(error), "log fenced");
    shared.is_fenced.store(true, Ordering::Release);
    shared.progressed.notify_one();
}

fn note_append(stats: &mut LogWriterStats, batches: usize, elapsed_us: u64, wal: WalStats) {
    stats.appends += 1;
    stats.batches += batches as u64;
    stats.append_us_total += elapsed_us;
    stats.append_us_max = stats.append_us_max.max(elapsed_us);
    stats.append_us_buckets.resize(LATENCY_BUCKETS, 0);
    let bucket = (u64::BITS - elapsed_us.leading_zeros()) as usize;
    if let Some(count) = stats.append_us_buckets.get_mut(bucket.min(LATENCY_BUCKETS - 1)) {
        *count += 1;
    }
    stats.wal = wal;
}

/// What a node does with a turn.
pub trait Outbox {
    /// Send to another node, or drop.
    fn send(&mut self, to: NodeId, frame: Frame);
    /// Apply. Returns the applied index if it is applied already; else the owner calls
    /// [`MultiRaft::applied`] later.
    fn apply(&mut self, group: PartitionId, entries: Vec<Committed>) -> Option<u64>;
    /// The rest of the turn: roles, reads, snapshots. `batch`, `messages`, `committed` are empty.
    fn perform(&mut self, turn: Turn);
}

/// A [`MultiRaft`] with its log writer.
#[derive(Debug)]
pub struct RaftDriver {
    /// The core.
    pub multi: MultiRaft,
    /// The log.
    pub writer: LogWriter,
}

/// The loop must end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriveError {
    /// The log failed. Stop the node; it must not be restarted on this disk.
    #[error("the log is fenced")]
    Fenced,
    /// A peer sent something else than frames. Close that connection.
    #[error("bad frame")]
    Frame(#[from] FrameError),
}

impl RaftDriver {
    /// Puts the two together.
    #[must_use]
    pub fn new(multi: MultiRaft, writer: LogWriter) -> RaftDriver {
        RaftDriver { multi, writer }
    }

    /// Tells the core what the log reported.
    pub fn on_log(&mut self, progress: LogProgress, now_ms: u64) {
        match progress {
            LogProgress::Persisted(batch) => self.multi.persisted(batch, now_ms),
            LogProgress::Fenced => self.multi.log_failed(),
        }
    }

    /// Performs turns until there is nothing to do, or the log writer has enough (then the next
    /// report of the log is the occasion to go on).
    ///
    /// # Errors
    ///
    /// [`DriveError::Fenced`] when the log has failed.
    pub fn pump(&mut self, now_ms: u64, outbox: &mut impl Outbox) -> Result<(), DriveError> {
        while self.multi.has_work() && self.writer.has_room() {
            let mut turn = self.multi.turn(now_ms);
            if let Some(batch) = turn.batch.take() {
                self.writer.submit(batch);
            }
            for (to, frame) in turn.messages.drain(..) {
                outbox.send(to, frame);
            }
            for (group, entries) in turn.committed.drain(..) {
                if let Some(index) = outbox.apply(group, entries) {
                    self.multi.applied(group, index);
                }
            }
            outbox.perform(turn);
        }
        self.multi.hold(!self.writer.has_room());
        if self.writer.is_fenced() {
            self.multi.log_failed();
            return Err(DriveError::Fenced);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RaftConfig;
    use crate::message::{Body, Message};
    use crate::types::{LogPosition, Members};
    use crate::wal::{EntryKind, LogEntry, MemoryStorage, WalOptions, segment_name};

    fn batch(number: u64) -> LogBatch {
        LogBatch { number, records: vec![Record::GroupRemoved { group: PartitionId(1) }] }
    }

    fn batch_of(number: u64, bytes: usize) -> LogBatch {
        let entry = LogEntry {
            position: LogPosition { term: 1, index: number },
            kind: EntryKind::Normal,
            context: Vec::new().into(),
            data: vec![7; bytes].into(),
        };
        let group = PartitionId(1);
        let mut records = vec![Record::Entry { group, entry }];
        if number == 1 {
            let (mark, members) = (LogPosition::default(), Members::default());
            records.insert(0, Record::GroupCreated { group, mark, members });
        }
        LogBatch { number, records }
    }

    /// An owner that only counts.
    #[derive(Default)]
    struct Nobody {
        sent: usize,
    }

    impl Outbox for Nobody {
        fn send(&mut self, _to: NodeId, _frame: Frame) {
            self.sent += 1;
        }

        fn apply(&mut self, _group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
            entries.last().map(|entry| entry.position.index)
        }

        fn perform(&mut self, _turn: Turn) {}
    }

    fn writer(disk: &MemoryStorage) -> LogWriter {
        let (wal, _) = Wal::open(disk.clone(), WalOptions::new([1; 16], 1)).unwrap();
        LogWriter::spawn(wal).unwrap()
    }

    #[tokio::test(flavor = "current_thread")]
    async fn everything_submitted_is_reported_and_flushes_are_shared() {
        let disk = MemoryStorage::default();
        let mut writer = writer(&disk);
        (1..=1000).for_each(|number| writer.submit(batch(number)));
        let mut last = 0;
        while last < 1000 {
            match writer.progressed().await {
                LogProgress::Persisted(number) => {
                    assert!(number > last);
                    last = number;
                }
                LogProgress::Fenced => panic!("fenced"),
            }
        }
        let stats = writer.stats();
        assert_eq!(stats.batches, 1000);
        assert!(stats.appends < 1000, "{stats:?}");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_failed_flush_is_reported_and_nothing_after_it_is_persisted() {
        let disk = MemoryStorage::default();
        let mut writer = writer(&disk);
        writer.submit(batch(1));
        assert_eq!(writer.progressed().await, LogProgress::Persisted(1));
        disk.fail_sync_after(0);
        writer.submit(batch(2));
        assert_eq!(writer.progressed().await, LogProgress::Fenced);
        assert!(writer.is_fenced());
    }

    /// Found by a reader: while the log waited for room, and the writer took no more, what others sent went on piling up
    /// in the library, and what each tick had a leader say.
    #[tokio::test(flavor = "current_thread")]
    async fn while_the_writer_is_full_nothing_that_comes_in_is_kept() {
        let group = PartitionId(1);
        let disk = MemoryStorage::default();
        let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
        assert!(multi.create_group(group, &[0, 1, 2].map(NodeId), &[], false));
        let mut driver = RaftDriver::new(multi, writer(&disk));
        let mut node = Nobody::default();
        driver.pump(0, &mut node).unwrap();
        assert_eq!(driver.writer.progressed().await, LogProgress::Persisted(1));
        driver.on_log(LogProgress::Persisted(1), 0);
        driver.pump(0, &mut node).unwrap();
        disk.set_full(true);
        // What does not fit into the segment that is there, and a queue behind it.
        driver.writer.submit(batch_of(2, 8 << 20));
        while driver.writer.has_room() {
            (0..5_000).for_each(|_| driver.writer.submit(batch(3)));
            // The writer takes what waits once.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for now_ms in 0..10_000 {
            let prev = LogPosition { term: 1, index: 1 };
            let entry =
                LogEntry { position: LogPosition { term: 2, index: 2 }, ..LogEntry::default() };
            let beat = Body::Heartbeat { commit: 1, stamp_ms: now_ms, read: None };
            let append = Body::Append { prev, commit: 1, count: 1, entries: vec![entry] };
            let messages =
                [beat, append].map(|body| (group, Message::new(2, body))).into_iter().collect();
            driver.multi.step_frame(NodeId(1), Frame { messages }.encode(), now_ms).unwrap();
            driver.multi.tick(now_ms);
            driver.pump(now_ms, &mut node).unwrap();
        }
        assert_eq!(node.sent, 0);
        let waiting = driver.multi.waiting(group);
        assert!(waiting < 10, "{waiting} wait");
        assert!(driver.multi.propose(group, vec![1].into()).is_err());
    }

    /// Found by a reader: the log took the rest of a disk and gave it back five times a second while it waited, or without
    /// a pause where that took longer.
    #[tokio::test(flavor = "current_thread")]
    async fn a_log_that_waits_asks_less_and_less_often_and_writes_nothing_meanwhile() {
        let disk = MemoryStorage::default();
        let (wal, _) = Wal::open(disk.clone(), WalOptions::new([1; 16], 1)).unwrap();
        let mut writing = Writing::new(wal, Arc::default());
        disk.set_free(Some(4 << 20));
        writing.waiting = vec![batch_of(1, 8 << 20)];
        let before = disk.written_bytes();
        let pauses = (0..6).map(|_| {
            writing.asks_from = writing.asks_from.map(|_| Instant::now());
            match writing.step(false) {
                Step::Later(pause) => pause.as_millis(),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(pauses.collect::<Vec<_>>(), [200, 400, 800, 1600, 2000, 2000]);
        assert!(matches!(writing.step(false), Step::Later(rest) if rest.as_millis() > 1_000));
        assert_eq!(disk.written_bytes(), before);
        disk.set_free(None);
        writing.asks_from = Some(Instant::now());
        assert_eq!(writing.step(false), Step::Again);
        assert_eq!((writing.pause, writing.unreported), (ROOM_PAUSE, Some(1)));
    }

    /// Simulation, seeds 273430, 273971 and 800263: a disk had lied about the last batch of a log, which stood at its end
    /// for a while. That it was missing there could not be told from a log that had never had it.
    #[tokio::test(flavor = "current_thread")]
    async fn no_log_ends_with_entries_for_long() {
        for is_closing in [false, true] {
            let disk = MemoryStorage::default();
            let options = || WalOptions::new([1; 16], 1);
            let (wal, _) = Wal::open(disk.clone(), options()).unwrap();
            let mut writing = Writing::new(wal, Arc::default());
            writing.waiting = vec![batch_of(1, 100)];
            assert_eq!(writing.step(false), Step::Again);
            if is_closing {
                assert_eq!(writing.step(true), Step::Ended);
            } else {
                assert!(matches!(writing.step(false), Step::Later(rest) if rest <= SEAL_AFTER));
                writing.seals_from = Instant::now();
                assert_eq!(writing.step(false), Step::Idle);
                let flushes = disk.counts().0;
                assert_eq!((writing.step(false), disk.counts().0), (Step::Idle, flushes));
            }
            disk.damage(&segment_name(1), 2 * 4096 + 8);
            assert!(!Wal::open(disk, options()).unwrap().1.damaged.is_empty());
        }
    }

    /// Simulation, seed 800129: a disk had lost the write of a vote, the process ended before it wrote anything behind it,
    /// and the vote of that term was given once more.
    #[tokio::test(flavor = "current_thread")]
    async fn no_log_ends_with_a_vote() {
        let disk = MemoryStorage::default();
        let options = || WalOptions::new([1; 16], 1);
        let (wal, _) = Wal::open(disk.clone(), options()).unwrap();
        let mut writing = Writing::new(wal, Arc::default());
        let group = PartitionId(1);
        let flushes = |writing: &mut Writing, term, vote, commit| {
            let before = disk.counts().0;
            let records = vec![Record::HardState { group, term, vote, commit }];
            writing.waiting = vec![LogBatch { number: 2, records }];
            assert_eq!(writing.step(false), Step::Again);
            assert_eq!(writing.step(false), Step::Idle);
            disk.counts().0 - before
        };
        writing.waiting = vec![batch_of(1, 100)];
        writing.step(false);
        let vote = Some(NodeId(2));
        assert_eq!(flushes(&mut writing, 2, vote, 0), 2);
        let lossy = disk.fork();
        lossy.damage(&segment_name(1), 3 * 4096 + 8);
        assert!(Wal::open(lossy, options()).unwrap().1.damaged[0].vote_lost);
        assert_eq!(flushes(&mut writing, 2, vote, 1), 1, "the commit index");
        assert_eq!(flushes(&mut writing, 3, None, 1), 1, "a term");
    }

    /// Found by a reader: what a replica's members send it has to be logged, whoever has filled its disk. When the last
    /// prepared segment was full the log was fenced, and with it the disk, for good.
    #[tokio::test(flavor = "current_thread")]
    async fn on_a_full_disk_the_log_waits_for_room() {
        let disk = MemoryStorage::default();
        let options = WalOptions {
            segment_bytes: 1 << 20,
            first_segment_bytes: 1 << 16,
            carry_bytes_max: 1 << 14,
            ..WalOptions::new([1; 16], 1)
        };
        let (wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
        let mut writer = LogWriter::spawn(wal).unwrap();
        disk.set_full(true);
        let mut written = 0;
        for number in 1..=200 {
            writer.submit(batch_of(number, 20_000));
            let progress = tokio::time::timeout(Duration::from_secs(1), writer.progressed()).await;
            match progress {
                Ok(LogProgress::Persisted(number)) => written = number,
                Ok(LogProgress::Fenced) => panic!("fenced"),
                Err(_) => break,
            }
        }
        assert!((1..150).contains(&written), "{written}");
        disk.set_full(false);
        assert_eq!(writer.progressed().await, LogProgress::Persisted(written + 1));
        drop(writer);
        let (_, recovered) = Wal::open(disk.clone(), options).unwrap();
        assert_eq!(recovered.groups[0].entries.len() as u64, written + 1);
        assert!(recovered.damaged.is_empty() && !recovered.has_torn_tail);
    }
}
