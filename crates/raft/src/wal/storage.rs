//! The files under the log: a narrow trait, and its real implementation.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::WalError;

/// Files as the log needs them, all in one directory. Names are plain ASCII without slashes.
///
/// The real one is [`FileStorage`]; tests and the simulation use
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
}

const LOCK_NAME: &str = "lock";

/// A build for tests only, which must be seen to fail them (`make test-flush-fault`).
const SKIPS_FLUSHES: bool = cfg!(feature = "fault-skip-log-flush");

/// A directory of the real file system, locked against other processes while this value lives.
#[derive(Debug)]
pub struct FileStorage {
    directory: PathBuf,
    directory_file: File,
    files: HashMap<String, File>,
    /// Held for its `flock`.
    _lock: File,
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
        std::fs::create_dir_all(directory)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(directory.join(LOCK_NAME))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => WalError::Locked { directory: directory.to_owned() },
            TryLockError::Error(error) => WalError::Io(error),
        })?;
        Ok(FileStorage {
            directory: directory.to_owned(),
            directory_file: File::open(directory)?,
            files: HashMap::new(),
            _lock: lock,
        })
    }

    fn file(&mut self, name: &str) -> io::Result<&File> {
        if !self.files.contains_key(name) {
            let path = self.directory.join(name);
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            self.files.insert(name.to_owned(), file);
        }
        self.files.get(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

impl LogStorage for FileStorage {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            if let Ok(name) = entry?.file_name().into_string()
                && name != LOCK_NAME
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn create(&mut self, name: &str) -> io::Result<()> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(self.directory.join(name))?;
        self.files.insert(name.to_owned(), file);
        Ok(())
    }

    fn read(&mut self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let file = self.file(name)?;
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.write_all_at(bytes, offset)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        let file = self.file(name)?;
        if SKIPS_FLUSHES { Ok(()) } else { file.sync_data() }
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.directory.join(from), self.directory.join(to))?;
        self.files.remove(to);
        if let Some(file) = self.files.remove(from) {
            self.files.insert(to.to_owned(), file);
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.files.remove(name);
        std::fs::remove_file(self.directory.join(name))
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        if SKIPS_FLUSHES { Ok(()) } else { self.directory_file.sync_all() }
    }
}
