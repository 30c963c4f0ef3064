//! How much of an extent can be read, where its replicas end at different places.
//!
//! What lies behind the end of a member, and that nobody knows to be acknowledged, was not promised to anybody.
//! If it cannot be read either, nobody needs it: an extent ends before it (the longest checksum-valid
//! prefix, [`crate::alignment`]). What was promised and cannot be read is lost, and stays in its place, unless
//! it shares its block with bytes that can be read elsewhere: those behind the end of a member were never flushed
//! there, those before it may have been.

use std::collections::BTreeSet;

use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId};
use milpa_wire::data::ExtentState;

use crate::alignment::Claim;
use crate::store::{ExtentStore, StoreError};

use super::align::Run;
use super::disk::Disk;

/// Bytes read at once.
const READ_BYTES: u64 = 256 << 10;

impl Run {
    /// What the members claim, without what they cannot read and need not have.
    pub(super) async fn readable(
        &self,
        extent: ExtentId,
        claims: &[Claim],
    ) -> Result<Vec<Claim>, DataError> {
        let is_member = |node: &NodeId| self.configuration.members.contains(node);
        // …which may lack what was promised, and its learner have it.
        let goes_alone = self.configuration.members.len() == 1;
        let members = claims.iter().filter(|claim| is_member(&claim.node));
        let lengths: Vec<Option<u64>> =
            members.map(|claim| claim.state.map(|state| state.length)).collect();
        let of_holders = lengths.iter().copied().flatten().min();
        let of_all = lengths.iter().map(|length| length.unwrap_or(0)).min();
        let promised = claims.iter().filter_map(|claim| claim.state.as_ref()).map(promised).max();
        let mut readable = claims.to_vec();
        for claim in &mut readable {
            // A member without any of it may have lost its replica. To one that learns that makes no
            // difference: what was acknowledged did not need it.
            let shortest = if is_member(&claim.node) { of_holders } else { of_all };
            let (Some(state), Some(shortest)) = (&mut claim.state, shortest) else { continue };
            let needed = match goes_alone {
                true => state.length,
                false => shortest.max(promised.unwrap_or(0)),
            };
            let promised = (shortest, needed.min(state.length));
            let end = match self.damaged_at_an_end(extent, claim.node, promised, claims).await? {
                Some(start) => start,
                None if state.length <= needed => continue,
                None => {
                    let tail = (needed, state.length);
                    self.readable_until(extent, claim.node, tail, claims).await?
                }
            };
            if end < state.length {
                tracing::warn!(partition = %self.filling.partition, %extent, node = %claim.node, end,
                    length = state.length, "the end of an extent is damaged, and not all members have it");
                (state.length, state.sealed) = (end, false);
            }
        }
        Ok(readable)
    }

    /// Where the first block begins, of those in which another member ends between two places, that this
    /// one cannot read, and the other one can as far as it has it. Copied as lost it would take with it what the
    /// other one has.
    async fn damaged_at_an_end(
        &self,
        extent: ExtentId,
        node: NodeId,
        (from, to): (u64, u64),
        claims: &[Claim],
    ) -> Result<Option<u64>, DataError> {
        let is_member = |claim: &&Claim| self.configuration.members.contains(&claim.node);
        let others = claims.iter().filter(is_member).filter(|claim| claim.node != node);
        let ends = others.filter_map(|claim| Some((claim.state?.length, claim.node)));
        let is_within = |end: u64| (from..to).contains(&end) && !end.is_multiple_of(BLOCK_BYTES);
        let ends: BTreeSet<(u64, NodeId)> = ends.filter(|(end, _)| is_within(*end)).collect();
        for (end, other) in ends {
            let start = end / BLOCK_BYTES * BLOCK_BYTES;
            match self.read(extent, (start, to.min(start + BLOCK_BYTES) - start), node).await {
                Ok(_) => continue,
                Err(DataError::Corrupt { .. } | DataError::Doubtful { .. }) => {}
                Err(error) => return Err(error),
            }
            match self.read(extent, (start, end - start), other).await {
                Ok(_) => return Ok(Some(start)),
                Err(DataError::Corrupt { .. } | DataError::Doubtful { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Where the first block begins that a replica cannot read between two places, or the second place.
    async fn readable_until(
        &self,
        extent: ExtentId,
        node: NodeId,
        (from, to): (u64, u64),
        claims: &[Claim],
    ) -> Result<u64, DataError> {
        let mut at = from / BLOCK_BYTES * BLOCK_BYTES;
        while at < to {
            let wanted = (to - at).min(READ_BYTES);
            let (block, refused) = match self.read(extent, (at, wanted), node).await {
                Ok(got) => {
                    at += got;
                    self.filling.shared.throttle_repair(self.filling.disk, got).await;
                    continue;
                }
                Err(refused @ (DataError::Corrupt { block } | DataError::Doubtful { block })) => {
                    (block, refused)
                }
                Err(error) => return Err(error),
            };
            let start = at.max(block.saturating_mul(BLOCK_BYTES));
            if start >= from || self.is_read_elsewhere(extent, (start, from), node, claims).await? {
                return Ok(start);
            }
            // Needed, and nobody else has it: it is settled first, or it is lost, and stays in its place.
            if matches!(refused, DataError::Doubtful { .. }) {
                return Err(refused);
            }
            at = start + BLOCK_BYTES;
        }
        Ok(to)
    }

    /// Whether some other replica can read these bytes of one block. Not those that have found them damaged.
    async fn is_read_elsewhere(
        &self,
        extent: ExtentId,
        (start, end): (u64, u64),
        node: NodeId,
        claims: &[Claim],
    ) -> Result<bool, DataError> {
        let has_them = |claim: &&Claim| claim.state.is_some_and(|state| state.length >= end);
        for claim in claims.iter().filter(|claim| claim.node != node).filter(has_them) {
            match self.read(extent, (start, end - start), claim.node).await {
                Ok(_) => return Ok(true),
                Err(DataError::Corrupt { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// How many of these bytes a replica reads at once, holes counted. Who is behind in the log is asked
    /// again, for a while.
    async fn read(
        &self,
        extent: ExtentId,
        (at, wanted): (u64, u64),
        node: NodeId,
    ) -> Result<u64, DataError> {
        if node == self.node {
            return self.read_here(extent, at, wanted).await;
        }
        self.filling.fetch_patiently(extent, (at, wanted), node).await.map(|chunk| chunk.length())
    }

    /// As others are answered: a disk that failed to read once, or a log that is being repeated, decides nothing.
    async fn read_here(&self, extent: ExtentId, at: u64, wanted: u64) -> Result<u64, DataError> {
        if self.filling.is_repeating().await? {
            return Err(DataError::Busy);
        }
        let read = move |store: &ExtentStore| match store.read_for_repair(extent, at, wanted) {
            Err(StoreError::ReadFailed { block, .. }) => Ok(Err(block)),
            read => read.map(|found| Ok(found.hole + found.stored.bytes.len() as u64)),
        };
        match self.filling.on_extent(extent, read).await? {
            Ok(0) => Err(DataError::NotHere),
            Ok(got) => Ok(got),
            Err(block) if self.is_given_up(extent, block).await => {
                Err(DataError::Corrupt { block })
            }
            Err(_) => Err(DataError::Busy),
        }
    }

    /// Whether a block that this disk cannot read is not to be waited for any more. If not, it is looked for elsewhere.
    async fn is_given_up(&self, extent: ExtentId, block: u64) -> bool {
        let id = self.filling.partition;
        let look = move |disk: &mut Disk| {
            let given_up = !disk.partitions.get(&id)?.lost.may_be_read(extent, block);
            if !given_up {
                disk.repair_block(id, extent, block);
            }
            Some(given_up)
        };
        self.filling.shared.ask_disk(self.filling.disk, look).await.flatten().unwrap_or(false)
    }
}

/// How much of an extent is known to have been on all members.
pub(super) fn promised(state: &ExtentState) -> u64 {
    if state.sealed { state.length } else { state.committed }
}
