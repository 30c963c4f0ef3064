//! Snapshots: written beside the work, served to peers, fetched from them.
//!
//! The core freezes its state in microseconds; a thread writes it while the partition goes on.
//! The log is then dropped up to the snapshot *before* the new one: if the new file rots, the node
//! still starts from its predecessor and the log.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_host::disk::{File, Open};
use milpa_host::jobs;
use milpa_raft::{InstallSnapshot, LogPosition, MultiRaft, SnapshotDescriptor};
use milpa_types::{MetaError, NodeId, PartitionId, Role};
use milpa_wire::meta::{MetaAnswer, MetaReply, MetaRequest};
use tracing::{debug, error, info, warn};

use super::context::Context;
use super::inbox::Event;
use super::marks::Marks;
use super::metrics::Metrics;
use super::replica::{LogGrowth, Replica};
use super::responder::Responder;
use super::shell::Shell;
use super::snapshot_file::{self, FileHeader};
use super::snapshot_store::SnapshotStore;
use crate::core::{Partition, Snapshot};

/// Snapshots written at once on this node: the disk is the log's first.
pub(super) const JOBS_MAX: usize = 2;
/// Bytes of one piece for a peer.
const PIECE_BYTES: usize = 1 << 20;
/// Files kept of each partition.
const KEPT: usize = 2;
/// A partition with few changes is written after this time all the same, so that its entries do
/// not keep old segments of the shared log alive.
pub(super) const IDLE_MS: u64 = 600_000;
/// After a failed attempt.
pub(super) const RETRY_MS: u64 = 30_000;
/// One piece of a snapshot from a peer.
const PIECE_WAIT: Duration = Duration::from_secs(5);
/// Tries for one piece.
const PIECE_TRIES: u32 = 5;

/// What is done with the snapshots of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotJob {
    Write,
    /// They are read again.
    Scrub,
    /// One is fetched from a peer: the state is about to be replaced.
    Fetch,
}

impl Shell {
    /// Once a tick: begins snapshots that are due, and fetches those that Raft asked for.
    pub(crate) fn run_snapshots(&mut self, multi: &mut MultiRaft, now: u64) {
        for install in std::mem::take(&mut self.installs) {
            self.begin_fetch(multi, install);
        }
        let (entries, bytes) =
            (self.ctx.config.snapshot_after_entries, self.ctx.config.snapshot_after_bytes);
        let is_due = |replica: &&Replica| {
            !self.snapshot_jobs.contains_key(&replica.id()) && is_due(replica, entries, bytes, now)
        };
        let due: Vec<PartitionId> =
            self.replicas.values().filter(is_due).map(Replica::id).collect();
        for partition in due {
            if self.disk_jobs() >= JOBS_MAX {
                return;
            }
            self.begin_snapshot(multi, partition, now);
        }
        self.run_scrub(now);
    }

    /// Jobs that keep the disk busy.
    pub(super) fn disk_jobs(&self) -> usize {
        self.snapshot_jobs.values().filter(|job| **job != SnapshotJob::Fetch).count()
    }

    /// A job is over: the replica that it was for, unless that is deleted, and another one here perhaps.
    pub(super) fn job_ended(
        &mut self,
        partition: PartitionId,
        identity: &Rc<()>,
    ) -> Option<&mut Replica> {
        self.snapshot_jobs.remove(&partition);
        self.replicas.get_mut(&partition).filter(|replica| Rc::ptr_eq(&replica.identity, identity))
    }

    fn begin_snapshot(&mut self, multi: &mut MultiRaft, partition: PartitionId, now: u64) {
        let Some(replica) = self.replicas.get_mut(&partition) else { return };
        let log = &mut replica.log;
        log.due_ms = now + IDLE_MS;
        if let Some(newest) = log.newest.clone().filter(|n| n.position == replica.applied) {
            // Nothing happened since: the newest is good enough for a follower, and for the log.
            (log.wanted, log.previous) = (false, newest.position.index);
            multi.compact(partition, newest.position.index);
            return multi.set_snapshot(partition, newest);
        }
        let Some(descriptor) = multi.describe(partition, replica.applied.index) else { return };
        (log.wanted, log.entries, log.bytes) = (false, 0, 0);
        let rotten = log.rotten.clone();
        let snapshot = replica.state.begin_snapshot(descriptor.position.term);
        let header = FileHeader { definition: replica.definition.clone(), descriptor };
        let identity = Rc::clone(&replica.identity);
        self.snapshot_jobs.insert(partition, SnapshotJob::Write);
        let (store, inbox) = (self.ctx.store.clone(), Rc::clone(&self.ctx.inbox));
        tokio::task::spawn_local(async move {
            let descriptor = header.descriptor.clone();
            let job = move || write(&store, &header, snapshot, &rotten);
            let written = jobs::run("snapshot", job).await.unwrap_or(false);
            let written = written.then_some(descriptor);
            inbox.push(Event::SnapshotWritten { partition, identity, written });
        });
    }

    /// A snapshot is durable, or could not be written.
    pub(crate) fn snapshot_written(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        identity: &Rc<()>,
        written: Option<SnapshotDescriptor>,
    ) {
        let Some(replica) = self.job_ended(partition, identity) else { return };
        let log = &mut replica.log;
        let Some(descriptor) = written else {
            Metrics::get().snapshots_failed.inc();
            log.due_ms = now_ms() + RETRY_MS;
            log.entries += 1;
            return;
        };
        Metrics::get().snapshots_written.inc();
        debug!(%partition, index = descriptor.position.index, "snapshot written");
        log.rotten.clear();
        let newest = log.newest.replace(descriptor.clone());
        log.previous = newest.map_or(0, |newest| newest.position.index);
        multi.set_snapshot(partition, descriptor);
        if log.previous > 0 {
            multi.compact(partition, log.previous);
        }
    }

    /// A piece of a snapshot for a peer.
    pub(crate) fn serve_snapshot(
        &self,
        partition: PartitionId,
        index: u64,
        offset: u64,
        responder: Responder,
    ) {
        let store = self.ctx.store.clone();
        tokio::task::spawn_local(async move {
            let read = move || store.read_piece(partition, index, offset, PIECE_BYTES);
            match jobs::run("snapshot", read).await {
                Ok(Ok(Some((piece, total)))) => {
                    let answer = Ok(MetaAnswer::SnapshotPiece { total });
                    responder.send_with(&answer, piece.into());
                }
                Ok(Ok(None)) => responder.fail(MetaError::WrongPartition),
                Ok(Err(error)) => {
                    error!(%partition, index, %error, "cannot read a snapshot for a peer");
                    responder.fail(MetaError::DiskFailed);
                }
                Err(_) => responder.fail(MetaError::Busy),
            }
        });
    }

    fn begin_fetch(&mut self, multi: &mut MultiRaft, install: InstallSnapshot) {
        let partition = install.group;
        let Some(replica) = self.replicas.get_mut(&partition) else {
            return multi.snapshot_failed(partition);
        };
        if self.snapshot_jobs.contains_key(&partition) {
            return multi.snapshot_failed(partition);
        }
        info!(%partition, from = %install.from, position = ?install.snapshot.position,
            "fetching a snapshot: this replica is too far behind for the log");
        let identity = Rc::clone(&replica.identity);
        self.snapshot_jobs.insert(partition, SnapshotJob::Fetch);
        let ctx = Rc::clone(&self.ctx);
        tokio::task::spawn_local(async move {
            let fetched = fetch_and_read(&ctx, &install, &identity).await;
            if let Err(problem) = &fetched {
                warn!(%partition, problem, "could not install a snapshot");
            }
            let fetched = fetched.ok().map(Box::new);
            ctx.inbox.push(Event::SnapshotFetched { partition, identity, fetched });
        });
    }

    /// A peer's snapshot is durable here and read, or not.
    pub(crate) fn snapshot_fetched(
        &mut self,
        multi: &mut MultiRaft,
        partition: PartitionId,
        identity: &Rc<()>,
        fetched: Option<Box<(FileHeader, Partition)>>,
    ) {
        let now = now_ms();
        let scrub_due_ms = self.ctx.next_scrub_ms(now);
        let Some(replica) = self.job_ended(partition, identity) else { return };
        let Some(fetched) = fetched else {
            Metrics::get().snapshots_failed.inc();
            return multi.snapshot_failed(partition);
        };
        let (header, state) = *fetched;
        Metrics::get().snapshots_installed.inc();
        info!(%partition, position = ?header.descriptor.position, "snapshot installed");
        let descriptor = header.descriptor;
        replica.step_down();
        replica.state = state;
        replica.applied = descriptor.position;
        replica.definition = header.definition;
        replica.marks = Marks::default();
        replica.log = LogGrowth {
            newest: Some(descriptor.clone()),
            due_ms: now + IDLE_MS,
            scrub_due_ms,
            ..LogGrowth::default()
        };
        multi.snapshot_installed(partition, descriptor.position.index);
        multi.set_snapshot(partition, descriptor);
    }
}

pub(super) fn is_due(replica: &Replica, entries: u64, bytes: u64, now: u64) -> bool {
    let log = &replica.log;
    if !replica.has_begun() {
        return false;
    }
    let rests = log.newest.as_ref().is_some_and(|newest| newest.position == replica.applied)
        && log.previous == replica.applied.index;
    log.wanted || log.entries >= entries || log.bytes >= bytes || (!rests && now >= log.due_ms)
}

/// Writes, names, and sets aside and prunes what it stands for. Blocking. Says in the log what went wrong.
fn write(
    store: &SnapshotStore,
    header: &FileHeader,
    snapshot: Snapshot,
    rotten: &[LogPosition],
) -> bool {
    let (partition, position) = (header.definition.partition, header.descriptor.position);
    let path = store.writing_path(partition);
    if let Err(error) = snapshot_file::write(&path, header, snapshot) {
        error!(%partition, %error, source = ?std::error::Error::source(&error),
            "cannot write a snapshot");
        return false;
    }
    let published = store.publish(partition, position, &path);
    if let Err(error) = &published {
        error!(%partition, %error, "cannot publish a snapshot");
        return false;
    }
    // One of the same position has been replaced.
    for old in rotten.iter().filter(|old| **old != position) {
        if let Err(error) = store.set_aside(partition, *old)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            warn!(%partition, ?old, %error, "cannot set a rotten snapshot aside");
        }
    }
    if let Err(error) = store.prune(partition, KEPT) {
        warn!(%partition, %error, "cannot delete old snapshots");
    }
    true
}

/// Fetches a snapshot piece by piece, makes it durable and reads it.
async fn fetch_and_read(
    ctx: &Context,
    install: &InstallSnapshot,
    identity: &Rc<()>,
) -> Result<(FileHeader, Partition), String> {
    let (partition, position) = (install.group, install.snapshot.position);
    let path = ctx.store.incoming_path(partition);
    fetch(ctx, install, identity, path.clone()).await?;
    let (store, expected) = (ctx.store.clone(), install.snapshot.clone());
    let read = move || check_and_publish(&store, partition, position, &path, &expected);
    jobs::run("snapshot", read).await.map_err(|error| error.to_string())?
}

async fn fetch(
    ctx: &Context,
    install: &InstallSnapshot,
    identity: &Rc<()>,
    path: PathBuf,
) -> Result<(), String> {
    let file = on_thread(move || File::open(&path, Open::Empty)).await?;
    let mut offset = 0;
    loop {
        let (piece, total) = fetch_piece(ctx, install, identity, offset).await?;
        if piece.is_empty() || offset + piece.len() as u64 > total {
            return Err(format!("a piece at {offset} of {total} bytes has {}", piece.len()));
        }
        let (end, out) = (offset + piece.len() as u64, file.clone());
        on_thread(move || out.write_at(&piece, offset)).await?;
        offset = end;
        if offset == total {
            return on_thread(move || file.sync()).await;
        }
    }
}

async fn fetch_piece(
    ctx: &Context,
    install: &InstallSnapshot,
    identity: &Rc<()>,
    offset: u64,
) -> Result<(Bytes, u64), String> {
    let (partition, index) = (install.group, install.snapshot.position.index);
    let request = MetaRequest::FetchSnapshot { partition, index, offset };
    let mut problem = String::from("no address of the leader");
    for attempt in 0..PIECE_TRIES {
        if Rc::strong_count(identity) == 1 {
            return Err("the replica was removed meanwhile".to_owned());
        }
        match ask_for_piece(ctx, install.from, &request).await {
            Ok(piece) => return Ok(piece),
            Err(Some(refused)) => return Err(refused.to_string()),
            Err(None) => problem = format!("{} does not answer", install.from),
        }
        tokio::time::sleep(Duration::from_millis(50 << attempt)).await;
    }
    Err(problem)
}

/// One try; `Err(None)` may be repeated.
async fn ask_for_piece(
    ctx: &Context,
    from: NodeId,
    request: &MetaRequest,
) -> Result<(Bytes, u64), Option<MetaError>> {
    let address = ctx.address(from).ok_or(None)?;
    let called =
        ctx.pool.call::<_, MetaReply>(address, Role::Meta, request, Bytes::new(), PIECE_WAIT).await;
    match called {
        Ok((Ok(MetaAnswer::SnapshotPiece { total }), piece)) => Ok((piece, total)),
        Ok((Ok(_), _)) => Err(Some(MetaError::Invalid)),
        Ok((Err(MetaError::Busy), _)) => Err(None),
        Ok((Err(error), _)) => Err(Some(error)),
        Err(_) => Err(None),
    }
}

fn check_and_publish(
    store: &SnapshotStore,
    partition: PartitionId,
    position: LogPosition,
    path: &std::path::Path,
    expected: &SnapshotDescriptor,
) -> Result<(FileHeader, Partition), String> {
    let (header, state) = snapshot_file::read(path).map_err(|error| error.to_string())?;
    if header.definition.partition != partition || &header.descriptor != expected {
        return Err("the peer sent another snapshot than it had offered".to_owned());
    }
    store.publish(partition, position, path).map_err(|error| error.to_string())?;
    store.prune(partition, KEPT).map_err(|error| error.to_string())?;
    Ok((header, state))
}

/// Runs file work on a thread that may block.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, String> {
    let done = jobs::run("snapshot", work).await.map_err(|error| error.to_string())?;
    done.map_err(|error| error.to_string())
}
