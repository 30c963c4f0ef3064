//! Load generators: mdtest's phases and fio's patterns, side by side with plain ext4 in one run.
//!
//! This machine is noisy, so figures are only worth something as ratios within a run. CPU counts as
//! much as time: our users' CPUs belong to somebody else.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod cpu;
mod failover;
mod million;
mod names;
mod patterns;
mod recovery;
mod worker;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use milpa_testbed::{Outcome, Testbed};

use cpu::CpuMeter;

/// Measures MilpaFS beside the file system below it.
#[derive(Parser)]
#[command(name = "milpa-bench")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// mdtest's phases with 1, 4 and 16 processes, then fio's patterns; beside plain ext4
    Compare {
        /// Names each process makes in each phase
        #[arg(long, default_value_t = 1000)]
        names: u32,
        /// Size of the file for the patterns, in MiB
        #[arg(long, default_value_t = 256)]
        mib: u32,
        /// A directory to compare with, instead of a temporary one
        #[arg(long)]
        plain: Option<PathBuf>,
    },
    /// A million inodes: memory for each, and how soon a meta node is ready after a restart
    Million {
        /// How many files
        #[arg(long, default_value_t = 1_000_000)]
        files: u64,
    },
    /// One large directory: `ls -f`, `ls -l`, and the memory of the mount
    Directory {
        /// How many files
        #[arg(long, default_value_t = 100_000)]
        files: u64,
    },
    /// A data node lost for good: how soon its replicas are made again, and what clients notice
    Recovery {
        /// How many files of 4 KiB the node holds that is lost
        #[arg(long, default_value_t = 50_000)]
        files: u64,
        /// What repair may copy to each disk in a second, in MiB; else the default of data nodes
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
        repair_mib: Option<u64>,
    },
    /// Servers killed under load: the longest call that a client sees, role by role
    Failover {
        /// How often each process is killed
        #[arg(long, default_value_t = 2)]
        rounds: u32,
    },
    /// One process of a phase (the others start this)
    #[command(hide = true)]
    Worker {
        /// Where to work
        directory: PathBuf,
        /// How many names or operations
        count: u32,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Compare { names, mib, plain } => compare(names, mib, plain.as_deref()),
        Command::Million { files } => million::run(files),
        Command::Directory { files } => million::directory(files),
        Command::Recovery { files, repair_mib } => recovery::run(files, repair_mib),
        Command::Failover { rounds } => failover::run(rounds),
        Command::Worker { directory, count } => worker::run(&directory, count),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn compare(count: u32, mib: u32, plain: Option<&Path>) -> Outcome {
    let mut bed = Testbed::start()?;
    let mount = bed.mount("default")?;
    let scratch = bed.scratch().join("plain");
    let plain = plain.unwrap_or(&scratch);
    std::fs::create_dir_all(plain).map_err(|e| format!("{}: {e}", plain.display()))?;
    let meter = CpuMeter::of(&bed, &mount)?;
    println!(
        "durability: metadata synced to a majority; fsync on all 3 replicas (one disk below all of them)"
    );
    println!(
        "\n{:<28}{:>10}{:>12}{:>9}{:>14}",
        "operation", "ext4 /s", "MilpaFS /s", "ratio", "CPU us/op"
    );
    names::compare(plain, &mount.path, count, &meter)?;
    println!(
        "\n{:<28}{:>10}{:>12}{:>9}{:>14}",
        "pattern", "ext4 MB/s", "MilpaFS", "ratio", "CPU us/op"
    );
    patterns::compare(plain, &mount.path, mib, &meter)?;
    bed.umount(&mount)?;
    bed.down()
}
