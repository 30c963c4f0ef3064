//! A manager whose log or state cannot be used any more: it sets them aside, and takes part again as one whose
//! directory is empty (docs/decisions/0010), when a majority of the others is there to go on with.
//!
//! Nothing is deleted but what was set aside before: whoever loses more directories than the others can make up
//! for may find in it what is nowhere else.

use std::io;
use std::path::Path;

use milpa_host::disk;
use milpa_host::node_directory::{DirectoryError, NodeDirectory};

use super::checkpoint::FILE as STATE_FILE;
use super::{LOG_DIRECTORY, RunError};

const SUFFIX: &str = "damaged";

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

/// Notes first that it takes part again: with part of its log it must not go on as if that were all.
pub(super) fn set_aside(directory: &mut NodeDirectory) -> Result<(), RunError> {
    directory.set_rejoining(true)?;
    for name in [LOG_DIRECTORY, STATE_FILE] {
        let path = directory.path().join(name);
        move_away(&path).map_err(|source| {
            let action = "set aside";
            RunError::Directory(DirectoryError::Io { action, path: path.clone(), source })
        })?;
        tracing::warn!(path = %path.with_added_extension(SUFFIX).display(), "set aside");
    }
    Ok(())
}

fn move_away(path: &Path) -> io::Result<()> {
    let aside = path.with_added_extension(SUFFIX);
    if !is_there(path)? {
        return Ok(());
    }
    if is_there(&aside)? {
        // Of two that were damaged the later one replaces what was good enough once more.
        remove(&aside)?;
    }
    disk::rename(path, &aside)?;
    disk::sync_directory(path.parent().unwrap_or(path))
}

fn is_there(path: &Path) -> io::Result<bool> {
    match disk::status(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match disk::list(path) {
        Ok(_) => disk::remove_tree(path),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => disk::remove(path),
        Err(error) => Err(error),
    }
}
