//! The packed leaf of a [`Tree`](super::Tree): sorted records, back to back in one allocation.
//!
//! A record is its key's length (two bytes, little-endian), the key and the value. `starts` has
//! the place of each. Both vectors grow by small exact steps: doubling would leave a quarter of
//! all memory unused, and memory is what bounds the number of files.

/// Bytes by which a leaf grows: one copy of the leaf in ten or so inserts.
const GROWTH_BYTES: usize = 512;
/// Places by which `starts` grows.
const GROWTH_RECORDS: usize = 8;

#[derive(Clone, Default)]
pub(super) struct Leaf {
    starts: Vec<u32>,
    bytes: Vec<u8>,
}

impl Leaf {
    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    pub(super) fn size(&self) -> usize {
        self.bytes.len()
    }

    fn start(&self, index: usize) -> usize {
        self.starts.get(index).map_or(self.bytes.len(), |&start| start as usize)
    }

    /// Key and value of the `index`-th record; empty slices past the end.
    pub(super) fn record(&self, index: usize) -> (&[u8], &[u8]) {
        let record = self.bytes.get(self.start(index)..self.start(index + 1)).unwrap_or_default();
        let Some((length, rest)) = record.split_first_chunk::<2>() else {
            return (&[], &[]);
        };
        rest.split_at_checked(usize::from(u16::from_le_bytes(*length))).unwrap_or_default()
    }

    /// Where `key` is, or where it belongs.
    pub(super) fn search(&self, key: &[u8]) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = usize::midpoint(low, high);
            match self.record(middle).0.cmp(key) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Ok(middle),
            }
        }
        Err(low)
    }

    pub(super) fn insert(&mut self, index: usize, key: &[u8], value: &[u8]) {
        debug_assert!(key.len() <= usize::from(u16::MAX), "keys are ids and names");
        let start = self.start(index);
        let length = 2 + key.len() + value.len();
        self.open_gap(start, 0, length);
        let (head, rest) = self.bytes[start..start + length].split_at_mut(2);
        head.copy_from_slice(&(key.len() as u16).to_le_bytes());
        rest[..key.len()].copy_from_slice(key);
        rest[key.len()..].copy_from_slice(value);
        if self.starts.len() == self.starts.capacity() {
            self.starts.reserve_exact(GROWTH_RECORDS);
        }
        self.starts.insert(index, start as u32);
        self.shift(index + 1, 0, length);
    }

    pub(super) fn replace(&mut self, index: usize, value: &[u8]) {
        let old = self.record(index).1.len();
        let end = self.start(index + 1);
        let start = end - old;
        if old != value.len() {
            self.open_gap(start, old, value.len());
            self.shift(index + 1, old, value.len());
        }
        self.bytes[start..start + value.len()].copy_from_slice(value);
    }

    pub(super) fn remove(&mut self, index: usize) {
        let (start, end) = (self.start(index), self.start(index + 1));
        self.bytes.drain(start..end);
        if index < self.starts.len() {
            self.starts.remove(index);
        }
        self.shift(index, end - start, 0);
        if self.bytes.capacity() > self.bytes.len() + 2 * GROWTH_BYTES {
            self.bytes.shrink_to(self.bytes.len() + GROWTH_BYTES);
            self.starts.shrink_to(self.starts.len() + GROWTH_RECORDS);
        }
    }

    /// Cuts off the records from `index` on.
    pub(super) fn split_off(&mut self, index: usize) -> Leaf {
        let start = self.start(index);
        let bytes = self.bytes.split_off(start);
        let starts = self.starts[index..].iter().map(|&at| at - start as u32).collect();
        self.starts.truncate(index);
        self.bytes.shrink_to_fit();
        self.starts.shrink_to_fit();
        Leaf { starts, bytes }
    }

    /// Adds the records of `next`, whose keys are all higher.
    pub(super) fn append(&mut self, next: &Leaf) {
        let base = self.bytes.len() as u32;
        self.bytes.reserve_exact(next.bytes.len());
        self.bytes.extend_from_slice(&next.bytes);
        self.starts.reserve_exact(next.starts.len());
        self.starts.extend(next.starts.iter().map(|&at| at + base));
    }

    /// The record at which to cut an overfull leaf in two. A record just added at the end goes
    /// alone, so that rising keys (inode ids, always) leave full leaves behind.
    pub(super) fn middle(&self, inserted: usize) -> usize {
        if inserted + 1 == self.count() {
            return inserted;
        }
        let half = (self.bytes.len() / 2) as u32;
        self.starts.partition_point(|&start| start < half).clamp(1, self.count() - 1)
    }

    /// Makes the `old` bytes at `start` `new` bytes long.
    fn open_gap(&mut self, start: usize, old: usize, new: usize) {
        let length = self.bytes.len();
        if new > old {
            let more = new - old;
            if self.bytes.capacity() < length + more {
                self.bytes.reserve_exact(more.max(GROWTH_BYTES));
            }
            self.bytes.resize(length + more, 0);
            self.bytes.copy_within(start + old..length, start + new);
        } else {
            self.bytes.drain(start + new..start + old);
        }
    }

    fn shift(&mut self, from: usize, old: usize, new: usize) {
        for start in self.starts.iter_mut().skip(from) {
            *start = (*start as usize + new - old) as u32;
        }
    }
}
