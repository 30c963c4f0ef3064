//! Tests of the store as a whole.

mod crash_model;
mod damage;
mod faults;
mod operations;
mod pieces;
mod real_files;
mod speed;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use milpa_types::{Epoch, ExtentId, InodeId, PartitionId, SessionId};

use super::memory_files::MemoryFiles;
use super::*;

const PARTITION: PartitionId = PartitionId(42);
/// A large extent.
const LARGE: ExtentId = ExtentId(7);

/// A store on a disk in memory, with caches so small that everything is evicted all the time.
struct World {
    files: MemoryFiles,
    disk: Arc<StoreDisk>,
    store: Arc<ExtentStore>,
    report: RecoveryReport,
}

impl World {
    fn new() -> World {
        World::on(MemoryFiles::new())
    }

    fn on(files: MemoryFiles) -> World {
        let limits = StoreLimits { files_max: 1, chunks_max: 1 };
        let disk = StoreDisk::new(Arc::new(files.clone()), limits);
        let (store, report) = ExtentStore::open(&disk, directory(), PARTITION).unwrap();
        World { files, disk, store: Arc::new(store), report }
    }

    fn with_extent() -> World {
        let world = World::new();
        world.store.create_extent(new_extent(LARGE)).unwrap();
        world
    }

    /// The process dies; the system, and what it has in memory, lives on.
    fn kill(self) -> World {
        let World { files, disk, .. } = self;
        // So that nothing is flushed when the store goes out of scope: a dead process flushes nothing.
        disk.fence("kill", &std::io::Error::other("test"));
        World::on(files)
    }

    /// The machine loses power.
    fn crash(self, seed: u64) -> World {
        self.files.cut_power(seed);
        self.kill()
    }

    fn append(&self, bytes: &[u8]) -> Result<u64, StoreError> {
        let offset = self.length(LARGE);
        self.store.append(LARGE, offset, bytes, Checksums::of_payload(&checksums_of(bytes)))
    }

    fn overwrite(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let sums = checksums_of(bytes);
        let sums = Checksums::of_payload(&sums);
        self.store.overwrite(LARGE, offset, bytes, sums, Overwriting::New).map(drop)
    }

    fn length(&self, id: ExtentId) -> u64 {
        self.store.states(&[id]).first().map_or(0, |state| state.length)
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.store.flush(&[(LARGE, 0)])
    }

    /// Reads, and checks the checksums that come with the bytes.
    fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>, StoreError> {
        let stored = self.store.read(LARGE, offset, length as u32)?;
        let sums = Checksums::of_blocks(&stored.checksums, offset);
        assert!(length == 0 || sums.verify(&stored.bytes).is_ok(), "checksums of the answer");
        Ok(stored.bytes.to_vec())
    }

    fn free(&self, offset: u64, length: u64) {
        self.store
            .free(&[Freed { extent: LARGE, offset, length }], &mut HeaderBlocks::default())
            .unwrap();
    }

    fn path(&self) -> PathBuf {
        extent_path(directory(), LARGE)
    }
}

fn directory() -> &'static Path {
    Path::new("/disk/partitions/42")
}

fn new_extent(id: ExtentId) -> NewExtent {
    NewExtent { id, epoch: Epoch(3), inode: InodeId(11), session: SessionId(13) }
}

/// Bytes that differ everywhere and from seed to seed.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut byte = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state >> 24) as u8
    };
    (0..length).map(|_| byte()).collect()
}
