//! How much of an extent can be read, where its replicas end at different places.
//!
//! What lies behind the end of a member was not acknowledged, or power took it there before it was flushed.
//! If nobody can read it, nobody needs it: an extent ends there (the longest checksum-valid prefix,
//! [`crate::alignment`]). What all members hold, and none can read, is lost, and stays in its place.

use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId};
use milpa_wire::data::TRANSFER_BYTES_MAX;

use crate::alignment::Claim;
use crate::store::ExtentStore;

use super::align::Run;

impl Run {
    /// What the members claim, without what they cannot read behind the end of the shortest one.
    pub(super) async fn readable(
        &self,
        extent: ExtentId,
        claims: &[Claim],
    ) -> Result<Vec<Claim>, DataError> {
        let is_member = |node: &NodeId| self.configuration.members.contains(node);
        let members = claims.iter().filter(|claim| is_member(&claim.node));
        let lengths: Vec<Option<u64>> =
            members.map(|claim| claim.state.map(|state| state.length)).collect();
        let of_holders = lengths.iter().copied().flatten().min();
        let of_all = lengths.iter().map(|length| length.unwrap_or(0)).min();
        let mut claims = claims.to_vec();
        for claim in &mut claims {
            // A member without any of it may have lost its replica. To one that learns that makes no
            // difference: what was acknowledged did not need it.
            let shortest = if is_member(&claim.node) { of_holders } else { of_all };
            let (Some(state), Some(shortest)) = (&mut claim.state, shortest) else { continue };
            if state.length <= shortest {
                continue;
            }
            let tail = (shortest, state.length);
            let end = self.readable_until(extent, claim.node, tail).await?;
            if end < state.length {
                tracing::warn!(partition = %self.filling.partition, %extent, node = %claim.node, end,
                    length = state.length, "the end of an extent is damaged, and not all members have it");
                (state.length, state.sealed) = (end, false);
            }
        }
        Ok(claims)
    }

    /// Where the first block begins that a replica cannot read between two places, or the second place.
    async fn readable_until(
        &self,
        extent: ExtentId,
        node: NodeId,
        (from, to): (u64, u64),
    ) -> Result<u64, DataError> {
        let mut at = from / BLOCK_BYTES * BLOCK_BYTES;
        if node == self.node {
            let (first, count) = (at / BLOCK_BYTES, (to - at).div_ceil(BLOCK_BYTES));
            let verify = move |store: &ExtentStore| store.verify(extent, first, count);
            let found = self.filling.on_extent(extent, verify).await?;
            return Ok(found.damaged.first().map_or(to, |block| block * BLOCK_BYTES));
        }
        while at < to {
            let wanted = (to - at).min(TRANSFER_BYTES_MAX as u64);
            match self.filling.fetch(extent, at, wanted, node, 0).await {
                Ok(chunk) => at += chunk.length(),
                Err(DataError::Corrupt { block }) => return Ok(at.max(block * BLOCK_BYTES)),
                Err(error) => return Err(error),
            }
        }
        Ok(to)
    }
}
