//! What a crash, a torn write and a rotten byte may and may not do to the log.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};
use proptest::prelude::*;

use super::record::{Stored, encoded_bytes};
use super::replay::Replay;
use super::*;
use crate::types::{LogPosition, Members};

mod segments;

const OWNER: [u8; 16] = [7; 16];

fn options() -> WalOptions {
    WalOptions {
        segment_bytes: 64 << 10,
        first_segment_bytes: 32 << 10,
        segments_max: 2,
        ..WalOptions::new(OWNER, 11)
    }
}

fn open(disk: &MemoryStorage) -> (Wal, Recovered) {
    Wal::open(disk.clone(), options()).unwrap()
}

fn at(term: u64, index: u64) -> LogPosition {
    LogPosition { term, index }
}

fn created(group: u64) -> Record {
    let members = Members::new(&[NodeId(1), NodeId(2), NodeId(3)], &[]);
    Record::GroupCreated { group: PartitionId(group), mark: at(1, 1), members }
}

fn hard(group: u64, term: u64, commit: u64) -> Record {
    Record::HardState { group: PartitionId(group), term, vote: Some(NodeId(2)), commit }
}

fn entry(group: u64, term: u64, index: u64, bytes: usize) -> Record {
    let data = Bytes::from(vec![(group + index) as u8; bytes]);
    let entry = LogEntry { position: at(term, index), data, ..LogEntry::default() };
    Record::Entry { group: PartitionId(group), entry }
}

fn compacted(group: u64, term: u64, index: u64) -> Record {
    let members = Members::new(&[NodeId(1), NodeId(2), NodeId(3)], &[]);
    Record::Compacted { group: PartitionId(group), mark: at(term, index), members }
}

fn batch(records: &[Record]) -> LogBatch {
    LogBatch { number: 0, records: records.to_vec() }
}

/// What a log with these records holds.
fn model(records: &[Record]) -> Vec<RecoveredGroup> {
    let mut replay = Replay::default();
    records.iter().for_each(|record| replay.apply(&Stored::Record(record.clone())));
    replay.finish().0
}

#[test]
fn what_was_appended_is_recovered_and_a_batch_costs_one_flush() {
    let disk = MemoryStorage::default();
    let (mut wal, recovered) = open(&disk);
    assert_eq!(recovered, Recovered::default());
    let batches = [
        batch(&[created(1), hard(1, 1, 1), created(2), hard(2, 1, 1)]),
        batch(&[entry(1, 2, 2, 10), entry(1, 2, 3, 5000), entry(2, 2, 2, 0)]),
        batch(&[hard(1, 2, 3)]),
    ];
    wal.append(&batches[..1]).unwrap();
    let before = disk.counts();
    wal.append(&batches[1..]).unwrap();
    let after = disk.counts();
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "one write, one flush for both");
    disk.crash(|_| false);
    let (_, recovered) = open(&disk);
    let all: Vec<_> = batches.iter().flat_map(|b| b.records.clone()).collect();
    assert_eq!(recovered.groups, model(&all));
    assert!(recovered.damaged.is_empty() && !recovered.has_torn_tail);
}

/// Goal: a crash during a flush loses that flush and nothing else, whichever sectors made it.
/// Method: for a batch of many sectors, keep any one away, or only a prefix, or only a suffix.
#[test]
fn a_torn_batch_is_dropped_whole_and_never_called_corruption() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let durable = [created(1), hard(1, 1, 1), entry(1, 1, 2, 600)];
    wal.append(&[batch(&durable)]).unwrap();
    disk.fail_sync_after(0);
    let torn = [entry(1, 1, 3, 4000), hard(1, 2, 2), entry(1, 2, 4, 3000)];
    assert!(wal.append(&[batch(&torn)]).is_err());
    let sectors = disk.dirty_sectors();
    assert!(sectors >= 16, "{sectors}");
    let all: Vec<_> = durable.iter().chain(&torn).cloned().collect();
    for k in 0..=sectors {
        let patterns: [&dyn Fn(usize) -> bool; 3] = [&|n| n != k, &|n| n < k, &|n| n >= k];
        for keep in patterns {
            let disk = disk.fork();
            disk.crash(keep);
            disk.fail_sync_after(u64::MAX);
            let (mut wal, recovered) = open(&disk);
            assert_eq!(recovered.damaged, [], "sector {k} of {sectors}");
            let is_kept = recovered.groups == model(&all);
            assert!(is_kept || recovered.groups == model(&durable));
            // The log goes on over the remains, and they never come back.
            wal.append(&[batch(&[entry(1, 3, 3, 100)])]).unwrap();
            let mut after = if is_kept { all.clone() } else { durable.to_vec() };
            after.push(entry(1, 3, 3, 100));
            let (_, recovered) = open(&disk);
            assert_eq!((recovered.groups, recovered.damaged), (model(&after), vec![]));
        }
    }
}

/// Goal: of a batch that had been durable no byte can change without its groups being reported.
/// Method: for each kind of record, one batch with it and one behind; flip every byte.
#[test]
fn corruption_below_a_durable_batch_is_reported_for_each_kind_of_record() {
    let group = PartitionId(1);
    let members = Members::new(&[NodeId(1)], &[]);
    let kinds = [
        created(1),
        Record::GroupRemoved { group },
        hard(1, 5, 3),
        entry(1, 1, 4, 40),
        Record::Truncated { group, from: 3 },
        compacted(1, 1, 2),
        Record::Snapshot { group, mark: at(4, 9), members },
    ];
    for kind in kinds {
        let disk = MemoryStorage::default();
        let (mut wal, _) = open(&disk);
        wal.append(&[batch(&[created(1), hard(1, 1, 1), created(2), hard(2, 1, 1)])]).unwrap();
        wal.append(&[batch(&[entry(1, 1, 2, 9), entry(1, 1, 3, 9), entry(2, 1, 2, 9)])]).unwrap();
        wal.append(&[batch(std::slice::from_ref(&kind))]).unwrap();
        wal.append(&[batch(&[entry(2, 1, 3, 9)])]).unwrap();
        let start = SEGMENT_START + 2 * 4096;
        let trace = record::trace_bytes(2);
        for offset in (0..64 + trace + encoded_bytes(&kind)).step_by(3) {
            let disk = disk.fork();
            assert!(disk.damage(&segment_name(1), start + offset));
            let (mut wal, recovered) = open(&disk);
            let groups: Vec<_> = recovered.damaged.iter().map(|damage| damage.group.0).collect();
            let is_padding = offset >= 64 + trace + encoded_bytes(&kind) - 16;
            let is_trace = (64..64 + trace).contains(&offset);
            assert!(
                groups == [1] || is_padding || (is_trace && groups.is_empty()),
                "{kind:?} at {offset}: {:?}",
                recovered.damaged
            );
            assert!(!recovered.has_torn_tail);
            // The bystander is whole, the log goes on, and the damage is not forgotten.
            let bystander = recovered.groups.iter().find(|g| g.group.0 == 2).unwrap();
            assert_eq!(bystander.entries.len(), 2);
            wal.append(&[batch(&[entry(2, 1, 4, 9)])]).unwrap();
            let (mut wal, again) = open(&disk);
            assert_eq!(again.damaged, recovered.damaged);
            wal.append(&[batch(&[Record::GroupRemoved { group }])]).unwrap();
            assert_eq!(open(&disk).1.damaged, []);
        }
    }
}

const SEGMENT_START: usize = format::SEGMENT_HEADER_BYTES as usize;

#[test]
fn damage_names_the_entries_and_whether_the_vote_is_lost() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1), hard(1, 1, 1)])]).unwrap();
    wal.append(&[batch(&[hard(1, 2, 1), entry(1, 2, 2, 5000), entry(1, 2, 3, 50)])]).unwrap();
    wal.append(&[batch(&[entry(1, 2, 4, 50)])]).unwrap();
    // The body of entry 2, not its header: the batch stays readable around it.
    disk.damage(&segment_name(1), SEGMENT_START + 4096 + 4000);
    let (_, recovered) = open(&disk);
    let expected = Damage {
        group: PartitionId(1),
        vote_lost: false,
        entries: vec![(2, 2)],
        is_unbounded: false,
    };
    assert_eq!(recovered.damaged, [expected]);
    // The whole batch: the trace in the next one tells what it was.
    disk.damage(&segment_name(1), SEGMENT_START + 4096 + 8);
    let (_, recovered) = open(&disk);
    let expected = Damage {
        group: PartitionId(1),
        vote_lost: true,
        entries: vec![(2, 3)],
        is_unbounded: false,
    };
    assert_eq!(recovered.damaged, [expected]);
    assert_eq!(recovered.groups[0].entries.len(), 1, "what follows is kept, nothing is truncated");
}

#[test]
fn a_bad_last_batch_is_a_torn_tail() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1), hard(1, 1, 1)])]).unwrap();
    wal.append(&[batch(&[entry(1, 1, 2, 50)])]).unwrap();
    disk.damage(&segment_name(1), SEGMENT_START + 4096 + 64 + 60);
    let (_, recovered) = open(&disk);
    assert!(recovered.has_torn_tail && recovered.damaged.is_empty());
    assert!(recovered.groups[0].entries.is_empty());
}

#[test]
fn a_lost_or_unreadable_segment_makes_every_group_suspect() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1), hard(1, 1, 1)])]).unwrap();
    for i in 2..60 {
        wal.append(&[batch(&[entry(1, 1, i, 2000)])]).unwrap();
    }
    assert!(wal.stats().segments > 3);
    for ruin in [0, 1] {
        let disk = disk.fork();
        if ruin == 0 {
            let mut storage = disk.clone();
            storage.remove(&segment_name(2)).unwrap();
        } else {
            disk.damage(&segment_name(2), 30);
            disk.damage(&segment_name(2), 4096 + 30);
        }
        let (_, recovered) = open(&disk);
        assert_eq!(recovered.damaged.len(), 1);
        let damage = &recovered.damaged[0];
        assert!(damage.vote_lost && damage.is_unbounded && !damage.entries.is_empty());
    }
    // A single bad copy of the header is harmless.
    disk.damage(&segment_name(2), 30);
    assert!(open(&disk).1.damaged.is_empty());
}

/// Found by a reader: only groups that had been read before the unreadable segment were suspect. One that was
/// first read after it passed for whole, without its vote and with fewer entries than it had acknowledged, and
/// the segment that proved the loss was freed.
#[test]
fn a_group_that_is_first_read_after_a_hole_is_suspect() {
    for mark in [3, 5] {
        let disk = MemoryStorage::default();
        let (mut wal, _) = open(&disk);
        let mut records = vec![created(1), hard(1, 7, 1)];
        records.extend((2..=5).map(|index| entry(1, 1, index, 10)));
        records.extend([created(2), hard(2, 1, 1), entry(2, 1, 2, 22_000)]);
        wal.append(&[batch(&records)]).unwrap();
        wal.append(&[batch(&[compacted(1, 1, mark)])]).unwrap();
        assert_eq!(wal.stats().segments, 2);
        disk.damage(&segment_name(1), 30);
        disk.damage(&segment_name(1), 4096 + 30);
        let (mut wal, recovered) = open(&disk);
        let group = PartitionId(1);
        let expected = Damage { group, vote_lost: true, entries: vec![], is_unbounded: true };
        assert_eq!(recovered.damaged, [expected], "compacted up to {mark}");
        // What was founded since cannot have lost anything in it.
        wal.append(&[batch(&[created(3), hard(3, 1, 1)])]).unwrap();
        assert!(disk.list().unwrap().contains(&segment_name(1)), "the proof is kept");
        assert_eq!(open(&disk).1.damaged, recovered.damaged);
    }
}

/// Appends to group 2, and compacts it, until the first segment is old enough to be freed.
fn outgrow_first_segment(wal: &mut Wal) {
    for i in 3..20 {
        wal.append(&[batch(&[entry(2, 1, i, 28_000), compacted(2, 1, i - 1)])]).unwrap();
    }
}

/// Found by a reader: a crash had torn a batch at the end of a segment, and recovery had dropped it. When the
/// segment was to be freed, an entry of it was copied forward in the place of the one that is in the log.
#[test]
fn what_a_torn_batch_held_is_not_carried_forward() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let durable = [created(1), hard(1, 1, 1), entry(1, 1, 2, 10), created(2), hard(2, 1, 1)];
    wal.append(&[batch(&durable)]).unwrap();
    disk.fail_sync_after(0);
    let cut = Record::Truncated { group: PartitionId(1), from: 2 };
    assert!(wal.append(&[batch(&[cut, entry(1, 2, 2, 10), entry(2, 1, 2, 3500)])]).is_err());
    let last_sector = disk.dirty_sectors() - 1;
    disk.crash(|n| n != last_sector);
    disk.fail_sync_after(u64::MAX);
    let (mut wal, recovered) = open(&disk);
    assert!(recovered.has_torn_tail);
    outgrow_first_segment(&mut wal);
    assert!(!disk.list().unwrap().contains(&segment_name(1)), "freed");
    let (_, recovered) = open(&disk);
    assert_eq!(recovered.groups[0].entries[0].position, at(1, 2));
    assert_eq!(recovered.damaged, []);
}

/// Found by the property below: two lives in turn died while they wrote the same place. What the first had torn
/// and recovery had dropped came back whole, with its own head and the second's tail.
#[test]
fn what_a_crash_tore_and_recovery_dropped_stays_dropped() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let durable = [created(1), hard(1, 1, 1)];
    wal.append(&[batch(&durable)]).unwrap();
    let is_head = |sector| sector == 0;
    for (bytes, keeps_head) in [(3000, true), (3500, false)] {
        disk.fail_sync_after(0);
        assert!(wal.append(&[batch(&[entry(1, 1, 2, bytes)])]).is_err());
        disk.crash(|sector| is_head(sector) == keeps_head);
        disk.fail_sync_after(u64::MAX);
        let (next, recovered) = open(&disk);
        assert_eq!(recovered.groups, model(&durable), "{bytes}");
        wal = next;
    }
}

/// Found while reading for the one above: what had replaced an entry rotted while the process ran, and the
/// replaced one was copied forward.
#[test]
fn a_segment_is_kept_if_what_replaced_an_entry_cannot_be_read() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let before = [created(1), hard(1, 1, 1), entry(1, 1, 2, 10), created(2), hard(2, 1, 1)];
    wal.append(&[batch(&before)]).unwrap();
    let cut = Record::Truncated { group: PartitionId(1), from: 2 };
    wal.append(&[batch(&[cut, entry(1, 2, 2, 10)])]).unwrap();
    let body = 64 + record::trace_bytes(2) + 48 + 48 + 8;
    assert!(disk.damage(&segment_name(1), SEGMENT_START + 4096 + body));
    outgrow_first_segment(&mut wal);
    assert!(disk.list().unwrap().contains(&segment_name(1)), "kept");
    assert_eq!(open(&disk).1.damaged[0].entries, [(2, 2)]);
}

#[test]
fn another_owner_is_refused() {
    let disk = MemoryStorage::default();
    drop(open(&disk));
    let other = WalOptions { owner: [8; 16], ..options() };
    let result = Wal::open(disk, other);
    assert!(matches!(result, Err(WalError::WrongOwner { found: OWNER, .. })));
}

#[test]
fn after_a_failed_flush_nothing_is_written_again() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1)])]).unwrap();
    disk.fail_sync_after(0);
    assert!(matches!(wal.append(&[batch(&[hard(1, 1, 1)])]), Err(WalError::Io(_))));
    disk.fail_sync_after(u64::MAX);
    let before = disk.counts();
    assert!(matches!(wal.append(&[batch(&[hard(1, 1, 1)])]), Err(WalError::Fenced)));
    assert_eq!(disk.counts(), before, "neither a write nor a second sync");
}

#[test]
fn compacted_segments_are_reused_and_idle_groups_do_not_hold_them() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let mut records = vec![created(1), hard(1, 1, 1), created(2), hard(2, 3, 1), entry(2, 1, 2, 9)];
    wal.append(&[batch(&records)]).unwrap();
    for i in 2..400 {
        let mut next = vec![entry(1, 1, i, 3000)];
        if i % 10 == 0 {
            next.push(compacted(1, 1, i - 5));
        }
        wal.append(&[batch(&next)]).unwrap();
        records.extend(next);
    }
    let stats = wal.stats();
    assert!(stats.segments <= 4, "{stats:?}");
    assert!(stats.carried > 0, "{stats:?}");
    let names = disk.list().unwrap();
    assert!(names.len() <= 7, "{names:?}");
    disk.crash(|_| false);
    let (_, recovered) = open(&disk);
    assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
}

#[test]
fn a_second_process_is_refused_and_real_files_work() {
    let directory = tempfile::tempdir().unwrap();
    let storage = FileStorage::open(directory.path()).unwrap();
    assert!(matches!(FileStorage::open(directory.path()), Err(WalError::Locked { .. })));
    let records = [created(1), hard(1, 1, 1), entry(1, 1, 2, 100_000)];
    let options = WalOptions { segment_bytes: 1 << 20, ..options() };
    let (mut wal, _) = Wal::open(storage, options.clone()).unwrap();
    wal.append(&[batch(&records)]).unwrap();
    drop(wal);
    let storage = FileStorage::open(directory.path()).unwrap();
    let (_, recovered) = Wal::open(storage, options).unwrap();
    assert_eq!(recovered.groups, model(&records));
}

/// How far a group of the generated history is: its last entry and its mark. 0 if there is none.
#[derive(Clone, Copy, Default)]
struct Slot {
    last: u64,
    mark: u64,
}

/// A small language of histories: each step is one batch.
fn step(seed: u64, slots: &mut [Slot; 3]) -> Vec<Record> {
    let id = seed % 3 + 1;
    let slot = &mut slots[(id - 1) as usize];
    if slot.last == 0 {
        *slot = Slot { last: 1, mark: 1 };
        return vec![created(id), hard(id, 1, 1)];
    }
    match seed / 3 % 8 {
        0 => vec![hard(id, seed % 100, slot.last)],
        1 if slot.last > slot.mark + 1 => {
            slot.mark = slot.last - 1;
            vec![compacted(id, 1, slot.mark)]
        }
        2 if slot.last > slot.mark + 2 => {
            slot.last -= 1;
            vec![
                Record::Truncated { group: PartitionId(id), from: slot.last },
                entry(id, 2, slot.last, seed as usize % 500),
            ]
        }
        3 if seed.is_multiple_of(5) => {
            *slot = Slot::default();
            vec![Record::GroupRemoved { group: PartitionId(id) }]
        }
        _ => {
            let count = 1 + seed % 4;
            let entries = (1..=count).map(|i| entry(id, 1, slot.last + i, seed as usize % 3000));
            let entries = entries.collect();
            slot.last += count;
            entries
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 300, ..ProptestConfig::default() })]

    /// Goal: whatever the process was doing when it died (a flush, a change of segments, freeing,
    /// copying forward, preparing), everything acknowledged is there, no more than the call under
    /// way is there besides, and nothing is called damaged. Three lives of one log each.
    #[test]
    fn acknowledged_records_survive_a_crash_at_any_step(
        lives in prop::collection::vec((0_u64..260, any::<u64>()), 3),
        seed in any::<u64>(),
    ) {
        let disk = MemoryStorage::default();
        // What may be acknowledged: the disk does not always tell how much a crash left of the call under way.
        let mut histories: Vec<Vec<Record>> = vec![Vec::new()];
        let mut last = [Slot::default(); 3];
        let mut seeds = (0_u64..).map(|i| mix(seed ^ mix(i)));
        for (budget, crash_seed) in lives {
            let mut under_way = Vec::new();
            disk.fail_after(Some(budget));
            if let Ok((mut wal, recovered)) = Wal::open(disk.clone(), options()) {
                prop_assert!(histories.iter().all(|history| recovered.groups == model(history)));
                for seed in seeds.by_ref().take(50) {
                    under_way = step(seed, &mut last);
                    if wal.append(&[batch(&under_way)]).is_err() {
                        break;
                    }
                    histories.iter_mut().for_each(|history| history.extend_from_slice(&under_way));
                    under_way.clear();
                    if seed % 4 == 0 && wal.prepare_step().is_err() {
                        break;
                    }
                }
            }
            disk.fail_after(None);
            disk.crash_seeded(crash_seed);
            let (_, recovered) = open(&disk);
            prop_assert_eq!(&recovered.damaged, &vec![]);
            // The call under way may be there, in part if it needed several flushes.
            let possible = histories.iter().flat_map(|history| {
                (0..=under_way.len()).map(|count| [history, &under_way[..count]].concat())
            });
            let fitting: Vec<_> = possible.filter(|all| recovered.groups == model(all)).collect();
            prop_assert!(!fitting.is_empty(), "{:?}\nnone of\n{:?}", recovered.groups, histories);
            histories = fitting;
            // Bring the generator in step with what is there.
            for (i, slot) in last.iter_mut().enumerate() {
                let group = recovered.groups.iter().find(|g| g.group.0 == i as u64 + 1);
                *slot = group.map_or_else(Slot::default, |g| {
                    let mark = g.mark.index;
                    let last = g.entries.last().map_or(mark, |entry| entry.position.index);
                    Slot { last, mark }
                });
            }
        }
    }

    /// Goal: no single rotten byte anywhere in the log goes unnoticed, unless nothing depends on it.
    #[test]
    fn one_rotten_byte_never_changes_what_is_recovered_silently(
        seed in any::<u64>(),
        count in 20_u64..60,
        segment in 1_u64..5,
        offset in 0_usize..65_536,
    ) {
        prop_assert!(check_rotten_byte(seed, count, segment, offset));
    }
}

/// Writes a history, flips one byte, opens: the same groups come out, or damage is reported, or the
/// byte was in the last batch.
fn check_rotten_byte(seed: u64, count: u64, segment: u64, offset: usize) -> bool {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    let mut last = [Slot::default(); 3];
    let mut acknowledged = Vec::new();
    let mut before_last = 0;
    for seed in (0..count).map(|i| mix(seed ^ mix(i))) {
        let records = step(seed, &mut last);
        wal.append(&[batch(&records)]).unwrap();
        before_last = acknowledged.len();
        acknowledged.extend(records);
    }
    disk.damage(&segment_name(segment), offset);
    let (_, recovered) = open(&disk);
    let is_same = recovered.groups == model(&acknowledged);
    // The last call may have made more than one batch, the last of which is the damaged one.
    let is_part = |count| recovered.groups == model(&acknowledged[..count]);
    let is_last = recovered.has_torn_tail || (before_last..acknowledged.len()).any(is_part);
    is_same || !recovered.damaged.is_empty() || is_last
}

/// The last call changed segments in its middle.
#[test]
fn the_last_batch_may_be_a_part_of_the_last_call() {
    assert!(check_rotten_byte(5_630_374_310_159_284_238, 24, 4, 8_192));
}

/// Story: the copy of an old entry was rotten. It was taken for a new entry that had replaced all
/// above it, a compaction then covered the loss, and a committed entry was gone without a word.
#[test]
fn a_rotten_copy_takes_no_newer_entry_along() {
    assert!(check_rotten_byte(5_965_945_849_660_224_625, 27, 4, 12_616));
}
