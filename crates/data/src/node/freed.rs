//! Frees that a member missed, run by the primary with each alignment.
//!
//! A meta node asks the members of the day to free bytes, and is done when all of them have. A
//! replica that is outside of the configuration at that moment does not hear of it; when it
//! returns, or is filled from another one, it holds bytes that are gone everywhere else. The word
//! that they may go was given once and for all: space in an extent is never used twice.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{DataError, Epoch, ExtentId, FreedRange, NodeId};
use milpa_wire::data::{DataAnswer, DataRequest, FREED_RANGES_MAX};

use super::fill::Filling;
use super::requests::freed_of;
use super::service::free_everywhere;

const WAIT: Duration = Duration::from_secs(10);
/// Extents that are asked about at once.
const EXTENTS_AT_ONCE: usize = 1024;

/// What the members say is freed. The union is true of all of them.
#[derive(Debug, Default)]
pub(crate) struct FreedRanges {
    by_member: BTreeMap<NodeId, BTreeSet<(ExtentId, u64, u64)>>,
}

impl FreedRanges {
    /// Asks these members, of whom `node` is the one that asks. Who does not answer is left out.
    pub async fn ask(
        filling: &Filling,
        epoch: Epoch,
        node: NodeId,
        members: impl Iterator<Item = NodeId>,
        extents: &BTreeSet<ExtentId>,
    ) -> FreedRanges {
        let extents: Vec<ExtentId> = extents.iter().copied().collect();
        let mut freed = FreedRanges::default();
        for member in members {
            let mut told = BTreeSet::new();
            let mut answered = Ok(());
            let mut waiting: Vec<&[ExtentId]> = extents.chunks(EXTENTS_AT_ONCE).collect();
            while let Some(extents) = waiting.pop() {
                let ranges = match member == node {
                    true => here(filling, extents.to_vec()).await,
                    false => of_member(filling, epoch, member, extents.to_vec()).await,
                };
                match ranges {
                    // There may be more of them than one answer takes.
                    Ok(ranges) if ranges.len() >= FREED_RANGES_MAX && extents.len() > 1 => {
                        let (first, second) = extents.split_at(extents.len() / 2);
                        waiting.extend([first, second]);
                    }
                    Ok(ranges) => {
                        told.extend(ranges.iter().map(|r| (r.extent, r.offset, r.length)))
                    }
                    Err(error) => answered = Err(error),
                }
            }
            match answered {
                Ok(()) => {
                    freed.by_member.insert(member, told);
                }
                Err(error) => tracing::debug!(%member, %error, "cannot ask what is freed"),
            }
        }
        freed
    }

    /// How many members answered.
    pub fn members(&self) -> usize {
        self.by_member.len()
    }

    /// Extents that some member was told to remove.
    pub fn removed(&self) -> BTreeSet<ExtentId> {
        let all = self.by_member.values().flatten();
        all.filter(|(.., length)| *length == u64::MAX).map(|(extent, ..)| *extent).collect()
    }

    /// What each member has to free; `holds` tells whether it has the extent at all.
    fn missed(
        &self,
        holds: impl Fn(NodeId, ExtentId) -> bool,
    ) -> BTreeMap<NodeId, Vec<(ExtentId, u64, u64)>> {
        let union: BTreeSet<_> = self.by_member.values().flatten().copied().collect();
        let missed = |member: NodeId, told: &BTreeSet<(ExtentId, u64, u64)>| {
            let lacks = |range: &&(ExtentId, u64, u64)| {
                let is_gone = told.contains(&(range.0, 0, u64::MAX));
                !is_gone && !told.contains(*range) && holds(member, range.0)
            };
            union.iter().filter(lacks).copied().collect::<Vec<_>>()
        };
        let all = self.by_member.iter().map(|(member, told)| (*member, missed(*member, told)));
        all.filter(|(_, ranges)| !ranges.is_empty()).collect()
    }

    /// Tells each member what it missed. Gives the extents of which a member could not be told.
    pub async fn share(
        &self,
        filling: &Filling,
        node: NodeId,
        holds: impl Fn(NodeId, ExtentId) -> bool,
    ) -> BTreeSet<ExtentId> {
        let mut untold = BTreeSet::new();
        let partition = filling.partition;
        for (member, missed) in self.missed(holds) {
            tracing::info!(%partition, %member, ranges = missed.len(), "a member missed frees");
            for missed in missed.chunks(FREED_RANGES_MAX) {
                let range = |&(extent, offset, length): &(ExtentId, u64, u64)| FreedRange {
                    partition,
                    extent,
                    offset,
                    length,
                };
                let ranges = missed.iter().map(range).collect();
                let freed = match member == node {
                    true => free_everywhere(&filling.shared, ranges).await,
                    false => {
                        let request = DataRequest::Free { ranges };
                        let asked = filling.shared.ask_node(member, &request, Bytes::new(), WAIT);
                        asked.await.map(|_| ())
                    }
                };
                if let Err(error) = freed {
                    tracing::debug!(%member, %error, "frees could not be shared");
                    untold.extend(missed.iter().map(|(extent, ..)| *extent));
                }
            }
        }
        untold
    }
}

async fn here(filling: &Filling, extents: Vec<ExtentId>) -> Result<Vec<FreedRange>, DataError> {
    let (store, partition) = (filling.store.clone(), filling.partition);
    let job = move || freed_of(&store, partition, &extents);
    filling.shared.run_slow(filling.disk, job).await.ok_or(DataError::Busy)
}

/// What another member has freed of these extents.
pub(super) async fn of_member(
    filling: &Filling,
    epoch: Epoch,
    member: NodeId,
    extents: Vec<ExtentId>,
) -> Result<Vec<FreedRange>, DataError> {
    let request = DataRequest::Freed { partition: filling.partition, epoch, extents };
    match filling.shared.ask_node(member, &request, Bytes::new(), WAIT).await? {
        (DataAnswer::Freed(ranges), _) => Ok(ranges),
        _ => Err(DataError::Invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_frees_what_others_have_freed_of_the_extents_it_holds() {
        let range = |extent, offset, length| (ExtentId(extent), offset, length);
        let told = [
            (NodeId(1), BTreeSet::from([range(7, 0, 10), range(8, 0, u64::MAX)])),
            (NodeId(2), BTreeSet::from([range(7, 0, 10), range(7, 50, 5), range(8, 3, 4)])),
            (NodeId(3), BTreeSet::new()),
        ];
        let freed = FreedRanges { by_member: told.into() };
        assert_eq!(freed.removed(), BTreeSet::from([ExtentId(8)]));
        let holds = |node, extent| node != NodeId(3) || extent == ExtentId(7);
        let missed = BTreeMap::from([
            (NodeId(1), vec![range(7, 50, 5)]),
            (NodeId(2), vec![range(8, 0, u64::MAX)]),
            (NodeId(3), vec![range(7, 0, 10), range(7, 50, 5)]),
        ]);
        assert_eq!(freed.missed(holds), missed);
    }
}
