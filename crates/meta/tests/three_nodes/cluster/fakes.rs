//! A manager that knows what the test tells it, and data nodes that only free.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Peer, Pool, Reply, Service, serve};
use milpa_types::{
    DataPartition, Epoch, FreedRange, ManagerError, MetaPartition, Node, NodeId, NodeState,
    PartitionId, Role, Volume, VolumeOptions, VolumeView,
};
use milpa_wire::data::{DataAnswer, DataReply, DataRequest};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};
use milpa_wire::meta::{CreateMetaPartition, MetaReply, MetaRequest};
use tokio::runtime::Runtime;

use super::{CLUSTER, VOLUME};

/// Serves on a thread of its own until the end of the process; gives its address.
fn serve_on_thread(
    identity: Arc<Identity>,
    service: impl FnOnce() -> Rc<dyn Service> + Send + 'static,
) -> SocketAddr {
    let (bound, address) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async move {
            let listener = milpa_host::net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
            bound.send(listener.local_addr().unwrap()).unwrap();
            serve(listener, identity, service()).await.unwrap();
        });
    });
    address.recv().unwrap()
}

/// The tiny manager.
pub struct Manager {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    pool: Pool,
    runtime: Runtime,
}

#[derive(Default)]
struct State {
    /// By incarnation.
    ids: BTreeMap<u128, NodeId>,
    nodes: BTreeMap<NodeId, Node>,
    nodes_version: u64,
    meta: Vec<MetaPartition>,
    data: Vec<DataPartition>,
}

impl Manager {
    pub fn start(secret: Key) -> Manager {
        let credential = Credential::Cluster(secret);
        let identity = Arc::new(Identity::new(Some(CLUSTER), Role::Manager, credential));
        let state: Arc<Mutex<State>> = Arc::default();
        let shared = Arc::clone(&state);
        let address = serve_on_thread(Arc::clone(&identity), move || Rc::new(Answers(shared)));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Manager { address, state, pool: Pool::new(identity), runtime: runtime.unwrap() }
    }

    pub fn address_of(&self, node: NodeId) -> SocketAddr {
        self.state.lock().unwrap().nodes[&node].address
    }

    pub fn ask(&self, to: SocketAddr, request: &MetaRequest) -> MetaReply {
        let wait = Duration::from_secs(5);
        let call = self.pool.call(to, Role::Meta, request, Bytes::new(), wait);
        let called = self.runtime.block_on(call);
        called.map_or(Err(milpa_types::MetaError::OutcomeUnknown), |(reply, _)| reply)
    }

    pub fn add_partition(&self, definition: &CreateMetaPartition) {
        self.state.lock().unwrap().meta.push(MetaPartition {
            id: definition.partition,
            volume: definition.volume,
            slot: definition.slot,
            members: definition.members.clone(),
            leader: None,
            takes_inodes: true,
            inodes: 0,
            dentries: 0,
            inode_highest: 0,
        });
    }

    pub fn add_data_partition(&self, id: PartitionId, replicas: &[NodeId]) {
        self.state.lock().unwrap().data.push(DataPartition {
            id,
            volume: VOLUME,
            epoch: Epoch(1),
            members: replicas.to_vec(),
            primary: replicas[0],
            replicas: replicas.to_vec(),
            takes_extents: true,
            used_bytes: 0,
            extents: 0,
        });
    }

    fn add_node(&self, node: Node) {
        let mut state = self.state.lock().unwrap();
        state.nodes_version += 1;
        state.nodes.insert(node.id, node);
    }
}

struct Answers(Arc<Mutex<State>>);

impl Service for Answers {
    fn request(&self, _peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let request: ManagerRequest = milpa_wire::decode(&body).unwrap();
        let answer: ManagerReply = self.0.lock().unwrap().answer(request);
        reply.send(&answer, Bytes::new());
    }
}

impl State {
    fn answer(&mut self, request: ManagerRequest) -> ManagerReply {
        match request {
            ManagerRequest::Register(register) => {
                let next = NodeId(1 + self.ids.len() as u32);
                let id = *self.ids.entry(register.incarnation).or_insert(next);
                self.nodes_version += 1;
                let node = node(id, register.role, register.address);
                self.nodes.insert(id, node);
                Ok(ManagerAnswer::Registered { cluster: CLUSTER, node: id })
            }
            ManagerRequest::Heartbeat(heartbeat) => {
                for report in heartbeat.meta {
                    let known = self.meta.iter_mut().find(|p| p.id == report.partition);
                    if let Some(partition) = known {
                        partition.leader = report.leader.or(partition.leader);
                    }
                }
                Ok(ManagerAnswer::Alive { nodes_version: self.nodes_version })
            }
            ManagerRequest::GetNodes => {
                Ok(ManagerAnswer::Nodes(self.nodes.values().cloned().collect()))
            }
            ManagerRequest::GetVolumeById { volume } if volume == VOLUME => {
                Ok(ManagerAnswer::Volume(Box::new(self.view())))
            }
            other => Err(ManagerError::NotAllowed { reason: format!("{other:?}") }),
        }
    }

    fn view(&self) -> VolumeView {
        VolumeView {
            cluster: CLUSTER,
            version: 1,
            volume: Volume {
                id: VOLUME,
                name: "home".to_owned(),
                options: VolumeOptions::default(),
            },
            meta: self.meta.clone(),
            data: self.data.clone(),
            nodes: self.nodes.values().cloned().collect(),
        }
    }
}

fn node(id: NodeId, role: Role, address: SocketAddr) -> Node {
    Node {
        id,
        role,
        address,
        http_address: address,
        zone: "default".to_owned(),
        region: String::new(),
        state: NodeState::Active,
        disks: Vec::new(),
        memory_bytes: 0,
        disks_draining: Vec::new(),
    }
}

/// A data node that notes what it is told to free.
pub struct DataNode {
    pub id: NodeId,
    freed: Arc<Mutex<Vec<FreedRange>>>,
    /// It answers "busy" to what concerns these.
    refused: Arc<Mutex<BTreeSet<PartitionId>>>,
}

impl DataNode {
    pub fn start(secret: &Key, manager: &Manager, id: NodeId) -> DataNode {
        let credential = Credential::Cluster(secret.clone());
        let identity = Arc::new(Identity::new(Some(CLUSTER), Role::Data, credential));
        identity.set_node(id);
        let (freed, refused) = (Arc::default(), Arc::default());
        let frees = Frees { freed: Arc::clone(&freed), refused: Arc::clone(&refused) };
        let address = serve_on_thread(identity, move || Rc::new(frees));
        manager.add_node(node(id, Role::Data, address));
        DataNode { id, freed, refused }
    }

    pub fn freed(&self) -> Vec<FreedRange> {
        self.freed.lock().unwrap().clone()
    }

    pub fn refuse(&self, partitions: &[PartitionId]) {
        *self.refused.lock().unwrap() = partitions.iter().copied().collect();
    }
}

struct Frees {
    freed: Arc<Mutex<Vec<FreedRange>>>,
    refused: Arc<Mutex<BTreeSet<PartitionId>>>,
}

impl Service for Frees {
    fn request(&self, _peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let DataRequest::Free { ranges } = milpa_wire::decode(&body).unwrap() else {
            panic!("a meta node asks a data node for nothing but to free");
        };
        let refused = self.refused.lock().unwrap();
        let answer: DataReply = if ranges.iter().any(|range| refused.contains(&range.partition)) {
            Err(milpa_types::DataError::Busy)
        } else {
            self.freed.lock().unwrap().extend(ranges);
            Ok(DataAnswer::Done)
        };
        reply.send(&answer, Bytes::new());
    }
}
