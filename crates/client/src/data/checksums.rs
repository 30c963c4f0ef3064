//! CRC32C for each 4 KiB, as the data protocol wants them.

use milpa_types::BLOCK_BYTES;
use milpa_wire::frame::crc32c;

/// One checksum for each 4 KiB of `bytes`, counted from its first byte.
pub(crate) fn of_payload(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_BYTES as usize).map(crc32c).collect()
}

/// Checks bytes that were read at `offset` of an extent: the first checksum covers the bytes up to
/// the next 4 KiB boundary of the extent.
pub(crate) fn match_read(offset: u64, bytes: &[u8], checksums: &[u32]) -> bool {
    let first = (BLOCK_BYTES - offset % BLOCK_BYTES).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at(first);
    let mut expected = checksums.iter();
    let mut blocks = (!head.is_empty()).then_some(head).into_iter();
    let matches = |block: &[u8], sum: Option<&u32>| sum.is_some_and(|sum| crc32c(block) == *sum);
    blocks.all(|block| matches(block, expected.next()))
        && rest.chunks(BLOCK_BYTES as usize).all(|block| matches(block, expected.next()))
        && expected.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_checked_by_the_extents_blocks() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
        let sums = [
            crc32c(&bytes[..96]),
            crc32c(&bytes[96..4192]),
            crc32c(&bytes[4192..8288]),
            crc32c(&bytes[8288..]),
        ];
        assert!(match_read(4000, &bytes, &sums));
        assert!(!match_read(0, &bytes, &sums));
        assert!(!match_read(4000, &bytes, &sums[..3]), "a checksum is missing");
        let mut damaged = bytes.clone();
        damaged[5000] ^= 1;
        assert!(!match_read(4000, &damaged, &sums));
        assert!(match_read(8192, &bytes, &of_payload(&bytes)));
        assert!(match_read(7, &[], &[]));
    }
}
