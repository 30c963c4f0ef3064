//! What all parts of a node share. Everything lives on the node's one thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::address_book::AddressBook;
use milpa_host::managers::Managers;
use milpa_host::rpc::{CallError, Pool};
use milpa_types::{DataError, DiskId, ExtentId, NodeId, PartitionId, Role};
use milpa_wire::data::{DataAnswer, DataPartitionReport, DataReply, DataRequest};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::DataNodeConfig;

use super::disk::{Disk, DiskEvent};
use super::ledger::Ledger;
use super::metrics::Gauges;
use super::pace::Paces;
use super::peers::Peers;

/// One disk, as the rest of the node sees it.
pub(crate) struct DiskHandle {
    /// Its id.
    pub id: DiskId,
    /// The way to its task.
    pub events: UnboundedSender<DiskEvent>,
    /// What it last reported.
    pub report: DiskReport,
}

/// What a disk's task publishes for heartbeats.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskReport {
    /// Its partitions, but those of which the replica takes no part.
    pub partitions: Vec<DataPartitionReport>,
    /// Those.
    pub damaged: Vec<PartitionId>,
    /// As heartbeats carry it.
    pub disk: Option<milpa_types::Disk>,
    /// What the metrics say of all disks together.
    pub gauges: Gauges,
}

/// Shared by the tasks of a node.
pub(crate) struct Shared {
    /// Settings.
    pub config: DataNodeConfig,
    /// Who we are.
    pub node: NodeId,
    /// Connections.
    pub pool: Pool,
    /// The managers.
    pub managers: Managers,
    /// Where the other nodes listen, also while no manager is there to tell.
    pub addresses: RefCell<AddressBook>,
    /// Which disk holds a partition: the one whose replica serves, if one does.
    pub routes: RefCell<BTreeMap<PartitionId, usize>>,
    /// The same, and where the last replica was, for the next start.
    pub ledger: RefCell<Ledger>,
    /// The disks.
    pub disks: RefCell<Vec<DiskHandle>>,
    /// Disks that could not be opened.
    pub failed: Vec<milpa_types::Disk>,
    /// How fast the other data nodes are.
    pub peers: RefCell<Peers>,
    /// Probes that may be carried out at a time.
    pub probes: Semaphore,
    /// Requests handed to disk tasks and not yet taken by them.
    pub queued: Cell<usize>,
    /// The node is about to stop: it sends no heartbeats, and leads as little as it can.
    pub is_leaving: Cell<bool>,
    /// How fast repair goes on each disk.
    pub paces: Paces,
    /// The next heartbeat has something to say that the managers may be waiting for.
    pub news: Notify,
}

impl Shared {
    /// All disks as heartbeats carry them.
    pub fn describe_disks(&self) -> Vec<milpa_types::Disk> {
        let disks = self.disks.borrow();
        let in_service = disks.iter().filter_map(|disk| disk.report.disk.clone());
        in_service.chain(self.failed.iter().cloned()).collect()
    }

    /// Where a node listens, if known.
    pub fn address(&self, node: NodeId) -> Option<SocketAddr> {
        self.addresses.borrow().get(node)
    }

    /// Asks another data node. A node that cannot be asked is silent.
    pub async fn ask_node(
        &self,
        node: NodeId,
        request: &DataRequest,
        payload: Bytes,
        wait: Duration,
    ) -> Result<(DataAnswer, Bytes), DataError> {
        let silent = DataError::MemberSilent { node };
        let Some(address) = self.address(node) else { return Err(silent) };
        let called: Result<(DataReply, Bytes), CallError> =
            self.pool.call(address, Role::Data, request, payload, wait).await;
        match called {
            Ok((Ok(answer), bytes)) => Ok((answer, bytes)),
            Ok((Err(error), _)) => Err(error),
            Err(error) => {
                tracing::debug!(%node, %error, "a data node did not answer");
                Err(silent)
            }
        }
    }

    /// Has a closure run by a disk's task and gives its result; `None` if the task is gone.
    pub async fn ask_disk<T: Send + 'static>(
        &self,
        disk: usize,
        question: impl FnOnce(&mut Disk) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let then = Box::new(move |disk: &mut Disk| {
            let _ = sender.send(question(disk));
        });
        let events = self.disks.borrow().get(disk)?.events.clone();
        events.send(DiskEvent::Then(then)).ok()?;
        receiver.await.ok()
    }

    /// Runs a job on one of a disk's threads for long jobs; `None` if the disk's task is gone.
    pub async fn run_slow<T: Send + 'static>(
        &self,
        disk: usize,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let start = move |disk: &mut Disk| {
            disk.workers.slow(job, |_, done| drop(sender.send(done)));
        };
        self.ask_disk(disk, start).await?;
        receiver.await.ok()
    }

    /// Runs a job of copying behind all earlier ones of its extent.
    pub async fn run_copy<T: Send + 'static>(
        &self,
        disk: usize,
        extent: (PartitionId, ExtentId),
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let start = move |disk: &mut Disk| {
            disk.workers.ordered_copy(extent, job, |_, done| drop(sender.send(done)));
        };
        self.ask_disk(disk, start).await?;
        receiver.await.ok()
    }
}
