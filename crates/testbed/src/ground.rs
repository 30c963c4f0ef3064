//! The directory that a test bed stands on, and who clears it when nobody else can.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Outcome;

/// A temporary directory with everything of a test bed. Dropping it removes it. When our process ends
/// without that (Ctrl-C, a kill), a process that waits for it clears the ground: it kills what runs
/// there, unmounts, and removes our network namespaces and the directory.
#[derive(Debug)]
pub(crate) struct Ground {
    /// Its standard input closes when we end, however we do.
    clearer: Child,
    directory: tempfile::TempDir,
}

impl Ground {
    /// A new directory below `parent`.
    ///
    /// # Errors
    ///
    /// When it or the process cannot be made.
    pub fn new_in(parent: &Path) -> Outcome<Ground> {
        let made = tempfile::Builder::new().prefix("milpa-testbed-").tempdir_in(parent);
        let directory = made.map_err(|e| format!("no temporary directory: {e}"))?;
        let mut command = Command::new("sh");
        command.args(["-c", include_str!("clear-ground.sh"), "clear-ground"]);
        command.arg(directory.path()).arg(format!("{}-", own_namespaces()));
        // In a group of its own: Ctrl-C on a terminal hits everybody in ours. What it cannot clear it
        // says on our standard error.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let clearer = command.spawn().map_err(|e| format!("cannot run sh: {e}"))?;
        Ok(Ground { clearer, directory })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Keeps the files for a look after a failure, and says where.
    pub fn keep(&mut self) {
        self.directory.disable_cleanup(true);
        eprintln!("kept: {}", self.path().display());
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        if let Some(mut input) = self.clearer.stdin.take() {
            let _ = writeln!(input, "cleared");
        }
        let _ = self.clearer.wait();
    }
}

/// What the names of all network namespaces of this process begin with.
pub(crate) fn own_namespaces() -> String {
    format!("milpa-{}", std::process::id())
}
