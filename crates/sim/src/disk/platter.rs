//! The state of one disk: names and files, each volatile and durable, and what it does to them when it misbehaves.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::content::{BLOCK, Content};
use super::effects::Effects;
use super::file::{Change, FileNode, blocks_of};
use super::names::{Entry, NameChange, Names, prune};
use crate::random::Random;

/// How an unsynced change of a directory may get lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameLoss {
    /// The newest ones first, as on a file system with a metadata journal.
    Newest,
    /// Any of them, as POSIX allows.
    Any,
}

/// How a disk misbehaves.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    pub capacity_bytes: u64,
    pub name_loss: NameLoss,
    /// Failed reads, in a million (F9).
    pub read_errors: u32,
    /// Files in which a write that is meant for another one may land: those that have copies elsewhere.
    pub may_be_hit: fn(&Path) -> bool,
}

/// What a disk held at a time, as far as it was durable.
#[derive(Clone, Debug, Default)]
pub struct Image {
    names: Names,
    files: BTreeMap<u64, Content>,
}

impl Image {
    /// A small file of it as text.
    pub fn text(&self, path: &Path) -> Option<String> {
        let Some(Entry::File(number)) = self.names.get(path) else { return None };
        let mut bytes = vec![0; 4096];
        let length = self.files.get(number)?.read(&mut bytes, 0);
        String::from_utf8(bytes.get(..length)?.to_vec()).ok()
    }
}

/// Failures that were ordered for the calls to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ordered {
    /// The next write fails with EIO.
    FailWrite,
    /// The next sync fails with EIO.
    FailSync,
    /// The next change of a name fails with EIO.
    FailName,
    /// The next read fails with EIO (F9).
    FailRead,
    /// The next write is acknowledged and goes nowhere (F4).
    LoseWrite,
    /// The next write lands in another block of its file, or in another file (F6).
    MisdirectWrite,
}

/// A write that was acknowledged and is not where it should be.
#[derive(Clone, Debug)]
struct Lost {
    number: u64,
    bytes: Vec<u8>,
    offset: u64,
}

/// How often something happened to a disk.
#[derive(Clone, Debug, Default)]
pub struct DiskCounts {
    pub reads: u64,
    pub writes: u64,
    pub syncs: u64,
    pub lost_writes: u64,
    pub torn_writes: u64,
    pub lost_names: u64,
    pub flipped_bits: u64,
    pub misdirected: u64,
    pub dropped_syncs: u64,
    pub errors: u64,
    pub unreadable_blocks: u64,
    pub full: u64,
}

impl DiskCounts {
    pub fn by_name(&self) -> [(&'static str, u64); 12] {
        [
            ("reads", self.reads),
            ("writes", self.writes),
            ("syncs", self.syncs),
            ("lost writes", self.lost_writes),
            ("torn writes", self.torn_writes),
            ("lost names", self.lost_names),
            ("flipped bits", self.flipped_bits),
            ("misdirected writes", self.misdirected),
            ("dropped syncs", self.dropped_syncs),
            ("errors", self.errors),
            ("unreadable blocks", self.unreadable_blocks),
            ("refusals for lack of space", self.full),
        ]
    }

    pub fn add(&mut self, other: &DiskCounts) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.syncs += other.syncs;
        self.lost_writes += other.lost_writes;
        self.torn_writes += other.torn_writes;
        self.lost_names += other.lost_names;
        self.flipped_bits += other.flipped_bits;
        self.misdirected += other.misdirected;
        self.dropped_syncs += other.dropped_syncs;
        self.errors += other.errors;
        self.unreadable_blocks += other.unreadable_blocks;
        self.full += other.full;
    }
}

/// One disk.
#[derive(Debug)]
pub struct Platter {
    pub options: DiskOptions,
    pub random: Random,
    /// Raised at each end of a life of the node: handles of older lives are dead.
    pub life: u64,
    /// A write or a sync has failed: the node takes it out of service, and what was not flushed before
    /// is lost. Reset by who looks.
    pub has_failed: bool,
    /// Every change is one.
    pub effects: Arc<Effects>,
    pub ordered: VecDeque<Ordered>,
    /// How many orders of each kind were carried out. Taken by who counts them.
    pub carried_out: BTreeMap<Ordered, u64>,
    /// The last one, while its file was not written since.
    lost: Option<Lost>,
    /// Syncs succeed and make nothing durable.
    pub drops_syncs: bool,
    pub counts: DiskCounts,
    pub(super) names: Names,
    durable_names: Names,
    unsynced_names: Vec<NameChange>,
    pub(super) files: BTreeMap<u64, FileNode>,
    pub(super) locks: BTreeSet<PathBuf>,
    next_file: u64,
    allocated: u64,
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl Platter {
    pub fn new(options: DiskOptions, random: Random) -> Platter {
        let root = Names::from([(PathBuf::from("/"), Entry::Directory)]);
        Platter {
            options,
            random,
            life: 0,
            has_failed: false,
            effects: Arc::default(),
            ordered: VecDeque::new(),
            carried_out: BTreeMap::new(),
            lost: None,
            drops_syncs: false,
            counts: DiskCounts::default(),
            names: root.clone(),
            durable_names: root,
            unsynced_names: Vec::new(),
            files: BTreeMap::new(),
            locks: BTreeSet::new(),
            next_file: 1,
            allocated: 0,
        }
    }

    /// Bytes in use.
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    /// Refuses calls of dead lives, and all when nothing has an effect any more.
    pub(super) fn check(&self, life: u64) -> io::Result<()> {
        if life != self.life || self.effects.are_over() { Err(eio()) } else { Ok(()) }
    }

    /// Every change of the disk passes here first.
    pub(super) fn effect(&mut self, life: u64) -> io::Result<()> {
        self.check(life)?;
        if self.effects.happens() { Ok(()) } else { Err(eio()) }
    }

    /// Whether this was ordered for the next call of its kind.
    fn takes_order(&mut self, kind: Ordered) -> bool {
        let place = self.ordered.iter().position(|ordered| *ordered == kind);
        let is_taken = place.and_then(|place| self.ordered.remove(place)).is_some();
        if is_taken {
            *self.carried_out.entry(kind).or_default() += 1;
        }
        is_taken
    }

    fn ordered(&mut self, kind: Ordered) -> io::Result<()> {
        if self.takes_order(kind) {
            self.counts.errors += 1;
            self.has_failed |= kind != Ordered::FailRead;
            return Err(eio());
        }
        Ok(())
    }

    /// Whether this sync is one that only pretends.
    fn drops_sync(&mut self) -> bool {
        self.counts.dropped_syncs += u64::from(self.drops_syncs);
        self.drops_syncs
    }

    pub(super) fn file(&mut self, number: u64) -> io::Result<&mut FileNode> {
        self.files.get_mut(&number).ok_or_else(eio)
    }

    pub(super) fn create(&mut self, path: &Path) -> io::Result<u64> {
        self.require_parent(path)?;
        let number = self.next_file;
        self.add_name(path, Entry::File(number))?;
        self.next_file += 1;
        self.files.insert(number, FileNode::default());
        Ok(number)
    }

    /// A new file or directory. A full disk has no room for its name either (F8).
    pub(super) fn add_name(&mut self, path: &Path, entry: Entry) -> io::Result<()> {
        if self.allocated + BLOCK > self.options.capacity_bytes {
            return Err(self.is_full());
        }
        self.change_names(NameChange::Set(path.to_owned(), entry))
    }

    fn is_full(&mut self) -> io::Error {
        self.counts.full += 1;
        io::Error::from_raw_os_error(libc::ENOSPC)
    }

    pub(super) fn require_parent(&self, path: &Path) -> io::Result<()> {
        match path.parent().and_then(|parent| self.names.get(parent)) {
            Some(Entry::Directory) => Ok(()),
            Some(Entry::File(_)) => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(super) fn change_names(&mut self, change: NameChange) -> io::Result<()> {
        self.ordered(Ordered::FailName)?;
        change.apply(&mut self.names);
        self.unsynced_names.push(change);
        Ok(())
    }

    pub(super) fn sync_names(&mut self, directory: &Path) -> io::Result<()> {
        self.counts.syncs += 1;
        self.ordered(Ordered::FailSync)?;
        if self.drops_sync() {
            return Ok(());
        }
        let keeps_order = self.options.name_loss == NameLoss::Newest;
        let (synced, unsynced): (Vec<_>, Vec<_>) = std::mem::take(&mut self.unsynced_names)
            .into_iter()
            .partition(|change| keeps_order || change.is_in(directory));
        synced.iter().for_each(|change| change.apply(&mut self.durable_names));
        self.unsynced_names = unsynced;
        self.forget_unnamed();
        Ok(())
    }

    /// Gives back files that no name leads to, now or after a power cut. A handle to such a file
    /// keeps nothing alive: production closes files before it removes them, or does not care.
    fn forget_unnamed(&mut self) {
        let pending = self.unsynced_names.iter().filter_map(|change| match change {
            NameChange::Set(_, entry) => Some(entry),
            _ => None,
        });
        let named: BTreeSet<u64> = self
            .names
            .values()
            .chain(self.durable_names.values())
            .chain(pending)
            .filter_map(|entry| if let Entry::File(number) = entry { Some(*number) } else { None })
            .collect();
        let allocated = &mut self.allocated;
        self.files.retain(|number, file| {
            let is_named = named.contains(number);
            if !is_named {
                *allocated -= file.current.allocated();
            }
            is_named
        });
    }

    pub(super) fn read(&mut self, number: u64, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.counts.reads += 1;
        self.ordered(Ordered::FailRead)?;
        let parts = self.options.read_errors;
        if self.random.per_million(parts) {
            self.counts.errors += 1;
            return Err(eio());
        }
        let file = self.file(number)?;
        if file.unreadable.range(blocks_of(at, buffer.len() as u64)).next().is_some() {
            self.counts.errors += 1;
            return Err(eio());
        }
        Ok(file.current.read(buffer, at))
    }

    pub(super) fn write(&mut self, number: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.counts.writes += 1;
        self.ordered(Ordered::FailWrite)?;
        self.lost.take_if(|lost| lost.number == number);
        let (mut number, mut offset) = (number, offset);
        if self.takes_order(Ordered::LoseWrite) {
            self.counts.lost_writes += 1;
            self.lost = Some(Lost { number, bytes: bytes.to_vec(), offset });
            return Ok(());
        }
        if self.takes_order(Ordered::MisdirectWrite) {
            self.counts.misdirected += 1;
            self.lost = Some(Lost { number, bytes: bytes.to_vec(), offset });
            match self.lands_at(number, offset, bytes.len() as u64) {
                Some(elsewhere) => (number, offset) = elsewhere,
                None => return Ok(()),
            }
        }
        let capacity = self.options.capacity_bytes;
        let file = self.files.get_mut(&number).ok_or_else(eio)?;
        if !file.is_changeable(offset, bytes.len() as u64) {
            self.counts.errors += 1;
            return Err(eio());
        }
        let added = file.current.missing_blocks(offset, bytes.len() as u64) * BLOCK;
        if added > 0 && self.allocated + added > capacity {
            return Err(self.is_full());
        }
        self.allocated += added;
        file.write(bytes, offset);
        Ok(())
    }

    /// Where a write goes that goes astray: over what its file holds in another block, or over what another file
    /// holds. Nowhere, if that holds nothing of that length: bytes in a hole would harm nobody, and be nobody's
    /// to free.
    fn lands_at(&mut self, number: u64, offset: u64, length: u64) -> Option<(u64, u64)> {
        let (own, within) = (offset / BLOCK, offset % BLOCK);
        let is_other = |(path, entry): (&PathBuf, &Entry)| match entry {
            Entry::File(other) if *other != number && (self.options.may_be_hit)(path) => {
                Some(*other)
            }
            _ => None,
        };
        let others: Vec<u64> = self.names.iter().filter_map(is_other).collect();
        let other =
            if self.random.chance(1, 2) { self.random.pick(&others).copied() } else { None };
        let hit = other.unwrap_or(number);
        let content = &self.files.get(&hit)?.current;
        let is_full = |block: u64| content.missing_blocks(block * BLOCK + within, length) == 0;
        let mut blocks = content.block_numbers();
        blocks.retain(|block| (hit != number || *block != own) && is_full(*block));
        self.random.pick(&blocks).map(|block| (hit, block * BLOCK + within))
    }

    pub(super) fn punch(&mut self, number: u64, offset: u64, length: u64) -> io::Result<()> {
        self.reshape(number, Change::Punch(offset, length))
    }

    pub(super) fn truncate(&mut self, number: u64, length: u64) -> io::Result<()> {
        self.reshape(number, Change::Truncate(length))
    }

    fn reshape(&mut self, number: u64, change: Change) -> io::Result<()> {
        self.ordered(Ordered::FailWrite)?;
        let file = self.files.get_mut(&number).ok_or_else(eio)?;
        if matches!(change, Change::Punch(offset, length) if !file.is_changeable(offset, length)) {
            self.counts.errors += 1;
            return Err(eio());
        }
        let before = file.current.allocated();
        file.reshape(change);
        self.allocated = self.allocated + file.current.allocated() - before;
        Ok(())
    }

    pub(super) fn sync(&mut self, number: u64) -> io::Result<()> {
        self.counts.syncs += 1;
        if let Err(error) = self.ordered(Ordered::FailSync) {
            if let Some(file) = self.files.get_mut(&number) {
                file.sync_failed();
            }
            return Err(error);
        }
        if !self.drops_sync() {
            self.file(number)?.sync();
        }
        Ok(())
    }

    /// The system gives back what memory it can: what it has as written is read from the medium again.
    pub(super) fn release(&mut self, number: u64) {
        if let Some(file) = self.files.get_mut(&number) {
            file.release();
        }
        self.count_allocated();
    }

    /// Makes everything durable, as a machine does before it is switched off.
    pub fn sync_everything(&mut self) {
        let changes = std::mem::take(&mut self.unsynced_names);
        changes.iter().for_each(|change| change.apply(&mut self.durable_names));
        self.files.values_mut().for_each(FileNode::sync);
        self.forget_unnamed();
    }

    /// Whether there is a file of this name.
    pub fn has(&self, path: &Path) -> bool {
        self.names.contains_key(path)
    }

    /// A copy of what is durable now.
    pub fn image(&self) -> Image {
        let files = self.files.iter().map(|(number, file)| (*number, file.durable.clone()));
        Image { names: self.durable_names.clone(), files: files.collect() }
    }

    /// The disk is another one, between two lives: with an old copy of what was here (F7), or empty.
    pub fn exchange(&mut self, image: Option<Image>) {
        let Image { names, files } = image.unwrap_or_else(|| Image {
            names: Names::from([(PathBuf::from("/"), Entry::Directory)]),
            files: BTreeMap::new(),
        });
        self.names.clone_from(&names);
        self.durable_names = names;
        self.unsynced_names.clear();
        let whole = |(number, content)| (number, FileNode::durable(content));
        self.files = files.into_iter().map(whole).collect();
        self.count_allocated();
    }

    /// Writes after all what it lost last, if it was the end of a file of this kind.
    pub fn find_lost(&mut self, is_meant: impl Fn(&Path) -> bool) {
        let Some(Lost { number, bytes, offset }) = self.lost.take() else { return };
        let is_it =
            |(path, entry): (&PathBuf, &Entry)| *entry == Entry::File(number) && is_meant(path);
        let is_named = self.names.iter().any(is_it);
        if let Some(file) = self.files.get_mut(&number).filter(|_| is_named) {
            file.current.write(&bytes, offset);
            file.durable.write(&bytes, offset);
        }
        self.count_allocated();
    }

    fn count_allocated(&mut self) {
        self.allocated = self.files.values().map(|file| file.current.allocated()).sum();
    }

    /// The node is gone and its kernel lives: nothing is lost but descriptors and locks.
    pub fn end_life(&mut self) {
        self.life += 1;
        self.effects.go_on();
        // A process reads most when it starts, and makes most names.
        self.ordered.retain(|it| matches!(it, Ordered::FailRead | Ordered::FailName));
        // The log has been read as it is: what is lost now stays so.
        self.lost = None;
        self.locks.clear();
    }

    /// The power is gone: of what was not synced, anything may be lost (F2), torn at a sector (F3).
    pub fn cut_power(&mut self) {
        self.end_life();
        let changes = std::mem::take(&mut self.unsynced_names);
        let kept = self.random.below(changes.len() as u64 + 1) as usize;
        for (place, change) in changes.iter().enumerate() {
            let is_kept = match self.options.name_loss {
                NameLoss::Newest => place < kept,
                NameLoss::Any => self.random.chance(1, 2),
            };
            if is_kept {
                change.apply(&mut self.durable_names);
            } else {
                self.counts.lost_names += 1;
            }
        }
        prune(&mut self.durable_names);
        self.names = self.durable_names.clone();
        let is_content = |(path, entry): (&PathBuf, &Entry)| match entry {
            Entry::File(number) if path.extension().is_some_and(|it| it == "extent") => {
                Some(*number)
            }
            _ => None,
        };
        let content: BTreeSet<u64> = self.names.iter().filter_map(is_content).collect();
        for (number, file) in &mut self.files {
            let torn = file.cut_power(&mut self.random, &mut self.counts);
            if let Some(block) = torn.filter(|_| content.contains(number)) {
                self.counts.unreadable_blocks += 1;
                file.unreadable.insert(block);
            }
        }
        self.forget_unnamed();
        self.count_allocated();
    }

    /// Bit rot (F5): flips a bit of a durable block that is not being written. Gives the path.
    pub fn rot(&mut self, is_victim: impl Fn(&Path) -> bool) -> Option<(PathBuf, u64)> {
        let victims: Vec<(PathBuf, u64)> = self
            .names
            .iter()
            .filter_map(|(path, entry)| match entry {
                Entry::File(number) if is_victim(path) => Some((path.clone(), *number)),
                _ => None,
            })
            .collect();
        let (path, number) = self.random.pick(&victims)?.clone();
        let file = self.files.get_mut(&number)?;
        let blocks = file.durable.block_numbers();
        let block = *self.random.pick(&blocks)?;
        let length = file.durable.length.saturating_sub(block * BLOCK).min(BLOCK);
        let (offset, bit) = (block * BLOCK + self.random.below(length), self.random.below(8));
        for content in [&mut file.durable, &mut file.current] {
            let mut byte = [0];
            if content.read(&mut byte, offset) == 1 {
                content.write(&[byte[0] ^ (1 << bit)], offset);
            }
        }
        self.counts.flipped_bits += 1;
        Some((path, offset))
    }
}
