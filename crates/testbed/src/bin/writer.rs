//! The loads of the crash tests, each a process of its own: `milpa-writer DIR` (`milpa_testbed::load`),
//! `milpa-writer DIR SEED` (`milpa_testbed::ledger`).

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments[..] {
        [directory] => milpa_testbed::load::write_files(Path::new(directory)),
        [directory, seed] => match seed.parse() {
            Ok(seed) => milpa_testbed::ledger::keep(Path::new(directory), seed),
            Err(_) => Err(format!("bad seed {seed:?}")),
        },
        _ => Err("usage: milpa-writer DIR [SEED]".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            println!("{problem}");
            ExitCode::FAILURE
        }
    }
}
