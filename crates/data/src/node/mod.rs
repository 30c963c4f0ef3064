//! The shell of a data node: sockets, threads, files and clocks around the cores.
//!
//! One thread runs everything that decides: the sockets, the managers' link and one task for each
//! disk, which owns the disk's partitions and its Raft groups (`disk`). Each disk has threads of
//! its own for what blocks (`workers`); what they finish comes back as an event. Nothing is
//! locked, and no queue is without a bound: requests are refused when a disk's jobs are too many,
//! and everything else follows from requests that were accepted.

mod access;
mod align;
mod appends;
mod apply;
mod configure;
#[cfg(any(test, feature = "decoders"))]
pub(crate) mod decoding {
    pub(crate) use super::label::Label;
    pub(crate) use super::ledger::Noted as Ledger;
    pub(crate) use super::lost_note::{parse as parse_lost, text_of as text_of_lost};
    pub(crate) use super::scrubbing::{parse as parse_place, text_of as text_of_place};
    pub(crate) use super::state::PartitionState;
}
mod disk;
mod doubt;
mod fetch;
mod fill;
mod freed;
mod gaps;
mod handed;
mod heartbeat;
mod held;
mod label;
mod leave;
mod ledger;
mod licence;
mod lost;
mod lost_note;
mod metrics;
mod offering;
mod open;
mod overwrites;
mod pace;
mod partition;
mod partitions;
mod peers;
mod probing;
mod readable;
mod reads;
mod recent;
mod replace;
mod requests;
mod returned;
mod scrubbing;
mod service;
mod shared;
mod snapshot;
mod state;
mod usage;
mod workers;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use milpa_host::address_book::AddressBook;
use milpa_host::keys::Key;
use milpa_host::lives::Living;
use milpa_host::managers::{Managers, ManagersError};
use milpa_host::node_directory::{DirectoryError, NodeDirectory};
use milpa_host::rpc::{Credential, Identity, Pool, serve};
use milpa_host::{entropy, jobs, net, telemetry};
use milpa_types::{ClusterId, Disk as DiskDescription, Life, NodeId, Role};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::LocalSet;

use crate::{DataNodeConfig, DiskConfig};

use disk::Disk;
use heartbeat::Addresses;
use label::{Labelled, label_disks};
use ledger::Ledger;
use open::{OpenedDisk, Unopened, describe_failed, files_max, open_disk};
use service::DataService;
use shared::{DiskHandle, DiskReport, Shared};

/// Why a data node ended or could not start.
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
    /// The managers refused the node.
    #[error("cannot register with the managers")]
    Register(#[from] ManagersError),
    /// A disk cannot be opened. (One that fails later is fenced, and the node goes on.)
    #[error("cannot use disk {}: {problem}", path.display())]
    Disk {
        /// Its directory.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
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

/// Runs a data node until `stop` is ready. Call it on a tokio `current_thread` runtime; it makes
/// its own `LocalSet`.
///
/// # Errors
///
/// [`NodeError`] when the node cannot start, is refused, or its listening socket fails.
pub async fn run(
    config: DataNodeConfig,
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
    config: DataNodeConfig,
    cluster: ClusterId,
    secret: Key,
    announce: impl FnOnce(Started),
    stop: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    config.validate().map_err(|problems| NodeError::Config { problems })?;
    let running = Running::default();
    let node = start_and_serve(config, cluster, secret, announce, &running);
    let run_until_stopped = async {
        let mut node = std::pin::pin!(node);
        tokio::select! {
            biased;
            result = &mut node => return result,
            () = stop => {}
        }
        // Before it serves there is nothing to hand over.
        let Some((shared, incarnation)) = running.borrow().clone() else { return Ok(()) };
        tokio::select! {
            biased;
            result = node => result,
            () = leave::leave(&shared, incarnation) => Ok(()),
        }
    };
    LocalSet::new().run_until(run_until_stopped).await
}

/// What the tasks of a node share, once it serves, and its incarnation.
type Running = RefCell<Option<(Rc<Shared>, u128)>>;

/// Starts everything and serves. Ends only with an error: the socket's, or the managers' refusal.
async fn start_and_serve(
    mut config: DataNodeConfig,
    cluster: ClusterId,
    secret: Key,
    announce: impl FnOnce(Started),
    running: &Running,
) -> Result<(), NodeError> {
    let mut directory = NodeDirectory::open(&config.directory, Role::Data, cluster)?;
    let listener = net::bind(config.listen).await.map_err(listen_error(config.listen))?;
    let bound = listener.local_addr().map_err(listen_error(config.listen))?;
    let http = telemetry::serve_http(config.http_listen, telemetry::http_routes())
        .await
        .map_err(listen_error(config.http_listen))?;
    let addresses = Addresses { listen: config.advertise.unwrap_or(bound), http };
    let identity = Arc::new(Identity::new(Some(cluster), Role::Data, Credential::Cluster(secret)));
    let pool = Pool::new(Arc::clone(&identity));
    let managers = Managers::new(pool.clone(), config.managers.clone());
    let (mut opened, failed, ledger) = open_disks(&mut config, directory.incarnation()).await?;
    opened.iter_mut().for_each(|disk| disk.leave_out(&ledger));
    let in_service = opened.iter().zip(&config.disks).map(|(disk, config)| disk.describe(config));
    let descriptions: Vec<_> = in_service.chain(failed.clone()).collect();
    let life = directory.begin_life()?;
    let me = Myself { directory, addresses, life, registers: true };
    let (node, me) = introduce(me, &managers, &config, descriptions).await?;
    identity.set_node(node);
    let known_addresses = AddressBook::open(config.directory.join("nodes"));
    let shared = Rc::new(Shared {
        config,
        node,
        pool,
        managers,
        addresses: RefCell::new(known_addresses),
        routes: RefCell::default(),
        ledger: RefCell::new(ledger),
        disks: RefCell::default(),
        failed,
        peers: RefCell::new(peers::Peers::of(node)),
        probes: Semaphore::new(probing::PROBES_MAX),
        queued: Cell::new(0),
        is_leaving: Cell::new(false),
        paces: pace::Paces::default(),
        news: tokio::sync::Notify::new(),
    });
    start_disks(&shared, opened)?;
    running.replace(Some((Rc::clone(&shared), me.directory.incarnation())));
    tracing::info!(%node, address = %addresses.listen, "data node serves");
    announce(Started { node, address: addresses.listen, http_address: http });
    let service = Rc::new(DataService { shared: Rc::clone(&shared) });
    tokio::select! {
        biased;
        served = serve(listener, identity, service) => {
            let source = served.err().unwrap_or_else(|| io::Error::other("closed"));
            Err(NodeError::Listen { address: bound, source })
        }
        refused = keep_in_touch(shared, me) => Err(refused.into()),
    }
}

/// What a node tells the managers of itself.
struct Myself {
    directory: NodeDirectory,
    addresses: Addresses,
    life: Life,
    /// They have not taken its registration yet.
    registers: bool,
}

impl Myself {
    async fn register(
        &self,
        managers: &Managers,
        config: &DataNodeConfig,
        disks: Vec<DiskDescription>,
    ) -> Result<NodeId, ManagersError> {
        let Myself { directory, addresses, life, .. } = self;
        heartbeat::register(managers, config, directory, *life, *addresses, disks).await
    }
}

/// Tells the managers that the node starts, before anybody hears of what its disks hold: a directory that
/// is an older copy has forgotten promises. A node that was known goes on without their word when none of them
/// answers for `managers_wait_ms`; a new one has to have an id.
async fn introduce(
    mut me: Myself,
    managers: &Managers,
    config: &DataNodeConfig,
    disks: Vec<DiskDescription>,
) -> Result<(NodeId, Myself), NodeError> {
    let registering = me.register(managers, config, disks);
    let node = match me.directory.node() {
        None => registering.await?,
        Some(node) => {
            let wait = Duration::from_millis(config.managers_wait_ms);
            tracing::info!(%node, ?wait, "asking the managers before it serves");
            match tokio::time::timeout(wait, registering).await {
                Ok(registered) => registered?,
                Err(_) => {
                    tracing::warn!(%node, waited_ms = config.managers_wait_ms,
                        "no manager says whether this node's directory is its newest; it serves all the same");
                    return Ok((node, me));
                }
            }
        }
    };
    me.directory.set_node(node)?;
    me.directory.life_has_begun();
    me.registers = false;
    Ok((node, me))
}

/// Registers, if the managers have not answered yet, and then sends heartbeats and offers. Ends when
/// the managers refuse the node.
async fn keep_in_touch(shared: Rc<Shared>, me: Myself) -> ManagersError {
    let (managers, config) = (&shared.managers, &shared.config);
    if me.registers {
        let disks = shared.describe_disks();
        if let Err(error) = me.register(managers, config, disks).await {
            return error;
        }
    }
    let offering = offering::offer_for_ever(Rc::clone(&shared));
    let beating = heartbeat::beat(Rc::clone(&shared), me.directory.incarnation());
    let probing = probing::probe_for_ever(Rc::clone(&shared));
    let living = Living::new(me.directory, shared.node, Rc::default());
    tokio::select! {
        biased;
        never = offering => match never {},
        never = beating => match never {},
        never = probing => match never {},
        refused = living.renew_for_ever(managers, Duration::from_millis(config.life_ms)) => refused,
    }
}

fn listen_error(address: SocketAddr) -> impl Fn(io::Error) -> NodeError {
    move |source| NodeError::Listen { address, source }
}

/// The disks of a node that could be opened, those that could not, as far as they are known, and which replica is where.
type Disks = (Vec<OpenedDisk>, Vec<DiskDescription>, Ledger);

/// Opens all disks at once, each on a thread of its own. Those that have failed leave the settings.
///
/// # Errors
///
/// If one is not what the settings take it for, or none can be opened.
async fn open_disks(config: &mut DataNodeConfig, incarnation: u128) -> Result<Disks, NodeError> {
    let home = config.directory.clone();
    let of_home = |problem| NodeError::Disk { path: home.clone(), problem };
    let mut ledger = Ledger::open(&home).map_err(of_home)?;
    let labelled = label_disks(&config.disks, incarnation, &mut ledger).map_err(of_home)?;
    let files_max = files_max(config.disks.len());
    let mut opening = Vec::new();
    for (disk, labelled) in config.disks.drain(..).zip(labelled) {
        let nonce = random(&disk.path)?;
        let opener = Opener { disk, labelled, incarnation, nonce, files_max };
        opening.push((opener.start(), opener));
    }
    let (mut opened, mut failed, mut last) = (Vec::new(), Vec::new(), None);
    for (started, opener) in opening {
        let unusable = |problem| NodeError::Disk { path: opener.disk.path.clone(), problem };
        match opener.finish(started).await {
            Ok(it) => {
                opened.push(it);
                config.disks.push(opener.disk);
            }
            Err(Unopened::Refused(problem)) => return Err(unusable(problem)),
            Err(Unopened::Failed(problem)) => {
                tracing::error!(disk = %opener.disk.path.display(), problem,
                    "a disk has failed: its replicas are made elsewhere; replace it");
                let known = opener.labelled.id;
                failed.extend(known.map(|id| describe_failed(&opener.disk, id, &problem)));
                last = Some(unusable(problem));
            }
        }
    }
    let is_all = last.is_none();
    if let Some(error) = last.filter(|_| opened.is_empty()) {
        return Err(error);
    }
    let found: Vec<_> = opened.iter().flat_map(OpenedDisk::found).collect();
    let noted = ledger.take_in(&found, is_all);
    noted.map_err(|error| of_home(format!("cannot note where its replicas are: {error}")))?;
    Ok((opened, failed, ledger))
}

/// How often a disk that fails is tried again, and the pause before: a read may fail once.
const OPEN_RETRIES: u32 = 2;
const OPEN_PAUSE: Duration = Duration::from_secs(1);

/// Opens one disk.
struct Opener {
    disk: DiskConfig,
    labelled: Labelled,
    incarnation: u128,
    nonce: u64,
    files_max: usize,
}

type Opening = tokio::task::JoinHandle<Result<OpenedDisk, Unopened>>;

impl Opener {
    fn start(&self) -> Opening {
        let (disk, Labelled { id, label }) = (self.disk.clone(), self.labelled.clone());
        let id = label.and(id.ok_or_else(|| "it has no id".to_owned())).map_err(Unopened::Failed);
        let (incarnation, nonce, files_max) = (self.incarnation, self.nonce, self.files_max);
        jobs::run("open", move || open_disk(&disk, id?, incarnation, nonce, files_max))
    }

    async fn finish(&self, mut started: Opening) -> Result<OpenedDisk, Unopened> {
        let mut retries = OPEN_RETRIES;
        loop {
            match started.await.unwrap_or_else(|e| Err(Unopened::Refused(e.to_string()))) {
                Err(Unopened::Failed(problem)) if self.labelled.label.is_ok() && retries > 0 => {
                    tracing::warn!(disk = %self.disk.path.display(), problem, "tried again");
                    tokio::time::sleep(OPEN_PAUSE).await;
                    retries -= 1;
                    started = self.start();
                }
                opened => return opened,
            }
        }
    }
}

fn start_disks(shared: &Rc<Shared>, opened: Vec<OpenedDisk>) -> Result<(), NodeError> {
    let mut disks = Vec::new();
    for (index, disk) in opened.into_iter().enumerate() {
        let (events, inbox) = unbounded_channel();
        let path = shared.config.disks.get(index).map(|disk| disk.path.clone());
        let path = path.unwrap_or_default();
        let seed = random(&path)?;
        let failed = |problem| NodeError::Disk { path, problem };
        let id = disk.id;
        let mut disk =
            disk.start(index, Rc::clone(shared), seed, events.clone()).map_err(failed)?;
        let report = DiskReport::default();
        shared.disks.borrow_mut().push(DiskHandle { id, events, report });
        // The first heartbeat says what is here.
        disk.publish_report();
        disks.push((disk, inbox));
    }
    for (disk, inbox) in disks {
        tokio::task::spawn_local(Disk::run(disk, inbox));
    }
    Ok(())
}

/// A number that differs from start to start: for election timeouts and for the log's nonce. No
/// secret depends on it.
fn random(path: &Path) -> Result<u64, NodeError> {
    let failed =
        |error: io::Error| NodeError::Disk { path: path.into(), problem: error.to_string() };
    entropy::u64().map_err(failed)
}
