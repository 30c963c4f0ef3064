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
const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// What the leader tells, and what only shows from outside.
#[derive(Serialize)]
struct Seen {
    #[serde(flatten)]
    status: ClusterStatus,
    absent_managers: Vec<Absent>,
}

/// A manager that the others have to do without.
#[derive(Debug, Serialize)]
struct Absent {
    node: NodeId,
    why: &'static str,
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
    // The leader does not watch the others: as long as most of them run, it leads.
    let others = status.managers.iter().filter(|(node, _)| *node != status.leader);
    let asked = others.map(|(node, address)| {
        let (node, address, managers) = (*node, *address, managers.clone());
        tokio::spawn(
            async move { why_absent(&managers, address).await.map(|why| Absent { node, why }) },
        )
    });
    let mut absent_managers = Vec::new();
    for task in asked.collect::<Vec<_>>() {
        absent_managers.extend(task.await.ok().flatten());
    }
    Ok(Seen { status: *status, absent_managers })
}

async fn why_absent(managers: &Managers, address: SocketAddr) -> Option<&'static str> {
    let request = ManagerRequest::IsFounded;
    let called: Result<(ManagerReply, _), CallError> =
        managers.pool().call(address, Role::Manager, &request, Bytes::new(), ANSWER_WAIT).await;
    match called {
        Ok((Ok(ManagerAnswer::Founded(true)), _)) => None,
        Ok((Ok(ManagerAnswer::CatchesUp), _)) => Some("catches up"),
        Ok((Ok(_), _)) => Some("does not know the cluster yet"),
        Ok((Err(_), _)) => Some("is not ready"),
        Err(CallError::Refused { .. }) => Some("refuses us"),
        Err(_) => Some("does not answer"),
    }
}

fn managers_line(seen: &Seen) -> String {
    let list = seen.status.managers.iter().map(|(node, address)| {
        let absent = seen.absent_managers.iter().find(|absent| absent.node == *node);
        match absent {
            Some(absent) => format!("{address} ({})", absent.why),
            None if *node == seen.status.leader => format!("{address} (leads)"),
            None => address.to_string(),
        }
    });
    list.collect::<Vec<_>>().join(", ")
}

fn manager_warning(seen: &Seen) -> Option<String> {
    let (absent, all) = (seen.absent_managers.len(), seen.status.managers.len());
    let rest = match (all / 2).checked_sub(absent) {
        None => "too few of them, as seen from here".to_owned(),
        Some(0) => "if one more fails, nothing can be changed or repaired".to_owned(),
        Some(spare) => format!("{spare} more may fail"),
    };
    (absent > 0).then(|| format!("managers in service: {} of {all}; {rest}", all - absent))
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

    fn seen(managers: u32, absent: &[u32]) -> Seen {
        let address = |id: u32| SocketAddr::from(([10, 0, 0, id as u8], 7400));
        let status = ClusterStatus {
            managers: (1..=managers).map(|id| (NodeId(id), address(id))).collect(),
            leader: NodeId(2),
            cluster: milpa_types::ClusterId(1),
            nodes: Vec::new(),
            volumes: Vec::new(),
            warnings: Vec::new(),
        };
        let absent = absent.iter().map(|id| Absent { node: NodeId(*id), why: "catches up" });
        Seen { status, absent_managers: absent.collect() }
    }

    #[test]
    fn a_manager_that_does_not_take_part_is_named() {
        let all = seen(3, &[]);
        assert_eq!(managers_line(&all), "10.0.0.1:7400, 10.0.0.2:7400 (leads), 10.0.0.3:7400");
        assert_eq!(manager_warning(&all), None);
        assert!(managers_line(&seen(3, &[3])).ends_with("10.0.0.3:7400 (catches up)"));
        let warned = |managers, absent: &[u32]| manager_warning(&seen(managers, absent)).unwrap();
        let last =
            "managers in service: 2 of 3; if one more fails, nothing can be changed or repaired";
        assert_eq!(warned(3, &[3]), last);
        assert_eq!(warned(5, &[1]), "managers in service: 4 of 5; 1 more may fail");
        let too_few = "managers in service: 1 of 3; too few of them, as seen from here";
        assert_eq!(warned(3, &[1, 3]), too_few);
    }
}
