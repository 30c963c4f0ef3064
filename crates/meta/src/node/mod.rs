//! The shell that runs the partitions of one node.
//!
//! One thread owns everything: the state machines, Raft, who waits for what. It drains what is
//! ready, lets Raft take its turns, and waits again; nothing in between blocks:
//!
//! ```text
//! connections ─┐                     ┌─▶ log writer (a thread) ──┐
//! own tasks ───┼─▶ inbox ─▶ loop ────┼─▶ frames to other nodes   │
//! threads ─────┘      ▲              └─▶ replies                 │
//!                     └────────── durable up to batch n ◀────────┘
//! ```
//!
//! A leader's appends leave in the same turn that hands the batch to the log writer, so a change
//! costs two flushes in parallel, its own and the faster follower's, and one round trip.
//!
//! Volumes with `durability = memory` are served as synced ones: the Raft log makes no difference
//! between groups, and group commit makes the flush cheap. That is stronger than asked for.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use milpa_host::clock::{Instant, now_ms};
use milpa_host::keys::Key;
use milpa_host::lives::Living;
use milpa_host::managers::{Managers, ManagersError};
use milpa_host::net::{self, Listener};
use milpa_host::node_directory::{DirectoryError, NodeDirectory};
use milpa_host::rpc::{Credential, Identity, Pool, serve};
use milpa_host::{entropy, jobs, telemetry};
use milpa_raft::{
    DriveError, FileStorage, LogWriter, MultiRaft, RaftConfig, RaftDriver, Recovered, Wal,
    WalError, WalOptions,
};
use milpa_types::{ClusterId, NodeId, Role};
use tokio::task::LocalSet;
use tracing::{info, warn};

use self::context::Context;
use self::inbox::{Front, Inbox};
use self::manager_link::SelfDescription;
use self::metrics::{LogMeter, Metrics};
use self::recovery::Loaded;
use self::shell::Shell;
use self::snapshot_store::SnapshotStore;
use self::upkeep::Upkeep;
use crate::config::MetaNodeConfig;

mod apply;
mod batch;
mod check;
mod context;
mod coordinate;
mod deletion;
#[cfg(test)]
mod failing_reads;
mod freeing;
mod hand_over;
mod inbox;
mod leases;
mod manager_link;
mod marks;
mod metrics;
mod partitions;
mod recovery;
mod replica;
mod requests;
mod responder;
mod scrubbing;
mod shell;
pub(crate) mod snapshot_file;
pub(crate) mod snapshot_store;
mod snapshots;
mod upkeep;

/// Shortest wait of the loop's clock; Raft's own grain is coarser.
const TICK: Duration = Duration::from_millis(20);
/// Between two looks at the log writer's counts.
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// Turns in a row before the loop looks at its inbox again.
const TURNS_MAX: usize = 8;
/// Share of the machine's memory that a node without a limit of its own may use.
const MEMORY_SHARE: (u64, u64) = (3, 4);

/// Why a meta node could not start, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The settings are out of bounds: every problem, one line each.
    #[error("bad settings: {}", problems.join("; "))]
    Config {
        /// The lines.
        problems: Vec<String>,
    },
    /// The node's directory cannot be used.
    #[error("cannot use the node's directory")]
    Directory(#[from] DirectoryError),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The managers refused the node, or none answered and the node has no id yet.
    #[error("cannot register with the managers")]
    Register(#[from] ManagersError),
    /// The Raft log cannot be opened or written.
    #[error("cannot use the Raft log")]
    Log(#[from] WalError),
    /// The Raft log failed while the node ran. What the disk holds is unknown: nothing more is
    /// acknowledged. Check the disk before starting again.
    #[error("the Raft log failed")]
    LogFailed(#[from] DriveError),
    /// Snapshots or definitions cannot be read at all.
    #[error("cannot read the partitions in {}", directory.display())]
    Partitions {
        /// Where.
        directory: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Something that this build gets wrong, or the system's refusal of a thread or of randomness.
    #[error("cannot start: {0}")]
    Start(String),
}

/// Where a node that has started can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The id that the manager gave.
    pub node: NodeId,
    /// Where it takes requests.
    pub address: SocketAddr,
    /// Where its metrics are.
    pub http_address: SocketAddr,
}

/// Runs a meta node until `stop` completes. Call it on a `current_thread` runtime; it makes its own
/// `LocalSet`.
///
/// # Errors
///
/// [`NodeError`] when the node cannot start, or cannot go on.
pub async fn run(
    config: MetaNodeConfig,
    cluster: ClusterId,
    secret: Key,
    stop: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    run_announced(config, cluster, secret, |_| {}, stop).await
}

/// As [`run`], and tells through `announce` where the node listens once it does: with port 0 in
/// the settings nobody knows it before.
///
/// # Errors
///
/// As [`run`].
pub async fn run_announced(
    config: MetaNodeConfig,
    cluster: ClusterId,
    secret: Key,
    announce: impl FnOnce(Started),
    stop: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    config.validate().map_err(|problems| NodeError::Config { problems })?;
    let running = Running::default();
    let node = start_and_loop(config, cluster, secret, announce, &running);
    let run_until_stopped = async {
        let mut node = std::pin::pin!(node);
        tokio::select! {
            biased;
            result = &mut node => return result.map(|never| match never {}),
            () = stop => {}
        }
        // Before it serves there is nothing to hand over.
        let Some(ctx) = running.borrow().clone() else { return Ok(()) };
        tokio::select! {
            biased;
            result = node => result.map(|never| match never {}),
            () = hand_over::hand_over_all(&ctx) => Ok(()),
        }
    };
    LocalSet::new().run_until(run_until_stopped).await
}

/// What tasks of a node share, once it serves.
type Running = RefCell<Option<Rc<Context>>>;

/// The loop never ends well.
enum Never {}

async fn start_and_loop(
    config: MetaNodeConfig,
    cluster: ClusterId,
    secret: Key,
    announce: impl FnOnce(Started),
    running: &Running,
) -> Result<Never, NodeError> {
    let mut directory = NodeDirectory::open(&config.directory, Role::Meta, cluster)?;
    let listener = listen(config.listen).await?;
    let address = listener.local_addr().map_err(listen_error(config.listen))?;
    let http_address = telemetry::serve_http(config.http_listen, telemetry::http_routes())
        .await
        .map_err(listen_error(config.http_listen))?;
    let identity = Arc::new(Identity::new(Some(cluster), Role::Meta, Credential::Cluster(secret)));
    let pool = Pool::new(Arc::clone(&identity));
    let managers = Managers::new(pool.clone(), config.managers.clone());
    let life = Rc::new(Cell::new(directory.begin_life()?));
    let incarnation = directory.incarnation();
    let me = SelfDescription { incarnation, life: Rc::clone(&life), address, http_address };

    // Read first, as it may take long: a node that is registered is one in service for whoever looks.
    let opened = open_disk(&config, me.incarnation).await;
    let opened = opened.map_err(|e| NodeError::Start(e.to_string()))??;
    let (node, registered) = introduce(&managers, &config, &me, directory.node()).await?;
    directory.set_node(node)?;
    if registered {
        directory.life_has_begun();
    }
    let (living, life_lasts) =
        (Living::new(directory, node, life), Duration::from_millis(config.life_ms));
    identity.set_node(node);

    let inbox = Rc::new(Inbox::default());
    let (store, memory_limit) = (opened.store.clone(), memory_limit(&config));
    let ctx = Context::new(config, node, pool, managers, Rc::clone(&inbox), store);
    let ctx = Rc::new(ctx);
    let mut shell = Shell::new(Rc::clone(&ctx), opened.seed);
    let driver = start_raft(node, opened, &mut shell)?;
    running.replace(Some(Rc::clone(&ctx)));
    let service = Rc::new(Front { inbox: Rc::clone(&inbox) });
    let started = Started { node, address, http_address };
    info!(%node, %address, "meta node serves");
    announce(started);
    // A task like those of the connections: what they bring in one turn of the runtime is dealt
    // with and answered in the same.
    let driving =
        tokio::task::spawn_local(async move { drive(driver, shell, &inbox, memory_limit).await });
    tokio::select! {
        biased;
        result = driving => result.map_err(|e| NodeError::Start(e.to_string()))?,
        result = serve(listener, identity, service) => {
            let source = result.err().unwrap_or_else(|| io::Error::other("closed"));
            Err(NodeError::Listen { address, source })
        }
        refusal = living.renew_for_ever(&ctx.managers, life_lasts) => Err(refusal.into()),
        refusal = manager_link::report_for_ever(Rc::clone(&ctx), me, registered) => {
            Err(refusal.into())
        }
    }
}

async fn listen(address: SocketAddr) -> Result<Listener, NodeError> {
    net::bind(address).await.map_err(listen_error(address))
}

fn listen_error(address: SocketAddr) -> impl Fn(io::Error) -> NodeError {
    move |source| NodeError::Listen { address, source }
}

/// Tells the managers that the node starts, before anybody hears of what its disk holds: a directory that is
/// an older copy has forgotten promises. A node that was known goes on without their word when none of them
/// answers for `managers_wait_ms`, and is not registered then; one without an id can do nothing.
async fn introduce(
    managers: &Managers,
    config: &MetaNodeConfig,
    me: &SelfDescription,
    known: Option<NodeId>,
) -> Result<(NodeId, bool), ManagersError> {
    let registering = async {
        loop {
            match manager_link::register(managers, config, me, known).await {
                Err(error @ ManagersError::Unreachable { .. }) => {
                    warn!(%error, "cannot register: trying again");
                }
                registered => return registered,
            }
        }
    };
    let Some(node) = known else { return Ok((registering.await?, true)) };
    let wait = Duration::from_millis(config.managers_wait_ms);
    info!(%node, ?wait, "asking the managers before it serves");
    if let Ok(registered) = tokio::time::timeout(wait, registering).await {
        return Ok((registered?, true));
    }
    warn!(%node, waited_ms = config.managers_wait_ms,
        "no manager says whether this node's directory is its newest; it serves all the same");
    Ok((node, false))
}

/// What the disk held.
struct Opened {
    wal: Wal,
    recovered: Recovered,
    store: SnapshotStore,
    loaded: Vec<Loaded>,
    seed: u64,
}

/// Opens log and snapshots on threads, both at once.
fn open_disk(
    config: &MetaNodeConfig,
    incarnation: u128,
) -> tokio::task::JoinHandle<Result<Opened, NodeError>> {
    let directory = config.directory.clone();
    jobs::run("open", move || {
        let seed = entropy::u64().map_err(|error| NodeError::Start(error.to_string()))?;
        let partitions = directory.join("partitions");
        let failed = |source| NodeError::Partitions { directory: partitions.clone(), source };
        let store = SnapshotStore::open(partitions.clone()).map_err(failed)?;
        let open_log = || {
            let storage = FileStorage::open(&directory.join("raft"))?;
            Wal::open(storage, WalOptions::new(incarnation.to_le_bytes(), seed))
        };
        let (loaded, log) = jobs::beside("snapshot-load", || recovery::load_all(&store), open_log)
            .map_err(|error| NodeError::Start(error.to_string()))?;
        let (wal, recovered) = log?;
        Ok(Opened { wal, recovered, store, loaded: loaded.map_err(failed)?, seed })
    })
}

/// The configured limit, or the node's share of the machine's memory.
fn memory_limit(config: &MetaNodeConfig) -> u64 {
    if config.memory_limit_bytes > 0 {
        return config.memory_limit_bytes;
    }
    let total = telemetry::machine_memory_bytes();
    total.map_or(u64::MAX, |bytes| bytes / MEMORY_SHARE.1 * MEMORY_SHARE.0)
}

fn start_raft(node: NodeId, opened: Opened, shell: &mut Shell) -> Result<RaftDriver, NodeError> {
    let Opened { wal, recovered, loaded, seed, .. } = opened;
    // Nobody reads from followers.
    let config = RaftConfig { announces_commits: false, ..RaftConfig::default() };
    let mut multi =
        MultiRaft::new(node, config, seed).map_err(|error| NodeError::Start(error.to_string()))?;
    shell.recover(&mut multi, loaded, recovered);
    // The first heartbeat says what is here: one that named nothing could be the last one heard for a while.
    shell.publish_report(&multi);
    Ok(RaftDriver::new(multi, LogWriter::spawn(wal)?))
}

/// The loop: everything ready goes in, Raft takes its turns, everything due goes out.
async fn drive(
    mut driver: RaftDriver,
    mut shell: Shell,
    inbox: &Inbox,
    memory_limit: u64,
) -> Result<Never, NodeError> {
    let metrics = Metrics::get();
    let mut upkeep = Upkeep::new(memory_limit, now_ms());
    let (mut meter, mut measured) = (LogMeter::default(), Instant::now());
    let mut ticks = tokio::time::interval(driver.multi.tick_interval().min(TICK));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            progress = driver.writer.progressed() => driver.on_log(progress, now_ms()),
            () = inbox.filled() => {}
            _ = ticks.tick() => {}
        }
        // Not only when the tick wakes us: under load it is always something else.
        upkeep.tick(&mut shell, &mut driver.multi, now_ms());
        let began = Instant::now();
        let events = inbox.drain();
        metrics.inbox.set(events.len() as i64);
        for event in events {
            shell.handle(&mut driver.multi, event);
        }
        for _ in 0..TURNS_MAX {
            driver.pump(now_ms(), &mut shell)?;
            // May propose again.
            shell.after_turns(&mut driver.multi);
            if !driver.multi.has_work() {
                break;
            }
        }
        metrics.turn.observe(began.elapsed().as_secs_f64());
        if measured.elapsed() >= MEASURE_EVERY {
            measured = Instant::now();
            meter.measure(&driver.writer.stats());
        }
    }
}
