//! CPU time of the cluster's processes and the mount.

use milpa_testbed::{Mounted, Outcome, Testbed};

/// Reads the CPU time that some processes have used so far.
#[derive(Debug)]
pub struct CpuMeter {
    pids: Vec<i32>,
}

impl CpuMeter {
    /// The servers of a test bed and the process behind a mount.
    pub fn of(bed: &Testbed, mount: &Mounted) -> Outcome<CpuMeter> {
        let mut pids: Vec<i32> = bed.processes().iter().filter_map(|p| p.pid()).collect();
        pids.push(mount.pid()?);
        Ok(CpuMeter { pids })
    }

    /// Microseconds of CPU used so far, user and system.
    pub fn used_us(&self) -> u64 {
        self.pids.iter().filter_map(|pid| process_us(*pid)).sum()
    }
}

/// proc(5): fields 14 and 15 of stat, in clock ticks of 10 ms.
fn process_us(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold spaces.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) * 10_000)
}
