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

impl DataClient {
    /// Returns when all members of each partition have these extents on disk: the members of the
    /// epoch in which they answered. Never reports success for fewer.
    pub(crate) async fn flush(
        &self,
        extents: BTreeMap<PartitionId, Extents>,
    ) -> Result<(), FsError> {
        let mut calls: Vec<Boxed<'_, Result<(), FsError>>> = Vec::new();
        for (partition, extents) in extents {
            for piece in extents.chunks(EXTENTS_MAX) {
                let piece = piece.to_vec();
                calls.push(Box::pin(self.flush_partition(partition, piece)));
            }
        }
        join_all(calls).await.into_iter().collect()
    }

    async fn flush_partition(
        &self,
        partition: PartitionId,
        extents: Extents,
    ) -> Result<(), FsError> {
        let mut retry = Retry::new(&self.core, "flush");
        loop {
            let view = self.core.views.current();
            let trouble = match view.data(partition) {
                None => Some(Trouble::NoRoute("the data partition is not in the view")),
                Some(route) => {
                    let extents = extents.clone();
                    let epoch = route.epoch;
                    let request = DataRequest::Flush { partition, epoch, extents };
                    let one = |node: NodeId| -> Boxed<'_, Result<(), Trouble>> {
                        let (view, request) = (&view, &request);
                        let wait = retry.cap(TRY_WAIT);
                        Box::pin(async move {
                            match self.call(view, node, request, Bytes::new(), wait).await? {
                                (DataAnswer::Done, _) => Ok(()),
                                _ => Err(Trouble::Nonsense { node }),
                            }
                        })
                    };
                    let calls = route.members.iter().map(|node| one(*node)).collect();
                    // All of them in one epoch: an answer of an earlier round proves nothing for
                    // the members of a later one.
                    join_all(calls).await.into_iter().find_map(Result::err)
                }
            };
            let Some(trouble) = trouble else { return Ok(()) };
            retry.note(&trouble);
            if let Some(error @ (DataError::NoExtent | DataError::Invalid)) = trouble.answer() {
                return Err(error.clone().into());
            }
            if trouble.next() != Next::RetrySame {
                self.core.views.refresh(&*self.core.transport, &view).await;
            }
            retry.pause().await?;
        }
    }
}
