//! `milpa status`: the cluster in one look.

use milpa_types::{NodeState, Role};
use milpa_wire::manager::{ClusterStatus, ManagerAnswer, ManagerRequest};

use super::{ask, print_json, unexpected};
use crate::cluster::Cluster;
use crate::failure::Outcome;
use crate::size::show_bytes;

/// Prints it.
pub fn run(cluster: &Cluster, json: bool) -> Outcome {
    let answer = ask(cluster, &ManagerRequest::Status)?;
    let ManagerAnswer::Status(status) = answer else { return Err(unexpected(&answer)) };
    if json {
        return print_json(&status);
    }
    println!("cluster  {}", status.cluster);
    print_managers(&status);
    print_nodes(&status);
    print!("\n{}", super::volume::table(&status.volumes).render());
    if !status.warnings.is_empty() {
        println!();
    }
    for warning in &status.warnings {
        println!("warning: {warning}");
    }
    Ok(())
}

fn print_managers(status: &ClusterStatus) {
    let list: Vec<String> = status
        .managers
        .iter()
        .map(|(node, address)| {
            let mark = if *node == status.leader { " (leads)" } else { "" };
            format!("{address}{mark}")
        })
        .collect();
    println!("managers {}", list.join(", "));
}

fn print_nodes(status: &ClusterStatus) {
    for role in [Role::Meta, Role::Data] {
        let nodes: Vec<_> = status.nodes.iter().filter(|n| n.role == role).collect();
        let active = nodes.iter().filter(|n| n.state == NodeState::Active).count();
        println!("{role:<8} {active} of {} nodes active", nodes.len());
    }
    let disks = status.nodes.iter().filter(|n| n.role == Role::Data).flat_map(|n| &n.disks);
    let used = disks.map(|disk| disk.used_bytes).sum();
    let free = milpa_types::free_bytes(status.nodes.iter());
    println!("disks    {} used by MilpaFS, {} free", show_bytes(used), show_bytes(free));
}
