//! No call waits for long: after any single failure 10 s at most.
//!
//! What is broken at a time is known to the nemesis, as [`Span`]s. The bound applies to a call if no more
//! than one server was broken from a while before the call began until it ended: two at once may have to
//! be waited for until one is back, up to the client's deadline. Faults that concern many machines
//! at once count as two. A call that began while two were broken
//! may wait for them; what it waits after that is measured too.

use std::collections::BTreeSet;

use crate::cluster::IO_DEADLINE;
use crate::network::LinkFaults;

/// What a call may take after a single failure.
const BOUND_MS: u64 = 10_000;
/// The same on a network that holds up one packet in a hundred, and all behind it, for up to a second: a leader
/// loses its followers again and again though no server is broken.
const LATE_BOUND_MS: u64 = 2 * BOUND_MS;
/// One in a hundred, in a million.
const LATE: u32 = 10_000;
/// A network that loses more than one packet in fifty keeps nothing but the clients' deadline.
const LOSSY: u32 = 20_000;
const LOSSY_BOUND_MS: u64 = IO_DEADLINE.as_millis() as u64 + BOUND_MS;
/// A server that is back has to catch up before another failure is one by itself.
const SETTLE_MS: u64 = 10_000;

/// A time in which something was broken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub from_ms: u64,
    pub until_ms: u64,
    /// The one server that was; `None` for more than that.
    pub place: Option<usize>,
}

/// A call that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub operation: &'static str,
    pub what: String,
    pub at_ms: u64,
    pub took_ms: u64,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stalls {
    /// Calls to which the bound applied.
    pub bounded: u64,
    /// The longest of them.
    pub longest_ms: u64,
    /// Those that broke it.
    pub broken: Vec<String>,
    /// Others that went on waiting for longer than that when no more than one server was broken.
    pub prolonged: Vec<String>,
}

/// The bound on such a network.
pub(crate) fn bound_ms(links: &LinkFaults) -> u64 {
    match links {
        LinkFaults { loss, .. } if *loss > LOSSY => LOSSY_BOUND_MS,
        LinkFaults { delays, .. } if *delays >= LATE => LATE_BOUND_MS,
        _ => BOUND_MS,
    }
}

/// Holds every call against what was broken meanwhile.
pub(crate) fn judge(calls: &[Ended], spans: &[Span], bound_ms: u64) -> Stalls {
    let mut stalls = Stalls::default();
    for call in calls {
        let Ended { operation, what, at_ms, took_ms } = call;
        let began_ms = at_ms.saturating_sub(*took_ms);
        let applies = is_single(spans, began_ms, *at_ms);
        if applies {
            stalls.bounded += 1;
            stalls.longest_ms = stalls.longest_ms.max(*took_ms);
        }
        if *took_ms > bound_ms {
            let waited_ms = longest_single(spans, began_ms, *at_ms);
            let detail = format!(
                "{operation} {what} took {took_ms} ms, until {:.3} s; {waited_ms} ms of that while one \
                 server was broken at most",
                *at_ms as f64 / 1000.0
            );
            match waited_ms > bound_ms {
                true if applies => stalls.broken.push(detail),
                true => stalls.prolonged.push(detail),
                false => {}
            }
        }
    }
    stalls
}

/// The longest time between the two in which no more than one server was broken. Another failure grants
/// the time anew.
fn longest_single(spans: &[Span], from_ms: u64, to_ms: u64) -> u64 {
    let ends =
        spans.iter().flat_map(|span| [span.from_ms, span.until_ms.saturating_add(SETTLE_MS)]);
    let mut times: BTreeSet<u64> = ends.filter(|time| (from_ms..to_ms).contains(time)).collect();
    times.extend([from_ms, to_ms]);
    let (mut longest, mut since, mut before) = (0, from_ms, from_ms);
    for time in times {
        if time > before && !is_single(spans, before + 1, time - 1) {
            since = time;
        }
        longest = longest.max(time - since);
        if spans.iter().any(|span| span.from_ms == time) {
            since = time;
        }
        before = time;
    }
    longest
}

/// Whether no more than one server was broken between the two.
fn is_single(spans: &[Span], from_ms: u64, to_ms: u64) -> bool {
    let meanwhile = spans
        .iter()
        .filter(|span| span.from_ms <= to_ms && from_ms <= span.until_ms.saturating_add(SETTLE_MS));
    let mut broken = BTreeSet::new();
    for span in meanwhile {
        let Some(place) = span.place else { return false };
        broken.insert(place);
    }
    broken.len() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(at_ms: u64, took_ms: u64) -> Ended {
        Ended { operation: "read", what: String::new(), at_ms, took_ms }
    }

    fn span(from_ms: u64, until_ms: u64, place: Option<usize>) -> Span {
        Span { from_ms, until_ms, place }
    }

    #[test]
    fn a_stall_counts_unless_two_servers_were_broken() {
        let calls = [call(20_000, 15_000), call(21_000, 9_000)];
        let found = |spans: &[Span]| {
            let stalls = judge(&calls, spans, BOUND_MS);
            (stalls.bounded, stalls.longest_ms, stalls.broken.len())
        };
        let late = LinkFaults { delays: 20_000, ..LinkFaults::default() };
        assert!(judge(&calls, &[], bound_ms(&late)).broken.is_empty());
        let punctual = LinkFaults { delays: 1_000, ..LinkFaults::default() };
        assert_eq!(judge(&calls, &[], bound_ms(&punctual)).broken.len(), 1);
        let one = span(4_000, 6_000, Some(1));
        assert_eq!(found(&[]), (2, 15_000, 1), "nothing was broken");
        assert_eq!(found(&[one]), (2, 15_000, 1));
        assert_eq!(found(&[one, span(7_000, 9_000, Some(1))]), (2, 15_000, 1), "the same again");
        assert_eq!(found(&[one, span(19_000, u64::MAX, Some(2))]), (0, 0, 0));
        assert_eq!(found(&[one, span(1_000, 1_500, Some(2))]), (1, 9_000, 0), "settled by then");
        assert_eq!(found(&[span(10_000, 11_000, None)]), (0, 0, 0), "many at once");
        assert_eq!(found(&[span(22_000, 23_000, None)]), (2, 15_000, 1), "later");
    }

    #[test]
    fn what_a_call_waits_after_an_overlap_is_measured_too() {
        let prolonged = |took_ms| {
            let many = [span(1_000, 2_000, Some(1)), span(1_500, 3_000, Some(2))];
            let stalls = judge(&[call(2_000 + took_ms, took_ms)], &many, BOUND_MS);
            assert_eq!((stalls.bounded, stalls.broken.len()), (0, 0));
            stalls.prolonged.len()
        };
        // The first one has settled at 12,000.
        assert_eq!(prolonged(19_000), 0);
        assert_eq!(prolonged(21_000), 1);
    }
}
