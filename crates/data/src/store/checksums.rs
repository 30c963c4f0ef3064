//! CRC32C of 4 KiB pieces: those that come with a payload, and those that blocks have.
//!
//! The two differ when a payload does not start on a block boundary of its extent: the pieces of a
//! payload are counted from its first byte, blocks from the extent's.

use crc_fast::{CrcAlgorithm, Digest};
use milpa_wire::frame::crc32c;

use super::StoreError;
use super::format::BLOCK;

/// Checksums that came with bytes, and which piece each of them covers.
#[derive(Clone, Copy, Debug)]
pub struct Checksums<'a> {
    values: &'a [u32],
    /// Bytes that the first value covers, 1 to 4096; the others cover 4096 (the last perhaps less).
    first_bytes: usize,
}

impl<'a> Checksums<'a> {
    /// One for each 4 KiB from the payload's first byte, as appends and overwrites carry them.
    #[must_use]
    pub fn of_payload(values: &'a [u32]) -> Checksums<'a> {
        Checksums { values, first_bytes: BLOCK }
    }

    /// The first up to the extent's next 4 KiB boundary after `offset`, as reads return them.
    #[must_use]
    pub fn of_blocks(values: &'a [u32], offset: u64) -> Checksums<'a> {
        Checksums { values, first_bytes: BLOCK - offset as usize % BLOCK }
    }

    /// Whether the bytes are those that the checksums were computed of.
    ///
    /// # Errors
    ///
    /// [`StoreError::DamagedInTransit`].
    pub(super) fn verify(&self, bytes: &[u8]) -> Result<(), StoreError> {
        let mut values = self.values.iter();
        let matches = pieces(bytes, self.first_bytes)
            .all(|piece| values.next().is_some_and(|value| *value == crc32c(piece)));
        if matches && values.next().is_none() { Ok(()) } else { Err(StoreError::DamagedInTransit) }
    }

    /// The checksums themselves, if each of them covers one block of an extent at `offset`.
    pub(super) fn as_blocks(&self, offset: u64) -> Option<&'a [u32]> {
        (self.first_bytes == BLOCK - offset as usize % BLOCK).then_some(self.values)
    }
}

/// The checksums of a payload, as its sender attaches them.
#[must_use]
pub fn checksums_of(payload: &[u8]) -> Vec<u32> {
    payload.chunks(BLOCK).map(crc32c).collect()
}

/// The checksums of bytes at an offset of an extent, by blocks, as reads return them.
#[must_use]
pub fn block_checksums(offset: u64, bytes: &[u8]) -> Vec<u32> {
    pieces(bytes, BLOCK - offset as usize % BLOCK).map(crc32c).collect()
}

/// `bytes` in pieces of which the first has `first_bytes`, the others 4 KiB.
pub(super) fn pieces(bytes: &[u8], first_bytes: usize) -> impl Iterator<Item = &[u8]> {
    let (first, rest) = bytes.split_at_checked(first_bytes).unwrap_or((bytes, &[]));
    std::iter::once(first).filter(|first| !first.is_empty()).chain(rest.chunks(BLOCK))
}

/// The CRC of `before` and `bytes` one after the other, without the bytes of the former.
pub(super) fn extend_crc(before: u32, bytes: &[u8]) -> u32 {
    // CRC-32/ISCSI inverts at the start and at the end: undo the latter to go on.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!before));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crc_is_extended_without_its_bytes() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        for cut in [0, 1, 100, 4095, 4096, 9_999, 10_000] {
            let (before, after) = bytes.split_at(cut);
            assert_eq!(extend_crc(crc32c(before), after), crc32c(&bytes), "cut at {cut}");
        }
    }

    #[test]
    fn checksums_must_match_in_value_and_number() {
        let bytes = vec![7u8; 10_000];
        let sums = checksums_of(&bytes);
        assert!(Checksums::of_payload(&sums).verify(&bytes).is_ok());
        assert!(Checksums::of_payload(&sums[..2]).verify(&bytes).is_err());
        assert!(Checksums::of_payload(&sums).verify(&bytes[..8192]).is_err());
        assert!(Checksums::of_payload(&sums).verify(&bytes[1..]).is_err());
        let blocks: Vec<u32> = pieces(&bytes, 96).map(crc32c).collect();
        assert!(Checksums::of_blocks(&blocks, 4000).verify(&bytes).is_ok());
        assert!(Checksums::of_payload(&blocks).verify(&bytes).is_err());
    }
}
