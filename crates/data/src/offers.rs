//! Which extents are offered to their inode's partition, and when (DESIGN.md section 5: bytes
//! that were not published when their writer fell silent are deleted on the partition's word).
//!
//! Every replica offers its own: no member needs to know what another one holds, and a copy that
//! was left behind somewhere is found there. What is kept is remembered until the process ends;
//! then all is offered again, slowly, which also finds what a lost message left.
//!
//! # What is deliberately absent
//!
//! The belief that anything is garbage. Time only decides when to ask.

use std::collections::BTreeMap;

use milpa_types::ExtentId;

/// After "the writer may still publish", or no answer.
const ASK_AGAIN_MS: u64 = 60_000;

/// An extent as a replica holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Which.
    pub extent: ExtentId,
    /// Bytes, dead ones included.
    pub length: u64,
    /// How often a file gave bytes of it back and may have left some that nobody names. Of a shared extent
    /// only if their piece did not die with them.
    pub part_frees: u64,
}

/// What is known of one extent.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// What was held of it when last looked at, and since when it is that.
    held: Held,
    quiet_since_ms: u64,
    /// Pieces below this have been asked about.
    from: u64,
    /// Those below this are known to be kept or gone; if none, those below `from` are.
    waiting: Option<u64>,
    /// A file refers to it: nothing to ask.
    is_kept: bool,
    /// Not before this time.
    ask_ms: u64,
}

/// The offers of one partition's replica.
#[derive(Debug, Default)]
pub struct Offers {
    extents: BTreeMap<ExtentId, Progress>,
    /// Where the next look starts, so that all extents have their turn.
    next: ExtentId,
}

/// What came of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything up to here is kept or gone; the rest comes next.
    UpTo(u64),
    /// All of it is.
    Settled,
    /// Somebody may still publish some of it. Further pieces, from here on, do not wait for that.
    Waits(Option<u64>),
    /// Nobody answered.
    Later,
}

impl Offers {
    /// Looks at all extents of the replica, in order, and picks at most `limit` that have been quiet
    /// for `silent_ms`. Returns each with where to begin.
    pub fn due(
        &mut self,
        held: &[Held],
        now_ms: u64,
        silent_ms: u64,
        limit: usize,
    ) -> Vec<(ExtentId, u64)> {
        self.observe(held, now_ms);
        let is_due = |progress: &Progress| {
            let quiet = now_ms.saturating_sub(progress.quiet_since_ms) >= silent_ms;
            quiet && !progress.is_kept && progress.ask_ms <= now_ms
        };
        let turn = self.extents.range(self.next..).chain(self.extents.range(..self.next));
        let due: Vec<(ExtentId, u64)> = turn
            .filter(|(_, progress)| is_due(progress))
            .take(limit)
            .map(|(extent, progress)| (*extent, progress.from))
            .collect();
        if let Some((last, _)) = due.last() {
            self.next = ExtentId(last.0.wrapping_add(1));
        }
        due
    }

    fn observe(&mut self, held: &[Held], now_ms: u64) {
        let mut present = BTreeMap::new();
        for held in held.iter().copied() {
            let (from, waiting, is_kept) = (0, None, false);
            let fresh =
                Progress { held, quiet_since_ms: now_ms, from, waiting, is_kept, ask_ms: 0 };
            let mut progress = self.extents.get(&held.extent).copied().unwrap_or(fresh);
            if progress.held != held {
                if progress.held.part_frees != held.part_frees {
                    // Perhaps all that the file had, and nobody names those that it never had.
                    progress = Progress { ask_ms: progress.ask_ms, ..fresh };
                }
                // What is new in a shared extent has not been judged.
                progress.is_kept &= !held.extent.is_small();
                (progress.held, progress.quiet_since_ms) = (held, now_ms);
            }
            present.insert(held.extent, progress);
        }
        self.extents = present;
    }

    /// Notes what came of asking about an extent.
    pub fn answered(&mut self, extent: ExtentId, outcome: Outcome, now_ms: u64) {
        let Some(progress) = self.extents.get_mut(&extent) else { return };
        let again_ms = now_ms.saturating_add(ASK_AGAIN_MS);
        let next = match outcome {
            Outcome::UpTo(next) => Some(next),
            Outcome::Settled => None,
            Outcome::Waits(next) => {
                progress.waiting.get_or_insert(progress.from);
                next
            }
            Outcome::Later => {
                progress.ask_ms = again_ms;
                return;
            }
        };
        match (next, progress.waiting) {
            (Some(next), _) => progress.from = next,
            (None, Some(waiting)) => {
                (progress.from, progress.waiting) = (waiting, None);
                progress.ask_ms = again_ms;
            }
            (None, None) => progress.is_kept = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENT: u64 = 1000;
    const A: ExtentId = ExtentId(1);
    const B: ExtentId = ExtentId(2);

    fn held(extent: ExtentId, length: u64) -> Held {
        Held { extent, length, part_frees: 0 }
    }

    #[test]
    fn an_extent_is_offered_after_silence_and_not_again_once_kept() {
        let mut offers = Offers::default();
        assert_eq!(offers.due(&[held(A, 10)], 0, SILENT, 9), vec![]);
        assert_eq!(offers.due(&[held(A, 20)], 900, SILENT, 9), vec![], "it grew");
        assert_eq!(offers.due(&[held(A, 20)], 1000, SILENT, 9), vec![]);
        assert_eq!(offers.due(&[held(A, 20)], 1900, SILENT, 9), vec![(A, 0)]);
        offers.answered(A, Outcome::Later, 1900);
        assert_eq!(offers.due(&[held(A, 20)], 2000, SILENT, 9), vec![]);
        assert_eq!(offers.due(&[held(A, 20)], 1900 + ASK_AGAIN_MS, SILENT, 9), vec![(A, 0)]);
        offers.answered(A, Outcome::Settled, 100_000);
        assert_eq!(offers.due(&[held(A, 20)], 1_000_000, SILENT, 9), vec![]);
    }

    #[test]
    fn a_shared_extent_is_offered_piece_by_piece() {
        let mut offers = Offers::default();
        offers.due(&[held(A, 10)], 0, SILENT, 9);
        offers.answered(A, Outcome::UpTo(7), 0);
        assert_eq!(offers.due(&[held(A, 10)], SILENT, SILENT, 9), vec![(A, 7)]);
    }

    /// Found by a reader: one piece that somebody could still publish kept all behind it from being offered.
    #[test]
    fn a_piece_that_waits_keeps_none_behind_it_from_being_offered() {
        let mut offers = Offers::default();
        let due = |offers: &mut Offers, now| offers.due(&[held(A, 10)], now, SILENT, 9);
        due(&mut offers, 0);
        let mut now = SILENT;
        for last in [Outcome::Settled, Outcome::Waits(None), Outcome::Settled] {
            offers.answered(A, Outcome::UpTo(3), now);
            assert_eq!(due(&mut offers, now), vec![(A, 3)]);
            offers.answered(A, Outcome::Waits(Some(5)), now);
            assert_eq!(due(&mut offers, now), vec![(A, 5)], "what is behind it");
            offers.answered(A, Outcome::Waits(Some(7)), now);
            assert_eq!(due(&mut offers, now), vec![(A, 7)]);
            offers.answered(A, last, now);
            assert_eq!(due(&mut offers, now), vec![], "all were asked about");
            now += ASK_AGAIN_MS;
            assert_eq!(due(&mut offers, now), vec![(A, 3)], "from the first that waits");
        }
        offers.answered(A, Outcome::Settled, now);
        assert_eq!(due(&mut offers, now + ASK_AGAIN_MS), vec![]);
    }

    /// Story: a shared extent that had been quiet for a while and was settled took further pieces;
    /// those whose writer died were never offered, and lay there until the node's next start, when
    /// this replica alone deleted them: the replicas differed.
    #[test]
    fn what_is_appended_to_a_settled_shared_extent_is_offered_again() {
        let small = ExtentId::small(1);
        for (extent, again) in [(small, vec![(small, 0)]), (A, vec![])] {
            let mut offers = Offers::default();
            offers.due(&[held(extent, 10)], 0, SILENT, 9);
            offers.answered(extent, Outcome::Settled, 0);
            assert_eq!(offers.due(&[held(extent, 10)], SILENT, SILENT, 9), vec![]);
            assert_eq!(offers.due(&[held(extent, 20)], SILENT, SILENT, 9), vec![], "not yet quiet");
            assert_eq!(offers.due(&[held(extent, 20)], 2 * SILENT, SILENT, 9), again);
        }
    }

    /// Story: a writer had sent more than it published. The extent was settled, its file deleted, and
    /// the end that no file ever had stayed until the node's next start. Simulation, seed 17102: the
    /// beginning of a piece, of a file that got the rest of it.
    #[test]
    fn an_extent_of_which_bytes_were_freed_is_offered_again_from_its_beginning() {
        for extent in [A, ExtentId::small(1)] {
            let mut offers = Offers::default();
            offers.due(&[held(extent, 10)], 0, SILENT, 9);
            offers.answered(extent, Outcome::UpTo(7), 0);
            offers.answered(extent, Outcome::Settled, 0);
            let freed = [Held { part_frees: 1, ..held(extent, 10) }];
            assert_eq!(offers.due(&freed, SILENT, SILENT, 9), vec![], "not yet quiet");
            assert_eq!(offers.due(&freed, 2 * SILENT, SILENT, 9), vec![(extent, 0)]);
        }
    }

    #[test]
    fn every_extent_has_its_turn() {
        let mut offers = Offers::default();
        let both = [held(A, 1), held(B, 1)];
        offers.due(&both, 0, SILENT, 1);
        assert_eq!(offers.due(&both, SILENT, SILENT, 1), vec![(A, 0)]);
        assert_eq!(offers.due(&both, SILENT, SILENT, 1), vec![(B, 0)]);
        assert_eq!(offers.due(&both, SILENT, SILENT, 1), vec![(A, 0)]);
    }
}
