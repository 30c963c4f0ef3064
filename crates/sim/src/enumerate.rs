//! `milpa-sim --crash-points`: the same calm course, again and again, with a crash or a pause at each of its points.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use milpa_sim::{CrashPoint, Outcome, Settings, crash_points, run_seed};

/// Runs every `every`-th point of a seed, so many at once. Says whether all were good.
fn crash_everywhere(calm: &Settings, every: u64, jobs: usize) -> bool {
    let began = Instant::now();
    let outcome = run_seed(calm);
    if !outcome.is_good() {
        println!("{outcome}");
        return false;
    }
    let points = crash_points(&outcome, every);
    let failed = run_all(calm, &points, jobs);
    println!(
        "seed {}: {} effects of {} machines, {} crashes, {failed} failed [{:.0} s]",
        calm.seed,
        outcome.effects.iter().map(|machine| machine.effects).sum::<u64>(),
        outcome.effects.len(),
        points.len(),
        began.elapsed().as_secs_f64()
    );
    failed == 0
}

/// Gives how many failed, and prints them.
fn run_all(calm: &Settings, points: &[CrashPoint], jobs: usize) -> usize {
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    let work = || {
        while let Some(point) = points.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome: Outcome =
                run_seed(&Settings { crash: Some(point.clone()), ..calm.clone() });
            if !outcome.is_good() {
                println!("{outcome}");
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| (0..jobs.max(1)).for_each(|_| drop(scope.spawn(work))));
    failed.into_inner()
}

/// Every seed of a range.
pub(crate) fn crash_everywhere_in(
    seeds: std::ops::Range<u64>,
    settings: impl Fn(u64) -> Settings,
    every: u64,
    jobs: usize,
) -> ExitCode {
    let failed = seeds.filter(|seed| !crash_everywhere(&settings(*seed), every, jobs)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
