//! Overwrites that were handed to the disk while bytes of a replica are on their way from another one.
//!
//! What comes is older than they are, and is not to take their place. It does not have to be asked for anew, as their
//! bytes are absolute: they are laid over what came before it lands. Else an extent that is overwritten all the time
//! would never be copied.

use std::collections::BTreeMap;
use std::sync::Arc;

use milpa_types::ExtentId;

use super::apply::CommittedOverwrite;

/// Bytes kept for a partition. What is on its way for so long that more has come is asked for anew.
const BYTES_MAX: usize = 16 << 20;
/// What one takes besides its bytes, about.
const ONE_BYTES: usize = 256;

/// Those of one partition, by their place in the log.
#[derive(Default)]
pub(crate) struct Recent {
    overwrites: BTreeMap<u64, Arc<CommittedOverwrite>>,
    bytes: usize,
    /// Of those up to here some may be forgotten.
    forgotten: u64,
}

impl Recent {
    /// One goes to the disk, for the first time or again. Nothing is kept while nobody fetches anything.
    pub fn hand(&mut self, index: u64, it: &Arc<CommittedOverwrite>, is_fetching: bool) {
        if !is_fetching {
            self.forget_all();
            self.forgotten = self.forgotten.max(index);
            return;
        }
        if index <= self.forgotten {
            return;
        }
        self.bytes += ONE_BYTES + it.bytes.len();
        if let Some(again) = self.overwrites.insert(index, Arc::clone(it)) {
            self.bytes -= ONE_BYTES + again.bytes.len();
        }
        while self.bytes > BYTES_MAX {
            let Some((index, oldest)) = self.overwrites.pop_first() else { break };
            self.bytes -= ONE_BYTES + oldest.bytes.len();
            self.forgotten = index;
        }
    }

    /// Nobody fetches anything any more.
    pub fn forget_all(&mut self) {
        let last = self.overwrites.last_key_value().map_or(0, |(index, _)| *index);
        self.forgotten = self.forgotten.max(last);
        self.overwrites.clear();
        self.bytes = 0;
    }

    /// All of an extent behind `index`, in their order. `None` if not all are known.
    pub fn behind(&self, index: u64, extent: ExtentId) -> Option<Vec<Arc<CommittedOverwrite>>> {
        if self.forgotten > index {
            return None;
        }
        let behind = self.overwrites.range(index + 1..).map(|(_, it)| it);
        Some(behind.filter(|it| it.extent == extent).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::store::Overwriting;

    const EXTENT: ExtentId = ExtentId(7);

    fn overwrite(extent: ExtentId, length: usize) -> Arc<CommittedOverwrite> {
        let bytes = Bytes::from(vec![0; length]);
        Arc::new(CommittedOverwrite::new((extent, 0), bytes, Vec::new(), Overwriting::New))
    }

    fn behind(recent: &Recent, index: u64) -> Option<usize> {
        recent.behind(index, EXTENT).map(|behind| behind.len())
    }

    #[test]
    fn those_behind_are_all_of_them_or_not_known() {
        let mut recent = Recent::default();
        recent.hand(3, &overwrite(EXTENT, 10), false);
        assert_eq!((behind(&recent, 2), behind(&recent, 3)), (None, Some(0)));
        for (index, extent) in [(5, EXTENT), (6, ExtentId(8)), (9, EXTENT), (9, EXTENT)] {
            recent.hand(index, &overwrite(extent, 10), true);
        }
        assert_eq!([3, 5, 9].map(|index| behind(&recent, index)), [Some(2), Some(1), Some(0)]);
        assert_eq!(recent.bytes, 3 * (ONE_BYTES + 10));
        recent.hand(10, &overwrite(EXTENT, 10), false);
        assert_eq!((behind(&recent, 9), recent.bytes), (None, 0));
        recent.hand(12, &overwrite(EXTENT, 10), true);
        recent.forget_all();
        assert_eq!((behind(&recent, 11), behind(&recent, 12), recent.bytes), (None, Some(0), 0));
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut recent = Recent::default();
        let one = overwrite(EXTENT, 1 << 20);
        for index in 1..100 {
            recent.hand(index, &one, true);
            assert!(recent.bytes <= BYTES_MAX, "{}", recent.bytes);
        }
        assert_eq!((behind(&recent, 1), behind(&recent, 98)), (None, Some(1)));
    }
}
