//! The end of a group's log, in memory, as the Raft library reads it.
//!
//! What is here need not be durable yet: the library is told by `on_persist_ready`. And not all of
//! the log need be here: the log on disk begins after the last compaction, because a restart
//! replays it from there, but in memory only followers that lag want applied entries. So these go
//! when they are too many bytes ([`MemLog::trim`]); a follower that lags further behind gets a
//! snapshot, as if the log had been compacted.

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
    /// The last entry that is gone from the disk too.
    pub(crate) mark: LogPosition,
    /// The configuration at `mark`.
    pub(crate) members: Members,
    pub(crate) hard_state: HardState,
    /// The last entry before `entries`: the mark, or later.
    start: LogPosition,
    /// Where each term begins among the entries that are on disk only, ascending.
    terms: VecDeque<LogPosition>,
    entries: VecDeque<Entry>,
    /// About how much memory `entries` take.
    bytes: usize,
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
        let bytes = entries.iter().map(entry_bytes).sum();
        MemLog {
            mark,
            members,
            hard_state,
            start: mark,
            terms: VecDeque::new(),
            entries,
            bytes,
            snapshot: None,
            wanted: RefCell::default(),
        }
    }

    pub(crate) fn last(&self) -> LogPosition {
        self.entries.back().map_or(self.start, position_of)
    }

    /// Where `index` stands in `entries`.
    fn offset(&self, index: u64) -> Option<usize> {
        usize::try_from(index.checked_sub(self.start.index + 1)?).ok()
    }

    /// Appends, dropping what stands at and after the first new index. Returns that index if
    /// anything was dropped.
    pub(crate) fn append(&mut self, entries: Vec<Entry>) -> Option<u64> {
        let first = entries.first()?.index;
        let keep = self.offset(first)?;
        let is_conflict = keep < self.entries.len();
        let dropped: usize = self.entries.iter().skip(keep).map(entry_bytes).sum();
        self.entries.truncate(keep);
        self.bytes -= dropped;
        self.bytes += entries.iter().map(entry_bytes).sum::<usize>();
        self.entries.extend(entries);
        is_conflict.then_some(first)
    }

    /// About how much memory the entries take.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets the oldest entries up to `index` until the rest takes at most `bytes_max`. They stay
    /// on disk; their terms stay known, because compaction and snapshots need them.
    pub(crate) fn trim(&mut self, index: u64, bytes_max: usize) {
        while self.bytes > bytes_max
            && let Some(entry) = self.entries.pop_front_if(|entry| entry.index <= index)
        {
            self.bytes -= entry_bytes(&entry);
            let position = position_of(&entry);
            if position.term != self.start.term {
                self.terms.push_back(position);
            }
            self.start = position;
        }
        self.give_back();
    }

    /// A queue that once was long keeps its room; in hundreds of groups that adds up.
    fn give_back(&mut self) {
        if self.entries.capacity() > 64 + 4 * self.entries.len() {
            self.entries.shrink_to(64 + 2 * self.entries.len());
        }
    }

    /// Drops entries up to and including `mark`, on disk too.
    pub(crate) fn compact(&mut self, mark: LogPosition, members: Members) {
        if self.start.index < mark.index {
            let count = self.offset(mark.index).map_or(0, |offset| offset + 1);
            let dropped = self.entries.drain(..count.min(self.entries.len()));
            self.bytes -= dropped.map(|entry| entry_bytes(&entry)).sum::<usize>();
            self.start = mark;
            self.give_back();
        }
        self.terms.retain(|since| since.index > mark.index);
        (self.mark, self.members) = (mark, members);
    }

    /// A snapshot takes the place of everything.
    pub(crate) fn restore(&mut self, snapshot: SnapshotDescriptor) {
        self.entries.clear();
        self.terms.clear();
        self.bytes = 0;
        (self.mark, self.members) = (snapshot.position, snapshot.members);
        self.start = self.mark;
        self.snapshot = None;
    }

    /// The term of an entry that is on disk, here or not, or of the mark.
    pub(crate) fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.mark.index {
            return Some(self.mark.term);
        }
        if index > self.mark.index && index <= self.start.index {
            let since = self.terms.iter().rev().find(|since| since.index <= index);
            return Some(since.map_or(self.mark.term, |since| since.term));
        }
        self.entries.get(self.offset(index)?).map(|entry| entry.term)
    }
}

fn position_of(entry: &Entry) -> LogPosition {
    LogPosition { term: entry.term, index: entry.index }
}

/// What an entry takes in memory: itself, and its bytes with what an allocation of their own costs.
fn entry_bytes(entry: &Entry) -> usize {
    const ALLOCATION_BYTES: usize = 48;
    size_of::<Entry>() + ALLOCATION_BYTES + entry.data.len() + entry.context.len()
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
        let missing = if index < self.start.index {
            StorageError::Compacted
        } else {
            StorageError::Unavailable
        };
        self.term_at(index).ok_or(Error::Store(missing))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.start.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last().index)
    }

    /// A snapshot older than the entries at hand would leave a hole, and one from before the
    /// follower became a member would be refused by it: then a newer one is asked for.
    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        let usable = self.snapshot.as_ref().filter(|snapshot| {
            snapshot.position.index >= request_index.max(self.start.index)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn log(terms: &[u64]) -> MemLog {
        let mark = LogPosition { term: 1, index: 10 };
        let mut log = MemLog::new(mark, Members::default(), HardState::default(), VecDeque::new());
        let entry = |(index, term): (u64, &u64)| {
            let mut entry = Entry::default();
            (entry.term, entry.index) = (*term, index);
            entry
        };
        log.append((11..).zip(terms).map(entry).collect());
        log
    }

    /// What compaction and snapshots ask for must be known of entries that are on disk only.
    #[test]
    fn trimmed_entries_keep_their_terms_and_make_room() {
        let terms = [1, 1, 2, 2, 2, 5, 5, 6];
        let mut log = log(&terms);
        let whole = log.bytes();
        log.trim(15, whole / 2);
        assert_eq!(log.bytes(), whole / 2, "four of eight entries");
        assert_eq!(log.first_index().unwrap(), 15);
        log.trim(16, 0);
        assert_eq!(log.first_index().unwrap(), 17, "what is not applied stays");
        let known = |log: &MemLog, from: u64| -> Vec<u64> {
            (from..=18).filter_map(|index| log.term_at(index)).collect()
        };
        assert_eq!(known(&log, 11), terms);
        let entries = log.entries(15, 17, None, GetEntriesContext::empty(false));
        assert!(matches!(entries, Err(Error::Store(StorageError::Compacted))));
        log.compact(LogPosition { term: 2, index: 14 }, Members::default());
        assert_eq!(known(&log, 14), terms[3..]);
        assert_eq!(log.first_index().unwrap(), 17);
        log.compact(LogPosition { term: 5, index: 17 }, Members::default());
        assert_eq!((log.first_index().unwrap(), known(&log, 17)), (18, vec![5, 6]));
        assert_eq!(log.bytes(), whole / 8);
    }

    #[test]
    fn a_conflict_is_cut_and_counted() {
        let mut log = log(&[1, 1, 1, 1]);
        let whole = log.bytes();
        let mut entry = Entry::default();
        (entry.term, entry.index) = (2, 13);
        assert_eq!(log.append(vec![entry]), Some(13));
        assert_eq!((log.last().index, log.bytes()), (13, whole / 4 * 3));
    }
}
