//! A manager, a meta node and data nodes that answer from one table of names, inodes and extents. What happens to the volume
//! while it is checked, a test does before some request is answered.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_fsck::{Options, Report};
use milpa_host::keys::Key;
use milpa_host::managers::Managers;
use milpa_host::rpc::{self, Credential, Identity, Peer, Pool, Reply, Service};
use milpa_types::{
    ClusterId, DataError, DataPartition, Epoch, ExtentId, FileKind, FreedRange, InodeId,
    ManagerError, MetaError, MetaPartition, MetaSlot, Name, Node, NodeId, NodeState, PartitionId,
    Role, SessionId, Timestamp, VolumeId, VolumeOptions, VolumeView,
};
use milpa_wire::check::{
    CheckedInode, Fault, Looked, LookedInode, MetaCheck, MetaChecked, MetaRepair, names_wanted,
};
use milpa_wire::data::{DataAnswer, DataReply, DataRequest, ExtentState};
use milpa_wire::decode;
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};
use milpa_wire::meta::{ExtentOffer, MetaAnswer, MetaReply, MetaRequest, MetaStatistics, Verdict};
use tokio::task::LocalSet;

const CLUSTER: ClusterId = ClusterId(42);
const NODE: NodeId = NodeId(1);
const DATA_NODES: [NodeId; 3] = [NodeId(4), NodeId(5), NodeId(6)];
/// The data partition, if the volume has extents.
pub const DATA: PartitionId = PartitionId(50);
const PATIENCE: Duration = Duration::from_secs(60);

/// What the volume holds. The partition of slot `n` has id `n + 1`.
pub struct Volume {
    /// Partitions that the manager knows; 0 when it does not know the volume.
    pub partitions: u32,
    /// Replicas that the manager wants of each; there are three.
    pub meta_replicas: u8,
    pub inodes: BTreeMap<InodeId, FileKind>,
    /// Directory and name, and what is named.
    pub names: BTreeMap<(InodeId, Name), (InodeId, FileKind)>,
    pub faults: Vec<Fault>,
    /// Questions about content get answers to another one.
    pub has_strange_content: bool,
    /// Repairs that were asked for, in order.
    pub repairs: Vec<MetaRepair>,
    /// What each data node holds.
    pub extents: Vec<ExtentState>,
    /// What of it is freed.
    pub freed: Vec<FreedRange>,
    /// What becomes of these extents; the others are to be deleted.
    pub wanted: BTreeMap<ExtentId, Verdict>,
    /// Ranges on the free list of each meta partition.
    pub freed_waiting: u64,
    /// For the check.
    pub patience: Duration,
}

impl Volume {
    /// A root directory in one partition.
    pub fn new() -> Volume {
        Volume {
            partitions: 1,
            meta_replicas: 3,
            inodes: [(InodeId::ROOT, FileKind::Directory)].into(),
            names: BTreeMap::new(),
            faults: Vec::new(),
            has_strange_content: false,
            repairs: Vec::new(),
            extents: Vec::new(),
            freed: Vec::new(),
            wanted: BTreeMap::new(),
            freed_waiting: 0,
            patience: milpa_fsck::PATIENCE,
        }
    }

    /// Makes an extent of this length, for a file of this inode.
    pub fn extent(&mut self, extent: u64, inode: InodeId, length: u64) {
        self.extents.push(ExtentState {
            extent: ExtentId(extent),
            epoch: Epoch(1),
            inode,
            session: SessionId(7),
            length,
            committed: length,
            sealed: true,
            overwritten: false,
        });
    }

    /// Makes a name in the root directory.
    pub fn name(&mut self, name: &str, inode: InodeId) {
        let name = Name::new(name.as_bytes()).unwrap();
        self.names.insert((InodeId::ROOT, name), (inode, FileKind::Directory));
    }

    fn view(&self, meta_node: SocketAddr, data_node: SocketAddr) -> VolumeView {
        let id = VolumeId(1);
        let meta = (0..self.partitions).map(MetaSlot).map(|slot| MetaPartition {
            id: PartitionId(u64::from(slot.0) + 1),
            volume: id,
            slot,
            members: vec![NODE; 3],
            leader: Some(NODE),
            takes_inodes: true,
            inodes: 0,
            dentries: 0,
            inode_highest: 0,
        });
        let data = DataPartition {
            id: DATA,
            volume: id,
            epoch: Epoch(1),
            members: DATA_NODES.to_vec(),
            primary: DATA_NODES[0],
            replicas: DATA_NODES.to_vec(),
            takes_extents: true,
            used_bytes: 0,
            extents: 0,
        };
        let node = |id, role, address| Node {
            id,
            role,
            address,
            http_address: address,
            zone: String::new(),
            region: String::new(),
            state: NodeState::Active,
            disks: Vec::new(),
            memory_bytes: 0,
            disks_draining: Vec::new(),
        };
        let (cluster, meta) = (CLUSTER, meta.collect());
        let data = if self.extents.is_empty() { Vec::new() } else { vec![data] };
        let mut nodes = vec![node(NODE, Role::Meta, meta_node)];
        nodes.extend(DATA_NODES.map(|id| node(id, Role::Data, data_node)));
        VolumeView { cluster, version: 1, volume: home(), meta, data, nodes }
    }

    fn answer(&mut self, request: &MetaRequest) -> MetaReply {
        let slot = |partition: &PartitionId| MetaSlot(partition.0 as u32 - 1);
        match request {
            MetaRequest::Read { partition, .. } => {
                let slot = slot(partition);
                let own = self.inodes.keys().filter(|inode| inode.slot() == slot);
                let inode_highest = own.max().copied().unwrap_or(slot.first_inode());
                let freed_waiting = self.freed_waiting;
                let statistics =
                    MetaStatistics { inode_highest, freed_waiting, ..MetaStatistics::default() };
                Ok(MetaAnswer::Statistics(statistics))
            }
            MetaRequest::Check { partition, check } => {
                Ok(MetaAnswer::Checked(self.check(slot(partition), check)))
            }
            MetaRequest::Repair { repair, .. } => {
                self.repairs.push(repair.clone());
                Ok(MetaAnswer::Done)
            }
            _ => Err(MetaError::Invalid),
        }
    }

    fn check(&self, slot: MetaSlot, check: &MetaCheck) -> MetaChecked {
        let own = self.inodes.iter().filter(|(inode, _)| inode.slot() == slot);
        let names = self.names.iter().filter(|((directory, _), _)| directory.slot() == slot);
        match check {
            MetaCheck::Inodes { .. } => {
                let inodes = own.map(|(inode, kind)| {
                    let names = names_wanted(*inode, *kind, 2);
                    CheckedInode { inode: *inode, kind: *kind, names }
                });
                let faults = self.faults.iter().filter(|fault| fault.inode.slot() == slot);
                MetaChecked::Inodes {
                    inodes: inodes.collect(),
                    faults: faults.cloned().collect(),
                    unlisted: 0,
                    dentries: 0,
                    segments: 0,
                    next: None,
                }
            }
            MetaCheck::Dentries { first, last, .. } => {
                let named = names.map(|(_, named)| *named);
                let named = named.filter(|(inode, _)| (first..=last).contains(&inode)).collect();
                MetaChecked::Dentries { named, next: None }
            }
            MetaCheck::Names { inodes } => {
                MetaChecked::Names(inodes.iter().map(|inode| self.look(slot, *inode)).collect())
            }
            MetaCheck::Segments { .. } if self.has_strange_content => {
                MetaChecked::Offers(Vec::new())
            }
            MetaCheck::Segments { .. } => MetaChecked::Segments { found: Vec::new(), next: None },
            MetaCheck::Offers { offers } => {
                let verdict = |offer: &ExtentOffer| self.wanted.get(&offer.range.extent).copied();
                let verdicts = offers.iter().map(|it| verdict(it).unwrap_or(Verdict::Delete));
                MetaChecked::Offers(verdicts.collect())
            }
        }
    }

    fn answer_data(&self, request: &DataRequest) -> DataReply {
        match request {
            DataRequest::ExtentInfo { extents, .. } => {
                let is_asked =
                    |it: &&ExtentState| extents.is_empty() || extents.contains(&it.extent);
                Ok(DataAnswer::Extents(self.extents.iter().filter(is_asked).copied().collect()))
            }
            DataRequest::Freed { extents, .. } => {
                let is_asked = |it: &&FreedRange| extents.contains(&it.extent);
                Ok(DataAnswer::Freed(self.freed.iter().filter(is_asked).copied().collect()))
            }
            DataRequest::LostBlocks { .. } => Ok(DataAnswer::LostBlocks(Vec::new())),
            _ => Err(DataError::Invalid),
        }
    }

    fn look(&self, slot: MetaSlot, inode: InodeId) -> Looked {
        let kind = self.inodes.get(&inode).filter(|_| inode.slot() == slot);
        let names = self
            .names
            .iter()
            .filter(|((directory, _), (named, _))| (directory.slot(), *named) == (slot, inode));
        let examples: Vec<_> =
            names.map(|((directory, name), (_, kind))| (*directory, name.clone(), *kind)).collect();
        Looked {
            inode: kind.map(|kind| LookedInode {
                kind: *kind,
                link_count: 2,
                size: 0,
                changed: Timestamp(1),
                is_in_operation: false,
                is_held: false,
            }),
            names: examples.len() as u64,
            digest: examples.len() as u64,
            is_locked: false,
            examples,
        }
    }
}

/// The volume, as the managers know it.
fn home() -> milpa_types::Volume {
    let (name, options) = ("home".to_owned(), VolumeOptions::default());
    milpa_types::Volume { id: VolumeId(1), name, options }
}

type BeforeMeta = dyn FnMut(&MetaRequest, &mut Volume);

/// All servers.
struct Fake {
    volume: RefCell<Volume>,
    /// What a test does before a request is answered.
    before: RefCell<Box<BeforeMeta>>,
    meta_address: Cell<SocketAddr>,
    data_address: Cell<SocketAddr>,
}

impl Fake {
    fn manager(&self, request: &ManagerRequest) -> ManagerReply {
        match request {
            ManagerRequest::GetVolumeById { .. } if self.volume.borrow().partitions == 0 => {
                Err(ManagerError::NoVolume { name: "home".to_owned() })
            }
            ManagerRequest::GetVolumeById { .. } => {
                let view =
                    self.volume.borrow().view(self.meta_address.get(), self.data_address.get());
                Ok(ManagerAnswer::Volume(Box::new(view)))
            }
            ManagerRequest::GetMetaReplicas => {
                Ok(ManagerAnswer::MetaReplicas { wanted: self.volume.borrow().meta_replicas })
            }
            _ => Err(ManagerError::Invalid { problems: Vec::new() }),
        }
    }

    fn meta(&self, request: &MetaRequest) -> MetaReply {
        let mut volume = self.volume.borrow_mut();
        (self.before.borrow_mut())(request, &mut volume);
        volume.answer(request)
    }
}

struct FakeService(Rc<Fake>, Role);

impl Service for FakeService {
    fn request(&self, _peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        match self.1 {
            Role::Manager => reply.send(&self.0.manager(&decode(&body).unwrap()), Bytes::new()),
            Role::Data => {
                let answer = self.0.volume.borrow().answer_data(&decode(&body).unwrap());
                reply.send(&answer, Bytes::new());
            }
            _ => reply.send(&self.0.meta(&decode(&body).unwrap()), Bytes::new()),
        }
    }
}

/// Checks and repairs a volume to which `before` does something before a meta request is answered; the
/// report, and what is left of the volume.
pub fn check(
    volume: Volume,
    before: impl FnMut(&MetaRequest, &mut Volume) + 'static,
) -> (Report, Volume) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let secret = Key::random().unwrap();
        let fake = Rc::new(Fake {
            volume: RefCell::new(volume),
            before: RefCell::new(Box::new(before)),
            meta_address: Cell::new(([127, 0, 0, 1], 0).into()),
            data_address: Cell::new(([127, 0, 0, 1], 0).into()),
        });
        let manager = serve(&fake, &secret, Role::Manager).await;
        fake.meta_address.set(serve(&fake, &secret, Role::Meta).await);
        fake.data_address.set(serve(&fake, &secret, Role::Data).await);
        let managers = Managers::new(Pool::new(identity(&secret, Role::Admin)), vec![manager]);
        let (home, tell) = (home(), &mut |_, _: &_| {});
        let options = Options { repairs: true, patience: fake.volume.borrow().patience };
        let checked = milpa_fsck::check(&managers, &home, &options, tell);
        let report = tokio::time::timeout(PATIENCE, checked).await.unwrap();
        let left = std::mem::replace(&mut *fake.volume.borrow_mut(), Volume::new());
        (report, left)
    })
}

async fn serve(fake: &Rc<Fake>, secret: &Key, role: Role) -> SocketAddr {
    let listener = milpa_host::net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = Rc::new(FakeService(Rc::clone(fake), role));
    tokio::task::spawn_local(rpc::serve(listener, identity(secret, role), service));
    address
}

fn identity(secret: &Key, role: Role) -> Arc<Identity> {
    Arc::new(Identity::new(Some(CLUSTER), role, Credential::Cluster(secret.clone())))
}
