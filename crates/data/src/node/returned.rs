//! A replica that was started again says so to the primary.
//!
//! A power cut takes the tails of extents that were acknowledged and never flushed. An append that
//! meets the gap is refused, and the extent aligned. But nothing meets the gap in an extent that is
//! written to its end: its bytes would be on a copy less until the next comparison of everything; and
//! one that is open and waits for its writer would stay out of the comparison, and its fsync fail.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::now_ms;
use milpa_host::rpc::Reply;
use milpa_types::{DataError, Epoch, NodeId, PartitionId};
use milpa_wire::data::DataRequest;

use super::disk::Disk;
use super::partition::answer_done;

/// The primary only takes note.
const TELL_WAIT: Duration = Duration::from_secs(2);
/// Pause after a primary that did not answer.
const PAUSE_MS: u64 = 500;

impl Disk {
    /// Tells the primaries that do not know yet that this process has started. A new epoch ends it:
    /// that begins with a comparison.
    pub fn tick_returned(&mut self, now: u64) {
        let node = self.shared.node;
        let untold = self.partitions.values_mut().filter(|partition| {
            let alignment = &partition.alignment;
            let idle = !alignment.is_running && now >= alignment.next_ms;
            alignment.is_unknown && idle && partition.configuration.primary != node
        });
        for partition in untold {
            partition.alignment.is_running = true;
            let (id, shared, disk) = (partition.id, Rc::clone(&self.shared), self.index);
            let (epoch, primary) = (partition.configuration.epoch, partition.configuration.primary);
            tokio::task::spawn_local(async move {
                let request = DataRequest::Returned { partition: id, epoch };
                let told = shared.ask_node(primary, &request, Bytes::new(), TELL_WAIT).await;
                let done = move |disk: &mut Disk| disk.told(id, epoch, told.map(|_| ()));
                shared.ask_disk(disk, done).await;
            });
        }
    }

    fn told(&mut self, id: PartitionId, epoch: Epoch, told: Result<(), DataError>) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        let alignment = &mut partition.alignment;
        alignment.is_running = false;
        if partition.configuration.epoch != epoch {
            return;
        }
        match told {
            Ok(()) => alignment.is_unknown = false,
            Err(error) => {
                tracing::debug!(partition = %id, %error, "the primary does not know of the start");
                alignment.next_ms = now_ms() + PAUSE_MS;
            }
        }
    }

    /// A member was started again: what it told before does not count.
    pub fn returned(&mut self, from: NodeId, (id, epoch): (PartitionId, Epoch), reply: Reply) {
        let node = self.shared.node;
        let noted = self.partition(id).and_then(|partition| {
            partition.check_epoch(epoch)?;
            let primary = partition.configuration.primary;
            if primary != node {
                return Err(DataError::NotPrimary { hint: Some(primary) });
            }
            if !partition.configuration.holders().any(|holder| holder == from) {
                return Err(DataError::Invalid);
            }
            partition.alignment.wants_all = true;
            partition.alignment.is_unknown = true;
            let mut effects = Vec::new();
            partition.primary.member_returned(&mut effects);
            Ok(effects)
        });
        let result = noted.map(|effects| self.perform_appends(id, effects));
        answer_done(reply, result);
    }
}
