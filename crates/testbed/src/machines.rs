//! A cluster of several machines: each a network namespace with an address of its own, all on one
//! switch. Their cables can be pulled, and they can be made deaf or mute.
//!
//! The cluster is made as README.md tells a person to make it: `milpa init`, a config file for each
//! process, each process started by hand in the foreground. Nobody starts again what dies but the
//! test. Needs root and iproute2.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::faulty::FaultyDisks;
use crate::ground::Ground;
use crate::network::{Cut, Network, address, checked};
use crate::process::signal_pid;
use crate::{Mounted, Outcome, program};

/// What a process is: `manager`, `meta` or `data`.
pub type Role = &'static str;

/// The machines of a cluster, and what they run.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The roles of each server.
    pub servers: Vec<Vec<Role>>,
    /// Machines for mounts. One more is the operator's, for commands and for looking.
    pub clients: u8,
    /// With a seed, the directory of each process is a disk of `milpa-faultfs`, named as the process.
    pub faulty_disks: Option<u64>,
    /// Further lines for the config files of a role.
    pub settings: Vec<(Role, &'static str)>,
}

impl Layout {
    /// Servers with a manager, a meta node and a data node each, and a client.
    #[must_use]
    pub fn alike(servers: u8) -> Layout {
        let all = vec!["manager", "meta", "data"];
        let servers = vec![all; usize::from(servers)];
        Layout { servers, clients: 1, faulty_disks: None, settings: Vec::new() }
    }
}

/// A server process, named by its role and machine: `meta2`.
#[derive(Debug)]
struct Process {
    name: String,
    role: Role,
    server: u8,
    /// Its server's: its own one, its config file and its log are in it.
    directory: PathBuf,
    /// Missing while it is not meant to run.
    child: Option<Child>,
}

impl Process {
    fn home(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.name))
    }

    fn config_file(&self) -> PathBuf {
        self.directory.join(format!("{}.toml", self.name))
    }
}

/// Servers 1..=n, clients numbered on, and the operator. Dropping it stops and removes everything.
#[derive(Debug)]
pub struct Machines {
    program: PathBuf,
    layout: Layout,
    processes: Vec<Process>,
    mounts: Vec<PathBuf>,
    mounts_made: usize,
    network: Network,
    /// Mounted on the `ground`, and so dropped before it.
    disks: Option<FaultyDisks>,
    ground: Ground,
}

impl Machines {
    /// Makes the machines and the switch, and starts the processes. Returns when the managers answer
    /// and all nodes are there.
    ///
    /// # Errors
    ///
    /// What could not be made or started.
    pub fn start(layout: Layout) -> Outcome<Machines> {
        let ground = Ground::new_in(&std::env::temp_dir())?;
        let network = Network::lay(layout.servers.len() as u8 + layout.clients + 1)?;
        let (processes, mounts, program) = (Vec::new(), Vec::new(), program()?);
        let (mounts_made, disks) = (0, None);
        let mut machines =
            Machines { program, layout, processes, mounts, mounts_made, network, disks, ground };
        let managers = machines.managers();
        let etc = machines.ground.path().join("etc").display().to_string();
        machines.milpa(&["init", "--managers", &managers, &etc])?;
        machines.prepare_processes()?;
        for name in machines.names() {
            machines.start_process(&name)?;
        }
        let limit = Duration::from_secs(60);
        machines.wait_until("all nodes registered", limit, Machines::are_all_active)?;
        Ok(machines)
    }

    /// Where the managers listen, as options have it.
    pub fn managers(&self) -> String {
        let servers =
            (1..).zip(&self.layout.servers).filter(|(_, roles)| roles.contains(&"manager"));
        let all = servers.map(|(server, _)| listen(server, "manager").0);
        all.collect::<Vec<_>>().join(",")
    }

    /// A place for files outside of the cluster.
    pub fn scratch(&self) -> &Path {
        self.ground.path()
    }

    /// All server processes, by name.
    pub fn names(&self) -> Vec<String> {
        self.processes.iter().map(|process| process.name.clone()).collect()
    }

    /// Runs `milpa` as the operator; standard output, or all of its output as the error.
    ///
    /// # Errors
    ///
    /// When it ends with another code than 0.
    pub fn milpa(&self, words: &[&str]) -> Outcome<String> {
        self.milpa_on(self.operator(), words)
    }

    fn milpa_on(&self, machine: u8, words: &[&str]) -> Outcome<String> {
        let mut command = self.network.on(machine);
        command.arg(&self.program).arg("--cluster").arg(self.cluster_file()).args(words);
        let output = command.output().map_err(|e| format!("cannot run milpa: {e}"))?;
        checked(&format!("milpa {}", words.join(" ")), &output)
    }

    /// Runs `milpa --json` as the operator.
    ///
    /// # Errors
    ///
    /// As [`milpa`](Machines::milpa), or when the output is not JSON.
    pub fn json(&self, words: &[&str]) -> Outcome<Value> {
        let text = self.milpa(&[&["--json"], words].concat())?;
        serde_json::from_str(&text).map_err(|e| format!("milpa {}: {e}: {text}", words.join(" ")))
    }

    /// Mounts a volume on a machine, with nothing but its key.
    ///
    /// # Errors
    ///
    /// What `milpa mount` said.
    pub fn mount(&mut self, machine: u8, volume: &str) -> Outcome<Mounted> {
        self.mounts_made += 1;
        let number = self.mounts_made;
        let (path, key) = (self.scratch().join(format!("mnt{number}")), self.scratch().join("key"));
        let log = self.scratch().join(format!("mount{number}.log")).display().to_string();
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        std::fs::write(&key, self.milpa(&["volume", "key", volume])?).map_err(|e| e.to_string())?;
        self.mounts.push(path.clone());
        let (managers, shown) = (self.managers(), path.display().to_string());
        let (key, given) =
            (key.display().to_string(), ["--managers", &managers, "--log-file", &log]);
        let words = [&["mount", volume, &shown, "--key-file", &key][..], &given[..]].concat();
        self.milpa_on(machine, &words)?;
        Ok(Mounted { path })
    }

    /// Unmounts; returns when all that was written is stored, or at once when its process is dead.
    ///
    /// # Errors
    ///
    /// What `milpa umount` said.
    pub fn umount(&mut self, mounted: &Mounted, is_dead: bool) -> Outcome {
        let shown = mounted.path.display().to_string();
        let forced: &[&str] = if is_dead { &["--force"] } else { &[] };
        self.milpa(&[&["umount", &shown], forced].concat())?;
        self.mounts.retain(|path| *path != mounted.path);
        Ok(())
    }

    /// The machine that is a client's, counted from 1.
    pub fn client(&self, client: u8) -> u8 {
        self.layout.servers.len() as u8 + client
    }

    /// The operator's machine.
    pub fn operator(&self) -> u8 {
        self.client(self.layout.clients + 1)
    }

    /// Breaks a machine's network.
    ///
    /// # Errors
    ///
    /// What `ip` or `tc` said.
    pub fn cut(&self, machine: u8, cut: Cut) -> Outcome {
        self.network.cut(machine, cut)
    }

    /// Undoes [`cut`](Machines::cut).
    ///
    /// # Errors
    ///
    /// What `ip` or `tc` said.
    pub fn mend(&self, machine: u8, cut: Cut) -> Outcome {
        self.network.mend(machine, cut)
    }

    /// Breaks the way from one machine to another, in this direction only.
    ///
    /// # Errors
    ///
    /// What `ip` said.
    pub fn cut_way(&self, from: u8, to: u8) -> Outcome {
        self.network.cut_way(from, to)
    }

    /// Undoes [`cut_way`](Machines::cut_way).
    ///
    /// # Errors
    ///
    /// What `ip` said.
    pub fn mend_way(&self, from: u8, to: u8) -> Outcome {
        self.network.mend_way(from, to)
    }

    /// As [`FaultyDisks::order`].
    ///
    /// # Errors
    ///
    /// What the program said, or that the cluster is on usual disks.
    pub fn order(&mut self, line: &str) -> Outcome<String> {
        self.disks.as_mut().ok_or("the cluster is not on faulty disks")?.order(line)
    }

    /// Starts a process.
    ///
    /// # Errors
    ///
    /// When it cannot be started, or there is none of this name.
    pub fn start_process(&mut self, name: &str) -> Outcome {
        let place = self.place(name)?;
        let process = &self.processes[place];
        let log = std::fs::File::options().append(true).create(true).open(process.log());
        let log = log.map_err(|e| format!("log of {name}: {e}"))?;
        let mut command = self.network.on(process.server);
        command.arg(&self.program).arg("--cluster").arg(self.cluster_file());
        command.args([process.role, "--config"]).arg(process.config_file()).arg(process.home());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|e| format!("cannot start {name}: {e}"))?;
        self.processes[place].child = Some(child);
        Ok(())
    }

    /// Sends a signal to a process.
    ///
    /// # Errors
    ///
    /// When it does not run: a fault that hits nobody would prove nothing.
    pub fn signal(&mut self, name: &str, signal: i32) -> Outcome {
        let place = self.place(name)?;
        let child = self.processes[place].child.as_mut();
        let child = child.ok_or_else(|| format!("{name} does not run"))?;
        match child.try_wait() {
            Ok(None) => signal_pid(child.id() as i32, signal),
            ended => Err(format!("{name} has ended: {ended:?}")),
        }
    }

    /// kill -9 of a process, which stays dead.
    ///
    /// # Errors
    ///
    /// As [`signal`](Machines::signal).
    pub fn kill(&mut self, name: &str) -> Outcome {
        self.signal(name, libc::SIGKILL)?;
        let place = self.place(name)?;
        let child = self.processes[place].child.take();
        child.map_or(Ok(()), |mut child| child.wait().map(drop).map_err(|e| e.to_string()))
    }

    /// Processes that have ended though nobody killed them. They can be started again.
    pub fn take_ended(&mut self) -> Vec<String> {
        let mut ended = Vec::new();
        for process in &mut self.processes {
            if process.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None))) {
                process.child = None;
                ended.push(process.name.clone());
            }
        }
        ended
    }

    /// The directory of a process.
    ///
    /// # Errors
    ///
    /// When there is none of this name.
    pub fn home(&self, name: &str) -> Outcome<PathBuf> {
        self.place(name).map(|place| self.processes[place].home())
    }

    /// The logs of all processes, of all their lives, and of the mounts.
    pub fn logs(&self) -> Vec<PathBuf> {
        let mounts =
            (1..=self.mounts_made).map(|number| self.scratch().join(format!("mount{number}.log")));
        self.processes.iter().map(Process::log).chain(mounts).collect()
    }

    /// The id of the node that is a process, if the managers know it. A node that lost its directory
    /// comes back as another one.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn node_id(&self, name: &str) -> Outcome<u64> {
        let process = &self.processes[self.place(name)?];
        let (listen, _) = listen(process.server, process.role);
        let nodes = self.json(&["node", "list"])?;
        let mut nodes = nodes.as_array().ok_or("node list is no list")?.iter();
        let found = nodes.find(|node| node["address"] == *listen && node["state"] == "Active");
        found.and_then(|node| node["id"].as_u64()).ok_or_else(|| format!("{name} is not active"))
    }

    /// How many partitions of its kind have a member on a meta or data process, and how many there are.
    ///
    /// # Errors
    ///
    /// When the managers do not say.
    pub fn replicas_on(&self, name: &str) -> Outcome<(usize, usize)> {
        let (node, partitions) = (self.node_id(name)?, self.partitions_like(name)?);
        let is_on = |partition: &&Value| {
            partition["members"].as_array().is_some_and(|members| members.contains(&node.into()))
        };
        Ok((partitions.iter().filter(is_on).count(), partitions.len()))
    }

    /// The partitions that processes of this one's role hold.
    fn partitions_like(&self, name: &str) -> Outcome<Vec<Value>> {
        let role = self.processes[self.place(name)?].role;
        let list = self.json(&["partition", "list"])?;
        list["Partitions"][role].as_array().cloned().ok_or_else(|| "no partitions".to_owned())
    }

    /// Whether all meta and data processes are nodes in service, and there are no others.
    pub fn are_all_active(&self) -> bool {
        let expected = self.processes.iter().filter(|process| process.role != "manager").count();
        let Ok(nodes) = self.json(&["node", "list"]) else { return false };
        let nodes = nodes.as_array().cloned().unwrap_or_default();
        nodes.len() == expected && nodes.iter().all(|node| node["state"] == "Active")
    }

    /// Waits until `holds` says so.
    ///
    /// # Errors
    ///
    /// When the time is up first: with what was waited for.
    pub fn wait_until(
        &self,
        what: &str,
        limit: Duration,
        mut holds: impl FnMut(&Machines) -> bool,
    ) -> Outcome {
        let started = Instant::now();
        while !holds(self) {
            if started.elapsed() > limit {
                return Err(format!("{what}: not within {} s", limit.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Keeps the cluster's files for a look after a failure, and says where.
    pub fn keep_files(&mut self) {
        self.ground.keep();
    }

    /// Directories, disks and config files.
    fn prepare_processes(&mut self) -> Outcome {
        for (server, roles) in (1..).zip(self.layout.servers.clone()) {
            for role in roles {
                let name = format!("{role}{server}");
                let directory = self.scratch().join(format!("server{server}"));
                self.processes.push(Process { name, role, server, directory, child: None });
            }
        }
        let homes: Vec<PathBuf> = self.processes.iter().map(Process::home).collect();
        for home in &homes {
            std::fs::create_dir_all(home).map_err(|e| format!("{}: {e}", home.display()))?;
        }
        if let Some(seed) = self.layout.faulty_disks {
            self.disks = Some(FaultyDisks::mount(&homes, seed)?);
        }
        for process in &self.processes {
            let path = process.config_file();
            let written = std::fs::write(&path, self.config(process));
            written.map_err(|e| format!("{}: {e}", path.display()))?;
        }
        Ok(())
    }

    fn config(&self, process: &Process) -> String {
        let (role, home) = (process.role, process.home());
        let ((listen, http), home) = (listen(process.server, role), home.display());
        let managers = self.managers().replace(',', "\", \"");
        let settings = self.layout.settings.iter().filter(|(of, _)| *of == role);
        let settings: String = settings.map(|(_, lines)| format!("{lines}\n")).collect();
        let common =
            format!("directory = \"{home}\"\nlisten = \"{listen}\"\nhttp_listen = \"{http}\"\n");
        match role {
            "manager" => format!("{common}peers = [\"{managers}\"]\n{settings}"),
            "data" => format!(
                "{common}managers = [\"{managers}\"]\n{settings}[[disks]]\npath = \"{home}/disk\"\n"
            ),
            _ => format!("{common}managers = [\"{managers}\"]\n{settings}"),
        }
    }

    fn place(&self, name: &str) -> Outcome<usize> {
        let found = self.processes.iter().position(|process| process.name == name);
        found.ok_or_else(|| format!("no process named {name}"))
    }

    fn cluster_file(&self) -> PathBuf {
        self.ground.path().join("etc/cluster.toml")
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("MILPA_KEEP").is_some() {
            self.keep_files();
        }
        for path in self.mounts.drain(..).rev() {
            let _ = Command::new(&self.program).args(["umount", "--force"]).arg(&path).output();
        }
        for child in self.processes.iter_mut().filter_map(|process| process.child.as_mut()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where a process of a server listens: for requests, and for HTTP.
fn listen(server: u8, role: Role) -> (String, String) {
    let port = match role {
        "manager" => 7400,
        "meta" => 7410,
        _ => 7420,
    };
    let address = address(server);
    (format!("{address}:{port}"), format!("{address}:{}", port + 1))
}
