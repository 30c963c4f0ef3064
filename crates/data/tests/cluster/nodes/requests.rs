//! What the managers, the meta nodes and clients ask of the nodes, and how long a test waits for it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use milpa_host::rpc::Pool;
use milpa_types::{DataError, Deletion, DiskId, Epoch, ExtentId, InodeId, NodeId, Role};
use milpa_wire::data::*;

use super::{
    CALL_WAIT, Cluster, INODE, LOG_TRIMMED_AFTER, PARTITION, SESSION, VOLUME, checksums,
    configuration, disk_of, pattern, until,
};

impl Cluster {
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
        self.try_create_replica_on(node, disk_of(node), configuration).await
    }

    pub async fn try_create_replica_on(
        &self,
        node: u32,
        disk: DiskId,
        configuration: Configuration,
    ) -> Result<(), DataError> {
        let request = DataRequest::CreatePartition(CreateDataPartition {
            partition: PARTITION,
            volume: VOLUME,
            disk,
            configuration,
            relaxed: false,
        });
        self.ask(&self.as_manager, node, &request, Bytes::new()).await.map(|_| ())
    }

    pub async fn drop_replica(&self, node: u32) {
        self.delete_replica(node, Deletion::Any).await.unwrap();
    }

    pub async fn delete_replica(&self, node: u32, deletion: Deletion) -> Result<(), DataError> {
        let request = DataRequest::DeletePartition { partition: PARTITION, deletion };
        self.ask(&self.as_manager, node, &request, Bytes::new()).await.map(|_| ())
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

    /// The same without an overwrite. Gives the epoch.
    pub async fn configure_until_trimmed(&self, members: &[u32], from: u64) -> u64 {
        let (started, mut epoch) = (Instant::now(), from);
        while started.elapsed() < LOG_TRIMMED_AFTER {
            epoch += 1;
            self.configure(configuration(epoch, members), members).await;
        }
        epoch
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
            let done = tokio::time::timeout(Duration::from_millis(200), over).await;
            assert!(!matches!(done, Ok(Ok(()))), "{done:?}");
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
