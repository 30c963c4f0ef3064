//! The machine that watches: it makes the volume, asks all nodes what they hold while the run goes
//! on, and at the end waits until everything is whole and compares the replicas.
//!
//! It asks what an operator can ask, over links that no fault touches.

mod leaving;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::keys::Key;
use milpa_host::managers::Managers;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_types::{
    DataPartition, Epoch, ExtentId, MetaPartition, Node, NodeId, NodeState, PartitionId, Role,
};
use milpa_wire::data::{
    Configuration, DataAnswer, DataPartitionReport, DataReply, DataRequest, ExtentDigest,
};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};
use milpa_wire::meta::{MetaAnswer, MetaPartitionReport, MetaReply, MetaRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use leaving::Leaving;

use crate::cluster::{self, CLUSTER, VOLUME};
use crate::history::SharedHistory;
use crate::options::Options;
use crate::trace;

/// What a node says when it finds bytes damaged on every replica. Their digests differ then: each has
/// them damaged in its own way.
pub(crate) const LOST: &str = "bytes are damaged on every replica";
/// Of each meta partition, as the managers' policy has it.
const META_REPLICAS: usize = 3;
/// Between two looks at all nodes.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// One node's answer.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
const MANAGERS_WAIT: Duration = Duration::from_secs(10);
/// What the extents of one partition that are open for small files may keep when all is deleted.
const OPEN_EXTENTS_BYTES: u64 = 64 << 10;

/// What the simulation wants to be waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Nothing but a look now and then.
    #[default]
    Watch,
    /// All replicas whole and equal.
    Whole,
    /// No inode but the root, no byte on the data nodes.
    Empty,
    /// One more meta or data partition.
    Grow,
}

/// What the observer and the simulation tell each other.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub wanted: Wanted,
    /// What is wanted has been reached.
    pub is_reached: bool,
    /// Why it has not, as of the last look.
    pub missing: String,
    /// The volume's key, once there is a volume.
    pub key: Option<Key>,
    /// The configuration of each epoch of each data partition.
    configurations: BTreeMap<(PartitionId, Epoch), Configuration>,
    pub replicas_compared: u64,
    pub bytes_compared: u64,
    pub splits: u64,
    /// Who is on its way out.
    pub leaving: Option<Leaving>,
    /// Whose node was removed: its disk can be emptied.
    pub has_left: Option<SocketAddr>,
    pub nodes_left: u64,
}

pub(crate) type SharedWatch = Rc<RefCell<Watch>>;

pub(crate) struct Observer {
    pub watch: SharedWatch,
    pub history: SharedHistory,
    pub options: Options,
    pool: Pool,
    managers: Managers,
}

/// What could not be had, in words.
type Missing<T> = Result<T, String>;

impl Observer {
    pub fn new(watch: SharedWatch, history: SharedHistory, options: Options) -> Observer {
        let credential = Credential::Cluster(cluster::secret());
        let pool = Pool::new(Arc::new(Identity::new(Some(CLUSTER), Role::Admin, credential)));
        let managers = Managers::new(pool.clone(), cluster::managers());
        Observer { watch, history, options, pool, managers }
    }

    /// Makes the volume, then watches for ever.
    pub async fn run(self) -> String {
        while let Err(missing) = self.make_volume().await {
            trace::note(&format!("no volume yet: {missing}"));
            tokio::time::sleep(LOOK_EVERY).await;
        }
        trace::note("the volume is made");
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.look().await;
            let weights = &self.options.weights;
            if weights.lose + weights.old_disk + weights.lie > 0 {
                self.remove_replaced().await;
            }
            self.see_off().await;
            let wanted = self.watch.borrow().wanted;
            let result = match wanted {
                Wanted::Watch => continue,
                Wanted::Whole => self.check_whole().await,
                Wanted::Empty => self.check_empty().await,
                Wanted::Grow => self.grow().await,
            };
            let mut watch = self.watch.borrow_mut();
            if watch.wanted == wanted {
                watch.is_reached = result.is_ok();
                watch.missing = result.err().unwrap_or_default();
            }
        }
    }

    async fn ask(&self, request: &ManagerRequest) -> Missing<ManagerAnswer> {
        self.managers.call(request, MANAGERS_WAIT).await.map_err(|error| error.to_string())
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        to: SocketAddr,
        role: Role,
        request: &Q,
    ) -> Missing<A> {
        let called = self.pool.call(to, role, request, Bytes::new(), ANSWER_WAIT).await;
        called.map(|(answer, _)| answer).map_err(|error| error.to_string())
    }

    async fn make_volume(&self) -> Missing<()> {
        let nodes = self.nodes().await?;
        let wanted = self.options.meta_nodes + self.options.data_nodes;
        if nodes.len() < wanted {
            return Err(format!("{} of {wanted} nodes have registered", nodes.len()));
        }
        let create = ManagerRequest::CreateVolume {
            name: VOLUME.to_owned(),
            options: cluster::volume_options(&self.options),
            meta_partitions: 0,
            data_partitions: self.options.data_partitions,
        };
        // An answer may have been lost: then there is a volume, or there will be.
        if let Err(missing) = self.ask(&create).await {
            trace::note(&format!("the volume was asked for: {missing}"));
        }
        match self.ask(&ManagerRequest::GetVolumeKey { name: VOLUME.to_owned() }).await? {
            ManagerAnswer::Key(key) => {
                let key = Key::from_hex(&key).map_err(|error| error.to_string())?;
                self.watch.borrow_mut().key = Some(key);
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    }

    async fn nodes(&self) -> Missing<Vec<Node>> {
        match self.ask(&ManagerRequest::ListNodes).await? {
            ManagerAnswer::Nodes(nodes) => Ok(nodes),
            other => Err(format!("{other:?}")),
        }
    }

    async fn partitions(&self) -> Missing<(Vec<MetaPartition>, Vec<DataPartition>)> {
        let request = ManagerRequest::ListPartitions { volume: Some(VOLUME.to_owned()) };
        match self.ask(&request).await? {
            ManagerAnswer::Partitions { meta, data } => Ok((meta, data)),
            other => Err(format!("{other:?}")),
        }
    }

    /// Asks every data server which configurations it has adopted.
    async fn look(&self) {
        for number in 0..self.options.data_nodes {
            let address = cluster::listens(cluster::Part::Data, number);
            let answer: Missing<DataReply> =
                self.call(address, Role::Data, &DataRequest::Report).await;
            if let Ok(Ok(DataAnswer::Report(report))) = answer {
                for report in report.partitions {
                    self.saw_configuration(report.partition, report.configuration);
                }
            }
        }
    }

    /// An operator says which nodes will not come back: those at whose address a newer one is.
    async fn remove_replaced(&self) {
        let Ok(nodes) = self.nodes().await else { return };
        let is_replaced =
            |node: &&Node| nodes.iter().any(|n| n.address == node.address && n.id > node.id);
        for node in nodes.iter().filter(is_replaced) {
            // Refused while it holds what is needed: it is asked again.
            let removed = self.ask(&ManagerRequest::RemoveNode { node: node.id }).await;
            trace::note(&format!("node {} is removed: {:?}", node.id, removed.err()));
        }
    }

    fn saw_configuration(&self, partition: PartitionId, seen: Configuration) {
        let key = (partition, seen.epoch);
        let mut watch = self.watch.borrow_mut();
        let known = watch.configurations.entry(key).or_insert_with(|| seen.clone());
        if *known != seen {
            let detail = format!("partition {partition}: {known:?} and {seen:?}");
            self.history.borrow_mut().violated("one configuration per epoch", detail);
        }
    }

    /// All nodes active, all partitions with all their members, all replicas equal.
    async fn check_whole(&self) -> Missing<()> {
        let nodes = self.nodes().await?;
        if let Some(node) = nodes.iter().find(|node| node.state != NodeState::Active) {
            return Err(format!("node {} is {:?}", node.id, node.state));
        }
        let addresses: BTreeMap<NodeId, SocketAddr> =
            nodes.iter().map(|node| (node.id, node.address)).collect();
        for address in cluster::managers() {
            self.check_manager(address).await?;
        }
        let (meta, data) = self.partitions().await?;
        let (mut replicas, mut bytes) = (0, 0);
        for partition in &meta {
            replicas += self.compare_meta(partition, &addresses).await?;
        }
        for partition in &data {
            if partition.members.len() != partition.replicas.len() {
                return Err(format!("{} has the members {:?}", partition.id, partition.members));
            }
            self.check_aligned(partition, &addresses).await?;
            let (compared, hashed) = self.compare_data(partition, &addresses).await?;
            replicas += compared;
            bytes += hashed;
        }
        let mut watch = self.watch.borrow_mut();
        (watch.replicas_compared, watch.bytes_compared) = (replicas, bytes);
        Ok(())
    }

    /// One that was damaged has set aside what it had, and has caught up.
    async fn check_manager(&self, address: SocketAddr) -> Missing<()> {
        let request = ManagerRequest::IsFounded;
        match self.call::<_, ManagerReply>(address, Role::Manager, &request).await? {
            Ok(ManagerAnswer::Founded(true)) => Ok(()),
            reply => Err(format!("manager {address} takes no part: {reply:?}")),
        }
    }

    async fn compare_meta(
        &self,
        partition: &MetaPartition,
        addresses: &BTreeMap<NodeId, SocketAddr>,
    ) -> Missing<u64> {
        if partition.members.len() < META_REPLICAS {
            return Err(format!("{} has the members {:?}", partition.id, partition.members));
        }
        let mut hashes: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        let mut places: BTreeMap<NodeId, u64> = BTreeMap::new();
        for node in &partition.members {
            let address = addresses.get(node).ok_or_else(|| format!("no address of {node}"))?;
            let request = MetaRequest::StateHash { partition: partition.id };
            match self.call::<_, MetaReply>(*address, Role::Meta, &request).await? {
                Ok(MetaAnswer::StateHash { index, hash }) => {
                    hashes.entry(index).or_default().insert(hash);
                    places.insert(*node, index);
                }
                other => return Err(format!("{} at {node}: {other:?}", partition.id)),
            }
        }
        if hashes.values().any(|at_index| at_index.len() > 1) {
            let detail = format!("meta partition {}: {hashes:x?}", partition.id);
            self.history.borrow_mut().violated("meta replicas equal", detail);
        }
        if hashes.len() > 1 {
            return Err(format!("replicas of {} are at {places:?}", partition.id));
        }
        Ok(partition.members.len() as u64)
    }

    /// No replica knows of extents that may differ.
    async fn check_aligned(
        &self,
        partition: &DataPartition,
        addresses: &BTreeMap<NodeId, SocketAddr>,
    ) -> Missing<()> {
        for node in &partition.members {
            let address = addresses.get(node).ok_or_else(|| format!("no address of {node}"))?;
            let answer =
                self.call::<_, DataReply>(*address, Role::Data, &DataRequest::Report).await?;
            let Ok(DataAnswer::Report(report)) = answer else {
                return Err(format!("{node} answers {answer:?}"));
            };
            let own = report.partitions.iter().find(|report| report.partition == partition.id);
            let own = own.ok_or_else(|| format!("{node} does not hold {}", partition.id))?;
            if own.unaligned > 0 || own.configuration.epoch != partition.epoch {
                return Err(format!("{} at {node}: {own:?}", partition.id));
            }
        }
        Ok(())
    }

    async fn compare_data(
        &self,
        partition: &DataPartition,
        addresses: &BTreeMap<NodeId, SocketAddr>,
    ) -> Missing<(u64, u64)> {
        let mut lengths: Vec<(ExtentId, u64)> = Vec::new();
        let mut expected: BTreeMap<ExtentId, ExtentDigest> = BTreeMap::new();
        let mut order = vec![partition.primary];
        order.extend(partition.members.iter().filter(|node| **node != partition.primary));
        for node in order {
            let address = addresses.get(&node).ok_or_else(|| format!("no address of {node}"))?;
            let request = DataRequest::Digest { partition: partition.id, lengths: lengths.clone() };
            let answer = self.call::<_, DataReply>(*address, Role::Data, &request).await?;
            let Ok(DataAnswer::Digest(digests)) = answer else {
                if trace::has_error(LOST) {
                    continue;
                }
                return Err(format!("{} at {node}: {answer:?}", partition.id));
            };
            // An extent without committed bytes need not exist everywhere.
            let held = digests.into_iter().filter(|digest| digest.length > 0);
            let held: BTreeMap<_, _> = held.map(|digest| (digest.extent, digest)).collect();
            if node == partition.primary {
                lengths = held.values().map(|digest| (digest.extent, digest.length)).collect();
                expected = held;
            } else if held != expected && !trace::has_error(LOST) {
                let all: BTreeSet<_> = held.keys().chain(expected.keys()).collect();
                let differs = all.into_iter().find(|id| held.get(id) != expected.get(id));
                let (here, there) =
                    differs.map_or((None, None), |id| (expected.get(id), held.get(id)));
                return Err(format!(
                    "{}: primary {} holds {here:?}, {node} holds {there:?}",
                    partition.id, partition.primary
                ));
            }
        }
        let bytes = expected.values().map(|digest| digest.length).sum();
        Ok((partition.members.len() as u64, bytes))
    }

    /// After everything was deleted: no inode, no operation, no byte is left.
    async fn check_empty(&self) -> Missing<()> {
        for number in 0..self.options.meta_nodes {
            let address = cluster::listens(cluster::Part::Meta, number);
            let answer: MetaReply = self.call(address, Role::Meta, &MetaRequest::Report).await?;
            let Ok(MetaAnswer::Report(report)) = answer else { return Err(format!("{answer:?}")) };
            let left = |report: &&MetaPartitionReport| {
                let counts = &report.statistics;
                // The root is in one of the partitions.
                counts.inodes > 1
                    || counts.dentries > 0
                    || counts.held > 0
                    || counts.operations > 0
                    || counts.freed_waiting > 0
            };
            if let Some(report) = report.partitions.iter().find(left) {
                return Err(format!("meta node {}: {report:?}", number + 1));
            }
        }
        for number in 0..self.options.data_nodes {
            let address = cluster::listens(cluster::Part::Data, number);
            let answer: DataReply = self.call(address, Role::Data, &DataRequest::Report).await?;
            let Ok(DataAnswer::Report(report)) = answer else { return Err(format!("{answer:?}")) };
            // A shared extent that is still open keeps its header and last block. Where the header of a
            // piece is lost, nobody finds the pieces behind it that no file ever got.
            let is_lost = trace::has_error(LOST);
            let left_bytes = if is_lost { 2 * self.options.small_extent_bytes_max } else { 0 };
            let is_left = |report: &&DataPartitionReport| {
                report.allocated_bytes > left_bytes + OPEN_EXTENTS_BYTES
            };
            if let Some(report) = report.partitions.iter().find(is_left) {
                return Err(format!("data node {}: {report:?}", number + 1));
            }
        }
        Ok(())
    }

    async fn grow(&self) -> Missing<()> {
        let is_meta = self.watch.borrow().splits.is_multiple_of(2);
        let (meta_partitions, data_partitions) = (u32::from(is_meta), u32::from(!is_meta));
        let name = VOLUME.to_owned();
        let grown =
            self.ask(&ManagerRequest::GrowVolume { name, meta_partitions, data_partitions }).await;
        trace::note(&format!("growing the volume: {:?}", grown.as_ref().err()));
        let mut watch = self.watch.borrow_mut();
        watch.splits += 1;
        // Something else may be wanted by now.
        if watch.wanted == Wanted::Grow {
            watch.wanted = Wanted::Watch;
        }
        Ok(())
    }
}
