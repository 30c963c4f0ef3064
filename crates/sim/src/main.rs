//! `milpa-sim`: runs seeds of the simulation and adds up what they met.

// A program around the simulation, with real threads, files and clocks.
#![allow(clippy::disallowed_methods)]

mod enumerate;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use clap::builder::PossibleValuesParser;
use milpa_sim::{CrashPoint, Outcome, Settings, fault_kinds, run_seed};
use serde::{Deserialize, Serialize};

/// Runs the whole cluster in one deterministic process, under faults that a seed draws.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Run one seed and show what happened.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run the seeds from A to below B.
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    seeds: Option<(u64, u64)>,
    /// Seeds that run at once.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Operations of all clients together, for each seed, at least.
    #[arg(long, default_value_t = 2_000)]
    operations: u64,
    /// No faults.
    #[arg(long)]
    calm: bool,
    /// Print every event as it happens.
    #[arg(long)]
    verbose: bool,
    /// Run each seed twice and compare.
    #[arg(long)]
    twice: bool,
    /// Kinds of faults that are not to happen, such as `rot`.
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(fault_kinds()))]
    without: Vec<String>,
    /// A calm run in which a machine crashes after so many effects: `meta1:312:power`, `:kill`, or `:pause`.
    #[arg(long, value_name = "POINT", requires = "seed")]
    crash: Option<CrashPoint>,
    /// Run each seed calmly, then again with a crash, or a pause, at every point of its course, or at one of N.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", conflicts_with_all = ["crash", "hours", "tally", "twice"])]
    crash_points: Option<u64>,
    /// Keep count here, and go on after the last seed that is counted.
    #[arg(long, requires = "hours")]
    tally: Option<PathBuf>,
    /// Run for so long.
    #[arg(long)]
    hours: Option<f64>,
    /// Go on after a failed seed.
    #[arg(long)]
    keep_going: bool,
}

impl Arguments {
    fn settings(&self, seed: u64) -> Settings {
        Settings {
            seed,
            operations: self.operations,
            is_calm: self.calm,
            is_verbose: self.verbose,
            without: self.without.clone(),
            crash: self.crash.clone(),
        }
    }
}

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let parse = |part: &str| part.trim().parse::<u64>().map_err(|error| error.to_string());
    let (first, end) = text.split_once("..").ok_or("write it as A..B")?;
    Ok((parse(first)?, parse(end)?))
}

/// What all seeds together met.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Tally {
    /// All seeds below have been run.
    next_seed: u64,
    /// Seeds above that have been run too: several run at once, and a run may be cut off.
    #[serde(default)]
    ahead: BTreeSet<u64>,
    seeds: u64,
    failed: Vec<u64>,
    simulated_ms: u64,
    operations: u64,
    /// Of the seed that had the fewest.
    fewest_operations: Option<u64>,
    fewest_faults: Option<u64>,
    longest_call_ms: u64,
    /// When no more than one server was broken.
    #[serde(default)]
    longest_bounded_ms: u64,
    /// What happened how often; what never did has a zero.
    counts: BTreeMap<String, u64>,
    /// Log lines of level ERROR.
    errors: BTreeMap<String, u64>,
    /// Failures that clients were told of.
    client_errors: BTreeMap<String, u64>,
}

impl Tally {
    fn add(&mut self, outcome: &Outcome) {
        self.ahead.insert(outcome.seed);
        while self.ahead.remove(&self.next_seed) {
            self.next_seed += 1;
        }
        self.seeds += 1;
        if !outcome.is_good() {
            self.failed.push(outcome.seed);
        }
        self.simulated_ms += outcome.simulated_ms;
        self.operations += outcome.operations;
        let fewest = |known: Option<u64>, new| Some(known.map_or(new, |known| known.min(new)));
        self.fewest_operations = fewest(self.fewest_operations, outcome.operations);
        self.fewest_faults = fewest(self.fewest_faults, outcome.faults);
        self.longest_call_ms = self.longest_call_ms.max(outcome.longest_call.0);
        self.longest_bounded_ms = self.longest_bounded_ms.max(outcome.longest_bounded_ms);
        let maps = [
            (&mut self.counts, &outcome.counts),
            (&mut self.errors, &outcome.errors),
            (&mut self.client_errors, &outcome.client_errors),
        ];
        for (sum, added) in maps {
            for (name, number) in added {
                *sum.entry(name.clone()).or_default() += number;
            }
        }
    }

    /// For people. Without `elapsed` the same bytes for the same seeds.
    fn describe(&self, elapsed: Option<Duration>) -> Result<String, fmt::Error> {
        let mut text = String::new();
        let out = &mut text;
        write!(out, "{} seeds, {} failed: ", self.seeds, self.failed.len())?;
        write!(out, "{:.0} s of simulated time", self.simulated_ms as f64 / 1000.0)?;
        if let Some(elapsed) = elapsed {
            write!(out, " in {:.0} s", elapsed.as_secs_f64())?;
        }
        let longest_s = self.longest_call_ms as f64 / 1000.0;
        writeln!(out, ", {} operations, the longest took {longest_s:.1} s", self.operations)?;
        let longest_s = self.longest_bounded_ms as f64 / 1000.0;
        writeln!(out, "after one failure at most, the longest took {longest_s:.1} s")?;
        if let (Some(operations), Some(faults)) = (self.fewest_operations, self.fewest_faults) {
            writeln!(out, "each seed had at least {operations} operations and {faults} faults")?;
        }
        for (name, number) in self.counts.iter().filter(|(_, number)| **number > 0) {
            writeln!(out, "  {name:<40} {number:>12}")?;
        }
        let never: Vec<_> =
            self.counts.iter().filter(|(_, n)| **n == 0).map(|(name, _)| &**name).collect();
        let never = if never.is_empty() { "-".to_owned() } else { never.join(", ") };
        writeln!(out, "never happened: {never}")?;
        describe_most(out, "clients were told", &self.client_errors)?;
        describe_most(out, "log lines of level ERROR", &self.errors)?;
        if !self.failed.is_empty() {
            writeln!(out, "failed seeds: {:?}", self.failed)?;
        }
        Ok(text)
    }
}

fn describe_most(out: &mut String, title: &str, lines: &BTreeMap<String, u64>) -> fmt::Result {
    let mut lines: Vec<_> = lines.iter().collect();
    lines.sort_by_key(|(_, number)| std::cmp::Reverse(**number));
    writeln!(out, "{title}: {} kinds", lines.len())?;
    lines.into_iter().take(40).try_for_each(|(line, n)| writeln!(out, "  {n:>6} {line}"))
}

/// Prints. Who closes the pipe has read enough.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let started = Instant::now();
    // Before the first seed: hours of work would be in no tally.
    let kept = load(&arguments).and_then(|tally| save(&arguments, &tally).map(|()| tally));
    let mut tally = match kept {
        Ok(tally) => tally,
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    let (first, end) = match (arguments.seed, arguments.seeds) {
        (Some(seed), _) => (seed, seed + 1),
        (None, Some(range)) => range,
        (None, None) if arguments.hours.is_some() => (tally.next_seed, u64::MAX),
        (None, None) => (0, 20),
    };
    if let Some(every) = arguments.crash_points {
        let calm = |seed| Settings { is_calm: true, ..arguments.settings(seed) };
        return enumerate::crash_everywhere_in(first..end, calm, every, arguments.jobs);
    }
    let (next, done) = (AtomicU64::new(first), tally.ahead.clone());
    let is_stopped = AtomicU64::new(0);
    let shared = Mutex::new(&mut tally);
    let limit = arguments.hours.map(|hours| Duration::from_secs_f64(hours * 3600.0));
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let is_late = limit.is_some_and(|limit| started.elapsed() >= limit);
                    if is_late || is_stopped.load(Ordering::Relaxed) > 0 {
                        return;
                    }
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    if done.contains(&seed) {
                        continue;
                    }
                    let outcome = run_one(seed, &arguments);
                    if !outcome.is_good() && !arguments.keep_going {
                        is_stopped.store(1, Ordering::Relaxed);
                    }
                    if let Ok(mut tally) = shared.lock() {
                        tally.add(&outcome);
                        if let Err(problem) = save(&arguments, &tally) {
                            eprintln!("error: {problem}");
                        }
                    }
                }
            });
        }
    });
    let elapsed = arguments.seed.is_none().then(|| started.elapsed());
    say(&tally.describe(elapsed).unwrap_or_default());
    if tally.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_one(seed: u64, arguments: &Arguments) -> Outcome {
    let settings = arguments.settings(seed);
    let began = Instant::now();
    let mut outcome = run_seed(&settings);
    if arguments.twice {
        let again = run_seed(&settings);
        if again.hash != outcome.hash {
            let detail = format!("hashes {:016x} and {:016x}", outcome.hash, again.hash);
            outcome.violations.push(("same seed, same course".to_owned(), detail));
        }
    }
    // A single seed prints the same bytes each time.
    match arguments.seed {
        Some(_) if outcome.is_good() => say(&format!("{outcome}{}\n", outcome.options)),
        Some(_) => say(&format!("{outcome}\n")),
        None => say(&format!("{outcome} [{:.1} s]\n", began.elapsed().as_secs_f64())),
    }
    outcome
}

/// What earlier runs have counted.
fn load(arguments: &Arguments) -> Result<Tally, String> {
    let Some(path) = &arguments.tally else { return Ok(Tally::default()) };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Tally::default()),
        Err(error) => return Err(format!("cannot read the tally {}: {error}", path.display())),
    };
    let tally = serde_json::from_str(&text);
    tally.map_err(|error| format!("{} is not a tally: {error}", path.display()))
}

fn save(arguments: &Arguments, tally: &Tally) -> Result<(), String> {
    let Some(path) = &arguments.tally else { return Ok(()) };
    let fresh = path.with_extension("new");
    serde_json::to_string_pretty(tally)
        .map_err(std::io::Error::other)
        .and_then(|text| std::fs::write(&fresh, text))
        .and_then(|()| std::fs::rename(&fresh, path))
        .map_err(|error| format!("cannot keep the tally in {}: {error}", path.display()))
}
