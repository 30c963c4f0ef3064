//! Three real data nodes on the loopback interface, each on a thread of its own, and a manager
//! that only remembers who registered.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use milpa_data::{DataNodeConfig, DiskConfig, Started, run_announced};
use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Pool, Service, serve};
use milpa_types::{
    ClusterId, DiskId, EXTENT_BYTES_MAX, Epoch, ExtentId, InodeId, NodeId, PartitionId, Role,
    SessionId, VolumeId,
};
use milpa_wire::data::*;
use milpa_wire::frame::crc32c;
use milpa_wire::manager::Heartbeat;

use super::stand_ins::{Judge, Registry};

mod requests;

pub const PARTITION: PartitionId = PartitionId(11);
pub const VOLUME: VolumeId = VolumeId(1);
pub const INODE: InodeId = InodeId(5);
/// An inode that nobody publishes to.
pub const UNWANTED: InodeId = InodeId(6);
pub const SESSION: SessionId = SessionId(77);
pub const CLUSTER: ClusterId = ClusterId(42);
/// Longer than anything takes; a test that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(30);
const CALL_WAIT: Duration = Duration::from_secs(10);
/// Milliseconds for which entries are kept for a member that is away, and well above that.
const LOG_TRIM_MS: u64 = 1_000;
const LOG_TRIMMED_AFTER: Duration = Duration::from_millis(3 * LOG_TRIM_MS);

fn secret() -> Key {
    Key::from_hex(&"5a".repeat(32)).unwrap()
}

/// Serves as this role on a free port.
async fn serve_as(role: Role, service: Rc<dyn Service>) -> SocketAddr {
    let listener = milpa_host::net::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let identity = Identity::new(Some(CLUSTER), role, Credential::Cluster(secret()));
    tokio::task::spawn_local(serve(listener, Arc::new(identity), service));
    address
}

/// A running node: dropping `stop` ends it as a crash would, without a goodbye.
struct Running {
    stop: tokio::sync::oneshot::Sender<()>,
    thread: std::thread::JoinHandle<()>,
    started: Started,
}

/// The cluster and the three kinds of callers it has.
pub struct Cluster {
    base: tempfile::TempDir,
    manager: SocketAddr,
    registry: Rc<Registry>,
    running: BTreeMap<u32, Running>,
    pub as_manager: Pool,
    pub as_admin: Pool,
    pub as_meta: Pool,
    pub as_client: Pool,
}

impl Cluster {
    /// Starts the manager and three nodes, one after the other, so that they get ids 1, 2, 3.
    pub async fn start() -> Cluster {
        milpa_host::telemetry::init_logs();
        let pool = |role| {
            let credential = Credential::Cluster(secret());
            Pool::new(Arc::new(Identity::new(Some(CLUSTER), role, credential)))
        };
        let client = Identity::new(
            Some(CLUSTER),
            Role::Client,
            Credential::Volume { name: "v".into(), key: secret().volume_key(VOLUME) },
        );
        client.set_volume(VOLUME);
        let judge = serve_as(Role::Meta, Rc::new(Judge)).await;
        let (nodes, version, lives, heard) = Default::default();
        let registry = Rc::new(Registry { judge, nodes, version, lives, heard });
        let manager = serve_as(Role::Manager, registry.clone()).await;
        let mut cluster = Cluster {
            // Not in what may be a tmpfs: there is no device behind that.
            base: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            manager,
            registry,
            running: BTreeMap::new(),
            as_manager: pool(Role::Manager),
            as_admin: pool(Role::Admin),
            as_meta: pool(Role::Meta),
            as_client: Pool::new(Arc::new(client)),
        };
        for node in 1..=3 {
            cluster.start_node(node).await;
        }
        cluster
    }

    fn config(&self, node: u32) -> DataNodeConfig {
        let directory: PathBuf = self.base.path().join(format!("node{node}"));
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let disks = [1, 2].map(|disk| {
            let mut disk = DiskConfig::new(directory.join(format!("disk{disk}")));
            disk.reserve_bytes = 1 << 20;
            disk
        });
        let managers = vec![self.manager];
        let mut config = DataNodeConfig::new(directory, disks.to_vec(), any, any, managers);
        config.member_silent_ms = 500;
        config.log_trim_ms = LOG_TRIM_MS;
        config.writer_silent_ms = 1_000;
        config.scrub_period_s = 10;
        config
    }

    pub async fn start_node(&mut self, node: u32) {
        self.start_node_with(node, self.config(node)).await;
    }

    /// A node that looks for no damage.
    pub async fn start_node_without_scrub(&mut self, node: u32) {
        let config = DataNodeConfig { scrub_period_s: 0, ..self.config(node) };
        self.start_node_with(node, config).await;
    }

    /// A node whose disks have no more room than they are to keep.
    pub async fn start_full_node(&mut self, node: u32) {
        let mut config = self.config(node);
        // All that is free is of the reserve, and that is not exhausted.
        let free = milpa_host::disk::space(self.base.path()).unwrap().free;
        config.disks.iter_mut().for_each(|disk| disk.reserve_bytes = (free * 2).min(1 << 40));
        self.start_node_with(node, config).await;
    }

    /// A node that repeats all overwrites when it starts again.
    pub async fn start_node_with_long_log(&mut self, node: u32) {
        let config = DataNodeConfig { log_trim_ms: 600_000, ..self.config(node) };
        self.start_node_with(node, config).await;
    }

    /// A node that takes so many bytes a second from other replicas, and reads nothing by itself.
    pub async fn start_slow_filling_node(&mut self, node: u32, repair_bytes_per_second: u64) {
        let slow = DataNodeConfig { repair_bytes_per_second, ..self.config(node) };
        self.start_node_with(node, DataNodeConfig { scrub_period_s: 0, ..slow }).await;
    }

    /// A node whose clock brings a heartbeat each second.
    pub async fn start_rarely_heard_node(&mut self, node: u32) {
        let config = DataNodeConfig { heartbeat_ms: 1_000, ..self.config(node) };
        self.start_node_with(node, config).await;
    }

    /// A node that fills slowly and keeps a long log.
    pub async fn start_slow_filling_node_with_long_log(&mut self, node: u32, bytes_a_second: u64) {
        let slow = DataNodeConfig { repair_bytes_per_second: bytes_a_second, ..self.config(node) };
        let slow = DataNodeConfig { scrub_period_s: 0, log_trim_ms: 600_000, ..slow };
        self.start_node_with(node, slow).await;
    }

    /// A node that tells of another life every second.
    pub async fn start_short_lived_node(&mut self, node: u32) {
        let config = DataNodeConfig { life_ms: 1_000, ..self.config(node) };
        self.start_node_with(node, config).await;
    }

    /// How often nodes have told of another life while they ran.
    pub fn renewals(&self) -> u32 {
        self.registry.lives.borrow().values().map(|(_, renewed)| renewed).sum()
    }

    /// What the managers last heard from a node.
    pub fn heard(&self, node: u32) -> Option<Heartbeat> {
        self.registry.heard.borrow().get(&NodeId(node)).cloned()
    }

    /// Nothing was heard from a node yet.
    pub fn forget_heard(&self, node: u32) {
        self.registry.heard.borrow_mut().remove(&NodeId(node));
    }

    /// Where a node keeps what its replica knows of its configuration.
    pub fn state_file(&self, node: u32) -> PathBuf {
        let place = format!("node{node}/disk{}/states/{PARTITION}", disk_of(node));
        self.base.path().join(place)
    }

    /// A backup of all that a node has.
    pub fn copy_directory(&self, node: u32, to: &Path) {
        copy(&self.base.path().join(format!("node{node}")), to);
    }

    /// Puts a copy in the place of a node's directory.
    pub fn put_back(&self, node: u32, from: &Path) {
        let directory = self.base.path().join(format!("node{node}"));
        std::fs::remove_dir_all(&directory).unwrap();
        copy(from, &directory);
    }

    /// Puts what a copy has of partitions in the place of a node's, and leaves it its life: its disk has lied for long.
    pub fn put_back_disk(&self, node: u32, from: &Path) {
        for place in ["partitions", "raft", "states"] {
            let place = format!("disk{}/{place}", disk_of(node));
            let to = self.base.path().join(format!("node{node}")).join(&place);
            std::fs::remove_dir_all(&to).unwrap();
            copy(&from.join(&place), &to);
        }
    }

    /// Starts a node that must end before it serves; says why it did.
    pub async fn start_in_vain(&self, node: u32) -> String {
        let config = self.config(node);
        let ended = tokio::task::spawn_blocking(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let serves = |_| panic!("it serves");
            let ran = run_announced(config, CLUSTER, secret(), serves, std::future::pending());
            runtime.block_on(ran).unwrap_err()
        });
        format!("{:?}", tokio::time::timeout(PATIENCE, ended).await.unwrap().unwrap())
    }

    /// All three restart where they were, while no manager answers.
    pub async fn restart_without_managers(&mut self) {
        until("everybody has written down where the others are", async || {
            let book = |node| self.base.path().join(format!("node{node}/nodes"));
            let lines = |node| Some(std::fs::read_to_string(book(node)).ok()?.lines().count());
            [1, 2, 3].into_iter().all(|node| lines(node) == Some(3)).then_some(())
        })
        .await;
        let listen = [1, 2, 3].map(|node| self.running[&node].started.address);
        for node in [1, 2, 3] {
            self.kill_node(node).await;
        }
        for (node, listen) in (1..).zip(listen) {
            // Port 1 is nobody's.
            let managers = vec!["127.0.0.1:1".parse().unwrap()];
            let config =
                DataNodeConfig { listen, managers, managers_wait_ms: 500, ..self.config(node) };
            self.start_node_with(node, config).await;
        }
    }

    async fn start_node_with(&mut self, node: u32, config: DataNodeConfig) {
        let (announce, announced) = tokio::sync::oneshot::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let log = tracing::dispatcher::get_default(Clone::clone);
        let thread = std::thread::spawn(move || {
            let _log = tracing::dispatcher::set_default(&log);
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let announce = |started| {
                let _ = announce.send(started);
            };
            let stop = async {
                let _ = stopped.await;
            };
            runtime.block_on(run_announced(config, CLUSTER, secret(), announce, stop)).unwrap();
        });
        let started = tokio::time::timeout(PATIENCE, announced).await.unwrap().unwrap();
        assert_eq!(started.node, NodeId(node));
        self.running.insert(node, Running { stop, thread, started });
    }

    /// Ends a node without a goodbye, and waits until its files are let go.
    pub async fn kill_node(&mut self, node: u32) {
        let running = self.running.remove(&node).unwrap();
        drop(running.stop);
        let thread = running.thread;
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
    }

    /// All at once.
    pub async fn kill_nodes(&mut self, nodes: &[u32]) {
        let stopped = nodes.iter().map(|node| self.running.remove(node).unwrap().thread);
        let threads: Vec<_> = stopped.collect();
        for thread in threads {
            tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
        }
    }

    pub async fn stop(&mut self) {
        let running: Vec<u32> = self.running.keys().copied().collect();
        self.kill_nodes(&running).await;
    }

    /// Flips a bit of the extent's file on one node, behind its back.
    pub fn damage(&self, node: u32, offset: u64) {
        use std::os::unix::fs::FileExt;
        let disk = disk_of(node);
        let place = format!("node{node}/disk{disk}/partitions/{PARTITION}");
        let directory = self.base.path().join(place);
        let mut damaged = 0;
        for entry in std::fs::read_dir(directory).unwrap() {
            let file = std::fs::File::options().read(true).write(true).open(entry.unwrap().path());
            let file = file.unwrap();
            let mut byte = [0];
            if file.metadata().unwrap().len() > (1 << 20) {
                file.read_exact_at(&mut byte, offset).unwrap();
                file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
                damaged += 1;
            }
        }
        assert_eq!(damaged, 1, "the test has one extent");
    }

    /// Takes an extent from a node that does not run, as a power cut takes one that was never flushed.
    pub fn lose_extent(&self, node: u32, extent: ExtentId) {
        std::fs::remove_file(self.extent_file(node, extent)).unwrap();
    }

    /// As [`lose_extent`](Cluster::lose_extent), but for the file and its header.
    pub fn empty_extent(&self, node: u32, extent: ExtentId) {
        let file =
            std::fs::File::options().write(true).open(self.extent_file(node, extent)).unwrap();
        file.set_len(EXTENT_BYTES_MAX + 1024).unwrap();
    }

    /// The labels of the disk that has a node's replica, and of its other one.
    pub fn disk_labels(&self, node: u32) -> (PathBuf, PathBuf) {
        let DiskId(used) = disk_of(node);
        let label = |disk| self.base.path().join(format!("node{node}/disk{disk}/DISK"));
        (label(used), label(3 - used))
    }

    /// What says whose a replica's directory is.
    pub fn label_file(&self, node: u32) -> PathBuf {
        let place = format!("node{node}/disk{}/partitions/{PARTITION}/label", disk_of(node));
        self.base.path().join(place)
    }

    /// No room to write down what a replica knows of its configuration.
    pub fn fill_disk_of_states(&self, node: u32) {
        let new = format!("node{node}/disk{}/states/{PARTITION}.new", disk_of(node));
        std::os::unix::fs::symlink("/dev/full", self.base.path().join(new)).unwrap();
    }

    pub fn extent_file(&self, node: u32, extent: ExtentId) -> PathBuf {
        let disk = disk_of(node);
        let place =
            format!("node{node}/disk{disk}/partitions/{PARTITION}/{:016x}.extent", extent.0);
        self.base.path().join(place)
    }

    /// Bytes of an extent's file that the kernel keeps in memory.
    #[allow(unsafe_code)]
    pub fn cached_bytes(&self, node: u32, extent: ExtentId) -> usize {
        const PAGE: usize = 4096;
        let file = std::fs::File::open(self.extent_file(node, extent)).unwrap();
        let length = file.metadata().unwrap().len() as usize;
        let mut pages = vec![0_u8; length.div_ceil(PAGE)];
        let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: the mapping has this length and lives until munmap; `pages` has a byte for each page.
        unsafe {
            let map = libc::mmap(std::ptr::null_mut(), length, read, shared, file.as_raw_fd(), 0);
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mincore(map, length, pages.as_mut_ptr().cast()), 0);
            libc::munmap(map, length);
        }
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE
    }

    /// Flips a bit in the middle of an extent's file.
    pub fn rot_extent(&self, node: u32, extent: ExtentId, at: u64) {
        let mut options = std::fs::File::options();
        let file = options.read(true).write(true).open(self.extent_file(node, extent)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
}

/// The replicas of a partition lie on disks of different numbers.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

fn disk_of(node: u32) -> DiskId {
    DiskId(1 + node % 2)
}

pub fn other_disk_of(node: u32) -> DiskId {
    DiskId(3 - disk_of(node).0)
}

/// The first member is the primary.
pub fn configuration(epoch: u64, members: &[u32]) -> Configuration {
    let members: Vec<NodeId> = members.iter().copied().map(NodeId).collect();
    Configuration { epoch: Epoch(epoch), primary: members[0], members, learners: Vec::new() }
}

/// Members, and a learner.
pub fn learning(epoch: u64, members: &[u32], learner: u32) -> Configuration {
    Configuration { learners: vec![NodeId(learner)], ..configuration(epoch, members) }
}

pub fn checksums(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4096).map(crc32c).collect()
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| ((i / 7 + seed * 31) ^ (i * seed)) as u8).collect()
}

/// Tries until there is a result, or patience ends.
pub async fn until<T>(what: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(result) = attempt().await {
            return result;
        }
        assert!(started.elapsed() < PATIENCE, "gave up waiting until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
