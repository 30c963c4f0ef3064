//! The files under the log: a narrow trait, and its real implementation.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use milpa_host::disk::{self, File, Lock, Open};

use super::WalError;

/// Files as the log needs them, all in one directory. Names are plain ASCII without slashes.
///
/// [`FileStorage`] is on the disk, real or simulated; the tests of the log alone use
/// [`MemoryStorage`](super::MemoryStorage), which can lose and tear what was not synced.
pub trait LogStorage: Send + 'static {
    /// All names, in any order.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes an empty file, or empties an existing one.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn create(&mut self, name: &str) -> io::Result<()>;

    /// Reads up to `buffer.len()` bytes; fewer only at the end of the file.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn read(&mut self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes all of `bytes`, growing the file if need be. One `pwrite`.
    ///
    /// # Errors
    ///
    /// What the system says. The log is fenced then.
    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes the file's contents durable. One `fdatasync`. Never called again after an error.
    ///
    /// # Errors
    ///
    /// What the system says. The log is fenced then.
    fn sync(&mut self, name: &str) -> io::Result<()>;

    /// Renames, replacing what is there. Durable after `sync_dir`.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;

    /// Removes. Durable after `sync_dir`.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn remove(&mut self, name: &str) -> io::Result<()>;

    /// Makes creations, renames and removals durable.
    ///
    /// # Errors
    ///
    /// What the system says. The log is fenced then.
    fn sync_dir(&mut self) -> io::Result<()>;

    /// Bytes that files can still grow by. Others may take them at any time.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn free_bytes(&self) -> io::Result<u64>;
}

const LOCK_NAME: &str = "lock";

/// A build for tests only, which must be seen to fail them (`make test-flush-fault`).
const SKIPS_FLUSHES: bool = cfg!(feature = "fault-skip-log-flush");

/// A directory on a disk, locked against other processes while this value lives.
#[derive(Debug)]
pub struct FileStorage {
    directory: PathBuf,
    files: BTreeMap<String, File>,
    _lock: Lock,
}

impl FileStorage {
    /// Opens the directory, making it if need be, and takes its lock.
    ///
    /// # Errors
    ///
    /// [`WalError::Locked`] if another process has it open; [`WalError::Io`].
    pub fn open(directory: &Path) -> Result<FileStorage, WalError> {
        if SKIPS_FLUSHES {
            tracing::error!("this build skips flushes of the log: for tests only");
        }
        disk::create_directory(directory)?;
        let lock = disk::lock(&directory.join(LOCK_NAME)).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => WalError::Locked { directory: directory.to_owned() },
            _ => WalError::Io(error),
        })?;
        let directory = directory.to_owned();
        Ok(FileStorage { directory, files: BTreeMap::new(), _lock: lock })
    }

    fn file(&mut self, name: &str) -> io::Result<&File> {
        if !self.files.contains_key(name) {
            // It is of an earlier life: those of this one are made here.
            let file = File::open_from_medium(&self.directory.join(name))?;
            self.files.insert(name.to_owned(), file);
        }
        self.files.get(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

impl LogStorage for FileStorage {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = disk::list(&self.directory)?;
        names.retain(|name| name != LOCK_NAME);
        Ok(names)
    }

    fn create(&mut self, name: &str) -> io::Result<()> {
        let file = File::open(&self.directory.join(name), Open::Empty)?;
        self.files.insert(name.to_owned(), file);
        Ok(())
    }

    fn read(&mut self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.file(name)?.read_at(buffer, offset)
    }

    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.write_at(bytes, offset)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        let file = self.file(name)?;
        if SKIPS_FLUSHES { Ok(()) } else { file.sync() }
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        disk::rename(&self.directory.join(from), &self.directory.join(to))?;
        self.files.remove(to);
        if let Some(file) = self.files.remove(from) {
            self.files.insert(to.to_owned(), file);
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.files.remove(name);
        disk::remove(&self.directory.join(name))
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        if SKIPS_FLUSHES { Ok(()) } else { disk::sync_directory(&self.directory) }
    }

    fn free_bytes(&self) -> io::Result<u64> {
        disk::space(&self.directory).map(|space| space.free)
    }
}
