//! Several machines, as README.md tells to set them up.

use std::time::Duration;

use milpa_testbed::Machines;
use milpa_testbed::load::{Writer, content, path};

use crate::{pattern, write_synced};

/// A cable is pulled under a writer, of one machine after the other: the machine with the manager,
/// meta and data node in use is done without within the promised time, and catches up after that.
#[test]
fn three_machines_of_which_one_loses_its_network() {
    let mut machines = Machines::start(3).unwrap();
    machines.milpa(&["volume", "create", "photos"]).unwrap();
    let mount = machines.mount("photos").unwrap();
    write_synced(&mount.join("before"), &pattern(1, 5 << 20)).unwrap();

    let directory = mount.join("files");
    std::fs::create_dir(&directory).unwrap();
    let writer = Writer::start(env!("CARGO_BIN_EXE_milpa-writer"), &directory).unwrap();
    let goes_on = |machines: &Machines| {
        let target = writer.acknowledged() + 20;
        machines
            .wait_until("the writer goes on", Duration::from_secs(30), |_| {
                writer.acknowledged() >= target || writer.has_ended()
            })
            .unwrap();
    };
    goes_on(&machines);
    for machine in 1..=3 {
        machines.pull(machine).unwrap();
        goes_on(&machines);
        machines.plug(machine).unwrap();
        machines
            .wait_until("the machine is back", Duration::from_secs(30), |machines| {
                let nodes = machines.milpa(&["node", "list"]);
                nodes.is_ok_and(|nodes| !nodes.contains("silent"))
            })
            .unwrap();
        goes_on(&machines);
    }
    let (count, longest) = writer.finish().unwrap();
    println!("{count} files written and synced; the longest took {longest:?}");
    assert!(longest < Duration::from_secs(10), "one file took {longest:?}");

    let other = machines.mount("photos").unwrap();
    assert!(std::fs::read(other.join("before")).unwrap() == pattern(1, 5 << 20));
    for number in 0..count {
        let read = std::fs::read(path(&other.join("files"), number)).unwrap();
        assert!(read == content(number), "file {number} differs");
    }
    machines
        .wait_until("replicas equal", Duration::from_secs(60), |machines| {
            machines.milpa(&["partition", "compare"]).is_ok()
        })
        .unwrap();
}
