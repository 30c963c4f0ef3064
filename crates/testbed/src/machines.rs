//! A cluster of several machines: each a network namespace with an address of its own, all on one
//! switch. Their cables can be pulled.
//!
//! The cluster is made as README.md tells a person to make it: `milpa init`, a config file for each
//! process, each process started by hand in the foreground. Needs root and iproute2.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::{Outcome, program};

/// What each server of the cluster runs, with its ports: requests, HTTP.
const ROLES: [(&str, u16, u16); 3] =
    [("manager", 7400, 7401), ("meta", 7410, 7411), ("data", 7420, 7421)];

/// Servers 1..=n and one client, numbered n + 1. Dropping it stops and removes everything.
#[derive(Debug)]
pub struct Machines {
    program: PathBuf,
    directory: tempfile::TempDir,
    name: String,
    servers: u8,
    processes: Vec<Child>,
    mounts: Vec<PathBuf>,
}

impl Machines {
    /// Makes the machines and the switch, and starts a manager, a meta node and a data node on each
    /// server. Returns when the managers answer and all nodes are there.
    ///
    /// # Errors
    ///
    /// What could not be made or started.
    pub fn start(servers: u8) -> Outcome<Machines> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("milpa-{}-{number}", std::process::id());
        let directory = tempfile::Builder::new().prefix("milpa-machines-").tempdir();
        let directory = directory.map_err(|e| format!("no temporary directory: {e}"))?;
        let (processes, mounts) = (Vec::new(), Vec::new());
        let mut machines =
            Machines { program: program()?, directory, name, servers, processes, mounts };
        machines.cable()?;
        let managers = machines.managers();
        let etc = machines.directory.path().join("etc").display().to_string();
        machines.milpa(&["init", "--managers", &managers, &etc])?;
        for server in 1..=servers {
            for role in ROLES {
                machines.start_process(server, role)?;
            }
        }
        machines.wait_until_complete()?;
        Ok(machines)
    }

    /// Where the managers listen, as options have it.
    pub fn managers(&self) -> String {
        let all = (1..=self.servers).map(|server| format!("{}:7400", address(server)));
        all.collect::<Vec<_>>().join(",")
    }

    /// A place for files outside of the cluster.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// Runs `milpa` on the client; standard output, or all of its output as the error.
    ///
    /// # Errors
    ///
    /// When it ends with another code than 0.
    pub fn milpa(&self, words: &[&str]) -> Outcome<String> {
        let mut command = self.on(self.servers + 1);
        command.arg(&self.program).arg("--cluster").arg(self.cluster_file()).args(words);
        let output = command.output().map_err(|e| format!("cannot run milpa: {e}"))?;
        checked(&format!("milpa {}", words.join(" ")), &output)
    }

    /// Mounts a volume on the client, with nothing but its key.
    ///
    /// # Errors
    ///
    /// What `milpa mount` said.
    pub fn mount(&mut self, volume: &str) -> Outcome<PathBuf> {
        let number = self.mounts.len() + 1;
        let (path, key) = (self.scratch().join(format!("mnt{number}")), self.scratch().join("key"));
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        std::fs::write(&key, self.milpa(&["volume", "key", volume])?).map_err(|e| e.to_string())?;
        self.mounts.push(path.clone());
        let (managers, shown) = (self.managers(), path.display().to_string());
        let key = key.display().to_string();
        self.milpa(&["mount", volume, &shown, "--managers", &managers, "--key-file", &key])?;
        Ok(path)
    }

    /// Pulls a machine's network cable.
    ///
    /// # Errors
    ///
    /// What `ip` said.
    pub fn pull(&self, machine: u8) -> Outcome {
        self.ip(&["-n", &self.switch(), "link", "set", &port(machine), "down"])
    }

    /// Plugs it in again.
    ///
    /// # Errors
    ///
    /// What `ip` said.
    pub fn plug(&self, machine: u8) -> Outcome {
        self.ip(&["-n", &self.switch(), "link", "set", &port(machine), "up"])
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

    /// One switch, and a namespace with an interface on it for each machine.
    fn cable(&self) -> Outcome {
        let switch = self.switch();
        self.ip(&["netns", "add", &switch])?;
        self.ip(&["-n", &switch, "link", "add", "switch", "type", "bridge"])?;
        self.ip(&["-n", &switch, "link", "set", "switch", "up"])?;
        for machine in 1..=self.servers + 1 {
            let (own, port) = (self.namespace(machine), port(machine));
            let address = format!("{}/24", address(machine));
            self.ip(&["netns", "add", &own])?;
            let pair = ["type", "veth", "peer", "name", "eth0", "netns", &own];
            self.ip(&[&["-n", &switch, "link", "add", &port][..], &pair[..]].concat())?;
            self.ip(&["-n", &switch, "link", "set", &port, "master", "switch", "up"])?;
            self.ip(&["-n", &own, "link", "set", "lo", "up"])?;
            self.ip(&["-n", &own, "addr", "add", &address, "dev", "eth0"])?;
            self.ip(&["-n", &own, "link", "set", "eth0", "up"])?;
        }
        Ok(())
    }

    fn start_process(&mut self, server: u8, (role, port, http): (&str, u16, u16)) -> Outcome {
        let directory = self.directory.path().join(format!("server{server}"));
        std::fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
        let config = directory.join(format!("{role}.toml"));
        let home = directory.join(role);
        let text = self.config(server, role, &home, port, http);
        std::fs::write(&config, text).map_err(|e| e.to_string())?;
        let log = std::fs::File::create(directory.join(format!("{role}.log")));
        let log = log.map_err(|e| e.to_string())?;
        let mut command = self.on(server);
        command.arg(&self.program).arg("--cluster").arg(self.cluster_file());
        command.args([role, "--config"]).arg(&config).arg(&home);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.processes.push(command.spawn().map_err(|e| format!("cannot start {role}: {e}"))?);
        Ok(())
    }

    fn config(&self, server: u8, role: &str, home: &Path, port: u16, http: u16) -> String {
        let (home, address) = (home.display(), address(server));
        let managers = self.managers().replace(',', "\", \"");
        let common = format!(
            "directory = \"{home}\"\nlisten = \"{address}:{port}\"\nhttp_listen = \"{address}:{http}\"\n"
        );
        match role {
            "manager" => format!("{common}peers = [\"{managers}\"]\n"),
            "data" => {
                format!("{common}managers = [\"{managers}\"]\n[[disks]]\npath = \"{home}/disk\"\n")
            }
            _ => format!("{common}managers = [\"{managers}\"]\n"),
        }
    }

    fn wait_until_complete(&self) -> Outcome {
        let expected = 2 * usize::from(self.servers);
        self.wait_until("all nodes registered", Duration::from_secs(30), |machines| {
            machines
                .milpa(&["node", "list"])
                .is_ok_and(|nodes| nodes.matches(" active ").count() == expected)
        })
    }

    /// A command that runs on a machine: in its network, with our files.
    fn on(&self, machine: u8) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.namespace(machine)));
        command
    }

    fn ip(&self, words: &[&str]) -> Outcome {
        let output = Command::new("ip").args(words).output();
        let output = output.map_err(|e| format!("cannot run ip (package iproute2): {e}"))?;
        checked(&format!("ip {}", words.join(" ")), &output).map(drop)
    }

    fn cluster_file(&self) -> PathBuf {
        self.directory.path().join("etc/cluster.toml")
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn namespace(&self, machine: u8) -> String {
        format!("{}-{machine}", self.name)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("MILPA_KEEP").is_some() {
            self.directory.disable_cleanup(true);
            eprintln!("kept: {}", self.directory.path().display());
        }
        for path in self.mounts.drain(..).rev() {
            let _ = Command::new(&self.program).args(["umount", "--force"]).arg(&path).output();
        }
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        for machine in 1..=self.servers + 1 {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(machine)]).output();
        }
        let _ = Command::new("ip").args(["netns", "del", &self.switch()]).output();
    }
}

fn address(machine: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, machine)
}

/// The switch's end of a machine's cable.
fn port(machine: u8) -> String {
    format!("port{machine}")
}

fn checked(what: &str, output: &Output) -> Outcome<String> {
    let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(shown(&output.stdout));
    }
    Err(format!("{what}: {}\n{}{}", output.status, shown(&output.stdout), shown(&output.stderr)))
}
