//! The server processes of a test bed.

use std::path::PathBuf;

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

/// Sends a signal to one process.
///
/// # Errors
///
/// When the process is gone.
#[allow(unsafe_code)]
pub(crate) fn signal_pid(pid: i32, signal: i32) -> Outcome {
    // SAFETY: kill takes two numbers; the caller made sure whose pid it is.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(format!("cannot signal {pid}: {}", std::io::Error::last_os_error())),
    }
}
