//! Reads: from any member that has the bytes, except those of overwritten extents.
//!
//! A replica answers only if it would know of overwrites: it takes part in the configuration, and
//! its group has a leader that it hears. Bytes that were overwritten in place are read at the
//! leader under its lease, after everything committed is on the extent.

use std::sync::Arc;

use bytes::Bytes;
use milpa_host::clock::{now_ms, now_us};
use milpa_host::rpc::Reply;
use milpa_types::{DataError, ExtentId, PartitionId};
use milpa_wire::data::{DataAnswer, DataReply, ExtentState, Read, TRANSFER_BYTES_MAX};

use crate::store::{StoreError, StoredBytes};

use super::disk::Disk;
use super::metrics::Metrics;
use super::partition::answer;
use super::requests::data_error;

/// A follower that has heard nothing from its leader's node for this long may be out of the
/// configuration without knowing it. Above the longest election timeout.
const HEARD_MS: u64 = 1_500;

impl Disk {
    /// A client's read.
    pub fn read(&mut self, read: Read, reply: Reply, arrived_us: u64) {
        match self.may_read(&read) {
            Err(error) => {
                Metrics::get().read_errors.inc();
                answer(reply, Err(error));
            }
            Ok(true) => self.read_as_leader(read, reply, arrived_us),
            Ok(false) => self.read_unless_marked(read, reply, arrived_us),
        }
    }

    /// Whether the read may be answered here, and if so whether only as the leader.
    fn may_read(&mut self, read: &Read) -> Result<bool, DataError> {
        let (node, now, ticked) = (self.shared.node, now_ms(), self.ticked_ms);
        if self.is_out_of_service {
            // Its groups say nothing any more: what was overwritten is not known here.
            return Err(DataError::DiskFailed);
        }
        let heard = |node| self.heard_ms.get(&node).copied().unwrap_or(0);
        let lease = self.driver.multi.lease_valid(read.partition, now);
        let heard_leader = self.partitions.get(&read.partition).and_then(|p| p.leader).map(heard);
        let partition = self.partition(read.partition)?;
        if read.length == 0 || read.length as usize > TRANSFER_BYTES_MAX {
            return Err(DataError::Invalid);
        }
        if !partition.is_member(node) || partition.is_installing {
            return Err(DataError::NotHere);
        }
        if partition.leads() {
            let waiting = partition.applying.borrow().is_waiting(read.extent);
            return if lease { Ok(read.at_leader || waiting) } else { Err(DataError::Busy) };
        }
        if read.at_leader || partition.applying.borrow().is_waiting(read.extent) {
            return Err(partition.not_leader());
        }
        // A process that was stopped wakes up with frames unread.
        let fresh = now.saturating_sub(ticked) < HEARD_MS;
        match heard_leader {
            _ if !partition.licence.holds(partition.configuration.epoch) => Err(DataError::Busy),
            Some(heard) if fresh && now.saturating_sub(heard) < HEARD_MS => Ok(false),
            _ => Err(DataError::Busy),
        }
    }

    /// Reads bytes that may have been overwritten, behind the overwrites of the extent.
    fn read_as_leader(&mut self, read: Read, reply: Reply, arrived_us: u64) {
        if let Err(error) = self.check_lease(read.partition) {
            return answer(reply, Err(error));
        }
        let Some(partition) = self.partitions.get(&read.partition) else { return };
        let store = Arc::clone(&partition.store);
        self.workers.ordered(
            (read.partition, read.extent),
            move || store.read_live(read.extent, read.offset, read.length),
            move |disk, result| {
                // The lease counts when the answer leaves, not when it was computed.
                let result = match disk.check_lease(read.partition) {
                    Ok(()) if disk.is_hindered(&read) => Err(DataError::Busy),
                    Ok(()) => {
                        disk.judge(&read, result).map_err(|error| disk.until_repaired(&read, error))
                    }
                    Err(error) => Err(error),
                };
                answer_read(reply, result, arrived_us);
            },
        );
    }

    /// Whether a committed overwrite of these bytes could not be done yet: what was read is old.
    fn is_hindered(&self, read: &Read) -> bool {
        let partition = self.partitions.get(&read.partition);
        partition.is_some_and(|partition| partition.applying.borrow().is_hindered(read.extent))
    }

    fn check_lease(&mut self, id: PartitionId) -> Result<(), DataError> {
        let lease = self.driver.multi.lease_valid(id, now_ms());
        let committed = self.driver.multi.status(id).map_or(u64::MAX, |status| status.commit);
        let partition = self.partition(id)?;
        if !partition.leads() {
            return Err(partition.not_leader());
        }
        let delivered = partition.applying.borrow().delivered();
        if lease && delivered >= committed { Ok(()) } else { Err(DataError::Busy) }
    }

    /// Reads on whichever thread is free, and finds out there whether the extent is marked.
    fn read_unless_marked(&mut self, read: Read, reply: Reply, arrived_us: u64) {
        let Some(partition) = self.partitions.get(&read.partition) else { return };
        let (store, leads) = (Arc::clone(&partition.store), partition.leads());
        let not_leader = DataError::NotPrimary { hint: partition.leader };
        let events = self.events.clone();
        self.workers.read(move || {
            let states = store.states(&[read.extent]);
            let marked = states.first().is_some_and(|state| state.overwritten);
            if marked && !leads {
                return answer(reply, Err(lost_of(&read, &states).unwrap_or(not_leader)));
            }
            let then: super::workers::Continuation = if marked {
                Box::new(move |disk| disk.read_as_leader(read, reply, arrived_us))
            } else {
                match store.read_live(read.extent, read.offset, read.length) {
                    Ok(stored) => return answer_read(reply, Ok(stored), arrived_us),
                    Err(error) => Box::new(move |disk| {
                        let result = disk.judge(&read, Err(error));
                        answer_read(reply, result, arrived_us);
                    }),
                }
            };
            let _ = events.send(super::disk::DiskEvent::Then(then));
        });
    }

    fn judge(
        &mut self,
        read: &Read,
        result: Result<StoredBytes, StoreError>,
    ) -> Result<StoredBytes, DataError> {
        // Clients may ask for anything: what overflows lies behind the end of every extent.
        let end = read.offset.saturating_add(u64::from(read.length));
        result.map_err(|error| {
            self.note_damage(read.partition, read.extent, &error);
            self.lost_or(read.partition, read.extent, end, error)
        })
    }

    /// What a reader is told of a damaged block that nobody else may read to him: to wait for the repair
    /// that has just begun, unless one has found that no member has the block.
    fn until_repaired(&self, read: &Read, error: DataError) -> DataError {
        match error {
            DataError::Corrupt { block } => match self.partitions.get(&read.partition) {
                Some(partition) if partition.lost.contains(read.extent, block) => error,
                _ => DataError::Busy,
            },
            error => error,
        }
    }

    /// A damaged block is repaired from another replica, whoever found it.
    pub(crate) fn note_damage(&mut self, id: PartitionId, extent: ExtentId, error: &StoreError) {
        if let Some(block) = error.damaged_block() {
            Metrics::get().corrupt_blocks.inc();
            self.repair_block(id, extent, block);
        }
    }

    /// What others are told of a failure. That a replica lacks bytes usually means that another one has
    /// them. Nobody has them if they lie behind the end of a sealed extent, or in an extent that the
    /// primary does not have and the members, compared, do not either: power failed everywhere before
    /// they were flushed. Nobody then needs to wait for them.
    pub(crate) fn lost_or(
        &self,
        id: PartitionId,
        extent: ExtentId,
        end: u64,
        error: StoreError,
    ) -> DataError {
        let Some(partition) = self.partitions.get(&id) else { return data_error(error) };
        match (&error, partition.store.states(&[extent]).first()) {
            (StoreError::Shorter { .. }, Some(state)) if state.sealed && end > state.length => {
                DataError::Lost { length: state.length }
            }
            (StoreError::NoExtent, None)
                if partition.configuration.primary == self.shared.node
                    && !partition.store.is_removed(extent)
                    && partition.alignment.is_complete() =>
            {
                DataError::Lost { length: 0 }
            }
            _ => data_error(error),
        }
    }
}

/// What lies behind the end of a sealed extent is lost, whoever leads: its length was decided for all. The leader may have
/// nothing of it, and cannot tell whether it is still to get it.
fn lost_of(read: &Read, states: &[ExtentState]) -> Option<DataError> {
    let end = read.offset.saturating_add(u64::from(read.length));
    let lost = states.first().filter(|state| state.sealed && end > state.length);
    lost.map(|state| DataError::Lost { length: state.length })
}

fn answer_read(reply: Reply, result: Result<StoredBytes, DataError>, arrived_us: u64) {
    let metrics = Metrics::get();
    match result {
        Ok(stored) => {
            metrics.read_bytes.inc_by(stored.bytes.len() as u64);
            let seconds = now_us().saturating_sub(arrived_us) as f64 / 1e6;
            metrics.read_seconds.observe(seconds);
            let body: DataReply = Ok(DataAnswer::Bytes { checksums: stored.checksums, hole: 0 });
            reply.send(&body, stored.bytes);
        }
        Err(error) => {
            metrics.read_errors.inc();
            let body: DataReply = Err(error);
            reply.send(&body, Bytes::new());
        }
    }
}
