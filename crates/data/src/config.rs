//! Settings of one data node. Read from TOML by the CLI, checked by [`DataNodeConfig::validate`].

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One directory on one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The directory. Made if it is missing; belongs to this node from then on.
    pub path: PathBuf,
    /// Bytes that MilpaFS may use there; 0 for all that the file system has. 0 or 64 MiB or more.
    #[serde(default)]
    pub capacity_bytes: u64,
    /// Bytes of the file system that are left free, so that deletes, repair and a restart always
    /// have room: below, appends get `ENOSPC`; below a quarter of it (somebody else fills the disk),
    /// overwrites too. 1 MiB to 1 TiB.
    #[serde(default = "reserve_bytes_default")]
    pub reserve_bytes: u64,
}

impl DiskConfig {
    /// A disk with the usual reserve and no limit but the file system's.
    #[must_use]
    pub fn new(path: PathBuf) -> DiskConfig {
        DiskConfig { path, capacity_bytes: 0, reserve_bytes: reserve_bytes_default() }
    }
}

/// Settings of one data node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataNodeConfig {
    /// Where the node keeps who it is (cluster, node id, incarnation). May be one of the disks'
    /// directories.
    pub directory: PathBuf,
    /// Directories for file content, one for each physical disk. 1 to 64, none twice.
    pub disks: Vec<DiskConfig>,
    /// Where requests are taken. Port 0 draws a free one.
    pub listen: SocketAddr,
    /// The address that others are told, when it is not `listen` (port forwarding, wildcard).
    #[serde(default)]
    pub advertise: Option<SocketAddr>,
    /// Where `/metrics` is served. Port 0 draws a free one.
    pub http_listen: SocketAddr,
    /// The managers. 1 to 9.
    pub managers: Vec<SocketAddr>,
    /// Leaf switch of this server. 1 to 64 bytes.
    #[serde(default = "zone_default")]
    pub zone: String,
    /// Fault domain of this server; empty for one of its own. At most 64 bytes.
    #[serde(default)]
    pub region: String,
    /// Threads that read and write, for each disk. 1 to 64.
    #[serde(default = "disk_threads_default")]
    pub disk_threads: u32,
    /// Jobs that may wait for the threads of one disk; above it requests are answered "busy".
    /// 16 to 65,536.
    #[serde(default = "disk_queue_max_default")]
    pub disk_queue_max: u32,
    /// Appends that may be under way in one partition; above it they are answered "busy".
    /// 16 to 65,536.
    #[serde(default = "append_queue_max_default")]
    pub append_queue_max: u32,
    /// A shared extent for small files is closed when it has this many bytes, and the next one is
    /// begun. 1 MiB to 256 MiB.
    #[serde(default = "small_extent_bytes_max_default")]
    pub small_extent_bytes_max: u64,
    /// A backup that has not answered an append for this long breaks the extent. 100 to 60,000
    /// milliseconds.
    #[serde(default = "member_silent_ms_default")]
    pub member_silent_ms: u64,
    /// Between two heartbeats to the managers; what they may be waiting for is told at once. 50 to 1,000
    /// milliseconds.
    #[serde(default = "heartbeat_ms_default")]
    pub heartbeat_ms: u64,
    /// A writer that has appended nothing for this long and published nothing is asked about at
    /// the inode's partition. 1,000 to 86,400,000 milliseconds.
    #[serde(default = "writer_silent_ms_default")]
    pub writer_silent_ms: u64,
    /// Bytes a second that repair may copy to one disk; less is kinder to a disk that turns. 1 MiB or more.
    #[serde(default = "repair_bytes_per_second_default")]
    pub repair_bytes_per_second: u64,
    /// Within this time every byte is read again against its checksum. 10 to 31,536,000 seconds; 0 for
    /// never.
    #[serde(default = "scrub_period_s_default")]
    pub scrub_period_s: u64,
    /// Overwrites kept in the Raft log before they are flushed to their extents and the log is
    /// trimmed; up to twice as many while a block is damaged. 1 MiB to 4 GiB.
    #[serde(default = "log_bytes_max_default")]
    pub log_bytes_max: u64,
    /// The same, by time. 1,000 to 3,600,000 milliseconds.
    #[serde(default = "log_trim_ms_default")]
    pub log_trim_ms: u64,
    /// A start waits so long for the managers to say that the directory is no older copy; then the node
    /// serves without that word. 0 to 86,400,000 milliseconds.
    #[serde(default = "managers_wait_ms_default")]
    pub managers_wait_ms: u64,
    /// How old a copy of the directory must be to be refused for certain: so often the managers hear of
    /// another life of the node (docs/decisions/0011). 1,000 to 86,400,000 milliseconds.
    #[serde(default = "life_ms_default")]
    pub life_ms: u64,
}

fn reserve_bytes_default() -> u64 {
    256 << 20
}
fn zone_default() -> String {
    milpa_types::DEFAULT_ZONE.to_owned()
}
fn disk_threads_default() -> u32 {
    4
}
fn disk_queue_max_default() -> u32 {
    1024
}
fn append_queue_max_default() -> u32 {
    1024
}
fn small_extent_bytes_max_default() -> u64 {
    64 << 20
}
fn member_silent_ms_default() -> u64 {
    2_000
}
fn heartbeat_ms_default() -> u64 {
    200
}
fn writer_silent_ms_default() -> u64 {
    60_000
}
/// Two weeks, as Ceph and others have it for reads of everything.
fn scrub_period_s_default() -> u64 {
    14 * 86_400
}
/// Four nodes that share two cores and one disk copy 360 to 390 MB/s with it, and clients' p99 is one to two times as long
/// meanwhile: docs/guarantees.md, P7, has what was measured with this and with other values (`milpa-bench recovery
/// --repair-mib`).
fn repair_bytes_per_second_default() -> u64 {
    104 << 20
}
fn log_bytes_max_default() -> u64 {
    64 << 20
}
fn log_trim_ms_default() -> u64 {
    30_000
}
/// Managers that lost their power with everybody else are back by then.
fn managers_wait_ms_default() -> u64 {
    60_000
}
/// One small entry in the managers' log for each node.
fn life_ms_default() -> u64 {
    600_000
}

impl DataNodeConfig {
    /// The usual values around what every node must be told: its directories, where it listens,
    /// and where the managers are.
    #[must_use]
    pub fn new(
        directory: PathBuf,
        disks: Vec<DiskConfig>,
        listen: SocketAddr,
        http_listen: SocketAddr,
        managers: Vec<SocketAddr>,
    ) -> DataNodeConfig {
        DataNodeConfig {
            directory,
            disks,
            listen,
            advertise: None,
            http_listen,
            managers,
            zone: zone_default(),
            region: String::new(),
            disk_threads: disk_threads_default(),
            disk_queue_max: disk_queue_max_default(),
            append_queue_max: append_queue_max_default(),
            small_extent_bytes_max: small_extent_bytes_max_default(),
            member_silent_ms: member_silent_ms_default(),
            heartbeat_ms: heartbeat_ms_default(),
            writer_silent_ms: writer_silent_ms_default(),
            repair_bytes_per_second: repair_bytes_per_second_default(),
            scrub_period_s: scrub_period_s_default(),
            log_bytes_max: log_bytes_max_default(),
            log_trim_ms: log_trim_ms_default(),
            managers_wait_ms: managers_wait_ms_default(),
            life_ms: life_ms_default(),
        }
    }

    /// Returns every violated bound, not just the first: an operator fixes a file once.
    ///
    /// # Errors
    ///
    /// One line for each bad key, `key: value is …, allowed …`.
    pub fn validate(&self) -> Result<(), Vec<String>> {
        let mut problems = self.numbers_out_of_bounds();
        self.check_disks(&mut problems);
        if self.managers.is_empty() || self.managers.len() > 9 {
            problems.push(format!("managers: {} are given, allowed 1 to 9", self.managers.len()));
        }
        if self.zone.is_empty() || self.zone.len() > 64 {
            problems.push(format!("zone: has {} bytes, allowed 1 to 64", self.zone.len()));
        }
        if self.region.len() > 64 {
            problems.push(format!("region: has {} bytes, allowed 0 to 64", self.region.len()));
        }
        if self.advertise.is_none() && self.listen.ip().is_unspecified() {
            problems.push(format!(
                "advertise: is missing, needed because listen is {} and others cannot call that",
                self.listen
            ));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    fn numbers_out_of_bounds(&self) -> Vec<String> {
        // 0 stands for never.
        let scrub_period_s = if self.scrub_period_s == 0 { 10 } else { self.scrub_period_s };
        let numbers = [
            ("disk_threads", u64::from(self.disk_threads), 1, 64),
            ("disk_queue_max", u64::from(self.disk_queue_max), 16, 65_536),
            ("append_queue_max", u64::from(self.append_queue_max), 16, 65_536),
            ("small_extent_bytes_max", self.small_extent_bytes_max, 1 << 20, 256 << 20),
            ("member_silent_ms", self.member_silent_ms, 100, 60_000),
            ("heartbeat_ms", self.heartbeat_ms, 50, 1_000),
            ("writer_silent_ms", self.writer_silent_ms, 1_000, 86_400_000),
            ("repair_bytes_per_second", self.repair_bytes_per_second, 1 << 20, 1 << 40),
            ("scrub_period_s", scrub_period_s, 10, 31_536_000),
            ("log_bytes_max", self.log_bytes_max, 1 << 20, 4 << 30),
            ("log_trim_ms", self.log_trim_ms, 1_000, 3_600_000),
            ("managers_wait_ms", self.managers_wait_ms, 0, 86_400_000),
            ("life_ms", self.life_ms, 1_000, 86_400_000),
        ];
        numbers
            .iter()
            .filter(|(_, value, low, high)| value < low || value > high)
            .map(|(key, value, low, high)| {
                format!("{key}: value is {value}, allowed {low} to {high}")
            })
            .collect()
    }

    fn check_disks(&self, problems: &mut Vec<String>) {
        if self.disks.is_empty() || self.disks.len() > 64 {
            problems.push(format!("disks: {} are given, allowed 1 to 64", self.disks.len()));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let mut bound = |key: &str, value: u64, low: u64, high: u64| {
                if value < low || value > high {
                    problems.push(format!(
                        "disks[{index}].{key}: value is {value}, allowed {low} to {high}"
                    ));
                }
            };
            bound("reserve_bytes", disk.reserve_bytes, 1 << 20, 1 << 40);
            if disk.capacity_bytes != 0 {
                bound("capacity_bytes", disk.capacity_bytes, 64 << 20, 1 << 60);
            }
            if self.disks.iter().take(index).any(|other| other.path == disk.path) {
                problems.push(format!("disks[{index}].path: {:?} is given twice", disk.path));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DataNodeConfig {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let disks = vec![DiskConfig::new(PathBuf::from("/d1"))];
        DataNodeConfig::new(PathBuf::from("/n"), disks, address, address, vec![address])
    }

    #[track_caller]
    fn check_problem(change: impl Fn(&mut DataNodeConfig), expected: &str) {
        let mut bad = config();
        change(&mut bad);
        let problems = bad.validate().unwrap_err();
        assert!(problems.iter().any(|line| line.starts_with(expected)), "{problems:?}");
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn the_usual_values_are_valid_and_each_bad_one_is_named() {
        assert_eq!(config().validate(), Ok(()));
        check_problem(|c| c.disks.clear(), "disks:");
        check_problem(|c| c.disks.push(c.disks[0].clone()), "disks[1].path:");
        check_problem(|c| c.disks[0].reserve_bytes = 0, "disks[0].reserve_bytes:");
        check_problem(|c| c.disks[0].capacity_bytes = 1, "disks[0].capacity_bytes:");
        check_problem(|c| c.managers.clear(), "managers:");
        check_problem(|c| c.zone.clear(), "zone:");
        check_problem(|c| c.disk_threads = 0, "disk_threads:");
        check_problem(|c| c.heartbeat_ms = 10_000, "heartbeat_ms:");
        check_problem(|c| c.listen = "0.0.0.0:1".parse().unwrap(), "advertise:");
    }

    #[test]
    fn every_problem_is_returned_at_once() {
        let mut bad = config();
        bad.disk_threads = 0;
        bad.heartbeat_ms = 0;
        bad.disks.clear();
        assert_eq!(bad.validate().unwrap_err().len(), 3);
    }
}
