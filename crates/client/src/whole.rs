//! Directories of which all names are known here: those that we made and nobody else fills.
//!
//! Before the kernel creates a name it looks for it. In a directory that this client made, and to
//! which it has added all names since, the answer is known: there is none. The servers confirm that
//! with every change of ours, as its answer tells the directory's version, which rises by one with
//! each change by anybody. So the knowledge is never older than our last change, and is believed only
//! for as long as a name from a cache would be.
//!
//! Names are kept as hashes, and a name once there is never taken out: then, and when two names have
//! one hash, a server is asked.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::Duration;

use milpa_types::{InodeId, Name};
use tokio::time::Instant;

use crate::core::lock;

/// Names of all directories together; beyond it everything is forgotten, and directories that are
/// made from then on are known again.
const NAMES_MAX: usize = 1 << 18;
/// Directories.
const DIRECTORIES_MAX: usize = 1 << 14;
/// Changes that may be answered before an earlier one is.
const AHEAD_MAX: usize = 1024;

/// See the module.
#[derive(Debug)]
pub(crate) struct WholeDirectories {
    state: Mutex<State>,
    hasher: RandomState,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct State {
    directories: HashMap<InodeId, Whole>,
    names: usize,
}

#[derive(Debug)]
struct Whole {
    /// All changes up to this version are ours.
    version: u64,
    /// It was the directory's version at this time or later.
    as_of: Instant,
    /// Versions beyond the next one that are ours too.
    ahead: BTreeSet<u64>,
    names: HashSet<u64>,
}

impl WholeDirectories {
    pub(crate) fn new(timeout: Duration) -> WholeDirectories {
        WholeDirectories { state: Mutex::default(), hasher: RandomState::new(), timeout }
    }

    /// We made this directory, and asked for it at `asked`.
    pub(crate) fn made(&self, directory: InodeId, asked: Instant) {
        let mut state = lock(&self.state);
        if state.directories.len() >= DIRECTORIES_MAX {
            *state = State::default();
        }
        let (ahead, names) = (BTreeSet::new(), HashSet::new());
        state.directories.insert(directory, Whole { version: 0, as_of: asked, ahead, names });
    }

    /// We are about to add a name. It need not come to that.
    pub(crate) fn expect(&self, directory: InodeId, name: &Name) {
        let mut state = lock(&self.state);
        let Some(whole) = state.directories.get_mut(&directory) else { return };
        let is_new = whole.names.insert(self.hasher.hash_one(name));
        state.names += usize::from(is_new);
        if state.names > NAMES_MAX {
            *state = State::default();
        }
    }

    /// A change of ours, asked for at `asked`, made this version.
    pub(crate) fn changed(&self, directory: InodeId, version: u64, asked: Instant) {
        let mut state = lock(&self.state);
        let Some(whole) = state.directories.get_mut(&directory) else { return };
        if version > whole.version {
            whole.ahead.insert(version);
        }
        while whole.ahead.remove(&(whole.version + 1)) {
            whole.version += 1;
        }
        if whole.version >= version {
            whole.as_of = whole.as_of.max(asked);
        } else if whole.ahead.len() > AHEAD_MAX {
            // Somebody else changed it.
            let names = whole.names.len();
            state.directories.remove(&directory);
            state.names = state.names.saturating_sub(names);
        }
    }

    /// Whether it is known that there is no such name.
    pub(crate) fn lacks(&self, directory: InodeId, name: &Name) -> bool {
        let state = lock(&self.state);
        state.directories.get(&directory).is_some_and(|whole| {
            whole.as_of.elapsed() < self.timeout
                && !whole.names.contains(&self.hasher.hash_one(name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: InodeId = InodeId(7);

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn names_are_known_to_be_absent_as_long_as_only_we_change_the_directory() {
        let whole = WholeDirectories::new(Duration::from_secs(1));
        let step = || tokio::time::advance(Duration::from_millis(600));
        assert!(!whole.lacks(DIRECTORY, &name("a")), "not ours");
        whole.made(DIRECTORY, Instant::now());
        assert!(whole.lacks(DIRECTORY, &name("a")));
        whole.expect(DIRECTORY, &name("a"));
        assert!(!whole.lacks(DIRECTORY, &name("a")), "from when it may be there");
        step().await;
        // Two at once, answered in the other order.
        whole.changed(DIRECTORY, 2, Instant::now());
        whole.changed(DIRECTORY, 1, Instant::now());
        step().await;
        assert!(whole.lacks(DIRECTORY, &name("b")), "confirmed by the changes");
        step().await;
        assert!(!whole.lacks(DIRECTORY, &name("b")), "too old");
        whole.changed(DIRECTORY, 4, Instant::now());
        assert!(!whole.lacks(DIRECTORY, &name("b")), "version 3 was somebody else's");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded() {
        let whole = WholeDirectories::new(Duration::from_secs(1));
        whole.made(DIRECTORY, Instant::now());
        for i in 0..=NAMES_MAX {
            whole.expect(DIRECTORY, &name(&i.to_string()));
        }
        assert_eq!(lock(&whole.state).names, 0);
        whole.made(DIRECTORY, Instant::now());
        for version in (2..).step_by(2).take(AHEAD_MAX + 2) {
            whole.changed(DIRECTORY, version, Instant::now());
        }
        assert!(lock(&whole.state).directories.is_empty());
    }
}
