//! A client as simple as can be: it follows leaders and repeats requests with the same id.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_types::{
    FileKind, InodeId, MetaError, Name, Next, NodeId, PartitionId, Role, SessionId, Timestamp,
};
use milpa_wire::meta::{
    Entry, MetaAnswer, MetaRead, MetaReply, MetaRequest, MetaWrite, NewInode, RequestId,
};
use tokio::runtime::Runtime;

use super::{Cluster, PATIENCE, VOLUME};

/// One mount, so to speak.
pub struct Client {
    pub session: SessionId,
    pool: Pool,
    runtime: Runtime,
    nodes: Vec<NodeId>,
    sequences: BTreeMap<PartitionId, u64>,
    leaders: BTreeMap<PartitionId, NodeId>,
}

/// What each request waits for one node.
const WAIT: Duration = Duration::from_secs(2);

impl Client {
    pub fn new(cluster: &Cluster) -> Client {
        let key = cluster.secret.volume_key(VOLUME);
        let credential = Credential::Volume { name: "home".to_owned(), key };
        let identity = Identity::new(Some(super::CLUSTER), Role::Client, credential);
        identity.set_volume(VOLUME);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Client {
            session: SessionId(milpa_host::entropy::u128().unwrap()),
            pool: Pool::new(Arc::new(identity)),
            runtime: runtime.unwrap(),
            nodes: cluster.nodes.iter().map(|node| node.id).collect(),
            sequences: BTreeMap::new(),
            leaders: BTreeMap::new(),
        }
    }

    /// One try with one node.
    pub fn try_once(&self, to: SocketAddr, request: &MetaRequest, wait: Duration) -> MetaReply {
        let call = self.pool.call(to, Role::Meta, request, Bytes::new(), wait);
        match self.runtime.block_on(call) {
            Ok((reply, _)) => reply,
            Err(error) if error.outcome_unknown() => Err(MetaError::OutcomeUnknown),
            Err(_) => Err(MetaError::Busy),
        }
    }

    /// Repeats the request until the leader gives a definite answer.
    pub fn call(
        &mut self,
        cluster: &Cluster,
        partition: PartitionId,
        request: &MetaRequest,
    ) -> MetaReply {
        let end = Instant::now() + PATIENCE;
        let mut turn = 0;
        loop {
            let node = *self.leaders.get(&partition).unwrap_or(&self.nodes[turn % 3]);
            turn += 1;
            let reply = self.try_once(cluster.manager.address_of(node), request, WAIT);
            let Err(error) = &reply else {
                self.leaders.insert(partition, node);
                return reply;
            };
            assert!(Instant::now() < end, "no definite answer: {error} to {request:?}");
            match (error, error.next()) {
                (MetaError::NotLeader { leader: Some(leader) }, _) if *leader != node => {
                    self.leaders.insert(partition, *leader);
                }
                (_, Next::RetrySame | Next::RefreshRoute) => drop(self.leaders.remove(&partition)),
                _ => return reply,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The node that last answered for the partition.
    pub fn leader(&self, partition: PartitionId) -> NodeId {
        self.leaders[&partition]
    }

    pub fn next_id(&mut self, partition: PartitionId) -> RequestId {
        let sequence = self.sequences.entry(partition).or_insert(0);
        *sequence += 1;
        RequestId { session: self.session, sequence: *sequence, unanswered: *sequence }
    }

    pub fn write_with_id(
        &mut self,
        cluster: &Cluster,
        partition: PartitionId,
        id: RequestId,
        write: MetaWrite,
    ) -> MetaReply {
        let request = MetaRequest::Write { partition, id, now: Timestamp(1_000), write };
        self.call(cluster, partition, &request)
    }

    pub fn write(
        &mut self,
        cluster: &Cluster,
        partition: PartitionId,
        write: MetaWrite,
    ) -> MetaReply {
        let id = self.next_id(partition);
        self.write_with_id(cluster, partition, id, write)
    }

    pub fn open_session(&mut self, cluster: &Cluster, partitions: u64) {
        for slot in 0..partitions {
            let partition = Cluster::partition(slot);
            let opened = self.write(cluster, partition, MetaWrite::OpenSession);
            assert_eq!(opened, Ok(MetaAnswer::Done));
        }
    }

    pub fn read(&mut self, cluster: &Cluster, partition: PartitionId, read: MetaRead) -> MetaReply {
        self.call(cluster, partition, &MetaRequest::Read { partition, reader: None, read })
    }

    /// A file in the first partition's root.
    pub fn create(&mut self, cluster: &Cluster, text: &str) -> Entry {
        let partition = Cluster::partition(0);
        match self.write(cluster, partition, create(InodeId::ROOT, text, FileKind::File, None)) {
            Ok(MetaAnswer::Entry(entry)) => entry,
            other => panic!("create {text}: {other:?}"),
        }
    }

    pub fn lookup(
        &mut self,
        cluster: &Cluster,
        parent: InodeId,
        text: &str,
    ) -> Result<Entry, MetaError> {
        let partition = Cluster::partition(u64::from(parent.slot().0));
        let read = MetaRead::Lookup { parent, name: name(text) };
        match self.read(cluster, partition, read)? {
            MetaAnswer::Entry(entry) => Ok(entry),
            other => panic!("lookup {text}: {other:?}"),
        }
    }

    /// All names in a directory.
    pub fn names(&mut self, cluster: &Cluster, parent: InodeId) -> Vec<String> {
        let partition = Cluster::partition(u64::from(parent.slot().0));
        let mut names: Vec<String> = Vec::new();
        loop {
            let after = names.last().map(|last| name(last));
            let read = MetaRead::ReadDirectory { parent, after, limit: 100, with_attributes: true };
            match self.read(cluster, partition, read) {
                Ok(MetaAnswer::Page { entries, end }) => {
                    names.extend(entries.iter().map(|entry| entry.name.to_string()));
                    if end {
                        return names;
                    }
                }
                other => panic!("readdir: {other:?}"),
            }
        }
    }
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A create of `text`, in the partition of slot `placement` if given.
pub fn create(
    parent: InodeId,
    text: &str,
    kind: FileKind,
    placement: Option<milpa_types::MetaSlot>,
) -> MetaWrite {
    let inode = NewInode { kind, mode: 0o755, uid: 1, gid: 1, device: 0, target: Vec::new() };
    let (name, content) = (name(text), None);
    MetaWrite::Create { parent, name, inode, placement, open_existing: false, content }
}
