//! Blocks that a crash tore and the log completed: right, unless it was rot and no crash.
//!
//! A replica whose block does not match its checksum when the log is repeated cannot tell which. It takes
//! the block from a member that has it whole. If there is none, those who are in doubt compare what they have:
//! what two of them made of it is right. What nobody confirms is lost.

use bytes::Bytes;
use milpa_host::clock;
use milpa_host::rpc::Reply;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId, NodeId, PartitionId};
use milpa_wire::data::{DataAnswer, DataReply, DataRequest};

use crate::store::{ExtentStore, StoreError, checksums_of};

use super::disk::Disk;
use super::fetch::FETCH_WAIT;
use super::fill::Filling;
use super::partition::answer;

impl Filling {
    /// Settles what a block is that no member has whole. The members have said so; who may be in doubt
    /// answers, or it is not settled.
    pub(super) async fn settle_doubt(
        &self,
        extent: ExtentId,
        block: u64,
        members: &[NodeId],
    ) -> Result<(), DataError> {
        let own = move |store: &ExtentStore| store.doubtful_bytes(extent, block);
        if self.on_extent(extent, own).await?.is_none() {
            return Ok(());
        }
        if self.is_repeating().await? {
            return Err(DataError::Busy);
        }
        let fence = self.fence(extent, 0).await?;
        let (mut others, mut asked) = (Vec::new(), members.to_vec());
        // They too: what nobody confirms is lost for good.
        asked.extend(self.others().await?.1);
        for node in asked {
            match self.ask_in_doubt(extent, block, node, fence).await {
                Ok(bytes) => others.push(bytes),
                Err(DataError::Corrupt { .. } | DataError::NotHere | DataError::NoExtent) => {}
                // It is to learn, and has not heard of it yet.
                Err(DataError::WrongPartition) if !members.contains(&node) => {}
                Err(error) => return Err(error),
            }
        }
        // If a member ends within it, the primary cuts what nobody confirms.
        let may_be_cut = self.is_behind_an_end(extent, block, members).await?;
        let settle = move |store: &ExtentStore| match may_be_cut {
            false => store.settle_doubtful(extent, block, &others).map(|()| true),
            true => store.accept_doubtful(extent, block, &others),
        };
        match self.unless_overwritten(extent, fence, settle).await? {
            Some(true) => Ok(()),
            Some(false) => Err(DataError::NotHere),
            None => Err(DataError::Busy),
        }
    }

    /// Whether the log is still being repeated: of a block there may be more in it.
    pub(super) async fn is_repeating(&self) -> Result<bool, DataError> {
        let partition = self.partition;
        let look = move |disk: &mut Disk| {
            Some(disk.partitions.get(&partition)?.is_repeating(clock::now_ms()))
        };
        let found = self.shared.ask_disk(self.disk, look).await.flatten();
        found.ok_or(DataError::WrongPartition)
    }

    async fn ask_in_doubt(
        &self,
        extent: ExtentId,
        block: u64,
        node: NodeId,
        applied: u64,
    ) -> Result<Bytes, DataError> {
        let partition = self.partition;
        let request = DataRequest::Doubtful { partition, extent, block, applied };
        let answer = self.shared.ask_node(node, &request, Bytes::new(), FETCH_WAIT).await?;
        let (DataAnswer::Bytes { checksums, .. }, bytes) = answer else {
            return Err(DataError::Invalid);
        };
        let is_right = bytes.len() as u64 <= BLOCK_BYTES && checksums_of(&bytes) == checksums;
        if is_right { Ok(bytes) } else { Err(DataError::Invalid) }
    }
}

impl Disk {
    /// A member compares a block about which it is in doubt.
    pub(super) fn doubtful(
        &mut self,
        (id, extent): (PartitionId, ExtentId),
        block: u64,
        applied: u64,
        reply: Reply,
    ) {
        let checked = self.partition(id).and_then(|partition| {
            let applying = partition.applying.borrow();
            // What the extent went through before the start, or before the last checkpoint, is forgotten.
            let last = applying.last_of(extent).max(partition.state.applied);
            if partition.is_repeating(clock::now_ms()) {
                Err(DataError::Busy)
            } else if applying.has_applied(applied, extent) && last <= applied {
                Ok(partition.store.clone())
            } else if applying.is_hindered(extent) {
                // Perhaps by this very block: it has made nothing of it, and waits for others.
                Err(DataError::NotHere)
            } else {
                Err(DataError::Busy)
            }
        });
        let store = match checked {
            Ok(store) => store,
            Err(error) => return answer(reply, Err(error)),
        };
        let partition = self.partitions.get(&id);
        let may_be_read = partition.is_none_or(|it| it.lost.may_be_read(extent, block));
        // Behind the overwrites that were handed to it, and before any that come.
        self.workers.ordered(
            (id, extent),
            move || match made_of(&store, extent, block) {
                Ok(bytes) => {
                    let checksums = checksums_of(&bytes);
                    let body: DataReply = Ok(DataAnswer::Bytes { checksums, hole: 0 });
                    reply.send(&body, bytes);
                }
                Err(StoreError::NoExtent | StoreError::Shorter { .. }) => {
                    answer(reply, Err(DataError::NotHere));
                }
                // It may be read the next time.
                Err(StoreError::ReadFailed { block, .. }) if may_be_read => {
                    answer(reply, Err(DataError::Unsettled { block }));
                }
                Err(error) => answer(reply, Err(error.into())),
            },
            |_, ()| {},
        );
    }
}

/// What this replica has of a block about which another one is in doubt: what the log made of it, or the block
/// itself, if it is whole by now, or ends sooner here.
fn made_of(store: &ExtentStore, extent: ExtentId, block: u64) -> Result<Bytes, StoreError> {
    if let Some(bytes) = store.doubtful_bytes(extent, block)? {
        return Ok(bytes.into());
    }
    let found = store.read_for_repair(extent, block.saturating_mul(BLOCK_BYTES), BLOCK_BYTES)?;
    if found.hole > 0 { Err(StoreError::NoExtent) } else { Ok(found.stored.bytes) }
}
