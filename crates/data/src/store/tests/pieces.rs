//! Small extents: pieces of many files, freed one by one.

use milpa_types::BLOCK_BYTES;

use std::collections::BTreeSet;

use super::super::memory_files::{Call, Fault};
use super::super::piece::{PIECE_HEADER_BYTES, PieceHeader, PiecePlace};
use super::*;

fn small() -> ExtentId {
    ExtentId::small(1)
}

/// Appends a piece and returns where its bytes begin.
fn add(store: &ExtentStore, inode: u64, bytes: &[u8]) -> u64 {
    let offset = store.states(&[small()])[0].length;
    let header = PieceHeader {
        inode: InodeId(inode),
        session: SessionId(5),
        file_offset: 0,
        length: bytes.len() as u32,
    };
    let place = PiecePlace { partition: PARTITION, extent: small(), offset };
    let mut record = header.encode(place).to_vec();
    record.extend_from_slice(bytes);
    let sums = checksums_of(&record);
    store.append(small(), offset, &record, Checksums::of_payload(&sums)).unwrap();
    offset + PIECE_HEADER_BYTES as u64
}

fn free(store: &ExtentStore, offset: u64, length: u64) {
    store.free(&[Freed { extent: small(), offset, length }], &mut HeaderBlocks::default()).unwrap();
}

fn live(store: &ExtentStore) -> Vec<u64> {
    let (mut inodes, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let (pieces, next) = store.live_pieces(small(), at, 2).unwrap();
        inodes.extend(pieces.iter().map(|piece| piece.header.inode.0));
        from = next;
    }
    inodes
}

fn world() -> World {
    let world = World::new();
    let new = NewExtent { id: small(), epoch: Epoch(1), inode: InodeId(0), session: SessionId(0) };
    world.store.create_extent(new).unwrap();
    world
}

#[test]
fn live_pieces_are_those_that_are_not_freed() {
    let world = world();
    let offsets: Vec<u64> =
        (0..10).map(|inode| add(&world.store, inode, &pattern(inode, 1_500))).collect();
    assert_eq!(live(&world.store), (0..10).collect::<Vec<_>>());
    // In parts, in any order, also twice.
    free(&world.store, offsets[3] + 500, 1_000);
    assert_eq!(live(&world.store).len(), 10, "half of piece 3 lives");
    free(&world.store, offsets[3], 500);
    free(&world.store, offsets[4], 1_500);
    free(&world.store, offsets[2], 1_500);
    free(&world.store, offsets[2], 1_500);
    free(&world.store, offsets[9], 1_500);
    assert_eq!(live(&world.store), [0, 1, 5, 6, 7, 8]);
    for inode in [0, 1, 5, 8u64] {
        let read = world.store.read(small(), offsets[inode as usize], 1_500).unwrap();
        assert_eq!(read.bytes, pattern(inode, 1_500));
    }
    world.store.flush(&[(small(), 0)]).unwrap();
    let world = world.crash(7);
    assert_eq!(live(&world.store), [0, 1, 5, 6, 7, 8]);
    for inode in [0, 1, 5, 6, 7, 8] {
        free(&world.store, offsets[inode], 1_500);
    }
    assert_eq!(live(&world.store), [0u64; 0]);
    let length = world.length(small());
    world.store.seal(small(), length).unwrap();
    assert_eq!(world.store.extent_count(), 0, "all dead and sealed: removed");
}

/// Simulation, seed 17102: the file got only the end of a piece, and gave it back. Of the beginning,
/// which no file had, nobody was asked again.
#[test]
fn a_piece_that_dies_in_part_is_something_to_ask_about_again() {
    let world = world();
    let offsets: Vec<u64> =
        (0..2).map(|inode| add(&world.store, inode, &pattern(inode, 1_500))).collect();
    let before = world.store.held();
    free(&world.store, offsets[0], 1_500);
    assert_eq!(world.store.held(), before, "all of it");
    free(&world.store, offsets[1] + 500, 1_000);
    let after = world.store.held();
    assert_ne!(after, before);
    free(&world.store, offsets[1] + 500, 1_000);
    free(&world.store, offsets[1], 1_500);
    assert_eq!(world.store.held(), after, "nothing new, and the rest of it");
}

/// Headers are never freed by name; if they did not die with their bytes, no block of a small
/// extent could ever be punched.
#[test]
fn neighbours_that_die_give_back_the_blocks_between_them() {
    let world = world();
    let offsets: Vec<u64> =
        (0..60).map(|inode| add(&world.store, inode, &pattern(inode, 1_000))).collect();
    world.store.flush(&[(small(), 0)]).unwrap();
    let allocated = || world.store.allocated_bytes();
    let before = allocated();
    for offset in &offsets[1..] {
        free(&world.store, *offset, 1_000);
    }
    world.store.flush(&[(small(), 0)]).unwrap();
    let freed = (before - allocated()) / BLOCK_BYTES;
    assert_eq!(freed, 60 * 1_048 / BLOCK_BYTES - 1, "all but the first and the last block");
    assert_eq!(world.store.read(small(), offsets[0], 1_000).unwrap().bytes, pattern(0, 1_000));
}

/// Found by the simulation (seed 4979): a piece was freed while the block of its header was rotten here. When
/// that was repaired nobody looked at the header again, and the replicas differed until the next comparison.
#[test]
fn a_header_that_was_damaged_when_its_piece_was_freed_goes_when_its_block_is_repaired() {
    let world = world();
    let first = add(&world.store, 1, &pattern(1, 1_500));
    add(&world.store, 2, &pattern(2, 9_000));
    let block = world.store.read(small(), 0, 4_096).unwrap().bytes;
    world.store.flush(&[(small(), 0)]).unwrap();
    let path = extent_path(&world.store.directory, small());
    world.files.flip_bit(&path, 10, 3).unwrap();
    let world = world.kill();
    free(&world.store, first, 1_500);
    let has_header = |world: &World| {
        let freed = world.store.freed(&[small()], 100);
        freed.iter().any(|range| range.offset == first - PIECE_HEADER_BYTES as u64)
    };
    assert!(!has_header(&world), "it cannot be read");
    let sums = checksums_of(&block);
    world.store.repair_blocks(small(), 0, &block, Checksums::of_payload(&sums)).unwrap();
    assert!(has_header(&world));
    assert_eq!(live(&world.store), [2]);
}

/// Found by the simulation (seed 821): rot took the record that a piece is dead, when its blocks had been
/// given back. The word came again, the header was gone with its block and not known to be dead, and the
/// extent stayed at this replica alone.
#[test]
fn a_header_that_went_with_its_block_is_dead() {
    let mut world = world();
    let offsets = [1, 2].map(|inode| add(&world.store, inode, &pattern(inode, 9_000)));
    let length = world.length(small());
    world.store.seal(small(), length).unwrap();
    world.store.flush(&[(small(), length)]).unwrap();
    free(&world.store, offsets[0], 9_000);
    world.files.flip_bit(&world.store.directory.join("freed"), 20, 3).unwrap();
    world = world.kill();
    for offset in offsets {
        free(&world.store, offset, 9_000);
    }
    assert_eq!(world.store.extent_count(), 0, "all dead and sealed: removed");
}

/// Found by the simulation (seed 99 with reads that fail): the header of a freed piece could not be read, so
/// it stayed, at this replica alone.
#[test]
fn a_header_that_could_not_be_read_goes_when_its_piece_is_freed_again() {
    for failures in 0..2 {
        let mut world = world();
        let first = add(&world.store, 1, &pattern(1, 1_500));
        add(&world.store, 2, &pattern(2, 1_500));
        if failures > 0 {
            world.files.fail(Fault { call: Call::Read, after: 0, errno: 5 });
            let range = Freed { extent: small(), offset: first, length: 1_500 };
            let mut headers = HeaderBlocks::default();
            let failed = world.store.free(&[range], &mut headers);
            assert!(matches!(failed, Err(StoreError::ReadFailed { .. })), "{failed:?}");
            assert_eq!(headers.damaged, [(small(), 0)], "somebody is to repair it");
        }
        free(&world.store, first, 1_500);
        let header = first - PIECE_HEADER_BYTES as u64;
        for _ in 0..2 {
            let freed = world.store.freed(&[small()], 100);
            assert!(freed.iter().any(|range| range.offset == header), "{freed:?}");
            assert_eq!(live(&world.store), [2]);
            world = world.kill();
        }
    }
}

/// Found by the simulation (seed 249750): a meta node asked for ever to free a piece whose header this disk could not
/// read, and no other replica had.
#[test]
fn a_piece_is_freed_though_no_replica_can_read_its_header() {
    let world = world();
    let first = add(&world.store, 1, &pattern(1, 1_500));
    let range = Freed { extent: small(), offset: first, length: 1_500 };
    world.files.fail(Fault { call: Call::Read, after: 0, errno: 5 });
    let lost = BTreeSet::from([(small(), 0)]);
    world.store.free(&[range], &mut HeaderBlocks { lost, damaged: Vec::new() }).unwrap();
    assert_eq!(world.store.freed(&[small()], 100), [range]);
}

/// Found by the simulation (`--strict`, seed 2769): the header of a freed piece was damaged, nobody read its
/// block any more, and the extent stayed at this replica until the next comparison.
#[test]
fn a_damaged_header_of_a_freed_piece_is_told_of() {
    let world = world();
    let first = add(&world.store, 1, &pattern(1, 9_000));
    let second = add(&world.store, 2, &pattern(2, 9_000));
    let header = second - PIECE_HEADER_BYTES as u64;
    let path = extent_path(&world.store.directory, small());
    world.files.flip_bit(&path, header, 3).unwrap();
    let freed = |offset| {
        let mut headers = HeaderBlocks::default();
        world
            .store
            .free(&[Freed { extent: small(), offset, length: 9_000 }], &mut headers)
            .unwrap();
        headers.damaged
    };
    assert_eq!(freed(second), [(small(), header / BLOCK_BYTES)]);
    assert_eq!(freed(first), []);
}

/// Found by a reader: an error made the store forget which headers it had found damaged.
#[test]
fn a_damaged_header_is_told_of_beside_one_that_could_not_be_read() {
    let mut both = 0;
    for after in 0..6 {
        let world = world();
        let offsets = [1, 2].map(|inode| add(&world.store, inode, &pattern(inode, 9_000)));
        let header = offsets[1] - PIECE_HEADER_BYTES as u64;
        let path = extent_path(&world.store.directory, small());
        world.files.flip_bit(&path, header, 3).unwrap();
        world.files.fail(Fault { call: Call::Read, after, errno: 5 });
        let dead = |offset| Freed { extent: small(), offset, length: 9_000 };
        let mut headers = HeaderBlocks::default();
        let freed = world.store.free(&[dead(offsets[1]), dead(offsets[0])], &mut headers);
        assert!(headers.damaged.contains(&(small(), header / BLOCK_BYTES)), "{after}: {headers:?}");
        both += usize::from(freed.is_err() && headers.damaged.contains(&(small(), 0)));
    }
    assert!(both > 0);
}

/// Story: a user keeps a copy of a data node's disk in a file. Its content holds piece headers;
/// when the end of the file is cut off right behind one, 48 live bytes must not die.
#[test]
fn content_that_looks_like_a_header_is_not_taken_for_one() {
    let world = world();
    let place = PiecePlace { partition: PARTITION, extent: small(), offset: 0 };
    let header =
        PieceHeader { inode: InodeId(1), session: SessionId(1), file_offset: 0, length: 4_000 };
    let mut content = header.encode(place).to_vec();
    content.extend(pattern(1, 12_000));
    let at = add(&world.store, 9, &content);
    free(&world.store, at + PIECE_HEADER_BYTES as u64, 12_000);
    let read = world.store.read(small(), at, PIECE_HEADER_BYTES as u32).unwrap();
    assert_eq!(read.bytes, content[..PIECE_HEADER_BYTES]);
    assert_eq!(live(&world.store), [9]);
}
