//! Snapshots: written beside the work, served to peers, fetched from them.
//!
//! The core freezes its state in microseconds; a thread writes it while the partition goes on.
//! The log is then dropped up to the snapshot *before* the new one: if the new file rots, the node
//! still starts from its predecessor and the log.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_host::disk::{self, File, Open};
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
use super::snapshot_file::{self, FileHeader, is_of_medium};
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
/// After one could not be fetched no other is asked for so long: what was missing here, such as room, does not come at once.
/// Doubled each time.
const FETCH_PAUSE_MIN: Duration = Duration::from_millis(200);
/// What was missing may be there by then: others wait for this replica, perhaps.
const FETCH_PAUSE_MAX: Duration = Duration::from_secs(5);

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
        let log = self.replicas.get(&partition).map(|replica| &replica.log);
        let is_newest = |log: &&LogGrowth| {
            log.newest.as_ref().is_some_and(|newest| newest.position.index == index)
        };
        let is_given = log.filter(is_newest).map(|log| Rc::clone(&log.is_given));
        let give = move || is_given.map(|is_given| is_given.set(true));
        tokio::task::spawn_local(async move {
            let read = move || store.read_piece(partition, index, offset, PIECE_BYTES);
            match jobs::run("snapshot", read).await {
                Ok(Ok(Some((piece, total)))) => {
                    if offset.saturating_add(piece.len() as u64) >= total {
                        give();
                    }
                    let answer = Ok(MetaAnswer::SnapshotPiece { total });
                    responder.send_with(&answer, piece.into());
                }
                Ok(Ok(None)) => {
                    give();
                    responder.fail(MetaError::WrongPartition);
                }
                Ok(Err(error)) => {
                    error!(%partition, index, %error, "cannot read a snapshot for a peer");
                    if is_of_medium(&error) {
                        give();
                    }
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
        let pause = fetch_pause(replica.log.fetches_failed);
        self.snapshot_jobs.insert(partition, SnapshotJob::Fetch);
        let ctx = Rc::clone(&self.ctx);
        tokio::task::spawn_local(async move {
            let fetched = fetch_and_read(&ctx, &install, &identity).await;
            if let Err(problem) = &fetched {
                warn!(%partition, problem, "could not install a snapshot");
                // As soon as that is said, another one is offered.
                tokio::time::sleep(pause).await;
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
        let Some(replica) = self.job_ended(partition, identity) else {
            // Its group may run on, and would wait for this one for ever.
            return multi.snapshot_failed(partition);
        };
        let Some(fetched) = fetched else {
            Metrics::get().snapshots_failed.inc();
            replica.log.fetches_failed = replica.log.fetches_failed.saturating_add(1);
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
        discard(&path);
        return false;
    }
    let published = store.publish(partition, position, &path);
    if let Err(error) = &published {
        error!(%partition, %error, "cannot publish a snapshot");
        discard(&path);
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

/// Removes what was not finished: on a full disk it has the room that was left.
fn discard(unfinished: &Path) {
    if let Err(error) = disk::remove(unfinished)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        warn!(?unfinished, %error, "cannot remove an unfinished snapshot");
    }
}

/// How long nothing is fetched after an attempt that failed, as so many had before it.
fn fetch_pause(failed: u32) -> Duration {
    let factor = 1_u32.checked_shl(failed).unwrap_or(u32::MAX);
    FETCH_PAUSE_MIN.saturating_mul(factor).min(FETCH_PAUSE_MAX)
}

/// Fetches a snapshot piece by piece, makes it durable and reads it. Leaves nothing if that fails.
async fn fetch_and_read(
    ctx: &Context,
    install: &InstallSnapshot,
    identity: &Rc<()>,
) -> Result<(FileHeader, Partition), String> {
    if ctx.is_disk_full() {
        return Err("the disk is full".to_owned());
    }
    let (partition, position) = (install.group, install.snapshot.position);
    let path = ctx.store.incoming_path(partition);
    let fetched = fetch(ctx, install, identity, path.clone()).await;
    let (store, expected) = (ctx.store.clone(), install.snapshot.clone());
    let read = move || {
        let read =
            fetched.and_then(|()| check_and_publish(&store, partition, position, &path, &expected));
        read.inspect_err(|_| discard(&path))
    };
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
        if !ctx.has_room_for(total - offset) {
            return Err(format!("the disk has no room for {total} bytes"));
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
    path: &Path,
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

#[cfg(test)]
mod tests {
    use milpa_host::disk;
    use milpa_raft::{MemberChange, Members, RaftConfig};

    use super::*;
    use crate::node::recovery::tests::{NODE, PARTITION, definition, handle_next, shell};

    fn descriptor(index: u64) -> SnapshotDescriptor {
        let position = LogPosition { term: 1, index };
        SnapshotDescriptor { position, members: Members::new(&[NODE, NodeId(102)], &[]) }
    }

    /// What a partition's directory has that nobody finished.
    fn unfinished(store: &SnapshotStore) -> Vec<String> {
        let directory = store.writing_path(PARTITION).parent().unwrap().to_owned();
        let names = disk::list(&directory).unwrap();
        names.into_iter().filter(|name| name.ends_with(".tmp")).collect()
    }

    /// Found by a reader: what could not be written to its end, or not fetched, kept its room, the last that the disk had.
    #[test]
    fn a_snapshot_that_cannot_be_written_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().join("partitions")).unwrap();
        store.define(&definition()).unwrap();
        let full = Path::new("/dev/full");
        std::os::unix::fs::symlink(full, store.writing_path(PARTITION)).unwrap();
        let state = Replica::founded(definition()).state;
        let header = FileHeader { definition: definition(), descriptor: descriptor(1) };
        assert!(!write(&store, &header, state.begin_snapshot(1), &[]));
        assert!(unfinished(&store).is_empty() && full.exists());
    }

    /// One that a leader offers, which has no address.
    async fn fetch_in_vain(shell: &mut Shell) -> MultiRaft {
        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        shell.ctx.store.define(&definition()).unwrap();
        shell.replicas.insert(PARTITION, Replica::founded(definition()));
        let snapshot = descriptor(40);
        shell.begin_fetch(
            &mut multi,
            InstallSnapshot { group: PARTITION, from: NodeId(102), snapshot },
        );
        assert_eq!(shell.snapshot_jobs.get(&PARTITION), Some(&SnapshotJob::Fetch));
        handle_next(shell, &mut multi).await;
        multi
    }

    #[tokio::test]
    async fn a_snapshot_that_cannot_be_fetched_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        tokio::task::LocalSet::new().run_until(fetch_in_vain(&mut shell)).await;
        assert_eq!(unfinished(&shell.ctx.store), [""; 0]);
        assert!(shell.snapshot_jobs.is_empty());
        assert_eq!(shell.replicas[&PARTITION].log.fetches_failed, 1);
    }

    /// Found by a reader: a follower without room fetched what it could not take five times a second.
    #[tokio::test]
    async fn on_a_full_disk_no_snapshot_is_fetched() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        shell.ctx.free_bytes.set(1);
        shell.ctx.store.define(&definition()).unwrap();
        let path = shell.ctx.store.incoming_path(PARTITION);
        std::fs::write(&path, "not touched").unwrap();
        let began = std::time::Instant::now();
        tokio::task::LocalSet::new().run_until(fetch_in_vain(&mut shell)).await;
        assert!(began.elapsed() >= FETCH_PAUSE_MIN);
        assert_eq!(std::fs::read(&path).unwrap(), b"not touched");
    }

    /// Lets one take its turn; gives a snapshot that it is to fetch.
    fn take_turn(
        multi: &mut MultiRaft,
        other: &mut MultiRaft,
        now: u64,
    ) -> Option<InstallSnapshot> {
        multi.tick(now);
        let mut turn = multi.turn(now);
        if let Some(batch) = turn.batch {
            multi.persisted(batch.number, now);
        }
        for (_, frame) in turn.messages {
            other.step_frame(multi.node(), frame.encode(), now).unwrap();
        }
        for entry in turn.committed.iter().filter_map(|(_, entries)| entries.last()) {
            multi.applied(PARTITION, entry.position.index);
        }
        turn.installs.pop()
    }

    /// A follower that is offered a snapshot by a group of one, whose log begins behind it. Gives what it is to fetch.
    fn offered() -> (MultiRaft, InstallSnapshot) {
        const LEADER: NodeId = NodeId(102);
        let config = RaftConfig::default();
        let mut leader = MultiRaft::new(LEADER, config.clone(), 1).unwrap();
        let mut follower = MultiRaft::new(NODE, config, 1).unwrap();
        leader.create_group(PARTITION, &[LEADER], &[], true);
        follower.create_group(PARTITION, &[], &[], false);
        for now in (0..5_000).step_by(25) {
            take_turn(&mut leader, &mut follower, now);
            if let Some(install) = take_turn(&mut follower, &mut leader, now) {
                return (follower, install);
            }
            let applied = leader.status(PARTITION).unwrap().applied;
            if let Some(snapshot) = leader.describe(PARTITION, applied) {
                leader.set_snapshot(PARTITION, snapshot);
                leader.compact(PARTITION, applied);
            }
            let change = MemberChange { voters: vec![LEADER], learners: vec![NODE] };
            leader.propose_change(PARTITION, &change, &[], Bytes::new()).ok();
        }
        panic!("nothing is offered");
    }

    /// Found by a reader: the group of a replica that was given up meanwhile waited for the snapshot for ever.
    #[tokio::test]
    async fn who_was_given_up_while_it_fetched_waits_for_no_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let (mut multi, install) = offered();
        shell.replicas.insert(PARTITION, Replica::founded(definition()));
        let fetching = async {
            shell.begin_fetch(&mut multi, install);
            shell.give_up_replica(PARTITION, "a test".to_owned());
            handle_next(&mut shell, &mut multi).await;
        };
        tokio::task::LocalSet::new().run_until(fetching).await;
        let told = multi.turn(5_000).messages;
        assert_eq!(told.first().map(|(to, _)| *to), Some(NodeId(102)), "it could not be fetched");
    }

    #[test]
    fn a_fetch_that_fails_again_waits_longer() {
        let ms = |failed| fetch_pause(failed).as_millis();
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6, u32::MAX].map(ms),
            [200, 400, 800, 1600, 3200, 5000, 5000, 5000]
        );
    }

    /// Found by a reader: each follower that was busy, or full, had its leader read all snapshots of the partition again.
    #[tokio::test]
    async fn a_snapshot_is_doubted_by_who_was_given_all_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let store = shell.ctx.store.clone();
        store.define(&definition()).unwrap();
        let path = store.writing_path(PARTITION);
        std::fs::write(&path, vec![7; PIECE_BYTES + 1]).unwrap();
        store.publish(PARTITION, descriptor(40).position, &path).unwrap();
        let mut replica = Replica::founded(definition());
        replica.log.newest = Some(descriptor(40));
        replica.log.scrub_due_ms = u64::MAX;
        shell.replicas.insert(PARTITION, replica);
        let serving = async {
            for (offset, is_doubted) in [(0, false), (PIECE_BYTES as u64, true)] {
                let (responder, answer) = Responder::task("fetch", Duration::from_secs(9));
                shell.serve_snapshot(PARTITION, 40, offset, responder);
                answer.await.unwrap().unwrap();
                let log = &mut shell.replicas.get_mut(&PARTITION).unwrap().log;
                log.doubt();
                assert_eq!(log.scrub_due_ms < u64::MAX, is_doubted, "{offset}");
                log.scrub_due_ms = u64::MAX;
                log.doubt();
                assert_eq!(log.scrub_due_ms, u64::MAX, "once");
            }
        };
        tokio::task::LocalSet::new().run_until(serving).await;
    }
}
