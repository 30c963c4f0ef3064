//! When each voter stands for election.
//!
//! Where all draw from the same span, two survivors of three are often nearer to each other than a vote
//! takes on a busy disk: both stand, each votes for itself, and nobody leads for one timeout more. So
//! the span is cut into as many slots as there are voters, and each draws within its own. Between two
//! slots there is time for an election, and the later half of the span is waited for only if two of three
//! are gone. The slots rotate with the term, so that no voter is always the last, and differ from group to
//! group, so that what a lost node led goes to all others alike.

/// The first slot begins so many ticks behind the earliest moment at which the others may vote for
/// somebody else: they heard the leader a little later, and what they refuse is asked again only one
/// timeout later.
const MARGIN_TICKS: usize = 2;

/// A voter's slot: which, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    rank: usize,
    count: usize,
}

impl Slot {
    /// Of the voter that is `rank`-th of `count`, in what `turn` (the term and the group) makes of it.
    pub(super) fn of(rank: usize, count: usize, turn: u64) -> Slot {
        let turned = usize::try_from(turn % count.max(1) as u64).unwrap_or(0);
        Slot { rank: (rank + turned) % count.max(1), count }
    }
}

/// The election timeout in ticks, at least `min` and less than `max`: within the slot, or, for one
/// who is no voter or where the span has no room for slots, anywhere.
pub(super) fn timeout((min, max): (usize, usize), slot: Option<Slot>, drawn: u64) -> usize {
    let first = min + MARGIN_TICKS;
    let width = |count: usize| max.saturating_sub(first) / count.max(1);
    let (start, span) = match slot {
        Some(Slot { rank, count }) if width(count) > 0 => {
            (first + rank * width(count), width(count).div_ceil(2))
        }
        _ => (min, max.saturating_sub(min).max(1)),
    };
    start + usize::try_from(drawn % span as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn half_a_second_has_slots_for_three_voters_with_four_ticks_between_them() {
        let ends = |rank| [0, 2].map(|drawn| timeout((20, 40), Some(Slot::of(rank, 3, 0)), drawn));
        assert_eq!([0, 1, 2].map(ends), [[22, 24], [28, 30], [34, 36]]);
        let next_term = [0, 1, 2].map(|rank| Slot::of(rank, 3, 1).rank);
        assert_eq!(next_term, [1, 2, 0]);
    }

    proptest! {
        /// Goal: whatever they draw, no two voters stand at the same time, and all within the bounds.
        #[test]
        fn voters_keep_apart(
            count in 1_usize..8,
            span in 0_usize..60,
            turn: u64,
            draws in prop::collection::vec(any::<u64>(), 8),
        ) {
            let bounds = (20, 20 + span.max(2));
            let mut all: Vec<usize> = (0..count)
                .map(|rank| timeout(bounds, Some(Slot::of(rank, count, turn)), draws[rank]))
                .collect();
            prop_assert!(all.iter().all(|ticks| (bounds.0..bounds.1).contains(ticks)));
            all.sort_unstable();
            let width = (bounds.1 - bounds.0).saturating_sub(MARGIN_TICKS) / count;
            let gap = all.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(usize::MAX);
            prop_assert!(width == 0 || gap > width / 2, "{all:?} {width}");
        }

        #[test]
        fn who_is_no_voter_draws_from_the_whole_span(drawn: u64) {
            prop_assert_eq!(timeout((20, 40), None, drawn), 20 + (drawn % 20) as usize);
        }
    }
}
