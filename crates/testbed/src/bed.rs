//! A cluster in a temporary directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::Outcome;
use crate::faulty::FaultyDisks;
use crate::ground::Ground;
use crate::process::{ServerProcess, kill, signal_pid};

/// A running embedded cluster. Dropping it leaves nothing behind.
#[derive(Debug)]
pub struct Testbed {
    program: PathBuf,
    data: PathBuf,
    processes: Vec<ServerProcess>,
    mounts: Vec<PathBuf>,
    /// Mounted on the `ground`, and so dropped before it.
    pub(crate) disks: Option<FaultyDisks>,
    ground: Ground,
}

/// A mount of a volume.
#[derive(Clone, Debug)]
pub struct Mounted {
    /// Where.
    pub path: PathBuf,
}

impl Mounted {
    /// The process behind the mount, found by its command line.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn pid(&self) -> Outcome<i32> {
        let shown = self.path.display().to_string();
        for entry in std::fs::read_dir("/proc").map_err(|e| e.to_string())?.flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            if words.contains(&b"--foreground".as_slice()) && words.contains(&shown.as_bytes()) {
                return Ok(pid);
            }
        }
        Err(format!("no process serves {shown}"))
    }
}

#[derive(Deserialize)]
struct ClusterFile {
    process: Vec<ServerProcess>,
}

/// The `milpa` program of the build that this test belongs to, or what `MILPA_PROGRAM` names.
///
/// # Errors
///
/// When it was not built.
pub fn program() -> Outcome<PathBuf> {
    match std::env::var_os("MILPA_PROGRAM") {
        Some(path) => Ok(path.into()),
        None => built("milpa", "milpa-cli"),
    }
}

/// A program of the build that this test belongs to.
pub(crate) fn built(name: &str, package: &str) -> Outcome<PathBuf> {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let candidates = own.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| format!("{name} is not built: cargo build -p {package}"))
}

impl Testbed {
    /// Starts a cluster with the usual number of nodes.
    ///
    /// # Errors
    ///
    /// What `milpa up` said.
    pub fn start() -> Outcome<Testbed> {
        Testbed::start_with(&[])
    }

    /// Starts a cluster with further arguments for `milpa up`.
    ///
    /// # Errors
    ///
    /// What `milpa up` said.
    pub fn start_with(arguments: &[&str]) -> Outcome<Testbed> {
        Testbed::start_in(&std::env::temp_dir(), arguments)
    }

    /// Starts a cluster whose settings are changed first: `tune` gets the table of each process's
    /// config file.
    ///
    /// # Errors
    ///
    /// What `milpa up` said, or a config file that cannot be read or written.
    pub fn start_tuned(
        arguments: &[&str],
        tune: impl Fn(&ServerProcess, &mut toml::Table),
    ) -> Outcome<Testbed> {
        let mut bed = Testbed::start_with(arguments)?;
        bed.down()?;
        for process in &bed.processes {
            let path = process.directory.join("config.toml");
            let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
            let text = std::fs::read_to_string(&path).map_err(|e| failed(&e))?;
            let mut table: toml::Table = toml::from_str(&text).map_err(|e| failed(&e))?;
            tune(process, &mut table);
            let text = toml::to_string(&table).map_err(|e| failed(&e))?;
            std::fs::write(&path, text).map_err(|e| failed(&e))?;
        }
        bed.up(&[])?;
        Ok(bed)
    }

    /// Starts a cluster that takes a silent node for dead after a few seconds.
    ///
    /// # Errors
    ///
    /// As [`start_tuned`](Testbed::start_tuned).
    pub fn start_impatient(arguments: &[&str]) -> Outcome<Testbed> {
        Testbed::start_tuned(arguments, |process, table| {
            let policy = table.get_mut("policy").and_then(|policy| policy.as_table_mut());
            if let Some(policy) = policy.filter(|_| process.role == "manager") {
                policy.insert("dead_after_ms".to_owned(), toml::Value::Integer(5_000));
            }
        })
    }

    /// The id that the managers gave to a meta or data process.
    ///
    /// # Errors
    ///
    /// When there is no such process, or no manager knows it.
    pub fn node_id(&self, name: &str) -> Outcome<u64> {
        let process = self.process(name)?;
        let nodes = self.json(&["node", "list"])?;
        let nodes = nodes.as_array().ok_or("node list is no list")?;
        let found = nodes.iter().find(|node| node["address"] == process.listen.as_str());
        found.and_then(|node| node["id"].as_u64()).ok_or_else(|| format!("{name} is unknown"))
    }

    /// Starts a cluster whose files lie in a temporary directory below `parent`.
    ///
    /// # Errors
    ///
    /// What `milpa up` said.
    pub fn start_in(parent: &Path, arguments: &[&str]) -> Outcome<Testbed> {
        let ground = Ground::new_in(parent)?;
        let data = ground.path().join("cluster");
        Testbed::start_at(ground, data, None, arguments)
    }

    pub(crate) fn start_at(
        ground: Ground,
        data: PathBuf,
        disks: Option<FaultyDisks>,
        arguments: &[&str],
    ) -> Outcome<Testbed> {
        let (processes, mounts) = (Vec::new(), Vec::new());
        let mut bed = Testbed { program: program()?, data, processes, mounts, disks, ground };
        bed.up(arguments)?;
        Ok(bed)
    }

    /// `milpa up`: starts what does not run.
    ///
    /// # Errors
    ///
    /// What it said.
    pub fn up(&mut self, arguments: &[&str]) -> Outcome {
        let data = self.data().display().to_string();
        let mut words = vec!["up", "--data", &data];
        words.extend(arguments);
        self.milpa(&words)?;
        let path = self.data().join("cluster.toml");
        let text =
            std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let file: ClusterFile = toml::from_str(&text).map_err(|e| e.to_string())?;
        self.processes = file.process;
        Ok(())
    }

    /// `milpa down`.
    ///
    /// # Errors
    ///
    /// What it said.
    pub fn down(&mut self) -> Outcome {
        let data = self.data().display().to_string();
        self.milpa(&["down", "--data", &data])?;
        self.mounts.clear();
        Ok(())
    }

    /// The cluster's data directory.
    pub fn data(&self) -> PathBuf {
        self.data.clone()
    }

    /// A place for files outside of the cluster.
    pub fn scratch(&self) -> &Path {
        self.ground.path()
    }

    /// All server processes.
    pub fn processes(&self) -> &[ServerProcess] {
        &self.processes
    }

    /// A server process by name.
    ///
    /// # Errors
    ///
    /// When there is none of this name.
    pub fn process(&self, name: &str) -> Outcome<&ServerProcess> {
        let found = self.processes.iter().find(|process| process.name == name);
        found.ok_or_else(|| format!("no process named {name}"))
    }

    /// The pid of the supervisor.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub fn supervisor(&self) -> Outcome<i32> {
        let text = std::fs::read_to_string(self.data().join("SUPERVISOR"));
        let pid = text.ok().and_then(|text| text.trim().parse().ok());
        pid.ok_or_else(|| "no supervisor runs".to_owned())
    }

    /// Lets who is killed stay away, or come back: the supervisor stands still, or goes on.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub fn pause_supervisor(&self, pauses: bool) -> Outcome {
        let signal = if pauses { libc::SIGSTOP } else { libc::SIGCONT };
        crate::process::signal_pid(self.supervisor()?, signal)
    }

    /// kill -9 of every server process and the supervisor, as a power cut of the processes.
    ///
    /// # Errors
    ///
    /// When none of them ran.
    pub fn kill_all(&self) -> Outcome {
        // The supervisor first, or it would start again what is killed.
        signal_pid(self.supervisor()?, libc::SIGKILL)?;
        let killed = self.processes.iter().filter(|process| process.kill().is_ok()).count();
        if killed == 0 { Err("no process was there to kill".to_owned()) } else { Ok(()) }
    }

    /// Runs `milpa` on this cluster; standard output, or all of its output as the error.
    ///
    /// # Errors
    ///
    /// When it ends with another code than 0.
    pub fn milpa(&self, words: &[&str]) -> Outcome<String> {
        let output = self.milpa_output(words)?;
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        if output.status.success() {
            return Ok(out);
        }
        Err(format!("milpa {}: {}\n{out}{error}", words.join(" "), output.status))
    }

    /// Runs `milpa` on this cluster, whatever comes of it.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn milpa_output(&self, words: &[&str]) -> Outcome<Output> {
        let mut command = Command::new(&self.program);
        command.args(words).env("MILPA_CLUSTER", self.data());
        command.output().map_err(|e| format!("cannot run {}: {e}", self.program.display()))
    }

    /// Runs `milpa --json` on this cluster.
    ///
    /// # Errors
    ///
    /// As [`milpa`](Testbed::milpa), or when the output is not JSON.
    pub fn json(&self, words: &[&str]) -> Outcome<Value> {
        let mut all = vec!["--json"];
        all.extend(words);
        let text = self.milpa(&all)?;
        serde_json::from_str(&text).map_err(|e| format!("milpa {}: {e}: {text}", words.join(" ")))
    }

    /// Mounts a volume on a directory of its own.
    ///
    /// # Errors
    ///
    /// What `milpa mount` said.
    pub fn mount(&mut self, volume: &str) -> Outcome<Mounted> {
        self.mount_with(volume, &[])
    }

    /// Mounts a volume with further arguments for `milpa mount`.
    ///
    /// # Errors
    ///
    /// What `milpa mount` said.
    pub fn mount_with(&mut self, volume: &str, arguments: &[&str]) -> Outcome<Mounted> {
        let number = self.mounts.len() + 1;
        let path = self.ground.path().join(format!("mnt{number}"));
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let shown = path.display().to_string();
        let log = self.ground.path().join(format!("mount{number}.log")).display().to_string();
        let mut words = vec!["mount", volume, &shown, "--log-file", &log];
        words.extend(arguments);
        self.mounts.push(path.clone());
        self.milpa(&words)?;
        Ok(Mounted { path })
    }

    /// Unmounts; returns when all that was written is stored.
    ///
    /// # Errors
    ///
    /// What `milpa umount` said.
    pub fn umount(&mut self, mounted: &Mounted) -> Outcome {
        self.milpa(&["umount", &mounted.path.display().to_string()])?;
        self.mounts.retain(|path| *path != mounted.path);
        Ok(())
    }

    /// Waits until `holds` says so.
    ///
    /// # Errors
    ///
    /// When the time is up first: with what was waited for, and how the cluster stands.
    pub fn wait_until(
        &self,
        what: &str,
        limit: Duration,
        mut holds: impl FnMut(&Testbed) -> bool,
    ) -> Outcome {
        let started = Instant::now();
        while !holds(self) {
            if started.elapsed() > limit {
                return Err(format!(
                    "{what}: not within {} s\n{}",
                    limit.as_secs(),
                    self.standing()
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// What the cluster says of itself, for the message of a test that failed.
    fn standing(&self) -> String {
        let asked: [&[&str]; 4] =
            [&["status"], &["node", "list"], &["partition", "list"], &["task", "list"]];
        let say = |words: &[&str]| self.milpa(words).unwrap_or_else(|error| error);
        asked.map(say).join("\n")
    }

    /// Bytes that MilpaFS has allocated on all data nodes, as they themselves report.
    ///
    /// # Errors
    ///
    /// When the managers do not answer.
    pub fn allocated_bytes(&self) -> Outcome<u64> {
        let nodes = self.json(&["node", "list"])?;
        let nodes = nodes.as_array().ok_or("node list is no list")?;
        let disks =
            nodes.iter().filter(|n| n["role"] == "Data").flat_map(|n| n["disks"].as_array());
        Ok(disks.flatten().filter_map(|disk| disk["used_bytes"].as_u64()).sum())
    }

    /// Keeps the cluster's files for a look after a failure, and says where.
    pub fn keep_files(&mut self) {
        self.ground.keep();
    }

    fn stop_everything(&mut self) {
        for path in self.mounts.drain(..).rev() {
            // One that is hard would wait for servers that never come back, long after the mount is gone.
            let mounted = Mounted { path };
            let _ = mounted.pid().and_then(kill);
            let _ =
                Command::new(&self.program).args(["umount", "--force"]).arg(&mounted.path).output();
        }
        let _ = Command::new(&self.program)
            .args(["down", "--force", "--data"])
            .arg(self.data())
            .output();
        // A process that was stopped with SIGSTOP, or whose supervisor was killed.
        if let Ok(pid) = self.supervisor() {
            let _ = signal_pid(pid, libc::SIGKILL);
        }
        for process in &self.processes {
            let _ = process.kill();
        }
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("MILPA_KEEP").is_some() {
            self.keep_files();
        }
        self.stop_everything();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
