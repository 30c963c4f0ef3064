//! Snapshots: the state at one log index as a file, written while the partition goes on.
//!
//! [`Partition::begin_snapshot`] shares the trees' nodes (see [`tree`](super::tree)); what changes
//! afterwards is copied by the change. So a snapshot stops nobody, costs memory only for the nodes
//! changed while it lives, and can be written by another thread.
//!
//! # Format 1
//!
//! A file is a sequence of pieces; numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | length of the payload, at most 16 MiB |
//! | 4 | CRC32C of the payload |
//! | n | payload: one byte says which, then |
//! | | 1: [`SnapshotHeader`] and the counters, postcard |
//! | | 2: one byte, the table; records of it in key order: key and value, each after its length (4 bytes) |
//! | | 3: number of pieces before this one (8), CRC32C of their CRCs in order (4), state hash (8) |
//!
//! A file that does not end with its trailer is torn. One whose checksums, counts or state hash do
//! not match is damaged. Neither is used.

use std::io::Read;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use milpa_types::{MetaSlot, PartitionId, VolumeId, VolumeOptions};
use serde::{Deserialize, Serialize};

use super::table::{Counters, TABLES, Tables};
use super::tree::Tree;
use super::{Partition, PartitionSetup};

/// The format that this build writes, and the only one it reads.
pub const SNAPSHOT_FORMAT: u16 = 1;
/// Largest payload of a piece that is read.
const PAYLOAD_BYTES_MAX: usize = 16 << 20;
/// Largest payload of a piece that is written, a last record of some KiB excepted.
const PIECE_BYTES_MAX: usize = 1 << 20;

const HEADER: u8 = 1;
const RECORDS: u8 = 2;
const TRAILER: u8 = 3;

/// What a snapshot file says of itself in its first piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotHeader {
    /// Layout of the file: [`SNAPSHOT_FORMAT`].
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
    counters: Counters,
    hash: u64,
    trees: [Tree; TABLES],
    next: Next,
    pieces: u64,
    checksum: crc_fast::Digest,
}

/// What the next piece holds. After the last table's records comes the trailer.
enum Next {
    Header,
    /// Records of a table, above the last key that was given.
    Records {
        table: usize,
        after: Option<Vec<u8>>,
    },
    Nothing,
}

impl Partition {
    /// Freezes the state at [`applied`](Partition::applied), whose Raft term the caller knows.
    /// Takes microseconds whatever the size.
    #[must_use]
    pub fn begin_snapshot(&self, term: u64) -> Snapshot {
        let trees = self.tables.trees().map(Tree::clone);
        Snapshot {
            header: SnapshotHeader {
                format: SNAPSHOT_FORMAT,
                partition: self.setup.partition,
                volume: self.setup.volume,
                slot: self.setup.slot,
                options: self.setup.options.clone(),
                index: self.applied,
                term,
                counts: trees.iter().map(Tree::count).collect(),
            },
            counters: self.counters.clone(),
            hash: self.hash(),
            trees,
            next: Next::Header,
            pieces: 0,
            checksum: crc_fast::Digest::new(Crc32Iscsi),
        }
    }
}

impl Snapshot {
    /// What it is of.
    #[must_use]
    pub fn header(&self) -> &SnapshotHeader {
        &self.header
    }

    /// The next bytes of the file, about `bytes_max` of them (at most 1 MiB, and always at least
    /// one record); `None` when all were given. The file is their concatenation.
    pub fn next_piece(&mut self, bytes_max: usize) -> Option<Vec<u8>> {
        let payload = match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Header => {
                self.next = Next::Records { table: 0, after: None };
                let mut payload = vec![HEADER];
                payload.extend(milpa_wire::encode(&(&self.header, &self.counters)));
                payload
            }
            Next::Records { table, after } => self.records(table, after, bytes_max),
            Next::Nothing => return None,
        };
        let crc = crc_of(&payload);
        self.checksum.update(&crc.to_le_bytes());
        self.pieces += 1;
        let length = (payload.len() as u32).to_le_bytes();
        Some([&length[..], &crc.to_le_bytes(), &payload].concat())
    }

    fn records(&mut self, mut table: usize, after: Option<Vec<u8>>, bytes_max: usize) -> Vec<u8> {
        let mut after = after;
        while let Some(tree) = self.trees.get(table) {
            let mut payload = vec![RECORDS, table as u8];
            let from = after.as_deref().unwrap_or_default();
            let mut records =
                tree.range(from).skip_while(|(key, _)| Some(*key) == after.as_deref());
            let mut last: Option<Vec<u8>> = None;
            while payload.len() < bytes_max.min(PIECE_BYTES_MAX) || last.is_none() {
                let Some((key, value)) = records.next() else { break };
                for part in [key, value] {
                    payload.extend((part.len() as u32).to_le_bytes());
                    payload.extend(part);
                }
                last = Some(key.to_vec());
            }
            if last.is_some() {
                self.next = Next::Records { table, after: last };
                return payload;
            }
            // Written out: its nodes are needed no longer.
            if let Some(tree) = self.trees.get_mut(table) {
                *tree = Tree::default();
            }
            table += 1;
            after = None;
        }
        self.trailer()
    }

    fn trailer(&mut self) -> Vec<u8> {
        let mut payload = vec![TRAILER];
        payload.extend(self.pieces.to_le_bytes());
        payload.extend((self.checksum.finalize() as u32).to_le_bytes());
        payload.extend(self.hash.to_le_bytes());
        payload
    }
}

fn crc_of(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
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

/// Rebuilds a partition from the bytes of a snapshot file. Reads to the end of the trailer.
///
/// # Errors
///
/// [`RestoreError`]; nothing of a refused file is used.
pub fn restore(reader: impl Read) -> Result<(Partition, SnapshotHeader), RestoreError> {
    let mut reader = Reader::new(reader);
    let first = reader.piece()?;
    let (header, counters) = reader.header(&first)?;
    let mut trees: [Tree; TABLES] = Default::default();
    let hash = reader.records(|records| fill(&mut trees, records))?;
    if !trees.iter().map(Tree::count).eq(header.counts.iter().copied()) {
        return Err(reader.damaged("counts"));
    }
    let setup = PartitionSetup {
        partition: header.partition,
        volume: header.volume,
        slot: header.slot,
        options: header.options.clone(),
    };
    let tables = Tables::from_trees(trees).ok_or_else(|| reader.damaged("a record"))?;
    let partition = Partition { setup, applied: header.index, tables, counters };
    if partition.hash() != hash {
        return Err(reader.damaged("state hash"));
    }
    Ok((partition, header))
}

/// Reads the bytes of a snapshot file to the end of the trailer, and checks them against their checksums. Takes
/// memory for one piece.
///
/// # Errors
///
/// [`RestoreError`]; nothing of such a file can be relied on.
pub fn verify(reader: impl Read) -> Result<SnapshotHeader, RestoreError> {
    let mut reader = Reader::new(reader);
    let first = reader.piece()?;
    let (header, _) = reader.header(&first)?;
    reader.records(|_| Some(()))?;
    Ok(header)
}

/// Puts the records of one piece into their tree. `None` if they are not records.
fn fill(trees: &mut [Tree; TABLES], records: &[u8]) -> Option<()> {
    let (&table, mut rest) = records.split_first()?;
    let tree = trees.get_mut(usize::from(table))?;
    while !rest.is_empty() {
        let key = take_part(&mut rest)?;
        let value = take_part(&mut rest)?;
        if key.len() > usize::from(u16::MAX) {
            return None;
        }
        tree.insert(key, value);
    }
    Some(())
}

fn take_part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, after) = rest.split_first_chunk::<4>()?;
    let (part, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *rest = after;
    Some(part)
}

struct Reader<R> {
    reader: R,
    pieces: u64,
    checksum: crc_fast::Digest,
}

impl<R: Read> Reader<R> {
    fn new(reader: R) -> Reader<R> {
        Reader { reader, pieces: 0, checksum: crc_fast::Digest::new(Crc32Iscsi) }
    }

    /// Hands out the records of each piece up to the trailer; gives the hash of the state. `take` answers `None` if
    /// they are no records.
    fn records(&mut self, mut take: impl FnMut(&[u8]) -> Option<()>) -> Result<u64, RestoreError> {
        loop {
            let expected = (self.pieces, self.checksum.finalize() as u32);
            let payload = self.piece()?;
            match payload.split_first() {
                Some((&RECORDS, records)) => {
                    take(records).ok_or_else(|| self.damaged("records"))?;
                }
                Some((&TRAILER, trailer)) => return self.trailer(trailer, expected),
                _ => return Err(self.damaged("kind of piece")),
            }
        }
    }

    /// The payload of the next piece, its checksum checked.
    fn piece(&mut self) -> Result<Vec<u8>, RestoreError> {
        let mut head = [0; 8];
        self.fill(&mut head)?;
        let [l0, l1, l2, l3, c0, c1, c2, c3] = head;
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(self.damaged("length"));
        }
        // What is there, not what the length says, decides how much memory this takes.
        let mut payload = Vec::new();
        self.reader.by_ref().take(length as u64).read_to_end(&mut payload)?;
        if payload.len() < length {
            return Err(RestoreError::Torn { pieces: self.pieces });
        }
        let crc = [c0, c1, c2, c3];
        if crc_of(&payload) != u32::from_le_bytes(crc) {
            return Err(self.damaged("checksum"));
        }
        self.checksum.update(&crc);
        self.pieces += 1;
        Ok(payload)
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), RestoreError> {
        self.reader.read_exact(buffer).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => RestoreError::Torn { pieces: self.pieces },
            _ => RestoreError::Read(error),
        })
    }

    fn header(&self, payload: &[u8]) -> Result<(SnapshotHeader, Counters), RestoreError> {
        let Some((&HEADER, body)) = payload.split_first() else {
            return Err(self.damaged("kind of first piece"));
        };
        // The format comes first in every format (one byte up to 127), so that a newer one can be
        // named.
        match body.first().map(|&format| u16::from(format)) {
            Some(SNAPSHOT_FORMAT) => {}
            Some(format) => return Err(RestoreError::Format { format }),
            None => return Err(self.damaged("header")),
        }
        milpa_wire::decode(body).map_err(|_| self.damaged("header"))
    }

    fn trailer(&self, trailer: &[u8], expected: (u64, u32)) -> Result<u64, RestoreError> {
        let mut written = expected.0.to_le_bytes().to_vec();
        written.extend(expected.1.to_le_bytes());
        match trailer.strip_prefix(written.as_slice()).and_then(|hash| hash.try_into().ok()) {
            Some(hash) => Ok(u64::from_le_bytes(hash)),
            None => Err(self.damaged("trailer")),
        }
    }

    /// The piece just read, or being read, is not what was written.
    fn damaged(&self, what: &'static str) -> RestoreError {
        RestoreError::Damaged { piece: self.pieces.saturating_sub(1), what }
    }
}
