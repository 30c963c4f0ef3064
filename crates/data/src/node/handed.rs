//! Overwrites that were handed to the disk, for as long as an earlier one of the same extent may have to be done again.
//!
//! Where the disk hinders one (a block of it could not be read this time), later ones go on. Nothing but another
//! replica could then give what it would have made of its bytes, unless it and all that followed it are repeated:
//! their bytes are absolute, so that what comes of it is what the log says.

use std::collections::BTreeMap;
use std::sync::Arc;

use milpa_types::ExtentId;

use super::apply::CommittedOverwrite;

/// Bytes kept for a partition. If more came behind one that is hindered, that one waits for another replica.
const BYTES_MAX: usize = 64 << 20;
/// What one takes besides its bytes, about.
const ONE_BYTES: usize = 512;

/// The overwrites of one partition.
#[derive(Default)]
pub(crate) struct Handed {
    by_extent: BTreeMap<ExtentId, BTreeMap<u64, One>>,
    bytes: usize,
    /// The last one that was let go though an earlier one is hindered.
    dropped: BTreeMap<ExtentId, u64>,
}

struct One {
    it: Arc<CommittedOverwrite>,
    is_done: bool,
}

impl One {
    fn bytes(&self) -> usize {
        ONE_BYTES + self.it.bytes.len()
    }
}

impl Handed {
    /// An overwrite goes to the disk, for the first time or again.
    pub fn hand(&mut self, index: u64, it: &Arc<CommittedOverwrite>) {
        let one = One { it: Arc::clone(it), is_done: false };
        let bytes = one.bytes();
        let former = self.by_extent.entry(it.extent).or_default().insert(index, one);
        self.bytes += if former.is_none() { bytes } else { 0 };
    }

    /// It is done. `first` is the first of the extent that the disk hinders.
    pub fn done(&mut self, index: u64, extent: ExtentId, first: Option<u64>) {
        let Some(ones) = self.by_extent.get_mut(&extent) else { return };
        if let Some(one) = ones.get_mut(&index) {
            one.is_done = true;
        }
        let is_behind = |index: u64| first.is_some_and(|first| index > first);
        // One by one: there may be many behind one that is hindered for long.
        if is_behind(index) && self.bytes <= BYTES_MAX {
            return;
        }
        let is_full = self.bytes > BYTES_MAX;
        ones.retain(|index, one| {
            let keeps = !one.is_done || is_behind(*index) && !is_full;
            if !keeps {
                self.bytes -= one.bytes();
                if is_behind(*index) {
                    self.dropped.insert(extent, *index);
                }
            }
            keeps
        });
        if ones.is_empty() {
            self.by_extent.remove(&extent);
        }
        if first.is_none() {
            self.dropped.remove(&extent);
        }
    }

    /// All that were handed to the disk behind this one, in their order. `None` if not all are known.
    pub fn behind(&self, index: u64, extent: ExtentId) -> Option<Vec<Arc<CommittedOverwrite>>> {
        if self.dropped.get(&extent).is_some_and(|dropped| *dropped > index) {
            return None;
        }
        let ones = self.by_extent.get(&extent).into_iter().flat_map(|ones| ones.range(index + 1..));
        Some(ones.map(|(_, one)| Arc::clone(&one.it)).collect())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::store::Overwriting;

    const EXTENT: ExtentId = ExtentId(7);

    fn overwrite(length: usize) -> Arc<CommittedOverwrite> {
        let bytes = Bytes::from(vec![0; length]);
        Arc::new(CommittedOverwrite::new((EXTENT, 0), bytes, Vec::new(), Overwriting::New))
    }

    fn behind(handed: &Handed, index: u64) -> Option<usize> {
        handed.behind(index, EXTENT).map(|behind| behind.len())
    }

    #[test]
    fn what_follows_one_that_is_hindered_is_kept_and_nothing_else() {
        let mut handed = Handed::default();
        for index in [3, 5, 8] {
            handed.hand(index, &overwrite(10));
        }
        handed.done(3, EXTENT, None);
        assert_eq!((behind(&handed, 2), handed.bytes), (Some(2), 2 * (ONE_BYTES + 10)));
        // 5 is hindered; what is on its way counts as well.
        handed.done(8, EXTENT, Some(5));
        handed.hand(9, &overwrite(10));
        assert_eq!(behind(&handed, 5), Some(2));
        handed.hand(5, &overwrite(10));
        handed.done(5, EXTENT, None);
        assert_eq!(
            (behind(&handed, 0), handed.bytes),
            (Some(1), ONE_BYTES + 10),
            "9 is on its way"
        );
        handed.done(9, EXTENT, None);
        assert!(handed.by_extent.is_empty() && handed.bytes == 0);
    }

    #[test]
    fn who_has_more_behind_it_than_can_be_kept_is_not_repeated() {
        let mut handed = Handed::default();
        handed.hand(1, &overwrite(10));
        // However short they are.
        let one = overwrite(1);
        for index in 2..=(BYTES_MAX / ONE_BYTES) as u64 + 2 {
            handed.hand(index, &one);
            handed.done(index, EXTENT, Some(1));
            assert!(handed.bytes <= BYTES_MAX + ONE_BYTES, "{}", handed.bytes);
        }
        assert_eq!(behind(&handed, 1), None);
        handed.done(1, EXTENT, None);
        assert_eq!((behind(&handed, 0), handed.bytes), (Some(0), 0));
    }
}
