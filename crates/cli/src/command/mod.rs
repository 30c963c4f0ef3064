//! The commands, one file for each family.

pub mod down;
pub mod fsck;
pub mod info;
pub mod init;
pub mod mount;
mod mount_log;
pub mod node;
pub mod partition;
pub mod serve;
pub mod status;
pub mod task;
pub mod up;
pub mod volume;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use milpa_host::managers::{Managers, ManagersError};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::failure::{Failure, Outcome};

/// How long a command waits for the managers.
const MANAGERS_WAIT: Duration = Duration::from_secs(10);

/// Runs a command's asynchronous part.
pub fn block_on<T>(work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| Failure::user("cannot start the runtime").because(&e))?.block_on(work)
}

/// Asks the managers of a cluster one question.
pub fn ask(cluster: &Cluster, request: &ManagerRequest) -> Outcome<ManagerAnswer> {
    block_on(async {
        let managers = cluster.managers()?;
        ask_managers(&managers, request, MANAGERS_WAIT).await
    })
}

/// Asks the managers one question and turns failures into what a person can act on.
pub async fn ask_managers(
    managers: &Managers,
    request: &ManagerRequest,
    wait: Duration,
) -> Outcome<ManagerAnswer> {
    managers.call(request, wait).await.map_err(|error| explain(&error))
}

fn explain(error: &ManagersError) -> Failure {
    let what = match error {
        ManagersError::Answered(answer) => return Failure::user(answer.to_string()),
        ManagersError::Refused { .. } => "the manager refused us",
        ManagersError::Unreachable { .. } => "the managers cannot be reached",
        _ => "the managers did not do it",
    };
    let failure = Failure::cluster(what).because(error);
    match error {
        ManagersError::Unreachable { .. } => failure.fix(
            "is the cluster running? Start it with `milpa up`, or name it with --cluster FILE",
        ),
        ManagersError::Refused { .. } => {
            failure.fix("check that --cluster names the right cluster and its key file")
        }
        _ => failure,
    }
}

/// An answer of another kind than the question's: a bug of ours or a newer manager.
pub fn unexpected(answer: &ManagerAnswer) -> Failure {
    let text: String = format!("{answer:?}").chars().take(80).collect();
    Failure::cluster(format!("the manager answered something else: {text}"))
}

/// Asks the managers for a change, and says that it was made.
pub fn change(cluster: &Cluster, request: &ManagerRequest, json: bool, text: &str) -> Outcome {
    let answer = ask(cluster, request)?;
    if json {
        return print_json(&answer);
    }
    println!("{text}");
    Ok(())
}

/// Asks on a terminal for `word`; without one, only `--yes` will do.
pub fn confirm(yes: bool, question: &str, word: &str, refusal: &str) -> Outcome {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::user(refusal).fix("add --yes if that is what you want"));
    }
    print!("{question} ");
    let _ = std::io::stdout().flush();
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line);
    if read.is_ok() && line.trim() == word { Ok(()) } else { Err(Failure::user(refusal)) }
}

/// Prints a value as indented JSON.
pub fn print_json<T: Serialize>(value: &T) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::user("cannot print JSON").because(&e))?;
    println!("{text}");
    Ok(())
}
