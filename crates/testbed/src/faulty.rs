//! Clusters on disks whose power can be cut: the program `milpa-faultfs`, mounted.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::bed::built;
use crate::ground::Ground;
use crate::process::signal_pid;
use crate::{Outcome, Testbed};

/// Faulty disks, each mounted on a directory. Dropping them unmounts them and forgets what they held.
#[derive(Debug)]
pub struct FaultyDisks {
    layer: Child,
    answers: BufReader<ChildStdout>,
}

impl FaultyDisks {
    /// Mounts an empty disk on each directory; `seed` decides what power cuts take.
    ///
    /// # Errors
    ///
    /// What the program said.
    pub fn mount(directories: &[PathBuf], seed: u64) -> Outcome<FaultyDisks> {
        let mut command = Command::new(built("milpa-faultfs", "milpa-faultfs")?);
        command.args(directories).args(["--seed", &seed.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut layer = command.spawn().map_err(|e| format!("milpa-faultfs: {e}"))?;
        let answers = BufReader::new(layer.stdout.take().ok_or("no pipe")?);
        let mut disks = FaultyDisks { layer, answers };
        match disks.answer()?.as_str() {
            "ready" => Ok(disks),
            other => Err(format!("milpa-faultfs: {other}")),
        }
    }

    /// Gives an order, `DISK,… COMMAND` (see `milpa-faultfs --help`), and waits until it is carried out.
    ///
    /// # Errors
    ///
    /// What the program said.
    pub fn order(&mut self, line: &str) -> Outcome<String> {
        let input = self.layer.stdin.as_mut().ok_or("milpa-faultfs has ended")?;
        writeln!(input, "{line}").map_err(|e| e.to_string())?;
        let answer = self.answer()?;
        if answer.starts_with("error: ") { Err(format!("{line}: {answer}")) } else { Ok(answer) }
    }

    /// Memory of the program: all that the disks hold.
    pub fn memory_bytes(&self) -> Option<u64> {
        crate::memory_bytes(self.layer.id() as i32)
    }

    fn answer(&mut self) -> Outcome<String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(0) => Err("milpa-faultfs has ended".to_owned()),
            Ok(_) => Ok(line.trim_end().to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Drop for FaultyDisks {
    fn drop(&mut self) {
        drop(self.layer.stdin.take());
        let _ = self.layer.wait();
    }
}

impl Testbed {
    /// Starts a cluster with everything that `milpa up` makes on one faulty disk, named `disk`.
    ///
    /// # Errors
    ///
    /// What `milpa-faultfs` or `milpa up` said.
    pub fn start_on_faulty_disk(seed: u64) -> Outcome<Testbed> {
        let ground = Ground::new_in(&std::env::temp_dir())?;
        let disk = ground.path().join("disk");
        std::fs::create_dir(&disk).map_err(|e| e.to_string())?;
        let disks = FaultyDisks::mount(std::slice::from_ref(&disk), seed)?;
        Testbed::start_at(ground, disk.join("cluster"), Some(disks), &[])
    }

    /// Starts a cluster with a faulty disk for each process's directory, named as the process, and with
    /// further arguments for `milpa up`.
    ///
    /// # Errors
    ///
    /// What `milpa-faultfs` or `milpa up` said.
    pub fn start_on_faulty_disks(seed: u64, arguments: &[&str]) -> Outcome<Testbed> {
        let mut bed = Testbed::start_with(arguments)?;
        bed.down()?;
        let directories: Vec<PathBuf> =
            bed.processes().iter().map(|process| process.directory.clone()).collect();
        for path in &directories {
            std::fs::rename(path, beside(path)).map_err(|e| e.to_string())?;
            std::fs::create_dir(path).map_err(|e| e.to_string())?;
        }
        bed.disks = Some(FaultyDisks::mount(&directories, seed)?);
        for path in &directories {
            copy(&beside(path), path)?;
            std::fs::remove_dir_all(beside(path)).map_err(|e| e.to_string())?;
        }
        bed.order("all sync")?;
        bed.up(&[])?;
        Ok(bed)
    }

    /// As [`FaultyDisks::order`].
    ///
    /// # Errors
    ///
    /// What the program said, or that the cluster is on usual disks.
    pub fn order(&mut self, line: &str) -> Outcome<String> {
        self.disks.as_mut().ok_or("the cluster is not on faulty disks")?.order(line)
    }

    /// Cuts the power of the machine of each of these processes: at one instant its disk stops and it is
    /// killed, and what its disk had not synced is lost, torn or kept. Gives what the disks said. The
    /// supervisor starts the processes again. `milpa up` has to, when the power went everywhere and
    /// the supervisor died as well.
    ///
    /// # Errors
    ///
    /// When one of them does not run.
    pub fn cut_power(&mut self, names: &[String]) -> Outcome<String> {
        self.cut_power_of_disk(&names.join(","), names)
    }

    /// As [`cut_power`](Testbed::cut_power), with these processes on these disks.
    ///
    /// # Errors
    ///
    /// When one of them does not run.
    pub fn cut_power_of_disk(&mut self, disks: &str, names: &[String]) -> Outcome<String> {
        // From here on nobody may touch what is frozen: pid files are read first.
        let pids = names.iter().map(|name| {
            let pid = self.process(name)?.pid();
            pid.ok_or_else(|| format!("{name} does not run"))
        });
        let pids = pids.collect::<Outcome<Vec<i32>>>()?;
        let is_everywhere = names.len() == self.processes().len();
        let supervisor = self.supervisor()?;
        signal_pid(supervisor, if is_everywhere { libc::SIGKILL } else { libc::SIGSTOP })?;
        self.order(&format!("{disks} freeze"))?;
        for pid in &pids {
            signal_pid(*pid, libc::SIGKILL)?;
        }
        let taken = self.order(&format!("{disks} cut"))?;
        self.wait_until("killed processes gone", std::time::Duration::from_secs(10), |_| {
            pids.iter().all(|pid| !is_alive(*pid))
        })?;
        if !is_everywhere {
            signal_pid(supervisor, libc::SIGCONT)?;
        }
        Ok(taken)
    }

    /// Copies what the faulty disks hold beside them, where it outlives them.
    ///
    /// # Errors
    ///
    /// When it cannot be copied.
    pub fn keep_disks(&mut self) -> Outcome {
        let directories: Vec<_> = self.processes().iter().map(|p| p.directory.clone()).collect();
        for path in directories.iter().filter(|_| self.disks.is_some()) {
            let kept = self.scratch().join("kept");
            std::fs::create_dir_all(&kept).map_err(|e| e.to_string())?;
            // The processes run on: files that go meanwhile are not missed.
            let _ = copy(path, &kept.join(path.file_name().unwrap_or_default()));
        }
        self.keep_files();
        Ok(())
    }
}

fn beside(path: &Path) -> PathBuf {
    path.with_extension("before")
}

/// Whether the process runs, or is about to end but still holds files.
fn is_alive(pid: i32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = state.rsplit_once(") ").map_or("", |(_, rest)| rest);
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}

/// Copies a directory, holes as holes.
fn copy(source: &Path, target: &Path) -> Outcome {
    let mut command = Command::new("cp");
    command.args(["-rT", "--sparse=always"]).args([source, target]);
    let output = command.output().map_err(|e| format!("cp: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("cp {}: {}", source.display(), String::from_utf8_lossy(&output.stderr)))
}
