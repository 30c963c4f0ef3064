//! Bit rot, misdirected writes, stale files: noticed, never served.

use milpa_types::BLOCK_BYTES;
use milpa_wire::frame::crc32c;
use proptest::prelude::*;

use super::super::files::StoreFiles;
use super::super::format::{BLOCK, HEADER_OFFSET, slot_offset};
use super::*;

/// Found by the simulation (seed 37737): a disk had lost a record of what was freed, and not the punch. After a
/// restart the blocks were served as zeros to who had not heard that their file was gone.
#[test]
fn what_was_freed_is_not_served_as_zeros_though_the_record_of_it_is_lost() {
    let world = World::with_extent();
    let bytes = pattern(1, 5 * BLOCK + 1_000);
    world.append(&bytes).unwrap();
    world.store.seal(LARGE, bytes.len() as u64).unwrap();
    world.flush().unwrap();
    let free = |world: &World| {
        world.free(4_096, 8_192);
        world.free(20_480, 1_000);
    };
    free(&world);
    let log = world.files.open(&directory().join("freed")).unwrap();
    let length = log.length().unwrap();
    log.write_at(&vec![0; length as usize], 0).unwrap();
    let world = world.kill();
    assert_eq!(world.store.freed(&[LARGE], 9), [], "it is lost");
    assert_eq!(world.read(0, BLOCK).unwrap(), bytes[..BLOCK]);
    for (lost, length) in [(1, BLOCK), (2, BLOCK), (5, 1_000)] {
        let is_damaged = |error| matches!(error, StoreError::Corrupt { block } if block == lost);
        let at = lost * BLOCK_BYTES;
        assert!(world.read(at, length).is_err_and(is_damaged), "{lost}");
        let repair = world.store.read_for_repair(LARGE, at, length as u64);
        assert!(repair.is_err_and(is_damaged), "{lost}");
    }
    assert_eq!(world.store.verify(LARGE, 0, 6).unwrap().damaged, [1, 2, 5]);
    // Nor does it count as torn by a crash, which two replicas could agree on.
    let patch = pattern(2, 100);
    let sums = checksums_of(&patch);
    let sums = Checksums::of_payload(&sums);
    world.store.overwrite(LARGE, 4_200, &patch, sums, Overwriting::Repeated).unwrap();
    assert!(matches!(world.store.doubtful_bytes(LARGE, 1), Err(StoreError::Corrupt { block: 1 })));
    // Others have the record.
    free(&world);
    assert!(world.store.verify(LARGE, 0, 6).unwrap().damaged.is_empty());
}

/// An extent of five blocks with a freed one, flushed.
fn built() -> (World, Vec<u8>) {
    let world = World::with_extent();
    let mut bytes = pattern(1, 18_000);
    world.append(&bytes).unwrap();
    world.free(4_096, 4_096);
    bytes[4_096..8_192].fill(0);
    world.flush().unwrap();
    (world, bytes)
}

/// Every read gives the right bytes or an error.
fn check_reads(world: &World, bytes: &[u8]) -> Vec<u64> {
    let held = world.length(LARGE).min(bytes.len() as u64);
    let mut damaged = Vec::new();
    for (block, piece) in bytes[..held as usize].chunks(BLOCK_BYTES as usize).enumerate() {
        match world.read(block as u64 * BLOCK_BYTES, piece.len()) {
            Ok(read) => assert_eq!(read, piece, "block {block}"),
            Err(StoreError::Corrupt { block }) => damaged.push(block),
            Err(other) => panic!("{other}"),
        }
    }
    damaged
}

proptest! {
    #[test]
    fn a_flipped_bit_of_live_data_is_noticed(at in 0..18_000u64, bit in 0..8u8, restart: bool) {
        let (mut world, bytes) = built();
        world.files.flip_bit(&world.path(), at, bit).unwrap();
        if restart {
            world = world.kill();
            prop_assert_eq!(world.length(LARGE), 18_000, "flushed bytes are never cut");
        }
        let block = at / BLOCK_BYTES;
        let expected = if block == 1 { vec![] } else { vec![block] };
        prop_assert_eq!(&check_reads(&world, &bytes), &expected);
        prop_assert_eq!(&world.store.verify(LARGE, 0, 100).unwrap().damaged, &expected);
        if let Some(block) = expected.first() {
            repair(&world, &bytes, *block);
            prop_assert!(check_reads(&world, &bytes).is_empty());
            world.flush().unwrap();
            let world = world.crash(at + 1);
            prop_assert!(check_reads(&world, &bytes).is_empty());
            prop_assert_eq!(world.length(LARGE), 18_000);
        }
    }

    /// The story (simulation, seeds 197 and 205): a primary had bytes of an append that the others
    /// had not taken. When it copied a snapshot of the shorter leader, the last block did not end
    /// where its own did, and was refused for ever.
    #[test]
    fn bytes_of_a_shorter_peer_leave_what_is_behind_them(
        held in 1..18_000u64,
        from in 0..5u64,
        seed: u64,
    ) {
        let (world, mut bytes) = built();
        let start = (from * BLOCK_BYTES).min((held - 1) / BLOCK_BYTES * BLOCK_BYTES);
        let newer = pattern(2, held as usize)[start as usize..].to_vec();
        let sums = checksums_of(&newer);
        world.store.repair_blocks(LARGE, start, &newer, Checksums::of_payload(&sums)).unwrap();
        bytes[start as usize..held as usize].copy_from_slice(&newer);
        // What is freed stays so.
        bytes[4_096..8_192].fill(0);
        prop_assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
        world.flush().unwrap();
        let world = world.crash(seed);
        prop_assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
        prop_assert_eq!(world.length(LARGE), 18_000);
    }

    #[test]
    fn a_flipped_bit_of_the_checksums_or_headers_serves_nothing_wrong(
        at in 0..1_064u64,
        bit in 0..8u8,
    ) {
        let (world, bytes) = built();
        world.files.flip_bit(&world.path(), HEADER_OFFSET + at, bit).unwrap();
        let world = world.kill();
        prop_assert_eq!(world.length(LARGE), 18_000);
        prop_assert!(check_reads(&world, &bytes).len() <= 1);
    }
}

fn repair(world: &World, bytes: &[u8], block: u64) {
    let start = block * BLOCK_BYTES;
    let end = bytes.len().min((start + BLOCK_BYTES) as usize);
    let good = &bytes[start as usize..end];
    let sums = checksums_of(good);
    world.store.repair_blocks(LARGE, start, good, Checksums::of_payload(&sums)).unwrap();
}

/// Puts bytes over committed ones; gives the blocks that are doubtful then.
fn overwrite(world: &World, at: u64, bytes: &[u8], overwriting: Overwriting) -> Vec<u64> {
    let sums = checksums_of(bytes);
    let sums = Checksums::of_payload(&sums);
    world.store.overwrite(LARGE, at, bytes, sums, overwriting).unwrap()
}

/// The story (simulation, `--strict --seed 2`): a block in which a byte had rotted passed for one that a
/// crash had left torn. The log completed it, and the wrong byte had a valid checksum.
#[test]
fn what_completes_a_torn_block_proves_nothing_of_the_rest() {
    for block in [0, 4] {
        let (mut world, mut bytes) = built();
        let at = block * BLOCK_BYTES + 100;
        let patch = pattern(7, 50);
        overwrite(&world, at, &[0; 50], Overwriting::New);
        world.flush().unwrap();
        // The bytes were written, their checksum was not.
        let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
        file.write_at(&patch, at).unwrap();
        world = world.kill();
        assert_eq!(overwrite(&world, at, &patch, Overwriting::Repeated), [block]);
        bytes[at as usize..at as usize + 50].copy_from_slice(&patch);
        let expected = bytes[at as usize - 100..at as usize + 100].to_vec();
        let is_doubtful = |world: &World| {
            let read = world.read(at - 100, 200);
            matches!(read, Err(StoreError::Doubtful { block: found }) if found == block)
        };
        assert!(is_doubtful(&world));
        assert_eq!(world.store.verify(LARGE, 0, 100).unwrap().damaged, [block]);
        // It stays so: over restarts, and whatever is put over a part of it.
        world.flush().unwrap();
        world = world.crash(block);
        assert!(is_doubtful(&world));
        assert_eq!(overwrite(&world, at, &patch, Overwriting::New), [block]);
        assert!(is_doubtful(&world));
        settle_with_own(&world, block).unwrap();
        world.flush().unwrap();
        world = world.crash(block);
        assert_eq!(world.read(at - 100, 200).unwrap(), expected);
    }
}

/// As if another replica had made the same of a doubtful block.
fn settle_with_own(world: &World, block: u64) -> Result<(), StoreError> {
    let own = world.store.doubtful_bytes(LARGE, block)?.unwrap();
    world.store.settle_doubtful(LARGE, block, &[vec![0; 4096].into(), own.into()])
}

/// The story (simulation, `--strict --seed 11984`): the only replica that was left took a block in which a
/// byte had rotted for one that a crash had torn, and the wrong byte had a valid checksum.
#[test]
fn a_doubtful_block_that_nobody_confirms_is_damaged() {
    let (world, _) = built();
    let patch = pattern(7, 50);
    overwrite(&world, 100, &patch, Overwriting::New);
    world.flush().unwrap();
    world.files.flip_bit(&world.path(), 2_000, 3).unwrap();
    let world = world.kill();
    assert_eq!(overwrite(&world, 100, &patch, Overwriting::Repeated), [0]);
    let mut other = world.store.doubtful_bytes(LARGE, 0).unwrap().unwrap();
    other[2_000] ^= 1 << 3;
    let settled = world.store.settle_doubtful(LARGE, 0, &[other.into()]);
    assert!(matches!(settled, Err(StoreError::Corrupt { block: 0 })), "{settled:?}");
    // Nor is it later.
    assert!(matches!(settle_with_own(&world, 0), Err(StoreError::Corrupt { block: 0 })));
    assert!(matches!(world.read(0, 10), Err(StoreError::Corrupt { block: 0 })));
}

/// Of several overwrites in the log the checksum is that of the last one.
#[test]
fn the_checksum_of_a_later_overwrite_proves_a_torn_block_too() {
    let (world, mut bytes) = built();
    let patches = [(100, pattern(7, 50)), (120, pattern(8, 50)), (90, pattern(9, 20))];
    let old = bytes.clone();
    for (at, patch) in &patches {
        overwrite(&world, *at as u64, patch, Overwriting::New);
        bytes[*at..at + patch.len()].copy_from_slice(patch);
    }
    let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
    file.write_at(&old[90..100], 90).unwrap();
    let world = world.kill();
    let repeated =
        patches.map(|(at, patch)| overwrite(&world, at as u64, &patch, Overwriting::Repeated));
    assert_eq!(repeated, [vec![0], vec![0], vec![]]);
    assert!(check_reads(&world, &bytes).is_empty());
}

#[test]
fn the_checksum_of_what_an_overwrite_left_proves_a_torn_block() {
    let (world, mut bytes) = built();
    let patch = pattern(7, 50);
    overwrite(&world, 100, &patch, Overwriting::New);
    // The checksum was written, the bytes were not.
    let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
    file.write_at(&bytes[100..150], 100).unwrap();
    let world = world.kill();
    assert_eq!(overwrite(&world, 100, &patch, Overwriting::Repeated), [0u64; 0]);
    bytes[100..150].copy_from_slice(&patch);
    assert!(check_reads(&world, &bytes).is_empty());
}

/// An overwrite over a part of a rotten block was not done at all: if no other replica gave its range,
/// whole blocks of it stayed as they were before, with valid checksums.
#[test]
fn an_overwrite_over_a_part_of_a_rotten_block_replaces_all_others() {
    let (world, mut bytes) = built();
    world.files.flip_bit(&world.path(), 8_192 + 10, 3).unwrap();
    let patch = pattern(6, 6_000);
    assert_eq!(overwrite(&world, 12_000, &patch, Overwriting::New), [2]);
    bytes[12_000..18_000].copy_from_slice(&patch);
    assert_eq!(check_reads(&world, &bytes), [2]);
    assert!(matches!(settle_with_own(&world, 2), Err(StoreError::Corrupt { block: 2 })));
    world.flush().unwrap();
    let world = world.crash(1);
    assert_eq!(check_reads(&world, &bytes), [2]);
    repair(&world, &bytes, 2);
    assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
}

#[test]
fn a_rotten_block_is_never_accepted() {
    let (world, _) = built();
    world.files.flip_bit(&world.path(), 10, 3).unwrap();
    let world = world.kill();
    let accepted = settle_with_own(&world, 0);
    assert!(matches!(accepted, Err(StoreError::Corrupt { block: 0 })));
}

/// F6: a block's bytes and even its checksum slot written to another block's place.
#[test]
fn a_misdirected_write_is_noticed_at_both_victims() {
    let (world, _) = built();
    let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
    let (mut data, mut slot) = ([0; 4096], [0; 8]);
    file.read_at(&mut data, 0).unwrap();
    file.read_at(&mut slot, slot_offset(0)).unwrap();
    file.write_at(&data, 2 * BLOCK_BYTES).unwrap();
    let world = world.kill();
    assert!(matches!(world.read(8_192, 1), Err(StoreError::Corrupt { block: 2 })), "data alone");
    file.write_at(&slot, slot_offset(2)).unwrap();
    let world = world.kill();
    assert!(matches!(world.read(8_192, 1), Err(StoreError::Corrupt { block: 2 })), "data and slot");
}

/// F4: a disk that confirmed a write and lost it; zeros or an old state come back.
#[test]
fn a_lost_write_is_noticed() {
    let (world, bytes) = built();
    let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
    file.write_at(&[0; 4096], 8_192).unwrap();
    assert_eq!(check_reads(&world, &bytes), [2]);
    let world = world.kill();
    assert_eq!(check_reads(&world, &bytes), [2]);
    assert_eq!(world.length(LARGE), 18_000);
}

/// A header that is gone while data is there is damage, not an extent that was never flushed.
#[test]
fn an_extent_without_a_readable_header_is_kept_and_not_served() {
    let (world, _) = built();
    for slot in 0..2 {
        world.files.flip_bit(&world.path(), HEADER_OFFSET + slot * 512 + 70, 3).unwrap();
    }
    let world = world.kill();
    assert_eq!(world.report.unreadable, [LARGE]);
    assert!(matches!(world.read(0, 1), Err(StoreError::NoExtent)));
    assert!(matches!(world.store.create_extent(new_extent(LARGE)), Err(StoreError::Exists)));
    assert_eq!(world.store.highest_id(false), Some(LARGE));
    world.free(0, u64::MAX);
    assert!(world.kill().report.unreadable.is_empty());
}

/// The story (simulation, seed 45): such an extent could not be filled from another replica, for ever, as
/// its file was there.
#[test]
fn an_extent_without_a_readable_header_can_be_made_anew() {
    let (world, _) = built();
    assert!(matches!(world.store.discard_unreadable(LARGE), Err(StoreError::Exists)));
    for slot in 0..2 {
        world.files.flip_bit(&world.path(), HEADER_OFFSET + slot * 512 + 70, 3).unwrap();
    }
    let world = world.kill();
    world.store.discard_unreadable(LARGE).unwrap();
    world.store.create_extent(new_extent(LARGE)).unwrap();
    let mut bytes = pattern(9, 10_000);
    world.append(&bytes).unwrap();
    // What was freed stays so.
    bytes[4_096..8_192].fill(0);
    assert!(world.read(0, 10_000).unwrap() == bytes);
    assert!(matches!(world.store.discard_unreadable(LARGE), Err(StoreError::Exists)));
}

/// The block at the flushed end, damaged: reported, kept, not served, and appends do not hide it.
#[test]
fn a_damaged_last_block_stays_damaged_until_repaired() {
    let (world, bytes) = built();
    world.files.flip_bit(&world.path(), 17_000, 1).unwrap();
    let world = world.kill();
    assert_eq!(world.report.extents[0].damaged, [4]);
    assert_eq!(world.length(LARGE), 18_000);
    world.append(&pattern(5, 10)).unwrap();
    assert!(matches!(world.read(17_999, 5), Err(StoreError::Corrupt { block: 4 })));
    let mut whole = bytes;
    whole.extend(pattern(5, 10));
    repair(&world, &whole, 4);
    assert_eq!(world.read(0, 18_010).unwrap(), whole);
}

/// A block that is known to lack overwrites stays damaged, also if it is the last one and a header still
/// has its old checksum, and if power fails once the extents are flushed.
#[test]
fn a_block_that_is_not_trusted_is_not_made_whole_by_a_restart() {
    for block in [0, 2] {
        for seed in 0..20 {
            let world = World::with_extent();
            world.append(&pattern(1, 10_000)).unwrap();
            world.flush().unwrap();
            world.store.distrust(LARGE, block).unwrap();
            world.store.flush_all().unwrap();
            let world = if seed == 0 { world.kill() } else { world.crash(seed) };
            let read = world.read(block * BLOCK_BYTES, 100);
            assert!(matches!(read, Err(StoreError::Corrupt { .. })), "{block} {seed}: {read:?}");
        }
    }
}

/// Found by a reader: the block in which an extent was to end was taken away by sealing the extent before
/// it. What was left of it was dead, so all of it was, and the word of that went to all replicas.
#[test]
fn a_block_that_is_taken_away_to_be_filled_again_leaves_no_extent_for_dead() {
    let (world, bytes) = built();
    world.free(0, 8_192);
    world.files.flip_bit(&world.path(), 8_200, 3).unwrap();
    assert!(matches!(world.store.seal(LARGE, 8_292), Err(StoreError::Corrupt { block: 2 })));
    world.store.cut_for_repair(LARGE, 2).unwrap();
    for round in 0..3 {
        let state = world.store.states(&[LARGE])[0];
        assert_eq!((state.length, state.sealed), (8_192, false), "{round}");
        world.store.cut_for_repair(LARGE, 2).unwrap();
    }
    let world = world.crash(3);
    let state = world.store.states(&[LARGE])[0];
    assert_eq!((state.length, state.sealed), (8_192, false));
    assert!(
        world.store.freed(&[LARGE], 100).iter().all(|freed| freed.length <= 8_192),
        "not all of it"
    );
    let rest = &bytes[8_192..8_292];
    let sums = checksums_of(rest);
    world.store.append(LARGE, 8_192, rest, Checksums::of_payload(&sums)).unwrap();
    world.store.seal(LARGE, 8_292).unwrap();
    assert_eq!(world.read(8_192, 100).unwrap(), rest);
}

/// Found by a reader: zeros that stand for lost bytes are the same on all replicas. With the mark in a
/// checksum of the bytes, a crash between these and their slot made them look torn by it: two replicas
/// that had made the same of the zeros confirmed each other.
#[test]
fn what_is_lost_is_never_taken_for_torn() {
    for (block, kept) in (2..4).flat_map(|block| (0..3).map(move |kept| (block, kept))) {
        let world = World::with_extent();
        world.append(&pattern(1, 8_192)).unwrap();
        world.store.append_lost(LARGE, 8_192, BLOCK_BYTES).unwrap();
        world.store.append_lost(LARGE, 12_288, 3_000).unwrap();
        world.flush().unwrap();
        let (at, patch) = (block * BLOCK_BYTES + 100, pattern(7, 50));
        let file = super::super::files::StoreFiles::open(&world.files, &world.path()).unwrap();
        let mut slot = [0; 8];
        file.read_at(&mut slot, slot_offset(block)).unwrap();
        assert_eq!(overwrite(&world, at, &patch, Overwriting::New), [block]);
        match kept {
            0 => file.write_at(&slot, slot_offset(block)).unwrap(),
            1 => file.write_at(&[0; 50], at).unwrap(),
            _ => {}
        }
        let world = world.kill();
        assert_eq!(world.length(LARGE), 15_288);
        assert_eq!(overwrite(&world, at, &patch, Overwriting::Repeated), [block]);
        let settled = settle_with_own(&world, block);
        assert!(matches!(settled, Err(StoreError::Corrupt { .. })), "{block} {kept}: {settled:?}");
        assert!(matches!(world.read(at, 1), Err(StoreError::Corrupt { .. })));
        // All of it is written, and it is whole.
        let length = (world.length(LARGE) - block * BLOCK_BYTES).min(BLOCK_BYTES);
        let whole = pattern(9, length as usize);
        overwrite(&world, block * BLOCK_BYTES, &whole, Overwriting::New);
        world.flush().unwrap();
        let world = world.crash(block);
        assert_eq!(world.read(block * BLOCK_BYTES, whole.len()).unwrap(), whole);
    }
}

/// Found by a reader: an older header knew less of the last block, as whole, than the newer one, as damaged.
#[test]
fn an_older_header_does_not_make_a_damaged_end_whole() {
    for seed in 0..64 {
        let world = World::with_extent();
        world.append(&pattern(1, 5_000)).unwrap();
        overwrite(&world, 0, &pattern(2, 10), Overwriting::New);
        world.flush().unwrap();
        world.append(&pattern(3, 1_000)).unwrap();
        world.store.distrust(LARGE, 1).unwrap();
        world.store.flush_all().unwrap();
        let world = world.crash(seed);
        let read = world.read(4_096, 100);
        assert!(matches!(read, Err(StoreError::Corrupt { block: 1 })), "{seed}: {read:?}");
        assert_eq!(world.length(LARGE), 6_000, "{seed}");
    }
}

/// Found by a reader: what was flushed behind a lost block was not there after the power was cut.
#[test]
fn what_is_flushed_behind_a_lost_block_stays() {
    for seed in 0..64 {
        let world = World::with_extent();
        world.append(&pattern(1, 8_192)).unwrap();
        world.store.append_lost(LARGE, 8_192, BLOCK_BYTES).unwrap();
        world.append(&pattern(3, 5_000)).unwrap();
        world.flush().unwrap();
        let world = world.crash(seed);
        assert_eq!(world.length(LARGE), 17_288, "{seed}");
        assert_eq!(world.read(12_288, 5_000).unwrap(), pattern(3, 5_000), "{seed}");
        assert!(matches!(world.read(8_192, 1), Err(StoreError::Corrupt { block: 2 })), "{seed}");
    }
}

/// A store of the first version is taken over: its label says so from then on.
#[test]
fn a_label_of_the_first_version_is_replaced() {
    let (world, bytes) = built();
    let path = directory().join("label");
    let file = super::super::files::StoreFiles::open(&world.files, &path).unwrap();
    let mut old = [0; 16];
    file.read_at(&mut old, 0).unwrap();
    old[7] = b'1';
    file.write_at(&[&old[..], &crc32c(&old).to_le_bytes()].concat(), 0).unwrap();
    let mut world = world.kill();
    for _ in 0..2 {
        let mut label = [0; 8];
        let file = super::super::files::StoreFiles::open(&world.files, &path).unwrap();
        file.read_at(&mut label, 0).unwrap();
        assert_eq!(&label, b"MLPSTOR2");
        assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
        world = world.crash(5);
    }
}

/// Found by a reader: a header that was older than the repair made the last block damaged again, and what had been
/// appended behind it was cut.
#[test]
fn a_repaired_end_stays_whole_though_the_header_does_not_know_of_it() {
    let world = World::with_extent();
    let mut bytes = pattern(1, 5_000);
    world.append(&bytes).unwrap();
    world.flush().unwrap();
    world.store.distrust(LARGE, 1).unwrap();
    world.store.flush_all().unwrap();
    bytes[4_096..].copy_from_slice(&pattern(2, 904));
    repair(&world, &bytes, 1);
    let world = world.kill();
    assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
    world.append(&pattern(3, 1_000)).unwrap();
    bytes.extend(pattern(3, 1_000));
    let world = world.kill();
    assert_eq!(world.length(LARGE), 6_000);
    assert_eq!(check_reads(&world, &bytes), Vec::<u64>::new());
}
