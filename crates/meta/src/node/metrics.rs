//! What the node tells Prometheus.
//!
//! One set for the process: labels are closed sets of words, never ids or paths.

use std::sync::OnceLock;
use std::time::Duration;

use milpa_host::telemetry;
use milpa_raft::shell::LogWriterStats;
use milpa_wire::meta::{MetaRead, MetaReply, MetaRequest, MetaWrite, Step};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// A kind of request, as a label.
pub(crate) type Operation = &'static str;

/// The word for a request in metrics.
pub(crate) fn operation_of(request: &MetaRequest) -> Operation {
    match request {
        MetaRequest::Read { read, .. } => operation_of_read(read),
        MetaRequest::Write { write, .. } => operation_of_write(write),
        MetaRequest::Batch(_) => "batch",
        MetaRequest::KeepAlive { .. } => "keep_alive",
        MetaRequest::Participate { step, .. } => operation_of_step(step),
        MetaRequest::OfferExtents { .. } => "offer_extents",
        MetaRequest::CreatePartition(_) => "create_partition",
        MetaRequest::DeletePartition { .. } => "delete_partition",
        MetaRequest::Split { .. } => "split",
        MetaRequest::FetchSnapshot { .. } => "fetch_snapshot",
        MetaRequest::Report => "report",
        MetaRequest::SetVolumeOptions { .. } => "set_volume_options",
        MetaRequest::Configure { .. } => "configure",
        MetaRequest::TransferLeader { .. } => "transfer_leader",
        MetaRequest::StateHash { .. } => "state_hash",
        MetaRequest::Check { .. } => "check",
        MetaRequest::Repair { .. } => "repair",
        MetaRequest::RefuseReplica { .. } => "refuse_replica",
    }
}

fn operation_of_read(read: &MetaRead) -> Operation {
    match read {
        MetaRead::Lookup { .. } => "lookup",
        MetaRead::GetAttributes { .. } => "get_attributes",
        MetaRead::GetAttributesBatch { .. } => "get_attributes_batch",
        MetaRead::ReadLink { .. } => "read_link",
        MetaRead::ReadDirectory { .. } => "read_directory",
        MetaRead::GetLayout { .. } => "get_layout",
        MetaRead::LookupLayout { .. } => "lookup_layout",
        MetaRead::Statistics => "statistics",
    }
}

fn operation_of_write(write: &MetaWrite) -> Operation {
    match write {
        MetaWrite::OpenSession => "open_session",
        MetaWrite::CloseSession => "close_session",
        MetaWrite::Create { .. } => "create",
        MetaWrite::Link { .. } => "link",
        MetaWrite::Unlink { .. } => "unlink",
        MetaWrite::RemoveDirectory { .. } => "remove_directory",
        MetaWrite::Rename { .. } => "rename",
        MetaWrite::SetAttributes { .. } => "set_attributes",
        MetaWrite::Publish(_) => "publish",
        MetaWrite::MarkFlushed { .. } => "mark_flushed",
        MetaWrite::Release { .. } => "release",
        MetaWrite::GrantInodes { .. } => "grant_inodes",
        MetaWrite::CutLost { .. }
        | MetaWrite::CutLostExtents { .. }
        | MetaWrite::CutLostRanges { .. } => "cut_lost",
    }
}

fn operation_of_step(step: &Step) -> Operation {
    match step {
        Step::PrepareInode { .. } => "prepare_inode",
        Step::PrepareLink { .. } => "prepare_link",
        Step::PrepareRemoveDirectory { .. } => "prepare_remove_directory",
        Step::PrepareTake { .. } => "prepare_take",
        Step::Finish => "finish",
        Step::Abort => "abort",
        Step::DropLink { .. } => "drop_link",
        Step::Inquire => "inquire",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: &'static str,
    outcome: &'static str,
}

/// All metrics of this role.
pub(crate) struct Metrics {
    operations: Family<OperationLabels, Histogram, fn() -> Histogram>,
    /// Replicas held.
    pub partitions: Gauge,
    /// Of these, how many this node leads.
    pub partitions_led: Gauge,
    /// Of these, how many cannot take part because their log or state is damaged.
    pub partitions_damaged: Gauge,
    /// Inodes in all replicas.
    pub inodes: Gauge,
    /// Dentries in all replicas.
    pub dentries: Gauge,
    /// Sessions of the partitions led here.
    pub sessions: Gauge,
    /// Proposals that wait for a majority.
    pub proposals: Gauge,
    /// Reads that wait for a round of heartbeats.
    pub reads_waiting: Gauge,
    /// Unfinished cross-partition operations driven here.
    pub operations_driven: Gauge,
    /// Ranges that wait to be freed on data nodes.
    pub freed_waiting: Gauge,
    /// Events in the inbox when a turn began.
    pub inbox: Gauge,
    /// One turn of the loop.
    pub turn: Histogram,
    log_flush: Histogram,
    log_bytes: Gauge,
    log_segments: Gauge,
    /// Changes of term.
    pub term_changes: Counter,
    /// Log entries applied.
    pub applied: Counter,
    /// Snapshots written.
    pub snapshots_written: Counter,
    /// Snapshots installed from a peer.
    pub snapshots_installed: Counter,
    /// Snapshots that could not be written, read or installed, or were found damaged.
    pub snapshots_failed: Counter,
    /// Partitions whose snapshots were read again.
    pub snapshots_scrubbed: Counter,
    /// Sessions whose lease ran out.
    pub sessions_expired: Counter,
}

impl Metrics {
    /// The process's set.
    pub(crate) fn get() -> &'static Metrics {
        static METRICS: OnceLock<Metrics> = OnceLock::new();
        METRICS.get_or_init(Metrics::register)
    }

    fn register() -> Metrics {
        use telemetry::{counter, gauge, histogram};
        Metrics {
            operations: telemetry::histograms(
                "milpa_meta_operation_seconds",
                "Time from a request's arrival to its answer.",
            ),
            partitions: gauge("milpa_meta_partitions", "Replicas held."),
            partitions_led: gauge("milpa_meta_partitions_led", "Partitions led."),
            partitions_damaged: gauge(
                "milpa_meta_partitions_damaged",
                "Replicas that cannot take part: log or state damaged.",
            ),
            inodes: gauge("milpa_meta_inodes", "Inodes in all replicas."),
            dentries: gauge("milpa_meta_dentries", "Dentries in all replicas."),
            sessions: gauge("milpa_meta_sessions", "Sessions of the partitions led."),
            proposals: gauge("milpa_meta_proposals", "Proposals waiting for a majority."),
            reads_waiting: gauge("milpa_meta_reads_waiting", "Reads waiting for heartbeats."),
            operations_driven: gauge(
                "milpa_meta_cross_partition_operations",
                "Unfinished cross-partition operations driven here.",
            ),
            freed_waiting: gauge(
                "milpa_meta_freed_ranges_waiting",
                "Ranges waiting to be freed on data nodes.",
            ),
            inbox: gauge("milpa_meta_inbox_events", "Events drained by the last turn."),
            log_flush: histogram(
                "milpa_meta_log_flush_seconds",
                "Time of one write and flush of the Raft log.",
            ),
            log_bytes: gauge(
                "milpa_meta_log_written_bytes",
                "Bytes written to the Raft log since the start.",
            ),
            log_segments: gauge("milpa_meta_log_segments", "Segment files of the Raft log."),
            turn: histogram("milpa_meta_turn_seconds", "One turn of the node's loop."),
            term_changes: counter("milpa_meta_raft_term_changes", "Changes of term."),
            applied: counter("milpa_meta_entries_applied", "Log entries applied."),
            snapshots_written: counter("milpa_meta_snapshots_written", "Snapshots written."),
            snapshots_installed: counter(
                "milpa_meta_snapshots_installed",
                "Snapshots installed from a peer.",
            ),
            snapshots_failed: counter(
                "milpa_meta_snapshots_failed",
                "Snapshots that could not be written, read or installed, or were found damaged.",
            ),
            snapshots_scrubbed: counter(
                "milpa_meta_snapshots_scrubbed",
                "Partitions whose snapshots were read again against their checksums.",
            ),
            sessions_expired: counter(
                "milpa_meta_sessions_expired",
                "Sessions whose lease ran out.",
            ),
        }
    }

    /// Counts one answer.
    pub(crate) fn answered(&self, operation: Operation, took: Duration, reply: &MetaReply) {
        let outcome = match reply {
            Ok(_) => "ok",
            Err(error) => match error.next() {
                milpa_types::Next::GiveUp => "refused",
                _ => "retry",
            },
        };
        let labels = OperationLabels { operation, outcome };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

/// Carries the log writer's own counts over into the metrics.
#[derive(Debug, Default)]
pub(crate) struct LogMeter {
    seen: Vec<u64>,
}

impl LogMeter {
    /// Adds what happened since the last time. The writer counts flushes by powers of two of
    /// microseconds; each is taken for the middle of its bucket.
    pub(crate) fn measure(&mut self, stats: &LogWriterStats) {
        let metrics = Metrics::get();
        self.seen.resize(stats.append_us_buckets.len(), 0);
        for (power, (seen, count)) in self.seen.iter_mut().zip(&stats.append_us_buckets).enumerate()
        {
            let middle_seconds = 0.75e-6 * 2_f64.powi(power as i32);
            for _ in *seen..*count {
                metrics.log_flush.observe(middle_seconds);
            }
            *seen = *count;
        }
        metrics.log_bytes.set(stats.wal.bytes as i64);
        metrics.log_segments.set(stats.wal.segments as i64);
    }
}
