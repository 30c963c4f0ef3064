//! Our lease with the meta partitions, and the numbers that make requests be applied once.
//!
//! One random id serves all partitions; in each it is opened before the first change there. When a
//! partition does not know it, the lease has run out: what we held may have been let go. Then a new
//! id begins everywhere, at a higher *generation*, and handles of an older generation can no longer
//! be read or written. Nothing that was sent under the old id is ever sent again.
//!
//! A request that is given up without an answer frees its number and is over, but for a publish: that one
//! keeps it, and is repeated under it until its outcome is known.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use milpa_types::{PartitionId, SessionId};
use milpa_wire::meta::RequestId;
use tokio::sync::Notify;

use crate::core::lock;
use crate::window::SequenceWindow;

/// The client's session.
pub(crate) struct Sessions {
    state: Mutex<State>,
    /// Told whenever a request is answered.
    answered: Notify,
}

struct State {
    id: SessionId,
    generation: u64,
    partitions: BTreeMap<PartitionId, InPartition>,
}

struct InPartition {
    window: SequenceWindow,
    opened: bool,
    /// Held by the one request that opens the session here.
    opening: Arc<tokio::sync::Mutex<()>>,
}

/// A request that has its number and no answer yet. Dropping it frees the number: it is never sent again.
pub(crate) struct Ticket {
    sessions: Arc<Sessions>,
    partition: PartitionId,
    pub session: SessionId,
    pub generation: u64,
    sequence: u64,
}

impl Sessions {
    pub(crate) fn new(id: SessionId) -> Sessions {
        let state = State { id, generation: 1, partitions: BTreeMap::new() };
        Sessions { state: Mutex::new(state), answered: Notify::new() }
    }

    /// The id and its generation.
    pub(crate) fn current(&self) -> (SessionId, u64) {
        let state = lock(&self.state);
        (state.id, state.generation)
    }

    /// Whether the session is open in a partition, and the lock to open it under.
    pub(crate) fn opening(&self, partition: PartitionId) -> (bool, Arc<tokio::sync::Mutex<()>>) {
        let mut state = lock(&self.state);
        let here = state.partition(partition);
        (here.opened, Arc::clone(&here.opening))
    }

    /// The id and its generation, if the session is open in a partition.
    pub(crate) fn current_in(&self, partition: PartitionId) -> Option<(SessionId, u64)> {
        let state = lock(&self.state);
        let opened = state.partitions.get(&partition).is_some_and(|here| here.opened);
        opened.then_some((state.id, state.generation))
    }

    pub(crate) fn set_opened(&self, partition: PartitionId, generation: u64) {
        let mut state = lock(&self.state);
        if state.generation == generation {
            state.partition(partition).opened = true;
        }
    }

    /// Partitions in which the session is open.
    pub(crate) fn opened(&self) -> Vec<PartitionId> {
        let state = lock(&self.state);
        state.partitions.iter().filter(|(_, here)| here.opened).map(|(id, _)| *id).collect()
    }

    /// Gives the next request its number; waits while too many are unanswered.
    pub(crate) async fn begin(self: &Arc<Self>, partition: PartitionId) -> Ticket {
        loop {
            // Registered before the look, so that an answer in between is not missed.
            let mut answered = std::pin::pin!(self.answered.notified());
            answered.as_mut().enable();
            if let Some(ticket) = self.try_begin(partition) {
                return ticket;
            }
            answered.await;
        }
    }

    fn try_begin(self: &Arc<Self>, partition: PartitionId) -> Option<Ticket> {
        let mut state = lock(&self.state);
        let (session, generation) = (state.id, state.generation);
        let sequence = state.partition(partition).window.begin()?;
        Some(Ticket { sessions: Arc::clone(self), partition, session, generation, sequence })
    }

    /// The lease of `generation` ran out. The first to notice begins a new session.
    pub(crate) fn renew(&self, generation: u64, fresh: SessionId) {
        let mut state = lock(&self.state);
        if state.generation == generation {
            tracing::warn!(
                old = %state.id, new = %fresh,
                "our session expired: open files can no longer be written; a new session begins"
            );
            state.id = fresh;
            state.generation += 1;
            state.partitions.clear();
            drop(state);
            self.answered.notify_waiters();
        }
    }
}

impl State {
    fn partition(&mut self, partition: PartitionId) -> &mut InPartition {
        self.partitions.entry(partition).or_insert_with(|| InPartition {
            window: SequenceWindow::new(),
            opened: false,
            opening: Arc::default(),
        })
    }
}

impl Ticket {
    /// What the request carries.
    pub(crate) fn id(&self) -> RequestId {
        let mut state = lock(&self.sessions.state);
        let same = state.generation == self.generation;
        let unanswered =
            if same { state.partition(self.partition).window.unanswered() } else { self.sequence };
        RequestId { session: self.session, sequence: self.sequence, unanswered }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = lock(&self.sessions.state);
        if state.generation == self.generation {
            state.partition(self.partition).window.finish(self.sequence);
        }
        drop(state);
        self.sessions.answered.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_257th_request_waits_for_an_answer() {
        let sessions = Arc::new(Sessions::new(SessionId(1)));
        let partition = PartitionId(1);
        let mut out = Vec::new();
        for _ in 0..256 {
            out.push(sessions.begin(partition).await);
        }
        let blocked = tokio::time::timeout(Duration::from_secs(1), sessions.begin(partition));
        assert!(blocked.await.is_err());
        drop(out.remove(5));
        let blocked = tokio::time::timeout(Duration::from_secs(1), sessions.begin(partition));
        assert!(blocked.await.is_err(), "the lowest is still out");
        drop(out.remove(0));
        let id = sessions.begin(partition).await.id();
        assert_eq!((id.sequence, id.unanswered), (257, 2));
    }

    #[tokio::test]
    async fn a_renewed_session_starts_anew_and_old_tickets_do_not_disturb_it() {
        let sessions = Arc::new(Sessions::new(SessionId(1)));
        let partition = PartitionId(1);
        let old = sessions.begin(partition).await;
        sessions.set_opened(partition, 1);
        sessions.renew(1, SessionId(2));
        sessions.renew(1, SessionId(3));
        assert_eq!(sessions.current(), (SessionId(2), 2), "only the first to notice renews");
        assert!(sessions.opened().is_empty());
        let fresh = sessions.begin(partition).await;
        drop(old);
        assert_eq!(fresh.id().unanswered, 1);
    }
}
