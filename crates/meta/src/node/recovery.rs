//! The start: what the disk holds, read by all processors at once, joined with the Raft log.
//!
//! Nothing is guessed. A replica whose log lost what had been durable, or whose state cannot be
//! rebuilt, is left as it is and reported: it may hold the only copy of something, and it may have
//! voted, so it must not take part until the manager has taken it out of its group
//! (RELIABILITY.md 4.6).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;

use milpa_host::clock::now_ms;
use milpa_host::jobs;
use milpa_raft::{GroupStart, LogPosition, MultiRaft, Recovered, SnapshotDescriptor};
use milpa_types::PartitionId;
use milpa_wire::meta::CreateMetaPartition;
use tracing::{error, info, warn};

use super::metrics::Metrics;
use super::partitions::Removal;
use super::replica::{FOUNDED, Replica};
use super::shell::Shell;
use super::snapshot_file::is_of_medium;
use super::snapshot_store::{SnapshotStore, Stored};
use super::snapshots::IDLE_MS;
use crate::core::Partition;

/// Why a replica that was refused is not served after a restart either.
const REFUSED: &str = "its state was not that of most replicas";

/// One partition as its directory has it.
#[derive(Default)]
pub(crate) struct Loaded {
    partition: PartitionId,
    definition: Option<CreateMetaPartition>,
    snapshot: Option<(SnapshotDescriptor, Partition)>,
    /// Newer ones that could not be read, and are there still.
    rotten: Vec<LogPosition>,
    started: bool,
    joining: bool,
    deleted: bool,
    refused: bool,
    /// Why nothing of it could be read.
    unread: Option<io::Error>,
}

/// Reads every partition's newest good snapshot. Blocking; uses as many threads as there are
/// processors.
///
/// # Errors
///
/// The disk's, when the partitions cannot even be listed, or one cannot be read for a reason that passes, or is not its own.
pub(crate) fn load_all(store: &SnapshotStore) -> io::Result<Vec<Loaded>> {
    let partitions = store.partitions()?;
    let (next, loaded) = (Mutex::new(partitions.into_iter()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let partition = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(partition) = partition else { return };
            let one = load(store, partition).or_else(|error| match is_of_medium(&error) {
                true => Ok(Loaded { partition, unread: Some(error), ..Loaded::default() }),
                false => Err(error),
            });
            loaded.lock().unwrap_or_else(PoisonError::into_inner).push(one);
        }
    };
    jobs::on_all_processors(work);
    let loaded = loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
    loaded.into_iter().collect()
}

fn load(store: &SnapshotStore, partition: PartitionId) -> io::Result<Loaded> {
    let Stored { mut definition, snapshots, started, joining, deleted, refused } =
        store.inspect(partition)?;
    let (mut snapshot, mut rotten) = (None, Vec::new());
    for position in if deleted { Vec::new() } else { snapshots } {
        match store.read(partition, position) {
            Ok((header, state)) => {
                definition.get_or_insert(header.definition);
                snapshot = Some((header.descriptor, state));
                break;
            }
            Err(error) => {
                error!(%partition, ?position, %error, source = ?std::error::Error::source(&error),
                    "a snapshot is damaged: trying the one before");
                Metrics::get().snapshots_failed.inc();
                // What the disk refuses now it may give the next time.
                if error.io().is_some() {
                    rotten.push(position);
                } else if let Err(error) = store.set_aside(partition, position) {
                    warn!(%partition, ?position, %error, "cannot set a damaged snapshot aside");
                    rotten.push(position);
                }
            }
        }
    }
    let marks = Loaded { started, joining, deleted, refused, ..Loaded::default() };
    Ok(Loaded { partition, definition, snapshot, rotten, ..marks })
}

impl Shell {
    /// Joins what the directories hold with what the log held, and starts the groups.
    pub(crate) fn recover(
        &mut self,
        multi: &mut MultiRaft,
        loaded: Vec<Loaded>,
        recovered: Recovered,
    ) {
        let log_is_whole = recovered.damaged.is_empty();
        if !log_is_whole {
            error!(damage = ?recovered.damaged, "parts of the Raft log are unreadable");
        }
        let logged: BTreeSet<PartitionId> = recovered.groups.iter().map(|g| g.group).collect();
        let mut found: BTreeMap<PartitionId, Loaded> =
            loaded.into_iter().map(|one| (one.partition, one)).collect();
        let starts = found.iter().map(|(id, one)| (*id, start_of(one))).collect();
        let refused: BTreeMap<PartitionId, String> = multi
            .recover(recovered, &starts, now_ms())
            .into_iter()
            .map(|(group, error)| (group, error.to_string()))
            .collect();
        for group in logged {
            let one = found.remove(&group);
            self.recover_logged(multi, group, one, refused.get(&group));
        }
        for (_, one) in found {
            self.recover_unlogged(multi, one, log_is_whole);
        }
        info!(partitions = self.replicas.len(), damaged = self.damaged.len(), "state loaded");
    }

    /// A group that the log knows.
    fn recover_logged(
        &mut self,
        multi: &mut MultiRaft,
        group: PartitionId,
        one: Option<Loaded>,
        refused: Option<&String>,
    ) {
        if one.as_ref().is_some_and(|one| one.deleted) {
            multi.remove_group(group);
            return self.remove_later(group, Removal::FULL);
        }
        if let Some(error) = one.as_ref().and_then(|one| one.unread.as_ref()) {
            // Whether it had a vote was written there.
            multi.refuse_group(group);
            return self.give_up_replica(group, format!("its directory cannot be read: {error}"));
        }
        if let Some(reason) = refused {
            return self.give_up_replica(group, reason.clone());
        }
        // Whatever becomes of the replica, its group runs, and must not vote.
        if one.as_ref().is_some_and(|one| one.joining) {
            self.join_group(multi, group);
        }
        if one.as_ref().is_some_and(|one| one.refused) {
            return self.give_up_replica(group, REFUSED.to_owned());
        }
        let Some((one, definition)) = one.and_then(|mut one| {
            let definition = one.definition.take()?;
            Some((one, definition))
        }) else {
            return self.give_up_replica(group, "its definition is lost".to_owned());
        };
        let mut replica = match one.snapshot {
            Some((descriptor, state)) => {
                multi.set_snapshot(group, descriptor.clone());
                let mut replica = Replica::new(definition, state, descriptor.position);
                replica.log.newest = Some(descriptor);
                replica
            }
            None if definition.joins => Replica::joining(definition),
            None => Replica::founded(definition),
        };
        replica.started = one.started;
        replica.log.due_ms = now_ms() + IDLE_MS;
        // Another one takes their place: they would be kept instead of good ones that are older.
        replica.log.wanted = !one.rotten.is_empty();
        replica.log.rotten = one.rotten;
        replica.log.scrub_due_ms = self.ctx.first_scrub_ms(now_ms());
        if let Some(status) = multi.status(group) {
            (replica.role, replica.term, replica.leader) =
                (status.role, status.term, status.leader);
        }
        self.replicas.insert(group, replica);
    }

    /// A directory whose group the log does not know.
    fn recover_unlogged(&mut self, multi: &mut MultiRaft, one: Loaded, log_is_whole: bool) {
        let partition = one.partition;
        if one.deleted {
            return self.remove_directory(partition);
        }
        if let Some(error) = one.unread {
            let reason = format!("its directory cannot be read: {error}");
            return self.give_up_replica(partition, reason);
        }
        if one.refused {
            return self.give_up_replica(partition, REFUSED.to_owned());
        }
        match one.definition {
            // The node crashed before the group's first flush returned: nobody was promised
            // anything, so it begins now.
            Some(definition) if log_is_whole && !one.started && one.snapshot.is_none() => {
                self.begin_group(multi, definition);
            }
            // Or before the definition was there: it begins when the managers come again.
            None if log_is_whole && !one.started => self.remove_directory(partition),
            _ => self.give_up_replica(partition, "its log is lost".to_owned()),
        }
    }

    /// What cannot be removed now is later; until then nothing is made in its place.
    fn remove_directory(&mut self, partition: PartitionId) {
        if let Err(error) = self.ctx.store.remove(partition) {
            warn!(%partition, %error, "cannot remove the directory of a deleted partition");
            self.remove_later(partition, Removal::Waiting);
        }
    }
}

fn start_of(one: &Loaded) -> GroupStart {
    match &one.snapshot {
        Some((descriptor, _)) => GroupStart {
            applied: descriptor.position.index,
            snapshot: Some(descriptor.clone()),
            delivered: None,
        },
        None => {
            let joins = one.definition.as_ref().is_some_and(|definition| definition.joins);
            GroupStart {
                applied: if joins { 0 } else { FOUNDED.index },
                snapshot: None,
                delivered: None,
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::SocketAddr;
    use std::rc::Rc;
    use std::sync::Arc;

    use milpa_host::keys::Key;
    use milpa_host::managers::Managers;
    use milpa_host::rpc::{Credential, Identity, Pool};
    use milpa_raft::{LogPosition, Members, RaftConfig, RecoveredGroup};
    use milpa_types::{ClusterId, MetaSlot, NodeId, Role, VolumeId, VolumeOptions};

    use super::*;
    use crate::config::MetaNodeConfig;
    use crate::node::context::Context;
    use crate::node::failing_reads::fail_reads;
    use crate::node::inbox::Inbox;
    use crate::node::responder::Responder;
    use crate::node::snapshot_file::{self, FileHeader};
    use crate::node::snapshots::{RETRY_MS, SnapshotJob, is_due};

    pub(in crate::node) const NODE: NodeId = NodeId(101);
    pub(in crate::node) const PARTITION: PartitionId = PartitionId(7);

    pub(in crate::node) fn shell(directory: &std::path::Path) -> Shell {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = MetaNodeConfig::new(directory.to_path_buf(), any, any, Vec::new());
        let credential = Credential::Cluster(Key::random().unwrap());
        let pool = Pool::new(Arc::new(Identity::new(Some(ClusterId(7)), Role::Meta, credential)));
        let managers = Managers::new(pool.clone(), Vec::new());
        let store = SnapshotStore::open(directory.join("partitions")).unwrap();
        let inbox = Rc::new(Inbox::default());
        Shell::new(Rc::new(Context::new(config, NODE, pool, managers, inbox, store)), 1)
    }

    pub(in crate::node) fn definition() -> CreateMetaPartition {
        CreateMetaPartition {
            partition: PARTITION,
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(0),
            members: vec![NODE],
            joins: false,
        }
    }

    /// Waits for what the jobs have to say, and handles it.
    pub(in crate::node) async fn handle_next(shell: &mut Shell, multi: &mut MultiRaft) {
        let inbox = Rc::clone(&shell.ctx.inbox);
        let wait = std::time::Duration::from_secs(10);
        tokio::time::timeout(wait, inbox.filled()).await.expect("a job ends");
        for event in inbox.drain() {
            shell.handle(multi, event);
        }
    }

    /// Whether no job has anything to say within a moment.
    async fn is_silent(shell: &Shell) -> bool {
        let moment = std::time::Duration::from_millis(50);
        tokio::time::timeout(moment, shell.ctx.inbox.filled()).await.is_err()
    }

    /// What the log holds of a group that was founded.
    fn logged() -> Recovered {
        let group = RecoveredGroup {
            group: PARTITION,
            mark: LogPosition { term: 1, index: 1 },
            members: Members::new(&[NODE], &[]),
            term: 1,
            vote: None,
            commit: 1,
            entries: Vec::new(),
        };
        Recovered { groups: vec![group], ..Recovered::default() }
    }

    /// The story: the directory of a deleted partition went at the start, before the log had
    /// forgotten the group. After a crash in between the definition was lost for ever. Then all of it waited for the log,
    /// and the log of a full disk for the room that it took.
    #[tokio::test]
    async fn what_is_deleted_goes_after_the_log_has_forgotten_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let store = shell.ctx.store.clone();
        store.define(&definition()).unwrap();
        store.mark_deleted(PARTITION).unwrap();
        let partition = directory.path().join("partitions/7");
        std::fs::write(
            partition.join("00000000000000000040-00000000000000000002.snapshot"),
            "much",
        )
        .unwrap();
        let loaded = load_all(&store).unwrap();
        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        let recovering = async {
            shell.recover(&mut multi, loaded, logged());
            shell.snapshot_jobs.insert(PARTITION, SnapshotJob::Write);
            shell.remove_directories(&multi);
            assert!(is_silent(&shell).await, "a snapshot is being written there");
            assert!(shell.deleting.contains(&PARTITION), "none is made in its place");
            assert!(shell.replicas.is_empty() && shell.damaged.is_empty());

            shell.snapshot_jobs.clear();
            for _ in 0..2 {
                shell.remove_directories(&multi);
                handle_next(&mut shell, &mut multi).await;
                let names = milpa_host::disk::list(&partition).unwrap();
                assert_eq!(names, ["deleted"], "the log may not know it yet");
                assert!(shell.deleting.contains(&PARTITION));
                shell.remove_directories(&multi);
                assert!(is_silent(&shell).await, "what is left waits for the log");
                // The same after a crash.
                std::fs::write(partition.join("definition"), "").unwrap();
                let loaded = load_all(&store).unwrap();
                multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
                shell.recover(&mut multi, loaded, logged());
            }

            let told = multi.turn(now_ms()).batch.expect("the log is told");
            multi.persisted(told.number, now_ms());
            shell.remove_directories(&multi);
            handle_next(&mut shell, &mut multi).await;
            assert_eq!(store.partitions().unwrap(), [], "nothing waits for it any more");
            assert!(shell.deleting.is_empty());
        };
        tokio::task::LocalSet::new().run_until(recovering).await;
    }

    /// Found by a reader: clocks begin with the process, so that "verified some time within the last two weeks" was at its
    /// beginning for nearly all: they were read again all at once after two weeks, and never where nodes start more often.
    /// In the same way half a minute became ten.
    #[tokio::test]
    async fn what_is_due_after_a_start_is_due_soon_and_not_all_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let period_ms = shell.ctx.config.scrub_period_s * 1_000;
        let dues: Vec<u64> = (0..100).map(|_| shell.ctx.first_scrub_ms(1_000)).collect();
        let half_ms = 1_000 + period_ms / 2;
        assert!(dues.iter().all(|due| (1_000..1_000 + period_ms).contains(due)), "{dues:?}");
        assert!((20..80).contains(&dues.iter().filter(|due| **due < half_ms).count()), "{dues:?}");

        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        let mut replica = Replica::founded(definition());
        replica.applied.index += 1;
        let identity = Rc::clone(&replica.identity);
        shell.replicas.insert(PARTITION, replica);
        shell.snapshot_written(&mut multi, PARTITION, &identity, None);
        let is_due = |after_ms: u64| {
            is_due(&shell.replicas[&PARTITION], u64::MAX, u64::MAX, now_ms() + after_ms)
        };
        assert!(!is_due(RETRY_MS / 2) && is_due(RETRY_MS));
    }

    /// Found by a reader: a sector that could not be read in the definition of one partition, where a damaged one costs nothing,
    /// kept the node from starting, with all that it has.
    #[tokio::test]
    async fn what_cannot_be_read_of_one_partition_costs_no_other_one() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let store = shell.ctx.store.clone();
        store.define(&definition()).unwrap();
        let (unread, lost) = (PartitionId(8), PartitionId(9));
        store.define(&CreateMetaPartition { partition: unread, ..definition() }).unwrap();
        // What is there cannot be read as a file, and as a directory.
        let path = |id: PartitionId| directory.path().join(format!("partitions/{id}"));
        std::fs::remove_file(path(unread).join("definition")).unwrap();
        std::fs::create_dir(path(unread).join("definition")).unwrap();
        std::fs::write(path(lost), "").unwrap();
        let loaded = load_all(&store).unwrap();
        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        let mut recovered = logged();
        for group in [unread, lost] {
            recovered.groups.push(RecoveredGroup { group, ..recovered.groups[0].clone() });
        }
        shell.recover(&mut multi, loaded, recovered);
        assert!(shell.replicas.contains_key(&PARTITION));
        assert_eq!(shell.damaged.keys().copied().collect::<Vec<_>>(), [unread, lost]);
        assert!(multi.status(lost).is_none(), "it may have had no vote");
    }

    /// Writes a snapshot of the partition.
    fn write_snapshot(store: &SnapshotStore, position: LogPosition) {
        let mut state = Replica::founded(definition()).state;
        state.skip(position.index);
        let descriptor = SnapshotDescriptor { position, members: Members::new(&[NODE], &[]) };
        let header = FileHeader { definition: definition(), descriptor };
        let path = store.writing_path(PARTITION);
        snapshot_file::write(&path, &header, state.begin_snapshot(position.term)).unwrap();
        store.publish(PARTITION, position, &path).unwrap();
    }

    /// Found by a reader: a definition that could not be read once was lost, and the newest snapshot was passed over for one
    /// before it, behind which the log of a partition at rest does not begin: either cost the replica.
    #[tokio::test]
    async fn a_disk_that_fails_to_read_once_costs_no_replica() {
        let newest = LogPosition { term: 1, index: 40 };
        let file = format!("{:020}-{:020}.snapshot", newest.index, newest.term);
        for (name, mark) in [("definition", logged().groups[0].mark), (file.as_str(), newest)] {
            let directory = tempfile::tempdir().unwrap();
            let mut shell = shell(directory.path());
            let store = shell.ctx.store.clone();
            store.define(&definition()).unwrap();
            if mark == newest {
                write_snapshot(&store, LogPosition { term: 1, index: 5 });
                write_snapshot(&store, newest);
            }
            let path = directory.path().join("partitions/7").join(name);
            let loaded = {
                let _entered = fail_reads(path, 1);
                load_all(&store).unwrap()
            };
            let mut recovered = logged();
            (recovered.groups[0].mark, recovered.groups[0].commit) = (mark, mark.index);
            let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
            shell.recover(&mut multi, loaded, recovered);
            assert!(shell.replicas.contains_key(&PARTITION), "{name}: {:?}", shell.damaged);
        }
    }

    /// Found by a reader: a rotten snapshot that could not be set aside was one of the two that are kept, in the place of the
    /// good one behind which the log begins.
    #[tokio::test]
    async fn a_snapshot_that_cannot_be_read_is_to_be_replaced() {
        let newest = LogPosition { term: 1, index: 40 };
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let store = shell.ctx.store.clone();
        store.define(&definition()).unwrap();
        let mark = LogPosition { term: 1, index: 5 };
        write_snapshot(&store, mark);
        write_snapshot(&store, newest);
        let file = format!("{:020}-{:020}.snapshot", newest.index, newest.term);
        let path = directory.path().join("partitions/7").join(&file);
        std::fs::write(&path, "rotten").unwrap();
        std::fs::create_dir_all(path.with_extension("damaged").join("in the way")).unwrap();
        let mut recovered = logged();
        (recovered.groups[0].mark, recovered.groups[0].commit) = (mark, mark.index);
        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        let loaded = load_all(&store).unwrap();
        shell.recover(&mut multi, loaded, recovered);
        let log = &shell.replicas[&PARTITION].log;
        assert!(log.wanted && log.rotten == [newest]);
    }

    /// Found by a reader: a mark for which there was no room was not tried again, and nothing went before a log that had
    /// no room either.
    #[tokio::test]
    async fn a_deletion_that_could_not_be_marked_is_marked_later() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        let store = shell.ctx.store.clone();
        store.define(&definition()).unwrap();
        let mut multi = MultiRaft::new(NODE, RaftConfig::default(), 1).unwrap();
        shell.recover(&mut multi, load_all(&store).unwrap(), logged());
        let failed = Err(io::Error::from(io::ErrorKind::StorageFull));
        let removing = async {
            let (responder, _answer) = Responder::task("delete", std::time::Duration::ZERO);
            shell.deletion_noted(&mut multi, PARTITION, failed, responder);
            shell.remove_directories(&multi);
            handle_next(&mut shell, &mut multi).await;
        };
        tokio::task::LocalSet::new().run_until(removing).await;
        let names = milpa_host::disk::list(&directory.path().join("partitions/7")).unwrap();
        assert_eq!(names, ["deleted"]);
    }

    /// A disk that has failed for good is not asked for ever.
    #[tokio::test]
    async fn what_cannot_be_emptied_is_left_to_the_log() {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = shell(directory.path());
        shell.remove_later(PARTITION, Removal::FULL);
        let mut tries = 0;
        while matches!(shell.removable[&PARTITION], Removal::Full { .. }) {
            shell.directory_emptied(PARTITION, false);
            tries += 1;
            assert!(tries <= 1_000);
        }
        assert_eq!(shell.removable[&PARTITION], Removal::Waiting);
    }
}
