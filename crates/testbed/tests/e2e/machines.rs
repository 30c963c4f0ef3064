//! Several machines, as README.md tells to set them up.

use std::path::Path;
use std::time::{Duration, Instant};

use milpa_testbed::load::{Writer, content, path};
use milpa_testbed::{Cut, Layout, Machines};

use crate::{pattern, write_synced};

/// How long one machine does not reach another: longer than any call may take.
const UNHEARD: Duration = Duration::from_secs(12);
/// How long a cable is out.
const AWAY: Duration = Duration::from_secs(7);

/// A cable is pulled under a writer, of one machine after the other: the machine with the manager,
/// meta and data node in use is done without within the promised time, and catches up after that.
#[test]
fn three_machines_of_which_one_loses_its_network() {
    let mut machines = Machines::start(Layout::alike(3)).unwrap();
    machines.milpa(&["volume", "create", "photos"]).unwrap();
    let mount = machines.mount(machines.client(1), "photos").unwrap().path;
    write_synced(&mount.join("before"), &pattern(1, 5 << 20)).unwrap();

    let directory = mount.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(env!("CARGO_BIN_EXE_milpa-writer"), &directory).unwrap();
    let goes_on = |machines: &Machines| wait_for_progress(machines, &writer);
    goes_on(&machines);
    for machine in 1..=3 {
        machines.cut(machine, Cut::Pulled).unwrap();
        let cut = Instant::now();
        goes_on(&machines);
        // TCP by itself would wait as long again for what it has to send.
        std::thread::sleep(AWAY.saturating_sub(cut.elapsed()));
        machines.mend(machine, Cut::Pulled).unwrap();
        machines
            .wait_until("the machine is back", Duration::from_secs(30), |machines| {
                let nodes = machines.milpa(&["node", "list"]);
                nodes.is_ok_and(|nodes| !nodes.contains("silent"))
            })
            .unwrap();
        // The next one may go when there are three copies of everything again: of two, one is not enough.
        machines
            .wait_until("all copies are back", Duration::from_secs(30), |machines| {
                let status = machines.milpa(&["status"]);
                let lacks =
                    |status: &str| status.contains("3 copies") || status.contains("in service");
                status.is_ok_and(|status| !lacks(&status))
            })
            .unwrap();
        goes_on(&machines);
    }
    let (count, longest) = writer.finish().unwrap();
    println!("{count} files written and synced; the longest took {longest:?}");
    assert!(longest < Duration::from_secs(10), "one file took {longest:?}");

    let other = machines.mount(machines.operator(), "photos").unwrap().path;
    assert!(std::fs::read(other.join("before")).unwrap() == pattern(1, 5 << 20));
    check_files(&other, count);
    machines
        .wait_until("replicas equal", Duration::from_secs(60), |machines| {
            machines.milpa(&["partition", "compare"]).is_ok()
        })
        .unwrap();
}

/// What a machine sends to the client does not arrive, and everybody else hears both: no server is done without, and the
/// client is carried to it. The members that have to know of an fsync, and the leaders, are asked all the same.
#[test]
fn a_client_that_one_machine_does_not_reach_goes_on() {
    let mut machines = Machines::start(Layout::alike(3)).unwrap();
    machines.milpa(&["volume", "create", "photos"]).unwrap();
    let client = machines.client(1);
    let mount = machines.mount(client, "photos").unwrap().path;
    let directory = mount.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(env!("CARGO_BIN_EXE_milpa-writer"), &directory).unwrap();
    wait_for_progress(&machines, &writer);
    for machine in 1..=3 {
        machines.cut_way(machine, client).unwrap();
        let cut = Instant::now();
        wait_for_progress(&machines, &writer);
        std::thread::sleep(UNHEARD.saturating_sub(cut.elapsed()));
        let nodes = machines.milpa(&["node", "list"]).unwrap();
        assert!(!nodes.contains("silent"), "{nodes}");
        machines.mend_way(machine, client).unwrap();
        wait_for_progress(&machines, &writer);
    }
    let (count, longest) = writer.finish().unwrap();
    println!("{count} files written and synced; the longest took {longest:?}");
    assert!(longest < Duration::from_secs(10), "one file took {longest:?}");
    check_files(&mount, count);
}

fn wait_for_progress(machines: &Machines, writer: &Writer) {
    let target = writer.acknowledged() + 20;
    machines
        .wait_until("the writer goes on", Duration::from_secs(30), |_| {
            writer.acknowledged() >= target || writer.has_ended()
        })
        .unwrap();
}

fn check_files(mount: &Path, count: u64) {
    for number in 0..count {
        let read = std::fs::read(path(&mount.join("files"), number)).unwrap();
        assert!(read == content(number), "file {number} differs");
    }
}
