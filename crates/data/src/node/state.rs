//! What a replica must remember besides its extents: who takes part, and how far its log went.
//!
//! One small file for each partition, replaced as a whole: written beside, flushed, renamed, the
//! directory flushed. After a power cut either the old or the new one is there.
//!
//! ```text
//! offset size field
//!      0    4 magic "MLPS"
//!      4    4 format, 1
//!      8    4 CRC32C of what follows
//!     12    . the state, encoded
//! ```

use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk;
use milpa_raft::SnapshotDescriptor;
use milpa_types::{PartitionId, VolumeId};
use milpa_wire::data::Configuration;
use milpa_wire::frame::crc32c;
use serde::{Deserialize, Serialize};

const MAGIC: [u8; 4] = *b"MLPS";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 12;

/// The state of one replica. All fields are for correctness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartitionState {
    /// The partition: a file under another name is refused.
    pub partition: PartitionId,
    /// Its volume.
    pub volume: VolumeId,
    /// The configuration adopted here. Written before this replica acts in it, so that after a
    /// restart an older epoch finds no ear.
    pub configuration: Configuration,
    /// Log index up to which every overwrite is on its extent and flushed.
    pub applied: u64,
    /// What takes the place of the log below that.
    pub snapshot: Option<SnapshotDescriptor>,
    /// Extent numbers below this may have been given here.
    pub ids_until: u32,
    /// The volume's overwrites may be acknowledged from memory.
    pub relaxed: bool,
}

/// Where the state of a partition lies.
pub(crate) fn state_path(directory: &Path, partition: PartitionId) -> PathBuf {
    directory.join(partition.to_string())
}

impl PartitionState {
    /// Makes the state durable.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        disk::replace(&state_path(directory, self.partition), &self.encode())
    }

    pub fn encode(&self) -> Vec<u8> {
        let body = milpa_wire::encode(self);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        bytes.extend_from_slice(&crc32c(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Reads a state, or says what is wrong with the file.
    pub fn load(path: &Path) -> Result<PartitionState, String> {
        let bytes = disk::read(path).map_err(|e| format!("cannot read {path:?}: {e}"))?;
        PartitionState::decode(&bytes).map_err(|problem| format!("{path:?} {problem}"))
    }

    pub fn decode(bytes: &[u8]) -> Result<PartitionState, &'static str> {
        let (header, body) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or("is shorter than its header")?;
        let word = |at: usize| header.get(at..at + 4).unwrap_or_default();
        if word(0) != MAGIC {
            return Err("is no partition state");
        }
        if word(4) != FORMAT.to_le_bytes() {
            return Err("is of a newer format");
        }
        if word(8) != crc32c(body).to_le_bytes() {
            return Err("is damaged: its checksum does not match");
        }
        milpa_wire::decode(body).map_err(|_| "is damaged: it cannot be decoded")
    }
}

/// The states of all partitions in a directory, sorted by id. Unfinished files are removed.
pub(crate) fn load_all(directory: &Path) -> Result<Vec<PartitionState>, String> {
    let failed = |e: io::Error| format!("cannot list {directory:?}: {e}");
    let mut states = Vec::new();
    for name in disk::list(directory).map_err(failed)? {
        let path = directory.join(name);
        if path.extension().is_some_and(|extension| extension == "new") {
            // What a crash left of a replacement that never happened.
            disk::remove(&path).map_err(failed)?;
            continue;
        }
        let state = PartitionState::load(&path)?;
        if path != state_path(directory, state.partition) {
            return Err(format!("{path:?} is the state of partition {}", state.partition));
        }
        states.push(state);
    }
    states.sort_by_key(|state| state.partition);
    Ok(states)
}

#[cfg(test)]
mod tests {
    use milpa_types::{Epoch, NodeId};

    use super::*;

    fn state() -> PartitionState {
        let members = vec![NodeId(1), NodeId(2)];
        PartitionState {
            partition: PartitionId(7),
            volume: VolumeId(1),
            configuration: Configuration {
                epoch: Epoch(3),
                members,
                primary: NodeId(2),
                learners: Vec::new(),
            },
            applied: 99,
            snapshot: None,
            ids_until: 16,
            relaxed: false,
        }
    }

    #[test]
    fn a_state_survives_and_a_leftover_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        state().save(directory.path()).unwrap();
        std::fs::write(directory.path().join("7.new"), b"half").unwrap();
        assert_eq!(load_all(directory.path()).unwrap(), vec![state()]);
        assert!(!directory.path().join("7.new").exists());
    }

    #[test]
    fn damage_and_a_moved_file_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        state().save(directory.path()).unwrap();
        let path = state_path(directory.path(), PartitionId(7));
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(load_all(directory.path()).is_err(), "byte {at}");
        }
        std::fs::write(&path, &whole).unwrap();
        std::fs::rename(&path, directory.path().join("8")).unwrap();
        assert!(load_all(directory.path()).is_err());
    }
}
