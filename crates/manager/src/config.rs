//! The settings of one manager, as they stand in its file.
//!
//! Times are in milliseconds, sizes in bytes; the unit is part of each name. Unknown fields are
//! refused by name, and [`ManagerConfig::validate`] returns every problem at once.

use std::net::SocketAddr;
use std::path::PathBuf;

use milpa_types::NodeId;
use serde::{Deserialize, Serialize};

/// The first id that a meta or data node may get; managers have the ids below, from 1 upward.
pub const NODE_ID_FIRST: u32 = 101;

/// Largest number of managers in one cluster. More than seven only slow down each other.
pub const MANAGERS_MAX: usize = 7;

/// One manager's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManagerConfig {
    /// Where this manager keeps its log, its state and its identity. Used by no other process.
    pub directory: PathBuf,
    /// Where it listens for nodes, clients and other managers.
    pub listen: SocketAddr,
    /// Where it serves the HTTP interface and `/metrics`.
    pub http_listen: SocketAddr,
    /// All managers, in the same order in every manager's file: the first has the id 1, and so on.
    /// An odd number, as a majority decides. The addresses are those that others can reach.
    pub peers: Vec<SocketAddr>,
    /// The managers' HTTP addresses, in the order of `peers`, so that a follower can redirect a
    /// browser to the leader. Empty: a follower answers 503 instead.
    #[serde(default)]
    pub http_peers: Vec<SocketAddr>,
    /// This manager's place in `peers`, counted from 1. Needed when `listen` is not itself one of
    /// the peers (`0.0.0.0`, say); 0 to find it by `listen`.
    #[serde(default)]
    pub id: u32,
    /// When the state is written out and the log cut.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// What the planners aim at.
    #[serde(default)]
    pub policy: Policy,
}

/// When the state is written out and the log cut. The Raft log is the truth: a checkpoint only
/// shortens a restart and lets the log be dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Write the state after this many log entries. 1 to 1,000,000.
    pub entries: u64,
    /// Write the state this long after the first entry that it lacks. 100 to 3,600,000.
    pub interval_ms: u64,
    /// Entries kept in the log below the checkpoint, so that a manager that was away for a moment
    /// needs no snapshot. 0 to 1,000,000.
    pub entries_kept: u64,
}

impl Default for CheckpointConfig {
    fn default() -> CheckpointConfig {
        CheckpointConfig { entries: 4096, interval_ms: 30_000, entries_kept: 4096 }
    }
}

/// What the planners aim at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// A node that sends no heartbeat for this long is silent, and data partitions go on without
    /// it. At 2 s, and one for the change of configuration, no call waits longer than 10 s
    /// (docs/guarantees.md). 500 to 600,000.
    pub silence_period_ms: u64,
    /// A node that sends no heartbeat for this long is dead: its replicas are made again on other
    /// nodes. Long enough for a restart of its machine, as each repair copies all that it held. A
    /// removed node, one whose server was set up anew (a newer node serves at its address) and a failed disk
    /// are repaired at once. Above `silence_period_ms`, at most
    /// 2,592,000,000 (30 days).
    pub dead_after_ms: u64,
    /// Replicas that may be made at the same time in the whole cluster. 1 to 4,096.
    pub repairs_max: u32,
    /// Replicas that one node may be making at the same time. 1 to 256.
    pub repairs_per_node_max: u32,
    /// A replica that is not made by then is given up, and made elsewhere. 60,000 to 2,592,000,000.
    pub repair_deadline_ms: u64,
    /// A node or disk that is drained for longer is warned of; it goes on. 60,000 to 31,536,000,000.
    pub drain_deadline_ms: u64,
    /// Whether primaries and leaders move to nodes that have fewer of them, one after the other,
    /// while nothing is being repaired.
    pub balances: bool,
    /// How often the planners run, at the least: news of a data partition start them at once. 20 to 5,000.
    pub pass_interval_ms: u64,
    /// How long a node may take for one step. What it misses is tried again by a later pass.
    /// 100 to 60,000.
    pub task_deadline_ms: u64,
    /// Steps under way at once, on all nodes together. 1 to 4,096.
    pub tasks_in_flight_max: u32,
    /// Replicas of each meta partition; a majority of them decides. 3, 5 or 7.
    pub meta_replicas: u8,
    /// Data partitions of a new volume whose creator names no number. 1 to 4,096.
    pub data_partitions_initial: u32,
    /// Bytes after which a data partition is full. Only the sum over a volume matters much: full
    /// ones are joined by new ones. 64 MiB or more.
    pub data_partition_bytes: u64,
    /// Extents after which a data partition is full. 1,000 or more.
    pub data_partition_extents_max: u64,
    /// A partition filled to this share is nearly full: when all of a volume's are, new ones are
    /// added. 10 to 94.
    pub nearly_full_percent: u8,
    /// A partition filled to this share takes no new extents while another still does. Above
    /// `nearly_full_percent`, at most 100.
    pub full_percent: u8,
    /// Data partitions added to a volume whose partitions are nearly full. 1 to 4,096.
    pub data_partitions_growth: u32,
    /// The delta of CFS's Algorithm 1: how many ids above the highest one heard of a meta
    /// partition may still give after it was cut off. It must exceed what it can give between two
    /// heartbeats, id blocks of sessions (65,536) among them. 65,536 or more.
    pub split_delta_inodes: u64,
    /// Nodes in one Raft set (CFS 2.5): replicas of a partition are taken from one set where
    /// possible, so that a node exchanges heartbeats with few others. 3 to 1,000.
    pub raft_set_nodes: u32,
    /// Nodes among which the least used is chosen for each replica: the d of power-of-d choices.
    /// With d at or above the number of nodes the spread is exact. 1 to 1,000.
    pub choices: u32,
    /// Memory of a meta node that counts as fully used when nodes are compared. 64 MiB or more.
    pub meta_memory_bytes: u64,
    /// A disk with less room than this, or than a twentieth of its capacity if that is smaller,
    /// takes no new extents and no new partitions.
    pub disk_free_bytes_min: u64,
    /// Regions that are trusted (InterFS): each partition has a replica in one of them. A node
    /// without a region is always trusted. Empty: all regions are.
    pub trusted_regions: Vec<String>,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            silence_period_ms: 2_000,
            dead_after_ms: 300_000,
            repairs_max: 64,
            repairs_per_node_max: 4,
            repair_deadline_ms: 86_400_000,
            drain_deadline_ms: 7 * 86_400_000,
            balances: true,
            pass_interval_ms: 200,
            task_deadline_ms: 2_000,
            tasks_in_flight_max: 128,
            meta_replicas: 3,
            data_partitions_initial: 6,
            data_partition_bytes: 64 << 30,
            data_partition_extents_max: 100_000,
            nearly_full_percent: 80,
            full_percent: 95,
            data_partitions_growth: 6,
            split_delta_inodes: 1 << 20,
            raft_set_nodes: 12,
            choices: 8,
            meta_memory_bytes: 8 << 30,
            disk_free_bytes_min: 256 << 20,
            trusted_regions: Vec::new(),
        }
    }
}

/// Settings that cannot work. Lists every problem, not only the first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad manager settings: {}", problems.join("; "))]
pub struct ConfigError {
    /// One line each, `key: …`.
    pub problems: Vec<String>,
}

impl ManagerConfig {
    /// Settings with the default policy, for the manager that is found in `peers` by `listen`.
    #[must_use]
    pub fn new(
        directory: PathBuf,
        listen: SocketAddr,
        http_listen: SocketAddr,
        peers: Vec<SocketAddr>,
    ) -> ManagerConfig {
        ManagerConfig {
            directory,
            listen,
            http_listen,
            peers,
            http_peers: Vec::new(),
            id: 0,
            checkpoint: CheckpointConfig::default(),
            policy: Policy::default(),
        }
    }

    /// This manager's id: its place in `peers`, counted from 1.
    #[must_use]
    pub fn own_id(&self) -> Option<NodeId> {
        if self.id > 0 {
            return (self.id as usize <= self.peers.len()).then_some(NodeId(self.id));
        }
        let place = self.peers.iter().position(|peer| *peer == self.listen)?;
        u32::try_from(place + 1).ok().map(NodeId)
    }

    /// All managers with their ids.
    #[must_use]
    pub fn managers(&self) -> Vec<(NodeId, SocketAddr)> {
        (1..).map(NodeId).zip(self.peers.iter().copied()).collect()
    }

    /// Checks the bounds named at the fields.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        if self.directory.as_os_str().is_empty() {
            problems.push("directory: missing".to_owned());
        }
        self.check_peers(&mut problems);
        bound(&mut problems, "checkpoint.entries", self.checkpoint.entries, 1, 1_000_000);
        bound(&mut problems, "checkpoint.interval_ms", self.checkpoint.interval_ms, 100, 3_600_000);
        bound(&mut problems, "checkpoint.entries_kept", self.checkpoint.entries_kept, 0, 1_000_000);
        self.policy.check(&mut problems);
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    fn check_peers(&self, problems: &mut Vec<String>) {
        let count = self.peers.len();
        if count == 0 || count > MANAGERS_MAX || count.is_multiple_of(2) {
            problems.push(format!(
                "peers: {count} managers, allowed are odd numbers from 1 to {MANAGERS_MAX}"
            ));
        }
        for (place, peer) in self.peers.iter().enumerate() {
            if self.peers[..place].contains(peer) {
                problems.push(format!("peers: {peer} appears twice"));
            }
            if peer.ip().is_unspecified() || peer.port() == 0 {
                problems.push(format!("peers: {peer} is not an address that others can reach"));
            }
        }
        if !self.http_peers.is_empty() && self.http_peers.len() != count {
            problems.push(format!(
                "http_peers: {} addresses for {count} peers; give one each, or none",
                self.http_peers.len()
            ));
        }
        if self.own_id().is_none() {
            problems.push(if self.id > 0 {
                format!("id: value is {}, allowed 1 to {count} (a place in peers)", self.id)
            } else {
                format!("listen: {} is not in peers; add it, or set id", self.listen)
            });
        }
    }
}

impl Policy {
    fn check(&self, problems: &mut Vec<String>) {
        let rows: [(&str, u64, u64, u64); 20] = [
            ("silence_period_ms", self.silence_period_ms, 500, 600_000),
            ("dead_after_ms", self.dead_after_ms, 1_000, 2_592_000_000),
            ("repairs_max", self.repairs_max.into(), 1, 4096),
            ("repairs_per_node_max", self.repairs_per_node_max.into(), 1, 256),
            ("repair_deadline_ms", self.repair_deadline_ms, 60_000, 2_592_000_000),
            ("drain_deadline_ms", self.drain_deadline_ms, 60_000, 31_536_000_000),
            ("pass_interval_ms", self.pass_interval_ms, 20, 5_000),
            ("task_deadline_ms", self.task_deadline_ms, 100, 60_000),
            ("tasks_in_flight_max", self.tasks_in_flight_max.into(), 1, 4096),
            ("meta_replicas", self.meta_replicas.into(), 3, 7),
            ("data_partitions_initial", self.data_partitions_initial.into(), 1, 4096),
            ("data_partition_bytes", self.data_partition_bytes, 64 << 20, 1 << 50),
            ("data_partition_extents_max", self.data_partition_extents_max, 1000, 1 << 32),
            ("nearly_full_percent", self.nearly_full_percent.into(), 10, 94),
            ("full_percent", self.full_percent.into(), 11, 100),
            ("data_partitions_growth", self.data_partitions_growth.into(), 1, 4096),
            ("split_delta_inodes", self.split_delta_inodes, 65_536, 1 << 32),
            ("raft_set_nodes", self.raft_set_nodes.into(), 3, 1000),
            ("choices", self.choices.into(), 1, 1000),
            ("meta_memory_bytes", self.meta_memory_bytes, 64 << 20, 1 << 50),
        ];
        for (name, value, low, high) in rows {
            bound(problems, &format!("policy.{name}"), value, low, high);
        }
        if self.meta_replicas.is_multiple_of(2) {
            problems.push(format!(
                "policy.meta_replicas: value is {}, allowed 3, 5, 7",
                self.meta_replicas
            ));
        }
        if self.full_percent <= self.nearly_full_percent {
            problems.push(format!(
                "policy.full_percent: value is {}, allowed above nearly_full_percent ({})",
                self.full_percent, self.nearly_full_percent
            ));
        }
        if self.dead_after_ms <= self.silence_period_ms {
            problems.push(format!(
                "policy.dead_after_ms: value is {}, allowed above silence_period_ms ({})",
                self.dead_after_ms, self.silence_period_ms
            ));
        }
        if self.silence_period_ms < self.pass_interval_ms.saturating_mul(2) {
            problems
                .push("policy.silence_period_ms: must be two pass intervals or more".to_owned());
        }
    }
}

fn bound(problems: &mut Vec<String>, key: &str, value: u64, low: u64, high: u64) {
    if value < low || value > high {
        problems.push(format!("{key}: value is {value}, allowed {low} to {high}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> ManagerConfig {
        let peers: Vec<SocketAddr> =
            ["10.0.0.1:7700", "10.0.0.2:7700", "10.0.0.3:7700"].map(|a| a.parse().unwrap()).into();
        ManagerConfig::new(
            "/var/lib/milpa".into(),
            peers[1],
            "10.0.0.2:7780".parse().unwrap(),
            peers,
        )
    }

    #[test]
    fn the_defaults_are_valid_and_the_id_is_the_place_among_the_peers() {
        let config = three();
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.own_id(), Some(NodeId(2)));
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut ManagerConfig), key: &str) {
        let mut config = three();
        change(&mut config);
        let problems = config.validate().unwrap_err().problems;
        assert!(problems.iter().any(|p| p.starts_with(key)), "{key}: {problems:?}");
    }

    #[test]
    fn each_bound_is_checked_under_its_key() {
        check(|c| c.directory = PathBuf::new(), "directory:");
        check(|c| c.peers.truncate(2), "peers: 2 managers");
        check(|c| c.peers[2] = c.peers[0], "peers: 10.0.0.1:7700 appears twice");
        check(|c| c.peers[2] = "0.0.0.0:1".parse().unwrap(), "peers: 0.0.0.0:1 is not");
        check(|c| c.listen = "0.0.0.0:7700".parse().unwrap(), "listen: 0.0.0.0:7700 is not in");
        check(|c| c.id = 4, "id: value is 4, allowed 1 to 3");
        check(|c| c.http_peers = vec![c.listen], "http_peers: 1 addresses");
        check(|c| c.checkpoint.entries = 0, "checkpoint.entries: value is 0");
        check(|c| c.checkpoint.interval_ms = 1, "checkpoint.interval_ms");
        check(|c| c.policy.silence_period_ms = 1, "policy.silence_period_ms");
        check(|c| c.policy.meta_replicas = 4, "policy.meta_replicas: value is 4, allowed 3, 5, 7");
        check(|c| c.policy.dead_after_ms = 2_000, "policy.dead_after_ms: value is 2000, allowed");
        check(|c| c.policy.full_percent = 80, "policy.full_percent: value is 80, allowed above");
    }

    #[test]
    fn all_problems_come_at_once() {
        let mut config = three();
        config.policy.choices = 0;
        config.policy.raft_set_nodes = 0;
        assert_eq!(config.validate().unwrap_err().problems.len(), 2);
    }
}
