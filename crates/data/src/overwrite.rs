//! Overwrites in place through the partition's Raft group: what an entry says, and which entries
//! wait to be applied.
//!
//! ```text
//! offset size field
//!      0    1 format, 1
//!      1    4 bytes of the head
//!      5    . head, encoded
//!      .    . bytes of an overwrite, to the end
//! ```
//!
//! Entries carry absolute bytes, so applying one again, in order, changes nothing. The applied
//! index that is written down is always one up to which every touched extent has been flushed.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{BufMut, Bytes, BytesMut};
use milpa_types::ExtentId;
use milpa_wire::data::Configuration;
use serde::{Deserialize, Serialize};

const FORMAT: u8 = 1;
const PREFIX_BYTES: usize = 5;
/// Head of an entry at most: a kilobyte of checksums and some numbers.
pub const HEAD_BYTES_MAX: usize = 4096;

/// What an entry orders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryHead {
    /// Replace bytes of an extent.
    Overwrite {
        /// Which.
        extent: ExtentId,
        /// First byte.
        offset: u64,
        /// One for each 4 KiB from the first byte.
        checksums: Vec<u32>,
    },
    /// A configuration with the same members as before, and another primary. (One with other
    /// members is a Raft membership change.)
    Configure(Configuration),
}

/// Puts an entry together.
#[must_use]
pub fn encode_entry(head: &EntryHead, bytes: &[u8]) -> Bytes {
    let head = milpa_wire::encode(head);
    let mut entry = BytesMut::with_capacity(PREFIX_BYTES + head.len() + bytes.len());
    entry.put_u8(FORMAT);
    entry.put_u32_le(u32::try_from(head.len()).unwrap_or(u32::MAX));
    entry.put_slice(&head);
    entry.put_slice(bytes);
    entry.freeze()
}

/// Takes an entry apart; the bytes stay a slice of it. `None` if it is none of ours.
#[must_use]
pub fn decode_entry(entry: &Bytes) -> Option<(EntryHead, Bytes)> {
    let (prefix, rest) = entry.split_first_chunk::<PREFIX_BYTES>()?;
    let [format, length @ ..] = *prefix;
    let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
    let head = milpa_wire::decode(rest.get(..length)?).ok()?;
    (format == FORMAT).then(|| (head, entry.slice(PREFIX_BYTES + length..)))
}

/// Which committed entries are applied here.
#[derive(Debug)]
pub struct Applying {
    /// Everything up to here is applied.
    applied: u64,
    /// The last entry that came out of the log.
    delivered: u64,
    /// Applied out of order, above `applied`.
    done: BTreeSet<u64>,
    /// Under way, by extent.
    waiting: BTreeMap<ExtentId, u32>,
    /// The last overwrite of each extent that was handed to the disk since the start.
    last: BTreeMap<ExtentId, u64>,
    /// The last overwrite that came out of the log, or that a snapshot stands for.
    overwritten: u64,
    /// Up to here a snapshot has overwritten what it liked, or is about to.
    covered: u64,
    /// Those that the disk could not do: the old bytes are there until another replica gives the new.
    hindered: BTreeMap<u64, ExtentId>,
}

impl Applying {
    /// Goes on after `applied`. No entry up to there that is behind `overwritten` is an overwrite.
    #[must_use]
    pub fn new(applied: u64, overwritten: u64) -> Applying {
        Applying {
            applied,
            delivered: applied,
            done: BTreeSet::new(),
            waiting: BTreeMap::new(),
            last: BTreeMap::new(),
            overwritten,
            covered: 0,
            hindered: BTreeMap::new(),
        }
    }

    /// An entry came out of the log. `extent` is what it overwrites.
    pub fn begin(&mut self, index: u64, extent: Option<ExtentId>) {
        assert!(index > self.delivered, "entries come out once, in order");
        self.delivered = index;
        if let Some(extent) = extent {
            *self.waiting.entry(extent).or_default() += 1;
            self.last.insert(extent, index);
            self.overwritten = self.overwritten.max(index);
        }
    }

    /// The disk could not do an entry.
    pub fn hinder(&mut self, index: u64, extent: ExtentId) {
        self.hindered.insert(index, extent);
    }

    /// Whether the extent has bytes that a committed overwrite has replaced.
    #[must_use]
    pub fn is_hindered(&self, extent: ExtentId) -> bool {
        self.first_hindered(extent).is_some()
    }

    /// The first overwrite of the extent that the disk could not do.
    #[must_use]
    pub fn first_hindered(&self, extent: ExtentId) -> Option<u64> {
        self.hindered.iter().find(|(_, hindered)| **hindered == extent).map(|(index, _)| *index)
    }

    /// Whether an overwrite may be done again, with all that were handed to the disk behind it: not if
    /// a snapshot stands for it.
    #[must_use]
    pub fn may_repeat(&self, index: u64) -> bool {
        index > self.covered
    }

    /// An entry is applied. Returns whether the applied index moved.
    pub fn finish(&mut self, index: u64, extent: Option<ExtentId>) -> bool {
        if let Some(extent) = extent
            && let Some(count) = self.waiting.get_mut(&extent)
        {
            *count -= 1;
            if *count == 0 {
                self.waiting.remove(&extent);
            }
        }
        self.hindered.remove(&index);
        if index > self.applied {
            self.done.insert(index);
        }
        let before = self.applied;
        while self.done.remove(&(self.applied + 1)) {
            self.applied += 1;
        }
        self.applied > before
    }

    /// A snapshot begins to take the place of the entries up to `index`, at any extent. From now on none
    /// of them may land behind it, nor bytes that were fetched without them, even if the snapshot fails.
    pub fn cover(&mut self, index: u64) {
        self.covered = self.covered.max(index);
    }

    /// A snapshot took the place of the entries up to `index`, of which the last overwrite is not behind `overwritten`.
    pub fn jump(&mut self, index: u64, overwritten: u64) {
        self.overwritten = self.overwritten.max(overwritten);
        self.applied = self.applied.max(index);
        self.delivered = self.delivered.max(index);
        self.done = self.done.split_off(&(self.applied + 1));
        self.hindered = self.hindered.split_off(&(self.applied + 1));
    }

    /// The log goes on after `index`: of entries before it that are not known here any may have been an overwrite.
    pub fn resume(&mut self, index: u64) {
        if index > self.applied {
            self.jump(index, index);
        }
    }

    /// Everything up to here is applied (not flushed).
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// The last overwrite, or a later entry.
    #[must_use]
    pub fn overwritten(&self) -> u64 {
        self.overwritten
    }

    /// Everything up to here has come out of the log.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Whether the extent has all that entries up to `index` made of it. One that waits, of another extent,
    /// does not matter.
    #[must_use]
    pub fn has_applied(&self, index: u64, extent: ExtentId) -> bool {
        self.applied >= index || (self.delivered >= index && !self.is_waiting(extent))
    }

    /// Whether committed overwrites of this extent are not on it yet.
    #[must_use]
    pub fn is_waiting(&self, extent: ExtentId) -> bool {
        self.waiting.contains_key(&extent)
    }

    /// The last entry that may have changed this extent here since the start, 0 if none: an overwrite
    /// that was handed to the disk, or one that a snapshot stands for.
    #[must_use]
    pub fn last_of(&self, extent: ExtentId) -> u64 {
        self.last.get(&extent).copied().unwrap_or(0).max(self.covered)
    }

    /// Up to here a snapshot stands for the entries.
    #[must_use]
    pub fn covered(&self) -> u64 {
        self.covered
    }

    /// Forgets which overwrites up to `index` were handed to the disk. Only while nobody fetches
    /// bytes: a fetch compares with them.
    pub fn forget_until(&mut self, index: u64) {
        self.last.retain(|_, last| *last > index);
    }

    /// Extents overwritten after `index`: they are to be flushed.
    #[must_use]
    pub fn touched_after(&self, index: u64) -> Vec<ExtentId> {
        self.last.iter().filter(|(_, last)| **last > index).map(|(extent, _)| *extent).collect()
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::{Epoch, NodeId};

    use super::*;

    #[test]
    fn entries_survive_and_hostile_ones_are_refused() {
        let head =
            EntryHead::Overwrite { extent: ExtentId(7), offset: 4096, checksums: vec![1, 2] };
        let entry = encode_entry(&head, b"bytes");
        assert_eq!(decode_entry(&entry), Some((head, Bytes::from_static(b"bytes"))));
        let members = vec![NodeId(1), NodeId(2)];
        let configuration =
            Configuration { epoch: Epoch(2), members, primary: NodeId(2), learners: Vec::new() };
        let entry = encode_entry(&EntryHead::Configure(configuration.clone()), b"");
        let decoded = decode_entry(&entry);
        assert_eq!(decoded, Some((EntryHead::Configure(configuration), Bytes::new())));
        for bad in [&b""[..], b"\x01", b"\x02\0\0\0\0", b"\x01\xff\xff\xff\xff", b"\x01\x02\0\0\0x"]
        {
            assert_eq!(decode_entry(&Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
    }

    #[test]
    fn the_applied_index_moves_over_a_gap_only_when_it_is_filled() {
        let (a, b) = (ExtentId(1), ExtentId(2));
        let mut applying = Applying::new(10, 0);
        applying.begin(11, Some(a));
        applying.begin(12, Some(b));
        applying.begin(13, None);
        assert!(!applying.finish(12, Some(b)));
        assert!(!applying.finish(13, None));
        assert!(applying.is_waiting(a) && !applying.is_waiting(b));
        assert_eq!(applying.applied(), 10);
        assert!(applying.finish(11, Some(a)));
        assert_eq!(applying.applied(), 13);
        assert_eq!(applying.touched_after(11), vec![b]);
    }

    #[test]
    fn an_extent_is_hindered_until_what_it_lacks_is_there() {
        let (a, b) = (ExtentId(1), ExtentId(2));
        let mut applying = Applying::new(0, 0);
        for index in [1, 2] {
            applying.begin(index, Some(a));
            applying.hinder(index, a);
        }
        applying.finish(1, Some(a));
        assert!(applying.is_hindered(a) && !applying.is_hindered(b));
        applying.finish(2, Some(a));
        assert!(!applying.is_hindered(a));
    }

    /// Story: bytes that were fetched before a snapshot landed behind it, without the overwrites that it
    /// had brought; and an overwrite that the disk could not do was tried again over newer ones of it.
    #[test]
    fn what_is_older_than_a_snapshot_does_not_land_once_it_is_copied() {
        let (a, b) = (ExtentId(1), ExtentId(2));
        let mut applying = Applying::new(10, 0);
        applying.begin(11, Some(a));
        applying.cover(50);
        assert_eq!((applying.last_of(a), applying.last_of(b)), (50, 50));
        // It failed, and an older one comes: what has landed of the first is there.
        applying.cover(40);
        applying.forget_until(50);
        assert_eq!(applying.last_of(b), 50);
        applying.jump(50, 0);
        applying.begin(51, Some(a));
        assert_eq!((applying.last_of(a), applying.last_of(b)), (51, 50));
    }

    #[test]
    fn a_snapshot_takes_the_place_of_entries() {
        let mut applying = Applying::new(0, 0);
        applying.begin(1, None);
        applying.jump(50, 0);
        assert_eq!(applying.applied(), 50);
        assert!(!applying.finish(1, None), "it came too late");
        applying.begin(51, Some(ExtentId(1)));
        assert!(applying.finish(51, Some(ExtentId(1))));
        assert_eq!(applying.applied(), 51);
    }
}
