//! What a node's own directory says of its disks: which id each was given, and on which of them the replica of a partition
//! is.
//!
//! A disk that was out of service does not know what was made elsewhere meanwhile. Its replica of a partition may be one
//! that the group has let go, and the node may have become a member again by another replica, on another disk, whose votes and
//! bytes others count on. So the disk's own word is not enough for it to serve.
//!
//! `LEDGER`, replaced as a whole:
//!
//! ```text
//! offset size field
//!      0    4 magic "MLPG"
//!      4    4 format, 1
//!      8    4 CRC32C of all else
//!     12    . disks and replicas, encoded
//! ```
//!
//! If it is damaged it is made anew from what the disks hold.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk;
use milpa_types::{DiskId, Epoch, PartitionId};
use milpa_wire::frame::crc32c_of;
use serde::{Deserialize, Serialize};

const FILE: &str = "LEDGER";
const MAGIC: [u8; 4] = *b"MLPG";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 12;

/// What is noted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    /// Ids that were given, and the directory that had each last: none is given twice, also not while the label of its
    /// disk cannot be read.
    disks: BTreeMap<DiskId, String>,
    /// The disk that has the node's replica of a partition, or had the last one.
    replicas: BTreeMap<PartitionId, DiskId>,
}

/// The file, and what it says.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    path: PathBuf,
    noted: Noted,
    /// Replicas that serve where they were found, as nothing else is known of them.
    unnoted: BTreeMap<PartitionId, DiskId>,
}

/// What a disk was found to hold of a partition: as of which configuration, if that could be read.
pub(crate) type Found = (PartitionId, DiskId, Option<Epoch>);

impl Ledger {
    /// That of the node with this directory.
    ///
    /// # Errors
    ///
    /// If a newer program wrote it, or it cannot be read for a reason that is not the disk's.
    pub fn open(directory: &Path) -> Result<Ledger, String> {
        let path = directory.join(FILE);
        let noted = match disk::read(&path) {
            Ok(bytes) => match Noted::decode(&bytes) {
                Ok(noted) => noted,
                Err(problem @ BadLedger::Version) => return Err(format!("{path:?} {problem}")),
                Err(problem) => lost(&path, &problem),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Noted::default(),
            Err(error) if disk::is_failure(&error) => lost(&path, &error),
            Err(error) => return Err(format!("cannot read {path:?}: {error}")),
        };
        Ok(Ledger { path, noted, unnoted: BTreeMap::new() })
    }

    /// The id that the disk in this directory was given last.
    pub fn disk_in(&self, directory: &Path) -> Option<DiskId> {
        let name = directory.display().to_string();
        self.noted.disks.iter().rev().find(|(_, it)| **it == name).map(|(id, _)| *id)
    }

    /// Ids that no disk was ever given.
    pub fn free_ids(&self) -> impl Iterator<Item = DiskId> {
        let last = self.noted.disks.keys().next_back().map_or(0, |last| last.0);
        (1..=u32::MAX).map(DiskId).filter(move |id| id.0 > last)
    }

    /// Notes where disks are.
    ///
    /// # Errors
    ///
    /// Those of the node's directory: then nothing is noted.
    pub fn note_disks(&mut self, disks: &[(DiskId, &Path)]) -> io::Result<()> {
        self.change(|noted| {
            noted.disks.extend(disks.iter().map(|(id, path)| (*id, path.display().to_string())));
        })
    }

    /// Notes that a partition's replica is made on this disk: before it is.
    ///
    /// # Errors
    ///
    /// As [`note_disks`](Ledger::note_disks).
    pub fn note_replica(&mut self, partition: PartitionId, disk: DiskId) -> io::Result<()> {
        self.change(|noted| noted.replicas.extend([(partition, disk)]))
    }

    /// Whether the replica that is to serve is on this disk.
    pub fn has_replica(&self, partition: PartitionId, disk: DiskId) -> bool {
        let place = self.noted.replicas.get(&partition).or_else(|| self.unnoted.get(&partition));
        place == Some(&disk)
    }

    /// Takes in what was found on the disks at a start. Of replicas that were never noted the newest counts; it is noted
    /// once every disk was looked at, as one that was not may have a newer one. Then, too, what nobody has any more is forgotten.
    ///
    /// # Errors
    ///
    /// As [`note_disks`](Ledger::note_disks).
    pub fn take_in(&mut self, found: &[Found], is_all: bool) -> io::Result<()> {
        let mut newest: BTreeMap<PartitionId, (Option<Epoch>, DiskId)> = BTreeMap::new();
        for (partition, disk, epoch) in found {
            let best = newest.entry(*partition).or_insert((*epoch, *disk));
            *best = (*best).max((*epoch, *disk));
        }
        self.unnoted = newest.iter().map(|(partition, (_, disk))| (*partition, *disk)).collect();
        self.unnoted.retain(|partition, _| !self.noted.replicas.contains_key(partition));
        if !is_all {
            return Ok(());
        }
        let unnoted = std::mem::take(&mut self.unnoted);
        self.change(|noted| {
            noted.replicas.retain(|partition, _| newest.contains_key(partition));
            noted.replicas.extend(unnoted);
        })
    }

    fn change(&mut self, change: impl FnOnce(&mut Noted)) -> io::Result<()> {
        let mut changed = self.noted.clone();
        change(&mut changed);
        if changed != self.noted {
            disk::replace(&self.path, &changed.encode())?;
            self.noted = changed;
        }
        Ok(())
    }
}

fn lost(path: &Path, problem: &dyn std::fmt::Display) -> Noted {
    tracing::error!(path = %path.display(), %problem,
        "where this node's replicas are is made out anew from what its disks hold");
    Noted::default()
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadLedger {
    #[error("is damaged: its checksum does not match")]
    Damaged,
    #[error("is of a newer format, or none of ours")]
    Version,
}

impl Noted {
    pub fn encode(&self) -> Vec<u8> {
        let head = [MAGIC, FORMAT.to_le_bytes()].concat();
        let body = milpa_wire::encode(self);
        let crc = crc32c_of(&[&head[..], &body]);
        [&head[..], &crc.to_le_bytes(), &body].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<Noted, BadLedger> {
        let (header, body) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(BadLedger::Damaged)?;
        let (head, crc) = header.split_at(8);
        if crc != crc32c_of(&[head, body]).to_le_bytes() {
            return Err(BadLedger::Damaged);
        }
        if head != [MAGIC, FORMAT.to_le_bytes()].concat() {
            return Err(BadLedger::Version);
        }
        milpa_wire::decode(body).map_err(|_| BadLedger::Version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DiskId = DiskId(1);
    const B: DiskId = DiskId(2);
    const PARTITION: PartitionId = PartitionId(7);

    fn opened(directory: &Path) -> Ledger {
        Ledger::open(directory).unwrap()
    }

    #[test]
    fn no_id_is_given_twice_and_a_directory_has_the_last_one() {
        let base = tempfile::tempdir().unwrap();
        let mut ledger = opened(base.path());
        assert_eq!(ledger.free_ids().next(), Some(A));
        let disks =
            [(A, Path::new("/a")), (DiskId(5), Path::new("/b")), (DiskId(3), Path::new("/b"))];
        ledger.note_disks(&disks).unwrap();
        let ledger = opened(base.path());
        assert_eq!(ledger.free_ids().next(), Some(DiskId(6)));
        let ids = ["/a", "/b", "/c"].map(|path| ledger.disk_in(Path::new(path)));
        assert_eq!(ids, [Some(A), Some(DiskId(5)), None]);
    }

    #[test]
    fn a_replica_is_where_the_last_one_was_made() {
        let base = tempfile::tempdir().unwrap();
        let mut ledger = opened(base.path());
        ledger.note_disks(&[(A, Path::new("/a")), (B, Path::new("/b"))]).unwrap();
        let both = [(PARTITION, A, Some(Epoch(3))), (PARTITION, B, Some(Epoch(2)))];
        ledger.take_in(&both, true).unwrap();
        assert!(ledger.has_replica(PARTITION, A) && !ledger.has_replica(PARTITION, B));
        ledger.note_replica(PARTITION, B).unwrap();
        // The disk that has it is out; later it is back, and has it no more.
        for is_all in [false, true] {
            let mut ledger = opened(base.path());
            ledger.take_in(&both[..1], is_all).unwrap();
            assert!(!ledger.has_replica(PARTITION, A) && ledger.has_replica(PARTITION, B));
        }
        ledger.take_in(&[], false).unwrap();
        assert!(ledger.has_replica(PARTITION, B));
        ledger.take_in(&[], true).unwrap();
        assert_eq!(ledger.noted.replicas, BTreeMap::new());
    }

    /// Found by a reader: what was found while a disk was out was noted for good.
    #[test]
    fn what_was_never_noted_is_settled_when_all_disks_are_there() {
        let base = tempfile::tempdir().unwrap();
        let both = [(PARTITION, A, Some(Epoch(3))), (PARTITION, B, Some(Epoch(4)))];
        let mut ledger = opened(base.path());
        ledger.take_in(&both[..1], false).unwrap();
        assert!(ledger.has_replica(PARTITION, A), "nothing else is known");
        let mut ledger = opened(base.path());
        ledger.take_in(&both, true).unwrap();
        assert!(ledger.has_replica(PARTITION, B) && !ledger.has_replica(PARTITION, A));
        assert!(opened(base.path()).has_replica(PARTITION, B));
    }

    #[test]
    fn of_replicas_that_were_never_noted_one_that_can_be_read_counts() {
        let base = tempfile::tempdir().unwrap();
        let mut ledger = opened(base.path());
        ledger.take_in(&[(PARTITION, A, Some(Epoch(1))), (PARTITION, B, None)], true).unwrap();
        assert!(ledger.has_replica(PARTITION, A));
    }

    #[test]
    fn a_damaged_ledger_is_made_anew_and_a_newer_one_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let mut ledger = opened(base.path());
        ledger.note_replica(PARTITION, B).unwrap();
        let path = base.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut rotten = whole.clone();
            rotten[at] ^= 4;
            std::fs::write(&path, rotten).unwrap();
            assert_eq!(opened(base.path()).noted, Noted::default(), "byte {at}");
        }
        let body = milpa_wire::encode(&Noted::default());
        let head = [MAGIC, 2_u32.to_le_bytes()].concat();
        let crc = crc32c_of(&[&head[..], &body]).to_le_bytes();
        std::fs::write(&path, [&head[..], &crc, &body].concat()).unwrap();
        assert!(Ledger::open(base.path()).unwrap_err().contains("newer"));
    }
}
