//! What the leader of a snapshot cannot vouch for.
//!
//! Who has copied a snapshot counts as having applied the log up to it: nothing that it holds may lack an
//! overwrite. What it holds behind the leader's end of an extent does not come with the snapshot. Mostly nobody
//! was told that it is written, and it may stay. But the leader may have lost it (a power cut takes what was
//! never flushed) and is being given it again, while overwrites passed it by: then another member gives it.
//!
//! What cannot be had is marked as damaged: it may be wrong, and its bytes stay for whoever can tell. Since
//! that may be the last copy, members that are late are waited for first.

use std::collections::BTreeSet;
use std::time::Duration;

use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, NodeId};
use milpa_wire::data::{DataPartitionReport, ExtentState, TRANSFER_BYTES_MAX};
use tokio::time::Instant;

use crate::store::{ExtentStore, StoreError};

use super::fetch::{BEHIND_PAUSE, Chunk};
use super::fill::Filling;
use super::freed::FreedRanges;
use super::held::States;
use super::readable::promised;
use super::replace::replace_chunk;

/// All members that are silent or behind are waited for so long, in all.
const PATIENCE: Duration = Duration::from_secs(20);
/// So many blocks (256 MiB) are marked as damaged at most while a member is silent that may have them; and so many are
/// remembered, to be repaired soon. The scrub finds the others.
const LEFT_MAX: u64 = 65_536;

/// Bytes of an extent that are here, that the leader does not have, and that may have been overwritten.
#[derive(Debug, PartialEq, Eq)]
struct Gap {
    extent: ExtentId,
    from: u64,
    until: u64,
}

impl Gap {
    fn blocks(&self) -> u64 {
        self.until.div_ceil(BLOCK_BYTES) - self.from / BLOCK_BYTES
    }
}

/// All gaps, and who may fill them.
pub(super) struct Gaps {
    gaps: Vec<Gap>,
    /// Members that answer.
    sources: Vec<NodeId>,
    /// As of this log index.
    index: u64,
    /// When those that are late are waited for no more.
    deadline: Instant,
    /// Without a source that falls silent the copy is begun anew.
    are_two: bool,
}

/// Compares what is here (`own`) with what the leader has (`led`), and asks the other members about the rest.
pub(super) async fn find(
    filling: &Filling,
    (leader, index): (NodeId, u64),
    report: &DataPartitionReport,
    own: &States,
    led: &States,
) -> Result<Gaps, DataError> {
    let (mut gaps, mut sources) = (Vec::new(), Vec::new());
    let configuration = &report.configuration;
    let deadline = Instant::now() + PATIENCE;
    if report.is_given_rest {
        // It never had what it lacks, and waits for it to come from here (docs/decisions/0007).
        return Ok(Gaps { gaps, sources, index, deadline, are_two: false });
    }
    let end = |extent| led.get(extent).map_or(0, |state| state.length);
    let longer = own.iter().filter(|(extent, state)| state.length > end(extent));
    let mut extents: BTreeSet<ExtentId> = longer.map(|(extent, _)| *extent).collect();
    if !extents.is_empty() {
        let (epoch, node) = (configuration.epoch, filling.shared.node);
        let only = std::iter::once(leader);
        let freed = FreedRanges::ask(filling, epoch, node, only, &extents).await;
        if freed.members() == 0 {
            return Err(DataError::MemberSilent { node: leader });
        }
        let removed = freed.removed();
        extents.retain(|extent| !removed.contains(extent));
    }
    let extents: Vec<ExtentId> = extents.into_iter().collect();
    let (mut others, mut silent) = (Vec::new(), false);
    let members = configuration.members.iter().copied();
    for member in members.filter(|it| *it != filling.shared.node && *it != leader) {
        if extents.is_empty() {
            break;
        }
        let asked = (member, configuration.epoch, index);
        match states_as_of(filling, asked, &extents, deadline).await {
            Ok(states) => {
                others.push(states);
                sources.push(member);
            }
            Err(error) => {
                tracing::warn!(partition = %filling.partition, %member, %error,
                    "a member does not say what it has of what the leader lacks");
                silent = true;
            }
        }
    }
    for extent in extents {
        let Some(held) = own.get(&extent) else { continue };
        let others: Vec<&ExtentState> = others.iter().filter_map(|at| at.get(&extent)).collect();
        gaps.extend(gap(held, led.get(&extent), &others, !silent));
    }
    let blocks: u64 = gaps.iter().map(Gap::blocks).sum();
    // Of two members the other one may be lost, and the last copy be here; without it nothing goes on anyway.
    let are_two = configuration.members.len() <= 2;
    if silent && (blocks > LEFT_MAX || are_two && blocks > 0) {
        tracing::warn!(partition = %filling.partition, blocks,
            "the leader lacks too much, and a member that may have it is silent: waiting for it");
        return Err(DataError::Busy);
    }
    Ok(Gaps { gaps, sources, index, deadline, are_two })
}

/// What may have been overwritten of that which is here and not at the leader: what is known to have been on all
/// members, if one of them has heard of an overwrite. Who does not answer may know more. (Of its own commit
/// offset a member knows the least after a restart; what an overwritten one holds, it was filled with.)
fn gap(
    own: &ExtentState,
    led: Option<&ExtentState>,
    others: &[&ExtentState],
    is_complete: bool,
) -> Option<Gap> {
    let is_overwritten = others.iter().copied().chain(led).chain([own]).any(|it| it.overwritten);
    let bound = |other: &&ExtentState| match other.overwritten {
        true => other.length,
        false => promised(other),
    };
    let known = others.iter().map(bound).chain([promised(own)]).max().unwrap_or(0);
    let until = match (is_complete, is_overwritten) {
        (false, _) => own.length,
        (true, true) => known.min(own.length),
        (true, false) => 0,
    };
    let from = led.map_or(0, |state| state.length);
    (until > from).then_some(Gap { extent: own.extent, from, until })
}

impl Gaps {
    /// Replaces what lies in the gaps by other members' bytes. Adds to `left` the blocks that nobody gave:
    /// they are damaged here now, whatever else fails.
    pub async fn close(
        mut self,
        filling: &Filling,
        left: &mut Vec<(ExtentId, u64)>,
    ) -> Result<(), DataError> {
        for gap in std::mem::take(&mut self.gaps) {
            match self.close_one(filling, &gap, left).await {
                // Removed here meanwhile.
                Ok(()) | Err(DataError::NoExtent) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn close_one(
        &mut self,
        filling: &Filling,
        gap: &Gap,
        left: &mut Vec<(ExtentId, u64)>,
    ) -> Result<(), DataError> {
        let extent = gap.extent;
        filling.on_extent(extent, move |store| store.mark_overwritten(extent)).await?;
        let mut at = gap.from / BLOCK_BYTES * BLOCK_BYTES;
        while at < gap.until {
            let block = at / BLOCK_BYTES;
            let chunk = self.fetch(filling, gap, at).await?;
            let got = chunk.length();
            let replace = move |store: &ExtentStore, chunk: &Chunk| match chunk.lost {
                0 => land_or_distrust(store, extent, at, chunk),
                _ => store.distrust(extent, block).map(|()| Some(block)),
            };
            if let Some(distrusted) = filling.land(extent, at, chunk, replace).await? {
                let is_remembered = (left.len() as u64) < LEFT_MAX;
                left.extend(distrusted.filter(|_| is_remembered).map(|block| (extent, block)));
                let end = match distrusted {
                    Some(block) => (block + 1) * BLOCK_BYTES,
                    None => at + got,
                };
                at = if end >= gap.until { end } else { end / BLOCK_BYTES * BLOCK_BYTES };
            }
            filling.shared.throttle_repair(filling.disk, got).await;
        }
        Ok(())
    }

    /// Whole blocks from `at` on, or what is wanted of the last one. Else a chunk without the first of them.
    async fn fetch(&mut self, filling: &Filling, gap: &Gap, at: u64) -> Result<Chunk, DataError> {
        let wanted = (gap.until - at).min(TRANSFER_BYTES_MAX as u64);
        let shortest = wanted.min(BLOCK_BYTES);
        loop {
            // Before they are asked: an overwrite may come meanwhile.
            let fence = filling.fence(gap.extent, self.index).await?;
            let mut is_late = false;
            for source in self.sources.clone() {
                match self.fetch_from(filling, gap.extent, (at, wanted), source).await {
                    Ok(chunk) if chunk.length() >= shortest => return Ok(chunk),
                    Err(DataError::Busy | DataError::Unsettled { .. }) => is_late = true,
                    Err(silent @ DataError::MemberSilent { .. }) if self.are_two => {
                        return Err(silent);
                    }
                    Err(DataError::MemberSilent { .. }) => {
                        // It was there just now: not waited for at each block.
                        self.sources.retain(|other| *other != source);
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            if !is_late || Instant::now() >= self.deadline {
                return Ok(Chunk::without(shortest, fence));
            }
            tokio::time::sleep(BEHIND_PAUSE).await;
        }
    }

    /// As much as a source has before a block that is damaged there.
    async fn fetch_from(
        &self,
        filling: &Filling,
        extent: ExtentId,
        (at, wanted): (u64, u64),
        source: NodeId,
    ) -> Result<Chunk, DataError> {
        let fetched = filling.fetch(extent, at, wanted, source, self.index).await;
        let damaged = match &fetched {
            Err(
                DataError::Corrupt { block }
                | DataError::Doubtful { block }
                | DataError::Unsettled { block },
            ) => block.saturating_mul(BLOCK_BYTES),
            _ => return fetched,
        };
        if !(at + 1..at + wanted).contains(&damaged) {
            return fetched;
        }
        filling.fetch(extent, at, damaged - at, source, self.index).await
    }
}

/// Gives the block that could not take its bytes: they are a part of it, and it is damaged here.
fn land_or_distrust(
    store: &ExtentStore,
    extent: ExtentId,
    at: u64,
    chunk: &Chunk,
) -> Result<Option<u64>, StoreError> {
    match replace_chunk(store, extent, at + chunk.hole, chunk) {
        Err(StoreError::Corrupt { block }) => store.distrust(extent, block).map(|()| Some(block)),
        landed => landed.map(|()| None),
    }
}

/// What a member has of these extents, once it has applied the log up to an index: until then it may
/// not know that one was overwritten.
async fn states_as_of(
    filling: &Filling,
    (member, epoch, index): (NodeId, Epoch, u64),
    extents: &[ExtentId],
    deadline: Instant,
) -> Result<States, DataError> {
    for extent in extents {
        // No byte of it: what counts is whether that is refused as too early.
        let ask = async || filling.fetch(*extent, 0, 0, member, index).await;
        if let Some(error) = patiently(deadline, ask).await.err().filter(is_late) {
            return Err(error);
        }
    }
    patiently(deadline, async || filling.states_of(member, epoch, Some(extents)).await).await
}

/// Asks again while who is asked is late.
async fn patiently<T>(
    deadline: Instant,
    mut ask: impl AsyncFnMut() -> Result<T, DataError>,
) -> Result<T, DataError> {
    loop {
        match ask().await {
            Err(error) if is_late(&error) && Instant::now() < deadline => {
                tokio::time::sleep(BEHIND_PAUSE).await;
            }
            answered => return answered,
        }
    }
}

/// Whether a member may answer soon: it is away, just back, or has not come so far in the log. One whose replica is lost
/// will not: a node answers when it has looked what its disks hold.
fn is_late(error: &DataError) -> bool {
    matches!(error, DataError::Busy | DataError::MemberSilent { .. } | DataError::StaleEpoch { .. })
}

#[cfg(test)]
mod tests {
    use milpa_types::{InodeId, SessionId};

    use super::*;

    fn state(length: u64, committed: u64, overwritten: bool) -> ExtentState {
        let (extent, epoch) = (ExtentId(1), Epoch(1));
        let (inode, session, sealed) = (InodeId(1), SessionId(1), false);
        ExtentState { extent, epoch, inode, session, length, committed, sealed, overwritten }
    }

    fn range(
        own: &ExtentState,
        led: Option<&ExtentState>,
        others: &[&ExtentState],
        is_complete: bool,
    ) -> Option<(u64, u64)> {
        gap(own, led, others, is_complete).map(|gap| (gap.from, gap.until))
    }

    #[test]
    fn what_all_members_had_and_the_leader_lacks_is_not_taken_for_up_to_date() {
        let own = state(9_000, 8_000, false);
        let led = state(5_000, 5_000, true);
        let whole = ExtentState { sealed: true, ..state(9_000, 9_000, true) };
        // Known here, known elsewhere, and not known at all.
        assert_eq!(range(&own, Some(&led), &[], true), Some((5_000, 8_000)));
        assert_eq!(range(&own, Some(&led), &[&whole], true), Some((5_000, 9_000)));
        assert_eq!(range(&own, Some(&led), &[], false), Some((5_000, 9_000)));
        assert_eq!(range(&own, None, &[&whole], true), Some((0, 9_000)));
        assert_eq!(range(&own, None, &[], false), Some((0, 9_000)));
        // An overwritten one has forgotten in a restart how much all had.
        let forgetful = state(9_000, 1_000, true);
        let own = state(9_000, 1_000, false);
        assert_eq!(range(&own, None, &[&forgetful], true), Some((0, 9_000)));
    }

    #[test]
    fn what_nobody_was_told_of_and_what_was_never_overwritten_stays() {
        let led = state(5_000, 5_000, true);
        assert_eq!(range(&state(9_000, 5_000, false), Some(&led), &[], true), None);
        let unmarked = state(9_000, 9_000, false);
        assert_eq!(range(&unmarked, None, &[&unmarked], true), None);
        assert_eq!(range(&unmarked, Some(&state(5_000, 5_000, false)), &[], true), None);
    }
}
