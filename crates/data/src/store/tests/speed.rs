//! How much the store costs over plain writes. Run with
//! `cargo test -p milpa-data --release store::tests::speed -- --ignored --nocapture`.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use super::super::files::DiskFiles;
use super::*;

const TOTAL: usize = 256 << 20;

/// MB/s of `TOTAL` bytes in pieces, given the time they take.
fn report(what: &str, piece: usize, run: impl FnOnce()) {
    let start = Instant::now();
    run();
    let seconds = start.elapsed().as_secs_f64();
    let rate = TOTAL as f64 / 1e6 / seconds;
    println!("{what:32} {:6} KiB pieces: {rate:8.0} MB/s", piece as f64 / 1024.0);
}

#[test]
#[ignore = "a benchmark"]
fn speed_of_appends_and_reads() {
    let directory = tempfile::tempdir_in(".").unwrap();
    for piece in [128 << 10, 4 << 10] {
        let bytes = pattern(1, piece);
        let sums = checksums_of(&bytes);
        for round in 0..2 {
            let path = directory.path().join(format!("plain-{piece}-{round}"));
            let file = std::fs::File::create_new(&path).unwrap();
            report("plain pwrite", piece, || {
                for offset in (0..TOTAL).step_by(piece) {
                    file.write_all_at(&bytes, offset as u64).unwrap();
                }
            });
            std::fs::remove_file(path).unwrap();
            let disk = StoreDisk::new(Arc::new(DiskFiles), StoreLimits::default());
            let path = directory.path().join(format!("store-{piece}-{round}"));
            let (store, _) = ExtentStore::open(&disk, &path, PARTITION).unwrap();
            store.create_extent(new_extent(LARGE)).unwrap();
            report("append", piece, || {
                for offset in (0..TOTAL).step_by(piece) {
                    let sums = Checksums::of_payload(&sums);
                    store.append(LARGE, offset as u64, &bytes, sums).unwrap();
                }
            });
            report("read, in the page cache", piece, || {
                for offset in (0..TOTAL).step_by(piece) {
                    store.read(LARGE, offset as u64, piece as u32).unwrap();
                }
            });
            store
                .free(
                    &[Freed { extent: LARGE, offset: 0, length: u64::MAX }],
                    &mut HeaderBlocks::default(),
                )
                .unwrap();
        }
    }
}
