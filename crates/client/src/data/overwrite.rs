//! Replacing committed bytes in place, through the partition's Raft group (CFS section 4).

use std::time::Duration;

use bytes::Bytes;
use milpa_types::{Column, DataError, Next, NodeId};
use milpa_wire::data::{DataAnswer, DataRequest, Overwrite};

use super::append::FULL_AFTER;
use super::read::LOOK_AFTER;
use super::{DataClient, Trouble, checksums};
use crate::core::Retry;
use crate::error::FsError;
use crate::flights::Flights;
use crate::transport::Boxed;

/// One try: a majority's logs, synced, and the first time the mark on all members.
const TRY_WAIT: Duration = Duration::from_secs(3);

/// Bytes to put over committed ones.
#[derive(Clone, Debug)]
pub(crate) struct Replacement {
    pub file_offset: u64,
    pub column: Column,
    pub data: Bytes,
}

impl DataClient {
    /// Replaces all, a window of them at once; they must not overlap. `done` is told of each that a
    /// majority has in its synced log. `NoExtent` and `NotHere` mean that the columns may be out of date; `Corrupt`, that
    /// no member has a block, and that what is written into it could not be read.
    pub(crate) async fn overwrite(
        &self,
        replacements: Vec<Replacement>,
        done: &mut (dyn FnMut(&Replacement) + Send),
    ) -> Result<(), FsError> {
        let mut flights = Flights::new();
        let mut waiting = replacements.into_iter();
        let mut result = Ok(());
        loop {
            while result.is_ok() && flights.len() < self.core.config.packets_in_flight {
                let Some(next) = waiting.next() else { break };
                let call: Boxed<'_, _> = Box::pin(async move {
                    let outcome = self.overwrite_one(&next).await;
                    (next, outcome)
                });
                flights.launch(call).await;
            }
            match flights.next().await {
                None => return result,
                Some((replaced, Ok(()))) => done(&replaced),
                Some((_, Err(error))) => result = result.and(Err(error)),
            }
        }
    }

    async fn overwrite_one(&self, replacement: &Replacement) -> Result<(), FsError> {
        let Column { partition, extent, offset } = replacement.column;
        let checksums = checksums::of_payload(&replacement.data);
        let mut retry = Retry::new(&self.core, "overwrite");
        let mut failed: Option<NodeId> = None;
        loop {
            let view = self.core.views.current();
            let term = self.term(partition);
            let trouble = match view.data(partition) {
                None => Trouble::NoRoute("the data partition is not in the view"),
                Some(route) => {
                    let node = next_after(failed.take(), &route.members)
                        .unwrap_or_else(|| self.leader(route));
                    let checksums = checksums.clone();
                    let epoch = route.epoch;
                    let request = DataRequest::Overwrite(Overwrite {
                        partition,
                        epoch,
                        extent,
                        offset,
                        term,
                        checksums,
                    });
                    let payload = replacement.data.clone();
                    match self.call(&view, node, &request, payload, retry.cap(TRY_WAIT)).await {
                        Ok((DataAnswer::Done, _)) => {
                            self.set_leader(partition, node);
                            self.set_overwritten(partition, extent);
                            return Ok(());
                        }
                        Ok(_) => Trouble::Nonsense { node },
                        Err(trouble) => trouble,
                    }
                }
            };
            retry.note(&trouble);
            match &trouble {
                Trouble::Answered { node, error: DataError::NotPrimary { hint } } => {
                    match hint.filter(|hint| hint != node && !self.core.health.is_suspect(*hint)) {
                        Some(leader) => self.set_leader(partition, leader),
                        None => failed = Some(*node),
                    }
                }
                // Ours was of an earlier one, or none: this may go at once.
                Trouble::Answered { node, error: DataError::OtherTerm { term: led } }
                    if *led > term =>
                {
                    self.set_leader(partition, *node);
                    self.set_term(partition, *led);
                    continue;
                }
                Trouble::Answered { error: DataError::NoSpace, .. }
                    if retry.elapsed() >= FULL_AFTER =>
                {
                    return Err(DataError::NoSpace.into());
                }
                Trouble::Answered { error, .. }
                    if error.next() == Next::GiveUp
                        || matches!(error, DataError::Corrupt { .. }) =>
                {
                    return Err(error.clone().into());
                }
                Trouble::Answered { error: DataError::NotHere, .. } => {
                    // The leader lacks the bytes; whether everybody does, the primary knows.
                    if let Some(length) = self.lost(&[replacement.column]).await {
                        return Err(DataError::Lost { length }.into());
                    }
                    // One that was made after they had been freed knows nothing of them.
                    if retry.elapsed() >= LOOK_AFTER {
                        return Err(DataError::NotHere.into());
                    }
                    self.core.views.refresh(&*self.core.transport).await;
                }
                Trouble::Answered { error, .. } if error.next() == Next::RetrySame => {}
                Trouble::Answered { .. } | Trouble::NoRoute(_) => {
                    self.core.views.refresh(&*self.core.transport).await;
                }
                Trouble::Call { node, .. } | Trouble::Nonsense { node } => {
                    self.forget_leader(partition);
                    failed = Some(*node);
                    self.core.views.refresh(&*self.core.transport).await;
                }
            }
            retry.pause().await?;
        }
    }
}

/// The member after one that failed.
fn next_after(failed: Option<NodeId>, members: &[NodeId]) -> Option<NodeId> {
    let failed = failed?;
    let at = members.iter().position(|member| *member == failed).map_or(0, |at| at + 1);
    members.get(at % members.len().max(1)).copied()
}
