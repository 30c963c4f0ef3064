//! A file's content map as this client sees it: published segments with its own laid over them.

use std::collections::BTreeMap;

use milpa_types::{Column, Columns, Segment};

use crate::error::FsError;

/// Non-overlapping plain segments by file offset; what they leave out are holes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentMap {
    segments: BTreeMap<u64, Segment>,
}

/// A part of a file range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// First byte within the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Where they lie; `None` for a hole.
    pub column: Option<Column>,
}

impl SegmentMap {
    /// Takes a layout that a server sent.
    ///
    /// # Errors
    ///
    /// [`FsError`] when it is striped, or no layout at all.
    pub(crate) fn from_server(segments: Vec<Segment>) -> Result<SegmentMap, FsError> {
        let mut map = SegmentMap::default();
        let mut end = 0;
        for segment in segments {
            let Columns::One(column) = segment.columns else {
                return Err(FsError::Unsupported("striped files need a newer client"));
            };
            let in_order = segment.offset >= end && segment.length > 0;
            let fits = segment.offset.checked_add(segment.length).is_some()
                && column.offset.checked_add(segment.length).is_some();
            if !in_order || !fits {
                return Err(FsError::Broken("layout is out of order or out of bounds"));
            }
            end = segment.end();
            map.segments.insert(segment.offset, segment);
        }
        Ok(map)
    }

    pub(crate) fn pieces(&self) -> usize {
        self.segments.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// In file order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.segments.values()
    }

    /// Bytes that are no holes.
    pub(crate) fn bytes(&self) -> u64 {
        self.iter().map(|segment| segment.length).sum()
    }

    /// Lays a segment over what is there, and joins it with neighbours that it continues.
    pub(crate) fn overlay(&mut self, segment: Segment) {
        self.cut(segment.offset, segment.end());
        let mut joined = segment;
        let before = self.segments.range(..joined.offset).next_back();
        if let Some((&at, before)) = before
            && before.is_continued_by(&joined)
        {
            joined = Segment { length: before.length + joined.length, ..before.clone() };
            self.segments.remove(&at);
        }
        if let Some(after) = self.segments.get(&joined.end())
            && joined.is_continued_by(after)
        {
            let (at, length) = (after.offset, after.length);
            self.segments.remove(&at);
            joined.length += length;
        }
        self.segments.insert(joined.offset, joined);
    }

    /// Makes a hole of `[start, end)`.
    pub(crate) fn cut(&mut self, start: u64, end: u64) {
        while let Some((&at, _)) = self.segments.range(..end).next_back() {
            let Some(segment) = self.segments.remove(&at) else { break };
            if segment.end() <= start {
                self.segments.insert(at, segment);
                break;
            }
            for kept in [segment.clip(0, start), segment.clip(end, u64::MAX)].into_iter().flatten()
            {
                self.segments.insert(kept.offset, kept);
            }
        }
    }

    /// Splits `[start, end)` into segments and holes, in order.
    pub(crate) fn parts(&self, start: u64, end: u64) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut at = start;
        let first = self.segments.range(..=start).next_back().map_or(start, |(&key, _)| key);
        for segment in self.segments.range(first..end.max(first)).map(|(_, segment)| segment) {
            let Some(clipped) = segment.clip(at, end) else { continue };
            let Columns::One(column) = clipped.columns else { continue };
            if at < clipped.offset {
                parts.push(Part { offset: at, length: clipped.offset - at, column: None });
            }
            at = clipped.end();
            let (offset, length) = (clipped.offset, clipped.length);
            parts.push(Part { offset, length, column: Some(column) });
        }
        if at < end {
            parts.push(Part { offset: at, length: end - at, column: None });
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use milpa_types::{ExtentId, PartitionId};
    use proptest::prelude::*;

    use super::*;

    fn column(extent: u64, offset: u64) -> Column {
        Column { partition: PartitionId(1), extent: ExtentId(extent), offset }
    }

    /// Each byte of the model says where it lies: extent and offset.
    type Model = Vec<Option<(u64, u64)>>;

    fn seen(map: &SegmentMap, span: usize) -> Model {
        let mut model = vec![None; span];
        let mut at = 0;
        for part in map.parts(0, span as u64) {
            assert_eq!(part.offset, at, "parts leave nothing out");
            for i in 0..part.length {
                model[(part.offset + i) as usize] = part.column.map(|c| (c.extent.0, c.offset + i));
            }
            at += part.length;
        }
        assert_eq!(at, span as u64);
        model
    }

    proptest! {
        #[test]
        fn the_last_segment_wins_byte_by_byte(
            steps in prop::collection::vec((0..200u64, 1..60u64, 0..4u64, 0..500u64, any::<bool>()), 1..40),
        ) {
            let mut map = SegmentMap::default();
            let mut model: Model = vec![None; 300];
            for (offset, length, extent, at, cut) in steps {
                if cut {
                    map.cut(offset, offset + length);
                } else {
                    map.overlay(Segment::plain(offset, length, column(extent, at)));
                }
                for i in 0..length {
                    model[(offset + i) as usize] = (!cut).then_some((extent, at + i));
                }
            }
            prop_assert_eq!(seen(&map, 300), model);
            let part = map.parts(50, 120);
            prop_assert_eq!(part.iter().map(|p| p.length).sum::<u64>(), 70);
        }
    }

    #[test]
    fn sequential_appends_become_one_key() {
        let mut map = SegmentMap::default();
        for i in [0, 2, 1] {
            map.overlay(Segment::plain(i * 10, 10, column(7, i * 10)));
        }
        assert_eq!(map.iter().count(), 1);
        assert_eq!(map.bytes(), 30);
    }

    #[test]
    fn hostile_layouts_are_refused() {
        let overflow = Segment::plain(u64::MAX - 1, 10, column(1, 0));
        let twice = Segment::plain(0, 10, column(1, 0));
        assert!(SegmentMap::from_server(vec![overflow]).is_err());
        assert!(SegmentMap::from_server(vec![twice.clone(), twice]).is_err());
    }
}
