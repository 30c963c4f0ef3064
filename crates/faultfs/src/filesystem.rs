//! The disk behind the kernel's requests. All of it is in memory, so every method answers at once,
//! unless the disk was told to be slow or frozen: then the thread waits, as it is meant to.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use milpa_fuse::flags::open::{DIRECT_IO, PARALLEL_DIRECT_WRITES};
use milpa_fuse::{
    Attr, Config, Create, Entry, Fallocate, Filesystem, Flush, Forget, Fsync, KernelInfo, Mkdir,
    Open, Opened, Read, Readdirplus, Release, Rename, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, SetAttr,
    Statfs, Write,
};
use milpa_host::disk::{Disk, Open as How, SimulatedFile};
use milpa_sim::disk::{Mount, Ordered, Platter};

use crate::aimed::Aimed;
use crate::nodes::Nodes;

const BLOCK_BYTES: u64 = 4096;

/// A disk, mounted.
#[derive(Debug)]
pub(crate) struct FaultyFs {
    platter: Arc<Mutex<Platter>>,
    power: Mutex<Power>,
    /// The disk was thawed, or its power cut.
    changed: Condvar,
    nodes: Mutex<Nodes>,
    files: Mutex<BTreeMap<u64, OpenFile>>,
    directories: Mutex<BTreeMap<u64, Vec<String>>>,
    next_handle: AtomicU64,
    /// Every change and sync takes so much longer.
    pub delay_ms: AtomicU64,
    /// Every read does.
    pub read_delay_ms: AtomicU64,
    aimed: Aimed,
}

/// Whether the disk answers, and in which life: what was begun in one does nothing in the next.
#[derive(Debug)]
struct Power {
    disk: Mount,
    life: u64,
    is_frozen: bool,
}

#[derive(Debug)]
struct OpenFile {
    nodeid: u64,
    file: Arc<dyn SimulatedFile>,
}

type Answer<T> = Result<T, i32>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: &io::Error) -> i32 {
    match (error.raw_os_error(), error.kind()) {
        (Some(code), _) => code,
        (None, io::ErrorKind::NotFound) => libc::ENOENT,
        (None, io::ErrorKind::AlreadyExists) => libc::EEXIST,
        (None, _) => libc::EIO,
    }
}

/// A result of the disk as a result for the kernel.
fn told<T>(result: io::Result<T>) -> Answer<T> {
    result.map_err(|error| errno(&error))
}

impl FaultyFs {
    pub fn new(platter: Arc<Mutex<Platter>>) -> FaultyFs {
        let disk = Mount::new(Arc::clone(&platter), 1);
        FaultyFs {
            platter,
            power: Mutex::new(Power { disk, life: 0, is_frozen: false }),
            changed: Condvar::new(),
            nodes: Mutex::new(Nodes::new()),
            files: Mutex::default(),
            directories: Mutex::default(),
            next_handle: AtomicU64::new(1),
            delay_ms: AtomicU64::new(0),
            read_delay_ms: AtomicU64::new(0),
            aimed: Aimed::default(),
        }
    }

    /// The next call of this kind fails: of any file, or of one with `part` in its path.
    pub fn order(&self, failure: Ordered, part: &str) {
        if part.is_empty() {
            self.platter().ordered.push_back(failure);
        } else {
            self.aimed.add(failure, part);
        }
    }

    /// Carries out a call, with the failure of one of these kinds if one was ordered for this file.
    fn aimed<T>(&self, nodeid: u64, kinds: &[Ordered], call: impl FnOnce() -> T) -> T {
        self.aimed.meet(&self.platter, || self.path(nodeid).ok(), kinds, call)
    }

    pub fn platter(&self) -> MutexGuard<'_, Platter> {
        lock(&self.platter)
    }

    /// Calls wait from now on, or go on.
    pub fn freeze(&self, is_frozen: bool) {
        lock(&self.power).is_frozen = is_frozen;
        self.changed.notify_all();
    }

    /// The power goes, and comes back: what waits fails, and so does every file that is open.
    /// Nothing needs to be mounted again: names and attributes are not cached by the kernel, and
    /// neither are contents (DIRECT_IO).
    pub fn cut_power(&self) {
        let mut power = lock(&self.power);
        self.platter().cut_power();
        power.disk = Mount::new(Arc::clone(&self.platter), 1);
        power.life += 1;
        power.is_frozen = false;
        lock(&self.files).clear();
        lock(&self.directories).clear();
        self.changed.notify_all();
    }

    /// The disk as of now, once it is not frozen. A call that a power cut found waiting fails.
    fn disk(&self) -> Answer<Mount> {
        let power = lock(&self.power);
        let life = power.life;
        let power = self.changed.wait_while(power, |power| power.is_frozen && power.life == life);
        let power = power.unwrap_or_else(PoisonError::into_inner);
        if power.life == life { Ok(power.disk.clone()) } else { Err(libc::EIO) }
    }

    fn path(&self, id: u64) -> Answer<PathBuf> {
        lock(&self.nodes).path(id).map(PathBuf::from).ok_or(libc::ESTALE)
    }

    fn below(&self, parent: u64, name: &OsStr) -> Answer<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    /// An open file, once the disk is not frozen.
    fn file(&self, fh: u64) -> Answer<Arc<dyn SimulatedFile>> {
        self.disk()?;
        lock(&self.files).get(&fh).map(|open| Arc::clone(&open.file)).ok_or(libc::EIO)
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn keep(&self, nodeid: u64, file: Arc<dyn SimulatedFile>) -> Opened {
        let fh = self.handle();
        lock(&self.files).insert(fh, OpenFile { nodeid, file });
        Opened { fh, flags: DIRECT_IO | PARALLEL_DIRECT_WRITES }
    }

    fn attributes(disk: &Mount, id: u64, path: &Path) -> Answer<Attr> {
        let is_directory = told(disk.is_directory(path))?;
        let status = told(disk.status(path))?;
        let (mode, nlink) =
            if is_directory { (libc::S_IFDIR | 0o755, 2) } else { (libc::S_IFREG | 0o600, 1) };
        let (size, blocks) = (status.length, status.allocated / 512);
        Ok(Attr { ino: id, size, blocks, mode, nlink, blksize: 4096, ..Attr::default() })
    }

    /// Attributes of a file that has no name any more but is open.
    fn attributes_of_unlinked(&self, id: u64) -> Answer<Attr> {
        let files = lock(&self.files);
        let open = files.values().find(|open| open.nodeid == id).ok_or(libc::ESTALE)?;
        let status = told(open.file.status())?;
        let (size, blocks, mode) = (status.length, status.allocated / 512, libc::S_IFREG | 0o600);
        Ok(Attr { ino: id, size, blocks, mode, blksize: 4096, ..Attr::default() })
    }

    fn attributes_of(&self, id: u64) -> Answer<Attr> {
        let disk = self.disk()?;
        match self.path(id) {
            Ok(path) => FaultyFs::attributes(&disk, id, &path),
            Err(_) => self.attributes_of_unlinked(id),
        }
    }

    fn entry(&self, disk: &Mount, path: PathBuf) -> Answer<Entry> {
        let attr = FaultyFs::attributes(disk, 0, &path)?;
        let nodeid = lock(&self.nodes).id(path);
        let attr = Attr { ino: nodeid, ..attr };
        // Nothing is remembered: after a power cut the kernel must not know more than the disk.
        Ok(Entry { nodeid, attr, ..Entry::default() })
    }

    #[allow(clippy::disallowed_methods)] // A slow disk is slow in real time, on a thread of its own.
    fn dawdle(&self, delay_ms: &AtomicU64) {
        let delay = delay_ms.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_millis(delay));
        }
    }

    fn look_up(&self, parent: u64, name: &OsStr) -> Answer<Entry> {
        let disk = self.disk()?;
        self.entry(&disk, self.below(parent, name)?)
    }

    fn set(&self, id: u64, set: &SetAttr) -> Answer<Attr> {
        let disk = self.disk()?;
        if let Some(size) = set.size {
            let file = match set.fh {
                Some(fh) => self.file(fh)?,
                None => told(disk.open(&self.path(id)?, How::Existing))?,
            };
            self.aimed(id, &[Ordered::FailWrite], || told(file.truncate(size)))?;
        }
        self.attributes_of(id)
    }

    fn opened(&self, id: u64, flags: u32) -> Answer<Opened> {
        let disk = self.disk()?;
        let is_emptied = flags & libc::O_TRUNC as u32 != 0;
        let how = if is_emptied { How::Empty } else { How::Existing };
        Ok(self.keep(id, told(disk.open(&self.path(id)?, how))?))
    }

    fn created(&self, create: &Create<'_>, parent: u64) -> Answer<(Entry, Opened)> {
        let disk = self.disk()?;
        let path = self.below(parent, create.name)?;
        let has = |flag: i32| create.flags & flag as u32 != 0;
        let file = match told(disk.open(&path, How::New)) {
            Err(libc::EEXIST) if !has(libc::O_EXCL) => {
                let how = if has(libc::O_TRUNC) { How::Empty } else { How::Existing };
                told(disk.open(&path, how))?
            }
            opened => opened?,
        };
        let entry = self.entry(&disk, path)?;
        let opened = self.keep(entry.nodeid, file);
        Ok((entry, opened))
    }

    fn make_directory(&self, parent: u64, name: &OsStr) -> Answer<Entry> {
        let disk = self.disk()?;
        let path = self.below(parent, name)?;
        if disk.status(&path).is_ok() {
            return Err(libc::EEXIST);
        }
        told(disk.create_directory(&path))?;
        self.entry(&disk, path)
    }

    fn remove(&self, parent: u64, name: &OsStr, is_directory: bool) -> Answer<()> {
        let disk = self.disk()?;
        let path = self.below(parent, name)?;
        if is_directory {
            if !told(disk.list(&path))?.is_empty() {
                return Err(libc::ENOTEMPTY);
            }
            told(disk.remove_tree(&path))?;
        } else {
            told(disk.remove(&path))?;
        }
        lock(&self.nodes).removed(&path);
        Ok(())
    }

    fn moved(&self, parent: u64, rename: &Rename<'_>) -> Answer<()> {
        if rename.flags != 0 {
            return Err(libc::EINVAL);
        }
        let disk = self.disk()?;
        let source = self.below(parent, rename.name)?;
        let target = self.below(rename.new_parent, rename.new_name)?;
        told(disk.rename(&source, &target))?;
        lock(&self.nodes).renamed(&source, &target);
        Ok(())
    }

    fn bytes(&self, id: u64, read: &Read) -> Answer<Vec<u8>> {
        let mut buffer = vec![0; read.size as usize];
        let file = self.file(read.fh)?;
        let read_at = || told(file.read_at(&mut buffer, read.offset));
        let count = self.aimed(id, &[Ordered::FailRead], read_at)?;
        buffer.truncate(count);
        Ok(buffer)
    }

    fn written(&self, id: u64, write: &Write<'_>) -> Answer<()> {
        let file = self.file(write.fh)?;
        let kinds = [Ordered::FailWrite, Ordered::LoseWrite, Ordered::MisdirectWrite];
        self.aimed(id, &kinds, || told(file.write_at(write.data, write.offset)))
    }

    /// FUSE passes no posix_fadvise on: what was not written is forgotten at once, as when memory is short.
    fn synced(&self, id: u64, fsync: &Fsync) -> Answer<()> {
        let file = self.file(fsync.fh)?;
        let sync = || told(file.sync().inspect_err(|_| file.release()));
        self.aimed(id, &[Ordered::FailSync], sync)
    }

    fn punched(&self, id: u64, fallocate: &Fallocate) -> Answer<()> {
        let punch = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
        if fallocate.mode != punch {
            return Err(libc::EOPNOTSUPP);
        }
        let file = self.file(fallocate.fh)?;
        let punch = || told(file.punch(fallocate.offset, fallocate.length));
        self.aimed(id, &[Ordered::FailWrite], punch)
    }

    fn sync_directory(&self, id: u64) -> Answer<()> {
        let (disk, path) = (self.disk()?, self.path(id)?);
        self.aimed(id, &[Ordered::FailSync], || told(disk.sync_directory(&path)))
    }

    /// What is listed is what was there at opendir: who lists may remove meanwhile.
    fn open_directory(&self, id: u64) -> Answer<Opened> {
        let disk = self.disk()?;
        let names = told(disk.list(&self.path(id)?))?;
        let fh = self.handle();
        lock(&self.directories).insert(fh, names);
        Ok(Opened { fh, flags: 0 })
    }

    fn add_names(&self, id: u64, read: &Read, reply: &mut ReplyDirectory) -> Answer<()> {
        let (disk, path) = (self.disk()?, self.path(id)?);
        let directories = lock(&self.directories);
        let names = directories.get(&read.fh).ok_or(libc::EIO)?;
        let dots = [".", ".."].map(str::to_owned);
        let skipped = usize::try_from(read.offset).unwrap_or(usize::MAX);
        for (place, name) in (0u64..).zip(dots.iter().chain(names)).skip(skipped) {
            let is_directory = place < 2 || disk.is_directory(&path.join(name)).unwrap_or(false);
            let mode = if is_directory { libc::S_IFDIR } else { libc::S_IFREG };
            if !reply.add(place + 1, place + 1, mode, OsStr::new(name)) {
                break;
            }
        }
        Ok(())
    }

    fn space(&self, id: u64) -> Answer<Statfs> {
        let disk = self.disk()?;
        let space = told(disk.space(&self.path(id)?))?;
        Ok(Statfs {
            blocks: space.total / BLOCK_BYTES,
            blocks_free: space.free / BLOCK_BYTES,
            blocks_available: space.free / BLOCK_BYTES,
            files: 1 << 32,
            files_free: 1 << 32,
            block_bytes: BLOCK_BYTES as u32,
            name_bytes_max: 255,
            fragment_bytes: BLOCK_BYTES as u32,
        })
    }
}

/// Answers with `answer`, or with the errno.
macro_rules! answer {
    ($reply:expr, $result:expr, $answer:expr) => {
        match $result {
            Ok(value) => {
                #[allow(clippy::redundant_closure_call)] // The reply is moved in one arm only.
                let _ = ($answer)($reply, value);
            }
            Err(code) => $reply.error(code),
        }
    };
}

impl Filesystem for FaultyFs {
    fn init(&self, _kernel: &KernelInfo, config: &mut Config) -> Result<(), i32> {
        config.readdirplus = Readdirplus::Off;
        Ok(())
    }

    fn lookup(&self, request: &Request, name: &OsStr, reply: ReplyEntry) {
        let entry = self.look_up(request.nodeid, name);
        answer!(reply, entry, |reply: ReplyEntry, entry| reply.entry(&entry));
    }

    fn forget(&self, _forget: Forget) {}

    fn getattr(&self, request: &Request, _fh: Option<u64>, reply: ReplyAttr) {
        let attr = self.attributes_of(request.nodeid);
        answer!(reply, attr, |reply: ReplyAttr, attr| reply.attr(&attr, Duration::ZERO));
    }

    fn setattr(&self, request: &Request, set: &SetAttr, reply: ReplyAttr) {
        self.dawdle(&self.delay_ms);
        let attr = self.set(request.nodeid, set);
        answer!(reply, attr, |reply: ReplyAttr, attr| reply.attr(&attr, Duration::ZERO));
    }

    fn mkdir(&self, request: &Request, directory: &Mkdir<'_>, reply: ReplyEntry) {
        let made = self.make_directory(request.nodeid, directory.name);
        answer!(reply, made, |reply: ReplyEntry, entry| reply.entry(&entry));
    }

    fn unlink(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.remove(request.nodeid, name, false);
        answer!(reply, removed, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn rmdir(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.remove(request.nodeid, name, true);
        answer!(reply, removed, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn rename(&self, request: &Request, rename: &Rename<'_>, reply: ReplyEmpty) {
        let moved = self.moved(request.nodeid, rename);
        answer!(reply, moved, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn open(&self, request: &Request, open: &Open, reply: ReplyOpen) {
        let opened = self.opened(request.nodeid, open.flags);
        answer!(reply, opened, |reply: ReplyOpen, opened| reply.opened(opened));
    }

    fn create(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        let created = self.created(create, request.nodeid);
        answer!(reply, created, |reply: ReplyCreate, (entry, opened)| reply
            .created(&entry, opened));
    }

    fn read(&self, request: &Request, read: &Read, reply: ReplyData) {
        self.dawdle(&self.read_delay_ms);
        let bytes = self.bytes(request.nodeid, read);
        answer!(reply, bytes, |reply: ReplyData, bytes: Vec<u8>| reply.data(&bytes));
    }

    fn write(&self, request: &Request, write: &Write<'_>, reply: ReplyWrite) {
        self.dawdle(&self.delay_ms);
        let written = self.written(request.nodeid, write);
        let size = u32::try_from(write.data.len()).unwrap_or(0);
        answer!(reply, written, |reply: ReplyWrite, ()| reply.written(size));
    }

    fn fallocate(&self, request: &Request, fallocate: &Fallocate, reply: ReplyEmpty) {
        self.dawdle(&self.delay_ms);
        let done = self.punched(request.nodeid, fallocate);
        answer!(reply, done, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn flush(&self, _request: &Request, _flush: &Flush, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, request: &Request, fsync: &Fsync, reply: ReplyEmpty) {
        self.dawdle(&self.delay_ms);
        let synced = self.synced(request.nodeid, fsync);
        answer!(reply, synced, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn fsyncdir(&self, request: &Request, _fsync: &Fsync, reply: ReplyEmpty) {
        self.dawdle(&self.delay_ms);
        let synced = self.sync_directory(request.nodeid);
        answer!(reply, synced, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn release(&self, _request: &Request, release: &Release, reply: ReplyEmpty) {
        lock(&self.files).remove(&release.fh);
        reply.ok();
    }

    fn opendir(&self, request: &Request, _open: &Open, reply: ReplyOpen) {
        let opened = self.open_directory(request.nodeid);
        answer!(reply, opened, |reply: ReplyOpen, opened| reply.opened(opened));
    }

    fn readdir(&self, request: &Request, read: &Read, mut reply: ReplyDirectory) {
        match self.add_names(request.nodeid, read, &mut reply) {
            Ok(()) => drop(reply.ok()),
            Err(code) => reply.error(code),
        }
    }

    fn releasedir(&self, _request: &Request, release: &Release, reply: ReplyEmpty) {
        lock(&self.directories).remove(&release.fh);
        reply.ok();
    }

    fn statfs(&self, request: &Request, reply: ReplyStatfs) {
        let space = self.space(request.nodeid);
        answer!(reply, space, |reply: ReplyStatfs, shown| reply.statfs(&shown));
    }
}
