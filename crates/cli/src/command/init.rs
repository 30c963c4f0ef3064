//! `milpa init` and `milpa config`: what a cluster of several machines starts from.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use milpa_data::{DataNodeConfig, DiskConfig};
use milpa_host::disk;
use milpa_host::keys::Key;
use milpa_manager::ManagerConfig;
use milpa_meta::MetaNodeConfig;

use crate::arguments::ServerRole;
use crate::cluster::{CLUSTER_FILE, ClusterFile};
use crate::failure::{Failure, Outcome};

/// Writes the cluster file and key of a new cluster.
pub fn init(directory: &Path, managers: &[SocketAddr]) -> Outcome {
    if managers.len().is_multiple_of(2) {
        let what = format!("{} managers are named; an odd number is needed", managers.len());
        return Err(Failure::user(what).fix("name three (or five), as a majority decides"));
    }
    let file = directory.join(CLUSTER_FILE);
    if file.exists() {
        let what = format!("{} exists: a cluster is described here already", file.display());
        return Err(Failure::user(what).fix("name another directory"));
    }
    let failed = |e: &dyn std::error::Error| {
        Failure::user(format!("cannot write to {}", directory.display())).because(e)
    };
    disk::create_directory(directory).map_err(|e| failed(&e))?;
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| Failure::user(format!("no randomness: {e}")))?;
    let content = ClusterFile {
        cluster: format!("{:032x}", u128::from_le_bytes(id)),
        managers: managers.to_vec(),
        key_file: "cluster.key".into(),
        process: Vec::new(),
    };
    let key = Key::random().map_err(|e| failed(&e))?;
    key.write_new(&directory.join("cluster.key")).map_err(|e| failed(&e))?;
    let text = toml::to_string_pretty(&content).map_err(|e| failed(&e))?;
    disk::replace(&file, text.as_bytes()).map_err(|e| failed(&e))?;
    println!("wrote {} and cluster.key", file.display());
    println!("next: copy both to every server, then run on each of them, for example:");
    println!("  milpa config manager > manager.toml      # and edit it; likewise meta, data");
    println!("  milpa --cluster {} manager --config manager.toml DIR", file.display());
    Ok(())
}

/// Prints a config file with every field.
pub fn config(role: ServerRole) -> Outcome {
    let listen = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let managers = vec![listen(7400), listen(7402), listen(7404)];
    let text = match role {
        ServerRole::Manager => {
            let directory = PathBuf::from("/var/lib/milpa/manager");
            let config = ManagerConfig::new(directory, listen(7400), listen(7401), managers);
            toml::to_string_pretty(&config)
        }
        ServerRole::Meta => {
            let directory = PathBuf::from("/var/lib/milpa/meta");
            let config = MetaNodeConfig::new(directory, listen(7410), listen(7411), managers);
            toml::to_string_pretty(&config)
        }
        ServerRole::Data => {
            let directory = PathBuf::from("/var/lib/milpa/data");
            let disks = vec![DiskConfig::new(directory.join("disk"))];
            let (listen, http) = (listen(7420), listen(7421));
            toml::to_string_pretty(&DataNodeConfig::new(directory, disks, listen, http, managers))
        }
    };
    let text = text.map_err(|e| Failure::user("cannot print settings").because(&e))?;
    println!(
        "# Units are part of each field's name; the meaning of each stands in docs/config.md."
    );
    print!("{text}");
    Ok(())
}
