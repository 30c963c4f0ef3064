//! The next segment: prepared before it is needed, and as large as the disk has room for.

use super::*;

#[test]
fn preparing_a_segment_keeps_the_switch_cheap() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1)])]).unwrap();
    for i in 2..4 {
        wal.append(&[batch(&[entry(1, 1, i, 5000)])]).unwrap();
    }
    while wal.prepare_step().unwrap() {}
    assert!(disk.list().unwrap().iter().any(|name| spare_id(name).is_some()));
    let syncs = disk.counts().0;
    wal.append(&[batch(&[entry(1, 1, 4, 15_000)])]).unwrap();
    assert_eq!(wal.stats().segments, 2);
    assert_eq!(disk.counts().0 - syncs, 2, "the new header, then the batch");
}

/// Measured: 64 MiB were zeroed at a stretch, by three replicas within seconds of each other, and for a third of a second
/// each time the slowest hundredth of the clients' calls took three times as long.
#[test]
fn the_next_segment_is_prepared_as_the_current_one_fills() {
    let disk = MemoryStorage::default();
    let options = WalOptions { first_segment_bytes: 16 << 20, ..large() };
    let (mut wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
    wal.append(&[batch(&[created(1)])]).unwrap();
    let mut steps = Vec::new();
    for i in 2..14 {
        // What a process that died had prepared is not believed.
        if i == 10 {
            (wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
        }
        wal.append(&[batch(&[entry(1, 1, i, (1 << 20) - 8192)])]).unwrap();
        while wal.prepare_step().unwrap() {}
        steps.push(prepared_mib(&disk));
    }
    assert_eq!(steps, [0, 0, 0, 0, 2, 4, 6, 8, 4, 8, 12, 0]);
    assert!(disk.list().unwrap().iter().any(|name| spare_id(name).is_some()));
}

/// As a node begins.
#[test]
fn a_small_first_segment_has_a_large_one_prepared_before_it_is_full() {
    let disk = MemoryStorage::default();
    let options = WalOptions { first_segment_bytes: 1 << 20, ..large() };
    let (mut wal, _) = Wal::open(disk.clone(), options).unwrap();
    wal.append(&[batch(&[created(1)])]).unwrap();
    let mut steps = Vec::new();
    for i in 2..10 {
        wal.append(&[batch(&[entry(1, 1, i, 98_000)])]).unwrap();
        while wal.prepare_step().unwrap() {}
        steps.push(prepared_mib(&disk));
    }
    assert_eq!(steps, [0, 0, 2, 5, 8, 11, 14, 0]);
    assert!(disk.list().unwrap().iter().any(|name| spare_id(name).is_some()));
}

fn prepared_mib(disk: &MemoryStorage) -> usize {
    disk.clone().read(TEMPORARY_NAME, 0, &mut vec![0; 16 << 20]).unwrap_or(0) >> 20
}

/// Story: while somebody else had filled the disk, the segment that nobody needed yet could not be
/// prepared, and the log was fenced for it.
#[test]
fn a_full_disk_stops_the_preparation_and_not_the_log() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = open(&disk);
    wal.append(&[batch(&[created(1)])]).unwrap();
    for i in 2..4 {
        wal.append(&[batch(&[entry(1, 1, i, 5000)])]).unwrap();
    }
    disk.set_full(true);
    assert!(!wal.prepare_step().unwrap());
    assert!(!wal.prepare_step().unwrap());
    assert!(!disk.list().unwrap().contains(&TEMPORARY_NAME.to_owned()), "given back");
    wal.append(&[batch(&[entry(1, 1, 4, 100)])]).unwrap();
    disk.set_full(false);
    while wal.prepare_step().unwrap() {}
    assert!(disk.list().unwrap().iter().any(|name| spare_id(name).is_some()));
    disk.crash(|_| false);
    let (_, recovered) = open(&disk);
    assert_eq!(recovered.groups[0].entries.len(), 3);
}

fn has_room(wal: &mut Wal, batches: &[LogBatch]) -> bool {
    wal.make_room(batches).unwrap() == batches.len()
}

/// Found by a reader: what is copied forward to free a segment begins with the trace of the batch before, for which no room
/// was made. Where many groups had a part in that one the copies needed one segment more, and a full disk was fenced.
#[test]
fn on_a_full_disk_nothing_is_copied_forward_that_has_no_room() {
    let groups = 1..=260;
    let options = WalOptions { segment_bytes: 128 << 10, ..options() };
    let (mut freed, mut kept) = (0, 0);
    for filled in 1..24 {
        let disk = MemoryStorage::default();
        let (mut wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
        let mut records: Vec<_> = groups.clone().map(created).collect();
        records.push(entry(1, 1, 2, 10));
        // The entry of the second group is the first in the second segment.
        records.push(entry(2, 1, 2, 9_000));
        wal.append(&[batch(&records)]).unwrap();
        assert_eq!(wal.stats().segments, 2);
        let compacts = compacted(2, 1, 2);
        wal.append(&[batch(&[compacts.clone(), entry(2, 1, 3, filled * 4096 - 300)])]).unwrap();
        disk.set_full(true);
        let mut last: Vec<_> = groups.clone().map(|group| hard(group, 1, 1)).collect();
        last.push(compacted(1, 1, 2));
        let last = [batch(&last)];
        if !has_room(&mut wal, &last) {
            continue;
        }
        wal.append(&last).unwrap();
        let is_freed = !disk.list().unwrap().contains(&segment_name(1));
        (freed, kept) = (freed + u32::from(is_freed), kept + u32::from(!is_freed));
        records.extend([compacts, entry(2, 1, 3, filled * 4096 - 300)]);
        records.extend(last[0].records.clone());
        let (_, recovered) = Wal::open(disk, options.clone()).unwrap();
        assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
    }
    assert!(freed > 3 && kept > 3, "{freed} freed, {kept} kept");
}

/// Found by a reader: of a run of small entries with large ones behind them the large ones were left, and counted for as many
/// small ones. They were copied forward where there was no room, and a full disk was fenced.
#[test]
fn on_a_full_disk_what_is_copied_forward_is_counted_as_it_is() {
    let options =
        WalOptions { segment_bytes: 256 << 10, first_segment_bytes: 256 << 10, ..options() };
    // A quarter of the segment may be copied.
    for (large, is_copied) in [(16_000, true), (40_000, false)] {
        let (mut freed, mut kept) = (0, 0);
        for filled in 1..44 {
            let disk = MemoryStorage::default();
            let (mut wal, _) = Wal::open(disk.clone(), options.clone()).unwrap();
            let mut records = vec![created(1), created(2)];
            records.extend((2..42).map(|index| entry(1, 1, index, 1000)));
            records.extend((42..45).map(|index| entry(1, 1, index, large)));
            records.extend([entry(2, 1, 2, 200_000), entry(2, 1, 3, 60_000)]);
            wal.append(&[batch(&records)]).unwrap();
            assert_eq!(wal.stats().segments, 3);
            let fill = entry(2, 1, 4, filled * 4096 - 300);
            wal.append(&[batch(std::slice::from_ref(&fill))]).unwrap();
            disk.set_full(true);
            let last = [batch(&[compacted(1, 1, 41)])];
            if !has_room(&mut wal, &last) {
                continue;
            }
            wal.append(&last).unwrap();
            let is_freed = !disk.list().unwrap().contains(&segment_name(1));
            (freed, kept) = (freed + u32::from(is_freed), kept + u32::from(!is_freed));
            records.push(fill);
            records.extend(last[0].records.clone());
            let (_, recovered) = Wal::open(disk.clone(), options.clone()).unwrap();
            assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
            // What is known now is not read again each time.
            let before = disk.read_bytes();
            let next = [batch(&[hard(1, 1, 42)])];
            if !is_freed && has_room(&mut wal, &next) {
                wal.append(&next).unwrap();
                assert_eq!(disk.read_bytes(), before);
            }
        }
        assert!(kept > 10 && is_copied == (freed > 10), "{large}: {freed} freed, {kept} kept");
    }
}

/// Segments of 16 MiB, the first one small.
fn large() -> WalOptions {
    let first_segment_bytes = 64 << 10;
    WalOptions { segment_bytes: 16 << 20, first_segment_bytes, ..options() }
}

/// Found by a reader: a log that waited for room zeroed what was left of the disk, and gave it back, five times a second:
/// nobody else had any of it.
#[test]
fn who_waits_for_room_leaves_the_rest_of_the_disk_alone() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = Wal::open(disk.clone(), large()).unwrap();
    wal.append(&[batch(&[created(1), entry(1, 1, 2, 50_000)])]).unwrap();
    disk.set_free(Some(3 << 20));
    let before = disk.written_bytes();
    for _ in 0..10 {
        assert!(!has_room(&mut wal, &[batch(&[entry(1, 1, 3, 50_000)])]));
        assert!(!wal.prepare_step().unwrap());
    }
    assert_eq!(disk.written_bytes() - before, 0);
    disk.set_free(None);
    let waiting = [batch(&[entry(1, 1, 3, 50_000)])];
    assert!(has_room(&mut wal, &waiting));
    wal.append(&waiting).unwrap();
}

/// Found by a reader: with 60 MiB left on its disk a log of segments of 64 MiB waited for room. On a meta node, where room is made
/// by deletions, which go through the log, it waited for ever.
#[test]
fn on_a_disk_with_little_room_segments_are_smaller_until_there_is_room_again() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = Wal::open(disk.clone(), large()).unwrap();
    let mut records = vec![created(1), hard(1, 1, 1)];
    wal.append(&[batch(&records)]).unwrap();
    disk.set_free(Some(11 << 20));
    let mut index = 1;
    let mut next = |count: u64| -> Vec<LogBatch> {
        let entries = (0..count).map(|_| {
            index += 1;
            batch(&[entry(1, 1, index, 100_000)])
        });
        entries.collect()
    };
    let mut taken = 0;
    // More at once than there is room for: some of it goes on.
    let mut waiting = next(200);
    while let count @ 1.. = wal.make_room(&waiting).unwrap() {
        let batches: Vec<_> = waiting.drain(..count).collect();
        wal.append(&batches).unwrap();
        records.extend(batches.into_iter().flat_map(|batch| batch.records));
        taken += count;
        while wal.prepare_step().unwrap() {}
    }
    assert!((60..75).contains(&taken), "{taken} entries of 100,000 bytes");
    let mut free = disk.clone();
    let sizes = |disk: &mut MemoryStorage| {
        let names = disk.list().unwrap();
        let mut buffer = vec![0; 17 << 20];
        let sizes = names.iter().map(|name| disk.read(name, 0, &mut buffer).unwrap() >> 20);
        sizes.collect::<Vec<_>>()
    };
    assert_eq!(sizes(&mut free), [4, 2, 1]);
    assert!(disk.free_bytes().unwrap() >= 4 << 20, "others have some");
    disk.crash(|_| false);
    let (mut wal, recovered) = Wal::open(disk.clone(), large()).unwrap();
    assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
    // With room again they are as large as they were, and of the small ones none is used again.
    disk.set_free(None);
    while wal.make_room(&waiting).unwrap() < waiting.len() {}
    wal.append(&waiting).unwrap();
    records.extend(waiting.into_iter().flat_map(|batch| batch.records));
    let last = batch(&[compacted(1, 1, 201)]);
    wal.append(std::slice::from_ref(&last)).unwrap();
    records.extend(last.records);
    while wal.prepare_step().unwrap() {}
    assert!(sizes(&mut free).iter().all(|size| *size == 16), "{:?}", sizes(&mut free));
    disk.crash(|_| false);
    let (_, recovered) = Wal::open(disk, large()).unwrap();
    assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
}

/// Who appends without asking for room, or starts behind a segment that cannot be read, takes a smaller one too.
#[test]
fn a_segment_that_cannot_wait_is_as_large_as_there_is_room_for() {
    let disk = MemoryStorage::default();
    let (mut wal, _) = Wal::open(disk.clone(), large()).unwrap();
    let mut records = vec![created(1), entry(1, 1, 2, 30_000)];
    wal.append(&[batch(&records)]).unwrap();
    (0..6).for_each(|_| assert!(wal.prepare_step().unwrap()));
    disk.set_full(true);
    let next = entry(1, 1, 3, 1_500_000);
    wal.append(&[batch(std::slice::from_ref(&next))]).unwrap();
    records.push(next);
    assert_eq!(disk.free_bytes().unwrap(), 4 << 20, "of six a segment of two");
    let (_, recovered) = Wal::open(disk, large()).unwrap();
    assert_eq!((recovered.groups, recovered.damaged), (model(&records), vec![]));
}
