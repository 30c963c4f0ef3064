//! The file of one snapshot: the state of one partition at one log index.
//!
//! ```text
//! offset size field
//!      0    8 magic "MLPMETA1"
//!      8    4 header bytes H, at most 1 MiB
//!     12    4 CRC32C of bytes 0..12 and the header
//!     16    H header: postcard of `SnapshotHeader`
//!      .      pieces, each:
//!             4 bytes n of the piece, 1 to 16 MiB
//!             4 CRC32C over the previous CRC (4 bytes, the header's for the first), n, the bytes
//!             n bytes, the core's business
//!      .    4 0: the end
//!      .    4 CRC32C over the previous CRC and the number of pieces (8 bytes)
//! ```
//!
//! Numbers are little-endian. Each CRC continues the one before, so that a piece of another
//! snapshot, a missing or repeated piece and a cut file are all told from a whole one. The medium
//! may tear, lose or misplace any write that was not synced: the file is written under a temporary
//! name, synced, renamed, and the directory synced (RELIABILITY.md 4.6).

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use milpa_raft::SnapshotDescriptor;
use milpa_wire::frame::crc32c;
use milpa_wire::meta::CreateMetaPartition;
use serde::{Deserialize, Serialize};

const MAGIC: [u8; 8] = *b"MLPMETA1";
const HEADER_BYTES_MAX: usize = 1 << 20;
/// Bound on what a damaged length can make a reader allocate.
pub const PIECE_BYTES_MAX: usize = 16 << 20;

/// What the snapshot is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotHeader {
    /// The partition as the manager defined it, so that a replica can be rebuilt from the file
    /// alone. For correctness.
    pub definition: CreateMetaPartition,
    /// Log position and members. For correctness.
    pub descriptor: SnapshotDescriptor,
}

/// Why a snapshot file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// The disk said no.
    #[error("{context}")]
    Io {
        /// What was tried.
        context: &'static str,
        /// The disk's words.
        #[source]
        source: io::Error,
    },
    /// The bytes are not those that were written.
    #[error("snapshot is damaged: {0}")]
    Damaged(&'static str),
}

fn io_error(context: &'static str) -> impl FnOnce(io::Error) -> SnapshotFileError {
    move |source| SnapshotFileError::Io { context, source }
}

fn chain(previous: u32, parts: [&[u8]; 2]) -> u32 {
    let mut bytes = Vec::with_capacity(4 + parts[0].len() + parts[1].len());
    bytes.extend_from_slice(&previous.to_le_bytes());
    bytes.extend_from_slice(parts[0]);
    bytes.extend_from_slice(parts[1]);
    crc32c(&bytes)
}

/// Writes one file from front to end. Blocking: runs on a thread of its own.
pub struct SnapshotWriter {
    file: BufWriter<File>,
    crc: u32,
    pieces: u64,
}

impl SnapshotWriter {
    /// Creates `path`, replacing what an interrupted attempt left there.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError::Io`].
    pub fn create(path: &Path, header: &SnapshotHeader) -> Result<Self, SnapshotFileError> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        let mut file = BufWriter::new(file.map_err(io_error("create snapshot file"))?);
        let header = milpa_wire::encode(header);
        let mut front = Vec::with_capacity(16 + header.len());
        front.extend_from_slice(&MAGIC);
        front.extend_from_slice(&(header.len() as u32).to_le_bytes());
        let crc = chain(0, [&front, &header]);
        front.extend_from_slice(&crc.to_le_bytes());
        front.extend_from_slice(&header);
        file.write_all(&front).map_err(io_error("write snapshot header"))?;
        Ok(SnapshotWriter { file, crc, pieces: 0 })
    }

    /// Adds one piece.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError`] when the disk fails or the piece is empty or too large.
    pub fn write_piece(&mut self, piece: &[u8]) -> Result<(), SnapshotFileError> {
        if piece.is_empty() || piece.len() > PIECE_BYTES_MAX {
            return Err(SnapshotFileError::Damaged("a piece is empty or too large"));
        }
        let length = (piece.len() as u32).to_le_bytes();
        self.crc = chain(self.crc, [&length, piece]);
        self.pieces += 1;
        let parts: [&[u8]; 3] = [&length, &self.crc.to_le_bytes(), piece];
        for part in parts {
            self.file.write_all(part).map_err(io_error("write snapshot piece"))?;
        }
        Ok(())
    }

    /// Writes the end and syncs the file; returns its length in bytes.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError::Io`]: the file must not be used.
    pub fn finish(mut self) -> Result<u64, SnapshotFileError> {
        let crc = chain(self.crc, [&self.pieces.to_le_bytes(), &[]]);
        let end: [&[u8]; 2] = [&0u32.to_le_bytes(), &crc.to_le_bytes()];
        for part in end {
            self.file.write_all(part).map_err(io_error("write snapshot end"))?;
        }
        let file = self.file.into_inner().map_err(|e| e.into_error());
        let file = file.map_err(io_error("write snapshot end"))?;
        file.sync_all().map_err(io_error("sync snapshot file"))?;
        Ok(file.metadata().map_err(io_error("measure snapshot file"))?.len())
    }
}

/// Reads one file from front to end and trusts nothing in it.
pub struct SnapshotReader {
    file: BufReader<File>,
    header: SnapshotHeader,
    crc: u32,
    pieces: u64,
    ended: bool,
}

impl SnapshotReader {
    /// Opens `path` and checks its header.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError`].
    pub fn open(path: &Path) -> Result<SnapshotReader, SnapshotFileError> {
        let file = File::open(path).map_err(io_error("open snapshot file"))?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut front = [0; 16];
        fill(&mut file, &mut front, "header is cut")?;
        let [_, _, _, _, _, _, _, _, l0, l1, l2, l3, c0, c1, c2, c3] = front;
        if !front.starts_with(&MAGIC) {
            return Err(SnapshotFileError::Damaged("not a snapshot file"));
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length > HEADER_BYTES_MAX {
            return Err(SnapshotFileError::Damaged("header is too long"));
        }
        let mut header = vec![0; length];
        fill(&mut file, &mut header, "header is cut")?;
        let crc = u32::from_le_bytes([c0, c1, c2, c3]);
        if crc != chain(0, [front.get(..12).unwrap_or_default(), &header]) {
            return Err(SnapshotFileError::Damaged("header does not match its checksum"));
        }
        let header = milpa_wire::decode(&header)
            .map_err(|_| SnapshotFileError::Damaged("header is of another version"))?;
        Ok(SnapshotReader { file, header, crc, pieces: 0, ended: false })
    }

    /// What the file claims to be.
    #[must_use]
    pub fn header(&self) -> &SnapshotHeader {
        &self.header
    }

    /// The next piece; `None` at the end, once the end has been verified.
    ///
    /// # Errors
    ///
    /// [`SnapshotFileError`]: nothing that was read from this file may be used.
    pub fn next_piece(&mut self) -> Result<Option<Vec<u8>>, SnapshotFileError> {
        if self.ended {
            return Ok(None);
        }
        let mut front = [0; 8];
        fill(&mut self.file, &mut front, "file is cut")?;
        let [l0, l1, l2, l3, c0, c1, c2, c3] = front;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let crc = u32::from_le_bytes([c0, c1, c2, c3]);
        if length == 0 {
            return self.end(crc);
        }
        if length as usize > PIECE_BYTES_MAX {
            return Err(SnapshotFileError::Damaged("a piece is too long"));
        }
        let mut piece = vec![0; length as usize];
        fill(&mut self.file, &mut piece, "a piece is cut")?;
        self.crc = chain(self.crc, [&length.to_le_bytes(), &piece]);
        if self.crc != crc {
            return Err(SnapshotFileError::Damaged("a piece does not match its checksum"));
        }
        self.pieces += 1;
        Ok(Some(piece))
    }

    fn end(&mut self, crc: u32) -> Result<Option<Vec<u8>>, SnapshotFileError> {
        if chain(self.crc, [&self.pieces.to_le_bytes(), &[]]) != crc {
            return Err(SnapshotFileError::Damaged("the end does not match its checksum"));
        }
        if self.file.read(&mut [0]).map_err(io_error("read snapshot file"))? != 0 {
            return Err(SnapshotFileError::Damaged("bytes follow the end"));
        }
        self.ended = true;
        Ok(None)
    }
}

fn fill(
    file: &mut impl Read,
    buffer: &mut [u8],
    cut: &'static str,
) -> Result<(), SnapshotFileError> {
    file.read_exact(buffer).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => SnapshotFileError::Damaged(cut),
        _ => SnapshotFileError::Io { context: "read snapshot file", source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use milpa_raft::{LogPosition, Members};
    use milpa_types::{MetaSlot, NodeId, PartitionId, VolumeId, VolumeOptions};

    fn header() -> SnapshotHeader {
        SnapshotHeader {
            definition: CreateMetaPartition {
                partition: PartitionId(3),
                volume: VolumeId(1),
                options: VolumeOptions::default(),
                slot: MetaSlot(0),
                members: vec![NodeId(1), NodeId(2)],
            },
            descriptor: SnapshotDescriptor {
                position: LogPosition { term: 2, index: 99 },
                members: Members::new(&[NodeId(1), NodeId(2)], &[]),
            },
        }
    }

    fn write(path: &Path, pieces: &[&[u8]]) {
        let mut writer = SnapshotWriter::create(path, &header()).unwrap();
        for piece in pieces {
            writer.write_piece(piece).unwrap();
        }
        let length = writer.finish().unwrap();
        assert_eq!(length, std::fs::metadata(path).unwrap().len());
    }

    fn read(path: &Path) -> Result<Vec<Vec<u8>>, SnapshotFileError> {
        let mut reader = SnapshotReader::open(path)?;
        let mut pieces = Vec::new();
        while let Some(piece) = reader.next_piece()? {
            pieces.push(piece);
        }
        Ok(pieces)
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write(&path, &[b"first", b"second"]);
        assert_eq!(SnapshotReader::open(&path).unwrap().header(), &header());
        assert_eq!(read(&path).unwrap(), [b"first".to_vec(), b"second".to_vec()]);
    }

    /// F3 and F5 on this file: every byte flipped and every length cut must be told from a whole.
    #[test]
    fn any_flipped_byte_and_any_cut_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write(&path, &[b"first", b"second"]);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            std::fs::write(&path, &damaged).unwrap();
            assert!(read(&path).is_err(), "byte {at} flipped");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(read(&path).is_err(), "cut at {at}");
        }
        std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert!(read(&path).is_err(), "a byte too many");
    }
}
