//! What all parts of a node share. Everything lives on the node's one thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::address_book::AddressBook;
use milpa_host::clock::now_us;
use milpa_host::managers::Managers;
use milpa_host::rpc::{CallError, Pool};
use milpa_types::{DataError, DiskId, ExtentId, NodeId, PartitionId, Role};
use milpa_wire::data::{DataAnswer, DataPartitionReport, DataReply, DataRequest};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::DataNodeConfig;

use super::disk::{Disk, DiskEvent};
use super::ledger::Ledger;
use super::metrics::Gauges;
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

/// Chunks of extents that are fetched at once to fill replicas on one disk: enough to keep a disk busy, and no
/// more than clients' requests can pass between.
const REPAIR_TURNS: usize = 2;

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
    /// When the next piece of a repair may be fetched, in microseconds, by disk.
    pub repair_due_us: RefCell<BTreeMap<usize, u64>>,
    /// Turns to fetch a piece of an extent to fill a replica, by disk.
    pub repair_turns: RefCell<BTreeMap<usize, Arc<Semaphore>>>,
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

    /// Runs a job on the thread that keeps an extent's jobs in order.
    pub async fn run_ordered<T: Send + 'static>(
        &self,
        disk: usize,
        extent: (PartitionId, ExtentId),
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let start = move |disk: &mut Disk| {
            disk.workers.ordered(extent, job, |_, done| drop(sender.send(done)));
        };
        self.ask_disk(disk, start).await?;
        receiver.await.ok()
    }

    /// Waits until few enough pieces are on their way to a disk. One that hangs stops no other.
    pub async fn repair_turn(&self, disk: usize) -> Option<OwnedSemaphorePermit> {
        let turns = {
            let mut by_disk = self.repair_turns.borrow_mut();
            let turns =
                by_disk.entry(disk).or_insert_with(|| Arc::new(Semaphore::new(REPAIR_TURNS)));
            Arc::clone(turns)
        };
        // Never closed.
        turns.acquire_owned().await.ok()
    }

    /// Waits until a disk may take `bytes` more from other replicas.
    pub async fn throttle_repair(&self, disk: usize, bytes: u64) {
        let now = now_us();
        let cost = bytes.saturating_mul(1_000_000) / self.config.repair_bytes_per_second.max(1);
        let due = {
            let mut by_disk = self.repair_due_us.borrow_mut();
            let next = by_disk.entry(disk).or_insert(now);
            *next = (*next).max(now).saturating_add(cost);
            *next
        };
        tokio::time::sleep(Duration::from_micros(due.saturating_sub(now))).await;
    }
}
