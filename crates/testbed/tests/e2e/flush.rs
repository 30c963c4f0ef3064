//! A reply that promises durability leaves after the flushes that it promises: strace on every node.
//!
//! The tests that kill processes cannot see a missing flush, because the page cache outlives the
//! process. `make test-flush-fault` builds programs that skip flushes and expects this test to fail.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use milpa_testbed::Testbed;
use milpa_testbed::trace::{Call, Kind, Trace, Tracer, Window};
use serde_json::Value;

use crate::pattern;

/// What the log of a node holds when it has heard of our operations: names and bytes of these.
const OVERWRITE: &str = "overwritten-in-place-and-flushed";
const INLINE: &str = "kept-in-the-inode-and-flushed";
const DIRECTORY: &str = "directory-that-was-acknowledged";
const FILE: &str = "file-that-was-acknowledged";
const RENAMED: &str = "name-that-was-acknowledged";

/// Where an extent file has its two header slots (crates/data, `store/format.rs`). After a flush they
/// are written once more, as a hint to recovery that no reply depends on.
const HEADERS: std::ops::Range<u64> = (256 << 20)..(256 << 20) + 1024;

#[test]
fn no_reply_leaves_before_the_flushes_that_it_promises() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let path = |name: &str| mount.path.join(name);
    let layout = |name: &str| bed.json(&["info", &path(name).display().to_string()]).unwrap();
    let nodes = Nodes::attach(&bed);

    // Made before the windows open: the entry that makes a file must not pass for the one that
    // publishes its content.
    let [big, small, inline] = ["big", "small", "inline"].map(|name| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).open(path(name)).unwrap()
    });
    let (big_window, ()) = Window::around(|| write_and_fsync(&big, &pattern(1, 200_000), 0));
    let big_layout = layout("big");
    let middle: Vec<u8> = OVERWRITE.bytes().cycle().take(4096).collect();
    let (overwrite_window, ()) = Window::around(|| write_and_fsync(&big, &middle, 100_000));
    let (small_window, ()) = Window::around(|| write_and_fsync(&small, &pattern(2, 1024), 0));
    let (inline_window, ()) = Window::around(|| write_and_fsync(&inline, INLINE.as_bytes(), 0));
    let synced = open_o_sync(&path("synced"));
    // No fsync: the write itself is what promises.
    let (synced_window, written) = Window::around(|| synced.write_at(&pattern(3, 8192), 0));
    assert_eq!(written.unwrap(), 8192);
    let (mkdir_window, made) = Window::around(|| std::fs::create_dir(path(DIRECTORY)));
    let (create_window, created) = Window::around(|| File::create(path(FILE)));
    let (rename_window, renamed) = Window::around(|| std::fs::rename(path(FILE), path(RENAMED)));
    let (unlink_window, unlinked) = Window::around(|| std::fs::remove_file(path(RENAMED)));
    made.and(renamed).and(unlinked).and(created).unwrap();
    let (small_layout, synced_layout) = (layout("small"), layout("synced"));

    let seen = nodes.detach();
    let mut early = Vec::new();
    let mut check = |what: &str, problems: Vec<String>| {
        early.extend(problems.into_iter().map(|problem| format!("{what}: {problem}")));
    };
    check("fsync of 200 kB", seen.extents(big_window, &big_layout));
    check("fsync of 200 kB", seen.entries_of_extents(big_window, &big_layout));
    check("fsync of 200 kB", seen.logs("meta", big_window, ""));
    check("fsync of an overwrite", seen.logs("data", overwrite_window, OVERWRITE));
    check("fsync of 1 KiB", seen.extents(small_window, &small_layout));
    check("fsync of 1 KiB", seen.logs("meta", small_window, ""));
    check("fsync of an inline file", seen.logs("meta", inline_window, INLINE));
    check("O_SYNC write", seen.extents(synced_window, &synced_layout));
    check("O_SYNC write", seen.logs("meta", synced_window, ""));
    check("mkdir", seen.logs("meta", mkdir_window, DIRECTORY));
    check("create", seen.logs("meta", create_window, FILE));
    check("rename", seen.logs("meta", rename_window, RENAMED));
    check("unlink", seen.logs("meta", unlink_window, RENAMED));
    assert!(early.is_empty(), "replies left too early:\n{}", early.join("\n"));
}

/// With `durability = memory` fsync waits for no data disk: many of them with few flushes prove it.
/// When the owner changes his mind on the live volume, fsync flushes again.
#[test]
fn a_volume_in_memory_waits_for_no_data_disk_until_its_owner_changes_his_mind() {
    const FILES: usize = 60;
    let mut bed = Testbed::start().unwrap();
    bed.milpa(&["volume", "create", "scratch", "--durability", "memory"]).unwrap();
    let status = bed.milpa(&["status"]).unwrap();
    assert!(status.contains("durability = memory"), "{status}");
    let mount = bed.mount("scratch").unwrap();
    let write = |prefix: &str| {
        for number in 0..FILES {
            let file = File::create(mount.path.join(format!("{prefix}{number}"))).unwrap();
            write_and_fsync(&file, &pattern(number as u64, 1024), 0);
        }
    };
    write("warm");
    let nodes = Nodes::attach(&bed);
    let (in_memory, ()) = Window::around(|| write("memory"));
    let seen = nodes.detach();
    for (node, trace) in seen.0.iter().filter(|(node, _)| node.role == "data") {
        let flushes = count(trace, in_memory, |call| call.kind == Kind::Flush);
        assert!(flushes < FILES / 2, "{}: {flushes} flushes for {FILES} fsyncs", node.name);
    }

    bed.milpa(&["volume", "set", "scratch", "--durability", "synced"]).unwrap();
    bed.wait_until("all data nodes flush again", std::time::Duration::from_secs(20), |bed| {
        bed.processes().iter().filter(|process| process.role == "data").all(|process| {
            let gauge = "milpa_data_partitions_from_memory";
            milpa_testbed::metric(&process.http_listen, gauge) == Some(0.0)
        })
    })
    .unwrap();
    let nodes = Nodes::attach(&bed);
    let file = File::create(mount.path.join("synced")).unwrap();
    let (synced, ()) = Window::around(|| write_and_fsync(&file, &pattern(9, 1024), 0));
    let layout = mount.path.join("synced").display().to_string();
    let layout = bed.json(&["info", &layout]).unwrap();
    let seen = nodes.detach();
    let early = [seen.extents(synced, &layout), seen.logs("meta", synced, "")].concat();
    assert!(early.is_empty(), "replies left too early:\n{}", early.join("\n"));
}

fn count(trace: &Trace, window: Window, chosen: impl Fn(&Call) -> bool) -> usize {
    let is_in = |call: &&Call| (window.from_us..=window.to_us).contains(&call.begun_us);
    trace.calls.iter().filter(is_in).filter(|call| chosen(call)).count()
}

fn write_and_fsync(file: &File, bytes: &[u8], offset: u64) {
    file.write_all_at(bytes, offset).unwrap();
    file.sync_all().unwrap();
}

fn open_o_sync(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).custom_flags(libc::O_SYNC).open(path).unwrap()
}

/// The meta and data nodes, each with an strace on it.
struct Nodes(Vec<(Node, Tracer)>);

/// A process that stores.
#[derive(Clone)]
struct Node {
    name: String,
    role: String,
    /// What layouts call it.
    id: u64,
    /// As the kernel names it.
    directory: PathBuf,
}

impl Nodes {
    fn attach(bed: &Testbed) -> Nodes {
        let known = bed.json(&["node", "list"]).unwrap();
        let known = known.as_array().unwrap();
        let stores = bed.processes().iter().filter(|process| process.role != "manager");
        let traced = stores.map(|process| {
            let listed = known.iter().find(|node| node["address"] == process.listen.as_str());
            let node = Node {
                name: process.name.clone(),
                role: process.role.clone(),
                id: listed.and_then(|node| node["id"].as_u64()).unwrap(),
                directory: process.directory.canonicalize().unwrap(),
            };
            let output = bed.scratch().join(format!("{}.trace", node.name));
            (node, Tracer::attach(process.pid().unwrap(), output).unwrap())
        });
        let nodes = Nodes(traced.collect());
        assert_eq!(nodes.0.len(), 6, "three meta nodes and three data nodes");
        nodes
    }

    fn detach(self) -> Seen {
        let detach = |(node, tracer): (Node, Tracer)| (node, tracer.detach().unwrap());
        Seen(self.0.into_iter().map(detach).collect())
    }
}

/// What the nodes did.
struct Seen(Vec<(Node, Trace)>);

impl Seen {
    /// Who did not flush the extents of a file: every member has to.
    fn extents(&self, window: Window, layout: &Value) -> Vec<String> {
        let check = |node: &Node, trace: &Trace, extent: &Path| {
            let content = |call: &Call| call.path == extent && is_content(call.kind);
            trace.all_flushed(window, content).map_err(|problem| format!("{} {problem}", node.name))
        };
        self.members(layout, check)
    }

    /// Who did not flush the names of these extents, all of which are new.
    fn entries_of_extents(&self, window: Window, layout: &Value) -> Vec<String> {
        self.members(layout, |node, trace, extent| {
            let directory = extent.parent().unwrap();
            let is_flushed = trace.has_flush(window, directory);
            let problem = format!("{} made {} without a flush", node.name, extent.display());
            is_flushed.then_some(()).ok_or(problem)
        })
    }

    fn members(
        &self,
        layout: &Value,
        check: impl Fn(&Node, &Trace, &Path) -> Result<(), String>,
    ) -> Vec<String> {
        let segments = layout["segments"].as_array().unwrap();
        assert!(!segments.is_empty(), "no extents: {layout}");
        let mut problems = Vec::new();
        for segment in segments {
            let (partition, extent) = (&segment["partition"], segment["extent"].as_u64().unwrap());
            let file = format!("disk/partitions/{partition}/{extent:016x}.extent");
            let members = segment["members"].as_array().unwrap();
            let is_member = |node: &Node| node.role == "data" && members.contains(&node.id.into());
            let traces: Vec<_> = self.0.iter().filter(|(node, _)| is_member(node)).collect();
            assert_eq!(traces.len(), 3, "not on all data nodes: {segment}");
            let checked = traces
                .iter()
                .filter_map(|(node, trace)| check(node, trace, &node.directory.join(&file)).err());
            problems.extend(checked);
        }
        problems
    }

    /// Whether a majority of the nodes flushed a log entry that shows `text`; who did not, if not.
    fn logs(&self, role: &str, window: Window, text: &str) -> Vec<String> {
        let mut late = BTreeMap::new();
        for (node, trace) in self.0.iter().filter(|(node, _)| node.role == role) {
            let is_entry = |call: &Call| {
                call.path.starts_with(&node.directory)
                    && call.path.extension().is_some_and(|extension| extension == "wal")
                    && call.shown.contains(text)
            };
            if let Err(problem) = trace.one_flushed(window, is_entry) {
                late.insert(node.name.clone(), problem);
            }
        }
        if late.len() <= 1 {
            return Vec::new();
        }
        late.into_iter().map(|(name, problem)| format!("{name} {problem}")).collect()
    }
}

/// Bytes and their checksums, as opposed to the header.
fn is_content(kind: Kind) -> bool {
    matches!(kind, Kind::Write { offset } if !HEADERS.contains(&offset))
}
