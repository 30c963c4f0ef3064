//! Written bytes that wait in memory, by file offset: the pure part of the write buffer.
//!
//! A [`RangeMap`] holds non-overlapping pieces. A large write is kept as it came, without a copy;
//! small writes that continue each other are gathered into one growing piece, so that a program
//! that writes byte by byte costs bytes and not allocations. The model in the tests is a plain
//! vector.

use std::collections::BTreeMap;

use bytes::Bytes;
use milpa_types::PACKET_BYTES;

/// Writes below this are copied into a growing piece; larger ones are kept as they are.
const GATHER_BYTES_MAX: usize = 32 * 1024;

/// Bytes by file offset.
#[derive(Debug, Default)]
pub(crate) struct RangeMap {
    pieces: BTreeMap<u64, Piece>,
    bytes: u64,
}

#[derive(Debug)]
enum Piece {
    /// As it came.
    Shared(Bytes),
    /// Gathered from small writes; still takes more.
    Growing(Vec<u8>),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Shared(bytes) => bytes.len(),
            Piece::Growing(bytes) => bytes.len(),
        }
    }

    fn freeze(self) -> Bytes {
        match self {
            Piece::Shared(bytes) => bytes,
            Piece::Growing(bytes) => bytes.into(),
        }
    }

    /// A copy of a part; of a shared piece only a reference.
    fn part(&self, from: usize, to: usize) -> Bytes {
        match self {
            Piece::Shared(bytes) => bytes.slice(from..to),
            Piece::Growing(bytes) => Bytes::copy_from_slice(bytes.get(from..to).unwrap_or(&[])),
        }
    }
}

impl RangeMap {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Pieces held: what bounds the memory besides the bytes.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Writes `data` at `offset` over whatever is there. Returns how many held bytes it replaced.
    pub(crate) fn insert(&mut self, offset: u64, data: Bytes) -> u64 {
        if data.len() < GATHER_BYTES_MAX {
            return self.insert_slice(offset, &data);
        }
        let replaced = self.remove(offset, offset + data.len() as u64);
        self.put(offset, Piece::Shared(data));
        replaced
    }

    /// [`insert`](RangeMap::insert) of borrowed bytes, which are copied.
    pub(crate) fn insert_slice(&mut self, offset: u64, data: &[u8]) -> u64 {
        if data.is_empty() {
            return 0;
        }
        if data.len() >= GATHER_BYTES_MAX {
            return self.insert(offset, Bytes::copy_from_slice(data));
        }
        let Some((start, held)) = self.growing_at(offset, data.len()) else {
            let replaced = self.remove(offset, offset + data.len() as u64);
            self.put(offset, Piece::Growing(data.to_vec()));
            return replaced;
        };
        let piece_end = start + held as u64;
        let inside = data.len().min((piece_end - offset) as usize);
        let removed = self.remove(piece_end, offset + data.len() as u64);
        let at = (offset - start) as usize;
        if let Some(Piece::Growing(bytes)) = self.pieces.get_mut(&start) {
            let (over, beyond) = data.split_at(inside);
            if let Some(target) = bytes.get_mut(at..at + inside) {
                target.copy_from_slice(over);
            }
            bytes.extend_from_slice(beyond);
            self.bytes += beyond.len() as u64;
        }
        removed + inside as u64
    }

    /// Writes only where nothing is held: these bytes are older. Returns how many were not needed.
    pub(crate) fn insert_below(&mut self, offset: u64, data: &Bytes) -> u64 {
        let mut used = 0;
        for (start, end) in self.gaps(offset, offset + data.len() as u64) {
            let part = data.slice((start - offset) as usize..(end - offset) as usize);
            used += part.len() as u64;
            self.put(start, Piece::Shared(part));
        }
        data.len() as u64 - used
    }

    /// Forgets the bytes in `[start, end)`. Returns how many there were.
    pub(crate) fn remove(&mut self, start: u64, end: u64) -> u64 {
        let before = self.bytes;
        if start < end {
            drop(self.take(start, end));
        }
        before - self.bytes
    }

    /// Takes the bytes in `[start, end)` out, in order.
    pub(crate) fn take(&mut self, start: u64, end: u64) -> Vec<(u64, Bytes)> {
        let mut taken = Vec::new();
        while let Some((&at, _)) = self.pieces.range(..end).next_back() {
            let Some(piece) = self.pieces.remove(&at) else { break };
            let piece_end = at + piece.len() as u64;
            if piece_end <= start {
                self.pieces.insert(at, piece);
                break;
            }
            self.bytes -= piece.len() as u64;
            let bytes = piece.freeze();
            let (low, high) = (at.max(start), piece_end.min(end));
            if at < low {
                self.put(at, Piece::Shared(bytes.slice(..(low - at) as usize)));
            }
            if high < piece_end {
                self.put(high, Piece::Shared(bytes.slice((high - at) as usize..)));
            }
            taken.push((low, bytes.slice((low - at) as usize..(high - at) as usize)));
        }
        taken.reverse();
        taken
    }

    /// The bytes held in `[start, end)`, in order.
    pub(crate) fn read(&self, start: u64, end: u64) -> Vec<(u64, Bytes)> {
        let mut found = Vec::new();
        if start >= end {
            return found;
        }
        for (&at, piece) in self.pieces.range(..end).rev() {
            let piece_end = at + piece.len() as u64;
            if piece_end <= start {
                break;
            }
            let (low, high) = (at.max(start), piece_end.min(end));
            found.push((low, piece.part((low - at) as usize, (high - at) as usize)));
        }
        found.reverse();
        found
    }

    /// The parts of `[start, end)` that are not held, in order.
    pub(crate) fn gaps(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut high = end;
        for (&at, piece) in self.pieces.range(..end).rev() {
            let piece_end = at + piece.len() as u64;
            if piece_end <= start {
                break;
            }
            if piece_end < high {
                gaps.push((piece_end, high));
            }
            high = at.max(start);
        }
        if start < high {
            gaps.push((start, high));
        }
        gaps.reverse();
        gaps
    }

    /// The longest runs without a gap, in order.
    pub(crate) fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (&at, piece) in &self.pieces {
            let end = at + piece.len() as u64;
            match runs.last_mut() {
                Some(run) if run.1 == at => run.1 = end,
                _ => runs.push((at, end)),
            }
        }
        runs
    }

    fn put(&mut self, at: u64, piece: Piece) {
        debug_assert!(piece.len() > 0, "pieces are never empty");
        self.bytes += piece.len() as u64;
        self.pieces.insert(at, piece);
    }

    /// A growing piece that `length` bytes at `offset` continue or fall into.
    fn growing_at(&self, offset: u64, length: usize) -> Option<(u64, usize)> {
        let (&start, piece) = self.pieces.range(..=offset).next_back()?;
        let Piece::Growing(bytes) = piece else { return None };
        let at = usize::try_from(offset - start).ok()?;
        (at <= bytes.len() && at + length <= PACKET_BYTES).then_some((start, bytes.len()))
    }
}

/// Joins consecutive pieces into packets of at most `packet_bytes`, cut at every gap. A packet that
/// lies within one piece is not copied.
pub(crate) fn packets(pieces: &[(u64, Bytes)], packet_bytes: usize) -> Vec<(u64, Bytes)> {
    let mut packets: Vec<(u64, Bytes)> = Vec::new();
    let mut open: Option<(u64, Vec<Bytes>, usize)> = None;
    for (offset, bytes) in pieces {
        let mut rest = bytes.clone();
        let mut at = *offset;
        while !rest.is_empty() {
            let continues =
                open.as_ref().is_some_and(|(start, _, held)| start + *held as u64 == at);
            if !continues {
                packets.extend(open.take().map(join));
            }
            let (_, parts, held) = open.get_or_insert_with(|| (at, Vec::new(), 0));
            let part = rest.split_to(rest.len().min(packet_bytes - *held));
            at += part.len() as u64;
            *held += part.len();
            parts.push(part);
            if *held == packet_bytes {
                packets.extend(open.take().map(join));
            }
        }
    }
    packets.extend(open.map(join));
    packets
}

fn join((offset, mut parts, held): (u64, Vec<Bytes>, usize)) -> (u64, Bytes) {
    if parts.len() == 1 {
        return (offset, parts.swap_remove(0));
    }
    let mut joined = Vec::with_capacity(held);
    for part in parts {
        joined.extend_from_slice(&part);
    }
    (offset, joined.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: usize = 100_000;

    #[derive(Clone, Debug)]
    enum Step {
        Write(usize, Vec<u8>),
        Below(usize, Vec<u8>),
        Remove(usize, usize),
        Take(usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let length = prop_oneof![1..200usize, 1..40_000usize];
        let data = (length, any::<u8>()).prop_map(|(n, b)| vec![b; n]);
        let place = prop_oneof![0..1000usize, 0..SPAN - 40_000];
        prop_oneof![
            4 => (place.clone(), data.clone()).prop_map(|(at, data)| Step::Write(at, data)),
            1 => (place.clone(), data).prop_map(|(at, data)| Step::Below(at, data)),
            1 => (place.clone(), 0..SPAN).prop_map(|(at, n)| Step::Remove(at, at + n)),
            1 => (place, 0..SPAN).prop_map(|(at, n)| Step::Take(at, at + n)),
        ]
    }

    fn held(model: &[Option<u8>], start: usize, end: usize) -> u64 {
        model.iter().take(end).skip(start).flatten().count() as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_range_map_is_a_vector_of_optional_bytes(steps in prop::collection::vec(step(), 1..40)) {
            let mut model: Vec<Option<u8>> = vec![None; SPAN * 2];
            let mut map = RangeMap::default();
            for step in steps {
                match step {
                    Step::Write(at, data) => {
                        let replaced = held(&model, at, at + data.len());
                        prop_assert_eq!(map.insert(at as u64, data.clone().into()), replaced);
                        for (slot, byte) in model.iter_mut().skip(at).zip(data) { *slot = Some(byte) }
                    }
                    Step::Below(at, data) => {
                        let kept = held(&model, at, at + data.len());
                        prop_assert_eq!(map.insert_below(at as u64, &data.clone().into()), kept);
                        for (slot, byte) in model.iter_mut().skip(at).zip(data) {
                            slot.get_or_insert(byte);
                        }
                    }
                    Step::Remove(start, end) => {
                        let gone = held(&model, start, end);
                        prop_assert_eq!(map.remove(start as u64, end as u64), gone);
                        model.iter_mut().take(end).skip(start).for_each(|slot| *slot = None);
                    }
                    Step::Take(start, end) => {
                        let taken = map.take(start as u64, end as u64);
                        let bytes: usize = taken.iter().map(|(_, b)| b.len()).sum();
                        prop_assert_eq!(bytes as u64, held(&model, start, end));
                        for (at, bytes) in taken {
                            for (i, byte) in bytes.iter().enumerate() {
                                prop_assert_eq!(model[at as usize + i].take(), Some(*byte));
                            }
                        }
                    }
                }
                prop_assert_eq!(map.bytes(), held(&model, 0, SPAN * 2));
            }
            let mut seen = vec![None; SPAN * 2];
            for (at, bytes) in map.read(0, SPAN as u64 * 2) {
                for (i, byte) in bytes.iter().enumerate() { seen[at as usize + i] = Some(*byte) }
            }
            prop_assert!(seen == model, "bytes differ");
            for (start, end) in map.gaps(0, SPAN as u64 * 2) {
                prop_assert_eq!(held(&model, start as usize, end as usize), 0);
            }
            let runs: u64 = map.runs().iter().map(|(s, e)| e - s).sum();
            prop_assert_eq!(runs, map.bytes());
        }

        #[test]
        fn packets_keep_every_byte_in_place(
            lengths in prop::collection::vec((0..3u64, 1..400usize), 1..20),
        ) {
            let (mut at, mut pieces, mut expected) = (0, vec![], BTreeMap::new());
            for (i, (gap, length)) in lengths.into_iter().enumerate() {
                at += gap;
                pieces.push((at, Bytes::from(vec![i as u8; length])));
                for k in 0..length as u64 { expected.insert(at + k, i as u8); }
                at += length as u64;
            }
            let mut found = BTreeMap::new();
            for (at, bytes) in packets(&pieces, 128) {
                prop_assert!((1..=128).contains(&bytes.len()));
                for (i, byte) in bytes.iter().enumerate() { found.insert(at + i as u64, *byte); }
            }
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn byte_by_byte_writing_gathers_into_few_pieces() {
        let mut map = RangeMap::default();
        for i in 0..300_000u64 {
            assert_eq!(map.insert_slice(i, &[i as u8]), 0);
        }
        assert_eq!(map.pieces(), 300_000usize.div_ceil(PACKET_BYTES));
        assert_eq!(map.runs(), [(0, 300_000)]);
    }

    #[test]
    fn a_packet_within_one_write_shares_its_bytes() {
        let write = Bytes::from(vec![7; 1 << 20]);
        let cut = packets(&[(0, write.clone())], PACKET_BYTES);
        assert_eq!(cut.len(), 8);
        assert_eq!(cut[3].1.as_ptr(), write[3 * PACKET_BYTES..].as_ptr());
    }
}
