//! Disks of a data node that lie (F4, F6) or fail (F9): readers get the right bytes, what is damaged is
//! made whole from another replica, and a disk that failed a write or a flush is used no more.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use milpa_testbed::load::pattern;
use milpa_testbed::{Mounted, Testbed, metric};
use serde_json::Value;

use super::crash::wait_for_more;
use super::fsck::first_segment;
use super::repair::{finish, process_of, start_load};

const HEAL_MAX: Duration = Duration::from_secs(60);
const BLOCK: u64 = 4096;
/// What a file has before its disk lies: an extent of its own.
const BEFORE: usize = 100 * BLOCK as usize;
/// One append. In one write, so that one lie is about all of it.
const MORE: usize = 16 * BLOCK as usize;

/// A file that is being written, and the data node that readers ask first for its bytes.
struct Victim {
    name: String,
    file: File,
    content: Vec<u8>,
    /// A process, and so a disk.
    node: String,
    /// The name of the extent's file on each disk.
    extent: String,
}

impl Victim {
    fn create(bed: &Testbed, mount: &Mounted, name: &str, seed: u64) -> Victim {
        let (content, path) = (pattern(seed, BEFORE), mount.path.join(name));
        let file = File::create(&path).unwrap();
        file.write_all_at(&content, 0).unwrap();
        file.sync_all().unwrap();
        let (_, extent, nodes) = first_segment(bed, &path);
        let first = nodes[(extent % nodes.len() as u64) as usize];
        let (node, extent) = (process_of(bed, first), format!("{extent:016x}.extent"));
        Victim { name: name.to_owned(), file, content, node, extent }
    }

    /// All members acknowledge it.
    fn append_synced(&mut self, seed: u64) {
        let more = pattern(seed, MORE);
        self.file.write_all_at(&more, self.content.len() as u64).unwrap();
        self.file.sync_all().unwrap();
        self.content.extend(more);
    }

    /// The next call of a kind that is about the extent, on the node that readers ask first.
    fn order(&self, bed: &mut Testbed, what: &str) {
        bed.order(&format!("{} {what} {}", self.node, self.extent)).unwrap();
    }

    #[track_caller]
    fn check(&self, mount: &Path) {
        let read = std::fs::read(mount.join(&self.name)).unwrap();
        assert!(read == self.content, "{} differs", self.name);
    }
}

/// A metric of a server.
fn measured(bed: &Testbed, node: &str, name: &str) -> f64 {
    let http = &bed.process(node).unwrap().http_listen;
    metric(http, name).unwrap_or_else(|| panic!("{node} does not tell {name}"))
}

fn repaired(bed: &Testbed, node: &str) -> f64 {
    measured(bed, node, "milpa_data_blocks_repaired_total")
}

/// How often something happened to a disk, as its counts say.
fn counted(bed: &mut Testbed, node: &str, what: &str) -> u64 {
    let counts = bed.order(&format!("{node} counts")).unwrap();
    let found = counts.split(", ").find_map(|count| count.strip_suffix(what));
    found.unwrap_or_else(|| panic!("{what:?} is not in {counts}")).trim().parse().unwrap()
}

fn wait_until_equal(bed: &Testbed) {
    bed.wait_until("replicas equal", HEAL_MAX, |bed| bed.milpa(&["partition", "compare"]).is_ok())
        .unwrap();
}

/// A write that was acknowledged is nowhere (F4), or over other blocks of its file (F6). Who has a
/// checksum in each block's own place notices it at the first read.
#[test]
fn lost_and_misdirected_writes_are_noticed_by_readers_and_repaired() {
    let mut bed = Testbed::start_on_faulty_disks(5, &[]).unwrap();
    let mount = bed.mount("default").unwrap();
    let orders = [("lose-write", "lost writes"), ("misdirect-write", "misdirected writes")];
    let mut victims = Vec::new();
    for (seed, (order, count)) in (1..).zip(orders) {
        let mut victim = Victim::create(&bed, &mount, order, seed);
        let (before, done) = (repaired(&bed, &victim.node), counted(&mut bed, &victim.node, count));
        victim.order(&mut bed, order);
        victim.append_synced(seed + 10);
        let lies = counted(&mut bed, &victim.node, count) - done;
        assert_eq!(lies, 1, "{order} met no write of {}: a void run", victim.extent);
        let fresh = bed.mount("default").unwrap();
        victim.check(&fresh.path);
        let blocks = (MORE as u64 / BLOCK) as f64;
        // What no reader came by is found by a comparison, which reads everything.
        wait_until_equal(&bed);
        let after = repaired(&bed, &victim.node) - before;
        println!("{order}: {after} blocks repaired on {}", victim.node);
        // Of a misdirected write what it landed on, too.
        let least = if order == "lose-write" { blocks } else { 2.0 * blocks };
        assert!(after >= least, "{after} blocks of {order} are repaired, and not {least}");
        assert_eq!(measured(&bed, &victim.node, "milpa_data_disks_fenced"), 0.0);
        victims.push(victim);
    }
    let fresh = bed.mount("default").unwrap();
    victims.iter().for_each(|victim| victim.check(&fresh.path));
    let lost =
        ["data1", "data2", "data3"].map(|n| measured(&bed, n, "milpa_data_lost_bytes_total"));
    assert_eq!(lost, [0.0; 3], "bytes that no replica has");
}

/// Why a disk is out of service, if the node has said so.
fn fenced(bed: &Testbed, node: &str) -> Option<String> {
    let id = bed.node_id(node).ok()?;
    let nodes = bed.json(&["node", "list"]).ok()?;
    let node = nodes.as_array()?.iter().find(|node| node["id"] == id)?.clone();
    node["disks"][0]["fenced"].as_str().map(str::to_owned)
}

fn warnings(bed: &Testbed) -> Option<Vec<Value>> {
    bed.json(&["status"]).ok()?["warnings"].as_array().cloned()
}

/// F9: a read that fails costs its block a repair. A write or a flush that fails costs the node its disk: nobody
/// knows what it holds, until a start reads it. Programs notice nothing.
#[test]
fn eio_of_a_read_is_repaired_and_of_a_write_or_a_flush_fences_the_disk() {
    let mut bed = Testbed::start_on_faulty_disks(6, &[]).unwrap();
    let load = start_load(&mut bed);
    let mut victim = Victim::create(&bed, &load.mount, "victim", 1);
    let node = victim.node.clone();
    let errors = counted(&mut bed, &node, "errors");
    // A read of several blocks, then that of the first one by itself.
    let fails = [0; 2].map(|_| victim.order(&mut bed, "fail-read")).len() as u64;
    let before = repaired(&bed, &node);
    let fresh = bed.mount("default").unwrap();
    victim.check(&fresh.path);
    assert_eq!(counted(&mut bed, &node, "errors") - errors, fails, "nobody read there: a void run");
    bed.wait_until("its block is repaired", HEAL_MAX, |bed| repaired(bed, &node) > before).unwrap();
    assert_eq!(fenced(&bed, &node), None);

    for (seed, order) in (2..).zip(["fail-write", "fail-sync"]) {
        let own = format!("victim of {order}");
        victim = Victim::create(&bed, &load.mount, &own, seed);
        let node = victim.node.clone();
        victim.order(&mut bed, order);
        victim.append_synced(seed + 10);
        bed.wait_until("its disk is out of service", HEAL_MAX, |bed| fenced(bed, &node).is_some())
            .unwrap();
        println!("{order}: {node}: {}", fenced(&bed, &node).unwrap());
        assert_eq!(measured(&bed, &node, "milpa_data_disks_fenced"), 1.0);
        let fresh = bed.mount("default").unwrap();
        victim.check(&fresh.path);
        wait_for_more(&bed, &load.writer, 20);
        // Not before a start: what was not flushed is not flushed again.
        assert!(fenced(&bed, &node).is_some());
        bed.process(&node).unwrap().kill().unwrap();
        bed.wait_until("in service again", HEAL_MAX, |bed| {
            warnings(bed).is_some_and(|warnings| warnings.is_empty())
        })
        .unwrap();
        victim.check(&fresh.path);
    }
    finish(&mut bed, load);
}
