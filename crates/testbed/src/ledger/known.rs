//! What has to be in one file.

use std::fs::OpenOptions;
use std::path::Path;

use crate::Outcome;

/// What is known of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// What is there whatever happens, but where `pending` says otherwise.
    pub durable: Vec<u8>,
    /// How much of it an fsync covered. Behind that are zeros of a truncation, over which bytes may
    /// have been written: those may be lost, and the file end before them.
    pub synced: usize,
    /// Writes since then: offset and bytes.
    pub pending: Vec<(u64, Vec<u8>)>,
}

impl Known {
    pub fn length_max(&self) -> u64 {
        let ends = self.pending.iter().map(|(offset, bytes)| offset + bytes.len() as u64);
        ends.max().unwrap_or(0).max(self.durable.len() as u64)
    }

    /// All that was written is there for good.
    pub fn synced(&mut self) {
        for (offset, bytes) in std::mem::take(&mut self.pending) {
            let (start, end) = (offset as usize, offset as usize + bytes.len());
            self.durable.resize(self.durable.len().max(end), 0);
            self.durable[start..end].copy_from_slice(&bytes);
        }
        self.synced = self.durable.len();
    }

    pub fn length_min(&self) -> usize {
        if self.pending.is_empty() { self.durable.len() } else { self.synced }
    }

    pub fn cut(&mut self, length: u64) {
        self.durable.resize(length as usize, 0);
        self.synced = self.synced.min(length as usize);
        for (offset, bytes) in &mut self.pending {
            bytes.truncate(length.saturating_sub(*offset) as usize);
        }
        self.pending.retain(|(_, bytes)| !bytes.is_empty());
    }

    /// As `cut`, or not: what is behind `length` is zeros, or missing, or as before.
    pub fn may_be_cut(&mut self, length: u64) {
        let end = self.length_max();
        let kept = self.durable.len().min(length as usize);
        let behind = self.durable.split_off(kept);
        self.synced = self.synced.min(kept);
        if !behind.is_empty() {
            self.pending.insert(0, (kept as u64, behind));
        }
        if length > end {
            self.pending.push((end, vec![0; (length - end) as usize]));
        }
    }

    pub fn check(&self, path: &Path) -> Outcome {
        let may_be_torn = !self.pending.is_empty();
        match std::fs::read(path) {
            // What was not synced may be torn on every member. Who syncs the file next is told, and it is cut there.
            Err(error) if may_be_torn && error.raw_os_error() == Some(libc::EIO) => {
                let file = OpenOptions::new().write(true).open(path);
                let synced = file.and_then(|file| file.sync_all());
                let found = std::fs::read(path);
                let found =
                    found.map_err(|e| format!("{e}, after an fsync that gave {synced:?}"))?;
                self.check_bytes(&found)
            }
            found => self.check_bytes(&found.map_err(|e| e.to_string())?),
        }
    }

    pub fn check_bytes(&self, found: &[u8]) -> Outcome {
        let (least, most) = (self.length_min(), self.length_max() as usize);
        if found.len() < least || found.len() > most {
            return Err(format!("{} bytes, not {least} to {most}", found.len()));
        }
        let mut is_good: Vec<bool> = found
            .iter()
            .enumerate()
            // Behind the end a gap between two writes is zeros.
            .map(|(place, byte)| *byte == self.durable.get(place).copied().unwrap_or(0))
            .collect();
        for (offset, bytes) in &self.pending {
            let from = (*offset as usize).min(found.len());
            let there = is_good[from..].iter_mut().zip(&found[from..]);
            for ((is_good, byte), expected) in there.zip(bytes) {
                *is_good |= byte == expected;
            }
        }
        let Some(first) = is_good.iter().position(|is_good| !is_good) else { return Ok(()) };
        let wrong = is_good.iter().zip(found).filter(|(is_good, _)| !**is_good);
        let zeros = wrong.clone().filter(|(_, byte)| **byte == 0).count();
        Err(format!(
            "{} wrong bytes of {} ({least} synced), the first at {first}; {zeros} are zeros",
            wrong.count(),
            found.len(),
        ))
    }
}
