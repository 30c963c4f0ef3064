//! Data nodes so slow that partitions go on without them where they can (RELIABILITY.md, F11).
//!
//! An append is as fast as the slowest member. So a member that others keep calling slow leaves, like one that is
//! silent, and comes back as one that was, as a learner first, when they do not call it so any more
//! (docs/decisions/0014). One that is slow only under load proves it when it is back: it is held off for a few
//! seconds at the least, and for twice as long each time that it is slow again.
//!
//! One that is silent is not slow: what to do about it is decided elsewhere (`planner::silence`).
//!
//! Kept in the leader's memory only: what a new leader forgets costs one more trial.

use std::collections::BTreeMap;

use milpa_types::NodeId;

/// When several call it slow, a node is held off after this long: when many are slow, all are heard of by then.
const AFTER_MS: u64 = 1_000;
/// One alone, who finds others fast, may have a bad link to it; but without it that one's partitions are fast
/// again all the same.
const AFTER_ONE_MS: u64 = 3_000;
/// How long it is held off at the least, the first time…
const HOLD_MIN_MS: u64 = 5_000;
/// …and in the end. One that was well for as long as that begins anew.
const HOLD_MAX_MS: u64 = 960_000;
/// Between two looks: after more, nobody knows what was in between.
const LOOK_MS: u64 = 2_000;
/// Who was silent is not judged before it is heard for this long: until then others have only waited for it.
const GRACE_MS: u64 = 5_000;
/// One in this many data nodes may be held off at a time, and one always: when more are slow, it is load
/// and not a fault, and what is left would have to carry it.
const ONE_IN: usize = 10;

/// What is heard about a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// How many others call it slow.
    pub callers: usize,
    /// Nothing comes from itself.
    pub is_silent: bool,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Avoided {
    by_node: BTreeMap<NodeId, Slowness>,
    judged_ms: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slowness {
    /// Since when somebody, and since when several, call it slow without a break.
    since_ms: Option<u64>,
    agreed_ms: Option<u64>,
    /// When it was last silent.
    silent_ms: Option<u64>,
    is_held: bool,
    /// Until when it is or was held off at the least; 0 if it never was.
    until_ms: u64,
    /// How long that was.
    hold_ms: u64,
}

impl Slowness {
    fn note(&mut self, heard: &Heard, now_ms: u64) {
        if heard.is_silent {
            self.silent_ms = Some(now_ms);
        }
        let callers = if self.was_silent_of_late(now_ms) { 0 } else { heard.callers };
        let go_on = |since: Option<u64>, is_so: bool| is_so.then(|| since.unwrap_or(now_ms));
        self.since_ms = go_on(self.since_ms, callers >= 1);
        self.agreed_ms = go_on(self.agreed_ms, callers >= 2);
        if self.is_held && self.since_ms.is_none() && now_ms >= self.until_ms {
            (self.is_held, self.until_ms) = (false, now_ms);
        }
    }

    fn is_due(&self, now_ms: u64) -> bool {
        let has_lasted = |since: Option<u64>, ms: u64| {
            since.is_some_and(|since| now_ms.saturating_sub(since) >= ms)
        };
        !self.is_held
            && (has_lasted(self.since_ms, AFTER_ONE_MS) || has_lasted(self.agreed_ms, AFTER_MS))
    }

    fn hold(&mut self, now_ms: u64) {
        let again = self.hold_ms.saturating_mul(2).min(HOLD_MAX_MS);
        self.hold_ms = if self.was_held_of_late(now_ms) { again } else { HOLD_MIN_MS };
        (self.is_held, self.until_ms) = (true, now_ms.saturating_add(self.hold_ms));
    }

    fn was_held_of_late(&self, now_ms: u64) -> bool {
        self.until_ms > 0 && now_ms < self.until_ms.saturating_add(HOLD_MAX_MS)
    }

    fn was_silent_of_late(&self, now_ms: u64) -> bool {
        self.silent_ms.is_some_and(|silent_ms| now_ms.saturating_sub(silent_ms) < GRACE_MS)
    }

    fn is_forgotten(&self, now_ms: u64) -> bool {
        !self.is_held
            && self.since_ms.is_none()
            && !self.was_held_of_late(now_ms)
            && !self.was_silent_of_late(now_ms)
    }
}

impl Avoided {
    /// Takes in what is heard now about nodes that somebody calls slow, out of so many data nodes. To be called
    /// again and again.
    pub fn judge(&mut self, heard: &BTreeMap<NodeId, Heard>, data_nodes: usize, now_ms: u64) {
        let is_late = now_ms.saturating_sub(self.judged_ms) > LOOK_MS;
        self.judged_ms = now_ms;
        for node in heard.keys() {
            self.by_node.entry(*node).or_default();
        }
        for slowness in self.by_node.values_mut().filter(|_| is_late) {
            (slowness.since_ms, slowness.agreed_ms) = (None, None);
        }
        for (node, slowness) in &mut self.by_node {
            let was_held = slowness.is_held;
            slowness.note(heard.get(node).unwrap_or(&Heard::default()), now_ms);
            if was_held && !slowness.is_held {
                tracing::info!(%node, "a data node is not called slow any more: it takes part again");
            }
        }
        self.by_node.retain(|_, slowness| !slowness.is_forgotten(now_ms));
        let is_held_or_slow = |it: &&Slowness| it.is_held || it.since_ms.is_some();
        if self.by_node.values().filter(is_held_or_slow).count() > (data_nodes / ONE_IN).max(1) {
            return;
        }
        for (node, slowness) in self.by_node.iter_mut().filter(|(_, it)| it.is_due(now_ms)) {
            slowness.hold(now_ms);
            let at_least_ms = slowness.hold_ms;
            tracing::warn!(%node, at_least_ms, "a data node is slow: partitions go on without it");
        }
    }

    /// For how long a node is held off at the least from now on, in milliseconds, if it is held off.
    #[must_use]
    pub fn held_ms(&self, node: NodeId, now_ms: u64) -> Option<u64> {
        let slowness = self.by_node.get(&node)?;
        slowness.is_held.then(|| slowness.until_ms.saturating_sub(now_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId(104);
    const OTHER: NodeId = NodeId(105);

    fn called_by(callers: usize, slow: &[NodeId]) -> BTreeMap<NodeId, Heard> {
        slow.iter().map(|node| (*node, Heard { callers, is_silent: false })).collect()
    }

    /// Two nodes call these slow.
    fn called(slow: &[NodeId]) -> BTreeMap<NodeId, Heard> {
        called_by(2, slow)
    }

    /// Judges every 200 ms for a while, these being slow, and says how often the first was held off.
    fn passes(avoided: &mut Avoided, slow: &[NodeId], now_ms: &mut u64, for_ms: u64) -> u64 {
        let mut held = 0;
        for _ in 0..for_ms / 200 {
            *now_ms += 200;
            avoided.judge(&called(slow), 3, *now_ms);
            held += u64::from(avoided.held_ms(ONE, *now_ms).is_some());
        }
        held
    }

    #[test]
    fn who_is_slow_for_a_while_is_held_off() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS), 0);
        passes(&mut avoided, &[], &mut now_ms, 200);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS), 0, "in one row");
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, 200), 1);
        assert_eq!(avoided.held_ms(ONE, now_ms), Some(HOLD_MIN_MS));
        assert_eq!(passes(&mut avoided, &[], &mut now_ms, 60_000), HOLD_MIN_MS / 200 - 1);
    }

    #[test]
    fn who_is_slow_again_is_held_off_for_twice_as_long() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        for hold_s in [5, 10, 20, 40, 80, 160, 320, 640, 960, 960] {
            passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS + 200);
            assert_eq!(avoided.held_ms(ONE, now_ms), Some(hold_s * 1000));
            passes(&mut avoided, &[], &mut now_ms, hold_s * 1000 + 5_000);
            assert_eq!(avoided.held_ms(ONE, now_ms), None);
        }
        passes(&mut avoided, &[], &mut now_ms, HOLD_MAX_MS);
        assert!(avoided.by_node.is_empty(), "well for long");
        passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS + 200);
        assert_eq!(avoided.held_ms(ONE, now_ms), Some(HOLD_MIN_MS));
    }

    #[test]
    fn who_stays_slow_is_held_off_without_a_break_while_anybody_says_so() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, 600_000), 3_000);
        now_ms += 200;
        avoided.judge(&called_by(1, &[ONE]), 3, now_ms);
        assert_eq!(avoided.held_ms(ONE, now_ms), Some(0));
        assert_eq!(passes(&mut avoided, &[], &mut now_ms, 200), 0, "and no longer");
    }

    #[test]
    fn one_alone_has_to_say_so_for_longer() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        let mut held = Vec::new();
        for _ in 0..20 {
            now_ms += 200;
            avoided.judge(&called_by(1, &[ONE]), 3, now_ms);
            held.push(avoided.held_ms(ONE, now_ms).is_some());
        }
        assert_eq!(held.iter().position(|held| *held), Some(15));
    }

    #[test]
    fn who_was_silent_is_not_slow_for_that() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        let silent = BTreeMap::from([(ONE, Heard { callers: 2, is_silent: true })]);
        for _ in 0..50 {
            now_ms += 200;
            avoided.judge(&silent, 3, now_ms);
            assert_eq!(avoided.held_ms(ONE, now_ms), None);
        }
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, GRACE_MS), 0);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS), 1, "still slow");
    }

    #[test]
    fn what_was_between_two_looks_far_apart_is_not_known() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        passes(&mut avoided, &[ONE], &mut now_ms, 600);
        now_ms += 10_000;
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, AFTER_MS), 0);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, 200), 1);
    }

    #[test]
    fn many_slow_ones_are_load() {
        let (mut avoided, mut now_ms) = (Avoided::default(), 5_000);
        assert_eq!(passes(&mut avoided, &[ONE, OTHER], &mut now_ms, 60_000), 0);
        assert_eq!(passes(&mut avoided, &[ONE], &mut now_ms, 1_000), 5, "the other is well again");
        passes(&mut avoided, &[ONE, OTHER], &mut now_ms, 10_000);
        assert_eq!(avoided.held_ms(OTHER, now_ms), None, "while one is out, no other one goes");
        avoided.judge(&called(&[ONE, OTHER]), 20, now_ms);
        assert!(avoided.held_ms(ONE, now_ms).is_some(), "of many, one in ten may");
        assert!(avoided.held_ms(OTHER, now_ms).is_some());
    }
}
