//! `milpa-faultfs`: mounts disks that fail on command.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;

use clap::Parser;
use milpa_faultfs::{COMMANDS, Disks, Options};
use tokio::signal::unix::{SignalKind, signal};

/// Disks that lose what was not synced when their power is cut, and fail on command
#[derive(Debug, Parser)]
#[command(after_help = after_help())]
struct Arguments {
    /// An empty directory for each disk
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Listen for commands on this socket, until SIGTERM. Without it they are read from standard
    /// input, and the end of the input ends the disks
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Decides what power cuts take
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of each disk in MiB; what is in use takes as much of this process's memory
    #[arg(long, default_value_t = 4096)]
    capacity_mib: u64,
    /// Lose the newest names first, as a file system with a journal does, not any of them
    #[arg(long)]
    keep_order_of_names: bool,
}

fn after_help() -> String {
    format!(
        "Commands, a line each, answered by a line: DISK,… COMMAND. DISK is a directory, its\n\
         last component, or all:\n{COMMANDS}\n\n\
         Example:\n  milpa-faultfs /mnt/a /mnt/b --seed 7 --control /run/faultfs &\n  \
         echo all freeze | nc -UN /run/faultfs    # then kill who uses them, then:\n  \
         echo all cut | nc -UN /run/faultfs"
    )
}

/// A command and where its answer goes, or `None`: the end.
type Order = Option<(String, mpsc::SyncSender<String>)>;

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false).init();
    match serve(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let options = Options {
        capacity_bytes: arguments.capacity_mib << 20,
        seed: arguments.seed,
        keeps_order_of_names: arguments.keep_order_of_names,
    };
    let (orders, queue) = mpsc::sync_channel(16);
    end_at_signals(orders.clone())?;
    let disks = Disks::mount(&arguments.directories, options)?;
    match &arguments.control {
        Some(path) => listen(path, orders)?,
        None => drop(std::thread::spawn(move || {
            converse(std::io::stdin().lock(), std::io::stdout(), &orders);
            orders.send(None)
        })),
    }
    println!("ready");
    for order in queue {
        let Some((line, asker)) = order else { break };
        let answer = disks.obey(&line).unwrap_or_else(|problem| format!("error: {problem}"));
        let _ = asker.send(answer);
    }
    if let Some(path) = &arguments.control {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

fn listen(path: &Path, orders: mpsc::SyncSender<Order>) -> Result<(), Box<dyn Error>> {
    let listener = UnixListener::bind(path).map_err(|e| format!("{}: {e}", path.display()))?;
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let orders = orders.clone();
            std::thread::spawn(move || serve_stream(&stream, &orders));
        }
    });
    Ok(())
}

fn serve_stream(stream: &UnixStream, orders: &mpsc::SyncSender<Order>) {
    converse(BufReader::new(stream), stream, orders);
}

/// Passes commands on and answers back, until either side has ended.
fn converse(input: impl BufRead, mut output: impl Write, orders: &mpsc::SyncSender<Order>) {
    for line in input.lines().map_while(Result::ok) {
        let (asker, answer) = mpsc::sync_channel(1);
        if orders.send(Some((line, asker))).is_err() {
            return;
        }
        let Ok(answer) = answer.recv() else { return };
        if writeln!(output, "{answer}").and_then(|()| output.flush()).is_err() {
            return;
        }
    }
}

/// A process that just ended would leave dead mounts behind.
fn end_at_signals(orders: mpsc::SyncSender<Order>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let terminate = signal(SignalKind::terminate());
            let interrupt = signal(SignalKind::interrupt());
            let (Ok(mut terminate), Ok(mut interrupt)) = (terminate, interrupt) else { return };
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            let _ = orders.send(None);
        });
    });
    Ok(())
}
