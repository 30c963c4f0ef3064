//! The same on files of the operating system.

use super::super::files::DiskFiles;
use super::*;

fn open(directory: &Path) -> ExtentStore {
    let disk = StoreDisk::new(Arc::new(DiskFiles), StoreLimits::default());
    let (store, report) = ExtentStore::open(&disk, directory, PARTITION).unwrap();
    assert!(report.extents.iter().all(|extent| extent.damaged.is_empty()), "{report:?}");
    store
}

fn append(store: &ExtentStore, bytes: &[u8]) {
    let offset = store.states(&[LARGE])[0].length;
    let sums = checksums_of(bytes);
    store.append(LARGE, offset, bytes, Checksums::of_payload(&sums)).unwrap();
}

#[test]
fn a_partition_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("partitions/42");
    let bytes = pattern(1, 300_000);
    {
        let store = open(&path);
        store.create_extent(new_extent(LARGE)).unwrap();
        append(&store, &bytes[..100]);
        append(&store, &bytes[100..200_000]);
        store.flush(&[(LARGE, 200_000)]).unwrap();
        append(&store, &bytes[200_000..]);
    }
    let store = open(&path);
    assert_eq!(store.read(LARGE, 0, 300_000).unwrap().bytes, bytes);
    store.seal(LARGE, 250_000).unwrap();
    drop(store);
    let store = open(&path);
    assert_eq!(store.read(LARGE, 0, 250_000).unwrap().bytes, bytes[..250_000]);
    assert!(store.read(LARGE, 0, 250_001).is_err());
    let details = store.details(&[])[0];
    assert_eq!((details.state.inode, details.state.session), (InodeId(11), SessionId(13)));
    assert!(details.state.sealed && details.flushed == 250_000);
}

/// Simulation, seed 1023: a replica that was lost is made again in the same place, and its extents
/// are filled: into the files that it has, not into those that its predecessor had open.
#[test]
fn a_partition_that_is_made_again_shares_no_open_file_with_its_predecessor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("42");
    let disk = StoreDisk::new(Arc::new(DiskFiles), StoreLimits::default());
    let (former, _) = ExtentStore::open(&disk, &path, PARTITION).unwrap();
    former.create_extent(new_extent(LARGE)).unwrap();
    append(&former, &pattern(1, 10_000));
    former.close();
    std::fs::remove_dir_all(&path).unwrap();

    let (store, _) = ExtentStore::open(&disk, &path, PARTITION).unwrap();
    store.create_extent(new_extent(LARGE)).unwrap();
    append(&store, &pattern(2, 10_000));
    store.flush_all().unwrap();
    // Whoever still works for the former one is told, and touches nothing.
    let sums = checksums_of(&[0; 8]);
    let late = former.append(LARGE, 10_000, &[0; 8], Checksums::of_payload(&sums));
    assert!(matches!(late, Err(StoreError::Closed)), "{late:?}");
    assert_eq!(former.freed(&[LARGE], 9), [], "nobody is told that it was removed");
    let late = former.create_extent(new_extent(ExtentId(9)));
    assert!(matches!(late, Err(StoreError::Closed)), "{late:?}");
    drop((former, store));
    assert!(!disk.is_fenced());
    assert_eq!(open(&path).read(LARGE, 0, 10_000).unwrap().bytes, pattern(2, 10_000));
}

/// Simulation, seeds 769 and 1367: what follows a block that no replica has whole was on one only.
#[test]
fn lost_bytes_are_kept_as_damaged_and_more_can_follow() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.create_extent(new_extent(LARGE)).unwrap();
    append(&store, &pattern(1, 4_096 + 100));
    assert!(store.append_lost(LARGE, 4_196, 4_096).is_err(), "more than one block");
    store.append_lost(LARGE, 4_196, 3_996).unwrap();
    append(&store, &pattern(2, 4_096));
    store.append_lost(LARGE, 12_288, 4_096).unwrap();
    store.append_lost(LARGE, 16_384, 10).unwrap();
    store.seal(LARGE, 16_394).unwrap();
    store.flush_all().unwrap();
    let check = |store: &ExtentStore| {
        assert_eq!(store.read(LARGE, 0, 4_096).unwrap().bytes, pattern(1, 4_096));
        assert_eq!(store.read(LARGE, 8_192, 4_096).unwrap().bytes, pattern(2, 4_096));
        for (offset, lost) in [(4_096, 1), (12_288, 3), (16_384, 4)] {
            let read = store.read(LARGE, offset, 10);
            assert!(
                matches!(read, Err(StoreError::Corrupt { block }) if block == lost),
                "{read:?}"
            );
        }
    };
    check(&store);
    drop(store);
    let disk = StoreDisk::new(Arc::new(DiskFiles), StoreLimits::default());
    let (store, _) = ExtentStore::open(&disk, directory.path(), PARTITION).unwrap();
    check(&store);
    // A replica with the block is found after all.
    let (block, sums) = (pattern(7, 4_096), checksums_of(&pattern(7, 4_096)));
    store.repair_blocks(LARGE, 12_288, &block, Checksums::of_payload(&sums)).unwrap();
    assert_eq!(store.read(LARGE, 12_288, 4_096).unwrap().bytes, block);
}

/// What nobody has whole is not taken for right because the log is repeated over a part of it.
#[test]
fn a_block_that_is_known_to_be_damaged_is_never_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.create_extent(new_extent(LARGE)).unwrap();
    append(&store, &pattern(1, 4_096));
    store.append_lost(LARGE, 4_096, 4_096).unwrap();
    append(&store, &pattern(3, 4_096));
    store.distrust(LARGE, 2).unwrap();
    let part = pattern(9, 100);
    let sums = checksums_of(&part);
    let overwrite = |block: u64, how| {
        let at = block * 4_096 + 50;
        store.overwrite(LARGE, at, &part, Checksums::of_payload(&sums), how).unwrap()
    };
    for block in [1, 2] {
        assert_eq!(overwrite(block, Overwriting::New), [block]);
        assert_eq!(overwrite(block, Overwriting::Repeated), [block]);
        let accepted = store.doubtful_bytes(LARGE, block);
        assert!(matches!(accepted, Err(StoreError::Corrupt { .. })), "{accepted:?}");
        let read = store.read(LARGE, block * 4_096, 4_096);
        assert!(matches!(read, Err(StoreError::Corrupt { .. })), "{read:?}");
    }
    assert_eq!(store.read(LARGE, 0, 4_096).unwrap().bytes, pattern(1, 4_096));
    // The last block, whose checksum is in the header, after a restart.
    store.append_lost(LARGE, 12_288, 1_000).unwrap();
    store.flush_all().unwrap();
    drop(store);
    let disk = StoreDisk::new(Arc::new(DiskFiles), StoreLimits::default());
    let (store, _) = ExtentStore::open(&disk, directory.path(), PARTITION).unwrap();
    let whole = Checksums::of_payload(&sums);
    assert_eq!(store.overwrite(LARGE, 12_300, &part, whole, Overwriting::Repeated).unwrap(), [3]);
    let accepted = store.doubtful_bytes(LARGE, 3);
    assert!(matches!(accepted, Err(StoreError::Corrupt { .. })), "{accepted:?}");
}

#[test]
fn freeing_really_gives_blocks_back() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.create_extent(new_extent(LARGE)).unwrap();
    append(&store, &pattern(1, 1 << 20));
    store.flush_all().unwrap();
    assert!(store.unflushed().is_empty());
    let before = store.allocated_bytes();
    assert!(before >= 1 << 20, "{before}");
    store
        .free(
            &[Freed { extent: LARGE, offset: 4_096, length: 900_000 }],
            &mut HeaderBlocks::default(),
        )
        .unwrap();
    let after = store.allocated_bytes();
    assert!(before - after >= 890_000, "{before} to {after}");
    assert_eq!(store.read(LARGE, 0, 4_096).unwrap().bytes, pattern(1, 4_096));
    store
        .free(&[Freed { extent: LARGE, offset: 0, length: u64::MAX }], &mut HeaderBlocks::default())
        .unwrap();
    assert_eq!(store.allocated_bytes(), 0);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "label and freed log");
}

/// Found by the simulation (seed 4544): the blocks were given back, and counted as allocated for ever.
#[test]
fn what_a_seal_cuts_off_is_no_longer_counted() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.create_extent(new_extent(LARGE)).unwrap();
    let bytes = pattern(1, 1 << 20);
    store.append(LARGE, 0, &bytes, Checksums::of_payload(&checksums_of(&bytes))).unwrap();
    store.flush_all().unwrap();
    let before = store.allocated_bytes();
    store.seal(LARGE, 4_096).unwrap();
    let after = store.allocated_bytes();
    assert!(before - after >= 1_000_000, "{before} to {after}");
}

/// More extents than descriptors: files are closed and opened behind the scenes.
#[test]
fn descriptors_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let limits = StoreLimits { files_max: 4, chunks_max: 2 };
    let disk = StoreDisk::new(Arc::new(DiskFiles), limits);
    let (store, _) = ExtentStore::open(&disk, directory.path(), PARTITION).unwrap();
    let descriptors = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let ours = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        ours.filter(|target| target.starts_with(directory.path())).count()
    };
    for id in 1..=20 {
        store.create_extent(new_extent(ExtentId(id))).unwrap();
    }
    for round in 0..3u64 {
        for id in 1..=20 {
            let bytes = pattern(id + round, 1_000);
            let sums = checksums_of(&bytes);
            let sums = Checksums::of_payload(&sums);
            store.append(ExtentId(id), round * 1_000, &bytes, sums).unwrap();
            assert!(descriptors() <= 5, "four extents and the freed log");
        }
    }
    for id in 1..=20 {
        assert_eq!(store.read(ExtentId(id), 1_000, 1_000).unwrap().bytes, pattern(id + 1, 1_000));
    }
}
