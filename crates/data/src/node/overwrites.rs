//! Overwrites: proposed at the leader, applied by everybody, flushed before the log is trimmed.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::{now_ms, now_us};
use milpa_host::rpc::Reply;
use milpa_raft::{Committed, LogPosition, Payload, ProposeError, RoleChange};
use milpa_types::{DataError, ExtentId, NodeId, PartitionId};
use milpa_wire::data::{DataAnswer, DataRequest, Overwrite, TRANSFER_BYTES_MAX};

use crate::overwrite::{EntryHead, HEAD_BYTES_MAX, decode_entry, encode_entry};
use crate::store::{ExtentStore, Overwriting, StoreError, checksums_of};

use super::apply::{CommittedOverwrite, has_all};
use super::disk::Disk;
use super::metrics::Metrics;
use super::partition::{Partition, Proposal, Waiting, answer, answer_done};

/// An entry: the largest overwrite and its head.
pub(crate) const ENTRY_BYTES_MAX: usize = TRANSFER_BYTES_MAX + HEAD_BYTES_MAX;
/// A proposal that nobody hears of for this long is given up: the client was told "lost" before.
const PROPOSAL_MS: u64 = 30_000;
/// All members must have marked an extent within this time, else the client tries again.
const MARK_WAIT: Duration = Duration::from_secs(3);
/// Between two questions whether a member has marked an extent.
const MARK_PAUSE: Duration = Duration::from_millis(5);
impl Disk {
    /// A client's overwrite.
    pub fn overwrite(&mut self, it: Overwrite, payload: &Bytes, reply: Reply, arrived_us: u64) {
        let id = it.partition;
        if let Err(error) = self.check_overwrite(&it, payload) {
            return answer(reply, Err(error));
        }
        let (extent, length) = (it.extent, payload.len() as u64);
        let head = EntryHead::Overwrite { extent, offset: it.offset, checksums: it.checksums };
        let proposed = self.driver.multi.propose(id, encode_entry(&head, payload));
        let waiting = Waiting::Overwrite { extent, length, reply, arrived_us };
        self.proposed(id, proposed, waiting);
    }

    fn check_overwrite(&mut self, it: &Overwrite, payload: &Bytes) -> Result<(), DataError> {
        let (fenced, exhausted) = (self.is_fenced(), self.usage.is_exhausted);
        let leads_in = self.driver.multi.leads_in(it.partition);
        let partition = self.partition(it.partition)?;
        partition.check_epoch(it.epoch)?;
        let Some(term) = leads_in.filter(|_| partition.leads()) else {
            return Err(partition.not_leader());
        };
        if term != it.term {
            return Err(DataError::OtherTerm { term });
        }
        // The newest one out of the log, too: it may not be in force yet, and the group commits by it.
        let configurations = [&partition.configuration, &partition.state.configuration];
        if configurations.iter().any(|it| it.members.len() < 2) {
            return Err(DataError::ReadOnly);
        }
        if fenced {
            return Err(DataError::DiskFailed);
        }
        if exhausted {
            return Err(DataError::NoSpace);
        }
        if payload.is_empty() || payload.len() > TRANSFER_BYTES_MAX {
            return Err(DataError::Invalid);
        }
        if checksums_of(payload) != it.checksums {
            return Err(DataError::DamagedInTransit);
        }
        let end = it.offset.checked_add(payload.len() as u64).ok_or(DataError::Invalid)?;
        if partition.store.is_partly_freed(it.extent, it.offset, end) {
            // The writer has not heard that the file's bytes were cut off or replaced: what it
            // writes here would be in no file.
            return Err(DataError::NoExtent);
        }
        let states = partition.store.states(&[it.extent]);
        let length = states.first().map_or(0, |state| state.length);
        if let Some(block) = partition.lost.left_in_part(it.extent, (it.offset, end), length) {
            // If it is lost, or comes to be, what is written there can never be read.
            let is_lost = partition.lost.contains(it.extent, block);
            return Err(if is_lost { DataError::Corrupt { block } } else { DataError::Busy });
        }
        match states.first() {
            Some(state) if end <= state.committed => Ok(()),
            // Sealed means that its length was decided for all; the commit offset on the disk is
            // a hint, and may be of an earlier time.
            Some(state) if state.sealed && end <= state.length => Ok(()),
            Some(state) if state.sealed => Err(DataError::Lost { length: state.length }),
            // The primary's word that these bytes are committed is still on its way; or the bytes
            // are, if this replica is being filled.
            Some(_) => Err(DataError::Busy),
            None if partition.store.is_removed(it.extent) => Err(DataError::NoExtent),
            None => Err(DataError::NotHere),
        }
    }

    /// Notes who waits for an entry, or tells them why there is none.
    pub fn proposed(
        &mut self,
        id: PartitionId,
        proposed: Result<LogPosition, ProposeError>,
        waiting: Waiting,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        match proposed {
            Ok(LogPosition { term, index }) => {
                let since_ms = self.ticked_ms;
                let proposal = Proposal { term, waiting, since_ms };
                if let Some(former) = partition.proposals.insert(index, proposal) {
                    refuse(former.waiting, &DataError::Busy);
                }
            }
            Err(error) => {
                let error = match error {
                    ProposeError::NotLeader { leader, .. } => {
                        DataError::NotPrimary { hint: leader }
                    }
                    ProposeError::NoGroup { .. } => DataError::WrongPartition,
                    ProposeError::LogFailed => DataError::DiskFailed,
                    ProposeError::TooLarge { .. } => DataError::Invalid,
                    _ => DataError::Busy,
                };
                refuse(waiting, &error);
            }
        }
    }

    /// One committed entry of a group.
    pub fn committed(&mut self, id: PartitionId, entry: Committed) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let index = entry.position.index;
        partition.checkpoint.bytes += payload_bytes(&entry.payload);
        let configuration = match entry.payload {
            Payload::Empty => None,
            Payload::Members { context, .. } => milpa_wire::decode(&context).ok(),
            Payload::Data(data) => match decode_entry(&data) {
                Some((EntryHead::Overwrite { extent, offset, checksums }, bytes)) => {
                    partition.applying.borrow_mut().begin(index, Some(extent));
                    let overwriting = match index <= partition.repeated_until {
                        true => Overwriting::Repeated,
                        false => Overwriting::New,
                    };
                    let place = (extent, offset);
                    let it = CommittedOverwrite::new(place, bytes, checksums, overwriting);
                    return self.apply_overwrite(id, entry.position, Arc::new(it), Vec::new(), 0);
                }
                Some((EntryHead::Configure(configuration), _)) => Some(configuration),
                None => {
                    tracing::error!(partition = %id, index, "a log entry cannot be understood");
                    None
                }
            },
        };
        partition.applying.borrow_mut().begin(index, None);
        match configuration {
            Some(configuration) => self.adopt(id, entry.position, configuration),
            None => self.entry_applied(id, entry.position, None, Ok(())),
        }
    }

    /// An entry has had its effect here (or, with an error, could not have it on this extent).
    pub fn entry_applied(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        extent: Option<ExtentId>,
        result: Result<(), DataError>,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let moved = partition.applying.borrow_mut().finish(position.index, extent);
        let applied = partition.applying.borrow().applied();
        if let Some(extent) = extent {
            let first = partition.applying.borrow().first_hindered(extent);
            partition.handed.done(position.index, extent, first);
        }
        let proposal = partition.proposals.remove(&position.index);
        if moved {
            self.driver.multi.applied(id, applied);
        }
        let Some(proposal) = proposal else { return };
        if proposal.term != position.term {
            return refuse(proposal.waiting, &DataError::Busy);
        }
        match proposal.waiting {
            Waiting::Overwrite { extent, length, reply, arrived_us } => match result {
                Ok(()) => {
                    self.answer_overwrite(id, (extent, position.index), length, reply, arrived_us);
                }
                Err(error) => answer(reply, Err(error)),
            },
            Waiting::Configure { configuration, replies } => {
                self.answer_configure(id, &configuration, replies);
            }
        }
    }

    /// Answers at once if all members are known to send readers of this extent to the leader;
    /// else asks them until they do. One round trip, at an extent's first overwrite.
    fn answer_overwrite(
        &mut self,
        id: PartitionId,
        (extent, index): (ExtentId, u64),
        length: u64,
        reply: Reply,
        arrived_us: u64,
    ) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let done = move |reply: Reply| {
            let metrics = Metrics::get();
            metrics.overwrite_bytes.inc_by(length);
            let seconds = now_us().saturating_sub(arrived_us) as f64 / 1e6;
            metrics.overwrite_seconds.observe(seconds);
            answer_done(reply, Ok(()));
        };
        if partition.marked_everywhere.contains(&extent) {
            return done(reply);
        }
        let configuration = partition.configuration.clone();
        let of_others = partition.licence.of_others(now_ms());
        let (shared, disk, node) = (Rc::clone(&self.shared), self.index, self.shared.node);
        tokio::task::spawn_local(async move {
            tokio::time::sleep(of_others).await;
            for member in configuration.members.iter().filter(|member| **member != node) {
                let asked =
                    marked(&shared, disk, (id, configuration.epoch), (extent, index), *member);
                if !matches!(tokio::time::timeout(MARK_WAIT, asked).await, Ok(true)) {
                    // The bytes are committed, but a reader may still see the old ones at this
                    // member. The client repeats itself until it is heard or out of the epoch.
                    return answer(reply, Err(DataError::Busy));
                }
            }
            let note = move |disk: &mut Disk| {
                let Some(partition) = disk.partitions.get_mut(&id) else { return };
                // Another one may have members that were not asked.
                if partition.configuration.epoch == configuration.epoch {
                    partition.marked_everywhere.insert(extent);
                }
            };
            shared.ask_disk(disk, note).await;
            done(reply);
        });
    }

    /// Roles, terms and leaders.
    pub fn role_changed(&mut self, change: &RoleChange) {
        let Some(partition) = self.partitions.get_mut(&change.group) else { return };
        Metrics::get().raft_role_changes.inc();
        tracing::debug!(partition = %change.group, role = ?change.role, term = change.term,
            leader = ?change.leader, "Raft role");
        (partition.role, partition.term) = (change.role, change.term);
        partition.leader = change.leader;
        if change.leader.is_none() {
            partition.licence.revoke();
        }
    }

    /// Deadlines of proposals, and checkpoints that are due.
    pub fn tick_overwrites(&mut self, now: u64) {
        let config = &self.shared.config;
        let (bytes_max, trim_ms) = (config.log_bytes_max, config.log_trim_ms);
        let mut due = Vec::new();
        for (id, partition) in &mut self.partitions {
            give_up_old(partition, now);
            let checkpoint = &mut partition.checkpoint;
            if checkpoint.at_ms == 0 {
                checkpoint.at_ms = now;
            }
            let waited = now.saturating_sub(checkpoint.at_ms) >= trim_ms;
            let news = partition.applying.borrow().applied() > partition.state.applied;
            let wanted = checkpoint.bytes >= bytes_max || (waited && (news || has_come(partition)));
            let checkpoint = &partition.checkpoint;
            if wanted && !checkpoint.is_running && !partition.is_installing {
                due.push(*id);
            }
        }
        if self.is_fenced() {
            return;
        }
        for id in due {
            self.start_checkpoint(id, now);
        }
    }

    /// Flushes what was overwritten, writes the applied index down, then lets the log go.
    fn start_checkpoint(&mut self, id: PartitionId, now: u64) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let (index, since) = (partition.applying.borrow().applied(), partition.state.applied);
        let came = if has_come(partition) { partition.lacking.clone() } else { BTreeSet::new() };
        let touched: Vec<(ExtentId, u64)> = {
            let applying = partition.applying.borrow();
            let touched = applying.touched_after(since).into_iter().chain(came.iter().copied());
            touched.map(|extent| (extent, 0)).collect()
        };
        partition.checkpoint.is_running = true;
        partition.checkpoint.bytes = 0;
        partition.checkpoint.at_ms = now;
        let store = Arc::clone(&partition.store);
        self.workers.slow(
            move || flush_those_left(&store, &touched),
            move |disk, flushed| disk.checkpoint_flushed(id, index, &came, flushed),
        );
    }

    fn checkpoint_flushed(
        &mut self,
        id: PartitionId,
        index: u64,
        came: &BTreeSet<ExtentId>,
        flushed: Result<(), StoreError>,
    ) {
        let snapshot = self.driver.multi.describe(id, index);
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if let Err(error) = flushed {
            partition.checkpoint.is_running = false;
            tracing::warn!(partition = %id, %error, "the log was not trimmed: a flush failed");
            return;
        }
        if partition.state.applied > index {
            // A snapshot has come meanwhile, and stands for more.
            partition.checkpoint.is_running = false;
            return;
        }
        partition.state.applied = index;
        partition.state.overwritten = partition.applying.borrow().overwritten();
        if !came.is_empty() && has_come(partition) {
            partition.lacking.retain(|extent| !came.contains(extent));
            partition.state.lacks_overwritten =
                partition.lacked_before || !partition.lacking.is_empty();
        }
        if snapshot.is_some() {
            partition.state.snapshot.clone_from(&snapshot);
        }
        self.save_state(
            id,
            Box::new(move |disk| {
                if let Some(partition) = disk.partitions.get_mut(&id) {
                    partition.checkpoint.is_running = false;
                    if !partition.is_fetching() {
                        partition.applying.borrow_mut().forget_until(index);
                    }
                }
                if let Some(snapshot) = snapshot {
                    disk.hand_out(id, snapshot);
                    disk.trim_log(id, index);
                }
            }),
        );
    }

    /// Lets the log up to `index` go. While a block is damaged here, what is in memory stays for members that are away. Their
    /// copy may be the last good one: who comes back by the log keeps it, and who copies a snapshot cannot know that it is good.
    fn trim_log(&mut self, id: PartitionId, index: u64) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let Some(status) = self.driver.multi.status(id) else { return };
        let last = if partition.lost.is_empty() { index } else { status.tail_first - 1 };
        self.driver.multi.compact(id, index.min(last));
    }
}

/// Flushes extents of which some may be removed by now.
fn flush_those_left(store: &ExtentStore, extents: &[(ExtentId, u64)]) -> Result<(), StoreError> {
    for extent in extents {
        match store.flush(std::slice::from_ref(extent)) {
            Ok(()) | Err(StoreError::NoExtent | StoreError::Removed) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether a member marks the extent as overwritten, asked until it does, or until the epoch is over: nobody answers for
/// that one then, and who waits is to ask again in the next.
async fn marked(
    shared: &Rc<super::shared::Shared>,
    disk: usize,
    (partition, epoch): (PartitionId, milpa_types::Epoch),
    (extent, index): (ExtentId, u64),
    member: NodeId,
) -> bool {
    let request = DataRequest::ExtentInfo { partition, epoch, extents: vec![extent], after: None };
    loop {
        match shared.ask_node(member, &request, Bytes::new(), MARK_WAIT).await {
            Ok((DataAnswer::Extents(states), _)) => {
                let is_marked = match states.first() {
                    Some(state) => state.overwritten,
                    None => lacks_as_of(shared, partition, (extent, index), member).await,
                };
                if is_marked {
                    return true;
                }
            }
            Ok(_) => return false,
            Err(error) => tracing::debug!(%member, %error, "cannot ask for a mark"),
        }
        let now = move |disk: &mut Disk| Some(disk.partitions.get(&partition)?.configuration.epoch);
        if shared.ask_disk(disk, now).await.flatten() != Some(epoch) {
            return false;
        }
        tokio::time::sleep(MARK_PAUSE).await;
    }
}

/// Whether a member that has applied the log up to `index` has nothing of an extent. It serves nobody then, and what it
/// copies later has the overwrite, and its mark; one that is behind may be copying what has neither.
async fn lacks_as_of(
    shared: &Rc<super::shared::Shared>,
    partition: PartitionId,
    (extent, index): (ExtentId, u64),
    member: NodeId,
) -> bool {
    let request = DataRequest::Fetch { partition, extent, offset: 0, length: 1, applied: index };
    let answer = shared.ask_node(member, &request, Bytes::new(), MARK_WAIT).await;
    matches!(answer, Err(DataError::NoExtent))
}

fn payload_bytes(payload: &Payload) -> u64 {
    match payload {
        Payload::Data(data) => data.len() as u64,
        Payload::Empty | Payload::Members { .. } => 64,
    }
}

/// Whether all that overwrites found missing is there: it came with the overwrites.
fn has_come(partition: &Partition) -> bool {
    let Partition { lacking, store, .. } = partition;
    !lacking.is_empty() && lacking.iter().all(|extent| has_all(store, *extent))
}

fn give_up_old(partition: &mut Partition, now: u64) {
    let old = |proposal: &Proposal| now.saturating_sub(proposal.since_ms) > PROPOSAL_MS;
    // Dropping the reply tells the caller that the outcome is unknown.
    partition.proposals.retain(|_, proposal| !old(proposal));
}

impl Disk {
    /// Nobody is told that an overwrite is done which only this replica has.
    pub fn refuse_overwrites(&mut self, id: PartitionId) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let is_overwrite = |it: &mut Proposal| matches!(it.waiting, Waiting::Overwrite { .. });
        for (_, proposal) in partition.proposals.extract_if(.., |_, it| is_overwrite(it)) {
            refuse(proposal.waiting, &DataError::ReadOnly);
        }
    }
}

/// Tells those who wait for a proposal that it will not be.
fn refuse(waiting: Waiting, error: &DataError) {
    match waiting {
        Waiting::Overwrite { reply, .. } => answer(reply, Err(error.clone())),
        Waiting::Configure { replies, .. } => {
            for reply in replies {
                answer(reply, Err(error.clone()));
            }
        }
    }
}
