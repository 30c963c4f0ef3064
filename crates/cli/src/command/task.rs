//! `milpa task …`.

use milpa_wire::manager::{ManagerAnswer, ManagerRequest, Task, TaskKind};

use super::{ask, print_json, unexpected};
use crate::arguments::TaskCommand;
use crate::cluster::Cluster;
use crate::failure::Outcome;
use crate::size::show_bytes;
use crate::table::Table;

/// Carries out one of the commands.
pub fn run(cluster: &Cluster, command: &TaskCommand, json: bool) -> Outcome {
    let TaskCommand::List = command;
    let answer = ask(cluster, &ManagerRequest::ListTasks)?;
    let ManagerAnswer::Tasks(tasks) = answer else { return Err(unexpected(&answer)) };
    if json {
        return print_json(&tasks);
    }
    if tasks.is_empty() {
        println!("nothing is being repaired or moved");
        return Ok(());
    }
    print!("{}", table(&tasks, now_unix_ms()).render());
    Ok(())
}

fn table(tasks: &[Task], now_unix_ms: u64) -> Table {
    let titles = ["task", "work", "owner", "progress", "since", "left", "deadline", "reason"];
    let mut table = Table::new(&titles);
    for task in tasks {
        let of = task.partition.map(|partition| partition.to_string()).unwrap_or_default();
        let (work, shown): (String, fn(u64) -> String) = match task.kind {
            TaskKind::DataReplica => (format!("replica of data partition {of}"), show_bytes),
            TaskKind::MetaReplica => {
                (format!("replica of meta partition {of}"), |n| format!("{n} entries"))
            }
            TaskKind::Drain => ("drain".to_owned(), |n| format!("{n} replicas")),
        };
        let percent = task.done.saturating_mul(100) / task.total.max(1);
        let (progress, left, deadline) = if is_emptied(task) {
            ("empty".to_owned(), "-".to_owned(), "-".to_owned())
        } else {
            (
                format!("{percent} % ({} of {})", shown(task.done), shown(task.total)),
                task.left_ms.map_or("?".to_owned(), duration),
                deadline(task.deadline_unix_ms, now_unix_ms),
            )
        };
        table.row(vec![
            if task.id == 0 { "-".to_owned() } else { task.id.to_string() },
            work,
            format!("node {}", task.owner),
            progress,
            duration(now_unix_ms.saturating_sub(task.begun_unix_ms)),
            left,
            deadline,
            task.reason.clone(),
        ]);
    }
    table
}

/// A drain stays until its node is removed, or taken back into service: also that of a node that held nothing.
fn is_emptied(task: &Task) -> bool {
    task.kind == TaskKind::Drain && task.done == task.total
}

fn now_unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// A replica that is not made by then is made elsewhere; of a drain that is not done then there is a warning.
fn deadline(unix_ms: u64, now_unix_ms: u64) -> String {
    match unix_ms.checked_sub(now_unix_ms) {
        Some(left) => format!("in {}", duration(left)),
        None => format!("{} ago", duration(now_unix_ms - unix_ms)),
    }
}

/// The two largest units.
fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::{NodeId, PartitionId};

    use super::*;

    #[test]
    fn a_task_says_what_where_how_far_and_why() {
        let task = Task {
            id: 3,
            kind: TaskKind::DataReplica,
            partition: Some(PartitionId(7)),
            owner: NodeId(105),
            reason: "node 104 is dead".to_owned(),
            begun_unix_ms: 1_000,
            deadline_unix_ms: 3_601_000 + 61_000,
            done: 1 << 20,
            total: 4 << 20,
            left_ms: Some(90_000),
        };
        let shown = table(&[task], 61_000).render();
        for part in ["data partition 7", "105", "25 %", "1 min 0 s", "1 min 30 s", "in 1 h 0 min"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        for part in ["owner", "node 105", "node 104 is dead"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(deadline(1_000, 61_000), "1 min 0 s ago");
    }

    #[test]
    fn a_drain_says_when_its_node_is_empty_though_it_held_nothing_before() {
        let drain = |done, total| Task {
            id: 0,
            kind: TaskKind::Drain,
            partition: None,
            owner: NodeId(105),
            reason: "node 105 is drained".to_owned(),
            begun_unix_ms: 1_000,
            deadline_unix_ms: 3_601_000,
            done,
            total,
            left_ms: None,
        };
        let shown = |task| table(&[task], 61_000).render();
        assert!(shown(drain(2, 3)).contains("66 % (2 replicas of 3 replicas)"));
        for is_empty in [shown(drain(3, 3)), shown(drain(0, 0))] {
            assert!(is_empty.contains("  empty  ") && !is_empty.contains('%'), "{is_empty}");
        }
    }
}
