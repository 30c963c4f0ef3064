//! Telling the operator of lost blocks, each once: which these are is noted in a file of the disk, so that a start knows.
//! Until a start has looked for them, no flush passes over them.

use std::path::{Path, PathBuf};

use milpa_host::disk as files;
use milpa_types::{BLOCK_BYTES, ExtentId, PartitionId};

use super::disk::Disk;
use super::metrics::Metrics;

/// Blocks of a disk that are noted: 2 MB.
const NOTED_MAX: usize = 65_536;
/// Between two notes.
const NOTE_MS: u64 = 1_000;
const FILE: &str = "lost";

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

    /// What was noted last. A note that cannot be read costs that some are told of again, and that those behind the
    /// last flushed block of their extent are found when they are read.
    pub fn read(&self) -> Vec<LostPlace> {
        let text = files::read(&self.file).unwrap_or_default();
        let places = parse(&String::from_utf8_lossy(&text));
        if places.is_none() && !text.is_empty() {
            tracing::warn!(file = %self.file.display(), "the note of lost blocks cannot be read");
        }
        places.unwrap_or_default()
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
                disk.partitions.values_mut().for_each(|partition| partition.lost.is_not_noted());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_back_and_nonsense_is_not() {
        let places =
            vec![(PartitionId(7), ExtentId::small(3), 9), (PartitionId(8), ExtentId(7), 0)];
        assert_eq!(parse(&text_of(&places)), Some(places));
        assert_eq!(parse("1\n"), Some(Vec::new()));
        for bad in ["", "1", "2\n", "1\n1 2\n", "1\n1 2 3 4\n", "1\na b c\n", "1\n\n"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
