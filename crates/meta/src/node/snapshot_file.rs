//! The file of one snapshot: a header of the shell, then the core's bytes as they are.
//!
//! ```text
//! offset size field
//!      0    8 magic "MLPMETA1"
//!      8    4 header bytes H, at most 1 MiB
//!     12    4 CRC32C of bytes 0..12 and the header
//!     16    H header: postcard of `FileHeader`
//!      .      the core's snapshot, which carries checksums of its own
//!             ([`crate::core::restore`])
//! ```
//!
//! Numbers are little-endian. The medium may tear, lose or misplace any write that was not synced:
//! the file is written under a temporary name, synced, renamed, and the directory synced
//! (RELIABILITY.md 4.6).

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use milpa_host::disk::{File, Open};
use milpa_raft::SnapshotDescriptor;
use milpa_wire::frame::crc32c_of;
use milpa_wire::meta::CreateMetaPartition;
use serde::{Deserialize, Serialize};

use crate::core::verify as core_verify;
use crate::core::{Partition, RestoreError, Snapshot, SnapshotHeader, restore};

const MAGIC: [u8; 8] = *b"MLPMETA1";
/// Bound on what a damaged length can make a reader allocate.
const HEADER_BYTES_MAX: usize = 1 << 20;
/// Bytes asked of the core at once while writing.
const PIECE_BYTES: usize = 1 << 20;

/// What the snapshot is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileHeader {
    /// The partition as the manager defined it, so that a replica can be rebuilt from the file
    /// alone. For correctness.
    pub definition: CreateMetaPartition,
    /// Log position and members. For correctness.
    pub descriptor: SnapshotDescriptor,
}

/// Why a snapshot file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotFileError {
    /// The disk said no.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The disk's words.
        #[source]
        source: io::Error,
    },
    /// The bytes are not those that were written.
    #[error("snapshot is damaged: {0}")]
    Damaged(&'static str),
    /// The core refused its part.
    #[error("snapshot is unusable")]
    Restore(#[from] RestoreError),
}

impl SnapshotFileError {
    /// What the system said when it was to read the file: that may pass.
    pub(crate) fn io(&self) -> Option<&io::Error> {
        match self {
            SnapshotFileError::Io { source, .. }
            | SnapshotFileError::Restore(RestoreError::Read(source)) => Some(source),
            SnapshotFileError::Damaged(_) | SnapshotFileError::Restore(_) => None,
        }
    }

    /// Whether the medium has not what was written: it says so itself, or has something else.
    pub(crate) fn is_rot(&self) -> bool {
        self.io().is_none_or(is_of_medium)
    }
}

/// Whether the medium has not what was written there: not a disk that is gone as a whole, nor a shortage, which passes.
pub(crate) fn is_of_medium(error: &io::Error) -> bool {
    let says_so = [libc::EIO, libc::EUCLEAN, libc::EBADMSG, libc::EISDIR, libc::ENOTDIR];
    error.raw_os_error().is_some_and(|errno| says_so.contains(&errno))
}

fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> SnapshotFileError {
    move |source| SnapshotFileError::Io { action, source }
}

fn header_crc(front: &[u8], header: &[u8]) -> u32 {
    crc32c_of(&[front, header])
}

/// Writes a whole snapshot and syncs it; returns its length in bytes. Blocking: runs on a thread
/// of its own while the partition goes on.
///
/// # Errors
///
/// [`SnapshotFileError::Io`]: the file must not be used.
pub(crate) fn write(
    path: &Path,
    header: &FileHeader,
    mut snapshot: Snapshot,
) -> Result<u64, SnapshotFileError> {
    let file = File::open(path, Open::Empty).map_err(io_error("create snapshot file"))?;
    let mut file = BufWriter::new(file.stream());
    file.write_all(&encode_header(header)).map_err(io_error("write snapshot header"))?;
    while let Some(piece) = snapshot.next_piece(PIECE_BYTES) {
        file.write_all(&piece).map_err(io_error("write snapshot"))?;
    }
    let file = file.into_inner().map_err(|e| io_error("write snapshot")(e.into_error()))?;
    file.file().sync().map_err(io_error("sync snapshot file"))?;
    file.file().length().map_err(io_error("measure snapshot file"))
}

pub(crate) fn encode_header(header: &FileHeader) -> Vec<u8> {
    let header = milpa_wire::encode(header);
    let mut bytes = Vec::with_capacity(16 + header.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    let crc = header_crc(&bytes, &header);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(&header);
    bytes
}

/// Reads a whole snapshot and trusts nothing in it. Blocking.
///
/// # Errors
///
/// [`SnapshotFileError`]: nothing of the file may be used.
pub(crate) fn read(path: &Path) -> Result<(FileHeader, Partition), SnapshotFileError> {
    let file = File::open(path, Open::Read).map_err(io_error("open snapshot file"))?;
    decode(&mut BufReader::with_capacity(1 << 20, file.stream()))
}

/// As [`read`], of bytes from anywhere.
pub(crate) fn decode(file: &mut impl Read) -> Result<(FileHeader, Partition), SnapshotFileError> {
    let header = read_header(file)?;
    let (partition, inner) = restore(file)?;
    header.require(&inner)?;
    if partition.applied() != header.descriptor.position.index {
        return Err(NOT_TOGETHER);
    }
    Ok((header, partition))
}

/// Reads a whole snapshot as it is on the medium, whatever the page cache has, and checks it. Takes little memory.
/// Blocking.
///
/// # Errors
///
/// [`SnapshotFileError`]: nothing of the file may be used.
pub(crate) fn verify(path: &Path) -> Result<FileHeader, SnapshotFileError> {
    let file = File::open_from_medium(path).map_err(io_error("open snapshot file"))?;
    let mut file = BufReader::with_capacity(1 << 20, file.stream());
    let header = read_header(&mut file)?;
    header.require(&core_verify(&mut file)?)?;
    Ok(header)
}

const NOT_TOGETHER: SnapshotFileError =
    SnapshotFileError::Damaged("header and state do not belong together");

impl FileHeader {
    /// Whether it belongs to this state of the core.
    fn require(&self, inner: &SnapshotHeader) -> Result<(), SnapshotFileError> {
        let position = self.descriptor.position;
        let claimed =
            (self.definition.partition, self.definition.slot, position.index, position.term);
        let found = (inner.partition, inner.slot, inner.index, inner.term);
        if claimed == found { Ok(()) } else { Err(NOT_TOGETHER) }
    }
}

fn read_header(file: &mut impl Read) -> Result<FileHeader, SnapshotFileError> {
    let mut front = [0; 12];
    fill(file, &mut front)?;
    let [magic @ .., l0, l1, l2, l3] = front;
    if magic != MAGIC {
        return Err(SnapshotFileError::Damaged("not a snapshot file"));
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > HEADER_BYTES_MAX {
        return Err(SnapshotFileError::Damaged("header is too long"));
    }
    let mut crc = [0; 4];
    fill(file, &mut crc)?;
    let mut header = vec![0; length];
    fill(file, &mut header)?;
    if u32::from_le_bytes(crc) != header_crc(&front, &header) {
        return Err(SnapshotFileError::Damaged("header does not match its checksum"));
    }
    let mut header: FileHeader = milpa_wire::decode(&header)
        .map_err(|_| SnapshotFileError::Damaged("header is of another version"))?;
    header.descriptor.members = header.descriptor.members.sorted();
    Ok(header)
}

fn fill(file: &mut impl Read, buffer: &mut [u8]) -> Result<(), SnapshotFileError> {
    file.read_exact(buffer).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => SnapshotFileError::Damaged("header is cut"),
        _ => SnapshotFileError::Io { action: "read snapshot file", source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_raft::{LogPosition, Members};
    use milpa_types::{MetaSlot, NodeId, PartitionId, VolumeId, VolumeOptions};

    use crate::core::PartitionSetup;

    fn header(term: u64, index: u64) -> FileHeader {
        FileHeader {
            definition: CreateMetaPartition {
                joins: false,
                partition: PartitionId(3),
                volume: VolumeId(1),
                options: VolumeOptions::default(),
                slot: MetaSlot(0),
                members: vec![NodeId(1), NodeId(2)],
            },
            descriptor: SnapshotDescriptor {
                position: LogPosition { term, index },
                members: Members::new(&[NodeId(1), NodeId(2)], &[]),
            },
        }
    }

    fn written(path: &Path) -> Vec<u8> {
        let header = header(2, 99);
        let mut partition = Partition::new(PartitionSetup::from(&header.definition));
        partition.skip(99);
        let length = write(path, &header, partition.begin_snapshot(2)).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(length, bytes.len() as u64);
        bytes
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        written(&path);
        let (read_header, partition) = read(&path).unwrap();
        assert_eq!(read_header, header(2, 99));
        assert_eq!(verify(&path).unwrap(), header(2, 99));
        assert_eq!(partition.applied(), 99);
    }

    /// F3 and F5 on this file: every byte flipped and every length cut must be told from a whole.
    #[test]
    fn any_flipped_byte_and_any_cut_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let whole = written(&path);
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            std::fs::write(&path, &damaged).unwrap();
            let check = |what: &str| {
                assert!(read(&path).is_err(), "byte {at} {what}");
                let verified = verify(&path).expect_err(what);
                assert!(
                    verified.is_rot() && verified.io().is_none(),
                    "byte {at} {what}: {verified}"
                );
            };
            check("flipped");
            std::fs::write(&path, &whole[..at]).unwrap();
            check("is where it ends");
        }
    }

    /// A whole file under the wrong name, or with the header of another one, is not used.
    #[test]
    fn a_header_of_another_snapshot_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let partition = Partition::new(PartitionSetup::from(&header(2, 99).definition));
        write(&path, &header(2, 99), partition.begin_snapshot(2)).unwrap();
        assert!(matches!(read(&path), Err(SnapshotFileError::Damaged(_))));
    }

    /// A million files: how long freezing, writing and reading take, and how much memory a file.
    #[test]
    #[ignore = "a measurement: cargo test --release -p milpa-meta million -- --ignored --nocapture"]
    fn a_million_files() {
        use crate::core::Command;
        use milpa_host::telemetry::memory_bytes;
        use milpa_types::{FileKind, InodeId, Name, SessionId, Timestamp};
        use milpa_wire::meta::{MetaWrite, NewInode, RequestId};
        use std::time::Instant;

        const FILES: u64 = 1_000_000;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let memory = memory_bytes();
        let mut partition = Partition::new(PartitionSetup::from(&header(2, 99).definition));
        let command = |sequence, write| Command::Client {
            id: RequestId { session: SessionId(1), sequence, unanswered: sequence },
            now: Timestamp(1),
            write,
        };
        partition.apply(1, &command(1, MetaWrite::OpenSession));
        let began = Instant::now();
        for n in 0..FILES {
            let (kind, mode, target) = (FileKind::File, 0o644, Vec::new());
            let write = MetaWrite::Create {
                parent: InodeId::ROOT,
                name: Name::new(format!("file-{n:011}").as_bytes()).unwrap(),
                inode: NewInode { kind, mode, uid: 1, gid: 1, device: 0, target },
                placement: None,
                open_existing: false,
                content: None,
            };
            partition.apply(n + 2, &command(n + 2, write));
        }
        println!("applied in {:?}", began.elapsed());
        println!("{} bytes of memory a file", (memory_bytes() - memory) / FILES);
        assert_eq!(partition.statistics().inodes, FILES + 1);

        let began = Instant::now();
        let snapshot = partition.begin_snapshot(2);
        println!("frozen in {:?}", began.elapsed());
        let bytes = write(&path, &header(2, FILES + 1), snapshot).unwrap();
        println!("{bytes} bytes written in {:?}", began.elapsed());
        let began = Instant::now();
        let (_, restored) = read(&path).unwrap();
        println!("read in {:?}", began.elapsed());
        assert_eq!(restored.hash(), partition.hash());
    }
}
