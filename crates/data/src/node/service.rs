//! What arrives on the node's socket, and which disk it goes to.

use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;
use milpa_host::clock::now_us;
use milpa_host::rpc::{Peer, Reply, Service};
use milpa_types::{DataError, Deletion, FreedRange, PartitionId, Role, VolumeId};
use milpa_wire::data::{DataAnswer, DataNodeReport, DataRequest, FREED_RANGES_MAX};

use crate::store::Freed;

use super::access::{is_allowed, partition_of};
use super::disk::{DiskEvent, Incoming};
use super::partition::{answer, answer_done};
use super::probing::probe;
use super::shared::Shared;

/// Requests that may wait for the disks' tasks; above it they are refused. The tasks take all
/// that is there at each turn, so this many means that the thread cannot keep up.
const QUEUED_MAX: usize = 65_536;

/// The server side of a data node.
pub(crate) struct DataService {
    /// What the node's tasks share.
    pub shared: Rc<Shared>,
}

impl Service for DataService {
    fn request(&self, peer: &Peer, body: Bytes, payload: Bytes, reply: Reply) {
        let Ok(request) = milpa_wire::decode::<DataRequest>(&body) else {
            return answer(reply, Err(DataError::Invalid));
        };
        if !is_allowed(peer.role, &request) {
            tracing::warn!(role = %peer.role, from = %peer.address, "a request beyond its role");
            return answer(reply, Err(DataError::Invalid));
        }
        match request {
            DataRequest::Report => self.report(reply),
            DataRequest::Free { ranges } => self.free(ranges, reply),
            DataRequest::SetRelaxed { volume, relaxed } => self.set_relaxed(volume, relaxed, reply),
            DataRequest::Probe => self.probe(reply),
            request => self.route(peer, request, payload, reply),
        }
    }

    fn one_way(&self, peer: &Peer, _channel: u16, body: Bytes) {
        if peer.role != Role::Data {
            return;
        }
        // A frame carries messages of all groups that share a disk at the sender; here they may
        // lie on different ones. Each disk takes those of its groups.
        for disk in self.shared.disks.borrow().iter() {
            let _ = disk.events.send(DiskEvent::Frame { from: peer.node, body: body.clone() });
        }
    }
}

impl DataService {
    fn route(&self, peer: &Peer, request: DataRequest, payload: Bytes, reply: Reply) {
        let queued = self.shared.queued.get();
        if queued >= QUEUED_MAX {
            return answer(reply, Err(DataError::Busy));
        }
        let Some(disk) = self.disk_of(&request) else {
            let gone = matches!(request, DataRequest::DeletePartition { .. });
            let result = if gone { Ok(DataAnswer::Done) } else { Err(DataError::WrongPartition) };
            return answer(reply, result);
        };
        let disks = self.shared.disks.borrow();
        let Some(handle) = disks.get(disk) else { return };
        let arrived_us = now_us();
        let incoming = Incoming { peer: *peer, request, payload, reply, arrived_us };
        if handle.events.send(DiskEvent::Request(Box::new(incoming))).is_ok() {
            self.shared.queued.set(queued + 1);
        }
    }

    /// The disk whose replica serves; for what is to be made, or deleted, that of a replica that takes no part may be another.
    fn disk_of(&self, request: &DataRequest) -> Option<usize> {
        let partition = partition_of(request)?;
        let known = self.shared.routes.borrow().get(&partition).copied();
        let disks = self.shared.disks.borrow();
        let takes_no_part = |index: &usize| {
            disks.get(*index).is_some_and(|disk| disk.report.damaged.contains(&partition))
        };
        // If none serves, one that the ledger does not name first: another one may be made again where it is.
        let is_noted = |index: &usize| {
            let disk = disks.get(*index).map(|disk| disk.id);
            disk.is_some_and(|disk| self.shared.ledger.borrow().has_replica(partition, disk))
        };
        let left_over = || (0..disks.len()).filter(takes_no_part).min_by_key(is_noted);
        match request {
            DataRequest::CreatePartition(create) => {
                let named = || disks.iter().position(|disk| disk.id == create.disk);
                known.filter(|index| !takes_no_part(index)).or_else(named)
            }
            DataRequest::DeletePartition { deletion, .. } => match deletion {
                Deletion::Leftover { log_end: None } => left_over().or(known),
                Deletion::Leftover { .. } => known,
                Deletion::Any => known.or_else(left_over),
            },
            _ => known,
        }
    }

    fn report(&self, reply: Reply) {
        let partitions =
            self.shared.disks.borrow().iter().flat_map(|d| d.report.partitions.clone()).collect();
        answer(reply, Ok(DataAnswer::Report(DataNodeReport { partitions })));
    }

    fn probe(&self, reply: Reply) {
        let shared = Rc::clone(&self.shared);
        tokio::task::spawn_local(async move { answer_done(reply, probe(shared).await) });
    }

    /// A volume's durability changed; answered when every disk has written that down.
    fn set_relaxed(&self, volume: VolumeId, relaxed: bool, reply: Reply) {
        let shared = Rc::clone(&self.shared);
        tokio::task::spawn_local(async move {
            let disks = shared.disks.borrow().len();
            let mut result = Ok(());
            for disk in 0..disks {
                let set = move |disk: &mut super::disk::Disk| disk.set_relaxed(volume, relaxed);
                for done in shared.ask_disk(disk, set).await.unwrap_or_default() {
                    result = result.and(done.await.unwrap_or(Err(DataError::Busy)));
                }
            }
            answer_done(reply, result);
        });
    }

    /// Frees ranges of several partitions; answered when all of it is durable.
    fn free(&self, ranges: Vec<FreedRange>, reply: Reply) {
        if ranges.len() > FREED_RANGES_MAX {
            return answer(reply, Err(DataError::Invalid));
        }
        let shared = Rc::clone(&self.shared);
        tokio::task::spawn_local(async move {
            answer_done(reply, free_everywhere(&shared, ranges).await);
        });
    }
}

/// Frees ranges on this node, whichever disks they lie on.
pub(crate) async fn free_everywhere(
    shared: &Rc<Shared>,
    ranges: Vec<FreedRange>,
) -> Result<(), DataError> {
    let mut by_partition: BTreeMap<PartitionId, Vec<Freed>> = BTreeMap::new();
    for FreedRange { partition, extent, offset, length } in ranges {
        by_partition.entry(partition).or_default().push(Freed { extent, offset, length });
    }
    let mut result = Ok(());
    for (partition, ranges) in by_partition {
        let disk = shared.routes.borrow().get(&partition).copied();
        let Some(disk) = disk else {
            result = Err(DataError::WrongPartition);
            continue;
        };
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let free = move |disk: &mut super::disk::Disk| {
            disk.free(partition, ranges, |freed| drop(sender.send(freed)));
        };
        shared.ask_disk(disk, free).await;
        if let Err(error) = receiver.await.unwrap_or(Err(DataError::Busy)) {
            result = Err(error);
        }
    }
    result
}
