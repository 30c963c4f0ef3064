//! Operations on names.

use milpa_client::{Creation, FsError};
use milpa_model::dentry::Call;
use milpa_types::{InodeId, MetaError, Name};
use tokio::time::Instant;

use super::worker::Worker;
use crate::history::{Key, Outcome, outcome_of};

/// Names of files in one directory.
const FILE_NAMES: u64 = 10;
/// Names of directories in one directory.
const DIRECTORY_NAMES: u64 = 4;
/// Names of symbolic links in one directory.
const SYMLINK_NAMES: u64 = 4;
/// Directories in use at most.
const DIRECTORIES_MAX: usize = 12;
/// Entries of one page.
const PAGE: u32 = 7;

pub(super) const CREATION: Creation = Creation { mode: 0o755, uid: 0, gid: 0 };

/// The call as the model knows it, for a change that makes a name.
fn made(result: &Result<InodeId, FsError>) -> Option<Call> {
    match result {
        Ok(inode) => Some(Call::Made(Some(*inode))),
        Err(FsError::Meta(MetaError::Exists)) => Some(Call::WasTaken),
        Err(_) => None,
    }
}

/// The call as the model knows it, for a change that removes a name.
fn removed(result: &Result<(), FsError>) -> Option<Call> {
    match result {
        Ok(()) => Some(Call::Removed),
        Err(FsError::Meta(MetaError::NotFound)) => Some(Call::WasMissing),
        Err(FsError::Meta(
            MetaError::IsDirectory | MetaError::NotDirectory | MetaError::NotEmpty,
        )) => Some(Call::WasTaken),
        Err(_) => None,
    }
}

impl Worker {
    pub(super) fn file_key(&mut self) -> Option<Key> {
        Some((self.directory(), self.name('f', FILE_NAMES)?))
    }

    fn symlink_key(&mut self) -> Option<Key> {
        Some((self.directory(), self.name('s', SYMLINK_NAMES)?))
    }

    fn directory_key(&mut self) -> Option<Key> {
        Some((self.directory(), self.name('d', DIRECTORY_NAMES)?))
    }

    /// Ends a change in the history, unless nobody knows its outcome.
    pub(super) fn end<T>(
        &self,
        key: &Key,
        place: usize,
        result: &Result<T, FsError>,
        call: Option<Call>,
    ) {
        if result.as_ref().err().map(outcome_of) != Some(Outcome::Unknown) {
            self.plan.history.borrow_mut().end_name(key, place, call);
        }
    }

    fn begin(&self, key: &Key, unknown: Call) -> usize {
        self.plan.history.borrow_mut().begin_name(key, unknown)
    }

    pub(super) async fn mkdir(&mut self) {
        let Some(key) = self.directory_key() else { return };
        if self.plan.directories.borrow().len() >= DIRECTORIES_MAX {
            return;
        }
        let (began, place) = (Instant::now(), self.begin(&key, Call::Made(None)));
        let result = self.client.mkdir(key.0, &key.1, CREATION).await.map(|made| made.inode);
        self.ended("mkdir", &what(&key), began, &result);
        self.end(&key, place, &result, made(&result));
        if let Ok(inode) = result {
            self.plan.directories.borrow_mut().push(inode);
        }
    }

    pub(super) async fn rmdir(&mut self) {
        let Some(key) = self.directory_key() else { return };
        let (began, place) = (Instant::now(), self.begin(&key, Call::Removed));
        let result = self.client.rmdir(key.0, &key.1).await;
        self.ended("rmdir", &what(&key), began, &result);
        self.end(&key, place, &result, removed(&result));
    }

    /// A symbolic link is made, and read.
    pub(super) async fn symlink(&mut self) {
        let Some(key) = self.symlink_key() else { return };
        let (began, place) = (Instant::now(), self.begin(&key, Call::Made(None)));
        let wanted = target_of(&key.1);
        let making = self.client.symlink(key.0, &key.1, wanted.as_bytes(), CREATION);
        let result = making.await.map(|made| made.inode);
        self.ended("symlink", &what(&key), began, &result);
        self.end(&key, place, &result, made(&result));
        let Ok(inode) = result else { return };
        let began = Instant::now();
        let read = self.client.readlink(inode).await;
        self.ended("readlink", &inode.to_string(), began, &read);
        if let Ok(target) = read
            && target != wanted.as_bytes()
        {
            let detail = format!("{} leads to {target:?}", what(&key));
            self.plan.history.borrow_mut().violated("targets of links", detail);
        }
    }

    pub(super) async fn unlink(&mut self) {
        let of_link = self.random.chance(1, 4);
        let key = if of_link { self.symlink_key() } else { self.file_key() };
        let Some(key) = key else { return };
        let (began, place) = (Instant::now(), self.begin(&key, Call::Removed));
        let result = self.client.unlink(key.0, &key.1).await;
        self.ended("unlink", &what(&key), began, &result);
        self.end(&key, place, &result, removed(&result));
    }

    pub(super) async fn link(&mut self) {
        let Some(key) = self.file_key() else { return };
        let Some(inode) = self.random.pick(&self.files).map(|file| file.inode) else { return };
        self.plan.history.borrow_mut().linked.insert(inode);
        let (began, place) = (Instant::now(), self.begin(&key, Call::Made(Some(inode))));
        let result = self.client.link(inode, key.0, &key.1).await.map(|linked| linked.inode);
        self.ended("link", &format!("{inode} as {}", what(&key)), began, &result);
        self.end(&key, place, &result, made(&result));
    }

    pub(super) async fn rename(&mut self) {
        let (source, target) = (self.file_key(), self.file_key());
        self.rename_to("rename", source, target).await;
    }

    /// Within its parent or up to the root. (Elsewhere two that cross can build a loop, until there is the volume-wide
    /// lock of DESIGN.md section 4.)
    pub(super) async fn rename_directory(&mut self) {
        let Some(source) = self.directory_key() else { return };
        let parent = if self.random.chance(1, 2) { source.0 } else { InodeId::ROOT };
        let target = self.name('d', DIRECTORY_NAMES).map(|name| (parent, name));
        self.rename_to("rename directory", Some(source), target).await;
    }

    async fn rename_to(
        &mut self,
        operation: &'static str,
        source: Option<Key>,
        target: Option<Key>,
    ) {
        let (Some(source), Some(target)) = (source, target) else { return };
        if source == target {
            return;
        }
        let no_replace = self.random.chance(1, 4);
        let moved_here = if no_replace { Call::MovedHereNew } else { Call::MovedHere };
        let began = Instant::now();
        let taken = self.begin(&source, Call::MovedAway);
        let given = self.begin(&target, moved_here);
        let renaming = self.client.rename(source.0, &source.1, target.0, &target.1, no_replace);
        let result = renaming.await;
        self.ended(operation, &format!("{} to {}", what(&source), what(&target)), began, &result);
        let (away, here) = match &result {
            Ok(()) => (Some(Call::MovedAway), Some(moved_here)),
            Err(FsError::Meta(MetaError::Exists | MetaError::NotEmpty)) => {
                (None, Some(Call::WasTaken))
            }
            Err(_) => (None, None),
        };
        self.end(&source, taken, &result, away);
        self.end(&target, given, &result, here);
    }

    pub(super) async fn lookup(&mut self) {
        let Some(key) = self.file_key() else { return };
        self.look_up(&key).await;
    }

    /// What a name names, if the answer came.
    pub(super) async fn look_up(&mut self, key: &Key) -> Option<InodeId> {
        let (began, begin) = (Instant::now(), self.plan.history.borrow_mut().moment());
        let result = self.client.lookup(key.0, &key.1).await;
        self.ended("lookup", &what(key), began, &result);
        let seen = match &result {
            Ok(attributes) => Some(attributes.inode),
            Err(FsError::Meta(MetaError::NotFound)) => None,
            Err(_) => return None,
        };
        if self.plan.judges_lookups {
            self.plan.history.borrow_mut().saw(key, begin, Call::Saw(seen));
        }
        seen
    }

    pub(super) async fn getattr(&mut self) {
        let Some(inode) = self.random.pick(&self.files).map(|file| file.inode) else { return };
        let began = Instant::now();
        let result = self.client.getattr(inode).await;
        self.ended("getattr", &inode.to_string(), began, &result);
    }

    pub(super) async fn readdir(&mut self) {
        let directory = self.directory();
        let (began, begin) = (Instant::now(), self.plan.history.borrow_mut().moment());
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let result = self.client.readdir(directory, after, PAGE, false).await;
            if result.is_err() {
                return self.ended("readdir", &directory.to_string(), began, &result);
            }
            let Ok(page) = result else { return };
            after = page.entries.last().map(|entry| entry.name.clone());
            listed.extend(page.entries);
            if page.end || after.is_none() {
                break;
            }
        }
        self.ended("readdir", &format!("{directory}: {}", listed.len()), began, &Ok(()));
        let mut history = self.plan.history.borrow_mut();
        let known: Vec<Name> = history
            .names
            .keys()
            .filter(|(parent, _)| *parent == directory)
            .map(|(_, name)| name.clone())
            .collect();
        for name in known {
            let seen = listed.iter().find(|entry| entry.name == name).map(|entry| entry.inode);
            history.saw(&(directory, name), begin, Call::Saw(seen));
        }
    }
}

/// What a symbolic link of this name leads to. Links are not renamed.
pub(super) fn target_of(name: &Name) -> String {
    format!("../where {name} leads to")
}

pub(super) fn what((parent, name): &Key) -> String {
    format!("{parent}/{name}")
}
