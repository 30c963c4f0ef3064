//! A manager whose log or state cannot be used any more: it sets them aside, and takes part again as one whose
//! directory is empty (docs/decisions/0010), when a majority of the others is there to go on with.
//!
//! Nothing is deleted: whoever loses more directories than the others can make up for may find in what was set
//! aside what is nowhere else.

use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk;
use milpa_host::node_directory::{DirectoryError, NodeDirectory};

use super::checkpoint::FILE as STATE_FILE;
use super::{LOG_DIRECTORY, RunError};

/// Kept of each, at most: a disk that goes on to damage what it gets is to be replaced, and is not to be filled.
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

/// Where it is then; `None` if there was nothing.
fn move_away(path: &Path) -> io::Result<Option<PathBuf>> {
    if !is_there(path)? {
        return Ok(None);
    }
    for number in 1..=KEPT {
        let aside = path.with_added_extension(format!("damaged.{number}"));
        if !is_there(&aside)? {
            disk::rename(path, &aside)?;
            disk::sync_directory(path.parent().unwrap_or(path))?;
            return Ok(Some(aside));
        }
    }
    Err(io::Error::other(format!(
        "{KEPT} were set aside before: look at the disk, and delete them"
    )))
}

fn is_there(path: &Path) -> io::Result<bool> {
    match disk::status(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
