//! Sequence numbers of one session to one partition: which are out, and which is the lowest.

use std::collections::BTreeSet;

/// A partition keeps this many replies of a session at most (DESIGN.md section 4).
pub(crate) const OUTSTANDING_MAX: u64 = 256;

/// The requests of one session to one partition that have no answer yet.
#[derive(Debug)]
pub(crate) struct SequenceWindow {
    next: u64,
    outstanding: BTreeSet<u64>,
}

impl SequenceWindow {
    /// A fresh session's: sequences start at 1.
    pub(crate) fn new() -> SequenceWindow {
        SequenceWindow { next: 1, outstanding: BTreeSet::new() }
    }

    /// Gives the next sequence, or `None` while it would leave the lowest unanswered one too far
    /// behind.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        if self.next - self.unanswered() >= OUTSTANDING_MAX {
            return None;
        }
        let sequence = self.next;
        self.next += 1;
        self.outstanding.insert(sequence);
        Some(sequence)
    }

    /// The lowest sequence without an answer; the next one if all are answered.
    pub(crate) fn unanswered(&self) -> u64 {
        self.outstanding.first().copied().unwrap_or(self.next)
    }

    /// The request was answered, or given up and will never be sent again.
    pub(crate) fn finish(&mut self, sequence: u64) {
        self.outstanding.remove(&sequence);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_lowest_unanswered_is_never_far_behind_and_never_above(
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..2000),
        ) {
            let mut window = SequenceWindow::new();
            let mut out: Vec<u64> = Vec::new();
            let mut last = 0;
            for (begin, which) in steps {
                if begin {
                    if let Some(sequence) = window.begin() {
                        prop_assert_eq!(sequence, last + 1, "sequences rise by one");
                        prop_assert!(sequence - window.unanswered() < OUTSTANDING_MAX);
                        last = sequence;
                        out.push(sequence);
                    } else {
                        prop_assert!(!out.is_empty(), "an empty window is never full");
                    }
                } else if !out.is_empty() {
                    window.finish(out.swap_remove(which.index(out.len())));
                }
                let lowest = out.iter().min().copied().unwrap_or(last + 1);
                prop_assert_eq!(window.unanswered(), lowest);
            }
        }
    }
}
