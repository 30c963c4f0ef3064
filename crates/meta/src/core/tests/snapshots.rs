//! Snapshots: frozen while the partition goes on, refused when damaged.

use proptest::prelude::*;

use super::*;
use crate::core::{RestoreError, Snapshot, restore};

/// A partition with a bit of everything in it.
fn busy() -> Solo {
    let mut solo = Solo::new();
    for i in 0..2000u64 {
        let file = solo.make(ROOT, &format!("file-{i:05}"), FileKind::File);
        if i % 3 == 0 {
            solo.write(publish(file, 0, vec![segment(0, 100, ExtentId(i), 0)])).unwrap();
        }
        if i % 10 == 0 {
            let held = i % 20 == 0;
            let name = name(&format!("file-{i:05}"));
            solo.write(MetaWrite::Unlink { parent: ROOT, name, held }).unwrap();
        }
    }
    let directory = create(ROOT, "elsewhere", FileKind::Directory);
    let MetaWrite::Create { parent, name, inode, .. } = directory else { unreachable!() };
    let placement = Some(MetaSlot(1));
    let write =
        MetaWrite::Create { parent, name, inode, placement, open_existing: false, content: None };
    let id = RequestId { session: ME, sequence: 9000, unanswered: 8990 };
    let command = Command::Client { id, now: Timestamp(5), write };
    assert!(matches!(solo.apply(&command).outcome, Outcome::Deferred(_)));
    solo
}

fn file_of(mut snapshot: Snapshot, bytes_max: usize) -> Vec<u8> {
    std::iter::from_fn(|| snapshot.next_piece(bytes_max)).flatten().collect()
}

#[test]
fn what_is_restored_is_what_was_frozen() {
    let solo = busy();
    let file = file_of(solo.partition.begin_snapshot(3), 4096);
    let (restored, header) = restore(file.as_slice()).unwrap();
    assert_eq!((header.index, header.term), (solo.partition.applied(), 3));
    assert_eq!(restored.hash(), solo.partition.hash());
    assert_eq!(restored.setup(), solo.partition.setup());
    assert_eq!(restored.statistics(), solo.partition.statistics());
    assert_eq!(restored.next_steps(10), solo.partition.next_steps(10));
    assert_eq!(restored.free_orders(0, 5000), solo.partition.free_orders(0, 5000));
    assert_eq!(file_of(restored.begin_snapshot(3), 4096), file, "equal state, equal file");
}

#[test]
fn another_thread_may_write_it() {
    fn is_send<T: Send>(_: &T) {}
    is_send(&Solo::new().partition.begin_snapshot(1));
}

#[test]
fn changes_during_a_snapshot_are_not_in_it() {
    let mut solo = busy();
    let frozen = file_of(solo.partition.begin_snapshot(1), 2000);
    let mut snapshot = solo.partition.begin_snapshot(1);
    let mut file = Vec::new();
    let mut step = 0;
    solo.sequence = 10_000;
    while let Some(piece) = snapshot.next_piece(2000) {
        file.extend(piece);
        for _ in 0..10 {
            // In front of the writer's cursor, behind it and around it.
            step += 1;
            solo.make(ROOT, &format!("new-{step}"), FileKind::File);
            let old = format!("file-{:05}", (step * 7919) % 2000);
            drop(solo.write(unlink(ROOT, &old)));
        }
    }
    assert!(step > 100, "{step} changes went on beside it");
    assert!(file == frozen, "byte by byte what a stopped world would have written");
}

#[test]
fn a_torn_file_is_refused_wherever_it_ends() {
    let mut solo = Solo::new();
    solo.make(ROOT, "f", FileKind::File);
    let file = file_of(solo.partition.begin_snapshot(1), 64);
    for end in 0..file.len() {
        let refused = restore(&file[..end]).err();
        assert!(matches!(refused, Some(RestoreError::Torn { .. })), "{end}: {refused:?}");
    }
    assert!(restore(file.as_slice()).is_ok());
}

#[test]
fn a_newer_format_is_named() {
    let file = file_of(Solo::new().partition.begin_snapshot(1), 64);
    let length = u32::from_le_bytes(file[..4].try_into().unwrap()) as usize;
    let mut payload = file[8..8 + length].to_vec();
    payload[1] = 2;
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &payload) as u32;
    let newer = [&file[..4], &crc.to_le_bytes(), &payload].concat();
    assert!(matches!(restore(newer.as_slice()).err(), Some(RestoreError::Format { format: 2 })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_flipped_bit_is_noticed_wherever_it_is(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut solo = Solo::new();
        for i in 0..20 {
            solo.make(ROOT, &format!("f{i}"), FileKind::File);
        }
        let mut file = file_of(solo.partition.begin_snapshot(1), 200);
        let at = at.index(file.len());
        file[at] ^= 1 << bit;
        prop_assert!(restore(file.as_slice()).is_err());
    }

    #[test]
    fn hostile_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(restore(bytes.as_slice()).is_err());
    }
}
