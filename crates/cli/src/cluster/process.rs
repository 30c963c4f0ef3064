//! One process of an embedded cluster: started, found again, watched and stopped.
//!
//! A process is known by the pid file in its directory *and* by its command line, which names its
//! role and directory: a number alone may long belong to somebody else. It is watched through a
//! pidfd, which works for processes that an earlier supervisor started as well.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::embedded::Process;

const PID_FILE: &str = "PID";

/// A log that has grown past this is kept as `NAME.log.1` when its process starts again.
const LOG_BYTES_MAX: u64 = 64 << 20;

/// A running process.
#[derive(Debug)]
pub struct Running {
    /// Its pid.
    pub pid: i32,
    descriptor: OwnedFd,
}

impl Running {
    /// The process with this pid, if it runs and its command line holds all of `words`.
    pub fn find(pid: i32, words: &[&str]) -> Option<Running> {
        // The descriptor first: from then on the pid cannot change its owner unnoticed.
        let descriptor = pidfd_open(pid).ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let arguments: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        let running = Running { pid, descriptor };
        let matches = words.iter().all(|word| arguments.contains(&word.as_bytes()));
        (matches && running.is_alive()).then_some(running)
    }

    /// Whether it still runs. A zombie does not.
    pub fn is_alive(&self) -> bool {
        !self.wait(Duration::ZERO)
    }

    /// Waits for its end; false when the time is up first.
    pub fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            match poll_readable(&self.descriptor, rest) {
                Ok(ended) => return ended,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
    }

    /// Sends a signal to this process and no other.
    pub fn signal(&self, signal: i32) {
        // A process that has just ended is what the caller wants anyway.
        let _ = pidfd_send_signal(&self.descriptor, signal);
    }

    /// Asks it to end, and makes it when it has not within `grace`. True when it ended by itself.
    pub fn stop(&self, grace: Duration) -> bool {
        self.signal(libc::SIGTERM);
        // A stopped process cannot end by itself.
        self.signal(libc::SIGCONT);
        if self.wait(grace) {
            return true;
        }
        self.signal(libc::SIGKILL);
        self.wait(Duration::from_secs(5));
        false
    }
}

/// The process that runs for this entry, if one does.
pub fn running(process: &Process) -> Option<Running> {
    let pid = std::fs::read_to_string(process.directory.join(PID_FILE)).ok()?;
    let directory = process.directory.to_string_lossy();
    Running::find(pid.trim().parse().ok()?, &[process.role.as_str(), &directory])
}

/// Starts the process, with its output appended to its log. It survives its parent.
pub fn start(process: &Process, logs: &Path) -> io::Result<(std::process::Child, Running)> {
    let log = open_log(&logs.join(format!("{}.log", process.name)))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(process.role.as_str()).arg(&process.directory);
    // It belongs to the cluster of its directory, whatever the user's shell says.
    command.env_remove(super::CLUSTER_VARIABLE);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // A group of its own: Ctrl-C in the terminal that started the cluster is not for it.
    command.process_group(0);
    let child = command.spawn()?;
    let pid = child.id() as i32;
    std::fs::write(process.directory.join(PID_FILE), format!("{pid}\n"))?;
    let descriptor = pidfd_open(pid)?;
    Ok((child, Running { pid, descriptor }))
}

/// Opens a log for appending; one that has grown too long is put aside first.
pub fn open_log(path: &Path) -> io::Result<File> {
    if path.metadata().is_ok_and(|m| m.len() > LOG_BYTES_MAX) {
        std::fs::rename(path, path.with_extension("log.1"))?;
    }
    OpenOptions::new().create(true).append(true).open(path)
}

#[allow(unsafe_code)]
fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two numbers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[allow(unsafe_code)]
fn pidfd_send_signal(fd: &OwnedFd, signal: i32) -> io::Result<()> {
    let (fd, none) = (fd.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
    // SAFETY: an open descriptor, a number, a null siginfo as the man page allows, no flags.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[allow(unsafe_code)]
fn poll_readable(fd: &OwnedFd, wait: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let milliseconds = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd that outlives the call.
    match unsafe { libc::poll(&raw mut poll, 1, milliseconds) } {
        -1 => Err(io::Error::last_os_error()),
        ready => Ok(ready > 0),
    }
}
