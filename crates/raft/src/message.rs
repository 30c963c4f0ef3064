//! Skeleton.
use bytes::Bytes;
use milpa_types::PartitionId;

/// The messages of all groups from one node to another, of one turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    pub(crate) messages: Vec<(PartitionId, Message)>,
}

/// One message of one group. Opaque: only [`MultiRaft`](crate::MultiRaft) makes and reads them.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {}

/// Bytes that are no frame. The connection they came from should be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Cut short, or not of our making.
    #[error("malformed frame")]
    Malformed,
}

impl Frame {
    /// The frame as pieces for a vectored write. Entry bodies of 4 KiB and more are not copied.
    #[must_use]
    pub fn encode_parts(&self) -> Vec<Bytes> {
        unimplemented!()
    }

    /// The frame in one piece.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        unimplemented!()
    }

    /// Reads a frame. Large entry bodies stay slices of `bytes`.
    ///
    /// # Errors
    ///
    /// [`FrameError`] for anything that `encode` does not produce. Never panics, never allocates
    /// more than a small multiple of the input.
    pub fn decode(bytes: Bytes) -> Result<Frame, FrameError> {
        let _ = bytes;
        unimplemented!()
    }
}
