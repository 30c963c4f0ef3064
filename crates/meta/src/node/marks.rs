//! What the state was at some log indexes, as numbers: replicas of a partition must agree on them.
//!
//! The core keeps the hash of its state up to date with every change, so a mark costs nothing. All
//! replicas mark the same indexes; the managers, who hear of them with each heartbeat, compare. The
//! present state is marked too: in a group where nothing happens all replicas are at one index.

use std::collections::VecDeque;

use milpa_types::{MetaError, PartitionId};
use milpa_wire::meta::StateMark;

use super::inbox::done;
use super::replica::Replica;
use super::responder::Responder;
use super::shell::Shell;
use crate::core::{Partition, SNAPSHOT_FORMAT};

/// Entries between two marks, and how many are kept: a second of a very busy partition, as long as the
/// heartbeats of two nodes may lie apart.
const EVERY: u64 = 4096;
const KEPT: usize = 4;

/// The marks of one replica.
#[derive(Debug, Default)]
pub(crate) struct Marks(VecDeque<StateMark>);

impl Marks {
    /// To be called with the state after each entry.
    pub(crate) fn note(&mut self, state: &Partition) {
        if state.applied().is_multiple_of(EVERY) {
            if self.0.len() >= KEPT {
                self.0.pop_front();
            }
            self.0.push_back(mark(state));
        }
    }
}

fn mark(state: &Partition) -> StateMark {
    StateMark { format: SNAPSHOT_FORMAT, index: state.applied(), hash: state.hash() }
}

impl Replica {
    /// The state at some past indexes, and now.
    pub(crate) fn state_marks(&self) -> Vec<StateMark> {
        let past = self.marks.0.iter().copied();
        past.chain([mark(&self.state)]).collect()
    }
}

impl Shell {
    /// The managers found that this replica's state is not that of most others. If it really is the one
    /// that they mean, it answers nothing from here on, also after a restart: they replace it.
    pub(crate) fn refuse_replica(
        &mut self,
        partition: PartitionId,
        refused: StateMark,
        responder: Responder,
    ) {
        let Some(replica) = self.replicas.get(&partition) else {
            return responder.send(&done());
        };
        if !replica.state_marks().contains(&refused) {
            return responder.fail(MetaError::Invalid);
        }
        let reason =
            format!("at log index {} its state is not that of most replicas", refused.index);
        self.give_up_replica(partition, reason);
        let store = self.ctx.store.clone();
        tokio::task::spawn_local(async move {
            let noted = milpa_host::jobs::run("partitions", move || store.mark_refused(partition));
            match noted.await {
                Ok(Ok(())) => responder.send(&done()),
                Ok(Err(error)) => {
                    tracing::error!(%partition, %error, "cannot note that a replica was refused");
                    responder.fail(MetaError::DiskFailed);
                }
                Err(_) => responder.fail(MetaError::OutcomeUnknown),
            }
        });
    }
}
