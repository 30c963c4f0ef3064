//! Skeleton of the write-ahead log.
#![allow(unused_variables, missing_docs, clippy::unimplemented)]
use std::io;
use std::path::Path;

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use crate::types::{LogPosition, Members};

/// Records to make durable together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogBatch {
    pub number: u64,
    pub records: Vec<Record>,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    GroupCreated { group: PartitionId, members: Members },
    GroupRemoved { group: PartitionId },
}

/// What the log held.
#[derive(Debug, Default)]
pub struct Recovered {
    pub groups: Vec<RecoveredGroup>,
    pub damaged: Vec<Damage>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredGroup {
    pub group: PartitionId,
    pub term: u64,
    pub vote: Option<NodeId>,
    pub commit: u64,
    pub mark: LogPosition,
    pub members: Members,
}

/// A part of the log that had been durable and is unreadable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub group: PartitionId,
    pub vote_lost: bool,
    pub entries: Option<(u64, u64)>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WalError {
    #[error("the log is fenced after a failed write or flush")]
    Fenced,
    #[error("log file operation failed")]
    Io(#[from] io::Error),
}

/// Settings of the log.
#[derive(Clone, Debug)]
pub struct WalOptions {
    pub owner: [u8; 16],
    pub nonce: u64,
    pub segment_bytes: u64,
}

impl WalOptions {
    #[must_use]
    pub fn new(owner: [u8; 16], nonce: u64) -> WalOptions {
        WalOptions { owner, nonce, segment_bytes: 64 << 20 }
    }
}

/// Files as the log needs them.
pub trait LogStorage: Send + 'static {
    fn list(&self) -> io::Result<Vec<String>>;
    fn create(&mut self, name: &str) -> io::Result<()>;
    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self, name: &str) -> io::Result<()>;
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&mut self, name: &str) -> io::Result<()>;
    fn sync_dir(&mut self) -> io::Result<()>;
}

/// A directory of the real file system, locked against other processes.
pub struct FileStorage {}

impl FileStorage {
    pub fn open(directory: &Path) -> Result<Box<dyn LogStorage>, WalError> {
        unimplemented!()
    }
}

/// The log.
pub struct Wal {}

impl Wal {
    pub fn open(
        storage: Box<dyn LogStorage>,
        options: WalOptions,
    ) -> Result<(Wal, Recovered), WalError> {
        unimplemented!()
    }

    pub fn append(&mut self, batches: &[LogBatch]) -> Result<(), WalError> {
        let _ = Bytes::new();
        unimplemented!()
    }
}
