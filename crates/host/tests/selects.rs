//! What no lint can say: that every `select!` in nodes and clients is biased.
//!
//! An unbiased one draws from a generator of tokio's own, so that two simulations of one seed would
//! differ. The order of the branches is then a matter of fairness, which each says in a comment where
//! it counts.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

const CRATES: [&str; 8] = ["types", "wire", "host", "raft", "meta", "data", "manager", "client"];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_select_is_biased() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    CRATES.iter().for_each(|name| sources(&crates.join(name).join("src"), &mut files));
    let mut selects = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        // An example in a comment is none.
        let code: Vec<&str> = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
        for body in code.join("\n").split("select! {").skip(1) {
            selects += 1;
            assert!(body.trim_start().starts_with("biased;"), "in {}", file.display());
        }
    }
    assert!(selects > 5, "only {selects} found: has the test lost sight of them?");
}
