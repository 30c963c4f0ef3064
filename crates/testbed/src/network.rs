//! Machines as far as a network is concerned: namespaces on one switch. Needs root and iproute2.

use std::net::Ipv4Addr;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Outcome;
use crate::ground::own_namespaces;

/// Classic BPF: `ret 2`, by which the kernel drops the packet (TC_ACT_SHOT). Netem and the usual drop
/// action are not in every kernel.
const DROP_ALL: &str = "1,6 0 0 2,";

/// No machine has this hardware address: what is sent to it is lost.
const NOBODY: &str = "02:00:00:00:00:01";

/// How a machine's network fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cut {
    /// Its cable is pulled: nothing in, nothing out, and the link is down.
    Pulled,
    /// What it sends arrives; what is sent to it does not.
    Deaf,
    /// What is sent to it arrives; what it sends does not.
    Mute,
}

/// Machines 1..=n, each a namespace with an interface on the switch. Dropping it removes them.
#[derive(Debug)]
pub(crate) struct Network {
    name: String,
    machines: u8,
}

impl Network {
    /// Makes the switch and the machines.
    ///
    /// # Errors
    ///
    /// What `ip` said.
    pub fn lay(machines: u8) -> Outcome<Network> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", own_namespaces());
        let network = Network { name, machines };
        let switch = network.switch();
        run("ip", &["netns", "add", &switch])?;
        run("ip", &["-n", &switch, "link", "add", "switch", "type", "bridge"])?;
        run("ip", &["-n", &switch, "link", "set", "switch", "up"])?;
        (1..=machines).try_for_each(|machine| network.connect(machine))?;
        Ok(network)
    }

    fn connect(&self, machine: u8) -> Outcome {
        let (switch, own, port) = (self.switch(), self.namespace(machine), port(machine));
        let address = format!("{}/24", address(machine));
        run("ip", &["netns", "add", &own])?;
        let pair = ["type", "veth", "peer", "name", "eth0", "netns", &own];
        run("ip", &[&["-n", &switch, "link", "add", &port][..], &pair[..]].concat())?;
        run("ip", &["-n", &switch, "link", "set", &port, "master", "switch", "up"])?;
        run("ip", &["-n", &own, "link", "set", "lo", "up"])?;
        run("ip", &["-n", &own, "addr", "add", &address, "dev", "eth0"])?;
        run("ip", &["-n", &own, "link", "set", "eth0", "up"])
    }

    /// A command that runs on a machine: in its network, with our files.
    pub fn on(&self, machine: u8) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.namespace(machine)));
        command
    }

    /// Breaks a machine's network.
    pub fn cut(&self, machine: u8, cut: Cut) -> Outcome {
        let (place, device) = self.end(machine, cut);
        if cut == Cut::Pulled {
            return run("ip", &["-n", &place, "link", "set", &device, "down"]);
        }
        run("tc", &["-n", &place, "qdisc", "add", "dev", &device, "ingress"])?;
        let filter = ["parent", "ffff:", "bpf", "da", "bytecode", DROP_ALL];
        run("tc", &[&["-n", &place, "filter", "add", "dev", &device][..], &filter[..]].concat())
    }

    /// Undoes [`cut`](Network::cut).
    pub fn mend(&self, machine: u8, cut: Cut) -> Outcome {
        let (place, device) = self.end(machine, cut);
        match cut {
            Cut::Pulled => run("ip", &["-n", &place, "link", "set", &device, "up"]),
            _ => run("tc", &["-n", &place, "qdisc", "del", "dev", &device, "ingress"]),
        }
    }

    /// Lets nothing through any more that one machine sends to another one: it has a wrong hardware address of it.
    pub fn cut_way(&self, from: u8, to: u8) -> Outcome {
        let (own, other) = (self.namespace(from), address(to).to_string());
        let wrong = ["lladdr", NOBODY, "nud", "permanent", "dev", "eth0"];
        run("ip", &[&["-n", &own, "neigh", "replace", &other][..], &wrong[..]].concat())
    }

    /// Undoes [`cut_way`](Network::cut_way).
    pub fn mend_way(&self, from: u8, to: u8) -> Outcome {
        let (own, other) = (self.namespace(from), address(to).to_string());
        run("ip", &["-n", &own, "neigh", "del", &other, "dev", "eth0"])
    }

    /// Where packets are stopped: as they come into the switch, or into the machine.
    fn end(&self, machine: u8, cut: Cut) -> (String, String) {
        match cut {
            Cut::Pulled | Cut::Mute => (self.switch(), port(machine)),
            Cut::Deaf => (self.namespace(machine), "eth0".to_owned()),
        }
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn namespace(&self, machine: u8) -> String {
        format!("{}-{machine}", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for machine in 1..=self.machines {
            let _ = run("ip", &["netns", "del", &self.namespace(machine)]);
        }
        let _ = run("ip", &["netns", "del", &self.switch()]);
    }
}

/// The address of a machine.
pub(crate) fn address(machine: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, machine)
}

/// The switch's end of a machine's cable.
fn port(machine: u8) -> String {
    format!("port{machine}")
}

fn run(program: &str, words: &[&str]) -> Outcome {
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|e| format!("cannot run {program} (package iproute2): {e}"))?;
    checked(&format!("{program} {}", words.join(" ")), &output).map(drop)
}

/// Standard output, or all of its output as the error.
pub(crate) fn checked(what: &str, output: &Output) -> Outcome<String> {
    let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(shown(&output.stdout));
    }
    Err(format!("{what}: {}\n{}{}", output.status, shown(&output.stdout), shown(&output.stderr)))
}
