//! A node that stops cleanly hands its leaderships over first, so that nobody waits for elections.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_raft::MultiRaft;
use milpa_types::{NodeId, PartitionId};
use tracing::info;

use super::context::Context;
use super::inbox::Event;
use super::replica::Replica;
use super::shell::Shell;

/// A node that stops waits so long for its followers to take over.
const WAIT: Duration = Duration::from_millis(1_500);
const POLL: Duration = Duration::from_millis(20);

impl Shell {
    /// Asks a current follower of each group led here to lead; again in each round until it does.
    pub(crate) fn hand_over(&self, multi: &mut MultiRaft) {
        let led: Vec<PartitionId> =
            self.replicas.values().filter(|replica| replica.leads()).map(Replica::id).collect();
        for partition in led {
            hand_over_group(multi, partition);
        }
    }

    /// A replica that cannot apply must not lead: it hands over, once a round until it does.
    pub(crate) fn hand_over_damaged(&self, multi: &mut MultiRaft) {
        for partition in self.damaged.keys() {
            hand_over_group(multi, *partition);
        }
    }
}

/// Asks a follower that is there, and has the log, to lead the group, if this node does.
fn hand_over_group(multi: &mut MultiRaft, partition: PartitionId) {
    let Some(status) = multi.status(partition) else { return };
    let current = status.current();
    if let Some(to) = status.members.voters.iter().find(|node| current.contains(node)) {
        multi.transfer_leader(partition, *to);
    }
}

/// Has everything led here handed over, and returns when that is done or has taken too long.
pub(crate) async fn hand_over_all(ctx: &Rc<Context>) {
    ctx.inbox.push(Event::Leave);
    let started = Instant::now();
    while led(ctx) > 0 && started.elapsed() < WAIT {
        tokio::time::sleep(POLL).await;
    }
    info!(still_led = led(ctx), took = ?started.elapsed(), "leaderships handed over");
}

fn led(ctx: &Context) -> usize {
    let own: NodeId = ctx.node;
    ctx.report.borrow().iter().filter(|report| report.leader == Some(own)).count()
}
