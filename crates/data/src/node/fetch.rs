//! Bytes of other replicas: who has them, who is behind, and when nobody has them.
//!
//! A chunk is fetched only from a replica that has applied at least as much of the log as this
//! one had when it asked ([`Chunk::fence`]).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId};
use milpa_wire::data::{DataAnswer, DataRequest};

use crate::store::block_checksums;

use super::apply::CommittedOverwrite;
use super::disk::Disk;
use super::fill::Filling;
use super::metrics::Metrics;

/// One fetch may take this long.
pub(super) const FETCH_WAIT: Duration = Duration::from_secs(10);
/// A source that is behind is asked again after this pause, and so many times.
pub(super) const BEHIND_PAUSE: Duration = Duration::from_millis(50);
const BEHIND_MAX: u32 = 200;
/// The same where nothing else is asked meanwhile.
const BUSY_MAX: u32 = 40;
/// A block that may be whole soon is waited for so many times.
const UNSETTLED_MAX: u32 = 20;

/// A chunk on its way from another replica to its place.
pub(super) struct Chunk {
    pub hole: u64,
    pub bytes: Bytes,
    pub checksums: Vec<u32>,
    /// Bytes, of one block, that nobody gave: they take the place of `bytes`.
    pub lost: u64,
    /// What this replica had applied when it asked.
    pub fence: u64,
}

/// What a source that is in doubt about its own bytes means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// It is asked again until it has decided, if it comes first.
    Waits,
    /// It does not have them.
    Refuses,
}

impl Chunk {
    pub(super) fn without(lost: u64, fence: u64) -> Chunk {
        Chunk { hole: 0, bytes: Bytes::new(), checksums: Vec::new(), lost, fence }
    }

    /// Whether it is an answer to this range, as it was sent. Before anything newer is laid over it: the checksums of that
    /// would cover what happened to the rest on the way.
    fn check(&self, (offset, length): (u64, u64)) -> Result<(), DataError> {
        // It ends where these begin.
        if self.length() == 0 {
            return Err(DataError::NotHere);
        }
        if self.length() > length {
            return Err(DataError::Invalid);
        }
        let start = offset.saturating_add(self.hole);
        let is_as_sent = block_checksums(start, &self.bytes) == self.checksums;
        if is_as_sent { Ok(()) } else { Err(DataError::DamagedInTransit) }
    }

    /// What it is with these overwrites laid over it, at a place of the extent. `None` if one of them touches what is no
    /// bytes.
    pub(super) fn with(self, at: u64, overwrites: &[Arc<CommittedOverwrite>]) -> Option<Chunk> {
        let start = at.saturating_add(self.hole);
        let end = start.saturating_add(self.bytes.len() as u64);
        let all = at..end.saturating_add(self.lost);
        let touches =
            |range: &Range<u64>, it: &Range<u64>| range.start.max(it.start) < range.end.min(it.end);
        let over: Vec<_> = overwrites.iter().filter(|it| touches(&all, &it.range())).collect();
        if over.is_empty() {
            return Some(self);
        }
        if over
            .iter()
            .any(|it| touches(&(at..start), &it.range()) || touches(&(end..all.end), &it.range()))
        {
            return None;
        }
        let mut bytes = self.bytes.to_vec();
        for it in over {
            let range = it.range();
            let (from, to) = (range.start.max(start), range.end.min(end));
            let new = it.bytes.get((from - range.start) as usize..(to - range.start) as usize)?;
            bytes.get_mut((from - start) as usize..(to - start) as usize)?.copy_from_slice(new);
        }
        let checksums = block_checksums(start, &bytes);
        Some(Chunk { bytes: bytes.into(), checksums, ..self })
    }

    /// How many bytes the source gave.
    pub(super) fn length(&self) -> u64 {
        self.hole.saturating_add(self.bytes.len() as u64)
    }
}

impl Filling {
    /// From the first that has the bytes, or at least `shortest` of them. Who is behind is asked again, but
    /// nobody else waits for it. `Unsettled` if a block stays damaged where it may become whole. `Doubtful` if all have answered and
    /// none has the bytes whole, so that this node may accept what a crash left here: of those who are in
    /// doubt the lowest goes first, and the others wait for it ([`Doubt::Waits`]).
    pub(super) async fn fetch_from_any(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        shortest: u64,
        sources: &[NodeId],
        applied: u64,
        doubt: Doubt,
    ) -> Result<Chunk, DataError> {
        let (mut left, mut refusals) = (sources.to_vec(), Vec::new());
        for tries in 0..BEHIND_MAX {
            let (mut behind, mut unsettled) = (Vec::new(), None);
            for source in left {
                match self.fetch(extent, offset, length, source, applied).await {
                    Ok(chunk) if chunk.length() >= shortest => return Ok(chunk),
                    Ok(_) => refusals.push(DataError::NotHere),
                    Err(DataError::Busy) => behind.push(source),
                    Err(error @ DataError::Unsettled { .. }) => {
                        unsettled = Some(error);
                        behind.push(source);
                    }
                    // It may wait for this one, which cannot read its own.
                    Err(DataError::Doubtful { block })
                        if doubt == Doubt::Waits && source < self.shared.node =>
                    {
                        unsettled = Some(DataError::Unsettled { block });
                        behind.push(source);
                    }
                    Err(error) => refusals.push(error),
                }
            }
            if behind.is_empty() {
                return Err(refused_by_all(&refusals, offset / BLOCK_BYTES));
            }
            if let Some(error) = unsettled.filter(|_| tries >= UNSETTLED_MAX) {
                return Err(error);
            }
            left = behind;
            tokio::time::sleep(BEHIND_PAUSE).await;
        }
        Err(DataError::Busy)
    }

    /// From one source, which is asked again for a while if it is a moment behind in the log.
    pub(super) async fn fetch_patiently(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        source: NodeId,
    ) -> Result<Chunk, DataError> {
        for _ in 0..BUSY_MAX {
            match self.fetch(extent, offset, length, source, 0).await {
                Err(DataError::Busy) => tokio::time::sleep(BEHIND_PAUSE).await,
                fetched => return fetched,
            }
        }
        Err(DataError::Busy)
    }

    /// One try.
    pub(super) async fn fetch(
        &self,
        extent: ExtentId,
        offset: u64,
        length: u64,
        source: NodeId,
        applied: u64,
    ) -> Result<Chunk, DataError> {
        let (partition, fence) = (self.partition, self.fence(extent, applied).await?);
        let request = DataRequest::Fetch { partition, extent, offset, length, applied: fence };
        let answer = self.shared.ask_node(source, &request, Bytes::new(), FETCH_WAIT).await?;
        let (DataAnswer::Bytes { checksums, hole }, bytes) = answer else {
            return Err(DataError::Invalid);
        };
        let chunk = Chunk { hole, bytes, checksums, lost: 0, fence };
        chunk.check((offset, length))?;
        Metrics::get().fetched_bytes.inc_by(chunk.bytes.len() as u64);
        Ok(chunk)
    }

    /// Bytes of one block that are damaged at the source: from another replica, or the word that they are
    /// lost. `Doubtful` while that is not known: a replica may have them, or take for right what a crash
    /// left of them.
    pub(super) async fn fetch_or_lose(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        source: NodeId,
        applied: u64,
    ) -> Result<Chunk, DataError> {
        // Before they are asked: an overwrite may make the block whole meanwhile.
        let fence = self.fence(extent, applied).await?;
        let (members, learners) = self.others().await?;
        let mut is_lost = members.contains(&source) || learners.contains(&source);
        for member in members {
            match self.fetch(extent, offset, length, member, applied).await {
                Ok(chunk) => return Ok(chunk),
                Err(DataError::Corrupt { .. }) => {}
                Err(DataError::NotHere | DataError::NoExtent) if member != source => {}
                Err(_) => is_lost = false,
            }
        }
        let range = (offset, length);
        if let Some(chunk) = self.fetch_at_once(extent, range, 1, &learners, applied).await {
            return Ok(chunk);
        }
        if !is_lost {
            return Err(DataError::Doubtful { block: offset / BLOCK_BYTES });
        }
        Ok(Chunk::without(length, fence))
    }

    /// All these bytes of one block from whoever gives them now, or a chunk without them.
    pub(super) async fn fetch_or_leave(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        applied: u64,
    ) -> Result<Chunk, DataError> {
        // Before they are asked: an overwrite may make the block whole meanwhile.
        let fence = self.fence(extent, applied).await?;
        let (members, learners) = self.others().await?;
        let sources = [members, learners].concat();
        let range = (offset, length);
        let found = self.fetch_at_once(extent, range, length, &sources, applied).await;
        Ok(found.unwrap_or(Chunk::without(length, fence)))
    }

    /// From the first that has at least `shortest` of the bytes and gives them now.
    pub(super) async fn fetch_at_once(
        &self,
        extent: ExtentId,
        (offset, length): (u64, u64),
        shortest: u64,
        sources: &[NodeId],
        applied: u64,
    ) -> Option<Chunk> {
        for source in sources {
            let fetched = self.fetch(extent, offset, length, *source, applied).await;
            if let Some(chunk) = fetched.ok().filter(|chunk| chunk.length() >= shortest) {
                return Some(chunk);
            }
        }
        None
    }

    /// The other members, and the other learners.
    pub(super) async fn others(&self) -> Result<(Vec<NodeId>, Vec<NodeId>), DataError> {
        let (partition, node) = (self.partition, self.shared.node);
        let others = move |disk: &mut Disk| {
            let partition = disk.partitions.get(&partition)?;
            Some((partition.others(node), partition.other_learners(node)))
        };
        let others = self.shared.ask_disk(self.disk, others).await.flatten();
        others.ok_or(DataError::WrongPartition)
    }

    /// How much of the log a source must have applied: all that was handed to the extent here, applied
    /// or waiting. Older bytes would not land.
    pub(super) async fn fence(&self, extent: ExtentId, applied: u64) -> Result<u64, DataError> {
        let partition = self.partition;
        let handed = move |disk: &mut Disk| {
            let applying = disk.partitions.get(&partition)?.applying.borrow();
            Some(applying.applied().max(applying.last_of(extent)))
        };
        let here = self.shared.ask_disk(self.disk, handed).await;
        Ok(here.flatten().ok_or(DataError::WrongPartition)?.max(applied))
    }
}

/// Whether this refusal says that its source does not have the bytes whole, now or later.
pub(super) fn is_lacked(refusal: &DataError) -> bool {
    matches!(refusal, DataError::Corrupt { .. } | DataError::NotHere | DataError::NoExtent)
}

/// What it means that every source has refused, in this order, to give bytes from block `first` on:
/// `NoExtent` if the extent is gone everywhere, `Doubtful` if nobody has the bytes whole (there may be
/// nobody else), else what the last one said.
fn refused_by_all(refusals: &[DataError], first: u64) -> DataError {
    let damaged = |refusal: &DataError| match refusal {
        DataError::Corrupt { block } | DataError::Doubtful { block } => Some(*block),
        _ => None,
    };
    let lacks = |refusal: &DataError| damaged(refusal).is_some() || is_lacked(refusal);
    let is_gone =
        !refusals.is_empty() && refusals.iter().all(|refusal| *refusal == DataError::NoExtent);
    if !is_gone && refusals.iter().all(lacks) {
        let block = refusals.iter().rev().find_map(damaged).unwrap_or(first);
        return DataError::Doubtful { block };
    }
    refusals.last().cloned().unwrap_or(DataError::NotHere)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Overwriting;

    #[test]
    fn nobody_has_bytes_when_all_lack_them_and_one_may_when_it_does_not_say() {
        let corrupt = DataError::Corrupt { block: 7 };
        let nowhere = DataError::Doubtful { block: 7 };
        let (gone, lacks) = (DataError::NoExtent, DataError::NotHere);
        let silent = DataError::MemberSilent { node: NodeId(3) };
        for (refusals, meaning) in [
            (vec![corrupt.clone(), lacks.clone()], nowhere.clone()),
            (vec![gone.clone(), corrupt.clone()], nowhere.clone()),
            (vec![DataError::Doubtful { block: 7 }], nowhere),
            (vec![lacks, gone.clone()], DataError::Doubtful { block: 2 }),
            (vec![gone.clone(), gone.clone()], gone),
            (vec![silent.clone(), corrupt.clone()], corrupt.clone()),
            (vec![corrupt, silent.clone()], silent),
            (vec![], DataError::Doubtful { block: 2 }),
        ] {
            assert_eq!(refused_by_all(&refusals, 2), meaning, "{refusals:?}");
        }
    }

    const EXTENT: ExtentId = ExtentId(7);
    const AT: u64 = 5_000;

    fn overwrite(offset: u64, bytes: &[u8]) -> Arc<CommittedOverwrite> {
        let bytes = Bytes::copy_from_slice(bytes);
        Arc::new(CommittedOverwrite::new((EXTENT, offset), bytes, Vec::new(), Overwriting::New))
    }

    fn chunk(hole: u64, length: usize, lost: u64) -> Chunk {
        let bytes = vec![1; length];
        let checksums = block_checksums(AT + hole, &bytes);
        Chunk { hole, bytes: bytes.into(), checksums, lost, fence: 3 }
    }

    #[test]
    fn newer_bytes_are_laid_over_a_chunk_and_its_checksums_are_theirs() {
        let over = [
            overwrite(0, &[9; 5_000]),
            overwrite(4_000, &[2; 1_500]),
            overwrite(5_400, &[3; 200]),
            overwrite(14_990, &[4; 500]),
            overwrite(15_000, &[9; 5_000]),
        ];
        let now = chunk(0, 10_000, 0).with(AT, &over).unwrap();
        let mut expected = vec![1; 10_000];
        expected[..500].fill(2);
        expected[400..600].fill(3);
        expected[9_990..].fill(4);
        assert!(now.bytes == expected);
        assert_eq!(now.checksums, block_checksums(AT, &expected));
        assert_eq!((now.hole, now.lost, now.fence), (0, 0, 3));
    }

    /// Found by a reader: with newer bytes laid over it, what the way had done to the rest got a checksum that matched.
    #[test]
    fn what_was_damaged_on_its_way_is_not_taken() {
        assert_eq!(chunk(1_000, 9_000, 0).check((AT, 10_000)), Ok(()));
        assert_eq!(chunk(1_000, 9_001, 0).check((AT, 10_000)), Err(DataError::Invalid));
        assert_eq!(chunk(0, 0, 0).check((AT, 10_000)), Err(DataError::NotHere));
        let mut bytes = vec![1; 9_000];
        bytes[4_321] ^= 4;
        let damaged = Chunk { bytes: bytes.into(), ..chunk(1_000, 9_000, 0) };
        assert_eq!(damaged.check((AT, 10_000)), Err(DataError::DamagedInTransit));
        let short = Chunk { checksums: Vec::new(), ..chunk(1_000, 9_000, 0) };
        assert_eq!(short.check((AT, 10_000)), Err(DataError::DamagedInTransit));
    }

    #[test]
    fn what_is_no_bytes_is_asked_for_anew_if_it_is_overwritten() {
        let over = |offset| [overwrite(offset, &[2; 100])];
        assert!(chunk(1_000, 1_000, 0).with(AT, &over(AT + 950)).is_none());
        assert!(chunk(1_000, 1_000, 0).with(AT, &over(AT + 1_000)).is_some());
        assert!(Chunk::without(1_000, 3).with(AT, &over(AT + 999)).is_none());
        assert!(Chunk::without(1_000, 3).with(AT, &over(AT + 1_000)).is_some());
        assert!(Chunk::without(1_000, 3).with(AT, &over(AT - 100)).is_some());
    }
}
