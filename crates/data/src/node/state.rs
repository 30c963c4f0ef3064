//! What a replica must remember besides its extents: who takes part, and how far its log went.
//!
//! One small file for each partition, replaced as a whole: written beside, flushed, renamed, the
//! directory flushed. After a power cut either the old or the new one is there.
//!
//! ```text
//! offset size field
//!      0    4 magic "MLPS"
//!      4    4 format, 6
//!      8    4 CRC32C of all else
//!     12    . the state, encoded
//! ```
//!
//! In format 1 the checksum covered the state alone; up to format 2 the state ended before `configured`, in format 3
//! before `lacks_overwritten`, in format 4 before `overwritten`, in format 5 before `is_new`.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk;
use milpa_raft::{LogPosition, SnapshotDescriptor};
use milpa_types::{NodeId, PartitionId, VolumeId};
use milpa_wire::data::Configuration;
use milpa_wire::frame::crc32c_of;
use serde::{Deserialize, Serialize};

use super::open::Unopened;

const MAGIC: [u8; 4] = *b"MLPS";
const FORMAT: u32 = 6;
/// From this one on it says which overwrite was the last.
const OVERWRITTEN_FORMAT: u32 = 5;
/// In this one the checksum covers less.
const FIRST_FORMAT: u32 = 1;
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
    /// Where in the log the last configuration stood that came out of it; nowhere, if none did. One that came with
    /// the replica or with a snapshot may be newer.
    pub configured: LogPosition,
    /// Bytes were missing here that an overwrite replaces: they had yet to come, or a crash took them. What others have of
    /// them may lack that. Until they have come, or the members have been compared.
    pub lacks_overwritten: bool,
    /// It goes on alone, and is given by its learner what it never had (docs/decisions/0007). Until the two have been compared.
    pub is_given_rest: bool,
    /// No entry of the log behind this index and up to `applied` is an overwrite.
    pub overwritten: u64,
    /// It was made blank, and has not been a member since.
    pub is_new: bool,
}

/// Where the state of a partition lies.
pub(crate) fn state_path(directory: &Path, partition: PartitionId) -> PathBuf {
    directory.join(partition.to_string())
}

impl PartitionState {
    /// Another configuration is in force for this node.
    pub fn adopt(&mut self, configuration: Configuration, node: NodeId) {
        self.is_new &= !configuration.members.contains(&node);
        self.configuration = configuration;
    }

    /// Makes the state durable.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        disk::replace(&state_path(directory, self.partition), &self.encode())
    }

    pub fn encode(&self) -> Vec<u8> {
        let head = [MAGIC, FORMAT.to_le_bytes()].concat();
        let body = milpa_wire::encode(self);
        let crc = crc32c_of(&[&head[..], &body]);
        [&head[..], &crc.to_le_bytes(), &body].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<PartitionState, BadState> {
        let (header, body) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(BadState::Damaged)?;
        let word = |at: usize| header.get(at..at + 4).unwrap_or_default();
        let is_of = |format: u32| word(4) == format.to_le_bytes();
        let header_covered = if is_of(FIRST_FORMAT) { &[] } else { &header[..8] };
        if word(8) != crc32c_of(&[header_covered, body]).to_le_bytes() {
            return Err(BadState::Damaged);
        }
        if word(0) != MAGIC {
            return Err(BadState::Version);
        }
        let format = (FIRST_FORMAT..=FORMAT).find(|format| is_of(*format));
        // What the state did not have yet.
        let format = format.ok_or(BadState::Version)?;
        let missing = match format {
            1 | 2 => milpa_wire::encode(&(LogPosition::default(), false, false, 0_u64, false)),
            3 => milpa_wire::encode(&(false, false, 0_u64, false)),
            4 => milpa_wire::encode(&(0_u64, false)),
            5 => milpa_wire::encode(&false),
            _ => Vec::new(),
        };
        let state = milpa_wire::decode(&[body, &missing].concat());
        let mut state: PartitionState = state.map_err(|_| BadState::Version)?;
        if format < OVERWRITTEN_FORMAT {
            // Any may be one.
            state.overwritten = state.applied;
        }
        Ok(state)
    }
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadState {
    #[error("is damaged: its checksum does not match")]
    Damaged,
    #[error("is of a newer format, or none of ours")]
    Version,
}

/// What a directory of states holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct States {
    /// By id.
    pub whole: Vec<PartitionState>,
    /// Partitions whose state cannot be trusted: each costs one replica, not the disk.
    pub damaged: BTreeSet<PartitionId>,
}

/// The states of all partitions in a directory. Unfinished files are removed.
pub(crate) fn load_all(directory: &Path) -> Result<States, Unopened> {
    let failed = |e: io::Error| Unopened::of(&e, format!("cannot list {directory:?}: {e}"));
    let mut states = States::default();
    for name in disk::list(directory).map_err(failed)? {
        let path = directory.join(&name);
        if path.extension().is_some_and(|extension| extension == "new") {
            // What a crash left of a replacement that never happened.
            disk::remove(&path).map_err(failed)?;
            continue;
        }
        let id = name
            .parse()
            .map(PartitionId)
            .map_err(|_| Unopened::Refused(format!("{path:?} is no partition's")))?;
        let bytes = match disk::read(&path) {
            Ok(bytes) => bytes,
            // The next start may have what this one lacks.
            Err(error) if disk::is_shortage(&error) => {
                return Err(Unopened::Refused(format!("cannot read {path:?}: {error}")));
            }
            Err(error) => {
                tracing::error!(partition = %id, ?path, %error, "the state of a replica cannot be read");
                states.damaged.insert(id);
                continue;
            }
        };
        match PartitionState::decode(&bytes) {
            Ok(state) if state.partition == id => states.whole.push(state),
            // A disk may put one file's bytes over another one's.
            Ok(PartitionState { partition: other, .. }) => {
                tracing::error!(partition = %id, ?path, %other, "the state of a replica is another one's");
                states.damaged.insert(id);
            }
            Err(BadState::Damaged) => {
                tracing::error!(partition = %id, ?path, "the state of a replica is damaged");
                states.damaged.insert(id);
            }
            Err(problem) => return Err(Unopened::Refused(format!("{path:?} {problem}"))),
        }
    }
    states.whole.sort_by_key(|state| state.partition);
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
            configured: LogPosition { term: 2, index: 90 },
            lacks_overwritten: true,
            is_new: true,
            is_given_rest: false,
            overwritten: 80,
        }
    }

    #[test]
    fn a_state_survives_and_a_leftover_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        state().save(directory.path()).unwrap();
        std::fs::write(directory.path().join("7.new"), b"half").unwrap();
        assert_eq!(load_all(directory.path()).unwrap().whole, vec![state()]);
        assert!(!directory.path().join("7.new").exists());
    }

    /// Found by the simulation (seed 45): one rotten bit of one state, and the node did not start.
    #[test]
    fn a_damaged_state_costs_one_replica() {
        let directory = tempfile::tempdir().unwrap();
        let other = PartitionState { partition: PartitionId(8), ..state() };
        other.save(directory.path()).unwrap();
        let (path, whole) = (state_path(directory.path(), PartitionId(7)), state().encode());
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            let found = load_all(directory.path()).unwrap();
            assert_eq!(found.whole, std::slice::from_ref(&other), "byte {at}");
            assert_eq!(found.damaged, [PartitionId(7)].into(), "byte {at}");
        }
        std::fs::write(&path, &whole[..5]).unwrap();
        assert_eq!(load_all(directory.path()).unwrap().damaged, [PartitionId(7)].into());
    }

    /// Found by the simulation (seed 750041): a disk put one partition's state over another one's, and the node
    /// did not start.
    #[test]
    fn a_state_over_another_ones_costs_one_replica() {
        let directory = tempfile::tempdir().unwrap();
        state().save(directory.path()).unwrap();
        std::fs::write(state_path(directory.path(), PartitionId(8)), state().encode()).unwrap();
        let found = load_all(directory.path()).unwrap();
        assert_eq!(found, States { whole: vec![state()], damaged: [PartitionId(8)].into() });
    }

    #[test]
    fn a_file_of_another_version_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = state_path(directory.path(), PartitionId(7));
        let mut newer = state().encode();
        newer[4] = FORMAT as u8 + 1;
        let crc = crc32c_of(&[&newer[..8], &newer[12..]]);
        newer[8..12].copy_from_slice(&crc.to_le_bytes());
        std::fs::write(&path, newer).unwrap();
        load_all(directory.path()).unwrap_err();
    }
}
