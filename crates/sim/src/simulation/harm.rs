//! The nemesis' hand: what its faults do to machines, and what mends them.

use std::ffi::OsStr;
use std::path::Path;

use super::{DISK_BYTES, Placed, Simulation, WHOLE_MS, arm, locked};
use crate::cluster::{self, Part};
use crate::crash_points::Crash;
use crate::disk::Ordered;
use crate::nemesis::{Fault, Mend};
use crate::network::Ending;
use crate::observer::{Leaving, Wanted};
use crate::trace;

/// Where extents, definitions and snapshots lie.
const CONTENT: [&str; 1] = ["partitions"];
/// All that a replica consists of. (What says which node this is has no copy elsewhere: a node that
/// cannot read it refuses to start.)
const REPLICA: [&str; 4] = ["partitions", "states", "raft", "state.redb"];
/// Bits of each server that flip at rest.
const ROTTEN_AT_REST: u64 = 8;
/// What is paused at a point that was asked for stands still for so long: others lead by then.
const PAUSE_LASTS_MS: u64 = 8_000;
/// And then so long clients go on working with it.
const GONE_ON_MS: u64 = 1_000;
/// By then the managers have heard what a node that starts has lost.
const ROT_IS_SEEN_MS: u64 = 10_000;

/// Whether a file is of a replica: others have what it holds.
pub(super) fn has_copies(path: &Path) -> bool {
    is_below(path, &REPLICA)
}

/// The kind of a fault that a disk was ordered to make.
pub(super) fn name_of(ordered: Ordered) -> &'static str {
    match ordered {
        Ordered::FailWrite | Ordered::FailSync | Ordered::FailName => "disk-error",
        Ordered::FailRead => "read-error",
        Ordered::LoseWrite | Ordered::MisdirectWrite => "lie",
    }
}

/// Whether a file is below a directory of one of these names.
fn is_below(path: &Path, names: &[&str]) -> bool {
    let is_one = |part: &OsStr| names.iter().any(|name| part == *name);
    path.components().any(|component| is_one(component.as_os_str()))
}

impl Simulation {
    pub(super) fn harm(&mut self) {
        self.copy_disks();
        for mend in self.nemesis.due(self.now_ms) {
            self.mend(mend);
        }
        if let Some((name, fault)) = self.nemesis.strike(self.now_ms) {
            trace::note(&format!("FAULT {}", self.describe(fault)));
            self.may_be_called_dead(fault);
            if self.inflict(fault) {
                self.happened(name, fault.is_harm());
            }
        }
    }

    /// A machine stands still from the point that was asked for until others have taken over, and a while later clients
    /// may rest.
    pub(super) fn pause_at_point(&mut self, place: usize) {
        let asked = self.options.crash.as_ref().filter(|point| point.crash == Crash::Pause);
        let (Some(point), Some(placed)) = (asked, self.machines.get(place)) else { return };
        let is_reached = placed.machine.disk().effects.done() >= point.effects;
        if self.crashes > 0 || point.machine != placed.machine.name || !is_reached {
            return;
        }
        let fault = match placed.part {
            Part::Client => Fault::ClientPause(place, PAUSE_LASTS_MS),
            _ => Fault::Pause(place, PAUSE_LASTS_MS),
        };
        trace::note(&format!("FAULT {}", self.describe(fault)));
        self.crashes += 1;
        self.nemesis.breaks(fault, self.now_ms, PAUSE_LASTS_MS);
        self.may_be_called_dead(fault);
        self.inflict(fault);
        self.gone_on_at = Some(self.now_ms + PAUSE_LASTS_MS + GONE_ON_MS);
    }

    /// Who is not heard for long is dead to the managers, and lost with all that is on it (docs/decisions/0007). What was
    /// not synced is nowhere then, if the others lose their power.
    fn may_be_called_dead(&self, fault: Fault) {
        let (dead_ms, lasts_ms) = (self.options.dead_after_ms, self.options.fault_lasts_ms);
        let is_lost = |place: usize| match fault {
            Fault::Pause(paused, lasts_ms) => paused == place && lasts_ms >= dead_ms,
            Fault::Kill(one)
            | Fault::Freeze(one, _)
            | Fault::Isolate(one)
            | Fault::Deaf(one)
            | Fault::Mute(one) => one == place && lasts_ms >= dead_ms,
            Fault::KillEverywhere | Fault::Split(_) => lasts_ms >= dead_ms,
            _ => false,
        };
        for (place, placed) in self.machines.iter().enumerate() {
            if placed.part == Part::Data && is_lost(place) {
                self.history.borrow_mut().power_cut(placed.number as u32);
            }
        }
    }

    pub(super) fn happened(&mut self, name: &'static str, is_harm: bool) {
        self.nemesis.happened(name, is_harm);
        if is_harm {
            self.quota.fault_happened();
        }
    }

    fn describe(&self, fault: Fault) -> String {
        let name =
            |place: usize| self.machines.get(place).map_or("?", |placed| placed.machine.name);
        match fault {
            Fault::Kill(a)
            | Fault::Power(a)
            | Fault::Isolate(a)
            | Fault::Deaf(a)
            | Fault::Mute(a)
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
            | Fault::FailedWrite(a, _)
            | Fault::FailedSync(a, _)
            | Fault::FailedName(a, _)
            | Fault::Pause(a, _)
            | Fault::WallJump(a, _)
            | Fault::SlowDisk(a, ..)
            | Fault::SlowLink(a, ..)
            | Fault::ClientPause(a, _) => {
                format!("{fault:?} = {}", name(a))
            }
            Fault::OneWay(a, b) | Fault::Cut(a, b) => {
                format!("{fault:?} = {} to {}", name(a), name(b))
            }
            Fault::PowerEverywhere | Fault::KillEverywhere | Fault::Split(_) | Fault::Grow => {
                format!("{fault:?}")
            }
        }
    }

    /// False if nothing has happened, or not yet: what a disk is ordered to do counts when it does.
    fn inflict(&mut self, fault: Fault) -> bool {
        match fault {
            Fault::Kill(place) => return self.stop(place, Ending::Process),
            Fault::Power(place) => return self.stop(place, Ending::Power),
            Fault::PowerEverywhere => {
                self.spare_ends_of_logs();
                for place in self.places(|placed| placed.part.is_server()) {
                    self.stop(place, Ending::Power);
                }
            }
            Fault::KillEverywhere => {
                for place in self.places(|placed| placed.part.is_server()) {
                    self.stop(place, Ending::Process);
                }
            }
            Fault::Freeze(place, effects) => {
                if let Some(placed) = self.machines.get(place) {
                    placed.machine.disk().effects.end_after(effects);
                }
                return false;
            }
            Fault::Isolate(_)
            | Fault::Deaf(_)
            | Fault::Mute(_)
            | Fault::OneWay(..)
            | Fault::Cut(..)
            | Fault::Split(_) => self.set_blocked(fault, true),
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
            Fault::SlowDisk(place, times, _) => self.set_slowness(place, times),
            Fault::SlowLink(place, extra_ms, _) => {
                if let Some(placed) = self.machines.get(place) {
                    locked(&self.wires).set_slow(placed.machine.address, extra_ms);
                }
            }
            Fault::FailedRead(_)
            | Fault::LostWrite(_)
            | Fault::MisdirectedWrite(_)
            | Fault::FailedWrite(..)
            | Fault::FailedSync(..)
            | Fault::FailedName(..) => {
                self.order_of(fault);
                return false;
            }
            Fault::FullDisk(place) => {
                if let Some(placed) = self.machines.get(place) {
                    let mut disk = placed.machine.disk();
                    disk.options.capacity_bytes = disk.allocated();
                }
            }
            Fault::Rot(place) if self.is_part(place, Part::Data) => {
                return self.rot(place, &CONTENT);
            }
            Fault::Rot(place) => return self.rot(place, &REPLICA),
            Fault::ClientKill(place) => self.kill_client(place),
            Fault::Grow => self.watch.borrow_mut().wanted = Wanted::Grow,
            // Two of three managers' directories are one too many (docs/decisions/0010).
            Fault::Lose(place) if self.is_part(place, Part::Manager) && self.one_begins_anew() => {
                return false;
            }
            Fault::Lose(place) => self.lose(place),
            Fault::OldDisk(place) => self.bring_back_old_disk(place),
            Fault::Drain(place) => self.drain(place),
        }
        true
    }

    /// Where a log ends, nothing tells what a disk lost from what was never written. While a peer lives, it remembers
    /// what was acknowledged; when all lose their power nobody does (docs/decisions/0012).
    fn spare_ends_of_logs(&self) {
        for placed in &self.machines {
            placed.machine.disk().find_lost(|path| is_below(path, &["raft"]));
        }
    }

    /// Whether a manager has an empty directory yet, or had one and has not caught up: also one that is started for the
    /// first time after the others have begun.
    fn one_begins_anew(&self) -> bool {
        let begins = |placed: &Placed| {
            let home = Path::new("/").join(placed.machine.name);
            let disk = placed.machine.disk();
            disk.has(&home.join("REJOINING")) || !disk.has(&home.join("raft"))
        };
        self.machines.iter().filter(|placed| placed.part == Part::Manager).any(begins)
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

    /// A server that the managers refuse for what is on its disk gets an empty one.
    pub(super) fn empty_refused(&mut self, place: usize) {
        if !self.old_disks.has(place) {
            trace::note("its operator empties its disk");
            self.renew(place);
        }
    }

    fn drain(&mut self, place: usize) {
        let Some(placed) = self.machines.get(place) else { return };
        let address = cluster::listens(placed.part, placed.number);
        // Whoever is told to stay has to hear of it first.
        self.watch.borrow_mut().leaving.get_or_insert_with(|| Leaving::new(address));
    }

    /// A server whose node was removed begins anew. It held nothing: no copy is lost.
    pub(super) fn renew_who_left(&mut self) {
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

    pub(super) fn mend(&mut self, mend: Mend) {
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
            Mend::StartAgain(place) => {
                let disk = self.machines.get(place).map(|placed| placed.machine.disk());
                // Another failure may be to come (seed 771945).
                if disk.is_none_or(|disk| disk.ordered.is_empty()) {
                    self.failed_disks.remove(&place);
                }
                self.stop(place, Ending::Process);
                self.restart(place);
            }
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

    fn set_slowness(&mut self, place: usize, times: u64) {
        if let Some(placed) = self.machines.get(place) {
            placed.machine.slowness.set(times);
        }
    }

    fn is_part(&self, place: usize, part: Part) -> bool {
        self.machines.get(place).is_some_and(|placed| placed.part == part)
    }

    /// Orders what a disk is to do.
    fn order_of(&mut self, fault: Fault) {
        match fault {
            Fault::FailedRead(place) => self.order(place, Ordered::FailRead),
            Fault::LostWrite(place) => self.order_lie(place, Ordered::LoseWrite),
            Fault::MisdirectedWrite(place) => self.order_lie(place, Ordered::MisdirectWrite),
            Fault::FailedWrite(place, _) => self.order_failure(place, Ordered::FailWrite),
            Fault::FailedSync(place, _) => self.order_failure(place, Ordered::FailSync),
            Fault::FailedName(place, _) => self.order_failure(place, Ordered::FailName),
            _ => {}
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
            if self.is_part(place, Part::Data) {
                self.harmed.insert(place);
            }
            self.order(place, what);
        }
    }

    fn order_failure(&mut self, place: usize, failure: Ordered) {
        self.order(place, failure);
        self.failed_disks.insert(place);
    }

    fn rot(&mut self, place: usize, names: &[&str]) -> bool {
        self.unsynced_were_lost(place);
        let Some(placed) = self.machines.get(place) else { return false };
        let hit = placed.machine.disk().rot(|path| is_below(path, names));
        trace::note(&format!("a bit flips: {hit:?}"));
        hit.is_some()
    }

    /// What is on the disks can be read: all servers start again at once, and have all that they had.
    pub(super) fn read_again(&mut self) {
        for place in self.places(|placed| placed.part.is_server()) {
            self.stop(place, Ending::Process);
        }
        // A crash that has not come yet would be forgotten with the life in which it was asked for.
        let crash = self.options.crash.as_ref().filter(|_| self.crashes == 0);
        self.machines.iter().for_each(|placed| arm(&placed.machine, crash));
        self.start_servers();
        self.want(Wanted::Whole, WHOLE_MS, "disk formats readable");
    }

    /// One server of each kind finds extents, logs, states and snapshots damaged when it starts. (While
    /// other servers are broken that is one failure too many: a group without a majority waits.)
    pub(super) fn rot_at_rest(&mut self) {
        for part in [Part::Data, Part::Meta, Part::Manager] {
            let Some(place) = self.places(|placed| placed.part == part).first().copied() else {
                return;
            };
            self.stop(place, Ending::Process);
            for _ in 0..ROTTEN_AT_REST {
                self.rot(place, &REPLICA);
            }
            self.start(place);
        }
        self.run_until(ROT_IS_SEEN_MS, |_| false);
        self.want(Wanted::Whole, WHOLE_MS, "replicas equal after rot");
    }

    fn set_blocked(&mut self, fault: Fault, blocked: bool) {
        let cuts = |a: usize, b: usize| match fault {
            Fault::Isolate(place) => a == place || b == place,
            Fault::Deaf(place) => b == place,
            Fault::Mute(place) => a == place,
            Fault::OneWay(from, to) => (a, b) == (from, to),
            Fault::Cut(one, other) => (a, b) == (one, other) || (b, a) == (one, other),
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
}
