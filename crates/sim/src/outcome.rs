//! One seed from its beginning to what it found.

// The thread of a seed is a real one.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Once;

use tracing::Level;

use crate::crash_points::Effectful;
use crate::options::Options;
pub use crate::options::Settings;
use crate::simulation::Simulation;
use crate::trace::{self, LogLines};
use crate::workload::OPERATIONS;
use crate::{entropy, history::CallCounts};

/// Events that are shown of a failed run.
const EVENTS_SHOWN: usize = 60;

/// What a run did and found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// How to make this run again: options of `milpa-sim`.
    pub replay: String,
    /// What the seed drew, in words.
    pub options: String,
    /// Hash of everything that happened: equal for two runs of one seed.
    pub hash: u64,
    /// Simulated milliseconds.
    pub simulated_ms: u64,
    /// Operations of the clients that ended.
    pub operations: u64,
    /// Faults that happened.
    pub faults: u64,
    /// Broken promises: which check found them, and what it saw.
    pub violations: Vec<(String, String)>,
    /// What happened how often, by name: faults, packets, operations.
    pub counts: BTreeMap<String, u64>,
    /// How many effects each machine had.
    pub effects: Vec<Effectful>,
    /// The longest that one operation took, in milliseconds, and which.
    pub longest_call: (u64, String),
    /// The longest in milliseconds when no more than one server was broken.
    pub longest_bounded_ms: u64,
    /// Log lines of level ERROR, and how often each came.
    pub errors: BTreeMap<String, u64>,
    /// Failures that clients were told of, and how often.
    pub client_errors: BTreeMap<String, u64>,
    /// The last events.
    pub events: Vec<String>,
}

/// Runs one seed on a thread of its own, because the randomness of libraries is the thread's.
#[must_use]
pub fn run_seed(settings: &Settings) -> Outcome {
    static ONCE: Once = Once::new();
    ONCE.call_once(trace::catch_panics);
    let of_thread = settings.clone();
    let (seed, replay) = (settings.seed, settings.to_string());
    let thread = std::thread::Builder::new().name(format!("seed {seed}"));
    let spawned = thread.spawn(move || run_here(&of_thread));
    let lost = |reason: String| {
        let violations = vec![("simulation".to_owned(), reason)];
        Outcome { seed, replay: replay.clone(), violations, ..Outcome::default() }
    };
    match spawned {
        Ok(running) => {
            running.join().unwrap_or_else(|_| lost("the simulator itself panicked".to_owned()))
        }
        Err(error) => lost(error.to_string()),
    }
}

fn run_here(settings: &Settings) -> Outcome {
    entropy::seed_thread(settings.seed);
    trace::begin(settings.is_verbose);
    let level = if settings.is_verbose { Level::DEBUG } else { Level::INFO };
    tracing::subscriber::with_default(LogLines { level }, || {
        let options = Options::draw(settings);
        let mut simulation = Simulation::new(options);
        simulation.run();
        let mut outcome = summarize(&simulation);
        outcome.replay = settings.to_string();
        simulation.shut_down();
        drop(simulation);
        let trace = trace::end();
        outcome.hash = trace.hash();
        outcome.counts.insert("checked elections".to_owned(), trace.elections());
        outcome.counts.insert("checked epochs".to_owned(), trace.epochs());
        outcome.events = trace.last(EVENTS_SHOWN).map(str::to_owned).collect();
        for panic in &trace.panics {
            outcome.violations.push(("no panic".to_owned(), panic.clone()));
        }
        outcome.errors = trace.errors;
        outcome
    })
}

fn summarize(simulation: &Simulation) -> Outcome {
    let history = simulation.history.borrow();
    let violations = history.violations.iter().map(|v| (v.check.to_owned(), v.detail.clone()));
    let longest = history.counts.iter().max_by_key(|(_, counts)| counts.longest_ms);
    Outcome {
        seed: simulation.options.seed,
        options: simulation.options.to_string(),
        simulated_ms: simulation.now_ms,
        operations: history.operations(),
        faults: simulation.nemesis.faults(),
        violations: violations.collect(),
        counts: counts_of(simulation),
        effects: simulation.effects(),
        longest_call: longest
            .map(|(name, counts)| (counts.longest_ms, (*name).to_owned()))
            .unwrap_or_default(),
        longest_bounded_ms: simulation.stalls.longest_ms,
        client_errors: history.errors.clone(),
        ..Outcome::default()
    }
}

fn counts_of(simulation: &Simulation) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let mut count = |name: &str, number: u64| {
        counts.insert(name.to_owned(), number);
    };
    for (name, _) in simulation.options.weights.clone().by_name() {
        let number = simulation.nemesis.counts.get(name).copied();
        count(&format!("fault {name}"), number.unwrap_or_default());
    }
    OPERATIONS.iter().for_each(|name| count(&format!("operation {name}"), 0));
    let history = simulation.history.borrow();
    for (name, CallCounts { done, failed, unknown, .. }) in &history.counts {
        count(&format!("operation {name}"), done + failed + unknown);
        count("outcome done", 0);
    }
    let sum = |of: fn(&CallCounts) -> u64| history.counts.values().map(of).sum();
    count("outcome done", sum(|counts| counts.done));
    count("outcome refused", sum(|counts| counts.failed));
    count("outcome unknown", sum(|counts| counts.unknown));
    count("checked reads", history.judged_reads);
    count("checked writes that fsync confirmed", history.synced_writes);
    count("checked names", history.names.len() as u64);
    count("checked calls after one failure at most", simulation.stalls.bounded);
    let watch = simulation.watch.borrow();
    count("checked replicas", watch.replicas_compared);
    count("checked bytes of replicas", watch.bytes_compared);
    count("lives of servers", simulation.lives());
    count("nodes that left", watch.nodes_left);
    count("old disks put back", simulation.old_disks.count);
    let disks = simulation.disk_counts();
    for (name, number) in disks.by_name() {
        count(&format!("disk {name}"), number);
    }
    let wires = simulation.wires.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (name, number) in wires.counts.by_name() {
        count(&format!("network {name}"), number);
    }
    counts
}

impl Outcome {
    /// Whether no promise was broken.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.violations.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (longest_ms, operation) = &self.longest_call;
        writeln!(
            f,
            "seed {}: {}, {} operations and {} faults in {:.1} s of simulated time, \
             longest {:.1} s ({operation}), hash {:016x}",
            self.seed,
            if self.is_good() { "good" } else { "FAILED" },
            self.operations,
            self.faults,
            self.simulated_ms as f64 / 1000.0,
            *longest_ms as f64 / 1000.0,
            self.hash
        )?;
        if self.is_good() {
            return Ok(());
        }
        writeln!(f, "{}", self.options)?;
        writeln!(f, "the last events:")?;
        self.events.iter().try_for_each(|event| writeln!(f, "  {event}"))?;
        for (check, detail) in &self.violations {
            writeln!(f, "VIOLATION of \"{check}\": {detail}")?;
        }
        write!(f, "replay with: milpa-sim {}", self.replay)
    }
}
