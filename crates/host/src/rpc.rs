//! Requests and answers between processes: deadlines, pipelining, bounded queues, proven peers.
//!
//! A server implements [`Service`] and calls [`serve`]; a caller has a [`Pool`] of connections, one
//! for each address, made on demand. Requests of one connection are sent in the order in which
//! [`Pool::call`] was first polled, and many are in flight at once; answers come in any order.
//!
//! # What a failed call means
//!
//! [`CallError::Unreachable`] and [`CallError::Refused`]: the request was not sent. `Lost` and
//! `TimedOut`: it was, and nobody knows whether it was carried out. Nothing here repeats a request.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{ClusterId, NodeId, Role, VolumeId};
use milpa_wire::frame::{Frame, FrameKind};
use milpa_wire::handshake::Claim;
use milpa_wire::{decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::clock::Instant;
use crate::connection::{self, Outbox, OutboxClosed};
use crate::descriptors;
use crate::detour::{self, Carried, Opened};
use crate::handshake::{self, Admitted, HandshakeError};
use crate::keys::Key;
use crate::net::{Listener, Stream};

/// A connection attempt, handshake included, may take this long.
const CONNECT_WAIT: Duration = Duration::from_secs(2);
/// A caller that does not finish its handshake by then is cut off.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// After a failed attempt the same address is not tried again for this long.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// Connections that one server holds at most.
const CONNECTIONS_MAX: usize = 20_000;
/// Of the descriptors of the process: files have to be opened, too.
const CONNECTIONS_PERCENT: u64 = 40;

/// Who we are, for every handshake.
#[derive(Debug)]
pub struct Identity {
    cluster: OnceLock<ClusterId>,
    role: Role,
    node: AtomicU32,
    credential: Credential,
    volume: OnceLock<VolumeId>,
}

/// What we can prove.
#[derive(Clone, Debug)]
pub enum Credential {
    /// The cluster's secret: servers and operators.
    Cluster(Key),
    /// The access key of a volume: clients.
    Volume {
        /// Its name.
        name: String,
        /// Its access key.
        key: Key,
    },
}

impl Identity {
    /// A process of `role` with this credential; `cluster` may be unknown to a client at first.
    #[must_use]
    pub fn new(cluster: Option<ClusterId>, role: Role, credential: Credential) -> Identity {
        let cell = OnceLock::new();
        if let Some(cluster) = cluster {
            let _ = cell.set(cluster);
        }
        let (node, volume) = (AtomicU32::new(0), OnceLock::new());
        Identity { cluster: cell, role, node, credential, volume }
    }

    /// The cluster, once known.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster.get().copied()
    }

    /// Learns the cluster; the first one learned stays.
    pub fn set_cluster(&self, cluster: ClusterId) {
        let _ = self.cluster.set(cluster);
    }

    /// What we are.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Our node id; 0 before the first registration.
    #[must_use]
    pub fn node(&self) -> NodeId {
        NodeId(self.node.load(Ordering::Relaxed))
    }

    /// Learns the node id that the manager gave.
    pub fn set_node(&self, node: NodeId) {
        self.node.store(node.0, Ordering::Relaxed);
    }

    /// A client learns its volume's id, which meta and data nodes know it by.
    pub fn set_volume(&self, volume: VolumeId) {
        let _ = self.volume.set(volume);
    }

    /// What we can prove.
    #[must_use]
    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    pub(crate) fn key(&self) -> &Key {
        match &self.credential {
            Credential::Cluster(key) | Credential::Volume { key, .. } => key,
        }
    }

    pub(crate) fn claim(&self) -> Claim {
        match (&self.credential, self.volume.get()) {
            (Credential::Cluster(_), _) => Claim::Cluster,
            (Credential::Volume { .. }, Some(volume)) => Claim::Volume(*volume),
            (Credential::Volume { name, .. }, None) => Claim::VolumeNamed(name.clone()),
        }
    }
}

/// Who is at the other end, as the handshake proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// What it is.
    pub role: Role,
    /// Its node id; 0 for clients, operators and nodes not yet registered.
    pub node: NodeId,
    /// The one volume that a client may use; `None` for everybody else.
    pub volume: Option<VolumeId>,
    /// Where it calls from.
    pub address: SocketAddr,
}

/// What a server does with what arrives. Called on the node's own thread; must not block.
pub trait Service: 'static {
    /// A request. Answer through `reply`, now or later, from any thread.
    fn request(&self, peer: &Peer, body: Bytes, payload: Bytes, reply: Reply);

    /// A message that wants no answer.
    fn one_way(&self, _peer: &Peer, _channel: u16, _body: Bytes) {}

    /// The id of a volume, for a client's first call. Only managers know.
    fn volume_named(&self, _name: &str) -> Option<VolumeId> {
        None
    }

    /// Whether a connection is to be carried to this address, for a caller that does not reach it: asked once for each. Only
    /// managers do that.
    fn carries_to(&self, _address: SocketAddr) -> bool {
        false
    }
}

/// The right and duty to answer one request. Dropped unanswered, the caller gets
/// [`CallError::Lost`] at once instead of waiting.
#[derive(Debug)]
pub struct Reply {
    outbox: Option<Arc<Outbox>>,
    id: u64,
    deadline: Instant,
}

impl Reply {
    /// Answers. A caller that has gone away is not an error.
    pub fn send<T: Serialize>(mut self, body: &T, payload: Bytes) {
        self.send_body(encode(body).into(), payload);
    }

    /// When the caller stops waiting.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    fn send_body(&mut self, body: Bytes, payload: Bytes) {
        let kind = FrameKind::Reply;
        let frame = Frame { kind, channel: 0, id: self.id, wait_ms: 0, body, payload };
        if let Some(outbox) = self.outbox.take()
            && outbox.push(&frame).is_err()
        {
            outbox.close();
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        // An empty body is no message: the caller reads it as "lost".
        self.send_body(Bytes::new(), Bytes::new());
    }
}

/// Accepts connections until the future is dropped. Run it inside a `LocalSet`.
///
/// # Errors
///
/// Only when the listening socket itself fails.
pub async fn serve(
    listener: Listener,
    identity: Arc<Identity>,
    service: Rc<dyn Service>,
) -> io::Result<()> {
    let (connections, carried) = (Rc::new(()), Carried::default());
    let connections_max = descriptors::share(CONNECTIONS_PERCENT, CONNECTIONS_MAX);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) if is_transient(&error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(RECONNECT_PAUSE).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        if Rc::strong_count(&connections) > connections_max {
            warn!(%address, limit = connections_max, "too many connections: one refused");
            continue;
        }
        let (identity, service, guard, carried) =
            (Arc::clone(&identity), Rc::clone(&service), Rc::clone(&connections), carried.clone());
        tokio::task::spawn_local(async move {
            serve_connection(stream, address, &identity, &*service, &carried).await;
            drop(guard);
        });
    }
}

/// Failures of accept(2) that concern one connection or pass by themselves.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNABORTED
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOBUFS
                | libc::ENOMEM
                | libc::EPROTO
                | libc::EINTR
        )
    )
}

async fn serve_connection(
    mut stream: Stream,
    address: SocketAddr,
    identity: &Identity,
    service: &dyn Service,
    carried: &Carried,
) {
    let _ = stream.tune();
    let admitted = handshake::answer(&mut stream, identity, service);
    let Admitted { peer, onward } = match tokio::time::timeout(HANDSHAKE_WAIT, admitted).await {
        Ok(Ok(admitted)) => admitted,
        Ok(Err(HandshakeError::Refused(reason))) => {
            warn!(%address, %reason, "refused a connection");
            return;
        }
        Ok(Err(error)) => {
            debug!(%address, %error, "a connection ended during its handshake");
            return;
        }
        Err(_) => {
            warn!(%address, "refused a connection: its handshake took too long");
            return;
        }
    };
    if let Some(to) = onward {
        return detour::carry(stream, &peer, to, service, carried).await;
    }
    debug!(?peer, "connected");
    let (outbox, stream) = (Arc::new(Outbox::default()), Arc::new(stream));
    outbox.open(Arc::clone(&stream));
    let received = connection::receive(&stream, |frame| dispatch(frame, &peer, &outbox, service));
    // Fair though biased: receiving yields after some frames, and then it is sending's turn.
    tokio::select! {
        biased;
        result = received => {
            if let Err(error) = result { debug!(?peer, %error, "connection failed") }
        }
        result = outbox.drain(&stream) => {
            if let Err(error) = result { debug!(?peer, %error, "connection failed") }
        }
    }
    outbox.close();
}

fn dispatch(frame: Frame, peer: &Peer, outbox: &Arc<Outbox>, service: &dyn Service) {
    match frame.kind {
        FrameKind::Request => {
            let deadline = Instant::now() + Duration::from_millis(u64::from(frame.wait_ms));
            let reply = Reply { outbox: Some(Arc::clone(outbox)), id: frame.id, deadline };
            service.request(peer, frame.body, frame.payload, reply);
        }
        FrameKind::OneWay => service.one_way(peer, frame.channel, frame.body),
        FrameKind::Reply | FrameKind::Handshake => {
            warn!(?peer, kind = ?frame.kind, "peer sent a frame out of turn; closing");
            outbox.close();
        }
    }
}

/// Failure of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// No connection: the request was not sent. Safe to send elsewhere.
    #[error("{address} cannot be reached: {reason}")]
    Unreachable {
        /// Whom we called.
        address: SocketAddr,
        /// What the socket said.
        reason: String,
    },
    /// The handshake failed: repeating it changes nothing.
    #[error("{address} refused the connection: {reason}")]
    Refused {
        /// Whom we called.
        address: SocketAddr,
        /// What it or we did not accept.
        reason: String,
    },
    /// The connection broke after the request was queued: outcome unknown.
    #[error("connection to {address} was lost before the answer")]
    Lost {
        /// Whom we called.
        address: SocketAddr,
    },
    /// No answer in time: outcome unknown.
    #[error("{address} did not answer within {waited_ms} ms")]
    TimedOut {
        /// Whom we called.
        address: SocketAddr,
        /// How long we waited.
        waited_ms: u64,
    },
    /// The answer is not a message of this protocol version.
    #[error("{address} gave an answer that makes no sense")]
    BadAnswer {
        /// Whom we called.
        address: SocketAddr,
    },
}

impl CallError {
    /// Whether the request may have been carried out.
    #[must_use]
    pub fn outcome_unknown(&self) -> bool {
        match self {
            CallError::Unreachable { .. } | CallError::Refused { .. } => false,
            CallError::Lost { .. } | CallError::TimedOut { .. } | CallError::BadAnswer { .. } => {
                true
            }
        }
    }
}

/// Connections to other processes, one for each address, made on demand. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pool {
    shared: Arc<PoolShared>,
}

#[derive(Debug)]
struct PoolShared {
    identity: Arc<Identity>,
    /// Who carries connections to servers that are not reached otherwise.
    managers: Vec<SocketAddr>,
    /// How many connections lead through one of them: nearly always none.
    around: AtomicUsize,
    connections: Mutex<BTreeMap<SocketAddr, Arc<Connection>>>,
}

/// A connection that is open, being opened, or was broken.
#[derive(Debug)]
struct Connection {
    address: SocketAddr,
    /// Who we said we are in the handshake.
    introduced_as: NodeId,
    /// It leads through a manager.
    is_around: AtomicBool,
    outbox: Outbox,
    next_id: AtomicU64,
    pending: Mutex<Pending>,
}

/// Body and payload of an answer.
type Answered = Result<(Bytes, Bytes), CallError>;

#[derive(Debug, Default)]
struct Pending {
    waiters: BTreeMap<u64, oneshot::Sender<Answered>>,
    /// Why the connection is over, and since when.
    broken: Option<(CallError, Instant)>,
    /// There is a better way: it ends with the last answer that is waited for.
    is_left: bool,
}

impl Pool {
    /// A pool that introduces itself as `identity`.
    #[must_use]
    pub fn new(identity: Arc<Identity>) -> Pool {
        Pool::around(identity, Vec::new())
    }

    /// The same, which reaches servers through one of these `managers` where there is no direct way.
    #[must_use]
    pub fn around(identity: Arc<Identity>, managers: Vec<SocketAddr>) -> Pool {
        let (around, connections) = (AtomicUsize::new(0), Mutex::default());
        Pool { shared: Arc::new(PoolShared { identity, managers, around, connections }) }
    }

    /// Whether the connection to a server leads through a manager.
    #[must_use]
    pub fn is_around(&self, to: SocketAddr) -> bool {
        if self.shared.around.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.get(&to).is_some_and(|it| it.is_around.load(Ordering::Relaxed))
    }

    /// Who this pool says it is.
    #[must_use]
    pub fn identity(&self) -> &Arc<Identity> {
        &self.shared.identity
    }

    /// Sends a request and waits for its answer. Dropping the future forgets the answer, not the
    /// request.
    ///
    /// # Errors
    ///
    /// [`CallError`]; see the module documentation for what each means.
    pub async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        to: SocketAddr,
        expects: Role,
        request: &Q,
        payload: Bytes,
        wait: Duration,
    ) -> Result<(A, Bytes), CallError> {
        let connection = self.connection(to, expects);
        let (id, answer) = connection.begin(encode(request).into(), payload, wait)?;
        let _forget = ForgetOnDrop { connection: &connection, id };
        let waited_ms = wait.as_millis() as u64;
        let (body, payload) = match tokio::time::timeout(wait, answer).await {
            Ok(Ok(answered)) => answered?,
            Ok(Err(_)) => return Err(CallError::Lost { address: to }),
            Err(_) => return Err(CallError::TimedOut { address: to, waited_ms }),
        };
        if body.is_empty() {
            return Err(CallError::Lost { address: to });
        }
        let answer = decode(&body).map_err(|_| CallError::BadAnswer { address: to })?;
        Ok((answer, payload))
    }

    /// Sends a one-way message. It waits for a connection that is being made, and is dropped if
    /// there is none or its queue is full: Raft repeats what matters.
    pub fn post(&self, to: SocketAddr, expects: Role, channel: u16, body: Bytes) {
        let kind = FrameKind::OneWay;
        let frame = Frame { kind, channel, id: 0, wait_ms: 0, body, payload: Bytes::new() };
        if self.connection(to, expects).outbox.push_now(&frame).is_err() {
            debug!(%to, channel, "a one-way message was dropped");
        }
    }

    fn connection(&self, to: SocketAddr, expects: Role) -> Arc<Connection> {
        let mut connections =
            self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let introduced_as = self.shared.identity.node();
        match connections.get(&to) {
            // A node introduces itself anew once it has been told its id.
            Some(connection) if connection.introduced_as != introduced_as => {
                connection.outbox.close();
            }
            Some(connection) if !connection.may_be_replaced() => return Arc::clone(connection),
            _ => {}
        }
        let connection = Arc::new(Connection {
            address: to,
            introduced_as,
            is_around: AtomicBool::new(false),
            outbox: Outbox::default(),
            next_id: AtomicU64::new(1),
            pending: Mutex::default(),
        });
        connections.insert(to, Arc::clone(&connection));
        let (shared, opened) = (Arc::clone(&self.shared), Arc::clone(&connection));
        tokio::spawn(async move { opened.run(&shared, expects).await });
        connection
    }
}

impl Connection {
    fn lock(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_be_replaced(&self) -> bool {
        let pending = self.lock();
        let is_over = |(_, since): &(CallError, Instant)| since.elapsed() >= RECONNECT_PAUSE;
        pending.is_left || pending.broken.as_ref().is_some_and(is_over)
    }

    /// Queues a request and registers who waits for its answer.
    fn begin(
        &self,
        body: Bytes,
        payload: Bytes,
        wait: Duration,
    ) -> Result<(u64, oneshot::Receiver<Answered>), CallError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        {
            let mut pending = self.lock();
            if let Some((error, _)) = &pending.broken {
                return Err(self.not_sent(error));
            }
            pending.waiters.insert(id, sender);
        }
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let kind = FrameKind::Request;
        let frame = Frame { kind, channel: 0, id, wait_ms, body, payload };
        if let Err(OutboxClosed) = self.outbox.push_now(&frame) {
            self.lock().waiters.remove(&id);
            let reason = "its queue is full or the connection is closing".to_owned();
            return Err(CallError::Unreachable { address: self.address, reason });
        }
        Ok((id, receiver))
    }

    /// What a request gets that was never sent because the connection had broken before.
    fn not_sent(&self, broken: &CallError) -> CallError {
        match broken {
            CallError::Refused { .. } | CallError::Unreachable { .. } => broken.clone(),
            other => CallError::Unreachable { address: self.address, reason: other.to_string() },
        }
    }

    /// Connects, then moves frames until the connection breaks; then tells everyone who waits.
    async fn run(&self, shared: &PoolShared, expects: Role) {
        let (address, identity) = (self.address, &shared.identity);
        let opening = detour::open(address, identity, expects, &shared.managers);
        let error = match tokio::time::timeout(CONNECT_WAIT, opening).await {
            Ok(Ok(Opened { stream, is_around })) => {
                let exchange = self.exchange(Arc::new(stream));
                if is_around {
                    self.is_around.store(true, Ordering::Relaxed);
                    shared.around.fetch_add(1, Ordering::Relaxed);
                    let direct = detour::wait_for_direct(address, identity, expects);
                    self.exchange_until(exchange, direct).await;
                    shared.around.fetch_sub(1, Ordering::Relaxed);
                    self.is_around.store(false, Ordering::Relaxed);
                } else {
                    exchange.await;
                }
                CallError::Lost { address }
            }
            Ok(Err(HandshakeError::Refused(reason))) => CallError::Refused { address, reason },
            Ok(Err(HandshakeError::Io(e))) => {
                CallError::Unreachable { address, reason: e.to_string() }
            }
            Ok(Err(other)) => CallError::Refused { address, reason: other.to_string() },
            Err(_) => {
                let reason = format!("no connection within {} s", CONNECT_WAIT.as_secs());
                CallError::Unreachable { address, reason }
            }
        };
        if let CallError::Refused { reason, .. } = &error {
            warn!(%address, %reason, "connection refused");
        }
        self.outbox.close();
        let mut pending = self.lock();
        pending.broken = Some((error.clone(), Instant::now()));
        for (_, waiter) in std::mem::take(&mut pending.waiters) {
            let _ = waiter.send(Err(error.clone()));
        }
    }

    /// Exchanges frames, and no new requests any more once there is a better way.
    async fn exchange_until(
        &self,
        exchange: impl Future<Output = ()>,
        better: impl Future<Output = ()>,
    ) {
        tokio::pin!(exchange);
        tokio::select! {
            biased;
            () = &mut exchange => return,
            () = better => {}
        }
        {
            let mut pending = self.lock();
            pending.is_left = true;
            self.close_if_done(&pending);
        }
        exchange.await;
    }

    fn close_if_done(&self, pending: &Pending) {
        if pending.is_left && pending.waiters.is_empty() {
            self.outbox.close();
        }
    }

    async fn exchange(&self, stream: Arc<Stream>) {
        self.outbox.open(Arc::clone(&stream));
        let received = connection::receive(&stream, |frame| self.answered(frame));
        // As in `serve_connection`.
        let result = tokio::select! {
            biased;
            result = received => result,
            result = self.outbox.drain(&stream) => result,
        };
        match result {
            Ok(()) => debug!(address = %self.address, "connection closed"),
            Err(error) => info!(address = %self.address, %error, "connection lost"),
        }
    }

    /// Nobody waits for this answer from now on.
    fn forget(&self, id: u64) -> Option<oneshot::Sender<Answered>> {
        let mut pending = self.lock();
        let waiter = pending.waiters.remove(&id);
        self.close_if_done(&pending);
        waiter
    }

    fn answered(&self, frame: Frame) {
        if frame.kind != FrameKind::Reply {
            warn!(address = %self.address, "server sent a frame out of turn; closing");
            return self.outbox.close();
        }
        // A caller that no longer waits took its entry away: nothing to do.
        if let Some(waiter) = self.forget(frame.id) {
            let _ = waiter.send(Ok((frame.body, frame.payload)));
        }
    }
}

/// Takes the entry of a call away that nobody waits for any more.
struct ForgetOnDrop<'a> {
    connection: &'a Connection,
    id: u64,
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        self.connection.forget(self.id);
    }
}

#[cfg(test)]
mod tests;
