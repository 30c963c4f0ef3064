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
use std::path::{Path, PathBuf};
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
use milpa_wire::frame::crc32c;
use tokio::sync::mpsc::UnboundedSender;

use crate::DiskConfig;
use crate::store::files::DiskFiles;
use crate::store::{ExtentStore, RecoveryReport, StoreDisk, StoreLimits};

use super::disk::{Disk, DiskEvent};
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

const LABEL_FILE: &str = "DISK";
const LABEL_FORMAT: u32 = 2;
/// How often a label that cannot be read is read.
const READS_MAX: u32 = 4;
/// Open extent files of one disk, and cached checksum chunks of 4 KiB.
const LIMITS: StoreLimits = StoreLimits { files_max: 1024, chunks_max: 4096 };
/// Of the descriptors of the process, for the extent files of all disks.
const FILES_PERCENT: u64 = 30;
/// Below this each read opens a file.
const FILES_MIN: usize = 16;

/// Which disk of which node a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    pub incarnation: u128,
    pub disk: DiskId,
}

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

/// Finds each disk's id: the one in its directory, or a free one. Written down where it is new. Of a disk that has
/// failed it is not known.
///
/// # Errors
///
/// What is wrong with the settings.
pub(crate) fn label_disks(
    disks: &[DiskConfig],
    incarnation: u128,
) -> Result<Vec<Result<DiskId, String>>, String> {
    let mut labels = Vec::new();
    for disk in disks {
        labels.push(match read_label(&disk.path, incarnation) {
            Ok(label) => Ok(label),
            Err(Unopened::Failed(problem)) => Err(problem),
            Err(Unopened::Refused(problem)) => return Err(problem),
        });
    }
    let known: BTreeSet<DiskId> = labels.iter().flatten().flatten().map(|it| it.disk).collect();
    let mut free = (1..=u32::MAX).map(DiskId).filter(|id| !known.contains(id));
    let mut ids: Vec<Result<DiskId, String>> = Vec::new();
    for (disk, label) in disks.iter().zip(labels) {
        let id = match label {
            Ok(Some(label)) => Ok(label.disk),
            Ok(None) => {
                let free = free.next().unwrap_or_default();
                match write_label(&disk.path, Label { incarnation, disk: free }) {
                    Ok(()) => Ok(free),
                    Err(Unopened::Failed(problem)) => Err(problem),
                    Err(Unopened::Refused(problem)) => return Err(problem),
                }
            }
            Err(problem) => Err(problem),
        };
        if id.is_ok() && ids.contains(&id) {
            return Err(format!("{:?} is a copy of another of this node's disks", disk.path));
        }
        ids.push(id);
    }
    Ok(ids)
}

fn read_label(directory: &Path, incarnation: u128) -> Result<Option<Label>, Unopened> {
    files::create_directory(directory)
        .map_err(|error| Unopened::of(&error, format!("cannot make {directory:?}: {error}")))?;
    let path = directory.join(LABEL_FILE);
    let mut read = files::read(&path);
    for _ in 1..READS_MAX {
        // A read may fail once.
        if !read.as_ref().is_err_and(files::is_failure) {
            break;
        }
        read = files::read(&path);
    }
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Unopened::of(&error, format!("cannot read {path:?}: {error}"))),
    };
    match Label::parse(&String::from_utf8_lossy(&bytes), incarnation) {
        Ok(label) => Ok(Some(label)),
        Err(problem @ BadLabel::Damaged) => Err(Unopened::Failed(format!("{path:?} {problem}"))),
        Err(problem) => Err(Unopened::Refused(format!("{path:?} {problem}"))),
    }
}

/// What is wrong with a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadLabel {
    #[error("is damaged")]
    Damaged,
    #[error("is of a newer format")]
    Version,
    #[error("belongs to another data node")]
    Foreign,
}

impl Label {
    /// Reads the label of a disk of the node with this incarnation, or says what is wrong. The first format had no
    /// checksum.
    pub fn parse(text: &str, incarnation: u128) -> Result<Label, BadLabel> {
        let (content, checksum) = text.rsplit_once("crc = ").unwrap_or((text, ""));
        let fields: BTreeMap<&str, &str> =
            content.lines().filter_map(|line| line.split_once(" = ")).collect();
        let field = |name: &str| fields.get(name).copied().ok_or(BadLabel::Damaged);
        let format: u32 = field("format")?.parse().map_err(|_| BadLabel::Damaged)?;
        let is_sound =
            u32::from_str_radix(checksum.trim_end(), 16) == Ok(crc32c(content.as_bytes()));
        match format {
            1 if checksum.is_empty() => {}
            _ if !is_sound => return Err(BadLabel::Damaged),
            LABEL_FORMAT => {}
            _ => return Err(BadLabel::Version),
        }
        let found = u128::from_str_radix(field("incarnation")?, 16);
        let disk = field("disk")?.parse().map_err(|_| BadLabel::Damaged)?;
        match found {
            Ok(found) if found == incarnation => Ok(Label { incarnation, disk: DiskId(disk) }),
            Ok(_) => Err(BadLabel::Foreign),
            Err(_) => Err(BadLabel::Damaged),
        }
    }

    pub fn to_text(self) -> String {
        let Label { incarnation, disk } = self;
        let content =
            format!("format = {LABEL_FORMAT}\nincarnation = {incarnation:032x}\ndisk = {disk}\n");
        let crc = crc32c(content.as_bytes());
        format!("{content}crc = {crc:08x}\n")
    }
}

fn write_label(directory: &Path, label: Label) -> Result<(), Unopened> {
    let path = directory.join(LABEL_FILE);
    files::replace(&path, label.to_text().as_bytes())
        .map_err(|error| Unopened::of(&error, format!("cannot write {path:?}: {error}")))
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
        routes.extend(disk.damaged.iter().map(|id| (*id, index)));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_keep_their_ids_in_whatever_order_they_are_named() {
        let base = tempfile::tempdir().unwrap();
        let disk = |name: &str| DiskConfig::new(base.path().join(name));
        let (a, b, c) = (disk("a"), disk("b"), disk("c"));
        let ids = |ids: &[u32]| Ok(ids.iter().map(|id| Ok(DiskId(*id))).collect::<Vec<_>>());
        assert_eq!(label_disks(&[a.clone(), b.clone()], 7), ids(&[1, 2]));
        let later = label_disks(&[c, b.clone(), a.clone()], 7);
        assert_eq!(later, ids(&[3, 2, 1]));
        let foreign = label_disks(std::slice::from_ref(&a), 8).unwrap_err();
        assert!(foreign.contains("another data node"), "{foreign}");
        std::fs::copy(a.path.join(LABEL_FILE), b.path.join(LABEL_FILE)).unwrap();
        let copied = label_disks(&[a, b], 7).unwrap_err();
        assert!(copied.contains("copy"), "{copied}");
    }

    /// Found by a reader: one rotten byte in one disk's label, and no disk of the node was served any more.
    #[test]
    fn a_damaged_label_costs_no_other_disk() {
        let base = tempfile::tempdir().unwrap();
        let disks = ["a", "b", "c"].map(|name| DiskConfig::new(base.path().join(name)));
        label_disks(&disks[..2], 7).unwrap();
        let path = disks[0].path.join(LABEL_FILE);
        let whole = std::fs::read(&path).unwrap();
        for (at, bit) in (0..whole.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut rotten = whole.clone();
            rotten[at] ^= 1 << bit;
            std::fs::write(&path, rotten).unwrap();
            let ids = label_disks(&disks[..2], 7).unwrap();
            assert!(ids[0].is_err() || ids[0] == Ok(DiskId(1)), "{at} {bit}: {ids:?}");
            assert_eq!(ids[1], Ok(DiskId(2)));
        }
        std::fs::write(&path, "").unwrap();
        let ids = label_disks(&disks, 7).unwrap();
        assert!(ids[0].is_err() && ids[1] == Ok(DiskId(2)), "{ids:?}");
    }

    #[test]
    fn a_label_without_a_checksum_is_of_the_first_format() {
        let first = "format = 1\nincarnation = 7\ndisk = 3\n";
        assert_eq!(Label::parse(first, 7), Ok(Label { incarnation: 7, disk: DiskId(3) }));
        assert_eq!(Label::parse(first, 8), Err(BadLabel::Foreign));
        let second = first.replace("format = 1", "format = 2");
        assert_eq!(Label::parse(&second, 7), Err(BadLabel::Damaged));
    }
}
