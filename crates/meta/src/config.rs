//! The settings of a meta node, as its config file gives them.

use std::net::SocketAddr;
use std::path::PathBuf;

use milpa_types::DEFAULT_ZONE;
use serde::{Deserialize, Serialize};

/// One meta node. The first four fields have no default: a node must be told where it lives and
/// who manages it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetaNodeConfig {
    /// Directory for the node's identity, Raft log and snapshots. Created if missing. It needs
    /// room for the log (twice `snapshot_after_bytes` of each partition) and two snapshots of
    /// each partition.
    pub directory: PathBuf,
    /// Address for clients and other nodes, `ip:port`. It is told to the manager, so it must be
    /// reachable from outside (not `0.0.0.0`). Port 0 takes any free port.
    pub listen: SocketAddr,
    /// Address for metrics and health, `ip:port`. Port 0 takes any free port.
    pub http_listen: SocketAddr,
    /// Addresses of the managers, at least one.
    pub managers: Vec<SocketAddr>,
    /// Zone (leaf switch) of this server: 1 to 64 bytes.
    #[serde(default = "default_zone")]
    pub zone: String,
    /// Region (fault domain) of this server, at most 64 bytes; empty for a region of its own.
    #[serde(default)]
    pub region: String,
    /// Memory in bytes above which the node takes no new inodes: clients see ENOSPC, everything
    /// else goes on. 0 for three quarters of the machine's memory; else at least 64 MiB.
    #[serde(default)]
    pub memory_limit_bytes: u64,
    /// Bytes of the file system under `directory` that are left free: below, the node takes no new
    /// inodes, as above. 1 MiB to 1 TiB.
    #[serde(default = "default_reserve_bytes")]
    pub reserve_bytes: u64,
    /// Milliseconds after the last word of a client until its session ends and the files that
    /// only it held open are deleted: 1,000 to 600,000. The same on all meta nodes.
    #[serde(default = "default_session_lease_ms")]
    pub session_lease_ms: u64,
    /// Log entries of one partition since its last snapshot, after which the next is written:
    /// 100 or more.
    #[serde(default = "default_snapshot_after_entries")]
    pub snapshot_after_entries: u64,
    /// Log bytes of one partition since its last snapshot, after which the next is written:
    /// 65,536 or more.
    #[serde(default = "default_snapshot_after_bytes")]
    pub snapshot_after_bytes: u64,
    /// Within this time every snapshot is read again against its checksums. 1 to 31,536,000 seconds; 0 for never.
    #[serde(default = "default_scrub_period_s")]
    pub scrub_period_s: u64,
    /// Proposals of one partition that may wait for a majority, before clients are told to try
    /// again later: 1 to 1,000,000.
    #[serde(default = "default_proposals_max")]
    pub proposals_max: usize,
    /// Milliseconds that a start waits for the managers to say that the directory is no older copy; then the
    /// node serves without that word: at most 86,400,000.
    #[serde(default = "default_managers_wait_ms")]
    pub managers_wait_ms: u64,
    /// How old a copy of the directory must be to be refused for certain, in milliseconds: so often the
    /// managers hear of another life of the node (docs/decisions/0011). 1,000 to 86,400,000.
    #[serde(default = "default_life_ms")]
    pub life_ms: u64,
}

fn default_zone() -> String {
    DEFAULT_ZONE.to_owned()
}

/// DESIGN.md section 4; RELIABILITY.md 4.3 says how long others may wait for a lost client.
fn default_session_lease_ms() -> u64 {
    30_000
}

/// Room for the next segment of the log (64 MiB) and the next snapshots of small partitions.
fn default_reserve_bytes() -> u64 {
    128 << 20
}

/// Replay was measured at 86,000 entries a second on a busy two-core machine: a restart replays for
/// some two seconds at most.
fn default_snapshot_after_entries() -> u64 {
    200_000
}

/// 200,000 entries of an ordinary create, and what bounds large ones.
fn default_snapshot_after_bytes() -> u64 {
    64 << 20
}

/// As data nodes read everything again.
fn default_scrub_period_s() -> u64 {
    14 * 86_400
}

/// Two seconds of work at 10,000 changes a second: more would be answered too late anyway.
fn default_proposals_max() -> usize {
    20_000
}

/// Managers that lost their power with everybody else are back by then.
fn default_managers_wait_ms() -> u64 {
    60_000
}

/// One small entry in the managers' log for each node.
fn default_life_ms() -> u64 {
    600_000
}

impl MetaNodeConfig {
    /// A node with the default for everything that has one.
    #[must_use]
    pub fn new(
        directory: PathBuf,
        listen: SocketAddr,
        http_listen: SocketAddr,
        managers: Vec<SocketAddr>,
    ) -> MetaNodeConfig {
        MetaNodeConfig {
            directory,
            listen,
            http_listen,
            managers,
            zone: default_zone(),
            region: String::new(),
            memory_limit_bytes: 0,
            reserve_bytes: default_reserve_bytes(),
            session_lease_ms: default_session_lease_ms(),
            snapshot_after_entries: default_snapshot_after_entries(),
            snapshot_after_bytes: default_snapshot_after_bytes(),
            scrub_period_s: default_scrub_period_s(),
            proposals_max: default_proposals_max(),
            managers_wait_ms: default_managers_wait_ms(),
            life_ms: default_life_ms(),
        }
    }

    /// Checks every bound named at the fields.
    ///
    /// # Errors
    ///
    /// Every problem, one line each, beginning with the field's name.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let mut check = |holds: bool, problem: String| {
            if !holds {
                problems.push(problem);
            }
        };
        check(!self.directory.as_os_str().is_empty(), "directory: must not be empty".to_owned());
        check(
            !self.listen.ip().is_unspecified(),
            format!("listen: {} cannot be reached by others, name one address", self.listen),
        );
        check(
            self.listen.port() == 0 || self.listen != self.http_listen,
            format!("http_listen: {} is the listen address too", self.http_listen),
        );
        check(!self.managers.is_empty(), "managers: at least one address is needed".to_owned());
        check(
            (1..=64).contains(&self.zone.len()),
            format!("zone: has {} bytes, allowed 1 to 64", self.zone.len()),
        );
        check(
            self.region.len() <= 64,
            format!("region: has {} bytes, allowed 0 to 64", self.region.len()),
        );
        let mut bound = |field: &str, value: u64, low: u64, high: u64| {
            let problem = format!("{field}: value is {value}, allowed {low} to {high}");
            check((low..=high).contains(&value), problem);
        };
        if self.memory_limit_bytes != 0 {
            bound("memory_limit_bytes", self.memory_limit_bytes, 64 << 20, u64::MAX);
        }
        bound("reserve_bytes", self.reserve_bytes, 1 << 20, 1 << 40);
        bound("session_lease_ms", self.session_lease_ms, 1_000, 600_000);
        bound("snapshot_after_entries", self.snapshot_after_entries, 100, u64::MAX);
        bound("snapshot_after_bytes", self.snapshot_after_bytes, 65_536, u64::MAX);
        if self.scrub_period_s != 0 {
            bound("scrub_period_s", self.scrub_period_s, 1, 31_536_000);
        }
        bound("proposals_max", self.proposals_max as u64, 1, 1_000_000);
        bound("managers_wait_ms", self.managers_wait_ms, 0, 86_400_000);
        bound("life_ms", self.life_ms, 1_000, 86_400_000);
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> MetaNodeConfig {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        MetaNodeConfig::new("/srv/meta".into(), address(7002), address(7102), vec![address(7001)])
    }

    #[test]
    fn the_defaults_are_valid_and_every_problem_is_named() {
        assert_eq!(config().validate(), Ok(()));
        let bad = MetaNodeConfig {
            directory: PathBuf::new(),
            listen: SocketAddr::from(([0, 0, 0, 0], 7002)),
            managers: Vec::new(),
            zone: String::new(),
            memory_limit_bytes: 1,
            reserve_bytes: 1,
            session_lease_ms: 0,
            snapshot_after_entries: 1,
            scrub_period_s: 31_536_001,
            proposals_max: 0,
            life_ms: 0,
            ..config()
        };
        let problems = bad.validate().expect_err("eleven fields are wrong");
        let fields: Vec<&str> = problems.iter().filter_map(|p| p.split(':').next()).collect();
        let expected = [
            "directory",
            "listen",
            "managers",
            "zone",
            "memory_limit_bytes",
            "reserve_bytes",
            "session_lease_ms",
            "snapshot_after_entries",
            "scrub_period_s",
            "proposals_max",
            "life_ms",
        ];
        assert_eq!(fields, expected);
    }
}
