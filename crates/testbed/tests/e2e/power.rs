//! Power cuts on real processes: the machines of nodes die, and what their disks had not synced is lost,
//! torn or kept. Every node's directory is on a disk of `milpa-faultfs`.
//!
//! A failing run prints its seed and keeps logs, ledgers and disks. `MILPA_POWER_SEED` takes the same course
//! of victims, loads and losses again (the processes' timing differs); `MILPA_POWER_CUTS` is the number of
//! cuts, 100 in `make power`. A short course is part of every `make test`.
//!
//! That the test can fail is shown by those whose names begin with `must_lose`: they fail when nothing is lost.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use milpa_testbed::ledger::{Finished, Ledger, Plan};
use milpa_testbed::load::{pattern, write_synced};
use milpa_testbed::{Mounted, Outcome, Testbed, kill};

use crate::from_environment;

const WRITER: &str = env!("CARGO_BIN_EXE_milpa-writer");
/// Loads at once, each with files of its own.
const LOADS: u64 = 3;
/// Old rounds that are still looked at. Then they are removed, under cuts as well.
const ROUNDS_KEPT: usize = 4;
/// The short course.
const CUTS_FEW: u64 = 3;
/// Who has to lose something does so in fewer cuts.
const CUTS_UNTIL_LOST: u64 = 6;
/// How long the checker waits for what it reads; not long where something has to be lost.
const CHECKER_DEADLINE: &str = "io-deadline=60";
const CHECKER_DEADLINE_SHORT: &str = "io-deadline=10";
/// For the cluster to come back by itself.
const RETURN_WAIT: Duration = Duration::from_secs(60);

fn seed() -> u64 {
    from_environment("MILPA_POWER_SEED").unwrap_or_else(|| u64::from(std::process::id()))
}

fn cuts() -> u64 {
    from_environment("MILPA_POWER_CUTS").unwrap_or(100)
}

/// Who loses power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victims {
    /// All servers, and the client.
    Everything,
    AllServers,
    AllOf(&'static str),
    One(&'static str),
}

impl Victims {
    /// The first rounds are the hardest ones, and those after them follow from the seed.
    fn of_round(seed: u64, round: u64) -> Victims {
        let all = [
            Victims::Everything,
            Victims::AllServers,
            Victims::AllOf("data"),
            Victims::One("meta"),
            Victims::One("data"),
            Victims::AllOf("meta"),
            Victims::One("manager"),
            Victims::Everything,
        ];
        let place = if round < 3 { round } else { (seed ^ round).wrapping_mul(0x9E37_79B9) >> 16 };
        all[place as usize % all.len()]
    }

    fn names(self, bed: &Testbed, round: u64) -> Vec<String> {
        let of = |role: &str| {
            let fit = bed.processes().iter().filter(|p| role.is_empty() || p.role == role);
            fit.map(|process| process.name.clone()).collect::<Vec<_>>()
        };
        match self {
            Victims::Everything | Victims::AllServers => of(""),
            Victims::AllOf(role) => of(role),
            Victims::One(role) => vec![of(role).swap_remove(round as usize % 3)],
        }
    }
}

/// What the loads of a round left behind.
struct Past {
    directory: String,
    /// By the number of their load.
    plans: Vec<(usize, Plan)>,
}

/// Operations that returned, and problems found.
#[derive(Debug, Default)]
struct Course {
    volume: &'static str,
    checker_deadline: &'static str,
    seed: u64,
    operations: usize,
    failed: usize,
    past: VecDeque<Past>,
    problems: Vec<String>,
    /// Calls that waited for their whole deadline, as the clients' logs tell.
    given_up: usize,
    longest_return: Duration,
}

impl std::fmt::Debug for Past {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.directory)
    }
}

impl Course {
    fn round(&mut self, bed: &mut Testbed, round: u64) -> Outcome {
        let victims = Victims::of_round(self.seed, round);
        let mount = bed.mount(self.volume)?;
        let directory = format!("round{round}");
        let loads = self.start_loads(&mount, &directory, round)?;
        let least = 40 + (self.seed ^ round) as usize * 37 % 160;
        go_on(bed, &loads, least)?;
        let names = victims.names(bed, round);
        let client = mount.pid()?;
        let is_client_dead = victims == Victims::Everything;
        if is_client_dead {
            kill(client)?;
        }
        let taken = bed.cut_power(&names)?;
        let started = Instant::now();
        if names.len() == bed.processes().len() {
            bed.up(&[])?;
        }
        bed.wait_until("all nodes active", RETURN_WAIT, are_all_active)?;
        self.longest_return = self.longest_return.max(started.elapsed());
        if is_client_dead {
            bed.milpa(&["umount", "--force", &mount.path.display().to_string()])?;
        } else {
            go_on(bed, &loads, 20)?;
        }
        let operations = self.finish_loads(bed, directory, loads)?;
        println!(
            "cut {}: {victims:?}, {operations} operations, back in {:.1} s; {}",
            round + 1,
            started.elapsed().as_secs_f32(),
            taken
        );
        if !is_client_dead {
            bed.umount(&mount)?;
        }
        self.check(bed)
    }

    fn start_loads(&self, mount: &Mounted, directory: &str, round: u64) -> Outcome<Vec<Ledger>> {
        let start = |number: u64| {
            let own: PathBuf = mount.path.join(directory).join(number.to_string());
            std::fs::create_dir_all(&own).map_err(|e| format!("{}: {e}", own.display()))?;
            Ledger::start(WRITER, &own, self.seed.wrapping_add(round * LOADS + number))
        };
        (0..LOADS).map(start).collect()
    }

    fn finish_loads(
        &mut self,
        bed: &Testbed,
        directory: String,
        loads: Vec<Ledger>,
    ) -> Outcome<usize> {
        let (mut plans, mut operations) = (Vec::new(), 0);
        for (number, load) in loads.into_iter().enumerate() {
            let Finished { lines, plan, .. } = load.finish();
            let kept = bed.scratch().join(format!("{directory}.{number}.ledger"));
            std::fs::write(kept, lines.join("\n")).map_err(|e| e.to_string())?;
            let failed = lines.iter().filter(|line| line.starts_with("failed"));
            self.failed += failed.count();
            operations += lines.len();
            match plan {
                Ok(plan) => plans.push((number, plan)),
                Err(found) => self.problems.push(found),
            }
        }
        self.operations += operations;
        self.show_given_up(bed)?;
        self.past.push_back(Past { directory, plans });
        Ok(operations)
    }

    /// Not a loss, but what a person wants to look into.
    fn show_given_up(&mut self, bed: &Testbed) -> Outcome {
        let mut lines = Vec::new();
        for entry in std::fs::read_dir(bed.scratch()).map_err(|e| e.to_string())?.flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "log") {
                let text = std::fs::read_to_string(entry.path()).map_err(|e| e.to_string())?;
                let given_up = text.lines().filter(|line| line.contains("gave up"));
                lines.extend(given_up.map(str::to_owned));
            }
        }
        lines.sort_unstable();
        lines.iter().skip(self.given_up).for_each(|line| println!("  {line}"));
        self.given_up = lines.len();
        Ok(())
    }

    /// Through a mount that has cached nothing.
    fn check(&mut self, bed: &mut Testbed) -> Outcome {
        let fresh = bed.mount_with(self.volume, &["-o", self.checker_deadline])?;
        for past in &self.past {
            for (number, plan) in &past.plans {
                if !self.problems.is_empty() {
                    break;
                }
                let place = format!("{}/{number}", past.directory);
                let problems = plan.check(&fresh.path.join(&place));
                self.problems.extend(problems.into_iter().map(|p| format!("{place}/{p}")));
            }
        }
        if self.past.len() > ROUNDS_KEPT
            && let Some(old) = self.past.pop_front()
        {
            std::fs::remove_dir_all(fresh.path.join(&old.directory)).map_err(|e| e.to_string())?;
        }
        bed.umount(&fresh)
    }
}

/// Waits until each load has so many more operations behind it.
fn go_on(bed: &Testbed, loads: &[Ledger], more: usize) -> Outcome {
    let targets: Vec<usize> = loads.iter().map(|load| load.length() + more).collect();
    bed.wait_until("the loads go on", Duration::from_secs(90), |_| {
        let reached = |(load, target): (&Ledger, &usize)| load.length() >= *target;
        loads.iter().zip(&targets).all(reached) || loads.iter().any(Ledger::has_ended)
    })?;
    if loads.iter().any(Ledger::has_ended) { Err("a load has ended".to_owned()) } else { Ok(()) }
}

fn are_all_active(bed: &Testbed) -> bool {
    let Ok(nodes) = bed.json(&["node", "list"]) else { return false };
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    nodes.len() == 6 && nodes.iter().all(|node| node["state"] == "Active")
}

/// Cuts until something is lost, but at least so often; at most `cuts`.
fn run(bed: &mut Testbed, course: &mut Course, (least, cuts): (u64, u64)) -> Outcome {
    for round in 0..cuts {
        course.round(bed, round)?;
        if !course.problems.is_empty() && round + 1 >= least {
            break;
        }
    }
    Ok(())
}

fn check_that_nothing_is_lost(seed: u64, cuts: u64) {
    println!("MILPA_POWER_SEED={seed}");
    let mut bed = Testbed::start_on_faulty_disks(seed, &[]).unwrap();
    let (volume, checker_deadline) = ("default", CHECKER_DEADLINE);
    let mut course = Course { volume, checker_deadline, seed, ..Course::default() };
    let mut done = run(&mut bed, &mut course, (1, cuts));
    if done.is_ok() {
        done = bed.wait_until("replicas equal", Duration::from_secs(120), |bed| {
            bed.milpa(&["partition", "compare"]).is_ok()
        });
    }
    if done.is_err() || !course.problems.is_empty() {
        let kept = bed.keep_disks();
        panic!("MILPA_POWER_SEED={seed}: {done:?} {:#?} {kept:?}", course.problems);
    }
    let Course { operations, failed, longest_return, .. } = course;
    println!("nothing lost in {cuts} power cuts, {operations} operations, {failed} failed");
    println!("back after at most {longest_return:?}; {}", bed.order("all counts").unwrap());
}

#[test]
#[ignore = "long: make power"]
fn power_cuts_take_nothing_that_was_acknowledged() {
    check_that_nothing_is_lost(seed(), cuts());
}

#[test]
fn a_few_power_cuts_take_nothing() {
    check_that_nothing_is_lost(1, CUTS_FEW);
}

/// Only acknowledged bytes or names that are missing count, and not that something takes long: the
/// cluster has to come back, and the loads to go on, here as well.
fn check_that_something_is_lost(mut bed: Testbed, volume: &'static str, seed: u64, least: u64) {
    println!("MILPA_POWER_SEED={seed}");
    let checker_deadline = CHECKER_DEADLINE_SHORT;
    let mut course = Course { volume, checker_deadline, seed, ..Course::default() };
    let done = run(&mut bed, &mut course, (least, CUTS_UNTIL_LOST));
    if done.is_err() || course.problems.is_empty() {
        let kept = bed.keep_disks();
        panic!("nothing that was acknowledged was lost: {done:?} {:#?} {kept:?}", course.problems);
    }
    println!("lost, as it must: {:#?}", course.problems);
}

/// What is not on disks when fsync returns is lost, and noticed. Loads that were told so go on.
#[test]
#[ignore = "make power-must-lose"]
fn must_lose_with_durability_memory() {
    let seed = seed();
    let bed = Testbed::start_on_faulty_disks(seed, &[]).unwrap();
    bed.milpa(&["volume", "create", "scratch", "--durability", "memory"]).unwrap();
    check_that_something_is_lost(bed, "scratch", seed, CUTS_FEW);
}

/// As above, for disks that lie about syncs.
#[test]
#[ignore = "make power-must-lose"]
fn must_lose_on_disks_that_pretend_to_sync() {
    let seed = seed();
    let mut bed = Testbed::start_on_faulty_disks(seed, &[]).unwrap();
    bed.order("data1,data2,data3 drop-syncs on").unwrap();
    check_that_something_is_lost(bed, "default", seed, 1);
}

/// What `milpa up` made a moment ago is there as well: without the cluster's file and key nobody would
/// find the bytes again.
#[test]
#[ignore = "make power"]
fn a_power_cut_leaves_a_new_cluster() {
    let seed = seed();
    println!("MILPA_POWER_SEED={seed}");
    let mut bed = Testbed::start_on_faulty_disk(seed).unwrap();
    let mount = bed.mount("default").unwrap();
    write_synced(&mount.path.join("first"), &pattern(seed, 100_000)).unwrap();
    kill(mount.pid().unwrap()).unwrap();
    let names: Vec<String> = bed.processes().iter().map(|process| process.name.clone()).collect();
    bed.cut_power_of_disk("disk", &names).unwrap();
    bed.up(&[]).unwrap();
    bed.milpa(&["umount", "--force", &mount.path.display().to_string()]).unwrap();
    let fresh = bed.mount("default").unwrap();
    assert!(std::fs::read(fresh.path.join("first")).unwrap() == pattern(seed, 100_000));
}
