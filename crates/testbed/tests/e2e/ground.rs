//! A test that is killed leaves nothing behind.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use milpa_testbed::{Layout, Machines};

/// Set for the one that is to be killed.
const VICTIM: &str = "MILPA_GROUND_VICTIM";
/// What it says once all of it is there.
const STANDS: &str = "stands on ";
const CLEARED_MAX: Duration = Duration::from_secs(60);

/// The test runs itself once more, with everything that a test bed can leave, and kills that.
#[test]
fn a_killed_test_leaves_nothing() {
    if std::env::var_os(VICTIM).is_some() {
        return stand_and_wait();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", "ground::a_killed_test_leaves_nothing"]);
    command.env(VICTIM, "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut victim = command.spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut said = lines.filter_map(|line| Some(line.split_once(STANDS)?.1.to_owned()));
    let ground = said.next().unwrap();
    assert!(!processes_on(&ground).is_empty() && !mounts_on(&ground).is_empty());
    assert!(!namespaces_of(victim.id()).is_empty());
    victim.kill().unwrap();
    victim.wait().unwrap();
    // Who clears the ground has the same standard error, and complains there.
    let mut complaints = victim.stderr.take().unwrap();
    let (told, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = complaints.read_to_string(&mut text);
        told.send(read.map(|_| text))
    });
    let complaints = heard.recv_timeout(CLEARED_MAX).expect("nobody clears the ground").unwrap();
    assert!(!Path::new(&ground).exists(), "{complaints}");
    assert_eq!(processes_on(&ground), Vec::<String>::new(), "{complaints}");
    assert_eq!(mounts_on(&ground), Vec::<String>::new(), "{complaints}");
    assert_eq!(namespaces_of(victim.id()), Vec::<String>::new(), "{complaints}");
}

/// Machines, disks and a mount, until somebody kills us.
fn stand_and_wait() {
    let layout = Layout { faulty_disks: Some(1), ..Layout::alike(3) };
    let mut machines = Machines::start(layout).unwrap();
    machines.milpa(&["volume", "create", "killed"]).unwrap();
    let mounted = machines.mount(machines.client(1), "killed").unwrap();
    std::fs::write(mounted.path.join("file"), "bytes").unwrap();
    println!("{STANDS}{}", machines.scratch().display());
    std::io::stdout().flush().unwrap();
    std::thread::park_timeout(CLEARED_MAX);
}

/// The command lines with this directory in them. A process that has ended has none.
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
