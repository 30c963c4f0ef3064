//! F11: a member that becomes slow is done without where the others are enough (docs/decisions/0014).

use std::path::Path;
use std::time::{Duration, Instant};

use milpa_testbed::load::{self, content, write_synced};
use milpa_testbed::{Mounted, Testbed};

/// RELIABILITY.md, F11: by then it is known that it is slow, and partitions go on without it.
const NOTICED_MAX: Duration = Duration::from_secs(10);
/// RELIABILITY: after a single failure no call waits longer.
const STALL_MAX: Duration = Duration::from_secs(10);
const BACK_MAX: Duration = Duration::from_secs(60);
const FILES: usize = 200;

/// Files of one writer, and how long each took.
struct Files {
    mount: Mounted,
    written: u64,
}

impl Files {
    fn write(&mut self) -> Duration {
        let started = Instant::now();
        let path = self.path(&self.mount.path);
        write_synced(&path, &content(self.written)).unwrap();
        self.written += 1;
        let took = started.elapsed();
        assert!(took < STALL_MAX, "file {} took {took:?}", self.written);
        took
    }

    fn path(&self, mount: &Path) -> std::path::PathBuf {
        load::path(mount, self.written)
    }

    /// How long it took to write a file, at least nine times in ten.
    fn usually(&mut self) -> Duration {
        let mut took: Vec<Duration> = (0..FILES).map(|_| self.write()).collect();
        took.sort();
        println!(
            "p50 {:?}, p90 {:?}, p99 {:?}",
            took[FILES / 2],
            took[FILES * 9 / 10],
            took[FILES * 99 / 100]
        );
        took[FILES * 9 / 10]
    }
}

fn status(bed: &Testbed) -> String {
    bed.milpa(&["status"]).unwrap_or_default()
}

/// Three data nodes, so that every partition has a replica on the slow one.
#[test]
fn a_slow_data_node_is_done_without_until_it_is_fast_again() {
    let mut bed = Testbed::start_on_faulty_disks(11, &[]).unwrap();
    let mut files = Files { mount: bed.mount("default").unwrap(), written: 0 };
    let before = files.usually();
    bed.order("data3 delay 200").unwrap();
    let began = Instant::now();
    let mut slowest = Duration::ZERO;
    while began.elapsed() < NOTICED_MAX {
        slowest = slowest.max(files.write());
    }
    println!("noticed; the slowest file meanwhile took {slowest:?}");
    let status_then = status(&bed);
    assert!(status_then.contains("is slow"), "{status_then}");
    assert!(status_then.contains("partitions go on without it"), "{status_then}");
    let during = files.usually();
    assert!(during < before * 2 + Duration::from_millis(20), "{during:?}, before it {before:?}");
    bed.order("data3 delay 0").unwrap();
    let mended = Instant::now();
    bed.wait_until("it takes part again", BACK_MAX, |bed| {
        let status = status(bed);
        !status.contains("slow") && !status.contains("of 3 copies")
    })
    .unwrap();
    println!("it takes part again after {:?}", mended.elapsed());
    let after = files.usually();
    assert!(after < before * 2 + Duration::from_millis(20), "{after:?}, before it {before:?}");
    bed.wait_until("replicas equal", BACK_MAX, |bed| bed.milpa(&["partition", "compare"]).is_ok())
        .unwrap();
    let fresh = bed.mount("default").unwrap();
    for number in 0..files.written {
        let read = std::fs::read(load::path(&fresh.path, number)).unwrap();
        assert!(read == content(number), "file {number} differs");
    }
}
