//! Appending packets to extents (CFS 2.2.4), and what to do when that fails (2.2.5).
//!
//! Packets go to the primary in order, several in flight. What the primary has answered is on all
//! members; the caller is told and may forget those bytes. When anything goes wrong, what was not
//! answered goes to a new extent, usually of another partition: the old extent's tail is never
//! looked at again, as no key refers to it.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{
    Column, DataError, DataPartition, EXTENT_BYTES_MAX, Epoch, ExtentId, InodeId, Next, NodeId,
    PartitionId, SessionId,
};
use milpa_wire::data::{Append, AppendTarget, DataAnswer, DataRequest};
use tokio::time::Instant;

use super::{DataClient, Trouble, checksums};
use crate::core::Retry;
use crate::error::FsError;
use crate::flights::Flight;
use crate::view::View;

/// One packet is on the disks' caches of all members by then, or the primary is given up.
const TRY_WAIT: Duration = Duration::from_secs(3);
/// An extent is left when appends to it take so much longer than elsewhere, and four times as long.
const LEAVE_WHEN_SLOWER_BY: Duration = Duration::from_millis(500);
/// When all partitions say that they are full, others may have been added meanwhile. Not longer:
/// a program should learn soon that the disk is full.
pub(super) const FULL_AFTER: Duration = Duration::from_secs(1);
/// When partitions are short of members, a failover may be under way.
const READ_ONLY_AFTER: Duration = Duration::from_secs(10);

/// Bytes to append, with their checksums.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub file_offset: u64,
    pub data: Bytes,
    checksums: Vec<u32>,
}

impl Packet {
    pub(crate) fn new(file_offset: u64, data: Bytes) -> Packet {
        let checksums = checksums::of_payload(&data);
        Packet { file_offset, data, checksums }
    }

    fn len(&self) -> u64 {
        self.data.len() as u64
    }
}

/// An extent that this client may append to.
#[derive(Clone, Debug)]
pub(crate) struct OpenExtent {
    pub partition: PartitionId,
    pub extent: ExtentId,
    epoch: Epoch,
    primary: NodeId,
    /// All bytes below are on all members.
    end: u64,
}

/// For whom, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppendFor {
    pub inode: InodeId,
    pub session: SessionId,
    /// Answer from the disks.
    pub sync: bool,
    /// One packet may share an extent with other files.
    pub small: bool,
}

/// Bytes that are on all members now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Committed {
    pub file_offset: u64,
    pub length: u64,
    pub column: Column,
}

impl DataClient {
    /// Appends all packets, telling `committed` of each as it is acknowledged. `open` is the extent
    /// to go on with, and afterwards the one to go on with next time.
    pub(crate) async fn append(
        &self,
        purpose: AppendFor,
        packets: Vec<Packet>,
        open: &mut Option<OpenExtent>,
        committed: &mut (dyn FnMut(Committed) + Send),
    ) -> Result<(), FsError> {
        let mut queue: VecDeque<Packet> = packets.into();
        let mut retry = Retry::new(&self.core, "append");
        let mut full_since = None;
        while let Some(first) = queue.front() {
            let before = queue.len();
            let full = |e: &OpenExtent| e.end + first.len() > EXTENT_BYTES_MAX;
            let view = self.core.views.current();
            if open
                .as_ref()
                .is_some_and(|extent| full(extent) || self.has_become_slow(&view, extent))
                && let Some(extent) = open.take()
            {
                self.close_extent(extent);
            }
            // Taken out while in use: an interrupted append must not be continued at a guess.
            let outcome = match open.take() {
                Some(extent) => {
                    self.append_window(&view, purpose, extent, &mut queue, committed).await
                }
                None => self.begin_extent(&view, purpose, &mut queue, committed).await,
            };
            if queue.len() < before {
                retry.progressed();
                full_since = None;
            }
            match outcome {
                Ok(next) => *open = next,
                Err((trouble, extent)) => {
                    *open = self.recover(trouble, extent, &mut retry, &mut full_since).await?;
                }
            }
        }
        Ok(())
    }

    /// Whether an extent is better left for another partition: each change costs one more extent in the
    /// file's map, so only for much.
    fn has_become_slow(&self, view: &View, extent: &OpenExtent) -> bool {
        let members = |partition| view.data(partition).map(|found| found.members.as_slice());
        let latency = |of: &[NodeId]| self.core.health.append_latency(of);
        let Some(ours) = members(extent.partition).map(latency) else { return false };
        if ours <= LEAVE_WHEN_SLOWER_BY {
            return false;
        }
        let others = view.volume.data.iter().filter(|other| other.takes_extents);
        let fastest = others.map(|other| latency(&other.members)).min().unwrap_or(ours);
        ours > fastest * 4 + LEAVE_WHEN_SLOWER_BY
    }

    /// After a failure: pauses, and gives the extent to go on with, if any.
    async fn recover(
        &self,
        trouble: Trouble,
        extent: Option<OpenExtent>,
        retry: &mut Retry<'_>,
        full_since: &mut Option<Instant>,
    ) -> Result<Option<OpenExtent>, FsError> {
        retry.note(&trouble);
        if let Trouble::Answered { error: DataError::MemberSilent { node }, .. } = &trouble
            && let Some(address) = self.core.views.current().address(*node)
        {
            self.core.health.suspect(*node, address, &"another member could not reach it");
        }
        if trouble.next() == Next::RetrySame {
            retry.pause().await?;
            return Ok(extent);
        }
        if let Some(DataError::Invalid) = trouble.answer() {
            return Err(DataError::Invalid.into());
        }
        let view = self.core.views.current();
        match patience_when_full(&trouble, &view) {
            Some(patience) => {
                let since = *full_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= patience {
                    return Err(trouble.answer().cloned().unwrap_or(DataError::NoSpace).into());
                }
            }
            None => *full_since = None,
        }
        if !matches!(trouble.answer(), Some(DataError::Sealed { .. })) {
            self.core.views.refresh(&*self.core.transport).await;
        }
        retry.pause().await?;
        Ok(None)
    }

    /// Sends the first packet to a partition of our choice: as a piece of a small extent, or as the
    /// beginning of an extent of the file's own.
    async fn begin_extent(
        &self,
        view: &View,
        purpose: AppendFor,
        queue: &mut VecDeque<Packet>,
        committed: &mut (dyn FnMut(Committed) + Send),
    ) -> Result<Option<OpenExtent>, (Trouble, Option<OpenExtent>)> {
        let Some(packet) = queue.front() else { return Ok(None) };
        let Some(partition) = self.choose(view) else {
            return Err((Trouble::NoRoute("no partition takes new bytes"), None));
        };
        let small = purpose.small && queue.len() == 1;
        let token = self.token();
        let target =
            if small { AppendTarget::Small { token } } else { AppendTarget::New { token } };
        let request = append_request(partition.id, partition.epoch, purpose, packet, target);
        let started = Instant::now();
        let call = self.call(view, partition.primary, &request, packet.data.clone(), TRY_WAIT);
        let (extent, offset, length) = match call.await {
            Ok((DataAnswer::Appended { extent, offset, committed }, _))
                if extent.is_small() == small
                    && offset.checked_add(packet.len()).is_some_and(|end| end <= committed) =>
            {
                self.core.health.append_took(&partition.members, started.elapsed());
                (extent, offset, packet.len())
            }
            Ok(_) => {
                self.avoid(partition.id);
                return Err((Trouble::Nonsense { node: partition.primary }, None));
            }
            Err(trouble) => {
                self.avoid(partition.id);
                return Err((trouble, None));
            }
        };
        let column = Column { partition: partition.id, extent, offset };
        committed(Committed { file_offset: packet.file_offset, length, column });
        queue.pop_front();
        Ok((!small).then(|| open_extent(partition, extent, offset + length)))
    }

    /// Sends packets to the end of an extent, a window of them in flight, until the queue is empty,
    /// the extent full, or something fails.
    async fn append_window(
        &self,
        view: &View,
        purpose: AppendFor,
        mut extent: OpenExtent,
        queue: &mut VecDeque<Packet>,
        committed: &mut (dyn FnMut(Committed) + Send),
    ) -> Result<Option<OpenExtent>, (Trouble, Option<OpenExtent>)> {
        let mut flights: VecDeque<Flight<'_, Result<(DataAnswer, Bytes), Trouble>>> =
            VecDeque::new();
        let mut sent_end = extent.end;
        loop {
            while flights.len() < self.core.config.packets_in_flight {
                let Some(packet) = queue.get(flights.len()) else { break };
                if sent_end + packet.len() > EXTENT_BYTES_MAX {
                    break;
                }
                let target = AppendTarget::Extent { extent: extent.extent, offset: sent_end };
                let request =
                    append_request(extent.partition, extent.epoch, purpose, packet, target);
                sent_end += packet.len();
                let (payload, primary) = (packet.data.clone(), extent.primary);
                let members = view.data(extent.partition).map(|partition| &*partition.members);
                let call = Box::pin(async move {
                    let started = Instant::now();
                    let answer = self.call(view, primary, &request, payload, TRY_WAIT).await;
                    if let (Ok(_), Some(members)) = (&answer, members) {
                        self.core.health.append_took(members, started.elapsed());
                    }
                    answer
                });
                flights.push_back(Flight::launch(call as crate::transport::Boxed<'_, _>).await);
            }
            let Some(mut flight) = flights.pop_front() else { return Ok(Some(extent)) };
            let answer = flight.land().await;
            let Some(packet) = queue.front() else { return Ok(Some(extent)) };
            let end = extent.end + packet.len();
            let acknowledged = match &answer {
                Ok((DataAnswer::Appended { extent: at, offset, committed }, _)) => {
                    *at == extent.extent && *offset == extent.end && *committed >= end
                }
                // The seal tells what is on all members: it may be more than we were answered. It
                // does not tell what is on their disks.
                Err(Trouble::Answered { error: DataError::Sealed { length }, .. }) => {
                    *length >= end && end <= sent_end && !purpose.sync
                }
                _ => false,
            };
            if acknowledged {
                let (partition, offset) = (extent.partition, extent.end);
                let column = Column { partition, extent: extent.extent, offset };
                let (file_offset, length) = (packet.file_offset, packet.len());
                committed(Committed { file_offset, length, column });
                extent.end = end;
                queue.pop_front();
            }
            match answer {
                Ok(_) if acknowledged => {}
                Ok(_) => return Err((Trouble::Nonsense { node: extent.primary }, None)),
                Err(Trouble::Answered { error: DataError::Sealed { .. }, .. }) if acknowledged => {}
                Err(trouble) => {
                    let kept = self.after_failed_window(&trouble, extent, flights).await;
                    return Err((trouble, kept));
                }
            }
        }
    }

    /// A primary that was only busy, or got damaged bytes, takes the same extent up where it stands,
    /// once it has dealt with all that is on the way.
    async fn after_failed_window(
        &self,
        trouble: &Trouble,
        extent: OpenExtent,
        mut flights: VecDeque<Flight<'_, Result<(DataAnswer, Bytes), Trouble>>>,
    ) -> Option<OpenExtent> {
        if trouble.next() != Next::RetrySame {
            if !matches!(trouble.answer(), Some(DataError::Sealed { .. })) {
                self.avoid(extent.partition);
            }
            return None;
        }
        while let Some(mut flight) = flights.pop_front() {
            let _ = flight.land().await;
        }
        Some(extent)
    }

    /// Tells the primary, in the background, that nothing more comes. If the message is lost, the
    /// end of our session says the same.
    pub(crate) fn close_extent(&self, extent: OpenExtent) {
        let Some(address) = self.core.views.current().address(extent.primary) else { return };
        let transport = std::sync::Arc::clone(&self.core.transport);
        let OpenExtent { partition, extent, .. } = extent;
        drop(self.core.runtime.spawn(async move {
            let request = DataRequest::Close { partition, extent };
            let closed = transport.data(address, &request, Bytes::new(), TRY_WAIT).await;
            tracing::trace!(%partition, %extent, ?closed, "closed an extent");
        }));
    }
}

/// How long to try on when nobody takes bytes: briefly when the partitions are whole and full, longer
/// when they may only be short of members. `None` when the trouble is of another kind.
fn patience_when_full(trouble: &Trouble, view: &View) -> Option<Duration> {
    let active = |partition: &DataPartition| {
        partition.members.iter().filter(|member| view.is_active(**member)).count()
    };
    let short = view.volume.data.iter().all(|partition| active(partition) < 2);
    match trouble {
        Trouble::Answered { error: DataError::NoSpace, .. } => Some(FULL_AFTER),
        Trouble::Answered { error: DataError::ReadOnly, .. } => Some(READ_ONLY_AFTER),
        Trouble::NoRoute(_) if short => Some(READ_ONLY_AFTER),
        Trouble::NoRoute(_) => Some(FULL_AFTER),
        _ => None,
    }
}

fn append_request(
    partition: PartitionId,
    epoch: Epoch,
    purpose: AppendFor,
    packet: &Packet,
    target: AppendTarget,
) -> DataRequest {
    DataRequest::Append(Append {
        partition,
        epoch,
        inode: purpose.inode,
        session: purpose.session,
        file_offset: packet.file_offset,
        target,
        sync: purpose.sync,
        checksums: packet.checksums.clone(),
    })
}

fn open_extent(partition: &DataPartition, extent: ExtentId, end: u64) -> OpenExtent {
    let DataPartition { id, epoch, primary, .. } = *partition;
    OpenExtent { partition: id, extent, epoch, primary, end }
}
