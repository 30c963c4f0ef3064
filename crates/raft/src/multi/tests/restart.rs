//! A group starts again from its log and from what its owner has.

use std::collections::BTreeMap;

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use crate::convert::{Change, REMOVED, VOTER};
use crate::message::{Body, Message};
use crate::wal::{EntryKind, LogEntry, MemoryStorage, Wal, WalOptions};

const GROUP: PartitionId = PartitionId(1);

fn refusal(group: RecoveredGroup, damaged: Vec<Damage>, start: GroupStart) -> Option<RecoverError> {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    let id = group.group;
    let recovered = Recovered { groups: vec![group], damaged, ..Recovered::default() };
    let mut refused = multi.recover(recovered, &BTreeMap::from([(id, start)]), 0);
    assert_eq!(multi.status(id).is_none(), !refused.is_empty());
    assert!(!multi.create_group(id, &[NodeId(0)], &[], true), "what is on disk is in the way");
    assert!(multi.remove_group(id));
    assert!(!multi.is_forgotten(id), "it is not even told to the log");
    let batch = multi.turn(0).batch.unwrap();
    assert_eq!(batch.records.first(), Some(&Record::GroupRemoved { group: id }));
    assert!(!multi.is_forgotten(id), "a crash would bring it back");
    multi.persisted(batch.number, 0);
    assert!(multi.is_forgotten(id));
    refused.pop().map(|(_, error)| error)
}

#[test]
fn a_group_starts_only_if_log_and_state_machine_fit() {
    let group = GROUP;
    let mark = LogPosition { term: 2, index: 10 };
    let members = Members::new(&[NodeId(0), NodeId(1)], &[]);
    let recovered =
        RecoveredGroup { group, term: 2, commit: 10, mark, members, ..RecoveredGroup::default() };
    let start = |applied, snapshot| GroupStart { applied, snapshot, ..GroupStart::default() };
    assert_eq!(refusal(recovered.clone(), vec![], start(10, None)), None);
    assert!(matches!(
        refusal(recovered.clone(), vec![], start(9, None)),
        Some(RecoverError::StateTooOld { applied: 9, first: 10 })
    ));
    assert!(matches!(
        refusal(recovered.clone(), vec![], start(12, None)),
        Some(RecoverError::LogTooShort { applied: 12, last: 10 })
    ));
    let position = LogPosition { term: 3, index: 12 };
    let snapshot = SnapshotDescriptor { position, members: recovered.members.clone() };
    assert_eq!(refusal(recovered.clone(), vec![], start(12, Some(snapshot))), None);
    let damage = Damage { group, vote_lost: true, ..Damage::default() };
    assert!(matches!(
        refusal(recovered, vec![damage], start(10, None)),
        Some(RecoverError::Damaged(_))
    ));
}

/// A log whose mark is 10, with entries 11 to 13 of term 2, and of which nothing behind 10 is known to be committed.
fn uncommitted() -> RecoveredGroup {
    let entry = |index| LogEntry {
        position: LogPosition { term: 2, index },
        kind: EntryKind::Normal,
        context: Bytes::new(),
        data: Bytes::from_static(b"x"),
    };
    RecoveredGroup {
        group: GROUP,
        term: 2,
        commit: 10,
        mark: LogPosition { term: 2, index: 10 },
        members: Members::new(&[NodeId(0), NodeId(1)], &[]),
        entries: (11..=13).map(entry).collect(),
        ..RecoveredGroup::default()
    }
}

/// What becomes of it.
fn restarted(start: GroupStart) -> GroupStatus {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    let recovered = Recovered { groups: vec![uncommitted()], ..Recovered::default() };
    assert!(multi.recover(recovered, &BTreeMap::from([(GROUP, start)]), 0).is_empty());
    multi.status(GROUP).unwrap()
}

/// The story: a follower had entries of a leader that was deposed, and nobody else had them. It
/// fetched a snapshot of the next leader; power went after the state was replaced and before the log
/// was told. The restart took the state's index for the log's: entries that were never committed
/// counted as committed, and the true ones could not take their place.
#[test]
fn a_log_that_differs_from_the_snapshot_that_was_activated_is_dropped() {
    let with_snapshot = |term| {
        let position = LogPosition { term, index: 12 };
        let snapshot = Some(SnapshotDescriptor { position, members: uncommitted().members });
        let status = restarted(GroupStart { applied: 12, snapshot, ..GroupStart::default() });
        (status.first_index, status.commit, status.last_index)
    };
    assert_eq!(with_snapshot(3), (13, 12, 12), "other entries");
    assert_eq!(with_snapshot(2), (11, 12, 13), "the same: what follows may be the only copy");
}

/// The story (simulation, seed 37737): one of two members was lost. The other one, started again, had forgotten
/// that the change that made them two was committed, and could not go on alone, though its owner knew of it.
#[test]
fn what_the_owner_has_seen_come_out_of_the_log_is_committed() {
    let commit = |term, index| {
        let delivered = Some(LogPosition { term, index });
        restarted(GroupStart { applied: 10, delivered, ..GroupStart::default() }).commit
    };
    assert_eq!(commit(2, 12), 12);
    assert_eq!(commit(1, 12), 10, "another entry");
    assert_eq!(commit(2, 14), 10, "the log has lost it");
}

/// Found by a reader: a voter took two changes with one flush, and lost power before the next one. It came back into the
/// configuration before both, where those who had been let go could elect it. Who appended the second change had seen the
/// first come out of the log: all but the last are committed.
#[test]
fn all_changes_in_a_log_but_the_last_are_committed() {
    let change = |index, steps: Vec<(u8, u32)>| {
        let change = Change { steps, context: Vec::new() };
        let context = postcard::to_stdvec(&change).unwrap().into();
        let position = LogPosition { term: 2, index };
        LogEntry { position, kind: EntryKind::Change, context, data: Bytes::from_static(b"x") }
    };
    let leave = LogEntry { context: Bytes::new(), data: Bytes::new(), ..change(13, vec![]) };
    let mut group = uncommitted();
    group.members = Members::new(&[0, 1, 2].map(NodeId), &[NodeId(3)]);
    group.entries[0] = change(11, vec![(VOTER, 3), (REMOVED, 2)]);
    group.entries[2] = leave;
    let mut multi = MultiRaft::new(NodeId(1), RaftConfig::default(), 1).unwrap();
    let recovered = Recovered { groups: vec![group], ..Recovered::default() };
    assert!(multi.recover(recovered, &BTreeMap::new(), 0).is_empty());
    while multi.has_work() {
        let _ = multi.turn(0);
    }
    let GroupStatus { commit, members, .. } = multi.status(GROUP).unwrap();
    assert_eq!((commit, members.voters), (11, [0, 1, 3].map(NodeId).to_vec()));
    assert_eq!(members.outgoing, [0, 1, 2].map(NodeId));
}

fn entries(term: u64, indexes: std::ops::RangeInclusive<u64>) -> Vec<LogEntry> {
    let position = |index| LogPosition { term, index };
    indexes.map(|index| LogEntry { position: position(index), ..LogEntry::default() }).collect()
}

/// What is recovered of the group when the log has these records.
fn recovered_from(records: &[Record]) -> RecoveredGroup {
    let disk = MemoryStorage::default();
    let options = WalOptions::new([1; 16], 1);
    let (mut wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
    wal.append(&[LogBatch { number: 1, records: records.to_vec() }]).unwrap();
    Wal::open(disk, options).unwrap().1.groups.remove(0)
}

/// Found by a reader: the hard state named as committed what stood behind it in the same batch. The segment
/// ended between them, power went, and the entries of a deposed leader that had stood there before came out as
/// committed.
#[test]
fn what_a_batch_that_was_cut_in_two_leaves_is_never_taken_for_committed() {
    let group = GROUP;
    let members = Members::new(&[NodeId(0), NodeId(1), NodeId(2)], &[]);
    let mark = LogPosition { term: 1, index: 1 };
    let mut log = vec![
        Record::GroupCreated { group, mark, members },
        Record::HardState { group, term: 2, vote: None, commit: 4 },
    ];
    let before = [entries(1, 2..=4), entries(2, 5..=6)].concat();
    log.extend(before.into_iter().map(|entry| Record::Entry { group, entry }));
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    let recovered = Recovered { groups: vec![recovered_from(&log)], ..Recovered::default() };
    assert!(multi.recover(recovered, &BTreeMap::new(), 0).is_empty());
    let mut take = |prev: LogPosition, entries: Vec<LogEntry>| {
        let count = entries.len() as u32;
        let body = Body::Append { prev, commit: 20, count, entries };
        let frame = Frame { messages: vec![(group, Message::new(3, body))] };
        multi.step_frame(NodeId(1), frame.encode(), 1).unwrap();
        let batch = multi.turn(1).batch.unwrap();
        multi.persisted(batch.number, 1);
        batch.records
    };
    let records = take(LogPosition { term: 1, index: 4 }, entries(3, 5..=20));
    for count in 0..=records.len() {
        let recovered = recovered_from(&[&log, &records[..count]].concat());
        let committed = recovered.entries.iter().filter(|it| it.position.index <= recovered.commit);
        let is_old = |entry: &&LogEntry| entry.position.term == 2;
        assert_eq!(committed.filter(is_old).count(), 0, "{count} of {}", records.len());
    }
    // What could not be said then is said with the next records.
    let next = take(LogPosition { term: 3, index: 20 }, entries(3, 21..=21));
    let all = [log, records, next].concat();
    assert_eq!(recovered_from(&all).commit, 20);
}
