//! A load of all kinds of changes, and a ledger of what was acknowledged, kept outside of the system
//! under test.
//!
//! The load is a process; its operations follow from a seed and from the results of those before. So
//! the ledger that it prints, a line for each operation that returned, is enough for another process
//! to know, after a power cut, what each file has to hold:
//!
//! * names: what create, rename, unlink and truncate acknowledged holds without any fsync;
//! * bytes: what the last successful fsync covered; what was written since may be there or not, byte by
//!   byte, but nothing else may.
//!
//! An operation that failed, or that was under way when its process or client died, may have happened
//! or not. Its file is not used again.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::load::pattern;
use crate::random::Random;
use crate::tree::close;

mod known;

use known::Known;

/// Two, so that a rename can lead from one meta partition to another.
const DIRECTORIES: [&str; 2] = ["left", "right"];
const NAMES_PER_DIRECTORY: u64 = 12;
const FILE_BYTES_MAX: u64 = 1 << 20;
/// After so many nothing more is looked at: what is damaged may take its whole deadline to say so.
const PROBLEMS_MAX: usize = 3;
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(200);

/// One step of the load.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operation {
    Create(String),
    Write { name: String, offset: u64, length: u64, seed: u64 },
    Sync(String),
    Truncate(String, u64),
    Rename(String, String),
    Unlink(String),
    Read(String),
}

/// The names at which a file may be, and may be missing at.
#[derive(Clone, Debug)]
struct Doubt {
    names: Vec<String>,
    known: Known,
    /// It may be at none of them.
    may_be_gone: bool,
}

/// The load, and what has to be true of its files so far.
#[derive(Debug, Default)]
pub struct Plan {
    seed: u64,
    random: Random,
    number: u64,
    files: BTreeMap<String, Known>,
    doubts: Vec<Doubt>,
    calls: Calls,
}

/// How the operations went that returned.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    /// The longest: its place in the ledger, and what it was.
    pub slowest: Option<(Duration, usize, String)>,
    /// Places in the ledger and errors of those that failed.
    pub failed: Vec<(usize, String)>,
}

impl Calls {
    fn note(&mut self, place: usize, took: Duration, operation: &Operation) {
        if self.slowest.as_ref().is_none_or(|(longest, _, _)| took > *longest) {
            self.slowest = Some((took, place, operation.to_string()));
        }
    }
}

/// For people: an operation without its bytes.
impl std::fmt::Display for Operation {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Operation::Create(name) => write!(formatter, "create of {name}"),
            Operation::Write { name, offset, length, .. } => {
                write!(formatter, "write and close of {name}, {length} bytes at {offset}")
            }
            Operation::Sync(name) => write!(formatter, "fsync of {name}"),
            Operation::Truncate(name, length) => {
                write!(formatter, "truncation of {name} to {length}")
            }
            Operation::Rename(from, to) => write!(formatter, "rename of {from} to {to}"),
            Operation::Unlink(name) => write!(formatter, "unlink of {name}"),
            Operation::Read(name) => write!(formatter, "read of {name}"),
        }
    }
}

impl Plan {
    /// Before the first operation: two empty directories.
    #[must_use]
    pub fn new(seed: u64) -> Plan {
        Plan { seed, random: Random::new(seed), ..Plan::default() }
    }

    /// How its operations went.
    #[must_use]
    pub fn calls(&self) -> &Calls {
        &self.calls
    }

    fn is_in_doubt(&self, name: &str) -> bool {
        self.doubts.iter().any(|doubt| doubt.names.iter().any(|other| other == name))
    }

    /// A name that is not in doubt; of a file that is there, or of none.
    fn pick(&mut self, is_there: bool) -> Option<String> {
        let all = DIRECTORIES.iter().flat_map(|directory| {
            (0..NAMES_PER_DIRECTORY).map(move |number| format!("{directory}/f{number}"))
        });
        let fit =
            all.filter(|name| self.files.contains_key(name) == is_there && !self.is_in_doubt(name));
        let fit: Vec<String> = fit.collect();
        let place = self.random.below(fit.len() as u64);
        fit.get(place as usize).cloned()
    }

    /// The next operation; `None` when too many names are in doubt.
    fn next(&mut self) -> Option<Operation> {
        self.number += 1;
        let (choice, there) = (self.random.below(100), self.pick(true));
        let Some(name) = there.filter(|_| choice >= 15) else {
            let free = self.pick(false).map(Operation::Create);
            return free.or_else(|| self.pick(true).map(Operation::Unlink));
        };
        Some(match choice {
            15..45 => self.write(name),
            45..70 => Operation::Sync(name),
            70..80 => {
                // Over another file, as editors do, or to a free name.
                let is_over = self.random.below(3) == 0;
                match self.pick(is_over).filter(|target| *target != name) {
                    Some(target) => Operation::Rename(name, target),
                    None => Operation::Sync(name),
                }
            }
            80..86 => Operation::Unlink(name),
            86..92 => Operation::Truncate(name, self.random.below(FILE_BYTES_MAX / 4)),
            _ => Operation::Read(name),
        })
    }

    /// Small and large, behind the end and over what is there.
    fn write(&mut self, name: String) -> Operation {
        let length = self.files.get(&name).map_or(0, Known::length_max);
        let offset = match self.random.below(3) {
            0 => self.random.below(length + 1),
            1 => self.random.below(length + 1) / 4096 * 4096,
            _ => length,
        };
        let most = [600, 5_000, 40_000, 300_000][self.random.below(4) as usize];
        let offset = offset.min(FILE_BYTES_MAX - most);
        let length = 1 + self.random.below(most);
        Operation::Write { name, offset, length, seed: self.seed ^ (self.number << 20) }
    }

    /// The operation returned: what it says is so from now on.
    fn succeeded(&mut self, operation: Operation) {
        match operation {
            Operation::Create(name) => drop(self.files.insert(name, Known::default())),
            Operation::Write { name, offset, length, seed } => {
                let bytes = pattern(seed, length as usize);
                self.change(&name, |known| known.pending.push((offset, bytes)));
            }
            Operation::Sync(name) => self.change(&name, Known::synced),
            Operation::Truncate(name, length) => self.change(&name, |known| known.cut(length)),
            Operation::Rename(from, to) => {
                if let Some(known) = self.files.remove(&from) {
                    self.files.insert(to, known);
                }
            }
            Operation::Unlink(name) => drop(self.files.remove(&name)),
            Operation::Read(_) => {}
        }
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.files.get_mut(name) {
            change(known);
        }
    }

    /// The operation failed, or nobody knows: both outcomes are fine.
    fn in_doubt(&mut self, operation: Operation) {
        match operation {
            Operation::Create(name) => self.doubt(vec![name], Known::default(), true),
            Operation::Unlink(name) => {
                let known = self.files.remove(&name).unwrap_or_default();
                self.doubt(vec![name], known, true);
            }
            Operation::Rename(from, to) => {
                let known = self.files.remove(&from).unwrap_or_default();
                if let Some(replaced) = self.files.remove(&to) {
                    self.doubt(vec![to.clone()], replaced, true);
                }
                self.doubt(vec![from, to], known, false);
            }
            Operation::Write { ref name, .. } | Operation::Truncate(ref name, _) => {
                let name = name.clone();
                let mut known = self.files.remove(&name).unwrap_or_default();
                match operation {
                    Operation::Write { offset, length, seed, .. } => {
                        known.pending.push((offset, pattern(seed, length as usize)));
                    }
                    Operation::Truncate(_, length) => known.may_be_cut(length),
                    _ => {}
                }
                self.doubt(vec![name], known, false);
            }
            Operation::Sync(name) => {
                let known = self.files.remove(&name).unwrap_or_default();
                self.doubt(vec![name], known, false);
            }
            Operation::Read(_) => {}
        }
    }

    fn doubt(&mut self, names: Vec<String>, known: Known, may_be_gone: bool) {
        self.doubts.push(Doubt { names, known, may_be_gone });
    }

    /// Follows a ledger to its end; the operation without a line was under way.
    ///
    /// # Errors
    ///
    /// What the load itself found wrong.
    pub fn replay(seed: u64, ledger: &[String]) -> Outcome<Plan> {
        let mut plan = Plan::new(seed);
        for (place, line) in ledger.iter().enumerate() {
            let Some(operation) = plan.next() else { break };
            let mut words = line.splitn(3, ' ');
            let (outcome, took) = (words.next(), words.next().and_then(|us| us.parse().ok()));
            if let Some(took) = took {
                plan.calls.note(place, Duration::from_micros(took), &operation);
            }
            match (outcome, took) {
                (Some("ok"), Some(_)) => plan.succeeded(operation),
                (Some("failed"), Some(_)) => {
                    let error = words.next().unwrap_or_default();
                    plan.calls.failed.push((place, format!("{operation}: {error}")));
                    plan.in_doubt(operation);
                }
                _ => return Err(format!("the load (seed {seed}) says: {line}")),
            }
        }
        if let Some(operation) = plan.next() {
            plan.in_doubt(operation);
        }
        Ok(plan)
    }

    /// Compares the files below `directory` with what has to be there. The first few problems.
    #[must_use]
    pub fn check(&self, directory: &Path) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, known) in &self.files {
            if problems.len() >= PROBLEMS_MAX {
                return problems;
            }
            if let Err(problem) = known.check(&directory.join(name)) {
                problems.push(format!("{name}: {problem}"));
            }
        }
        for doubt in &self.doubts {
            if let Err(problem) = self.check_doubt(doubt, directory) {
                problems.push(format!("{:?}, in doubt: {problem}", doubt.names));
            }
        }
        for sub in DIRECTORIES {
            match self.unexpected(directory, sub) {
                Ok(names) => problems.extend(names.iter().map(|n| format!("{n}: came back"))),
                Err(error) => problems.push(format!("{sub}: {error}")),
            }
        }
        problems
    }

    fn check_doubt(&self, doubt: &Doubt, directory: &Path) -> Outcome {
        let mut last = None;
        for name in &doubt.names {
            match doubt.known.check(&directory.join(name)) {
                Ok(()) => return Ok(()),
                Err(problem) => last = Some(problem),
            }
        }
        // Another doubt may be about the same name, and hold for what is there.
        let is_there = |name: &String| directory.join(name).exists();
        match last {
            Some(problem) if !doubt.may_be_gone => Err(problem),
            Some(problem) if doubt.names.iter().any(is_there) && !self.is_contested(doubt) => {
                Err(problem)
            }
            _ => Ok(()),
        }
    }

    fn is_contested(&self, doubt: &Doubt) -> bool {
        let shares = |other: &&Doubt| other.names.iter().any(|name| doubt.names.contains(name));
        self.doubts.iter().filter(shares).count() > 1
    }

    fn unexpected(&self, directory: &Path, sub: &str) -> std::io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(directory.join(sub))? {
            let name = format!("{sub}/{}", entry?.file_name().to_string_lossy());
            if !self.files.contains_key(&name) && !self.is_in_doubt(&name) {
                names.push(name);
            }
        }
        Ok(names)
    }
}

/// The load itself. It ends when its input ends, or its mount is gone.
///
/// # Errors
///
/// When its directories cannot be made.
pub fn keep(directory: &Path, seed: u64) -> Outcome {
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        ended.send(())
    });
    for sub in DIRECTORIES {
        std::fs::create_dir_all(directory.join(sub)).map_err(|e| format!("{sub}: {e}"))?;
    }
    let (mut plan, mut output) = (Plan::new(seed), std::io::stdout());
    while end.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
        let Some(operation) = plan.next() else { break };
        let started = Instant::now();
        let performed = perform(&plan, &operation, directory);
        let took_us = started.elapsed().as_micros();
        let line = match performed {
            Ok(None) => {
                plan.succeeded(operation);
                format!("ok {took_us}")
            }
            Ok(Some(problem)) => format!("{operation} found {problem}"),
            // The mount is gone, as this machine would be.
            Err(e)
                if [libc::ENOTCONN, libc::ECONNABORTED].map(Some).contains(&e.raw_os_error()) =>
            {
                break;
            }
            Err(error) => {
                plan.in_doubt(operation);
                // Who is refused does not ask for all that is left at once.
                std::thread::sleep(PAUSE_AFTER_FAILURE);
                format!("failed {took_us} {error}")
            }
        };
        writeln!(output, "{line}").and_then(|()| output.flush()).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Does it; what a read found wrong.
fn perform(
    plan: &Plan,
    operation: &Operation,
    directory: &Path,
) -> std::io::Result<Option<String>> {
    let path = |name: &String| directory.join(name);
    let open = |name: &String| OpenOptions::new().write(true).open(path(name));
    match operation {
        Operation::Create(name) => File::create_new(path(name)).and_then(close)?,
        Operation::Write { name, offset, length, seed } => {
            let file = open(name)?;
            file.write_all_at(&pattern(*seed, *length as usize), *offset)?;
            // May be the only one to tell that the bytes are lost.
            close(file)?;
        }
        Operation::Sync(name) => open(name)?.sync_all()?,
        Operation::Truncate(name, length) => open(name)?.set_len(*length)?,
        Operation::Rename(from, to) => std::fs::rename(path(from), path(to))?,
        Operation::Unlink(name) => std::fs::remove_file(path(name))?,
        Operation::Read(name) => {
            let found = read_from_servers(&path(name))?;
            return Ok(plan.files.get(name).and_then(|known| known.check_bytes(&found).err()));
        }
    }
    Ok(None)
}

/// Reads a file, none of it from the kernel's cache.
#[allow(unsafe_code)]
fn read_from_servers(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    // SAFETY: the descriptor is open; the call takes numbers only.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A load process and its ledger so far.
#[derive(Debug)]
pub struct Ledger {
    child: Child,
    directory: PathBuf,
    seed: u64,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Ledger {
    /// Starts `program` (the `milpa-writer` of this crate) on a directory.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(program: &str, directory: &Path, seed: u64) -> Outcome<Ledger> {
        let mut command = Command::new(program);
        command.arg(directory).arg(seed.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), line));
            }
        });
        Ok(Ledger { child, directory: directory.to_owned(), seed, lines, reader: Some(reader) })
    }

    /// Operations that returned, with success or not.
    #[must_use]
    pub fn length(&self) -> usize {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether the load has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(std::thread::JoinHandle::is_finished)
    }

    /// Stops the load.
    pub fn finish(mut self) -> Finished {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let (returned, lines): (Vec<_>, Vec<_>) = lines.into_iter().unzip();
        let plan = Plan::replay(self.seed, &lines)
            .map_err(|e| format!("{}: {e}", self.directory.display()));
        Finished { lines, returned, plan }
    }
}

/// A ledger that is at its end.
#[derive(Debug)]
pub struct Finished {
    /// A line for each operation that returned.
    pub lines: Vec<String>,
    /// When each did.
    pub returned: Vec<Instant>,
    /// What the lines mean, or what the load found wrong.
    pub plan: Outcome<Plan>,
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
