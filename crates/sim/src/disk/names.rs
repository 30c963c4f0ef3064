//! The names on a disk, and changes of them that are not synced yet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a name names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    File(u64),
    Directory,
}

pub type Names = BTreeMap<PathBuf, Entry>;

/// An unsynced change of a directory.
#[derive(Clone, Debug)]
pub enum NameChange {
    Set(PathBuf, Entry),
    Removed(PathBuf),
    Renamed(PathBuf, PathBuf),
}

impl NameChange {
    pub fn is_in(&self, directory: &Path) -> bool {
        let below = |path: &Path| path.parent() == Some(directory);
        match self {
            NameChange::Set(path, _) | NameChange::Removed(path) => below(path),
            NameChange::Renamed(source, target) => below(source) || below(target),
        }
    }

    pub fn apply(&self, names: &mut Names) {
        match self {
            NameChange::Set(path, entry) => drop(names.insert(path.clone(), *entry)),
            NameChange::Removed(path) => drop(names.remove(path)),
            NameChange::Renamed(source, target) => rename(names, source, target),
        }
    }
}

fn rename(names: &mut Names, source: &Path, target: &Path) {
    let below: Vec<PathBuf> =
        names.keys().filter(|path| path.starts_with(source)).cloned().collect();
    for path in below {
        let Some(entry) = names.remove(&path) else { continue };
        let Ok(rest) = path.strip_prefix(source) else { continue };
        let moved = if rest.as_os_str().is_empty() { target.to_owned() } else { target.join(rest) };
        names.insert(moved, entry);
    }
}

/// Takes away what no directory leads to any more.
pub fn prune(names: &mut Names) {
    // A directory comes before what is below it.
    let mut kept = Names::new();
    for (path, entry) in std::mem::take(names) {
        let parent = path.parent();
        if parent.is_none_or(|parent| kept.get(parent) == Some(&Entry::Directory)) {
            kept.insert(path, entry);
        }
    }
    *names = kept;
}
