//! Blocks of a partition that are damaged here: those that are looked for at other replicas, and those that no
//! replica has whole, which are lost.
//!
//! Until it is known of a block which of the two it is, this replica does not have it, and no flush passes over it: it
//! is *open*. Each replica that has such a block asks the others for it, and each that is asked notices that its own
//! is damaged: without a pause that grows they would set each other to work without end.
//!
//! With every configuration they are looked for anew, but the operator is told of each once: of which he was, and which they
//! are, is kept over configurations, and over restarts ([`super::lost_note`]). What is lost is found out from the replicas.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::Range;

use milpa_types::{BLOCK_BYTES, ExtentId, NodeId};

use crate::store::Freed;

/// Blocks that are remembered: of those behind them who reads them has to tell again.
const BLOCKS_MAX: usize = 65_536;
/// A member that was just getting it from elsewhere when it was asked first has it by the second time.
const REPAIRS_UNTIL_LOST: u32 = 2;
/// Pauses between repairs: the first one, and the longest one.
const PAUSE_MIN_MS: u64 = 500;
const PAUSE_MAX_MS: u64 = 8_000;
/// The longest one while somebody may be about to have the block: an fsync waits for it.
const WAIT_MAX_MS: u64 = 2_000;
/// What was found out about a lost block holds for a flush for so long: with more of them than can be looked for within
/// that, it is refused.
const FRESH_MS: u64 = 20_000;

/// Open blocks that are looked at for one turn.
const LOOKS_MAX: usize = 1024;

/// A block of an extent.
type Place = (ExtentId, u64);

/// Damaged blocks.
#[derive(Debug, Default)]
pub(crate) struct LostBlocks {
    blocks: BTreeMap<Place, Damage>,
    /// Those of them that are not known to be lost.
    open: BTreeSet<Place>,
    /// The block that was last looked at for its turn.
    turn: Place,
    /// Which they are, or of which the operator was told, is not what it was when it was last noted.
    is_changed: bool,
}

#[derive(Debug, Default)]
struct Damage {
    /// Repairs in a row that found that no member has it whole.
    repairs: u32,
    /// Whether the last one found that the extent is to end before it.
    is_needless: bool,
    /// Repairs that have found that somebody else may have it, and cannot give it yet.
    waits: u32,
    /// When the last one ended.
    found_ms: u64,
    /// Not repaired again before.
    rests_until_ms: u64,
    /// The operator knows.
    is_told: bool,
    /// All who were asked when it was found nowhere. If one of them has it, somebody else had it first.
    lackers: Vec<NodeId>,
}

impl Damage {
    fn is_found_nowhere(&self) -> bool {
        self.repairs >= REPAIRS_UNTIL_LOST
    }

    fn is_lost(&self) -> bool {
        self.is_found_nowhere() && !self.is_needless
    }

    /// It was lost when it was last known, and nobody has mended it since: it may be looked for anew just now.
    fn is_told_lost(&self) -> bool {
        self.is_told && !self.is_needless
    }

    /// Others may be asked now.
    fn is_looked_for_anew(&mut self) {
        (self.repairs, self.is_needless, self.rests_until_ms) = (0, false, 0);
    }
}

/// The blocks of an extent's first `length` bytes.
fn blocks_below(extent: ExtentId, length: u64) -> Range<Place> {
    (extent, 0)..(extent, length.div_ceil(BLOCK_BYTES))
}

impl LostBlocks {
    /// A block is damaged, and others may have it.
    pub fn find(&mut self, extent: ExtentId, block: u64) {
        self.change((extent, block), |_| {});
    }

    /// The same of one that is damaged since, whatever was known of it.
    pub fn find_anew(&mut self, extent: ExtentId, block: u64) {
        self.change((extent, block), |damage| {
            damage.is_looked_for_anew();
            damage.lackers.clear();
        });
    }

    /// None of these had a block whole, who are all members and learners. True when it is called lost from now on.
    pub fn add(&mut self, extent: ExtentId, block: u64, asked: &[NodeId], now_ms: u64) -> bool {
        let mut is_new = false;
        self.change((extent, block), |damage| {
            let was_lost = damage.is_lost();
            if std::mem::take(&mut damage.is_needless) {
                damage.repairs = 0;
            }
            let doublings = damage.repairs.min(16);
            let pause_ms = PAUSE_MIN_MS.saturating_mul(1 << doublings).min(PAUSE_MAX_MS);
            damage.repairs = damage.repairs.saturating_add(1);
            damage.lackers.extend(asked);
            damage.lackers.sort_unstable();
            damage.lackers.dedup();
            damage.found_ms = now_ms;
            damage.rests_until_ms = now_ms.saturating_add(pause_ms);
            is_new = damage.is_lost() && !was_lost;
        });
        is_new
    }

    /// The same of one that the extent is to end before, or that others have as much of as is needed: the primary
    /// makes them equal, and nothing is lost.
    pub fn add_needless(&mut self, extent: ExtentId, block: u64, now_ms: u64) {
        self.change((extent, block), |damage| {
            damage.repairs = damage.repairs.saturating_add(1);
            damage.is_needless = true;
            damage.rests_until_ms = now_ms.saturating_add(PAUSE_MIN_MS);
        });
    }

    /// Somebody else may have a block, and cannot give it now: it is silent, in doubt, or cannot read it.
    pub fn wait(&mut self, extent: ExtentId, block: u64, now_ms: u64) {
        self.change((extent, block), |damage| {
            damage.is_looked_for_anew();
            let doublings = damage.waits.min(16);
            let pause_ms = PAUSE_MIN_MS.saturating_mul(1 << doublings).min(WAIT_MAX_MS);
            damage.rests_until_ms = now_ms.saturating_add(pause_ms);
            damage.waits = damage.waits.saturating_add(1);
        });
    }

    /// It may be whole elsewhere: somebody did not say that he lacks it.
    pub fn doubt(&mut self, extent: ExtentId, block: u64) {
        if self.blocks.contains_key(&(extent, block)) {
            self.change((extent, block), Damage::is_looked_for_anew);
        }
    }

    /// Those of an extent's first bytes that were last looked for too long ago may be elsewhere by now.
    pub fn doubt_old(&mut self, extent: ExtentId, length: u64, now_ms: u64) {
        let blocks = self.blocks.range(blocks_below(extent, length));
        let is_old = |damage: &Damage| damage.found_ms.saturating_add(FRESH_MS) < now_ms;
        let old = blocks.filter(|(_, damage)| damage.is_lost() && is_old(damage));
        for place in old.map(|(place, _)| *place).collect::<Vec<_>>() {
            self.change(place, Damage::is_looked_for_anew);
        }
    }

    /// Others may be asked now.
    pub fn doubt_all(&mut self) {
        self.blocks.values_mut().for_each(Damage::is_looked_for_anew);
        self.open = self.blocks.keys().copied().collect();
    }

    /// It is whole.
    pub fn remove(&mut self, extent: ExtentId, block: u64) {
        self.open.remove(&(extent, block));
        self.is_changed |= self.blocks.remove(&(extent, block)).is_some();
    }

    /// Blocks of an extent were written to, and are whole, but for some.
    pub fn remove_written(&mut self, extent: ExtentId, blocks: Range<u64>, but: &[u64]) {
        let written = self.blocks.range((extent, blocks.start)..(extent, blocks.end));
        let whole = written.map(|((_, block), _)| *block).filter(|block| !but.contains(block));
        for block in whole.collect::<Vec<_>>() {
            self.remove(extent, block);
        }
    }

    /// Notes that the operator is told of a block. False if he knows.
    pub fn tell(&mut self, extent: ExtentId, block: u64) -> bool {
        let mut is_new = false;
        self.change((extent, block), |damage| {
            is_new = !std::mem::replace(&mut damage.is_told, true);
        });
        self.is_changed |= is_new;
        is_new
    }

    /// Damaged blocks in which some of these bytes are.
    pub fn of_freed(&self, ranges: &[Freed]) -> Vec<Place> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        let of = |range: &Freed| {
            let end = range.offset.saturating_add(range.length).div_ceil(BLOCK_BYTES);
            let blocks = (range.extent, range.offset / BLOCK_BYTES)..(range.extent, end);
            self.blocks.range(blocks).map(|(place, _)| *place)
        };
        ranges.iter().flat_map(of).collect()
    }

    /// The blocks of an extent of which the operator was told that they are lost, and that still are.
    pub fn told_of(&self, extent: ExtentId) -> impl Iterator<Item = Place> {
        let blocks = self.blocks.range((extent, 0)..=(extent, u64::MAX));
        blocks.filter(|(_, damage)| damage.is_told_lost()).map(|(place, _)| *place)
    }

    /// How many these are of all extents.
    pub fn told(&self) -> usize {
        self.blocks.values().filter(|damage| damage.is_told_lost()).count()
    }

    /// Changes what is known of a block, if there is room to know anything of it.
    fn change(&mut self, place: Place, change: impl FnOnce(&mut Damage)) {
        let is_new = !self.blocks.contains_key(&place);
        if is_new && self.blocks.len() >= BLOCKS_MAX {
            return;
        }
        self.is_changed |= is_new;
        let damage = self.blocks.entry(place).or_default();
        change(damage);
        if damage.is_lost() {
            self.open.remove(&place);
        } else {
            self.open.insert(place);
        }
    }

    /// All blocks, and whether the operator was told of each.
    pub fn all(&self) -> impl Iterator<Item = (ExtentId, u64, bool)> {
        self.blocks.iter().map(|((extent, block), damage)| (*extent, *block, damage.is_told))
    }

    /// Whether these have changed since this was last asked.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// They are still to be noted.
    pub fn is_not_noted(&mut self) {
        self.is_changed = true;
    }

    /// Whether no member has a block, by two repairs in a row.
    pub fn contains(&self, extent: ExtentId, block: u64) -> bool {
        self.blocks.get(&(extent, block)).is_some_and(Damage::is_lost)
    }

    /// A damaged block that still is when all between two offsets of its extent, of so many bytes, is written anew.
    pub fn left_in_part(
        &self,
        extent: ExtentId,
        (from, to): (u64, u64),
        length: u64,
    ) -> Option<u64> {
        let ends = [from / BLOCK_BYTES, to.saturating_sub(1) / BLOCK_BYTES];
        ends.into_iter().find(|block| {
            let start = block.saturating_mul(BLOCK_BYTES);
            let is_written = from <= start && start.saturating_add(BLOCK_BYTES).min(length) <= to;
            !is_written && self.blocks.contains_key(&(extent, *block))
        })
    }

    /// All blocks of which no other member has all that is here, needed or not.
    pub fn all_nowhere(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        let all = self.blocks.iter().filter(|(_, damage)| damage.is_found_nowhere());
        all.map(|(place, _)| *place)
    }

    /// The lost ones of an extent's first `length` bytes.
    pub fn below(&self, extent: ExtentId, length: u64) -> impl Iterator<Item = (ExtentId, u64)> {
        let blocks = self.blocks.range(blocks_below(extent, length));
        blocks.filter(|(_, damage)| damage.is_lost()).map(|(place, _)| *place)
    }

    /// Whether no block is known to be damaged.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether some of an extent's first `length` bytes are in open blocks.
    pub fn has_open(&self, extent: ExtentId, length: u64) -> bool {
        self.open.range(blocks_below(extent, length)).next().is_some()
    }

    /// Whether it is still to be expected that the disk reads a block. If not, nobody is to wait for it: two who cannot
    /// read theirs would wait for each other.
    pub fn may_be_read(&self, extent: ExtentId, block: u64) -> bool {
        let is_given_up =
            |damage: &Damage| damage.is_found_nowhere() || damage.waits >= REPAIRS_UNTIL_LOST;
        !self.blocks.get(&(extent, block)).is_some_and(is_given_up)
    }

    /// Whether it is too early to try again.
    pub fn rests(&self, extent: ExtentId, block: u64, now_ms: u64) -> bool {
        self.blocks.get(&(extent, block)).is_some_and(|damage| now_ms < damage.rests_until_ms)
    }

    /// Some open blocks that may be looked for now, each in its turn.
    pub fn due(
        &mut self,
        now_ms: u64,
        at_most: usize,
        is_looked_for: impl Fn(&Place) -> bool,
    ) -> Vec<Place> {
        let (behind, before) =
            (self.open.range((Excluded(self.turn), Unbounded)), self.open.range(..=self.turn));
        let mut due = Vec::new();
        for place in behind.chain(before).take(LOOKS_MAX) {
            if due.len() >= at_most {
                break;
            }
            self.turn = *place;
            let rests = self.blocks.get(place).is_some_and(|damage| now_ms < damage.rests_until_ms);
            if !rests && !is_looked_for(place) {
                due.push(*place);
            }
        }
        due
    }

    /// Who has said, since a block was found damaged here, that it does not have it.
    pub fn lackers(&self, extent: ExtentId, block: u64) -> Vec<NodeId> {
        self.blocks.get(&(extent, block)).map(|damage| damage.lackers.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: ExtentId = ExtentId(7);

    #[test]
    fn a_block_is_lost_when_two_repairs_in_a_row_find_it_nowhere() {
        let mut lost = LostBlocks::default();
        assert!(!lost.add(EXTENT, 9, &[], 0));
        lost.remove(EXTENT, 9);
        assert!(!lost.add(EXTENT, 9, &[], 1_000));
        assert!(!lost.contains(EXTENT, 9));
        assert!(lost.add(EXTENT, 9, &[], 2_000), "told once");
        assert!(!lost.add(EXTENT, 9, &[], 4_000));
        assert!(lost.contains(EXTENT, 9));
        lost.remove_written(ExtentId(8), 0..100, &[]);
        lost.remove_written(EXTENT, 0..9, &[]);
        lost.remove_written(EXTENT, 8..10, &[9]);
        assert!(lost.contains(EXTENT, 9));
        lost.remove_written(EXTENT, 8..10, &[8]);
        assert!(!lost.contains(EXTENT, 9));
    }

    #[test]
    fn nobody_is_told_for_long_to_wait_for_a_disk() {
        let mut lost = LostBlocks::default();
        lost.wait(EXTENT, 9, 0);
        assert!(lost.may_be_read(EXTENT, 9));
        lost.doubt_all();
        lost.wait(EXTENT, 9, 0);
        assert!(!lost.may_be_read(EXTENT, 9) && lost.may_be_read(EXTENT, 8));
        assert!(!lost.contains(EXTENT, 9), "others may have it");
        lost.remove(EXTENT, 9);
        assert!(lost.may_be_read(EXTENT, 9));
    }

    /// Found by a reader: with more blocks that a silent learner may have than are looked for at the same time, others never had
    /// their turn.
    #[test]
    fn each_has_its_turn_and_what_somebody_may_have_waits_a_little() {
        let mut lost = LostBlocks::default();
        for block in 0..4 {
            lost.find(EXTENT, block);
        }
        let due = |lost: &mut LostBlocks, now, but| {
            let due = lost.due(now, 2, |(_, block)| *block == but);
            due.into_iter().map(|(_, block)| block).collect::<Vec<u64>>()
        };
        lost.wait(EXTENT, 1, 1_000);
        assert_eq!(due(&mut lost, 1_499, 9), [0, 2]);
        lost.doubt(EXTENT, 0);
        assert_eq!(due(&mut lost, 1_499, 9), [3, 0]);
        assert_eq!(due(&mut lost, 1_500, 2), [1, 3]);
        for _ in 0..10 {
            lost.wait(EXTENT, 0, 10_000);
        }
        assert!(lost.rests(EXTENT, 0, 11_999) && !lost.rests(EXTENT, 0, 12_000));
    }

    #[test]
    fn who_lacked_a_block_is_remembered_until_it_is_damaged_anew() {
        let mut lost = LostBlocks::default();
        lost.add(EXTENT, 9, &[NodeId(3), NodeId(1)], 0);
        lost.add(EXTENT, 9, &[NodeId(2), NodeId(1)], 1_000);
        lost.doubt_all();
        assert_eq!(lost.lackers(EXTENT, 9), [NodeId(1), NodeId(2), NodeId(3)]);
        lost.find_anew(EXTENT, 9);
        assert_eq!(lost.lackers(EXTENT, 9), []);
    }

    #[test]
    fn what_nobody_has_is_looked_for_ever_more_rarely() {
        let (mut lost, mut now) = (LostBlocks::default(), 0);
        let mut pauses = Vec::new();
        for _ in 0..40 {
            assert!(!lost.rests(EXTENT, 9, now));
            lost.add(EXTENT, 9, &[], now);
            let began = now;
            while lost.rests(EXTENT, 9, now) {
                now += 100;
            }
            pauses.push(now - began);
        }
        assert!(pauses.starts_with(&[500, 1_000, 2_000, 4_000, 8_000]), "{pauses:?}");
        assert!(pauses.ends_with(&[8_000, 8_000]), "{pauses:?}");
    }

    #[test]
    fn the_operator_is_told_once_until_the_block_is_whole() {
        let mut lost = LostBlocks::default();
        lost.add(EXTENT, 9, &[], 0);
        assert!(lost.take_changed() && lost.all().eq([(EXTENT, 9, false)]));
        assert!(lost.add(EXTENT, 9, &[], 1_000) && !lost.take_changed());
        assert!(lost.tell(EXTENT, 9) && lost.take_changed());
        lost.doubt_all();
        assert!(!lost.contains(EXTENT, 9) && !lost.rests(EXTENT, 9, 1_000));
        lost.add(EXTENT, 9, &[], 2_000);
        lost.doubt(EXTENT, 9);
        lost.add(EXTENT, 9, &[], 3_000);
        assert!(lost.add(EXTENT, 9, &[], 4_000) && !lost.tell(EXTENT, 9) && !lost.take_changed());
        let told = |lost: &LostBlocks| (lost.told(), lost.told_of(EXTENT).collect::<Vec<_>>());
        lost.doubt_all();
        assert_eq!(told(&lost), (1, vec![(EXTENT, 9)]), "as long as nothing else is known");
        lost.add_needless(EXTENT, 9, 5_000);
        assert_eq!(told(&lost), (0, Vec::new()));
        lost.add(EXTENT, 9, &[], 6_000);
        assert_eq!(told(&lost), (1, vec![(EXTENT, 9)]));
        assert_eq!(lost.told_of(ExtentId(8)).count(), 0);
        assert!(lost.all().eq([(EXTENT, 9, true)]));
        lost.remove(EXTENT, 9);
        assert!(lost.take_changed() && lost.is_empty());
        assert!(lost.tell(EXTENT, 9));
    }

    #[test]
    fn as_many_as_there_is_room_for() {
        let mut lost = LostBlocks::default();
        for block in 0..=BLOCKS_MAX as u64 {
            lost.add(EXTENT, block, &[], 0);
        }
        assert_eq!(lost.open.iter().copied().count(), BLOCKS_MAX);
        lost.add(EXTENT, 0, &[], 1_000);
        assert!(lost.contains(EXTENT, 0), "what is known is not forgotten for what comes");
    }

    #[test]
    fn a_damaged_block_is_open_until_it_is_whole_or_lost() {
        let mut lost = LostBlocks::default();
        let is_open = |lost: &LostBlocks| {
            let (here, before) = (lost.has_open(EXTENT, 40_000), lost.has_open(EXTENT, 36_864));
            assert!(!before && lost.open.iter().copied().eq(here.then_some((EXTENT, 9))));
            here
        };
        lost.find(EXTENT, 9);
        assert!(is_open(&lost));
        lost.add(EXTENT, 9, &[], 0);
        assert!(is_open(&lost));
        lost.find(EXTENT, 9);
        assert!(
            lost.add(EXTENT, 9, &[], 1_000) && !is_open(&lost),
            "found twice, and looked for in between"
        );
        assert_eq!(lost.below(EXTENT, 40_000).collect::<Vec<_>>(), [(EXTENT, 9)]);
        lost.doubt_all();
        assert!(is_open(&lost));
        lost.doubt(EXTENT, 8);
        lost.remove(EXTENT, 9);
        assert!(!is_open(&lost));
    }

    #[test]
    fn a_lost_block_is_whole_again_when_all_of_it_is_written() {
        let mut lost = LostBlocks::default();
        assert!(!lost.add(EXTENT, 9, &[], 0) && lost.add(EXTENT, 9, &[], 1_000));
        let start = 9 * BLOCK_BYTES;
        let end = start + BLOCK_BYTES;
        for (range, length, left) in [
            ((start, end), end * 2, None),
            ((start - 1, end + 1), end * 2, None),
            ((start, start + 100), start + 100, None),
            ((start, start + 100), start + 101, Some(9)),
            ((start + 1, end), end, Some(9)),
            ((0, start + 1), end, Some(9)),
            ((end - 1, end * 2), end * 2, Some(9)),
            ((0, start), end, None),
            ((end, end * 2), end * 2, None),
        ] {
            assert_eq!(lost.left_in_part(EXTENT, range, length), left, "{range:?} of {length}");
        }
    }

    #[test]
    fn what_was_lost_long_ago_is_looked_for_anew_for_a_flush() {
        let mut lost = LostBlocks::default();
        assert!(!lost.add(EXTENT, 9, &[], 0) && lost.add(EXTENT, 9, &[], 1_000));
        lost.doubt_old(EXTENT, 9 * BLOCK_BYTES, 100_000);
        lost.doubt_old(EXTENT, 10 * BLOCK_BYTES, 1_000 + FRESH_MS);
        assert!(lost.contains(EXTENT, 9));
        lost.doubt_old(EXTENT, 10 * BLOCK_BYTES, 1_001 + FRESH_MS);
        assert!(!lost.contains(EXTENT, 9) && lost.has_open(EXTENT, 10 * BLOCK_BYTES));
        assert!(!lost.rests(EXTENT, 9, 1_001 + FRESH_MS));
    }

    #[test]
    fn what_the_primary_cuts_is_not_lost_and_nobody_waits_for_its_disk() {
        let mut lost = LostBlocks::default();
        for now in [0, 1_000, 2_000] {
            assert!(!lost.rests(EXTENT, 9, now));
            lost.add_needless(EXTENT, 9, now);
        }
        assert!(!lost.contains(EXTENT, 9) && lost.has_open(EXTENT, 40_000));
        assert!(!lost.may_be_read(EXTENT, 9));
        assert!(
            !lost.add(EXTENT, 9, &[], 3_000) && lost.add(EXTENT, 9, &[], 4_000),
            "nobody ends before it any more"
        );
    }
}
