//! Reads everything again, slowly, and repairs what does not match its checksums.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use milpa_host::clock::now_ms;
use milpa_host::disk as files;
use milpa_types::{BLOCK_BYTES, ExtentId, PartitionId};

use crate::scrub::{Place, Scrub, Step};
use crate::store::{ExtentStore, StoreError, Verified};

use super::disk::Disk;
use super::metrics::Metrics;

/// Blocks of one step: 1 MiB, read in pieces of 256 KiB.
const STEP_BLOCKS: u64 = 256;
/// Extents of one step.
const STEP_EXTENTS: usize = 64;
/// Between two notes of the place.
const NOTE_MS: u64 = 300_000;
const FILE: &str = "scrub";

/// The walk, and where it is noted.
pub(crate) struct Scrubbing {
    scrub: Scrub,
    file: PathBuf,
    noted_ms: u64,
}

/// A step, and the damage that it found.
struct Found {
    step: Step,
    damaged: Vec<(ExtentId, u64)>,
    /// What comes next could not be looked at now, and is to be tried again.
    is_cut_off: bool,
}

impl Scrubbing {
    /// Goes on where it was when the place was last noted. A note that cannot be read costs a
    /// beginning from the start.
    pub fn open(directory: &Path, period_s: u64) -> Scrubbing {
        let file = directory.join(FILE);
        let noted = files::read(&file).ok().and_then(|text| parse(&String::from_utf8_lossy(&text)));
        let period = (period_s > 0).then(|| Duration::from_secs(period_s));
        let scrub = Scrub::new(period, noted.unwrap_or_default(), now_ms());
        Scrubbing { scrub, file, noted_ms: now_ms() }
    }
}

pub(crate) fn parse(text: &str) -> Option<Place> {
    let mut numbers = text.strip_prefix("1 ")?.split_whitespace().map(str::parse);
    let mut next = || numbers.next()?.ok();
    let (partition, extent) = (PartitionId(next()?), ExtentId(next()?));
    Some(Place { partition, extent, block: next()? })
}

pub(crate) fn text_of(place: Place) -> String {
    format!("1 {} {} {}\n", place.partition.0, place.extent.0, place.block)
}

impl Disk {
    /// Starts the next step when it is due and the disk has nothing better to do.
    pub fn tick_scrub(&mut self, now: u64) {
        if self.is_fenced() || self.workers.is_full() {
            return;
        }
        let Some(place) = self.scrubbing.scrub.begin(now) else { return };
        let in_service =
            |id: &PartitionId| self.partitions.get(id).is_some_and(|p| p.broken.is_none());
        let ids = self.partitions.range(place.partition..).map(|(id, _)| *id);
        let mut ids = ids.filter(in_service);
        let Some(id) = ids.next() else {
            return self.step_done(Step { next: None, bytes: 0 });
        };
        let after = ids.next();
        let Some(store) = self.store_of(id) else { return };
        let start =
            if id == place.partition { (place.extent, place.block) } else { Default::default() };
        self.workers.copy(
            move || look(&store, id, start, after),
            move |disk, found| disk.scrubbed(id, found),
        );
    }

    fn scrubbed(&mut self, id: PartitionId, found: Found) {
        let Found { step, damaged, is_cut_off } = found;
        Metrics::get().scrubbed_bytes.inc_by(step.bytes);
        for (extent, block) in damaged {
            if !self.repair_block(id, extent, block) {
                // Too many at once: from here on again when some are repaired.
                let place = Place { partition: id, extent, block };
                return self.scrubbing.scrub.put_off(place, now_ms());
            }
            tracing::warn!(partition = %id, %extent, block, "a block does not match its checksum");
            Metrics::get().corrupt_blocks.inc();
        }
        if let Some(place) = step.next.filter(|_| is_cut_off) {
            return self.scrubbing.scrub.put_off(place, now_ms());
        }
        self.step_done(step);
        // On a large disk the next one is due at once.
        self.tick_scrub(now_ms());
    }

    fn step_done(&mut self, step: Step) {
        let (now, held) = (now_ms(), self.usage.allocated_bytes);
        if self.scrubbing.scrub.done(&step, held, now) {
            tracing::debug!(disk = %self.id, "all bytes of the disk were verified");
            Metrics::get().scrub_passes.inc();
        }
        if now.saturating_sub(self.scrubbing.noted_ms) >= NOTE_MS {
            self.scrubbing.noted_ms = now;
            let (file, text) =
                (self.scrubbing.file.clone(), text_of(step.next.unwrap_or_default()));
            let note = move || files::replace(&file, text.as_bytes());
            self.workers.slow(note, |_, noted| {
                if let Err(error) = noted {
                    tracing::debug!(%error, "the place of the scrub was not noted");
                }
            });
        }
    }
}

/// Reads some blocks of a partition. On a disk thread.
fn look(
    store: &Arc<ExtentStore>,
    partition: PartitionId,
    (mut extent, mut block): (ExtentId, u64),
    after: Option<PartitionId>,
) -> Found {
    let (mut blocks, mut damaged, mut is_cut_off) = (0, Vec::new(), false);
    let mut next = None;
    for _ in 0..STEP_EXTENTS {
        let Some(id) = store.next_extent(extent) else {
            next = after.map(|partition| Place { partition, ..Place::default() });
            break;
        };
        if id != extent {
            block = 0;
        }
        let verified = match store.verify(id, block, STEP_BLOCKS - blocks) {
            Ok(verified) => verified,
            // It was removed meanwhile, or the whole partition.
            Err(StoreError::NoExtent | StoreError::Removed | StoreError::Closed) => {
                Verified::default()
            }
            Err(error) => {
                tracing::debug!(%partition, extent = %id, %error, "not verified now");
                is_cut_off = true;
                next = Some(Place { partition, extent: id, block });
                break;
            }
        };
        blocks += verified.blocks;
        damaged.extend(verified.damaged.into_iter().map(|block| (id, block)));
        (extent, block) = match verified.next {
            Some(block) => (id, block),
            None => (ExtentId(id.0.saturating_add(1)), 0),
        };
        next = Some(Place { partition, extent, block });
        if blocks >= STEP_BLOCKS {
            break;
        }
    }
    Found { step: Step { next, bytes: blocks * BLOCK_BYTES }, damaged, is_cut_off }
}

#[cfg(test)]
mod tests {
    use super::*;

    use milpa_types::{Epoch, InodeId, SessionId};

    use crate::store::memory_files::{Call, Fault, MemoryFiles};
    use crate::store::{
        Checksums, Freed, HeaderBlocks, NewExtent, StoreDisk, StoreLimits, checksums_of,
    };

    const PARTITION: PartitionId = PartitionId(42);

    /// Extents 1 and 2 of 1,000 blocks each, and no room for a second open file.
    fn two_extents(files: &MemoryFiles) -> Arc<ExtentStore> {
        let limits = StoreLimits { files_max: 1, chunks_max: 16 };
        let disk = StoreDisk::new(Arc::new(files.clone()), limits);
        let (store, _) = ExtentStore::open(&disk, Path::new("/partition"), PARTITION).unwrap();
        for id in [1, 2].map(ExtentId) {
            let (epoch, inode, session) = (Epoch(1), InodeId(2), SessionId(3));
            store.create_extent(NewExtent { id, epoch, inode, session }).unwrap();
            let bytes = vec![7; 200 * BLOCK_BYTES as usize];
            let sums = checksums_of(&bytes);
            for turn in 0..5 {
                let offset = turn * bytes.len() as u64;
                store.append(id, offset, &bytes, Checksums::of_payload(&sums)).unwrap();
            }
        }
        store.flush_all().unwrap();
        Arc::new(store)
    }

    /// The period is shared out by what extents occupy on the disk. Steps counted blocks that were freed, too:
    /// with extents that were 5 % alive a period of 14 days became 280.
    #[test]
    fn the_steps_of_a_pass_count_no_more_than_the_disk_holds() {
        let store = two_extents(&MemoryFiles::new());
        for extent in [1, 2].map(ExtentId) {
            let length = 950 * BLOCK_BYTES;
            store
                .free(&[Freed { extent, offset: 0, length }], &mut HeaderBlocks::default())
                .unwrap();
        }
        let (mut start, mut counted) = (Default::default(), 0);
        while let Found { step: Step { next: Some(place), bytes }, .. } =
            look(&store, PARTITION, start, None)
        {
            counted += bytes;
            start = (place.extent, place.block);
            assert!(counted < store.allocated_bytes(), "{counted}");
        }
    }

    /// An extent that could not be opened, as the process had too many open files, counted as verified to its end.
    /// One that is gone is passed over.
    #[test]
    fn an_extent_that_cannot_be_opened_now_is_looked_at_again() {
        let files = MemoryFiles::new();
        let store = two_extents(&files);
        let begin = (ExtentId(1), 700);
        files.fail(Fault { call: Call::Open, after: 0, errno: libc::EMFILE });
        let found = look(&store, PARTITION, begin, None);
        let place = |extent, block| Place { partition: PARTITION, extent: ExtentId(extent), block };
        assert_eq!((found.is_cut_off, found.step.next), (true, Some(place(1, 700))));
        // In the middle of a step, too.
        files.fail(Fault { call: Call::Open, after: 1, errno: libc::ENOMEM });
        let found = look(&store, PARTITION, (ExtentId(1), 900), None);
        assert_eq!((found.is_cut_off, found.step.next), (true, Some(place(2, 0))));
        assert_eq!(found.step.bytes, 100 * BLOCK_BYTES);
        // Nor is a block damaged that could not be read for lack of memory.
        (0..1_000)
            .for_each(|_| files.fail(Fault { call: Call::Read, after: 0, errno: libc::ENOMEM }));
        let found = look(&store, PARTITION, begin, None);
        files.fail_no_more();
        assert_eq!((found.is_cut_off, found.step.next), (true, Some(place(1, 700))));
        assert_eq!(found.damaged, []);
        let freed = Freed { extent: ExtentId(1), offset: 0, length: u64::MAX };
        store.free(&[freed], &mut HeaderBlocks::default()).unwrap();
        let found = look(&store, PARTITION, begin, None);
        assert_eq!((found.is_cut_off, found.step.next), (false, Some(place(2, 256))));
    }

    #[test]
    fn a_place_is_read_back_and_nonsense_is_not() {
        let place = Place { partition: PartitionId(7), extent: ExtentId::small(3), block: 9 };
        assert_eq!(parse(&text_of(place)), Some(place));
        for bad in ["", "1 2 3", "2 1 1 1", "1 a b c"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
