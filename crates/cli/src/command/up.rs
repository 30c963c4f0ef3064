//! `milpa up`: a whole cluster on this machine.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use milpa_host::managers::Managers;
use milpa_types::{Node, Role, VolumeOptions};
use milpa_wire::manager::{ClusterStatus, ManagerAnswer, ManagerRequest};
use serde::Serialize;

use super::{ask_managers, block_on, mount, print_json, unexpected};
use crate::arguments::Up;
use crate::cluster::embedded::{self, Choices};
use crate::cluster::{
    CLUSTER_FILE, CLUSTER_VARIABLE, Cluster, default_data_directory, process, supervisor,
};
use crate::failure::{Failure, Outcome};

/// The volume that `up` creates.
pub const DEFAULT_VOLUME: &str = "default";

/// How long the processes may take until all serve.
const READY_WAIT: Duration = Duration::from_secs(60);
/// How long a port may stay in use by a process that is just ending.
const PORT_WAIT: Duration = Duration::from_secs(1);
/// How long a node on this machine may take to accept a connection.
const CONNECT_WAIT: Duration = Duration::from_millis(200);
/// After so long a person wants to know what is waited for.
const QUIET_WAIT: Duration = Duration::from_secs(5);
/// How often readiness is looked for.
const READY_POLL: Duration = Duration::from_millis(20);

#[derive(Serialize)]
struct Ready {
    cluster_file: String,
    volume: &'static str,
    ready_ms: u64,
    mount: Option<String>,
}

/// Starts what does not run, waits until all of it serves, and mounts.
pub fn run(arguments: &Up, cluster: Option<&Path>, json: bool) -> Outcome {
    let mut directories = arguments.data.clone();
    if directories.is_empty() {
        directories.push(directory_of(cluster));
    }
    let data_nodes = arguments.nodes.map_or(0, usize::from);
    let meta_nodes = arguments.meta_nodes.map_or(0, usize::from);
    if let Some(directory) = &arguments.mount {
        mount::check_mount_point(directory)?;
    }
    let started = Instant::now();
    let (cluster, fresh) =
        embedded::open_or_create(&Choices { directories, data_nodes, meta_nodes })?;
    say(
        json,
        &format!(
            "cluster in {}{}",
            cluster.directory().display(),
            if fresh { " (new)" } else { "" }
        ),
    );
    let mut supervisor = None;
    keep_supervised(&cluster, &mut supervisor)?;
    let status = block_on(async {
        let managers = cluster.managers()?;
        let status = wait_until_ready(&managers, &cluster, &mut supervisor, json).await?;
        ensure_volume(&managers).await?;
        Ok(status)
    })?;
    let ready_ms = started.elapsed().as_millis() as u64;
    say(json, &format!("ready after {:.1} s: {}", ready_ms as f64 / 1000.0, summary(&status)));
    if let Some(directory) = &arguments.mount {
        mount::mount_in_background(&cluster, DEFAULT_VOLUME, directory)?;
        say(json, &format!("volume {DEFAULT_VOLUME:?} mounted on {}", directory.display()));
    }
    if json {
        return print_json(&Ready {
            cluster_file: cluster.path.display().to_string(),
            volume: DEFAULT_VOLUME,
            ready_ms,
            mount: arguments.mount.as_ref().map(|d| d.display().to_string()),
        });
    }
    if arguments.mount.is_none() {
        say(json, &format!("mount it with: milpa mount {DEFAULT_VOLUME} DIR"));
    }
    Ok(())
}

/// A reader that has gone (`milpa up | head -1`) is no reason to leave a cluster half started.
fn say(json: bool, line: &str) {
    if !json {
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

fn summary(status: &ClusterStatus) -> String {
    let count = |role: Role| status.nodes.iter().filter(|n| n.role == role).count();
    let (meta, data) = (count(Role::Meta), count(Role::Data));
    format!("{} managers, {meta} meta nodes, {data} data nodes", status.managers.len())
}

/// Starts the supervisor, unless one runs or is starting. One that was found may be about to die, and
/// the one started then finds its lock taken: so this is looked at again until all is ready.
fn keep_supervised(cluster: &Cluster, own: &mut Option<Child>) -> Outcome {
    let is_starting = own.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
    if is_starting || supervisor::running(cluster.directory()).is_some() {
        return Ok(());
    }
    *own = Some(start_supervisor(cluster)?);
    Ok(())
}

/// A daemon that outlives this command.
fn start_supervisor(cluster: &Cluster) -> Outcome<Child> {
    let directory = cluster.directory();
    check_ports(cluster)?;
    let failed = |e: std::io::Error| Failure::user("cannot start the supervisor").because(&e);
    std::fs::create_dir_all(directory.join("logs")).map_err(failed)?;
    let log = process::open_log(&directory.join("logs/supervisor.log")).map_err(failed)?;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("supervise").arg(directory).current_dir("/");
    command.env_remove(CLUSTER_VARIABLE);
    command.stdin(Stdio::null()).stdout(log.try_clone().map_err(failed)?).stderr(log);
    command.process_group(0);
    command.spawn().map_err(failed)
}

/// A port that somebody else uses is found before anything is started.
fn check_ports(cluster: &Cluster) -> Outcome {
    for process in &cluster.file.process {
        if process::running(process).is_some() {
            continue;
        }
        for address in [process.listen, process.http_listen] {
            check_port(address, &process.name, cluster)?;
        }
    }
    Ok(())
}

fn check_port(address: SocketAddr, name: &str, cluster: &Cluster) -> Outcome {
    // A process that was killed a moment ago may not have let go of its port yet.
    let started = Instant::now();
    while started.elapsed() < PORT_WAIT && TcpListener::bind(address).is_err() {
        std::thread::sleep(READY_POLL);
    }
    TcpListener::bind(address).map(drop).map_err(|e| {
        let config = cluster.directory().join(name).join(embedded::CONFIG_FILE);
        Failure::user(format!("{name} cannot listen on {address}")).because(&e).fix(format!(
            "stop the process that uses the port, or change it in {} and {}",
            config.display(),
            cluster.path.display()
        ))
    })
}

/// Waits until the managers answer, and every node of the cluster is heard of and listens.
async fn wait_until_ready(
    managers: &Managers,
    cluster: &Cluster,
    supervisor: &mut Option<Child>,
    json: bool,
) -> Outcome<ClusterStatus> {
    let started = Instant::now();
    let mut last = None;
    let mut is_told = json;
    while started.elapsed() < READY_WAIT {
        keep_supervised(cluster, supervisor)?;
        let wait = Duration::from_millis(500);
        match ask_managers(managers, &ManagerRequest::Status, wait).await {
            Ok(ManagerAnswer::Status(status)) => {
                let missing = missing(cluster, &status).await;
                if missing.is_empty() {
                    return Ok(*status);
                }
                last = Some(Failure::cluster(format!("not in service: {}", missing.join(", "))));
            }
            Ok(other) => return Err(unexpected(&other)),
            Err(failure) => last = Some(failure),
        }
        let is_long = started.elapsed() >= QUIET_WAIT;
        if let (true, false, Some(failure)) = (is_long, is_told, &last) {
            say(json, &format!("still waiting: {}", failure.what()));
            is_told = true;
        }
        tokio::time::sleep(READY_POLL).await;
    }
    let logs = cluster.directory().join("logs");
    let failure = last.unwrap_or_else(|| Failure::cluster("the cluster did not start"));
    Err(failure.fix(format!("read the logs in {}", logs.display())))
}

/// The nodes of an embedded cluster that do not serve, by the names of their directories and logs. Managers that were
/// started a moment ago believe for a while that all nodes are there.
async fn missing(cluster: &Cluster, status: &ClusterStatus) -> Vec<String> {
    let mut missing = Vec::new();
    for process in cluster.file.process.iter().filter(|process| process.role != Role::Manager) {
        // It may be known by another address than it listens on.
        let is_it = |node: &Node| {
            let addresses = [node.address, node.http_address];
            node.role == process.role
                && (addresses.contains(&process.listen) || addresses.contains(&process.http_listen))
        };
        let is_heard = status.nodes.iter().any(|node| is_it(node) && node.state.is_heard());
        if !is_heard || !accepts(process.listen).await {
            missing.push(process.name.clone());
        }
    }
    missing
}

async fn accepts(address: SocketAddr) -> bool {
    let connects = tokio::net::TcpStream::connect(address);
    matches!(tokio::time::timeout(CONNECT_WAIT, connects).await, Ok(Ok(_)))
}

async fn ensure_volume(managers: &Managers) -> Outcome {
    let wait = Duration::from_secs(30);
    let answer = ask_managers(managers, &ManagerRequest::ListVolumes, wait).await?;
    let ManagerAnswer::Volumes(volumes) = answer else { return Err(unexpected(&answer)) };
    if volumes.iter().any(|v| v.volume.name == DEFAULT_VOLUME) {
        return Ok(());
    }
    let request = ManagerRequest::CreateVolume {
        name: DEFAULT_VOLUME.to_owned(),
        options: VolumeOptions::default(),
        meta_partitions: 0,
        data_partitions: 0,
    };
    ask_managers(managers, &request, wait).await.map(drop)
}

/// The directory of an embedded cluster that a command names, by itself or by its cluster file, or
/// the default one.
pub fn directory_of(given: Option<&Path>) -> PathBuf {
    match given {
        None => default_data_directory(),
        Some(path) if path.ends_with(CLUSTER_FILE) => {
            path.parent().map_or_else(PathBuf::new, Path::to_owned)
        }
        Some(path) => path.to_owned(),
    }
}
