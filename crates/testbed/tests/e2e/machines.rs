//! Several machines, as README.md tells to set them up.

use std::time::{Duration, Instant};

use milpa_testbed::load::{Writer, content, path};
use milpa_testbed::{Cut, Layout, Machines};

use crate::{pattern, write_synced};

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
