//! All file access of the store goes through two small traits, so that tests can lose, tear and
//! fail it ([`super::memory_files`]).
//!
//! The real implementation uses plain positioned system calls (pread, pwrite, fdatasync,
//! fallocate), one each per call here, so that a tracer can count and fail them one by one.

// The one call that the standard library lacks is fallocate(2) with FALLOC_FL_PUNCH_HOLE.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// The directory operations that the store needs.
pub trait StoreFiles: Send + Sync {
    /// Creates a file for reading and writing. Fails if it exists.
    ///
    /// # Errors
    ///
    /// As open(2).
    fn create(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>>;
    /// Opens an existing file for reading and writing.
    ///
    /// # Errors
    ///
    /// As open(2).
    fn open(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>>;
    /// Unlinks a file.
    ///
    /// # Errors
    ///
    /// As unlink(2).
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Renames a file over another, atomically.
    ///
    /// # Errors
    ///
    /// As rename(2).
    fn rename(&self, source: &Path, target: &Path) -> io::Result<()>;
    /// Creates a directory and its parents; an existing one is fine.
    ///
    /// # Errors
    ///
    /// As mkdir(2).
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// The names of the files in a directory, in order.
    ///
    /// # Errors
    ///
    /// As readdir(3).
    fn list(&self, directory: &Path) -> io::Result<Vec<String>>;
    /// Makes creations, removals and renames in a directory durable.
    ///
    /// # Errors
    ///
    /// As fsync(2). A failure fences the disk.
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;
    /// Bytes allocated to a file on the disk.
    ///
    /// # Errors
    ///
    /// As stat(2).
    fn allocated(&self, path: &Path) -> io::Result<u64>;
}

/// An open file. All calls are positioned and may run in parallel.
pub trait StoreFile: Send + Sync {
    /// Fills `buffer` from `offset`; bytes past the end of the file are zeros.
    ///
    /// # Errors
    ///
    /// As pread(2).
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// As pwrite(2); a part may then have been written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes everything written so far durable, with the metadata needed to read it.
    ///
    /// # Errors
    ///
    /// As fdatasync(2). A failure fences the disk.
    fn sync(&self) -> io::Result<()>;
    /// Turns a range into a hole that reads as zeros, and gives its blocks back. The size stays.
    ///
    /// # Errors
    ///
    /// As fallocate(2).
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;
    /// Sets the size.
    ///
    /// # Errors
    ///
    /// As ftruncate(2).
    fn truncate(&self, length: u64) -> io::Result<()>;
    /// The size in bytes.
    ///
    /// # Errors
    ///
    /// As fstat(2).
    fn length(&self) -> io::Result<u64>;
}

/// Files of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

/// Whether this is a build for tests only, which must be seen to fail them (`make
/// test-flush-fault`). All nodes skip flushes, or the one whose directory ends with the name in
/// `MILPA_FAULT_NODE`: a test that asks every member has to notice one.
fn skips_flushes() -> bool {
    cfg!(feature = "fault-skip-flush")
        && std::env::var("MILPA_FAULT_NODE")
            .map_or(true, |name| std::env::args().any(|word| word.ends_with(&name)))
}

impl SystemFiles {
    /// The files of a disk. A build that skips flushes says so at every start.
    #[must_use]
    pub fn new() -> SystemFiles {
        if skips_flushes() {
            tracing::error!("this build skips flushes of extents: for tests only");
        }
        SystemFiles
    }
}

impl StoreFiles for SystemFiles {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        Ok(Arc::new(SystemFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Arc::new(SystemFile(file)))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn rename(&self, source: &Path, target: &Path) -> io::Result<()> {
        std::fs::rename(source, target)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        let directory = File::open(directory)?;
        if skips_flushes() { Ok(()) } else { directory.sync_all() }
    }

    fn allocated(&self, path: &Path) -> io::Result<u64> {
        Ok(std::fs::metadata(path)?.blocks() * 512)
    }
}

struct SystemFile(File);

impl StoreFile for SystemFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.0.read_at(rest, offset + filled as u64) {
                Ok(0) => {
                    rest.fill(0);
                    break;
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        if skips_flushes() { Ok(()) } else { self.0.sync_data() }
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let bad = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let (offset, length) = (offset.try_into().map_err(bad)?, length.try_into().map_err(bad)?);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: the descriptor is open as long as `self.0` lives; no memory is passed.
            if unsafe { libc::fallocate(self.0.as_raw_fd(), mode, offset, length) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}
