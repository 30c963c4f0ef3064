//! One process of a phase, and those who start it.
//!
//! The parent starts N workers, each with a directory of its own, and writes the name of a phase to
//! all of them at once; each answers with a line when it is done. So all start together, and what
//! is timed is the slowest, as in mdtest.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use milpa_testbed::Outcome;

/// The phases, in the order in which mdtest runs them.
pub const PHASES: [&str; 8] = [
    "directory creation",
    "directory stat",
    "directory removal",
    "file creation",
    "file stat",
    "file read",
    "1 KiB create, write, close",
    "file removal",
];

/// Serves phases from standard input.
pub fn run(directory: &Path, count: u32) -> Outcome {
    for line in std::io::stdin().lines() {
        let phase = line.map_err(|e| e.to_string())?;
        let result = carry_out(&phase, directory, count);
        match result {
            Ok(()) => println!("done"),
            Err(error) => println!("{phase}: {error}"),
        }
        std::io::stdout().flush().map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn carry_out(phase: &str, directory: &Path, count: u32) -> std::io::Result<()> {
    let each = |work: &dyn Fn(&Path) -> std::io::Result<()>, kind: &str| {
        (0..count).try_for_each(|n| work(&directory.join(format!("{kind}{n:07}"))))
    };
    match phase {
        "directory creation" => each(&|path| std::fs::create_dir(path), "d"),
        "directory stat" => each(&|path| std::fs::metadata(path).map(drop), "d"),
        "directory removal" => each(&|path| std::fs::remove_dir(path), "d"),
        "file creation" => each(&|path| File::create_new(path).map(drop), "f"),
        "file stat" => each(&|path| std::fs::metadata(path).map(drop), "f"),
        "file read" => each(&|path| std::fs::read(path).map(drop), "f"),
        "1 KiB create, write, close" => each(&|path| std::fs::write(path, [7; 1024]), "w"),
        "file removal" => each(&|path| std::fs::remove_file(path), "f"),
        "clean up" => each(&|path| std::fs::remove_file(path), "w"),
        _ => Err(std::io::Error::other("unknown phase")),
    }
}

/// Workers that wait for a phase.
pub struct Workers {
    workers: Vec<Worker>,
}

struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Workers {
    /// Starts `processes` workers below `directory`, each to do `count` operations in a phase.
    pub fn start(directory: &Path, processes: u32, count: u32) -> Outcome<Workers> {
        let workers =
            (0..processes).map(|n| Worker::start(&directory.join(format!("p{n}")), count));
        Ok(Workers { workers: workers.collect::<Outcome<_>>()? })
    }

    /// Runs a phase in all of them and tells how long the slowest took.
    pub fn phase(&mut self, name: &str) -> Outcome<Duration> {
        let started = Instant::now();
        for worker in &mut self.workers {
            writeln!(worker.input, "{name}").map_err(|e| e.to_string())?;
        }
        for worker in &mut self.workers {
            let mut line = String::new();
            worker.output.read_line(&mut line).map_err(|e| e.to_string())?;
            if line.trim() != "done" {
                return Err(line);
            }
        }
        Ok(started.elapsed())
    }
}

impl Worker {
    fn start(directory: &Path, count: u32) -> Outcome<Worker> {
        std::fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let own = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(own);
        command.arg("worker").arg(directory).arg(count.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        Ok(Worker { child, input, output })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for Worker { mut child, input, .. } in self.workers.drain(..) {
            // The end of its input ends it.
            drop(input);
            let _ = child.wait();
        }
    }
}
