//! Pieces: how many small files share one extent.
//!
//! A small extent is a sequence of records, each a header of 48 bytes and the piece's bytes. To the rest
//! of the store both are plain appended bytes. An extent key points at the bytes; the header says
//! whose they are, so that pieces that no file ever got are found and offered to the inode's partition.
//!
//! ```text
//! offset size field
//!      0    4 magic "MLPP"
//!      4    4 length of the piece's bytes
//!      8    8 inode
//!     16   16 session that wrote it
//!     32    8 offset within the file
//!     40    4 0
//!     44    4 CRC32C of partition, extent, offset of the header in the extent, and bytes 0..44
//! ```
//!
//! The place is part of the CRC: a file whose *content* looks like a header (a copy of a data
//! node's disk, say) is never taken for one.

use milpa_types::{BLOCK_BYTES, ExtentId, InodeId, PartitionId, SessionId};
use milpa_wire::data::TRANSFER_BYTES_MAX;
use milpa_wire::frame::crc32c;

use super::format::{u32_at, u64_at};
use super::{ExtentStore, StoreError};

/// Bytes of a piece's header.
pub const PIECE_HEADER_BYTES: usize = 48;

const MAGIC: [u8; 4] = *b"MLPP";

/// Where a piece's header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PiecePlace {
    /// The partition.
    pub partition: PartitionId,
    /// The small extent.
    pub extent: ExtentId,
    /// The header's first byte within it; the piece's bytes follow the header.
    pub offset: u64,
}

/// Whose bytes a piece holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceHeader {
    /// The file.
    pub inode: InodeId,
    /// The session that wrote it.
    pub session: SessionId,
    /// First byte within the file.
    pub file_offset: u64,
    /// Bytes.
    pub length: u32,
}

/// A piece in a small extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its header.
    pub header: PieceHeader,
    /// First of its bytes within the extent, as extent keys have it.
    pub offset: u64,
}

impl PieceHeader {
    /// The header's bytes, for this place only.
    #[must_use]
    pub fn encode(&self, place: PiecePlace) -> [u8; PIECE_HEADER_BYTES] {
        let mut bytes = [0; PIECE_HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.inode.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.session.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.file_offset.to_le_bytes());
        let crc = header_crc(&bytes, place);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header at this place, if the bytes are one.
    #[must_use]
    pub fn decode(bytes: &[u8], place: PiecePlace) -> Option<PieceHeader> {
        let bytes: &[u8; PIECE_HEADER_BYTES] = bytes.first_chunk()?;
        let length = u32_at(bytes, 4);
        let session = u128::from(u64_at(bytes, 16)) | u128::from(u64_at(bytes, 24)) << 64;
        let valid = bytes[..4] == MAGIC
            && u32_at(bytes, 44) == header_crc(bytes, place)
            && length as usize <= TRANSFER_BYTES_MAX;
        valid.then_some(PieceHeader {
            inode: InodeId(u64_at(bytes, 8)),
            session: SessionId(session),
            file_offset: u64_at(bytes, 32),
            length,
        })
    }
}

pub(super) fn header_crc(bytes: &[u8; PIECE_HEADER_BYTES], place: PiecePlace) -> u32 {
    let mut covered = [0; 24 + 44];
    covered[..8].copy_from_slice(&place.partition.0.to_le_bytes());
    covered[8..16].copy_from_slice(&place.extent.0.to_le_bytes());
    covered[16..24].copy_from_slice(&place.offset.to_le_bytes());
    covered[24..].copy_from_slice(&bytes[..44]);
    crc32c(&covered)
}

pub(super) fn live_pieces(
    store: &ExtentStore,
    id: ExtentId,
    from: u64,
    limit: usize,
) -> Result<(Vec<Piece>, Option<u64>), StoreError> {
    if !id.is_small() {
        return Err(StoreError::Invalid("large extents have no pieces"));
    }
    let extent = store.extent(id)?;
    let (length, sealed) = {
        let state = extent.state();
        (state.length, state.sealed)
    };
    let (mut pieces, mut at) = (Vec::new(), from);
    while pieces.len() < limit {
        // A header is dead exactly if all of its piece is, so dead runs end at headers.
        if let Some((_, end)) = extent.state().dead.run_at(at) {
            at = end;
            continue;
        }
        if at + PIECE_HEADER_BYTES as u64 > length {
            return Ok((pieces, None));
        }
        let header = read_header(store, id, at)?;
        let header = header.ok_or(StoreError::Corrupt { block: at / BLOCK_BYTES })?;
        let offset = at + PIECE_HEADER_BYTES as u64;
        at = offset + u64::from(header.length);
        if at > length && !sealed {
            // The last append of a crashed node, half of it there: nobody was told about it. More
            // may arrive until the extent is sealed; then it is offered like all that has no owner.
            return Ok((pieces, None));
        }
        pieces.push(Piece { header, offset });
    }
    Ok((pieces, Some(at)))
}

/// The header at `offset` of a small extent, if there is one.
pub(super) fn read_header(
    store: &ExtentStore,
    id: ExtentId,
    offset: u64,
) -> Result<Option<PieceHeader>, StoreError> {
    let stored = store.read(id, offset, PIECE_HEADER_BYTES as u32)?;
    let place = PiecePlace { partition: store.partition, extent: id, offset };
    Ok(PieceHeader::decode(&stored.bytes, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_one_at_its_own_place_only() {
        let header = PieceHeader {
            inode: InodeId(5),
            session: SessionId(1 << 90 | 6),
            file_offset: 4096,
            length: 700,
        };
        let place =
            PiecePlace { partition: PartitionId(1), extent: ExtentId::small(2), offset: 12_345 };
        let bytes = header.encode(place);
        assert_eq!(PieceHeader::decode(&bytes, place), Some(header));
        assert_eq!(PieceHeader::decode(&bytes, PiecePlace { offset: 12_346, ..place }), None);
        let elsewhere = PiecePlace { extent: ExtentId::small(3), ..place };
        assert_eq!(PieceHeader::decode(&bytes, elsewhere), None);
        assert_eq!(PieceHeader::decode(&bytes[..47], place), None);
        for bit in 0..PIECE_HEADER_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(PieceHeader::decode(&damaged, place), None, "bit {bit}");
        }
    }
}
