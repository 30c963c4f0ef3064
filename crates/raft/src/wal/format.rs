//! Headers and checksums: bytes in, bytes out. The byte tables are in the [module](super) doc.

use crc_fast::{CrcAlgorithm, Digest, checksum};

#[cfg(any(test, feature = "decoders"))]
pub(crate) mod seal;

/// Batches start at multiples of this, so a flush never rewrites a page that holds durable bytes.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// Two copies of the segment header, one block each.
pub(crate) const SEGMENT_HEADER_BYTES: u64 = 2 * BLOCK_BYTES;
/// Largest segment. A header that names more would make its reader allocate as much.
pub(crate) const SEGMENT_BYTES_MAX: u64 = 1 << 30;
pub(crate) const BATCH_HEADER_BYTES: usize = 64;
pub(crate) const RECORD_HEADER_BYTES: usize = 48;

const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"MILPAWAL");
const SEGMENT_FIELDS_BYTES: usize = 96;
const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"MWB1");
const RECORD_MAGIC: u16 = u16::from_le_bytes(*b"MR");
const VERSION: u32 = 1;

/// Reads fields off a byte slice, front to back. Running out yields `None`, never a panic.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(length)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        Some(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }
}

/// CRC32C of `bytes` and of where they belong, so that a block that landed elsewhere, or that was
/// left by the segment file's former life, never verifies.
fn placed_crc(bytes: &[u8], salt: u64, place: u64) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(bytes);
    digest.update(&salt.to_le_bytes());
    digest.update(&place.to_le_bytes());
    digest.finalize() as u32
}

/// CRC32C of a record's body.
pub(crate) fn body_crc(body: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, body) as u32
}

/// The link of the hash chain: a digest of a whole batch, which contains its predecessor's.
pub(crate) fn chain_of(batch: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, batch)
}

/// Spreads the bits of `x` (`SplitMix64`'s finalizer).
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The first two blocks of a segment file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// Rising; also the file's name.
    pub(crate) seq: u64,
    /// Whose log this is.
    pub(crate) owner: [u8; 16],
    /// The number of the first batch in here. All lower ones were durable when this was written.
    pub(crate) first_batch: u64,
    /// The chain link of the batch before.
    pub(crate) chain: u64,
    /// Enters every checksum of the segment. Secret, so that user data cannot look like a batch.
    pub(crate) salt: u64,
    /// The file's size when it was made.
    pub(crate) segment_bytes: u64,
}

impl SegmentHeader {
    /// Both copies.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; SEGMENT_HEADER_BYTES as usize];
        for (copy, block) in out.chunks_mut(BLOCK_BYTES as usize).enumerate() {
            let mut fields = Vec::with_capacity(SEGMENT_FIELDS_BYTES);
            fields.extend_from_slice(&SEGMENT_MAGIC.to_le_bytes());
            fields.extend_from_slice(&VERSION.to_le_bytes());
            fields.extend_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
            fields.extend_from_slice(&self.seq.to_le_bytes());
            fields.extend_from_slice(&self.owner);
            fields.extend_from_slice(&self.first_batch.to_le_bytes());
            fields.extend_from_slice(&self.chain.to_le_bytes());
            fields.extend_from_slice(&self.salt.to_le_bytes());
            fields.extend_from_slice(&self.segment_bytes.to_le_bytes());
            fields.resize(SEGMENT_FIELDS_BYTES - 4, 0);
            let crc = placed_crc(&fields, 0, copy as u64);
            fields.extend_from_slice(&crc.to_le_bytes());
            block.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
        }
        out
    }

    /// The first of the two copies that verifies.
    pub(crate) fn decode(bytes: &[u8]) -> Option<SegmentHeader> {
        bytes
            .chunks(BLOCK_BYTES as usize)
            .take(2)
            .enumerate()
            .find_map(|(copy, block)| Self::decode_copy(block, copy as u64))
    }

    fn decode_copy(block: &[u8], copy: u64) -> Option<SegmentHeader> {
        let covered = block.get(..SEGMENT_FIELDS_BYTES - 4)?;
        let crc = Fields(block.get(SEGMENT_FIELDS_BYTES - 4..)?).u32()?;
        if placed_crc(covered, 0, copy) != crc {
            return None;
        }
        let mut fields = Fields(covered);
        let known = fields.u64()? == SEGMENT_MAGIC
            && fields.u32()? == VERSION
            && u64::from(fields.u32()?) == BLOCK_BYTES;
        known.then_some(())?;
        let header = SegmentHeader {
            seq: fields.u64()?,
            owner: fields.array()?,
            first_batch: fields.u64()?,
            chain: fields.u64()?,
            salt: fields.u64()?,
            segment_bytes: fields.u64()?,
        };
        let is_possible = (SEGMENT_HEADER_BYTES..=SEGMENT_BYTES_MAX)
            .contains(&header.segment_bytes)
            && header.segment_bytes.is_multiple_of(BLOCK_BYTES);
        is_possible.then_some(header)
    }
}

/// The start of one flushed write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchHeader {
    pub(crate) number: u64,
    pub(crate) seq: u64,
    pub(crate) offset: u64,
    /// Header and records, without the padding to the next block.
    pub(crate) length: u32,
    pub(crate) records: u32,
    /// The chain link of the batch before.
    pub(crate) chain: u64,
}

impl BatchHeader {
    pub(crate) fn encode(&self, salt: u64) -> [u8; BATCH_HEADER_BYTES] {
        let mut fields = Vec::with_capacity(BATCH_HEADER_BYTES);
        fields.extend_from_slice(&BATCH_MAGIC.to_le_bytes());
        fields.extend_from_slice(&VERSION.to_le_bytes());
        fields.extend_from_slice(&self.number.to_le_bytes());
        fields.extend_from_slice(&self.seq.to_le_bytes());
        fields.extend_from_slice(&self.offset.to_le_bytes());
        fields.extend_from_slice(&self.length.to_le_bytes());
        fields.extend_from_slice(&self.records.to_le_bytes());
        fields.extend_from_slice(&self.chain.to_le_bytes());
        fields.resize(BATCH_HEADER_BYTES - 4, 0);
        let crc = placed_crc(&fields, salt, self.offset);
        fields.extend_from_slice(&crc.to_le_bytes());
        let mut out = [0; BATCH_HEADER_BYTES];
        out.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
        out
    }

    /// Reads a header that claims to stand at `offset` of segment `seq`.
    pub(crate) fn decode(bytes: &[u8], salt: u64, seq: u64, offset: u64) -> Option<BatchHeader> {
        if Fields(bytes).u32()? != BATCH_MAGIC {
            return None;
        }
        let covered = bytes.get(..BATCH_HEADER_BYTES - 4)?;
        let crc = Fields(bytes.get(BATCH_HEADER_BYTES - 4..)?).u32()?;
        if placed_crc(covered, salt, offset) != crc {
            return None;
        }
        let mut fields = Fields(covered);
        let (_magic, version) = (fields.u32()?, fields.u32()?);
        let header = BatchHeader {
            number: fields.u64()?,
            seq: fields.u64()?,
            offset: fields.u64()?,
            length: fields.u32()?,
            records: fields.u32()?,
            chain: fields.u64()?,
        };
        // One without a length would stand before itself for ever.
        let is_possible = header.length as usize >= BATCH_HEADER_BYTES;
        let is_here = header.seq == seq && header.offset == offset;
        (version == VERSION && is_possible && is_here).then_some(header)
    }

    /// Bytes it takes in the file.
    pub(crate) fn padded_bytes(&self) -> u64 {
        u64::from(self.length).next_multiple_of(BLOCK_BYTES)
    }
}

/// The start of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) body_bytes: u32,
    pub(crate) group: u64,
    pub(crate) term: u64,
    pub(crate) index: u64,
    pub(crate) body_crc: u32,
}

impl RecordHeader {
    /// `place` is where it stands: its file offset, in the batch with this `number`.
    pub(crate) fn encode(&self, salt: u64, number: u64, offset: u64, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&RECORD_MAGIC.to_le_bytes());
        out.push(self.kind);
        out.push(self.flags);
        out.extend_from_slice(&self.body_bytes.to_le_bytes());
        out.extend_from_slice(&self.group.to_le_bytes());
        out.extend_from_slice(&self.term.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&offset.to_le_bytes());
        out.extend_from_slice(&self.body_crc.to_le_bytes());
        let crc = placed_crc(out.get(start..).unwrap_or_default(), salt, number);
        out.extend_from_slice(&crc.to_le_bytes());
    }

    /// Reads a record header that claims to stand at `offset` in batch `number`.
    pub(crate) fn decode(bytes: &[u8], salt: u64, number: u64, offset: u64) -> Option<Self> {
        let covered = bytes.get(..RECORD_HEADER_BYTES - 4)?;
        let crc = Fields(bytes.get(RECORD_HEADER_BYTES - 4..)?).u32()?;
        if placed_crc(covered, salt, number) != crc {
            return None;
        }
        let mut fields = Fields(covered);
        let magic = fields.u16()?;
        let (kind, flags) = (fields.u8()?, fields.u8()?);
        let body_bytes = fields.u32()?;
        let (group, term, index) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (place, body_crc) = (fields.u64()?, fields.u32()?);
        (magic == RECORD_MAGIC && place == offset).then_some(RecordHeader {
            kind,
            flags,
            body_bytes,
            group,
            term,
            index,
            body_crc,
        })
    }
}

/// Bodies start and end at multiples of eight.
pub(crate) fn padded_body(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_verifies_only_where_it_belongs() {
        let header =
            BatchHeader { number: 7, seq: 3, offset: 8192, length: 100, records: 1, chain: 5 };
        let bytes = header.encode(99);
        assert_eq!(BatchHeader::decode(&bytes, 99, 3, 8192), Some(header));
        assert_eq!(BatchHeader::decode(&bytes, 98, 3, 8192), None, "another life of the file");
        assert_eq!(BatchHeader::decode(&bytes, 99, 4, 8192), None, "another segment");
        assert_eq!(BatchHeader::decode(&bytes, 99, 3, 12288), None, "misdirected");
    }

    /// Checksums do not keep these away: whoever wrote them made them. A reader that believed them
    /// walked on the spot, or asked for as much memory as the header said.
    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let (number, seq, offset) = (7, 3, 8192);
        for (length, is_good) in [(0, false), (63, false), (64, true), (u32::MAX, true)] {
            let header = BatchHeader { number, seq, offset, length, records: 0, chain: 5 };
            let decoded = BatchHeader::decode(&header.encode(99), 99, seq, offset);
            assert_eq!(decoded.is_some(), is_good, "{length}");
        }
        for (size, is_good) in
            [(0, false), (8191, false), (8192, true), (1 << 30, true), (1 << 62, false)]
        {
            let (seq, owner, segment_bytes) = (1, [4; 16], size);
            let header =
                SegmentHeader { seq, owner, first_batch: 9, chain: 8, salt: 7, segment_bytes };
            assert_eq!(SegmentHeader::decode(&header.encode()).is_some(), is_good, "{size}");
        }
    }

    #[test]
    fn one_of_two_segment_headers_is_enough() {
        let header = SegmentHeader {
            seq: 1,
            owner: [4; 16],
            first_batch: 9,
            chain: 8,
            salt: 7,
            segment_bytes: 65_536,
        };
        let mut bytes = header.encode();
        bytes[20] ^= 1;
        assert_eq!(SegmentHeader::decode(&bytes), Some(header));
        bytes[4096 + 20] ^= 1;
        assert_eq!(SegmentHeader::decode(&bytes), None);
    }
}
