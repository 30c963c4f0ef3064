//! Blocks of a partition that no replica has whole.
//!
//! Each replica that has such a block asks the others for it, and each that is asked notices that its own
//! is damaged: without a pause that grows they would set each other to work without end.
//!
//! With every configuration they are looked for anew, but the operator is told of each once: which these are
//! is kept over configurations, and over restarts in a file of the disk. Until such a block is found or lost anew,
//! no flush passes over it; what is lost is found out from the replicas.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use milpa_host::disk as files;
use milpa_types::{BLOCK_BYTES, ExtentId, PartitionId};

use super::disk::Disk;
use super::metrics::Metrics;

/// Blocks that are remembered.
const BLOCKS_MAX: usize = 4096;
/// A member that was in doubt about its own when it was asked first has decided by the second time.
const REPAIRS_UNTIL_LOST: u32 = 2;
/// Blocks of a disk that are noted: 2 MB.
const NOTED_MAX: usize = 65_536;
/// Between two notes.
const NOTE_MS: u64 = 1_000;
const FILE: &str = "lost";
/// Pauses between repairs: the first one, and the longest one.
const PAUSE_MIN_MS: u64 = 500;
const PAUSE_MAX_MS: u64 = 64_000;

/// Damaged blocks that no member gave when it was asked.
#[derive(Debug, Default)]
pub(crate) struct LostBlocks {
    blocks: BTreeMap<(ExtentId, u64), Lost>,
    /// Of which of them the operator was told is not what it was when it was last noted.
    is_changed: bool,
}

#[derive(Debug, Default)]
struct Lost {
    /// Repairs in a row that have found that.
    repairs: u32,
    /// Repairs that have found that another member cannot read it either, and may yet.
    waits: u32,
    /// Not repaired again before.
    rests_until_ms: u64,
    /// The operator knows.
    is_told: bool,
}

impl Lost {
    fn is_certain(&self) -> bool {
        self.repairs >= REPAIRS_UNTIL_LOST
    }

    fn is_in_question(&self) -> bool {
        self.is_told && !self.is_certain()
    }
}

/// The blocks of an extent's first `length` bytes, as keys.
pub(crate) fn blocks_below(extent: ExtentId, length: u64) -> Range<(ExtentId, u64)> {
    (extent, 0)..(extent, length.div_ceil(BLOCK_BYTES))
}

impl LostBlocks {
    /// Notes that no member had a block whole. True when it is called lost from now on.
    pub fn add(&mut self, extent: ExtentId, block: u64, now_ms: u64) -> bool {
        let lost = self.entry(extent, block);
        let pause_ms = PAUSE_MIN_MS.saturating_mul(1 << lost.repairs.min(16)).min(PAUSE_MAX_MS);
        lost.repairs = lost.repairs.saturating_add(1);
        lost.rests_until_ms = now_ms.saturating_add(pause_ms);
        lost.repairs == REPAIRS_UNTIL_LOST
    }

    /// Notes that another member cannot read a block either now, and may be able to later.
    pub fn wait(&mut self, extent: ExtentId, block: u64) {
        self.doubt(extent, block);
        let lost = self.entry(extent, block);
        lost.waits = lost.waits.saturating_add(1);
    }

    /// Whether it is still to be expected that the disk reads a block. If not, nobody is to wait for it: two who cannot
    /// read theirs would wait for each other.
    pub fn may_be_read(&self, extent: ExtentId, block: u64) -> bool {
        let is_given_up = |lost: &Lost| lost.is_certain() || lost.waits >= REPAIRS_UNTIL_LOST;
        !self.blocks.get(&(extent, block)).is_some_and(is_given_up)
    }

    fn entry(&mut self, extent: ExtentId, block: u64) -> &mut Lost {
        if self.blocks.len() >= BLOCKS_MAX && !self.blocks.contains_key(&(extent, block)) {
            self.blocks.pop_first();
        }
        self.blocks.entry((extent, block)).or_default()
    }

    /// Notes that the operator is told of a block. False if he knows.
    pub fn tell(&mut self, extent: ExtentId, block: u64) -> bool {
        let is_new = !std::mem::replace(&mut self.entry(extent, block).is_told, true);
        self.is_changed |= is_new;
        is_new
    }

    /// The blocks of which the operator was told.
    pub fn told(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        self.blocks.iter().filter(|(_, lost)| lost.is_told).map(|(place, _)| *place)
    }

    /// Whether these have changed since this was last asked.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Whether no member has a block, by two repairs in a row.
    pub fn contains(&self, extent: ExtentId, block: u64) -> bool {
        self.blocks.get(&(extent, block)).is_some_and(Lost::is_certain)
    }

    /// All such blocks.
    pub fn all(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        self.blocks.iter().filter(|(_, lost)| lost.is_certain()).map(|(place, _)| *place)
    }

    /// Those of an extent's first `length` bytes.
    pub fn below(&self, extent: ExtentId, length: u64) -> impl Iterator<Item = u64> {
        let blocks = self.blocks.range(blocks_below(extent, length));
        blocks.filter(|(_, lost)| lost.is_certain()).map(|((_, block), _)| *block)
    }

    /// The blocks of which the operator was told, and that may be found yet: other members are asked since, or this
    /// node was started again. They are not here, whatever is found.
    pub fn in_question(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        self.blocks.iter().filter(|(_, lost)| lost.is_in_question()).map(|(place, _)| *place)
    }

    /// Whether some of an extent's first `length` bytes are in question.
    pub fn has_in_question(&self, extent: ExtentId, length: u64) -> bool {
        self.blocks.range(blocks_below(extent, length)).any(|(_, lost)| lost.is_in_question())
    }

    /// Whether it is too early to try again.
    pub fn rests(&self, extent: ExtentId, block: u64, now_ms: u64) -> bool {
        self.blocks.get(&(extent, block)).is_some_and(|lost| now_ms < lost.rests_until_ms)
    }

    /// It may be whole: somebody did not say that he lacks it.
    pub fn doubt(&mut self, extent: ExtentId, block: u64) {
        self.forget(|place| place == (extent, block));
    }

    /// It is whole.
    pub fn remove(&mut self, extent: ExtentId, block: u64) {
        self.remove_where(|place| place == (extent, block));
    }

    /// Blocks of an extent were written to, and are whole, but for some.
    pub fn remove_written(&mut self, extent: ExtentId, blocks: Range<u64>, but: &[u64]) {
        self.remove_where(|(lost, block)| {
            lost == extent && blocks.contains(&block) && !but.contains(&block)
        });
    }

    /// Others may be asked now.
    pub fn clear(&mut self) {
        self.forget(|_| true);
    }

    /// Forgets what is known of blocks, but not of which the operator was told.
    fn forget(&mut self, is_meant: impl Fn((ExtentId, u64)) -> bool) {
        self.blocks.retain(|place, lost| {
            if is_meant(*place) {
                (lost.repairs, lost.rests_until_ms) = (0, 0);
            }
            lost.repairs > 0 || lost.waits > 0 || lost.is_told
        });
    }

    fn remove_where(&mut self, is_meant: impl Fn((ExtentId, u64)) -> bool) {
        let mut is_changed = false;
        self.blocks.retain(|place, lost| {
            let stays = !is_meant(*place);
            is_changed |= !stays && lost.is_told;
            stays
        });
        self.is_changed |= is_changed;
    }
}

/// The note of the blocks of a disk of which the operator was told.
pub(crate) struct LostNote {
    file: PathBuf,
    noted_ms: u64,
    /// It is being written.
    is_writing: bool,
}

/// A lost block's partition, extent and number.
pub(crate) type LostPlace = (PartitionId, ExtentId, u64);

impl LostNote {
    pub fn new(directory: &Path) -> LostNote {
        LostNote { file: directory.join(FILE), noted_ms: 0, is_writing: false }
    }

    /// What was noted last. A note that cannot be read costs that some are told of again.
    pub fn read(&self) -> Vec<LostPlace> {
        let text = files::read(&self.file).unwrap_or_default();
        parse(&String::from_utf8_lossy(&text)).unwrap_or_default()
    }
}

pub(crate) fn parse(text: &str) -> Option<Vec<LostPlace>> {
    let place = |line: &str| {
        let mut numbers = line.split(' ').map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        let place = (PartitionId(next()?), ExtentId(next()?), next()?);
        numbers.next().is_none().then_some(place)
    };
    text.strip_prefix("1\n")?.lines().map(place).collect()
}

pub(crate) fn text_of(places: &[LostPlace]) -> String {
    let line =
        |(partition, extent, block): &LostPlace| format!("{partition} {} {block}\n", extent.0);
    ["1\n".to_owned()].into_iter().chain(places.iter().map(line)).collect()
}

impl Disk {
    /// Tells the operator that no replica has some bytes of a block: of all that is in a log this is what he
    /// must not miss.
    pub fn tell_lost(&mut self, id: PartitionId, extent: ExtentId, (offset, length): (u64, u64)) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if partition.lost.tell(extent, offset / BLOCK_BYTES) {
            Metrics::get().lost_bytes.inc_by(length);
            tracing::error!(partition = %id, %extent, offset, length, "bytes are damaged on every replica");
        }
    }

    /// Notes of which blocks the operator was told, when that has changed.
    pub fn tick_lost(&mut self, now: u64) {
        let is_early = now.saturating_sub(self.lost_note.noted_ms) < NOTE_MS;
        if self.is_fenced() || self.lost_note.is_writing || is_early {
            return;
        }
        self.lost_note.noted_ms = now;
        let mut is_changed = false;
        for partition in self.partitions.values_mut() {
            is_changed |= partition.lost.take_changed();
        }
        if !is_changed {
            return;
        }
        self.lost_note.is_writing = true;
        let told = self.partitions.values().flat_map(|partition| {
            let id = partition.id;
            partition.lost.told().map(move |(extent, block)| (id, extent, block))
        });
        let told: Vec<LostPlace> = told.take(NOTED_MAX).collect();
        let (file, text) = (self.lost_note.file.clone(), text_of(&told));
        let note = move || files::replace(&file, text.as_bytes());
        self.workers.slow(note, |disk, noted| {
            disk.lost_note.is_writing = false;
            if let Err(error) = noted {
                tracing::debug!(%error, "lost blocks were not noted");
            }
        });
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
    fn nobody_is_told_for_long_to_wait_for_a_disk() {
        let mut lost = LostBlocks::default();
        lost.wait(EXTENT, 9);
        assert!(lost.may_be_read(EXTENT, 9));
        lost.clear();
        lost.wait(EXTENT, 9);
        assert!(!lost.may_be_read(EXTENT, 9) && lost.may_be_read(EXTENT, 8));
        assert!(!lost.contains(EXTENT, 9), "others may have it");
        lost.remove(EXTENT, 9);
        assert!(lost.may_be_read(EXTENT, 9));
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
    fn the_operator_is_told_once_until_the_block_is_whole() {
        let mut lost = LostBlocks::default();
        lost.add(EXTENT, 9, 0);
        assert!(lost.add(EXTENT, 9, 1_000) && lost.tell(EXTENT, 9) && lost.take_changed());
        lost.clear();
        assert!(!lost.contains(EXTENT, 9) && !lost.rests(EXTENT, 9, 1_000));
        lost.add(EXTENT, 9, 2_000);
        lost.doubt(EXTENT, 9);
        lost.add(EXTENT, 9, 3_000);
        assert!(lost.add(EXTENT, 9, 4_000) && !lost.tell(EXTENT, 9) && !lost.take_changed());
        assert_eq!(lost.told().collect::<Vec<_>>(), [(EXTENT, 9)]);
        lost.remove(EXTENT, 9);
        assert!(lost.take_changed() && lost.told().next().is_none());
        assert!(lost.tell(EXTENT, 9));
    }

    #[test]
    fn a_note_is_read_back_and_nonsense_is_not() {
        let places = vec![(PartitionId(7), ExtentId::small(3), 9), (PartitionId(8), EXTENT, 0)];
        assert_eq!(parse(&text_of(&places)), Some(places));
        assert_eq!(parse("1\n"), Some(Vec::new()));
        for bad in ["", "1", "2\n", "1\n1 2\n", "1\n1 2 3 4\n", "1\na b c\n", "1\n\n"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
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
