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

    /// Drops everything at and above `end`.
    pub(super) fn cut(&mut self, end: u64) {
        let _above = self.0.split_off(&end);
        if let Some(mut last) = self.0.last_entry() {
            let high = (*last.get()).min(end);
            last.insert(high);
        }
    }

    /// One past the highest number in the set; 0 if it is empty.
    pub(super) fn last_end(&self) -> u64 {
        self.0.last_key_value().map_or(0, |(_, high)| *high)
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
            operations in prop::collection::vec((0..40u64, 0..12u64, prop::bool::weighted(0.1)), 0..40),
        ) {
            let (mut ranges, mut flags) = (Ranges::default(), [false; 64]);
            for (start, length, cut) in operations {
                if cut {
                    ranges.cut(start);
                    flags[start as usize..].fill(false);
                } else {
                    ranges.insert(start, start + length);
                    flags[start as usize..(start + length) as usize].fill(true);
                }
                for low in 0..60 {
                    for high in low..60 {
                        let expected = flags[low..high].iter().all(|flag| *flag);
                        prop_assert_eq!(ranges.covers(low as u64, high as u64), expected);
                    }
                }
                let listed: Vec<_> = ranges.iter().collect();
                prop_assert!(listed.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", listed);
                prop_assert!(listed.iter().all(|(low, high)| low < high));
            }
        }
    }
}
