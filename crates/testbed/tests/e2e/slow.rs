//! F11: a member that becomes slow is done without where the others are enough (docs/decisions/0014).

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use milpa_testbed::load::{self, content, write_synced};
use milpa_testbed::{Mounted, Testbed};
use serde_json::Value;

use super::fsck::first_segment;
use super::repair::{partitions, process_of};

/// RELIABILITY.md, F11: by then it is known that it is slow, and partitions go on without it.
const NOTICED_MAX: Duration = Duration::from_secs(10);
/// RELIABILITY: after a single failure no call waits longer.
const STALL_MAX: Duration = Duration::from_secs(10);
const BACK_MAX: Duration = Duration::from_secs(60);
/// What the managers wait for a sign of a node that is in service.
const SILENCE: Duration = Duration::from_secs(2);
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

/// Creates, renames and removes a file, and says how long each call took.
fn change_names(mount: &Path, number: usize) -> [Duration; 3] {
    let (made, moved) = (mount.join(format!("made{number}")), mount.join(format!("moved{number}")));
    let timed = |call: &dyn Fn() -> std::io::Result<()>| {
        let started = Instant::now();
        call().unwrap();
        let took = started.elapsed();
        assert!(took < STALL_MAX, "a change of names took {took:?}");
        took
    };
    [
        timed(&|| std::fs::File::create_new(&made).map(drop)),
        timed(&|| std::fs::rename(&made, &moved)),
        timed(&|| std::fs::remove_file(&moved)),
    ]
}

/// How long a change of names took, at least nine times in ten.
fn names_usually(mount: &Path, what: &str, rounds: usize) -> Duration {
    let rounds = (0..rounds).flat_map(|number| change_names(mount, number));
    let mut took: Vec<Duration> = rounds.collect();
    took.sort();
    let at = |percent: usize| took[took.len() * percent / 100];
    println!("{what}: p50 {:?}, p90 {:?}, max {:?}", at(50), at(90), took[took.len() - 1]);
    at(90)
}

/// Whether a node leads the partition of the volume's first inodes.
fn is_led_by(bed: &Testbed, node: u64) -> bool {
    let all = partitions(bed, "meta");
    let first = all.into_iter().find(|it| it["slot"] == 0).unwrap_or_default();
    first["leader"].as_u64() == Some(node)
}

/// Who leads the partition of the volume's first inodes, once the managers have spread leaders over the nodes: then
/// nobody moves them any more.
fn settled_leader(bed: &Testbed) -> (u64, Value) {
    let mut first = Value::Null;
    bed.wait_until("each meta node leads a partition", BACK_MAX, |bed| {
        let all = partitions(bed, "meta");
        let leaders: BTreeSet<u64> = all.iter().filter_map(|it| it["leader"].as_u64()).collect();
        first = all.into_iter().find(|it| it["slot"] == 0).unwrap_or_default();
        leaders.len() == 3
    })
    .unwrap();
    (first["leader"].as_u64().unwrap(), first)
}

/// A slow follower costs nothing: a majority goes on without it. A slow leader is waited for, as a change is applied when
/// it is in the leader's own log too, until it is relieved; and the managers, who even out who leads, do not
/// give it the lead back (docs/decisions/0016).
#[test]
fn a_slow_meta_node_costs_nothing_once_it_leads_no_more() {
    let mut bed = Testbed::start_on_faulty_disks(12, &[]).unwrap();
    let mount = bed.mount("default").unwrap();
    let (leader, partition) = settled_leader(&bed);
    let mut members =
        partition["members"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
    let follower = members.find(|id| *id != leader).unwrap();
    let before = names_usually(&mount.path, "before", 30);
    let delay = |bed: &mut Testbed, node, ms: u64| {
        let name = process_of(bed, node);
        bed.order(&format!("{name} delay {ms}")).unwrap();
    };
    delay(&mut bed, follower, 200);
    let during = names_usually(&mount.path, "a slow follower", 30);
    assert!(during < before * 2 + Duration::from_millis(20), "{during:?}, before it {before:?}");
    delay(&mut bed, follower, 0);

    assert_eq!(settled_leader(&bed).0, leader, "another one leads now: a void run");
    delay(&mut bed, leader, 200);
    let slow_since = Instant::now();
    while is_led_by(&bed, leader) {
        names_usually(&mount.path, "a slow leader", 1);
        assert!(slow_since.elapsed() < NOTICED_MAX, "it leads on");
    }
    println!("another one led after {:?}", slow_since.elapsed());
    write_synced(&mount.path.join("synced"), &content(77)).unwrap();
    let during = names_usually(&mount.path, "a slow node that leads no more", 300);
    assert!(during < before * 2 + Duration::from_millis(20), "{during:?}, before it {before:?}");
    assert!(!is_led_by(&bed, leader), "it was given the lead back");
    delay(&mut bed, leader, 0);
    let after = names_usually(&mount.path, "after", 30);
    assert!(after < before * 2 + Duration::from_millis(20), "{after:?}, before it {before:?}");
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("synced")).unwrap() == content(77));
}

/// Slow reads are not what a disk is held off for: who reads asks another member soon, and prefers it from then on.
#[test]
fn readers_of_a_slow_disk_are_served_by_another_one() {
    const DELAY: Duration = Duration::from_millis(2_000);
    let mut bed = Testbed::start_on_faulty_disks(13, &[]).unwrap();
    let mut files = Files { mount: bed.mount("default").unwrap(), written: 0 };
    while files.written < 30 {
        files.write();
    }
    let slow = bed.node_id("data3").unwrap();
    let is_first = |number: &u64| {
        let (_, extent, nodes) = first_segment(&bed, &load::path(&files.mount.path, *number));
        nodes[(extent % nodes.len() as u64) as usize] == slow
    };
    // The first file is empty.
    let there: Vec<u64> = (1..files.written).filter(is_first).collect();
    assert!(!there.is_empty(), "no reader begins at the slow disk: a void run");
    bed.order(&format!("data3 delay-reads {}", DELAY.as_millis())).unwrap();
    let fresh = bed.mount("default").unwrap();
    let mut slowest = Duration::ZERO;
    for number in &there {
        let started = Instant::now();
        let read = std::fs::read(load::path(&fresh.path, *number)).unwrap();
        slowest = slowest.max(started.elapsed());
        assert!(read == content(*number), "file {number} differs");
    }
    println!("{} files of which data3 is asked first; the slowest took {slowest:?}", there.len());
    assert!(slowest < DELAY, "{slowest:?}: nobody else was asked");
    bed.order("data3 delay-reads 0").unwrap();
}

/// An operator who restarts one node after the other goes by what the managers say of the last one.
#[test]
fn a_meta_node_is_in_service_when_it_has_read_its_disk() {
    let mut bed = Testbed::start_on_faulty_disks(14, &[]).unwrap();
    let mount = bed.mount("default").unwrap();
    write_synced(&mount.path.join("file"), &content(1)).unwrap();
    let (node, process) = (bed.node_id("meta2").unwrap(), bed.process("meta2").unwrap().clone());
    bed.pause_supervisor(true).unwrap();
    process.kill().unwrap();
    bed.wait_until("it is silent", BACK_MAX, |bed| !is_active(bed, node)).unwrap();
    bed.order("meta2 delay-reads 500").unwrap();
    bed.pause_supervisor(false).unwrap();
    bed.wait_until("it is in service", BACK_MAX, |bed| is_active(bed, node)).unwrap();
    let started = Instant::now();
    // As it was made, as it came to its disk, and now.
    bed.wait_until("it serves", BACK_MAX, |bed| {
        let log = std::fs::read_to_string(bed.data().join("logs/meta2.log")).unwrap();
        log.matches("meta node serves").count() == 3
    })
    .unwrap();
    assert!(started.elapsed() < SILENCE, "it was not there for {:?}", started.elapsed());
}

fn is_active(bed: &Testbed, node: u64) -> bool {
    let nodes = bed.json(&["node", "list"]).unwrap_or_default();
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    nodes.iter().any(|it| it["id"] == node && it["state"] == "Active")
}
