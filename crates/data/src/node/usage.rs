//! How full a disk is, counted now and then on a thread, and what is reported of it.

use milpa_host::clock::now_ms;
use milpa_host::disk::{self, Space};
use milpa_raft::GroupStatus;
use milpa_types::DataError;
use milpa_wire::data::DataPartitionReport;

use crate::store::ExtentStore;

use super::disk::Disk;
use super::metrics::Gauges;
use super::partition::Partition;
use super::shared::DiskReport;

/// Between two counts of allocated bytes, which cost a stat(2) for each extent.
const COUNT_MS: u64 = 2_000;
/// Between two looks at the file system's free space, which cost one statfs(2): a fast disk takes
/// less than the reserve in that time.
const SPACE_MS: u64 = 100;
/// Between two flushes of what nobody asked to flush: what a power cut may take (with `durability =
/// memory` also of what was asked for), and what must be read again when the node starts. As long
/// as the client's buffer keeps bytes that nobody flushes.
const FLUSH_MS: u64 = 5_000;
/// Between two reports to the heartbeat.
const REPORT_MS: u64 = 100;

/// What is known of a disk's space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// The file system as last asked.
    pub space: Option<Space>,
    /// Bytes that extents occupy.
    pub allocated_bytes: u64,
    /// Identifies the file system.
    pub device: u64,
    /// When it was last asked.
    pub space_ms: u64,
    /// It is being asked.
    pub is_asking: bool,
    /// Whether the disk takes no more bytes.
    pub is_full: bool,
    /// Whether it takes no overwrites either: what is left is for the log to go on.
    pub is_exhausted: bool,
    /// When the extents were last counted.
    pub counted_ms: u64,
    /// When the heartbeat's report was last renewed.
    pub reported_ms: u64,
    /// A count is under way.
    pub is_counting: bool,
    /// When unflushed extents were last flushed.
    pub flushed_ms: u64,
    /// That is under way.
    pub is_flushing: bool,
}

impl Disk {
    /// Counts and reports when it is time.
    pub fn tick_usage(&mut self, now: u64) {
        let due =
            self.usage.counted_ms == 0 || now.saturating_sub(self.usage.counted_ms) > COUNT_MS;
        if due && !self.usage.is_counting {
            self.count();
        }
        if now.saturating_sub(self.usage.space_ms) >= SPACE_MS && !self.usage.is_asking {
            self.ask_space();
        }
        if now.saturating_sub(self.usage.flushed_ms) > FLUSH_MS && !self.usage.is_flushing {
            self.flush_in_background();
        }
        if now.saturating_sub(self.usage.reported_ms) >= REPORT_MS {
            self.usage.reported_ms = now;
            self.publish_report();
        }
    }

    fn count(&mut self) {
        self.usage.is_counting = true;
        let stores: Vec<_> =
            self.partitions.values().map(|p| (p.id, std::sync::Arc::clone(&p.store))).collect();
        self.workers.slow(
            move || {
                let count =
                    |(id, store): &(_, std::sync::Arc<ExtentStore>)| (*id, store.allocated_bytes());
                stores.iter().map(count).collect::<Vec<_>>()
            },
            |disk, counts| {
                disk.usage.is_counting = false;
                disk.usage.counted_ms = now_ms().max(1);
                disk.usage.allocated_bytes = counts.iter().map(|(_, bytes)| bytes).sum();
                for (id, bytes) in counts {
                    if let Some(partition) = disk.partitions.get_mut(&id) {
                        partition.allocated_bytes = bytes;
                        if !partition.is_fetching() {
                            partition.recent.forget_all();
                        }
                    }
                }
                disk.refuse_when_full();
            },
        );
    }

    fn ask_space(&mut self) {
        self.usage.is_asking = true;
        let directory = self.directory.clone();
        self.workers.slow(
            move || disk::space(&directory).ok(),
            |disk, space| {
                disk.usage.is_asking = false;
                disk.usage.space_ms = now_ms();
                disk.usage.space = space.or(disk.usage.space);
                disk.refuse_when_full();
            },
        );
    }

    fn flush_in_background(&mut self) {
        if self.is_fenced() {
            return;
        }
        self.usage.is_flushing = true;
        let stores: Vec<_> =
            self.partitions.values().map(|p| std::sync::Arc::clone(&p.store)).collect();
        self.workers.slow(
            move || {
                for store in stores {
                    if let Err(error) = store.flush_all() {
                        tracing::debug!(partition = %store.partition(), %error, "not flushed");
                    }
                }
            },
            |disk, ()| {
                disk.usage.is_flushing = false;
                disk.usage.flushed_ms = now_ms();
            },
        );
    }

    /// Appends are refused when the reserve or the limit is touched; overwrites of what is there when
    /// most of the reserve is gone, as somebody else fills the disk: they go through the log, which
    /// then might not find room for its next segment. Frees always go on.
    fn refuse_when_full(&mut self) {
        let Some(config) = self.shared.config.disks.get(self.index) else { return };
        let free = self.usage.space.map_or(u64::MAX, |space| space.free);
        let limit = config.capacity_bytes;
        let over = limit != 0 && self.usage.allocated_bytes >= limit;
        self.usage.is_full = over || free < config.reserve_bytes;
        self.usage.is_exhausted = free < config.reserve_bytes / 4;
        let refusal = if self.is_fenced() {
            Some(DataError::DiskFailed)
        } else if self.usage.is_full {
            Some(DataError::NoSpace)
        } else {
            None
        };
        for partition in self.partitions.values_mut().filter(|p| p.broken.is_none()) {
            partition.primary.refuse(refusal.clone());
        }
    }

    /// Something that the managers may be waiting for has changed: the next tick reports it.
    pub fn report_soon(&mut self) {
        self.usage.reported_ms = 0;
    }

    pub fn publish_report(&mut self) {
        let in_service = self.partitions.values().filter(|p| p.broken.is_none());
        let partitions: Vec<_> = in_service.map(|partition| self.report(partition)).collect();
        let damaged = self.out_of_service();
        let gauges = Gauges {
            led: self.partitions.values().filter(|p| p.leads()).count(),
            relaxed: self.partitions.values().filter(|p| p.state.relaxed).count(),
            queue_depth: self.workers.depth(),
            unaligned: partitions.iter().map(|report| report.unaligned).sum(),
            fenced: usize::from(self.is_fenced()),
            damaged: damaged.len(),
        };
        let disk = Some(self.describe());
        let mut disks = self.shared.disks.borrow_mut();
        if let Some(handle) = disks.get_mut(self.index) {
            let (decisive, known) = (DataPartitionReport::decisive, &handle.report.partitions);
            if !partitions.iter().map(decisive).eq(known.iter().map(decisive)) {
                self.shared.news.notify_one();
            }
            handle.report = DiskReport { partitions, damaged, disk, gauges };
        }
        let failed = Gauges { fenced: self.shared.failed.len(), ..Gauges::default() };
        disks.iter().fold(failed, |all, disk| all.with(disk.report.gauges)).show();
    }

    fn report(&self, partition: &Partition) -> DataPartitionReport {
        let (alignment, extents) = (&partition.alignment, partition.store.extent_count());
        let known = alignment.unaligned + alignment.broken.len() as u64;
        let applying = partition.applying.borrow();
        let status = self.driver.multi.status(partition.id);
        let is_asked = partition.leads() && !partition.configuration.learners.is_empty();
        DataPartitionReport {
            partition: partition.id,
            disk: self.id,
            configuration: partition.configuration.clone(),
            leader: partition.leader,
            term: partition.term,
            allocated_bytes: partition.allocated_bytes,
            log_end: status.as_ref().map(GroupStatus::log_end),
            applied: applying.applied(),
            overwritten: applying.overwritten(),
            lacks_overwritten: partition.state.lacks_overwritten,
            is_given_rest: partition.state.is_given_rest,
            lost_blocks: partition.lost.told() as u64,
            extents,
            // Before the members have been compared, nothing is known of any extent.
            unaligned: if alignment.is_unknown { extents.max(1) } else { known },
            current: status.filter(|_| is_asked).map(|it| it.current()).unwrap_or_default(),
        }
    }

    /// The disk as heartbeats carry it.
    pub fn describe(&self) -> milpa_types::Disk {
        let limit = self.shared.config.disks.get(self.index).map_or(0, |d| d.capacity_bytes);
        let reserve = self.shared.config.disks.get(self.index).map_or(0, |d| d.reserve_bytes);
        let space = self.usage.space.unwrap_or_default();
        let used_bytes = self.usage.allocated_bytes;
        let free_on_disk = space.free.saturating_sub(reserve);
        let whole = used_bytes.saturating_add(free_on_disk);
        let capacity_bytes = if limit == 0 { whole } else { limit.min(whole) };
        milpa_types::Disk {
            id: self.id,
            path: self.directory.display().to_string(),
            capacity_bytes,
            free_bytes: capacity_bytes.saturating_sub(used_bytes),
            used_bytes,
            device: self.usage.device,
            fenced: self.is_fenced().then(|| "a write or flush failed".to_owned()),
        }
    }
}
