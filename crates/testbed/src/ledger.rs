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
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Outcome;
use crate::load::pattern;
use crate::tree::close;

/// Two, so that a rename can lead from one meta partition to another.
const DIRECTORIES: [&str; 2] = ["left", "right"];
const NAMES_PER_DIRECTORY: u64 = 12;
const FILE_BYTES_MAX: u64 = 1 << 20;
/// After so many nothing more is looked at: what is damaged may take its whole deadline to say so.
const PROBLEMS_MAX: usize = 3;

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

/// What is known of a file.
#[derive(Clone, Debug, Default)]
struct Known {
    /// What is there whatever happens, but where `pending` says otherwise.
    durable: Vec<u8>,
    /// How much of it an fsync covered. Behind that are zeros of a truncation, over which bytes may
    /// have been written: those may be lost, and the file end before them.
    synced: usize,
    /// Writes since then: offset and bytes.
    pending: Vec<(u64, Vec<u8>)>,
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
#[derive(Debug)]
pub struct Plan {
    seed: u64,
    state: u64,
    number: u64,
    files: BTreeMap<String, Known>,
    doubts: Vec<Doubt>,
}

impl Plan {
    /// Before the first operation: two empty directories.
    #[must_use]
    pub fn new(seed: u64) -> Plan {
        Plan { seed, state: seed, number: 0, files: BTreeMap::new(), doubts: Vec::new() }
    }

    /// Evenly from `0..bound` (splitmix64).
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound.max(1)
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
        let place = self.below(fit.len() as u64);
        fit.get(place as usize).cloned()
    }

    /// The next operation; `None` when too many names are in doubt.
    fn next(&mut self) -> Option<Operation> {
        self.number += 1;
        let (choice, there) = (self.below(100), self.pick(true));
        let Some(name) = there.filter(|_| choice >= 15) else {
            let free = self.pick(false).map(Operation::Create);
            return free.or_else(|| self.pick(true).map(Operation::Unlink));
        };
        Some(match choice {
            15..45 => self.write(name),
            45..70 => Operation::Sync(name),
            70..80 => {
                // Over another file, as editors do, or to a free name.
                let is_over = self.below(3) == 0;
                match self.pick(is_over).filter(|target| *target != name) {
                    Some(target) => Operation::Rename(name, target),
                    None => Operation::Sync(name),
                }
            }
            80..86 => Operation::Unlink(name),
            86..92 => Operation::Truncate(name, self.below(FILE_BYTES_MAX / 4)),
            _ => Operation::Read(name),
        })
    }

    /// Small and large, behind the end and over what is there.
    fn write(&mut self, name: String) -> Operation {
        let length = self.files.get(&name).map_or(0, Known::length_max);
        let offset = match self.below(3) {
            0 => self.below(length + 1),
            1 => self.below(length + 1) / 4096 * 4096,
            _ => length,
        };
        let most = [600, 5_000, 40_000, 300_000][self.below(4) as usize];
        let offset = offset.min(FILE_BYTES_MAX - most);
        let length = 1 + self.below(most);
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
        for line in ledger {
            let Some(operation) = plan.next() else { break };
            match line.split_once(' ') {
                None if line == "ok" => plan.succeeded(operation),
                Some(("failed", _)) => plan.in_doubt(operation),
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

impl Known {
    fn length_max(&self) -> u64 {
        let ends = self.pending.iter().map(|(offset, bytes)| offset + bytes.len() as u64);
        ends.max().unwrap_or(0).max(self.durable.len() as u64)
    }

    /// All that was written is there for good.
    fn synced(&mut self) {
        for (offset, bytes) in std::mem::take(&mut self.pending) {
            let (start, end) = (offset as usize, offset as usize + bytes.len());
            self.durable.resize(self.durable.len().max(end), 0);
            self.durable[start..end].copy_from_slice(&bytes);
        }
        self.synced = self.durable.len();
    }

    fn length_min(&self) -> usize {
        if self.pending.is_empty() { self.durable.len() } else { self.synced }
    }

    fn cut(&mut self, length: u64) {
        self.durable.resize(length as usize, 0);
        self.synced = self.synced.min(length as usize);
        for (offset, bytes) in &mut self.pending {
            bytes.truncate(length.saturating_sub(*offset) as usize);
        }
        self.pending.retain(|(_, bytes)| !bytes.is_empty());
    }

    /// As `cut`, or not: what is behind `length` is zeros, or missing, or as before.
    fn may_be_cut(&mut self, length: u64) {
        let end = self.length_max();
        let kept = self.durable.len().min(length as usize);
        let behind = self.durable.split_off(kept);
        self.synced = self.synced.min(kept);
        if !behind.is_empty() {
            self.pending.insert(0, (kept as u64, behind));
        }
        if length > end {
            self.pending.push((end, vec![0; (length - end) as usize]));
        }
    }

    fn check(&self, path: &Path) -> Outcome {
        self.check_bytes(&std::fs::read(path).map_err(|e| e.to_string())?)
    }

    fn check_bytes(&self, found: &[u8]) -> Outcome {
        let (least, most) = (self.length_min(), self.length_max() as usize);
        if found.len() < least || found.len() > most {
            return Err(format!("{} bytes, not {least} to {most}", found.len()));
        }
        let mut is_good: Vec<bool> = found
            .iter()
            .enumerate()
            // Behind the end a gap between two writes is zeros.
            .map(|(place, byte)| *byte == self.durable.get(place).copied().unwrap_or(0))
            .collect();
        for (offset, bytes) in &self.pending {
            let from = (*offset as usize).min(found.len());
            let there = is_good[from..].iter_mut().zip(&found[from..]);
            for ((is_good, byte), expected) in there.zip(bytes) {
                *is_good |= byte == expected;
            }
        }
        let Some(first) = is_good.iter().position(|is_good| !is_good) else { return Ok(()) };
        let wrong = is_good.iter().zip(found).filter(|(is_good, _)| !**is_good);
        let zeros = wrong.clone().filter(|(_, byte)| **byte == 0).count();
        Err(format!(
            "{} wrong bytes of {} ({least} synced), the first at {first}; {zeros} are zeros",
            wrong.count(),
            found.len(),
        ))
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
        let line = match perform(&plan, &operation, directory) {
            Ok(None) => {
                plan.succeeded(operation);
                "ok".to_owned()
            }
            Ok(Some(problem)) => format!("{operation:?} found {problem}"),
            // The mount is gone, as this machine would be.
            Err(e)
                if [libc::ENOTCONN, libc::ECONNABORTED].map(Some).contains(&e.raw_os_error()) =>
            {
                break;
            }
            Err(error) => {
                plan.in_doubt(operation);
                format!("failed {error}")
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
            let found = std::fs::read(path(name))?;
            return Ok(plan.files.get(name).and_then(|known| known.check_bytes(&found).err()));
        }
    }
    Ok(None)
}

/// A load process and its ledger so far.
#[derive(Debug)]
pub struct Ledger {
    child: Child,
    directory: PathBuf,
    seed: u64,
    lines: Arc<Mutex<Vec<String>>>,
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
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
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

    /// Stops the load; the lines of its ledger, and what they mean, or what the load found wrong.
    pub fn finish(mut self) -> (Vec<String>, Outcome<Plan>) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let plan = Plan::replay(self.seed, &lines)
            .map_err(|e| format!("{}: {e}", self.directory.display()));
        (lines, plan)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
