//! A load that keeps a record of what was acknowledged, outside of the system under test.
//!
//! The writer is a process of its own. A thread of a test would not do: starting any other process
//! closes the copies of the writer's descriptors, which flushes them, and so a test that waits for a
//! dead cluster could never start it again.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Outcome;

/// Reproducible bytes that differ by seed and position.
#[must_use]
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The bytes of the writer's `number`-th file: empty to 200 kB.
#[must_use]
pub fn content(number: u64) -> Vec<u8> {
    pattern(number, (number * 7919 % 200_000) as usize)
}

/// The writer's `number`-th file.
#[must_use]
pub fn path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("f{number}"))
}

/// The writer's main loop: one file after the other, each with fsync, and after each a line with
/// the microseconds that it took. It ends when its input ends.
///
/// # Errors
///
/// The first failed call.
pub fn write_files(directory: &Path) -> Outcome {
    let stop = Arc::new(AtomicU64::new(0));
    let stopped = Arc::clone(&stop);
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        stopped.store(1, Ordering::Release);
    });
    for number in 0.. {
        if stop.load(Ordering::Acquire) == 1 {
            break;
        }
        let started = Instant::now();
        write_synced(&path(directory, number), &content(number))
            .map_err(|e| format!("file {number}: {e}"))?;
        println!("{}", started.elapsed().as_micros());
        std::io::stdout().flush().map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Writes a file and returns when it is on disk.
///
/// # Errors
///
/// Of open, write, fsync.
pub fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// A writer process, and what it acknowledged.
#[derive(Debug)]
pub struct Writer {
    child: Child,
    record: Arc<Record>,
    reader: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Record {
    files: AtomicU64,
    longest_us: AtomicU64,
    problem: Mutex<Option<String>>,
}

impl Writer {
    /// Starts `program` (the `milpa-writer` of this crate) on a directory.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(program: &str, directory: &Path) -> Outcome<Writer> {
        let mut command = Command::new(program);
        command.arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let record = Arc::new(Record::default());
        let kept = Arc::clone(&record);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                kept.note(&line);
            }
        });
        Ok(Writer { child, record, reader: Some(reader) })
    }

    /// How many files are acknowledged as on disk.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.record.files.load(Ordering::Acquire)
    }

    /// Whether it has ended, which it does by itself only when a call failed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(std::thread::JoinHandle::is_finished)
    }

    /// Stops it: how many files it wrote, and the longest time that one took.
    ///
    /// # Errors
    ///
    /// The call that failed.
    pub fn finish(mut self) -> Outcome<(u64, Duration)> {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let status = self.child.wait().map_err(|e| e.to_string())?;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        let problem = self.record.problem.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match problem {
            Some(problem) => Err(problem),
            None if !status.success() => Err(format!("the writer ended with {status}")),
            None => Ok((self.acknowledged(), self.longest())),
        }
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.record.longest_us.load(Ordering::Acquire))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Record {
    fn note(&self, line: &str) {
        match line.parse::<u64>() {
            Ok(micros) => {
                self.longest_us.fetch_max(micros, Ordering::AcqRel);
                self.files.fetch_add(1, Ordering::AcqRel);
            }
            Err(_) => {
                *self.problem.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(line.to_owned());
            }
        }
    }
}
