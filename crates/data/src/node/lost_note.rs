//! Damaged blocks are noted in a file of the disk, so that a start knows of them: until it has looked for them, no flush passes
//! over them, and the log stays for members that may have them. And the operator is told of each that is lost once.

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

/// The note of the damaged blocks of a disk.
pub(crate) struct LostNote {
    file: PathBuf,
    noted_ms: u64,
    /// It is being written.
    is_writing: bool,
}

/// A damaged block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    pub partition: PartitionId,
    pub extent: ExtentId,
    pub block: u64,
    /// The operator was told that it is lost.
    pub is_told: bool,
}

impl LostNote {
    pub fn new(directory: &Path) -> LostNote {
        LostNote { file: directory.join(FILE), noted_ms: 0, is_writing: false }
    }

    /// What was noted last. A note that cannot be read costs that some are told of again, and that those behind the
    /// last flushed block of their extent are found when they are read.
    pub fn read(&self) -> Vec<Noted> {
        let text = files::read(&self.file).unwrap_or_default();
        let noted = parse(&String::from_utf8_lossy(&text));
        if noted.is_none() && !text.is_empty() {
            tracing::warn!(file = %self.file.display(), "the note of damaged blocks cannot be read");
        }
        noted.unwrap_or_default()
    }
}

/// Of the first format, which had only those of which the operator was told, too.
pub(crate) fn parse(text: &str) -> Option<Vec<Noted>> {
    let noted = |line: &str, is_first: bool| {
        let mut words = line.split(' ');
        let mut number = || words.next()?.parse().ok();
        let (partition, extent) = (PartitionId(number()?), ExtentId(number()?));
        let block = number()?;
        let is_told = match words.next() {
            None if is_first => true,
            Some("lost") if !is_first => true,
            Some("damaged") if !is_first => false,
            _ => return None,
        };
        words.next().is_none().then_some(Noted { partition, extent, block, is_told })
    };
    match text.strip_prefix("2\n") {
        Some(lines) => lines.lines().map(|line| noted(line, false)).collect(),
        None => text.strip_prefix("1\n")?.lines().map(|line| noted(line, true)).collect(),
    }
}

pub(crate) fn text_of(noted: &[Noted]) -> String {
    let line = |Noted { partition, extent, block, is_told }: &Noted| {
        let state = if *is_told { "lost" } else { "damaged" };
        format!("{partition} {} {block} {state}\n", extent.0)
    };
    ["2\n".to_owned()].into_iter().chain(noted.iter().map(line)).collect()
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

    /// Notes which blocks are damaged, when that has changed.
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
        let all = self.partitions.values().flat_map(|it| {
            let partition = it.id;
            let noted = move |(extent, block, is_told)| Noted { partition, extent, block, is_told };
            it.lost.all().map(noted)
        });
        let all: Vec<Noted> = all.take(NOTED_MAX).collect();
        let (file, text) = (self.lost_note.file.clone(), text_of(&all));
        let note = move || files::replace(&file, text.as_bytes());
        self.workers.slow(note, |disk, noted| {
            disk.lost_note.is_writing = false;
            if let Err(error) = noted {
                tracing::debug!(%error, "damaged blocks were not noted");
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
        let noted = |partition, extent, block, is_told| Noted {
            partition: PartitionId(partition),
            extent,
            block,
            is_told,
        };
        let all = vec![noted(7, ExtentId::small(3), 9, true), noted(8, ExtentId(7), 0, false)];
        assert_eq!(parse(&text_of(&all)), Some(all));
        assert_eq!(parse("2\n"), Some(Vec::new()));
        assert_eq!(parse("1\n8 7 0\n"), Some(vec![noted(8, ExtentId(7), 0, true)]));
        for bad in ["", "1", "3\n", "2\n1 2 3\n", "2\n1 2 3 4\n", "2\n1 2 3 lost 4\n", "2\n\n"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
        for bad in ["1\n1 2\n", "1\n1 2 3 4\n", "1\n1 2 3 lost\n", "1\na b c\n", "1\n\n"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
