//! The supervisor of an embedded cluster: keeps its processes running.
//!
//! It starts what does not run, adopts what an earlier supervisor left running, and starts again
//! what ends. Killing the supervisor leaves its children running; stopping it (SIGTERM, which is
//! what `milpa down` sends) stops them, the managers first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use milpa_types::Role;
use tracing::{error, info, warn};

use super::embedded::Process;
use super::process::{self, Running};
use super::{CLUSTER_FILE, Cluster};
use crate::failure::{Failure, Outcome};

/// The file with the supervisor's pid, in the data directory.
const PID_FILE: &str = "SUPERVISOR";

/// Time for a process to end by itself when the cluster is stopped.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How soon a stop is noticed by those that watch a process.
const WATCH: Duration = Duration::from_millis(100);
/// A process that ends sooner than this after its start is started again with a pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(2);
/// The longest pause between two starts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The supervisor that runs for this data directory.
pub fn running(directory: &Path) -> Option<Running> {
    let pid = std::fs::read_to_string(directory.join(PID_FILE)).ok()?;
    Running::find(pid.trim().parse().ok()?, &["supervise", &directory.to_string_lossy()])
}

/// Runs until it is told to stop; then stops every process of the cluster.
pub fn run(directory: &Path) -> Outcome {
    let cluster = Cluster::read(&directory.join(CLUSTER_FILE))?;
    let _lock = lock(directory)?;
    let io = |e: std::io::Error| Failure::user("cannot supervise the cluster").because(&e);
    std::fs::write(directory.join(PID_FILE), format!("{}\n", std::process::id())).map_err(io)?;
    let logs: PathBuf = directory.join("logs");
    let (managers, others): (Vec<_>, Vec<_>) =
        cluster.file.process.iter().cloned().partition(|process| process.role == Role::Manager);
    // Managers would take the nodes that end first for lost, and start again with two copies.
    let managers = Watched::start(managers, &logs);
    let others = Watched::start(others, &logs);
    wait_for_stop()?;
    info!("stopping the cluster");
    managers.stop();
    others.stop();
    let _ = std::fs::remove_file(directory.join(PID_FILE));
    Ok(())
}

/// Processes that are kept running, and end together.
struct Watched {
    stop: Arc<AtomicBool>,
    watchers: Vec<JoinHandle<()>>,
}

impl Watched {
    fn start(processes: Vec<Process>, logs: &Path) -> Watched {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |process: Process| {
            let (logs, stop) = (logs.to_owned(), Arc::clone(&stop));
            std::thread::spawn(move || keep_running(&process, &logs, &stop))
        };
        let watchers = processes.into_iter().map(start).collect();
        Watched { stop, watchers }
    }

    /// Returns when all have ended.
    fn stop(self) {
        self.stop.store(true, Ordering::Release);
        for watcher in self.watchers {
            if watcher.join().is_err() {
                error!("a watcher panicked");
            }
        }
    }
}

/// Only one supervisor for a directory, however many are started at once.
fn lock(directory: &Path) -> Outcome<std::fs::File> {
    let path = directory.join("SUPERVISOR.lock");
    let file = std::fs::File::create(&path)
        .map_err(|e| Failure::user(format!("cannot create {}", path.display())).because(&e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(Failure::user("the cluster already has a supervisor")),
    }
}

fn wait_for_stop() -> Outcome {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |e: std::io::Error| Failure::user("cannot wait for signals").because(&e);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed)?.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}

fn keep_running(process: &Process, logs: &Path, stop: &AtomicBool) {
    let mut pause = Duration::ZERO;
    while !stop.load(Ordering::Acquire) {
        let started = Instant::now();
        if let Some(running) = process::running(process) {
            info!(name = process.name, pid = running.pid, "adopted");
            watch(&running, stop);
        } else {
            match process::start(process, logs) {
                Ok((mut child, running)) => {
                    info!(name = process.name, pid = running.pid, "started");
                    watch(&running, stop);
                    match child.wait() {
                        Ok(status) => info!(name = process.name, %status, "ended"),
                        Err(error) => {
                            warn!(name = process.name, %error, "cannot learn how it ended")
                        }
                    }
                }
                Err(error) => error!(name = process.name, %error, "cannot be started"),
            }
        }
        let short_lived = started.elapsed() < HEALTHY_AFTER;
        pause = if short_lived { (pause * 2).clamp(WATCH, PAUSE_MAX) } else { Duration::ZERO };
        sleep_unless_stopped(pause, stop);
    }
}

/// Returns when the process has ended, by itself or because the cluster is being stopped.
fn watch(running: &Running, stop: &AtomicBool) {
    while !running.wait(WATCH) {
        if stop.load(Ordering::Acquire) {
            if !running.stop(STOP_GRACE) {
                warn!(pid = running.pid, "did not end by itself and was killed");
            }
            return;
        }
    }
}

fn sleep_unless_stopped(pause: Duration, stop: &AtomicBool) {
    let until = Instant::now() + pause;
    while Instant::now() < until && !stop.load(Ordering::Acquire) {
        std::thread::sleep(WATCH.min(pause));
    }
}
