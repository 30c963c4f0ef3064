//! A few seeds, and the one property that all others rest on.

use milpa_sim::{Outcome, Settings, run_seed};

fn run(seed: u64, operations: u64, is_calm: bool) -> Outcome {
    let (is_verbose, without) = (false, Vec::new());
    run_seed(&Settings { seed, operations, is_calm, is_verbose, without, crash: None })
}

/// A run is a function of its seed: whatever a library iterates over, whichever branch of a
/// `select!` is polled first. Without this no failing seed could be replayed.
#[test]
fn the_same_seed_takes_the_same_course_and_another_seed_another() {
    let (one, again) = (run(1, 60, false), run(1, 60, false));
    assert_eq!(one.events, again.events);
    assert_eq!(one.hash, again.hash);
    assert_ne!(one.hash, run(2, 60, false).hash);
}

/// Without faults everything works, nothing fails that should not, and it is not for want of trying.
#[test]
fn a_calm_run_is_good() {
    let outcome = run(11, 150, true);
    assert!(outcome.is_good(), "{outcome}");
    assert!(outcome.operations >= 150, "{outcome}");
    let count = |name: &str| outcome.counts.get(name).copied().unwrap_or(0);
    assert!(count("checked reads") > 10 && count("checked replicas") > 6, "{:?}", outcome.counts);
    assert!(outcome.longest_call.0 < 1_000, "{:?}", outcome.longest_call);
}

/// What a tally counts as a seed is one: operations that ended, and faults that happened.
#[test]
fn a_seed_is_not_done_before_it_has_seen_its_operations_and_its_faults() {
    for seed in 0..4 {
        let outcome = run(seed, 10, false);
        assert!(outcome.operations >= 10 && outcome.faults >= 5, "{outcome}");
    }
}
