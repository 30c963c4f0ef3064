//! When a member that does not lead may answer readers.
//!
//! It serves extents that it has not been told to be overwritten, and whoever overwrites one first waits for the word
//! of all members. A member that was dropped is not waited for, so it must have stopped by then: it
//! asks the leader whether its configuration is in force, after a start, a time without a leader, or one in which
//! it did not run (frames from before are read then as if they had just been sent); and a leader that has
//! dropped a member waits until that one hears no more of the group.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::rpc::Reply;
use milpa_types::{DataError, Epoch, NodeId, PartitionId};
use milpa_wire::data::DataRequest;

use super::disk::Disk;
use super::partition::{Partition, answer_done};

/// A process that does not look at its clock for so long may have been stopped for longer.
const LATE_MS: u64 = 500;
/// After so long without word from the group's leader there is none: an election timeout, and what a process
/// that is late by less than [`LATE_MS`] adds to it, and some more.
const LEADERLESS_MS: u64 = 2_000;
/// One question.
const ASK_WAIT: Duration = Duration::from_secs(1);
/// Between two.
const PAUSE_MS: u64 = 200;

/// Whether a replica may answer readers.
#[derive(Debug, Default)]
pub(crate) struct Licence {
    /// The leader has said that this is in force.
    epoch: Option<Epoch>,
    /// Answers to questions from before do not count.
    revoked: u64,
    is_asking: bool,
    next_ms: u64,
    /// Until then a member that was dropped may still answer readers.
    others_until_ms: u64,
}

impl Licence {
    /// Of a replica that was here before this process.
    pub fn of_found(now_ms: u64) -> Licence {
        Licence { others_until_ms: now_ms.saturating_add(LEADERLESS_MS), ..Licence::default() }
    }

    /// It has to be asked for again.
    pub fn revoke(&mut self) {
        self.epoch = None;
        self.revoked = self.revoked.wrapping_add(1);
        self.next_ms = 0;
    }

    /// Somebody is a member no more.
    pub fn dropped(&mut self, now_ms: u64) {
        self.others_until_ms = now_ms.saturating_add(LEADERLESS_MS);
    }

    /// Whether it holds in this epoch.
    pub fn holds(&self, epoch: Epoch) -> bool {
        self.epoch == Some(epoch)
    }

    /// How long those who were dropped may still answer.
    pub fn of_others(&self, now_ms: u64) -> Duration {
        Duration::from_millis(self.others_until_ms.saturating_sub(now_ms))
    }
}

/// Whom to ask, if it is time.
fn to_ask(partition: &Partition, node: NodeId, now: u64) -> Option<NodeId> {
    let licence = &partition.licence;
    let wants = partition.is_member(node) && !licence.holds(partition.configuration.epoch);
    let is_due = !licence.is_asking && now >= licence.next_ms;
    partition.leader.filter(|leader| wants && is_due && *leader != node)
}

impl Disk {
    /// Asks where it is needed.
    pub fn tick_licences(&mut self, now: u64) {
        let (node, disk) = (self.shared.node, self.index);
        let is_late = now.saturating_sub(self.ticked_ms) > LATE_MS;
        for partition in self.partitions.values_mut() {
            if is_late {
                partition.licence.revoke();
            }
            let Some(leader) = to_ask(partition, node, now) else { continue };
            partition.licence.is_asking = true;
            let (id, epoch) = (partition.id, partition.configuration.epoch);
            let (revoked, shared) = (partition.licence.revoked, Rc::clone(&self.shared));
            tokio::task::spawn_local(async move {
                let request = DataRequest::Licence { partition: id, epoch };
                let said =
                    shared.ask_node(leader, &request, Bytes::new(), ASK_WAIT).await.map(drop);
                let done = move |disk: &mut Disk| disk.licensed(id, (epoch, revoked), said);
                shared.ask_disk(disk, done).await;
            });
        }
    }

    /// Answers who asks for a licence. Not on a thread of the disk, where it would wait for those who flush; and
    /// only as the leader: to be taken for one is not enough.
    pub(super) fn license(&mut self, (id, epoch): (PartitionId, Epoch), reply: Reply) {
        let lease = self.driver.multi.lease_valid(id, milpa_host::clock::now_ms());
        let checked = self.partition(id).and_then(|partition| {
            partition.check_epoch(epoch)?;
            if !partition.leads() {
                return Err(partition.not_leader());
            }
            if lease { Ok(()) } else { Err(DataError::Busy) }
        });
        answer_done(reply, checked);
    }

    fn licensed(
        &mut self,
        id: PartitionId,
        (epoch, revoked): (Epoch, u64),
        said: Result<(), DataError>,
    ) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let licence = &mut partition.licence;
        licence.is_asking = false;
        if licence.revoked != revoked {
            return;
        }
        match said {
            Ok(()) => licence.epoch = Some(epoch),
            Err(error) => {
                tracing::debug!(partition = %id, %epoch, %error, "readers are not answered here");
                licence.next_ms = milpa_host::clock::now_ms() + PAUSE_MS;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_is_of_one_epoch_and_asked_for_again_after_it_was_revoked() {
        let mut licence = Licence { epoch: Some(Epoch(3)), next_ms: 700, ..Licence::default() };
        assert!(licence.holds(Epoch(3)) && !licence.holds(Epoch(4)));
        let revoked = licence.revoked;
        licence.revoke();
        assert!(!licence.holds(Epoch(3)));
        assert_ne!(licence.revoked, revoked, "an answer from before does not count");
        assert_eq!(licence.next_ms, 0);
    }

    #[test]
    fn who_was_dropped_is_waited_for_as_long_as_it_may_answer() {
        let mut licence = Licence::default();
        assert_eq!(licence.of_others(0), Duration::ZERO);
        licence.dropped(1_000);
        assert_eq!(licence.of_others(1_500), Duration::from_millis(LEADERLESS_MS - 500));
        assert_eq!(licence.of_others(1_000 + LEADERLESS_MS), Duration::ZERO);
        assert!(
            Licence::of_found(0).of_others(0) > Duration::ZERO,
            "it may have been dropped before"
        );
    }
}
