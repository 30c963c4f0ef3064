//! What clients notice when servers are killed: the longest call, role by role.
//!
//! Each role in turn is killed with `kill -9` while writers on a real mount make files, each with write,
//! fsync and close. The supervisor starts it again, but for all managers at once, who stay away for a
//! while. With three replicas each role has a leader, or a primary, among those that are killed.
//! Fails if a call took longer than is promised.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use milpa_testbed::load::Writer;
use milpa_testbed::{Mounted, Outcome, Testbed};

/// Writers, each in a directory of its own, so that several meta partitions are at work.
const WRITERS: usize = 4;
/// How long the quiet cluster is measured, and what it is given after each kill.
const QUIET: Duration = Duration::from_secs(5);
/// How long all managers stay away.
const AWAY: Duration = Duration::from_secs(20);
const RESTART_MAX: Duration = Duration::from_secs(30);
/// What is promised: of a meta leader, and of any other single failure.
const META_MAX: Duration = Duration::from_secs(2);
const STALL_MAX: Duration = Duration::from_secs(10);

/// Kills, and prints the longest call of each kind of failure.
pub fn run(rounds: u32) -> Outcome {
    let mut bed = Testbed::start()?;
    let mount = bed.mount("default")?;
    let mut load = Load { mount, turn: 0, too_long: Vec::new() };
    println!(
        "{WRITERS} writers: create + write 0..200 kB + fsync + close, one file after the other\n"
    );
    println!("{:<34}{:>8}{:>12}{:>16}", "what fails", "kills", "files/s", "longest call");
    load.measure(&bed, ("nothing", STALL_MAX), 0, |_| sleep(QUIET))?;
    for (role, longest_max) in [("meta", META_MAX), ("data", STALL_MAX), ("manager", META_MAX)] {
        let names: Vec<String> = of_role(&bed, role);
        let label = format!("each {role} node, one at a time");
        let kills = rounds * names.len() as u32;
        load.measure(&bed, (&label, longest_max), kills, |bed| {
            for name in (0..rounds).flat_map(|_| &names) {
                kill_and_wait(bed, name)?;
            }
            Ok(())
        })?;
    }
    let managers = of_role(&bed, "manager");
    let label = format!("all managers, for {} s", AWAY.as_secs());
    load.measure(&bed, (&label, META_MAX), managers.len() as u32, |bed| {
        bed.pause_supervisor(true)?;
        let killed = managers.iter().try_for_each(|name| bed.process(name)?.kill().map(drop));
        let waited = killed.and_then(|()| sleep(AWAY));
        bed.pause_supervisor(false)?;
        waited?;
        bed.wait_until("managers are back", RESTART_MAX, |bed| bed.json(&["status"]).is_ok())
    })?;
    bed.umount(&load.mount)?;
    bed.down()?;
    load.end()
}

/// Writers on one mount.
struct Load {
    mount: Mounted,
    turn: u32,
    /// What took longer than is promised.
    too_long: Vec<String>,
}

impl Load {
    /// Runs the writers while `fault` goes on, and prints what they noticed. No call may take longer than the
    /// limit beside the label.
    fn measure(
        &mut self,
        bed: &Testbed,
        (label, longest_max): (&str, Duration),
        kills: u32,
        fault: impl FnOnce(&Testbed) -> Outcome,
    ) -> Outcome {
        let started = Instant::now();
        let mut writers = Vec::new();
        let here = self.mount.path.join(self.turn.to_string());
        for number in 0..WRITERS {
            let directory = here.join(number.to_string());
            std::fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
            writers.push(Writer::start(&writer_program()?, &directory)?);
        }
        self.turn += 1;
        let failed = fault(bed);
        let (mut files, mut longest) = (0, Duration::ZERO);
        for writer in writers {
            let (written, took) = writer.finish()?;
            files += written;
            longest = longest.max(took);
        }
        failed?;
        let rate = files as f64 / started.elapsed().as_secs_f64();
        println!("{label:<34}{kills:>8}{rate:>12.0}{:>14.2} s", longest.as_secs_f64());
        if longest > longest_max {
            self.too_long.push(format!("{label}: {longest:.2?}, promised {longest_max:?}"));
        }
        // The next ones need the room.
        std::fs::remove_dir_all(&here).map_err(|e| format!("{}: {e}", here.display()))
    }

    fn end(&self) -> Outcome {
        if self.too_long.is_empty() { Ok(()) } else { Err(self.too_long.join("; ")) }
    }
}

fn of_role(bed: &Testbed, role: &str) -> Vec<String> {
    let processes = bed.processes().iter().filter(|process| process.role == role);
    processes.map(|process| process.name.clone()).collect()
}

fn kill_and_wait(bed: &Testbed, name: &str) -> Outcome {
    let killed = bed.process(name)?.kill()?;
    bed.wait_until("restarted", RESTART_MAX, |bed| {
        let pid = bed.process(name).ok().and_then(|process| process.pid());
        pid.is_some_and(|pid| pid != killed)
    })?;
    sleep(QUIET)
}

fn sleep(time: Duration) -> Outcome {
    std::thread::sleep(time);
    Ok(())
}

/// `milpa-writer`, built beside this program.
fn writer_program() -> Outcome<String> {
    let this = std::env::current_exe().map_err(|e| e.to_string())?;
    let writer: PathBuf = this.with_file_name("milpa-writer");
    match writer.exists() {
        true => Ok(writer.to_string_lossy().into_owned()),
        false => Err(format!("{} is missing: `make release` builds it", writer.display())),
    }
}
