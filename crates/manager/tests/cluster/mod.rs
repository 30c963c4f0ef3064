//! Three managers on loopback, each on a thread of its own, and stand-ins for meta and data nodes
//! that hold partitions, adopt configurations and send heartbeats.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_host::keys::Key;
use milpa_host::managers::Managers;
use milpa_host::rpc::{self, Credential, Identity, Peer, Pool, Reply, Service};
use milpa_manager::ManagerConfig;
use milpa_types::{
    ClusterId, DataError, Disk, DiskId, Life, ManagerError, NodeId, PartitionId, Role,
    VolumeOptions, VolumeView,
};
use milpa_wire::data::{DataAnswer, DataPartitionReport, DataReply, DataRequest};
use milpa_wire::manager::{Heartbeat, ManagerAnswer, ManagerReply, ManagerRequest, Register};
use milpa_wire::meta::{MetaAnswer, MetaPartitionReport, MetaReply, MetaRequest, MetaStatistics};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

pub const CLUSTER: ClusterId = ClusterId(0xc1);
/// Everything that is waited for comes within this time, or the test fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a test on one thread with local tasks.
pub fn run(test: impl Future<Output = ()>) {
    milpa_host::telemetry::init_logs();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(LocalSet::new().run_until(test));
}

struct Running {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// The managers and where they live.
pub struct Cluster {
    pub secret: Key,
    pub configs: Vec<ManagerConfig>,
    running: Vec<Option<Running>>,
    pub nodes: Rc<RefCell<Vec<Rc<FakeNode>>>>,
    pub admin: Managers,
    _directory: tempfile::TempDir,
}

impl Cluster {
    /// Three managers with quick settings, not yet started.
    pub fn new(change: impl Fn(&mut ManagerConfig)) -> Cluster {
        Cluster::of(3, change)
    }

    /// Any number of managers.
    pub fn of(count: usize, change: impl Fn(&mut ManagerConfig)) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let peers = own_addresses(count);
        let http_peers = own_addresses(count);
        let config = |place: usize| {
            let home = directory.path().join(format!("manager{place}"));
            let mut config =
                ManagerConfig::new(home, peers[place], http_peers[place], peers.clone());
            config.http_peers = http_peers.clone();
            config.policy.silence_period_ms = 600;
            config.policy.pass_interval_ms = 50;
            change(&mut config);
            config
        };
        let configs: Vec<ManagerConfig> = (0..count).map(config).collect();
        let secret = Key::random().unwrap();
        let admin = Managers::new(pool(Role::Admin, &secret), peers.clone());
        Cluster {
            secret,
            configs,
            running: (0..count).map(|_| None).collect(),
            nodes: Rc::default(),
            admin,
            _directory: directory,
        }
    }

    pub fn start(&mut self, place: usize) {
        let (config, secret) = (self.configs[place].clone(), self.secret.clone());
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let shutdown = async move { drop(stopped.await) };
            runtime.block_on(milpa_manager::run(config, CLUSTER, secret, shutdown)).unwrap();
        });
        self.running[place] = Some(Running { stop, thread });
    }

    pub fn start_all(&mut self) {
        (0..self.configs.len()).for_each(|place| self.start(place));
    }

    /// Ends a manager between two of its steps, as a kill would: it says goodbye to nobody.
    pub async fn stop(&mut self, place: usize) {
        let Some(running) = self.running[place].take() else { return };
        let _ = running.stop.send(());
        // Local tasks (the stand-ins among them) go on meanwhile.
        tokio::task::spawn_blocking(|| running.thread.join().unwrap()).await.unwrap();
    }

    pub async fn ask(&self, request: ManagerRequest) -> Result<ManagerAnswer, String> {
        self.admin.call(&request, PATIENCE).await.map_err(|error| error.to_string())
    }

    /// Asks one manager, whoever leads.
    pub async fn ask_one(&self, place: usize, request: &ManagerRequest) -> ManagerReply {
        let pool = self.admin.pool();
        let wait = Duration::from_secs(5);
        let to = self.configs[place].peers[place];
        let called = pool.call(to, Role::Manager, request, Bytes::new(), wait).await;
        called.map_or(Err(ManagerError::Busy), |(reply, _)| reply)
    }

    /// Whether a manager still makes up for a directory that was emptied.
    pub fn is_rejoining(&self, place: usize) -> bool {
        self.configs[place].directory.join("REJOINING").exists()
    }

    /// Waits until a manager knows that the cluster was founded.
    pub async fn until_founded(&self, place: usize) {
        self.until_it_says(place, &Ok(ManagerAnswer::Founded(true))).await;
    }

    /// Asks a manager whether it is founded until it says so.
    pub async fn until_it_says(&self, place: usize, expected: &ManagerReply) {
        let pool = pool(Role::Manager, &self.secret);
        let (to, wait) = (self.configs[place].listen, Duration::from_secs(1));
        let started = Instant::now();
        loop {
            let request = ManagerRequest::IsFounded;
            let called =
                pool.call::<_, ManagerReply>(to, Role::Manager, &request, Bytes::new(), wait).await;
            if matches!(&called, Ok((said, _)) if said == expected) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{called:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a manager whose directory was emptied has caught up.
    pub async fn until_rejoined(&self, place: usize) {
        self.until_founded(place).await;
        let started = Instant::now();
        while self.is_rejoining(place) {
            assert!(started.elapsed() < PATIENCE, "it does not catch up");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn create_volume(&self, name: &str) -> Result<ManagerAnswer, String> {
        let options = VolumeOptions::default();
        let name = name.to_owned();
        let (meta_partitions, data_partitions) = (0, 0);
        self.ask(ManagerRequest::CreateVolume { name, options, meta_partitions, data_partitions })
            .await
    }

    pub async fn volume(&self, name: &str) -> VolumeView {
        let request = ManagerRequest::GetVolume { name: name.to_owned(), known_version: 0 };
        match self.ask(request).await {
            Ok(ManagerAnswer::Volume(view)) => *view,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until a volume looks as wanted.
    pub async fn wait_for(&self, name: &str, wanted: impl Fn(&VolumeView) -> bool) -> VolumeView {
        let started = Instant::now();
        loop {
            let view = self.volume(name).await;
            if wanted(&view) {
                return view;
            }
            assert!(started.elapsed() < PATIENCE, "still {:?}", view.data);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The place of the manager that leads.
    pub async fn leader(&self) -> usize {
        match self.ask(ManagerRequest::Status).await {
            Ok(ManagerAnswer::Status(status)) => status.leader.0 as usize - 1,
            other => panic!("{other:?}"),
        }
    }

    /// Starts this many stand-ins of a role and waits until they have registered.
    pub async fn add_nodes(&self, role: Role, count: usize) {
        for _ in 0..count {
            let node = FakeNode::start(self, role).await;
            self.nodes.borrow_mut().push(node);
        }
    }

    pub fn node(&self, id: NodeId) -> Rc<FakeNode> {
        self.nodes.borrow().iter().find(|node| node.id.get() == id).cloned().unwrap()
    }

    /// A client's way to the managers.
    pub fn client(&self, name: &str, key: &Key) -> Pool {
        let credential = Credential::Volume { name: name.to_owned(), key: key.clone() };
        Pool::new(Arc::new(Identity::new(None, Role::Client, credential)))
    }
}

pub fn pool(role: Role, secret: &Key) -> Pool {
    let credential = Credential::Cluster(secret.clone());
    Pool::new(Arc::new(Identity::new(Some(CLUSTER), role, credential)))
}

/// Addresses on a host of their own: nobody is given one of their ports while a manager is down.
fn own_addresses(count: usize) -> Vec<SocketAddr> {
    static HOSTS: AtomicU16 = AtomicU16::new(0);
    let [high, low] = HOSTS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let of_process = (std::process::id() % 200) as u8 + 1;
    let host = Ipv4Addr::new(127, of_process, high, low.saturating_add(1));
    (0..count).map(|place| SocketAddr::from((host, 7_000 + place as u16))).collect()
}

/// A node that holds what it is told to hold and reports it.
pub struct FakeNode {
    pub id: Cell<NodeId>,
    pub role: Role,
    /// A node that is down neither answers nor sends heartbeats.
    pub is_up: Cell<bool>,
    pub meta: RefCell<BTreeMap<PartitionId, MetaPartitionReport>>,
    pub data: RefCell<BTreeMap<PartitionId, DataPartitionReport>>,
    /// Splits and other steps that were asked of it, by name.
    pub done: RefCell<Vec<String>>,
    nodes: Weak<RefCell<Vec<Rc<FakeNode>>>>,
}

impl FakeNode {
    async fn start(cluster: &Cluster, role: Role) -> Rc<FakeNode> {
        let listener = milpa_host::net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let credential = Credential::Cluster(cluster.secret.clone());
        let identity = Arc::new(Identity::new(Some(CLUSTER), role, credential));
        let node = Rc::new(FakeNode {
            id: Cell::new(NodeId(0)),
            role,
            is_up: Cell::new(true),
            meta: RefCell::default(),
            data: RefCell::default(),
            done: RefCell::default(),
            nodes: Rc::downgrade(&cluster.nodes),
        });
        let addresses = cluster.configs[0].peers.clone();
        let managers = Managers::new(Pool::new(Arc::clone(&identity)), addresses);
        let register = ManagerRequest::Register(Register {
            node: None,
            incarnation: u128::from(address.port()),
            life: Life::default(),
            role,
            address,
            http_address: address,
            zone: String::new(),
            region: String::new(),
            disks: vec![disk()],
        });
        match managers.call(&register, PATIENCE).await.unwrap() {
            ManagerAnswer::Registered { cluster, node: id } => {
                assert_eq!(cluster, CLUSTER);
                node.id.set(id);
                identity.set_node(id);
            }
            other => panic!("{other:?}"),
        }
        let service = Rc::new(FakeService(Rc::clone(&node)));
        tokio::task::spawn_local(async move { rpc::serve(listener, identity, service).await });
        let beating = Rc::clone(&node);
        tokio::task::spawn_local(async move {
            loop {
                if beating.is_up.get() {
                    let heartbeat = beating.heartbeat(u128::from(address.port()));
                    let wait = Duration::from_millis(400);
                    let _ = managers.call(&ManagerRequest::Heartbeat(heartbeat), wait).await;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        node
    }

    fn heartbeat(&self, incarnation: u128) -> Heartbeat {
        Heartbeat {
            node: self.id.get(),
            incarnation,
            disks: vec![disk()],
            memory_bytes: 1 << 20,
            meta: self.meta.borrow().values().cloned().collect(),
            data: self.data.borrow().values().cloned().map(|r| self.with_leader(r)).collect(),
            data_damaged: Vec::new(),
            slow_peers: Vec::new(),
        }
    }

    /// The group's leader is its first member that is up.
    fn with_leader(&self, mut report: DataPartitionReport) -> DataPartitionReport {
        report.leader = self.leader_of(&report);
        report.current = report.configuration.holders().collect();
        report
    }

    fn leader_of(&self, report: &DataPartitionReport) -> Option<NodeId> {
        let nodes = self.nodes.upgrade()?;
        let nodes = nodes.borrow();
        let is_up = |id: &&NodeId| nodes.iter().any(|n| n.id.get() == **id && n.is_up.get());
        report.configuration.members.iter().find(is_up).copied()
    }

    fn answer_meta(&self, request: MetaRequest) -> MetaReply {
        match request {
            MetaRequest::CreatePartition(create) => {
                let report = MetaPartitionReport {
                    voters: create.members.clone(),
                    learners: Vec::new(),
                    current: create.members.clone(),
                    is_full: false,
                    is_damaged: false,
                    declines_lead: false,
                    marks: Vec::new(),
                    partition: create.partition,
                    leader: create.members.first().copied(),
                    term: 1,
                    applied: 1,
                    log_end: None,
                    statistics: MetaStatistics {
                        inode_highest: create.slot.first_inode(),
                        ..MetaStatistics::default()
                    },
                };
                self.meta.borrow_mut().entry(create.partition).or_insert(report);
            }
            MetaRequest::DeletePartition { partition, .. } => {
                self.meta.borrow_mut().remove(&partition);
            }
            MetaRequest::Split { partition, end } => {
                self.done.borrow_mut().push(format!("split {partition} at {end}"));
            }
            MetaRequest::SetVolumeOptions { volume, options } => {
                let inline = options.inline_bytes_max;
                self.done.borrow_mut().push(format!("options of {volume}: inline {inline}"));
            }
            other => panic!("a manager does not ask for {other:?}"),
        }
        Ok(MetaAnswer::Done)
    }

    fn answer_data(&self, request: DataRequest) -> DataReply {
        match request {
            DataRequest::CreatePartition(create) => {
                let report = DataPartitionReport {
                    partition: create.partition,
                    disk: create.disk,
                    configuration: create.configuration,
                    leader: None,
                    term: 1,
                    allocated_bytes: 0,
                    extents: 0,
                    unaligned: 0,
                    log_end: None,
                    applied: 0,
                    overwritten: 0,
                    lacks_overwritten: false,
                    is_given_rest: false,
                    lost_blocks: 0,
                    current: Vec::new(),
                };
                self.data.borrow_mut().entry(create.partition).or_insert(report);
            }
            DataRequest::DeletePartition { partition, .. } => {
                self.data.borrow_mut().remove(&partition);
            }
            DataRequest::Configure { partition, configuration, .. } => {
                let own = self.data.borrow().get(&partition).cloned();
                let own = own.ok_or(DataError::WrongPartition)?;
                let hint = self.leader_of(&own);
                if hint != Some(self.id.get()) {
                    return Err(DataError::NotPrimary { hint });
                }
                if own.configuration.epoch.0 + 1 != configuration.epoch.0 {
                    return Err(DataError::StaleEpoch { current: own.configuration.epoch });
                }
                let nodes = self.nodes.upgrade().unwrap();
                for node in nodes.borrow().iter().filter(|node| node.is_up.get()) {
                    let mut held = node.data.borrow_mut();
                    if let Some(report) = held.get_mut(&partition) {
                        report.configuration = configuration.clone();
                    }
                }
            }
            other => panic!("a manager does not ask for {other:?}"),
        }
        Ok(DataAnswer::Done)
    }
}

struct FakeService(Rc<FakeNode>);

impl Service for FakeService {
    fn request(&self, peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        assert_eq!(peer.role, Role::Manager);
        if !self.0.is_up.get() {
            // Dropped: the caller reads "lost".
            return;
        }
        if self.0.role == Role::Meta {
            reply.send(&self.0.answer_meta(milpa_wire::decode(&body).unwrap()), Bytes::new());
        } else {
            reply.send(&self.0.answer_data(milpa_wire::decode(&body).unwrap()), Bytes::new());
        }
    }
}

fn disk() -> Disk {
    Disk {
        id: DiskId(1),
        path: "/disk".to_owned(),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 39,
        used_bytes: 0,
        device: 1,
        fenced: None,
    }
}
