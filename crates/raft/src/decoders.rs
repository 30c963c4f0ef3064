//! The decoders of this crate, for golden files and fuzzing.

use bytes::Bytes;
use milpa_types::{NodeId, PartitionId};
use milpa_wire::decoder::{Decoder, Random, generate, put};

use crate::message::{Body, Frame, Message};
use crate::types::{LogPosition, Members, SnapshotDescriptor};
use crate::wal::{
    EntryKind, LogBatch, LogEntry, LogStorage, MemoryStorage, Record, Recovered, Wal, WalOptions,
};

/// Bytes of a segment in a sample. The bytes of several stand one after the other.
const SEGMENT_BYTES: usize = 32 << 10;
const SEGMENTS_MAX: usize = 4;

/// All of them.
#[must_use]
pub fn all() -> Vec<Decoder> {
    vec![
        Decoder { name: "raft-frame", sample: frame, again: frame_again, seal: |b| frame_seal(b) },
        Decoder::of_message::<SnapshotDescriptor>("snapshot-descriptor"),
        Decoder { name: "wal", sample: log, again: log_again, seal: |b| log_seal(b) },
    ]
}

fn position(random: &mut Random) -> LogPosition {
    LogPosition { term: 1 + random.below(3), index: 1 + random.below(20) }
}

fn entry(random: &mut Random, position: LogPosition) -> LogEntry {
    let kind = if random.below(5) == 0 { EntryKind::Change } else { EntryKind::Normal };
    let (context, data) = (random.bytes(6).into(), random.bytes(300).into());
    LogEntry { position, kind, context, data }
}

fn frame(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let messages = (0..random.below(6)).map(|_| {
        let group = PartitionId(random.number());
        let mut message: Message = generate(random.draw());
        if random.below(4) > 0 {
            message.term = 3 + random.below(5);
        }
        if let Body::Append { prev, count, entries, .. } = &mut message.body {
            *prev = position(&mut random);
            let first = prev.index + 1;
            let at = |index| LogPosition { term: 3, index };
            *entries =
                (first..first + random.below(4)).map(|i| entry(&mut random, at(i))).collect();
            *count = entries.len() as u32;
        }
        (group, message)
    });
    Frame { messages: messages.collect() }.encode().to_vec()
}

fn frame_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(Frame::decode(Bytes::copy_from_slice(bytes)).ok()?.encode().to_vec())
}

/// The head is as long as what is there, unless something stands behind it.
fn frame_seal(bytes: &mut [u8]) {
    let length = (bytes.len().saturating_sub(4) as u32).to_le_bytes();
    put(bytes, 0, &length);
}

fn options() -> WalOptions {
    WalOptions {
        segment_bytes: 64 << 10,
        first_segment_bytes: SEGMENT_BYTES as u64,
        segments_max: 2,
        ..WalOptions::new([7; 16], 11)
    }
}

/// How many kinds of records [`record`] knows; a number above them is one of the more frequent ones.
const KINDS: u64 = 7;

fn record(kind: u64, random: &mut Random) -> Record {
    let group = PartitionId(1 + random.below(3));
    let members = Members::new(&[NodeId(1), NodeId(2), NodeId(3)], &[NodeId(4)]);
    let mark = position(random);
    match kind {
        0 => Record::GroupCreated { group, mark, members },
        1 => Record::GroupRemoved { group },
        2 | 7 | 8 => {
            let vote = (random.below(2) == 0).then_some(NodeId(random.below(3) as u32));
            Record::HardState { group, term: mark.term, vote, commit: mark.index }
        }
        3 => Record::Truncated { group, from: mark.index },
        4 => Record::Compacted { group, mark, members },
        5 => Record::Snapshot { group, mark, members },
        _ => Record::Entry { group, entry: entry(random, mark) },
    }
}

/// A log of one or more segments. Seed 0: two batches, each with a record of each kind, in one segment.
fn log(seed: u64) -> Vec<u8> {
    let disk = MemoryStorage::default();
    let mut random = Random::new(seed);
    if let Ok((mut wal, _)) = Wal::open(disk.clone(), options()) {
        let batches = if seed == 0 { 2 } else { 1 + random.below(12) };
        for number in 0..batches {
            let kinds: Vec<u64> = match seed {
                0 => (0..KINDS).collect(),
                _ => (0..1 + random.below(9)).map(|_| random.below(16)).collect(),
            };
            let mut records: Vec<Record> =
                kinds.into_iter().map(|kind| record(kind, &mut random)).collect();
            if seed != 0 && random.below(3) == 0 {
                let data = Bytes::from(vec![1; 9 << 10]);
                let entry =
                    LogEntry { position: position(&mut random), data, ..LogEntry::default() };
                records.push(Record::Entry { group: PartitionId(1), entry });
            }
            if wal.append(&[LogBatch { number, records }]).is_err() {
                break;
            }
        }
    }
    dump(disk)
}

/// All segments, the first [`SEGMENT_BYTES`] of each.
fn dump(mut disk: MemoryStorage) -> Vec<u8> {
    let names = disk.list().unwrap_or_default();
    let mut out = Vec::new();
    for name in names.iter().filter(|name| name.ends_with(".wal")).take(SEGMENTS_MAX) {
        let mut bytes = vec![0; SEGMENT_BYTES];
        // A short one is padded with zeros.
        let _ = disk.read(name, 0, &mut bytes);
        out.extend_from_slice(&bytes);
    }
    out
}

fn load(bytes: &[u8]) -> MemoryStorage {
    let mut disk = MemoryStorage::default();
    for (number, segment) in bytes.chunks(SEGMENT_BYTES).take(SEGMENTS_MAX).enumerate() {
        // The file's name says the number; a header that says another is damage.
        let seq = segment.get(16..24).and_then(|seq| seq.try_into().ok()).map(u64::from_le_bytes);
        let seq = seq.filter(|seq| *seq < 100).unwrap_or(number as u64);
        let name = format!("{seq:016x}.wal");
        let _ = disk.create(&name);
        let _ = disk.write_at(&name, 0, segment);
    }
    let _ = disk.sync_dir();
    disk
}

/// Recovers a log, and once more: reading changes nothing. Then appends, and finds that too.
fn log_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let disk = load(bytes);
    let open = || Wal::open(disk.clone(), options()).ok();
    let (wal, first) = open()?;
    let out = dump(disk.clone());
    drop(wal);
    let (mut wal, second) = open()?;
    let content = |recovered: &Recovered| (recovered.groups.clone(), recovered.damaged.clone());
    assert!(content(&first) == content(&second), "recovered twice: {first:?} then {second:?}");
    let group = PartitionId(u64::MAX);
    let appended = Record::HardState { group, term: 9, vote: None, commit: 1 };
    let created = Record::GroupCreated {
        group,
        mark: LogPosition { term: 1, index: 1 },
        members: Members::new(&[NodeId(1)], &[]),
    };
    let known = first.groups.iter().any(|found| found.group == group);
    if !known && wal.append(&[LogBatch { number: 1, records: vec![created, appended] }]).is_ok() {
        drop(wal);
        let (_, third) = open()?;
        let is_there = third.groups.iter().any(|found| found.group == group);
        assert!(is_there, "what was appended after recovery is lost: {first:?} then {third:?}");
    }
    // Segments that cannot be read are passed over, and a new one is begun.
    (out == bytes).then_some(out)
}

fn log_seal(bytes: &mut [u8]) {
    for segment in bytes.chunks_mut(SEGMENT_BYTES) {
        crate::wal::seal_segment(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by `milpa-fuzz`: the log went on behind such a batch, far outside its segment.
    #[test]
    fn a_batch_that_is_longer_than_its_segment_is_none() {
        for length in [24 << 10 | 1, 2 << 30, u32::MAX] {
            let mut bytes = log(0);
            put(&mut bytes, 8192 + 32, &u32::to_le_bytes(length));
            log_seal(&mut bytes);
            log_again(&bytes);
        }
    }

    #[test]
    fn golden_files_are_read_and_written_as_ever() {
        let golden = |decoder: &&Decoder| decoder.name != "raft-frame";
        milpa_wire::decoder::check_all_golden(
            env!("CARGO_MANIFEST_DIR"),
            all().iter().filter(golden),
        )
        .unwrap();
    }
}
