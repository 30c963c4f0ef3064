//! The server processes of a test bed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use crate::Outcome;

/// One server process, as the cluster file names it.
#[derive(Clone, Debug, Deserialize)]
pub struct ServerProcess {
    /// `meta1`, …
    pub name: String,
    /// `manager`, `meta` or `data`.
    pub role: String,
    /// Its directory.
    pub directory: PathBuf,
    /// Where it listens.
    pub listen: String,
    /// Where its metrics are.
    pub http_listen: String,
}

impl ServerProcess {
    /// Its pid, if it runs: the pid file's number must belong to a process of this role and
    /// directory, so that nobody else is ever hit.
    pub fn pid(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.directory.join("PID")).ok()?;
        let pid: i32 = text.trim().parse().ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let directory = self.directory.to_string_lossy();
        let ours = words.contains(&self.role.as_bytes()) && words.contains(&directory.as_bytes());
        ours.then_some(pid)
    }

    /// Its resident memory in bytes, if it runs.
    pub fn memory_bytes(&self) -> Option<u64> {
        memory_bytes(self.pid()?)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    ///
    /// When it does not run: a fault that hits nobody would prove nothing.
    pub fn signal(&self, signal: i32) -> Outcome<i32> {
        let pid = self.pid().ok_or_else(|| format!("{} does not run", self.name))?;
        signal_pid(pid, signal)?;
        Ok(pid)
    }

    /// kill -9.
    ///
    /// # Errors
    ///
    /// As [`signal`](ServerProcess::signal).
    pub fn kill(&self) -> Outcome<i32> {
        self.signal(libc::SIGKILL)
    }
}

/// Resident memory of a process in bytes, if it runs.
#[must_use]
pub fn memory_bytes(pid: i32) -> Option<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Sends a signal to one process.
///
/// # Errors
///
/// When the process is gone.
#[allow(unsafe_code)]
pub fn signal_pid(pid: i32, signal: i32) -> Outcome {
    // SAFETY: kill takes two numbers; the caller made sure whose pid it is.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(format!("cannot signal {pid}: {}", std::io::Error::last_os_error())),
    }
}

/// Sums a metric over its labels, as the process at `http` shows it.
#[must_use]
pub fn metric(http: &str, name: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(http).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let values: Vec<f64> = text.lines().filter_map(|line| sample(line, name)).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

/// The value of a line such as `name{label="x"} 3`.
fn sample(line: &str, name: &str) -> Option<f64> {
    let rest = line.strip_prefix(name)?;
    if !rest.starts_with(['{', ' ']) {
        return None;
    }
    rest.rsplit_once(' ')?.1.parse().ok()
}

/// kill -9 of a process whose directory, and with it its pid file, is gone.
///
/// # Errors
///
/// When it does not run.
pub fn kill(pid: i32) -> Outcome {
    signal_pid(pid, libc::SIGKILL)
}
