//! Having every member's disk hold what was appended.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{DataError, ExtentId, Next, NodeId, PartitionId};
use milpa_wire::data::{DataAnswer, DataRequest};

use super::{DataClient, Trouble};
use crate::core::Retry;
use crate::error::FsError;
use crate::flights::join_all;
use crate::transport::Boxed;

/// One flush: a slow disk with much to write may need this long.
const TRY_WAIT: Duration = Duration::from_secs(5);
/// Extents in one request at most.
const EXTENTS_MAX: usize = 4096;

/// Extents of one partition, and how many bytes of each must be on disk.
pub(crate) type Extents = Vec<(ExtentId, u64)>;

/// Where the bytes are after a flush, on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reached {
    /// In memory, which is all that a volume with `durability = memory` asks for.
    Memory,
    /// On the disks.
    Disks,
}

impl DataClient {
    /// Returns when all members of each partition have these extents on disk, or say that memory is
    /// what the volume's owner wants: the members of the epoch in which they answered. Never reports
    /// success for fewer.
    pub(crate) async fn flush(
        &self,
        extents: BTreeMap<PartitionId, Extents>,
    ) -> Result<Reached, FsError> {
        let mut calls: Vec<Boxed<'_, Result<Reached, FsError>>> = Vec::new();
        for (partition, extents) in extents {
            for piece in extents.chunks(EXTENTS_MAX) {
                let piece = piece.to_vec();
                calls.push(Box::pin(self.flush_partition(partition, piece)));
            }
        }
        least(join_all(calls).await)
    }

    async fn flush_partition(
        &self,
        partition: PartitionId,
        extents: Extents,
    ) -> Result<Reached, FsError> {
        let mut retry = Retry::new(&self.core, "flush");
        loop {
            let view = self.core.views.current();
            let reached = match view.data(partition) {
                None => Err(Trouble::NoRoute("the data partition is not in the view")),
                Some(route) => {
                    let extents = extents.clone();
                    let epoch = route.epoch;
                    let request = DataRequest::Flush { partition, epoch, extents };
                    let one = |node: NodeId| -> Boxed<'_, Result<Reached, Trouble>> {
                        let (view, request) = (&view, &request);
                        let wait = retry.cap(TRY_WAIT);
                        Box::pin(async move {
                            match self.call(view, node, request, Bytes::new(), wait).await? {
                                (DataAnswer::Done, _) => Ok(Reached::Disks),
                                (DataAnswer::InMemory, _) => Ok(Reached::Memory),
                                _ => Err(Trouble::Nonsense { node }),
                            }
                        })
                    };
                    let calls = route.members.iter().map(|node| one(*node)).collect();
                    // All of them in one epoch: an answer of an earlier round proves nothing for
                    // the members of a later one.
                    let mut reached = join_all(calls).await;
                    // That a member lacks bytes matters less than that another one knows why.
                    reached.sort_by_key(|one| !one.as_ref().is_err_and(ends_tries));
                    least(reached)
                }
            };
            let trouble = match reached {
                Ok(reached) => return Ok(reached),
                Err(trouble) => trouble,
            };
            retry.note(&trouble);
            if let Some(error) = trouble.answer().filter(|error| is_last_word(error)) {
                return Err(error.clone().into());
            }
            if trouble.next() != Next::RetrySame {
                self.core.views.refresh(&*self.core.transport).await;
            }
            retry.pause().await?;
        }
    }
}

fn ends_tries(trouble: &Trouble) -> bool {
    trouble.answer().is_some_and(is_last_word)
}

/// Whether another try would have the same answer.
fn is_last_word(error: &DataError) -> bool {
    matches!(error, DataError::NoExtent | DataError::Invalid | DataError::Lost { .. })
}

/// What holds for all of them; the first error, if there is one.
fn least<E>(reached: Vec<Result<Reached, E>>) -> Result<Reached, E> {
    reached.into_iter().try_fold(Reached::Disks, |least, one| Ok(least.min(one?)))
}
