//! Faults against a cluster of [`Machines`], one after the other, drawn from a seed.
//!
//! A [`Course`] is a deck of all faults, shuffled anew when it is used up, so that each comes up about
//! as often. Whom one hits, and for how long, is drawn with it. [`Fault::begin`] breaks, and
//! [`Fault::end`] mends, as an operator or a service manager would (docs/operations.md).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::machines::{Layout, Machines, Role};
use crate::network::Cut;
use crate::random::Random;
use crate::{Mounted, Outcome};

/// Seconds that a fault lasts: short enough that nobody is declared dead.
const LASTS_S: std::ops::Range<u64> = 4..14;
/// Milliseconds that a slow disk takes longer for each change and sync.
const SLOW_MS: [u64; 3] = [20, 50, 200];
const FLIPS: usize = 3;
/// Until a dead node is silent to the managers.
const REMOVAL_WAIT: Duration = Duration::from_secs(10);
/// Until a server that starts has said what it has lost.
const NOTICE_WAIT: Duration = Duration::from_secs(30);

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// kill -9; started again.
    Killed,
    /// SIGSTOP; SIGCONT.
    Stopped,
    /// The machine's network.
    CutOff(Cut),
    /// Not one byte more has room.
    DiskFilled,
    /// Each write and sync takes longer.
    DiskSlowed,
    /// Bits rot on one disk: of extents, and they are scrubbed; of a log, which is read at the next start.
    DiskFlipped,
    /// The directory of one replica is deleted, and the node restarted.
    ReplicaDeleted,
    /// The process's whole directory is deleted, and it is started with an empty one.
    DiskDeleted,
}

/// Whom it happens to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Victim {
    /// A server process.
    Process(String),
    /// All that runs on a server.
    Server(u8),
    /// A mount, counted from 1.
    Client(u8),
}

/// One fault.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// Whom.
    pub victim: Victim,
    /// How long it lasts.
    pub lasts: Duration,
    slow_ms: u64,
}

/// The faults to come.
#[derive(Debug)]
pub struct Course {
    random: Random,
    layout: Layout,
    deck: Vec<(Kind, Role)>,
}

/// Everything that can go wrong, with the kind of victim.
#[must_use]
pub fn all() -> Vec<(Kind, Role)> {
    let mut all = vec![
        (Kind::DiskFlipped, "data"),
        (Kind::DiskFlipped, "meta"),
        (Kind::DiskFlipped, "manager"),
        (Kind::ReplicaDeleted, "data"),
        (Kind::DiskDeleted, "data"),
        (Kind::DiskDeleted, "meta"),
    ];
    for role in ["manager", "meta", "data"] {
        let each = [Kind::Killed, Kind::Stopped, Kind::DiskFilled, Kind::DiskSlowed];
        all.extend(each.map(|kind| (kind, role)));
    }
    for role in ["server", "client"] {
        all.extend([Cut::Pulled, Cut::Deaf, Cut::Mute].map(|cut| (Kind::CutOff(cut), role)));
    }
    all.extend([Kind::Killed, Kind::Stopped].map(|kind| (kind, "client")));
    all
}

impl Course {
    /// All faults, as `seed` has it.
    #[must_use]
    pub fn new(seed: u64, layout: Layout) -> Course {
        Course { random: Random::new(seed), layout, deck: Vec::new() }
    }

    /// Draws the next one.
    pub fn draw(&mut self) -> Fault {
        if self.deck.is_empty() {
            self.deck = all();
        }
        let place = self.random.below(self.deck.len() as u64) as usize;
        let (kind, role) = self.deck.swap_remove(place);
        self.draw_one(kind, role)
    }

    /// A fault of a kind; who is hit is drawn.
    pub fn draw_one(&mut self, kind: Kind, role: Role) -> Fault {
        let victim = self.victim(role);
        let lasts = LASTS_S.start + self.random.below(LASTS_S.end - LASTS_S.start);
        let slow_ms = SLOW_MS[self.random.below(SLOW_MS.len() as u64) as usize];
        Fault { kind, victim, lasts: Duration::from_secs(lasts), slow_ms }
    }

    fn victim(&mut self, role: Role) -> Victim {
        match role {
            "client" => Victim::Client(1 + self.random.below(u64::from(self.layout.clients)) as u8),
            "server" => {
                Victim::Server(1 + self.random.below(self.layout.servers.len() as u64) as u8)
            }
            _ => {
                let servers = (1..).zip(&self.layout.servers);
                let fit = servers.filter(|(_, roles)| roles.contains(&role));
                let fit: Vec<u8> = fit.map(|(server, _)| server).collect();
                let place = self.random.below(fit.len() as u64) as usize;
                Victim::Process(format!("{role}{}", fit[place]))
            }
        }
    }
}

impl Fault {
    /// Breaks it. `mounts` are those of the clients.
    ///
    /// # Errors
    ///
    /// When the victim is not there: a fault that hits nobody would prove nothing.
    pub fn begin(&self, machines: &mut Machines, mounts: &[Mounted]) -> Outcome<String> {
        match &self.victim {
            Victim::Process(name) => self.begin_at_process(machines, name),
            Victim::Server(server) => self.cut(machines, *server),
            Victim::Client(client) => match self.kind {
                Kind::CutOff(_) => self.cut(machines, machines.client(*client)),
                Kind::Killed => signal(mounts, *client, libc::SIGKILL),
                _ => signal(mounts, *client, libc::SIGSTOP),
            },
        }
    }

    /// Mends it. A killed mount is for its owner to make again.
    ///
    /// # Errors
    ///
    /// What could not be done.
    pub fn end(&self, machines: &mut Machines, mounts: &[Mounted]) -> Outcome {
        match (&self.victim, self.kind) {
            (Victim::Server(server), Kind::CutOff(cut)) => machines.mend(*server, cut),
            (Victim::Client(client), Kind::CutOff(cut)) => {
                machines.mend(machines.client(*client), cut)
            }
            (Victim::Client(client), Kind::Stopped) => {
                signal(mounts, *client, libc::SIGCONT).map(drop)
            }
            (Victim::Process(name), _) => self.end_at_process(machines, name),
            _ => Ok(()),
        }
    }

    fn cut(&self, machines: &Machines, machine: u8) -> Outcome<String> {
        match self.kind {
            Kind::CutOff(cut) => machines.cut(machine, cut).map(|()| String::new()),
            other => Err(format!("{other:?} does not happen to machines")),
        }
    }

    fn begin_at_process(&self, machines: &mut Machines, name: &str) -> Outcome<String> {
        match self.kind {
            Kind::Killed => machines.kill(name)?,
            Kind::Stopped => machines.signal(name, libc::SIGSTOP)?,
            Kind::DiskFilled => return machines.order(&format!("{name} fill on")),
            Kind::DiskSlowed => return machines.order(&format!("{name} delay {}", self.slow_ms)),
            Kind::DiskFlipped if self.class().1 != "data" => {
                machines.kill(name)?;
                let home = machines.home(name)?;
                for aside in entries(&home)?.iter().filter(|path| is_set_aside(path)) {
                    remove(aside)?;
                }
                let flipped = rot_log(&home.join("raft"))?;
                return Ok(format!("flipped {flipped} bits of its log"));
            }
            Kind::DiskFlipped => {
                let flip = |_| machines.order(&format!("{name} flip .extent"));
                return Ok((0..FLIPS).map(flip).collect::<Outcome<Vec<_>>>()?.join("; "));
            }
            Kind::ReplicaDeleted => {
                machines.kill(name)?;
                let partitions = machines.home(name)?.join("disk/partitions");
                let victim = fullest(&partitions)?;
                remove(&victim)?;
                return Ok(victim.file_name().unwrap_or_default().display().to_string());
            }
            Kind::DiskDeleted => {
                let id = machines.node_id(name)?;
                machines.kill(name)?;
                for entry in entries(&machines.home(name)?)? {
                    remove(&entry)?;
                }
                // The operator knows that it does not come back. A node in service is not removed.
                machines.wait_until("the node can be removed", REMOVAL_WAIT, |machines| {
                    machines.milpa(&["node", "remove", &id.to_string(), "-y"]).is_ok()
                })?;
            }
            Kind::CutOff(_) => return Err("processes are cut off with their machine".to_owned()),
        }
        Ok(String::new())
    }

    fn end_at_process(&self, machines: &mut Machines, name: &str) -> Outcome {
        match self.kind {
            Kind::Killed | Kind::ReplicaDeleted | Kind::DiskDeleted => machines.start_process(name),
            Kind::Stopped => machines.signal(name, libc::SIGCONT),
            Kind::DiskFilled => machines.order(&format!("{name} fill off")).map(drop),
            Kind::DiskSlowed => machines.order(&format!("{name} delay 0")).map(drop),
            Kind::DiskFlipped if self.class().1 != "data" => {
                machines.start_process(name)?;
                self.await_notice(machines, name)
            }
            Kind::DiskFlipped | Kind::CutOff(_) => Ok(()),
        }
    }

    /// Until a server has said that its log has rotted, all looks well.
    fn await_notice(&self, machines: &mut Machines, name: &str) -> Outcome {
        let home = machines.home(name)?;
        let is_manager = self.class().1 == "manager";
        machines.wait_until("the damage is noticed", NOTICE_WAIT, |machines| match is_manager {
            true => {
                // The log goes last, when it is noted that it takes part again.
                home.join("raft.damaged.1").exists() && !home.join("REJOINING").exists()
            }
            false => machines
                .json(&["task", "list"])
                .is_ok_and(|tasks| tasks.as_array().is_some_and(|tasks| !tasks.is_empty())),
        })
    }

    /// Whom a client's calls may wait for without anybody to blame: itself.
    #[must_use]
    pub fn is_against_client(&self, client: u8) -> bool {
        self.victim == Victim::Client(client)
    }

    /// Whether calls may fail for lack of space while this lasts: when the full disk has a replica of
    /// every partition that takes new bytes. No other single failure may refuse one.
    ///
    /// # Errors
    ///
    /// When the managers do not say who is where.
    pub fn entitles_no_space(&self, machines: &Machines) -> Outcome<bool> {
        let (Kind::DiskFilled, Victim::Process(name)) = (self.kind, &self.victim) else {
            return Ok(false);
        };
        if self.class().1 != "data" {
            return Ok(false);
        }
        let (on, all) = machines.replicas_on(name)?;
        Ok(on == all)
    }

    /// The same against a node that holds something: one that came back with an empty disk, and got
    /// nothing since, would prove nothing.
    ///
    /// # Errors
    ///
    /// When the managers do not say who is where.
    pub fn aimed(mut self, machines: &Machines) -> Outcome<Fault> {
        let (_, role) = self.class();
        let Victim::Process(name) = &mut self.victim else { return Ok(self) };
        let alike: Vec<String> =
            machines.names().into_iter().filter(|other| other.starts_with(role)).collect();
        let first = alike.iter().position(|other| other == name).unwrap_or(0);
        for other in alike[first..].iter().chain(&alike[..first]) {
            if role == "manager" || machines.replicas_on(other)?.0 > 0 {
                name.clone_from(other);
                break;
            }
        }
        Ok(self)
    }

    /// For the count of faults: what, and to whom.
    #[must_use]
    pub fn class(&self) -> (Kind, Role) {
        let role = match &self.victim {
            Victim::Client(_) => "client",
            Victim::Server(_) => "server",
            Victim::Process(name) if name.starts_with("manager") => "manager",
            Victim::Process(name) if name.starts_with("meta") => "meta",
            Victim::Process(_) => "data",
        };
        (self.kind, role)
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Kind::Killed => "killed (-9)",
            Kind::Stopped => "stopped and continued",
            Kind::CutOff(Cut::Pulled) => "cut off",
            Kind::CutOff(Cut::Deaf) => "cut off: hears nothing",
            Kind::CutOff(Cut::Mute) => "cut off: is not heard",
            Kind::DiskFilled => "disk filled",
            Kind::DiskSlowed => "disk slowed",
            Kind::DiskFlipped => "disk flipped",
            Kind::ReplicaDeleted => "replica deleted",
            Kind::DiskDeleted => "disk deleted",
        })
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.victim {
            Victim::Process(name) => write!(formatter, "{name} {}", self.kind),
            Victim::Server(server) => write!(formatter, "server {server} {}", self.kind),
            Victim::Client(client) => write!(formatter, "client {client} {}", self.kind),
        }
    }
}

/// How often what happened to whom, a line for each.
#[must_use]
pub fn table(counts: &BTreeMap<(Kind, Role), u64>) -> String {
    let lines =
        counts.iter().map(|((kind, role), count)| format!("  {role:<8} {kind:<24} {count}\n"));
    lines.collect()
}

fn signal(mounts: &[Mounted], client: u8, signal: i32) -> Outcome<String> {
    let mount = mounts.get(usize::from(client) - 1).ok_or("no such client")?;
    crate::process::signal_pid(mount.pid()?, signal).map(|()| String::new())
}

fn entries(directory: &Path) -> Outcome<Vec<std::path::PathBuf>> {
    let failed = |e: std::io::Error| format!("{}: {e}", directory.display());
    let listed = std::fs::read_dir(directory).map_err(failed)?;
    listed.map(|entry| entry.map(|entry| entry.path()).map_err(failed)).collect()
}

/// The subdirectory with the most files.
fn fullest(directory: &Path) -> Outcome<std::path::PathBuf> {
    let count = |path: &std::path::PathBuf| entries(path).map_or(0, |files| files.len());
    let found = entries(directory)?.into_iter().filter(|path| path.is_dir()).max_by_key(count);
    found.ok_or_else(|| format!("{} is empty", directory.display()))
}

/// What a manager could not use, and an operator has looked at.
fn is_set_aside(path: &Path) -> bool {
    path.to_string_lossy().contains(".damaged.")
}

/// Flips a bit in every tenth block that holds something, of all files of a log; gives how many.
///
/// # Errors
///
/// What could not be read or written.
pub fn rot_log(directory: &Path) -> Outcome<usize> {
    let mut flipped = 0;
    for path in entries(directory)? {
        if path.extension().is_none_or(|extension| extension != "wal") {
            continue;
        }
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        let mut bytes = std::fs::read(&path).map_err(failed)?;
        let written = bytes.chunks_mut(4096).filter(|block| block.iter().any(|byte| *byte != 0));
        for block in written.skip(2).step_by(10) {
            block[100] ^= 4;
            flipped += 1;
        }
        std::fs::write(&path, bytes).map_err(failed)?;
    }
    Ok(flipped)
}

fn remove(path: &Path) -> Outcome {
    let removed =
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    removed.map_err(|e| format!("{}: {e}", path.display()))
}
