//! Failing calls: full disks, EIO at every call, the fence.

use std::sync::Barrier;

use milpa_types::BLOCK_BYTES;

use super::super::memory_files::{Call, Fault};
use super::*;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Story: after a failed fsync Linux marks the pages clean; a second fsync succeeds although the
/// bytes are lost (fsyncgate). So there is no second one.
#[test]
fn after_a_failed_flush_nothing_is_written_or_flushed_again() {
    let world = World::with_extent();
    world.append(&pattern(1, 10_000)).unwrap();
    world.files.fail(Fault { call: Call::Sync, after: 0, errno: EIO });
    assert!(matches!(world.flush(), Err(StoreError::DiskFailed)));
    assert!(world.disk.is_fenced());
    let (syncs, writes) = (world.files.syncs(), world.files.writes());
    assert!(matches!(world.flush(), Err(StoreError::DiskFailed)));
    assert!(matches!(world.append(&[1]), Err(StoreError::DiskFailed)));
    assert!(matches!(world.overwrite(0, &[1]), Err(StoreError::DiskFailed)));
    assert!(matches!(world.store.seal(LARGE, 1), Err(StoreError::DiskFailed)));
    let freed = Freed { extent: LARGE, offset: 0, length: 10_000 };
    assert!(matches!(
        world.store.free(&[freed], &mut HeaderBlocks::default()),
        Err(StoreError::DiskFailed)
    ));
    let created = world.store.create_extent(new_extent(ExtentId(8)));
    assert!(matches!(created, Err(StoreError::DiskFailed)));
    assert_eq!(world.read(0, 10_000).unwrap(), pattern(1, 10_000), "verified bytes still serve");
    drop(world.store);
    assert_eq!((world.files.syncs(), world.files.writes()), (syncs, writes));
}

/// Fsyncgate, and then the process starts again: what the failed flush was for is still in the page cache, clean. Who
/// builds on it is told by the next flush that it is durable, and it never was. Found by a reader.
#[test]
fn what_a_failed_flush_left_in_memory_is_not_built_upon_by_the_next_life() {
    for seed in 1..20 {
        let world = World::with_extent();
        world.append(&pattern(1, 10_000)).unwrap();
        world.flush().unwrap();
        world.append(&pattern(2, 20_000)).unwrap();
        world.free(0, 4_096);
        world.files.fail(Fault { call: Call::Sync, after: 0, errno: EIO });
        assert!(matches!(world.flush(), Err(StoreError::DiskFailed)));

        let world = world.kill();
        world.append(&pattern(3, 5_000)).unwrap();
        world.flush().unwrap();
        let acknowledged = world.length(LARGE);
        let bytes = world.read(4_096, acknowledged as usize - 4_096).unwrap();

        let world = world.crash(seed);
        assert!(world.length(LARGE) >= acknowledged, "{} of {acknowledged}", world.length(LARGE));
        assert_eq!(world.read(4_096, bytes.len()).unwrap(), bytes);
    }
}

/// The process dies between a write and its flush, and the system cannot write it: the next life is told, once.
#[test]
fn what_an_earlier_life_left_and_cannot_be_written_fences_the_disk() {
    let world = World::with_extent();
    world.append(&pattern(1, 10_000)).unwrap();
    // The directory's goes well.
    world.files.fail(Fault { call: Call::Sync, after: 1, errno: EIO });
    assert!(world.kill().disk.is_fenced());
}

/// EIO at the n-th write or flush, for every n of a small life: the disk is fenced, no operation
/// reports success that a crash then takes back.
#[test]
fn an_error_at_any_call_fences_and_loses_nothing_that_was_flushed() {
    let mut reached = 0;
    for call in [Call::Write, Call::Sync] {
        for after in 0..60 {
            let world = World::with_extent();
            world.files.fail(Fault { call, after, errno: EIO });
            let mut flushed = 0;
            let outcome = live(&world, &mut flushed);
            reached += u32::from(outcome.is_err());
            assert_eq!(outcome.is_err(), world.disk.is_fenced(), "{call:?} {after}: {outcome:?}");
            for seed in 1..4 {
                let files = world.files.clone();
                files.cut_power(seed);
                let world = World::on(files);
                let held = world.length(LARGE);
                assert!(held >= flushed, "{call:?} {after}: {held} of {flushed}");
                if held == 0 {
                    // Never flushed, it may be gone as a whole.
                    continue;
                }
                let expected = pattern(1, 40_000);
                assert_eq!(world.read(0, held as usize).unwrap(), expected[..held as usize]);
            }
        }
    }
    assert!(reached > 20, "only {reached} of the faults were reached");
}

/// A short life; notes how much a flush has confirmed.
fn live(world: &World, flushed: &mut u64) -> Result<(), StoreError> {
    let bytes = pattern(1, 40_000);
    for piece in [0..100, 100..5_000, 5_000..12_288, 12_288..30_000] {
        world.append(&bytes[piece.clone()])?;
        world.flush()?;
        *flushed = piece.end as u64;
    }
    world.append(&bytes[30_000..])?;
    *flushed = 29_000;
    world.store.seal(LARGE, 29_000)?;
    world.store.create_extent(new_extent(ExtentId(8)))?;
    world.store.flush(&[(ExtentId(8), 0)])
}

#[test]
fn a_full_disk_leaves_the_extent_as_it_was() {
    for after in 0..2 {
        let world = World::with_extent();
        world.append(&pattern(1, 5_000)).unwrap();
        world.files.fail(Fault { call: Call::Write, after, errno: ENOSPC });
        assert!(matches!(world.append(&pattern(2, 9_000)), Err(StoreError::NoSpace)));
        assert!(!world.disk.is_fenced());
        assert_eq!(world.length(LARGE), 5_000);
        assert_eq!(world.read(0, 5_000).unwrap(), pattern(1, 5_000));
        world.append(&pattern(3, 100)).unwrap();
        world.flush().unwrap();
        let world = world.crash(after + 1);
        assert_eq!(world.length(LARGE), 5_100, "nothing of the failed append came back");
        assert_eq!(world.read(5_000, 100).unwrap(), pattern(3, 100));
    }
}

#[test]
fn deletes_and_restarts_work_on_a_full_disk() {
    let world = World::with_extent();
    world.append(&pattern(1, 100_000)).unwrap();
    world.flush().unwrap();
    world.files.set_capacity(Some(world.files.pages_used()));
    assert!(matches!(world.append(&pattern(1, 100_000)), Err(StoreError::NoSpace)));
    let world = world.crash(1);
    assert_eq!(world.read(0, 100_000).unwrap(), pattern(1, 100_000));
    let before = world.files.pages_used();
    world.free(0, 50_000);
    world.flush().unwrap();
    assert!(world.files.pages_used() < before - 10, "punched");
    world.free(0, u64::MAX);
    assert!(world.files.pages_used() < 10, "removed");
}

/// Found by a reader: one call had noted a range and was reading headers of others. A second one with the same
/// range found it noted, had nothing to log, and was answered; then power failed.
#[test]
fn a_range_that_another_call_is_freeing_is_not_freed_before_that_is_logged() {
    for extent in [LARGE, ExtentId(9)] {
        for seed in 0..4 {
            let world = World::with_extent();
            world.append(&pattern(1, 20_000)).unwrap();
            world.flush().unwrap();
            let small = ExtentId::small(1);
            let inode = InodeId(0);
            world.store.create_extent(NewExtent { inode, ..new_extent(small) }).unwrap();
            let bytes = pattern(2, 20_000);
            let sums = checksums_of(&bytes);
            world.store.append(small, 0, &bytes, Checksums::of_payload(&sums)).unwrap();

            let range = Freed { extent, offset: 4_096, length: 8_192 };
            let (store, files) = (Arc::clone(&world.store), world.files.clone());
            world.files.before_read(move || {
                store.free(&[range], &mut HeaderBlocks::default()).unwrap();
                files.cut_power(seed);
            });
            let slow = Freed { extent: small, offset: 10_000, length: 10_000 };
            assert!(
                world.store.free(&[range, slow], &mut HeaderBlocks::default()).is_err(),
                "it was under way"
            );
            assert_eq!(world.kill().store.freed(&[extent], 9), [range], "{seed}");
        }
    }
}

/// Found by a reader: what the log could not take for lack of a descriptor was forgotten. The same range, freed
/// again, was known and not logged, and a crash brought it back.
#[test]
fn what_the_log_could_not_take_is_logged_when_it_is_freed_again() {
    let world = World::new();
    let range = |extent| Freed { extent: ExtentId(extent), offset: 0, length: 100 };
    let full: Vec<Freed> = (1..=512).map(range).collect();
    world.store.free(&full, &mut HeaderBlocks::default()).unwrap();
    world.files.fail(Fault { call: Call::Write, after: 0, errno: libc::EMFILE });
    let failed = world.store.free(&[range(600)], &mut HeaderBlocks::default());
    assert!(matches!(failed, Err(StoreError::Busy)), "{failed:?}");
    world.store.free(&[range(600)], &mut HeaderBlocks::default()).unwrap();
    let world = world.crash(3);
    assert_eq!(world.store.freed(&[ExtentId(600)], 9), [range(600)]);
}

#[test]
fn an_unreadable_block_is_an_error_of_the_read_alone() {
    let world = World::with_extent();
    world.append(&pattern(1, 10_000)).unwrap();
    world.read(0, 1).unwrap();
    world.files.fail(Fault { call: Call::Read, after: 0, errno: EIO });
    assert!(matches!(world.read(4_096, 1), Err(StoreError::ReadFailed { .. })));
    assert!(!world.disk.is_fenced());
    assert_eq!(world.read(4_096, 1).unwrap(), pattern(1, 10_000)[4_096..4_097]);
}

/// Found by a reader: one failed read as a partition was opened, or too many open files, and the extent counted
/// as one without a header, whose file is removed when another replica sends it anew.
#[test]
fn an_extent_that_could_not_be_read_at_once_is_not_taken_for_destroyed() {
    let mut world = World::with_extent();
    world.append(&pattern(1, 300_000)).unwrap();
    world.flush().unwrap();
    world.append(&pattern(2, 100)).unwrap();
    for after in 0..8 {
        world.files.fail(Fault { call: Call::Read, after, errno: EIO });
        world.disk.fence("kill", &std::io::Error::other("test"));
        let disk = StoreDisk::new(Arc::new(world.files.clone()), StoreLimits::default());
        if let Ok((_, report)) = ExtentStore::open(&disk, directory(), PARTITION) {
            assert_eq!(report.unreadable, [], "{after}");
            assert!(report.extents[0].length >= 300_000, "{after}");
        }
        world.files.fail_no_more();
    }
    // Again and again, as of one place: of the header there is another copy, and what is not known of blocks is found.
    // (Seed 163569: the power went while the second copy was written for the first time.)
    for after in 0..8 {
        (0..4).for_each(|_| world.files.fail(Fault { call: Call::Read, after, errno: EIO }));
        let disk = StoreDisk::new(Arc::new(world.files.clone()), StoreLimits::default());
        if let Ok((_, report)) = ExtentStore::open(&disk, directory(), PARTITION) {
            assert_eq!(report.unreadable, [], "{after}");
            assert!(report.extents[0].length >= 300_000, "{after}");
        }
        world.files.fail_no_more();
    }
    // For longer, and it is said that the whole cannot be opened now.
    for first in 0..8 {
        for after in first..first + 8 {
            world.files.fail(Fault { call: Call::Read, after, errno: libc::ENOMEM });
        }
        let disk = StoreDisk::new(Arc::new(world.files.clone()), StoreLimits::default());
        let opened = ExtentStore::open(&disk, directory(), PARTITION);
        assert!(opened.is_err(), "{first}");
        world.files.fail_no_more();
    }
    world = world.kill();
    assert_eq!(world.read(0, 300_000).unwrap(), pattern(1, 300_000));
    assert_eq!(world.length(LARGE), 300_100);
}

/// Found by a reader: such a cut was ended as one that seals, at a length that nobody had decided. What was left
/// was dead, so the whole extent was, on all replicas.
#[test]
fn a_cut_for_repair_that_a_crash_interrupts_seals_and_removes_nothing() {
    for (call, after) in [(Call::Sync, 0), (Call::Sync, 1), (Call::Sync, 2), (Call::Write, 1)] {
        for seed in 0..16 {
            let world = World::with_extent();
            world.append(&pattern(1, 18_000)).unwrap();
            world.flush().unwrap();
            world.free(0, 8_192);
            world.files.fail(Fault { call, after, errno: EIO });
            let cut = world.store.cut_for_repair(LARGE, 2);
            assert!(cut.is_err() || call == Call::Write, "{call:?} {after}");
            let world = world.crash(seed);
            let state = world.store.states(&[LARGE])[0];
            assert!(!state.sealed, "{call:?} {after} {seed}");
            assert!([8_192, 18_000].contains(&state.length), "{}", state.length);
            let more = pattern(1, 18_000)[state.length as usize..].to_vec();
            if !more.is_empty() {
                world.append(&more).unwrap();
            }
            let world = world.kill();
            assert_eq!(world.read(8_192, 9_808).unwrap(), pattern(1, 18_000)[8_192..]);
        }
    }
}

/// Found by a reader: an overwrite was counted before it was written. A flush between the two took it for
/// flushed, and the next one, after which the log is trimmed, did nothing.
#[test]
fn a_flush_beside_an_overwrite_does_not_count_what_it_has_not_seen() {
    for seed in 0..16 {
        let world = World::with_extent();
        world.append(&pattern(1, 10_000)).unwrap();
        world.overwrite(0, &[1]).unwrap();
        world.flush().unwrap();
        let store = Arc::clone(&world.store);
        world.files.before_write(move || store.flush(&[(LARGE, 10_000)]).unwrap());
        world.overwrite(4_096, &[7; 4_096]).unwrap();
        world.flush().unwrap();
        let world = world.crash(seed);
        assert_eq!(world.read(4_096, 4_096).unwrap(), [7; 4_096], "{seed}");
    }
}

/// The block that is named is the one that is repaired: no healthy one, and not for ever.
#[test]
fn an_unreadable_block_in_a_long_read_is_named() {
    let world = World::with_extent();
    world.append(&pattern(1, 40_000)).unwrap();
    world.read(0, 1).unwrap();
    for block in [0, 3, 9] {
        // The read of all, then that of this block alone.
        world.files.fail(Fault { call: Call::Read, after: 0, errno: EIO });
        world.files.fail(Fault { call: Call::Read, after: block, errno: EIO });
        let read = world.read(0, 40_000);
        assert!(
            matches!(read, Err(StoreError::ReadFailed { block: b, .. }) if b == block),
            "{read:?}"
        );
    }
    assert_eq!(world.read(0, 40_000).unwrap(), pattern(1, 40_000));
}

/// Found by the simulation (seed 37737): a crash came between the word that a block is freed and its hole, and the disk
/// could not read it. It was found damaged, and repaired, again and again, though nobody needed it.
#[test]
fn a_freed_block_need_not_be_readable() {
    let world = World::with_extent();
    let bytes = pattern(1, 8_192);
    world.append(&bytes).unwrap();
    world.flush().unwrap();
    let second = Freed { extent: LARGE, offset: 4_096, length: 4_096 };
    world.store.free(&[second], &mut HeaderBlocks::default()).unwrap();
    let fail_second = || {
        // The read of both, then that of the second alone.
        world.files.fail(Fault { call: Call::Read, after: 0, errno: EIO });
        world.files.fail(Fault { call: Call::Read, after: 1, errno: EIO });
    };
    world.read(0, 1).unwrap();
    fail_second();
    assert_eq!(world.read(0, 8_192).unwrap(), [&bytes[..4_096], &[0; 4_096]].concat());
    world.files.fail_no_more();
    fail_second();
    assert!(world.store.verify(LARGE, 0, 2).unwrap().damaged.is_empty());
}

/// A sector that cannot be read is given up only when it is known that nobody has what it held; then it is
/// written, and can be read again.
#[test]
fn a_block_that_cannot_be_read_is_lost_when_it_is_given_up() {
    let world = World::with_extent();
    let bytes = pattern(1, 18_000);
    world.append(&bytes).unwrap();
    world.flush().unwrap();
    assert_eq!(world.store.lose_unreadable(LARGE, 4_000, 10_000).unwrap(), [0u64; 0]);
    assert_eq!(world.read(0, 18_000).unwrap(), bytes);
    for (at, lost) in [(4_000, vec![0, 1]), (16_500, vec![4])] {
        world.files.fail(Fault { call: Call::Read, after: 0, errno: EIO });
        assert_eq!(world.store.lose_unreadable(LARGE, at, 500).unwrap(), lost);
    }
    world.files.fail(Fault { call: Call::Read, after: 0, errno: EIO });
    world.store.distrust(LARGE, 2).unwrap();
    world.flush().unwrap();
    let world = world.crash(7);
    assert_eq!(world.length(LARGE), 18_000);
    for block in [0, 1, 2, 4] {
        let read = world.read(block * BLOCK_BYTES, 1);
        assert!(matches!(read, Err(StoreError::Corrupt { block: found }) if found == block));
    }
    assert_eq!(world.read(12_288, 4_096).unwrap(), bytes[12_288..16_384]);
}

/// Found by a reader: the disk has to read a block of which only a part is written. So the repair of an extent's last
/// block, which is seldom full, failed like a write, and the whole disk was taken out of service.
#[test]
fn an_unreadable_end_costs_no_more_than_itself() {
    let world = World::with_extent();
    let bytes = pattern(1, 9_000);
    world.append(&bytes).unwrap();
    world.flush().unwrap();
    world.files.make_unreadable(&world.path(), 2).unwrap();
    let world = world.kill();
    assert_eq!(world.length(LARGE), 9_000);

    let appended = world.append(&pattern(2, 100));
    assert!(matches!(appended, Err(StoreError::ReadFailed { block: 2, .. })), "{appended:?}");
    assert!(world.store.reopen_for_repair(LARGE).is_ok());
    world.store.seal(LARGE, 9_000).unwrap();
    world.store.reopen_for_repair(LARGE).unwrap();
    world.store.seal(LARGE, 9_000).unwrap();
    assert!(matches!(world.read(8_192, 1), Err(StoreError::ReadFailed { block: 2, .. })));

    let sums = checksums_of(&bytes[4_096..]);
    let sums = Checksums::of_payload(&sums);
    world.store.repair_blocks(LARGE, 4_096, &bytes[4_096..], sums).unwrap();
    assert_eq!(world.read(0, 9_000).unwrap(), bytes);
    assert!(!world.disk.is_fenced());
}

/// Threads that flush one extent at once share flushes, and all their bytes are there.
#[test]
fn concurrent_flushes_share() {
    let world = World::with_extent();
    let (threads, barrier) = (8, Barrier::new(8));
    let before = world.files.syncs();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (world, barrier) = (&world, &barrier);
            scope.spawn(move || {
                let bytes = pattern(thread, 1_000);
                let sums = checksums_of(&bytes);
                // Whoever is out of order tries at the end that it is told.
                let mut offset = 0;
                while let Err(StoreError::OutOfOrder { expected }) =
                    world.store.append(LARGE, offset, &bytes, Checksums::of_payload(&sums))
                {
                    offset = expected;
                }
                barrier.wait();
                world.flush().unwrap();
                assert!(world.store.details(&[LARGE])[0].flushed >= offset + 1_000);
            });
        }
    });
    let syncs = world.files.syncs() - before;
    assert!((2..=threads + 1).contains(&syncs), "{syncs} syncs");
    let world = world.crash(3);
    assert_eq!(world.length(LARGE), threads * 1_000);
    world.read(0, threads as usize * 1_000).unwrap();
}

/// Readers, appenders, overwrites and frees of several extents at once, with caches of one entry:
/// nobody sees a byte that was not written there.
#[test]
fn parallel_users_do_not_disturb_each_other() {
    let world = World::new();
    let ids: Vec<_> = (1..=3).map(ExtentId).collect();
    for id in &ids {
        world.store.create_extent(new_extent(*id)).unwrap();
    }
    std::thread::scope(|scope| {
        for id in &ids {
            let store = &world.store;
            scope.spawn(move || {
                let bytes = pattern(id.0, 150_000);
                let mut offset = 0;
                for (index, part) in bytes.chunks(1_777).enumerate() {
                    let sums = checksums_of(part);
                    let sums = Checksums::of_payload(&sums);
                    store.append(*id, offset, part, sums).unwrap();
                    if index % 9 == 0 {
                        store.overwrite(*id, offset, part, sums, Overwriting::New).unwrap();
                        store.flush(&[(*id, offset)]).unwrap();
                    }
                    offset += part.len() as u64;
                }
            });
            scope.spawn(move || {
                let bytes = pattern(id.0, 150_000);
                let mut held = 0;
                while held < 150_000 {
                    held = store.states(&[*id])[0].length as usize;
                    let start = held.saturating_sub(10_000);
                    let read = store.read(*id, start as u64, (held - start) as u32).unwrap();
                    assert_eq!(read.bytes, bytes[start..held]);
                }
            });
        }
    });
}
