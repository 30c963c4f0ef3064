//! Skeleton of the snapshot API; bodies follow.

use std::io::Read;

use milpa_types::{MetaSlot, PartitionId, VolumeId, VolumeOptions};
use serde::{Deserialize, Serialize};

use super::Partition;

/// What a snapshot file says of itself in its first piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotHeader {
    /// Layout of the file.
    pub format: u16,
    /// The partition.
    pub partition: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// Which inode ids it owns.
    pub slot: MetaSlot,
    /// The volume's options as of `index`.
    pub options: VolumeOptions,
    /// Log index of the last entry in the state.
    pub index: u64,
    /// Raft term of that entry.
    pub term: u64,
    /// Records of each table.
    pub counts: Vec<u64>,
}

/// The state at one log index, frozen, while the partition goes on. `Send`: it may be written by a
/// thread of its own. Holding it costs memory only for what changes meanwhile.
pub struct Snapshot {
    header: SnapshotHeader,
}

impl Snapshot {
    /// What it is of.
    #[must_use]
    pub fn header(&self) -> &SnapshotHeader {
        &self.header
    }

    /// The next bytes of the file, about `bytes_max` of them; `None` when all were given.
    pub fn next_piece(&mut self, bytes_max: usize) -> Option<Vec<u8>> {
        let _ = bytes_max;
        None
    }
}

/// Why a snapshot file was refused. The replica asks a peer for another.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The file could not be read.
    #[error("snapshot could not be read")]
    Read(#[from] std::io::Error),
    /// The file ends early: a torn write.
    #[error("snapshot is torn after {pieces} whole pieces")]
    Torn {
        /// Whole pieces before the tear.
        pieces: u64,
    },
    /// A checksum or the state hash does not match: bit rot.
    #[error("snapshot is damaged in piece {piece}: {what}")]
    Damaged {
        /// Counted from 0.
        piece: u64,
        /// What did not match.
        what: &'static str,
    },
    /// Written by a newer build.
    #[error("snapshot format {format} is not known to this build")]
    Format {
        /// The file's.
        format: u16,
    },
}

/// Rebuilds a partition from the bytes of a snapshot file.
///
/// # Errors
///
/// [`RestoreError`]; nothing of a refused file is used.
pub fn restore(reader: impl Read) -> Result<(Partition, SnapshotHeader), RestoreError> {
    let _ = reader;
    Err(RestoreError::Torn { pieces: 0 })
}

pub(super) fn freeze(header: SnapshotHeader) -> Snapshot {
    Snapshot { header }
}
