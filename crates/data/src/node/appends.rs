//! What the append cores order, done: bytes to the disk's threads and to the other members.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use milpa_host::clock::{now_ms, now_us};
use milpa_host::rpc::Reply;
use milpa_types::{DataError, ExtentId, InodeId, NodeId, PartitionId, SessionId};
use milpa_wire::data::{Append, DataAnswer, DataRequest, Replicate, TRANSFER_BYTES_MAX};

use crate::append::{
    AppendHead, BackupEffect, Effect, OperationNumber, Placed, ReplicateHead, RequestNumber, Start,
};
use crate::store::piece::{PIECE_HEADER_BYTES, PieceHeader, PiecePlace};
use crate::store::{Checksums, ExtentStore, NewExtent, StoreError, checksums_of};

use super::disk::Disk;
use super::metrics::Metrics;
use super::partition::{Held, answer, answer_done};

/// A batch of pieces and their headers is at most this long.
pub(crate) const BATCH_BYTES_MAX: u64 = TRANSFER_BYTES_MAX as u64;
/// A replicated payload: a batch, or one piece of the largest size with its header.
const REPLICATE_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;

/// Bytes with a place, on their way to one replica.
struct Landing {
    new: Option<NewExtent>,
    extent: ExtentId,
    offset: u64,
    bytes: Bytes,
    checksums: Arc<Vec<u32>>,
    committed: u64,
    /// The bytes are there already: a repeat, or a barrier.
    is_there: bool,
}

impl Landing {
    /// Writes the bytes. On a disk thread, in the extent's order.
    fn land(&self, store: &ExtentStore) -> Result<(), StoreError> {
        if let Some(new) = self.new {
            match store.create_extent(new) {
                // Made just before a crash, and still empty: it is the same extent.
                Ok(()) | Err(StoreError::Exists) => {}
                Err(error) => return Err(error),
            }
        }
        if !self.is_there {
            let checksums = Checksums::of_payload(&self.checksums);
            store.append(self.extent, self.offset, &self.bytes, checksums)?;
        }
        store.set_commit(self.extent, self.committed)
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

impl Disk {
    /// A client's append.
    pub fn append(&mut self, append: Append, payload: Bytes, reply: Reply, arrived_us: u64) {
        // Checked before anybody else gets the bytes: damaged ones would break the extent, which
        // for small files is not the sender's alone.
        if checksums_of(&payload) != append.checksums {
            return answer(reply, Err(DataError::DamagedInTransit));
        }
        let request = self.number_request();
        let partition = match self.partition(append.partition) {
            Ok(partition) => partition,
            Err(error) => return answer(reply, Err(error)),
        };
        let id = append.partition;
        let head = AppendHead {
            epoch: append.epoch,
            inode: append.inode,
            session: append.session,
            target: append.target,
            length: payload.len() as u64,
            sync: append.sync,
        };
        let store = Arc::clone(&partition.store);
        let replica = || match head.target {
            milpa_wire::data::AppendTarget::Extent { extent, .. } => {
                store.states(&[extent]).first().copied()
            }
            _ => None,
        };
        partition.held.insert(request, Held::Append { append, payload, reply, arrived_us });
        let mut effects = Vec::new();
        partition.primary.append(request, &head, replica, &mut effects);
        self.perform_appends(id, effects);
    }

    /// The writer is finished.
    pub fn close(&mut self, id: PartitionId, extent: ExtentId, reply: Reply) {
        let mut effects = Vec::new();
        let closed =
            self.partition(id).map(|partition| partition.primary.close(extent, &mut effects));
        answer_done(reply, closed);
        self.perform_appends(id, effects);
    }

    /// Deadlines and announcements.
    pub fn tick_appends(&mut self, now: u64) {
        let ids: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in ids {
            let mut effects = Vec::new();
            if let Some(partition) = self.partitions.get_mut(&id) {
                partition.primary.tick(now, &mut effects);
            }
            self.perform_appends(id, effects);
        }
    }

    /// Performs the primary's effects, in order.
    pub fn perform_appends(&mut self, id: PartitionId, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Start(start) => self.start_operation(id, start),
                Effect::Answer { request, result } => self.answer_append(id, request, result),
                Effect::Announce { extent, committed } => self.announce(id, extent, committed),
                Effect::Closed { extent, length } => self.seal_everywhere(id, extent, length),
                Effect::Broken { extent, committed } => self.extent_broke(id, extent, committed),
                Effect::ReserveIds { until } => self.reserve_ids(id, until),
            }
        }
    }

    fn answer_append(
        &mut self,
        id: PartitionId,
        request: RequestNumber,
        result: Result<Placed, DataError>,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let Some(Held::Append { payload, reply, arrived_us, .. }) = partition.held.remove(&request)
        else {
            return;
        };
        let metrics = Metrics::get();
        match &result {
            Ok(_) => {
                metrics.append_bytes.inc_by(payload.len() as u64);
                let seconds = now_us().saturating_sub(arrived_us) as f64 / 1e6;
                metrics.append_seconds.observe(seconds);
            }
            Err(_) => {
                metrics.append_errors.inc();
            }
        }
        let appended = |Placed { extent, offset, committed }| DataAnswer::Appended {
            extent,
            offset,
            committed,
        };
        answer(reply, result.map(appended));
    }

    /// The bytes of an operation and their checksums. Pieces get their headers here.
    fn assemble(&self, id: PartitionId, start: &Start) -> Option<(Bytes, Vec<u32>)> {
        let partition = self.partitions.get(&id)?;
        let held = |request: &RequestNumber| match partition.held.get(request) {
            Some(Held::Append { append, payload, .. }) => Some((append, payload)),
            _ => None,
        };
        if !start.extent.is_small() {
            return match start.requests.first() {
                Some(request) => held(request).map(|(a, p)| (p.clone(), a.checksums.clone())),
                None => Some((Bytes::new(), Vec::new())),
            };
        }
        let mut batch = BytesMut::new();
        for request in &start.requests {
            let (append, payload) = held(request)?;
            let offset = start.offset + batch.len() as u64;
            let place = PiecePlace { partition: id, extent: start.extent, offset };
            batch.extend_from_slice(&piece_header(append, payload, place));
            batch.extend_from_slice(payload);
        }
        let batch = batch.freeze();
        let checksums = checksums_of(&batch);
        Some((batch, checksums))
    }

    fn start_operation(&mut self, id: PartitionId, start: Start) {
        let Some((bytes, checksums)) = self.assemble(id, &start) else {
            debug_assert!(false, "a core orders only what was handed to it");
            return;
        };
        let Some(partition) = self.partitions.get(&id) else { return };
        let (epoch, store) = (partition.configuration.epoch, Arc::clone(&partition.store));
        let (inode, session) = start.owner;
        for backup in &start.backups {
            let replicate = Replicate {
                partition: id,
                epoch,
                extent: start.extent,
                offset: start.offset,
                committed: start.committed,
                inode,
                session,
                sync: start.sync,
                checksums: checksums.clone(),
            };
            self.forward(id, start.operation, *backup, replicate, bytes.clone());
        }
        let new = NewExtent { id: start.extent, epoch, inode, session };
        let landing = Landing {
            new: (start.offset == 0).then_some(new),
            extent: start.extent,
            offset: start.offset,
            is_there: bytes.is_empty(),
            bytes,
            checksums: Arc::new(checksums),
            committed: start.committed,
        };
        let node = self.shared.node;
        let operation = start.operation;
        let began_us = now_us();
        self.land(id, store, landing, start.sync, move |disk, result| {
            let took_us = now_us().saturating_sub(began_us);
            disk.shared.peers.borrow_mut().note(node, &result, took_us, now_ms());
            disk.member_done(id, operation, node, result);
        });
    }

    /// Sends an operation to a backup, and reports what it says.
    fn forward(
        &self,
        id: PartitionId,
        operation: OperationNumber,
        backup: NodeId,
        replicate: Replicate,
        bytes: Bytes,
    ) {
        let (shared, disk) = (Rc::clone(&self.shared), self.index);
        let patience = self.shared.config.member_silent_ms * if replicate.sync { 4 } else { 1 };
        let wait = Duration::from_millis(patience);
        let request = DataRequest::Replicate(replicate);
        tokio::task::spawn_local(async move {
            let sent_us = now_us();
            let result = shared.ask_node(backup, &request, bytes, wait).await.map(|_| ());
            let took_us = now_us().saturating_sub(sent_us);
            shared.peers.borrow_mut().note(backup, &result, took_us, now_ms());
            let report = move |disk: &mut Disk| disk.member_done(id, operation, backup, result);
            shared.ask_disk(disk, report).await;
        });
    }

    fn member_done(
        &mut self,
        id: PartitionId,
        operation: OperationNumber,
        member: NodeId,
        result: Result<(), DataError>,
    ) {
        if let Err(error) = &result {
            tracing::info!(partition = %id, %member, %error, "a member did not take an append");
        }
        let mut effects = Vec::new();
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.primary.member_done(operation, member, result, &mut effects);
        }
        self.perform_appends(id, effects);
    }

    /// Writes on the extent's thread, then flushes if asked on one that may wait.
    fn land(
        &mut self,
        id: PartitionId,
        store: Arc<ExtentStore>,
        landing: Landing,
        sync: bool,
        then: impl FnOnce(&mut Disk, Result<(), DataError>) + Send + 'static,
    ) {
        let (extent, end) = (landing.extent, landing.end());
        let write_store = Arc::clone(&store);
        self.workers.ordered(
            (id, extent),
            move || landing.land(&write_store),
            move |disk, written| match written {
                Ok(()) if sync => disk
                    .workers
                    .slow(move || store.flush(&[(extent, end)]).map_err(DataError::from), then),
                other => then(disk, other.map_err(DataError::from)),
            },
        );
    }

    fn announce(&mut self, id: PartitionId, extent: ExtentId, committed: u64) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let store = Arc::clone(&partition.store);
        let configuration = partition.configuration.clone();
        // An extent that was deleted meanwhile needs no commit offset.
        self.workers.ordered(
            (id, extent),
            move || drop(store.set_commit(extent, committed)),
            |_, ()| {},
        );
        for backup in configuration.members.into_iter().filter(|m| *m != self.shared.node) {
            let request = DataRequest::Replicate(Replicate {
                partition: id,
                epoch: configuration.epoch,
                extent,
                offset: committed,
                committed,
                inode: InodeId(0),
                session: SessionId(0),
                sync: false,
                checksums: Vec::new(),
            });
            let (shared, disk) = (Rc::clone(&self.shared), self.index);
            let wait = Duration::from_secs(2);
            tokio::task::spawn_local(async move {
                let told = shared.ask_node(backup, &request, Bytes::new(), wait).await;
                if let Err(error) = told {
                    let report = move |disk: &mut Disk| disk.announcement_failed(id, extent, error);
                    shared.ask_disk(disk, report).await;
                }
            });
        }
    }

    fn announcement_failed(&mut self, id: PartitionId, extent: ExtentId, error: DataError) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let mut effects = Vec::new();
        partition.primary.announcement_failed(extent, error, &mut effects);
        self.perform_appends(id, effects);
    }

    fn extent_broke(&mut self, id: PartitionId, extent: ExtentId, committed: u64) {
        Metrics::get().broken_extents.inc();
        let node = self.shared.node;
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        partition.align_later(node, extent);
        let store = Arc::clone(&partition.store);
        self.workers.ordered(
            (id, extent),
            move || drop(store.set_commit(extent, committed)),
            |_, ()| {},
        );
    }

    fn reserve_ids(&mut self, id: PartitionId, until: u32) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        partition.state.ids_until = partition.state.ids_until.max(until);
        self.save_state(
            id,
            Box::new(move |disk| {
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.primary.ids_reserved(0, until);
                }
            }),
        );
    }

    /// The primary's bytes for this backup.
    pub fn replicate(&mut self, from: NodeId, replicate: Replicate, payload: Bytes, reply: Reply) {
        if payload.len() > REPLICATE_BYTES_MAX {
            return answer(reply, Err(DataError::Invalid));
        }
        let (id, request) = (replicate.partition, self.number_request());
        if self.is_fenced() {
            return answer(reply, Err(DataError::DiskFailed));
        }
        if self.usage.is_full && !payload.is_empty() {
            return answer(reply, Err(DataError::NoSpace));
        }
        let partition = match self.partition(id) {
            Ok(partition) => partition,
            Err(error) => return answer(reply, Err(error)),
        };
        let head = ReplicateHead {
            from,
            epoch: replicate.epoch,
            extent: replicate.extent,
            offset: replicate.offset,
            length: payload.len() as u64,
            committed: replicate.committed,
            sync: replicate.sync,
        };
        let store = Arc::clone(&partition.store);
        let extent = replicate.extent;
        partition.held.insert(request, Held::Replicate { replicate, payload, reply });
        let mut effects = Vec::new();
        let replica = || store.states(&[extent]).first().copied();
        partition.backup.replicate(request, &head, replica, &mut effects);
        self.perform_backup(id, effects);
    }

    /// Performs the backup's effects, in order.
    pub fn perform_backup(&mut self, id: PartitionId, effects: Vec<BackupEffect>) {
        for effect in effects {
            match effect {
                BackupEffect::Write { request, create } => {
                    self.backup_write(id, request, create, false);
                }
                BackupEffect::Confirm { request } => self.backup_write(id, request, false, true),
                BackupEffect::Answer { request, result } => {
                    let held = self.partitions.get_mut(&id).and_then(|p| p.held.remove(&request));
                    if let Some(Held::Replicate { reply, .. }) = held {
                        answer_done(reply, result);
                    }
                }
            }
        }
    }

    /// Writes what is not there yet; a repeat only flushes and notes the commit offset.
    fn backup_write(
        &mut self,
        id: PartitionId,
        request: RequestNumber,
        create: bool,
        is_there: bool,
    ) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let Some(Held::Replicate { replicate, payload, .. }) = partition.held.get(&request) else {
            return;
        };
        let (epoch, store) = (partition.configuration.epoch, Arc::clone(&partition.store));
        let (inode, session) = (replicate.inode, replicate.session);
        let new = NewExtent { id: replicate.extent, epoch, inode, session };
        let landing = Landing {
            new: create.then_some(new),
            extent: replicate.extent,
            offset: replicate.offset,
            bytes: payload.clone(),
            checksums: Arc::new(replicate.checksums.clone()),
            committed: replicate.committed,
            is_there,
        };
        let (extent, end, sync) = (landing.extent, landing.end(), replicate.sync);
        self.land(id, store, landing, sync, move |disk, result| {
            let mut effects = Vec::new();
            if let Some(partition) = disk.partitions.get_mut(&id) {
                partition.backup.written(request, extent, end, result, &mut effects);
            }
            disk.perform_backup(id, effects);
        });
    }

    /// A closed extent has the same bytes on all members: seal it, here and there. Whoever misses
    /// the word is told by the next alignment.
    fn seal_everywhere(&mut self, id: PartitionId, extent: ExtentId, length: u64) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let (store, epoch) = (Arc::clone(&partition.store), partition.configuration.epoch);
        let holders: Vec<NodeId> = partition.configuration.holders().collect();
        let owner = store.states(&[extent]).first().map(|state| (state.inode, state.session));
        let (inode, session) = owner.unwrap_or_default();
        let new = NewExtent { id: extent, epoch, inode, session };
        self.workers.ordered(
            (id, extent),
            move || {
                store.set_commit(extent, length)?;
                store.seal(extent, length)
            },
            move |_, result: Result<(), StoreError>| {
                if let Err(error) = result {
                    tracing::debug!(partition = %id, %extent, %error, "a closed extent was not sealed");
                }
            },
        );
        // A learner gets the bytes now: it becomes a member by what the last comparison has found.
        for member in holders.into_iter().filter(|member| *member != self.shared.node) {
            self.post_seal(id, new, length, member);
        }
    }

    fn post_seal(&self, partition: PartitionId, new: NewExtent, length: u64, member: NodeId) {
        let (shared, disk) = (Rc::clone(&self.shared), self.index);
        let NewExtent { id: extent, epoch, inode, session } = new;
        let appended = epoch;
        let source = self.shared.node;
        let request = DataRequest::Seal {
            partition,
            epoch,
            extent,
            length,
            appended,
            inode,
            session,
            source,
        };
        tokio::task::spawn_local(async move {
            let wait = Duration::from_secs(5);
            let told = shared.ask_node(member, &request, Bytes::new(), wait).await;
            if told.is_ok() {
                return;
            }
            let note = move |disk: &mut Disk| {
                let node = disk.shared.node;
                if let Some(partition) = disk.partitions.get_mut(&partition) {
                    partition.align_later(node, extent);
                }
            };
            shared.ask_disk(disk, note).await;
        });
    }
}

/// The record in front of a small file's bytes.
fn piece_header(append: &Append, payload: &Bytes, place: PiecePlace) -> [u8; PIECE_HEADER_BYTES] {
    let header = PieceHeader {
        inode: append.inode,
        session: append.session,
        file_offset: append.file_offset,
        length: u32::try_from(payload.len()).unwrap_or(u32::MAX),
    };
    header.encode(place)
}
