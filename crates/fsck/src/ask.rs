//! Asks the servers of a volume, and finds those who lead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::managers::{Managers, ManagersError};
use milpa_types::{
    InodeId, MetaError, MetaPartition, MetaSlot, Next, NodeId, PartitionId, Role, Segment,
    Timestamp, VolumeId, VolumeView,
};
use milpa_wire::check::{CHECK_INODES_MAX, MetaCheck, MetaChecked, MetaRepair};
use milpa_wire::data::{DataAnswer, DataReply, DataRequest};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{Content, MetaAnswer, MetaRead, MetaReply, MetaRequest, MetaStatistics};

use crate::suspects::Look;

/// One question to the managers.
const MANAGERS_WAIT: Duration = Duration::from_secs(10);
/// One try: a partition looks at millions of names for some questions.
const TRY_WAIT: Duration = Duration::from_secs(30);
/// One try with a data node.
const DATA_WAIT: Duration = Duration::from_secs(10);
/// All tries for one question: an election and a restart are over by then.
pub(crate) const WAIT: Duration = Duration::from_secs(90);
/// Leaders' names followed at once: two members may name each other.
const REDIRECTS_MAX: u32 = 3;
/// Pause between tries.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Why a volume could not be checked to the end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FsckError {
    /// The managers.
    #[error("the managers did not answer")]
    Managers(#[from] ManagersError),
    /// A partition's leader was not found, or did not answer.
    #[error("partition {partition} gave no answer within {waited_s} s (last: {last})")]
    Silent {
        /// Which.
        partition: PartitionId,
        /// How long.
        waited_s: u64,
        /// What it was last.
        last: String,
    },
    /// An answer of another kind than the question's.
    #[error("{whom} answered something else")]
    Strange {
        /// Who.
        whom: String,
    },
}

/// The servers of one volume.
pub(crate) struct Servers<'a> {
    managers: &'a Managers,
    view: VolumeView,
    leaders: BTreeMap<PartitionId, NodeId>,
}

impl<'a> Servers<'a> {
    pub(crate) async fn of(managers: &'a Managers, volume: VolumeId) -> Result<Self, FsckError> {
        let view = fetch(managers, volume).await?;
        Ok(Servers { managers, view, leaders: BTreeMap::new() })
    }

    /// The volume's partitions, as last fetched.
    pub(crate) fn view(&self) -> &VolumeView {
        &self.view
    }

    /// Fetches the partitions anew.
    pub(crate) async fn refresh(&mut self) -> Result<(), FsckError> {
        self.view = fetch(self.managers, self.view.volume.id).await?;
        Ok(())
    }

    /// How many replicas each meta partition should have.
    pub(crate) async fn meta_replicas(&self) -> Result<usize, FsckError> {
        match self.managers.call(&ManagerRequest::GetMetaReplicas, MANAGERS_WAIT).await? {
            ManagerAnswer::MetaReplicas { wanted } => Ok(wanted.into()),
            _ => Err(FsckError::Strange { whom: "the manager".to_owned() }),
        }
    }

    /// The meta partitions, by slot.
    pub(crate) fn meta(&self) -> Vec<PartitionId> {
        let mut meta: Vec<&MetaPartition> = self.view.meta.iter().collect();
        meta.sort_by_key(|partition| partition.slot);
        meta.iter().map(|partition| partition.id).collect()
    }

    /// Asks a meta partition a question.
    pub(crate) async fn check(
        &mut self,
        partition: PartitionId,
        check: MetaCheck,
    ) -> Result<MetaChecked, FsckError> {
        match self.ask(&MetaRequest::Check { partition, check }, partition).await? {
            Ok(MetaAnswer::Checked(checked)) => Ok(checked),
            _ => Err(strange(partition)),
        }
    }

    /// Has the partition of `owner` mend something; the reason if it does not.
    pub(crate) async fn repair(
        &mut self,
        owner: InodeId,
        now: Timestamp,
        repair: MetaRepair,
    ) -> Result<Result<(), String>, FsckError> {
        let record = self.view.meta.iter().find(|meta| meta.slot == owner.slot());
        let Some(partition) = record.map(|meta| meta.id) else {
            return Ok(Err("there is no such partition".to_owned()));
        };
        let request = MetaRequest::Repair { partition, now, repair };
        Ok(self.ask(&request, partition).await?.map(drop).map_err(|error| error.to_string()))
    }

    /// What all partitions together know of each of these inodes: also those that have opened since the
    /// view was fetched, as an inode or its name may be there.
    pub(crate) async fn look(&mut self, inodes: &[InodeId]) -> Result<Vec<Look>, FsckError> {
        self.refresh().await?;
        let slots: BTreeSet<MetaSlot> = self.view.meta.iter().map(|meta| meta.slot).collect();
        let look = |inode: &InodeId| Look::new(slots.contains(&inode.slot()));
        let mut looks: Vec<Look> = inodes.iter().map(look).collect();
        for (looks, inodes) in
            looks.chunks_mut(CHECK_INODES_MAX).zip(inodes.chunks(CHECK_INODES_MAX))
        {
            for partition in self.meta() {
                let check = MetaCheck::Names { inodes: inodes.to_vec() };
                let MetaChecked::Names(known) = self.check(partition, check).await? else {
                    return Err(strange(partition));
                };
                looks.iter_mut().zip(known).for_each(|(look, looked)| look.add(looked));
            }
        }
        Ok(looks)
    }

    /// What a meta partition counts of itself.
    pub(crate) async fn statistics(
        &mut self,
        partition: PartitionId,
    ) -> Result<MetaStatistics, FsckError> {
        let read = MetaRead::Statistics;
        let request = MetaRequest::Read { partition, reader: None, read };
        match self.ask(&request, partition).await? {
            Ok(MetaAnswer::Statistics(statistics)) => Ok(statistics),
            _ => Err(strange(partition)),
        }
    }

    /// The content map of a file; `None` if there is no such file.
    pub(crate) async fn layout(
        &mut self,
        inode: InodeId,
    ) -> Result<Option<Vec<Segment>>, FsckError> {
        let owner = self.view.meta.iter().find(|meta| meta.slot == inode.slot());
        let Some(partition) = owner.map(|meta| meta.id) else { return Ok(None) };
        let (mut all, mut from) = (Vec::new(), 0);
        loop {
            let read = MetaRead::GetLayout { inode, from };
            let request = MetaRequest::Read { partition, reader: None, read };
            let (segments, end) = match self.ask(&request, partition).await? {
                Ok(MetaAnswer::Layout { content: Content::Segments(segments), end, .. }) => {
                    (segments, end)
                }
                Ok(MetaAnswer::Layout { .. }) | Err(_) => return Ok(None),
                Ok(_) => return Err(strange(partition)),
            };
            all.extend(segments);
            if end {
                return Ok(Some(all));
            }
            match all.last().map(Segment::end).filter(|reached| *reached > from) {
                Some(reached) => from = reached,
                None => return Err(strange(partition)),
            }
        }
    }

    /// Asks a data node once.
    pub(crate) async fn data(
        &self,
        node: NodeId,
        request: &DataRequest,
    ) -> Result<DataAnswer, String> {
        let address = self.address(node)?;
        let pool = self.managers.pool();
        let called = pool.call(address, Role::Data, request, Bytes::new(), DATA_WAIT).await;
        let reply: DataReply = called.map_err(|error| error.to_string())?.0;
        reply.map_err(|error| format!("node {node}: {error}"))
    }

    fn address(&self, node: NodeId) -> Result<SocketAddr, String> {
        let known = self.view.nodes.iter().find(|known| known.id == node);
        Ok(known.ok_or(format!("nobody knows where node {node} is"))?.address)
    }

    /// Asks the leader of a meta partition until it answers, if only with a refusal that would come
    /// again.
    async fn ask(
        &mut self,
        request: &MetaRequest,
        partition: PartitionId,
    ) -> Result<MetaReply, FsckError> {
        let started = Instant::now();
        let (mut turn, mut redirects, mut last) = (0, 0, "nobody was asked".to_owned());
        while started.elapsed() < WAIT {
            let node = self.leader(partition, turn);
            turn += 1;
            match self.ask_node(node, request).await {
                Ok(Ok(answer)) => {
                    self.leaders.extend(node.map(|node| (partition, node)));
                    return Ok(Ok(answer));
                }
                Ok(Err(MetaError::NotLeader { leader: Some(leader) }))
                    if redirects < REDIRECTS_MAX =>
                {
                    redirects += 1;
                    self.leaders.insert(partition, leader);
                    continue;
                }
                // Locked: a repair that comes in the middle of an operation.
                Ok(Err(error)) if error.next() == Next::GiveUp || error == MetaError::Locked => {
                    return Ok(Err(error));
                }
                Ok(Err(error)) => {
                    last = error.to_string();
                    if error.next() == Next::RefreshRoute {
                        self.refresh().await?;
                    }
                }
                Err(error) => last = error,
            }
            self.leaders.remove(&partition);
            redirects = 0;
            tokio::time::sleep(PAUSE).await;
        }
        Err(FsckError::Silent { partition, waited_s: started.elapsed().as_secs(), last })
    }

    /// Whom to ask: who leads, as far as known; else one member after the other.
    fn leader(&self, partition: PartitionId, turn: usize) -> Option<NodeId> {
        let record = self.view.meta.iter().find(|meta| meta.id == partition)?;
        let known = self.leaders.get(&partition).copied();
        let hint = record.leader.filter(|_| turn == 0);
        let in_turn = || record.members.get(turn % record.members.len().max(1)).copied();
        known.or(hint).or_else(in_turn)
    }

    async fn ask_node(
        &self,
        node: Option<NodeId>,
        request: &MetaRequest,
    ) -> Result<MetaReply, String> {
        let node = node.ok_or("the partition has no members")?;
        let address = self.address(node)?;
        let pool = self.managers.pool();
        let called = pool.call(address, Role::Meta, request, Bytes::new(), TRY_WAIT).await;
        called.map(|(reply, _)| reply).map_err(|error| error.to_string())
    }
}

async fn fetch(managers: &Managers, volume: VolumeId) -> Result<VolumeView, FsckError> {
    match managers.call(&ManagerRequest::GetVolumeById { volume }, MANAGERS_WAIT).await? {
        ManagerAnswer::Volume(view) => Ok(*view),
        _ => Err(FsckError::Strange { whom: "the manager".to_owned() }),
    }
}

pub(crate) fn strange(partition: PartitionId) -> FsckError {
    FsckError::Strange { whom: format!("partition {partition}") }
}
