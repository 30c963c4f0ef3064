//! Who does harm: draws faults, remembers what it broke, and mends it when their time is over.

use std::collections::BTreeMap;

use crate::options::{Options, Weights};
use crate::random::Random;
use crate::stalls::Span;

/// A node that is drained for longer is told to stay.
const DRAIN_MS: u64 = 60_000;
/// A server stands still for up to this long (F18).
const PAUSE_MS: u64 = 600_000;
/// A server's disk or links are slow for up to this long (F11).
const SLOW_MS: u64 = 120_000;
/// A server that ended as its disk failed is back, and has caught up.
const RESTART_MS: u64 = 5_000;

/// A fault, against machines by their place in the simulation's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill(usize),
    Power(usize),
    PowerEverywhere,
    /// The processes of all servers.
    KillEverywhere,
    /// After this many further effects.
    Freeze(usize, u64),
    Isolate(usize),
    /// It is heard, and hears nobody.
    Deaf(usize),
    /// It hears, and nobody hears it.
    Mute(usize),
    OneWay(usize, usize),
    /// Two machines from each other, and from nobody else: those between them reach both (a bridge).
    Cut(usize, usize),
    /// Machines whose place has its bit set, against all others.
    Split(u64),
    Pause(usize, u64),
    WallJump(usize, i64),
    /// So many times slower, for how long.
    SlowDisk(usize, u64, u64),
    /// By so many milliseconds each way, for how long.
    SlowLink(usize, u64, u64),
    /// With how long the server is out of service for it.
    FailedWrite(usize, u64),
    FailedSync(usize, u64),
    /// A file or directory that cannot be made, renamed or removed.
    FailedName(usize, u64),
    FullDisk(usize),
    FailedRead(usize),
    LostWrite(usize),
    MisdirectedWrite(usize),
    Rot(usize),
    ClientKill(usize),
    ClientPause(usize, u64),
    Grow,
    Lose(usize),
    OldDisk(usize),
    Drain(usize),
}

impl Fault {
    /// Whether it breaks anything: a cluster that grows or loses a node by an operator's wish is well.
    pub fn is_harm(self) -> bool {
        !matches!(self, Fault::Grow | Fault::Drain(_))
    }

    /// What it breaks, and for how long: nothing that a call could wait for, one server, or more.
    fn span(self, from_ms: u64, lasts_ms: u64) -> Option<Span> {
        let span = |place, lasts_ms: u64| {
            Some(Span { from_ms, until_ms: from_ms.saturating_add(lasts_ms), place })
        };
        match self {
            Fault::Kill(place)
            | Fault::Power(place)
            | Fault::Freeze(place, _)
            | Fault::Isolate(place)
            | Fault::Deaf(place)
            | Fault::Mute(place)
            | Fault::OneWay(place, _)
            | Fault::Cut(place, _)
            | Fault::FullDisk(place) => span(Some(place), lasts_ms),
            Fault::Pause(place, lasts_ms)
            | Fault::SlowDisk(place, _, lasts_ms)
            | Fault::SlowLink(place, _, lasts_ms)
            | Fault::FailedWrite(place, lasts_ms)
            | Fault::FailedSync(place, lasts_ms)
            | Fault::FailedName(place, lasts_ms) => span(Some(place), lasts_ms),
            Fault::Lose(place) | Fault::OldDisk(place) => span(Some(place), u64::MAX),
            Fault::PowerEverywhere | Fault::KillEverywhere | Fault::Split(_) => {
                span(None, lasts_ms)
            }
            // Its own calls stand still with it.
            Fault::ClientPause(_, paused_ms) => span(None, paused_ms),
            Fault::FailedRead(_)
            | Fault::LostWrite(_)
            | Fault::MisdirectedWrite(_)
            | Fault::Rot(_)
            | Fault::WallJump(..)
            | Fault::ClientKill(_)
            | Fault::Grow
            | Fault::Drain(_) => None,
        }
    }
}

/// What ends a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mend {
    /// The server is started again.
    Start(usize),
    /// All servers are.
    StartAll,
    /// The links that this fault cut are open again.
    Open(Fault),
    FastDisk(usize),
    FastLink(usize),
    EmptyDisk(usize),
    /// A new client begins where one died.
    StartClient(usize),
    /// A server with an old copy of its disk gets an empty one.
    Replace(usize),
    /// A server whose disk has failed is started again, on the same one.
    StartAgain(usize),
    /// A node that was to leave, and has not, stays.
    Stay,
}

/// The machines that the nemesis knows: places of servers by role, and of clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct Victims {
    pub managers: Vec<usize>,
    pub meta: Vec<usize>,
    pub data: Vec<usize>,
    pub clients: Vec<usize>,
}

impl Victims {
    fn servers(&self) -> Vec<usize> {
        [&self.managers[..], &self.meta, &self.data].concat()
    }

    /// The servers whose disks rot and lie: one that has copies of data, one of names, and one manager. What the
    /// others hold stays good.
    fn have_bad_disks(&self) -> Vec<usize> {
        let groups = [&self.data, &self.meta, &self.managers];
        groups.into_iter().filter_map(|group| group.first()).copied().collect()
    }

    fn group_of(&self, place: usize) -> &[usize] {
        let groups = [&self.managers, &self.meta, &self.data];
        groups.into_iter().find(|group| group.contains(&place)).map_or(&[], Vec::as_slice)
    }
}

/// The one who does harm.
#[derive(Debug)]
pub(crate) struct Nemesis {
    random: Random,
    weights: Weights,
    every_ms: u64,
    lasts_ms: u64,
    is_gentle: bool,
    data_disks_fail: bool,
    next_ms: u64,
    /// When each impaired machine is well again.
    impaired: BTreeMap<usize, u64>,
    /// By their time.
    mends: BTreeMap<(u64, u64), Mend>,
    next_mend: u64,
    pub counts: BTreeMap<&'static str, u64>,
    /// What was broken when.
    pub spans: Vec<Span>,
    victims: Victims,
    /// A server has lost all its copies: another one would be one too many.
    has_lost: bool,
    has_lost_manager: bool,
    faults: u64,
    /// When another node may be drained.
    drains_ms: u64,
}

impl Nemesis {
    pub fn new(options: &Options, victims: Victims) -> Nemesis {
        Nemesis {
            random: Random::new(options.seed, "nemesis"),
            weights: options.weights.clone(),
            every_ms: options.fault_every_ms,
            lasts_ms: options.fault_lasts_ms,
            is_gentle: options.is_gentle,
            data_disks_fail: options.data_disks_fail,
            next_ms: 0,
            impaired: BTreeMap::new(),
            mends: BTreeMap::new(),
            next_mend: 0,
            counts: BTreeMap::new(),
            spans: Vec::new(),
            victims,
            has_lost: false,
            has_lost_manager: false,
            faults: 0,
            drains_ms: 0,
        }
    }

    /// Mends that are due.
    pub fn due(&mut self, now_ms: u64) -> Vec<Mend> {
        let later = self.mends.split_off(&(now_ms + 1, 0));
        std::mem::replace(&mut self.mends, later).into_values().collect()
    }

    /// Everything that is still broken: the end of the harm.
    pub fn surrender(&mut self, now_ms: u64) -> Vec<Mend> {
        for span in &mut self.spans {
            span.until_ms = span.until_ms.min(now_ms);
        }
        self.impaired.clear();
        std::mem::take(&mut self.mends).into_values().collect()
    }

    fn mend_at(&mut self, at_ms: u64, mend: Mend) {
        self.next_mend += 1;
        self.mends.insert((at_ms, self.next_mend), mend);
    }

    /// The next fault and its name, if its time has come.
    pub fn strike(&mut self, now_ms: u64) -> Option<(&'static str, Fault)> {
        if self.next_ms == 0 {
            self.next_ms = now_ms + self.random.between(1, 2 * self.every_ms);
        }
        if now_ms < self.next_ms {
            return None;
        }
        self.next_ms = now_ms + self.random.between(1, 2 * self.every_ms);
        self.impaired.retain(|_, until| *until > now_ms);
        let name = self.draw_kind()?;
        // Short ones more often than long ones.
        let lasts_ms = 50 + self.random.skewed(self.lasts_ms);
        let fault = self.draw(name, now_ms, lasts_ms)?;
        self.breaks(fault, now_ms, lasts_ms);
        Some((name, fault))
    }

    /// What it breaks is broken from now on.
    pub fn breaks(&mut self, fault: Fault, now_ms: u64, lasts_ms: u64) {
        self.spans.extend(fault.span(now_ms, lasts_ms));
    }

    /// A fault has really come to pass: not each that is drawn does.
    pub fn happened(&mut self, name: &'static str, is_harm: bool) {
        *self.counts.entry(name).or_default() += 1;
        self.faults += u64::from(is_harm);
    }

    /// How many faults did harm.
    pub fn faults(&self) -> u64 {
        self.faults
    }

    fn draw_kind(&mut self) -> Option<&'static str> {
        let total: u64 = self.weights.by_name().map(|(_, weight)| *weight).sum();
        let mut ticket = self.random.below(total);
        self.weights.by_name().find_map(|(name, weight)| {
            if ticket < *weight {
                return Some(name);
            }
            ticket -= *weight;
            None
        })
    }

    /// A server that may be impaired now.
    fn server(&mut self) -> Option<usize> {
        let place = *self.random.pick(&self.victims.servers())?;
        if self.impaired.contains_key(&place) {
            return None;
        }
        let group = self.victims.group_of(place);
        let is_alone = !group.iter().any(|other| self.impaired.contains_key(other));
        (is_alone || !self.is_gentle).then_some(place)
    }

    /// A server whose disk may damage what it holds.
    fn bad_disk(&mut self) -> Option<usize> {
        self.random.pick(&self.victims.have_bad_disks()).copied()
    }

    fn draw(&mut self, name: &str, now_ms: u64, lasts_ms: u64) -> Option<Fault> {
        let until = now_ms + lasts_ms;
        match name {
            "kill" | "power" | "freeze" => {
                let place = self.server()?;
                let fault = match name {
                    "kill" => Fault::Kill(place),
                    "power" => Fault::Power(place),
                    _ => Fault::Freeze(place, self.random.skewed(1_000)),
                };
                self.impair(place, until, Mend::Start(place));
                Some(fault)
            }
            "power-everywhere" | "kill-everywhere" if self.impaired.is_empty() => {
                self.mend_at(until, Mend::StartAll);
                let servers = self.victims.servers();
                self.impaired.extend(servers.into_iter().map(|place| (place, until)));
                let is_power = name == "power-everywhere";
                Some(if is_power { Fault::PowerEverywhere } else { Fault::KillEverywhere })
            }
            "isolate" => {
                let place = self.server()?;
                let fault = match self.random.below(3) {
                    0 => Fault::Isolate(place),
                    1 => Fault::Deaf(place),
                    _ => Fault::Mute(place),
                };
                self.impair(place, until, Mend::Open(fault));
                Some(fault)
            }
            "one-way" => {
                let place = self.server()?;
                let mut all = self.victims.servers();
                all.extend(&self.victims.clients);
                let other = *self.random.pick(&all)?;
                let fault = match self.random.below(3) {
                    0 => Fault::OneWay(place, other),
                    1 => Fault::OneWay(other, place),
                    _ => Fault::Cut(place, other),
                };
                self.impair(place, until, Mend::Open(fault));
                (place != other).then_some(fault)
            }
            "split" if !self.is_gentle => {
                let fault = Fault::Split(self.random.draw());
                self.mend_at(until, Mend::Open(fault));
                Some(fault)
            }
            "pause" => {
                let place = self.server()?;
                // Now and then for so long that all have forgotten it.
                let is_long = self.random.chance(1, 4);
                let paused_ms = if is_long { self.random.skewed(PAUSE_MS) } else { lasts_ms };
                self.impaired.insert(place, now_ms + paused_ms);
                Some(Fault::Pause(place, paused_ms))
            }
            "wall-jump" => {
                let place = *self.random.pick(&self.victims.servers())?;
                let jump = self.random.between(0, 7_200_000) as i64 - 3_600_000;
                Some(Fault::WallJump(place, jump))
            }
            "slow-disk" | "slow-link" => {
                let place = self.server()?;
                // Nobody comes and mends what still works.
                let is_long = self.random.chance(1, 4);
                let lasts_ms = if is_long { self.random.skewed(SLOW_MS) } else { lasts_ms };
                let is_disk = name == "slow-disk";
                let mend = if is_disk { Mend::FastDisk(place) } else { Mend::FastLink(place) };
                self.impair(place, now_ms + lasts_ms, mend);
                Some(match is_disk {
                    true => Fault::SlowDisk(place, self.random.between(20, 1000), lasts_ms),
                    false => Fault::SlowLink(place, self.random.between(5, 400), lasts_ms),
                })
            }
            "disk-error" => {
                let place = self.server()?;
                let is_data = self.victims.data.contains(&place);
                if is_data && !self.data_disks_fail {
                    return None;
                }
                // A data node goes on without a disk that failed, until somebody restarts it, soon or in the end;
                // another node ends, and its supervisor starts it again.
                let kept_ms = match is_data {
                    true if self.random.chance(1, 2) => {
                        self.mend_at(until, Mend::StartAgain(place));
                        lasts_ms + RESTART_MS
                    }
                    true => u64::MAX,
                    false => RESTART_MS,
                };
                self.impaired.insert(place, now_ms.saturating_add(kept_ms));
                Some(match self.random.below(3) {
                    0 => Fault::FailedWrite(place, kept_ms),
                    1 => Fault::FailedSync(place, kept_ms),
                    _ => Fault::FailedName(place, kept_ms),
                })
            }
            "full-disk" => {
                let place = self.server()?;
                self.impair(place, until, Mend::EmptyDisk(place));
                Some(Fault::FullDisk(place))
            }
            "rot" => Some(Fault::Rot(self.bad_disk()?)),
            "read-error" => Some(Fault::FailedRead(*self.random.pick(&self.victims.servers())?)),
            "lie" => {
                let place = self.bad_disk()?;
                Some(match self.random.chance(1, 2) {
                    true => Fault::LostWrite(place),
                    false => Fault::MisdirectedWrite(place),
                })
            }
            "client-kill" => {
                let place = *self.random.pick(&self.victims.clients)?;
                self.mend_at(now_ms + lasts_ms, Mend::StartClient(place));
                Some(Fault::ClientKill(place))
            }
            "client-pause" => {
                let place = *self.random.pick(&self.victims.clients)?;
                Some(Fault::ClientPause(place, self.random.skewed(60_000)))
            }
            "grow" => Some(Fault::Grow),
            "drain" => {
                if self.drains_ms > now_ms {
                    return None;
                }
                let nodes = [&self.victims.meta[..], &self.victims.data].concat();
                let place = *self.random.pick(&nodes)?;
                // A disk that lies as it is set up may lose what says whose it is, and nobody has that twice.
                if self.weights.lie > 0 && self.victims.have_bad_disks().contains(&place) {
                    return None;
                }
                self.drains_ms = now_ms + self.random.between(1_000, DRAIN_MS);
                self.mend_at(self.drains_ms, Mend::Stay);
                Some(Fault::Drain(place))
            }
            "lose" | "old-disk" => {
                let (place, is_lost) = (self.server()?, name == "lose");
                let is_manager = self.victims.managers.contains(&place);
                let before =
                    if is_manager { &mut self.has_lost_manager } else { &mut self.has_lost };
                // An old copy of a manager's disk is not told from the disk (docs/decisions/0011).
                if is_manager && !is_lost || std::mem::replace(before, true) {
                    return None;
                }
                // It has no copy of anything for some time after it is back.
                self.impaired.insert(place, u64::MAX);
                let mend = if is_lost { Mend::Start(place) } else { Mend::Replace(place) };
                self.mend_at(until, mend);
                Some(if is_lost { Fault::Lose(place) } else { Fault::OldDisk(place) })
            }
            _ => None,
        }
    }

    fn impair(&mut self, place: usize, until: u64, mend: Mend) {
        // It is not well the moment it is back: it has to catch up.
        self.impaired.insert(place, until + 3_000);
        self.mend_at(until, mend);
    }
}
