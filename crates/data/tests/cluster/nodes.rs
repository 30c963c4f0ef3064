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

use bytes::Bytes;
use milpa_data::{DataNodeConfig, DiskConfig, Started, run_announced};
use milpa_host::keys::Key;
use milpa_host::rpc::{Credential, Identity, Pool, Service, serve};
use milpa_types::{
    ClusterId, DataError, DiskId, EXTENT_BYTES_MAX, Epoch, ExtentId, InodeId, NodeId, PartitionId,
    Role, SessionId, VolumeId,
};
use milpa_wire::data::*;
use milpa_wire::frame::crc32c;

use super::stand_ins::{Judge, Registry};

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
        let (nodes, version, lives) = Default::default();
        let registry = Rc::new(Registry { judge, nodes, version, lives });
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

    /// One that is both of these.
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

    pub async fn ask(
        &self,
        pool: &Pool,
        node: u32,
        request: &DataRequest,
        payload: Bytes,
    ) -> Result<(DataAnswer, Bytes), DataError> {
        let address = self.running[&node].started.address;
        let called = pool.call::<_, DataReply>(address, Role::Data, request, payload, CALL_WAIT);
        let (answer, bytes) = called.await.map_err(|_| DataError::Busy)?;
        answer.map(|answer| (answer, bytes))
    }

    pub async fn create_partition(&self) {
        for node in [3, 2, 1] {
            self.create_replica(node, configuration(1, &[1, 2, 3])).await;
        }
    }

    pub async fn create_replica(&self, node: u32, configuration: Configuration) {
        self.try_create_replica(node, configuration).await.unwrap();
    }

    pub async fn try_create_replica(
        &self,
        node: u32,
        configuration: Configuration,
    ) -> Result<(), DataError> {
        let request = DataRequest::CreatePartition(CreateDataPartition {
            partition: PARTITION,
            volume: VOLUME,
            disk: disk_of(node),
            configuration,
            relaxed: false,
        });
        self.ask(&self.as_manager, node, &request, Bytes::new()).await.map(|_| ())
    }

    pub async fn drop_replica(&self, node: u32) {
        let request = DataRequest::DeletePartition { partition: PARTITION };
        self.ask(&self.as_manager, node, &request, Bytes::new()).await.unwrap();
    }

    /// Asks all three nodes the same; every answer must be `Ok`.
    pub async fn ask_all(&self, pool: &Pool, request: &DataRequest) {
        for node in [1, 2, 3] {
            let asked = self.ask(pool, node, request, Bytes::new()).await;
            assert!(asked.is_ok(), "node {node}: {asked:?}");
        }
    }

    pub async fn report(&self, node: u32) -> Option<DataPartitionReport> {
        let asked = self.ask(&self.as_admin, node, &DataRequest::Report, Bytes::new()).await;
        let Ok((DataAnswer::Report(report), _)) = asked else { return None };
        report.partitions.into_iter().find(|report| report.partition == PARTITION)
    }

    /// Who leads, as soon as all these nodes agree.
    pub async fn leader(&self, nodes: &[u32]) -> u32 {
        until("the group has a leader", async || {
            let mut leaders = Vec::new();
            for node in nodes {
                leaders.push(self.report(*node).await?.leader?);
            }
            let first = leaders[0];
            let agreed = leaders.iter().all(|leader| *leader == first);
            (agreed && nodes.contains(&first.0)).then_some(first.0)
        })
        .await
    }

    /// Commits a configuration, asking whoever leads.
    pub async fn configure(&self, configuration: Configuration, nodes: &[u32]) {
        let wanted = &configuration;
        until("the configuration is committed", async || {
            let configuration = wanted.clone();
            let (partition, lost) = (PARTITION, Vec::new());
            let request = DataRequest::Configure { partition, configuration, lost };
            for node in nodes {
                if self.ask(&self.as_manager, *node, &request, Bytes::new()).await.is_ok() {
                    return Some(());
                }
            }
            None
        })
        .await;
        until("every member has adopted it", async || {
            for node in nodes {
                if self.report(*node).await?.configuration != *wanted {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// Somebody becomes a member that learns in the epoch before.
    pub async fn join(&self, learner: u32, configuration: Configuration, nodes: &[u32]) {
        let learner = NodeId(learner);
        let members: Vec<NodeId> =
            configuration.members.iter().copied().filter(|it| *it != learner).collect();
        let (epoch, primary) = (Epoch(configuration.epoch.0 - 1), members[0]);
        let asked: Vec<u32> = members.iter().map(|node| node.0).collect();
        let learning = Configuration { epoch, members, primary, learners: vec![learner] };
        self.configure(learning, &asked).await;
        self.configure(configuration, nodes).await;
    }

    pub async fn append(
        &self,
        node: u32,
        epoch: u64,
        target: AppendTarget,
        bytes: &[u8],
    ) -> Result<(ExtentId, u64, u64), DataError> {
        self.append_for(INODE, node, epoch, target, bytes).await
    }

    pub async fn append_for(
        &self,
        inode: InodeId,
        node: u32,
        epoch: u64,
        target: AppendTarget,
        bytes: &[u8],
    ) -> Result<(ExtentId, u64, u64), DataError> {
        let request = DataRequest::Append(Append {
            partition: PARTITION,
            epoch: Epoch(epoch),
            inode,
            session: SESSION,
            file_offset: 0,
            target,
            sync: false,
            checksums: checksums(bytes),
        });
        let payload = Bytes::copy_from_slice(bytes);
        match self.ask(&self.as_client, node, &request, payload).await? {
            (DataAnswer::Appended { extent, offset, committed }, _) => {
                Ok((extent, offset, committed))
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    /// As [`append`](Cluster::append), repeating what is answered "busy". A new extent that was sealed before it had all
    /// members (one of them has just started) is given up for another one, as clients do.
    pub async fn append_patiently(
        &self,
        node: u32,
        epoch: u64,
        mut target: AppendTarget,
        bytes: &[u8],
    ) -> (ExtentId, u64, u64) {
        until("the append is taken", async || {
            match (self.append(node, epoch, target, bytes).await, &mut target) {
                (Ok(placed), _) => Some(placed),
                (Err(DataError::Busy | DataError::MemberSilent { .. }), _) => None,
                (Err(DataError::Sealed { .. }), AppendTarget::New { token }) => {
                    *token += 1_000_000;
                    None
                }
                (Err(error), _) => panic!("{error:?}"),
            }
        })
        .await
    }

    /// The primary seals the extent at all members.
    pub async fn close(&self, extent: ExtentId) {
        let close = DataRequest::Close { partition: PARTITION, extent };
        self.ask(&self.as_client, 1, &close, Bytes::new()).await.unwrap();
    }

    /// The only extent, written in one go and closed, on all three nodes.
    pub async fn closed_extent(&self, bytes: &[u8]) -> ExtentId {
        let new = AppendTarget::New { token: 1 };
        let (extent, ..) = self.append_patiently(1, 1, new, bytes).await;
        self.close(extent).await;
        self.equal_digests(&[1, 2, 3], 1).await;
        extent
    }

    /// Bytes that the primary alone writes, and that are not acknowledged: the others are down.
    pub async fn append_alone(&self, node: u32, extent: ExtentId, offset: u64, bytes: &[u8]) {
        let target = AppendTarget::Extent { extent, offset };
        let alone = self.append(node, 1, target, bytes).await;
        assert!(alone.is_err(), "{alone:?}");
        let range = offset as usize..offset as usize + bytes.len();
        until("the primary has written", async || {
            let held = std::fs::read(self.extent_file(node, extent)).ok()?;
            (held.get(range.clone()) == Some(bytes)).then_some(())
        })
        .await;
    }

    pub async fn read(
        &self,
        node: u32,
        extent: ExtentId,
        range: std::ops::Range<u64>,
        at_leader: bool,
    ) -> Result<Vec<u8>, DataError> {
        let (offset, length) = (range.start, (range.end - range.start) as u32);
        let read = Read { partition: PARTITION, extent, offset, length, at_leader };
        self.read_as_said(node, read).await
    }

    /// A read that may make no sense.
    pub async fn read_as_said(&self, node: u32, read: Read) -> Result<Vec<u8>, DataError> {
        let request = DataRequest::Read(read);
        until("the read is not refused as busy", async || {
            match self.ask(&self.as_client, node, &request, Bytes::new()).await {
                Err(DataError::Busy) => None,
                Err(error) => Some(Err(error)),
                Ok((_, bytes)) => Some(Ok(bytes.to_vec())),
            }
        })
        .await
    }

    /// Overwrites at the leader among `nodes`, as a client does: the hint is followed, "busy" is
    /// repeated.
    pub async fn overwrite(
        &self,
        nodes: &[u32],
        epoch: u64,
        extent: ExtentId,
        offset: u64,
        bytes: &[u8],
    ) {
        until("the overwrite is acknowledged", async || {
            self.try_overwrite(nodes, epoch, extent, offset, bytes).await.ok()
        })
        .await;
    }

    /// Overwrites until the log begins behind what a node that is away has of it.
    pub async fn overwrite_until_trimmed(&self, nodes: &[u32], epoch: u64, extent: ExtentId) {
        let started = Instant::now();
        while started.elapsed() < LOG_TRIMMED_AFTER {
            self.overwrite(nodes, epoch, extent, 1_000, &pattern(2, 3_000)).await;
        }
    }

    /// The same where they are not acknowledged, as a member is away that has not marked the extent.
    pub async fn overwrite_in_vain_until_trimmed(
        &self,
        nodes: &[u32],
        epoch: u64,
        extent: ExtentId,
    ) {
        let started = Instant::now();
        while started.elapsed() < LOG_TRIMMED_AFTER {
            let bytes = pattern(2, 3_000);
            let over = self.try_overwrite(nodes, epoch, extent, 1_000, &bytes);
            assert!(tokio::time::timeout(Duration::from_millis(200), over).await.is_err());
        }
    }

    /// One try, at whoever leads.
    pub async fn try_overwrite(
        &self,
        nodes: &[u32],
        epoch: u64,
        extent: ExtentId,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), DataError> {
        let mut it = Overwrite {
            partition: PARTITION,
            epoch: Epoch(epoch),
            extent,
            offset,
            term: 0,
            checksums: checksums(bytes),
        };
        let leader = self.leader(nodes).await;
        match self.overwrite_at(leader, &it, bytes).await {
            Err(DataError::OtherTerm { term }) => {
                it.term = term;
                self.overwrite_at(leader, &it, bytes).await
            }
            other => other,
        }
    }

    /// Sends it as it is.
    pub async fn overwrite_at(
        &self,
        node: u32,
        it: &Overwrite,
        bytes: &[u8],
    ) -> Result<(), DataError> {
        let request = DataRequest::Overwrite(it.clone());
        let payload = Bytes::copy_from_slice(bytes);
        self.ask(&self.as_client, node, &request, payload).await.map(|_| ())
    }

    /// `None` while a block there is damaged.
    pub async fn digest(&self, node: u32) -> Option<Vec<ExtentDigest>> {
        let request = DataRequest::Digest { partition: PARTITION, lengths: Vec::new() };
        match self.ask(&self.as_admin, node, &request, Bytes::new()).await {
            Ok((DataAnswer::Digest(digests), _)) => Some(digests),
            Err(DataError::Corrupt { .. }) => None,
            other => panic!("{other:?}"),
        }
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

    /// Waits until all these replicas are byte-equal up to their commit offsets.
    pub async fn equal_digests(&self, nodes: &[u32], extents: usize) -> Vec<ExtentDigest> {
        until("the replicas are equal", async || {
            for node in nodes {
                if self.report(*node).await?.unaligned > 0 {
                    return None;
                }
            }
            let first = self.digest(nodes[0]).await?;
            for node in &nodes[1..] {
                if self.digest(*node).await? != first {
                    return None;
                }
            }
            (first.len() == extents).then_some(first)
        })
        .await
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

/// The first member is the primary.
pub fn configuration(epoch: u64, members: &[u32]) -> Configuration {
    let members: Vec<NodeId> = members.iter().copied().map(NodeId).collect();
    Configuration { epoch: Epoch(epoch), primary: members[0], members, learners: Vec::new() }
}

/// Members 1 and 2, and a learner.
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
