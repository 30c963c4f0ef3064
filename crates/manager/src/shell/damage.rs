//! A manager whose log or state cannot be used any more: it sets them aside, and takes part again as one whose
//! directory is empty (docs/decisions/0010), when a majority of the others is there to go on with.
//!
//! What was set aside first is kept: whoever loses more directories than the others can make up for may find in it what
//! is nowhere else.

use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk;
use milpa_host::node_directory::{DirectoryError, NodeDirectory};

use super::checkpoint::FILE as STATE_FILE;
use super::{LOG_DIRECTORY, RunError};

/// Kept of each, at most; the last one is replaced. A disk that goes on to damage what it gets is not to be filled.
const KEPT: u32 = 8;

impl RunError {
    /// Whether bytes that this manager had written are gone or changed. A disk that refuses to read or write is
    /// another matter, and so is what a newer program wrote.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            RunError::Recover(_) | RunError::LogMissing | RunError::StateMissing => true,
            RunError::Checkpoint(error) => error.is_damage(),
            _ => false,
        }
    }
}

/// Sets aside all that the directory has of the group. A crash at any point leaves what is damaged again, or what
/// begins as an emptied directory: the log goes when it is noted that it takes part again, and the state before, as
/// one without a log that takes part again is thrown away.
pub(super) fn set_all_aside(directory: &mut NodeDirectory) -> Result<(), RunError> {
    set_aside(directory.path(), STATE_FILE)?;
    directory.set_rejoining(true)?;
    set_aside(directory.path(), LOG_DIRECTORY)
}

/// Sets the state aside: what the log has of it comes again.
pub(super) fn set_state_aside(directory: &Path) -> Result<(), RunError> {
    set_aside(directory, STATE_FILE)
}

fn set_aside(directory: &Path, name: &str) -> Result<(), RunError> {
    match move_away(&directory.join(name)) {
        Ok(Some(aside)) => {
            tracing::warn!(path = %aside.display(), "set aside");
            Ok(())
        }
        Ok(None) => Ok(()),
        Err(source) => {
            let (action, path) = ("set aside", directory.join(name));
            Err(RunError::Directory(DirectoryError::Io { action, path, source }))
        }
    }
}

/// Where it is then; `None` if there was nothing. The first ones stay, whatever comes.
fn move_away(path: &Path) -> io::Result<Option<PathBuf>> {
    if !is_there(path)? {
        return Ok(None);
    }
    let aside = |number| path.with_added_extension(format!("damaged.{number}"));
    let mut number = 1;
    while number < KEPT && is_there(&aside(number))? {
        number += 1;
    }
    let aside = aside(number);
    if is_there(&aside)? {
        remove(&aside)?;
    }
    disk::rename(path, &aside)?;
    disk::sync_directory(path.parent().unwrap_or(path))?;
    Ok(Some(aside))
}

/// A file or a directory.
fn remove(path: &Path) -> io::Result<()> {
    match disk::list(path) {
        Ok(_) => disk::remove_tree(path),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => disk::remove(path),
        Err(error) => Err(error),
    }
}

fn is_there(path: &Path) -> io::Result<bool> {
    match disk::status(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the simulation (seed 110176): a manager on a disk that damaged its log again and again ended for good.
    #[test]
    fn the_first_that_were_set_aside_stay() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path();
        for turn in 1..=20 {
            std::fs::create_dir(directory.join("raft")).unwrap();
            std::fs::write(directory.join("raft/log"), turn.to_string()).unwrap();
            std::fs::write(directory.join("state"), turn.to_string()).unwrap();
            for name in ["raft", "state"] {
                assert!(move_away(&directory.join(name)).unwrap().is_some());
                assert!(move_away(&directory.join(name)).unwrap().is_none());
            }
        }
        let content = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
        assert_eq!(content("raft.damaged.1/log") + &content("state.damaged.7"), "17");
        assert_eq!(content("raft.damaged.8/log") + &content("state.damaged.8"), "2020");
        assert_eq!(std::fs::read_dir(directory).unwrap().count(), 16);
    }
}
