//! `milpa`: every role, every command.
//!
//! This crate parses arguments and prints; what it calls lives in the other crates. Called as
//! `mount.milpa` (a link) it is the helper behind `mount -t milpa` and /etc/fstab.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod arguments;
mod cluster;
mod command;
mod failure;
mod size;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use milpa_types::Role;

use arguments::{Arguments, Command};
use cluster::Cluster;
use failure::Outcome;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            failure.exit_code()
        }
    }
}

fn run() -> Outcome {
    let words: Vec<String> = std::env::args().collect();
    if words.first().is_some_and(|name| name.ends_with("mount.milpa")) {
        return command::mount::helper(words.get(1..).unwrap_or_default());
    }
    let arguments = Arguments::parse();
    let (json, given) = (arguments.json, arguments.cluster.as_deref());
    if arguments.command.only_prints() {
        end_quietly_on_a_closed_pipe();
    }
    match arguments.command {
        Command::Up(up) => command::up::run(&up, given, json),
        Command::Down(down) => command::down::run(&down, given),
        Command::Status => command::status::run(&Cluster::find(given)?, json),
        Command::Mount(mount) => command::mount::mount(&mount, given),
        Command::Umount(umount) => command::mount::umount(&umount),
        Command::Volume(volume) => command::volume::run(&Cluster::find(given)?, volume, json),
        Command::Node(node) => command::node::run(&Cluster::find(given)?, &node, json),
        Command::Disk(disk) => command::node::run_disk(&Cluster::find(given)?, &disk, json),
        Command::Task(task) => command::task::run(&Cluster::find(given)?, &task, json),
        Command::Partition(partition) => {
            command::partition::run(&Cluster::find(given)?, partition, json)
        }
        Command::Fsck { volume, repair, patience } => {
            let patience = Duration::from_secs(patience);
            let options = milpa_fsck::Options { repairs: repair, patience };
            command::fsck::run(given, volume, &options, json)
        }
        Command::Info { path } => command::info::run(&path, json),
        Command::Init { managers, directory } => command::init::init(&directory, &managers),
        Command::Config { role } => command::init::config(role),
        Command::Manager(serve) => command::serve::run(Role::Manager, &serve, given),
        Command::Meta(serve) => command::serve::run(Role::Meta, &serve, given),
        Command::Data(serve) => command::serve::run(Role::Data, &serve, given),
        Command::Completion { shell } => {
            let mut command = Arguments::command();
            clap_complete::generate(shell, &mut command, "milpa", &mut std::io::stdout());
            Ok(())
        }
        Command::Supervise { directory } => {
            milpa_host::telemetry::init_logs();
            cluster::supervisor::run(&directory)
        }
    }
}

/// `milpa status | head` must end as other programs do. Servers keep SIGPIPE ignored: a peer that
/// hangs up is no reason to die.
#[allow(unsafe_code)]
fn end_quietly_on_a_closed_pipe() {
    // SAFETY: restores the default action of a signal before any thread is started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
