//! The network between a client and the fake servers, with faults on demand.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use milpa_client::transport::{Boxed, DataCall, Transport};
use milpa_client::{Client, ClientConfig, Creation, OpenFlags};
use milpa_host::keys::Key;
use milpa_host::managers::ManagersError;
use milpa_host::rpc::CallError;
use milpa_types::{
    ClusterId, DataPartition, Epoch, InodeId, ManagerError, MetaPartition, MetaSlot, Name, Node,
    NodeId, NodeState, PartitionId, Role, Volume, VolumeId, VolumeOptions, VolumeView,
};
use milpa_wire::data::DataRequest;
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{MetaReply, MetaRequest};

use crate::data::DataNodes;
use crate::meta::MetaNodes;

/// What happens to a call instead of its usual course.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Nobody listens there.
    Unreachable,
    /// Carried out, but the answer is lost.
    AnswerLost,
    /// The node hangs: never carried out, and the caller waits in vain.
    Hangs,
    /// The meta node answers so.
    Meta(milpa_types::MetaError),
    /// The data node answers so.
    Data(milpa_types::DataError),
    /// The data node's answer has a flipped bit.
    Damaged,
    /// The answer takes so long.
    Slow(Duration),
}

/// A call on its way, for the rules to look at.
pub enum Call<'a> {
    Meta(NodeId, &'a MetaRequest),
    Data(NodeId, &'a DataRequest),
}

type Rule = Box<dyn FnMut(&Call<'_>) -> Option<Fault> + Send>;

/// All servers.
pub struct Cluster {
    pub state: Mutex<State>,
    rules: Mutex<Vec<Rule>>,
}

pub struct State {
    pub view: VolumeView,
    pub meta: MetaNodes,
    pub data: DataNodes,
}

pub const META: [NodeId; 3] = [NodeId(1), NodeId(2), NodeId(3)];
pub const DATA: [NodeId; 3] = [NodeId(11), NodeId(12), NodeId(13)];

fn address(node: NodeId) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], node.0 as u16))
}

fn node(id: NodeId, role: Role) -> Node {
    Node {
        id,
        role,
        address: address(id),
        http_address: address(id),
        zone: milpa_types::DEFAULT_ZONE.to_owned(),
        region: String::new(),
        state: NodeState::Active,
        disks: vec![],
        memory_bytes: 0,
        disks_draining: Vec::new(),
    }
}

fn view() -> VolumeView {
    let volume = VolumeId(1);
    let meta = |k: u32| MetaPartition {
        id: PartitionId(100 + u64::from(k)),
        volume,
        slot: MetaSlot(k),
        members: META.to_vec(),
        leader: None,
        takes_inodes: true,
        inodes: 0,
        dentries: 0,
        inode_highest: 0,
    };
    let data = |k: u64| DataPartition {
        id: PartitionId(200 + k),
        volume,
        epoch: Epoch(1),
        members: DATA.to_vec(),
        primary: DATA[k as usize % 3],
        replicas: DATA.to_vec(),
        takes_extents: true,
        used_bytes: 0,
        extents: 0,
    };
    let nodes = META.map(|id| node(id, Role::Meta)).into_iter();
    VolumeView {
        cluster: ClusterId(7),
        version: 1,
        volume: Volume { id: volume, name: "field".to_owned(), options: VolumeOptions::default() },
        meta: vec![meta(0), meta(1)],
        data: (0..3).map(data).collect(),
        nodes: nodes.chain(DATA.map(|id| node(id, Role::Data))).collect(),
    }
}

impl Cluster {
    pub fn new() -> Arc<Cluster> {
        let state = State { view: view(), meta: MetaNodes::new(), data: DataNodes::default() };
        Arc::new(Cluster { state: Mutex::new(state), rules: Mutex::default() })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub async fn client(self: &Arc<Self>) -> Client {
        self.client_with(|_| {}).await
    }

    pub async fn client_with(self: &Arc<Self>, set: impl FnOnce(&mut ClientConfig)) -> Client {
        let mut config = config();
        set(&mut config);
        let transport = Arc::new(Network(Arc::clone(self)));
        Client::connect_over(transport, config).await.unwrap()
    }

    /// One more node, which alone has this partition.
    pub fn add_meta_node(&self, id: NodeId, partition: PartitionId) {
        let mut state = self.lock();
        state.view.nodes.push(node(id, Role::Meta));
        let its = state.view.meta.iter_mut().filter(|meta| meta.id == partition);
        its.for_each(|meta| meta.members = vec![id]);
        state.meta.leaders.insert(partition, id);
    }

    /// From now on calls that the rule has a fault for get it.
    pub fn rule(&self, rule: impl FnMut(&Call<'_>) -> Option<Fault> + Send + 'static) {
        self.rules.lock().unwrap().push(Box::new(rule));
    }

    /// The first call that matches gets the fault; the others pass.
    pub fn once(&self, fault: Fault, matches: impl Fn(&Call<'_>) -> bool + Send + 'static) {
        let mut fault = Some(fault);
        self.rule(move |call| if matches(call) { fault.take() } else { None });
    }

    pub fn heal(&self) {
        self.rules.lock().unwrap().clear();
    }

    fn fault(&self, call: &Call<'_>) -> Option<Fault> {
        self.rules.lock().unwrap().iter_mut().find_map(|rule| rule(call))
    }
}

pub fn config() -> ClientConfig {
    ClientConfig::new(vec![address(NodeId(99))], "field", Key::random().unwrap())
}

/// One client's way to the servers.
pub struct Network(pub Arc<Cluster>);

/// Gives the caller's failure for faults before the request is carried out.
async fn before(fault: &Option<Fault>, to: SocketAddr, wait: Duration) -> Result<(), CallError> {
    match fault {
        Some(Fault::Unreachable) => {
            Err(CallError::Unreachable { address: to, reason: "refused".to_owned() })
        }
        Some(Fault::Hangs) => {
            tokio::time::sleep(wait).await;
            Err(CallError::TimedOut { address: to, waited_ms: wait.as_millis() as u64 })
        }
        _ => Ok(()),
    }
}

async fn after(fault: &Option<Fault>, to: SocketAddr) -> Result<(), CallError> {
    match fault {
        Some(Fault::AnswerLost) => return Err(CallError::Lost { address: to }),
        Some(Fault::Slow(time)) => tokio::time::sleep(*time).await,
        _ => tokio::time::sleep(Duration::from_micros(100)).await,
    }
    Ok(())
}

impl Transport for Network {
    fn meta<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a MetaRequest,
        wait: Duration,
    ) -> Boxed<'a, Result<MetaReply, CallError>> {
        Box::pin(async move {
            let node = NodeId(u32::from(to.port()));
            let fault = self.0.fault(&Call::Meta(node, request));
            before(&fault, to, wait).await?;
            let reply = match &fault {
                Some(Fault::Meta(error)) => Err(error.clone()),
                _ => self.0.lock().meta.answer(node, request),
            };
            after(&fault, to).await?;
            Ok(reply)
        })
    }

    fn data<'a>(
        &'a self,
        to: SocketAddr,
        request: &'a DataRequest,
        payload: Bytes,
        wait: Duration,
    ) -> Boxed<'a, DataCall> {
        Box::pin(async move {
            let node = NodeId(u32::from(to.port()));
            let fault = self.0.fault(&Call::Data(node, request));
            before(&fault, to, wait).await?;
            let (reply, mut bytes) = match &fault {
                Some(Fault::Data(error)) => (Err(error.clone()), Bytes::new()),
                _ => {
                    let mut state = self.0.lock();
                    let State { data, view, .. } = &mut *state;
                    data.answer(view, node, request, &payload)
                }
            };
            if matches!(fault, Some(Fault::Damaged)) && !bytes.is_empty() {
                let mut damaged = bytes.to_vec();
                damaged[0] ^= 1;
                bytes = damaged.into();
            }
            after(&fault, to).await?;
            Ok((reply, bytes))
        })
    }

    fn manager<'a>(
        &'a self,
        request: &'a ManagerRequest,
        _wait: Duration,
    ) -> Boxed<'a, Result<ManagerAnswer, ManagersError>> {
        Box::pin(async move {
            let ManagerRequest::GetVolume { name, known_version } = request else {
                panic!("a client asks for volumes only");
            };
            let view = self.0.lock().view.clone();
            if view.volume.name != *name {
                return Err(ManagerError::NoVolume { name: name.clone() }.into());
            }
            if view.version == *known_version {
                return Ok(ManagerAnswer::Unchanged);
            }
            Ok(ManagerAnswer::Volume(Box::new(view)))
        })
    }

    fn identified(&self, _cluster: ClusterId, _volume: VolumeId) {}
}

pub const OWNER: Creation = Creation { mode: 0o644, uid: 1, gid: 1 };

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u8, length: usize) -> Bytes {
    let byte = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed;
    (0..length).map(byte).collect::<Vec<u8>>().into()
}

/// Creates and opens a file in the root directory.
pub async fn create(client: &Client, file: &str) -> milpa_client::OpenFile {
    client.create(InodeId::ROOT, &name(file), OWNER, OpenFlags::read_write()).await.unwrap()
}

pub async fn read(client: &Client, file: &str) -> Vec<u8> {
    client.read_path(file.as_bytes()).await.unwrap()
}

pub async fn write(client: &Client, file: &str, content: &Bytes) {
    client.write_path(file.as_bytes(), content.clone(), OWNER, false).await.unwrap();
}
