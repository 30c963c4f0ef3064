//! What an extent file looks like, byte by byte. Numbers are little-endian.
//!
//! ```text
//! offset               size   what
//! 0                    256 Mi data at its natural offset; holes where bytes were freed
//! 256 Mi                  512 header slot 0
//! 256 Mi +  512           512 header slot 1
//! 256 Mi + 1024        512 Ki one checksum slot of 8 bytes for each block of 4 KiB of data
//! ```
//!
//! Data, checksums and header share a file so that *one* fdatasync makes them durable together.
//! The file is sparse: an extent of up to 1.5 MiB needs one 4 KiB page besides its data.
//!
//! # Checksum slot
//!
//! ```text
//! bits    what
//!  0..32  CRC32C of the block's first `length` bytes, xor the block's location key
//! 32..45  length: valid bytes in the block, 1 to 4096; only an extent's last block has less
//! 45      freed: the block was punched and reads as zeros; the CRC field is !0 xor the key
//! 46      doubtful: a crash may have torn the block ([`Mark::Doubtful`])
//! 47      damaged: known to be ([`Mark::Damaged`]); at most one of bits 45 to 47 is set
//! 48..64  low half of CRC32C over bits 0..48 and the location key
//! ```
//!
//! All zeros means: no such block. The *location key* is drawn from partition, extent and block
//! number. So a checksum that is right for other bytes, or for these bytes at another place, is
//! wrong here: a misdirected write is noticed at both of its victims, and bit rot cannot make
//! a live block look freed (48 bits would have to agree).
//!
//! # Header slot
//!
//! ```text
//! offset size what                                                    read for
//!      0    8 magic "MLPEXT01"                                        correctness
//!      8    8 sequence: the greater of two valid slots counts         correctness
//!     16    8 partition                                               misdirected writes
//!     24    8 extent                                                  misdirected writes
//!     32    8 epoch in which the extent is appended                   correctness
//!     40    8 inode that owns a large extent                          offers of unpublished bytes
//!     48   16 session that writes it                                  the same
//!     64    4 flags: 1 sealed, 2 overwritten, 4 cut pending,          correctness
//!             8 last block doubtful, 16 last block damaged
//!     68    4 CRC32C of the last, partial block up to `length`        correctness
//!     72    8 length when the header was written; final if sealed     correctness
//!     80    8 floor: bytes below it were on disk before that          tells rot from a torn tail
//!     88    8 commit offset, as far as known                          the same; a hint
//!     96    4 slot number                                             misdirected writes
//!    100   24 0
//!    124    4 CRC32C of bytes 0..124
//! ```
//!
//! A header is written to the slot that does *not* hold the last flushed one.
//!
//! # Why a crash at any moment keeps what was flushed
//!
//! We assume of the disk: a flush that reported success is durable; of what was written since, any
//! subset of 4 KiB pages is on disk, in any of the states they had since; a page that was being
//! written may be torn at 512 bytes. (Disks that lie are caught by the checksums, see above.)
//!
//! * *Full blocks* are written once before they are flushed. A flush makes the block and its slot
//!   durable. Neither is written again, except by overwrite, punch and repair.
//! * *The last, partial block* is the difficult one: as it grows, its slot is replaced, so the slot on
//!   disk may describe more bytes than the block on disk has. But appended bytes never change
//!   earlier ones, so the shorter checksum would still be right: the flush has put it, with the length, into
//!   the header, and the header of the last completed flush is pinned until the next one completes.
//!   Recovery takes the longest of the three candidates (slot and both headers) that verifies. Two
//!   alternating slots in the checksum array would not do: appends go on while a flush is in flight, so
//!   three states are needed (flushed, in flight, growing), and the flushed one must not be in a
//!   sector that growth rewrites.
//! * *Torn slots*: a growing slot is rewritten in place. A torn or lost one fails its own check, or
//!   describes an earlier state of the block that still verifies.
//! * *Stale blocks*: after a crash, blocks beyond the valid prefix may hold bytes of appends that were lost in
//!   part. Before the first append to a reopened extent, everything beyond its end is cleared
//!   and flushed; otherwise a second crash could find them joined to newer bytes.
//! * *Cut*: the sealed length is first made durable in the header with `cut pending`; then the last slot is replaced and the
//!   rest cleared; a crash in between does this again.
//! * *Overwrite*: the range is on disk, and the floor in the flushed header is above it, before the first
//!   byte changes. So a block torn by an overwrite is never mistaken for a torn tail: it stays
//!   part of the extent, fails verification, and the Raft log, which is trimmed only after a flush, repeats the
//!   overwrite. Bytes of it that the overwrite does not cover are then taken
//!   as they are (they were rewritten with the values they had, so a torn page holds them either way).
//!   But a block with rot in those bytes looks the same, so such a block is *doubtful*: its slot is
//!   marked, it is not served, and comes from another replica. If no replica has it whole (power failed
//!   everywhere), and two made the same of it, it is accepted. One that is known to be damaged, and not
//!   by a crash, has another mark, and is never accepted. That mark holds whatever the bytes are: a crash
//!   between bytes and slot does not take it away, only a write of all that the block has.

use milpa_types::{
    BLOCK_BYTES, EXTENT_BYTES_MAX, Epoch, ExtentId, InodeId, PartitionId, SessionId,
};
use milpa_wire::frame::crc32c;

/// Bytes of a block, as an index.
pub(super) const BLOCK: usize = BLOCK_BYTES as usize;
/// Where header slot 0 is.
pub(super) const HEADER_OFFSET: u64 = EXTENT_BYTES_MAX;
/// Distance of the header slots: one sector each.
pub(super) const HEADER_STRIDE: u64 = 512;
/// Where the checksum slots are.
pub(super) const SLOTS_OFFSET: u64 = HEADER_OFFSET + 2 * HEADER_STRIDE;
/// Bytes of a checksum slot.
pub(super) const SLOT_BYTES: usize = 8;
/// Blocks in a full extent.
pub(super) const BLOCKS_MAX: u64 = EXTENT_BYTES_MAX / BLOCK_BYTES;
/// One past the last byte that an extent file can have.
pub(super) const FILE_BYTES_MAX: u64 = SLOTS_OFFSET + BLOCKS_MAX * SLOT_BYTES as u64;
/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"MLPEXT01";
const FREED: u64 = 1 << 45;
const DOUBTFUL: u64 = 1 << 46;
const DAMAGED: u64 = 1 << 47;
const TAIL_DOUBTFUL: u32 = 8;
const TAIL_DAMAGED: u32 = 16;
const LENGTH_MASK: u64 = 0x1fff;

/// Where the slot of a block is.
pub(super) fn slot_offset(block: u64) -> u64 {
    SLOTS_OFFSET + block * SLOT_BYTES as u64
}

/// Blocks that `length` bytes take, the last perhaps partial.
pub(super) fn block_count(length: u64) -> u64 {
    length.div_ceil(BLOCK_BYTES)
}

/// What binds a checksum to its place: one value for each extent, stirred with the block number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u32);

impl Place {
    pub(super) fn new(partition: PartitionId, extent: ExtentId) -> Place {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&partition.0.to_le_bytes());
        bytes[8..].copy_from_slice(&extent.0.to_le_bytes());
        Place(crc32c(&bytes))
    }

    /// Distinct for all blocks of an extent: multiplication with an odd number is a bijection.
    fn key(self, block: u64) -> u32 {
        self.0 ^ (block as u32).wrapping_add(1).wrapping_mul(0x9E37_79B1)
    }
}

/// Why a block is not served, though its checksum may be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// A crash may have torn it, and the log has completed it. Only of the bytes with this checksum.
    Doubtful,
    /// It is known to be damaged, whatever its bytes are, until all of them are written.
    Damaged,
}

impl Mark {
    /// Its bits in a checksum slot, above the first 32.
    fn slot_bits(mark: Option<Mark>) -> u64 {
        match mark {
            None => 0,
            Some(Mark::Doubtful) => DOUBTFUL >> 32,
            Some(Mark::Damaged) => DAMAGED >> 32,
        }
    }

    /// Its bits among a header's flags.
    fn flags(mark: Option<Mark>) -> u32 {
        match mark {
            None => 0,
            Some(Mark::Doubtful) => TAIL_DOUBTFUL,
            Some(Mark::Damaged) => TAIL_DAMAGED,
        }
    }
}

/// What is known of the bytes of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    /// Their CRC32C.
    pub(super) crc: u32,
    pub(super) mark: Option<Mark>,
}

impl Sum {
    /// Of bytes that are served.
    pub(super) fn whole(crc: u32) -> Sum {
        Sum { crc, mark: None }
    }

    /// The slot of a block with so many bytes.
    pub(super) fn slot(self, length: u16) -> Slot {
        match self {
            Sum { crc, mark: None } => Slot::Live { crc, length },
            Sum { crc, mark: Some(mark) } => Slot::Marked { mark, crc, length },
        }
    }
}

/// What a checksum slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// There is no such block.
    Empty,
    /// The first `length` bytes of the block have this CRC32C.
    Live { crc: u32, length: u16 },
    /// They had it, and are not to be served.
    Marked { mark: Mark, crc: u32, length: u16 },
    /// The block was punched.
    Freed { length: u16 },
    /// The slot itself is torn, rotten or misdirected.
    Damaged,
}

impl Slot {
    /// What it says of the bytes; nothing if it says nothing.
    pub(super) fn sum(self) -> Sum {
        match self {
            Slot::Live { crc, .. } => Sum::whole(crc),
            Slot::Marked { mark, crc, .. } => Sum { crc, mark: Some(mark) },
            Slot::Empty | Slot::Freed { .. } | Slot::Damaged => Sum::default(),
        }
    }

    pub(super) fn encode(self, place: Place, block: u64) -> u64 {
        let (sum, low) = match self {
            Slot::Empty | Slot::Damaged => return 0,
            Slot::Live { crc, length } => (crc, u64::from(length)),
            Slot::Marked { mark, crc, length } => {
                (crc, u64::from(length) | Mark::slot_bits(Some(mark)))
            }
            Slot::Freed { length } => (!0, u64::from(length) | FREED >> 32),
        };
        let key = place.key(block);
        seal_slot(u64::from(sum ^ key) | low << 32, key)
    }

    pub(super) fn decode(raw: u64, place: Place, block: u64) -> Slot {
        if raw == 0 {
            return Slot::Empty;
        }
        let key = place.key(block);
        let length = (raw >> 32 & LENGTH_MASK) as u16;
        if seal_slot(raw & ((1 << 48) - 1), key) != raw || length == 0 || length as usize > BLOCK {
            return Slot::Damaged;
        }
        let crc = raw as u32 ^ key;
        match raw & (FREED | DOUBTFUL | DAMAGED) {
            0 => Slot::Live { crc, length },
            DOUBTFUL => Slot::Marked { mark: Mark::Doubtful, crc, length },
            DAMAGED => Slot::Marked { mark: Mark::Damaged, crc, length },
            FREED if crc == u32::MAX => Slot::Freed { length },
            _ => Slot::Damaged,
        }
    }
}

/// Adds the check of the low 48 bits. A sealed slot is never mistaken for `Empty`: its length is at least 1.
fn seal_slot(low: u64, key: u32) -> u64 {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&low.to_le_bytes());
    bytes[8..].copy_from_slice(&key.to_le_bytes());
    low | u64::from(crc32c(&bytes) & 0xffff) << 48
}

/// The header of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) partition: PartitionId,
    pub(super) extent: ExtentId,
    pub(super) epoch: Epoch,
    pub(super) inode: InodeId,
    pub(super) session: SessionId,
    pub(super) sealed: bool,
    pub(super) overwritten: bool,
    pub(super) cut_pending: bool,
    pub(super) tail: Sum,
    pub(super) length: u64,
    pub(super) floor: u64,
    pub(super) committed: u64,
}

impl Header {
    pub(super) fn encode(&self, slot: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| {
            if let Some(target) = bytes.get_mut(at..at + field.len()) {
                target.copy_from_slice(field);
            }
        };
        let flags = u32::from(self.sealed)
            | u32::from(self.overwritten) << 1
            | u32::from(self.cut_pending) << 2
            | Mark::flags(self.tail.mark);
        put(0, &MAGIC);
        put(8, &self.sequence.to_le_bytes());
        put(16, &self.partition.0.to_le_bytes());
        put(24, &self.extent.0.to_le_bytes());
        put(32, &self.epoch.0.to_le_bytes());
        put(40, &self.inode.0.to_le_bytes());
        put(48, &self.session.0.to_le_bytes());
        put(64, &flags.to_le_bytes());
        put(68, &self.tail.crc.to_le_bytes());
        put(72, &self.length.to_le_bytes());
        put(80, &self.floor.to_le_bytes());
        put(88, &self.committed.to_le_bytes());
        put(96, &slot.to_le_bytes());
        let crc = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header in `bytes`, unless it is torn, rotten, or of another place.
    pub(super) fn decode(
        bytes: &[u8; HEADER_BYTES],
        slot: u32,
        partition: PartitionId,
        extent: ExtentId,
    ) -> Option<Header> {
        let crc = crc32c(&bytes[..HEADER_BYTES - 4]);
        let flags = u32_at(bytes, 64);
        let tail_mark = match flags & (TAIL_DOUBTFUL | TAIL_DAMAGED) {
            0 => None,
            TAIL_DOUBTFUL => Some(Mark::Doubtful),
            _ => Some(Mark::Damaged),
        };
        let header = Header {
            sequence: u64_at(bytes, 8),
            partition: PartitionId(u64_at(bytes, 16)),
            extent: ExtentId(u64_at(bytes, 24)),
            epoch: Epoch(u64_at(bytes, 32)),
            inode: InodeId(u64_at(bytes, 40)),
            session: SessionId(u128::from(u64_at(bytes, 48)) | u128::from(u64_at(bytes, 56)) << 64),
            sealed: flags & 1 != 0,
            overwritten: flags & 2 != 0,
            cut_pending: flags & 4 != 0,
            tail: Sum { crc: u32_at(bytes, 68), mark: tail_mark },
            length: u64_at(bytes, 72),
            floor: u64_at(bytes, 80),
            committed: u64_at(bytes, 88),
        };
        let here = bytes[..8] == MAGIC
            && u32_at(bytes, HEADER_BYTES - 4) == crc
            && u32_at(bytes, 96) == slot
            && header.partition == partition
            && header.extent == extent;
        let sane = header.length <= EXTENT_BYTES_MAX && header.floor <= header.length;
        (here && sane).then_some(header)
    }

    /// The last, partial block and its slot, as the header knows them.
    pub(super) fn tail(&self) -> Option<(u64, Slot)> {
        let within = self.length % BLOCK_BYTES;
        (within != 0).then(|| (self.length / BLOCK_BYTES, self.tail.slot(within as u16)))
    }
}

/// The little-endian number at `at`; 0 where the bytes end, which no caller reaches.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |field| u32::from_le_bytes(*field))
}

/// As [`u32_at`].
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |field| u64::from_le_bytes(*field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        Place::new(PartitionId(7), ExtentId(9))
    }

    fn header() -> Header {
        Header {
            sequence: 5,
            partition: PartitionId(7),
            extent: ExtentId(9),
            epoch: Epoch(3),
            inode: InodeId(11),
            session: SessionId(1 << 100 | 13),
            sealed: true,
            overwritten: false,
            cut_pending: true,
            tail: Sum::whole(0xDEAD_BEEF),
            length: 5_000,
            floor: 4_096,
            committed: 4_999,
        }
    }

    #[test]
    fn every_flipped_bit_of_a_slot_is_noticed() {
        for slot in [
            Slot::Live { crc: 0x1234_5678, length: 4096 },
            Slot::Live { crc: 0, length: 1 },
            Slot::Freed { length: 4096 },
            Slot::Marked { mark: Mark::Doubtful, crc: u32::MAX, length: 4096 },
            Slot::Marked { mark: Mark::Damaged, crc: 7, length: 9 },
        ] {
            let raw = slot.encode(place(), 3);
            assert_eq!(Slot::decode(raw, place(), 3), slot);
            for bit in 0..64 {
                let flipped = Slot::decode(raw ^ 1 << bit, place(), 3);
                assert_eq!(flipped, Slot::Damaged, "bit {bit} of {slot:?}");
            }
        }
    }

    /// A write that went to a neighbouring slot, or to another extent, is no checksum there.
    #[test]
    fn a_misdirected_slot_is_noticed() {
        let raw = Slot::Live { crc: 77, length: 100 }.encode(place(), 3);
        let mut noticed = 0;
        for block in (0..1000).filter(|block| *block != 3) {
            let there = Slot::decode(raw, place(), block);
            assert_ne!(there, Slot::Live { crc: 77, length: 100 }, "block {block}");
            noticed += u32::from(there == Slot::Damaged);
        }
        assert_eq!(noticed, 999);
        let elsewhere = Place::new(PartitionId(7), ExtentId(10));
        assert_eq!(Slot::decode(raw, elsewhere, 3), Slot::Damaged);
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed() {
        let bytes = header().encode(1);
        let decode = |bytes: &_, slot| Header::decode(bytes, slot, PartitionId(7), ExtentId(9));
        assert_eq!(decode(&bytes, 1), Some(header()));
        assert_eq!(decode(&bytes, 0), None, "the other slot");
        for bit in 0..HEADER_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&damaged, 1), None, "bit {bit}");
        }
        assert_eq!(Header::decode(&bytes, 1, PartitionId(8), ExtentId(9)), None);
        assert_eq!(Header::decode(&bytes, 1, PartitionId(7), ExtentId(8)), None);
    }

    /// Version 1 of the format. If this fails, old partitions can no longer be read: make a new
    /// version instead of changing these numbers.
    #[test]
    fn the_format_of_version_1_is_pinned() {
        let slot = Slot::Live { crc: 0x1234_5678, length: 4096 }.encode(place(), 3);
        let freed = Slot::Freed { length: 4096 }.encode(place(), 3);
        let sum = crc32c(&header().encode(1)[..HEADER_BYTES - 4]);
        assert_eq!((slot, freed, sum), GOLDEN, "{slot:#x} {freed:#x} {sum:#x}");
        let marked = [None, Some(Mark::Doubtful), Some(Mark::Damaged)].map(|mark| {
            let tail = Sum { mark, ..header().tail };
            let encoded = Header { tail, ..header() }.encode(1);
            (tail.slot(4096).encode(place(), 3) >> 45 & 7, encoded[64])
        });
        assert_eq!(marked, [(0, 5), (2, 13), (4, 21)]);
        assert_eq!(SLOTS_OFFSET, 268_436_480);
    }

    const GOLDEN: (u64, u64, u32) = (0x197c_1000_f662_9fb3, 0xaa2e_3000_1ba9_3634, 0x799e_d476);
}
