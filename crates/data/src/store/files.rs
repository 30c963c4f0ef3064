//! All file access of the store goes through two small traits, so that the store's own tests can lose,
//! tear and fail it ([`super::memory_files`]).
//!
//! Otherwise they stand on the disk port ([`milpa_host::disk`]), which is one system call for each
//! call here, so that a tracer can count and fail them one by one.

use std::io;
use std::path::Path;
use std::sync::Arc;

use milpa_host::disk::{self, File, Open};

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
    /// Opens a file that an earlier life of the process left: see [`File::open_from_medium`].
    ///
    /// # Errors
    ///
    /// As open(2).
    fn open_from_medium(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>>;
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
    /// As `read_at`, from the device: see [`File::read_direct`].
    ///
    /// # Errors
    ///
    /// As pread(2).
    fn read_direct(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }
    /// As `read_direct`, or from memory: see [`File::read_unkept`].
    ///
    /// # Errors
    ///
    /// As pread(2).
    fn read_unkept(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }
    /// As `write_at`, to the device: see [`File::write_direct`].
    ///
    /// # Errors
    ///
    /// As pwrite(2); a part may then have been written.
    fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_at(bytes, offset)
    }
    /// Gives memory back: see [`File::release`].
    fn release(&self, _offset: u64, _length: u64) {}
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

/// Files on a disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFiles;

/// Whether this is a build for tests only, which must be seen to fail them (`make
/// test-flush-fault`). All nodes skip flushes, or the one whose directory ends with the name in
/// `MILPA_FAULT_NODE`: a test that asks every member has to notice one.
fn skips_flushes() -> bool {
    cfg!(feature = "fault-skip-flush")
        && std::env::var("MILPA_FAULT_NODE")
            .map_or(true, |name| std::env::args().any(|word| word.ends_with(&name)))
}

impl DiskFiles {
    /// The files of a disk. A build that skips flushes says so at every start.
    #[must_use]
    pub fn new() -> DiskFiles {
        if skips_flushes() {
            tracing::error!("this build skips flushes of extents: for tests only");
        }
        DiskFiles
    }
}

impl StoreFiles for DiskFiles {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        Ok(Arc::new(File::open(path, Open::New)?))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        Ok(Arc::new(File::open(path, Open::Existing)?))
    }

    fn open_from_medium(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        Ok(Arc::new(File::open_from_medium(path)?))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        disk::remove(path)
    }

    fn rename(&self, source: &Path, target: &Path) -> io::Result<()> {
        disk::rename(source, target)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        disk::create_directory(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        disk::list(directory)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        if skips_flushes() { Ok(()) } else { disk::sync_directory(directory) }
    }

    fn allocated(&self, path: &Path) -> io::Result<u64> {
        Ok(disk::status(path)?.allocated)
    }
}

/// Behind the end of a file there are zeros.
fn fill_rest(buffer: &mut [u8], filled: usize) {
    buffer.get_mut(filled..).unwrap_or_default().fill(0);
}

impl StoreFile for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let filled = File::read_at(self, buffer, offset)?;
        fill_rest(buffer, filled);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        File::write_at(self, bytes, offset)
    }

    fn read_direct(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let filled = File::read_direct(self, buffer, offset)?;
        fill_rest(buffer, filled);
        Ok(())
    }

    fn read_unkept(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let filled = File::read_unkept(self, buffer, offset)?;
        fill_rest(buffer, filled);
        Ok(())
    }

    fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        File::write_direct(self, bytes, offset)
    }

    fn release(&self, offset: u64, length: u64) {
        File::release(self, offset, length);
    }

    fn sync(&self) -> io::Result<()> {
        if skips_flushes() { Ok(()) } else { File::sync(self) }
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        File::punch(self, offset, length)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        File::truncate(self, length)
    }

    fn length(&self) -> io::Result<u64> {
        File::length(self)
    }
}
