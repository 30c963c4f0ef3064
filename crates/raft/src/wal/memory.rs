//! A disk in memory that loses and tears what was not synced, for tests and the simulation.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::LogStorage;
use super::format::mix;

/// A torn write keeps or loses whole sectors of this size.
pub const SECTOR_BYTES: usize = 512;

/// A handle on a simulated directory. Clones see the same disk, so that a test can crash it or
/// damage it while a log has it.
#[derive(Clone, Debug, Default)]
pub struct MemoryStorage(Arc<Mutex<Disk>>);

#[derive(Clone, Debug, Default)]
struct Disk {
    files: Vec<FileState>,
    /// Names as a running process sees them, to indexes of `files`.
    names: BTreeMap<String, usize>,
    /// Names as they would be found after a crash.
    durable_names: BTreeMap<String, usize>,
    /// Operations on names since the last `sync_dir`: names and what they became. A rename is one
    /// operation on two names, as journalling file systems have it.
    pending_names: Vec<Vec<(String, Option<usize>)>>,
    syncs: u64,
    writes: u64,
    /// Bytes of all writes, also of those that found no room.
    written_bytes: u64,
    read_bytes: u64,
    fail_sync_after: Option<u64>,
    fail_after: Option<u64>,
    /// Bytes of all files beyond which none can grow.
    capacity_bytes: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct FileState {
    /// What a reader sees.
    cached: Vec<u8>,
    /// What is on the medium.
    durable: Vec<u8>,
    /// Sectors that differ or may differ.
    dirty: std::collections::BTreeSet<usize>,
}

impl FileState {
    fn persist(&mut self, sector: usize) {
        let start = sector * SECTOR_BYTES;
        let end = (start + SECTOR_BYTES).min(self.cached.len());
        if self.durable.len() < end {
            self.durable.resize(end, 0);
        }
        if let (Some(to), Some(from)) =
            (self.durable.get_mut(start..end), self.cached.get(start..end))
        {
            to.copy_from_slice(from);
        }
    }
}

impl MemoryStorage {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Power loss. Of what was not synced, `keep(n)` decides for the n-th dirty sector (counted
    /// over all files in the order of their creation) whether it reached the medium, and how many
    /// of the pending name operations did (asked with `usize::MAX - i` for the i-th; the first
    /// `false` stops).
    pub fn crash(&self, mut keep: impl FnMut(usize) -> bool) {
        let mut guard = self.disk();
        let disk = &mut *guard;
        let mut count = 0;
        for file in &mut disk.files {
            for sector in std::mem::take(&mut file.dirty) {
                if keep(count) {
                    file.persist(sector);
                }
                count += 1;
            }
            file.cached.clone_from(&file.durable);
        }
        for (i, changes) in std::mem::take(&mut disk.pending_names).into_iter().enumerate() {
            if !keep(usize::MAX - i) {
                break;
            }
            for (name, target) in changes {
                set_name(&mut disk.durable_names, name, target);
            }
        }
        disk.names = disk.durable_names.clone();
    }

    /// Another disk with what is on this one now.
    #[must_use]
    pub fn image(&self) -> MemoryStorage {
        MemoryStorage(Arc::new(Mutex::new(self.disk().clone())))
    }

    /// Power loss where a seeded coin decides for each sector.
    pub fn crash_seeded(&self, seed: u64) {
        self.crash(|n| mix(seed ^ mix(n as u64)).is_multiple_of(2));
    }

    /// How many sectors are not on the medium.
    #[must_use]
    pub fn dirty_sectors(&self) -> usize {
        self.disk().files.iter().map(|file| file.dirty.len()).sum()
    }

    /// Flips bits of one byte on the medium and in the cache. Returns false if there is none.
    pub fn damage(&self, name: &str, offset: usize) -> bool {
        let mut guard = self.disk();
        let disk = &mut *guard;
        let Some(file) = disk.names.get(name).and_then(|&i| disk.files.get_mut(i)) else {
            return false;
        };
        let mut hit = false;
        for bytes in [&mut file.cached, &mut file.durable] {
            if let Some(byte) = bytes.get_mut(offset) {
                *byte ^= 0x55;
                hit = true;
            }
        }
        hit
    }

    /// The next `syncs` syncs succeed, all later ones fail.
    pub fn fail_sync_after(&self, syncs: u64) {
        self.disk().fail_sync_after = Some(syncs);
    }

    /// The next `operations` changes succeed, all later ones fail: the process "dies" there.
    /// `None` heals.
    pub fn fail_after(&self, operations: Option<u64>) {
        self.disk().fail_after = operations;
    }

    /// While full, writes beyond the end of a file fail.
    pub fn set_full(&self, is_full: bool) {
        self.set_free(is_full.then_some(0));
    }

    /// From now on files can grow by so much together; without a bound if `None`.
    pub fn set_free(&self, bytes: Option<u64>) {
        let mut disk = self.disk();
        disk.capacity_bytes = bytes.map(|bytes| disk.used_bytes().saturating_add(bytes));
    }

    /// Bytes written so far.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.disk().written_bytes
    }

    /// Bytes read so far.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.disk().read_bytes
    }

    /// Syncs of files and writes so far.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let disk = self.disk();
        (disk.syncs, disk.writes)
    }

    /// An independent copy of the whole disk.
    #[must_use]
    pub fn fork(&self) -> MemoryStorage {
        let disk = self.disk();
        let files = disk
            .files
            .iter()
            .map(|file| FileState {
                cached: file.cached.clone(),
                durable: file.durable.clone(),
                dirty: file.dirty.clone(),
            })
            .collect();
        MemoryStorage(Arc::new(Mutex::new(Disk {
            files,
            names: disk.names.clone(),
            durable_names: disk.durable_names.clone(),
            pending_names: disk.pending_names.clone(),
            syncs: disk.syncs,
            writes: disk.writes,
            fail_sync_after: disk.fail_sync_after,
            fail_after: disk.fail_after,
            written_bytes: disk.written_bytes,
            read_bytes: disk.read_bytes,
            capacity_bytes: disk.capacity_bytes,
        })))
    }
}

fn set_name(names: &mut BTreeMap<String, usize>, name: String, target: Option<usize>) {
    match target {
        Some(file) => names.insert(name, file),
        None => names.remove(&name),
    };
}

impl Disk {
    fn file(&mut self, name: &str) -> io::Result<&mut FileState> {
        let index = self.names.get(name).copied();
        index
            .and_then(|i| self.files.get_mut(i))
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    fn used_bytes(&self) -> u64 {
        let named = self.names.values().filter_map(|&file| self.files.get(file));
        named.map(|file| file.cached.len() as u64).sum()
    }

    fn free_bytes(&self) -> u64 {
        self.capacity_bytes.map_or(u64::MAX, |bytes| bytes.saturating_sub(self.used_bytes()))
    }

    /// Counts a change, and refuses it if the process is dead.
    fn change(&mut self) -> io::Result<()> {
        if self.fail_after == Some(0) {
            return Err(io::Error::other("injected failure"));
        }
        self.fail_after = self.fail_after.map(|left| left - 1);
        Ok(())
    }

    fn name(&mut self, changes: Vec<(String, Option<usize>)>) {
        for (name, target) in &changes {
            set_name(&mut self.names, name.clone(), *target);
        }
        self.pending_names.push(changes);
    }
}

impl LogStorage for MemoryStorage {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.disk().names.keys().cloned().collect())
    }

    fn create(&mut self, name: &str) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        disk.files.push(FileState::default());
        let index = disk.files.len() - 1;
        disk.name(vec![(name.to_owned(), Some(index))]);
        Ok(())
    }

    fn read(&mut self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut disk = self.disk();
        let cached = &disk.file(name)?.cached;
        let from = cached.get(offset as usize..).unwrap_or_default();
        let count = from.len().min(buffer.len());
        buffer.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        disk.read_bytes += count as u64;
        Ok(count)
    }

    fn write_at(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        disk.writes += 1;
        let free_bytes = disk.free_bytes();
        disk.written_bytes += bytes.len() as u64;
        let file = disk.file(name)?;
        let start = offset as usize;
        let end = start + bytes.len();
        if end.saturating_sub(file.cached.len()) as u64 > free_bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if file.cached.len() < end {
            file.cached.resize(end, 0);
        }
        if let Some(to) = file.cached.get_mut(start..end) {
            to.copy_from_slice(bytes);
        }
        file.dirty.extend(start / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES));
        Ok(())
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        if disk.fail_sync_after == Some(0) {
            return Err(io::Error::other("injected flush failure"));
        }
        disk.fail_sync_after = disk.fail_sync_after.map(|left| left - 1);
        disk.syncs += 1;
        let file = disk.file(name)?;
        for sector in std::mem::take(&mut file.dirty) {
            file.persist(sector);
        }
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        let index = disk.names.get(from).copied();
        let index = index.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        disk.name(vec![(to.to_owned(), Some(index)), (from.to_owned(), None)]);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        disk.file(name)?;
        disk.name(vec![(name.to_owned(), None)]);
        Ok(())
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        let mut disk = self.disk();
        disk.change()?;
        disk.pending_names.clear();
        disk.durable_names = disk.names.clone();
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.disk().free_bytes())
    }
}
