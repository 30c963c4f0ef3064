//! The state as bytes: for the checkpoint, for a replica too far behind, and for comparing.
//!
//! ```text
//! offset size field
//!      0    4 magic "MLMS"
//!      4    4 format: 9; before, the last field of the state was missing (8); two more (7); the checksum was of the state
//!             alone (6); one more field was missing (5), and one more (4); and the one before these was another one (3)
//!             or missing too (2)
//!      8    4 CRC32C of all else
//!     12    . the state (postcard)
//! ```
//!
//! The checksum says what a format is worth that this program does not know: with a flipped bit in it the bytes are
//! damaged, and not a newer program's.

use std::collections::BTreeMap;

use milpa_types::{ClusterId, Epoch, NodeId, PartitionId, VolumeId};
use milpa_wire::DecodeError;
use milpa_wire::frame::{crc32c, crc32c_of};

use super::node::NodeRecord;
use super::partition::{DataRecord, MetaRecord, Removal};
use super::state::State;
use super::task::Task;
use super::volume::VolumeRecord;

const MAGIC: [u8; 4] = *b"MLMS";
const FORMAT: u32 = 9;
/// With a checksum that leaves the header out.
const FORMAT_WITH_BARE_HEADER: u32 = 6;
/// With epochs in `whole`, where members are named now.
const FORMAT_WITH_EPOCHS: u32 = 3;
/// The first one that is read.
const FORMAT_FIRST: u32 = 2;
const HEADER_BYTES: usize = 12;

/// The fields of the state in all formats: all but `whole` and what comes after it.
type Fields = (
    ClusterId,
    u64,
    u32,
    u32,
    u64,
    u64,
    BTreeMap<NodeId, NodeRecord>,
    BTreeMap<VolumeId, VolumeRecord>,
    BTreeMap<PartitionId, MetaRecord>,
    BTreeMap<PartitionId, DataRecord>,
    BTreeMap<PartitionId, Removal>,
    u64,
    BTreeMap<PartitionId, Task>,
);

/// Bytes that are no state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Not written by a manager, or cut short.
    #[error("{length} bytes are not a state of the manager")]
    Malformed {
        /// Bytes given.
        length: usize,
    },
    /// Written by a newer program.
    #[error("state has the format {found}, this program knows {FORMAT}; use the newer program")]
    Newer {
        /// The format found.
        found: u32,
    },
    /// Written by a program from before the first release.
    #[error("state has the old format {found}, this program knows {FORMAT}; make a new cluster")]
    Older {
        /// The format found.
        found: u32,
    },
    /// Damaged since it was written.
    #[error("state is damaged: its checksum does not match")]
    Damaged,
}

impl State {
    /// The state as bytes. Equal states give equal bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let body = milpa_wire::encode(self);
        let head = [MAGIC, FORMAT.to_le_bytes()].concat();
        let checksum = crc32c_of(&[&head[..], &body]);
        [&head[..], &checksum.to_le_bytes(), &body].concat()
    }

    /// Reads what [`State::encode`] wrote.
    ///
    /// # Errors
    ///
    /// [`SnapshotError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<State, SnapshotError> {
        let malformed = || SnapshotError::Malformed { length: bytes.len() };
        let (head, body) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(malformed)?;
        let ([magic, format, checksum], []) = head.as_chunks::<4>() else {
            return Err(malformed());
        };
        if *magic != MAGIC {
            return Err(malformed());
        }
        let found = u32::from_le_bytes(*format);
        let covered = match found {
            ..=FORMAT_WITH_BARE_HEADER => crc32c(body),
            _ => crc32c_of(&[&magic[..], format, body]),
        };
        if u32::from_le_bytes(*checksum) != covered {
            return Err(SnapshotError::Damaged);
        }
        let state = match found {
            ..FORMAT_FIRST => return Err(SnapshotError::Older { found }),
            FORMAT_WITH_EPOCHS => from_epochs(body),
            FORMAT_FIRST..=FORMAT => from_older(body, maps_missing(found)),
            _ => return Err(SnapshotError::Newer { found }),
        };
        state.map_err(|_| malformed())
    }

    /// A hash that tells whether two replicas at the same applied index agree.
    #[must_use]
    pub fn hash(&self) -> u32 {
        crc32c(&milpa_wire::encode(self))
    }
}

/// How many of the state's last fields, all of them maps, a format does not have.
fn maps_missing(format: u32) -> usize {
    match format {
        ..=FORMAT_WITH_EPOCHS => 6,
        4 => 5,
        5 => 4,
        FORMAT_WITH_BARE_HEADER | 7 => 3,
        8 => 1,
        _ => 0,
    }
}

fn from_older(body: &[u8], maps_missing: usize) -> Result<State, DecodeError> {
    let empty = milpa_wire::encode(&BTreeMap::<PartitionId, Epoch>::new());
    milpa_wire::decode(&[body, &empty.repeat(maps_missing)].concat())
}

/// With the epoch of which it was known that all members are whole. Of others it is seen again soon.
fn from_epochs(body: &[u8]) -> Result<State, DecodeError> {
    let (fields, epochs): (Fields, BTreeMap<PartitionId, Epoch>) = milpa_wire::decode(body)?;
    let mut state = from_older(&milpa_wire::encode(&fields), maps_missing(FORMAT_WITH_EPOCHS))?;
    state.members_whole(&epochs.into_iter().collect::<Vec<_>>());
    Ok(state)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use milpa_wire::encode;

    use super::*;
    use crate::core::holders::Possible;
    use crate::core::tests::Log;

    /// Format 3 had an epoch for each partition: what it says of the present one counts for all its members.
    #[test]
    fn who_is_whole_by_format_3_is_whole_still() {
        let mut log = Log::with_nodes(3, 3);
        log.volume("home", 1, 2);
        let [known, stale] = [PartitionId(2), PartitionId(3)];
        log.state.whole.retain(|partition, _| *partition == known);
        type Maps = (
            BTreeMap<PartitionId, BTreeSet<NodeId>>,
            BTreeMap<NodeId, u128>,
            BTreeMap<PartitionId, Epoch>,
            BTreeMap<PartitionId, BTreeMap<NodeId, BTreeSet<NodeId>>>,
            BTreeMap<PartitionId, NodeId>,
            BTreeMap<PartitionId, Vec<Possible>>,
        );
        let (fields, _): (Fields, Maps) = milpa_wire::decode(&encode(&log.state)).unwrap();
        let body = encode(&(fields, BTreeMap::from([(known, Epoch(1)), (stale, Epoch(0))])));
        let head = [MAGIC, FORMAT_WITH_EPOCHS.to_le_bytes(), crc32c(&body).to_le_bytes()].concat();
        assert_eq!(State::decode(&[head, body].concat()), Ok(log.state.clone()));
    }
}
