//! The ordering side of alignment, run by the primary: after a new epoch, after its own start, and
//! for extents that broke. What is left undone is tried again.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{DataError, Epoch, ExtentId, NodeId, PartitionId};
use milpa_wire::data::{Configuration, DataRequest};
use tokio::task::JoinSet;

use crate::alignment::{Claim, Decision, decide, sources};
use crate::store::{NewExtent, StoreError};

use super::disk::Disk;
use super::fill::Filling;
use super::freed::FreedRanges;
use super::held::States;
use super::metrics::Metrics;

/// A member may need this long to fetch what it lacks; it goes on after that, and is asked again.
const SEAL_WAIT: Duration = Duration::from_secs(60);
/// Pause after a run that left something undone: doubled with each failure, at most 16 of it. A replica that was
/// made a moment ago is there before the second.
const PAUSE_MS: u64 = 125;
/// All members are compared again after this time: a member that lost power for a moment may be
/// shorter than it was, without anybody having noticed its absence.
const COMPARE_MS: u64 = 600_000;

/// Extents that are made equal at the same time: one waits for the disk, one for the network.
const EXTENTS_AT_ONCE: usize = 4;

/// One run over a partition's extents.
pub(super) struct Run {
    pub(super) filling: Filling,
    pub(super) node: NodeId,
    pub(super) configuration: Configuration,
    /// Only these; all if `None`.
    only: Option<Vec<ExtentId>>,
    /// Counts the fills that were ordered: each is sent to the next source. It begins elsewhere
    /// after a failure.
    fills: Cell<usize>,
}

/// What a run leaves.
struct Outcome {
    /// Extents that are not known to be equal.
    left: BTreeSet<ExtentId>,
    /// Every member told what it holds.
    complete: bool,
}

/// Aligns extents, a few at a time. Gives those of which `align` did not say that it is done: a task
/// that panicked or was cancelled leaves its extent as one that failed does.
async fn left_of<F: Future<Output = bool> + 'static>(
    extents: &BTreeSet<ExtentId>,
    align: impl Fn(ExtentId) -> F,
) -> BTreeSet<ExtentId> {
    let mut left = extents.clone();
    let mut aligning = JoinSet::new();
    let mut waiting = extents.iter().copied();
    loop {
        while aligning.len() < EXTENTS_AT_ONCE
            && let Some(extent) = waiting.next()
        {
            let aligned = align(extent);
            aligning.spawn_local(async move { aligned.await.then_some(extent) });
        }
        match aligning.join_next().await {
            Some(Ok(Some(extent))) => drop(left.remove(&extent)),
            Some(Ok(None)) => {}
            Some(Err(error)) => tracing::error!(%error, "a task that aligned an extent failed"),
            None => return left,
        }
    }
}

/// The extent as a replica that has nothing of it must make it. Whose it is, is known to those who
/// took its first bytes from the primary, and to those who were told by one of them: a replica that
/// did not know could not offer it, and would keep what the others delete.
fn described(extent: ExtentId, claims: &[Claim]) -> NewExtent {
    let states = || claims.iter().filter_map(|claim| claim.state);
    let epoch = states().map(|state| state.epoch).min().unwrap_or_default();
    let owners = states().map(|state| (state.inode, state.session));
    let (inode, session) = owners.max_by_key(|(inode, _)| *inode).unwrap_or_default();
    NewExtent { id: extent, epoch, inode, session }
}

impl Disk {
    /// Starts the alignments that are due.
    pub fn tick_alignment(&mut self, now: u64) {
        if self.is_fenced() {
            return;
        }
        let node = self.shared.node;
        let due: Vec<PartitionId> = self
            .partitions
            .values()
            .filter(|partition| {
                let alignment = &partition.alignment;
                let old = now.saturating_sub(alignment.compared_ms) > COMPARE_MS;
                let work = alignment.wants_all || old || !alignment.broken.is_empty();
                let primary = partition.configuration.primary == node;
                let idle = !alignment.is_running && now >= alignment.next_ms;
                primary && work && idle && partition.broken.is_none()
            })
            .map(|partition| partition.id)
            .collect();
        for id in due {
            self.start_alignment(id);
        }
    }

    fn start_alignment(&mut self, id: PartitionId) {
        let Some(filling) = self.filling(id) else { return };
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        partition.alignment.is_running = true;
        partition.primary.watch();
        let broken = std::mem::take(&mut partition.alignment.broken);
        partition.alignment.unaligned = broken.len() as u64;
        let now = milpa_host::clock::now_ms();
        let old = now.saturating_sub(partition.alignment.compared_ms) > COMPARE_MS;
        // Wanted again by a member that returns during the run: it may have told of more before.
        let all = std::mem::take(&mut partition.alignment.wants_all) || old;
        let only = (!all).then(|| broken.into_iter().collect());
        let (node, configuration) = (self.shared.node, partition.configuration.clone());
        let epoch = configuration.epoch;
        let fills = Cell::new(partition.alignment.failures as usize);
        let run = Rc::new(Run { filling: filling.clone(), node, configuration, only, fills });
        tokio::task::spawn_local(async move {
            let outcome = Run::run(run).await;
            let done = move |disk: &mut Disk| disk.alignment_done(id, epoch, all, outcome);
            filling.shared.ask_disk(filling.disk, done).await;
        });
    }

    fn alignment_done(&mut self, id: PartitionId, epoch: Epoch, all: bool, outcome: Outcome) {
        let now = milpa_host::clock::now_ms();
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let alignment = &mut partition.alignment;
        alignment.is_running = false;
        if partition.configuration.epoch != epoch {
            // A newer epoch has its own run to make.
            return;
        }
        alignment.unaligned = 0;
        let done = outcome.complete && outcome.left.is_empty();
        if all {
            alignment.wants_all |= !outcome.complete;
            alignment.is_unknown &= alignment.wants_all;
            alignment.compared_ms = now;
        }
        alignment.broken.extend(outcome.left);
        alignment.failures = if done { 0 } else { alignment.failures.saturating_add(1) };
        alignment.next_ms = now + if done { 0 } else { PAUSE_MS << alignment.failures.min(4) };
        if done && all {
            if partition.configuration.members.len() > 1 {
                partition.state.lacks_overwritten = false;
                partition.lacked_before = false;
                partition.lacking.clear();
            }
            partition.state.is_given_rest = false;
            tracing::info!(partition = %id, %epoch, "all replicas are aligned");
            self.report_soon();
        }
    }
}

impl Run {
    async fn run(self: Rc<Self>) -> Outcome {
        let mut held: BTreeMap<NodeId, States> = BTreeMap::new();
        // A replica that is to become a member holds copies of theirs, so it changes no decision.
        for member in self.configuration.holders() {
            match self
                .filling
                .states_of(member, self.configuration.epoch, self.only.as_deref())
                .await
            {
                Ok(states) => {
                    held.insert(member, states);
                }
                Err(error) => {
                    tracing::debug!(%member, %error, "a member cannot be aligned yet");
                }
            }
        }
        let mut complete = held.len() == self.configuration.holders().count();
        // One that goes on alone may lack what its learner has.
        let decides = match self.configuration.members.len() {
            1 => complete,
            _ => self.configuration.members.iter().all(|member| held.contains_key(member)),
        };
        let asked = self.only.iter().flatten().copied();
        let mut extents: BTreeSet<ExtentId> =
            held.values().flat_map(|states| states.keys().copied()).chain(asked).collect();
        if !self.drop_changing(&mut extents).await {
            return Outcome { left: BTreeSet::new(), complete: false };
        }
        let members = held.keys().copied();
        let epoch = self.configuration.epoch;
        let freed = FreedRanges::ask(&self.filling, epoch, self.node, members, &extents).await;
        complete &= freed.members() == held.len();
        let removed = freed.removed();
        extents.retain(|extent| !removed.contains(extent));
        let mut left = left_of(&extents, |extent| {
            let claim = |(node, states): (&NodeId, &States)| Claim {
                node: *node,
                state: states.get(&extent).copied(),
            };
            let claims: Vec<Claim> = held.iter().map(claim).collect();
            let run = Rc::clone(&self);
            async move {
                let aligned = run.align(extent, &claims, (decides, complete)).await;
                if let Err(error) = &aligned {
                    tracing::debug!(%extent, %error, "an extent is not aligned yet");
                }
                aligned.is_ok()
            }
        })
        .await;
        // After the bytes: what is filled now lacks what its source has freed in part of a block.
        let holds = |member, extent| {
            let held = held.get(&member).is_some_and(|states| states.contains_key(&extent));
            held || extents.contains(&extent)
        };
        left.append(&mut freed.share(&self.filling, self.node, holds).await);
        if !complete {
            // Who did not answer may hold what is removed elsewhere.
            left.extend(removed);
        }
        Outcome { left, complete }
    }

    /// Extents that took appends while the members were asked are aligned when they break; closed
    /// ones are equal. False if the answers are of an epoch that is over: they count for nothing.
    async fn drop_changing(&self, extents: &mut BTreeSet<ExtentId>) -> bool {
        let (partition, epoch) = (self.filling.partition, self.configuration.epoch);
        let changing = move |disk: &mut Disk| {
            let partition = disk.partitions.get_mut(&partition)?;
            let changing = partition.primary.end_watch();
            (partition.configuration.epoch == epoch).then_some(changing)
        };
        let changing = self.filling.shared.ask_disk(self.filling.disk, changing).await.flatten();
        let Some(changing) = changing else { return false };
        extents.retain(|extent| !changing.contains(extent));
        true
    }

    async fn align(
        &self,
        extent: ExtentId,
        claims: &[Claim],
        (decides, complete): (bool, bool),
    ) -> Result<(), DataError> {
        if !decides {
            return Err(DataError::Busy);
        }
        let claims = &self.readable(extent, claims).await?;
        let (length, source, lost_to) = match decide(claims, 0, true, self.node) {
            Decision::Even => return Ok(()),
            Decision::Wait => return Err(DataError::Busy),
            Decision::Seal { length, source, lost_to } => (length, source, lost_to),
        };
        if lost_to > 0 {
            Metrics::get().lost_bytes.inc_by(lost_to - length);
            tracing::error!(partition = %self.filling.partition, %extent, length, lost_to,
                "acknowledged bytes that were never flushed are on no replica any more");
        }
        let new = described(extent, claims);
        let is_here = self.align_here(new, length, source).await?;
        let mut result = if complete || !is_here { Ok(()) } else { Err(DataError::Busy) };
        for claim in claims.iter().filter(|claim| claim.node != self.node) {
            let even = claim.state.is_some_and(|state| state.sealed && state.length == length);
            // Where an empty file is left, its seal says that nothing is on its way.
            if even || (!is_here && claim.state.is_none()) {
                continue;
            }
            let source = self.source_for(claim.node, claims, length);
            if let Err(error) = self.tell(claim.node, new, length, source).await {
                result = Err(error);
            }
        }
        result
    }

    /// Makes this replica whole first: the others fetch from it. False if nobody holds a byte of it.
    ///
    /// An extent may be removed on the way: all its bytes are dead, and it waited for its seal. Then
    /// the next run passes the word on; without it the others would wait for theirs for ever.
    async fn align_here(
        &self,
        new: NewExtent,
        length: u64,
        source: NodeId,
    ) -> Result<bool, DataError> {
        let (filling, store) = (&self.filling, self.filling.store.clone());
        let extent = new.id;
        let seal =
            move || store.seal(extent, length).and_then(|()| store.set_commit(extent, length));
        // To find out what the members have may have taken long.
        match filling.in_epoch(self.configuration.epoch, extent, seal).await? {
            Ok(()) => {}
            Err(StoreError::NoExtent) if length == 0 => return Ok(false),
            Err(error) if error.is_lack() && source != self.node => {
                filling.fill(new, length, self.configuration.epoch, source).await?;
            }
            Err(error) => return Err(error.into()),
        }
        let is_here = !filling.store.states(&[extent]).is_empty();
        if is_here { Ok(true) } else { Err(DataError::NoExtent) }
    }

    /// Who sends a member what it lacks: this node and others take turns.
    fn source_for(&self, member: NodeId, claims: &[Claim], length: u64) -> NodeId {
        let sources = sources(member, self.node, claims, length);
        let turn = self.fills.get();
        self.fills.set(turn.wrapping_add(1));
        sources.get(turn % sources.len().max(1)).copied().unwrap_or(self.node)
    }

    async fn tell(
        &self,
        member: NodeId,
        new: NewExtent,
        length: u64,
        source: NodeId,
    ) -> Result<(), DataError> {
        let request = DataRequest::Seal {
            partition: self.filling.partition,
            epoch: self.configuration.epoch,
            extent: new.id,
            length,
            appended: new.epoch,
            inode: new.inode,
            session: new.session,
            source,
        };
        // One that is gone there, or at the source, is not aligned either: the next run passes the word
        // on to those who still hold it.
        let told = self.filling.shared.ask_node(member, &request, Bytes::new(), SEAL_WAIT).await;
        told.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Story: an extent whose task had panicked counted as aligned.
    #[test]
    fn what_is_not_said_to_be_aligned_is_left() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let extents = (1..=9).map(ExtentId).collect();
        let align = |extent: ExtentId| async move {
            assert_ne!(extent.0, 3, "a task that fails");
            extent.0 != 5
        };
        let left = tokio::task::LocalSet::new().block_on(&runtime, left_of(&extents, align));
        assert_eq!(left, BTreeSet::from([ExtentId(3), ExtentId(5)]));
    }
}
