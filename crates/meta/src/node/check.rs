//! Questions of `milpa fsck`: answered from a frozen copy of the state, on a thread.

use std::rc::Rc;

use milpa_host::jobs;
use milpa_types::{MetaError, PartitionId};
use milpa_wire::check::MetaCheck;

use super::responder::Responder;
use super::shell::Shell;

/// Questions that are being answered at once on this node: they must not crowd out the work.
const CHECKS_MAX: usize = 2;

impl Shell {
    /// Answers a question about the state as it is now. The caller has seen that this node leads.
    pub(crate) fn check(&self, partition: PartitionId, check: MetaCheck, responder: Responder) {
        let Some(replica) = self.replicas.get(&partition) else {
            return responder.fail(MetaError::WrongPartition);
        };
        if Rc::strong_count(&self.checks) > CHECKS_MAX {
            return responder.fail(MetaError::Busy);
        }
        let (frozen, running) = (replica.state.freeze(), Rc::clone(&self.checks));
        tokio::task::spawn_local(async move {
            let answer = jobs::run("check", move || frozen.check(&check)).await;
            drop(running);
            responder.send(&answer.unwrap_or(Err(MetaError::OutcomeUnknown)));
        });
    }
}
