//! The layout of an embedded cluster: which processes, where, on which ports.
//!
//! ```text
//! DATA/cluster.toml   who and where (the cluster file)
//! DATA/cluster.key    the secret
//! DATA/SUPERVISOR     pid of the supervisor
//! DATA/logs/          a log for each process
//! DATA/manager1/ …    a directory for each process, with its config.toml
//! ```

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use milpa_data::{DataNodeConfig, DiskConfig};
use milpa_host::disk;
use milpa_host::keys::Key;
use milpa_manager::ManagerConfig;
use milpa_meta::MetaNodeConfig;
use milpa_types::Role;
use serde::{Deserialize, Serialize};

use super::{CLUSTER_FILE, Cluster, ClusterFile};
use crate::failure::{Failure, Outcome};

/// The name of each process's config file in its directory.
pub const CONFIG_FILE: &str = "config.toml";

/// Ports are sought from a place in this range upward: above those that services are known by,
/// below those that the kernel gives to outgoing connections. The place is drawn at random, so that
/// two clusters on one machine do not take each other's ports while one is down.
const PORTS: std::ops::Range<u16> = 10_000..30_000;

const MANAGERS: usize = 3;
/// Meta nodes, and data nodes, of which the user names no number.
const NODES: usize = 3;

/// One process of an embedded cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// `manager1`, `meta2`, …
    pub name: String,
    /// What it serves.
    #[serde(with = "role_word")]
    pub role: Role,
    /// Its directory, absolute.
    pub directory: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where its metrics are.
    pub http_listen: SocketAddr,
}

mod role_word {
    use milpa_types::Role;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(role: &Role, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(role.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Role, D::Error> {
        let word = String::deserialize(deserializer)?;
        [Role::Manager, Role::Meta, Role::Data]
            .into_iter()
            .find(|role| role.as_str() == word)
            .ok_or_else(|| serde::de::Error::custom(format!("unknown role {word:?}")))
    }
}

/// What the user chose.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The data directories; the first holds everything but the other data nodes' disks.
    pub directories: Vec<PathBuf>,
    /// How many data nodes; 0 for three, or as many as there are.
    pub data_nodes: usize,
    /// How many meta nodes; 0 for three, or as many as there are.
    pub meta_nodes: usize,
}

/// Reads the embedded cluster in `choices.directories[0]`, or creates one there.
pub fn open_or_create(choices: &Choices) -> Outcome<(Cluster, bool)> {
    let base = base(choices)?;
    if base.join(CLUSTER_FILE).exists() {
        let cluster = Cluster::read(base)?;
        check_choices(&cluster, choices)?;
        return Ok((cluster, false));
    }
    refuse_foreign_content(base)?;
    create(choices, base)?;
    Ok((Cluster::read(base)?, true))
}

fn base(choices: &Choices) -> Outcome<&Path> {
    choices.directories.first().map(PathBuf::as_path).ok_or_else(|| Failure::user("no directory"))
}

/// A cluster keeps its shape: growing an embedded one is not what `up` does silently.
fn check_choices(cluster: &Cluster, choices: &Choices) -> Outcome {
    let path = cluster.directory().display();
    for (role, wanted) in [(Role::Data, choices.data_nodes), (Role::Meta, choices.meta_nodes)] {
        let there = cluster.file.process.iter().filter(|p| p.role == role).count();
        if wanted != 0 && wanted != there {
            return Err(Failure::user(format!(
                "the cluster in {path} has {there} {role} nodes, not {wanted}"
            ))
            .fix("leave the number away, or name another directory with --data"));
        }
    }
    Ok(())
}

fn refuse_foreign_content(base: &Path) -> Outcome {
    let occupied = std::fs::read_dir(base).is_ok_and(|mut entries| entries.next().is_some());
    if occupied {
        let what = format!("{} holds something else than a MilpaFS cluster", base.display());
        return Err(Failure::user(what).fix("name an empty or new directory with --data DIR"));
    }
    Ok(())
}

fn create(choices: &Choices, base: &Path) -> Outcome {
    let io = |e: std::io::Error| {
        Failure::user(format!("cannot create a cluster in {}", base.display())).because(&e)
    };
    // All of it durably: without this file and the key nobody finds the bytes that are synced later.
    disk::create_directory(&base.join("logs")).map_err(io)?;
    let base = base.canonicalize().map_err(io)?;
    let or_usual = |count: usize| if count == 0 { NODES } else { count };
    let counts = (or_usual(choices.meta_nodes), or_usual(choices.data_nodes));
    let id = random_id()?;
    let processes = lay_out(&base, counts, id)?;
    let managers: Vec<&Process> = processes.iter().filter(|p| p.role == Role::Manager).collect();
    let file = ClusterFile {
        cluster: format!("{id:032x}"),
        managers: managers.iter().map(|m| m.listen).collect(),
        key_file: "cluster.key".into(),
        process: processes.clone(),
    };
    let http: Vec<SocketAddr> = managers.iter().map(|m| m.http_listen).collect();
    let mut data_nodes = 0;
    for process in &processes {
        let data = disk_directory(choices, process, data_nodes)?;
        data_nodes += usize::from(process.role == Role::Data);
        let config = config_text(process, &file, &http, data)?;
        disk::create_directory(&process.directory).map_err(io)?;
        disk::replace(&process.directory.join(CONFIG_FILE), config.as_bytes()).map_err(io)?;
    }
    let key = Key::random().map_err(|e| Failure::user("cannot make a key").because(&e))?;
    key.write_new(&base.join("cluster.key"))
        .map_err(|e| Failure::user("cannot write the key").because(&e))?;
    // Last and in one step: a directory without this file is no cluster.
    let text = toml::to_string_pretty(&file).map_err(|e| Failure::user("bug").because(&e))?;
    disk::replace(&base.join(CLUSTER_FILE), text.as_bytes()).map_err(io)
}

fn random_id() -> Outcome<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| Failure::user(format!("no randomness: {e}")))?;
    Ok(u128::from_le_bytes(bytes))
}

fn lay_out(base: &Path, (meta, data): (usize, usize), id: u128) -> Outcome<Vec<Process>> {
    let roles = [(Role::Manager, MANAGERS), (Role::Meta, meta), (Role::Data, data)];
    let named = roles
        .iter()
        .flat_map(|(role, count)| (1..=*count).map(move |n| (*role, format!("{role}{n}"))));
    let mut ports = free_ports(id);
    named
        .map(|(role, name)| {
            let directory = base.join(&name);
            let (listen, http_listen) = (next(&mut ports)?, next(&mut ports)?);
            Ok(Process { name, role, directory, listen, http_listen })
        })
        .collect()
}

fn next(ports: &mut impl Iterator<Item = SocketAddr>) -> Outcome<SocketAddr> {
    ports.next().ok_or_else(|| Failure::user("too few free ports on 127.0.0.1"))
}

/// Loopback addresses that nobody listens on now.
fn free_ports(id: u128) -> impl Iterator<Item = SocketAddr> {
    // Half of the range is left for the search upward.
    let first = PORTS.start + (id % u128::from(PORTS.end - PORTS.start) / 2) as u16;
    (first..PORTS.end)
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .filter(|address| TcpListener::bind(address).is_ok())
}

/// The disk of the data node with this index: its own directory, or with several `--data` one of
/// them in turn.
fn disk_directory(choices: &Choices, process: &Process, index: usize) -> Outcome<PathBuf> {
    if choices.directories.len() < 2 || process.role != Role::Data {
        return Ok(process.directory.join("disk"));
    }
    let turn = index % choices.directories.len();
    let disk = choices.directories.get(turn).cloned().unwrap_or_default();
    std::path::absolute(disk.join(format!("{}-disk", process.name)))
        .map_err(|e| Failure::user("bad --data directory").because(&e))
}

fn config_text(
    process: &Process,
    file: &ClusterFile,
    http: &[SocketAddr],
    disk: PathBuf,
) -> Outcome<String> {
    let (directory, managers) = (process.directory.clone(), file.managers.clone());
    let (listen, http_listen) = (process.listen, process.http_listen);
    let text = match process.role {
        Role::Manager => {
            let mut config = ManagerConfig::new(directory, listen, http_listen, managers);
            config.http_peers = http.to_vec();
            toml::to_string_pretty(&config)
        }
        Role::Meta => {
            toml::to_string_pretty(&MetaNodeConfig::new(directory, listen, http_listen, managers))
        }
        _ => {
            let disks = vec![DiskConfig::new(disk)];
            let config = DataNodeConfig::new(directory, disks, listen, http_listen, managers);
            toml::to_string_pretty(&config)
        }
    };
    let header = format!(
        "# MilpaFS: the settings of {}. Restart the process after a change.\n",
        process.name
    );
    text.map(|body| header + &body).map_err(|e| Failure::user("cannot write settings").because(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(directory: &Path, data_nodes: usize) -> Choices {
        Choices { directories: vec![directory.to_owned()], data_nodes, meta_nodes: 0 }
    }

    #[test]
    fn a_cluster_is_created_once_and_then_found() {
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().join("c");
        let (created, fresh) = open_or_create(&choices(&base, 4)).unwrap();
        assert!(fresh);
        assert_eq!(created.file.process.len(), 3 + 3 + 4);
        let (found, fresh) = open_or_create(&choices(&base, 0)).unwrap();
        assert!(!fresh);
        assert_eq!(found.file, created.file);
        assert!(open_or_create(&choices(&base, 5)).is_err());
    }

    #[test]
    fn every_config_file_is_one_that_its_role_accepts() {
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().join("c");
        let (cluster, _) = open_or_create(&choices(&base, 3)).unwrap();
        for process in &cluster.file.process {
            let text = std::fs::read_to_string(process.directory.join(CONFIG_FILE)).unwrap();
            match process.role {
                Role::Manager => {
                    toml::from_str::<ManagerConfig>(&text).unwrap().validate().unwrap();
                }
                Role::Meta => toml::from_str::<MetaNodeConfig>(&text).unwrap().validate().unwrap(),
                _ => toml::from_str::<DataNodeConfig>(&text).unwrap().validate().unwrap(),
            }
        }
    }

    #[test]
    fn a_directory_with_something_else_in_it_is_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join("photo.jpg"), "precious").unwrap();
        let failure = open_or_create(&choices(temp.path(), 3)).unwrap_err().to_string();
        assert!(failure.contains("something else"), "{failure}");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}
