//! What a leader knows of how much it holds its group up.
//!
//! Nobody misses a leader whose disk or links are slow: its heartbeats come late, and they come. But the group waits
//! for it. It has no lease when a majority answers later than `lease_ms`; and the library hands out nothing that is
//! not on the leader's own disk, though a majority has it. So a leader looks at itself, and when it was held up
//! for two seconds the others are asked ([`relief`](super::relief)).

/// What is held up for so long is not by chance.
const PATIENCE_MS: u64 = 2_000;
const PATIENCE_MAX_MS: u64 = 120_000;
/// The leader's disk is behind when it has not what was committed so long ago, and up to twice as long.
const BEHIND_MS: u64 = 100;
/// Between two questions that nobody answers.
const ASKED_EVERY_MS: u64 = 1_000;
/// Between two changes of a client that waits for each there is nothing that a slow disk could lack: it is behind
/// for a part of the time only. So what was is forgotten by a quarter of the time that passes.
const FORGOTTEN_SHARE: u64 = 4;
/// After giving up: the others have elected by then, if they can.
const REST_MS: u64 = 5_000;
/// For so many times its patience the lead is not wanted back: a minute at first.
const DECLINES_FACTOR: u64 = 30;
const LOOK_EVERY_MS: u64 = 100;
/// A process that was stopped has seen nothing meanwhile.
const LOOK_MS_MAX: u64 = 2 * LOOK_EVERY_MS;
/// An answer that took longer says nothing of how things are now.
const ANSWER_MS_MAX: u64 = 10_000;

/// For how long a leader was held up, and what came of it.
#[derive(Debug)]
pub(super) struct Burden {
    looked_ms: u64,
    /// Less a quarter of the time in which it was not.
    held_up_ms: u64,
    /// Doubles each time that the lead is given up, and comes back as time passes without trouble.
    patience_ms: u64,
    /// When the others were asked last.
    asked_ms: Option<u64>,
    rests_until_ms: u64,
    declines_until_ms: u64,
    /// What was committed: when, and up to where; this and the time before.
    commits: [(u64, u64); 2],
}

/// How a leader does at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) now_ms: u64,
    pub(super) has_lease: bool,
    pub(super) committed: u64,
    pub(super) persisted: u64,
}

impl Default for Burden {
    fn default() -> Burden {
        Burden {
            looked_ms: 0,
            held_up_ms: 0,
            patience_ms: PATIENCE_MS,
            asked_ms: None,
            rests_until_ms: 0,
            declines_until_ms: 0,
            commits: [(0, 0); 2],
        }
    }
}

impl Burden {
    /// It leads from here on, or does not any more.
    pub(super) fn begin(&mut self, committed: u64) {
        (self.held_up_ms, self.asked_ms) = (0, None);
        self.commits = [(self.looked_ms, committed); 2];
    }

    /// Whether it is time to look.
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.looked_ms.saturating_add(LOOK_EVERY_MS)
    }

    /// Whether the others are to be asked now.
    pub(super) fn asks(&mut self, look: Look) -> bool {
        let since_last_ms = look.now_ms.saturating_sub(self.looked_ms);
        let passed_ms = since_last_ms.min(LOOK_MS_MAX);
        self.looked_ms = look.now_ms;
        // Nobody looks at one that does not lead: that time was without trouble.
        self.forgive(since_last_ms - passed_ms);
        let [(_, before), (since_ms, recent)] = self.commits;
        if look.now_ms >= since_ms.saturating_add(BEHIND_MS) {
            self.commits = [(since_ms, recent), (look.now_ms, look.committed)];
        }
        if look.has_lease && look.persisted >= before {
            self.held_up_ms = self.held_up_ms.saturating_sub(passed_ms / FORGOTTEN_SHARE);
            if self.held_up_ms == 0 {
                self.forgive(passed_ms);
            }
            return false;
        }
        // However long it lasts, it is forgotten soon when it is over.
        self.held_up_ms = (self.held_up_ms + passed_ms).min(self.patience_ms + LOOK_MS_MAX);
        let is_due = |at: u64| look.now_ms >= at.saturating_add(ASKED_EVERY_MS);
        let asks = self.held_up_ms >= self.patience_ms && self.asked_ms.is_none_or(is_due);
        if asks {
            self.asked_ms = Some(look.now_ms);
        }
        asks
    }

    fn forgive(&mut self, passed_ms: u64) {
        self.patience_ms = self.patience_ms.saturating_sub(passed_ms).max(PATIENCE_MS);
    }

    /// Whether somebody who was asked at that time relieves it: others may have been asked since, as the way there
    /// and back can take longer than that.
    pub(super) fn is_relieved(&self, round: u64) -> bool {
        let counts = |asked: u64| round <= asked && asked - round <= ANSWER_MS_MAX;
        self.asked_ms.is_some_and(counts) && self.held_up_ms >= self.patience_ms
    }

    /// The lead is given up.
    pub(super) fn end(&mut self, now_ms: u64) {
        let declines_ms = DECLINES_FACTOR * self.patience_ms;
        self.declines_until_ms = now_ms.saturating_add(declines_ms);
        self.patience_ms = (2 * self.patience_ms).min(PATIENCE_MAX_MS);
        self.rests_until_ms = now_ms.saturating_add(REST_MS);
    }

    /// Whether others are to lead if they can.
    pub(super) fn declines(&self, now_ms: u64) -> bool {
        now_ms < self.declines_until_ms
    }

    /// Whether the election is left to others.
    pub(super) fn rests(&self, now_ms: u64) -> bool {
        now_ms < self.rests_until_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When a leader asks that is looked at every 25 ms, if it does within ten minutes.
    fn asks(burden: &mut Burden, from_ms: u64, look: impl Fn(u64) -> Look) -> Option<u64> {
        burden.begin(0);
        let mut times = (from_ms..from_ms + 600_000).step_by(25);
        times.find(|now_ms| burden.asks(look(*now_ms)))
    }

    fn good(now_ms: u64) -> Look {
        Look { now_ms, has_lease: true, committed: now_ms, persisted: now_ms }
    }

    fn without_lease(now_ms: u64) -> Look {
        Look { has_lease: false, ..good(now_ms) }
    }

    #[test]
    fn who_is_held_up_for_much_of_the_time_asks() {
        let fresh = Burden::default;
        assert_eq!(asks(&mut fresh(), 1_000, good), None);
        assert_eq!(asks(&mut fresh(), 1_000, without_lease), Some(2_800));
        // A disk that needs 300 ms for what the others have at once; and one that needs 75.
        let slow = |ms| move |now_ms| Look { persisted: now_ms - ms, ..good(now_ms) };
        assert!(asks(&mut fresh(), 1_000, slow(300)).is_some_and(|at| at < 4_000));
        assert_eq!(asks(&mut fresh(), 1_000, slow(75)), None);
        let now_and_then =
            |good_ms| move |now_ms| Look { has_lease: now_ms % 1_000 < good_ms, ..good(now_ms) };
        assert!(asks(&mut fresh(), 1_000, now_and_then(500)).is_some_and(|at| at < 7_000));
        assert_eq!(asks(&mut fresh(), 1_000, now_and_then(850)), None);
    }

    #[test]
    fn an_answer_counts_while_it_is_new_and_needed() {
        let mut burden = Burden::default();
        let round = asks(&mut burden, 100_000, without_lease).unwrap();
        assert!(burden.is_relieved(round) && !burden.is_relieved(round + 1));
        assert!(
            !burden.asks(without_lease(round + 900)) && burden.asks(without_lease(round + 1_000))
        );
        assert!(burden.is_relieved(round) && !burden.is_relieved(round - ANSWER_MS_MAX));
        for look in (0..10).map(|look| good(round + 1_100 + 100 * look)) {
            assert!(!burden.asks(look));
        }
        assert!(!burden.is_relieved(round + 1_000), "it got better");
    }

    #[test]
    fn patience_doubles_and_comes_back() {
        let (mut burden, mut now_ms, mut waited) = (Burden::default(), 1_000, Vec::new());
        for _ in 0..8 {
            let at = asks(&mut burden, now_ms, without_lease).unwrap();
            burden.end(at);
            assert!(burden.rests(at + REST_MS - 1) && !burden.rests(at + REST_MS));
            waited.push((at - now_ms).div_ceil(1_000));
            let declines_ms = 30 * 1_000 * waited.last().unwrap();
            assert!(burden.declines(at + declines_ms - 1) && !burden.declines(at + declines_ms));
            now_ms = at + 25;
        }
        assert_eq!(waited, [2, 4, 8, 16, 32, 64, 120, 120]);
        assert_eq!(asks(&mut burden, now_ms, good), None);
        assert_eq!(burden.patience_ms, PATIENCE_MS);
    }
}
