//! Files in memory that behave as badly as disks may: for crash tests.
//!
//! What a flush has reported is durable. Of everything since, [`MemoryFiles::cut_power`] keeps a
//! random part: each 512-byte sector of each 4 KiB page returns in one of the states that it had
//! since the last flush began. Directory changes are durable after `sync_directory`; of later ones a random
//! prefix survives, as with a journal. Calls can be made to fail; a flush that fails leaves what it was for
//! readable and clean, as Linux does, until the memory is given back or the power goes. Every choice comes
//! from the seed that the test gives.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::files::{StoreFile, StoreFiles};
use super::lock;

const PAGE: usize = 4096;
const SECTOR: usize = 512;

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// open.
    Open,
    /// pread.
    Read,
    /// pwrite, fallocate.
    Write,
    /// fdatasync, fsync of a directory.
    Sync,
}

/// A failure to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Of which call.
    pub call: Call,
    /// How many such calls succeed before.
    pub after: u64,
    /// With which error number.
    pub errno: i32,
}

/// A page's states since its file was last flushed, oldest first; the first is durable, the last
/// is what reads return. Never empty.
type Page = Vec<Arc<[u8; PAGE]>>;

#[derive(Default)]
struct Content {
    pages: BTreeMap<u64, Page>,
    /// Pages that became holes, to be given back when that is durable.
    punched: BTreeSet<u64>,
    /// Pages that a failed flush left clean: no later one writes them.
    unwritten: BTreeSet<u64>,
    /// Pages that the disk cannot read, until all of one is written or punched.
    unreadable: BTreeSet<u64>,
    length: u64,
}

impl Content {
    /// A flush has failed: what it was for is read back, and written no more.
    fn flush_failed(&mut self) {
        let dirty = self.pages.iter().filter(|(_, page)| page.len() > 1);
        self.unwritten.extend(dirty.map(|(number, _)| *number));
    }

    /// What is read, or written in part, needs what the disk has there.
    fn check_readable(&self, offset: u64, length: u64) -> io::Result<()> {
        let end = offset.saturating_add(length).div_ceil(PAGE as u64);
        match self.unreadable.range(offset / PAGE as u64..end).next() {
            Some(_) => Err(io::Error::from_raw_os_error(libc::EIO)),
            None => Ok(()),
        }
    }

    /// A change covers some pages, and others in part: of these the disk has to read the rest.
    fn check_changeable(&mut self, offset: u64, length: u64) -> io::Result<()> {
        let end = offset.saturating_add(length);
        let whole = offset.div_ceil(PAGE as u64)..end / PAGE as u64;
        for number in [offset / PAGE as u64, end.saturating_sub(1) / PAGE as u64] {
            if !whole.contains(&number) {
                self.check_readable(number * PAGE as u64, 1)?;
            }
        }
        self.unreadable.retain(|number| !whole.contains(number));
        Ok(())
    }

    /// Reads come from the medium again.
    fn release(&mut self) {
        for number in std::mem::take(&mut self.unwritten) {
            if let Some(page) = self.pages.get_mut(&number) {
                page.truncate(1);
            }
        }
    }
}

#[derive(Clone)]
enum Change {
    Create(PathBuf, Arc<Mutex<Content>>),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

type Names = BTreeMap<PathBuf, Arc<Mutex<Content>>>;

fn apply(names: &mut Names, change: &Change) {
    match change {
        Change::Create(path, file) => {
            names.insert(path.clone(), Arc::clone(file));
        }
        Change::Remove(path) => {
            names.remove(path);
        }
        Change::Rename(source, target) => {
            if let Some(file) = names.remove(source) {
                names.insert(target.clone(), file);
            }
        }
    }
}

#[derive(Default)]
struct Disk {
    names: Names,
    durable_names: Names,
    changes: Vec<Change>,
    faults: Vec<Fault>,
    /// Raised by each power cut: handles from before are dead.
    generation: u64,
    pages_max: Option<usize>,
    syncs: u64,
    writes: u64,
}

/// Called in the middle of a flush; see [`MemoryFiles::during_sync`].
type Hook = Arc<dyn Fn() + Send + Sync>;

/// A disk in memory. Clones share it.
#[derive(Clone, Default)]
pub struct MemoryFiles {
    disk: Arc<Mutex<Disk>>,
    sync_hook: Arc<Mutex<Option<Hook>>>,
    write_hook: Arc<Mutex<Option<Hook>>>,
    read_hook: Arc<Mutex<Option<Hook>>>,
}

impl MemoryFiles {
    /// An empty disk.
    #[must_use]
    pub fn new() -> MemoryFiles {
        MemoryFiles::default()
    }

    /// Makes a later call fail, once.
    pub fn fail(&self, fault: Fault) {
        lock(&self.disk).faults.push(fault);
    }

    /// Withdraws all failures to come.
    pub fn fail_no_more(&self) {
        lock(&self.disk).faults.clear();
    }

    /// Bounds the disk: writes that need more pages of 4 KiB fail with ENOSPC.
    pub fn set_capacity(&self, pages: Option<usize>) {
        lock(&self.disk).pages_max = pages;
    }

    /// Pages in use.
    #[must_use]
    pub fn pages_used(&self) -> usize {
        lock(&self.disk).names.values().map(|file| lock(file).pages.len()).sum()
    }

    /// Flushes of files and directories so far.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        lock(&self.disk).syncs
    }

    /// Writes and punches so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        lock(&self.disk).writes
    }

    /// Calls `hook` once in the middle of the next flush of a file: what it writes is not covered by that flush.
    pub fn during_sync(&self, hook: impl Fn() + Send + Sync + 'static) {
        *lock(&self.sync_hook) = Some(Arc::new(hook));
    }

    /// Calls `hook` once before the next write to a file.
    pub fn before_write(&self, hook: impl Fn() + Send + Sync + 'static) {
        *lock(&self.write_hook) = Some(Arc::new(hook));
    }

    /// Calls `hook` once before the next read of a file.
    pub fn before_read(&self, hook: impl Fn() + Send + Sync + 'static) {
        *lock(&self.read_hook) = Some(Arc::new(hook));
    }

    /// Loses power: a random part of what was not flushed is gone, open files are dead.
    pub fn cut_power(&self, seed: u64) {
        let mut random = Random(seed | 1);
        let mut disk = lock(&self.disk);
        disk.generation += 1;
        disk.faults.clear();
        let survivors = random.below(disk.changes.len() as u64 + 1) as usize;
        let changes = std::mem::take(&mut disk.changes);
        for change in changes.iter().take(survivors) {
            apply(&mut disk.durable_names, change);
        }
        // Other files are gone with their names.
        disk.names = disk.durable_names.clone();
        let mode = random.below(4);
        for file in disk.names.values() {
            let mut content = lock(file);
            content.release();
            // A hole that was not durable is a page again.
            content.punched.clear();
            for page in content.pages.values_mut() {
                let survivor = match mode {
                    0 => page.first().cloned(),
                    1 => page.last().cloned(),
                    2 => page.get(random.below(page.len() as u64) as usize).cloned(),
                    _ => Some(Arc::new(tear(page, &mut random))),
                };
                *page = survivor.into_iter().collect();
            }
        }
    }

    /// Flips a bit of a file, as rot does: on the disk and in memory.
    ///
    /// # Errors
    ///
    /// No such file.
    pub fn flip_bit(&self, path: &Path, offset: u64, bit: u8) -> io::Result<()> {
        let file = self.find(path)?;
        let mut content = lock(&file);
        let page = content.pages.entry(offset / PAGE as u64).or_insert_with(zero_page);
        for state in page {
            if let Some(byte) = Arc::make_mut(state).get_mut(offset as usize % PAGE) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }

    /// Makes a page of a file unreadable, as a bad sector in it does.
    ///
    /// # Errors
    ///
    /// No such file.
    pub fn make_unreadable(&self, path: &Path, page: u64) -> io::Result<()> {
        lock(&*self.find(path)?).unreadable.insert(page);
        Ok(())
    }

    fn find(&self, path: &Path) -> io::Result<Arc<Mutex<Content>>> {
        let found = lock(&self.disk).names.get(path).cloned();
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn handle(&self, file: Arc<Mutex<Content>>) -> Arc<dyn StoreFile> {
        let generation = lock(&self.disk).generation;
        Arc::new(MemoryFile { disk: self.clone(), file, generation })
    }

    /// Fails if a fault says so.
    fn call(&self, call: Call) -> io::Result<()> {
        let mut disk = lock(&self.disk);
        disk.syncs += u64::from(call == Call::Sync);
        disk.writes += u64::from(call == Call::Write);
        for index in 0..disk.faults.len() {
            let Some(fault) = disk.faults.get_mut(index).filter(|fault| fault.call == call) else {
                continue;
            };
            if fault.after == 0 {
                let errno = fault.errno;
                disk.faults.remove(index);
                return Err(io::Error::from_raw_os_error(errno));
            }
            fault.after -= 1;
        }
        Ok(())
    }

    fn change(&self, change: Change) {
        let mut disk = lock(&self.disk);
        apply(&mut disk.names, &change);
        disk.changes.push(change);
    }
}

fn zero_page() -> Page {
    vec![Arc::new([0; PAGE])]
}

/// A page of which each sector is in one of its states.
fn tear(page: &Page, random: &mut Random) -> [u8; PAGE] {
    let mut torn = [0; PAGE];
    for (index, sector) in torn.chunks_mut(SECTOR).enumerate() {
        let state = page.get(random.below(page.len() as u64) as usize);
        let start = index * SECTOR;
        if let Some(bytes) = state.and_then(|state| state.get(start..start + SECTOR)) {
            sector.copy_from_slice(bytes);
        }
    }
    torn
}

impl StoreFiles for MemoryFiles {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        self.call(Call::Write)?;
        if self.find(path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = Arc::<Mutex<Content>>::default();
        self.change(Change::Create(path.to_owned(), Arc::clone(&file)));
        Ok(self.handle(file))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        let file = self.find(path)?;
        self.call(Call::Open)?;
        Ok(self.handle(file))
    }

    fn open_from_medium(&self, path: &Path) -> io::Result<Arc<dyn StoreFile>> {
        let (handle, file) = (self.open(path)?, self.find(path)?);
        lock(&file).release();
        Ok(handle)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.find(path)?;
        self.change(Change::Remove(path.to_owned()));
        Ok(())
    }

    fn rename(&self, source: &Path, target: &Path) -> io::Result<()> {
        self.find(source)?;
        self.change(Change::Rename(source.to_owned(), target.to_owned()));
        Ok(())
    }

    fn create_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let disk = lock(&self.disk);
        let inside = disk.names.keys().filter(|path| path.parent() == Some(directory));
        Ok(inside.filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect())
    }

    fn sync_directory(&self, _directory: &Path) -> io::Result<()> {
        self.call(Call::Sync)?;
        let mut disk = lock(&self.disk);
        disk.changes.clear();
        disk.durable_names = disk.names.clone();
        Ok(())
    }

    fn allocated(&self, path: &Path) -> io::Result<u64> {
        let file = self.find(path)?;
        let pages = lock(&file).pages.len();
        Ok(pages as u64 * PAGE as u64)
    }
}

struct MemoryFile {
    disk: MemoryFiles,
    file: Arc<Mutex<Content>>,
    generation: u64,
}

impl MemoryFile {
    fn content(&self, call: Call) -> io::Result<std::sync::MutexGuard<'_, Content>> {
        if lock(&self.disk.disk).generation != self.generation {
            return Err(io::Error::other("the file was opened before the power cut"));
        }
        self.disk.call(call)?;
        Ok(lock(&self.file))
    }

    /// Fails where `count` more pages do not fit.
    fn reserve(&self, count: usize) -> io::Result<()> {
        let capacity = lock(&self.disk.disk).pages_max;
        match capacity {
            Some(pages) if self.disk.pages_used() + count > pages => {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => Ok(()),
        }
    }
}

impl StoreFile for MemoryFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let hook = lock(&self.disk.read_hook).take();
        if let Some(hook) = hook {
            hook();
        }
        let content = self.content(Call::Read)?;
        content.check_readable(offset, buffer.len() as u64)?;
        let (mut at, mut rest) = (offset, buffer);
        while !rest.is_empty() {
            let within = at as usize % PAGE;
            let count = rest.len().min(PAGE - within);
            let (now, later) = rest.split_at_mut(count);
            let page = content.pages.get(&(at / PAGE as u64)).and_then(|page| page.last());
            match page.and_then(|page| page.get(within..within + count)) {
                Some(bytes) => now.copy_from_slice(bytes),
                None => now.fill(0),
            }
            at += count as u64;
            rest = later;
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let hook = lock(&self.disk.write_hook).take();
        if let Some(hook) = hook {
            hook();
        }
        self.content(Call::Write)?.check_changeable(offset, bytes.len() as u64)?;
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let within = at as usize % PAGE;
            let (now, later) = rest.split_at_checked(PAGE - within).unwrap_or((rest, &[]));
            let number = at / PAGE as u64;
            if !lock(&self.file).pages.contains_key(&number) {
                self.reserve(1)?;
            }
            let mut content = lock(&self.file);
            content.punched.remove(&number);
            content.unwritten.remove(&number);
            let page = content.pages.entry(number).or_insert_with(zero_page);
            let mut state = page.last().map_or([0; PAGE], |state| **state);
            if let Some(target) = state.get_mut(within..within + now.len()) {
                target.copy_from_slice(now);
            }
            page.push(Arc::new(state));
            at += now.len() as u64;
            rest = later;
            content.length = content.length.max(at);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let content = self.content(Call::Sync).inspect_err(|_| {
            if lock(&self.disk.disk).generation == self.generation {
                lock(&self.file).flush_failed();
            }
        })?;
        let dirty = content.pages.iter().filter(|(number, _)| !content.unwritten.contains(number));
        let covered: Vec<_> = dirty.map(|(number, page)| (*number, page.len())).collect();
        drop(content);
        let hook = lock(&self.disk.sync_hook).take();
        if let Some(hook) = hook {
            hook();
        }
        let mut content = lock(&self.file);
        for (number, states) in covered {
            if let Some(page) = content.pages.get_mut(&number)
                && states <= page.len()
            {
                page.drain(..states - 1);
            }
        }
        let Content { pages, punched, .. } = &mut *content;
        punched.retain(|number| {
            let is_hole = pages.get(number).is_some_and(|page| page.len() == 1);
            if is_hole {
                pages.remove(number);
            }
            !is_hole
        });
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut content = self.content(Call::Write)?;
        content.check_changeable(offset, length)?;
        let end = offset.saturating_add(length);
        let first = offset / PAGE as u64;
        let Content { pages, punched, unwritten, .. } = &mut *content;
        for (number, page) in pages.range_mut(first..=end.saturating_sub(1) / PAGE as u64) {
            let start = number * PAGE as u64;
            unwritten.remove(number);
            let mut state = page.last().map_or([0; PAGE], |state| **state);
            let low = offset.saturating_sub(start) as usize;
            let high = (end - start).min(PAGE as u64) as usize;
            if let Some(hole) = state.get_mut(low..high) {
                hole.fill(0);
            }
            if high - low == PAGE {
                punched.insert(*number);
            }
            page.push(Arc::new(state));
        }
        Ok(())
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        let old = self.length()?;
        self.punch(length, old.saturating_sub(length).max(1))?;
        lock(&self.file).length = length;
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.content(Call::Read)?.length)
    }
}

/// xorshift64*: good enough to choose what to lose.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound.max(1)
    }
}
