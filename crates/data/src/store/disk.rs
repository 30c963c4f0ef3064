//! What the partitions of one disk share: the fence, the open files, the memory for checksums.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use milpa_host::disk::{is_full, is_shortage};
use milpa_types::ExtentId;

use super::extent::Extent;
use super::files::{StoreFile, StoreFiles};
use super::{StoreError, lock};

/// Bounds on what a disk's partitions hold in memory, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Open extent files. The least recently used is closed first.
    pub files_max: usize,
    /// Cached checksum chunks of 4 KiB; one covers 2 MiB of data.
    pub chunks_max: usize,
}

impl Default for StoreLimits {
    /// 512 files, and 64 MiB of checksums: those of 32 GiB of data.
    fn default() -> StoreLimits {
        StoreLimits { files_max: 512, chunks_max: 16_384 }
    }
}

/// Set by the first failed write or flush, for good: the page cache then no longer says what the
/// disk holds, and a second flush would report success for bytes that are lost.
#[derive(Debug, Default)]
struct Fence(AtomicBool);

impl Fence {
    fn close(&self, call: &'static str, error: &io::Error) {
        if !self.0.swap(true, Ordering::SeqCst) {
            tracing::error!(call, %error, "disk failed and is fenced: replace it");
        }
    }
}

/// One disk, as the stores on it see it.
pub struct StoreDisk {
    files: Arc<dyn StoreFiles>,
    fence: Arc<Fence>,
    limits: StoreLimits,
    open: Mutex<OpenFiles>,
    /// Counts the stores opened on this disk.
    stores: AtomicU64,
    /// Cached chunks in the order in which they will be looked at for eviction (clock).
    chunks: Mutex<VecDeque<(Weak<Extent>, u32)>>,
}

impl StoreDisk {
    /// A disk reached through `files`.
    #[must_use]
    pub fn new(files: Arc<dyn StoreFiles>, limits: StoreLimits) -> Arc<StoreDisk> {
        Arc::new(StoreDisk {
            files,
            fence: Arc::default(),
            limits,
            open: Mutex::default(),
            stores: AtomicU64::new(0),
            chunks: Mutex::default(),
        })
    }

    /// Whether the disk takes no writes any more.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fence.0.load(Ordering::SeqCst)
    }

    /// Takes the disk out of service, as a failed flush would: for the log writer that shares it.
    pub fn fence(&self, call: &'static str, error: &io::Error) {
        self.fence.close(call, error);
    }

    /// A number for a store that was just opened. A partition may be deleted and made again here: the
    /// open files of the one must not be taken for those of the other.
    pub(super) fn number_store(&self) -> StoreNumber {
        StoreNumber(self.stores.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn files(&self) -> &dyn StoreFiles {
        &*self.files
    }

    /// Refuses when fenced.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        if self.is_fenced() { Err(StoreError::DiskFailed) } else { Ok(()) }
    }

    /// What a failed write means: a full disk is ordinary, anything else fences.
    pub(crate) fn write_failed(&self, call: &'static str, error: &io::Error) -> StoreError {
        if is_full(error) {
            return StoreError::NoSpace;
        }
        self.fence.close(call, error);
        StoreError::DiskFailed
    }

    /// What a failed flush means: the fence, whatever the error.
    pub(crate) fn sync_failed(&self, error: &io::Error) -> StoreError {
        self.fence.close("fdatasync", error);
        StoreError::DiskFailed
    }

    /// What a failed open means: lack of descriptors or memory passes, the rest fences.
    pub(crate) fn open_failed(&self, error: &io::Error) -> StoreError {
        if is_shortage(error) { StoreError::Busy } else { self.write_failed("open", error) }
    }

    /// The extent's file, opened if it is not.
    pub(super) fn open_file(
        &self,
        store: StoreNumber,
        extent: ExtentId,
        path: impl FnOnce() -> std::path::PathBuf,
    ) -> io::Result<Arc<OpenFile>> {
        let key = (store, extent);
        if let Some(file) = lock(&self.open).get(key) {
            return Ok(file);
        }
        let file = self.files.open(&path())?;
        Ok(self.keep_open(key, file))
    }

    /// Takes a file that was just opened or created into the cache, closing another if need be.
    pub(super) fn keep_open(&self, key: FileKey, file: Arc<dyn StoreFile>) -> Arc<OpenFile> {
        let file = OpenFile { file, dirty: AtomicBool::new(false), fence: Arc::clone(&self.fence) };
        let (file, evicted) = lock(&self.open).insert(key, Arc::new(file), self.limits.files_max);
        // Closing may flush: not under the lock.
        drop(evicted);
        file
    }

    /// Forgets a removed extent's file without flushing it.
    pub(super) fn discard_file(&self, store: StoreNumber, extent: ExtentId) {
        let discarded = lock(&self.open).remove((store, extent));
        if let Some(file) = discarded {
            file.dirty.store(false, Ordering::SeqCst);
        }
    }

    /// Closes all files of a store that nobody uses any more: flushed, unless they are being deleted.
    pub(super) fn close_files(&self, store: StoreNumber, are_deleted: bool) {
        let closed = lock(&self.open).remove_store(store);
        if are_deleted {
            closed.iter().for_each(|file| file.dirty.store(false, Ordering::SeqCst));
        }
        // Closing may flush: not under the lock.
        drop(closed);
    }

    /// Notes that `extent` caches a chunk, and evicts others if there are too many.
    pub(super) fn chunk_cached(&self, extent: &Arc<Extent>, chunk: u32) {
        let mut chunks = lock(&self.chunks);
        chunks.push_back((Arc::downgrade(extent), chunk));
        // Each chunk is passed over at most once, so this ends.
        let mut looks = chunks.len() * 2;
        while chunks.len() > self.limits.chunks_max.max(1) && looks > 0 {
            looks -= 1;
            let Some((owner, chunk)) = chunks.pop_front() else { return };
            if owner.upgrade().is_some_and(|owner| !lock(&owner.sums).evict(chunk)) {
                chunks.push_back((owner, chunk));
            }
        }
    }
}

/// The way of bytes between memory and disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The system keeps them in memory for the next reader.
    Kept,
    /// It keeps nothing of them but what it has.
    Unkept,
    /// Nor is what it has taken for what the medium has.
    Direct,
}

/// An open extent file. Closing it flushes what was written since the last flush, so that a
/// write-back error is not lost with the descriptor.
pub(super) struct OpenFile {
    file: Arc<dyn StoreFile>,
    dirty: AtomicBool,
    fence: Arc<Fence>,
}

impl OpenFile {
    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_at(buffer, offset)
    }

    pub(super) fn read(&self, buffer: &mut [u8], offset: u64, way: Way) -> io::Result<()> {
        match way {
            Way::Kept => self.file.read_at(buffer, offset),
            Way::Unkept => self.file.read_unkept(buffer, offset),
            Way::Direct => self.file.read_direct(buffer, offset),
        }
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write(bytes, offset, Way::Kept)
    }

    pub(super) fn write(&self, bytes: &[u8], offset: u64, way: Way) -> io::Result<()> {
        self.dirty.store(true, Ordering::SeqCst);
        match way {
            Way::Kept => self.file.write_at(bytes, offset),
            Way::Unkept | Way::Direct => self.file.write_direct(bytes, offset),
        }
    }

    pub(super) fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.dirty.store(true, Ordering::SeqCst);
        self.file.punch(offset, length)
    }

    pub(super) fn release(&self, offset: u64, length: u64) {
        self.file.release(offset, length);
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        // Before the call: a write that comes during it makes the file dirty again.
        self.dirty.store(false, Ordering::SeqCst);
        self.file.sync()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let fenced = self.fence.0.load(Ordering::SeqCst);
        if *self.dirty.get_mut()
            && !fenced
            && let Err(error) = self.file.sync()
        {
            self.fence.close("fdatasync at close", &error);
        }
    }
}

/// Tells the stores of one disk apart, also two of the same partition, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StoreNumber(u64);

type FileKey = (StoreNumber, ExtentId);

/// Open files by extent, and by the time of their last use.
#[derive(Default)]
struct OpenFiles {
    files: BTreeMap<FileKey, (Arc<OpenFile>, u64)>,
    uses: BTreeMap<u64, FileKey>,
    /// Counts uses.
    clock: u64,
}

impl OpenFiles {
    fn get(&mut self, key: FileKey) -> Option<Arc<OpenFile>> {
        let (file, used) = self.files.get_mut(&key)?;
        self.clock += 1;
        self.uses.remove(used);
        self.uses.insert(self.clock, key);
        *used = self.clock;
        Some(Arc::clone(file))
    }

    /// Adds a file, unless another thread has added it meanwhile. Returns the one to use, and
    /// those to close.
    fn insert(
        &mut self,
        key: FileKey,
        file: Arc<OpenFile>,
        files_max: usize,
    ) -> (Arc<OpenFile>, Vec<Arc<OpenFile>>) {
        if let Some(present) = self.get(key) {
            return (present, vec![file]);
        }
        self.clock += 1;
        self.files.insert(key, (Arc::clone(&file), self.clock));
        self.uses.insert(self.clock, key);
        let mut evicted = Vec::new();
        while self.files.len() > files_max.max(1) {
            let Some((_, oldest)) = self.uses.pop_first() else { break };
            evicted.extend(self.files.remove(&oldest).map(|(file, _)| file));
        }
        (file, evicted)
    }

    fn remove_store(&mut self, store: StoreNumber) -> Vec<Arc<OpenFile>> {
        let all = (store, ExtentId(0))..=(store, ExtentId(u64::MAX));
        let keys: Vec<FileKey> = self.files.range(all).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    fn remove(&mut self, key: FileKey) -> Option<Arc<OpenFile>> {
        let (file, used) = self.files.remove(&key)?;
        self.uses.remove(&used);
        Some(file)
    }
}
