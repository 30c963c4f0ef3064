//! The write-ahead log of one node (or of one disk of a data node): all groups in one sequence of
//! batches, each made durable by one `pwrite` and one `fdatasync`.
//!
//! Why our own: a log that is damaged must be told from a log whose last write a crash had cut
//! short (RELIABILITY.md 4.6), the simulation must own the disk, and nothing else is needed: the
//! entries since the last compaction live in memory anyway, so the log is only ever appended to,
//! and read at start.
//!
//! # Assumptions about the disk
//!
//! After `fdatasync` has returned without error, what was written is there after a power loss.
//! What was not synced may be there, or not, sector by sector (512 bytes), in any order. A failed
//! flush leaves the state unknown and is never repeated. Any block may be found changed, zeroed or
//! replaced by another later (bit rot, lost and misdirected writes): that is recognised, not
//! repaired; repair is from the peers.
//!
//! # Files
//!
//! `<seq, 16 hex digits>.wal` are segments, `<id, 16 hex digits>.spare` segment files for reuse,
//! `new.tmp` a file being prepared, `lock` the `flock` against a second process. A segment file is
//! filled with zeros and synced before its first use, and reused afterwards, so that a flush finds
//! all blocks allocated and the file system commits no journal. On a disk that is nearly full segments are smaller than
//! [`WalOptions::segment_bytes`] says, and are not reused. All integers are little-endian.
//!
//! Segment header, two copies at 0 and 4096; the first batch stands at 8192:
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..8 | magic | `MILPAWAL` |
//! | 8..12 | version | 1 |
//! | 12..16 | block size | 4096 |
//! | 16..24 | seq | as in the file's name |
//! | 24..40 | owner | whose log, as given at open: of a server its directory's incarnation (xor the disk's id) |
//! | 40..48 | first batch | all lower numbers were durable when this was written |
//! | 48..56 | chain | digest of the batch before |
//! | 56..64 | salt | enters all checksums below; new in each life of the file |
//! | 64..72 | size | of the file |
//! | 72..92 | zero | |
//! | 92..96 | CRC32C | of 0..92 and of which copy this is |
//!
//! Batch, at a multiple of 4096 so that no flush touches a block with durable bytes:
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..4 | magic | `MWB1` |
//! | 4..8 | version | 1 |
//! | 8..16 | number | rising by one from batch to batch |
//! | 16..24 | seq | of the segment |
//! | 24..32 | file offset | against misdirected writes |
//! | 32..36 | length | header and records, without padding |
//! | 36..40 | records | how many |
//! | 40..48 | chain | CRC64 of the whole batch before, which contains its predecessor's |
//! | 48..60 | zero | |
//! | 60..64 | CRC32C | of 0..60, the salt and the offset |
//!
//! Record, at a multiple of 8:
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..2 | magic | `MR` |
//! | 2 | kind | see below |
//! | 3 | flags | 1 copied forward from a freed segment, 2 configuration change |
//! | 4..8 | body length | without padding |
//! | 8..16 | group | |
//! | 16..24 | term | |
//! | 24..32 | index | |
//! | 32..40 | file offset | of this record |
//! | 40..44 | CRC32C | of the body |
//! | 44..48 | CRC32C | of 0..44, the salt and the batch number |
//! | 48.. | body | |
//!
//! | kind | | term, index | body |
//! |---|---|---|---|
//! | 1 | group created | where the log starts | configuration |
//! | 2 | group removed | 0 | |
//! | 3 | hard state | term, commit | vote: u64, bit 32 set if given |
//! | 4 | entry | its position | u32 length of context, context, data |
//! | 5 | truncated | 0, first void index | |
//! | 6 | compacted | last dropped entry | configuration there |
//! | 7 | snapshot | its last entry | configuration there |
//! | 8 | trace | 0, number of the batch before | per group: u64 group, first, last, flags |
//!
//! A configuration is a byte "leaves by itself" and four lists (voters, learners, outgoing, next
//! learners) of u32 count and u32 nodes. Configurations between two such records follow from the
//! entries.
//!
//! # Recovery
//!
//! One flush is in flight at a time, so a batch was durable if a later one exists, or a later
//! segment whose header names a higher first batch. A bad batch with nothing after it is the *torn
//! tail* of a crash: it was never acknowledged, is dropped, and its head is erased. A bad batch with
//! something after it is *corruption*: nothing is truncated, and [`Recovered::damaged`] says which
//! groups lost which entries, and whose vote is unknown. The trace in the following batch pins the
//! damage to the groups that were in the lost one; if that is unreadable too, every group is suspect
//! that was not founded later.
//!
//! Records left by a reused file's former life never verify, because the salt differs. Since the
//! salt is secret, user data cannot be made to look like a batch either.
//!
//! # Freeing
//!
//! A segment is freed when no group needs anything in it. Hard states and starts of logs are
//! copied forward; live entries only when there are more than
//! [`WalOptions::segments_max`] segments and the entries are few. So a busy owner must compact its
//! groups, also the idle ones. From a segment of which any batch is unreadable no entries are copied: it
//! stays until they are compacted.
//!
//! # However
//!
//! If the very last batch rots while the process is down, it passes for a torn tail: what it
//! acknowledged is lost here, and only here. After a failed flush and a restart, the last batch is
//! written once more before it is believed, but a disk that lies twice is beyond this log.
//!
//! # What is deliberately absent
//!
//! No direct I/O (a batch is copied once, into the page cache), no compression, no encryption. The
//! log does not repair itself, and it does not judge what damage means for a group: see
//! [`RecoverError`](crate::RecoverError).

use std::io;
use std::path::PathBuf;

mod format;
mod live;
mod log;
pub mod memory;
mod record;
mod replay;
mod room;
mod scan;
mod storage;
mod write;

pub use log::{Wal, WalStats};
pub use memory::MemoryStorage;
pub use record::{EntryKind, LogBatch, LogEntry, Record};
pub use replay::{Damage, RecoveredGroup};
pub use storage::{FileStorage, LogStorage};

pub(crate) use format::mix;
#[cfg(any(test, feature = "decoders"))]
pub(crate) use format::seal::seal_segment;

const TEMPORARY_NAME: &str = "new.tmp";

pub(crate) fn segment_name(seq: u64) -> String {
    format!("{seq:016x}.wal")
}

fn segment_seq(name: &str) -> Option<u64> {
    parse_name(name, ".wal")
}

fn spare_name(id: u64) -> String {
    format!("{id:016x}.spare")
}

fn spare_id(name: &str) -> Option<u64> {
    parse_name(name, ".spare")
}

fn parse_name(name: &str, suffix: &str) -> Option<u64> {
    let digits = name.strip_suffix(suffix).filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Settings of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalOptions {
    /// Whose log this is: derived from cluster and node. A log with another tag is refused.
    pub owner: [u8; 16],
    /// Drawn at random by the shell at each start; enters the checksums of new segments.
    pub nonce: u64,
    /// Size of a segment file while there is room for it. A multiple of 4096, at least 64 KiB, at most 1 GiB; must hold the
    /// largest entry.
    pub segment_bytes: u64,
    /// Size of the very first segment, so that a new node starts without zeroing much. A multiple
    /// of 4096, at least 32 KiB and at most `segment_bytes`.
    pub first_segment_bytes: u64,
    /// With more old segments than this, few live entries are copied forward to free one.
    pub segments_max: usize,
    /// How many bytes of live entries are "few".
    pub carry_bytes_max: u64,
}

impl WalOptions {
    /// The defaults: segments of 64 MiB, the first one of 4 MiB.
    #[must_use]
    pub fn new(owner: [u8; 16], nonce: u64) -> WalOptions {
        WalOptions {
            owner,
            nonce,
            segment_bytes: 64 << 20,
            first_segment_bytes: 4 << 20,
            segments_max: 8,
            carry_bytes_max: 4 << 20,
        }
    }

    fn validate(&self) -> Result<(), WalError> {
        let checks = [
            (
                (64 << 10..=format::SEGMENT_BYTES_MAX).contains(&self.segment_bytes),
                "segment_bytes out of bounds",
            ),
            (
                (32 << 10..=self.segment_bytes).contains(&self.first_segment_bytes),
                "first_segment_bytes out of bounds",
            ),
            (
                self.segment_bytes.is_multiple_of(format::BLOCK_BYTES)
                    && self.first_segment_bytes.is_multiple_of(format::BLOCK_BYTES),
                "segment sizes must be multiples of 4096",
            ),
        ];
        match checks.iter().find(|(ok, _)| !ok) {
            Some((_, problem)) => Err(WalError::BadOptions { problem }),
            None => Ok(()),
        }
    }
}

/// What a log held when it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// All groups, ascending. Damaged ones too, as far as they could be read.
    pub groups: Vec<RecoveredGroup>,
    /// What was lost to corruption. Empty on a healthy disk, whatever the crash.
    pub damaged: Vec<Damage>,
    /// A write that a crash had cut short was dropped. Normal after a power loss.
    pub has_torn_tail: bool,
    /// How many batches were read.
    pub batches: u64,
}

/// Why the log cannot be opened, or can no longer be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalError {
    /// A file operation failed. If it happened while appending, the log is fenced now.
    #[error("log file operation failed")]
    Io(#[from] io::Error),
    /// An earlier write or flush failed. What the disk holds is unknown; repair or replace it.
    #[error("the log is fenced after a failed write or flush")]
    Fenced,
    /// Another process has the log open.
    #[error("another process uses the log in {}", directory.display())]
    Locked {
        /// Where.
        directory: PathBuf,
    },
    /// The log belongs to another node or another cluster.
    #[error("the log belongs to {found:02x?}, not to {expected:02x?}")]
    WrongOwner {
        /// Our tag.
        expected: [u8; 16],
        /// The tag in the file.
        found: [u8; 16],
    },
    /// A record does not fit into a segment. The settings contradict each other.
    #[error("a record does not fit into a segment of {segment_bytes} bytes")]
    RecordTooLarge {
        /// The configured size.
        segment_bytes: u64,
    },
    /// The settings are out of bounds.
    #[error("bad log settings: {problem}")]
    BadOptions {
        /// Which.
        problem: &'static str,
    },
}

#[cfg(test)]
mod tests;
