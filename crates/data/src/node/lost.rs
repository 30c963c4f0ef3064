//! Blocks of a partition that no replica has whole.
//!
//! Each replica that has such a block asks the others for it, and each that is asked notices that its own
//! is damaged: without a pause that grows they would set each other to work without end.

use std::collections::BTreeMap;
use std::ops::Range;

use milpa_types::ExtentId;

/// Blocks that are remembered.
const BLOCKS_MAX: usize = 4096;
/// A member that was in doubt about its own when it was asked first has decided by the second time.
const REPAIRS_UNTIL_LOST: u32 = 2;
/// Pauses between repairs: the first one, and the longest one.
const PAUSE_MIN_MS: u64 = 500;
const PAUSE_MAX_MS: u64 = 64_000;

/// Damaged blocks that no member gave when it was asked.
#[derive(Debug, Default)]
pub(crate) struct LostBlocks {
    blocks: BTreeMap<(ExtentId, u64), Lost>,
}

#[derive(Debug)]
struct Lost {
    /// Repairs in a row that have found that.
    repairs: u32,
    /// Not repaired again before.
    rests_until_ms: u64,
}

impl LostBlocks {
    /// Notes that no member had a block whole. True when it is called lost from now on.
    pub fn add(&mut self, extent: ExtentId, block: u64, now_ms: u64) -> bool {
        if self.blocks.len() >= BLOCKS_MAX && !self.blocks.contains_key(&(extent, block)) {
            self.blocks.pop_first();
        }
        let lost =
            self.blocks.entry((extent, block)).or_insert(Lost { repairs: 0, rests_until_ms: 0 });
        let pause_ms = PAUSE_MIN_MS.saturating_mul(1 << lost.repairs.min(16)).min(PAUSE_MAX_MS);
        lost.repairs = lost.repairs.saturating_add(1);
        lost.rests_until_ms = now_ms.saturating_add(pause_ms);
        lost.repairs == REPAIRS_UNTIL_LOST
    }

    /// Whether no member has a block, by two repairs in a row.
    pub fn contains(&self, extent: ExtentId, block: u64) -> bool {
        let lost = self.blocks.get(&(extent, block));
        lost.is_some_and(|lost| lost.repairs >= REPAIRS_UNTIL_LOST)
    }

    /// Whether it is too early to try again.
    pub fn rests(&self, extent: ExtentId, block: u64, now_ms: u64) -> bool {
        self.blocks.get(&(extent, block)).is_some_and(|lost| now_ms < lost.rests_until_ms)
    }

    /// It is whole, or may be: somebody did not say that he lacks it.
    pub fn remove(&mut self, extent: ExtentId, block: u64) {
        self.blocks.remove(&(extent, block));
    }

    /// Blocks of an extent were written to, and are whole, but for some.
    pub fn remove_written(&mut self, extent: ExtentId, blocks: Range<u64>, but: &[u64]) {
        self.blocks.retain(|(lost, block), _| {
            *lost != extent || !blocks.contains(block) || but.contains(block)
        });
    }

    /// Others may be asked now.
    pub fn clear(&mut self) {
        self.blocks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: ExtentId = ExtentId(7);

    #[test]
    fn a_block_is_lost_when_two_repairs_in_a_row_find_it_nowhere() {
        let mut lost = LostBlocks::default();
        assert!(!lost.add(EXTENT, 9, 0));
        lost.remove(EXTENT, 9);
        assert!(!lost.add(EXTENT, 9, 1_000));
        assert!(!lost.contains(EXTENT, 9));
        assert!(lost.add(EXTENT, 9, 2_000), "told once");
        assert!(!lost.add(EXTENT, 9, 4_000));
        assert!(lost.contains(EXTENT, 9));
        lost.remove_written(ExtentId(8), 0..100, &[]);
        lost.remove_written(EXTENT, 0..9, &[]);
        lost.remove_written(EXTENT, 8..10, &[9]);
        assert!(lost.contains(EXTENT, 9));
        lost.remove_written(EXTENT, 8..10, &[8]);
        assert!(!lost.contains(EXTENT, 9));
    }

    #[test]
    fn what_nobody_has_is_looked_for_ever_more_rarely() {
        let (mut lost, mut now) = (LostBlocks::default(), 0);
        let mut pauses = Vec::new();
        for _ in 0..40 {
            assert!(!lost.rests(EXTENT, 9, now));
            lost.add(EXTENT, 9, now);
            let began = now;
            while lost.rests(EXTENT, 9, now) {
                now += 100;
            }
            pauses.push(now - began);
        }
        assert!(pauses.starts_with(&[500, 1_000, 2_000, 4_000]), "{pauses:?}");
        assert!(pauses.ends_with(&[64_000, 64_000]), "{pauses:?}");
    }

    #[test]
    fn as_many_as_there_is_room_for() {
        let mut lost = LostBlocks::default();
        for block in 0..=BLOCKS_MAX as u64 {
            lost.add(EXTENT, block, 0);
        }
        assert_eq!(lost.blocks.len(), BLOCKS_MAX);
    }
}
