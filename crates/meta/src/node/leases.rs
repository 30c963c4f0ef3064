//! When the sessions of one partition end. Kept by its leader only, in monotonic milliseconds.

use std::collections::BTreeMap;

use milpa_types::SessionId;

/// After a proposal to end a session its timer waits this long for the entry to be applied.
const REPROPOSE_MS: u64 = 2_000;

/// Lease timers.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    ends_ms: BTreeMap<SessionId, u64>,
}

impl Leases {
    /// A new leader gives everybody a full lease: it cannot know who was heard last by whom.
    pub(crate) fn all_anew(sessions: &[SessionId], now_ms: u64, lease_ms: u64) -> Leases {
        let end = now_ms + lease_ms;
        Leases { ends_ms: sessions.iter().map(|session| (*session, end)).collect() }
    }

    /// The client lives.
    pub(crate) fn renew(&mut self, session: SessionId, now_ms: u64, lease_ms: u64) {
        self.ends_ms.insert(session, now_ms + lease_ms);
    }

    /// Gives sessions that have no timer a full lease. Not every session begins with a client's
    /// request: a link dropped by another partition may bring its holder along.
    pub(crate) fn adopt(&mut self, sessions: &[SessionId], now_ms: u64, lease_ms: u64) {
        for session in sessions {
            self.ends_ms.entry(*session).or_insert(now_ms + lease_ms);
        }
    }

    /// The session is over.
    pub(crate) fn remove(&mut self, session: SessionId) {
        self.ends_ms.remove(&session);
    }

    /// This process was stopped for a while: what its clients sent meanwhile is yet unread, so the
    /// time does not count against them.
    pub(crate) fn postpone(&mut self, by_ms: u64) {
        self.ends_ms.values_mut().for_each(|end| *end += by_ms);
    }

    /// Sessions whose lease has run out, at most `limit`. Each is named again after a while, until
    /// it is removed.
    pub(crate) fn expired(&mut self, now_ms: u64, limit: usize) -> Vec<SessionId> {
        let over = self.ends_ms.iter_mut().filter(|(_, end)| **end <= now_ms).take(limit);
        over.map(|(session, end)| {
            *end = now_ms + REPROPOSE_MS;
            *session
        })
        .collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.ends_ms.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionId = SessionId(1);
    const B: SessionId = SessionId(2);

    #[test]
    fn a_lease_ends_unless_renewed() {
        let mut leases = Leases::all_anew(&[A, B], 0, 100);
        leases.renew(B, 60, 100);
        assert_eq!(leases.expired(99, 10), []);
        assert_eq!(leases.expired(100, 10), [A]);
        assert_eq!(leases.expired(101, 10), [], "asked for once");
        leases.remove(A);
        assert_eq!(leases.expired(10_000, 10), [B]);
        assert_eq!(leases.len(), 1);
    }

    #[test]
    fn an_end_that_was_not_applied_is_asked_for_again() {
        let mut leases = Leases::all_anew(&[A], 0, 100);
        assert_eq!(leases.expired(100, 10), [A]);
        assert_eq!(leases.expired(100 + REPROPOSE_MS, 10), [A]);
    }

    #[test]
    fn an_adopted_session_gets_a_lease_and_the_others_keep_theirs() {
        let mut leases = Leases::all_anew(&[A], 0, 100);
        leases.adopt(&[A, B], 50, 100);
        assert_eq!(leases.expired(100, 10), [A]);
        assert_eq!(leases.expired(150, 10), [B]);
    }

    #[test]
    fn time_asleep_does_not_count() {
        let mut leases = Leases::all_anew(&[A], 0, 100);
        leases.postpone(1_000);
        assert_eq!(leases.expired(1_099, 10), []);
        assert_eq!(leases.expired(1_100, 10), [A]);
    }
}
