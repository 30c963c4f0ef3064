//! How many bytes a file takes, and how long a snapshot and a restart take. Not run by default:
//! `cargo test --release -p milpa-meta -- --ignored --nocapture a_million_files`.

use std::time::Instant;

use super::*;
use crate::core::restore;

const FILES: u64 = 1_000_000;
/// DESIGN.md section 4.
const BYTES_PER_FILE_MAX: u64 = 200;

/// Bytes of memory that this process has in use (the second field of statm, in pages).
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn measure(what: &str, with_extent: bool, in_order: bool) -> Partition {
    let before = resident();
    let mut solo = Solo::new();
    let start = Instant::now();
    let mut directory = ROOT;
    // Times as they are: small ones would take fewer bytes.
    solo.sequence = 0;
    for i in 0..FILES {
        if i % 1000 == 0 {
            directory = solo.make(ROOT, &format!("directory-{i:06}"), FileKind::Directory);
        }
        let tag = if in_order { i } else { i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24 };
        let text = format!("file-{tag:011}");
        let write = create(directory, &text[text.len() - 16..], FileKind::File);
        let id =
            RequestId { session: ME, sequence: 2 * i + 1_000_000, unanswered: 2 * i + 1_000_000 };
        let now = Timestamp(1_760_000_000_000_000_000 + i as i64 * 1_234_567);
        let created = solo.apply(&Command::Client { id, now, write }).outcome;
        let Outcome::Reply(Ok(MetaAnswer::Entry(entry))) = created else { panic!("{created:?}") };
        if with_extent {
            let id = RequestId { sequence: id.sequence + 1, unanswered: id.sequence + 1, ..id };
            let piece = segment(0, 4000, ExtentId::small(i / 1000), i % 1000 * 4096);
            let now = Timestamp(now.0 + 3_000_000);
            let write = publish(entry.inode, 0, vec![piece]);
            let MetaWrite::Publish(write) = write else { unreachable!() };
            let write = MetaWrite::Publish(Publish { modified: now, ..write });
            solo.apply(&Command::Client { id, now, write });
        }
        solo.sequence = id.sequence + 1;
    }
    let bytes = (resident() - before) / FILES;
    println!("{what}: {bytes} bytes a file, {:?} to apply", start.elapsed());
    assert!(bytes <= BYTES_PER_FILE_MAX, "{what}: {bytes} bytes a file");
    solo.partition
}

#[test]
#[ignore = "takes a second in a release build and a minute without; measures the whole process"]
fn a_million_files() {
    // All are kept: memory that one gave back would not count for the next.
    let _in_order = measure("empty, names in order", false, true);
    let _at_random = measure("empty, names at random", false, false);
    let partition = measure("one small extent, names at random", true, false);
    let start = Instant::now();
    let mut snapshot = partition.begin_snapshot(1);
    println!("snapshot begun in {:?}", start.elapsed());
    let start = Instant::now();
    let file: Vec<u8> = std::iter::from_fn(|| snapshot.next_piece(1 << 20)).flatten().collect();
    println!("snapshot of {} MB given in {:?}", file.len() / 1_000_000, start.elapsed());
    let start = Instant::now();
    let (restored, _) = restore(file.as_slice()).unwrap();
    println!("restored in {:?}", start.elapsed());
    assert_eq!(restored.hash(), partition.hash());
}
