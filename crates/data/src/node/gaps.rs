//! What the leader of a snapshot cannot vouch for.
//!
//! Who has copied a snapshot counts as having applied the log up to it: nothing that it holds may lack an
//! overwrite. What it holds behind the leader's end of an extent did not come with the snapshot. Mostly nobody
//! was told that it is written, and it may stay. But the leader may have lost it (a power cut takes what was
//! never flushed) and is being given it again, while overwrites passed it by: then another member gives it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, DataError, Epoch, ExtentId, NodeId};
use milpa_wire::data::{
    Configuration, DataAnswer, DataRequest, EXTENT_STATES_MAX, ExtentState, TRANSFER_BYTES_MAX,
};

use crate::store::{ExtentStore, StoreError};

use super::fetch::Chunk;
use super::fill::Filling;
use super::freed;
use super::readable::promised;
use super::replace::replace_chunk;

const ASK_WAIT: Duration = Duration::from_secs(5);
/// So many blocks are left for later at most (256 MiB). Where there are more, the members that have them are waited for.
const LEFT_MAX: usize = 65_536;

/// States of extents by their ids.
pub(super) type States = BTreeMap<ExtentId, ExtentState>;

/// Bytes of an extent that are here, and that the leader did not give.
struct Gap {
    extent: ExtentId,
    from: u64,
    until: u64,
}

/// Replaces what is here (`own`) and was not at the leader (`led`), if it may have been overwritten, by other members' as of
/// a log index. A block that nobody can give now is damaged here too, as in [`Filling::replace_all`]. Gives the blocks
/// that were left so.
pub(super) async fn close(
    filling: &Filling,
    (leader, index): (NodeId, u64),
    configuration: &Configuration,
    own: &States,
    led: &States,
) -> Result<Vec<(ExtentId, u64)>, DataError> {
    let end = |extent| led.get(extent).map_or(0, |state| state.length);
    let longer = own.iter().filter(|(extent, state)| state.length > end(extent));
    let mut extents: Vec<ExtentId> = longer.map(|(extent, _)| *extent).collect();
    let removed = removed_at(filling, leader, configuration.epoch, &extents).await?;
    extents.retain(|extent| !removed.contains(extent));
    if extents.is_empty() {
        return Ok(Vec::new());
    }
    let (mut others, mut sources, mut is_complete) = (Vec::new(), Vec::new(), true);
    for member in configuration.members.iter().copied() {
        if member == filling.shared.node || member == leader {
            continue;
        }
        match states_at(filling, member, configuration.epoch, &extents).await {
            Ok(states) => {
                others.push(states);
                sources.push(member);
            }
            Err(error) => {
                tracing::debug!(partition = %filling.partition, %member, %error,
                    "a member does not say what it has of what the leader lacks");
                is_complete = false;
            }
        }
    }
    let mut left = Vec::new();
    for extent in extents {
        let Some(held) = own.get(&extent) else { continue };
        let others: Vec<&ExtentState> = others.iter().filter_map(|at| at.get(&extent)).collect();
        let Some(gap) = gap(held, led.get(&extent), &others, is_complete) else { continue };
        close_one(filling, &gap, &sources, index, &mut left).await?;
    }
    Ok(left)
}

/// What may have been overwritten of that which is here and not at the leader: what is known to have been on all
/// members, if one of them has heard of an overwrite. Who does not answer may know more.
fn gap(
    own: &ExtentState,
    led: Option<&ExtentState>,
    others: &[&ExtentState],
    is_complete: bool,
) -> Option<Gap> {
    let all = || others.iter().copied().chain(led).chain([own]);
    let until = match is_complete {
        false => own.length,
        true if !all().any(|state| state.overwritten) => 0,
        true => all().map(promised).max().unwrap_or(0).min(own.length),
    };
    let from = led.map_or(0, |state| state.length);
    (until > from).then_some(Gap { extent: own.extent, from, until })
}

async fn close_one(
    filling: &Filling,
    gap: &Gap,
    sources: &[NodeId],
    index: u64,
    left: &mut Vec<(ExtentId, u64)>,
) -> Result<(), DataError> {
    let (extent, key) = (gap.extent, (filling.partition, gap.extent));
    let store = filling.store.clone();
    let mark = move || store.mark_overwritten(extent);
    match filling.shared.run_ordered(filling.disk, key, mark).await.ok_or(DataError::Busy)? {
        Ok(()) => {}
        Err(StoreError::NoExtent | StoreError::Removed) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let mut at = gap.from / BLOCK_BYTES * BLOCK_BYTES;
    while at < gap.until {
        if left.len() >= LEFT_MAX {
            tracing::warn!(partition = %filling.partition, %extent,
                "the leader lacks too much, and no other member gives it: waiting for one");
            return Err(DataError::Busy);
        }
        let chunk = fetch(filling, gap, at, sources, index).await?;
        let (fence, lost, got) = (chunk.fence, chunk.lost, chunk.length());
        let land = move |store: &ExtentStore| match lost {
            0 => replace_chunk(store, extent, at + chunk.hole, &chunk),
            _ => store.distrust(extent, at / BLOCK_BYTES),
        };
        let landed = match filling.unless_overwritten(extent, fence, land).await {
            Err(DataError::NoExtent) => return Ok(()),
            landed => landed?.is_some(),
        };
        // If not, an overwrite came between: the same again.
        if landed {
            left.extend((lost > 0).then_some((extent, at / BLOCK_BYTES)));
            let end = at + got + lost;
            at = if end >= gap.until { end } else { end / BLOCK_BYTES * BLOCK_BYTES };
        }
        filling.shared.throttle_repair(filling.disk, got).await;
    }
    Ok(())
}

/// Whole blocks from `at` on, or what is wanted of the last one, of whoever gives them now. Else a chunk without
/// the first of them.
async fn fetch(
    filling: &Filling,
    gap: &Gap,
    at: u64,
    sources: &[NodeId],
    index: u64,
) -> Result<Chunk, DataError> {
    // Before they are asked: an overwrite may come meanwhile.
    let fence = filling.fence(gap.extent, index).await?;
    let wanted = (gap.until - at).min(TRANSFER_BYTES_MAX as u64);
    let block = wanted.min(BLOCK_BYTES);
    // Where one is damaged, those before it come one by one.
    for length in [wanted, block] {
        let range = (at, length);
        let found = filling.fetch_at_once(gap.extent, range, block, sources, index).await;
        if let Some(chunk) = found {
            return Ok(chunk);
        }
    }
    Ok(Chunk::without(block, fence))
}

/// Which of these extents the leader has removed.
async fn removed_at(
    filling: &Filling,
    leader: NodeId,
    epoch: Epoch,
    extents: &[ExtentId],
) -> Result<BTreeSet<ExtentId>, DataError> {
    let mut removed = BTreeSet::new();
    for extents in extents.chunks(EXTENT_STATES_MAX) {
        let ranges = freed::of_member(filling, epoch, leader, extents.to_vec()).await?;
        let whole = ranges.iter().filter(|range| range.length == u64::MAX);
        removed.extend(whole.map(|range| range.extent));
    }
    Ok(removed)
}

/// What a member has of these extents.
async fn states_at(
    filling: &Filling,
    member: NodeId,
    epoch: Epoch,
    extents: &[ExtentId],
) -> Result<States, DataError> {
    let mut states = States::new();
    for extents in extents.chunks(EXTENT_STATES_MAX) {
        let (partition, extents) = (filling.partition, extents.to_vec());
        let request = DataRequest::ExtentInfo { partition, epoch, extents, after: None };
        let answer = filling.shared.ask_node(member, &request, Bytes::new(), ASK_WAIT).await?;
        let (DataAnswer::Extents(found), _) = answer else { return Err(DataError::Invalid) };
        states.extend(found.into_iter().map(|state| (state.extent, state)));
    }
    Ok(states)
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
