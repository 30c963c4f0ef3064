//! A group starts again from its log and from what its owner has.

use std::collections::BTreeMap;

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};

use super::super::*;
use crate::wal::{EntryKind, LogEntry};

const GROUP: PartitionId = PartitionId(1);

fn refusal(group: RecoveredGroup, damaged: Vec<Damage>, start: GroupStart) -> Option<RecoverError> {
    let mut multi = MultiRaft::new(NodeId(0), RaftConfig::default(), 1).unwrap();
    let id = group.group;
    let recovered = Recovered { groups: vec![group], damaged, ..Recovered::default() };
    let mut refused = multi.recover(recovered, &BTreeMap::from([(id, start)]), 0);
    assert_eq!(multi.status(id).is_none(), !refused.is_empty());
    assert!(!multi.create_group(id, &[NodeId(0)], &[], true), "what is on disk is in the way");
    assert!(multi.remove_group(id));
    let removed = multi.turn(0).batch.unwrap().records;
    assert_eq!(removed.first(), Some(&Record::GroupRemoved { group: id }));
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
