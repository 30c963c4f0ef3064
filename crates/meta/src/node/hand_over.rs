//! A node that stops cleanly hands its leaderships over first, so that nobody waits for elections; so
//! does a replica that was given up.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::{Instant, now_ms};
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
/// One follower is asked for so long, and then the next: it takes some flushes to lead.
const TURN_MS: u64 = 300;

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
    if let Some(to) = heir(&status.members.voters, &status.current(), now_ms()) {
        multi.transfer_leader(partition, to);
    }
}

/// Each of those that could lead has its turn: where nothing happens one is current whose log waits for room, and cannot
/// write down that it leads.
fn heir(voters: &[NodeId], current: &[NodeId], now: u64) -> Option<NodeId> {
    let heirs: Vec<NodeId> = voters.iter().copied().filter(|it| current.contains(it)).collect();
    let turn = usize::try_from(now / TURN_MS).unwrap_or_default();
    heirs.get(turn % heirs.len().max(1)).copied()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by a reader: it was the first one each time, though it could not take the lead.
    #[test]
    fn each_one_that_is_current_is_asked_to_lead_in_turn() {
        let (voters, current) = ([3, 1, 2].map(NodeId), [2, 4, 3].map(NodeId));
        let asked = |now| heir(&voters, &current, now).map(|node| node.0);
        let asked: Vec<_> = (0..4).map(|turn| asked(turn * TURN_MS)).collect();
        assert_eq!(asked, [Some(3), Some(2), Some(3), Some(2)]);
        assert_eq!(heir(&voters, &[], 7), None);
    }
}
