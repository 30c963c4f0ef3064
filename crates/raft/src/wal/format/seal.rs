//! Makes the checksums of a changed segment right, so that fuzzing gets behind them.

use milpa_wire::decoder::put;

use super::{
    BATCH_HEADER_BYTES, BATCH_MAGIC, BLOCK_BYTES, Fields, RECORD_HEADER_BYTES,
    SEGMENT_FIELDS_BYTES, SEGMENT_HEADER_BYTES, body_crc, chain_of, padded_body, placed_crc,
};

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| Fields(rest).u32()).unwrap_or_default()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| Fields(rest).u64()).unwrap_or_default()
}

/// All checksums, and the chain from each batch to the next.
pub(crate) fn seal_segment(segment: &mut [u8]) {
    for (copy, block) in segment.chunks_mut(BLOCK_BYTES as usize).take(2).enumerate() {
        let Some(covered) = block.get(..SEGMENT_FIELDS_BYTES - 4) else { continue };
        let crc = placed_crc(covered, 0, copy as u64);
        put(block, SEGMENT_FIELDS_BYTES - 4, &crc.to_le_bytes());
    }
    let salt = u64_at(segment, 56);
    let mut chain = None;
    for offset in (SEGMENT_HEADER_BYTES..segment.len() as u64).step_by(BLOCK_BYTES as usize) {
        let Some(batch) = segment.get_mut(offset as usize..) else { continue };
        if u32_at(batch, 0) != BATCH_MAGIC {
            continue;
        }
        if let Some(chain) = chain {
            put(batch, 40, &u64::to_le_bytes(chain));
        }
        seal_batch(batch, salt, offset);
        chain = batch.get(..u32_at(batch, 32) as usize).map(chain_of);
    }
}

fn seal_batch(batch: &mut [u8], salt: u64, offset: u64) {
    let (number, records) = (u64_at(batch, 8), u32_at(batch, 36));
    if let Some(covered) = batch.get(..BATCH_HEADER_BYTES - 4) {
        let crc = placed_crc(covered, salt, offset);
        put(batch, BATCH_HEADER_BYTES - 4, &crc.to_le_bytes());
    }
    let mut at = BATCH_HEADER_BYTES;
    for _ in 0..records {
        let Some(record) = batch.get_mut(at..) else { break };
        let length = u32_at(record, 4) as usize;
        let body = record.get(RECORD_HEADER_BYTES..).and_then(|rest| rest.get(..length));
        let Some(crc) = body.map(body_crc) else { break };
        put(record, 40, &crc.to_le_bytes());
        let covered = record.get(..RECORD_HEADER_BYTES - 4).unwrap_or_default();
        let crc = placed_crc(covered, salt, number);
        put(record, RECORD_HEADER_BYTES - 4, &crc.to_le_bytes());
        at += RECORD_HEADER_BYTES + padded_body(length);
    }
}
