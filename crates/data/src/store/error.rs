//! What an operation on the store can fail with, and what to do about it.

use std::io;

use milpa_types::DataError;

/// Failure of a store operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The extent does not exist here.
    #[error("no such extent")]
    NoExtent,
    /// The extent was removed; its id never comes back.
    #[error("extent was removed")]
    Removed,
    /// The partition is being deleted: nothing is known here of any extent any more.
    #[error("the partition is being deleted")]
    Closed,
    /// An extent of this id exists.
    #[error("extent exists")]
    Exists,
    /// The offset of an append is not the extent's end.
    #[error("append is out of order: extent ends at {expected}")]
    OutOfOrder {
        /// The end.
        expected: u64,
    },
    /// The extent has no room for the bytes. Another one will.
    #[error("extent is full at {length} bytes")]
    Full {
        /// Bytes it holds.
        length: u64,
    },
    /// The extent takes no more bytes.
    #[error("extent is sealed at {length} bytes")]
    Sealed {
        /// Its final length.
        length: u64,
    },
    /// Bytes beyond the end of this replica were asked for. Another replica may have them.
    #[error("replica holds only {length} bytes")]
    Shorter {
        /// Bytes it holds.
        length: u64,
    },
    /// Bytes or their checksum on the disk are damaged. They are never served; repair the block.
    #[error("checksum mismatch in block {block}")]
    Corrupt {
        /// Index of the block within the extent.
        block: u64,
    },
    /// A crash left the block torn, and the log completed it: what it did not cover may be damaged. Not
    /// served; repair the block, or, if no replica has it whole, accept it.
    #[error("block {block} was torn by a crash")]
    Doubtful {
        /// Index of the block within the extent.
        block: u64,
    },
    /// The disk could not read. As with [`StoreError::Corrupt`], another replica can.
    #[error("cannot read block {block}")]
    ReadFailed {
        /// Index of the block within the extent.
        block: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The bytes handed in do not match the checksums handed in.
    #[error("bytes were damaged on the way")]
    DamagedInTransit,
    /// The disk is full. The extent is as it was, except after an overwrite: its blocks may then
    /// fail verification until the same overwrite is repeated.
    #[error("no space left on the disk")]
    NoSpace,
    /// A write or flush failed, now or earlier. What the disk holds of unflushed bytes is
    /// unknown, so it takes no writes any more; nothing is retried.
    #[error("disk failed and is fenced")]
    DiskFailed,
    /// A flush by another thread takes too long, or the process lacks descriptors. Try again.
    #[error("busy")]
    Busy,
    /// Offsets or lengths that make no sense.
    #[error("invalid request: {0}")]
    Invalid(&'static str),
}

impl StoreError {
    /// The block that is not what it should be, or cannot be read: another replica may have it.
    #[must_use]
    pub fn damaged_block(&self) -> Option<u64> {
        match self {
            StoreError::Corrupt { block }
            | StoreError::Doubtful { block }
            | StoreError::ReadFailed { block, .. } => Some(*block),
            _ => None,
        }
    }

    /// Whether bytes are missing here that another replica may have.
    #[must_use]
    pub fn is_lack(&self) -> bool {
        let is_shorter = matches!(self, StoreError::Shorter { .. } | StoreError::NoExtent);
        is_shorter || self.damaged_block().is_some()
    }
}

impl From<StoreError> for DataError {
    fn from(error: StoreError) -> DataError {
        match error {
            StoreError::NoExtent | StoreError::Removed => DataError::NoExtent,
            StoreError::Closed => DataError::WrongPartition,
            StoreError::OutOfOrder { expected } => DataError::OutOfOrder { expected },
            StoreError::Full { length } | StoreError::Sealed { length } => {
                DataError::Sealed { length }
            }
            StoreError::Shorter { .. } => DataError::NotHere,
            StoreError::Corrupt { block } | StoreError::ReadFailed { block, .. } => {
                DataError::Corrupt { block }
            }
            StoreError::Doubtful { block } => DataError::Doubtful { block },
            StoreError::DamagedInTransit => DataError::DamagedInTransit,
            StoreError::NoSpace => DataError::NoSpace,
            StoreError::DiskFailed => DataError::DiskFailed,
            StoreError::Busy => DataError::Busy,
            StoreError::Exists | StoreError::Invalid(_) => DataError::Invalid,
        }
    }
}

/// Why a partition's directory could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The directory cannot be read or written.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: std::path::PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The directory belongs to another partition: copied or moved by hand.
    #[error("{path} holds partition {found}, not {expected}")]
    WrongPartition {
        /// The directory.
        path: std::path::PathBuf,
        /// Whose it is.
        found: milpa_types::PartitionId,
        /// Who asked.
        expected: milpa_types::PartitionId,
    },
    /// The directory holds extents but its label is missing or of another format.
    #[error("{path} is not a partition of a format that this version reads: {reason}")]
    BadLabel {
        /// The directory.
        path: std::path::PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
}
