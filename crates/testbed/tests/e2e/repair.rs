//! What is lost for good is made again elsewhere, and what is to go goes without a gap.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use milpa_testbed::faults::rot_log;
use milpa_testbed::load::{self, Writer};
use milpa_testbed::{Mounted, ServerProcess, Testbed};
use serde_json::Value;

use super::crash::{check_files, wait_for_more};

const WRITER: &str = env!("CARGO_BIN_EXE_milpa-writer");

/// RELIABILITY: after a single failure no call waits longer.
const STALL_MAX: Duration = Duration::from_secs(10);
/// Until all is as it should be; generous, as other processes share the machine.
const HEAL_MAX: Duration = Duration::from_secs(180);

/// A writer on a mount of its own.
pub(crate) struct Load {
    pub writer: Writer,
    pub mount: Mounted,
}

pub(crate) fn start_load(bed: &mut Testbed) -> Load {
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("files");
    std::fs::create_dir(&directory).unwrap();
    let load = Load { writer: Writer::start(WRITER, &directory).unwrap(), mount };
    wait_for_more(bed, &load.writer, 20);
    load
}

/// Ends the load; all that it wrote is there for a mount that has cached nothing, and on all
/// replicas alike.
#[track_caller]
pub(crate) fn finish(bed: &mut Testbed, load: Load) {
    let (count, longest) = load.writer.finish().unwrap();
    println!("{count} files written and synced; the longest took {longest:?}");
    assert!(longest < STALL_MAX, "one file took {longest:?}");
    let fresh = bed.mount("default").unwrap();
    check_files(&fresh.path.join("files"), count);
    bed.wait_until("replicas equal", Duration::from_secs(60), |bed| {
        bed.milpa(&["partition", "compare"]).is_ok()
    })
    .unwrap();
}

pub(crate) fn partitions(bed: &Testbed, kind: &str) -> Vec<Value> {
    let Ok(list) = bed.json(&["partition", "list"]) else { return Vec::new() };
    list["Partitions"][kind].as_array().cloned().unwrap_or_default()
}

/// The meta partition of the volumes' first inodes, once somebody leads it.
pub(crate) fn first_meta_partition(bed: &Testbed) -> Value {
    let mut found = Value::Null;
    bed.wait_until("the first meta partition is led", HEAL_MAX, |bed| {
        let first = partitions(bed, "meta").into_iter().find(|it| it["slot"] == 0);
        found = first.unwrap_or_default();
        found["leader"].is_u64()
    })
    .unwrap();
    found
}

/// Whether every partition has three members, and nothing on `gone`.
fn is_whole_without(bed: &Testbed, kind: &str, gone: u64) -> bool {
    let partitions = partitions(bed, kind);
    let is_whole = |partition: &Value| {
        let has = |field: &str, node: u64| {
            partition[field].as_array().is_some_and(|list| list.contains(&node.into()))
        };
        let members = partition["members"].as_array().map_or(0, Vec::len);
        members == 3 && !has("members", gone) && !has("replicas", gone)
    };
    !partitions.is_empty() && partitions.iter().all(is_whole) && tasks(bed).is_empty()
}

pub(crate) fn tasks(bed: &Testbed) -> Vec<Value> {
    let list = bed.json(&["task", "list"]);
    list.ok().and_then(|list| list.as_array().cloned()).unwrap_or_default()
}

/// The process and all its files are gone. It is stopped first: its files must go before the
/// supervisor sees it die, or it would be started again.
fn lose(process: &ServerProcess) {
    let pid = process.signal(libc::SIGSTOP).unwrap();
    std::fs::remove_dir_all(&process.directory).unwrap();
    milpa_testbed::kill(pid).unwrap();
}

#[test]
fn a_data_node_lost_for_good_is_replaced_under_load() {
    let mut bed = Testbed::start_impatient(&["--nodes", "5"]).unwrap();
    let load = start_load(&mut bed);
    wait_for_more(&bed, &load.writer, 100);
    // One that holds something.
    let names = ["data1", "data2", "data3", "data4", "data5"];
    let holds = |name: &&&str| {
        let id = bed.node_id(name).unwrap();
        partitions(&bed, "data").iter().any(|p| p["primary"] == id)
    };
    let name = *names.iter().find(holds).unwrap();
    let (lost, process) = (bed.node_id(name).unwrap(), bed.process(name).unwrap().clone());
    lose(&process);
    let started = Instant::now();
    let mut seen = Vec::new();
    bed.wait_until("fully redundant again", HEAL_MAX, |bed| {
        seen.extend(tasks(bed).iter().map(|task| task["reason"].to_string()));
        is_whole_without(bed, "data", lost)
    })
    .unwrap();
    println!("redundant again after {:?}", started.elapsed());
    assert!(seen.iter().any(|reason| reason.contains("is dead")), "{seen:?}");
    wait_for_more(&bed, &load.writer, 20);
    finish(&mut bed, load);
}

/// F9: a flush fails, at a server of each kind. None is tried again: a data node goes on without the disk, whose
/// replicas are made again elsewhere; a meta node and a manager end, and are started again on what their disks
/// really hold.
#[test]
fn a_disk_that_fails_is_out_of_service_and_its_replicas_are_made_again() {
    let mut bed = Testbed::start_on_faulty_disks(9, &["--nodes", "4"]).unwrap();
    let load = start_load(&mut bed);
    let primary = partitions(&bed, "data")[0]["primary"].as_u64().unwrap();
    let name = process_of(&bed, primary);
    bed.order(&format!("{name} fail-sync")).unwrap();
    let started = Instant::now();
    bed.wait_until("out of service", Duration::from_secs(30), |bed| {
        bed.json(&["node", "list"]).is_ok_and(|nodes| {
            let is_it = |node: &&Value| node["id"] == primary;
            let node = nodes.as_array().and_then(|nodes| nodes.iter().find(is_it));
            node.is_some_and(|node| !node["disks"][0]["fenced"].is_null())
        })
    })
    .unwrap();
    bed.wait_until("fully redundant again", HEAL_MAX, |bed| is_whole_without(bed, "data", primary))
        .unwrap();
    println!("redundant again after {:?}", started.elapsed());

    for name in ["meta1", "manager1"] {
        let process = bed.process(name).unwrap().clone();
        let before = process.pid().unwrap();
        bed.order(&format!("{name} fail-sync")).unwrap();
        bed.wait_until("started again", Duration::from_secs(30), |_| {
            process.pid().is_some_and(|pid| pid != before)
        })
        .unwrap();
        wait_for_more(&bed, &load.writer, 20);
    }
    // A start takes the disk into service again.
    bed.process(&name).unwrap().kill().unwrap();
    bed.wait_until("back in service", Duration::from_secs(30), |bed| {
        bed.json(&["status"])
            .is_ok_and(|status| status["warnings"].as_array().is_some_and(Vec::is_empty))
    })
    .unwrap();
    wait_for_more(&bed, &load.writer, 20);
    finish(&mut bed, load);
}

/// A server gets a new disk and starts with its settings: nobody waits for what it was until that counts as
/// dead, which takes five minutes.
#[test]
fn a_server_that_is_set_up_anew_takes_its_old_places_at_once() {
    let mut bed = Testbed::start().unwrap();
    let load = start_load(&mut bed);
    wait_for_more(&bed, &load.writer, 50);
    let (lost, process) = (bed.node_id("data1").unwrap(), bed.process("data1").unwrap().clone());
    let pid = process.signal(libc::SIGSTOP).unwrap();
    for entry in std::fs::read_dir(&process.directory).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => std::fs::remove_dir_all(entry.path()).unwrap(),
            false if entry.file_name() == "config.toml" => {}
            false => std::fs::remove_file(entry.path()).unwrap(),
        }
    }
    milpa_testbed::kill(pid).unwrap();
    bed.wait_until("fully redundant again", Duration::from_secs(60), |bed| {
        is_whole_without(bed, "data", lost)
    })
    .unwrap();
    bed.milpa(&["node", "remove", &lost.to_string(), "-y"]).unwrap();
    wait_for_more(&bed, &load.writer, 20);
    finish(&mut bed, load);
}

/// One of three is away, and another one is lost for good: the third has every acknowledged byte, also
/// those that were overwritten in place. It goes on alone, and takes in the one that comes back.
#[test]
fn the_last_of_three_goes_on_alone_and_takes_in_who_comes_back() {
    let mut bed = Testbed::start_impatient(&["--nodes", "3"]).unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("files");
    std::fs::create_dir(&directory).unwrap();
    let write = |numbers: std::ops::Range<u64>| {
        for number in numbers {
            load::write_synced(&load::path(&directory, number), &load::content(number)).unwrap();
        }
    };
    let mut changed = load::pattern(1, 300_000);
    load::write_synced(&mount.path.join("changed"), &changed).unwrap();
    write(0..20);
    let ids = ["data1", "data2", "data3"].map(|name| bed.node_id(name).unwrap());
    let all_have = |bed: &Testbed, wanted: &[u64]| {
        let have = |partition: &Value| {
            let members = partition["members"].as_array().into_iter().flatten();
            let mut members: Vec<u64> = members.filter_map(Value::as_u64).collect();
            members.sort_unstable();
            members == wanted
        };
        let partitions = partitions(bed, "data");
        !partitions.is_empty() && partitions.iter().all(have)
    };
    let wait = |bed: &Testbed, what: &str, wanted: &[usize]| {
        let mut wanted: Vec<u64> = wanted.iter().map(|index| ids[*index]).collect();
        wanted.sort_unstable();
        bed.wait_until(what, HEAL_MAX, |bed| all_have(bed, &wanted)).unwrap();
    };

    let away = bed.process("data1").unwrap().clone();
    away.signal(libc::SIGSTOP).unwrap();
    wait(&bed, "two members", &[1, 2]);
    write(20..40);
    let file = std::fs::File::options().write(true).open(mount.path.join("changed")).unwrap();
    changed[100_000..150_000].copy_from_slice(&load::pattern(2, 50_000));
    std::os::unix::fs::FileExt::write_all_at(&file, &changed[100_000..150_000], 100_000).unwrap();
    file.sync_all().unwrap();
    lose(&bed.process("data2").unwrap().clone());
    wait(&bed, "the survivor alone", &[2]);
    let check = |bed: &mut Testbed, count| {
        let fresh = bed.mount("default").unwrap();
        check_files(&fresh.path.join("files"), count);
        assert!(std::fs::read(fresh.path.join("changed")).unwrap() == changed);
    };
    check(&mut bed, 40);

    away.signal(libc::SIGCONT).unwrap();
    wait(&bed, "two members again", &[0, 2]);
    write(40..60);
    check(&mut bed, 60);
    bed.wait_until("replicas equal", Duration::from_secs(60), |bed| {
        bed.milpa(&["partition", "compare"]).is_ok()
    })
    .unwrap();
}

/// The name of the process that is a node.
pub(crate) fn process_of(bed: &Testbed, node: u64) -> String {
    let is_it = |name: &&str| bed.node_id(name) == Ok(node);
    let names = bed.processes().iter().map(|process| process.name.as_str());
    names.filter(|name| !name.starts_with("manager")).find(|n| is_it(n)).unwrap().to_owned()
}

/// A slow repair, so that there is a middle of it: the node that makes the replica is killed there,
/// then the primary that sends it, then the manager that leads. Each goes on where it was.
#[test]
fn a_repair_survives_the_death_of_everybody_who_has_part_in_it() {
    let mut bed = Testbed::start_tuned(&["--nodes", "4"], |process, table| {
        let set = |table: &mut toml::Table, key: &str, value: i64| {
            table.insert(key.to_owned(), toml::Value::Integer(value));
        };
        match process.role.as_str() {
            "manager" => {
                let policy = table.get_mut("policy").and_then(|policy| policy.as_table_mut());
                set(policy.unwrap(), "dead_after_ms", 5_000);
            }
            "data" => set(table, "repair_bytes_per_second", 1 << 20),
            _ => {}
        }
    })
    .unwrap();
    let mount = bed.mount("default").unwrap();
    let bytes = load::pattern(7, 24 << 20);
    load::write_synced(&mount.path.join("large"), &bytes).unwrap();
    // The partition with the bytes, and a member of it.
    bed.wait_until("counted", Duration::from_secs(20), |bed| {
        partitions(bed, "data").iter().any(|p| p["used_bytes"].as_u64() > Some(20 << 20))
    })
    .unwrap();
    let holder = |bed: &Testbed| {
        let all = partitions(bed, "data");
        all.into_iter().max_by_key(|partition| partition["used_bytes"].as_u64()).unwrap()
    };
    let partition = holder(&bed);
    let (id, lost) = (partition["id"].clone(), partition["members"][2].as_u64().unwrap());
    lose(&bed.process(&process_of(&bed, lost)).unwrap().clone());
    let running = |bed: &Testbed| tasks(bed).into_iter().find(|task| task["partition"] == id);
    let in_the_middle = |bed: &Testbed, least: u64| {
        bed.wait_until("it is being filled", HEAL_MAX, |bed| {
            running(bed).is_some_and(|task| task["done"].as_u64() > Some(least))
        })
        .unwrap();
    };
    let leader = |bed: &Testbed| {
        let status = bed.json(&["status"]).unwrap();
        format!("manager{}", status["leader"])
    };
    in_the_middle(&bed, 1 << 20);
    let task = running(&bed).unwrap();
    let owner = process_of(&bed, task["owner"].as_u64().unwrap());
    bed.process(&owner).unwrap().kill().unwrap();
    in_the_middle(&bed, 4 << 20);
    let primary = process_of(&bed, holder(&bed)["primary"].as_u64().unwrap());
    bed.process(&primary).unwrap().kill().unwrap();
    bed.process(&leader(&bed)).unwrap().kill().unwrap();
    bed.wait_until("another manager leads", Duration::from_secs(20), |bed| {
        running(bed).is_some_and(|now| now["id"] == task["id"])
    })
    .unwrap();
    bed.wait_until("fully redundant again", HEAL_MAX, |bed| is_whole_without(bed, "data", lost))
        .unwrap();
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("large")).unwrap() == bytes);
    bed.wait_until("replicas equal", Duration::from_secs(60), |bed| {
        bed.milpa(&["partition", "compare"]).is_ok()
    })
    .unwrap();
}

#[test]
fn a_data_node_is_drained_in_use_and_removed() {
    let mut bed = Testbed::start_with(&["--nodes", "5"]).unwrap();
    let load = start_load(&mut bed);
    wait_for_more(&bed, &load.writer, 100);
    // So much in one partition that the others are elsewhere long before it: then there is progress to be seen.
    let large = std::fs::File::create(load.mount.path.join("large")).unwrap();
    large.write_all_at(&vec![7; 100 << 20], 0).unwrap();
    large.sync_all().unwrap();
    let used = |partition: &Value| partition["used_bytes"].as_u64().unwrap_or(0);
    let fullest = |bed: &Testbed| partitions(bed, "data").into_iter().max_by_key(used);
    bed.wait_until("the managers know of it", HEAL_MAX, |bed| {
        fullest(bed).is_some_and(|partition| used(&partition) >= 50 << 20)
    })
    .unwrap();
    let primary = fullest(&bed).unwrap()["primary"].as_u64().unwrap();
    let node = primary.to_string();
    let refused = bed.milpa(&["node", "remove", &node, "-y"]).unwrap_err();
    assert!(refused.contains("is in service and holds"), "{refused}");
    bed.milpa(&["node", "drain", &node]).unwrap();
    let (mut shown, mut left) = (0, 0);
    bed.wait_until("nothing left there", HEAL_MAX, |bed| {
        let list = tasks(bed);
        let drain = list.iter().find(|task| task["kind"] == "Drain");
        shown = shown.max(drain.and_then(|task| task["done"].as_u64()).unwrap_or(0));
        left = left.max(drain.and_then(|task| task["left_ms"].as_u64()).unwrap_or(0));
        let is_done = drain.is_some_and(|task| task["done"] == task["total"]);
        is_done && used_bytes(bed, primary) == Some(0)
    })
    .unwrap();
    assert!(shown > 0, "progress was shown");
    assert!(left > 0, "and how long it would take");
    wait_for_more(&bed, &load.writer, 20);
    // Its process may go on for a moment: it is told that it is not one of us any more.
    bed.milpa(&["node", "remove", &node, "-y"]).unwrap();
    bed.wait_until("forgotten", Duration::from_secs(10), |bed| used_bytes(bed, primary).is_none())
        .unwrap();
    assert!(is_whole_without(&bed, "data", primary));
    finish(&mut bed, load);
}

/// What a node's disks hold, if the node is known.
fn used_bytes(bed: &Testbed, id: u64) -> Option<u64> {
    let nodes = bed.json(&["node", "list"]).ok()?;
    let node = nodes.as_array()?.iter().find(|node| node["id"] == id)?;
    Some(node["disks"].as_array()?.iter().filter_map(|disk| disk["used_bytes"].as_u64()).sum())
}

#[test]
fn a_meta_node_lost_for_good_is_replaced_under_load() {
    let mut bed = Testbed::start_impatient(&["--meta-nodes", "4"]).unwrap();
    let load = start_load(&mut bed);
    let held = partitions(&bed, "meta")[0]["members"][0].as_u64().unwrap();
    let names = ["meta1", "meta2", "meta3", "meta4"];
    let name = *names.iter().find(|name| bed.node_id(name) == Ok(held)).unwrap();
    let process = bed.process(name).unwrap().clone();
    lose(&process);
    let started = Instant::now();
    bed.wait_until("all replicas again", HEAL_MAX, |bed| is_whole_without(bed, "meta", held))
        .unwrap();
    println!("all replicas again after {:?}", started.elapsed());
    wait_for_more(&bed, &load.writer, 20);
    finish(&mut bed, load);
}

/// F5 with as few meta nodes as there can be: nobody has to bring a fourth one.
#[test]
fn meta_replicas_whose_log_has_rotted_are_made_again_where_they_were() {
    let mut bed = Testbed::start().unwrap();
    let load = start_load(&mut bed);
    wait_for_more(&bed, &load.writer, 100);
    let process = bed.process("meta2").unwrap().clone();
    bed.pause_supervisor(true).unwrap();
    process.kill().unwrap();
    let flipped = rot_log(&process.directory.join("raft")).unwrap();
    assert!(flipped > 0);
    bed.pause_supervisor(false).unwrap();
    let warns = |bed: &Testbed, text: &str| {
        bed.json(&["status"]).is_ok_and(|status| status["warnings"].to_string().contains(text))
    };
    let says = " has 2 of 3 replicas in service";
    bed.wait_until("it is noticed", Duration::from_secs(60), |bed| warns(bed, says)).unwrap();
    let started = Instant::now();
    bed.wait_until("whole again", HEAL_MAX, |bed| !warns(bed, says) && tasks(bed).is_empty())
        .unwrap();
    println!("whole again after {:?}", started.elapsed());
    wait_for_more(&bed, &load.writer, 20);
    // It counts.
    bed.process("meta1").unwrap().kill().unwrap();
    wait_for_more(&bed, &load.writer, 20);
    finish(&mut bed, load);
}

/// A manager ended until an operator emptied its directory.
#[test]
fn a_manager_whose_log_has_rotted_takes_part_again() {
    let bed = Testbed::start().unwrap();
    let process = bed.process("manager1").unwrap().clone();
    bed.pause_supervisor(true).unwrap();
    process.kill().unwrap();
    assert!(rot_log(&process.directory.join("raft")).unwrap() > 0);
    bed.pause_supervisor(false).unwrap();
    let aside = process.directory.join("raft.damaged.1");
    let rejoining = process.directory.join("REJOINING");
    bed.wait_until("it counts again", HEAL_MAX, |_| aside.exists() && !rejoining.exists()).unwrap();
    // With one of the others away it is half of the majority.
    bed.pause_supervisor(true).unwrap();
    bed.process("manager2").unwrap().kill().unwrap();
    bed.wait_until("the managers decide", HEAL_MAX, |bed| {
        bed.milpa(&["volume", "create", "later"]).is_ok()
    })
    .unwrap();
    bed.pause_supervisor(false).unwrap();
}

/// Who has mounted a volume needs no manager to read and write, for as long as nothing else fails.
#[test]
fn open_volumes_go_on_while_all_managers_are_dead() {
    let mut bed = Testbed::start().unwrap();
    let load = start_load(&mut bed);
    let reader = bed.mount("default").unwrap();
    let managers = ["manager1", "manager2", "manager3"];
    bed.pause_supervisor(true).unwrap();
    for name in managers {
        bed.process(name).unwrap().kill().unwrap();
    }
    let before = load.writer.acknowledged();
    wait_for_more(&bed, &load.writer, 100);
    let files: Vec<_> = std::fs::read_dir(reader.path.join("files")).unwrap().collect();
    assert!(files.len() as u64 >= before + 100, "{before}, {}", files.len());
    for file in files {
        std::fs::read(file.unwrap().path()).unwrap();
    }
    bed.pause_supervisor(false).unwrap();
    bed.wait_until("managers are back", Duration::from_secs(30), |bed| {
        bed.json(&["status"]).is_ok()
    })
    .unwrap();
    finish(&mut bed, load);
}

#[test]
fn a_meta_node_that_stops_cleanly_hands_over_first() {
    let mut bed = Testbed::start().unwrap();
    let load = start_load(&mut bed);
    for name in ["meta1", "meta2", "meta3"] {
        let process = bed.process(name).unwrap().clone();
        let before = process.signal(libc::SIGTERM).unwrap();
        bed.wait_until("restarted", Duration::from_secs(20), |_| {
            process.pid().is_some_and(|pid| pid != before)
        })
        .unwrap();
        let log = bed.data().join(format!("logs/{name}.log"));
        let log = std::fs::read_to_string(log).unwrap();
        assert!(log.contains("leaderships handed over still_led=0"), "{name} left leaders behind");
        wait_for_more(&bed, &load.writer, 50);
    }
    finish(&mut bed, load);
}
