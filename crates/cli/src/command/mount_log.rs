//! Where the process behind a mount logs, unless it was told: who gets an `EIO` has to find out why.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::cluster::process::open_log;
use crate::cluster::{Cluster, is_root};

/// Opens the log of a mount of `volume` at `directory`. `cluster` is the one that it goes through, if that is known
/// from a file: an embedded one has the logs of its mounts beside its own.
pub fn open(volume: &str, directory: &Path, cluster: Option<&Cluster>) -> io::Result<File> {
    let path = match cluster.filter(|cluster| !cluster.file.process.is_empty()) {
        Some(cluster) => cluster.directory().join("logs").join(name(volume)),
        // One for each mount point, so that those of several clusters do not mix.
        None => logs_directory().join(name(&directory.canonicalize()?.display().to_string())),
    };
    let failed = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    open_log(&path).map_err(failed)
}

/// With the machine's logs for root; for others where they keep state (XDG Base Directory Specification 0.8).
fn logs_directory() -> PathBuf {
    let of = |name| std::env::var_os(name).filter(|_| !is_root()).map(PathBuf::from);
    let state = of("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = state.or_else(|| of("HOME").map(|home| home.join(".local/state")));
    state.map_or_else(|| PathBuf::from("/var/log/milpa"), |state| state.join("milpa"))
}

/// A file's name for a volume, which nobody has checked yet, or for a path.
fn name(of: &str) -> String {
    format!("mount-{}.log", of.trim_start_matches('/').replace('/', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_one_name_whatever_is_mounted() {
        assert_eq!(name("/mnt/photos"), "mount-mnt-photos.log");
        assert_eq!(name("../photos"), "mount-..-photos.log");
    }
}
