//! mdtest's phases.

use std::path::Path;

use milpa_testbed::Outcome;

use crate::cpu::CpuMeter;
use crate::worker::{PHASES, Workers};

/// Runs all phases with 1, 4 and 16 processes, here and there.
pub fn compare(plain: &Path, mount: &Path, count: u32, meter: &CpuMeter) -> Outcome {
    for processes in [1, 4, 16] {
        let count = count / processes.min(4);
        let there = measure(plain, processes, count, meter)?;
        let here = measure(mount, processes, count, meter)?;
        for ((phase, ext4, _), (_, milpa, cpu)) in there.iter().zip(&here) {
            let label = format!("{processes:>2} × {phase}");
            println!("{label:<28}{ext4:>10.0}{milpa:>12.0}{:>9.3}{cpu:>14.0}", milpa / ext4);
        }
    }
    Ok(())
}

/// Operations a second and CPU microseconds an operation, for each phase.
fn measure(
    directory: &Path,
    processes: u32,
    count: u32,
    meter: &CpuMeter,
) -> Outcome<Vec<(&'static str, f64, f64)>> {
    let base = directory.join(format!("names{processes}"));
    let mut workers = Workers::start(&base, processes, count)?;
    let operations = f64::from(processes * count);
    let mut results = Vec::new();
    for phase in PHASES {
        let before = meter.used_us();
        let took = workers.phase(phase)?;
        let cpu = (meter.used_us() - before) as f64 / operations;
        results.push((phase, operations / took.as_secs_f64(), cpu));
    }
    workers.phase("clean up")?;
    drop(workers);
    std::fs::remove_dir_all(&base).map_err(|e| format!("{}: {e}", base.display()))?;
    Ok(results)
}
