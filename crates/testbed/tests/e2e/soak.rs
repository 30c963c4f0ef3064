//! Everything that a cluster is promised to survive, one after the other, for half an hour: servers and
//! clients are killed, stopped and cut off, disks are filled, slowed, flipped and deleted, while loads on
//! two clients write, and verify what they read.
//!
//! Each round is one fault, from [`milpa_testbed::faults`]: the loads run before, during and after it,
//! until the cluster is whole again by itself (or by the operator's step that docs/operations.md names).
//! Then the other client looks at all that a load left, and now and then a fresh mount does.
//!
//! A finding is a wrong byte, an error that the fault does not entitle, or a call that took longer than
//! the bound. Findings are told at once and fail the run at its end, so that one run shows all of them; a
//! cluster that does not become whole ends it. `MILPA_SOAK_SEED` takes the same course of faults and
//! loads again (the processes' timing differs), `MILPA_SOAK_MINUTES` is its length.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use milpa_testbed::faults::{self, Course, Fault, Kind};
use milpa_testbed::ledger::{Ledger, Plan};
use milpa_testbed::{Cut, Layout, Machines, Mounted, Outcome, Role};

use crate::from_environment;

const WRITER: &str = env!("CARGO_BIN_EXE_milpa-writer");
const VOLUME: &str = "soak";
const CLIENTS: u8 = 2;
/// On each client, each with files of its own.
const LOADS: u8 = 2;
/// Rounds whose files are kept; then they are removed, under faults as well.
const ROUNDS_KEPT: usize = 5;
/// Rounds between two looks through a fresh mount.
const FRESH_LOOK: u64 = 5;
/// After any single failure no call takes longer (docs/guarantees.md, P6).
const STALL_MAX: Duration = Duration::from_secs(10);
/// Until everything has its copies again; generous, as other processes share the machine.
const WHOLE_WAIT: Duration = Duration::from_secs(180);
/// For operations before and after a fault.
const PROGRESS_WAIT: Duration = Duration::from_secs(60);
const PROGRESS: usize = 15;

/// Four servers, so that what is lost on one has a place on another.
fn layout(seed: u64) -> Layout {
    let (most, last) = (vec!["manager", "meta", "data"], vec!["meta", "data"]);
    let servers = vec![most.clone(), most.clone(), most, last];
    let settings = vec![("data", "scrub_period_s = 20"), ("meta", "scrub_period_s = 20")];
    Layout { servers, clients: CLIENTS, faulty_disks: Some(seed), settings }
}

/// What the loads of a round left behind.
struct Past {
    round: u64,
    /// By client and load.
    plans: Vec<(u8, u8, Plan)>,
}

struct Load {
    client: u8,
    number: u8,
    ledger: Ledger,
}

/// A fault, while it lasts.
struct Spell<'a> {
    fault: &'a Fault,
    began: Instant,
    may_lack_space: bool,
}

impl Spell<'_> {
    /// Calls that failed, or took too long, without a right to.
    fn unentitled(&self, client: u8, plan: &Plan, returned: &[Instant]) -> Vec<String> {
        let is_entitled =
            |error: &str| self.may_lack_space && error.contains("No space left on device");
        let failed = plan.calls().failed.iter().filter(|(_, error)| !is_entitled(error));
        let mut found: Vec<String> =
            failed.map(|(at, error)| format!("{error}, {}", self.when(returned[*at]))).collect();
        let longest = self.longest(client, plan, returned);
        found.extend(longest.filter(|(waited, _)| *waited > STALL_MAX).map(|(_, call)| call));
        found
    }

    /// The longest call of a load, and what it was. A client that is itself stopped or cut off waits for
    /// nobody else.
    fn longest(&self, client: u8, plan: &Plan, returned: &[Instant]) -> Option<(Duration, String)> {
        let (took, at, operation) = plan.calls().slowest.as_ref()?;
        let own =
            if self.fault.is_against_client(client) { self.fault.lasts } else { Duration::ZERO };
        let text = format!("{operation} took {took:.1?}, {}", self.when(returned[*at]));
        Some((took.saturating_sub(own), text))
    }

    fn when(&self, at: Instant) -> String {
        let (after, before) = (at.checked_duration_since(self.began), self.began - at);
        match after {
            Some(after) => format!("returned {:.1} s after it began", after.as_secs_f32()),
            None => format!("returned {:.1} s before it began", before.as_secs_f32()),
        }
    }
}

struct Soak {
    machines: Machines,
    mounts: Vec<Mounted>,
    seed: u64,
    round: u64,
    past: VecDeque<Past>,
    operations: usize,
    refused: usize,
    longest: Duration,
    longest_text: String,
    counts: BTreeMap<(Kind, Role), u64>,
    findings: Vec<String>,
}

impl Soak {
    fn start(seed: u64) -> Outcome<Soak> {
        let mut machines = Machines::start(layout(seed))?;
        machines.milpa(&["volume", "create", VOLUME, "--data-partitions", "8"])?;
        let mount = |client| machines.mount(machines.client(client), VOLUME);
        let mounts = (1..=CLIENTS).map(mount).collect::<Outcome<_>>()?;
        Ok(Soak {
            machines,
            mounts,
            seed,
            round: 0,
            past: VecDeque::new(),
            operations: 0,
            refused: 0,
            longest: Duration::ZERO,
            longest_text: String::new(),
            counts: BTreeMap::new(),
            findings: Vec::new(),
        })
    }

    /// One fault, from a whole cluster to a whole cluster.
    fn round(&mut self, fault: Fault) -> Outcome {
        let fault = &fault.aimed(&self.machines)?;
        let loads = self.start_loads()?;
        go_on(&self.machines, &loads)?;
        let may_lack_space = fault.entitles_no_space(&self.machines)?;
        let began = Instant::now();
        let detail = fault.begin(&mut self.machines, &self.mounts)?;
        *self.counts.entry(fault.class()).or_default() += 1;
        std::thread::sleep(fault.lasts);
        fault.end(&mut self.machines, &self.mounts)?;
        let ended = Instant::now();
        self.make_whole(fault)?;
        let whole = ended.elapsed();
        go_on(&self.machines, &loads)?;
        let before = self.operations;
        let longest = self.finish_loads(&Spell { fault, began, may_lack_space }, loads)?;
        println!(
            "{:>4} {fault} for {:.1?}, whole {whole:.1?} later; {} operations, the longest {longest:.1?}; {detail}",
            self.round,
            ended - began,
            self.operations - before,
        );
        self.cross_check();
        self.round += 1;
        if self.round.is_multiple_of(FRESH_LOOK) { self.look_afresh() } else { Ok(()) }
    }

    fn place(&self, round: u64, client: u8, number: u8) -> String {
        format!("round{round}/{client}.{number}")
    }

    fn start_loads(&self) -> Outcome<Vec<Load>> {
        let mut loads = Vec::new();
        for (client, mount) in (1..).zip(&self.mounts) {
            for number in 1..=LOADS {
                let directory = mount.path.join(self.place(self.round, client, number));
                let made = std::fs::create_dir_all(&directory);
                made.map_err(|e| format!("{}: {e}", directory.display()))?;
                let seed =
                    self.seed ^ (self.round << 16 | u64::from(client) << 8 | u64::from(number));
                let ledger = Ledger::start(WRITER, &directory, seed)?;
                loads.push(Load { client, number, ledger });
            }
        }
        Ok(loads)
    }

    /// Does what is an operator's or a service manager's, and waits for the rest.
    fn make_whole(&mut self, fault: &Fault) -> Outcome {
        for client in 1..=CLIENTS {
            if fault.kind == Kind::Killed && fault.is_against_client(client) {
                let place = usize::from(client) - 1;
                self.machines.umount(&self.mounts[place].clone(), true)?;
                self.mounts[place] = self.machines.mount(self.machines.client(client), VOLUME)?;
            }
        }
        let started = Instant::now();
        while !is_whole(&self.machines) {
            for name in self.machines.take_ended() {
                println!("     {name} has ended by itself; started again");
                self.machines.start_process(&name)?;
            }
            if started.elapsed() > WHOLE_WAIT {
                let status = self.machines.milpa(&["status"]);
                let tasks = self.machines.milpa(&["task", "list"]);
                return Err(format!("not whole again after {fault}: {status:?} {tasks:?}"));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Ends the loads, and holds each call against what the fault entitles; the longest of all.
    fn finish_loads(&mut self, spell: &Spell<'_>, loads: Vec<Load>) -> Outcome<Duration> {
        let (mut plans, mut longest) = (Vec::new(), Duration::ZERO);
        for Load { client, number, ledger } in loads {
            let place = self.place(self.round, client, number);
            let finished = ledger.finish();
            let kept = self.machines.scratch().join(place.replace('/', "-") + ".ledger");
            std::fs::write(kept, finished.lines.join("\n")).map_err(|e| e.to_string())?;
            self.operations += finished.lines.len();
            let fault = spell.fault;
            let plan = match finished.plan {
                Ok(plan) => plan,
                Err(wrong) => {
                    self.finding(&format!("{fault}: {wrong}"));
                    continue;
                }
            };
            self.refused += plan.calls().failed.len();
            for found in spell.unentitled(client, &plan, &finished.returned) {
                self.finding(&format!("{fault}: {place}: {found}"));
            }
            if let Some((waited, call)) = spell.longest(client, &plan, &finished.returned) {
                longest = longest.max(waited);
                if waited > self.longest {
                    (self.longest, self.longest_text) =
                        (waited, format!("{fault}: {place}: {call}"));
                }
            }
            plans.push((client, number, plan));
        }
        self.past.push_back(Past { round: self.round, plans });
        Ok(longest)
    }

    /// Each client sees what the other one closed.
    fn cross_check(&mut self) {
        let Some(past) = self.past.back() else { return };
        let mut found = Vec::new();
        for (client, number, plan) in &past.plans {
            let other = &self.mounts[usize::from(CLIENTS - client)];
            let place = self.place(past.round, *client, *number);
            let problems = plan.check(&other.path.join(&place));
            found
                .extend(problems.iter().map(|p| format!("{place}, read by the other client: {p}")));
        }
        found.iter().for_each(|problem| self.finding(problem));
    }

    /// Everything that is kept, through a mount that has cached nothing; the oldest is removed.
    fn look_afresh(&mut self) -> Outcome {
        let fresh = self.machines.mount(self.machines.operator(), VOLUME)?;
        let mut found = Vec::new();
        for past in &self.past {
            for (client, number, plan) in &past.plans {
                let place = self.place(past.round, *client, *number);
                let problems = plan.check(&fresh.path.join(&place));
                found.extend(problems.iter().map(|p| format!("{place}, read afresh: {p}")));
            }
        }
        found.iter().for_each(|problem| self.finding(problem));
        while self.past.len() > ROUNDS_KEPT {
            let Some(old) = self.past.pop_front() else { break };
            let directory = fresh.path.join(format!("round{}", old.round));
            let removed = std::fs::remove_dir_all(&directory);
            removed.map_err(|e| format!("{}: {e}", directory.display()))?;
        }
        self.machines.umount(&fresh, false)
    }

    fn finding(&mut self, text: &str) {
        println!("FINDING (MILPA_SOAK_SEED={}, round {}): {text}", self.seed, self.round);
        self.findings.push(text.to_owned());
    }

    fn compare_replicas(&mut self) -> Outcome {
        let limit = Duration::from_secs(120);
        let compared = self.machines.wait_until("replicas equal", limit, |machines| {
            machines.milpa(&["partition", "compare"]).is_ok()
        });
        compared.map_err(|e| format!("{e}: {:?}", self.machines.milpa(&["partition", "compare"])))
    }

    /// No process may fall over, whatever it is told.
    fn look_for_panics(&mut self) {
        self.logged("panicked at").iter().for_each(|line| self.finding(line));
    }

    fn damaged_blocks(&self) -> usize {
        self.logged("a block does not match its checksum").len()
    }

    /// Lines of all logs that contain `part`.
    fn logged(&self, part: &str) -> Vec<String> {
        let mut found = Vec::new();
        for path in self.machines.logs() {
            // The log of a mount that failed may be missing.
            let text = std::fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines = text.lines().filter(|line| line.contains(part));
            found.extend(lines.map(|line| format!("{}: {line}", path.display())));
        }
        found
    }

    fn report(&self, started: Instant) {
        let faults: u64 = self.counts.values().sum();
        let minutes = started.elapsed().as_secs_f32() / 60.0;
        println!("{faults} faults in {minutes:.1} minutes (MILPA_SOAK_SEED={}):", self.seed);
        print!("{}", faults::table(&self.counts));
        println!("{} operations, {} of them refused", self.operations, self.refused);
        println!("longest stall: {:.1?} ({})", self.longest, self.longest_text);
        println!("blocks found damaged by scrubbing: {}", self.damaged_blocks());
        println!("findings: {}", self.findings.len());
    }
}

/// Waits until each load has so many more operations behind it, or has ended: its client is dead, or all
/// its files are in doubt.
fn go_on(machines: &Machines, loads: &[Load]) -> Outcome {
    let target = |load: &Load| load.ledger.length() + PROGRESS;
    let targets: Vec<usize> = loads.iter().map(target).collect();
    machines.wait_until("the loads go on", PROGRESS_WAIT, |_| {
        let reached = |(load, target): (&Load, &usize)| {
            load.ledger.length() >= *target || load.ledger.has_ended()
        };
        loads.iter().zip(&targets).all(reached)
    })
}

/// Whether every node serves, every partition has its copies, and nothing is left to do.
fn is_whole(machines: &Machines) -> bool {
    let tasks = machines.json(&["task", "list"]);
    let status = machines.json(&["status"]);
    let is_empty = |value: &serde_json::Value| value.as_array().is_some_and(Vec::is_empty);
    machines.are_all_active()
        && tasks.is_ok_and(|tasks| is_empty(&tasks))
        && status.is_ok_and(|status| is_empty(&status["warnings"]))
}

/// Takes faults until there is none left, and prints what came of it, whatever it was.
fn run(seed: u64, mut next: impl FnMut(&mut Course, Duration) -> Option<Fault>) {
    println!("MILPA_SOAK_SEED={seed}");
    let mut soak = Soak::start(seed).unwrap();
    let (mut course, started) = (Course::new(seed, layout(seed)), Instant::now());
    let mut done = Ok(());
    while let (Ok(()), Some(fault)) = (&done, next(&mut course, started.elapsed())) {
        let drawn = fault.to_string();
        done = soak.round(fault).map_err(|e| format!("{drawn}: {e}"));
    }
    let done = done.and_then(|()| soak.look_afresh()).and_then(|()| soak.compare_replicas());
    soak.look_for_panics();
    soak.report(started);
    if done.is_err() || !soak.findings.is_empty() {
        soak.machines.keep_files();
        panic!("MILPA_SOAK_SEED={seed}: {done:?} {:#?}", soak.findings);
    }
}

#[test]
#[ignore = "long: make soak"]
fn a_cluster_under_faults_for_half_an_hour() {
    let seed = from_environment("MILPA_SOAK_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let minutes = from_environment("MILPA_SOAK_MINUTES").unwrap_or(30);
    let length = Duration::from_secs(60 * minutes);
    run(seed, |course, elapsed| (elapsed < length).then(|| course.draw()));
}

/// One of each kind.
#[test]
fn a_few_faults_are_survived() {
    let mut few = VecDeque::from([
        (Kind::Killed, "data"),
        (Kind::Stopped, "meta"),
        (Kind::CutOff(Cut::Pulled), "server"),
        (Kind::CutOff(Cut::Deaf), "server"),
        (Kind::DiskFlipped, "data"),
        (Kind::DiskFlipped, "meta"),
        (Kind::DiskFlipped, "manager"),
        (Kind::ReplicaDeleted, "data"),
    ]);
    run(1, |course, _| few.pop_front().map(|(kind, role)| course.draw_one(kind, role)));
}
