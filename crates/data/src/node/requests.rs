//! Requests of one disk's partitions, each to its handler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use milpa_host::clock::{self, Instant};
use milpa_host::rpc::Reply;

use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, FreedRange, PartitionId, Role};
use milpa_wire::data::{
    DataAnswer, DataReply, DataRequest, EXTENT_STATES_MAX, ExtentDigest, ExtentState,
    FREED_RANGES_MAX,
};

use crate::store::{ExtentStore, Freed, HeaderBlocks, StoreError};

use super::access::partition_of;
use super::disk::{Disk, DiskEvent, Incoming};
use super::metrics::Metrics;
use super::partition::{Partition, answer};
use super::replace::whole_of;

/// Extents in one flush request, at most.
const FLUSH_EXTENTS_MAX: usize = 65_536;
/// Extents in one digest, at most: what fits into an answer.
const DIGESTS_MAX: usize = 200_000;

/// A store error as others are told: an extent that is not here may well be elsewhere.
pub(crate) fn data_error(error: StoreError) -> DataError {
    match error {
        StoreError::NoExtent => DataError::NotHere,
        other => other.into(),
    }
}

impl Disk {
    /// One request, its role already checked.
    pub fn request(&mut self, incoming: Incoming) {
        if let Err(error) = self.admit(&incoming) {
            answer(incoming.reply, Err(error));
            return;
        }
        let Incoming { peer, request, payload, reply, arrived_us } = incoming;
        match request {
            DataRequest::Append(append) => self.append(append, payload, reply, arrived_us),
            DataRequest::Replicate(it) => self.replicate(peer.node, it, payload, reply),
            DataRequest::Read(read) => self.read(read, reply, arrived_us),
            DataRequest::Flush { partition, epoch, extents } => {
                self.flush(partition, epoch, extents, reply);
            }
            DataRequest::Overwrite(it) => self.overwrite(it, &payload, reply, arrived_us),
            DataRequest::Close { partition, extent } => self.close(partition, extent, reply),
            DataRequest::ExtentInfo { partition, epoch, extents, after } => {
                self.extent_info((partition, epoch), extents, after, reply);
            }
            DataRequest::Seal { .. } => self.seal(peer.node, request, reply),
            DataRequest::Fetch { partition, extent, offset, length, applied } => {
                self.fetch((partition, extent), (offset, length), applied, reply);
            }
            DataRequest::Doubtful { partition, extent, block, applied } => {
                self.doubtful((partition, extent), block, applied, reply);
            }
            DataRequest::Licence { partition, epoch } => {
                self.license((partition, epoch), reply);
            }
            DataRequest::CreatePartition(create) => self.create_partition(create, reply),
            DataRequest::DeletePartition { partition, deletion } => {
                self.delete_partition(partition, deletion, reply);
            }
            DataRequest::Configure { partition, configuration, lost } => {
                self.configure(partition, configuration, &lost, reply);
            }
            DataRequest::Digest { partition, lengths } => self.digest(partition, lengths, reply),
            DataRequest::Freed { partition, epoch, extents } => {
                self.freed((partition, epoch), extents, reply);
            }
            DataRequest::LostBlocks { partition, epoch, extents } => {
                answer(reply, self.lost_blocks((partition, epoch), &extents));
            }
            DataRequest::Returned { partition, epoch } => {
                self.returned(peer.node, (partition, epoch), reply);
            }
            // These concern all disks: the service answers them.
            DataRequest::Free { .. }
            | DataRequest::Report
            | DataRequest::SetRelaxed { .. }
            | DataRequest::Probe => {
                answer(reply, Err(DataError::Invalid));
            }
        }
    }

    fn admit(&mut self, incoming: &Incoming) -> Result<(), DataError> {
        let client = incoming.peer.role == Role::Client;
        if client && self.workers.is_full() {
            return Err(self.busy());
        }
        if let DataRequest::CreatePartition(_) | DataRequest::DeletePartition { .. } =
            incoming.request
        {
            return Ok(());
        }
        let Some(id) = partition_of(&incoming.request) else { return Ok(()) };
        let volume = self.partition(id)?.state.volume;
        let foreign = client && incoming.peer.volume != Some(volume);
        if foreign { Err(DataError::WrongPartition) } else { Ok(()) }
    }

    fn flush(
        &mut self,
        id: PartitionId,
        epoch: Epoch,
        extents: Vec<(ExtentId, u64)>,
        reply: Reply,
    ) {
        // Each of them once: of each all that is lost is told.
        let is_sorted = extents.is_sorted_by(|(one, _), (next, _)| one < next);
        if !is_sorted || extents.len() > FLUSH_EXTENTS_MAX {
            return answer(reply, Err(DataError::Invalid));
        }
        if let Some(partition) = self.partitions.get_mut(&id) {
            let now = clock::now_ms();
            extents.iter().for_each(|(id, length)| partition.lost.doubt_old(*id, *length, now));
        }
        if let Err(error) = self.check_flush(id, epoch, &extents) {
            return answer(reply, Err(error));
        }
        let Some(partition) = self.partitions.get(&id) else { return };
        let (store, relaxed) = (Arc::clone(&partition.store), partition.state.relaxed);
        let lost = partition.lost_of(&extents);
        if relaxed && lost.is_empty() {
            // What was appended was written before it was acknowledged.
            let held = store.check_held(&extents).and_then(|()| none_removed(&store, &extents));
            let held = held.map_err(|error| self.not_flushed(id, &store, &extents, error));
            return answer(reply, held.map(|()| DataAnswer::InMemory));
        }
        self.workers.slow(
            move || {
                let started = Instant::now();
                let held = if relaxed { store.check_held(&extents) } else { store.flush(&extents) };
                let result = held.and_then(|()| none_removed(&store, &extents));
                Metrics::get().flush_seconds.observe(started.elapsed().as_secs_f64());
                // It may have come with other bytes since.
                let back = whole_of(&store, lost);
                (store, extents, reply, result, back)
            },
            move |disk, (store, extents, reply, result, back)| {
                let whole = if relaxed { DataAnswer::InMemory } else { DataAnswer::Done };
                let result = match result {
                    // What is lost may have been looked for anew since.
                    Ok(()) => disk
                        .check_flush(id, epoch, &extents)
                        .map(|()| disk.but_lost(id, &extents, &back, whole)),
                    Err(error) => Err(disk.not_flushed(id, &store, &extents, error)),
                };
                answer(reply, result);
            },
        );
    }

    /// Whether a flush may be answered now.
    fn check_flush(
        &mut self,
        id: PartitionId,
        epoch: Epoch,
        extents: &[(ExtentId, u64)],
    ) -> Result<(), DataError> {
        if self.is_fenced() {
            return Err(DataError::DiskFailed);
        }
        let partition = self.partition(id)?;
        partition.check_epoch(epoch)?;
        // What one disk has is not safe, whoever took it before.
        if partition.configuration.members.len() < 2 {
            return Err(DataError::ReadOnly);
        }
        if partition.may_be_flushed(extents) { Ok(()) } else { Err(DataError::Busy) }
    }

    /// What to say of a flush: as well which blocks no member has. They may be of other files than the one that is
    /// synced, or have been synced before: who asks knows.
    fn but_lost(
        &mut self,
        id: PartitionId,
        extents: &[(ExtentId, u64)],
        back: &[(ExtentId, u64)],
        whole: DataAnswer,
    ) -> DataAnswer {
        let Some(partition) = self.partitions.get_mut(&id) else { return whole };
        back.iter().for_each(|(extent, block)| partition.lost.remove(*extent, *block));
        let lost = partition.lost_of(extents);
        let in_memory = whole == DataAnswer::InMemory;
        if lost.is_empty() { whole } else { DataAnswer::DoneBut { lost, in_memory } }
    }

    /// Why not all of these are there. Which of them it was, the store does not say.
    fn not_flushed(
        &self,
        id: PartitionId,
        store: &ExtentStore,
        extents: &[(ExtentId, u64)],
        error: StoreError,
    ) -> DataError {
        let is_short = |(extent, at_least): &&(ExtentId, u64)| {
            store.check_held(&[(*extent, *at_least)]).is_err()
        };
        match extents.iter().find(is_short) {
            Some((extent, at_least)) => self.lost_or(id, *extent, *at_least, error),
            None => data_error(error),
        }
    }

    /// Frees ranges of one partition; `then` gets how it went, on a disk thread.
    pub fn free(
        &mut self,
        id: PartitionId,
        ranges: Vec<crate::store::Freed>,
        then: impl FnOnce(Result<(), DataError>) + Send + 'static,
    ) {
        match self.partition(id) {
            Ok(partition) => {
                let store = Arc::clone(&partition.store);
                let lost = partition.lost.all_nowhere().collect();
                let known = partition.lost.of_freed(&ranges);
                self.workers.free(
                    move || {
                        let mut headers = HeaderBlocks { lost, damaged: Vec::new() };
                        then(store.free(&ranges, &mut headers).map_err(DataError::from));
                        // A block of small files may have bytes of others.
                        (headers.damaged, whole_of(&store, known))
                    },
                    move |disk, (damaged, gone)| {
                        if let Some(partition) = disk.partitions.get_mut(&id) {
                            gone.iter().for_each(|(at, block)| partition.lost.remove(*at, *block));
                        }
                        for (extent, block) in damaged {
                            disk.repair_block(id, extent, block);
                        }
                    },
                );
            }
            Err(error) => then(Err(error)),
        }
    }

    fn extent_info(
        &mut self,
        place: (PartitionId, Epoch),
        extents: Vec<ExtentId>,
        after: Option<ExtentId>,
        reply: Reply,
    ) {
        let store = match self.asked_of(place, &extents) {
            Ok(partition) => Arc::clone(&partition.store),
            Err(error) => return answer(reply, Err(error)),
        };
        self.workers.slow(
            move || {
                let mut states = store.states(&extents);
                states.sort_by_key(|state| state.extent);
                states.retain(|state| after.is_none_or(|after| state.extent > after));
                states.truncate(EXTENT_STATES_MAX);
                answer(reply, Ok(DataAnswer::Extents(states)));
            },
            |_, ()| {},
        );
    }

    fn freed(&mut self, place: (PartitionId, Epoch), extents: Vec<ExtentId>, reply: Reply) {
        let id = place.0;
        match self.asked_of(place, &extents).map(|partition| Arc::clone(&partition.store)) {
            Ok(store) => self.workers.slow(
                move || answer(reply, Ok(DataAnswer::Freed(freed_of(&store, id, &extents)))),
                |_, ()| {},
            ),
            Err(error) => answer(reply, Err(error)),
        }
    }

    fn lost_blocks(&mut self, place: (PartitionId, Epoch), extents: &[ExtentId]) -> DataReply {
        let lost = &self.asked_of(place, extents)?.lost;
        let extents: BTreeSet<ExtentId> = extents.iter().copied().collect();
        let lost = extents.into_iter().flat_map(|extent| lost.told_of(extent));
        Ok(DataAnswer::LostBlocks(lost.collect()))
    }

    /// The partition of which something about some extents is asked.
    fn asked_of(
        &mut self,
        (id, epoch): (PartitionId, Epoch),
        extents: &[ExtentId],
    ) -> Result<&Partition, DataError> {
        let partition = self.partition(id)?;
        partition.check_epoch(epoch)?;
        if extents.len() > EXTENT_STATES_MAX {
            return Err(DataError::Invalid);
        }
        Ok(partition)
    }

    fn fetch(
        &mut self,
        (id, extent): (PartitionId, ExtentId),
        (offset, length): (u64, u64),
        applied: u64,
        reply: Reply,
    ) {
        let partition = match self.partition(id) {
            Ok(partition) => partition,
            Err(error) => return answer(reply, Err(error)),
        };
        let store = Arc::clone(&partition.store);
        let is_repeating = partition.is_repeating(clock::now_ms());
        // Bytes that lack overwrites which the asker has already skipped would lose them.
        let applying = partition.applying.borrow();
        let (may_give, is_hindered) =
            (applying.has_applied(applied, extent), applying.is_hindered(extent));
        drop(applying);
        if !may_give && is_hindered {
            return self.refuse_fetch(store, (id, extent), offset, reply);
        }
        if !may_give {
            return answer(reply, Err(DataError::Busy));
        }
        let length = length.min(milpa_wire::data::TRANSFER_BYTES_MAX as u64);
        let events = self.events.clone();
        let read = move || match store.read_for_repair(extent, offset, length) {
            Ok(found) => {
                let (checksums, hole) = (found.stored.checksums, found.hole);
                let body: DataReply = Ok(DataAnswer::Bytes { checksums, hole });
                reply.send(&body, found.stored.bytes);
            }
            Err(error) => {
                // Who asks has to have these bytes from here before its partition goes on.
                let note = move |disk: &mut Disk| {
                    disk.note_damage(id, extent, &error);
                    let may_be_read = |block| {
                        let partition = disk.partitions.get(&id);
                        partition.is_none_or(|partition| partition.lost.may_be_read(extent, block))
                    };
                    let answered = match error {
                        // The asker may take a damaged block for one that nobody has.
                        StoreError::ReadFailed { block, .. } if may_be_read(block) => {
                            DataError::Unsettled { block }
                        }
                        StoreError::Corrupt { block } | StoreError::Doubtful { block }
                            if is_repeating =>
                        {
                            DataError::Unsettled { block }
                        }
                        error => data_error(error),
                    };
                    answer(reply, Err(answered));
                };
                let _ = events.send(DiskEvent::Then(Box::new(note)));
            }
        };
        self.workers.copy(read, |_, ()| {});
    }

    /// An overwrite of the extent waits here, perhaps for the very block that is asked for, as the disk cannot read it: then
    /// nobody is to wait for this replica. Those who are in doubt about theirs would, and it for them. But it is not lost
    /// here: the disk may read it the next time.
    fn refuse_fetch(
        &mut self,
        store: Arc<ExtentStore>,
        (id, extent): (PartitionId, ExtentId),
        offset: u64,
        reply: Reply,
    ) {
        let block = offset / BLOCK_BYTES;
        let partition = self.partitions.get(&id);
        let may_be_read = partition.is_none_or(|it| it.lost.may_be_read(extent, block));
        let refuse = move || {
            let error = match store.read_for_repair(extent, offset, 1) {
                Err(StoreError::ReadFailed { .. }) if may_be_read => DataError::NotHere,
                Err(StoreError::ReadFailed { block, .. }) => DataError::Corrupt { block },
                _ => DataError::Busy,
            };
            answer(reply, Err(error));
        };
        self.workers.slow(refuse, |_, ()| {});
    }

    fn digest(&mut self, id: PartitionId, lengths: Vec<(ExtentId, u64)>, reply: Reply) {
        let store = match self.partition(id) {
            Ok(partition) => Arc::clone(&partition.store),
            Err(error) => return answer(reply, Err(error)),
        };
        self.workers.slow(
            move || {
                let lengths: BTreeMap<_, _> = lengths.into_iter().collect();
                let mut digests = Vec::new();
                for state in store.states(&[]).into_iter().take(DIGESTS_MAX) {
                    match verified_digest(&store, &state, &lengths) {
                        Ok(digest) => digests.push(digest),
                        // Removed meanwhile: it is in nobody's digest.
                        Err(StoreError::NoExtent | StoreError::Removed) => {}
                        Err(error) => return Err((state.extent, error, reply)),
                    }
                }
                let body: DataReply = Ok(DataAnswer::Digest(digests));
                reply.send(&body, Bytes::new());
                Ok(())
            },
            move |disk, compared| {
                if let Err((extent, error, reply)) = compared {
                    disk.note_damage(id, extent, &error);
                    answer(reply, Err(data_error(error)));
                }
            },
        );
    }
}

/// What is freed of these extents, as it travels between nodes.
pub(crate) fn freed_of(
    store: &ExtentStore,
    partition: PartitionId,
    extents: &[ExtentId],
) -> Vec<FreedRange> {
    let freed = store.freed(extents, FREED_RANGES_MAX).into_iter();
    freed
        .map(|Freed { extent, offset, length }| FreedRange { partition, extent, offset, length })
        .collect()
}

/// The digest of an extent whose bytes on the disk were read and found valid. A replica that is
/// shorter than the primary says what it has, so that the comparison shows it.
fn verified_digest(
    store: &ExtentStore,
    state: &ExtentState,
    lengths: &BTreeMap<ExtentId, u64>,
) -> Result<ExtentDigest, StoreError> {
    // All bytes of a sealed extent are committed, whatever the header had heard of that.
    let committed = if state.sealed { state.length } else { state.committed };
    let length = lengths.get(&state.extent).copied().unwrap_or(committed);
    if let Some(block) = store.verify(state.extent, 0, u64::MAX)?.damaged.first() {
        return Err(StoreError::Corrupt { block: *block });
    }
    match store.digest(state.extent, Some(length)) {
        Err(StoreError::Shorter { length }) => store.digest(state.extent, Some(length)),
        result => result,
    }
}

/// The store skips what was removed. To who asks for a flush it is an error: the extent may have been
/// removed because power had taken the only bytes of it that were not dead, and these are asked for.
fn none_removed(store: &ExtentStore, extents: &[(ExtentId, u64)]) -> Result<(), StoreError> {
    let is_removed = extents.iter().any(|(extent, _)| store.is_removed(*extent));
    if is_removed { Err(StoreError::Removed) } else { Ok(()) }
}
