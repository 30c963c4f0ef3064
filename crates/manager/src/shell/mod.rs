//! The process around the core: Raft, sockets, checkpoint, planners on a timer.
//!
//! One thread, one loop ([`run`]): take what has arrived, let Raft take its turn, perform what
//! came out, plan. Three kinds of work happen elsewhere and come back as events: the log's
//! flushes on the log writer's thread, checkpoints on a blocking thread, calls to nodes as local
//! tasks.
//!
//! # In the manager's directory
//!
//! `IDENTITY`, `LOCK`, `REJOINING` while it makes up for a lost one (milpa-host), `raft/` the log,
//! `state.redb` the state as of some log index; `raft.damaged.N`, `state.redb.damaged.N` what was set
//! aside (`damage`).

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_host::keys::Key;
use milpa_host::net::{self, Listener};
use milpa_host::node_directory::{DirectoryError, NodeDirectory};
use milpa_host::rpc::{self, Credential, Identity, Peer, Pool, Reply, Service};
use milpa_host::telemetry::with_sources;
use milpa_host::{disk, entropy};
use milpa_raft::{
    DriveError, FileStorage, GroupStart, LogWriter, MultiRaft, RaftConfig, RaftDriver,
    RecoverError, Recovered, RecoveredGroup, SnapshotDescriptor, Wal, WalError, WalOptions,
};
use milpa_types::{ClusterId, ManagerError, NodeId, Role, VolumeId};
use milpa_wire::manager::{ManagerReply, ManagerRequest};
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tracing::{info, warn};

mod access;
pub(crate) mod checkpoint;
mod damage;
mod event;
mod founding;
pub(crate) mod http;
mod leader;
mod metrics;
mod replica;
mod requests;
mod snapshot;
mod steps;

pub use checkpoint::CheckpointError;

use crate::config::{ConfigError, ManagerConfig};
use crate::core::State;
use checkpoint::CheckpointStore;
use event::{Event, INBOX_MAX, Inbox, Responder};
use founding::{Beginning, Circle, Notebook};
use metrics::metrics;
use replica::{Checkpoints, GROUP, Known, Replica, Start};

/// Events taken before Raft gets its turn: batches form, and no burst starves the ticks.
const EVENTS_PER_TURN: usize = 512;
/// Turns of Raft in a row without looking at the outside.
const TURNS_PER_ROUND: usize = 8;
const LOG_DIRECTORY: &str = "raft";
/// The managers' log is small: a new directory should not be filled with zeros for long.
const SEGMENT_BYTES: u64 = 16 << 20;
const FIRST_SEGMENT_BYTES: u64 = 1 << 20;

/// Why a manager could not start, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The settings contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The directory is not ours.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The directory holds another manager's votes.
    #[error(
        "{} is the directory of manager {found}, not {own}; keep the order of `peers`, or use an \
         empty directory", path.display()
    )]
    OtherManager {
        /// Which directory.
        path: PathBuf,
        /// Whose it is.
        found: NodeId,
        /// Who we are by the settings.
        own: NodeId,
    },
    /// The group was founded by others than the settings name.
    #[error(
        "this cluster has the managers {found:?}, but `peers` names {wanted:?}; managers cannot \
         be added or taken away in this version"
    )]
    OtherPeers {
        /// As the log says.
        found: Vec<NodeId>,
        /// As the settings say.
        wanted: Vec<NodeId>,
    },
    /// No randomness.
    #[error("no randomness from the kernel")]
    Entropy(#[source] io::Error),
    /// An address is in use, or not ours.
    #[error("cannot listen on {address}; is another process using it?")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The listening socket failed.
    #[error("the listening socket failed")]
    Accept(#[source] io::Error),
    /// The log cannot be opened.
    #[error("cannot open the log")]
    Log(#[from] WalError),
    /// The log does not fit the state, or is damaged.
    #[error("this manager's log cannot be used ({0})")]
    Recover(RecoverError),
    /// There is a state and no log: the vote given in it may be lost.
    #[error("the log of this manager is missing")]
    LogMissing,
    /// There is a log that was cut, and no state from before the cut.
    #[error("the state of this manager, state.redb, is missing")]
    StateMissing,
    /// What this manager has cannot be used, and the others are too few to have all of it.
    #[error("{damage}; the other managers are no majority without this one: restore its directory")]
    OnlyCopy {
        /// What is wrong with it.
        damage: String,
    },
    /// The settings of Raft contradict each other.
    #[error(transparent)]
    RaftConfig(#[from] milpa_raft::config::ConfigError),
    /// The log failed while running; its disk is not trusted any more.
    #[error("the log failed; the disk below it needs to be looked at")]
    Drive(#[from] DriveError),
    /// The state could not be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The others' log has another entry where this one's was committed.
    #[error("the other managers go on without an entry that is committed in this manager's log")]
    OtherLog,
    /// The same, and what this manager had is out of the way: one of the others' disks has lost what it had acknowledged.
    #[error(
        "the other managers have gone on without what this one had: that is set aside in its directory \
         (raft.damaged.N, state.redb.damaged.N); start it again, and it takes part with what they have"
    )]
    SetAside,
    /// A newer program wrote to the log.
    #[error("log entry {index} is of a newer program; start that one")]
    UnknownCommand {
        /// Which entry.
        index: u64,
    },
}

/// Runs one manager until `shutdown` completes. Call it on a `current_thread` runtime; it makes
/// its own `LocalSet`. All managers of a cluster are given the same cluster id and secret.
///
/// On the first start the managers named in `config.peers` found the group together, and the first of
/// them stands for election at once; later starts go on from the directory. One whose directory is empty
/// though the group was founded catches up before it votes.
///
/// # Errors
///
/// [`RunError`], with what to do in its text.
pub async fn run(
    config: ManagerConfig,
    cluster: ClusterId,
    secret: Key,
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    config.validate()?;
    LocalSet::new().run_until(run_local(config, cluster, secret, shutdown)).await
}

async fn run_local(
    config: ManagerConfig,
    cluster: ClusterId,
    secret: Key,
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let config = Rc::new(config);
    // Addresses first: a second start of the same manager must change nothing.
    let listener = listen(config.listen).await?;
    let http_listener = listen(config.http_listen).await?;
    let mut directory = NodeDirectory::open(&config.directory, Role::Manager, cluster)?;
    let own = config.own_id().unwrap_or_default();
    claim(&mut directory, own)?;

    let identity = Identity::new(Some(cluster), Role::Manager, Credential::Cluster(secret.clone()));
    let identity = Arc::new(identity);
    identity.set_node(own);
    let (inbox, mut events) = mpsc::channel(INBOX_MAX);
    let known = Rc::new(RefCell::new(Known::default()));
    let front =
        Front { inbox: inbox.clone(), known: Rc::clone(&known), managers: config.managers() };
    let web = http::routes(inbox.clone(), &secret, http::leader_urls(&config));
    let pool = Pool::new(Arc::clone(&identity));
    let serving = rpc::serve(listener, identity, Rc::new(front));
    let working = async {
        let managers = config.managers();
        let mut circle = Circle { own, managers: &managers, pool: &pool, events: &mut events };
        let begun = match open(&config, cluster, &mut directory, &mut circle).await {
            Err(damage) if damage.is_damage() => {
                circle.wait_until_others_go_on(damage).await?;
                damage::set_all_aside(&mut directory)?;
                open(&config, cluster, &mut directory, &mut circle).await?
            }
            begun => begun?,
        };
        let (state, driver, checkpoints) = begun;
        info!(manager = %own, listen = %config.listen, applied = state.applied(), "manager starts");
        let replica = Replica::new(Start {
            own,
            config: Rc::clone(&config),
            pool: pool.clone(),
            secret: secret.clone(),
            inbox,
            state,
            known,
            checkpoints,
        });
        let ended = drive(driver, replica, circle.events, Notebook::new(&mut directory)).await;
        match ended {
            Err(damage @ RunError::OtherLog) => {
                circle.wait_until_others_go_on(damage).await?;
                damage::set_all_aside(&mut directory)?;
                Err(RunError::SetAside)
            }
            ended => ended,
        }
    };
    tokio::select! {
        biased;
        ended = working => ended,
        ended = serving => ended.map_err(RunError::Accept),
        ended = async { axum::serve(http_listener, web).await } => ended.map_err(RunError::Accept),
        () = shutdown => {
            info!(manager = %own, "manager ends");
            Ok(())
        }
    }
}

/// Keeps the id in the directory. A directory never changes its id: its log holds votes under it.
fn claim(directory: &mut NodeDirectory, own: NodeId) -> Result<(), RunError> {
    match directory.node() {
        Some(found) if found != own => {
            Err(RunError::OtherManager { path: directory.path().to_owned(), found, own })
        }
        _ => Ok(directory.set_node(own)?),
    }
}

async fn listen(address: SocketAddr) -> Result<Listener, RunError> {
    net::bind(address).await.map_err(|source| RunError::Listen { address, source })
}

/// Opens what the directory holds, and begins with that.
async fn open(
    config: &ManagerConfig,
    cluster: ClusterId,
    directory: &mut NodeDirectory,
    circle: &mut Circle<'_>,
) -> Result<(State, RaftDriver, Checkpoints), RunError> {
    let opened = Opened::open(config, directory)?;
    if opened.is_new() && !directory.is_rejoining() {
        directory.set_rejoining(circle.ask().await == Beginning::Rejoin)?;
    }
    begin(opened, config, cluster, circle.own, directory)
}

/// What the directory holds.
struct Opened {
    wal: Wal,
    recovered: Recovered,
    store: CheckpointStore,
    loaded: Option<(State, SnapshotDescriptor)>,
}

impl Opened {
    fn open(config: &ManagerConfig, directory: &NodeDirectory) -> Result<Opened, RunError> {
        let log_directory = config.directory.join(LOG_DIRECTORY);
        disk::create_directory(&log_directory).map_err(WalError::Io)?;
        let seed = entropy::u64().map_err(RunError::Entropy)?;
        let mut options = WalOptions::new(directory.incarnation().to_le_bytes(), seed);
        (options.segment_bytes, options.first_segment_bytes) = (SEGMENT_BYTES, FIRST_SEGMENT_BYTES);
        let (wal, recovered) = Wal::open(FileStorage::open(&log_directory)?, options)?;
        if !recovered.damaged.is_empty() {
            return Err(RunError::Recover(RecoverError::Damaged(recovered.damaged)));
        }
        let held = held(&recovered);
        if held.is_none() && directory.is_rejoining() {
            // It may have been fetched before the log was durable. All of it comes again.
            CheckpointStore::discard(directory.path())?;
        }
        let loaded = CheckpointStore::open(directory.path()).and_then(loaded_from);
        let (store, loaded) = match loaded {
            // Nothing was cut from the log yet.
            Err(error) if error.is_damage() && held.is_some_and(|group| group.mark.index <= 1) => {
                warn!(
                    error = with_sources(&error),
                    "the state is damaged; all of it is in the log"
                );
                damage::set_state_aside(directory.path())?;
                loaded_from(CheckpointStore::open(directory.path())?)?
            }
            loaded => loaded?,
        };
        match (&loaded, held) {
            (Some(_), None) => return Err(RunError::LogMissing),
            // A founded group starts after entry 1; a log that starts later was cut at a checkpoint.
            (None, Some(group)) if group.mark.index > 1 => return Err(RunError::StateMissing),
            _ => {}
        }
        Ok(Opened { wal, recovered, store, loaded })
    }

    fn is_new(&self) -> bool {
        held(&self.recovered).is_none()
    }
}

type Loaded = (CheckpointStore, Option<(State, SnapshotDescriptor)>);

fn loaded_from(store: CheckpointStore) -> Result<Loaded, CheckpointError> {
    let loaded = store.load()?;
    Ok((store, loaded))
}

/// The managers' group, as the log had it.
fn held(recovered: &Recovered) -> Option<&RecoveredGroup> {
    recovered.groups.iter().find(|group| group.group == GROUP)
}

/// Goes on with the group, founds it, or takes part in it again.
fn begin(
    opened: Opened,
    config: &ManagerConfig,
    cluster: ClusterId,
    own: NodeId,
    directory: &NodeDirectory,
) -> Result<(State, RaftDriver, Checkpoints), RunError> {
    let is_new = opened.is_new();
    let start = match &opened.loaded {
        Some((state, descriptor)) => Some(GroupStart {
            applied: state.applied(),
            snapshot: Some(descriptor.clone()),
            delivered: None,
        }),
        // Before the first checkpoint: an empty state stands for all that was before the log.
        None => held(&opened.recovered).map(|group| GroupStart {
            applied: group.mark.index,
            snapshot: None,
            delivered: None,
        }),
    };
    let Opened { wal, recovered, store, loaded } = opened;
    let seed = entropy::u64().map_err(RunError::Entropy)?;
    let mut multi = MultiRaft::new(own, RaftConfig::default(), seed)?;
    let start = start.map(|start| (GROUP, start));
    let refused = multi.recover(recovered, &start.into_iter().collect(), now_ms());
    if let Some((_, reason)) = refused.into_iter().next() {
        return Err(RunError::Recover(reason));
    }
    let voters: Vec<NodeId> = config.managers().iter().map(|(id, _)| *id).collect();
    if directory.is_rejoining() {
        multi.rejoin_group(GROUP, entropy::u64().map_err(RunError::Entropy)?);
    } else if is_new {
        // The first campaigns at once, so that a new cluster does not wait for a timeout.
        multi.create_group(GROUP, &voters, &[], voters.first() == Some(&own));
    }
    let mut found = multi.status(GROUP).map(|status| status.members.voters).unwrap_or_default();
    found.sort_unstable();
    if !found.is_empty() && found != voters {
        return Err(RunError::OtherPeers { found, wanted: voters });
    }
    let driver = RaftDriver::new(multi, LogWriter::spawn(wal)?);
    let (state, kept) = match loaded {
        Some((state, descriptor)) => {
            let bytes = Bytes::from(state.encode());
            (state, Some((descriptor, bytes)))
        }
        None => (State::new(cluster), None),
    };
    Ok((state, driver, Checkpoints::new(store, kept)))
}

/// The loop.
async fn drive(
    mut driver: RaftDriver,
    mut replica: Replica,
    events: &mut mpsc::Receiver<Event>,
    mut notebook: Notebook<'_>,
) -> Result<(), RunError> {
    if let Some((descriptor, _)) = replica.checkpoints.kept.last() {
        driver.multi.set_snapshot(GROUP, descriptor.clone());
    }
    let mut ticks = tokio::time::interval(driver.multi.tick_interval());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        // Events last: they may never pause, and those that wait are taken below in any case. The
        // log and the clock pause by themselves.
        tokio::select! {
            biased;
            progress = driver.writer.progressed() => driver.on_log(progress, now_ms()),
            _ = ticks.tick() => driver.multi.tick(now_ms()),
            Some(event) = events.recv() => replica.handle(&mut driver.multi, event),
        }
        for _ in 0..EVENTS_PER_TURN {
            let Ok(event) = events.try_recv() else { break };
            replica.handle(&mut driver.multi, event);
        }
        for _ in 0..TURNS_PER_ROUND {
            driver.pump(now_ms(), &mut replica)?;
            if let Some(failure) = replica.failure.take() {
                return Err(failure);
            }
            if !replica.settle(&mut driver.multi) {
                break;
            }
        }
        notebook.keep(&driver.multi)?;
    }
}

/// Where requests and frames enter: checks what can be checked without the state, and queues.
struct Front {
    inbox: Inbox,
    known: Rc<RefCell<Known>>,
    managers: Vec<(NodeId, SocketAddr)>,
}

impl Service for Front {
    fn request(&self, peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let request: ManagerRequest = match milpa_wire::decode(&body) {
            Ok(request) => request,
            Err(error) => {
                let problems = vec![error.to_string()];
                let refused: ManagerReply = Err(ManagerError::Invalid { problems });
                return reply.send(&refused, Bytes::new());
            }
        };
        let responder = Responder::rpc(reply, &request);
        let (caller, request) = (peer.into(), Box::new(request));
        offer(&self.inbox, Event::Request { caller, request, responder });
    }

    fn one_way(&self, peer: &Peer, _channel: u16, body: Bytes) {
        let is_manager = self.managers.iter().any(|(id, _)| *id == peer.node);
        if peer.role != Role::Manager || !is_manager {
            warn!(?peer, "a stranger sent a Raft frame; dropped");
            return;
        }
        offer(&self.inbox, Event::Frame { from: peer.node, bytes: body });
    }

    fn volume_named(&self, name: &str) -> Option<VolumeId> {
        self.known.borrow().volumes.get(name).copied()
    }

    fn carries_to(&self, address: SocketAddr) -> bool {
        let is_heard = self.known.borrow().heard.contains(&address);
        if is_heard {
            metrics().carried.inc();
        }
        is_heard
    }
}

/// Queues an event; when the loop cannot keep up, a request is answered "busy" and a frame
/// dropped, which Raft repeats.
fn offer(inbox: &Inbox, event: Event) {
    let Err(error) = inbox.try_send(event) else { return };
    metrics().dropped.inc();
    if let Event::Request { responder, .. } = error.into_inner() {
        responder.send(Err(ManagerError::Busy));
    }
}

/// A pause between two tries of the same thing over HTTP.
const RETRY_AFTER: Duration = Duration::from_secs(1);
