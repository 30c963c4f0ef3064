//! `milpa status`: the cluster in one look.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::managers::Managers;
use milpa_host::rpc::CallError;
use milpa_types::{NodeId, NodeState, Role};
use milpa_wire::manager::{ClusterStatus, ManagerAnswer, ManagerReply, ManagerRequest};
use serde::Serialize;

use super::{MANAGERS_WAIT, ask_managers, block_on, print_json, unexpected};
use crate::cluster::Cluster;
use crate::failure::Outcome;
use crate::size::show_bytes;

/// How long a manager that runs may take to say so.
const ALIVE_WAIT: Duration = Duration::from_secs(1);

/// What the leader tells, and what only shows from outside.
#[derive(Serialize)]
struct Seen {
    #[serde(flatten)]
    status: ClusterStatus,
    /// Managers that do not answer.
    silent_managers: Vec<NodeId>,
}

/// Prints it.
pub fn run(cluster: &Cluster, json: bool) -> Outcome {
    let seen = block_on(look(cluster))?;
    if json {
        return print_json(&seen);
    }
    let status = &seen.status;
    println!("cluster  {}", status.cluster);
    println!("managers {}", managers_line(&seen));
    print_nodes(status);
    print!("\n{}", super::volume::table(&status.volumes).render());
    let warnings: Vec<String> =
        status.warnings.iter().cloned().chain(manager_warning(&seen)).collect();
    if !warnings.is_empty() {
        println!();
    }
    for warning in &warnings {
        println!("warning: {warning}");
    }
    Ok(())
}

async fn look(cluster: &Cluster) -> Outcome<Seen> {
    let managers = cluster.managers()?;
    let answer = ask_managers(&managers, &ManagerRequest::Status, MANAGERS_WAIT).await?;
    let ManagerAnswer::Status(status) = answer else { return Err(unexpected(&answer)) };
    let asked = status.managers.iter().map(|(node, address)| {
        let (node, address, managers) = (*node, *address, managers.clone());
        tokio::spawn(async move { (!is_alive(&managers, address).await).then_some(node) })
    });
    let mut silent_managers = Vec::new();
    for task in asked.collect::<Vec<_>>() {
        silent_managers.extend(task.await.ok().flatten());
    }
    Ok(Seen { status: *status, silent_managers })
}

/// The leader does not watch the other managers: as long as most of them run, it leads. So each is asked.
async fn is_alive(managers: &Managers, address: SocketAddr) -> bool {
    let request = ManagerRequest::IsFounded;
    let called: Result<(ManagerReply, _), CallError> =
        managers.pool().call(address, Role::Manager, &request, Bytes::new(), ALIVE_WAIT).await;
    matches!(called, Ok(_) | Err(CallError::Refused { .. }))
}

fn managers_line(seen: &Seen) -> String {
    let list = seen.status.managers.iter().map(|(node, address)| {
        let mark = if *node == seen.status.leader {
            " (leads)"
        } else if seen.silent_managers.contains(node) {
            " (does not answer)"
        } else {
            ""
        };
        format!("{address}{mark}")
    });
    list.collect::<Vec<_>>().join(", ")
}

fn manager_warning(seen: &Seen) -> Option<String> {
    let silent = seen.status.managers.iter().filter(|(id, _)| seen.silent_managers.contains(id));
    let silent: Vec<String> = silent.map(|(_, address)| address.to_string()).collect();
    let rest = match (seen.status.managers.len() / 2).saturating_sub(silent.len()) {
        0 => "if one more fails, nothing is changed or repaired".to_owned(),
        spare => format!("{spare} more may fail"),
    };
    let list = silent.join(", ");
    (!silent.is_empty()).then(|| format!("no answer from manager {list}: {rest}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(managers: u32, silent_managers: &[u32]) -> Seen {
        let address = |id: u32| SocketAddr::from(([10, 0, 0, id as u8], 7400));
        let status = ClusterStatus {
            managers: (1..=managers).map(|id| (NodeId(id), address(id))).collect(),
            leader: NodeId(2),
            cluster: milpa_types::ClusterId(1),
            nodes: Vec::new(),
            volumes: Vec::new(),
            warnings: Vec::new(),
        };
        Seen { status, silent_managers: silent_managers.iter().copied().map(NodeId).collect() }
    }

    #[test]
    fn a_manager_that_does_not_answer_is_named() {
        let all = seen(3, &[]);
        assert_eq!(managers_line(&all), "10.0.0.1:7400, 10.0.0.2:7400 (leads), 10.0.0.3:7400");
        assert_eq!(manager_warning(&all), None);
        let two = seen(3, &[3]);
        assert!(managers_line(&two).ends_with("10.0.0.3:7400 (does not answer)"));
        let rest = "if one more fails, nothing is changed or repaired";
        let of_three = format!("no answer from manager 10.0.0.3:7400: {rest}");
        assert_eq!(manager_warning(&two), Some(of_three));
        let of_five = "no answer from manager 10.0.0.1:7400: 1 more may fail".to_owned();
        assert_eq!(manager_warning(&seen(5, &[1])), Some(of_five));
    }
}
