//! Replicas come and go: opened at the start, created and dropped on the manager's word.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use milpa_host::disk as files;
use milpa_host::rpc::Reply;
use milpa_raft::{GroupStart, LogPosition, Role as RaftRole};
use milpa_types::{DataError, Deletion, NodeId, PartitionId, VolumeId};
use milpa_wire::data::{Configuration, CreateDataPartition};
use tokio::sync::oneshot::{Receiver, channel};

use crate::DataNodeConfig;
use crate::append::{Backup, Limits, Primary};
use crate::offers::Offers;
use crate::overwrite::Applying;
use crate::store::piece::PIECE_HEADER_BYTES;
use crate::store::{ExtentStore, RecoveryReport};

use super::appends::BATCH_BYTES_MAX;
use super::disk::Disk;
use super::handed::Handed;
use super::licence::Licence;
use super::lost::LostBlocks;
use super::partition::{Alignment, Checkpoint, Partition, Saving, answer, answer_done};
use super::recent::Recent;
use super::state::{PartitionState, state_path};

/// Ids that may be given before the next durable write of the bound.
const IDS_AT_START: u32 = 16_384;
/// Extents of one partition that take appends at the same time.
const EXTENTS_OPEN_MAX: usize = 65_536;
/// Repeats that are recognized, in one partition.
const TOKENS_MAX: usize = 32_768;
/// An extent that is open for so long without an append is closed.
const IDLE_MS: u64 = 600_000;

/// How a change of a partition went.
type Outcome = Result<(), DataError>;

/// How often a deletion looks whether the extents are still in use, and the pause between.
const UNUSED_TRIES_MAX: u32 = 1_000;
const UNUSED_PAUSE: Duration = Duration::from_millis(10);

/// The bounds of a partition's primary.
pub(crate) fn limits(config: &DataNodeConfig) -> Limits {
    Limits {
        requests_max: config.append_queue_max as usize,
        extents_max: EXTENTS_OPEN_MAX,
        small_extent_bytes_max: config.small_extent_bytes_max,
        batch_bytes_max: BATCH_BYTES_MAX,
        piece_header_bytes: PIECE_HEADER_BYTES as u64,
        member_silent_ms: config.member_silent_ms,
        idle_ms: IDLE_MS,
        tokens_max: TOKENS_MAX,
    }
}

/// Where a group goes on.
pub(crate) fn group_start(state: &PartitionState) -> GroupStart {
    let (applied, snapshot) = (state.applied, state.snapshot.clone());
    GroupStart { applied, snapshot, delivered: Some(state.configured) }
}

/// Whether this replica founds its group, or joins one that exists.
pub(crate) fn is_founder(state: &PartitionState, node: NodeId) -> bool {
    state.configuration.epoch.0 <= 1 && state.configuration.members.contains(&node)
}

impl Partition {
    /// Whether bytes are on their way here from other replicas.
    pub fn is_fetching(&self) -> bool {
        Rc::strong_count(&self.fetches) > 1
    }

    /// A replica around its store. `ids_next` is the first id that was never reserved.
    pub fn new(
        node: NodeId,
        store: ExtentStore,
        state: PartitionState,
        ids_next: u32,
        config: &DataNodeConfig,
    ) -> Partition {
        let configuration = state.configuration.clone();
        let mut primary = Primary::new(node, configuration.clone(), limits(config));
        primary.ids_reserved(ids_next, state.ids_until);
        let wants_all = configuration.primary == node;
        let is_unknown = configuration.holders().any(|holder| holder == node);
        Partition {
            id: state.partition,
            store: Arc::new(store),
            saving: Saving::default(),
            broken: None,
            primary,
            backup: Backup::new(node, configuration.clone()),
            configuration,
            held: BTreeMap::new(),
            role: RaftRole::Follower,
            term: 0,
            leader: None,
            applying: Rc::new(RefCell::new(Applying::new(state.applied, state.overwritten))),
            handed: Handed::default(),
            recent: Recent::default(),
            repeated_until: 0,
            standing: None,
            licence: Licence::default(),
            proposals: BTreeMap::new(),
            marked_everywhere: BTreeSet::new(),
            lacking: BTreeSet::new(),
            lacked_before: state.lacks_overwritten,
            checkpoint: Checkpoint::default(),
            is_installing: false,
            alignment: Alignment { wants_all, is_unknown, ..Alignment::default() },
            filling: BTreeMap::new(),
            repairing: BTreeSet::new(),
            lost: LostBlocks::default(),
            fetches: Rc::default(),
            offers: Offers::default(),
            allocated_bytes: 0,
            state,
        }
    }
}

/// Says what opening a partition's extents found.
pub(crate) fn log_recovery(partition: PartitionId, report: &RecoveryReport) {
    let damaged: usize = report.extents.iter().map(|extent| extent.damaged.len()).sum();
    if damaged > 0 || !report.unreadable.is_empty() || !report.vanished.is_empty() {
        tracing::warn!(%partition, damaged, unreadable = ?report.unreadable,
            vanished = ?report.vanished, "damage found; it is repaired from other replicas");
    }
}

impl Disk {
    /// The manager's word to hold a replica. Repeats are answered, not done twice.
    pub fn create_partition(&mut self, create: CreateDataPartition, reply: Reply) {
        let id = create.partition;
        if self.is_fenced() {
            return answer(reply, Err(DataError::DiskFailed));
        }
        if self.wiping.contains(&id) {
            return answer(reply, Err(DataError::Busy));
        }
        let is_member =
            |configuration: &Configuration| configuration.members.contains(&self.shared.node);
        let makes_member = is_member(&create.configuration);
        if let Some(partition) = self.partitions.get(&id) {
            let same = partition.state.volume == create.volume;
            if partition.broken.is_none() || makes_member {
                let result = if same { Ok(()) } else { Err(DataError::Invalid) };
                return answer_done(reply, result);
            }
            let own = &partition.state.configuration;
            if own.epoch > create.configuration.epoch && is_member(own) {
                // The managers have not heard yet that it was taken in.
                return answer(reply, Err(DataError::Busy));
            }
            self.damaged.insert(id);
        }
        if !makes_member && files::status(&self.extents.join(id.to_string())).is_ok() {
            // What a crash left of one that was being removed.
            self.damaged.insert(id);
        }
        if self.damaged.contains(&id) {
            if makes_member {
                return answer(reply, Err(DataError::DiskFailed));
            }
            // The group goes on without this replica: it may come back, blank.
            return self.wipe_replica(id, move |disk, wiped| match wiped {
                Some(Ok(())) => disk.create_partition(create, reply),
                Some(Err(error)) => {
                    disk.store_disk.fence("remove a damaged replica", &error);
                    answer(reply, Err(DataError::DiskFailed));
                }
                None => answer(reply, Err(DataError::Busy)),
            });
        }
        self.shared.routes.borrow_mut().insert(id, self.index);
        let result = self.make_partition(&create);
        if let Err(problem) = &result {
            tracing::error!(partition = %id, problem, "cannot create the partition");
            self.leave_route(id);
        }
        answer_done(reply, result.map_err(|_| DataError::DiskFailed));
    }

    /// No replica is here any more; one on another disk of the node may be.
    fn leave_route(&self, id: PartitionId) {
        let mut routes = self.shared.routes.borrow_mut();
        if routes.get(&id) == Some(&self.index) {
            routes.remove(&id);
        }
    }

    fn make_partition(&mut self, create: &CreateDataPartition) -> Result<(), String> {
        let id = create.partition;
        let noted = self.shared.ledger.borrow_mut().note_replica(id, self.id);
        noted.map_err(|error| format!("cannot note it in the node's directory: {error}"))?;
        let directory = self.extents.join(id.to_string());
        let opened = ExtentStore::open(&self.store_disk, &directory, id);
        let (store, report) = opened.map_err(|error| format!("{error}"))?;
        log_recovery(id, &report);
        let state = PartitionState {
            partition: id,
            volume: create.volume,
            configuration: create.configuration.clone(),
            applied: 0,
            snapshot: None,
            ids_until: IDS_AT_START,
            relaxed: create.relaxed,
            configured: LogPosition::default(),
            lacks_overwritten: false,
            is_given_rest: false,
            overwritten: 0,
            is_new: !create.configuration.members.contains(&self.shared.node),
        };
        // Small, rare, and before anybody may rely on it: written on this thread.
        state.save(&self.states).map_err(|error| error.to_string())?;
        let node = self.shared.node;
        let founder = is_founder(&state, node);
        self.start_group(&state, founder);
        if state.relaxed {
            say_relaxed(id, true);
        }
        let mut partition = Partition::new(node, store, state, 0, &self.shared.config);
        if let Some(status) = self.driver.multi.status(id) {
            partition.applying.borrow_mut().resume(status.applied);
        }
        partition.alignment = Alignment::default();
        self.partitions.insert(id, partition);
        self.report_soon();
        tracing::info!(partition = %id, founder, "partition created");
        Ok(())
    }

    /// A replica that was away while the group went on without it, and has committed what the group has
    /// not: out of service, and out of the reports, until the managers have it made anew.
    pub fn retire_replica(&mut self, id: PartitionId) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let problem = "its log is not the group's: something else was committed here";
        tracing::error!(partition = %id, problem, "the replica is out of service");
        self.driver.multi.refuse_group(id);
        partition.broken = Some(problem.to_owned());
        partition.primary.refuse(Some(DataError::DiskFailed));
        (partition.role, partition.leader) = (milpa_raft::Role::Follower, None);
        partition.licence.revoke();
    }

    /// Makes the Raft replica: a founder with all members, one that joins with none.
    pub fn start_group(&mut self, state: &PartitionState, founder: bool) {
        let configuration = &state.configuration;
        let campaign = founder && configuration.primary == self.shared.node;
        let voters: &[NodeId] = if founder { &configuration.members } else { &[] };
        self.driver.multi.create_group(state.partition, voters, &[], campaign);
        self.driver.multi.set_roster(state.partition, configuration.epoch, &configuration.members);
    }

    /// All partitions of a volume acknowledge from memory from now on, or from the disk. Each
    /// receiver gets how that went for one partition.
    pub fn set_relaxed(&mut self, volume: VolumeId, relaxed: bool) -> Vec<Receiver<Outcome>> {
        let concerned = |partition: &&mut Partition| {
            partition.state.volume == volume && partition.state.relaxed != relaxed
        };
        let mut changed = Vec::new();
        for partition in self.partitions.values_mut().filter(concerned) {
            partition.state.relaxed = relaxed;
            say_relaxed(partition.id, relaxed);
            changed.push((partition.id, Arc::clone(&partition.store)));
        }
        changed.into_iter().map(|(id, store)| self.settle_durability(id, store, relaxed)).collect()
    }

    /// Brings the disk in line: what was promised from memory is flushed when that ends, before it
    /// is written down as ended.
    fn settle_durability(
        &mut self,
        id: PartitionId,
        store: Arc<ExtentStore>,
        relaxed: bool,
    ) -> Receiver<Outcome> {
        let (sender, receiver) = channel();
        let flush = move || if relaxed { Ok(()) } else { store.flush_all() };
        self.workers.slow(flush, move |disk, flushed| match flushed {
            Ok(()) => disk.save_state(id, Box::new(move |_| drop(sender.send(Ok(()))))),
            Err(error) => drop(sender.send(Err(error.into()))),
        });
        receiver
    }

    /// The volume was deleted, or the replica is too many. Answered when the files are gone.
    pub fn delete_partition(&mut self, id: PartitionId, deletion: Deletion, reply: Reply) {
        if self.wiping.contains(&id) {
            return answer(reply, Err(DataError::Busy));
        }
        if self.partitions.get(&id).is_some_and(|partition| partition.saving.is_running) {
            // Until then it may have become another one.
            let again = move |disk: &mut Disk| disk.delete_partition(id, deletion, reply);
            return self.save_state(id, Box::new(again));
        }
        // One that takes no part is reported without.
        let status = self.driver.multi.status(id).filter(|_| self.partition(id).is_ok());
        let log_end = status.map(|status| status.log_end());
        if !deletion.is_of(log_end) {
            tracing::warn!(partition = %id, ?deletion, ?log_end, "the replica to delete was another one");
            return answer(reply, Err(DataError::Busy));
        }
        self.wipe_replica(id, move |_, wiped| {
            let done = matches!(wiped, Some(Ok(())));
            answer_done(reply, if done { Ok(()) } else { Err(DataError::Busy) });
        });
    }

    /// Forgets a replica and removes its files. Until they are gone none is made in its place.
    fn wipe_replica(
        &mut self,
        id: PartitionId,
        then: impl FnOnce(&mut Disk, Option<std::io::Result<()>>) + Send + 'static,
    ) {
        if self.partitions.get(&id).is_some_and(|partition| partition.saving.is_running) {
            // A state that is being written would come back after its file was removed.
            return self.save_state(id, Box::new(move |disk| disk.wipe_replica(id, then)));
        }
        if !self.wiping.insert(id) {
            return then(self, None);
        }
        self.driver.multi.remove_group(id);
        let store = self.partitions.remove(&id).map(|partition| {
            tracing::info!(partition = %id, "the replica's files are removed");
            partition.store.close();
            partition.store
        });
        let (states, extents) = (self.states.clone(), self.extents.clone());
        let (shared, disk) = (Rc::clone(&self.shared), self.index);
        tokio::task::spawn_local(async move {
            wait_until_unused(store).await;
            let wiped = shared.run_slow(disk, move || wipe(&states, &extents, id)).await;
            let done = move |disk: &mut Disk| {
                disk.wiping.remove(&id);
                if matches!(wiped, Some(Ok(()))) {
                    disk.damaged.remove(&id);
                    // Not before: who has no route is taken for deleted.
                    disk.leave_route(id);
                }
                then(disk, wiped);
            };
            shared.ask_disk(disk, done).await;
        });
    }
}

/// Nothing weakens durability silently.
pub(crate) fn say_relaxed(partition: PartitionId, relaxed: bool) {
    if relaxed {
        tracing::warn!(%partition, "durability = memory: this partition acknowledges a flush before \
            its disk has done it; a power cut may lose its newest bytes");
    } else {
        tracing::info!(%partition, "durability = synced: this partition flushes before it answers");
    }
}

/// Waits until no job uses the extents any more: one that finds its files gone would take the
/// disk for broken. Jobs are short; what fetches from other nodes ends as its partition is gone.
async fn wait_until_unused(store: Option<Arc<ExtentStore>>) {
    let Some(store) = store else { return };
    for _ in 0..UNUSED_TRIES_MAX {
        if Arc::strong_count(&store) == 1 {
            return;
        }
        tokio::time::sleep(UNUSED_PAUSE).await;
    }
}

/// Removes a replica's files, its state first: extents without a state are never opened.
fn wipe(states: &Path, extents: &Path, id: PartitionId) -> std::io::Result<()> {
    let missing = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    match files::remove(&state_path(states, id)) {
        Err(error) if !missing(&error) => return Err(error),
        _ => files::sync_directory(states)?,
    }
    match files::remove_tree(&extents.join(id.to_string())) {
        Err(error) if !missing(&error) => Err(error),
        _ => files::sync_directory(extents),
    }
}
