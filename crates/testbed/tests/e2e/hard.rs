//! `milpa mount -o hard`: calls wait for servers for as long as it takes, and who waits can be killed.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use milpa_testbed::load::{pattern, write_synced};
use milpa_testbed::{ServerProcess, Testbed, program, signal_pid};

/// Of the soft mount, which shows that servers are away for longer than its calls may take.
const DEADLINE: Duration = Duration::from_secs(2);
/// Its calls that fail while those of the hard one wait.
const FAILURES: usize = 3;
/// Until a process that was killed is gone.
const DEATH_MAX: Duration = Duration::from_secs(2);
/// Until `milpa umount --force` has ended.
const UMOUNT_MAX: Duration = Duration::from_secs(5);
const BACK_MAX: Duration = Duration::from_secs(30);
const BYTES: usize = 300_000;

/// A process that writes a file and syncs it. Not one of our threads: whoever starts another process closes
/// copies of its descriptors, and that waits for dead servers.
fn copy(source: &Path, target: &Path) -> Child {
    let mut command = Command::new("dd");
    command.arg(format!("if={}", source.display())).arg(format!("of={}", target.display()));
    command.args(["bs=1M", "conv=fsync", "status=none"]).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// What it said, at its end.
fn end(child: Child) -> (Output, String) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

fn signal_all(servers: &[ServerProcess], signal: i32) {
    for server in servers {
        server.signal(signal).unwrap();
    }
}

/// Everybody of these roles stands still; a hard mount waits until they go on.
#[track_caller]
fn check_that_hard_waits(roles: &[&str]) {
    let mut bed = Testbed::start().unwrap();
    let soft = bed.mount_with("default", &["-o", "io_deadline=2"]).unwrap();
    let hard = bed.mount_with("default", &["-o", "hard"]).unwrap();
    let unused = bed.mount_with("default", &["-o", "hard"]).unwrap();
    let source = bed.scratch().join("source");
    std::fs::write(&source, pattern(1, BYTES)).unwrap();
    for mount in [&soft, &hard] {
        write_synced(&mount.path.join("before"), &pattern(1, BYTES)).unwrap();
    }
    // Of their own: the kernel lets one process create in a directory at a time, and nobody who waits for
    // that lock can be killed, whatever the file system.
    for directory in ["one", "other", "third"] {
        std::fs::create_dir(hard.path.join(directory)).unwrap();
    }
    let stopped = bed.processes().iter().filter(|process| roles.contains(&&*process.role));
    let stopped: Vec<ServerProcess> = stopped.cloned().collect();
    signal_all(&stopped, libc::SIGSTOP);

    let mut waiting = copy(&source, &hard.path.join("one/waits"));
    let mut killed = copy(&source, &hard.path.join("other/killed"));
    let mut terminated = copy(&source, &hard.path.join("third/terminated"));
    let began = Instant::now();
    for number in 0..FAILURES {
        let (output, said) = end(copy(&source, &soft.path.join(format!("soft{number}"))));
        let is_eio = !output.status.success() && said.contains("Input/output error");
        assert!(is_eio, "{:?} after {:?}: {said}", output.status, began.elapsed());
    }
    assert!(began.elapsed() > DEADLINE, "a call of the soft mount has waited for its time");
    for child in [&mut waiting, &mut killed, &mut terminated] {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?} after {:?}", began.elapsed());
    }
    let started = Instant::now();
    killed.kill().unwrap();
    bed.wait_until("a process that was killed is gone", DEATH_MAX, |_| {
        killed.try_wait().unwrap().is_some()
    })
    .unwrap();
    // Story: its fsync ended, and the flush of what it left open waited, which nothing interrupts.
    signal_pid(terminated.id() as i32, libc::SIGTERM).unwrap();
    bed.wait_until("a process that was terminated is gone", DEATH_MAX, |_| {
        terminated.try_wait().unwrap().is_some()
    })
    .unwrap();
    println!("{:?} to die, after {:?} without servers", started.elapsed(), began.elapsed());

    // Story: it asked the mount for its process first, and waited for the servers as all do.
    let mut command = Command::new(program().unwrap());
    let mut detached = command.args(["umount", "--force"]).arg(&unused.path).spawn().unwrap();
    let is_gone = bed.wait_until("a mount that is forced away is gone", UMOUNT_MAX, |_| {
        detached.try_wait().unwrap().is_some()
    });
    signal_all(&stopped, libc::SIGCONT);
    is_gone.unwrap();
    assert!(detached.wait().unwrap().success());
    bed.wait_until("what waited is done", BACK_MAX, |_| waiting.try_wait().unwrap().is_some())
        .unwrap();
    let (output, said) = end(waiting);
    assert!(output.status.success(), "{:?}: {said}", output.status);
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("one/waits")).unwrap() == pattern(1, BYTES));
}

#[test]
fn a_hard_mount_waits_for_data_nodes_and_who_waits_can_be_killed() {
    check_that_hard_waits(&["data"]);
}

#[test]
fn a_hard_mount_waits_for_meta_nodes_and_who_waits_can_be_killed() {
    check_that_hard_waits(&["meta"]);
}
