//! A node that stops cleanly says so and hands over first: nobody waits for its silence.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_types::{NodeId, PartitionId};
use milpa_wire::manager::ManagerRequest;

use super::disk::Disk;
use super::shared::Shared;

/// The managers may take so long to hear of it: they may be stopping, too.
const TELL_WAIT: Duration = Duration::from_millis(500);
/// After they have: the configurations without this node are on their way.
const GRACE: Duration = Duration::from_millis(300);
/// Followers may take so long to lead.
const HAND_OVER_WAIT: Duration = Duration::from_millis(1_000);
const POLL: Duration = Duration::from_millis(20);

/// Leaves, in order: tells the managers, which drop this node from its partitions, and hands the
/// Raft groups over. Returns when that is done, or has taken too long.
pub(crate) async fn leave(shared: &Rc<Shared>, incarnation: u128) {
    shared.is_leaving.set(true);
    let request = ManagerRequest::Leave { node: shared.node, incarnation };
    match shared.managers.call(&request, TELL_WAIT).await {
        Ok(_) => tokio::time::sleep(GRACE).await,
        Err(error) => tracing::info!(%error, "no manager hears that this node leaves"),
    }
    let started = Instant::now();
    while led(shared) > 0 && started.elapsed() < HAND_OVER_WAIT {
        tokio::time::sleep(POLL).await;
    }
    tracing::info!(still_led = led(shared), "the node ends");
}

fn led(shared: &Shared) -> usize {
    let disks = shared.disks.borrow();
    let reports = disks.iter().flat_map(|disk| &disk.report.partitions);
    reports.filter(|report| report.leader == Some(shared.node)).count()
}

impl Disk {
    /// Asks a follower of each group led here to lead, in each tick until it does.
    pub fn tick_leaving(&mut self) {
        if !self.shared.is_leaving.get() || self.is_fenced() {
            return;
        }
        let led: Vec<PartitionId> =
            self.partitions.values().filter(|p| p.leads()).map(|p| p.id).collect();
        for id in led {
            let Some(status) = self.driver.multi.status(id) else { continue };
            let can_lead = |node: &NodeId| status.members.voters.contains(node);
            if let Some(follower) = status.current().into_iter().find(can_lead) {
                self.driver.multi.transfer_leader(id, follower);
            }
        }
    }
}
