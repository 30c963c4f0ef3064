//! What the node's tasks share with its loop: the ways out, and the map of who is where.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::address_book::AddressBook;
use milpa_host::clock::Instant;
use milpa_host::jobs;
use milpa_host::managers::Managers;
use milpa_host::rpc::Pool;
use milpa_types::{MetaError, MetaSlot, Next, NodeId, PartitionId, Role, VolumeId, VolumeView};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest};
use milpa_wire::meta::{MetaAnswer, MetaPartitionReport, MetaReply, MetaRequest};
use tokio::time::sleep;
use tracing::{debug, warn};

use super::inbox::{Asker, Event, Inbox};
use super::metrics::operation_of;
use super::responder::Responder;
use super::snapshot_store::SnapshotStore;
use crate::config::MetaNodeConfig;

/// One try with one meta node.
const TRY_WAIT: Duration = Duration::from_secs(1);
/// One question to the managers.
const MANAGER_WAIT: Duration = Duration::from_secs(3);
/// First pause between tries; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest pause between tries: an election takes longer, and what comes after it waits for this.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Redirections followed without a pause.
const REDIRECTS_MAX: u32 = 3;
/// The managers are not asked for addresses more often than this.
const ADDRESSES_AGE_MIN: Duration = Duration::from_millis(100);
/// Tries to find the members of a new group.
const FIND_TRIES: u32 = 10;
/// A view is not fetched again before this, whatever is wrong with it.
const VIEW_AGE_MIN: Duration = Duration::from_millis(100);

/// Shared by the loop and its tasks, all on one thread.
pub(crate) struct Context {
    /// The settings.
    pub config: MetaNodeConfig,
    /// Who we are.
    pub node: NodeId,
    /// Connections.
    pub pool: Pool,
    /// The managers.
    pub managers: Managers,
    /// The way back to the loop.
    pub inbox: Rc<Inbox>,
    /// Snapshots on disk.
    pub store: SnapshotStore,
    /// What is held here, renewed by the loop, for the heartbeats.
    pub report: RefCell<Rc<Vec<MetaPartitionReport>>>,
    /// Free bytes on the file system of the directory, as last asked.
    pub free_bytes: Cell<u64>,
    addresses: RefCell<AddressBook>,
    addresses_asked: Cell<Option<Instant>>,
    views: RefCell<BTreeMap<VolumeId, CachedView>>,
    leaders: RefCell<BTreeMap<PartitionId, NodeId>>,
}

struct CachedView {
    view: Rc<VolumeView>,
    fetched: Instant,
}

impl Context {
    pub(crate) fn new(
        config: MetaNodeConfig,
        node: NodeId,
        pool: Pool,
        managers: Managers,
        inbox: Rc<Inbox>,
        store: SnapshotStore,
    ) -> Context {
        let addresses = AddressBook::open(config.directory.join("nodes"));
        Context {
            config,
            node,
            pool,
            managers,
            inbox,
            store,
            report: RefCell::default(),
            free_bytes: Cell::new(u64::MAX),
            addresses: RefCell::new(addresses),
            addresses_asked: Cell::default(),
            views: RefCell::default(),
            leaders: RefCell::default(),
        }
    }

    /// Whether the reserve of the disk is touched.
    pub(crate) fn is_disk_full(&self) -> bool {
        self.free_bytes.get() < self.config.reserve_bytes
    }

    /// Whether so much could be written, as far as known.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        bytes <= self.free_bytes.get()
    }

    /// Where a node listens, as far as known.
    pub(crate) fn address(&self, node: NodeId) -> Option<SocketAddr> {
        self.addresses.borrow().get(node)
    }

    /// Asks the managers where everybody listens, unless somebody has just asked.
    pub(crate) async fn refresh_addresses(&self) -> bool {
        let asked = self.addresses_asked.get();
        if asked.is_some_and(|asked| asked.elapsed() < ADDRESSES_AGE_MIN) {
            return false;
        }
        self.addresses_asked.set(Some(Instant::now()));
        let answer = self.managers.call(&ManagerRequest::GetNodes, MANAGER_WAIT).await;
        match answer {
            Ok(ManagerAnswer::Nodes(nodes)) => {
                self.learn_addresses(nodes.iter().map(|node| (node.id, node.address)));
                true
            }
            Ok(other) => {
                warn!(?other, "the manager gave another answer than nodes");
                false
            }
            Err(error) => {
                debug!(%error, "cannot ask where the nodes are");
                false
            }
        }
    }

    /// Finds the addresses of all of `nodes`, or has tried to for a while: a group whose first
    /// messages go nowhere would wait for a second election.
    pub(crate) async fn find_addresses(&self, nodes: &[NodeId]) {
        for _ in 0..FIND_TRIES {
            if nodes.iter().all(|node| *node == self.node || self.address(*node).is_some()) {
                return;
            }
            if !self.refresh_addresses().await {
                sleep(ADDRESSES_AGE_MIN).await;
            }
        }
    }

    fn learn_addresses(&self, nodes: impl Iterator<Item = (NodeId, SocketAddr)>) {
        let changed = self.addresses.borrow_mut().learn(nodes);
        if let Some(save) = changed {
            jobs::run("addresses", save);
        }
    }

    /// The volume's partitions, at most `age_max` old.
    pub(crate) async fn view(&self, volume: VolumeId, age_max: Duration) -> Option<Rc<VolumeView>> {
        let age_max = age_max.max(VIEW_AGE_MIN);
        let cached = self.views.borrow().get(&volume).and_then(|cached| {
            (cached.fetched.elapsed() < age_max).then(|| Rc::clone(&cached.view))
        });
        if cached.is_some() {
            return cached;
        }
        let request = ManagerRequest::GetVolumeById { volume };
        match self.managers.call(&request, MANAGER_WAIT).await {
            Ok(ManagerAnswer::Volume(view)) => {
                let view = Rc::<VolumeView>::from(view);
                self.learn_addresses(view.nodes.iter().map(|node| (node.id, node.address)));
                let cached = CachedView { view: Rc::clone(&view), fetched: Instant::now() };
                self.views.borrow_mut().insert(volume, cached);
                Some(view)
            }
            Ok(other) => {
                warn!(?other, "the manager gave another answer than a volume");
                None
            }
            Err(error) => {
                debug!(%volume, %error, "cannot ask for a volume");
                // Old routes are better than none: a wrong one is noticed when it is used.
                self.views.borrow().get(&volume).map(|cached| Rc::clone(&cached.view))
            }
        }
    }

    /// Asks the leader of a partition of a volume until it gives a definite answer, at most for
    /// `wait`. The request must be idempotent.
    ///
    /// A definite answer is one that repeating the request would not change: [`MetaError::Locked`]
    /// is one, as whoever coordinates decides what it means.
    pub(crate) async fn ask(
        &self,
        volume: VolumeId,
        target: Target,
        request: impl Fn(PartitionId) -> MetaRequest,
        wait: Duration,
    ) -> Option<Result<MetaAnswer, MetaError>> {
        let end = Instant::now() + wait;
        let (mut pace, mut age_max, mut turn) = (Pace::default(), Duration::MAX, 0_usize);
        while Instant::now() < end {
            let view = self.view(volume, age_max).await;
            let route = view.and_then(|view| self.route(&view, target, turn));
            turn = turn.wrapping_add(1);
            age_max = Duration::MAX;
            let mut is_redirected = false;
            if let Some((partition, node)) = route {
                let left = end.saturating_duration_since(Instant::now());
                let answer = self.ask_node(node, request(partition), left.min(TRY_WAIT)).await;
                match answer {
                    Some(Err(MetaError::NotLeader { leader })) => {
                        let leader = leader.filter(|leader| *leader != node);
                        self.learn_leader(partition, leader);
                        is_redirected = leader.is_some();
                    }
                    Some(Err(error @ MetaError::Locked)) => return Some(Err(error)),
                    Some(Err(error)) => match error.next() {
                        Next::RetrySame => {}
                        Next::RefreshRoute => {
                            self.learn_leader(partition, None);
                            age_max = Duration::ZERO;
                        }
                        Next::RetryElsewhere | Next::GiveUp => return Some(Err(error)),
                    },
                    Some(Ok(answer)) => {
                        self.learn_leader(partition, Some(node));
                        return Some(Ok(answer));
                    }
                    None => self.learn_leader(partition, None),
                }
            } else {
                age_max = Duration::ZERO;
            }
            sleep(pace.pause(is_redirected)).await;
        }
        None
    }

    fn learn_leader(&self, partition: PartitionId, leader: Option<NodeId>) {
        match leader {
            Some(leader) => self.leaders.borrow_mut().insert(partition, leader),
            None => self.leaders.borrow_mut().remove(&partition),
        };
    }

    /// The partition, and the member to ask: its leader if known, else each in turn.
    fn route(
        &self,
        view: &VolumeView,
        target: Target,
        turn: usize,
    ) -> Option<(PartitionId, NodeId)> {
        let partition = view.meta.iter().find(|partition| match target {
            Target::Slot(slot) => partition.slot == slot,
            Target::Partition(id) => partition.id == id,
        })?;
        let known = self.leaders.borrow().get(&partition.id).copied();
        let hinted = partition.leader.filter(|_| turn == 0);
        let in_turn = || partition.members.get(turn % partition.members.len().max(1)).copied();
        Some((partition.id, known.or(hinted).or_else(in_turn)?))
    }

    /// One try; `None` when nobody knows what became of it.
    async fn ask_node(
        &self,
        node: NodeId,
        request: MetaRequest,
        wait: Duration,
    ) -> Option<MetaReply> {
        if node == self.node {
            return self.ask_self(Asker::SELF, request, wait).await;
        }
        let Some(address) = self.address(node) else {
            self.refresh_addresses().await;
            return None;
        };
        let called = self.pool.call(address, Role::Meta, &request, Bytes::new(), wait).await;
        match called {
            Ok((reply, _payload)) => Some(reply),
            Err(error) => {
                debug!(%node, %error, "a meta node could not be asked");
                None
            }
        }
    }

    /// Puts a request of this node to itself into the inbox: no network in between.
    pub(crate) async fn ask_self(
        &self,
        asker: Asker,
        request: MetaRequest,
        wait: Duration,
    ) -> Option<MetaReply> {
        let (responder, answer) = Responder::task(operation_of(&request), wait);
        self.inbox.push(Event::Request { asker, request, responder });
        tokio::time::timeout(wait, answer).await.ok()?.ok()
    }
}

/// How long each next try waits.
#[derive(Default)]
struct Pace {
    /// Pauses so far.
    pauses: u32,
    /// Redirections followed since the last one.
    redirects: u32,
}

impl Pace {
    /// None after a redirection, unless there were several: whoever was named may not know of it yet.
    fn pause(&mut self, is_redirected: bool) -> Duration {
        if is_redirected && self.redirects < REDIRECTS_MAX {
            self.redirects += 1;
            return Duration::ZERO;
        }
        self.redirects = 0;
        let pause = PAUSE_MIN.saturating_mul(1_u32.checked_shl(self.pauses).unwrap_or(u32::MAX));
        self.pauses = self.pauses.saturating_add(1);
        pause.min(PAUSE_MAX)
    }
}

/// How a partition of a volume is named.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// By its inode ids.
    Slot(MetaSlot),
    /// By its id.
    Partition(PartitionId),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: after an election a step paused half a second before it asked the leader it had just been
    /// told of; a lost node could so hold a call for two seconds.
    #[test]
    fn a_redirection_is_followed_at_once_and_a_circle_of_them_is_not() {
        let mut pace = Pace::default();
        let ms = |pauses: [Duration; 8]| pauses.map(|pause| pause.as_millis());
        let unknown = [(); 8].map(|()| pace.pause(false));
        assert_eq!(ms(unknown), [5, 10, 20, 40, 80, 100, 100, 100]);
        let circle = [(); 8].map(|()| pace.pause(true));
        assert_eq!(ms(circle), [0, 0, 0, 100, 0, 0, 0, 100]);
        pace.pauses = u32::MAX;
        assert_eq!(pace.pause(false), PAUSE_MAX);
    }
}
