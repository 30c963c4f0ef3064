//! Opening a disk: whose it is, what its log and its partitions hold.
//!
//! ```text
//! DIR/DISK          which disk of which node this is
//! DIR/raft/         the log of all Raft groups of the disk
//! DIR/states/ID     configuration and applied index of a partition
//! DIR/partitions/ID its extents
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use milpa_host::clock::now_ms;
use milpa_host::descriptors;
use milpa_host::disk as files;
use milpa_raft::{
    FileStorage, LogWriter, MultiRaft, RaftConfig, RaftDriver, Recovered, Wal, WalError, WalOptions,
};
use milpa_types::{DiskId, NodeId, PartitionId};
use milpa_wire::data::Configuration;
use tokio::sync::mpsc::UnboundedSender;

use crate::DiskConfig;
use crate::store::files::DiskFiles;
use crate::store::{ExtentStore, RecoveryReport, StoreDisk, StoreLimits};

use super::disk::{Disk, DiskEvent};
use super::label::{Label, renew_label};
use super::ledger::{Found, Ledger};
use super::licence::Licence;
use super::lost_note::{LostNote, Noted};
use super::overwrites::ENTRY_BYTES_MAX;
use super::partition::Partition;
use super::partitions::{group_start, is_founder, log_recovery};
use super::scrubbing::Scrubbing;
use super::shared::Shared;
use super::state::{PartitionState, States, load_all};
use super::usage::Usage;
use super::workers::Workers;

/// Open extent files of one disk, and cached checksum chunks of 4 KiB.
const LIMITS: StoreLimits = StoreLimits { files_max: 1024, chunks_max: 4096 };
/// Of the descriptors of the process, for the extent files of all disks.
const FILES_PERCENT: u64 = 30;
/// Below this each read opens a file.
const FILES_MIN: usize = 16;

/// What a disk held.
pub(crate) struct OpenedDisk {
    pub id: DiskId,
    directory: PathBuf,
    store_disk: Arc<StoreDisk>,
    wal: Wal,
    recovered: Recovered,
    replicas: Vec<(PartitionState, Result<Opened, String>)>,
    damaged: BTreeSet<PartitionId>,
    usage: Usage,
}

/// A partition's extents, and what opening them found.
type Opened = (ExtentStore, RecoveryReport);

/// Why a disk cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unopened {
    /// It has failed, or what it says of itself is damaged: that is no reason not to serve the others.
    Failed(String),
    /// It is not what the settings take it for, or somebody else uses it: an operator has to look.
    Refused(String),
}

impl Unopened {
    pub fn of(error: &io::Error, problem: String) -> Unopened {
        match files::is_failure(error) {
            true => Unopened::Failed(problem),
            false => Unopened::Refused(problem),
        }
    }
}

/// Opens everything on a disk. Takes as long as reading what was not flushed takes.
pub(crate) fn open_disk(
    config: &DiskConfig,
    id: DiskId,
    incarnation: u128,
    nonce: u64,
    files_max: usize,
) -> Result<OpenedDisk, Unopened> {
    let directory = config.path.clone();
    let (states, extents) = (directory.join("states"), directory.join("partitions"));
    for path in [&states, &extents] {
        files::create_directory(path)
            .map_err(|error| Unopened::of(&error, format!("cannot make {path:?}: {error}")))?;
    }
    let owner = owner_of(incarnation, id);
    let log = FileStorage::open(&directory.join("raft"))
        .and_then(|storage| Wal::open(storage, WalOptions::new(owner, nonce)));
    let (wal, recovered) = log.map_err(|error| match error {
        WalError::Io(error) => Unopened::of(&error, format!("cannot read its log: {error}")),
        error => Unopened::Refused(error.to_string()),
    })?;
    renew_label(&directory, Label { incarnation, disk: id })?;
    let limits = StoreLimits { files_max, ..LIMITS };
    let store_disk = StoreDisk::new(Arc::new(DiskFiles::new()), limits);
    let mut replicas = Vec::new();
    let States { whole, damaged } = load_all(&states)?;
    for state in whole {
        let path = extents.join(state.partition.to_string());
        let opened = ExtentStore::open(&store_disk, &path, state.partition);
        let opened = opened.map_err(|error| error.to_string());
        if let Ok((_, report)) = &opened {
            log_recovery(state.partition, report);
        }
        replicas.push((state, opened));
    }
    let usage = Usage {
        space: files::space(&directory).ok(),
        device: files::status(&directory).map_or(0, |status| status.device),
        allocated_bytes: replicas
            .iter()
            .flat_map(|(_, opened)| opened)
            .map(|(store, _)| store.allocated_bytes())
            .sum(),
        ..Usage::default()
    };
    Ok(OpenedDisk { id, directory, store_disk, wal, recovered, replicas, damaged, usage })
}

/// Open extent files of each of so many disks.
pub(crate) fn files_max(disks: usize) -> usize {
    let all = descriptors::share(FILES_PERCENT, usize::MAX);
    (all / disks.max(1)).clamp(FILES_MIN, LIMITS.files_max)
}

/// The log names its owner, so that a directory moved to another place is noticed.
fn owner_of(incarnation: u128, id: DiskId) -> [u8; 16] {
    (incarnation ^ u128::from(id.0)).to_le_bytes()
}

/// A disk that could not be opened, as registration and heartbeats carry it.
pub(crate) fn describe_failed(config: &DiskConfig, id: DiskId, problem: &str) -> milpa_types::Disk {
    milpa_types::Disk {
        id,
        path: config.path.display().to_string(),
        capacity_bytes: 0,
        free_bytes: 0,
        used_bytes: 0,
        device: 0,
        fenced: Some(problem.to_owned()),
    }
}

impl OpenedDisk {
    /// The disk as registration carries it.
    pub fn describe(&self, config: &DiskConfig) -> milpa_types::Disk {
        let free = self.usage.space.map_or(0, |s| s.free.saturating_sub(config.reserve_bytes));
        let used_bytes = self.usage.allocated_bytes;
        let whole = used_bytes.saturating_add(free);
        let limit = config.capacity_bytes;
        let capacity_bytes = if limit == 0 { whole } else { limit.min(whole) };
        milpa_types::Disk {
            id: self.id,
            path: self.directory.display().to_string(),
            capacity_bytes,
            free_bytes: capacity_bytes.saturating_sub(used_bytes),
            used_bytes,
            device: self.usage.device,
            fenced: None,
        }
    }

    /// What it holds of partitions.
    pub fn found(&self) -> impl Iterator<Item = Found> {
        let whole = self.replicas.iter().map(|(state, _)| state);
        let whole = whole.map(|state| (state.partition, Some(state.configuration.epoch)));
        let damaged = self.damaged.iter().map(|partition| (*partition, None));
        whole.chain(damaged).map(|(partition, epoch)| (partition, self.id, epoch))
    }

    /// Replicas whose partition has another one on this node take no part: they are reported like damaged ones, until
    /// the managers have them deleted.
    pub fn leave_out(&mut self, ledger: &Ledger) {
        let (disk, replicas) = (self.id, std::mem::take(&mut self.replicas));
        for (state, opened) in replicas {
            let partition = state.partition;
            if ledger.has_replica(partition, disk) {
                self.replicas.push((state, opened));
            } else {
                tracing::warn!(%partition, %disk, "what is left of a replica that was made again on another disk");
                self.damaged.insert(partition);
            }
        }
    }

    /// Starts the disk's threads and its Raft groups.
    pub fn start(
        self,
        index: usize,
        shared: Rc<Shared>,
        seed: u64,
        events: UnboundedSender<DiskEvent>,
    ) -> Result<Disk, String> {
        let (node, config) = (shared.node, shared.config.clone());
        // What the log on disk may hold of a partition, its followers find in memory too: a
        // snapshot copies all that was ever overwritten.
        let tail_bytes_max = usize::try_from(config.log_bytes_max).unwrap_or(usize::MAX);
        let raft = RaftConfig {
            entry_bytes_max: ENTRY_BYTES_MAX,
            tail_bytes_max,
            tail_bytes_node_max: tail_bytes_max.saturating_mul(4),
            ..RaftConfig::default()
        };
        let mut multi = MultiRaft::new(node, raft, seed).map_err(|e| e.to_string())?;
        let known: Vec<PartitionId> = self.recovered.groups.iter().map(|g| g.group).collect();
        // A replica that has written no index down stands where its log starts.
        let has_index = self.replicas.iter().map(|(state, _)| state).filter(|s| s.applied > 0);
        let starts = has_index.map(|state| (state.partition, group_start(state))).collect();
        let refused: BTreeMap<_, _> =
            multi.recover(self.recovered, &starts, now_ms()).into_iter().collect();
        let writer = LogWriter::spawn(self.wal).map_err(|e| e.to_string())?;
        let name = format!("disk{}", self.id);
        let workers = Workers::spawn(
            &name,
            config.disk_threads as usize,
            config.disk_queue_max as usize,
            events.clone(),
        )
        .map_err(|e| e.to_string())?;
        let mut disk = Disk {
            index,
            id: self.id,
            lost_note: LostNote::new(&self.directory),
            scrubbing: Scrubbing::open(&self.directory, config.scrub_period_s),
            states: self.directory.join("states"),
            extents: self.directory.join("partitions"),
            directory: self.directory,
            shared,
            store_disk: self.store_disk,
            workers,
            driver: RaftDriver::new(multi, writer),
            partitions: BTreeMap::new(),
            events,
            next_request: 0,
            usage: self.usage,
            ticked_ms: now_ms(),
            is_out_of_service: false,
            damaged: self.damaged,
            wiping: BTreeSet::new(),
            heard_ms: BTreeMap::new(),
        };
        let mut routes = disk.shared.routes.borrow_mut();
        for id in &disk.damaged {
            routes.entry(*id).or_insert(index);
        }
        drop(routes);
        for (state, opened) in self.replicas {
            let refusal = refused.get(&state.partition).map(ToString::to_string);
            disk.take_replica(node, state, opened, refusal, &known);
        }
        for Noted { partition, extent, block, is_told } in disk.lost_note.read() {
            let Some(partition) = disk.partitions.get_mut(&partition) else { continue };
            partition.lost.find(extent, block);
            if is_told {
                partition.lost.tell(extent, block);
            }
        }
        for group in known {
            if disk.damaged.contains(&group) {
                disk.driver.multi.refuse_group(group);
            } else if !disk.partitions.contains_key(&group) {
                // Deleted just before the process ended.
                disk.driver.multi.remove_group(group);
            }
        }
        Ok(disk)
    }
}

impl Disk {
    /// Puts a replica that was here before into service, or notes why not.
    fn take_replica(
        &mut self,
        node: NodeId,
        state: PartitionState,
        opened: Result<Opened, String>,
        refusal: Option<String>,
        known: &[PartitionId],
    ) {
        let id = state.partition;
        self.shared.routes.borrow_mut().insert(id, self.index);
        let (store, report) = match opened {
            Ok(opened) => opened,
            Err(problem) => {
                // Kept on disk, with its log, and out of the reports: the next start may open it, or the manager brings
                // another replica.
                tracing::error!(partition = %id, problem, "the partition cannot be opened");
                self.damaged.insert(id);
                return;
            }
        };
        let fresh = state.applied == 0 && state.snapshot.is_none();
        let missing = !known.contains(&id);
        let mut broken = refusal;
        if missing && fresh {
            // The process ended between the state and the log's first word of the group.
            self.start_group(&state, is_founder(&state, node));
        } else if missing && broken.is_none() {
            broken = Some("its Raft log is gone".to_owned());
        }
        if let Some(problem) = &broken {
            tracing::error!(partition = %id, problem, "the replica is out of service");
        }
        let Configuration { epoch, members, .. } = &state.configuration;
        self.driver.multi.set_roster(id, *epoch, members);
        let ids_next = state.ids_until;
        let mut partition = Partition::new(node, store, state, ids_next, &self.shared.config);
        if broken.is_none() {
            report.damaged_blocks().for_each(|(extent, block)| partition.lost.find(extent, block));
        }
        partition.broken = broken;
        partition.licence = Licence::of_found(now_ms());
        if let Some(status) = self.driver.multi.status(id) {
            // The first report says it, before the group has had its first turn.
            partition.term = status.term;
            partition.repeated_until = status.last_index;
            partition.applying.borrow_mut().resume(status.applied);
        }
        self.partitions.insert(id, partition);
    }
}
