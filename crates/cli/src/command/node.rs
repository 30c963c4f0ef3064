//! `milpa node …` and `milpa disk …`.

use milpa_types::{DiskId, Node, NodeId};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};

use super::{ask, change, confirm, print_json, unexpected};
use crate::arguments::{DiskCommand, NodeCommand};
use crate::cluster::Cluster;
use crate::failure::Outcome;
use crate::size::show_bytes;
use crate::table::Table;

/// Carries out one of the commands.
pub fn run(cluster: &Cluster, command: &NodeCommand, json: bool) -> Outcome {
    match command {
        NodeCommand::List => list(cluster, json),
        NodeCommand::Drain { node, undo } => {
            let request = ManagerRequest::DrainNode { node: NodeId(*node), drains: !undo };
            change(cluster, &request, json, drain_text(*undo))
        }
        NodeCommand::Remove { node, yes } => {
            let question = format!(
                "Forget node {node} for ever? What it holds is made again from other copies, and \
                 it cannot come back under this id. Type {node}:"
            );
            let refusal = format!("node {node} was not removed");
            confirm(*yes, &question, &node.to_string(), &refusal)?;
            change(cluster, &ManagerRequest::RemoveNode { node: NodeId(*node) }, json, "removed")
        }
    }
}

/// Carries out one of the commands about disks.
pub fn run_disk(cluster: &Cluster, command: &DiskCommand, json: bool) -> Outcome {
    let DiskCommand::Drain { node, disk, undo } = command;
    let (node, disk) = (NodeId(*node), DiskId(*disk));
    let request = ManagerRequest::DrainDisk { node, disk, drains: !undo };
    change(cluster, &request, json, drain_text(*undo))
}

fn drain_text(undo: bool) -> &'static str {
    match undo {
        true => {
            "back in service; what has left it stays where it is now, and new data may come to it"
        }
        false => "it is being emptied; watch it with: milpa task list",
    }
}

fn list(cluster: &Cluster, json: bool) -> Outcome {
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
            node.state.as_str().to_owned(),
            node.zone.clone(),
            if node.region.is_empty() { "(own)".to_owned() } else { node.region.clone() },
            show_bytes(node.memory_bytes),
            show_bytes(sum(|d| d.used_bytes)),
            show_bytes(sum(|d| d.free_bytes)),
        ]);
    }
    table
}
