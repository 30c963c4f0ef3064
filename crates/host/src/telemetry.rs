//! Logs and metrics, the same for every role.
//!
//! Metric names follow `milpa_<crate>_<noun>_<unit>[_total]` with base units; labels are closed
//! sets, never ids or paths.

use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing_subscriber::EnvFilter;

use crate::{net, world};

/// Sends logs to standard error. `MILPA_LOG` chooses what (`info` by default, syntax of
/// `RUST_LOG`), `MILPA_LOG_FORMAT=json` how. The first call counts; tests may call it many times.
pub fn init_logs() {
    let filter = EnvFilter::try_from_env("MILPA_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A log that cannot be written (its disk is full, say) must not take the process along: the
    // subscriber's own complaint would go to standard error as well, and panic there.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .log_internal_errors(false);
    if std::env::var("MILPA_LOG_FORMAT").is_ok_and(|format| format == "json") {
        let _ = builder.json().try_init();
    } else {
        let _ = builder.with_ansi(false).try_init();
    }
}

/// An error and what it comes from, in one line of a log.
#[must_use]
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

/// The registry of this process. Register each metric once, when its owner is made.
pub fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: OnceLock<Mutex<Registry>> = OnceLock::new();
    let cell = REGISTRY.get_or_init(|| {
        let mut registry = Registry::default();
        registry.register("milpa_build", "The version of this process.", build_gauge());
        registry.register(
            "milpa_process_memory_bytes",
            "Resident memory of this process.",
            memory_gauge().clone(),
        );
        Mutex::new(registry)
    });
    cell.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: String,
}

fn build_gauge() -> Family<BuildLabels, Gauge> {
    let family = Family::<BuildLabels, Gauge>::default();
    family.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION").to_owned() }).set(1);
    family
}

fn memory_gauge() -> &'static Gauge {
    static GAUGE: OnceLock<Gauge> = OnceLock::new();
    GAUGE.get_or_init(Gauge::default)
}

/// Registers and returns a counter.
#[must_use]
pub fn counter(name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry().register(name, help, counter.clone());
    counter
}

/// Registers and returns a gauge.
#[must_use]
pub fn gauge(name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry().register(name, help, gauge.clone());
    gauge
}

/// A histogram of seconds: 14 buckets from 20 µs, each twice the last, to 164 ms, and four wider
/// ones to 10 s. Flushes, loopback calls and stalls all fall where buckets are fine.
#[must_use]
pub fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(20e-6, 2.0, 14).chain([0.5, 1.0, 3.0, 10.0]))
}

/// Registers and returns a latency histogram.
#[must_use]
pub fn histogram(name: &str, help: &str) -> Histogram {
    let histogram = latency_histogram();
    registry().register(name, help, histogram.clone());
    histogram
}

/// Registers and returns latency histograms by label set.
#[must_use]
pub fn histograms<L>(name: &str, help: &str) -> Family<L, Histogram, fn() -> Histogram>
where
    L: EncodeLabelSet + Clone + std::fmt::Debug + Eq + std::hash::Hash + Send + Sync + 'static,
{
    let family = Family::new_with_constructor(latency_histogram as fn() -> Histogram);
    registry().register(name, help, family.clone());
    family
}

/// Resident memory of this process in bytes; 0 if the kernel does not tell.
#[must_use]
#[allow(clippy::disallowed_methods)]
pub fn memory_bytes() -> u64 {
    if let Some(world) = world::current() {
        return world.memory().used;
    }
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// Gives memory that this process has freed back to the system. malloc(3) keeps what lies below
/// something that is still in use, which after the replay of a log is nearly all of it. Takes some
/// milliseconds, during which others wait for memory.
#[allow(unsafe_code)]
pub fn give_back_memory() {
    if world::current().is_none() {
        // SAFETY: takes no pointer, and may be called by any thread at any time (malloc_trim(3)).
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// Memory of the machine in bytes, if the kernel tells.
#[must_use]
#[allow(clippy::disallowed_methods)]
pub fn machine_memory_bytes() -> Option<u64> {
    if let Some(world) = world::current() {
        return Some(world.memory().total);
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib = line.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Routes that every role serves: `/metrics` (OpenMetrics text) and `/healthz`.
pub fn http_routes() -> Router {
    Router::new().route("/metrics", get(metrics)).route("/healthz", get(|| async { "ok\n" }))
}

async fn metrics() -> impl IntoResponse {
    memory_gauge().set(memory_bytes() as i64);
    let mut text = String::new();
    // Writing into a String cannot fail; an empty page would show if it did.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry());
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}

/// Listens for HTTP and serves `routes` in the background until the process ends. Gives the address
/// in use, as port 0 asks for any.
///
/// # Errors
///
/// When the address cannot be bound: in use, or not ours.
pub async fn serve_http(address: SocketAddr, routes: Router) -> io::Result<SocketAddr> {
    let listener = net::bind(address).await?;
    let bound = listener.local_addr()?;
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, routes).await {
            tracing::error!(%error, "the HTTP listener failed; metrics are gone");
        }
    });
    Ok(bound)
}
