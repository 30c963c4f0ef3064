//! A node that stops cleanly hands its leaderships over first, so that nobody waits for elections; so
//! does a replica that was given up.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_raft::MultiRaft;
use milpa_types::{NodeId, PartitionId};
use tracing::{info, warn};

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

    /// Once a round: a replica that cannot apply must not lead, so it hands over until it does not.
    ///
    /// If its log is sound it acknowledges entries for a while all the same, since without it there
    /// may be no majority before another replica is made in its place. But what is never applied is
    /// never dropped: it leaves the group, here only, when it keeps more than a sound replica does
    /// between two snapshots.
    pub(crate) fn retire_damaged(&self, multi: &mut MultiRaft) {
        let config = &self.ctx.config;
        for partition in self.damaged.keys() {
            let Some(status) = multi.status(*partition) else { continue };
            hand_over_group(multi, *partition);
            let unapplied = status.last_index.saturating_sub(status.applied);
            let is_long = unapplied >= config.snapshot_after_entries
                || status.tail_bytes as u64 >= config.snapshot_after_bytes;
            if is_long {
                warn!(%partition, unapplied, "a damaged replica leaves its group: its log is too long");
                multi.refuse_group(*partition);
            }
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
