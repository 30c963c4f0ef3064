//! A server's data directory: whose it is, and that only one process uses it.

use std::io;
use std::path::{Path, PathBuf};

use milpa_types::{ClusterId, Life, NodeId, Role};
use milpa_wire::frame::crc32c;
use serde::{Deserialize, Serialize};

use crate::disk::{self, Lock};
use crate::entropy;

/// Written one after the other: a write that a disk loses, tears or puts elsewhere harms one of them, and the other one
/// says the same or what was true just before.
const IDENTITY_FILES: [&str; 2] = ["IDENTITY", "IDENTITY.2"];
const IDENTITY_FORMAT: u32 = 2;
const LOCK_FILE: &str = "LOCK";
const REJOINING_FILE: &str = "REJOINING";
/// Two for the same reason.
const LIFE_FILES: [&str; 2] = ["LIFE", "LIFE.2"];

/// An open data directory. The lock lasts until it is dropped or the process dies.
#[derive(Debug)]
pub struct NodeDirectory {
    path: PathBuf,
    identity: StoredIdentity,
    is_rejoining: bool,
    /// All zeros before the first life.
    life: Life,
    _lock: Lock,
}

/// What the identity file says: written once, plus the node id when the manager has given it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredIdentity {
    format: u32,
    cluster: String,
    role: String,
    incarnation: String,
    node: Option<u32>,
}

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The file system said no.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Another process has it open.
    #[error("{} is in use by another process; stop that one first", path.display())]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// It belongs to another cluster.
    #[error("{} belongs to cluster {found}, not to {wanted}; use another directory", path.display())]
    OtherCluster {
        /// Which.
        path: PathBuf,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        wanted: ClusterId,
    },
    /// It belongs to another kind of node.
    #[error("{} belongs to a {found} node, not to a {wanted} node; use another directory", path.display())]
    OtherRole {
        /// Which.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What it should hold.
        wanted: Role,
    },
    /// The identity file cannot be understood.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl NodeDirectory {
    /// Opens the directory, making it if it does not exist. One that holds anything else than a
    /// node of this cluster and role is refused and left as it is.
    ///
    /// # Errors
    ///
    /// [`DirectoryError`].
    pub fn open(
        path: &Path,
        role: Role,
        cluster: ClusterId,
    ) -> Result<NodeDirectory, DirectoryError> {
        disk::create_directory(path).map_err(io_error("create directory", path))?;
        let lock = lock(path)?;
        let (identity, is_whole) = match read_identity(path)? {
            Some(found) => found,
            None => {
                let identity = StoredIdentity {
                    format: IDENTITY_FORMAT,
                    cluster: cluster.to_string(),
                    role: role.to_string(),
                    incarnation: fresh_incarnation(path)?,
                    node: None,
                };
                write(path, &identity)?;
                (identity, true)
            }
        };
        if identity.cluster != cluster.to_string() {
            let (path, found) = (path.to_owned(), identity.cluster);
            return Err(DirectoryError::OtherCluster { path, found, wanted: cluster });
        }
        if identity.role != role.as_str() {
            let (path, found) = (path.to_owned(), identity.role);
            return Err(DirectoryError::OtherRole { path, found, wanted: role });
        }
        if !is_whole && let Err(error) = write(path, &identity) {
            tracing::warn!(%error, "whose the directory is says only one of two files");
        }
        let is_rejoining = match disk::status(&path.join(REJOINING_FILE)) {
            Ok(_) => true,
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(source) => return Err(io_error("look for", &path.join(REJOINING_FILE))(source)),
        };
        let life = read_life(path)?;
        Ok(NodeDirectory { path: path.to_owned(), identity, is_rejoining, life, _lock: lock })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id that the manager gave this node, if it has one.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.identity.node.map(NodeId)
    }

    /// Drawn at random when the directory was made: a copy of it is told from the original by the
    /// manager, who sees both alive.
    #[must_use]
    pub fn incarnation(&self) -> u128 {
        u128::from_str_radix(&self.identity.incarnation, 16).unwrap_or_default()
    }

    /// Keeps the id that the manager gave.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Io`].
    pub fn set_node(&mut self, node: NodeId) -> Result<(), DirectoryError> {
        if self.node() == Some(node) {
            return Ok(());
        }
        self.identity.node = Some(node.0);
        write(&self.path, &self.identity)
    }

    /// Begins the next life of the node: what the managers are to be told. What they may hear of is durable
    /// first, and stays the same until they have answered: so they know this directory from an older copy,
    /// and an answer that was lost is no harm. With a full disk the last life goes on.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Io`] if no randomness is to be had.
    pub fn begin_life(&mut self) -> Result<Life, DirectoryError> {
        if self.life.next == self.life.last {
            let drawn = entropy::u128();
            let next = drawn.map_err(io_error("draw randomness for", &self.path))?;
            self.keep(Life { next, ..self.life });
        }
        Ok(self.life)
    }

    /// The managers have heard of the life that began last: it is the newest.
    pub fn life_has_begun(&mut self) {
        let last = self.life.next;
        self.keep(Life { last, next: last });
    }

    /// What cannot be written is as if it had not been tried: what is there from before is as good.
    fn keep(&mut self, life: Life) {
        let text = life_text(life);
        let write = |name: &&str| {
            let file = self.path.join(name);
            disk::replace(&file, text.as_bytes()).map_err(io_error("write", &file))
        };
        match LIFE_FILES.iter().try_for_each(write) {
            Ok(()) => self.life = life,
            Err(error) => {
                tracing::warn!(%error, "which life of the node this is could not be written down");
            }
        }
    }

    /// Whether it took the place of a directory that was lost, and does not make up for it yet.
    #[must_use]
    pub fn is_rejoining(&self) -> bool {
        self.is_rejoining
    }

    /// Notes that it does, or does no more. Durable when it returns.
    ///
    /// # Errors
    ///
    /// [`DirectoryError::Io`].
    pub fn set_rejoining(&mut self, is_rejoining: bool) -> Result<(), DirectoryError> {
        if self.is_rejoining == is_rejoining {
            return Ok(());
        }
        let file = self.path.join(REJOINING_FILE);
        if is_rejoining {
            let text = b"This directory was empty or damaged when the cluster was founded already. The note goes when it has caught up.\n";
            disk::replace(&file, text).map_err(io_error("write", &file))?;
        } else {
            let removed = disk::remove(&file).and_then(|()| disk::sync_directory(&self.path));
            removed.map_err(io_error("remove", &file))?;
        }
        self.is_rejoining = is_rejoining;
        Ok(())
    }
}

fn io_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> DirectoryError {
    move |source| DirectoryError::Io { action, path: path.to_owned(), source }
}

fn lock(path: &Path) -> Result<Lock, DirectoryError> {
    let file = path.join(LOCK_FILE);
    disk::lock(&file).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => DirectoryError::InUse { path: path.to_owned() },
        _ => io_error("lock", &file)(error),
    })
}

fn fresh_incarnation(file: &Path) -> Result<String, DirectoryError> {
    let drawn = entropy::u128().map_err(io_error("draw randomness for", file))?;
    Ok(format!("{drawn:032x}"))
}

/// From the first file that says it: it is the newer one, if they differ. And whether both say it.
fn read_identity(path: &Path) -> Result<Option<(StoredIdentity, bool)>, DirectoryError> {
    let (mut found, mut good, mut wrong) = (None, 0, None);
    for file in IDENTITY_FILES.map(|name| path.join(name)) {
        let identity = match disk::read(&file) {
            Ok(text) => parse(&text, &file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => Err(io_error("read", &file)(source)),
        };
        match identity {
            Ok(identity) => {
                good += usize::from(found.as_ref().is_none_or(|first| *first == identity));
                found.get_or_insert(identity);
            }
            Err(error) => {
                tracing::warn!(%error, "one of the two files that say whose the directory is");
                wrong.get_or_insert(error);
            }
        }
    }
    match (found, wrong) {
        (Some(mut identity), _) => {
            let is_whole = good == IDENTITY_FILES.len() && identity.format == IDENTITY_FORMAT;
            identity.format = IDENTITY_FORMAT;
            Ok(Some((identity, is_whole)))
        }
        (None, Some(wrong)) => Err(wrong),
        (None, None) => Ok(None),
    }
}

/// The first format had no checksum.
fn parse(text: &[u8], file: &Path) -> Result<StoredIdentity, DirectoryError> {
    let damaged = |problem: String| DirectoryError::Damaged { path: file.to_owned(), problem };
    let text = String::from_utf8_lossy(text);
    let (said, crc) = text.rsplit_once(CRC_FIELD).unwrap_or((&text, ""));
    let identity: StoredIdentity = toml::from_str(said).map_err(|e| damaged(e.to_string()))?;
    if identity.format > IDENTITY_FORMAT {
        return Err(damaged(format!("format {} is newer than this program", identity.format)));
    }
    let has_none = identity.format == 1 && crc.is_empty();
    if !has_none && crc != crc_value(said) {
        return Err(damaged("its checksum does not match".to_owned()));
    }
    if u128::from_str_radix(&identity.incarnation, 16).is_err() {
        return Err(damaged("incarnation is not a hexadecimal number".to_owned()));
    }
    Ok(identity)
}

/// The last line: CRC32C of those before.
const CRC_FIELD: &str = "crc = ";

fn crc_value(said: &str) -> String {
    format!("\"{:08x}\"\n", crc32c(said.as_bytes()))
}

fn identity_text(identity: &StoredIdentity) -> Result<String, toml::ser::Error> {
    let said = toml::to_string(identity)?;
    let crc = crc_value(&said);
    Ok(said + CRC_FIELD + &crc)
}

/// From the first file that can be read: it is the newer one, if they differ. A block that cannot be read
/// harms one of them as much as a lost write does.
fn read_life(path: &Path) -> Result<Life, DirectoryError> {
    let mut unreadable = None;
    for file in LIFE_FILES.map(|name| path.join(name)) {
        match disk::read(&file) {
            Ok(text) => match parse_life(&text) {
                Some(life) => return Ok(life),
                None => {
                    let problem =
                        "it does not say which life of the node this is, nor does its twin";
                    let problem = problem.to_owned();
                    unreadable = Some(DirectoryError::Damaged { path: file, problem });
                }
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => unreadable = Some(io_error("read", &file)(source)),
        }
    }
    unreadable.map_or(Ok(Life::default()), Err)
}

/// One line: the format, both lives, and the CRC32C of these.
fn life_text(life: Life) -> String {
    let said = format!("1 {:032x} {:032x}", life.last, life.next);
    let checksum = crc32c(said.as_bytes());
    format!("{said} {checksum:08x}\n")
}

fn parse_life(text: &[u8]) -> Option<Life> {
    let text = std::str::from_utf8(text).ok()?;
    let mut words = text.strip_prefix("1 ")?.split_ascii_whitespace();
    let mut number = || u128::from_str_radix(words.next()?, 16).ok();
    let life = Life { last: number()?, next: number()? };
    (life_text(life) == text).then_some(life)
}

fn write(path: &Path, identity: &StoredIdentity) -> Result<(), DirectoryError> {
    let text = identity_text(identity).map_err(io::Error::other);
    let text = text.map_err(io_error("write", path))?;
    IDENTITY_FILES.iter().try_for_each(|name| {
        let file = path.join(name);
        disk::replace(&file, text.as_bytes()).map_err(io_error("write", &file))
    })
}

/// The identity file, for golden files and fuzzing.
#[cfg(any(test, feature = "decoders"))]
pub(crate) mod decoding {
    use super::*;

    pub(crate) fn sample(node: Option<u32>) -> Vec<u8> {
        let identity = StoredIdentity {
            format: IDENTITY_FORMAT,
            cluster: ClusterId(7).to_string(),
            role: Role::Meta.to_string(),
            incarnation: format!("{:032x}", 5),
            node,
        };
        identity_text(&identity).unwrap_or_default().into_bytes()
    }

    pub(crate) fn seal(bytes: &mut [u8]) {
        let name = CRC_FIELD.as_bytes();
        let Some(at) = bytes.windows(name.len()).rposition(|window| window == name) else { return };
        let (said, rest) = bytes.split_at_mut(at);
        let crc = crc_value(&String::from_utf8_lossy(said));
        if let Some(value) = rest.get_mut(name.len()..name.len() + crc.len()) {
            value.copy_from_slice(crc.as_bytes());
        }
    }

    pub(crate) fn sample_life(last: u128, next: u128) -> Vec<u8> {
        life_text(Life { last, next }).into_bytes()
    }

    pub(crate) fn life_again(bytes: &[u8]) -> Option<Vec<u8>> {
        parse_life(bytes).map(|life| life_text(life).into_bytes())
    }

    pub(crate) fn again(bytes: &[u8]) -> Option<Vec<u8>> {
        let mut identity = parse(bytes, Path::new("")).ok()?;
        identity.format = IDENTITY_FORMAT;
        identity_text(&identity).ok().map(String::into_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: ClusterId = ClusterId(7);

    #[test]
    fn a_directory_remembers_who_it_is() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("meta1");
        let mut first = NodeDirectory::open(&path, Role::Meta, CLUSTER).unwrap();
        assert_eq!(first.node(), None);
        first.set_node(NodeId(101)).unwrap();
        let incarnation = first.incarnation();
        drop(first);
        let again = NodeDirectory::open(&path, Role::Meta, CLUSTER).unwrap();
        assert_eq!((again.node(), again.incarnation()), (Some(NodeId(101)), incarnation));
    }

    /// The next life is the same until the managers have answered, also after a restart; then another.
    #[test]
    fn a_life_begins_once_and_the_next_one_follows_on_it() {
        let temp = tempfile::tempdir().unwrap();
        let open = || NodeDirectory::open(temp.path(), Role::Data, CLUSTER).unwrap();
        let first = open().begin_life().unwrap();
        assert_ne!(first.next, first.last);
        let mut directory = open();
        assert_eq!(directory.begin_life().unwrap(), first, "nobody has answered");
        directory.life_has_begun();
        drop(directory);
        let second = open().begin_life().unwrap();
        assert!(second.last == first.next && second.next != first.next);
        assert!(!second.follows(first.last));
    }

    #[test]
    fn with_no_room_for_another_life_the_last_one_goes_on() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("data1");
        let mut directory = NodeDirectory::open(&path, Role::Data, CLUSTER).unwrap();
        let begun = directory.begin_life().unwrap();
        directory.life_has_begun();
        // Nothing can be written there any more.
        std::fs::remove_dir_all(&path).unwrap();
        let Life { last, next } = directory.begin_life().unwrap();
        assert_eq!((last, next), (begun.next, begun.next));
    }

    /// Found by the simulation (seeds 44, 50, 64, 72, 158): a disk that acknowledged the write and lost it left
    /// a node that could not start.
    #[test]
    fn one_lost_write_takes_no_life() {
        let temp = tempfile::tempdir().unwrap();
        let open = || NodeDirectory::open(temp.path(), Role::Data, CLUSTER);
        let life = open().unwrap().begin_life().unwrap();
        let [first, second] = LIFE_FILES.map(|name| temp.path().join(name));
        std::fs::write(&first, "").unwrap();
        assert_eq!(open().unwrap().begin_life().unwrap(), life);
        // As a directory it cannot be read, like a bad block.
        std::fs::remove_file(&first).and(std::fs::create_dir(&first)).unwrap();
        assert_eq!(open().unwrap().begin_life().unwrap(), life);
        std::fs::remove_dir(&first).and(std::fs::write(&first, "")).unwrap();
        std::fs::write(&second, sample_of_rot(life)).unwrap();
        assert!(matches!(open(), Err(DirectoryError::Damaged { .. })));
        // As in directories of before.
        std::fs::remove_file(first).and(std::fs::remove_file(second)).unwrap();
        assert_eq!(open().unwrap().begin_life().unwrap().last, 0);
    }

    fn sample_of_rot(life: Life) -> String {
        life_text(life).replacen('0', "1", 1)
    }

    #[test]
    fn a_note_that_it_rejoins_lasts_until_it_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let open = || NodeDirectory::open(temp.path(), Role::Manager, CLUSTER).unwrap();
        let mut directory = open();
        assert!(!directory.is_rejoining());
        directory.set_rejoining(true).unwrap();
        drop(directory);
        let mut directory = open();
        assert!(directory.is_rejoining());
        directory.set_rejoining(false).unwrap();
        assert!(!directory.is_rejoining());
        drop(directory);
        assert!(!open().is_rejoining());
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        drop(NodeDirectory::open(temp.path(), Role::Meta, CLUSTER).unwrap());
        let other = NodeDirectory::open(temp.path(), Role::Meta, ClusterId(8));
        assert!(matches!(other, Err(DirectoryError::OtherCluster { .. })), "{other:?}");
        let other = NodeDirectory::open(temp.path(), Role::Data, CLUSTER);
        assert!(matches!(other, Err(DirectoryError::OtherRole { .. })), "{other:?}");
    }

    #[test]
    fn only_one_process_may_have_it() {
        let temp = tempfile::tempdir().unwrap();
        let _held = NodeDirectory::open(temp.path(), Role::Meta, CLUSTER).unwrap();
        let second = NodeDirectory::open(temp.path(), Role::Meta, CLUSTER);
        assert!(matches!(second, Err(DirectoryError::InUse { .. })), "{second:?}");
    }

    #[test]
    fn a_damaged_identity_is_not_overwritten() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join(IDENTITY_FILES[0]);
        std::fs::write(&file, "format = 1\nsurprise = 2\n").unwrap();
        let opened = NodeDirectory::open(temp.path(), Role::Meta, CLUSTER);
        assert!(matches!(opened, Err(DirectoryError::Damaged { .. })), "{opened:?}");
        let kept = std::fs::read_to_string(file).unwrap();
        assert!(kept.contains("surprise"));
    }

    /// Found by the simulation (seed 900017): a disk that lost one write, of the identity, left a node that did not start
    /// any more.
    #[test]
    fn one_lost_write_takes_no_identity() {
        let temp = tempfile::tempdir().unwrap();
        let open = || NodeDirectory::open(temp.path(), Role::Data, CLUSTER);
        let mut directory = open().unwrap();
        directory.set_node(NodeId(7)).unwrap();
        let incarnation = directory.incarnation();
        drop(directory);
        let files = IDENTITY_FILES.map(|name| temp.path().join(name));
        let whole = std::fs::read(&files[0]).unwrap();
        let says = |directory: NodeDirectory| (directory.node(), directory.incarnation());
        for file in &files {
            for at in 0..whole.len() {
                let mut rotten = whole.clone();
                rotten[at] ^= 1;
                std::fs::write(file, rotten).unwrap();
                assert_eq!(says(open().unwrap()), (Some(NodeId(7)), incarnation), "byte {at}");
                assert_eq!(std::fs::read(file).unwrap(), whole, "byte {at}");
            }
            std::fs::write(file, "").unwrap();
            assert_eq!(says(open().unwrap()), (Some(NodeId(7)), incarnation));
            std::fs::remove_file(file).unwrap();
            assert_eq!(says(open().unwrap()), (Some(NodeId(7)), incarnation));
            assert_eq!(std::fs::read(file).unwrap(), whole);
        }
        for file in &files {
            std::fs::write(file, &whole[1..]).unwrap();
        }
        assert!(matches!(open(), Err(DirectoryError::Damaged { .. })));
        assert_eq!(std::fs::read(&files[1]).unwrap(), whole[1..]);
    }

    #[test]
    fn a_directory_of_the_first_format_is_taken_over() {
        let temp = tempfile::tempdir().unwrap();
        let first = include_bytes!("../golden/identity");
        std::fs::write(temp.path().join(IDENTITY_FILES[0]), first).unwrap();
        let directory = NodeDirectory::open(temp.path(), Role::Meta, CLUSTER).unwrap();
        assert_eq!((directory.node(), directory.incarnation()), (Some(NodeId(101)), 5));
        for name in IDENTITY_FILES {
            let text = std::fs::read(temp.path().join(name)).unwrap();
            assert_eq!(text, decoding::sample(Some(101)));
        }
    }
}
