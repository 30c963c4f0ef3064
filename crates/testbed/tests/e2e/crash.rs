//! Processes die: nothing acknowledged is lost, and no call hangs.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use milpa_testbed::load::{self, Writer, content};
use milpa_testbed::{Mounted, Testbed};

const WRITER: &str = env!("CARGO_BIN_EXE_milpa-writer");

/// RELIABILITY: after a single failure no call waits longer.
const STALL_MAX: Duration = Duration::from_secs(10);

#[track_caller]
pub(crate) fn check_files(directory: &Path, count: u64) {
    for number in 0..count {
        let path = load::path(directory, number);
        let read = std::fs::read(&path).unwrap_or_else(|e| panic!("file {number}: {e}"));
        assert!(read == content(number), "file {number} differs ({} bytes)", read.len());
    }
}

#[track_caller]
pub(crate) fn wait_for_more(bed: &Testbed, writer: &Writer, more: u64) {
    let target = writer.acknowledged() + more;
    bed.wait_until("the writer goes on", Duration::from_secs(60), |_| {
        writer.acknowledged() >= target || writer.has_ended()
    })
    .unwrap();
}

#[test]
fn one_process_of_each_role_dies_and_writing_goes_on() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(WRITER, &directory).unwrap();
    wait_for_more(&bed, &writer, 20);
    for name in ["manager1", "meta1", "data1", "meta2", "data3", "manager2", "data2", "meta3"] {
        bed.process(name).unwrap().kill().unwrap();
        wait_for_more(&bed, &writer, 20);
        bed.wait_until("restarted", Duration::from_secs(15), |bed| {
            bed.process(name).is_ok_and(|process| process.pid().is_some())
        })
        .unwrap();
    }
    let (count, longest) = writer.finish().unwrap();
    println!("{count} files written and synced; the longest took {longest:?}");
    assert!(longest < STALL_MAX, "one file took {longest:?}");
    let other = bed.mount("default").unwrap();
    check_files(&other.path.join("files"), count);
    bed.wait_until("replicas equal", Duration::from_secs(60), |bed| {
        bed.milpa(&["partition", "compare"]).is_ok()
    })
    .unwrap();
}

#[test]
fn a_data_node_that_stays_away_is_done_without_and_taken_back() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(WRITER, &directory).unwrap();
    wait_for_more(&bed, &writer, 10);
    let away = bed.process("data2").unwrap().clone();
    away.signal(libc::SIGSTOP).unwrap();
    wait_for_more(&bed, &writer, 30);
    bed.wait_until("dropped from all partitions", Duration::from_secs(10), |bed| {
        members(bed) == 12
    })
    .unwrap();
    wait_for_more(&bed, &writer, 10);
    away.signal(libc::SIGCONT).unwrap();
    bed.wait_until("taken back", Duration::from_secs(30), |bed| members(bed) == 18).unwrap();
    wait_for_more(&bed, &writer, 10);
    let (count, longest) = writer.finish().unwrap();
    assert!(longest < STALL_MAX, "one file took {longest:?}");
    let fresh = bed.mount("default").unwrap();
    check_files(&fresh.path.join("files"), count);
    bed.wait_until("replicas equal", Duration::from_secs(60), |bed| {
        bed.milpa(&["partition", "compare"]).is_ok()
    })
    .unwrap();
}

/// A process that waits for a file system must die when it is killed, whatever the servers do.
#[test]
fn a_process_that_waits_for_dead_servers_can_be_killed() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let servers: Vec<_> =
        bed.processes().iter().filter(|process| process.role != "manager").cloned().collect();
    for server in &servers {
        server.signal(libc::SIGSTOP).unwrap();
    }
    let mut waiting = std::process::Command::new("stat")
        .arg(mount.path.join("nothing"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let state = format!("/proc/{}/wchan", waiting.id());
    bed.wait_until("it waits for us", Duration::from_secs(5), |_| {
        std::fs::read_to_string(&state)
            .is_ok_and(|place| place.contains("fuse") || place.contains("request_wait"))
    })
    .unwrap();
    let started = std::time::Instant::now();
    waiting.kill().unwrap();
    let status = waiting.wait().unwrap();
    assert!(!status.success());
    assert!(started.elapsed() < Duration::from_secs(2), "it took {:?} to die", started.elapsed());
    for server in &servers {
        server.signal(libc::SIGCONT).unwrap();
    }
    bed.wait_until("service again", Duration::from_secs(20), |_| {
        std::fs::write(mount.path.join("after"), "x").is_ok()
    })
    .unwrap();
}

/// Members of all data partitions together.
fn members(bed: &Testbed) -> usize {
    let Ok(list) = bed.json(&["partition", "list"]) else { return 0 };
    let data = list["Partitions"]["data"].as_array().cloned().unwrap_or_default();
    data.iter().filter_map(|partition| Some(partition["members"].as_array()?.len())).sum()
}

/// Rounds of killing everything; `make crash` runs 20.
fn rounds() -> u64 {
    crate::from_environment("MILPA_CRASH_ROUNDS").unwrap_or(2)
}

#[test]
fn everything_is_killed_at_once_and_what_was_synced_is_whole() {
    let mut bed = Testbed::start().unwrap();
    let mut total = 0;
    for round in 0..rounds() {
        let mount: Mounted = bed.mount("default").unwrap();
        let directory = mount.path.join(format!("round{round}"));
        std::fs::create_dir(&directory).unwrap();
        let writer = Writer::start(WRITER, &directory).unwrap();
        wait_for_more(&bed, &writer, 25 + round * 3);
        let acknowledged = writer.acknowledged();
        bed.kill_all().unwrap();
        bed.up(&[]).unwrap();
        wait_for_more(&bed, &writer, 5);
        let (count, _) = writer.finish().unwrap();
        assert!(acknowledged >= 25, "nothing was acknowledged: a void run");
        // Through a mount that has cached nothing.
        let fresh = bed.mount("default").unwrap();
        check_files(&fresh.path.join(format!("round{round}")), count);
        bed.umount(&fresh).unwrap();
        bed.umount(&mount).unwrap();
        total += count;
        println!(
            "round {}: {count} files, {acknowledged} of them synced before the kill",
            round + 1
        );
    }
    let mount = bed.mount("default").unwrap();
    assert_eq!(std::fs::read_dir(&mount.path).unwrap().count() as u64, rounds());
    println!("{total} files whole after {} kills of everything", rounds());
}

#[test]
fn down_and_up_bring_everything_back() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    std::fs::create_dir(mount.path.join("files")).unwrap();
    for number in 0..50 {
        // No fsync: a clean stop loses nothing that was closed.
        std::fs::write(mount.path.join(format!("files/f{number}")), content(number)).unwrap();
    }
    // Story: the nodes that ended first were taken for lost by the managers, which were still there:
    // after the start there were two copies, and whoever lost a disk then was left with one.
    let epochs = |bed: &Testbed| {
        let list = bed.json(&["partition", "list"]).unwrap();
        let partitions = list["Partitions"]["data"].as_array().unwrap().clone();
        partitions.iter().map(|partition| partition["epoch"].clone()).collect::<Vec<_>>()
    };
    let before = epochs(&bed);
    bed.down().unwrap();
    bed.up(&[]).unwrap();
    let mount = bed.mount("default").unwrap();
    check_files(&mount.path.join("files"), 50);
    assert_eq!(epochs(&bed), before, "an orderly stop takes no member away");
}

#[test]
fn killing_the_supervisor_leaves_its_children_running() {
    let mut bed = Testbed::start().unwrap();
    let before: Vec<_> = bed.processes().iter().map(|process| process.pid()).collect();
    let supervisor = bed.supervisor().unwrap();
    std::process::Command::new("kill").args(["-9", &supervisor.to_string()]).status().unwrap();
    bed.wait_until("supervisor gone", Duration::from_secs(5), |_| {
        !Path::new(&format!("/proc/{supervisor}/cmdline")).exists()
    })
    .unwrap();
    bed.milpa(&["status"]).unwrap();
    bed.up(&[]).unwrap();
    let after: Vec<_> = bed.processes().iter().map(|process| process.pid()).collect();
    assert_eq!(before, after, "the new supervisor adopts what runs");
}

/// Story: everything was killed, and `milpa up` came so soon that it found the supervisor still there.
/// Nothing was started, and after a minute it gave up.
#[test]
fn up_starts_a_supervisor_when_the_one_it_found_dies() {
    let mut bed = Testbed::start().unwrap();
    let supervisor = bed.supervisor().unwrap();
    // Alive, and starting nothing.
    let signal = |name: &str| {
        let pid = supervisor.to_string();
        std::process::Command::new("kill").args([name, &pid]).status().unwrap();
    };
    signal("-STOP");
    for process in bed.processes() {
        process.kill().unwrap();
    }
    let mut up = std::process::Command::new(milpa_testbed::program().unwrap());
    up.arg("up").arg("--data").arg(bed.data()).stdout(std::process::Stdio::piped());
    let mut up = up.spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(up.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert!(line.starts_with("cluster in"), "{line}");
    // It has found the supervisor when it waits for the managers, as one does for sockets.
    bed.wait_until("it asks the managers", Duration::from_secs(5), |_| {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", up.id()));
        call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_epoll_wait)))
    })
    .unwrap();
    signal("-KILL");
    assert!(up.wait().unwrap().success());
    bed.up(&[]).unwrap();
    bed.milpa(&["status"]).unwrap();
}
