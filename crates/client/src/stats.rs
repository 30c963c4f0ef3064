//! Counters and latencies of a client, in the process's metrics registry.

use std::sync::OnceLock;
use std::time::Duration;

use milpa_host::telemetry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CallLabels {
    operation: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OperationLabels {
    operation: &'static str,
}

/// The metrics of all clients of this process together.
pub(crate) struct Stats {
    calls: Family<CallLabels, Histogram, fn() -> Histogram>,
    retries: Family<OperationLabels, Counter>,
    /// Bytes that programs read.
    pub read_bytes: Counter,
    /// Bytes that programs wrote.
    pub written_bytes: Counter,
    /// Reads sent to a second replica because the first was slow.
    pub hedged_reads: Counter,
    /// Blocks that arrived with a checksum that does not match.
    pub corrupt_reads: Counter,
    /// Bytes that wait in the write buffer.
    pub buffer_bytes: Gauge,
    /// Files with a state in this client.
    pub open_files: Gauge,
}

impl Stats {
    /// The one instance of the process: a metric is registered once.
    pub(crate) fn shared() -> &'static Stats {
        static SHARED: OnceLock<Stats> = OnceLock::new();
        SHARED.get_or_init(|| {
            let retries = Family::<OperationLabels, Counter>::default();
            telemetry::registry().register(
                "milpa_client_retries",
                "Tries after the first, by operation.",
                retries.clone(),
            );
            Stats {
                calls: telemetry::histograms(
                    "milpa_client_call_duration_seconds",
                    "One operation of the client, retries included.",
                ),
                retries,
                read_bytes: telemetry::counter("milpa_client_read_bytes", "Bytes read."),
                written_bytes: telemetry::counter("milpa_client_written_bytes", "Bytes written."),
                hedged_reads: telemetry::counter(
                    "milpa_client_hedged_reads",
                    "Reads sent to a second replica because the first was slow.",
                ),
                corrupt_reads: telemetry::counter(
                    "milpa_client_corrupt_reads",
                    "Answers whose bytes did not match their checksums.",
                ),
                buffer_bytes: telemetry::gauge(
                    "milpa_client_buffer_bytes",
                    "Bytes in the write buffer.",
                ),
                open_files: telemetry::gauge("milpa_client_open_files", "Files open."),
            }
        })
    }

    pub(crate) fn called(&self, operation: &'static str, is_ok: bool, took: Duration) {
        let result = if is_ok { "ok" } else { "error" };
        let labels = CallLabels { operation, result };
        self.calls.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn retry(&self, operation: &'static str) {
        self.retries.get_or_create(&OperationLabels { operation }).inc();
    }
}
