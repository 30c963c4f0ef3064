//! End-to-end: real processes, real mounts, the shipped program.

#![allow(clippy::unwrap_used, clippy::panic)] // In a test a panic is how failure is told.

mod crash;
mod errors;
mod files;
mod names;
mod space;

use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Writes a file and returns when it is on disk.
fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Reproducible bytes that differ by seed and position.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
