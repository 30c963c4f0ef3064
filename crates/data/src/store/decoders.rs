//! What the store reads from its disk, for golden files and fuzzing.

use std::path::Path;
use std::sync::Arc;

use milpa_types::{BLOCK_BYTES, Epoch, ExtentId, InodeId, PartitionId, SessionId};
use milpa_wire::decoder::{Decoder, Random, put};
use milpa_wire::frame::crc32c;

use super::files::StoreFiles;
use super::format::{
    BLOCK, HEADER_BYTES, HEADER_OFFSET, HEADER_STRIDE, Header, Mark, Place, SLOT_BYTES,
    SLOTS_OFFSET, Slot, Sum, u32_at, u64_at,
};
use super::freed_log::{RECORD_BYTES, Record, record_crc};
use super::memory_files::MemoryFiles;
use super::piece::{PIECE_HEADER_BYTES, PieceHeader, PiecePlace, header_crc};
use super::recover::{LABEL_BYTES, decode_label, encode_label};
use super::{
    Checksums, ExtentStore, Freed, HeaderBlocks, NewExtent, StoreDisk, StoreLimits, checksums_of,
    extent_path,
};

const PARTITION: PartitionId = PartitionId(7);
const EXTENT: ExtentId = ExtentId(9);
const PIECE: PiecePlace = PiecePlace { partition: PARTITION, extent: EXTENT, offset: 12_345 };
/// The record's number and the block's: their places enter their checksums.
const RECORD: u64 = 5;
const SLOT: u64 = 3;

pub(crate) fn all() -> Vec<Decoder> {
    vec![
        Decoder {
            name: "extent-header",
            sample: header,
            again: header_again,
            seal: |b| header_seal(b),
        },
        Decoder { name: "checksum-slot", sample: slot, again: slot_again, seal: |_| {} },
        Decoder {
            name: "freed-record",
            sample: freed,
            again: freed_again,
            seal: |b| freed_seal(b),
        },
        Decoder {
            name: "piece-header",
            sample: piece,
            again: piece_again,
            seal: |b| piece_seal(b),
        },
        Decoder {
            name: "partition-label-2",
            sample: label,
            again: label_again,
            seal: |b| label_seal(b),
        },
        Decoder { name: "store", sample: store, again: store_again, seal: store_seal },
    ]
}

fn header(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let length = random.below(1 << 28);
    let header = Header {
        sequence: random.number(),
        partition: PARTITION,
        extent: EXTENT,
        epoch: Epoch(random.number()),
        inode: InodeId(random.number()),
        session: SessionId(u128::from(random.draw()) << 64 | 13),
        sealed: random.below(2) == 0,
        overwritten: random.below(2) == 0,
        cut_pending: random.below(2) == 0,
        tail: Sum::whole(random.draw() as u32),
        length,
        floor: random.below(length + 1),
        committed: random.below(length + 1),
    };
    let header = Header { tail: Sum { mark: mark(&mut random), ..header.tail }, ..header };
    header.encode(1).to_vec()
}

/// None in most samples, as in most blocks.
fn mark(random: &mut Random) -> Option<Mark> {
    match random.below(8) {
        0 => Some(Mark::Doubtful),
        1 => Some(Mark::Damaged),
        _ => None,
    }
}

fn header_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let header = Header::decode(bytes.first_chunk::<HEADER_BYTES>()?, 1, PARTITION, EXTENT)?;
    Some(header.encode(1).to_vec())
}

fn header_seal(bytes: &mut [u8]) {
    seal_header(bytes, 1);
}

fn seal_header(bytes: &mut [u8], slot: u32) {
    put(bytes, 0, b"MLPEXT01");
    put(bytes, 16, &PARTITION.0.to_le_bytes());
    put(bytes, 24, &EXTENT.0.to_le_bytes());
    put(bytes, 96, &slot.to_le_bytes());
    let crc = bytes.get(..HEADER_BYTES - 4).map(crc32c).unwrap_or_default();
    put(bytes, HEADER_BYTES - 4, &crc.to_le_bytes());
}

fn slot(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let length = 1 + random.below(BLOCK_BYTES) as u16;
    let slot = match random.below(3) {
        0 => Slot::Freed { length },
        _ => {
            let crc = random.draw() as u32;
            Sum { crc, mark: mark(&mut random) }.slot(length)
        }
    };
    slot.encode(Place::new(PARTITION, EXTENT), SLOT).to_le_bytes().to_vec()
}

fn slot_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let raw = u64::from_le_bytes(*bytes.first_chunk()?);
    let place = Place::new(PARTITION, EXTENT);
    match Slot::decode(raw, place, SLOT) {
        Slot::Damaged => None,
        slot => Some(slot.encode(place, SLOT).to_le_bytes().to_vec()),
    }
}

fn freed(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let (extent, a, b) = (ExtentId(random.number()), random.number(), random.number());
    let record = match random.below(2) {
        0 => Record::Dead { extent, start: a, end: b },
        _ => Record::Removed { first: extent, count: a },
    };
    record.encode(PARTITION, RECORD).to_vec()
}

fn freed_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let record = Record::decode(bytes.first_chunk()?, PARTITION, RECORD)?;
    Some(record.encode(PARTITION, RECORD).to_vec())
}

fn freed_seal(bytes: &mut [u8]) {
    seal_record(bytes, RECORD);
}

fn seal_record(bytes: &mut [u8], number: u64) {
    let Some(record) = bytes.first_chunk::<RECORD_BYTES>() else { return };
    let crc = record_crc(record, PARTITION, number);
    put(bytes, 0, &crc.to_le_bytes());
}

fn piece(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let header = PieceHeader {
        inode: InodeId(random.number()),
        session: SessionId(u128::from(random.draw()) << 64 | 13),
        file_offset: random.number(),
        length: random.below(1 << 17) as u32,
    };
    header.encode(PIECE).to_vec()
}

fn piece_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(PieceHeader::decode(bytes, PIECE)?.encode(PIECE).to_vec())
}

fn piece_seal(bytes: &mut [u8]) {
    let Some(header) = bytes.first_chunk::<PIECE_HEADER_BYTES>() else { return };
    let crc = header_crc(header, PIECE);
    put(bytes, PIECE_HEADER_BYTES - 4, &crc.to_le_bytes());
}

fn label(seed: u64) -> Vec<u8> {
    encode_label(PartitionId(if seed == 0 { PARTITION.0 } else { Random::new(seed).number() }))
        .to_vec()
}

fn label_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(encode_label(decode_label(bytes.first_chunk()?).ok()?).to_vec())
}

fn label_seal(bytes: &mut [u8]) {
    put(bytes, 0, b"MLPSTOR2");
    let crc = bytes.get(..16).map(crc32c).unwrap_or_default();
    put(bytes, 16, &crc.to_le_bytes());
}

/// A whole partition in one piece: label, freed log, both header slots, checksum slots, data. The data
/// is one extent of a few blocks.
const FREED_AT: usize = LABEL_BYTES;
const FREED_RECORDS: usize = 8;
const HEADERS_AT: usize = FREED_AT + FREED_RECORDS * RECORD_BYTES;
const SLOTS_AT: usize = HEADERS_AT + 2 * HEADER_STRIDE as usize;
const BLOCKS: usize = 5;
const DATA_AT: usize = SLOTS_AT + BLOCKS * SLOT_BYTES;
const STORE_BYTES: usize = DATA_AT + BLOCKS * BLOCK;

fn directory() -> &'static Path {
    Path::new("/7")
}

fn open(files: &MemoryFiles) -> Option<ExtentStore> {
    let limits = StoreLimits { files_max: 8, chunks_max: 8 };
    let disk = StoreDisk::new(Arc::new(files.clone()), limits);
    ExtentStore::open(&disk, directory(), PARTITION).ok().map(|(store, _)| store)
}

/// Where each part is: its file, its place there, its place in one piece, its length.
fn parts() -> [(std::path::PathBuf, u64, usize, usize); 5] {
    let extent = extent_path(directory(), EXTENT);
    [
        (directory().join("label"), 0, 0, LABEL_BYTES),
        (directory().join("freed"), 0, FREED_AT, HEADERS_AT - FREED_AT),
        (extent.clone(), HEADER_OFFSET, HEADERS_AT, SLOTS_AT - HEADERS_AT),
        (extent.clone(), SLOTS_OFFSET, SLOTS_AT, DATA_AT - SLOTS_AT),
        (extent, 0, DATA_AT, STORE_BYTES - DATA_AT),
    ]
}

fn dump(files: &MemoryFiles) -> Vec<u8> {
    let mut bytes = vec![0; STORE_BYTES];
    for (path, offset, at, length) in parts() {
        let part = bytes.get_mut(at..at + length);
        if let (Some(part), Ok(file)) = (part, files.open(&path)) {
            // What cannot be read is zeros.
            let _ = file.read_at(part, offset);
        }
    }
    bytes
}

fn load(bytes: &[u8]) -> Option<MemoryFiles> {
    let files = MemoryFiles::new();
    for (path, offset, at, length) in parts() {
        let part = bytes.get(at..).map(|rest| rest.get(..length).unwrap_or(rest));
        let file = files.open(&path).or_else(|_| files.create(&path)).ok()?;
        file.write_at(part.unwrap_or_default(), offset).ok()?;
    }
    Some(files)
}

fn store(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let files = MemoryFiles::new();
    let Some(store) = open(&files) else { return Vec::new() };
    let new = NewExtent {
        id: EXTENT,
        epoch: Epoch(3),
        inode: InodeId(if seed.is_multiple_of(2) { 11 } else { 0 }),
        session: SessionId(13),
    };
    // A step that is refused makes another valid sample.
    let _ = store.create_extent(new);
    let mut length = 0;
    for _ in 0..1 + random.below(5) {
        let bytes = vec![random.draw() as u8; 1 + random.below(6000) as usize];
        if length as usize + bytes.len() > BLOCKS * BLOCK {
            break;
        }
        let sums = checksums_of(&bytes);
        length =
            store.append(EXTENT, length, &bytes, Checksums::of_payload(&sums)).unwrap_or(length);
        match random.below(4) {
            0 => drop(store.flush(&[(EXTENT, 0)])),
            1 => {
                let freed = Freed { extent: EXTENT, offset: 0, length: random.below(length) };
                drop(store.free(&[freed], &mut HeaderBlocks::default()));
            }
            _ => {}
        }
    }
    if random.below(3) == 0 {
        drop(store.seal(EXTENT, length));
    }
    drop(store.flush(&[(EXTENT, 0)]));
    dump(&files)
}

/// Recovers what is there, and reads, verifies and appends: each is done or refused.
fn store_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let files = load(bytes)?;
    let store = open(&files)?;
    let details = store.details(&[EXTENT]);
    let Some(found) = details.first() else { return Some(dump(&files)) };
    let length = found.state.length;
    if let Ok(stored) = store.read(EXTENT, 0, length.min(STORE_BYTES as u64) as u32) {
        let sums = Checksums::of_blocks(&stored.checksums, 0);
        assert!(stored.bytes.is_empty() || sums.verify(&stored.bytes).is_ok(), "bytes served");
    }
    drop(store.verify(EXTENT, 0, 8));
    drop(store.live_pieces(EXTENT, 0, 100));
    drop(store.digest(EXTENT, None));
    let more = [1; 100];
    if store.append(EXTENT, length, &more, Checksums::of_payload(&checksums_of(&more))).is_ok() {
        // Some may be dead when they arrive, or stand in a block that is damaged; never other ones.
        let read = store.read(EXTENT, length, 100).map(|read| read.bytes).unwrap_or_default();
        assert!(
            read.iter().all(|byte| [0, 1].contains(byte)),
            "other bytes than those appended are read"
        );
    }
    None
}

fn store_seal(bytes: &mut Vec<u8>) {
    bytes.resize(STORE_BYTES, 0);
    put(bytes, 8, &PARTITION.0.to_le_bytes());
    label_seal(bytes);
    for number in 0..FREED_RECORDS {
        let record = bytes.get_mut(FREED_AT + number * RECORD_BYTES..).unwrap_or_default();
        if record.iter().take(RECORD_BYTES).any(|byte| *byte != 0) {
            seal_record(record, number as u64);
        }
    }
    for slot in 0..2 {
        let at = HEADERS_AT + slot * HEADER_STRIDE as usize;
        let header = bytes.get_mut(at..).unwrap_or_default();
        if header.iter().take(HEADER_BYTES).any(|byte| *byte != 0) {
            seal_header(header, slot as u32);
        }
    }
    for block in 0..BLOCKS {
        let raw = u64_at(bytes, SLOTS_AT + block * SLOT_BYTES);
        let length = (raw >> 32 & 0x1fff) as u16;
        let data = bytes.get(DATA_AT + block * BLOCK..).unwrap_or_default();
        let Some(data) = data.get(..usize::from(length).min(BLOCK)) else { continue };
        let slot = match (raw, length) {
            (0, _) | (_, 0) => continue,
            _ if raw >> 45 & 1 == 1 => Slot::Freed { length },
            _ if raw >> 46 & 1 == 1 => {
                Slot::Marked { mark: Mark::Doubtful, crc: crc32c(data), length }
            }
            _ if raw >> 47 & 1 == 1 => {
                Slot::Marked { mark: Mark::Damaged, crc: crc32c(data), length }
            }
            _ => Slot::Live { crc: crc32c(data), length },
        };
        let slot = slot.encode(Place::new(PARTITION, EXTENT), block as u64);
        put(bytes, SLOTS_AT + block * SLOT_BYTES, &slot.to_le_bytes());
    }
    debug_assert!(u32_at(bytes, 0) != 0, "the label is there");
}
