//! `milpa disk drain`: one disk of a node is emptied in use, and its node goes on with the others.

use std::path::{Path, PathBuf};
use std::time::Duration;

use milpa_testbed::{ServerProcess, Testbed, load};
use serde_json::Value;

use super::crash::wait_for_more;
use super::repair::{finish, start_load, tasks};

/// Generous, as other processes share the machine.
const EMPTY_MAX: Duration = Duration::from_secs(120);
/// Who has two disks.
const NODE: &str = "data1";

/// Where its second disk is.
fn second(process: &ServerProcess) -> PathBuf {
    process.directory.join("second")
}

/// A node with two disks among four, so that there is a place elsewhere for each of its replicas. All of
/// them are on the first disk: there was no other when they were made.
fn start() -> Testbed {
    Testbed::start_tuned(&["--nodes", "4"], |process, table| {
        if process.name == NODE {
            let mut disk = toml::Table::new();
            let path = second(process).display().to_string();
            disk.insert("path".to_owned(), toml::Value::String(path));
            let disks = table.get_mut("disks").and_then(|disks| disks.as_array_mut());
            disks.unwrap().push(toml::Value::Table(disk));
        }
    })
    .unwrap()
}

fn node(bed: &Testbed, id: u64) -> Value {
    let nodes = bed.json(&["node", "list"]).unwrap();
    nodes.as_array().unwrap().iter().find(|node| node["id"] == id).unwrap().clone()
}

/// Its disk of this directory: id and bytes in use.
fn disk(bed: &Testbed, id: u64, path: &Path) -> (u64, u64) {
    let node = node(bed, id);
    let mut disks = node["disks"].as_array().unwrap().iter();
    let shown = path.display().to_string();
    let disk = disks.find(|disk| disk["path"] == *shown).unwrap_or_else(|| panic!("{node}"));
    (disk["id"].as_u64().unwrap(), disk["used_bytes"].as_u64().unwrap())
}

/// Replicas that a disk holds.
fn held(path: &Path) -> usize {
    std::fs::read_dir(path.join("partitions")).map_or(0, Iterator::count)
}

/// The drain of a disk among the tasks.
fn drain(bed: &Testbed, (node, disk): (u64, u64)) -> Option<Value> {
    let reason = format!("disk {disk} of node {node} is drained");
    tasks(bed).into_iter().find(|task| task["kind"] == "Drain" && task["reason"] == *reason)
}

#[test]
fn a_disk_is_drained_in_use_and_its_node_goes_on_with_the_other() {
    let mut bed = start();
    let load = start_load(&mut bed);
    // Progress that can be seen: the small partitions are elsewhere before the large one.
    load::write_synced(&load.mount.path.join("large"), &load::pattern(3, 48 << 20)).unwrap();
    let (id, process) = (bed.node_id(NODE).unwrap(), bed.process(NODE).unwrap().clone());
    let first = node(&bed, id)["disks"][0]["path"].as_str().map(PathBuf::from).unwrap();
    let (drained, _) = disk(&bed, id, &first);
    let (other, _) = disk(&bed, id, &second(&process));
    assert_ne!(drained, other);
    let before = held(&first);
    assert!(before > 0 && held(&second(&process)) == 0, "{before} replicas on the first disk");

    let (node_word, disk_word) = (id.to_string(), drained.to_string());
    bed.milpa(&["disk", "drain", &node_word, &disk_word]).unwrap();
    assert_eq!(node(&bed, id)["disks_draining"], serde_json::json!([drained]));
    let (mut shown, mut total) = (0, 0);
    bed.wait_until("nothing is left there", EMPTY_MAX, |bed| {
        let Some(task) = drain(bed, (id, drained)) else { return false };
        let done = task["done"].as_u64().unwrap();
        total = task["total"].as_u64().unwrap();
        assert!(done >= shown, "{shown} were done, and now {task}");
        shown = done;
        done == total && disk(bed, id, &first).1 == 0 && held(&first) == 0
    })
    .unwrap();
    assert_eq!(total as usize, before, "each replica was counted");
    wait_for_more(&bed, &load.writer, 20);

    // Its node is in service: it takes what is new, on the other disk.
    assert_eq!(node(&bed, id)["state"], "Active");
    bed.milpa(&["volume", "create", "later"]).unwrap();
    bed.wait_until("the node takes new replicas", EMPTY_MAX, |_| held(&second(&process)) > 0)
        .unwrap();
    assert_eq!(held(&first), 0, "nothing new on a disk that is to go");

    bed.milpa(&["disk", "drain", &node_word, &disk_word, "--undo"]).unwrap();
    assert_eq!(node(&bed, id)["disks_draining"], serde_json::json!([]));
    assert_eq!(drain(&bed, (id, drained)), None);
    let fresh = bed.mount("default").unwrap();
    let large = std::fs::read(fresh.path.join("large")).unwrap();
    assert!(large == load::pattern(3, 48 << 20), "large differs");
    finish(&mut bed, load);
}
