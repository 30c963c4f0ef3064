//! Requests to meta partitions: finding the leader, trying again, applied once.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use milpa_host::rpc::CallError;
use milpa_types::{
    InodeId, MetaError, MetaPartition, MetaSlot, Next, NodeId, PartitionId, SessionId,
};
use milpa_wire::meta::{MetaAnswer, MetaRead, MetaRequest, MetaWrite};

use crate::core::{Core, Retry, lock, now};
use crate::error::FsError;
use crate::session::{Sessions, Ticket};
use crate::view::View;

/// First wait for one answer: an election takes up to a second, so a silent node is left after that.
const TRY_WAIT: Duration = Duration::from_secs(1);
/// Longest wait for one answer, when earlier ones were in vain. Not of a node that others know not to lead.
pub(crate) const TRY_WAIT_MAX: Duration = Duration::from_secs(4);
/// Redirections followed without a pause.
const REDIRECTS_MAX: u32 = 3;

/// The metadata client.
pub(crate) struct MetaClient {
    core: Arc<Core>,
    pub sessions: Arc<Sessions>,
    leaders: Mutex<BTreeMap<PartitionId, NodeId>>,
}

/// Why a request was not answered as asked.
enum Failure {
    /// An answer that is the caller's to handle.
    Answered(MetaError),
    /// The lease ran out. `executed_maybe`: an earlier try may have been carried out.
    Expired { executed_maybe: bool },
    /// No answer until the deadline.
    Unanswered(FsError),
}

impl From<Failure> for FsError {
    fn from(failure: Failure) -> FsError {
        match failure {
            Failure::Answered(error) => FsError::Meta(error),
            Failure::Expired { .. } => FsError::Stale("our session expired"),
            Failure::Unanswered(error) => error,
        }
    }
}

/// What to do after one try.
enum After {
    Done(MetaAnswer),
    Fail(Failure),
    /// Ask this node at once.
    Redirected(NodeId),
    /// Fetch the view, then try again.
    Refresh,
    /// Pause, then try again.
    Pause,
}

impl MetaClient {
    pub(crate) fn new(core: Arc<Core>) -> MetaClient {
        let sessions = Arc::new(Sessions::new(core.chance.session()));
        MetaClient { core, sessions, leaders: Mutex::default() }
    }

    /// A read, answered by the leader of the inode's partition.
    pub(crate) async fn read(&self, inode: InodeId, read: MetaRead) -> Result<MetaAnswer, FsError> {
        self.read_slot(inode.slot(), read).await
    }

    /// [`read`](MetaClient::read) by slot.
    pub(crate) async fn read_slot(
        &self,
        slot: MetaSlot,
        read: MetaRead,
    ) -> Result<MetaAnswer, FsError> {
        let mut retry = Retry::new(&self.core, operation_of_read(&read));
        let partition = self.partition(slot, &mut retry).await?;
        let reader = Some(self.sessions.current().0);
        let request = MetaRequest::Read { partition, reader, read };
        Ok(self.exchange(slot, &request, &mut retry).await?)
    }

    /// A change in the inode's partition, applied once.
    pub(crate) async fn write(
        &self,
        inode: InodeId,
        write: MetaWrite,
    ) -> Result<MetaAnswer, FsError> {
        self.write_under(None, inode, write, &mut None).await
    }

    /// The same, but under the session of this `generation` only: when its lease has run out, what it
    /// appended to data nodes belongs to nobody and may be deleted at any time.
    ///
    /// `unanswered` is the ticket of the same change, if it was sent before and its outcome is unknown; it
    /// then goes under that one. Afterwards it is there if the outcome is unknown now.
    pub(crate) async fn write_under(
        &self,
        generation: Option<u64>,
        inode: InodeId,
        write: MetaWrite,
        unanswered: &mut Option<Ticket>,
    ) -> Result<MetaAnswer, FsError> {
        let slot = inode.slot();
        let mut retry = Retry::new(&self.core, operation_of_write(&write));
        let partition = self.partition(slot, &mut retry).await?;
        loop {
            let ticket = match unanswered.take() {
                Some(ticket) if ticket.generation == self.sessions.current().1 => ticket,
                _ => self.opened_ticket(slot, partition, &mut retry).await?,
            };
            if generation.is_some_and(|generation| generation != ticket.generation) {
                return Err(FsError::Stale("our session expired before the file was changed"));
            }
            let request = write_request(partition, &ticket, write.clone());
            match self.exchange(slot, &request, &mut retry).await {
                Ok(answer) => return Ok(answer),
                Err(Failure::Expired { executed_maybe }) => {
                    self.sessions.renew(ticket.generation, self.core.chance.session());
                    // Only what nobody can have executed may go again under the new session.
                    if executed_maybe {
                        return Err(FsError::Stale("our session expired"));
                    }
                    retry.note("the session was unknown");
                    drop(ticket);
                    retry.pause().await?;
                }
                Err(failure) => {
                    *unanswered = matches!(failure, Failure::Unanswered(_)).then_some(ticket);
                    return Err(failure.into());
                }
            }
        }
    }

    /// A number for a change in a partition in which the session is open.
    async fn opened_ticket(
        &self,
        slot: MetaSlot,
        partition: PartitionId,
        retry: &mut Retry<'_>,
    ) -> Result<Ticket, FsError> {
        loop {
            self.opened_session(slot, partition, retry).await?;
            let ticket = self.begin(partition, retry).await?;
            if self.sessions.opening(partition).0 {
                return Ok(ticket);
            }
            // Another request found the session expired in between.
        }
    }

    /// Our session, known to the inode's partition. Call before bytes are appended for the inode: what has
    /// been written in a session that is unknown there is nobody's, and may be deleted at any time.
    pub(crate) async fn session_for(&self, inode: InodeId) -> Result<(SessionId, u64), FsError> {
        let slot = inode.slot();
        let mut retry = Retry::new(&self.core, "open_session");
        let partition = self.partition(slot, &mut retry).await?;
        self.opened_session(slot, partition, &mut retry).await
    }

    /// The session's id and generation, open in a partition.
    async fn opened_session(
        &self,
        slot: MetaSlot,
        partition: PartitionId,
        retry: &mut Retry<'_>,
    ) -> Result<(SessionId, u64), FsError> {
        loop {
            if let Some(current) = self.sessions.current_in(partition) {
                return Ok(current);
            }
            match self.open_session(slot, partition, retry).await {
                Err(Failure::Expired { .. }) => {
                    retry.note("the session had ended");
                    retry.pause().await?;
                }
                opened => opened?,
            }
        }
    }

    /// A number for the next request: not waited for longer than for an answer, as those that are out may
    /// have been given up and wait to be repeated.
    async fn begin(
        &self,
        partition: PartitionId,
        retry: &mut Retry<'_>,
    ) -> Result<Ticket, FsError> {
        loop {
            let begun = self.sessions.begin(partition);
            match tokio::time::timeout(retry.cap(TRY_WAIT), begun).await {
                Ok(ticket) => return Ok(ticket),
                Err(_) => retry.note("too many requests have no answer"),
            }
            retry.check(Duration::from_millis(1))?;
        }
    }

    /// Opens the session in a partition, unless it is.
    async fn open_session(
        &self,
        slot: MetaSlot,
        partition: PartitionId,
        retry: &mut Retry<'_>,
    ) -> Result<(), Failure> {
        let (opened, opening) = self.sessions.opening(partition);
        if opened {
            return Ok(());
        }
        let _one_at_a_time = opening.lock().await;
        if self.sessions.opening(partition).0 {
            return Ok(());
        }
        let ticket = self.begin(partition, retry).await.map_err(Failure::Unanswered)?;
        let request = write_request(partition, &ticket, MetaWrite::OpenSession);
        let answer = self.exchange(slot, &request, retry).await;
        if let Err(Failure::Expired { .. }) = &answer {
            self.sessions.renew(ticket.generation, self.core.chance.session());
        }
        answer?;
        self.sessions.set_opened(partition, ticket.generation);
        Ok(())
    }

    /// Ends the session wherever it is open. Best effort: what is missed ends with the lease.
    pub(crate) async fn close_sessions(&self) {
        for partition in self.sessions.opened() {
            let view = self.core.views.current();
            let Some(route) = view.volume.meta.iter().find(|p| p.id == partition) else { continue };
            let closing = async {
                let ticket = self.sessions.begin(partition).await;
                let request = write_request(partition, &ticket, MetaWrite::CloseSession);
                let mut retry = Retry::new(&self.core, "close_session");
                self.exchange(route.slot, &request, &mut retry).await
            };
            if tokio::time::timeout(TRY_WAIT_MAX, closing).await.is_err() {
                tracing::debug!(%partition, "the session could not be closed; its lease will end");
            }
        }
    }

    /// Renews the lease at every node that may lead a partition of the volume. That the session was never
    /// opened in one does not say that it is not known there: what is held open there may have had its
    /// name, and lost it, elsewhere. A session that is open nowhere is known nowhere.
    pub(crate) async fn keep_alive(&self) {
        if self.sessions.opened().is_empty() {
            return;
        }
        let (session, _) = self.sessions.current();
        let view = self.core.views.current();
        let routes = view.volume.meta.iter();
        let mut nodes: Vec<NodeId> = routes.flat_map(|p| p.members.iter().copied()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let request = MetaRequest::KeepAlive { session };
        let mut calls: Vec<crate::transport::Boxed<'_, ()>> = Vec::new();
        for node in nodes {
            let Some(address) = view.address(node) else { continue };
            let (core, request) = (&self.core, &request);
            calls.push(Box::pin(async move {
                // Its answer tells nothing that the next change does not: not all nodes lead.
                match core.transport.meta(address, request, TRY_WAIT_MAX).await {
                    Ok(_) => core.health.answered(node),
                    Err(error) => core.health.suspect(node, address, &error),
                }
            }));
        }
        crate::flights::join_all(calls).await;
    }

    /// The partition of a slot; a slot beyond the view may have been added since.
    async fn partition(
        &self,
        slot: MetaSlot,
        retry: &mut Retry<'_>,
    ) -> Result<PartitionId, FsError> {
        let mut view = self.core.views.current();
        for _ in 0..3 {
            if let Some(route) = view.meta(slot) {
                return Ok(route.id);
            }
            retry.note("no partition of the view has the inode");
            self.core.views.refresh(&*self.core.transport).await;
            view = self.core.views.current();
        }
        // Ids come from users too: FUSE handles over NFS, restored backups.
        view.meta(slot).map(|route| route.id).ok_or(FsError::Stale("no such inode in this volume"))
    }

    /// Sends a request until it is answered.
    async fn exchange(
        &self,
        slot: MetaSlot,
        request: &MetaRequest,
        retry: &mut Retry<'_>,
    ) -> Result<MetaAnswer, Failure> {
        let mut failed: Option<NodeId> = None;
        let mut redirected: Option<NodeId> = None;
        let mut redirects = 0;
        let mut patience = TRY_WAIT;
        // Whom the last member that does not lead took for the leader.
        let mut named: Option<Option<NodeId>> = None;
        let mut executed_maybe = false;
        loop {
            let view = self.core.views.current();
            let target = view.meta(slot).and_then(|route| {
                let node = redirected.take().unwrap_or_else(|| self.pick(route, failed));
                Some((route.id, node, view.address(node)?))
            });
            let after = match target {
                None => {
                    retry.note("the partition's nodes are not in the view");
                    After::Refresh
                }
                Some((partition, node, address)) => {
                    let may_lead = named.is_none_or(|leader| leader == Some(node));
                    let wait = retry.cap(if may_lead { patience } else { TRY_WAIT });
                    let outcome = self.core.transport.meta(address, request, wait).await;
                    executed_maybe |= matches!(&outcome, Err(e) if e.outcome_unknown())
                        || matches!(&outcome, Ok(Err(MetaError::OutcomeUnknown)));
                    failed = Some(node);
                    match &outcome {
                        Err(CallError::TimedOut { .. }) => {
                            patience = (patience * 2).min(TRY_WAIT_MAX);
                        }
                        Ok(Err(MetaError::NotLeader { leader })) => named = Some(*leader),
                        _ => {}
                    }
                    self.judge(partition, node, address, outcome, executed_maybe, retry)
                }
            };
            match after {
                After::Done(answer) => return Ok(answer),
                After::Fail(failure) => return Err(failure),
                After::Redirected(leader) if redirects < REDIRECTS_MAX => {
                    redirects += 1;
                    redirected = Some(leader);
                    continue;
                }
                After::Redirected(_) | After::Pause => redirects = 0,
                After::Refresh => {
                    self.core.views.refresh(&*self.core.transport).await;
                }
            }
            retry.pause().await.map_err(Failure::Unanswered)?;
        }
    }

    fn judge(
        &self,
        partition: PartitionId,
        node: NodeId,
        address: SocketAddr,
        outcome: Result<milpa_wire::meta::MetaReply, CallError>,
        executed_maybe: bool,
        retry: &mut Retry<'_>,
    ) -> After {
        let error = match outcome {
            Ok(reply) => {
                self.core.health.answered(node);
                match reply {
                    Ok(answer) => {
                        self.set_leader(partition, node);
                        return After::Done(answer);
                    }
                    Err(error) => error,
                }
            }
            Err(error) => {
                self.core.health.suspect(node, address, &error);
                self.forget_leader(partition, node);
                retry.note(&error);
                return After::Pause;
            }
        };
        if matches!(error, MetaError::UnknownSession) {
            return After::Fail(Failure::Expired { executed_maybe });
        }
        match error.next() {
            Next::GiveUp | Next::RetryElsewhere => return After::Fail(Failure::Answered(error)),
            Next::RefreshRoute => {
                self.forget_leader(partition, node);
                retry.note(format_args!("{address}: {error}"));
                return After::Refresh;
            }
            Next::RetrySame => retry.note(format_args!("{address}: {error}")),
        }
        match error {
            MetaError::NotLeader { leader: Some(leader) } if leader != node => {
                if self.core.health.is_suspect(leader) {
                    return After::Pause;
                }
                self.set_leader(partition, leader);
                After::Redirected(leader)
            }
            MetaError::NotLeader { .. } | MetaError::DiskFailed => {
                self.forget_leader(partition, node);
                After::Pause
            }
            // The leader is right and asks for patience.
            _ => {
                self.set_leader(partition, node);
                After::Pause
            }
        }
    }

    /// Whom to ask: the known leader, else the members in turn, suspects last.
    fn pick(&self, route: &MetaPartition, failed: Option<NodeId>) -> NodeId {
        let known = lock(&self.leaders).get(&route.id).copied();
        if let Some(leader) = known
            && route.members.contains(&leader)
        {
            return leader;
        }
        let hinted =
            route.leader.filter(|l| Some(*l) != failed && !self.core.health.is_suspect(*l));
        if let Some(leader) = hinted {
            return leader;
        }
        let after = route.members.iter().position(|m| Some(*m) == failed).map_or(0, |at| at + 1);
        let in_turn = || route.members.iter().cycle().skip(after).take(route.members.len());
        let healthy = in_turn().find(|m| !self.core.health.is_suspect(**m));
        healthy.or_else(|| in_turn().next()).copied().unwrap_or_default()
    }

    fn set_leader(&self, partition: PartitionId, node: NodeId) {
        lock(&self.leaders).insert(partition, node);
    }

    fn forget_leader(&self, partition: PartitionId, node: NodeId) {
        let mut leaders = lock(&self.leaders);
        if leaders.get(&partition) == Some(&node) {
            leaders.remove(&partition);
        }
    }

    /// The view that routes are taken from.
    pub(crate) fn view(&self) -> Arc<View> {
        self.core.views.current()
    }
}

fn write_request(partition: PartitionId, ticket: &Ticket, write: MetaWrite) -> MetaRequest {
    MetaRequest::Write { partition, id: ticket.id(), now: now(), write }
}

fn operation_of_read(read: &MetaRead) -> &'static str {
    match read {
        MetaRead::Lookup { .. } | MetaRead::LookupLayout { .. } => "lookup",
        MetaRead::GetAttributes { .. } | MetaRead::GetAttributesBatch { .. } => "getattr",
        MetaRead::ReadLink { .. } => "readlink",
        MetaRead::ReadDirectory { .. } => "readdir",
        MetaRead::GetLayout { .. } => "get_layout",
        MetaRead::Statistics => "statfs",
    }
}

fn operation_of_write(write: &MetaWrite) -> &'static str {
    match write {
        MetaWrite::OpenSession => "open_session",
        MetaWrite::CloseSession => "close_session",
        MetaWrite::Create { .. } => "create",
        MetaWrite::Link { .. } => "link",
        MetaWrite::Unlink { .. } => "unlink",
        MetaWrite::RemoveDirectory { .. } => "rmdir",
        MetaWrite::Rename { .. } => "rename",
        MetaWrite::SetAttributes { .. } => "setattr",
        MetaWrite::Publish(_) => "publish",
        MetaWrite::MarkFlushed { .. } => "mark_flushed",
        MetaWrite::Release { .. } => "release",
        MetaWrite::GrantInodes { .. } => "grant_inodes",
        MetaWrite::CutLost { .. }
        | MetaWrite::CutLostExtents { .. }
        | MetaWrite::CutLostRanges { .. } => "cut_lost",
    }
}
