//! What each operation does and refuses, without faults.

use milpa_types::{BLOCK_BYTES, DataError, EXTENT_BYTES_MAX};

use super::super::files::StoreFiles;
use super::super::freed_log::Record;
use super::super::memory_files::{Call, Fault};
use super::super::recover;
use super::*;

#[test]
fn appended_bytes_read_back_at_every_alignment() {
    let world = World::with_extent();
    let mut expected = Vec::new();
    for (seed, length) in [1, 99, 4096, 4095, 1, 8192, 131_072, 5000, 3].into_iter().enumerate() {
        let bytes = pattern(seed as u64, length);
        expected.extend_from_slice(&bytes);
        assert_eq!(world.append(&bytes).unwrap(), expected.len() as u64);
    }
    for (offset, length) in [(0, 1), (4095, 2), (100, 8192), (0, expected.len()), (7, 140_000)] {
        let read = world.read(offset, length).unwrap();
        assert_eq!(
            read,
            expected[offset as usize..offset as usize + length],
            "{length} at {offset}"
        );
    }
    let end = expected.len() as u64;
    assert!(matches!(world.read(end, 1), Err(StoreError::Shorter { length }) if length == end));
    assert!(matches!(world.read(u64::MAX, 1), Err(StoreError::Shorter { .. })));
}

#[test]
fn an_append_goes_to_the_end_or_nowhere() {
    let world = World::with_extent();
    let bytes = pattern(1, 5000);
    let sums = checksums_of(&bytes);
    let append = |offset, bytes: &[u8]| {
        world.store.append(LARGE, offset, bytes, Checksums::of_payload(&sums))
    };
    assert_eq!(append(0, &bytes).unwrap(), 5000);
    for offset in [0, 4999, 5001] {
        assert!(matches!(append(offset, &bytes), Err(StoreError::OutOfOrder { expected: 5000 })));
    }
    let mut damaged = bytes.clone();
    damaged[4500] ^= 1;
    assert!(matches!(append(5000, &damaged), Err(StoreError::DamagedInTransit)));
    assert!(matches!(append(5000, &[]), Err(StoreError::Invalid(_))));
    let nowhere = world.store.append(ExtentId(8), 0, &bytes, Checksums::of_payload(&sums));
    assert!(matches!(nowhere, Err(StoreError::NoExtent)));
    assert_eq!(world.length(LARGE), 5000);
}

#[test]
fn an_extent_ends_at_its_capacity() {
    let world = World::with_extent();
    let hole = EXTENT_BYTES_MAX - 4096;
    world.store.append_hole(LARGE, 0, hole).unwrap();
    assert!(
        matches!(world.append(&pattern(1, 4097)), Err(StoreError::Full { length }) if length == hole)
    );
    let bytes = pattern(2, 4096);
    assert_eq!(world.append(&bytes).unwrap(), EXTENT_BYTES_MAX);
    assert_eq!(world.read(hole, 4096).unwrap(), bytes);
    assert!(matches!(world.append(&[1]), Err(StoreError::Full { .. })));
    world.flush().unwrap();
    let world = world.crash(1);
    assert_eq!(world.length(LARGE), EXTENT_BYTES_MAX);
    assert_eq!(world.read(hole, 4096).unwrap(), bytes);
}

#[test]
fn an_overwrite_replaces_bytes_and_nothing_else() {
    let world = World::with_extent();
    let mut expected = pattern(1, 20_000);
    world.append(&expected).unwrap();
    for (offset, length) in [(0, 10), (4096, 4096), (4000, 200), (19_000, 1000), (5, 12_345)] {
        let bytes = pattern(offset as u64 + 9, length);
        world.overwrite(offset as u64, &bytes).unwrap();
        expected[offset..offset + length].copy_from_slice(&bytes);
        assert_eq!(world.read(0, 20_000).unwrap(), expected);
    }
    assert!(world.store.states(&[LARGE])[0].overwritten);
    assert!(matches!(
        world.overwrite(19_999, &[1, 2]),
        Err(StoreError::Shorter { length: 20_000 })
    ));
    // The partial block went on in memory as on disk.
    world.append(&pattern(3, 100)).unwrap();
    assert_eq!(world.read(0, 20_000).unwrap(), expected);
    assert_eq!(world.read(20_000, 100).unwrap(), pattern(3, 100));
}

/// Other reads of an overwritten extent must go to the leader, so the mark must not be lost.
#[test]
fn the_overwritten_mark_is_durable_before_the_first_byte_changes() {
    for seed in 1..40 {
        let world = World::with_extent();
        world.append(&pattern(1, 9000)).unwrap();
        world.overwrite(100, &pattern(2, 50)).unwrap();
        let world = world.crash(seed);
        assert!(world.store.states(&[LARGE])[0].overwritten, "seed {seed}");
        assert_eq!(world.length(LARGE), 9000);
    }
}

#[test]
fn a_seal_cuts_or_refuses() {
    let world = World::with_extent();
    let bytes = pattern(1, 10_000);
    world.append(&bytes).unwrap();
    assert!(matches!(world.store.seal(LARGE, 10_001), Err(StoreError::Shorter { length: 10_000 })));
    world.store.seal(LARGE, 10_000).unwrap();
    assert!(matches!(world.append(&[1]), Err(StoreError::Sealed { length: 10_000 })));
    for length in [9_000, 8_192, 8_191, 1, 0] {
        world.store.seal(LARGE, length).unwrap();
        assert_eq!(world.length(LARGE), length);
        assert_eq!(world.read(0, length as usize).unwrap(), bytes[..length as usize]);
        assert!(world.read(0, length as usize + 1).is_err());
    }
}

#[test]
fn a_cut_is_durable_on_return() {
    for seed in 1..40 {
        let world = World::with_extent();
        let bytes = pattern(1, 10_000);
        world.append(&bytes).unwrap();
        world.store.seal(LARGE, 5_000).unwrap();
        let world = world.crash(seed);
        let state = world.store.states(&[LARGE])[0];
        assert_eq!((state.length, state.sealed), (5_000, true), "seed {seed}");
        assert_eq!(world.read(0, 5_000).unwrap(), bytes[..5_000]);
    }
}

#[test]
fn a_short_replica_is_filled_from_its_peer_without_the_holes() {
    let peer = World::with_extent();
    peer.append(&pattern(1, 100_000)).unwrap();
    peer.free(8_192, 40_960);
    peer.store.seal(LARGE, 100_000).unwrap();

    let replica = World::with_extent();
    replica.append(&pattern(1, 5_000)).unwrap();
    replica.store.seal(LARGE, 5_000).unwrap();
    replica.store.reopen_for_repair(LARGE).unwrap();
    let mut steps = 0;
    while replica.length(LARGE) < 100_000 {
        let at = replica.length(LARGE);
        let repair = peer.store.read_for_repair(LARGE, at, 30_000).unwrap();
        if repair.hole > 0 {
            replica.store.append_hole(LARGE, at, repair.hole).unwrap();
        }
        let (at, stored) = (at + repair.hole, repair.stored);
        if !stored.bytes.is_empty() {
            let sums = Checksums::of_blocks(&stored.checksums, at);
            replica.store.append(LARGE, at, &stored.bytes, sums).unwrap();
        }
        steps += 1;
        assert!(steps < 20, "repair makes no progress");
    }
    replica.store.seal(LARGE, 100_000).unwrap();
    assert_eq!(replica.read(0, 100_000).unwrap(), peer.read(0, 100_000).unwrap());
    let digest = |world: &World| world.store.digest(LARGE, Some(100_000)).unwrap();
    assert_eq!(digest(&replica), digest(&peer));
}

/// As zeros it would be taken for bytes, by who has not freed it yet.
#[test]
fn parts_of_freed_blocks_travel_as_holes() {
    let world = World::with_extent();
    world.append(&pattern(1, 10_000)).unwrap();
    let hole = |at, length| {
        let found = world.store.read_for_repair(LARGE, at, length).unwrap();
        (found.hole, found.stored.bytes.len())
    };
    world.free(4_096, 5_904);
    assert_eq!(hole(4_096, 5_904), (4_096, 1_808), "it may go on");
    world.store.seal(LARGE, 10_000).unwrap();
    assert_eq!(hole(4_096, 5_904), (5_904, 0));
    assert_eq!(hole(8_192, 10_000), (1_808, 0));
    assert_eq!(hole(0, 10_000), (0, 4_096));
    assert_eq!(hole(8_192, 1_000), (1_000, 0));
    assert_eq!(hole(5_000, 1_000), (1_000, 0));
    assert_eq!(hole(4_000, 1_000), (0, 96));
}

/// Found by a reader: as zeros they were bytes until the word came that they are freed, and for good if that came from
/// another replica.
#[test]
fn parts_of_freed_blocks_are_freed_where_they_are_filled() {
    for (held, length) in [(5_000, 10_000), (5_000, 6_000), (4_096, 5_096), (5_000, 16_384)] {
        let replica = World::with_extent();
        replica.append(&pattern(1, held)).unwrap();
        replica.store.append_hole(LARGE, held as u64, (length - held) as u64).unwrap();
        replica.store.seal(LARGE, length as u64).unwrap();
        assert_eq!(replica.read(0, held).unwrap(), pattern(1, held));
        for at in [held, length - 1] {
            assert!(replica.store.is_partly_freed(LARGE, at as u64, at as u64 + 1), "{at}");
        }
    }
}

#[test]
fn digests_tell_replicas_apart() {
    let digest = |world: &World, length| world.store.digest(LARGE, Some(length)).unwrap();
    let (one, other) = (World::with_extent(), World::with_extent());
    one.append(&pattern(1, 9_000)).unwrap();
    other.append(&pattern(1, 4_000)).unwrap();
    other.append(&pattern(1, 9_000)[4_000..]).unwrap();
    other.append(b"not committed").unwrap();
    assert_eq!(digest(&one, 9_000), digest(&other, 9_000));
    assert_eq!(one.store.digest(LARGE, None).unwrap().length, 0, "nothing is committed");
    one.overwrite(8_999, &[0]).unwrap();
    assert_ne!(digest(&one, 9_000), digest(&other, 9_000));
    assert_eq!(digest(&one, 8_999), digest(&other, 8_999));
}

#[test]
fn freed_blocks_read_as_zeros_and_their_neighbours_as_before() {
    let world = World::with_extent();
    let bytes = pattern(1, 40_960);
    world.append(&bytes).unwrap();
    world.free(4_000, 5_000);
    // Block 1 is dead as a whole; of blocks 0 and 2 only a part.
    let read = world.read(0, 40_960).unwrap();
    assert_eq!(read[..4_096], bytes[..4_096]);
    assert_eq!(read[4_096..8_192], [0; 4_096]);
    assert_eq!(read[8_192..], bytes[8_192..]);
    // The rest of block 2 dies: it is freed although neither range covers it.
    world.free(9_000, 3_288);
    assert_eq!(world.read(8_192, 4_096).unwrap(), [0; 4_096]);
    assert_eq!(world.read(12_288, 4_096).unwrap(), bytes[12_288..16_384]);
    world.free(9_000, 3_288);
    world.flush().unwrap();
    let world = world.crash(3);
    assert_eq!(world.read(4_096, 8_192).unwrap(), [0; 8_192], "frees are durable");
    assert_eq!(world.store.verify(LARGE, 0, 100).unwrap().damaged, [0u64; 0]);
}

/// Freed blocks were read, as zeros, and counted: an extent that was 5 % alive took as long as a whole one.
#[test]
fn freed_blocks_are_not_verified_nor_counted() {
    let world = World::with_extent();
    world.append(&pattern(1, 100 * 4_096 + 500)).unwrap();
    world.free(8 * 4_096, 72 * 4_096);
    let verify = |from, blocks_max| {
        let found = world.store.verify(LARGE, from, blocks_max).unwrap();
        assert_eq!(found.damaged, [0u64; 0]);
        (found.blocks, found.next)
    };
    assert_eq!(verify(0, u64::MAX), (29, None));
    assert_eq!(verify(0, 10), (10, Some(82)));
    assert_eq!(verify(0, 8), (8, Some(80)), "where the next one that is not freed is");
    assert_eq!(verify(40, 21), (21, None));
    world.free(80 * 4_096, 20 * 4_096 + 500);
    assert_eq!(verify(40, 1), (1, None), "more may follow in the last block");
    world.store.seal(LARGE, 100 * 4_096 + 500).unwrap();
    assert_eq!(verify(0, 8), (8, None));
    assert_eq!(verify(8, 1), (0, None));
}

#[test]
fn the_last_block_is_freed_only_when_nothing_can_follow_in_it() {
    let world = World::with_extent();
    world.append(&pattern(1, 5_000)).unwrap();
    world.free(4_096, 904);
    let more = pattern(2, 100);
    world.append(&more).unwrap();
    assert_eq!(world.read(5_000, 100).unwrap(), more);
    world.free(5_000, 100);
    world.store.seal(LARGE, 5_100).unwrap();
    assert_eq!(world.read(4_096, 1_004).unwrap(), [0; 1_004]);
    assert_eq!(world.read(0, 4_096).unwrap(), pattern(1, 4_096));
}

#[test]
fn a_dead_extent_is_removed_and_never_comes_back() {
    for whole in [true, false] {
        let world = World::with_extent();
        world.append(&pattern(1, 10_000)).unwrap();
        world.flush().unwrap();
        if whole {
            world.free(0, u64::MAX);
        } else {
            world.free(0, 6_000);
            world.store.seal(LARGE, 10_000).unwrap();
            world.free(5_000, 5_000);
        }
        let check = |world: &World| {
            assert!(matches!(world.read(0, 1), Err(StoreError::Removed)), "whole: {whole}");
            let again = world.store.create_extent(new_extent(LARGE));
            assert!(matches!(again, Err(StoreError::Removed)));
            assert_eq!(world.store.highest_id(false), Some(LARGE));
            assert_eq!(world.store.highest_id(true), None);
            world.free(0, u64::MAX);
        };
        check(&world);
        let world = world.crash(5);
        check(&world);
        assert_eq!(world.store.extent_count(), 0);
    }
}

/// Story: a range was freed on the members of the day while one of them did not have the bytes yet,
/// or not the extent. It confirmed, was filled from a peer that had not freed them yet, and kept
/// them: the replicas differed, and the space never came back.
#[test]
fn what_was_freed_before_it_arrived_is_dead_when_it_arrives() {
    for has_some in [false, true] {
        for restarts in [false, true] {
            let mut world = World::new();
            if has_some {
                world.store.create_extent(new_extent(LARGE)).unwrap();
                world.append(&pattern(1, 1_000)).unwrap();
                world.flush().unwrap();
            }
            world.free(4_096, 8_192);
            if restarts {
                world = world.crash(7);
            }
            let _exists = world.store.create_extent(new_extent(LARGE));
            let bytes = pattern(1, 20_000);
            let held = world.length(LARGE) as usize;
            world.append(&bytes[held..]).unwrap();
            world.store.seal(LARGE, 20_000).unwrap();
            assert_eq!(world.read(4_096, 8_192).unwrap(), [0; 8_192]);
            assert_eq!(world.read(0, 4_096).unwrap(), bytes[..4_096]);
            assert_eq!(world.read(12_288, 7_712).unwrap(), bytes[12_288..]);
            world.flush().unwrap();
            let world = world.crash(8);
            assert_eq!(world.read(4_096, 8_192).unwrap(), [0; 8_192], "durable");
            world.free(0, 4_096);
            world.free(12_288, 7_712);
            assert!(matches!(world.read(0, 1), Err(StoreError::Removed)), "nothing lives in it");
        }
    }
}

/// Story: a replica lost the unflushed end of a sealed extent in a power failure. All that it had
/// left was dead, so it took the whole extent for dead, and told its peers to remove it: live
/// bytes that they still had.
#[test]
fn a_replica_that_lost_live_bytes_does_not_take_the_extent_for_dead() {
    let mut shortened = 0;
    for seed in 0..40 {
        let world = World::with_extent();
        world.append(&pattern(1, 8_192)).unwrap();
        world.flush().unwrap();
        world.append(&pattern(2, 8_192)).unwrap();
        world.store.seal(LARGE, 16_384).unwrap();
        let world = world.crash(seed);
        world.free(0, 8_192);
        shortened += usize::from(world.length(LARGE) < 16_384);
        assert_eq!(world.store.freed(&[LARGE], 9).first().map(|freed| freed.length), Some(8_192));
        assert!(!world.store.is_removed(LARGE), "seed {seed}");
    }
    assert!(shortened > 0, "no crash took anything");
}

/// Story: an extent was dead in all its bytes when it was sealed, and the process died between the
/// seal and what follows from it. Nobody ever removed it here.
#[test]
fn a_dead_extent_whose_removal_was_cut_short_is_removed_at_the_next_start() {
    let world = World::with_extent();
    world.append(&pattern(1, 8_192)).unwrap();
    world.free(0, 8_192);
    world.flush().unwrap();
    // The header of the seal is written; then the disk fails at the log of freed ranges.
    world.files.fail(Fault { call: Call::Sync, after: 0, errno: 5 });
    let _failed = world.store.seal(LARGE, 8_192);
    world.files.fail_no_more();
    let world = world.kill();
    assert!(matches!(world.read(0, 1), Err(StoreError::Removed)));
    assert!(world.report.extents.is_empty());
}

/// Story: two replicas agreed on what is live and on what is freed, but one had punched a block
/// while its seal was shorter, and `milpa partition compare` called them different for ever.
#[test]
fn freed_bytes_count_as_zeros_in_a_digest_given_back_or_not() {
    let long = World::with_extent();
    long.append(&pattern(1, 9_000)).unwrap();
    long.store.seal(LARGE, 9_000).unwrap();
    long.free(4_096, 2_000);
    let short = World::with_extent();
    short.append(&pattern(1, 6_096)).unwrap();
    short.store.seal(LARGE, 6_096).unwrap();
    short.free(4_096, 2_000);
    assert_eq!(short.read(4_096, 2_000).unwrap(), [0; 2_000]);
    short.store.reopen_for_repair(LARGE).unwrap();
    short.append(&pattern(1, 9_000)[6_096..]).unwrap();
    short.store.seal(LARGE, 9_000).unwrap();
    let digest = |world: &World| world.store.digest(LARGE, Some(9_000)).unwrap();
    assert_eq!(digest(&short), digest(&long));
    let other = World::with_extent();
    other.append(&pattern(1, 9_000)).unwrap();
    assert_ne!(
        digest(&other),
        digest(&long),
        "what one has freed and the other not is a difference"
    );
}

#[test]
fn the_freed_log_is_compacted_when_full() {
    let world = World::with_extent();
    let blocks = 3_000u64;
    world.append(&vec![7; 1 << 20]).unwrap();
    world.store.append_hole(LARGE, 1 << 20, blocks * BLOCK_BYTES).unwrap();
    for round in 0..3 {
        for index in 0..250 {
            world.free(index * 4_096 + round * 700, 650);
        }
    }
    for id in 100..400 {
        let freed = Freed { extent: ExtentId(id), offset: 0, length: u64::MAX };
        world.store.free(&[freed], &mut HeaderBlocks::default()).unwrap();
    }
    world.flush().unwrap();
    let dead = world.store.extent(LARGE).unwrap().state().dead.clone();
    let world = world.crash(9);
    assert_eq!(world.store.extent(LARGE).unwrap().state().dead, dead);
    assert_eq!(world.report.damaged_records, 0);
    assert_eq!(world.store.highest_id(false), Some(ExtentId(399)));
    assert!(matches!(
        world.store.create_extent(new_extent(ExtentId(250))),
        Err(StoreError::Removed)
    ));
}

/// Found by a reader: what was dead of an extent before it was removed was read again at each start as dead bytes
/// of one that is not here yet, and was written to each compacted log, without end.
#[test]
fn what_was_dead_of_a_removed_extent_is_forgotten() {
    let world = World::new();
    let free = |world: &World, extent, length| {
        let range = Freed { extent: ExtentId(extent), offset: 0, length };
        world.store.free(&[range], &mut HeaderBlocks::default()).unwrap();
    };
    let dead = |world: &World| {
        let file = world.files.open(&directory().join("freed")).unwrap();
        let mut bytes = vec![0; file.length().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        let records = (0..).zip(bytes.as_chunks().0);
        let records = records.filter_map(|(n, record)| Record::decode(record, PARTITION, n));
        records.filter(|record| matches!(record, Record::Dead { .. })).count()
    };
    for extent in 0..100 {
        free(&world, extent, 4_096);
        free(&world, extent, u64::MAX);
    }
    free(&world, 900, 4_096);
    let world = world.kill();
    assert_eq!(dead(&world), 101);
    for extent in 100..600 {
        free(&world, extent, u64::MAX);
    }
    assert_eq!(dead(&world), 1, "of the one that may come");
    let world = world.kill();
    assert_eq!(world.store.freed(&[ExtentId(900)], 9).len(), 1);
    assert!(world.store.is_removed(ExtentId(50)));
}

#[test]
fn a_directory_of_another_partition_is_refused() {
    let world = World::with_extent();
    let other = ExtentStore::open(&world.disk, directory(), PartitionId(43));
    let found = other.err().unwrap();
    assert!(matches!(found, OpenError::WrongPartition { found: PARTITION, .. }), "{found}");
}

/// Found by the simulation (seeds 9 and 32 with rot): one bit of a label took a whole replica away, and
/// no other one could be made in its place.
#[test]
fn a_damaged_label_is_written_anew() {
    let world = World::with_extent();
    let label = directory().join("label");
    for byte in 0..20 {
        world.files.flip_bit(&label, byte, 3).unwrap();
        let (store, report) = ExtentStore::open(&world.disk, directory(), PARTITION).unwrap();
        assert!(report.unreadable.is_empty() && store.present(LARGE).is_some(), "byte {byte}");
    }
    let other = ExtentStore::open(&world.disk, directory(), PartitionId(43));
    assert!(matches!(other, Err(OpenError::WrongPartition { .. })), "it is in order again");
}

#[test]
fn a_label_of_another_version_is_refused() {
    let world = World::with_extent();
    let mut label = recover::encode_label(PARTITION);
    label[7] = b'3';
    let crc = milpa_wire::frame::crc32c(&label[..16]);
    label[16..20].copy_from_slice(&crc.to_le_bytes());
    let file = world.files.open(&directory().join("label")).unwrap();
    file.write_at(&label, 0).unwrap();
    let found = ExtentStore::open(&world.disk, directory(), PARTITION).err().unwrap();
    assert!(matches!(found, OpenError::BadLabel { .. }), "{found}");
}

#[test]
fn commit_offsets_rise_and_are_written_with_a_flush() {
    let world = World::with_extent();
    world.append(&pattern(1, 10_000)).unwrap();
    world.store.set_commit(LARGE, 9_000).unwrap();
    world.store.set_commit(LARGE, 8_000).unwrap();
    world.flush().unwrap();
    let world = world.crash(1);
    assert_eq!(world.report.extents[0].committed, 9_000);
    world.store.set_commit(LARGE, 1 << 40).unwrap();
    assert_eq!(world.store.states(&[])[0].committed, 10_000, "never beyond the length");
}

/// One fdatasync for the file, one fsync for its new name; nothing for an extent without changes.
#[test]
fn a_flush_costs_what_it_must() {
    let world = World::with_extent();
    let cost = |world: &World| {
        let before = world.files.syncs();
        world.flush().unwrap();
        world.files.syncs() - before
    };
    world.append(&pattern(1, 10)).unwrap();
    assert_eq!(cost(&world), 2, "file and directory");
    assert_eq!(cost(&world), 0, "nothing new");
    world.append(&pattern(1, 10)).unwrap();
    assert_eq!(cost(&world), 1, "file");
    let writes = world.files.writes();
    world.append(&pattern(1, 131_072)).unwrap();
    assert_eq!(world.files.writes() - writes, 2, "data and slots");
}

#[test]
fn errors_travel_as_the_protocol_has_them() {
    let cases = [
        (StoreError::Removed, DataError::NoExtent),
        (StoreError::Full { length: 1 }, DataError::Sealed { length: 1 }),
        (StoreError::Shorter { length: 1 }, DataError::NotHere),
        (StoreError::Corrupt { block: 3 }, DataError::Corrupt { block: 3 }),
        (StoreError::OutOfOrder { expected: 9 }, DataError::OutOfOrder { expected: 9 }),
    ];
    for (error, expected) in cases {
        assert_eq!(DataError::from(error), expected);
    }
}
