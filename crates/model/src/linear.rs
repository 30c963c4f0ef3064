//! The search of Wing and Gong: is there an order of calls, each between its begin and its end,
//! in which a sequential object gives the answers that were given?

// Only asked whether it has something: its order is nobody's business.
#![allow(clippy::disallowed_types)]

use std::collections::HashSet;
use std::hash::Hash;

use crate::Moment;

/// A sequential object, by the states that one call may lead to.
pub trait Object {
    /// What it remembers.
    type State: Clone + Eq + Hash;
    /// A call with its answer, or without one.
    type Call;

    /// The states after this call in this state gave its answer: none, if it could not have.
    fn after(&self, state: &Self::State, call: &Self::Call) -> Vec<Self::State>;
}

/// A call of a history.
#[derive(Clone, Debug)]
pub struct Timed<C> {
    /// When it began.
    pub begin: Moment,
    /// When its answer was there; `None` for a call whose outcome nobody knows: it may take effect at
    /// any time after its begin, or never.
    pub end: Option<Moment>,
    /// The call.
    pub call: C,
}

/// States that one search looks at before it gives up.
const STEPS_MAX: usize = 2_000_000;

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An order explains the history.
    Linearizable,
    /// No order does; the longest explained part has this many calls.
    Violated {
        /// How many calls of known outcome were explained at best.
        explained: usize,
    },
    /// The search was given up.
    Unknown,
}

/// Searches an order for the history of one object.
pub fn check<O: Object>(object: &O, first: O::State, history: &[Timed<O::Call>]) -> Verdict {
    let mut calls: Vec<&Timed<O::Call>> = history.iter().collect();
    calls.sort_by_key(|call| call.begin);
    let words = calls.len().div_ceil(64);
    let wanted = calls.iter().filter(|call| call.end.is_some()).count();
    let (mut seen, mut steps, mut best) = (HashSet::new(), 0, 0);
    // Depth first: a stack of (which calls are done, state, how many of known outcome are done).
    let mut stack = vec![(vec![0_u64; words], first, 0)];
    while let Some((done, state, explained)) = stack.pop() {
        best = best.max(explained);
        if explained == wanted {
            return Verdict::Linearizable;
        }
        steps += 1;
        if steps > STEPS_MAX {
            return Verdict::Unknown;
        }
        let is_done =
            |place: usize| done.get(place / 64).is_some_and(|w| w >> (place % 64) & 1 == 1);
        let open = || calls.iter().enumerate().filter(|(place, _)| !is_done(*place));
        // Nothing that began after another call's end comes before that call.
        let first_end = open().filter_map(|(_, call)| call.end).min().unwrap_or(Moment::MAX);
        let candidates: Vec<_> = open().take_while(|(_, call)| call.begin < first_end).collect();
        for (place, call) in candidates.into_iter().rev() {
            for next in object.after(&state, &call.call) {
                let mut done = done.clone();
                if let Some(word) = done.get_mut(place / 64) {
                    *word |= 1 << (place % 64);
                }
                if seen.insert((done.clone(), next.clone())) {
                    stack.push((done, next, explained + usize::from(call.end.is_some())));
                }
            }
        }
    }
    Verdict::Violated { explained: best }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A register of numbers.
    struct Register;

    enum Call {
        Read(u8),
        Write(u8),
    }

    impl Object for Register {
        type State = u8;
        type Call = Call;

        fn after(&self, state: &u8, call: &Call) -> Vec<u8> {
            match call {
                Call::Read(seen) => {
                    if seen == state {
                        vec![*state]
                    } else {
                        vec![]
                    }
                }
                Call::Write(new) => vec![*new],
            }
        }
    }

    fn verdict(calls: Vec<(Moment, Option<Moment>, Call)>) -> Verdict {
        let timed = |(begin, end, call)| Timed { begin, end, call };
        check(&Register, 0, &calls.into_iter().map(timed).collect::<Vec<_>>())
    }

    #[test]
    fn overlapping_calls_may_take_effect_in_any_order() {
        let history = vec![
            (1, Some(6), Call::Write(1)),
            (2, Some(3), Call::Read(0)),
            (4, Some(5), Call::Read(1)),
        ];
        assert_eq!(verdict(history), Verdict::Linearizable);
    }

    #[test]
    fn a_read_of_the_past_is_a_violation() {
        let history = vec![(1, Some(2), Call::Write(1)), (3, Some(4), Call::Read(0))];
        assert_eq!(verdict(history), Verdict::Violated { explained: 1 });
    }

    #[test]
    fn a_call_without_an_answer_may_take_effect_late_or_never() {
        let never = vec![(1, None, Call::Write(1)), (3, Some(4), Call::Read(0))];
        assert_eq!(verdict(never), Verdict::Linearizable);
        let late = vec![
            (1, None, Call::Write(1)),
            (3, Some(4), Call::Read(0)),
            (5, Some(6), Call::Read(1)),
        ];
        assert_eq!(verdict(late), Verdict::Linearizable);
        let back = vec![
            (1, None, Call::Write(1)),
            (3, Some(4), Call::Read(1)),
            (5, Some(6), Call::Read(0)),
        ];
        assert_eq!(verdict(back), Verdict::Violated { explained: 1 });
    }
}
