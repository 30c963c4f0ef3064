//! Committed overwrites go to the extents: in the order of the log for each, and again where the disk hinders one.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_raft::LogPosition;
use milpa_types::{BLOCK_BYTES, DataError, ExtentId, PartitionId};

use crate::store::{Checksums, ExtentStore, Overwriting, StoreError, checksums_of};

use super::disk::Disk;

/// Between tries to get from another replica what an overwrite could not do here.
const REPAIR_PAUSE: Duration = Duration::from_millis(100);
/// So many times in a row, about a minute, nobody has what an overwrite needs and the disk cannot read: it is lost.
const REFUSALS_MAX: u32 = 600;

/// An overwrite that came out of the log.
pub(super) struct CommittedOverwrite {
    pub extent: ExtentId,
    offset: u64,
    pub bytes: Bytes,
    checksums: Vec<u32>,
    overwriting: Overwriting,
}

impl CommittedOverwrite {
    pub fn new(
        (extent, offset): (ExtentId, u64),
        bytes: Bytes,
        checksums: Vec<u32>,
        overwriting: Overwriting,
    ) -> CommittedOverwrite {
        CommittedOverwrite { extent, offset, bytes, checksums, overwriting }
    }

    /// Where it lies in its extent.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.bytes.len() as u64)
    }
}

/// How applying an overwrite went on a disk thread.
enum Applied {
    /// The bytes are on the extent, or the extent is gone. These blocks are to be repaired.
    Done(Vec<u64>),
    /// The old bytes could not be read, or the new ones not be written, this time.
    Hindered,
    /// The disk failed: nothing more is applied.
    Failed,
}

/// Whether bytes are missing here that are overwritten, and still to come.
type Lacks = bool;

impl Disk {
    /// Applies an overwrite, and once more those that were applied behind it.
    pub fn apply_overwrite(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        it: Arc<CommittedOverwrite>,
        behind: Vec<Arc<CommittedOverwrite>>,
        refusals: u32,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        partition.handed.hand(position.index, &it);
        let is_fetching = partition.is_fetching();
        partition.recent.hand(position.index, &it, is_fetching);
        let store = Arc::clone(&partition.store);
        let extent = it.extent;
        let blocks =
            it.offset / BLOCK_BYTES..(it.offset + it.bytes.len() as u64).div_ceil(BLOCK_BYTES);
        self.workers.ordered(
            (id, extent),
            move || (apply_all(&store, &it, &behind), it),
            move |disk, ((applied, lacks), it)| {
                if lacks {
                    disk.note_lack(id, extent);
                }
                disk.overwritten(id, position, (it, blocks, refusals), applied);
            },
        );
    }

    /// Saved with the applied index, before the log is trimmed behind it.
    fn note_lack(&mut self, id: PartitionId, extent: ExtentId) {
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.state.lacks_overwritten = true;
            partition.lacking.insert(extent);
        }
    }

    /// A disk thread is through with an overwrite of these blocks.
    fn overwritten(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        (it, blocks, refusals): (Arc<CommittedOverwrite>, Range<u64>, u32),
        applied: Applied,
    ) {
        let extent = it.extent;
        match applied {
            Applied::Done(damaged) => {
                if let Some(partition) = self.partitions.get_mut(&id) {
                    // Whole now, they may rot again.
                    partition.lost.remove_written(extent, blocks, &damaged);
                    // What the log makes of them may be what others have.
                    damaged.iter().for_each(|block| partition.lost.find_anew(extent, *block));
                }
                self.entry_applied(id, position, Some(extent), Ok(()));
                // One that finds no place is found again by who reads it, and by the scrub.
                for block in damaged {
                    self.repair_block(id, extent, block);
                }
            }
            Applied::Hindered => {
                if let Some(partition) = self.partitions.get(&id) {
                    partition.applying.borrow_mut().hinder(position.index, extent);
                }
                self.repair_until_done(id, position, it, refusals);
            }
            // The fence is up: everybody is told elsewhere, and the log keeps the entry.
            Applied::Failed => {}
        }
    }

    /// The old bytes are there, whole: without this entry they would be served, so it stays unapplied
    /// until another replica has given what it made of them. That one need not have applied it yet. Ends
    /// with the replica, or with the disk.
    fn repair_until_done(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        it: Arc<CommittedOverwrite>,
        refusals: u32,
    ) {
        let (extent, range) = (it.extent, (it.offset, it.bytes.len() as u64));
        self.repair_then(id, extent, range, position.index, move |disk, repaired| {
            let Err(error) = repaired else {
                return disk.entry_applied(id, position, Some(extent), Ok(()));
            };
            tracing::debug!(partition = %id, %extent, %error, "an overwrite waits for another replica");
            let is_nowhere = matches!(error, DataError::Doubtful { .. });
            // In a row.
            let refusals = if is_nowhere { refusals + 1 } else { 0 };
            if refusals >= REFUSALS_MAX {
                return disk.lose_overwritten(id, position, it);
            }
            let (shared, index) = (Rc::clone(&disk.shared), disk.index);
            tokio::task::spawn_local(async move {
                tokio::time::sleep(REPAIR_PAUSE).await;
                let again = move |disk: &mut Disk| disk.overwrite_again(id, position, it, refusals);
                shared.ask_disk(index, again).await;
            });
        });
    }

    /// A sector that cannot be read for long, and that nobody else has: without an end to that the log would
    /// grow for ever, and nothing else of the extent be served.
    fn lose_overwritten(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        it: Arc<CommittedOverwrite>,
    ) {
        let Some(partition) = self.partitions.get(&id) else { return };
        let (store, extent) = (Arc::clone(&partition.store), it.extent);
        let (offset, length) = (it.offset, it.bytes.len() as u64);
        self.workers.ordered(
            (id, extent),
            move || store.lose_unreadable(extent, offset, length),
            move |disk, lost| match lost {
                Ok(blocks) if !blocks.is_empty() => {
                    disk.entry_applied(id, position, Some(extent), Ok(()));
                    for block in blocks {
                        disk.repair_block(id, extent, block);
                    }
                }
                lost => {
                    tracing::debug!(partition = %id, %extent, ?lost, "an overwrite waits on");
                    disk.overwrite_again(id, position, it, 0);
                }
            },
        );
    }

    /// What hindered an overwrite may be over, at all replicas that wait for each other: it is tried
    /// here again, with those of the extent that were applied behind it.
    fn overwrite_again(
        &mut self,
        id: PartitionId,
        position: LogPosition,
        it: Arc<CommittedOverwrite>,
        refusals: u32,
    ) {
        if self.is_fenced() {
            return;
        }
        let Some(partition) = self.partitions.get(&id) else { return };
        let may_repeat = partition.applying.borrow().may_repeat(position.index);
        let behind = partition.handed.behind(position.index, it.extent).filter(|_| may_repeat);
        if partition.store.states(&[it.extent]).is_empty() {
            // Removed meanwhile, with what could not be overwritten.
            self.entry_applied(id, position, Some(it.extent), Ok(()));
        } else if let Some(behind) = behind {
            self.apply_overwrite(id, position, it, behind, refusals);
        } else {
            self.repair_until_done(id, position, it, refusals);
        }
    }
}

/// As [`apply`], with all that have to be applied again behind it.
fn apply_all(
    store: &ExtentStore,
    it: &CommittedOverwrite,
    behind: &[Arc<CommittedOverwrite>],
) -> (Applied, Lacks) {
    let (mut damaged, mut lacks) = (Vec::new(), false);
    for it in std::iter::once(it).chain(behind.iter().map(Arc::as_ref)) {
        match apply(store, it, &mut lacks) {
            Applied::Done(blocks) => damaged.extend(blocks),
            other => return (other, lacks),
        }
    }
    (Applied::Done(damaged), lacks)
}

/// Replaces what this replica holds of the range. What it lacks comes with the bytes that fill
/// it: those are fetched only from replicas that have applied at least as much of the log.
fn apply(store: &ExtentStore, it: &CommittedOverwrite, lacks: &mut Lacks) -> Applied {
    let CommittedOverwrite { extent, offset, bytes, checksums, overwriting } = it;
    let (extent, offset, overwriting) = (*extent, *offset, *overwriting);
    let whole = Checksums::of_payload(checksums);
    let mut once = || match store.overwrite(extent, offset, bytes, whole, overwriting) {
        Err(StoreError::Shorter { length }) => {
            *lacks |= !has_all(store, extent);
            apply_part(store, extent, offset, bytes, length, overwriting)
        }
        other => other,
    };
    let result = match once() {
        // A second time here, before any later overwrite of the extent, costs less than other replicas.
        Err(StoreError::ReadFailed { .. }) => once(),
        other => other,
    };
    match result {
        Ok(damaged) => Applied::Done(damaged),
        Err(StoreError::NoExtent) => {
            *lacks |= !store.is_removed(extent);
            Applied::Done(Vec::new())
        }
        Err(StoreError::Removed | StoreError::Closed) => Applied::Done(Vec::new()),
        // In place needs no space but for a mark.
        Err(
            StoreError::ReadFailed { .. }
            | StoreError::Corrupt { .. }
            | StoreError::Busy
            | StoreError::NoSpace,
        ) => Applied::Hindered,
        Err(error) => {
            tracing::error!(%extent, %error, "a committed overwrite cannot be applied");
            Applied::Failed
        }
    }
}

/// Whether the extent has all bytes that it will ever have here: its length was decided, or it was removed.
pub(super) fn has_all(store: &ExtentStore, extent: ExtentId) -> bool {
    let state = store.states(&[extent]).first().copied();
    state.map_or_else(|| store.is_removed(extent), |state| state.sealed)
}

fn apply_part(
    store: &ExtentStore,
    extent: ExtentId,
    offset: u64,
    bytes: &Bytes,
    length: u64,
    overwriting: Overwriting,
) -> Result<Vec<u64>, StoreError> {
    let held = usize::try_from(length.saturating_sub(offset)).unwrap_or(usize::MAX);
    let part = bytes.get(..held.min(bytes.len())).unwrap_or_default();
    if part.is_empty() {
        // The mark is needed all the same: readers of this extent go to the leader from now on.
        return store.mark_overwritten(extent).map(|()| Vec::new());
    }
    let checksums = checksums_of(part);
    store.overwrite(extent, offset, part, Checksums::of_payload(&checksums), overwriting)
}
