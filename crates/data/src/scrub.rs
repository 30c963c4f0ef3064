//! What is read again next, and when: each byte of a disk against its checksum once in a period
//! (RELIABILITY.md F5: damage that nobody reads would wait until the other copies are gone).
//!
//! The place is kept on disk, so that a node that is often restarted comes to the end all the same.

use std::time::Duration;

use milpa_types::{ExtentId, PartitionId};

/// Longest pause between two steps: what is added to a small disk has not long to wait.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// After a step that could not be done, or whose repairs have to wait.
const AGAIN: Duration = Duration::from_secs(1);

/// Time that was missed, as the disk had more to do or the process stood still, is made up for, up to so
/// much of it: one that is busy all day has the night for it.
const MISSED_MAX: Duration = Duration::from_secs(86_400);

/// A place in the order of partitions, extents and blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The partition, or the next there is.
    pub partition: PartitionId,
    /// The extent, or the next there is.
    pub extent: ExtentId,
    /// The block.
    pub block: u64,
}

/// What a step found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where the next one begins; `None` at the end of the disk.
    pub next: Option<Place>,
    /// Bytes that were read. The steps of a pass together read what the disk holds: what was freed in
    /// extents is not counted.
    pub bytes: u64,
}

/// The walk over one disk.
#[derive(Debug)]
pub struct Scrub {
    /// `None` for never.
    period: Option<Duration>,
    place: Place,
    is_running: bool,
    /// When the next step is due, for the pass to end in time.
    due_ms: u64,
    /// It does not begin before: after a failure, and when the steps are late and make up for it.
    rests_until_ms: u64,
    began_ms: u64,
}

impl Scrub {
    /// Goes on at `place`, after a pause.
    #[must_use]
    pub fn new(period: Option<Duration>, place: Place, now_ms: u64) -> Scrub {
        let due_ms = now_ms + millis(AGAIN);
        Scrub { period, place, is_running: false, due_ms, rests_until_ms: due_ms, began_ms: now_ms }
    }

    /// Where the next step begins, if it is time for it. It ends with `done` or `put_off`.
    pub fn begin(&mut self, now_ms: u64) -> Option<Place> {
        let is_time = now_ms >= self.due_ms && now_ms >= self.rests_until_ms;
        if self.period.is_none() || self.is_running || !is_time {
            return None;
        }
        (self.is_running, self.began_ms) = (true, now_ms);
        Some(self.place)
    }

    /// A step is over; the disk holds `held_bytes`. True at the end of a pass over all of it.
    pub fn done(&mut self, step: &Step, held_bytes: u64, now_ms: u64) -> bool {
        self.is_running = false;
        self.place = step.next.unwrap_or_default();
        let pause_ms = millis(self.pause(step.bytes, held_bytes));
        let missed_from_ms = now_ms.saturating_sub(millis(MISSED_MAX));
        // From when it was due, not from now: what steps take themselves is part of the period.
        self.due_ms = self.due_ms.max(missed_from_ms) + pause_ms;
        // At most twice as fast as it must be: whoever uses the disk hardly notices.
        self.rests_until_ms = self.began_ms + pause_ms / 2;
        step.next.is_none()
    }

    /// The step is to be done again, from `place` on.
    pub fn put_off(&mut self, place: Place, now_ms: u64) {
        self.is_running = false;
        self.place = place;
        self.rests_until_ms = now_ms + millis(AGAIN);
    }

    /// The step's share of the period.
    fn pause(&self, bytes: u64, held_bytes: u64) -> Duration {
        let share = bytes as f64 / held_bytes.max(bytes).max(1) as f64;
        let period = self.period.unwrap_or(PAUSE_MAX);
        // A step that read nothing was at the end, or passed over what is gone.
        if bytes == 0 { period.min(AGAIN) } else { period.mul_f64(share).min(PAUSE_MAX) }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn place(partition: u64, extent: u64, block: u64) -> Place {
        Place { partition: PartitionId(partition), extent: ExtentId(extent), block }
    }

    #[test]
    fn all_bytes_have_their_turn_within_the_period() {
        let held = 1 << 40;
        let step = Step { next: Some(place(1, 2, 3)), bytes: 1 << 20 };
        let mut scrub = Scrub::new(Some(14 * DAY), Place::default(), 0);
        let mut now = 1_000;
        assert_eq!(scrub.begin(now - 1), None);
        assert_eq!(scrub.begin(now), Some(Place::default()));
        assert_eq!(scrub.begin(now), None, "one at a time");
        for _ in 0..100 {
            assert!(!scrub.done(&step, held, now));
            now = scrub.due_ms;
            assert_eq!(scrub.begin(now), Some(place(1, 2, 3)));
        }
        let whole_ms = (now - 1_000) * (held / step.bytes) / 100;
        assert!(whole_ms <= millis(14 * DAY), "{whole_ms}");
        assert!(scrub.done(&Step { next: None, bytes: 5 }, held, now));
        assert_eq!(scrub.begin(now + millis(PAUSE_MAX)), Some(Place::default()));
    }

    /// Runs steps that take `step_ms`, looked for every 20 ms and at the end of each, until `end_ms`; how many.
    fn run(scrub: &mut Scrub, now: &mut u64, end_ms: u64, step_ms: u64, held: u64) -> u64 {
        let (mut steps, step) = (0, Step { next: Some(place(1, 2, 3)), bytes: 1 << 20 });
        while *now < end_ms {
            if scrub.begin(*now).is_some() {
                *now += step_ms;
                scrub.done(&step, held, *now);
                steps += 1;
            } else {
                *now = *now / 20 * 20 + 20;
            }
        }
        steps
    }

    /// The pause began when the step had ended, and that was noticed a tick later: 40 TiB took twice as long.
    #[test]
    fn the_time_of_the_steps_themselves_is_part_of_the_period() {
        let (held, hour) = (40 << 40, 3_600_000);
        let mut scrub = Scrub::new(Some(14 * DAY), Place::default(), 0);
        let steps = run(&mut scrub, &mut 1_000, hour, 15, held);
        let due = (held >> 20) * hour / millis(14 * DAY);
        assert!(steps.abs_diff(due) < due / 20, "{steps} steps in an hour, {due} were due");
    }

    #[test]
    fn what_was_missed_is_made_up_for_at_twice_the_speed_and_not_for_ever() {
        let (held, hour) = (1 << 40, 3_600_000);
        let due = (held >> 20) * hour / millis(14 * DAY);
        let is_about = |steps: u64, wanted: u64| steps.abs_diff(wanted) <= wanted / 20;
        let mut scrub = Scrub::new(Some(14 * DAY), Place::default(), 0);
        let mut now = 1_000 + 2 * hour;
        let steps = run(&mut scrub, &mut now, 3 * hour, 5, held);
        assert!(is_about(steps, 2 * due), "{steps} steps, {due} were due");
        let steps = run(&mut scrub, &mut now, 5 * hour, 5, held);
        assert!(is_about(steps, 3 * due), "{steps} steps");
        let steps = run(&mut scrub, &mut now, 6 * hour, 5, held);
        assert!(is_about(steps, due), "{steps} steps");
        now += 1_000 * hour;
        let end = now + 100 * hour;
        let steps = run(&mut scrub, &mut now, end, 5, held);
        assert!(is_about(steps, 124 * due), "{steps} steps");
    }

    #[test]
    fn a_step_that_is_put_off_is_done_again_and_no_period_means_never() {
        let mut scrub = Scrub::new(Some(DAY), place(1, 1, 0), 0);
        scrub.begin(1_000);
        scrub.put_off(place(1, 1, 7), 1_000);
        assert_eq!(scrub.begin(1_500), None);
        assert_eq!(scrub.begin(2_000), Some(place(1, 1, 7)));
        assert_eq!(Scrub::new(None, Place::default(), 0).begin(u64::MAX), None);
    }
}
