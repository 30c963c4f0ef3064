//! What a data node counts. One set for each process.

use std::sync::OnceLock;

use milpa_host::telemetry::{counter, gauge, histogram};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// The metrics of a data node.
pub(crate) struct Metrics {
    /// Append: received to acknowledged.
    pub append_seconds: Histogram,
    /// Bytes of acknowledged appends.
    pub append_bytes: Counter,
    /// Appends refused or failed.
    pub append_errors: Counter,
    /// Read: received to answered.
    pub read_seconds: Histogram,
    /// Bytes read.
    pub read_bytes: Counter,
    /// Reads refused or failed.
    pub read_errors: Counter,
    /// Overwrite: received to answered.
    pub overwrite_seconds: Histogram,
    /// Bytes of acknowledged overwrites.
    pub overwrite_bytes: Counter,
    /// One flush of some extents.
    pub flush_seconds: Histogram,
    /// Blocks found damaged by a read.
    pub corrupt_blocks: Counter,
    /// Blocks repaired from another replica.
    pub repaired_blocks: Counter,
    /// Bytes fetched from other replicas.
    pub fetched_bytes: Counter,
    /// Extents that broke.
    pub broken_extents: Counter,
    /// Replicas that take no part: log, state or extents are damaged.
    pub damaged: Gauge,
    /// Acknowledged bytes that no replica had after a power cut.
    pub lost_bytes: Counter,
    /// Extents that wait for alignment, on partitions whose primary is here.
    pub unaligned: Gauge,
    /// Jobs waiting or running on disk threads.
    pub queue_depth: Gauge,
    /// Requests refused because a queue was full.
    pub busy: Counter,
    /// Raft groups led here.
    pub raft_led: Gauge,
    /// Raft roles that changed.
    pub raft_role_changes: Counter,
    /// Partitions that acknowledge from memory.
    pub relaxed: Gauge,
    /// Disks out of service.
    pub disks_fenced: Gauge,
    /// Bytes read again against their checksums.
    pub scrubbed_bytes: Counter,
    /// Passes over all bytes of a disk.
    pub scrub_passes: Counter,
}

/// What is true of one disk now, or of all disks of the node together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gauges {
    pub led: usize,
    pub relaxed: usize,
    pub queue_depth: usize,
    pub unaligned: u64,
    pub fenced: usize,
    pub damaged: usize,
}

impl Gauges {
    /// Both together.
    pub fn with(self, other: Gauges) -> Gauges {
        Gauges {
            led: self.led + other.led,
            relaxed: self.relaxed + other.relaxed,
            queue_depth: self.queue_depth + other.queue_depth,
            unaligned: self.unaligned.saturating_add(other.unaligned),
            fenced: self.fenced + other.fenced,
            damaged: self.damaged + other.damaged,
        }
    }

    pub fn show(self) {
        let metrics = Metrics::get();
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        metrics.raft_led.set(count(self.led));
        metrics.relaxed.set(count(self.relaxed));
        metrics.queue_depth.set(count(self.queue_depth));
        metrics.unaligned.set(i64::try_from(self.unaligned).unwrap_or(i64::MAX));
        metrics.disks_fenced.set(count(self.fenced));
        metrics.damaged.set(count(self.damaged));
    }
}

impl Metrics {
    /// The process's one set, registered at first use.
    pub fn get() -> &'static Metrics {
        static METRICS: OnceLock<Metrics> = OnceLock::new();
        METRICS.get_or_init(Metrics::register)
    }

    fn register() -> Metrics {
        Metrics {
            append_seconds: histogram("milpa_data_append_duration_seconds", "Append to answer"),
            append_bytes: counter("milpa_data_append_bytes", "Bytes appended"),
            append_errors: counter("milpa_data_append_errors", "Appends refused or failed"),
            read_seconds: histogram("milpa_data_read_duration_seconds", "Read to answer"),
            read_bytes: counter("milpa_data_read_bytes", "Bytes read"),
            read_errors: counter("milpa_data_read_errors", "Reads refused or failed"),
            overwrite_seconds: histogram(
                "milpa_data_overwrite_duration_seconds",
                "Overwrite to answer",
            ),
            overwrite_bytes: counter("milpa_data_overwrite_bytes", "Bytes overwritten"),
            flush_seconds: histogram("milpa_data_flush_duration_seconds", "One flush of extents"),
            corrupt_blocks: counter("milpa_data_blocks_corrupt", "Blocks found damaged"),
            repaired_blocks: counter("milpa_data_blocks_repaired", "Blocks repaired from a peer"),
            fetched_bytes: counter("milpa_data_fetched_bytes", "Bytes fetched from other replicas"),
            broken_extents: counter("milpa_data_extents_broken", "Extents ended by a failure"),
            damaged: gauge(
                "milpa_data_partitions_damaged",
                "Replicas that take no part: log, state or extents are damaged",
            ),
            lost_bytes: counter(
                "milpa_data_lost_bytes",
                "Bytes that no replica has: never flushed when power failed everywhere, or damaged on all",
            ),
            unaligned: gauge("milpa_data_extents_unaligned", "Extents that wait for alignment"),
            queue_depth: gauge("milpa_data_disk_queue_depth", "Jobs of the disk threads"),
            busy: counter("milpa_data_busy", "Requests refused because a queue was full"),
            raft_led: gauge("milpa_data_raft_groups_led", "Raft groups led here"),
            raft_role_changes: counter("milpa_data_raft_role_changes", "Raft roles that changed"),
            relaxed: gauge(
                "milpa_data_partitions_from_memory",
                "Replicas of volumes with durability = memory: a power cut may lose bytes",
            ),
            disks_fenced: gauge("milpa_data_disks_fenced", "Disks out of service"),
            scrubbed_bytes: counter("milpa_data_scrubbed_bytes", "Bytes verified by the scrub"),
            scrub_passes: counter("milpa_data_scrub_passes", "Disks scrubbed from end to end"),
        }
    }
}
