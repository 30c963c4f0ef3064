//! `milpa node …`.

use milpa_types::Node;
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};

use super::{ask, print_json, unexpected};
use crate::arguments::NodeCommand;
use crate::cluster::Cluster;
use crate::failure::Outcome;
use crate::size::show_bytes;
use crate::table::Table;

/// Carries out one of the commands.
pub fn run(cluster: &Cluster, command: &NodeCommand, json: bool) -> Outcome {
    let NodeCommand::List = command;
    let answer = ask(cluster, &ManagerRequest::ListNodes)?;
    let ManagerAnswer::Nodes(nodes) = answer else { return Err(unexpected(&answer)) };
    if json {
        return print_json(&nodes);
    }
    print!("{}", table(&nodes).render());
    Ok(())
}

fn table(nodes: &[Node]) -> Table {
    let titles =
        ["node", "role", "address", "metrics", "state", "zone", "region", "memory", "used", "free"];
    let mut table = Table::new(&titles);
    for node in nodes {
        let sum = |field: fn(&milpa_types::Disk) -> u64| node.disks.iter().map(field).sum();
        table.row(vec![
            node.id.to_string(),
            node.role.to_string(),
            node.address.to_string(),
            node.http_address.to_string(),
            format!("{:?}", node.state).to_lowercase(),
            node.zone.clone(),
            if node.region.is_empty() { "(own)".to_owned() } else { node.region.clone() },
            show_bytes(node.memory_bytes),
            show_bytes(sum(|d| d.used_bytes)),
            show_bytes(sum(|d| d.free_bytes)),
        ]);
    }
    table
}
