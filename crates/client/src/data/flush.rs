//! Having every member's disk hold what was appended.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{BLOCK_BYTES, Column, DataError, ExtentId, Next, NodeId, PartitionId};
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

/// What a flush came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flushed {
    /// How far all bytes came that are left.
    pub reached: Reached,
    /// Where blocks of [`BLOCK_BYTES`] begin that no member has any more, of these extents. They may be of other
    /// files, or have been lost after they had been flushed.
    pub lost: Vec<Column>,
}

impl Flushed {
    fn whole(reached: Reached) -> Flushed {
        Flushed { reached, lost: Vec::new() }
    }

    /// What holds for both.
    fn and(mut self, other: Flushed) -> Flushed {
        self.lost.extend(other.lost);
        Flushed { reached: self.reached.min(other.reached), lost: self.lost }
    }
}

impl DataClient {
    /// Returns when all members of each partition have these extents on disk, or say that memory is
    /// what the volume's owner wants: the members of the epoch in which they answered. Never reports
    /// success for fewer.
    pub(crate) async fn flush(
        &self,
        extents: BTreeMap<PartitionId, Extents>,
    ) -> Result<Flushed, FsError> {
        let mut calls: Vec<Boxed<'_, Result<Flushed, FsError>>> = Vec::new();
        for (partition, extents) in extents {
            for piece in extents.chunks(EXTENTS_MAX) {
                let piece = piece.to_vec();
                calls.push(Box::pin(self.flush_partition(partition, piece)));
            }
        }
        all(join_all(calls).await)
    }

    async fn flush_partition(
        &self,
        partition: PartitionId,
        extents: Extents,
    ) -> Result<Flushed, FsError> {
        let mut retry = Retry::new(&self.core, "flush");
        loop {
            let view = self.core.views.current();
            let flushed = match view.data(partition) {
                None => Err(Trouble::NoRoute("the data partition is not in the view")),
                Some(route) => {
                    let extents = extents.clone();
                    let epoch = route.epoch;
                    let request = DataRequest::Flush { partition, epoch, extents };
                    let one = |node: NodeId| -> Boxed<'_, Result<Flushed, Trouble>> {
                        let (view, request) = (&view, &request);
                        let wait = retry.cap(TRY_WAIT);
                        Box::pin(async move {
                            match self.call(view, node, request, Bytes::new(), wait).await? {
                                (DataAnswer::Done, _) => Ok(Flushed::whole(Reached::Disks)),
                                (DataAnswer::InMemory, _) => Ok(Flushed::whole(Reached::Memory)),
                                (DataAnswer::DoneBut { lost, in_memory }, _) => {
                                    Ok(without(partition, lost, in_memory))
                                }
                                _ => Err(Trouble::Nonsense { node }),
                            }
                        })
                    };
                    let calls = route.members.iter().map(|node| one(*node)).collect();
                    // All of them in one epoch: an answer of an earlier round proves nothing for
                    // the members of a later one.
                    let mut flushed = join_all(calls).await;
                    flushed.sort_by_key(|one| one.as_ref().err().map(hearing));
                    all(flushed)
                }
            };
            let trouble = match flushed {
                Ok(flushed) => return Ok(flushed),
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

/// Whose trouble is heard first. That a member lacks bytes matters less than that another one knows why; and that one is
/// busy, than that another one knows that the view is old.
fn hearing(trouble: &Trouble) -> u8 {
    if trouble.answer().is_some_and(is_last_word) {
        0
    } else if trouble.next() != Next::RetrySame {
        1
    } else {
        2
    }
}

/// Whether another try would have the same answer.
fn is_last_word(error: &DataError) -> bool {
    matches!(error, DataError::NoExtent | DataError::Invalid | DataError::Lost { .. })
}

/// One member's word is enough: it has asked the others.
fn without(partition: PartitionId, lost: Vec<(ExtentId, u64)>, in_memory: bool) -> Flushed {
    let place = |(extent, block): (ExtentId, u64)| {
        let offset = block.saturating_mul(BLOCK_BYTES);
        Column { partition, extent, offset }
    };
    let reached = if in_memory { Reached::Memory } else { Reached::Disks };
    Flushed { reached, lost: lost.into_iter().map(place).collect() }
}

/// What holds for all of them; the first error, if there is one.
fn all<E>(flushed: Vec<Result<Flushed, E>>) -> Result<Flushed, E> {
    flushed.into_iter().try_fold(Flushed::whole(Reached::Disks), |all, one| Ok(all.and(one?)))
}
