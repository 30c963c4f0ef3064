//! Which segment still holds what: decides when a segment file can be freed.

use std::collections::BTreeMap;

use milpa_types::{NodeId, PartitionId};

use super::record::Record;
use super::room::Need;
use crate::types::{LogPosition, Members};

/// For every group, where its newest records stand.
#[derive(Debug, Default)]
pub(crate) struct LiveIndex {
    groups: BTreeMap<PartitionId, LiveGroup>,
}

#[derive(Debug, Default)]
struct LiveGroup {
    /// Segment of the record that says how the log starts.
    shape_segment: Option<u64>,
    mark: LogPosition,
    members: Members,
    /// Segment of the newest hard state.
    hard_segment: Option<u64>,
    term: u64,
    vote: Option<NodeId>,
    commit: u64,
    /// Live entries, ascending, without overlap.
    runs: Vec<Run>,
}

/// Entries `first..=last`, all in one segment.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: u64,
    last: u64,
    segment: u64,
    /// Bytes of all of them. An estimate after a cut.
    bytes: u64,
}

impl Run {
    /// Keeps indexes up to and including `last`; what is cut takes its share of bytes with it.
    fn cut_after(&mut self, last: u64) {
        self.bytes = self.share(last.saturating_sub(self.first) + 1);
        self.last = last;
    }

    fn cut_before(&mut self, first: u64) {
        self.bytes = self.share(self.last.saturating_sub(first) + 1);
        self.first = first;
    }

    fn share(&self, count: u64) -> u64 {
        self.bytes * count / (self.last - self.first + 1)
    }
}

/// What an old segment still holds.
#[derive(Debug, Default)]
pub(crate) struct SegmentLoad {
    /// Records that would be copied whatever the entries are: starts of logs and hard states.
    pub(crate) anchors: Vec<Record>,
    /// Group, first and last index of live entries in it.
    pub(crate) entries: Vec<(PartitionId, u64, u64)>,
    /// Their bytes. An estimate, which may be far below the truth, where entries beside them are not live any more.
    pub(crate) entry_bytes: u64,
}

impl SegmentLoad {
    pub(crate) fn is_empty(&self) -> bool {
        self.anchors.is_empty() && self.entries.is_empty()
    }

    /// Counts what copying all of it takes, as far as that is known.
    pub(crate) fn count(&self, need: &mut Need) {
        self.anchors.iter().for_each(|record| need.add(record));
        let entries = self.entries.iter().map(|(_, first, last)| last - first + 1).sum();
        need.add_some(entries, self.entry_bytes);
    }
}

impl LiveGroup {
    fn truncate(&mut self, from: u64) {
        self.runs.retain(|run| run.first < from);
        if let Some(run) = self.runs.last_mut().filter(|run| run.last >= from) {
            run.cut_after(from - 1);
        }
    }

    fn drop_through(&mut self, index: u64) {
        self.runs.retain(|run| run.last > index);
        if let Some(run) = self.runs.first_mut().filter(|run| run.first <= index) {
            run.cut_before(index + 1);
        }
    }

    fn push(&mut self, index: u64, segment: u64, bytes: u64) {
        match self.runs.last_mut() {
            Some(run) if run.segment == segment && run.last + 1 == index => {
                run.last = index;
                run.bytes += bytes;
            }
            _ => self.runs.push(Run { first: index, last: index, segment, bytes }),
        }
    }

    /// An entry copied forward: it lives in `segment` now, wherever it stood.
    fn move_entry(&mut self, index: u64, segment: u64, bytes: u64) {
        let at = self.runs.partition_point(|run| run.last < index);
        let mut insert_at = at;
        if let Some(run) = self.runs.get(at).copied().filter(|run| run.first <= index) {
            let (mut before, mut after) = (run, run);
            let mut pieces = Vec::with_capacity(2);
            if run.first < index {
                before.cut_after(index - 1);
                pieces.push(before);
                insert_at += 1;
            }
            if run.last > index {
                after.cut_before(index + 1);
                pieces.push(after);
            }
            self.runs.splice(at..=at, pieces);
        }
        let left = insert_at.checked_sub(1).and_then(|i| self.runs.get_mut(i));
        match left {
            Some(run) if run.segment == segment && run.last + 1 == index => {
                run.last = index;
                run.bytes += bytes;
            }
            _ => self.runs.insert(insert_at, Run { first: index, last: index, segment, bytes }),
        }
    }
}

impl LiveIndex {
    /// A record of `bytes` was written to `segment`.
    pub(crate) fn note(&mut self, record: &Record, segment: u64, bytes: u64, is_carried: bool) {
        if let Record::GroupRemoved { group } = record {
            self.groups.remove(group);
            return;
        }
        let live = self.groups.entry(record.group()).or_default();
        match record {
            Record::GroupRemoved { .. } => {}
            Record::GroupCreated { mark, members, .. } => {
                *live = LiveGroup {
                    shape_segment: Some(segment),
                    mark: *mark,
                    members: members.clone(),
                    ..LiveGroup::default()
                };
            }
            Record::HardState { term, vote, commit, .. } => {
                live.hard_segment = Some(segment);
                (live.term, live.vote, live.commit) = (*term, *vote, *commit);
            }
            Record::Entry { entry, .. } if entry.position.index <= live.mark.index => {}
            Record::Entry { entry, .. } if is_carried => {
                live.move_entry(entry.position.index, segment, bytes);
            }
            Record::Entry { entry, .. } => {
                live.truncate(entry.position.index);
                live.push(entry.position.index, segment, bytes);
            }
            Record::Truncated { from, .. } => live.truncate(*from),
            Record::Compacted { mark, members, .. } => {
                live.drop_through(mark.index);
                live.shape_segment = Some(segment);
                (live.mark, live.members) = (*mark, members.clone());
            }
            Record::Snapshot { mark, members, .. } => {
                live.runs.clear();
                live.shape_segment = Some(segment);
                (live.mark, live.members) = (*mark, members.clone());
            }
        }
    }

    /// Whether the record says that this replica has voted, and none before it said so.
    pub(crate) fn is_new_vote(&self, record: &Record) -> bool {
        let Record::HardState { group, term, vote: vote @ Some(_), .. } = record else {
            return false;
        };
        self.groups.get(group).is_none_or(|live| (live.term, live.vote) != (*term, *vote))
    }

    /// The live entries of a group from `first` on that are in one segment were read: they have so many bytes.
    pub(crate) fn measured(&mut self, group: PartitionId, first: u64, bytes: u64) {
        let runs = self.groups.get_mut(&group).map(|live| live.runs.iter_mut());
        if let Some(run) = runs.and_then(|mut runs| runs.find(|run| run.first == first)) {
            run.bytes = bytes;
        }
    }

    /// What `segment` still holds.
    pub(crate) fn load(&self, segment: u64) -> SegmentLoad {
        let mut load = SegmentLoad::default();
        for (&group, live) in &self.groups {
            if live.shape_segment == Some(segment) {
                let (mark, members) = (live.mark, live.members.clone());
                load.anchors.push(Record::Compacted { group, mark, members });
            }
            if live.hard_segment == Some(segment) {
                let (term, vote, commit) = (live.term, live.vote, live.commit);
                load.anchors.push(Record::HardState { group, term, vote, commit });
            }
            for run in live.runs.iter().filter(|run| run.segment == segment) {
                load.entries.push((group, run.first, run.last));
                load.entry_bytes += run.bytes;
            }
        }
        load
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wal::LogEntry;

    fn entry(index: u64) -> Record {
        let position = LogPosition { term: 1, index };
        Record::Entry { group: PartitionId(1), entry: LogEntry { position, ..LogEntry::default() } }
    }

    #[test]
    fn a_segment_is_free_when_everything_in_it_was_superseded() {
        let group = PartitionId(1);
        let mut live = LiveIndex::default();
        let mark = LogPosition::default();
        live.note(&Record::GroupCreated { group, mark, members: Members::default() }, 1, 10, false);
        live.note(&Record::HardState { group, term: 1, vote: None, commit: 0 }, 1, 10, false);
        (1..=4).for_each(|i| live.note(&entry(i), 1, 100, false));
        (5..=8).for_each(|i| live.note(&entry(i), 2, 100, false));
        let load = live.load(1);
        assert_eq!((load.anchors.len(), load.entry_bytes), (2, 400));
        let mark = LogPosition { term: 1, index: 2 };
        live.note(&Record::Compacted { group, mark, members: Members::default() }, 2, 10, false);
        live.note(&Record::HardState { group, term: 1, vote: None, commit: 0 }, 2, 10, false);
        assert_eq!(live.load(1).entries, [(group, 3, 4)]);
        live.note(&entry(3), 3, 100, true);
        live.note(&entry(4), 3, 100, true);
        assert!(live.load(1).is_empty());
        assert_eq!(live.load(3).entries, [(group, 3, 4)]);
        live.note(&Record::Truncated { group, from: 4 }, 3, 0, false);
        assert_eq!(live.load(3).entries, [(group, 3, 3)]);
        assert!(live.load(2).entries.is_empty());
    }
}
