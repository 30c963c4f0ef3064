//! Where the node keeps its partitions on disk, next to the Raft log.
//!
//! ```text
//! partitions/<id>/definition                       CreateMetaPartition, so that a replica without
//!                                                  snapshot can replay its log
//! partitions/<id>/<index>-<term>.snapshot          numbers of 20 digits, the newest last
//! partitions/<id>/started                          the replica has taken part: a missing log is a loss
//! partitions/<id>/joining                          it has not caught up since it was made: it has no vote
//! partitions/<id>/deleted                          to be forgotten, also by the log
//! partitions/<id>/refused                          its state differed from most others': not to be served
//! partitions/<id>/*.tmp, *.new                     unfinished, deleted at the start
//! ```
//!
//! Everything is written under a temporary name, synced, renamed, and the directory synced, as a rename
//! is durable only when its directory is (RELIABILITY.md 4.6, braft #254). All
//! methods block; only small ones are called from the node's loop.

use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk::{self, File, Open};
use milpa_raft::LogPosition;
use milpa_types::PartitionId;
use milpa_wire::frame::crc32c;
use milpa_wire::meta::CreateMetaPartition;
use tracing::warn;

use super::snapshot_file::{self, FileHeader, SnapshotFileError, is_of_medium};
use crate::core::Partition;

const SUFFIX: &str = ".snapshot";
const DEFINITION: &str = "definition";
const STARTED: &str = "started";
const JOINING: &str = "joining";
const DELETED: &str = "deleted";
const REFUSED: &str = "refused";
const WRITING: &str = "writing.tmp";
const INCOMING: &str = "incoming.tmp";

/// The directory of all partitions.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotStore {
    directory: PathBuf,
}

/// What one partition's directory holds.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    /// As the manager defined it; `None` when the file is missing, unreadable, damaged, or another partition's.
    pub(crate) definition: Option<CreateMetaPartition>,
    /// Log positions of its snapshots, the newest first. Not verified.
    pub(crate) snapshots: Vec<LogPosition>,
    /// Whether the replica has taken part in its group: then its log must exist.
    pub(crate) started: bool,
    /// Whether it was made to join its group, and has not caught up since.
    pub(crate) joining: bool,
    /// Whether the manager deleted it.
    pub(crate) deleted: bool,
    /// Whether the manager refused it.
    pub(crate) refused: bool,
}

impl SnapshotStore {
    /// Opens or creates the directory.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn open(directory: PathBuf) -> io::Result<SnapshotStore> {
        disk::create_directory(&directory)?;
        Ok(SnapshotStore { directory })
    }

    /// All partitions that have a directory, in order.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn partitions(&self) -> io::Result<Vec<PartitionId>> {
        let names = disk::list(&self.directory)?;
        let ids = names.iter().filter_map(|name| name.parse().ok());
        let mut found: Vec<_> = ids.map(PartitionId).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// What is held of a partition. Removes what interrupted writers left.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn inspect(&self, partition: PartitionId) -> io::Result<Stored> {
        let directory = self.of(partition);
        let mut stored = Stored::default();
        for name in disk::list(&directory)? {
            if (name.ends_with(".tmp") || name.ends_with(".new"))
                && let Err(error) = disk::remove(&directory.join(&name))
            {
                warn!(%partition, name, %error, "cannot remove what was not finished");
            }
            stored.snapshots.extend(parse_snapshot_name(&name));
            stored.started |= name == STARTED;
            stored.joining |= name == JOINING;
            stored.deleted |= name == DELETED;
            stored.refused |= name == REFUSED;
        }
        // What has a name here is built upon.
        disk::sync_directory(&directory)?;
        stored.snapshots.sort_unstable_by_key(|position| std::cmp::Reverse(position.index));
        stored.definition = read_definition(&directory.join(DEFINITION))?
            .filter(|definition| definition.partition == partition);
        Ok(stored)
    }

    /// Writes a partition's definition durably, creating its directory.
    ///
    /// # Errors
    ///
    /// The disk's: the partition must not be used. Also while the mark of a replica that was deleted is there: the
    /// next start would take this one for it.
    pub(crate) fn define(&self, definition: &CreateMetaPartition) -> io::Result<()> {
        let directory = self.of(definition.partition);
        match disk::status(&directory.join(DELETED)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(_) => return Err(io::Error::other("a replica that was deleted is still there")),
        }
        disk::create_directory(&directory)?;
        if definition.joins {
            self.mark(definition.partition, JOINING)?;
        }
        disk::replace(&directory.join(DEFINITION), &encode_definition(definition))
    }

    /// Notes durably that the replica takes part in its group.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn mark_started(&self, partition: PartitionId) -> io::Result<()> {
        self.mark(partition, STARTED)
    }

    /// Notes durably that a replica that joined its group has caught up. Repeating it is harmless.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn mark_joined(&self, partition: PartitionId) -> io::Result<()> {
        let directory = self.of(partition);
        remove_if_there(&directory.join(JOINING))?;
        disk::sync_directory(&directory)
    }

    /// Notes durably that the partition is deleted, before the log forgets it: a crash in between
    /// is then told from the loss of a definition.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn mark_deleted(&self, partition: PartitionId) -> io::Result<()> {
        // Of a damaged one it may be lost.
        disk::create_directory(&self.of(partition))?;
        self.mark(partition, DELETED)
    }

    /// Notes durably that the replica's state is not to be trusted.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn mark_refused(&self, partition: PartitionId) -> io::Result<()> {
        self.mark(partition, REFUSED)
    }

    fn mark(&self, partition: PartitionId, name: &str) -> io::Result<()> {
        let directory = self.of(partition);
        File::open(&directory.join(name), Open::Empty)?.sync()?;
        disk::sync_directory(&directory)
    }

    /// Deletes everything of a partition but the mark that it is deleted.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn empty(&self, partition: PartitionId) -> io::Result<()> {
        let directory = self.of(partition);
        for name in disk::list(&directory)?.iter().filter(|name| *name != DELETED) {
            // What is written there still may have removed it, or given it its name.
            remove_if_there(&directory.join(name))?;
        }
        disk::sync_directory(&directory)
    }

    /// Deletes everything of a partition, the mark that it is deleted last: what is left after a crash must not
    /// look like one that is about to begin. Missing is fine.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn remove(&self, partition: PartitionId) -> io::Result<()> {
        match self.empty(partition) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            emptied => {
                emptied?;
                disk::remove_tree(&self.of(partition))?;
            }
        }
        disk::sync_directory(&self.directory)
    }

    /// Where this node writes its next snapshot of a partition.
    #[must_use]
    pub(crate) fn writing_path(&self, partition: PartitionId) -> PathBuf {
        self.of(partition).join(WRITING)
    }

    /// Where a snapshot of a peer is collected.
    #[must_use]
    pub(crate) fn incoming_path(&self, partition: PartitionId) -> PathBuf {
        self.of(partition).join(INCOMING)
    }

    /// Gives a finished and synced file its name, durably.
    ///
    /// # Errors
    ///
    /// The disk's: the snapshot must not be relied on.
    pub(crate) fn publish(
        &self,
        partition: PartitionId,
        position: LogPosition,
        from: &Path,
    ) -> io::Result<()> {
        disk::rename(from, &self.path(partition, position))?;
        disk::sync_directory(&self.of(partition))
    }

    /// Reads and verifies a snapshot.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError`], also when the file is of another partition or position.
    pub(crate) fn read(
        &self,
        partition: PartitionId,
        position: LogPosition,
    ) -> Result<(FileHeader, Partition), SnapshotFileError> {
        let (header, state) = snapshot_file::read(&self.path(partition, position))?;
        require(&header, partition, position)?;
        Ok((header, state))
    }

    /// A piece of a snapshot's file for a peer, and the length of the whole file. `None` when
    /// there is no snapshot of this log index.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn read_piece(
        &self,
        partition: PartitionId,
        index: u64,
        offset: u64,
        bytes_max: usize,
    ) -> io::Result<Option<(Vec<u8>, u64)>> {
        let stored = self.inspect_names(partition)?;
        let Some(position) = stored.into_iter().find(|position| position.index == index) else {
            return Ok(None);
        };
        let file = File::open(&self.path(partition, position), Open::Read)?;
        let total = file.length()?;
        let left = usize::try_from(total.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut piece = vec![0; left.min(bytes_max)];
        let count = file.read_at(&mut piece, offset)?;
        piece.truncate(count);
        Ok(Some((piece, total)))
    }

    /// Reads all snapshots of a partition again, as they are on the medium; gives what became of each, the newest first.
    ///
    /// # Errors
    ///
    /// The disk's, when it is to list them.
    pub(crate) fn verify(
        &self,
        partition: PartitionId,
    ) -> io::Result<Vec<(LogPosition, Result<(), SnapshotFileError>)>> {
        let mut positions = self.inspect_names(partition)?;
        positions.sort_unstable_by_key(|position| std::cmp::Reverse(position.index));
        let verified = |position| {
            let header = snapshot_file::verify(&self.path(partition, position));
            (position, header.and_then(|header| require(&header, partition, position)))
        };
        Ok(positions.into_iter().map(verified).collect())
    }

    /// Sets a snapshot aside that turned out to be damaged, for whoever wants to know why.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn set_aside(
        &self,
        partition: PartitionId,
        position: LogPosition,
    ) -> io::Result<()> {
        let path = self.path(partition, position);
        disk::rename(&path, &path.with_extension("damaged"))?;
        disk::sync_directory(&self.of(partition))
    }

    /// Deletes all snapshots but the newest `keep`.
    ///
    /// # Errors
    ///
    /// The disk's.
    pub(crate) fn prune(&self, partition: PartitionId, keep: usize) -> io::Result<()> {
        let mut positions = self.inspect_names(partition)?;
        positions.sort_unstable_by_key(|position| std::cmp::Reverse(position.index));
        for position in positions.into_iter().skip(keep) {
            disk::remove(&self.path(partition, position))?;
        }
        Ok(())
    }

    fn inspect_names(&self, partition: PartitionId) -> io::Result<Vec<LogPosition>> {
        let names = disk::list(&self.of(partition))?;
        Ok(names.iter().filter_map(|name| parse_snapshot_name(name)).collect())
    }

    fn of(&self, partition: PartitionId) -> PathBuf {
        self.directory.join(partition.to_string())
    }

    fn path(&self, partition: PartitionId, position: LogPosition) -> PathBuf {
        let name = format!("{:020}-{:020}{SUFFIX}", position.index, position.term);
        self.of(partition).join(name)
    }
}

/// Whether a file is what its name says.
fn require(
    header: &FileHeader,
    partition: PartitionId,
    position: LogPosition,
) -> Result<(), SnapshotFileError> {
    if header.definition.partition != partition || header.descriptor.position != position {
        return Err(SnapshotFileError::Damaged("the file is of another snapshot"));
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match disk::remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn parse_snapshot_name(name: &str) -> Option<LogPosition> {
    let (index, term) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    Some(LogPosition { term: term.parse().ok()?, index: index.parse().ok()? })
}

fn read_definition(path: &Path) -> io::Result<Option<CreateMetaPartition>> {
    let bytes = match disk::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if is_of_medium(&error) => {
            warn!(path = %path.display(), %error, "a definition cannot be read");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(decode_definition(&bytes))
}

/// CRC32C of what follows (4 bytes, little-endian), then the definition.
pub(crate) fn encode_definition(definition: &CreateMetaPartition) -> Vec<u8> {
    let body = milpa_wire::encode(definition);
    [crc32c(&body).to_le_bytes().as_slice(), &body].concat()
}

pub(crate) fn decode_definition(bytes: &[u8]) -> Option<CreateMetaPartition> {
    let (crc, body) = bytes.split_first_chunk::<4>()?;
    (u32::from_le_bytes(*crc) == crc32c(body)).then(|| milpa_wire::decode(body).ok())?
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use milpa_types::{MetaSlot, NodeId, VolumeId, VolumeOptions};

    #[test]
    fn one_that_joins_is_known_as_such_until_it_has_joined() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().join("partitions")).unwrap();
        store.define(&definition(3)).unwrap();
        assert!(!store.inspect(PartitionId(3)).unwrap().joining);
        store.define(&CreateMetaPartition { joins: true, ..definition(4) }).unwrap();
        assert!(store.inspect(PartitionId(4)).unwrap().joining);
        for _ in 0..2 {
            store.mark_joined(PartitionId(4)).unwrap();
            assert!(!store.inspect(PartitionId(4)).unwrap().joining);
        }
    }

    fn definition(partition: u64) -> CreateMetaPartition {
        CreateMetaPartition {
            joins: false,
            partition: PartitionId(partition),
            volume: VolumeId(1),
            options: VolumeOptions::default(),
            slot: MetaSlot(2),
            members: vec![NodeId(1)],
        }
    }

    #[test]
    fn a_definition_comes_back_unless_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().join("partitions")).unwrap();
        store.define(&definition(12)).unwrap();
        store.define(&definition(3)).unwrap();
        assert_eq!(store.partitions().unwrap(), [PartitionId(3), PartitionId(12)]);
        assert_eq!(store.inspect(PartitionId(12)).unwrap().definition, Some(definition(12)));

        let path = directory.path().join("partitions/12/definition");
        let mut bytes = fs::read(&path).unwrap();
        bytes[5] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(store.inspect(PartitionId(12)).unwrap().definition, None);

        fs::write(&path, encode_definition(&definition(3))).unwrap();
        let found = store.inspect(PartitionId(12)).unwrap().definition;
        assert_eq!(found, None, "a disk may put one file's bytes over another one's");

        store.remove(PartitionId(12)).unwrap();
        store.remove(PartitionId(12)).unwrap();
        assert_eq!(store.partitions().unwrap(), [PartitionId(3)]);
    }

    /// Found by a reader: a removal that failed at a start left the mark, and it took the next replica along.
    #[test]
    fn nothing_is_made_beside_the_mark_of_what_was_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().join("partitions")).unwrap();
        store.define(&definition(3)).unwrap();
        store.mark_deleted(PartitionId(3)).unwrap();
        assert!(store.define(&definition(3)).is_err());
        store.remove(PartitionId(3)).unwrap();
        store.define(&definition(3)).unwrap();
        assert!(!store.inspect(PartitionId(3)).unwrap().deleted);
    }

    #[test]
    fn the_newest_snapshots_stay_and_pieces_are_read_by_index() {
        let directory = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(directory.path().to_path_buf()).unwrap();
        let partition = PartitionId(1);
        store.define(&definition(1)).unwrap();
        for index in [5, 40, 300] {
            let path = store.writing_path(partition);
            fs::write(&path, format!("state at {index}")).unwrap();
            store.publish(partition, LogPosition { term: 1, index }, &path).unwrap();
        }
        let (piece, total) = store.read_piece(partition, 40, 6, 2).unwrap().unwrap();
        assert_eq!((piece.as_slice(), total), (&b"at"[..], 11));
        let (piece, _) = store.read_piece(partition, 40, 1 << 60, 2).unwrap().unwrap();
        assert!(piece.is_empty());
        assert_eq!(store.read_piece(partition, 41, 0, 2).unwrap(), None);

        fs::write(store.incoming_path(partition), "half").unwrap();
        store.prune(partition, 2).unwrap();
        let indexes = |store: &SnapshotStore| -> Vec<u64> {
            store.inspect(partition).unwrap().snapshots.iter().map(|p| p.index).collect()
        };
        assert_eq!(indexes(&store), [300, 40]);
        assert!(!store.incoming_path(partition).exists());
    }
}
