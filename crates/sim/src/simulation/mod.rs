//! The whole cluster on one thread: its machines, one tick after the other, and the course of a run.
//!
//! A run has four phases. *Boot*: servers start, the volume is made. *Safety*: clients work while the
//! nemesis does harm; every answer is judged as it comes. *Heal*: what is broken is mended, and the
//! clients must finish, the groups elect, the replicas become equal, within a budget of simulated
//! time. *Verification*: a client that has seen nothing reads everything, then deletes everything,
//! and the space must come back.

mod harm;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::cluster::{self, MANAGERS, Part};
use crate::crash_points::{Crash, CrashPoint, Effectful};
use crate::disk::{DiskOptions, Platter};
use crate::history::SharedHistory;
use crate::machine::Machine;
use crate::nemesis::{Nemesis, Victims};
use crate::network::{Ending, Wires};
use crate::observer::{Observer, SharedWatch, Wanted};
use crate::old_disks::OldDisks;
use crate::options::Options;
use crate::random::Random;
use crate::stalls::{self, Stalls};
use crate::trace;
use crate::workload::{self, Plan, Quota};

/// Simulated milliseconds of a tick, while clients work and while everybody waits.
const TICK_MS: u64 = 1;
const WAITING_TICK_MS: u64 = 10;
/// Capacity of each disk.
const DISK_BYTES: u64 = 1 << 30;
/// Simulated time that each phase may take, in milliseconds.
const BOOT_MS: u64 = 60_000;
const SAFETY_MS: u64 = 600_000;
const HEAL_MS: u64 = 240_000;
const WHOLE_MS: u64 = 180_000;
const WALK_MS: u64 = 120_000;
const EMPTY_MS: u64 = 240_000;
/// Until a server that crashed at a point that was asked for is started again.
const CRASH_LASTS_MS: u64 = 1_000;

/// A machine and what it is for.
struct Placed {
    part: Part,
    number: usize,
    machine: Machine,
    /// A client's number over all lives of all clients.
    client: u32,
}

/// The cluster and all around it.
pub(crate) struct Simulation {
    pub options: Options,
    pub now_ms: u64,
    /// How far machines run ahead of each other: nothing arrives sooner. Short while clients work,
    /// longer while everybody waits.
    tick_ms: u64,
    pub history: SharedHistory,
    pub watch: SharedWatch,
    pub nemesis: Nemesis,
    pub wires: Arc<Mutex<Wires>>,
    machines: Vec<Placed>,
    /// There are no more faults.
    is_healing: bool,
    quota: Rc<Quota>,
    directories: Rc<RefCell<Vec<milpa_types::InodeId>>>,
    next_client: u32,
    /// Servers that ended by themselves, and when they are to be started again.
    restarts: Vec<(u64, usize)>,
    /// Servers whose disk failed a call: out of service until an operator restarts them.
    failed_disks: BTreeSet<usize>,
    /// Data servers that lost bytes at any time: to a power cut, to a failed disk, to rot, or to a lie.
    harmed: BTreeSet<usize>,
    order: Random,
    pub old_disks: OldDisks,
    /// What the verifying clients said at their end.
    pub verified: String,
    /// At the point that was asked for.
    pub crashes: u64,
    /// When what was paused at that point has been going on for a while.
    gone_on_at: Option<u64>,
    /// How long calls took.
    pub stalls: Stalls,
}

fn locked(wires: &Mutex<Wires>) -> MutexGuard<'_, Wires> {
    wires.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a machine crash where that was asked for.
fn arm(machine: &Machine, crash: Option<&CrashPoint>) {
    let is_here =
        |point: &&CrashPoint| point.machine == machine.name && point.crash != Crash::Pause;
    if let Some(point) = crash.filter(is_here) {
        let effects = &machine.disk().effects;
        effects.end_after(point.effects.saturating_sub(effects.done()));
    }
}

/// How managers say that a node has to start with an empty directory.
const REFUSED: [&str; 2] = ["is an older copy", "is not of this cluster"];

impl Simulation {
    pub fn new(options: Options) -> Simulation {
        let links = Random::new(options.seed, "links");
        let wires = Arc::new(Mutex::new(Wires::new(options.links.clone(), links)));
        let mut simulation = Simulation {
            now_ms: 0,
            tick_ms: TICK_MS,
            history: SharedHistory::default(),
            watch: SharedWatch::default(),
            nemesis: Nemesis::new(&options, Victims::default()),
            wires,
            machines: Vec::new(),
            is_healing: false,
            quota: Rc::new(Quota::new(options.operations, options.faults_min)),
            directories: Rc::new(RefCell::new(vec![milpa_types::InodeId::ROOT])),
            next_client: 1,
            restarts: Vec::new(),
            failed_disks: BTreeSet::new(),
            harmed: BTreeSet::new(),
            order: Random::new(options.seed, "order"),
            old_disks: OldDisks::default(),
            verified: String::new(),
            crashes: 0,
            gone_on_at: None,
            stalls: Stalls::default(),
            options,
        };
        let (meta, data) = (simulation.options.meta_nodes, simulation.options.data_nodes);
        let mut victims = Victims {
            managers: simulation.add(Part::Manager, MANAGERS),
            meta: simulation.add(Part::Meta, meta),
            data: simulation.add(Part::Data, data),
            clients: Vec::new(),
        };
        victims.clients = simulation.add(Part::Client, simulation.options.clients);
        // The observer, and the two clients that verify and delete.
        for place in simulation.add(Part::Observer, 3) {
            if let Some(placed) = simulation.machines.get(place) {
                locked(&simulation.wires).exempt(placed.machine.address);
            }
        }
        simulation.nemesis = Nemesis::new(&simulation.options, victims);
        simulation
    }

    /// Adds machines; gives their places.
    fn add(&mut self, part: Part, count: usize) -> Vec<usize> {
        let mut places = Vec::new();
        for number in 0..count {
            let name = part.name(number);
            let options = DiskOptions {
                capacity_bytes: DISK_BYTES,
                name_loss: self.options.name_loss,
                read_errors: 0,
                may_be_hit: harm::has_copies,
            };
            let disk =
                Platter::new(options, Random::new(self.options.seed, &format!("disk {name}")));
            let mut machine = Machine::new(
                name,
                part.address(number),
                disk,
                Arc::clone(&self.wires),
                self.options.jobs,
                self.options.seed,
            );
            arm(&machine, self.options.crash.as_ref());
            if part.is_server() {
                let drift = self.order.between(0, 2 * self.options.drift_ppm);
                machine.clock_rate_ppm = 1_000_000 + drift - self.options.drift_ppm;
            }
            places.push(self.machines.len());
            self.machines.push(Placed { part, number, machine, client: 0 });
        }
        places
    }

    /// One tick: what has arrived is delivered, then every machine runs for as long.
    fn tick(&mut self) {
        self.now_ms += self.tick_ms;
        trace::set_now(self.now_ms);
        let woken = {
            let mut wires = locked(&self.wires);
            wires.tick_ms = self.tick_ms;
            wires.advance(self.now_ms)
        };
        woken.into_iter().for_each(Waker::wake);
        self.renew_who_left();
        let restarts = std::mem::take(&mut self.restarts);
        for (at, place) in restarts {
            if at <= self.now_ms {
                self.start(place);
            } else {
                self.restarts.push((at, place));
            }
        }
        for place in 0..self.machines.len() {
            let Some(placed) = self.machines.get_mut(place) else { continue };
            let ended = placed.machine.step(self.now_ms);
            self.look_at_disk(place);
            self.pause_at_point(place);
            let Some(placed) = self.machines.get_mut(place) else { continue };
            if placed.machine.is_at_end() {
                self.crash(place);
            } else if let Some(reason) = ended {
                self.ended(place, &reason);
            }
        }
        trace::set_machine("");
        if self.gone_on_at.take_if(|at| *at <= self.now_ms).is_some() {
            self.quota.fault_happened();
        }
        for (check, detail) in trace::broken() {
            self.failed(check, &detail);
        }
        let wires = locked(&self.wires);
        trace::mix(&[wires.counts.packets, wires.counts.bytes, wires.counts.connections]);
    }

    /// Counts what its disk did to it.
    fn look_at_disk(&mut self, place: usize) {
        let Some(placed) = self.machines.get(place) else { return };
        let (has_failed, carried_out) = {
            let mut disk = placed.machine.disk();
            (std::mem::take(&mut disk.has_failed), std::mem::take(&mut disk.carried_out))
        };
        if has_failed {
            self.unsynced_were_lost(place);
        }
        for (ordered, times) in carried_out {
            (0..times).for_each(|_| self.happened(harm::name_of(ordered), true));
        }
    }

    /// Nothing that a machine does has an effect any more.
    fn crash(&mut self, place: usize) {
        let Some(crash) = self.options.crash.as_ref().map(|point| point.crash) else {
            self.happened("freeze", true);
            self.stop(place, Ending::Power);
            return;
        };
        trace::note("FAULT crash");
        self.crashes += 1;
        // Nobody mends what no nemesis broke.
        if self.machines.get(place).is_some_and(|placed| placed.part == Part::Client) {
            self.kill_client(place);
            self.start_client(place);
        } else {
            let ending = if crash == Crash::Power { Ending::Power } else { Ending::Process };
            self.stop(place, ending);
            self.restarts.push((self.now_ms + CRASH_LASTS_MS, place));
        }
    }

    fn kill_client(&mut self, place: usize) {
        self.stop(place, Ending::Process);
        if let Some(placed) = self.machines.get(place) {
            self.history.borrow_mut().client_died(placed.client);
        }
    }

    /// A node has ended by itself. A supervisor starts servers again.
    fn ended(&mut self, place: usize, reason: &str) {
        trace::note(&format!("ended by itself: {reason}"));
        let Some(placed) = self.machines.get_mut(place) else { return };
        placed.machine.stop(Ending::Process);
        // A manager's disk that lies may have taken the node's newest life, or its registration (docs/decisions/0012).
        // Its operator does what the reason says; a copy that the nemesis has put back is its own to replace.
        let is_refused = REFUSED.iter().any(|refused| reason.contains(refused));
        if self.is_healing && self.options.weights.lie > 0 && is_refused {
            self.empty_refused(place);
        }
        let Some(placed) = self.machines.get(place) else { return };
        match placed.part {
            Part::Client => {}
            Part::Observer => self.verified = reason.to_owned(),
            _ => self.restarts.push((self.now_ms + 1000, place)),
        }
    }

    /// Those whose disks were harmed, or that the managers have called dead: such a one is lost with all that is on it
    /// (docs/decisions/0007).
    fn failed_data_servers(&self) -> usize {
        let has_failed = |(place, placed): &(usize, &Placed)| {
            let is_dead =
                || trace::was_called_dead(placed.part.socket(placed.number, cluster::PORT));
            placed.part == Part::Data && (self.harmed.contains(place) || is_dead())
        };
        self.machines.iter().enumerate().filter(has_failed).count()
    }

    /// By a power cut, with a disk that failed, or where a bit rotted.
    fn unsynced_were_lost(&mut self, place: usize) {
        if let Some(placed) = self.machines.get(place)
            && placed.part == Part::Data
        {
            self.harmed.insert(place);
            self.history.borrow_mut().power_cut(placed.number as u32);
        }
    }

    /// Runs until something holds. False if it did not within so much simulated time.
    fn run_until(&mut self, limit_ms: u64, mut holds: impl FnMut(&mut Simulation) -> bool) -> bool {
        let end_ms = self.now_ms + limit_ms;
        while self.now_ms < end_ms {
            self.tick();
            if holds(self) {
                return true;
            }
            if trace::panics() > 0 || self.history.borrow().violations.len() > 10 {
                return true;
            }
        }
        false
    }

    fn start(&mut self, place: usize) {
        let Some(placed) = self.machines.get_mut(place) else { return };
        if placed.machine.is_running() {
            return;
        }
        let (part, number, options) = (placed.part, placed.number, &self.options);
        let started = placed.machine.start(self.now_ms, || cluster::server(part, number, options));
        if let Err(error) = started {
            self.history.borrow_mut().violated("simulation", format!("no runtime: {error}"));
        }
    }

    fn start_client(&mut self, place: usize) {
        let Some(key) = self.watch.borrow().key.clone() else { return };
        let client = self.next_client;
        let plan = Plan {
            config: cluster::client_config(&key, &self.options),
            client,
            workers: self.options.workers,
            quota: Rc::clone(&self.quota),
            history: Rc::clone(&self.history),
            directories: Rc::clone(&self.directories),
            seed: self.options.seed,
            judges_lookups: !self.options.caches_names,
            pause_max_ms: self.options.pause_max_ms,
        };
        let Some(placed) = self.machines.get_mut(place) else { return };
        if placed.machine.is_running() {
            return;
        }
        self.next_client += 1;
        placed.client = client;
        let started = placed.machine.start(self.now_ms, || Box::pin(workload::run_client(plan)));
        if let Err(error) = started {
            self.history.borrow_mut().violated("simulation", format!("no runtime: {error}"));
        }
    }

    /// Starts one of the machines that no fault touches.
    fn start_observer(&mut self, number: usize, node: impl FnOnce() -> crate::machine::Node) {
        let now_ms = self.now_ms;
        let found =
            self.machines.iter_mut().find(|p| p.part == Part::Observer && p.number == number);
        let Some(placed) = found else { return };
        if let Err(error) = placed.machine.start(now_ms, node) {
            self.history.borrow_mut().violated("simulation", format!("no runtime: {error}"));
        }
    }

    fn places(&self, wanted: impl Fn(&Placed) -> bool) -> Vec<usize> {
        let all = self.machines.iter().enumerate();
        all.filter(|(_, placed)| wanted(placed)).map(|(place, _)| place).collect()
    }

    /// The whole run. What it found is in the history.
    pub fn run(&mut self) {
        if !self.boot() || self.is_over() {
            return;
        }
        for place in self.places(|placed| placed.part == Part::Client) {
            self.start_client(place);
        }
        self.safety();
        if self.is_over() {
            return;
        }
        self.heal();
        if self.is_over() {
            return;
        }
        self.verification();
        if let Some(point) = self.options.crash.as_ref().filter(|_| self.crashes == 0) {
            let machines =
                self.effects().into_iter().map(|it| format!("{} {}", it.machine, it.effects));
            let machines = machines.collect::<Vec<_>>().join(", ");
            let detail = format!("{point} was not reached; what each machine did: {machines}");
            self.failed("simulation", &detail);
        }
    }

    fn is_over(&self) -> bool {
        trace::panics() > 0 || !self.history.borrow().violations.is_empty()
    }

    fn failed(&self, check: &'static str, detail: &str) {
        self.history.borrow_mut().violated(check, detail.to_owned());
    }

    fn start_servers(&mut self) {
        self.places(|placed| placed.part.is_server())
            .into_iter()
            .for_each(|place| self.start(place));
    }

    fn boot(&mut self) -> bool {
        trace::note("phase: boot");
        self.start_servers();
        let (watch, history) = (Rc::clone(&self.watch), Rc::clone(&self.history));
        let options = self.options.clone();
        self.start_observer(0, || Box::pin(Observer::new(watch, history, options).run()));
        let is_up = self.run_until(BOOT_MS, |sim| sim.watch.borrow().key.is_some());
        if !is_up {
            self.failed("boot", "no volume within the time");
        }
        is_up
    }

    fn safety(&mut self) {
        trace::note("phase: safety");
        self.run_until(SAFETY_MS, |sim| {
            sim.harm();
            sim.quota.is_met()
        });
    }

    /// False if it did not run.
    fn stop(&mut self, place: usize, ending: Ending) -> bool {
        let Some(placed) = self.machines.get_mut(place) else { return false };
        let was_running = placed.machine.is_running();
        if was_running {
            placed.machine.stop(ending);
            if ending == Ending::Power {
                self.unsynced_were_lost(place);
            }
        }
        was_running
    }

    fn heal(&mut self) {
        trace::note("phase: heal");
        self.is_healing = true;
        self.quota.no_more_faults();
        for mend in self.nemesis.surrender(self.now_ms) {
            self.mend(mend);
        }
        {
            let mut wires = locked(&self.wires);
            wires.heal();
            wires.faults.loss = 0;
            wires.faults.corruption = 0;
            wires.faults.resets = 0;
            wires.faults.delays = 0;
        }
        for placed in &mut self.machines {
            placed.machine.paused_until_ms = placed.machine.paused_until_ms.min(self.now_ms + 1);
            placed.machine.slowness.set(1);
            let mut disk = placed.machine.disk();
            disk.options.capacity_bytes = DISK_BYTES;
            disk.ordered.clear();
        }
        for place in std::mem::take(&mut self.failed_disks) {
            self.stop(place, Ending::Process);
        }
        self.start_servers();
        self.watch.borrow_mut().wanted = Wanted::Watch;
        let all_done = |sim: &mut Simulation| {
            !sim.machines.iter().any(|p| p.part == Part::Client && p.machine.is_running())
        };
        if !self.run_until(HEAL_MS, all_done) {
            self.failed("progress", "clients have not finished after everything was healed");
            return;
        }
        let bound_ms = stalls::bound_ms(&self.options.links);
        let stalls = stalls::judge(&self.history.borrow().calls, &self.nemesis.spans, bound_ms);
        stalls.broken.iter().for_each(|detail| self.failed("bounded stalls", detail));
        stalls.prolonged.iter().for_each(|detail| self.failed("stalls end with overlaps", detail));
        self.stalls = stalls;
        self.want(Wanted::Whole, WHOLE_MS, "replicas equal");
        if self.options.rots_at_rest && !self.is_over() {
            self.rot_at_rest();
        }
        if !self.is_over() {
            self.read_again();
        }
    }

    /// Waits for the observer to see that something holds.
    fn want(&mut self, wanted: Wanted, limit_ms: u64, check: &'static str) {
        {
            let mut watch = self.watch.borrow_mut();
            (watch.wanted, watch.is_reached) = (wanted, false);
        }
        self.tick_ms = WAITING_TICK_MS;
        if !self.run_until(limit_ms, |sim| sim.watch.borrow().is_reached) {
            let missing = self.watch.borrow().missing.clone();
            self.failed(check, &missing);
        }
        self.tick_ms = TICK_MS;
        self.watch.borrow_mut().wanted = Wanted::Watch;
    }

    fn verification(&mut self) {
        trace::note("phase: verification");
        let given_up = self.history.borrow_mut().judge_names();
        if given_up > 0 {
            self.failed("linearizable names", &format!("{given_up} searches were given up"));
        }
        let Some(key) = self.watch.borrow().key.clone() else { return };
        let mut options = self.options.clone();
        options.caches_names = false;
        let config = cluster::client_config(&key, &options);
        let (client, history) = (self.next_client, Rc::clone(&self.history));
        let (verifying, verified) = (config.clone(), Rc::clone(&history));
        let may_lose = self.failed_data_servers() >= 2;
        self.start_observer(1, || {
            Box::pin(workload::verify(verifying, client, verified, may_lose))
        });
        self.wait_for_observer(1, "the final walk did not end");
        self.history.borrow_mut().judge_names();
        if self.is_over() {
            return;
        }
        self.start_observer(2, || Box::pin(workload::delete_all(config, history)));
        self.wait_for_observer(2, "the final deletion did not end");
        if !self.is_over() {
            self.want(Wanted::Empty, EMPTY_MS, "space returns");
        }
    }

    fn wait_for_observer(&mut self, number: usize, otherwise: &str) {
        let is_done = |sim: &mut Simulation| {
            let is_it = |p: &&Placed| p.part == Part::Observer && p.number == number;
            sim.machines.iter().find(is_it).is_none_or(|placed| !placed.machine.is_running())
        };
        if !self.run_until(WALK_MS, is_done) {
            self.failed("verification", otherwise);
        }
    }

    /// Adds up what happened to the disks.
    pub fn disk_counts(&self) -> crate::disk::DiskCounts {
        let mut sum = crate::disk::DiskCounts::default();
        for placed in &self.machines {
            sum.add(&placed.machine.disk().counts);
        }
        sum
    }

    /// What machines did to their disks and to each other.
    pub fn effects(&self) -> Vec<Effectful> {
        let seen = self.machines.iter().filter(|placed| placed.part != Part::Observer);
        let effects = |placed: &Placed| Effectful {
            machine: placed.machine.name,
            has_disk: placed.part.is_server(),
            effects: placed.machine.disk().effects.done(),
        };
        seen.map(effects).collect()
    }

    /// How often servers were started.
    pub fn lives(&self) -> u64 {
        self.machines.iter().filter(|p| p.part.is_server()).map(|p| p.machine.lives).sum()
    }

    /// Ends all lives, so that nothing runs while the rest is dropped.
    pub fn shut_down(&mut self) {
        for placed in &mut self.machines {
            placed.machine.stop(Ending::Process);
        }
    }
}
