//! Builds the groups out of the records, and knows what a hole in the log may have cost.

use std::collections::BTreeMap;

use milpa_types::{NodeId, PartitionId};

use super::format::RecordHeader;
use super::record::{EntryKind, LogEntry, Record, Stored, TRACE_SHAPE, TRACE_VOTE, TraceLine};
use crate::types::{LogPosition, Members};

/// One group, as the log had it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredGroup {
    /// The group.
    pub group: PartitionId,
    /// The highest term seen.
    pub term: u64,
    /// The vote given in that term.
    pub vote: Option<NodeId>,
    /// The last index known to be committed; never beyond the last entry.
    pub commit: u64,
    /// The log starts after this position.
    pub mark: LogPosition,
    /// The configuration at `mark`.
    pub members: Members,
    /// The entries, ascending. Contiguous from `mark` unless the group is damaged.
    pub entries: Vec<LogEntry>,
}

impl RecoveredGroup {
    /// The term of the entry at an index above the mark, if there is one.
    pub(crate) fn term_at(&self, index: u64) -> Option<u64> {
        let above = index.checked_sub(self.mark.index + 1)?;
        let entry = self.entries.get(usize::try_from(above).ok()?)?;
        Some(entry.position.term)
    }

    /// The last change of the members but one in the log, 0 for none: it is committed, whether or not that was written
    /// down. A leader puts a change behind another one only after that one has come out of its log, and a new leader only
    /// after all that it found there has.
    pub(crate) fn committed_change(&self) -> u64 {
        let changes = self.entries.iter().rev().filter(|entry| entry.kind == EntryKind::Change);
        changes.map(|change| change.position.index).nth(1).unwrap_or_default()
    }
}

/// What a group lost to corruption: bytes that had been durable and are unreadable now.
///
/// A replica that is damaged must not take part in its group: it may hold the only copy of an
/// entry that it once acknowledged, or have given a vote it no longer knows of. Nothing is cut off
/// the log for it; the damage is reported again at every start until the group is removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// The group.
    pub group: PartitionId,
    /// Its newest term and vote may be lost. It must not vote, in any term it could have voted in.
    pub vote_lost: bool,
    /// Index ranges (first, last) of entries that are known to be lost.
    pub entries: Vec<(u64, u64)>,
    /// Further records of the group may be lost without trace: entries at any index, truncations,
    /// the group's removal.
    pub is_unbounded: bool,
}

impl Damage {
    fn is_any(&self) -> bool {
        self.vote_lost || self.is_unbounded || !self.entries.is_empty()
    }
}

#[derive(Debug, Default)]
struct Building {
    term: u64,
    vote: Option<NodeId>,
    commit: u64,
    mark: LogPosition,
    members: Members,
    /// Whether the record that says how the log starts was seen.
    has_shape: bool,
    entries: BTreeMap<u64, LogEntry>,
    vote_lost: bool,
    lost: Vec<(u64, u64)>,
    suspect: Option<Suspect>,
}

/// Records of the group may be missing, nobody knows which.
#[derive(Debug, Default)]
struct Suspect {
    /// The first entry written after the hole. Missing ones are below it.
    next_entry: Option<u64>,
}

impl Building {
    /// Entries from `index` on, lost ones included, are void.
    fn truncate(&mut self, index: u64) {
        self.entries.split_off(&index);
        self.lost.retain(|range| range.0 < index);
        for range in &mut self.lost {
            range.1 = range.1.min(index.saturating_sub(1));
        }
    }

    fn compact(&mut self, mark: LogPosition, members: &Members) {
        self.entries = self.entries.split_off(&(mark.index + 1));
        self.lost.retain(|range| range.1 > mark.index);
        for range in &mut self.lost {
            range.0 = range.0.max(mark.index + 1);
        }
        let covers = |suspect: &Suspect| suspect.next_entry.is_some_and(|i| i <= mark.index + 1);
        self.suspect = self.suspect.take().filter(|suspect| !covers(suspect));
        (self.mark, self.members, self.has_shape) = (mark, members.clone(), true);
    }

    fn insert(&mut self, entry: &LogEntry) {
        let index = entry.position.index;
        if index <= self.mark.index {
            return;
        }
        self.truncate(index);
        self.entries.insert(index, entry.clone());
        if let Some(suspect) = &mut self.suspect {
            suspect.next_entry.get_or_insert(index);
        }
    }

    /// Index ranges above the mark that nothing fills.
    fn gaps(&self) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut next = self.mark.index + 1;
        for &index in self.entries.keys() {
            if index > next {
                gaps.push((next, index - 1));
            }
            next = index + 1;
        }
        let beyond = self.lost.iter().filter(|range| range.1 >= next);
        gaps.extend(beyond.map(|range| (range.0.max(next), range.1)));
        gaps
    }

    fn finish(self, group: PartitionId) -> (RecoveredGroup, Damage) {
        let damage = Damage {
            group,
            vote_lost: self.vote_lost,
            entries: self.gaps(),
            is_unbounded: self.suspect.is_some() || !self.has_shape,
        };
        let last = self.entries.last_key_value().map_or(self.mark.index, |(&index, _)| index);
        let recovered = RecoveredGroup {
            group,
            term: self.term,
            vote: self.vote,
            commit: self.commit.max(self.mark.index).min(last),
            mark: self.mark,
            members: self.members,
            entries: self.entries.into_values().collect(),
        };
        (recovered, damage)
    }
}

/// Takes records in file order.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    groups: BTreeMap<PartitionId, Building>,
    /// Batches of which nothing is known were lost. A group first read after them may have had records there.
    has_hole: bool,
}

impl Replay {
    fn building(&mut self, group: PartitionId) -> &mut Building {
        let has_hole = self.has_hole;
        self.groups.entry(group).or_insert_with(|| Building {
            vote_lost: has_hole,
            suspect: has_hole.then(Suspect::default),
            ..Building::default()
        })
    }

    pub(crate) fn apply(&mut self, stored: &Stored) {
        match stored {
            Stored::Record(record) => self.record(record),
            Stored::Carried(record) => self.carried(record),
            Stored::Trace(_) => {}
        }
    }

    fn record(&mut self, record: &Record) {
        if let Record::GroupRemoved { group } = record {
            self.groups.remove(group);
            return;
        }
        let building = self.building(record.group());
        match record {
            Record::GroupRemoved { .. } => {}
            Record::GroupCreated { mark, members, .. } => {
                *building = Building {
                    mark: *mark,
                    members: members.clone(),
                    has_shape: true,
                    ..Building::default()
                };
            }
            Record::HardState { term, vote, commit, .. } => {
                (building.term, building.vote, building.commit) = (*term, *vote, *commit);
                // Term and vote are absolute: whatever was lost before, this supersedes it.
                building.vote_lost = false;
            }
            Record::Entry { entry, .. } => building.insert(entry),
            Record::Truncated { from, .. } => building.truncate(*from),
            Record::Compacted { mark, members, .. } => building.compact(*mark, members),
            Record::Snapshot { mark, members, .. } => {
                building.entries.clear();
                building.lost.clear();
                building.suspect = None;
                (building.mark, building.members) = (*mark, members.clone());
                building.has_shape = true;
            }
        }
    }

    /// A copy fills in what is missing because its original's segment was freed. It says nothing
    /// new. (Nothing is carried while damage is known, so it cannot hide any.)
    fn carried(&mut self, record: &Record) {
        let building = self.building(record.group());
        match record {
            Record::Entry { entry, .. } if entry.position.index > building.mark.index => {
                building.entries.entry(entry.position.index).or_insert_with(|| entry.clone());
            }
            Record::HardState { term, vote, commit, .. } => {
                (building.term, building.vote, building.commit) = (*term, *vote, *commit);
            }
            Record::Compacted { mark, members, .. } => building.compact(*mark, members),
            _ => {}
        }
    }

    /// A record whose header is readable and whose body is not.
    pub(crate) fn lost_record(&mut self, header: &RecordHeader) {
        if header.flags & super::record::FLAG_CARRIED != 0 && Kind::of(header.kind) == Kind::Entry {
            return self.lost_copy(PartitionId(header.group), header.index);
        }
        let mut line = TraceLine { group: header.group, first: 1, last: 0, flags: 0 };
        match Kind::of(header.kind) {
            Kind::Entry => (line.first, line.last) = (header.index, header.index),
            Kind::HardState => line.flags = TRACE_VOTE,
            Kind::Shape => line.flags = TRACE_SHAPE,
            Kind::Note => return,
        }
        self.lost_line(&line);
    }

    /// A copy of an entry. Entries above it have nothing to do with that: it was written before them.
    fn lost_copy(&mut self, group: PartitionId, index: u64) {
        let building = self.building(group);
        if index > building.mark.index && !building.entries.contains_key(&index) {
            building.lost.push((index, index));
        }
    }

    /// A batch of which a trace tells what it held.
    pub(crate) fn lost_batch(&mut self, lines: &[TraceLine]) {
        lines.iter().for_each(|line| self.lost_line(line));
    }

    fn lost_line(&mut self, line: &TraceLine) {
        let building = self.building(PartitionId(line.group));
        building.vote_lost |= line.flags & TRACE_VOTE != 0;
        if line.flags & TRACE_SHAPE != 0 {
            building.suspect = Some(Suspect::default());
        }
        if line.first <= line.last {
            // What lies above may be void since, or not, if the line is of copies: it is lost as
            // well, until something is written in its place.
            let top = building.entries.last_key_value().map_or(0, |(index, _)| *index);
            let known = building.lost.iter().map(|range| range.1).max().unwrap_or(0);
            building.truncate(line.first);
            building.lost.push((line.first, line.last.max(top).max(known)));
        }
    }

    /// Batches of which nothing is known.
    pub(crate) fn lost_anything(&mut self) {
        self.has_hole = true;
        for building in self.groups.values_mut() {
            building.vote_lost = true;
            building.suspect = Some(Suspect::default());
        }
    }

    pub(crate) fn finish(self) -> (Vec<RecoveredGroup>, Vec<Damage>) {
        let (groups, damaged): (Vec<_>, Vec<_>) =
            self.groups.into_iter().map(|(group, building)| building.finish(group)).unzip();
        (groups, damaged.into_iter().filter(Damage::is_any).collect())
    }
}

/// What losing a record of a kind means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Entry,
    HardState,
    Shape,
    Note,
}

impl Kind {
    fn of(kind: u8) -> Kind {
        match kind {
            super::record::KIND_ENTRY => Kind::Entry,
            super::record::KIND_HARD_STATE => Kind::HardState,
            super::record::KIND_TRACE => Kind::Note,
            _ => Kind::Shape,
        }
    }
}
