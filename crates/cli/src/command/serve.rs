//! `milpa manager|meta|data`: one server process, from its config file.

use std::path::{Path, PathBuf};

use milpa_data::DataNodeConfig;
use milpa_host::keys::Key;
use milpa_host::{descriptors, telemetry};
use milpa_manager::ManagerConfig;
use milpa_meta::MetaNodeConfig;
use milpa_types::{ClusterId, Role};
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::Serve;
use crate::cluster::embedded::CONFIG_FILE;
use crate::cluster::{CLUSTER_FILE, Cluster};
use crate::failure::{Failure, Outcome};

/// Runs the server until SIGTERM or SIGINT.
pub fn run(role: Role, arguments: &Serve, cluster: Option<&Path>) -> Outcome {
    let cluster = find_cluster(&arguments.directory, cluster)?;
    let config = arguments.config.clone().unwrap_or(arguments.directory.join(CONFIG_FILE));
    let server = Server {
        config,
        directory: &arguments.directory,
        id: cluster.id,
        secret: cluster.secret()?,
    };
    telemetry::init_logs();
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise RLIMIT_NOFILE");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::user("cannot start the runtime").because(&e))?;
    runtime.block_on(server.run(role))
}

/// The cluster file beside the node's directory, unless another is named.
fn find_cluster(directory: &Path, given: Option<&Path>) -> Outcome<Cluster> {
    if let Some(path) = given {
        return Cluster::read(path);
    }
    let beside = directory.parent().unwrap_or(Path::new(".")).join(CLUSTER_FILE);
    let inside = directory.join(CLUSTER_FILE);
    Cluster::read(if inside.exists() { &inside } else { &beside })
}

struct Server<'a> {
    config: PathBuf,
    directory: &'a Path,
    id: ClusterId,
    secret: Key,
}

impl Server<'_> {
    async fn run(self, role: Role) -> Outcome {
        let stop = stop_signal()?;
        let (id, secret) = (self.id, self.secret.clone());
        match role {
            Role::Manager => {
                let config: ManagerConfig = self.read_config()?;
                self.check_directory(&config.directory)?;
                milpa_manager::run(config, id, secret, stop).await.map_err(|e| failed(role, &e))
            }
            Role::Meta => {
                let config: MetaNodeConfig = self.read_config()?;
                self.check_directory(&config.directory)?;
                milpa_meta::run(config, id, secret, stop).await.map_err(|e| failed(role, &e))
            }
            _ => {
                let config: DataNodeConfig = self.read_config()?;
                self.check_directory(&config.directory)?;
                milpa_data::run(config, id, secret, stop).await.map_err(|e| failed(role, &e))
            }
        }
    }

    fn read_config<T: DeserializeOwned>(&self) -> Outcome<T> {
        let path = self.config.display();
        let text = std::fs::read_to_string(&self.config).map_err(|e| {
            Failure::user(format!("cannot read the config file {path}"))
                .because(&e)
                .fix("`milpa config manager|meta|data` prints one to start from")
        })?;
        toml::from_str(&text)
            .map_err(|e| Failure::user(format!("bad config file {path}")).because(&e))
    }

    /// The command line names the directory so that people see it in `ps`; it must not lie.
    fn check_directory(&self, configured: &Path) -> Outcome {
        let same = |a: &Path, b: &Path| {
            a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
        };
        if same(configured, self.directory) {
            return Ok(());
        }
        let (here, there) = (self.directory.display(), configured.display());
        Err(Failure::user(format!("directory is {here}, but the config file says {there}"))
            .fix("use the same directory in both"))
    }
}

fn failed(role: Role, error: &dyn std::error::Error) -> Failure {
    Failure::user(format!("the {role} node cannot run")).because(error)
}

fn stop_signal() -> Outcome<impl Future<Output = ()>> {
    let failed = |e: std::io::Error| Failure::user("cannot wait for signals").because(&e);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
