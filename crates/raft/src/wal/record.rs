//! Records: what the core asks to be made durable, and how it stands in the file.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::format::{Fields, RECORD_HEADER_BYTES, RecordHeader, body_crc, padded_body};
use crate::types::{LogPosition, Members};

/// Records to make durable together, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogBatch {
    /// Rising by one. What [`MultiRaft::persisted`](crate::MultiRaft::persisted) is told.
    pub number: u64,
    /// In the order in which they must take effect.
    pub records: Vec<Record>,
}

/// What an entry is to the Raft library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EntryKind {
    /// A proposal, or a leader's empty first entry.
    #[default]
    Normal,
    /// A configuration change.
    Change,
}

/// One entry of a group's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogEntry {
    /// Where it stands.
    pub position: LogPosition,
    /// What it is.
    pub kind: EntryKind,
    /// For changes: our own description of the change. Empty otherwise.
    pub context: Bytes,
    /// The proposal.
    pub data: Bytes,
}

/// One record. A later one about the same thing supersedes an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The group exists from here on, with an empty log after `mark`.
    GroupCreated {
        /// The group.
        group: PartitionId,
        /// Where its log starts.
        mark: LogPosition,
        /// Its first configuration; empty for a replica that waits for a snapshot.
        members: Members,
    },
    /// The group is gone, with everything about it.
    GroupRemoved {
        /// The group.
        group: PartitionId,
    },
    /// Term, vote and commit index. Correctness rests on the first two; the commit index saves
    /// time after a restart.
    HardState {
        /// The group.
        group: PartitionId,
        /// The highest term seen.
        term: u64,
        /// Whom this replica voted for in that term.
        vote: Option<NodeId>,
        /// An index known to be committed: the last one, or what was durable here if that is less.
        commit: u64,
    },
    /// An entry.
    Entry {
        /// The group.
        group: PartitionId,
        /// The entry.
        entry: LogEntry,
    },
    /// Entries from `from` on are void: another leader wrote others there.
    Truncated {
        /// The group.
        group: PartitionId,
        /// The first void index.
        from: u64,
    },
    /// Entries up to and including `mark` are no longer needed.
    Compacted {
        /// The group.
        group: PartitionId,
        /// The last entry that is dropped.
        mark: LogPosition,
        /// The configuration at `mark`.
        members: Members,
    },
    /// A snapshot took the place of the whole log, which goes on after `mark`.
    Snapshot {
        /// The group.
        group: PartitionId,
        /// The last entry in the snapshot.
        mark: LogPosition,
        /// The configuration at `mark`.
        members: Members,
    },
}

impl Record {
    /// The group it is about.
    #[must_use]
    pub fn group(&self) -> PartitionId {
        match self {
            Record::GroupCreated { group, .. }
            | Record::GroupRemoved { group }
            | Record::HardState { group, .. }
            | Record::Entry { group, .. }
            | Record::Truncated { group, .. }
            | Record::Compacted { group, .. }
            | Record::Snapshot { group, .. } => *group,
        }
    }
}

/// What stands in a file: a [`Record`], possibly copied forward, or the log's own notes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As the core gave it.
    Record(Record),
    /// Copied from an old segment so that it could be freed. Fills in, never supersedes.
    Carried(Record),
    /// What the batch before this one contained.
    Trace(Vec<TraceLine>),
}

/// One group's part in the batch before: if that batch is found destroyed, this tells what was in
/// it, so that the damage is pinned to the groups it hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TraceLine {
    pub(crate) group: u64,
    /// First and last entry index; `first > last` when there was none.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// [`TRACE_VOTE`] and [`TRACE_SHAPE`].
    pub(crate) flags: u64,
}

impl TraceLine {
    /// What is committed comes again, and a term.
    pub(crate) fn is_more_than_hard_state(&self) -> bool {
        self.first <= self.last || self.flags != TRACE_VOTE
    }
}

/// The batch held a hard state of the group.
pub(crate) const TRACE_VOTE: u64 = 1;
/// The batch held another record of the group than entries and hard state.
pub(crate) const TRACE_SHAPE: u64 = 2;
const TRACE_LINE_BYTES: usize = 32;

const KIND_CREATED: u8 = 1;
const KIND_REMOVED: u8 = 2;
pub(crate) const KIND_HARD_STATE: u8 = 3;
pub(crate) const KIND_ENTRY: u8 = 4;
const KIND_TRUNCATED: u8 = 5;
const KIND_COMPACTED: u8 = 6;
const KIND_SNAPSHOT: u8 = 7;
pub(crate) const KIND_TRACE: u8 = 8;

pub(super) const FLAG_CARRIED: u8 = 1;
const FLAG_CHANGE: u8 = 2;

/// An upper bound of the bytes a record takes.
pub(crate) fn encoded_bytes(record: &Record) -> usize {
    let body = match record {
        Record::Entry { entry, .. } => 4 + entry.context.len() + entry.data.len(),
        Record::HardState { .. } => 8,
        Record::GroupRemoved { .. } | Record::Truncated { .. } => 0,
        Record::GroupCreated { members, .. }
        | Record::Compacted { members, .. }
        | Record::Snapshot { members, .. } => {
            let lists =
                [&members.voters, &members.learners, &members.outgoing, &members.learners_next];
            21 + lists.iter().map(|list| 4 * list.len()).sum::<usize>()
        }
    };
    RECORD_HEADER_BYTES + padded_body(body)
}

/// An upper bound of the bytes a trace takes.
pub(crate) fn trace_bytes(lines: usize) -> usize {
    RECORD_HEADER_BYTES + lines * TRACE_LINE_BYTES
}

/// Where a record stands: enters its checksum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) salt: u64,
    pub(crate) number: u64,
    pub(crate) offset: u64,
}

fn put_members(members: &Members, out: &mut Vec<u8>) {
    let lists = [&members.voters, &members.learners, &members.outgoing, &members.learners_next];
    out.push(u8::from(members.auto_leave));
    for list in lists {
        out.extend_from_slice(&(list.len() as u32).to_le_bytes());
        list.iter().for_each(|node| out.extend_from_slice(&node.0.to_le_bytes()));
    }
}

fn get_members(fields: &mut Fields<'_>) -> Option<Members> {
    let auto_leave = fields.u8()? != 0;
    let mut list = || -> Option<Vec<NodeId>> {
        let count = fields.u32()? as usize;
        let bytes = fields.bytes(count.checked_mul(4)?)?;
        Some(bytes.chunks_exact(4).filter_map(|four| Fields(four).u32().map(NodeId)).collect())
    };
    let members = Members {
        voters: list()?,
        learners: list()?,
        outgoing: list()?,
        learners_next: list()?,
        auto_leave,
    };
    Some(members.sorted())
}

/// Kind, flags, group, term, index of a record's header.
fn describe(record: &Record) -> (u8, u8, PartitionId, u64, u64) {
    match record {
        Record::GroupCreated { group, mark, .. } => {
            (KIND_CREATED, 0, *group, mark.term, mark.index)
        }
        Record::GroupRemoved { group } => (KIND_REMOVED, 0, *group, 0, 0),
        Record::HardState { group, term, commit, .. } => {
            (KIND_HARD_STATE, 0, *group, *term, *commit)
        }
        Record::Entry { group, entry } => {
            let flags = if entry.kind == EntryKind::Change { FLAG_CHANGE } else { 0 };
            (KIND_ENTRY, flags, *group, entry.position.term, entry.position.index)
        }
        Record::Truncated { group, from } => (KIND_TRUNCATED, 0, *group, 0, *from),
        Record::Compacted { group, mark, .. } => (KIND_COMPACTED, 0, *group, mark.term, mark.index),
        Record::Snapshot { group, mark, .. } => (KIND_SNAPSHOT, 0, *group, mark.term, mark.index),
    }
}

fn put_body(record: &Record, out: &mut Vec<u8>) {
    match record {
        Record::Entry { entry, .. } => {
            out.extend_from_slice(&(entry.context.len() as u32).to_le_bytes());
            out.extend_from_slice(&entry.context);
            out.extend_from_slice(&entry.data);
        }
        Record::HardState { vote, .. } => {
            // Bit 32 tells "voted for node 0" from "did not vote".
            let vote = vote.map_or(0, |node| u64::from(node.0) | 1 << 32);
            out.extend_from_slice(&vote.to_le_bytes());
        }
        Record::GroupRemoved { .. } | Record::Truncated { .. } => {}
        Record::GroupCreated { members, .. }
        | Record::Compacted { members, .. }
        | Record::Snapshot { members, .. } => put_members(members, out),
    }
}

/// Appends a stored record to `out`.
pub(crate) fn encode(stored: &Stored, place: Place, out: &mut Vec<u8>) {
    let (kind, flags, group, term, index) = match stored {
        Stored::Record(record) => describe(record),
        Stored::Carried(record) => {
            let (kind, flags, group, term, index) = describe(record);
            (kind, flags | FLAG_CARRIED, group, term, index)
        }
        Stored::Trace(_) => (KIND_TRACE, 0, PartitionId(0), 0, place.number.saturating_sub(1)),
    };
    let header_at = out.len();
    out.resize(header_at + RECORD_HEADER_BYTES, 0);
    match stored {
        Stored::Record(record) | Stored::Carried(record) => put_body(record, out),
        Stored::Trace(lines) => {
            for line in lines {
                for field in [line.group, line.first, line.last, line.flags] {
                    out.extend_from_slice(&field.to_le_bytes());
                }
            }
        }
    }
    let body = out.get(header_at + RECORD_HEADER_BYTES..).unwrap_or_default();
    let header = RecordHeader {
        kind,
        flags,
        body_bytes: body.len() as u32,
        group: group.0,
        term,
        index,
        body_crc: body_crc(body),
    };
    let mut bytes = Vec::with_capacity(RECORD_HEADER_BYTES);
    header.encode(place.salt, place.number, place.offset, &mut bytes);
    out.iter_mut().skip(header_at).zip(bytes).for_each(|(to, from)| *to = from);
    out.resize(header_at + RECORD_HEADER_BYTES + padded_body(header.body_bytes as usize), 0);
}

/// Turns a verified header and body back into a record. `None`: a kind or shape of a version that
/// we do not know, or a bug of ours; the caller treats it as damage.
pub(crate) fn decode(header: &RecordHeader, body: &[u8]) -> Option<Stored> {
    let group = PartitionId(header.group);
    let mark = LogPosition { term: header.term, index: header.index };
    let mut fields = Fields(body);
    let record = match header.kind {
        KIND_CREATED => Record::GroupCreated { group, mark, members: get_members(&mut fields)? },
        KIND_REMOVED => Record::GroupRemoved { group },
        KIND_HARD_STATE => {
            let vote = fields.u64()?;
            let vote = (vote >> 32 != 0).then_some(NodeId(vote as u32));
            Record::HardState { group, term: header.term, vote, commit: header.index }
        }
        KIND_ENTRY => {
            let context_bytes = fields.u32()? as usize;
            let context = Bytes::copy_from_slice(fields.bytes(context_bytes)?);
            let data = Bytes::copy_from_slice(fields.0);
            let kind =
                if header.flags & FLAG_CHANGE != 0 { EntryKind::Change } else { EntryKind::Normal };
            Record::Entry { group, entry: LogEntry { position: mark, kind, context, data } }
        }
        KIND_TRUNCATED => Record::Truncated { group, from: header.index },
        KIND_COMPACTED => Record::Compacted { group, mark, members: get_members(&mut fields)? },
        KIND_SNAPSHOT => Record::Snapshot { group, mark, members: get_members(&mut fields)? },
        KIND_TRACE => return Some(Stored::Trace(decode_trace(body)?)),
        _ => return None,
    };
    let is_carried = header.flags & FLAG_CARRIED != 0;
    Some(if is_carried { Stored::Carried(record) } else { Stored::Record(record) })
}

fn decode_trace(body: &[u8]) -> Option<Vec<TraceLine>> {
    body.chunks_exact(TRACE_LINE_BYTES)
        .map(|line| {
            let mut fields = Fields(line);
            Some(TraceLine {
                group: fields.u64()?,
                first: fields.u64()?,
                last: fields.u64()?,
                flags: fields.u64()?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_file() {
        let group = PartitionId(9);
        let mark = LogPosition { term: 2, index: 5 };
        let members = Members {
            voters: vec![NodeId(0), NodeId(1)],
            learners: vec![NodeId(2)],
            outgoing: vec![NodeId(3)],
            learners_next: vec![],
            auto_leave: true,
        };
        let entry = LogEntry {
            position: mark,
            kind: EntryKind::Change,
            context: Bytes::from_static(b"ctx"),
            data: Bytes::from_static(b"data"),
        };
        let records = [
            Record::GroupCreated { group, mark, members: members.clone() },
            Record::GroupRemoved { group },
            Record::HardState { group, term: 3, vote: Some(NodeId(0)), commit: 4 },
            Record::HardState { group, term: 3, vote: None, commit: 4 },
            Record::Entry { group, entry },
            Record::Truncated { group, from: 6 },
            Record::Compacted { group, mark, members: members.clone() },
            Record::Snapshot { group, mark, members },
        ];
        let trace = Stored::Trace(vec![TraceLine { group: 1, first: 2, last: 3, flags: 1 }]);
        let all = records
            .iter()
            .flat_map(|r| [Stored::Record(r.clone()), Stored::Carried(r.clone())])
            .chain([trace]);
        for stored in all {
            let place = Place { salt: 1, number: 2, offset: 64 };
            let mut out = Vec::new();
            encode(&stored, place, &mut out);
            if let Stored::Record(record) = &stored {
                assert!(out.len() <= encoded_bytes(record), "{record:?}");
            }
            let header = RecordHeader::decode(&out, 1, 2, 64).unwrap();
            let body = &out[RECORD_HEADER_BYTES..][..header.body_bytes as usize];
            assert_eq!(body_crc(body), header.body_crc);
            assert_eq!(decode(&header, body), Some(stored));
        }
    }
}
