//! What reaches the manager's loop, and how its answers leave.

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::rpc::Reply;
use milpa_raft::SnapshotDescriptor;
use milpa_types::NodeId;
use milpa_wire::manager::{ManagerReply, ManagerRequest};
use tokio::sync::{mpsc, oneshot};

use super::access::{Caller, operation};
use super::checkpoint::CheckpointError;
use super::metrics::metrics;
use super::snapshot::Fetched;
use crate::planner::Step;

/// Events that may wait. Past it requests are answered "busy" and Raft frames dropped.
pub(super) const INBOX_MAX: usize = 8192;

/// The way into the loop, for other tasks and threads.
pub(super) type Inbox = mpsc::Sender<Event>;

/// Something that happened outside the loop.
pub(super) enum Event {
    /// Somebody asks.
    Request { caller: Caller, request: Box<ManagerRequest>, responder: Responder },
    /// Another manager's Raft messages.
    Frame { from: NodeId, bytes: Bytes },
    /// A node answered, or did not; asked while leading in `term`.
    StepDone { term: u64, step: Box<Step>, result: Result<(), String> },
    /// The state was written out.
    CheckpointDone {
        descriptor: SnapshotDescriptor,
        bytes: Bytes,
        result: Result<(), CheckpointError>,
    },
    /// A snapshot of the leader's was fetched and is durable, or not.
    SnapshotFetched { result: Result<Box<Fetched>, String> },
}

enum Way {
    Rpc(Reply),
    Http(oneshot::Sender<ManagerReply>),
}

/// The duty to answer one request. Dropped unanswered, the caller learns that the outcome is
/// unknown.
pub(super) struct Responder {
    way: Way,
    op: &'static str,
    started: Instant,
    deadline: Instant,
}

impl Responder {
    pub(super) fn rpc(reply: Reply, request: &ManagerRequest) -> Responder {
        let deadline = reply.deadline();
        let (op, started) = (operation(request), Instant::now());
        Responder { way: Way::Rpc(reply), op, started, deadline }
    }

    pub(super) fn http(
        sender: oneshot::Sender<ManagerReply>,
        request: &ManagerRequest,
        deadline: Instant,
    ) -> Responder {
        let (op, started) = (operation(request), Instant::now());
        Responder { way: Way::Http(sender), op, started, deadline }
    }

    /// When the caller stops waiting.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) fn send(self, reply: ManagerReply) {
        self.send_with(reply, Bytes::new());
    }

    /// Answers with bytes beside the body.
    pub(super) fn send_with(self, reply: ManagerReply, payload: Bytes) {
        metrics().request(self.op, reply.is_ok(), self.started.elapsed());
        match self.way {
            Way::Rpc(way) => way.send(&reply, payload),
            // A caller that has gone away is not an error.
            Way::Http(sender) => drop(sender.send(reply)),
        }
    }
}
