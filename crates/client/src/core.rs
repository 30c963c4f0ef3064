//! What every part of the client shares: the network, the volume's view, health, time and chance.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use milpa_host::{clock, entropy};
use milpa_types::{NodeId, SessionId, Timestamp};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::call::Call;
use crate::config::ClientConfig;
use crate::error::FsError;
use crate::stats::Stats;
use crate::transport::Transport;
use crate::view::Views;

/// A node that did not answer is asked last for this long.
const SUSPICION: Duration = Duration::from_secs(2);
/// How fast a node was counts for this long: who was slow and is avoided gets another try then.
const LATENCY_KEPT: Duration = Duration::from_secs(5);
/// First and longest pause between tries.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Shared by all parts of one client.
pub(crate) struct Core {
    pub config: ClientConfig,
    pub transport: Arc<dyn Transport>,
    pub views: Views,
    pub health: Health,
    pub chance: Chance,
    pub stats: &'static Stats,
    pub runtime: tokio::runtime::Handle,
}

/// Locks, whatever a panicking thread left behind: every critical section here leaves its data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The client's wall clock, for the times of inodes. Nothing is ordered by it.
pub(crate) fn now() -> Timestamp {
    let since = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

/// Randomness for session ids, jitter and choices.
pub(crate) struct Chance {
    state: AtomicU64,
}

impl Chance {
    pub(crate) fn new() -> Chance {
        let seed = entropy::u64().unwrap_or(0x9E37_79B9_7F4A_7C15);
        Chance { state: AtomicU64::new(seed) }
    }

    /// SplitMix64: good enough to spread load, and lock-free.
    pub(crate) fn next(&self) -> u64 {
        let mut z = self.state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when there is none.
    pub(crate) fn below(&self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// A session id, which must not be guessable nor met twice: from the kernel.
    pub(crate) fn session(&self) -> SessionId {
        let guessable = || u128::from(self.next()) << 64 | u128::from(self.next());
        SessionId(entropy::u128().unwrap_or_else(|_| guessable()))
    }
}

/// Which nodes failed to answer of late, and how fast the others are.
#[derive(Default)]
pub(crate) struct Health {
    nodes: Mutex<BTreeMap<NodeId, NodeHealth>>,
}

#[derive(Clone, Copy, Default)]
struct NodeHealth {
    /// Since when it does not answer, and where.
    suspect: Option<(Instant, SocketAddr)>,
    /// When it answered through a manager, as there is no direct way.
    around: Option<Instant>,
    reads: Latency,
    /// The quickest append of late in which the node took part, and when that was. An append is as slow
    /// as the slowest member: one that was quick clears them all, and who is slow is never in one.
    quickest_append: Option<(Duration, Instant)>,
}

/// Smoothed latency and its mean deviation in microseconds, as TCP does (RFC 6298).
#[derive(Clone, Copy, Default)]
struct Latency {
    smoothed_us: u64,
    deviation_us: u64,
    measured: Option<Instant>,
}

impl Latency {
    fn measure(&mut self, took: Duration) {
        let took = took.as_micros() as u64;
        let difference = self.smoothed_us.abs_diff(took);
        self.deviation_us = (self.deviation_us * 3 + difference) / 4;
        self.smoothed_us = (self.smoothed_us * 7 + took) / 8;
        self.measured = Some(Instant::now());
    }

    /// 0 when nothing was measured for a while.
    fn usual(&self) -> Duration {
        let is_fresh = self.measured.is_some_and(|at| at.elapsed() < LATENCY_KEPT);
        Duration::from_micros(if is_fresh { self.smoothed_us } else { 0 })
    }
}

impl Health {
    /// The node did not answer. Says so once for each spell.
    pub(crate) fn suspect(
        &self,
        node: NodeId,
        address: SocketAddr,
        reason: &dyn std::fmt::Display,
    ) {
        let mut nodes = lock(&self.nodes);
        let health = nodes.entry(node).or_default();
        if health.suspect.is_none() {
            warn!(%node, %address, %reason, "a node did not answer; trying others");
        }
        health.suspect = Some((Instant::now(), address));
    }

    /// The node answered.
    pub(crate) fn answered(&self, node: NodeId) {
        let mut nodes = lock(&self.nodes);
        if let Some(health) = nodes.get_mut(&node)
            && health.suspect.take().is_some()
        {
            info!(%node, "the node answers again");
        }
    }

    /// The node answered, through a manager: what others can do they are asked for.
    pub(crate) fn reached_around(&self, node: NodeId) {
        lock(&self.nodes).entry(node).or_default().around = Some(Instant::now());
    }

    pub(crate) fn is_suspect(&self, node: NodeId) -> bool {
        let nodes = lock(&self.nodes);
        let Some(health) = nodes.get(&node) else { return false };
        let silent = health.suspect.map(|(since, _)| since);
        let of_late = |since: Instant| since.elapsed() < SUSPICION;
        silent.is_some_and(of_late) || health.around.is_some_and(of_late)
    }

    /// Those that were asked since then and have not answered, for a person: empty if all have.
    pub(crate) fn silent_since(&self, since: Instant) -> String {
        let nodes = lock(&self.nodes);
        let suspects = nodes.iter().filter_map(|(node, health)| Some((node, health.suspect?)));
        let silent = suspects.filter(|(_, (asked, _))| *asked >= since);
        let names: Vec<_> = silent.map(|(node, (_, at))| format!("node {node} at {at}")).collect();
        names.join(", ")
    }

    /// A read took this long.
    pub(crate) fn read_took(&self, node: NodeId, took: Duration) {
        lock(&self.nodes).entry(node).or_default().reads.measure(took);
    }

    /// How long a read from the node usually takes.
    pub(crate) fn read_latency(&self, node: NodeId) -> Duration {
        lock(&self.nodes).get(&node).map_or(Duration::ZERO, |health| health.reads.usual())
    }

    /// An append to these members took this long, and succeeded: a refusal may be quick anywhere.
    pub(crate) fn append_took(&self, members: &[NodeId], took: Duration) {
        let (now, mut nodes) = (Instant::now(), lock(&self.nodes));
        for member in members {
            let quickest = &mut nodes.entry(*member).or_default().quickest_append;
            let is_beaten = |(known, at): (Duration, Instant)| {
                took <= known || now.saturating_duration_since(at) >= LATENCY_KEPT
            };
            if quickest.is_none_or(is_beaten) {
                *quickest = Some((took, now));
            }
        }
    }

    /// How long an append to these members is likely to take; 0 if that is not known.
    pub(crate) fn append_latency(&self, members: &[NodeId]) -> Duration {
        let nodes = lock(&self.nodes);
        let quickest = members.iter().filter_map(|member| nodes.get(member)?.quickest_append);
        let fresh = quickest.filter(|(_, at)| at.elapsed() < LATENCY_KEPT);
        fresh.map(|(took, _)| took).max().unwrap_or_default()
    }

    /// A read from the node that takes longer than this is slow: about its 95th percentile.
    pub(crate) fn read_is_slow_after(&self, node: NodeId) -> Duration {
        let of = |health: &NodeHealth| health.reads.smoothed_us + 4 * health.reads.deviation_us;
        Duration::from_micros(lock(&self.nodes).get(&node).map_or(0, of))
    }
}

/// The tries of one operation: until when, how long to pause, and what went wrong last.
pub(crate) struct Retry<'a> {
    core: &'a Core,
    operation: &'static str,
    /// Whose deadline counts.
    call: Call,
    started: Instant,
    limit: Option<Duration>,
    pause: Duration,
    last: String,
}

impl<'a> Retry<'a> {
    /// Begins now, with what is left of the call's time.
    pub(crate) fn new(core: &'a Core, operation: &'static str) -> Retry<'a> {
        let limit = core.config.io_deadline;
        let (call, started) = (Call::current(), Instant::now());
        Retry { core, operation, call, started, limit, pause: PAUSE_MIN, last: String::new() }
    }

    /// Something was achieved: the deadline counts from here.
    pub(crate) fn progressed(&mut self) {
        self.call.progressed();
        self.started = Instant::now();
        self.pause = PAUSE_MIN;
    }

    /// What went wrong, for the log.
    pub(crate) fn note(&mut self, what: impl std::fmt::Display) {
        self.last = what.to_string();
        self.core.stats.retry(self.operation);
        tracing::debug!(operation = self.operation, last = %self.last, "trying again");
    }

    /// What it waits for, if that is no node: for the log.
    pub(crate) fn waits_for(&mut self, what: &str) {
        what.clone_into(&mut self.last);
    }

    /// Cuts the wait of one try so that it does not outlast the deadline by more than 10 ms.
    pub(crate) fn cap(&self, wait: Duration) -> Duration {
        let left = self.limit.map(|limit| limit.saturating_sub(self.waited()));
        left.map_or(wait, |left| wait.min(left.max(Duration::from_millis(10))))
    }

    /// How long this operation has been tried.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// How long the call has waited for anything.
    fn waited(&self) -> Duration {
        self.call.since().elapsed()
    }

    /// Waits before the next try: longer each time, never in step with other clients.
    ///
    /// # Errors
    ///
    /// [`FsError::TimedOut`] when there is no time for another.
    pub(crate) async fn pause(&mut self) -> Result<(), FsError> {
        self.check(self.pause)?;
        let jitter = self.core.chance.next() % 1024;
        tokio::time::sleep(self.pause.mul_f64(0.5 + jitter as f64 / 1024.0)).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }

    /// Fails if the call's time is over before another `wait`.
    pub(crate) fn check(&self, wait: Duration) -> Result<(), FsError> {
        match self.limit {
            Some(limit) if self.waited() + wait >= limit => Err(self.give_up()),
            _ => Ok(()),
        }
    }

    /// The error of an operation whose time is over. It may have waited for another one, which knows more: so
    /// all who do not answer are named.
    fn give_up(&self) -> FsError {
        let (operation, waited, mut last) = (self.operation, self.waited(), self.last.clone());
        let silent = self.core.health.silent_since(self.call.since());
        warn!(operation, waited_ms = waited.as_millis() as u64, %last, %silent, "gave up");
        if !silent.is_empty() {
            last = format!("{last} (no answer from {silent})").trim_start().to_owned();
        }
        FsError::TimedOut { operation, waited, last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_asked_and_has_not_answered_is_named() {
        let (health, before) = (Health::default(), Instant::now());
        let at = SocketAddr::from(([127, 0, 0, 1], 7000));
        health.suspect(NodeId(105), at, &"it is tired");
        health.suspect(NodeId(106), at, &"it is tired");
        health.answered(NodeId(106));
        assert_eq!(health.silent_since(before), "node 105 at 127.0.0.1:7000");
        assert_eq!(health.silent_since(Instant::now() + Duration::from_secs(1)), "");
    }
}
