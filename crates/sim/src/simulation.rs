//! The whole cluster on one thread: its machines, one tick after the other, and the course of a run.
//!
//! A run has four phases. *Boot*: servers start, the volume is made. *Safety*: clients work while the
//! nemesis does harm; every answer is judged as it comes. *Heal*: what is broken is mended, and the
//! clients must finish, the groups elect, the replicas become equal, within a budget of simulated
//! time. *Verification*: a client that has seen nothing reads everything, then deletes everything,
//! and the space must come back.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::cluster::{self, MANAGERS, Part};
use crate::crash_points::{Crash, Effectful};
use crate::disk::{DiskOptions, Ordered, Platter};
use crate::history::SharedHistory;
use crate::machine::Machine;
use crate::nemesis::{Fault, Mend, Nemesis, Victims};
use crate::network::{Ending, Wires};
use crate::observer::{Leaving, Observer, SharedWatch, Wanted};
use crate::old_disks::OldDisks;
use crate::options::Options;
use crate::random::Random;
use crate::stalls::{self, Stalls};
use crate::trace;
use crate::workload::{self, Plan, Quota};

/// Simulated milliseconds of a tick, while clients work and while everybody waits.
const TICK_MS: u64 = 1;
const WAITING_TICK_MS: u64 = 10;
/// Where extents, definitions and snapshots lie.
const CONTENT: [&str; 1] = ["partitions"];
/// All that a replica consists of. (What says which node this is has no copy elsewhere: a node that
/// cannot read it refuses to start.)
const REPLICA: [&str; 3] = ["partitions", "states", "raft"];
/// Bits of each server that flip at rest.
const ROTTEN_AT_REST: u64 = 8;
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
/// By then the managers have heard what a node that starts has lost.
const ROT_IS_SEEN_MS: u64 = 10_000;

/// A machine and what it is for.
struct Placed {
    part: Part,
    number: usize,
    machine: Machine,
    /// A client's number over all lives of all clients.
    client: u32,
}

/// Whether a file is below a directory of one of these names.
fn is_below(path: &Path, names: &[&str]) -> bool {
    let is_one = |part: &OsStr| names.iter().any(|name| part == *name);
    path.components().any(|component| is_one(component.as_os_str()))
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
    /// How long calls took.
    pub stalls: Stalls,
}

fn locked(wires: &Mutex<Wires>) -> MutexGuard<'_, Wires> {
    wires.lock().unwrap_or_else(PoisonError::into_inner)
}

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
            if let Some(point) = self.options.crash.as_ref().filter(|point| point.machine == name) {
                machine.disk().effects.end_after(point.effects);
            }
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
            let has_failed = std::mem::take(&mut placed.machine.disk().has_failed);
            if has_failed {
                self.unsynced_were_lost(place);
            }
            let Some(placed) = self.machines.get_mut(place) else { continue };
            if placed.machine.is_at_end() {
                self.crash(place);
            } else if let Some(reason) = ended {
                self.ended(place, &reason);
            }
        }
        trace::set_machine("");
        let wires = locked(&self.wires);
        trace::mix(&[wires.counts.packets, wires.counts.bytes, wires.counts.connections]);
    }

    /// Nothing that a machine does has an effect any more.
    fn crash(&mut self, place: usize) {
        let Some(crash) = self.options.crash.as_ref().map(|point| point.crash) else {
            return self.stop(place, Ending::Power);
        };
        trace::note("FAULT crash");
        self.crashes += 1;
        // Nobody mends what no nemesis broke.
        if self.machines.get(place).is_some_and(|placed| placed.part == Part::Client) {
            self.kill_client(place);
            self.start_client(place);
        } else {
            let ending = if crash == Crash::Kill { Ending::Process } else { Ending::Power };
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
        match placed.part {
            Part::Client => {}
            Part::Observer => self.verified = reason.to_owned(),
            _ => self.restarts.push((self.now_ms + 1000, place)),
        }
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
        if self.options.crash.is_some() && self.crashes == 0 {
            self.failed("simulation", "the crash point was not reached");
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

    fn harm(&mut self) {
        self.copy_disks();
        for mend in self.nemesis.due(self.now_ms) {
            self.mend(mend);
        }
        if let Some(fault) = self.nemesis.strike(self.now_ms) {
            trace::note(&format!("FAULT {}", self.describe(fault)));
            self.inflict(fault);
            if fault.is_harm() {
                self.quota.fault_happened();
            }
        }
    }

    fn describe(&self, fault: Fault) -> String {
        let name =
            |place: usize| self.machines.get(place).map_or("?", |placed| placed.machine.name);
        match fault {
            Fault::Kill(a)
            | Fault::Power(a)
            | Fault::Isolate(a)
            | Fault::FailedWrite(a)
            | Fault::FailedSync(a)
            | Fault::FullDisk(a)
            | Fault::FailedRead(a)
            | Fault::LostWrite(a)
            | Fault::MisdirectedWrite(a)
            | Fault::Rot(a)
            | Fault::Lose(a)
            | Fault::OldDisk(a)
            | Fault::Drain(a)
            | Fault::ClientKill(a) => {
                format!("{fault:?} = {}", name(a))
            }
            Fault::Freeze(a, _)
            | Fault::Pause(a, _)
            | Fault::WallJump(a, _)
            | Fault::SlowDisk(a, _)
            | Fault::SlowLink(a, _)
            | Fault::ClientPause(a, _) => {
                format!("{fault:?} = {}", name(a))
            }
            Fault::OneWay(a, b) => format!("{fault:?} = {} to {}", name(a), name(b)),
            Fault::PowerEverywhere | Fault::Split(_) | Fault::Grow => format!("{fault:?}"),
        }
    }

    fn inflict(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(place) => self.stop(place, Ending::Process),
            Fault::Power(place) => self.stop(place, Ending::Power),
            Fault::PowerEverywhere => {
                for place in self.places(|placed| placed.part.is_server()) {
                    self.stop(place, Ending::Power);
                }
            }
            Fault::Freeze(place, effects) => {
                if let Some(placed) = self.machines.get(place) {
                    placed.machine.disk().effects.end_after(effects);
                }
            }
            Fault::Isolate(_) | Fault::OneWay(..) | Fault::Split(_) => {
                self.set_blocked(fault, true)
            }
            Fault::Pause(place, lasts_ms) | Fault::ClientPause(place, lasts_ms) => {
                if let Some(placed) = self.machines.get_mut(place) {
                    placed.machine.paused_until_ms = self.now_ms + lasts_ms;
                }
            }
            Fault::WallJump(place, jump_ms) => {
                if let Some(placed) = self.machines.get(place) {
                    placed.machine.wall_offset_ms.set(jump_ms);
                }
            }
            Fault::SlowDisk(place, times) => self.set_slowness(place, times),
            Fault::SlowLink(place, extra_ms) => {
                if let Some(placed) = self.machines.get(place) {
                    locked(&self.wires).set_slow(placed.machine.address, extra_ms);
                }
            }
            Fault::FailedRead(place) => self.order(place, Ordered::FailRead),
            Fault::LostWrite(place) => self.order_lie(place, Ordered::LoseWrite),
            Fault::MisdirectedWrite(place) => self.order_lie(place, Ordered::MisdirectWrite),
            Fault::FailedWrite(place) => self.order_failure(place, Ordered::FailWrite),
            Fault::FailedSync(place) => {
                // What the disk drops then is lost as in a power cut.
                self.order_failure(place, Ordered::FailSync);
                self.unsynced_were_lost(place);
            }
            Fault::FullDisk(place) => {
                if let Some(placed) = self.machines.get(place) {
                    let mut disk = placed.machine.disk();
                    disk.options.capacity_bytes = disk.allocated();
                }
            }
            Fault::Rot(place) => self.rot(place, &CONTENT),
            Fault::ClientKill(place) => self.kill_client(place),
            Fault::Grow => self.watch.borrow_mut().wanted = Wanted::Grow,
            Fault::Lose(place) => self.lose(place),
            Fault::OldDisk(place) => self.bring_back_old_disk(place),
            Fault::Drain(place) => self.drain(place),
        }
    }

    /// All that a server holds is gone.
    fn lose(&mut self, place: usize) {
        self.stop(place, Ending::Power);
        if let Some(placed) = self.machines.get(place) {
            placed.machine.disk().exchange(None);
        }
        self.unsynced_were_lost(place);
    }

    /// A server loses its power, and has an old copy of its disk then, if there is one that must be refused.
    fn bring_back_old_disk(&mut self, place: usize) {
        self.stop(place, Ending::Power);
        if let Some(placed) = self.machines.get(place) {
            self.old_disks.put_back(place, &placed.machine);
        }
        self.unsynced_were_lost(place);
        self.start(place);
    }

    /// A server begins anew, with an empty disk, or stays switched off with one. If it had an old disk, it must
    /// not have been taken for itself.
    fn renew(&mut self, place: usize) {
        let Some(placed) = self.machines.get_mut(place) else { return };
        let was_running = placed.machine.is_running();
        placed.machine.stop(Ending::Process);
        if self.old_disks.take_away(place, &placed.machine) {
            let detail = format!("{} was taken for what it had been", placed.machine.name);
            self.failed("old disks are refused", &detail);
        }
        if was_running {
            self.start(place);
        }
    }

    fn drain(&mut self, place: usize) {
        let Some(placed) = self.machines.get(place) else { return };
        let address = cluster::listens(placed.part, placed.number);
        // Whoever is told to stay has to hear of it first.
        self.watch.borrow_mut().leaving.get_or_insert_with(|| Leaving::new(address));
    }

    /// A server whose node was removed begins anew. It held nothing: no copy is lost.
    fn renew_who_left(&mut self) {
        let Some(address) = self.watch.borrow_mut().has_left.take() else { return };
        let is_it = |placed: &Placed| cluster::listens(placed.part, placed.number) == address;
        self.places(is_it).into_iter().for_each(|place| self.renew(place));
    }

    fn copy_disks(&mut self) {
        if self.options.weights.old_disk > 0 && self.old_disks.are_due(self.now_ms) {
            for (place, placed) in self.machines.iter().enumerate() {
                if matches!(placed.part, Part::Meta | Part::Data) {
                    self.old_disks.copy(place, &placed.machine);
                }
            }
        }
    }

    fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Start(place) => self.restart(place),
            Mend::StartAll => self.start_servers(),
            Mend::Open(fault) => self.set_blocked(fault, false),
            Mend::FastDisk(place) => self.set_slowness(place, 1),
            Mend::FastLink(place) => {
                if let Some(placed) = self.machines.get(place) {
                    locked(&self.wires).set_slow(placed.machine.address, 0);
                }
            }
            Mend::EmptyDisk(place) => {
                if let Some(placed) = self.machines.get(place) {
                    placed.machine.disk().options.capacity_bytes = DISK_BYTES;
                }
            }
            Mend::StartClient(place) => self.start_client(place),
            Mend::Replace(place) if self.old_disks.has(place) => {
                self.renew(place);
                self.start(place);
            }
            Mend::Replace(_) => {}
            Mend::Stay => {
                if let Some(leaving) = &mut self.watch.borrow_mut().leaving {
                    leaving.is_taken_back = true;
                }
            }
        }
    }

    /// Starts a server if it is down; one that the nemesis wanted to freeze and that has not lives on.
    fn restart(&mut self, place: usize) {
        if let Some(placed) = self.machines.get(place) {
            placed.machine.disk().effects.go_on();
        }
        self.start(place);
    }

    fn stop(&mut self, place: usize, ending: Ending) {
        let Some(placed) = self.machines.get_mut(place) else { return };
        if !placed.machine.is_running() {
            return;
        }
        placed.machine.stop(ending);
        if ending == Ending::Power {
            self.unsynced_were_lost(place);
        }
    }

    fn set_slowness(&mut self, place: usize, times: u64) {
        if let Some(placed) = self.machines.get(place) {
            placed.machine.slowness.set(times);
        }
    }

    fn order(&self, place: usize, what: Ordered) {
        if let Some(placed) = self.machines.get(place) {
            placed.machine.disk().ordered.push_back(what);
        }
    }

    /// One at a time: an overwrite of which the bytes and the checksum are both lost cannot be noticed.
    fn order_lie(&mut self, place: usize, what: Ordered) {
        let is_idle = |placed: &Placed| placed.machine.disk().ordered.is_empty();
        if self.machines.get(place).is_some_and(is_idle) {
            self.harmed.insert(place);
            self.order(place, what);
        }
    }

    fn order_failure(&mut self, place: usize, failure: Ordered) {
        self.order(place, failure);
        self.failed_disks.insert(place);
    }

    fn rot(&mut self, place: usize, names: &[&str]) {
        self.harmed.insert(place);
        self.unsynced_were_lost(place);
        let Some(placed) = self.machines.get(place) else { return };
        let hit = placed.machine.disk().rot(|path| is_below(path, names));
        trace::note(&format!("a bit flips: {hit:?}"));
    }

    /// One data node and one meta node find extents, logs, states and snapshots damaged when they start. (While
    /// other servers are broken that is one failure too many: a group without a majority waits.)
    fn rot_at_rest(&mut self) {
        for part in [Part::Data, Part::Meta] {
            let Some(place) = self.places(|placed| placed.part == part).first().copied() else {
                return;
            };
            self.stop(place, Ending::Process);
            (0..ROTTEN_AT_REST).for_each(|_| self.rot(place, &REPLICA));
            self.start(place);
        }
        self.run_until(ROT_IS_SEEN_MS, |_| false);
        self.want(Wanted::Whole, WHOLE_MS, "replicas equal after rot");
    }

    fn set_blocked(&mut self, fault: Fault, blocked: bool) {
        let cuts = |a: usize, b: usize| match fault {
            Fault::Isolate(place) => a == place || b == place,
            Fault::OneWay(from, to) => (a, b) == (from, to),
            Fault::Split(mask) => (mask >> (a % 64) ^ mask >> (b % 64)) & 1 == 1,
            _ => false,
        };
        let mut wires = locked(&self.wires);
        for (a, from) in self.machines.iter().enumerate() {
            for (b, to) in self.machines.iter().enumerate() {
                if a != b && cuts(a, b) {
                    wires.set_blocked(from.machine.address, to.machine.address, blocked);
                }
            }
        }
    }

    fn heal(&mut self) {
        trace::note("phase: heal");
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
        let stalls = stalls::judge(&self.history.borrow().calls, &self.nemesis.spans);
        stalls.broken.iter().for_each(|detail| self.failed("bounded stalls", detail));
        stalls.prolonged.iter().for_each(|detail| self.failed("stalls end with overlaps", detail));
        self.stalls = stalls;
        self.want(Wanted::Whole, WHOLE_MS, "replicas equal");
        if self.options.rots_at_rest && !self.is_over() {
            self.rot_at_rest();
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
        let may_lose = self.harmed.len() >= 2;
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
