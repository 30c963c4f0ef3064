//! What data nodes need around them: a manager that only remembers who registered, and a meta node that judges offers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use bytes::Bytes;
use milpa_host::rpc::{Peer, Reply, Service};
use milpa_types::{
    Life, ManagerError, MetaPartition, MetaSlot, Node, NodeId, NodeState, PartitionId, Role,
    Volume, VolumeOptions, VolumeView,
};
use milpa_wire::manager::{Heartbeat, ManagerAnswer, ManagerReply, ManagerRequest, Register};
use milpa_wire::meta::{ExtentOffer, MetaAnswer, MetaReply, MetaRequest, Verdict};

use super::nodes::{CLUSTER, INODE, UNWANTED, VOLUME};

const JUDGE: NodeId = NodeId(100);

/// A meta node that keeps everything but what was written for [`UNWANTED`].
pub struct Judge;

impl Service for Judge {
    fn request(&self, _peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let MetaRequest::OfferExtents { offers, .. } = milpa_wire::decode(&body).unwrap() else {
            panic!("a data node asks nothing else");
        };
        let judge = |offer: &ExtentOffer| match offer.inode == UNWANTED {
            true => Verdict::Delete,
            false => Verdict::Keep,
        };
        let verdicts = offers.iter().map(judge).collect();
        let body: MetaReply = Ok(MetaAnswer::Verdicts(verdicts));
        reply.send(&body, Bytes::new());
    }
}

/// Gives ids in the order of first registration.
pub struct Registry {
    pub judge: SocketAddr,
    pub nodes: RefCell<Vec<(u128, Register)>>,
    pub version: RefCell<u64>,
    /// The newest life of each incarnation, and how often it was renewed.
    pub lives: RefCell<BTreeMap<u128, (u128, u32)>>,
    /// The last heartbeat of each node.
    pub heard: RefCell<BTreeMap<NodeId, Heartbeat>>,
}

impl Service for Registry {
    fn request(&self, _peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let body: ManagerReply = match milpa_wire::decode(&body).unwrap() {
            ManagerRequest::Register(register) => {
                self.live(register.incarnation, register.life, 0).map(|()| self.register(register))
            }
            ManagerRequest::RenewLife { incarnation, life, .. } => {
                self.live(incarnation, life, 1).map(|()| ManagerAnswer::Done)
            }
            ManagerRequest::Heartbeat(heartbeat) => {
                self.heard.borrow_mut().insert(heartbeat.node, heartbeat);
                Ok(ManagerAnswer::Alive { nodes_version: *self.version.borrow() })
            }
            ManagerRequest::GetNodes => Ok(ManagerAnswer::Nodes(self.list())),
            ManagerRequest::GetVolumeById { .. } => {
                Ok(ManagerAnswer::Volume(Box::new(self.view())))
            }
            _ => Ok(ManagerAnswer::Done),
        };
        reply.send(&body, Bytes::new());
    }
}

impl Registry {
    /// A life begins, if it follows on the newest one.
    fn live(&self, incarnation: u128, life: Life, renewals: u32) -> Result<(), ManagerError> {
        let mut lives = self.lives.borrow_mut();
        let (newest, renewed) = lives.entry(incarnation).or_insert((life.last, 0));
        if !life.follows(*newest) {
            return Err(ManagerError::NodeRefused { reason: "an older copy".to_owned() });
        }
        (*newest, *renewed) = (life.next, *renewed + renewals);
        Ok(())
    }

    fn register(&self, register: Register) -> ManagerAnswer {
        *self.version.borrow_mut() += 1;
        let mut nodes = self.nodes.borrow_mut();
        let known = nodes.iter().position(|(incarnation, _)| *incarnation == register.incarnation);
        let place = known.unwrap_or(nodes.len());
        let entry = (register.incarnation, register);
        if place < nodes.len() {
            nodes[place] = entry;
        } else {
            nodes.push(entry);
        }
        ManagerAnswer::Registered { cluster: CLUSTER, node: NodeId(place as u32 + 1) }
    }

    /// One meta partition on one meta node, the judge of offers.
    fn view(&self) -> VolumeView {
        let meta = MetaPartition {
            id: PartitionId(1),
            volume: VOLUME,
            slot: MetaSlot(0),
            members: vec![JUDGE],
            leader: None,
            takes_inodes: true,
            inodes: 0,
            dentries: 0,
            inode_highest: INODE.0,
        };
        let judge = Node {
            id: JUDGE,
            role: Role::Meta,
            address: self.judge,
            http_address: self.judge,
            zone: String::new(),
            region: String::new(),
            state: NodeState::Active,
            disks: Vec::new(),
            memory_bytes: 0,
            disks_draining: Vec::new(),
        };
        let volume = Volume { id: VOLUME, name: "v".into(), options: VolumeOptions::default() };
        let (meta, data, nodes) = (vec![meta], Vec::new(), vec![judge]);
        VolumeView { cluster: CLUSTER, version: 1, volume, meta, data, nodes }
    }

    fn list(&self) -> Vec<Node> {
        let nodes = self.nodes.borrow();
        let ids = (1..).map(NodeId);
        ids.zip(nodes.iter())
            .map(|(id, (_, register))| Node {
                id,
                role: Role::Data,
                address: register.address,
                http_address: register.http_address,
                zone: register.zone.clone(),
                region: String::new(),
                state: NodeState::Active,
                disks: register.disks.clone(),
                memory_bytes: 0,
                disks_draining: Vec::new(),
            })
            .collect()
    }
}
