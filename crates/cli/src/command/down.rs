//! `milpa down`: stops the cluster that `milpa up` started.

use std::time::Duration;

use super::mount;
use crate::arguments::Down;
use crate::cluster::{Cluster, process, supervisor};
use crate::command::up::directory_of;
use crate::failure::{Failure, Outcome};

/// Longer than the supervisor gives its managers, and then the others.
const SUPERVISOR_GRACE: Duration = Duration::from_secs(30);
/// For processes without a supervisor.
const PROCESS_GRACE: Duration = Duration::from_secs(10);

/// Unmounts, then stops the supervisor and every process.
pub fn run(arguments: &Down, cluster: Option<&std::path::Path>) -> Outcome {
    let directory = directory_of(arguments.data.as_deref().or(cluster));
    let cluster = Cluster::read(&directory)?;
    for mounted in mount::mounts_of(&cluster)? {
        mount::unmount(&mounted, arguments.force)?;
        println!("unmounted {}", mounted.display());
    }
    let mut stopped = 0;
    if let Some(supervisor) = supervisor::running(cluster.directory()) {
        stopped += cluster.file.process.iter().filter(|p| process::running(p).is_some()).count();
        if !supervisor.stop(SUPERVISOR_GRACE) {
            return Err(Failure::cluster("the supervisor did not stop and was killed")
                .fix("run `milpa down` again to stop what it left running"));
        }
    }
    // What an earlier supervisor left behind when it was killed.
    for process in &cluster.file.process {
        if let Some(running) = process::running(process) {
            running.stop(PROCESS_GRACE);
            stopped += 1;
        }
    }
    match stopped {
        0 => println!("nothing was running in {}", cluster.directory().display()),
        n => println!("stopped {n} processes; the data stays in {}", cluster.directory().display()),
    }
    Ok(())
}
