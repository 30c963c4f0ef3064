//! A group's log since its last compaction, in memory, as the Raft library reads it.
//!
//! What is here need not be durable yet: the library is told by `on_persist_ready`.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};

use milpa_types::NodeId;
use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{Error, GetEntriesContext, RaftState, Storage, StorageError};

use crate::convert::{conf_state, node_of};
use crate::types::{LogPosition, Members, SnapshotDescriptor};

/// The log, its start, and the snapshot that can stand in for what is gone.
#[derive(Debug)]
pub(crate) struct MemLog {
    /// The last entry that is gone.
    pub(crate) mark: LogPosition,
    /// The configuration at `mark`.
    pub(crate) members: Members,
    pub(crate) hard_state: HardState,
    entries: VecDeque<Entry>,
    /// What the owner can serve.
    pub(crate) snapshot: Option<SnapshotDescriptor>,
    /// Followers for which a snapshot was asked and none was there. The library's interface reads
    /// through a shared reference, hence the cell.
    pub(crate) wanted: RefCell<BTreeSet<NodeId>>,
}

impl MemLog {
    pub(crate) fn new(
        mark: LogPosition,
        members: Members,
        hard_state: HardState,
        entries: VecDeque<Entry>,
    ) -> MemLog {
        MemLog { mark, members, hard_state, entries, snapshot: None, wanted: RefCell::default() }
    }

    pub(crate) fn last(&self) -> LogPosition {
        self.entries
            .back()
            .map_or(self.mark, |entry| LogPosition { term: entry.term, index: entry.index })
    }

    fn offset(&self, index: u64) -> Option<usize> {
        usize::try_from(index.checked_sub(self.mark.index + 1)?).ok()
    }

    /// Appends, dropping what stands at and after the first new index. Returns that index if
    /// anything was dropped.
    pub(crate) fn append(&mut self, entries: Vec<Entry>) -> Option<u64> {
        let first = entries.first()?.index;
        let keep = self.offset(first)?;
        let is_conflict = keep < self.entries.len();
        self.entries.truncate(keep);
        self.entries.extend(entries);
        is_conflict.then_some(first)
    }

    /// Drops entries up to and including `mark`.
    pub(crate) fn compact(&mut self, mark: LogPosition, members: Members) {
        let count = self.offset(mark.index).map_or(0, |offset| offset + 1);
        self.entries.drain(..count.min(self.entries.len()));
        if self.entries.is_empty() {
            self.entries.shrink_to(64);
        }
        (self.mark, self.members) = (mark, members);
    }

    /// A snapshot takes the place of everything.
    pub(crate) fn restore(&mut self, snapshot: SnapshotDescriptor) {
        self.entries.clear();
        (self.mark, self.members) = (snapshot.position, snapshot.members);
        self.snapshot = None;
    }

    pub(crate) fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.mark.index {
            return Some(self.mark.term);
        }
        self.entries.get(self.offset(index)?).map(|entry| entry.term)
    }
}

impl Storage for MemLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let conf_state: ConfState = conf_state(&self.members);
        Ok(RaftState { hard_state: self.hard_state.clone(), conf_state })
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        let start = self.offset(low).ok_or(Error::Store(StorageError::Compacted))?;
        let end = self.offset(high).ok_or(Error::Store(StorageError::Unavailable))?;
        if end > self.entries.len() || start > end {
            return Err(Error::Store(StorageError::Unavailable));
        }
        let mut left = max_size.into().unwrap_or(u64::MAX);
        let mut out = Vec::new();
        for entry in self.entries.range(start..end) {
            let bytes = (entry.data.len() + entry.context.len()) as u64 + 24;
            if !out.is_empty() && bytes > left {
                break;
            }
            left = left.saturating_sub(bytes);
            out.push(entry.clone());
        }
        Ok(out)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let missing = if index < self.mark.index {
            StorageError::Compacted
        } else {
            StorageError::Unavailable
        };
        self.term_at(index).ok_or(Error::Store(missing))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.mark.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last().index)
    }

    /// A snapshot older than the start of the log would leave a hole, and one from before the
    /// follower became a member would be refused by it: then a newer one is asked for.
    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        let usable = self.snapshot.as_ref().filter(|snapshot| {
            snapshot.position.index >= request_index.max(self.mark.index)
                && snapshot.position.index > 0
                && snapshot.members.contains(node_of(to))
        });
        match usable {
            Some(snapshot) => Ok(crate::convert::raft_snapshot(snapshot)),
            None => {
                self.wanted.borrow_mut().insert(node_of(to));
                Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable))
            }
        }
    }
}
