//! A set of byte ranges that grows by union: the dead ranges of an extent, the removed ids.

use std::collections::BTreeMap;

/// Disjoint, non-adjacent ranges `[start, end)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range, joining it with those that it overlaps or touches.
    pub(super) fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((&low, &high)) = self.0.range(..=end).next_back() {
            if high < start {
                break;
            }
            self.0.remove(&low);
            start = start.min(low);
            end = end.max(high);
        }
        self.0.insert(start, end);
    }

    /// Whether all of a range is in the set.
    pub(super) fn covers(&self, start: u64, end: u64) -> bool {
        start >= end || self.run_at(start).is_some_and(|(_, high)| high >= end)
    }

    /// The range that holds `at`, if any.
    pub(super) fn run_at(&self, at: u64) -> Option<(u64, u64)> {
        let (&low, &high) = self.0.range(..=at).next_back()?;
        (high > at).then_some((low, high))
    }

    /// Whether some of a range is in the set.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.within(start, end).next().is_some()
    }

    /// The parts of a range that are in the set.
    pub(super) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.run_at(start).map_or(start, |(low, _)| low);
        let runs = self.0.range(first..end.max(first));
        let parts = runs.map(move |(low, high)| ((*low).max(start), (*high).min(end)));
        parts.filter(|(low, high)| low < high)
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> {
        self.0.iter().map(|(low, high)| (*low, *high))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain array of flags.
        #[test]
        fn ranges_are_a_set_of_numbers(
            operations in prop::collection::vec((0..40u64, 0..12u64), 0..40),
        ) {
            let (mut ranges, mut flags) = (Ranges::default(), [false; 64]);
            for (start, length) in operations {
                ranges.insert(start, start + length);
                flags[start as usize..(start + length) as usize].fill(true);
                for low in 0..60 {
                    for high in low..60 {
                        let expected = flags[low..high].iter().all(|flag| *flag);
                        prop_assert_eq!(ranges.covers(low as u64, high as u64), expected);
                        let any = flags[low..high].iter().any(|flag| *flag);
                        prop_assert_eq!(ranges.overlaps(low as u64, high as u64), any);
                        let inside: u64 =
                            ranges.within(low as u64, high as u64).map(|(a, b)| b - a).sum();
                        let count = flags[low..high].iter().filter(|flag| **flag).count();
                        prop_assert_eq!(inside, count as u64);
                    }
                }
                let listed: Vec<_> = ranges.iter().collect();
                prop_assert!(listed.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", listed);
                prop_assert!(listed.iter().all(|(low, high)| low < high));
            }
        }
    }
}
