//! One manager's part in the group: applies what is committed, leads when elected.
//!
//! All of it lives on one task; whatever takes time happens elsewhere and comes back as an
//! [`Event`].

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use milpa_host::clock::{Instant, now_ms};
use milpa_host::jobs;
use milpa_host::keys::Key;
use milpa_host::rpc::Pool;
use milpa_raft::{
    Committed, Frame, InstallSnapshot, LogPosition, MultiRaft, Outbox, Payload, ProposeError, Role,
    RoleChange, SnapshotDescriptor, Turn,
};
use milpa_types::{NodeId, PartitionId, VolumeId};
use tracing::{debug, error, info, warn};

use super::RunError;
use super::checkpoint::CheckpointStore;
use super::event::{Event, Inbox, Responder};
use super::leader::Leadership;
use super::metrics::metrics;
use super::snapshot;
use crate::config::ManagerConfig;
use crate::core::{Applied, Command, CommandV1, State};

/// The managers' own Raft group.
pub(super) const GROUP: PartitionId = PartitionId(0);
/// Between two tries to write a checkpoint to a full disk.
const CHECKPOINT_AGAIN_MS: u64 = 10_000;

/// What handshakes need: they are answered between the loop's turns.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Volumes by name.
    pub volumes: BTreeMap<String, VolumeId>,
    /// Where nodes that are heard listen: what does not reach them is carried to them.
    pub heard: BTreeSet<SocketAddr>,
    /// As of this version of the nodes.
    nodes_version: u64,
}

/// What to do when a proposal has been applied.
pub(super) enum Then {
    /// Answer and act as leader of this term from now on.
    Lead,
    /// A planner proposed it: nothing.
    Planned,
    /// Tell the node its id.
    Register(Responder),
    /// Answer `Done`.
    Done(Responder),
    /// Answer with the volume.
    Volume(Responder),
    /// Answer with the new volume once it can be used.
    Create(Responder),
    /// Answer once all partitions of the volume can be used.
    Grow(Responder, VolumeId),
}

struct Pending {
    term: u64,
    then: Then,
}

/// The state on disk and what is kept to serve to others.
pub(super) struct Checkpoints {
    pub(super) store: CheckpointStore,
    /// The last two, newest last: a slow fetch of the older one may go on.
    pub(super) kept: Vec<(SnapshotDescriptor, Bytes)>,
    /// The file is being written: with our own state, or with one that is fetched. Never with both:
    /// the older one would go over the newer one, on which the log already rests.
    is_busy: bool,
    is_wanted: bool,
    saved_index: u64,
    /// When the first entry that the checkpoint lacks was applied.
    unsaved_since_ms: Option<u64>,
    /// The disk was full: not before this time.
    not_before_ms: u64,
}

impl Checkpoints {
    pub(super) fn new(
        store: CheckpointStore,
        loaded: Option<(SnapshotDescriptor, Bytes)>,
    ) -> Checkpoints {
        let saved_index = loaded.as_ref().map_or(0, |(descriptor, _)| descriptor.position.index);
        Checkpoints {
            store,
            kept: loaded.into_iter().collect(),
            is_busy: false,
            is_wanted: false,
            saved_index,
            unsaved_since_ms: None,
            not_before_ms: 0,
        }
    }

    fn keep(&mut self, descriptor: SnapshotDescriptor, bytes: Bytes) {
        self.saved_index = self.saved_index.max(descriptor.position.index);
        self.kept.push((descriptor, bytes));
        if self.kept.len() > 2 {
            self.kept.remove(0);
        }
    }
}

/// One manager.
pub(super) struct Replica {
    pub(super) own: NodeId,
    pub(super) config: Rc<ManagerConfig>,
    pub(super) managers: BTreeMap<NodeId, SocketAddr>,
    pub(super) pool: Pool,
    pub(super) secret: Key,
    pub(super) inbox: Inbox,
    pub(super) state: State,
    pub(super) known: Rc<RefCell<Known>>,
    /// Who leads, as far as Raft knows here.
    pub(super) leader: Option<NodeId>,
    pub(super) term: u64,
    role: Role,
    /// Set from the first command applied in our term until we step down.
    pub(super) leadership: Option<Leadership>,
    /// Elected, and the first command of the term is still to be proposed.
    lead_wanted: bool,
    pending: BTreeMap<u64, Pending>,
    /// How many of them planners proposed: no further pass before those are applied.
    pub(super) planned_pending: usize,
    pub(super) checkpoints: Checkpoints,
    installs: Vec<InstallSnapshot>,
    /// Why the process must end.
    pub(super) failure: Option<RunError>,
}

/// All that a replica starts from.
pub(super) struct Start {
    pub(super) own: NodeId,
    pub(super) config: Rc<ManagerConfig>,
    pub(super) pool: Pool,
    pub(super) secret: Key,
    pub(super) inbox: Inbox,
    pub(super) state: State,
    pub(super) known: Rc<RefCell<Known>>,
    pub(super) checkpoints: Checkpoints,
}

impl Replica {
    pub(super) fn new(start: Start) -> Replica {
        let managers = start.config.managers().into_iter().collect();
        let mut replica = Replica {
            own: start.own,
            config: start.config,
            managers,
            pool: start.pool,
            secret: start.secret,
            inbox: start.inbox,
            state: start.state,
            known: start.known,
            leader: None,
            term: 0,
            role: Role::Follower,
            leadership: None,
            lead_wanted: false,
            pending: BTreeMap::new(),
            planned_pending: 0,
            checkpoints: start.checkpoints,
            installs: Vec::new(),
            failure: None,
        };
        replica.refresh_volumes();
        replica.refresh_heard();
        replica
    }

    fn refresh_volumes(&mut self) {
        let volumes = self.state.volumes().map(|volume| (volume.name.clone(), volume.id));
        self.known.borrow_mut().volumes = volumes.collect();
    }

    fn refresh_heard(&mut self) {
        let heard = self.state.nodes().filter(|node| node.state.is_heard() && !node.is_removed);
        let mut known = self.known.borrow_mut();
        known.heard = heard.map(|node| node.address).collect();
        known.nodes_version = self.state.nodes_version();
    }

    /// Handles one event from outside.
    pub(super) fn handle(&mut self, multi: &mut MultiRaft, event: Event) {
        match event {
            Event::Request { caller, request, responder } => {
                self.request(multi, caller, *request, responder);
            }
            Event::Frame { from, bytes } => {
                if let Err(error) = multi.step_frame(from, bytes, now_ms()) {
                    warn!(manager = %from, %error, "a manager sent a bad Raft frame");
                }
            }
            Event::StepDone { term, step, result } => self.step_done(multi, term, &step, result),
            Event::CheckpointDone { descriptor, bytes, result } => {
                self.checkpoint_done(multi, descriptor, bytes, result);
            }
            Event::SnapshotFetched { result } => self.snapshot_fetched(multi, result),
        }
    }

    /// Proposes a command; `then` happens when it has been applied. A refused proposal is given
    /// back.
    pub(super) fn propose(
        &mut self,
        multi: &mut MultiRaft,
        command: CommandV1,
        then: Then,
    ) -> Result<(), (ProposeError, Then)> {
        let bytes = Bytes::from(milpa_wire::encode(&Command::V1(command)));
        match multi.propose(GROUP, bytes) {
            Ok(LogPosition { term, index }) => {
                self.planned_pending += usize::from(matches!(then, Then::Planned));
                self.pending.insert(index, Pending { term, then });
                Ok(())
            }
            Err(error) => Err((error, then)),
        }
    }

    /// What is left to do after Raft's turn. Whether it gave Raft more to do.
    pub(super) fn settle(&mut self, multi: &mut MultiRaft) -> bool {
        if self.lead_wanted {
            self.lead_wanted = false;
            let lead = CommandV1::Lead { manager: self.own };
            match self.propose(multi, lead, Then::Lead) {
                Err((ProposeError::Busy { .. }, _)) => self.lead_wanted = true,
                Err((error, _)) => debug!(%error, "elected and deposed at once"),
                Ok(()) => {}
            }
        }
        for install in std::mem::take(&mut self.installs) {
            self.install(multi, install);
        }
        self.checkpoint_if_due(multi);
        self.pass_if_due(multi);
        multi.has_work()
    }

    fn role_changed(&mut self, change: &RoleChange) {
        let is_new_term = change.term != self.term;
        (self.role, self.term, self.leader) = (change.role, change.term, change.leader);
        metrics().term.set(i64::try_from(change.term).unwrap_or(i64::MAX));
        // A new term is a new leadership, also when it is ours again.
        if self
            .leadership
            .as_ref()
            .is_some_and(|l| l.term != change.term || self.role != Role::Leader)
        {
            info!(term = change.term, leader = ?change.leader, "this manager no longer leads");
            self.leadership = None;
        }
        if self.role != Role::Leader || is_new_term {
            // Their outcome is unknown; dropping a responder tells the caller so.
            self.pending.clear();
            self.planned_pending = 0;
        }
        let leads = self.leadership.is_some();
        metrics().is_leader.set(i64::from(leads));
        self.lead_wanted = self.role == Role::Leader && !leads;
    }

    fn apply_entry(&mut self, entry: Committed) -> Result<(), RunError> {
        let position = entry.position;
        let applied = match entry.payload {
            Payload::Empty | Payload::Members { .. } => {
                self.state.skip(position.index);
                Applied::Done
            }
            Payload::Data(bytes) => {
                let command: Command = milpa_wire::decode(&bytes)
                    .map_err(|_| RunError::UnknownCommand { index: position.index })?;
                let applied = self.state.apply(position.index, &command);
                self.notice(&command, &applied);
                applied
            }
        };
        if let Some(Pending { term, then }) = self.pending.remove(&position.index) {
            self.planned_pending -= usize::from(matches!(then, Then::Planned));
            // In another term the place was taken by another entry: ours is lost for good, and
            // dropping the responder says no more than that.
            if term == position.term {
                self.finish(then, applied);
            }
        }
        Ok(())
    }

    /// Logs what operators care about, once in each manager, and keeps derived things up to date.
    fn notice(&mut self, Command::V1(command): &Command, applied: &Applied) {
        if matches!(applied, Applied::Refused(_)) {
            debug!(?command, ?applied, "a command came too late");
            return;
        }
        if self.state.nodes_version() != self.known.borrow().nodes_version {
            self.refresh_heard();
        }
        match command {
            CommandV1::CreateVolume { .. } | CommandV1::DeleteVolume { .. } => {
                self.refresh_volumes()
            }
            CommandV1::SetNodeState { node, state } => {
                self.refresh_heard();
                let address =
                    self.state.node(*node).map(|node| tracing::field::display(node.address));
                info!(%node, address, ?state, "node state");
            }
            CommandV1::SetConfiguration { partition, configuration }
            | CommandV1::ReplaceConfiguration { partition, configuration, .. } => {
                info!(%partition, ?configuration, "new configuration");
            }
            _ => {}
        }
        if let Some(leadership) = &mut self.leadership {
            leadership.pass_wanted = true;
        }
    }

    fn finish(&mut self, then: Then, applied: Applied) {
        let then = match then {
            Then::Lead => return self.lead(),
            Then::Planned => return,
            other => other,
        };
        self.answer_applied(then, applied);
    }

    fn lead(&mut self) {
        if self.role != Role::Leader {
            return;
        }
        info!(term = self.term, applied = self.state.applied(), "this manager leads");
        metrics().is_leader.set(1);
        self.leadership = Some(Leadership::new(self.term, now_ms()));
    }

    fn checkpoint_if_due(&mut self, multi: &mut MultiRaft) {
        let checkpoints = &mut self.checkpoints;
        let lacking = self.state.applied().saturating_sub(checkpoints.saved_index);
        if checkpoints.is_busy || lacking == 0 || now_ms() < checkpoints.not_before_ms {
            return;
        }
        let since = *checkpoints.unsaved_since_ms.get_or_insert_with(now_ms);
        let waited_ms = now_ms().saturating_sub(since);
        let is_due = checkpoints.is_wanted
            || lacking >= self.config.checkpoint.entries
            || waited_ms >= self.config.checkpoint.interval_ms;
        if !is_due {
            return;
        }
        let Some(descriptor) = multi.describe(GROUP, self.state.applied()) else { return };
        (checkpoints.is_busy, checkpoints.is_wanted) = (true, false);
        checkpoints.unsaved_since_ms = None;
        let (store, inbox) = (checkpoints.store.clone(), self.inbox.clone());
        let bytes = Bytes::from(self.state.encode());
        let (saved, position, state) = (store.clone(), descriptor.clone(), bytes.clone());
        let saving = jobs::run("checkpoint", move || {
            let started = Instant::now();
            let result = saved.save(&state, &position);
            metrics().checkpoint.observe(started.elapsed().as_secs_f64());
            result
        });
        tokio::task::spawn_local(async move {
            let result = saving.await.unwrap_or_else(|_| Err(store.ended()));
            // The loop is gone only when the process ends.
            let _ = inbox.send(Event::CheckpointDone { descriptor, bytes, result }).await;
        });
    }

    fn checkpoint_done(
        &mut self,
        multi: &mut MultiRaft,
        descriptor: SnapshotDescriptor,
        bytes: Bytes,
        result: Result<(), super::checkpoint::CheckpointError>,
    ) {
        self.checkpoints.is_busy = false;
        if let Err(error) = result {
            if error.is_for_lack_of_space() {
                warn!(%error, "no space for a checkpoint: the log is kept, and it is tried again");
                self.checkpoints.not_before_ms = now_ms() + CHECKPOINT_AGAIN_MS;
                return;
            }
            // A disk that failed once is not trusted with a second try.
            self.failure = Some(error.into());
            return;
        }
        let index = descriptor.position.index;
        debug!(index, bytes = bytes.len(), "state written out");
        self.checkpoints.keep(descriptor.clone(), bytes);
        multi.set_snapshot(GROUP, descriptor);
        multi.compact(GROUP, index.saturating_sub(self.config.checkpoint.entries_kept));
    }

    fn install(&mut self, multi: &mut MultiRaft, install: InstallSnapshot) {
        let from = self.managers.get(&install.from).copied();
        let Some(from) = from.filter(|_| !self.checkpoints.is_busy) else {
            // The leader offers it again.
            multi.snapshot_failed(GROUP);
            return;
        };
        info!(manager = %install.from, index = install.snapshot.position.index, "fetching the state");
        self.checkpoints.is_busy = true;
        let (pool, inbox) = (self.pool.clone(), self.inbox.clone());
        let (store, cluster) = (self.checkpoints.store.clone(), self.state.cluster());
        tokio::task::spawn_local(async move {
            let result = snapshot::fetch(pool, from, install.snapshot, cluster, store).await;
            // The loop is gone only when the process ends.
            let _ = inbox.send(Event::SnapshotFetched { result }).await;
        });
    }

    fn snapshot_fetched(
        &mut self,
        multi: &mut MultiRaft,
        result: Result<Box<snapshot::Fetched>, String>,
    ) {
        self.checkpoints.is_busy = false;
        match result {
            Ok(fetched) => {
                let snapshot::Fetched { state, descriptor, bytes } = *fetched;
                let index = descriptor.position.index;
                info!(index, "took over the state of the leader");
                if index > self.state.applied() {
                    self.state = state;
                    self.refresh_volumes();
                    self.refresh_heard();
                }
                self.checkpoints.keep(descriptor, bytes);
                multi.snapshot_installed(GROUP, index);
            }
            Err(reason) => {
                warn!(reason, "the state could not be fetched; the leader will offer it again");
                multi.snapshot_failed(GROUP);
            }
        }
    }

    /// Nodes and managers, to send steps to.
    pub(super) fn node_addresses(&self, of: &BTreeSet<NodeId>) -> BTreeMap<NodeId, SocketAddr> {
        let known = of.iter().filter_map(|id| self.state.node(*id));
        known.map(|node| (node.id, node.address)).collect()
    }
}

impl Outbox for Replica {
    fn send(&mut self, to: NodeId, frame: Frame) {
        if let Some(address) = self.managers.get(&to) {
            self.pool.post(*address, milpa_types::Role::Manager, 0, frame.encode());
        }
    }

    fn apply(&mut self, _group: PartitionId, entries: Vec<Committed>) -> Option<u64> {
        for entry in entries {
            if self.failure.is_some() {
                break;
            }
            if let Err(failure) = self.apply_entry(entry) {
                error!(%failure, "cannot go on");
                self.failure = Some(failure);
            }
        }
        let applied = self.state.applied();
        metrics().applied.set(i64::try_from(applied).unwrap_or(i64::MAX));
        Some(applied)
    }

    fn perform(&mut self, turn: Turn) {
        for change in turn.roles.iter().filter(|change| change.group == GROUP) {
            self.role_changed(change);
        }
        if !turn.snapshots_wanted.is_empty() {
            self.checkpoints.is_wanted = true;
        }
        self.installs.extend(turn.installs);
        if !turn.contradicted.is_empty() {
            self.failure = Some(RunError::OtherLog);
        }
    }
}
