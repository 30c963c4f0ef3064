//! Three meta nodes, a tiny manager and a client in one process, over real sockets and files.
//!
//! Each node has a thread and a runtime of its own; killing one drops its runtime with everything
//! in it, between any two of its steps.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod client;
pub mod fakes;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use milpa_host::keys::Key;
use milpa_meta::{MetaNodeConfig, Started, run_announced};
use milpa_types::{ClusterId, MetaSlot, NodeId, PartitionId, VolumeId, VolumeOptions};
use milpa_wire::meta::{CreateMetaPartition, MetaAnswer, MetaRequest};
use tokio::sync::oneshot;

use self::client::Client;
use self::fakes::{DataNode, Manager};

pub const CLUSTER: ClusterId = ClusterId(77);
pub const VOLUME: VolumeId = VolumeId(1);
/// Nothing here takes longer on any machine; what does has failed.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The whole.
pub struct Cluster {
    pub secret: Key,
    pub manager: Manager,
    pub nodes: Vec<Node>,
    directory: tempfile::TempDir,
    settings: fn(&mut MetaNodeConfig),
}

/// One meta node, running or not.
pub struct Node {
    pub config: MetaNodeConfig,
    pub id: NodeId,
    pub address: SocketAddr,
    running: Option<Running>,
}

struct Running {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Cluster {
    /// Three nodes with these settings and `partitions` partitions, each led by another node.
    pub fn start(partitions: u64, settings: fn(&mut MetaNodeConfig)) -> Cluster {
        milpa_host::telemetry::init_logs();
        let secret = Key::random().unwrap();
        let manager = Manager::start(secret.clone());
        let directory = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { secret, manager, nodes: Vec::new(), directory, settings };
        for number in 0..3 {
            cluster.add_node(number);
        }
        for slot in 0..partitions {
            cluster.create_partition(slot);
        }
        cluster
    }

    fn add_node(&mut self, number: usize) {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let directory = self.directory.path().join(format!("meta{number}"));
        let mut config = MetaNodeConfig::new(directory, any, any, vec![self.manager.address]);
        (self.settings)(&mut config);
        let mut node = Node { config, id: NodeId(0), address: any, running: None };
        node.start(&self.secret);
        self.nodes.push(node);
    }

    pub fn partition(slot: u64) -> PartitionId {
        PartitionId(100 + slot)
    }

    /// As the manager would: on all three, the first of which stands for election.
    pub fn create_partition(&mut self, slot: u64) {
        let mut members: Vec<NodeId> = self.nodes.iter().map(|node| node.id).collect();
        // In no order: the manager names whom it finds suited best first.
        let first = (slot as usize + 1) % members.len();
        members.rotate_left(first);
        let definition = CreateMetaPartition {
            joins: false,
            partition: Cluster::partition(slot),
            volume: VOLUME,
            options: VolumeOptions::default(),
            slot: MetaSlot(slot as u32),
            members,
        };
        self.manager.add_partition(&definition);
        for node in &self.nodes {
            let request = MetaRequest::CreatePartition(definition.clone());
            let answer = self.manager.ask(self.manager.address_of(node.id), &request);
            assert_eq!(answer, Ok(MetaAnswer::Done));
        }
    }

    pub fn client(&self) -> Client {
        Client::new(self)
    }

    /// Adds data nodes that hold one data partition.
    pub fn data_nodes(&self, count: u32) -> Vec<DataNode> {
        (0..count).map(|n| DataNode::start(&self.secret, &self.manager, NodeId(200 + n))).collect()
    }

    pub fn index_of(&self, node: NodeId) -> usize {
        self.nodes.iter().position(|n| n.id == node).unwrap()
    }

    /// Ends a node at once.
    pub fn kill(&mut self, index: usize) {
        self.nodes[index].kill();
    }

    /// Starts a node on what its directory holds.
    pub fn restart(&mut self, index: usize) {
        let secret = self.secret.clone();
        self.nodes[index].start(&secret);
        let node = &self.nodes[index];
        eventually("the node registers", || {
            (self.manager.address_of(node.id) == node.address).then_some(())
        });
    }

    /// The state hashes of all running replicas, once they are at the same index.
    pub fn equal_hashes(&self, partition: PartitionId) -> u64 {
        eventually("all replicas at one index", || {
            let hash = |node: &Node| {
                let request = MetaRequest::StateHash { partition };
                match self.manager.ask(self.manager.address_of(node.id), &request) {
                    Ok(MetaAnswer::StateHash { index, hash }) => Some((index, hash)),
                    _ => None,
                }
            };
            let running = self.nodes.iter().filter(|node| node.running.is_some());
            let hashes: Option<Vec<(u64, u64)>> = running.map(hash).collect();
            let hashes = hashes?;
            let (index, hash) = hashes[0];
            if hashes.iter().any(|(other, _)| *other != index) {
                return None;
            }
            assert!(hashes.iter().all(|(_, other)| *other == hash), "replicas differ: {hashes:?}");
            Some(hash)
        })
    }

    /// Flips a byte of a batch in the middle of a stopped node's log; gives the file.
    pub fn rot_log(&self, index: usize) -> PathBuf {
        let directory = self.nodes[index].config.directory.join("raft");
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let log = entries.filter(|path| path.extension().is_some_and(|e| e == "wal")).min();
        let log = log.expect("the node has a log");
        let mut bytes = std::fs::read(&log).unwrap();
        let batches: Vec<usize> =
            (0..bytes.len()).step_by(4096).filter(|at| bytes[*at..].starts_with(b"MWB1")).collect();
        // Not any block: behind the end of a longer batch it holds nothing that could be damaged. And the
        // last batch would be a torn tail.
        assert!(batches.len() > 2, "{batches:?}");
        bytes[batches[batches.len() / 2] + 8] ^= 1;
        std::fs::write(&log, bytes).unwrap();
        log
    }

    pub fn snapshots_of(&self, index: usize, partition: PartitionId) -> Vec<PathBuf> {
        let directory = self.nodes[index].config.directory.join("partitions");
        let entries = std::fs::read_dir(directory.join(partition.to_string())).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|e| e == "snapshot"));
        paths.sort();
        paths
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.iter_mut().for_each(Node::kill);
    }
}

impl Node {
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn start(&mut self, secret: &Key) {
        assert!(self.running.is_none());
        let (config, secret) = (self.config.clone(), secret.clone());
        let (announced, announcement) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let stop = async move { drop(stopped.await) };
            let announce = move |started: Started| announced.send(started).unwrap();
            let result = runtime.block_on(run_announced(config, CLUSTER, secret, announce, stop));
            if let Err(error) = result {
                tracing::error!(?error, "a node ended");
            }
        });
        let started = announcement.recv_timeout(PATIENCE).expect("the node starts");
        (self.id, self.address) = (started.node, started.address);
        self.running = Some(Running { stop, thread });
    }

    fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = running.stop.send(());
            running.thread.join().unwrap();
        }
    }
}

/// Waits until `look` sees what it looks for.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
