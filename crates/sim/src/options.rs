//! What a seed draws: the size of the cluster, which faults happen and how often, and knobs of the
//! nodes that make rare paths common (swarm testing: each seed a random subset, so that faults are
//! seen together as well as alone).

use std::fmt;

use crate::crash_points::{Crash, CrashPoint};
use crate::disk::NameLoss;
use crate::machine::JobTimes;
use crate::network::LinkFaults;
use crate::random::Random;

/// No seed is done before as many faults have happened.
const FAULTS_MIN: u64 = 5;

/// How a run is to be made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Decides everything else.
    pub seed: u64,
    /// Operations of all clients together, at least.
    pub operations: u64,
    /// No faults at all.
    pub is_calm: bool,
    /// Every event is printed as it happens.
    pub is_verbose: bool,
    /// Faults that are not to happen, by name.
    pub without: Vec<String>,
    /// No faults but this one: a machine crashes here.
    pub crash: Option<CrashPoint>,
}

impl fmt::Display for Settings {
    /// As options of `milpa-sim`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--seed {} --operations {}", self.seed, self.operations)?;
        if self.is_calm {
            write!(f, " --calm")?;
        }
        if !self.without.is_empty() {
            write!(f, " --without {}", self.without.join(","))?;
        }
        self.crash.iter().try_for_each(|crash| write!(f, " --crash {crash}"))
    }
}

/// Faults that happen from time to time, each with its weight: 0 for never.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Weights {
    /// A node's process is killed and started again (F10).
    pub kill: u64,
    /// A server loses its power (F2, F3).
    pub power: u64,
    /// All servers lose their power.
    pub power_everywhere: u64,
    /// The processes of all servers are killed at once (F10).
    pub kill_everywhere: u64,
    /// A server's power goes after one of its next effects: changes of its disk, and packets (F1).
    pub freeze: u64,
    /// A server is cut off, hears nobody, or is heard by nobody (F13, F14).
    pub isolate: u64,
    /// One direction between two machines is cut, or both (F13, F14).
    pub one_way: u64,
    /// The machines fall into two parts (F13).
    pub split: u64,
    /// A server stands still (F18).
    pub pause: u64,
    /// A wall clock jumps (F17).
    pub wall_jump: u64,
    /// A disk becomes slow (F11).
    pub slow_disk: u64,
    /// A server's links become slow (F11).
    pub slow_link: u64,
    /// A write or flush fails, or a name that is made or removed (F9).
    pub disk_error: u64,
    /// A server's disk is full for a while (F8).
    pub full_disk: u64,
    /// A bit of a server's disk flips, in the only server of each kind whose disk rots (F5).
    pub rot: u64,
    /// A client dies (F19).
    pub client_kill: u64,
    /// A client stands still, past its lease perhaps (F20).
    pub client_pause: u64,
    /// The volume grows, or a meta partition is split (F21).
    pub grow: u64,
    /// A read fails once, on any server (F9).
    pub read_error: u64,
    /// A write is acknowledged and lost, or lands elsewhere, on the only server of each kind whose disk lies
    /// (F4, F6).
    pub lie: u64,
    /// A server loses all that it holds, and comes back as a new one (F21), or as a manager that holds nothing.
    pub lose: u64,
    /// A meta or data node is drained in use, and removed when it is empty (F21).
    pub drain: u64,
    /// A meta or data server gets an old copy of its disk (F7), and is a new one when somebody has noticed.
    pub old_disk: u64,
}

/// What a seed has drawn.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub seed: u64,
    pub operations: u64,
    pub meta_nodes: usize,
    pub data_nodes: usize,
    pub clients: usize,
    pub workers: u32,
    pub pause_max_ms: u64,
    pub data_partitions: u32,
    pub inline_bytes_max: u32,
    pub small_file_bytes_max: u32,
    pub caches_names: bool,
    pub session_lease_ms: u64,
    pub snapshot_after_entries: u64,
    pub log_trim_ms: u64,
    pub small_extent_bytes_max: u64,
    /// Clocks run faster or slower by up to this much (F17).
    pub drift_ppm: u64,
    pub links: LinkFaults,
    pub jobs: JobTimes,
    pub name_loss: NameLoss,
    /// So many happen at least.
    pub faults_min: u64,
    /// Milliseconds between faults, on average.
    pub fault_every_ms: u64,
    /// Faults last up to this long.
    pub fault_lasts_ms: u64,
    /// A node that is silent for as long counts as dead, and may come back.
    pub dead_after_ms: u64,
    /// At most one server of each role is impaired at a time.
    pub is_gentle: bool,
    /// Whether disks of data nodes fail with the others.
    pub data_disks_fail: bool,
    /// When all is mended, a data and a meta node find damage as they start (F5).
    pub rots_at_rest: bool,
    pub weights: Weights,
    pub crash: Option<CrashPoint>,
}

impl Options {
    /// Draws for a seed.
    pub fn draw(settings: &Settings) -> Options {
        let mut random = Random::new(settings.seed, "options");
        let calm = settings.is_calm || settings.crash.is_some();
        let links = if calm { calm_links() } else { draw_links(&mut random) };
        let mut options = Options {
            seed: settings.seed,
            operations: settings.operations,
            meta_nodes: 3,
            data_nodes: random.between(3, 5) as usize,
            clients: random.between(2, 3) as usize,
            workers: random.between(1, 3) as u32,
            pause_max_ms: *random.pick(&[0, 5, 20, 50]).unwrap_or(&0),
            data_partitions: random.between(2, 6) as u32,
            inline_bytes_max: *random.pick(&[0, 512, 4096]).unwrap_or(&512),
            small_file_bytes_max: *random.pick(&[0, 16 << 10, 128 << 10]).unwrap_or(&0),
            caches_names: random.chance(1, 4),
            session_lease_ms: *random.pick(&[3_000, 10_000, 30_000]).unwrap_or(&30_000),
            snapshot_after_entries: *random.pick(&[100, 300, 5_000]).unwrap_or(&300),
            log_trim_ms: *random.pick(&[1_000, 5_000, 30_000]).unwrap_or(&5_000),
            small_extent_bytes_max: *random.pick(&[1 << 20, 4 << 20]).unwrap_or(&(1 << 20)),
            drift_ppm: *random.pick(&[0, 1_000, 50_000]).unwrap_or(&0),
            links,
            jobs: JobTimes {
                min_us: 0,
                max_us: *random.pick(&[200, 2_000, 8_000]).unwrap_or(&200),
            },
            name_loss: *random.pick(&[NameLoss::Newest, NameLoss::Any]).unwrap_or(&NameLoss::Any),
            faults_min: FAULTS_MIN,
            fault_every_ms: *random.pick(&[300, 1_000, 3_000]).unwrap_or(&1_000),
            fault_lasts_ms: *random.pick(&[1_000, 5_000, 20_000]).unwrap_or(&5_000),
            dead_after_ms: *random.pick(&[300_000, 300_000, 8_000]).unwrap_or(&300_000),
            is_gentle: random.chance(1, 2),
            data_disks_fail: true,
            rots_at_rest: false,
            weights: Weights::default(),
            crash: settings.crash.clone(),
        };
        options.weights = Weights::draw(&mut random);
        options.rots_at_rest = options.weights.rot > 0;
        if options.weights.drain > 0 {
            options.meta_nodes += 1;
            options.data_nodes = options.data_nodes.max(4);
        }
        if calm {
            options.weights = Weights::default();
            options.rots_at_rest = false;
            options.drift_ppm = 0;
        }
        for name in &settings.without {
            options.leave_out(name);
        }
        let does_harm = |name| name != "grow" && name != "drain";
        if options.weights.by_name().all(|(name, weight)| *weight == 0 || !does_harm(name)) {
            options.faults_min = 0;
        }
        if options.crash.as_ref().is_some_and(|point| point.crash == Crash::Pause) {
            // Clients work until what was paused has gone on.
            options.faults_min = 1;
        }
        if options.weights.lie > 0 || options.weights.rot > 0 {
            // As below: what is damaged behind our back is one copy, what is gone with a server another.
            (options.weights.lose, options.weights.old_disk) = (0, 0);
        }
        // What a disk loses behind our back, or a server, and another disk's end are two copies of three.
        let Weights { lie, lose, old_disk, .. } = options.weights;
        options.data_disks_fail = lie + lose + old_disk == 0;
        options
    }

    /// Takes one kind of fault away: one of [`fault_kinds`].
    fn leave_out(&mut self, name: &str) {
        match name {
            "network" => self.links = calm_links(),
            "drift" => self.drift_ppm = 0,
            "any-name-loss" => self.name_loss = NameLoss::Newest,
            _ => {
                if let Some(weight) = self.weights.by_name().find(|(known, _)| *known == name) {
                    *weight.1 = 0;
                }
            }
        }
    }
}

/// What [`Settings::without`] may name.
#[must_use]
pub fn fault_kinds() -> Vec<&'static str> {
    let mut weights = Weights::default();
    let drawn = weights.by_name().map(|(name, _)| name);
    ["network", "drift", "any-name-loss"].into_iter().chain(drawn).collect()
}

fn calm_links() -> LinkFaults {
    LinkFaults { latency_min_ms: 1, latency_max_ms: 1, ..LinkFaults::default() }
}

fn draw_links(random: &mut Random) -> LinkFaults {
    let is_lossy = random.chance(1, 12);
    let lost = random.between(20_000, 300_000) as u32;
    let mut rare = |rates: &[u32]| random.pick(rates).copied().unwrap_or(0);
    LinkFaults {
        latency_min_ms: 1,
        loss: if is_lossy { lost } else { rare(&[0, 0, 1_000, 20_000]) },
        corruption: rare(&[0, 0, 100, 2_000]),
        resets: rare(&[0, 0, 100, 2_000]),
        delays: rare(&[0, 0, 1_000, 20_000]),
        latency_max_ms: u64::from(rare(&[1, 3, 10])),
    }
}

impl Weights {
    fn draw(random: &mut Random) -> Weights {
        let mut weights = Weights::default();
        for (_, weight) in weights.by_name() {
            if random.chance(1, 2) {
                *weight = 1 + random.below(4);
            }
        }
        // An end of everything hides what single failures would show if it comes too often.
        weights.power_everywhere = weights.power_everywhere.min(1);
        weights.kill_everywhere = weights.kill_everywhere.min(1);
        weights
    }

    /// All of them, by name.
    pub fn by_name(&mut self) -> impl Iterator<Item = (&'static str, &mut u64)> {
        [
            ("kill", &mut self.kill),
            ("power", &mut self.power),
            ("power-everywhere", &mut self.power_everywhere),
            ("kill-everywhere", &mut self.kill_everywhere),
            ("freeze", &mut self.freeze),
            ("isolate", &mut self.isolate),
            ("one-way", &mut self.one_way),
            ("split", &mut self.split),
            ("pause", &mut self.pause),
            ("wall-jump", &mut self.wall_jump),
            ("slow-disk", &mut self.slow_disk),
            ("slow-link", &mut self.slow_link),
            ("disk-error", &mut self.disk_error),
            ("full-disk", &mut self.full_disk),
            ("rot", &mut self.rot),
            ("client-kill", &mut self.client_kill),
            ("client-pause", &mut self.client_pause),
            ("grow", &mut self.grow),
            ("read-error", &mut self.read_error),
            ("lie", &mut self.lie),
            ("lose", &mut self.lose),
            ("old-disk", &mut self.old_disk),
            ("drain", &mut self.drain),
        ]
        .into_iter()
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (links, jobs) = (&self.links, &self.jobs);
        writeln!(
            f,
            "seed {}: {} operations, 3 managers, {} meta, {} data nodes, {} clients with {} workers, \
             pause up to {} ms",
            self.seed,
            self.operations,
            self.meta_nodes,
            self.data_nodes,
            self.clients,
            self.workers,
            self.pause_max_ms
        )?;
        writeln!(
            f,
            "  volume: {} data partitions, inline {}, small {}; caches names {}; lease {} ms; \
             snapshot after {}; trim {} ms; small extents {}",
            self.data_partitions,
            self.inline_bytes_max,
            self.small_file_bytes_max,
            self.caches_names,
            self.session_lease_ms,
            self.snapshot_after_entries,
            self.log_trim_ms,
            self.small_extent_bytes_max
        )?;
        writeln!(
            f,
            "  links: {}-{} ms, in a million: {} lost, {} delayed, {} corrupted, {} reset; disks: jobs up \
             to {} us, unsynced names lost: {:?}; clock drift {} ppm",
            links.latency_min_ms,
            links.latency_max_ms,
            links.loss,
            links.delays,
            links.corruption,
            links.resets,
            jobs.max_us,
            self.name_loss,
            self.drift_ppm
        )?;
        write!(
            f,
            "  faults: every {} ms for up to {} ms, dead after {} ms, {}:",
            self.fault_every_ms,
            self.fault_lasts_ms,
            self.dead_after_ms,
            if self.is_gentle { "one server of a role at a time" } else { "anything goes" }
        )?;
        let mut weights = self.weights.clone();
        for (name, weight) in weights.by_name().filter(|(_, weight)| **weight > 0) {
            write!(f, " {name}={weight}")?;
        }
        Ok(())
    }
}
