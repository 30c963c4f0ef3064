//! Opening a partition: what the disk holds after whatever happened.
//!
//! Below the floor (bytes that a completed flush had covered) a block that does not verify is
//! damage: it stays part of the extent, is reported, and is repaired from a peer. Above it, the
//! longest prefix of verifying blocks counts, whatever lies behind. Nothing is cut here: that happens before
//! the next append, or by [`super::ExtentStore::seal`].
//!
//! All is read from the medium: a process that begins again after a flush has failed would find in the page
//! cache what never got there, and the next flush would call it durable.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock};

use milpa_host::disk::is_shortage;
use milpa_types::{BLOCK_BYTES, EXTENT_BYTES_MAX, ExtentId, PartitionId};
use milpa_wire::frame::crc32c;

use super::disk::StoreDisk;
use super::extent::{Entries, Extent, ExtentParts, State};
use super::files::StoreFile;
use super::format::{
    BLOCK, HEADER_BYTES, HEADER_OFFSET, HEADER_STRIDE, Header, Mark, Place, SLOT_BYTES, Slot, Sum,
    slot_offset, u32_at, u64_at,
};
use super::freed_log::{FreedLog, Unlogged};
use super::ranges::Ranges;
use super::{ExtentStore, OpenError, extent_path, free, lock, seal, write_lock};

const LABEL: &str = "label";
const LABEL_NEW: &str = "label.new";
pub(super) const LABEL_BYTES: usize = 32;
const LABEL_MAGIC: [u8; 8] = *b"MLPSTOR2";
/// Of partitions whose checksum slots have no marks: who reads only those would take a marked block for whole.
const LABEL_MAGIC_1: [u8; 8] = *b"MLPSTOR1";
/// Blocks read at once while a prefix is looked for: 256 KiB.
const STRIDE: u64 = 64;
/// How often an extent is read before its file counts as unreadable.
const READS_MAX: u32 = 4;

/// What [`ExtentStore::open`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Every extent, in order of ids.
    pub extents: Vec<ExtentRecovery>,
    /// Files without a readable header. They are kept for inspection and not served; their ids count as
    /// used. Free them as a whole once a peer has replaced them.
    pub unreadable: Vec<ExtentId>,
    /// Extents that were created but never flushed, and came back without a header: removed.
    pub vanished: Vec<ExtentId>,
    /// Records of the freed log that did not verify: torn at a crash, or rotten.
    pub damaged_records: u64,
}

impl RecoveryReport {
    /// Blocks that are part of an extent and not whole.
    pub fn damaged_blocks(&self) -> impl Iterator<Item = (ExtentId, u64)> {
        let of_one = |found: &ExtentRecovery| {
            let id = found.extent;
            found.damaged.clone().into_iter().map(move |block| (id, block))
        };
        self.extents.iter().flat_map(of_one)
    }
}

/// What was found of one extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentRecovery {
    /// Which.
    pub extent: ExtentId,
    /// The longest valid prefix in bytes; never below `flushed`.
    pub length: u64,
    /// Bytes that were certainly on disk before.
    pub flushed: u64,
    /// The commit offset as far as it was written down. If above `length`, committed but unflushed bytes
    /// are missing: fetch them from a peer.
    pub committed: u64,
    /// The length at which it was sealed. If above `length`, as for `committed`.
    pub sealed_at: Option<u64>,
    /// Whether it was overwritten in place: overwrites since the last flush must be repeated.
    pub overwritten: bool,
    /// Blocks among the flushed ones that were looked at and do not verify: repair them. Only the last one is looked at
    /// here; reads and scrubs verify the others.
    pub damaged: Vec<u64>,
}

pub(super) fn open(
    disk: &Arc<StoreDisk>,
    directory: &Path,
    partition: PartitionId,
) -> Result<(ExtentStore, RecoveryReport), OpenError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| OpenError::Io { action, path, source }
    };
    let files = disk.files();
    files.create_directory(directory).map_err(failed("create", directory))?;
    let names = files.list(directory).map_err(failed("list", directory))?;
    check_label(disk, directory, partition, &names)?;
    // Names that a crashed process created may not be on the disk yet.
    files.sync_directory(directory).map_err(failed("flush", directory))?;
    let loaded = FreedLog::load(files, directory, partition)
        .map_err(failed("read the freed log of", directory))?;

    let mut report =
        RecoveryReport { damaged_records: loaded.damaged_records, ..RecoveryReport::default() };
    let mut store = ExtentStore {
        partition,
        directory: directory.to_owned(),
        disk: Arc::clone(disk),
        number: disk.number_store(),
        is_closed: AtomicBool::new(false),
        extents: RwLock::new(BTreeMap::new()),
        freed: Mutex::new(loaded.log),
        unlogged: Unlogged::default(),
        entries: Entries::default(),
        unreadable: Vec::new(),
    };
    for id in names.iter().filter_map(|name| extent_of(name)) {
        let path = extent_path(directory, id);
        if lock(&store.freed).is_removed(id) {
            files.remove(&path).map_err(failed("remove", &path))?;
            continue;
        }
        match recover_patiently(&store, id) {
            Ok(Found::Extent(found)) => report.extents.push(found),
            Ok(Found::NeverFlushed) => {
                files.remove(&path).map_err(failed("remove", &path))?;
                report.vanished.push(id);
            }
            Ok(Found::Unreadable) => report.unreadable.push(id),
            // That is the process's trouble, and not the file's.
            Err(error) if is_shortage(&error) => return Err(failed("open", &path)(error)),
            Err(error) => {
                tracing::warn!(extent = id.0, %error, "extent cannot be read");
                report.unreadable.push(id);
            }
        }
    }
    store.unreadable.clone_from(&report.unreadable);
    if let Err(error) = free::after_recovery(&store) {
        // It is tried again with the next start; a failed disk is told by the next write.
        tracing::warn!(%partition, %error, "dead extents could not be removed");
    }
    report.extents.retain(|found| store.present(found.extent).is_some());
    Ok((store, report))
}

/// The extent whose file has this name.
fn extent_of(name: &str) -> Option<ExtentId> {
    let digits = name.strip_suffix(".extent").filter(|digits| digits.len() == 16)?;
    let id = u64::from_str_radix(digits, 16).ok()?;
    // Only the spelling that we write: one id, one file.
    (format!("{id:016x}") == digits).then_some(ExtentId(id))
}

/// Refuses a directory of another partition; labels an empty one, and one whose label is damaged.
fn check_label(
    disk: &StoreDisk,
    directory: &Path,
    partition: PartitionId,
    names: &[String],
) -> Result<(), OpenError> {
    let path = directory.join(LABEL);
    let failed = |source| OpenError::Io { action: "read or write", path: path.clone(), source };
    let bad = |reason| OpenError::BadLabel { path: directory.to_owned(), reason };
    if !names.iter().any(|name| name == LABEL) {
        if names.iter().any(|name| extent_of(name).is_some()) {
            return Err(bad("it has extents but no label"));
        }
        return write_label(disk, directory, partition).map_err(failed);
    }
    let mut bytes = [0; LABEL_BYTES];
    let file = disk.files().open_from_medium(&path).map_err(failed)?;
    file.read_at(&mut bytes, 0).map_err(failed)?;
    let found = match decode_label(&bytes) {
        Ok(found) => found,
        Err(BadLabel::Version) => return Err(bad("it is of another version")),
        // Whoever asks knows whose directory this is, and each extent's header says so too: what
        // one rotten bit took can be written again.
        Err(BadLabel::Damaged) => {
            tracing::warn!(%partition, "the label of a partition was damaged; it is written anew");
            return write_label(disk, directory, partition).map_err(failed);
        }
    };
    if found != partition {
        let path = directory.to_owned();
        return Err(OpenError::WrongPartition { path, found, expected: partition });
    }
    if bytes[..8] == LABEL_MAGIC_1 {
        return write_label(disk, directory, partition).map_err(failed);
    }
    Ok(())
}

/// What is wrong with a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadLabel {
    /// Its checksum does not match: in all versions it covers the first 16 bytes.
    Damaged,
    /// Somebody else wrote it.
    Version,
}

/// Whose directory a label says it is in, or what is wrong with it.
pub(super) fn decode_label(bytes: &[u8; LABEL_BYTES]) -> Result<PartitionId, BadLabel> {
    if u32_at(bytes, 16) != crc32c(&bytes[..16]) {
        return Err(BadLabel::Damaged);
    }
    if bytes[..8] != LABEL_MAGIC && bytes[..8] != LABEL_MAGIC_1 {
        return Err(BadLabel::Version);
    }
    Ok(PartitionId(u64_at(bytes, 8)))
}

pub(super) fn encode_label(partition: PartitionId) -> [u8; LABEL_BYTES] {
    let mut bytes = [0; LABEL_BYTES];
    bytes[..8].copy_from_slice(&LABEL_MAGIC);
    bytes[8..16].copy_from_slice(&partition.0.to_le_bytes());
    let crc = crc32c(&bytes[..16]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn write_label(disk: &StoreDisk, directory: &Path, partition: PartitionId) -> io::Result<()> {
    let (files, path_new) = (disk.files(), directory.join(LABEL_NEW));
    match files.remove(&path_new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = files.create(&path_new)?;
    file.write_at(&encode_label(partition), 0)?;
    file.sync()?;
    files.rename(&path_new, &directory.join(LABEL))?;
    files.sync_directory(directory)
}

enum Found {
    Extent(ExtentRecovery),
    NeverFlushed,
    Unreadable,
}

/// A disk that failed to read once is asked again.
fn read_patiently(file: &dyn StoreFile, bytes: &mut [u8], at: u64) -> io::Result<()> {
    let mut read = file.read_at(bytes, at);
    for _ in 1..READS_MAX {
        if !read.as_ref().is_err_and(|error| !is_shortage(error)) {
            break;
        }
        read = file.read_at(bytes, at);
    }
    read
}

/// The same of all that is read of an extent.
fn recover_patiently(store: &ExtentStore, id: ExtentId) -> io::Result<Found> {
    let mut found = recover_extent(store, id);
    for _ in 1..READS_MAX {
        if found.is_ok() {
            break;
        }
        found = recover_extent(store, id);
    }
    found
}

fn recover_extent(store: &ExtentStore, id: ExtentId) -> io::Result<Found> {
    let file = store.disk.files().open_from_medium(&extent_path(&store.directory, id))?;
    // One by one: of two copies the power may have gone while one was written, and the disk then cannot read that.
    let read = [0, 1].map(|slot: u32| {
        let mut bytes = [0; HEADER_BYTES];
        let read =
            read_patiently(&*file, &mut bytes, HEADER_OFFSET + u64::from(slot) * HEADER_STRIDE);
        read.map(|()| (bytes, Header::decode(&bytes, slot, store.partition, id)))
    });
    let headers = [0, 1].map(|slot: usize| read.get(slot)?.as_ref().ok()?.1);
    let is_blank = read.iter().flatten().all(|(bytes, _)| bytes.iter().all(|byte| *byte == 0));
    let has_none = headers.iter().all(Option::is_none);
    let failed = read.into_iter().find_map(Result::err);
    if let Some(error) = failed.filter(|error| has_none || is_shortage(error)) {
        return Err(error);
    }
    let newest = (0..).zip(headers).filter_map(|(slot, header)| Some((slot, header?)));
    let Some((slot, header)) = newest.max_by_key(|(_, header)| header.sequence) else {
        // A flushed extent has a header. Zeros: it was never flushed. Anything else: damage.
        return Ok(if is_blank { Found::NeverFlushed } else { Found::Unreadable });
    };
    if !header.sealed {
        // An earlier life may have died before it flushed what it wrote. That it could not be written is told once,
        // and here: whoever opens the file later would hear that all is well.
        file.sync().inspect_err(|error| drop(store.disk.sync_failed(error)))?;
        file.release(0, 0);
    }
    let dead = lock(&store.freed).absent(id).cloned().unwrap_or_default();
    let scan = Scan { file: &*file, place: Place::new(store.partition, id), header, headers, dead };
    let found = scan.run()?;
    let dead = lock(&store.freed).take_absent(id);
    let is_short = header.sealed && found.length < header.length;
    let state = State {
        length: found.length,
        tail: found.tail,
        flushed: header.floor.min(found.length),
        // The header may be in the system's memory only.
        floor: 0,
        committed: header.committed.min(found.length),
        // One that lacks bytes below its seal waits for them like any other: were it taken for
        // whole, the death of what is left would look like the death of the extent.
        sealed: header.sealed && !is_short,
        overwritten: header.overwritten,
        dead,
        part_frees: 0,
        torn: BTreeMap::new(),
        writes: 1,
        flushed_writes: u64::from(header.sealed && header.floor == found.length),
        allocated: None,
    };
    let needs_cut = !header.sealed || is_short || header.cut_pending;
    let parts = ExtentParts { header, slot, entry: 0, state, recovered: true, needs_cut };
    let extent = Arc::new(Extent::new(parts));
    write_lock(&store.extents).insert(id, Arc::clone(&extent));
    if header.cut_pending && !is_short {
        // A crash came between the decision to cut and its end. Should it fail now, the length
        // is right all the same, and a later seal tries again.
        if let Err(error) = seal::finish_cut(store, id, &header) {
            tracing::warn!(extent = id.0, %error, "cut could not be completed");
        }
    }
    Ok(Found::Extent(ExtentRecovery {
        extent: id,
        length: found.length,
        flushed: header.floor.min(found.length),
        committed: header.committed,
        sealed_at: header.sealed.then_some(header.length),
        overwritten: header.overwritten,
        damaged: found.damaged,
    }))
}

/// The search for the longest valid prefix.
struct Scan<'a> {
    file: &'a dyn StoreFile,
    place: Place,
    /// The newest header.
    header: Header,
    /// Both, for what they know of a partial block.
    headers: [Option<Header>; 2],
    dead: Ranges,
}

struct Prefix {
    length: u64,
    tail: Sum,
    damaged: Vec<u64>,
}

impl Scan<'_> {
    fn run(&self) -> io::Result<Prefix> {
        let is_bounded = self.header.sealed || self.header.cut_pending;
        let limit = if is_bounded { self.header.length } else { EXTENT_BYTES_MAX };
        let floor = self.header.floor.min(limit);
        let mut prefix = Prefix { length: 0, tail: Sum::default(), damaged: Vec::new() };
        let mut block = floor / BLOCK_BYTES;
        prefix.length = block * BLOCK_BYTES;
        let mut data = vec![0; STRIDE as usize * BLOCK];
        let mut slots = [0; STRIDE as usize * SLOT_BYTES];
        'scan: while block * BLOCK_BYTES < limit {
            self.read_slots(block, &mut slots)?;
            if self.ends_at(block, &slots) {
                break;
            }
            let unreadable = self.read_blocks(block, &mut data)?;
            for (raw, bytes) in slots.as_chunks::<SLOT_BYTES>().0.iter().zip(data.chunks(BLOCK)) {
                let start = block * BLOCK_BYTES;
                let bytes = bytes.get(..(limit - start).min(BLOCK_BYTES) as usize).unwrap_or(bytes);
                let slot = Slot::decode(u64::from_le_bytes(*raw), self.place, block);
                let (valid, sum) = match unreadable.contains(&block) {
                    true => self.known_of(block, slot),
                    false => self.valid_bytes(block, slot, bytes),
                };
                let valid = valid.min(bytes.len());
                (prefix.length, prefix.tail) = (start + valid as u64, sum);
                if valid > 0 && (sum.mark.is_some() || unreadable.contains(&block)) {
                    prefix.damaged.push(block);
                }
                block += 1;
                if valid < BLOCK || prefix.length == limit {
                    break 'scan;
                }
            }
        }
        if prefix.length < floor {
            self.keep_damaged_tail(floor, &mut prefix);
        }
        Ok(prefix)
    }

    /// Reads what is known of blocks: nothing, if the disk cannot read it, as of blocks that were never written.
    fn read_slots(&self, block: u64, slots: &mut [u8]) -> io::Result<()> {
        match read_patiently(self.file, slots, slot_offset(block)) {
            Err(error) if !is_shortage(&error) => {
                tracing::warn!(extent = self.header.extent.0, block, %error,
                    "the checksums of blocks cannot be read");
                slots.fill(0);
                Ok(())
            }
            read => read,
        }
    }

    /// Reads blocks from this one on; gives those that the disk cannot read.
    fn read_blocks(&self, first: u64, data: &mut [u8]) -> io::Result<BTreeSet<u64>> {
        let mut unreadable = BTreeSet::new();
        if self.file.read_at(data, first * BLOCK_BYTES).is_ok() {
            return Ok(unreadable);
        }
        for (block, bytes) in (first..).zip(data.chunks_mut(BLOCK)) {
            let Err(error) = self.file.read_at(bytes, block * BLOCK_BYTES) else { continue };
            if is_shortage(&error) {
                return Err(error);
            }
            tracing::warn!(extent = self.header.extent.0, block, %error, "a block cannot be read");
            unreadable.insert(block);
        }
        Ok(unreadable)
    }

    /// Whether nothing is known of the block at all: the ordinary end, found without reading data.
    fn ends_at(&self, block: u64, slots: &[u8]) -> bool {
        u64_at(slots, 0) == 0
            && !self.headers.iter().flatten().any(|header| tail_in(header, block).is_some())
    }

    /// How many bytes of a block are part of the extent, and what is known of them: the longest candidate that
    /// verifies. A mark is newer than what headers know of the block, and holds without its bytes: a block that was
    /// flushed as a lost one is part of the extent as any other.
    fn valid_bytes(&self, block: u64, slot: Slot, bytes: &[u8]) -> (usize, Sum) {
        let start = block * BLOCK_BYTES;
        let known = |length: u16| {
            let length = usize::from(length).min(bytes.len());
            (length, Sum::whole(crc32c(bytes.get(..length).unwrap_or(bytes))))
        };
        let tail = tail_in(&self.header, block);
        match (slot, tail) {
            // Freed bytes were there and are perhaps punched: their number is all that counts. A
            // dead range alone proves nothing: it may be of bytes that never came here.
            (
                Slot::Live { length, .. } | Slot::Marked { length, .. } | Slot::Freed { length },
                _,
            ) if self.dead.covers(start, start + u64::from(length)) => {
                return known(length);
            }
            // The record of it is lost.
            (Slot::Freed { length }, _) => {
                let (length, sum) = known(length);
                return (length, Sum { mark: Some(Mark::Damaged), ..sum });
            }
            (Slot::Marked { mark: Mark::Damaged, crc, length }, _) => {
                return (length.into(), Sum { crc, mark: Some(Mark::Damaged) });
            }
            // Whole since, if the slot is of other bytes than these.
            (slot, Some(Slot::Marked { mark: Mark::Damaged, crc, length })) => {
                let sum = Sum { crc, mark: Some(Mark::Damaged) };
                return match slot {
                    Slot::Live { crc: new, length: longer }
                        if (new != crc || longer > length)
                            && bytes.get(..longer.into()).map(crc32c) == Some(new) =>
                    {
                        (longer.into(), Sum::whole(new))
                    }
                    _ => (length.into(), sum),
                };
            }
            _ => {}
        }
        let verified = |slot: Slot| match slot {
            Slot::Live { crc, length } | Slot::Marked { crc, length, .. } => {
                let length = usize::from(length);
                (bytes.get(..length).map(crc32c) == Some(crc)).then_some((length, slot.sum()))
            }
            _ => None,
        };
        let is_marked = |slot: &Slot| matches!(slot, Slot::Marked { .. });
        let older: Vec<Slot> = match [Some(slot), tail].iter().flatten().any(is_marked) {
            true => tail.into_iter().collect(),
            false => self.headers.iter().flatten().filter_map(|it| tail_in(it, block)).collect(),
        };
        let candidates = older.into_iter().chain([slot]).filter_map(verified);
        candidates.max_by_key(|(length, _)| *length).unwrap_or_default()
    }

    /// What is known of a block that cannot be read, now or ever: should it be read later, that proves it.
    fn known_of(&self, block: u64, slot: Slot) -> (usize, Sum) {
        let known = [Some(slot), tail_in(&self.header, block)];
        let known = known.into_iter().flatten().filter_map(|slot| match slot {
            Slot::Live { length, .. } | Slot::Marked { length, .. } | Slot::Freed { length } => {
                Some((usize::from(length), slot.sum()))
            }
            Slot::Empty | Slot::Damaged => None,
        });
        known.max_by_key(|(length, _)| *length).unwrap_or_default()
    }

    /// The block at the floor is damaged. Its bytes were flushed, so they stay part of the extent;
    /// the CRC is chosen not to match, so that they are not served. A block that was marked as damaged stays so.
    fn keep_damaged_tail(&self, floor: u64, prefix: &mut Prefix) {
        let block = floor / BLOCK_BYTES;
        let mut bytes = vec![0; (floor % BLOCK_BYTES) as usize];
        let read = self.file.read_at(&mut bytes, block * BLOCK_BYTES);
        let mark = prefix.tail.mark.filter(|mark| *mark == Mark::Damaged);
        prefix.length = floor;
        prefix.tail = match read {
            Ok(()) => Sum { crc: !crc32c(&bytes), mark },
            Err(_) => Sum { crc: 0, mark },
        };
        if prefix.damaged.last() != Some(&block) {
            prefix.damaged.push(block);
        }
    }
}

/// The slot of a block, if it is the last, partial one that the header knows of.
fn tail_in(header: &Header, block: u64) -> Option<Slot> {
    header.tail().filter(|tail| tail.0 == block).map(|tail| tail.1)
}
