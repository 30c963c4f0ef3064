//! A test that is killed leaves nothing behind.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use milpa_testbed::{Layout, Machines};

/// What the one that is killed says once all of it is there.
const STANDS: &str = "stands on ";

#[test]
#[ignore = "is run, and killed, by `a_killed_test_leaves_nothing`"]
fn is_killed() {
    let layout = Layout { faulty_disks: Some(1), ..Layout::alike(3) };
    let mut machines = Machines::start(layout).unwrap();
    machines.milpa(&["volume", "create", "killed"]).unwrap();
    let mounted = machines.mount(machines.client(1), "killed").unwrap();
    std::fs::write(mounted.path.join("file"), "bytes").unwrap();
    println!("{STANDS}{}", machines.scratch().display());
    std::io::stdout().flush().unwrap();
    std::thread::park_timeout(Duration::from_secs(60));
}

#[test]
fn a_killed_test_leaves_nothing() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "--nocapture", "ground::is_killed"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut said = lines.filter_map(|line| Some(line.split_once(STANDS)?.1.to_owned()));
    let ground = said.next().unwrap();
    assert!(!processes_on(&ground).is_empty() && !mounts_on(&ground).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    let is_clear = || !Path::new(&ground).exists() && processes_on(&ground).is_empty();
    while !is_clear() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!Path::new(&ground).exists(), "{ground}");
    assert_eq!(processes_on(&ground), Vec::<String>::new());
    assert_eq!(mounts_on(&ground), Vec::<String>::new());
    assert_eq!(namespaces_of(child.id()), Vec::<String>::new());
}

/// The command lines with this directory in them.
fn processes_on(ground: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(ground)).collect()
}

fn mounts_on(ground: &str) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    mounts.lines().filter(|line| line.contains(ground)).map(str::to_owned).collect()
}

fn namespaces_of(pid: u32) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&format!("milpa-{pid}-"))).collect()
}
