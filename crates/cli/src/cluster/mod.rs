//! The cluster file: all that a command needs to reach a cluster.
//!
//! ```toml
//! cluster = "5f0c…"                      # the cluster's id
//! managers = ["10.0.0.1:7400", "10.0.0.2:7400", "10.0.0.3:7400"]
//! key_file = "cluster.key"               # its secret; relative to this file
//! ```
//!
//! An embedded cluster (`milpa up`) has it in its data directory, with a list of its processes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use milpa_host::keys::Key;
use milpa_host::managers::Managers;
use milpa_host::rpc::{Credential, Identity, Pool};
use milpa_types::{ClusterId, Role};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};

pub mod embedded;
pub mod process;
pub mod supervisor;

/// Name of the file within an embedded cluster's data directory.
pub const CLUSTER_FILE: &str = "cluster.toml";

/// The environment variable that names a cluster.
pub const CLUSTER_VARIABLE: &str = "MILPA_CLUSTER";

/// The file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// 32 hexadecimal digits.
    pub cluster: String,
    /// Where the managers listen: one or more.
    pub managers: Vec<SocketAddr>,
    /// The file with the cluster's secret.
    pub key_file: PathBuf,
    /// The processes of an embedded cluster; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub process: Vec<embedded::Process>,
}

/// A cluster file that was read, and the secret beside it.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Where the file is.
    pub path: PathBuf,
    /// What it says.
    pub file: ClusterFile,
    /// The parsed id.
    pub id: ClusterId,
}

/// Where `milpa up` keeps its data unless told otherwise.
pub fn default_data_directory() -> PathBuf {
    // A root shell has HOME too; servers expect their data below /var.
    let home = std::env::var_os("HOME").filter(|_| !is_root());
    match home {
        Some(home) => Path::new(&home).join(".local/share/milpa"),
        None => PathBuf::from("/var/lib/milpa"),
    }
}

/// Is this process root's?
#[allow(unsafe_code)]
pub fn is_root() -> bool {
    // SAFETY: geteuid reads a number of this process and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

impl Cluster {
    /// Reads the file at `path`, or in the directory `path`.
    pub fn read(path: &Path) -> Outcome<Cluster> {
        let path = if path.is_dir() { path.join(CLUSTER_FILE) } else { path.to_owned() };
        // One spelling: the supervisor is found again by the directory on its command line.
        let path = path.canonicalize().unwrap_or(path);
        let text = std::fs::read_to_string(&path).map_err(|e| {
            Failure::user(format!("cannot read the cluster file {}", path.display()))
                .because(&e)
                .fix("start a cluster with `milpa up`, or name one with --cluster FILE")
        })?;
        let file: ClusterFile = toml::from_str(&text).map_err(|e| {
            Failure::user(format!("bad cluster file {}", path.display())).because(&e)
        })?;
        let id = u128::from_str_radix(&file.cluster, 16).map_err(|e| {
            let what = format!("bad cluster id {:?} in {}", file.cluster, path.display());
            Failure::user(what).because(&e)
        })?;
        if file.managers.is_empty() {
            let what = format!("no managers are named in {}", path.display());
            return Err(Failure::user(what).fix("add managers = [\"ip:port\", …]"));
        }
        Ok(Cluster { path, file, id: ClusterId(id) })
    }

    /// Reads the file that `--cluster`, `MILPA_CLUSTER` or the default data directory names.
    pub fn find(given: Option<&Path>) -> Outcome<Cluster> {
        match given {
            Some(path) => Cluster::read(path),
            None => Cluster::read(&default_data_directory()),
        }
    }

    /// The directory of the file.
    pub fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// The cluster's secret.
    pub fn secret(&self) -> Outcome<Key> {
        let path = self.directory().join(&self.file.key_file);
        Key::read(&path).map_err(|e| {
            Failure::user("cannot read the cluster's secret")
                .because(&e)
                .fix("run the command as the user who started the cluster")
        })
    }

    /// The managers, asked as an operator. Call it within a tokio runtime.
    pub fn managers(&self) -> Outcome<Managers> {
        let credential = Credential::Cluster(self.secret()?);
        let identity = Arc::new(Identity::new(Some(self.id), Role::Admin, credential));
        Ok(Managers::new(Pool::new(identity), self.file.managers.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_refused(text: &str, part: &str) {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(CLUSTER_FILE), text).unwrap();
        let failure = Cluster::read(temp.path()).unwrap_err().to_string();
        assert!(failure.contains(part), "{failure}");
    }

    #[test]
    fn typos_are_named() {
        check_refused(
            "cluster = \"1\"\nmanager = []\nkey_file = \"k\"\n",
            "unknown field `manager`",
        );
        check_refused("cluster = \"x\"\nmanagers = []\nkey_file = \"k\"\n", "bad cluster id");
        check_refused("cluster = \"1\"\nmanagers = []\nkey_file = \"k\"\n", "no managers");
        check_refused("cluster = \"1\"\nmanagers = [\"a\"]\nkey_file = \"k\"\n", "socket address");
    }
}
