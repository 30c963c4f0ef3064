//! What a process really asked of its disk, as strace saw it.
//!
//! kill -9 loses no page cache, so it cannot tell whether anything was flushed. A trace can: strace
//! stops a thread when it enters a system call and when it leaves it, and notes the time before the
//! thread goes on. So a flush whose end is noted before our own fsync returned did happen before.

mod calls;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::JoinHandle;

pub use calls::{Call, Kind, Trace, Window};

use crate::Outcome;
use crate::process::signal_pid;

/// How much of what is written strace shows: enough to find one entry in a batch of the log.
const SHOWN_BYTES: &str = "16384";

/// An strace at work on one process. Dropping it lets the process go.
#[derive(Debug)]
pub struct Tracer {
    child: Child,
    output: PathBuf,
    /// Reads the rest of what strace says, so that it never waits for a reader.
    chatter: Option<JoinHandle<String>>,
}

impl Tracer {
    /// Attaches to all threads of a process; they are traced when this returns. The trace goes to
    /// the file `output`.
    ///
    /// # Errors
    ///
    /// When strace is not there, or may not attach.
    pub fn attach(pid: i32, output: PathBuf) -> Outcome<Tracer> {
        let mut command = Command::new("strace");
        command.args(["-f", "-ttt", "-T", "-y", "-s", SHOWN_BYTES]);
        command.args(["-e", "trace=fdatasync,fsync,pwrite64", "-o"]).arg(&output);
        command.args(["-p", &pid.to_string()]).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("cannot start strace: {e}"))?;
        let mut said = BufReader::new(child.stderr.take().ok_or("no pipe")?);
        if let Err(problem) = wait_until_attached(&mut said) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("strace did not attach to {pid}: {problem}"));
        }
        let chatter = std::thread::spawn(move || {
            let mut rest = String::new();
            let _ = said.read_to_string(&mut rest);
            rest
        });
        Ok(Tracer { child, output, chatter: Some(chatter) })
    }

    /// Lets the process go and reads the trace.
    ///
    /// # Errors
    ///
    /// When strace had ended before, because the process did.
    pub fn detach(mut self) -> Outcome<Trace> {
        if let Some(status) = self.child.try_wait().map_err(|e| e.to_string())? {
            return Err(format!("strace ended early: {status}: {}", self.finish()));
        }
        self.finish();
        let text = read(&self.output)?;
        Ok(Trace::parse(&text))
    }

    /// Ends strace the way that it detaches cleanly, and returns what it had to say.
    fn finish(&mut self) -> String {
        let Some(chatter) = self.chatter.take() else { return String::new() };
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = signal_pid(pid, libc::SIGTERM);
        }
        let _ = self.child.wait();
        chatter.join().unwrap_or_default()
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.finish();
    }
}

/// "strace: Process 4711 attached with 9 threads" comes when all threads are traced.
fn wait_until_attached(said: &mut BufReader<ChildStderr>) -> Outcome {
    let mut all = String::new();
    loop {
        let mut line = String::new();
        match said.read_line(&mut line) {
            Ok(0) | Err(_) => return Err(all),
            Ok(_) if line.starts_with("strace: Process") && line.contains(" attached") => {
                return Ok(());
            }
            Ok(_) => all.push_str(&line),
        }
    }
}

/// The bytes in the trace are escaped, so it is text.
fn read(path: &Path) -> Outcome<String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}
