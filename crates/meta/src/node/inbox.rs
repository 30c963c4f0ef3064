//! What the node's loop is told: by connections, by its own tasks, by threads.
//!
//! One queue, drained whole before each turn of Raft: requests that arrive together form one batch
//! of the log by themselves.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use bytes::Bytes;
use milpa_host::rpc::{Peer, Reply, Service};
use milpa_raft::{LogPosition, SnapshotDescriptor};
use milpa_types::{MetaError, NodeId, PartitionId, Role, VolumeId, VolumeView};
use milpa_wire::meta::{
    CreateMetaPartition, MetaAnswer, MetaReply, MetaRequest, OperationId, StepOutcome,
};
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::freeing::{Answer, Batch};
use super::metrics::operation_of;
use super::responder::Responder;
use super::snapshot_file::FileHeader;
use crate::access;
use crate::core::Partition;

/// Requests that may wait for the next turn; what is above is told to try again later.
const REQUESTS_MAX: usize = 50_000;
/// Raft bytes that may wait for the next turn; what is above is dropped, as Raft repeats it.
const FRAME_BYTES_MAX: usize = 256 << 20;

/// Who asks, as far as the answer depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker {
    /// What it is.
    pub role: Role,
    /// The one volume that a client may use.
    pub volume: Option<VolumeId>,
}

impl Asker {
    /// This node itself, coordinating.
    pub(crate) const SELF: Asker = Asker { role: Role::Meta, volume: None };
}

/// Something for the loop to act on.
pub(crate) enum Event {
    /// A request that its role allows.
    Request {
        /// Who.
        asker: Asker,
        /// What.
        request: MetaRequest,
        /// Whom to answer.
        responder: Responder,
    },
    /// Raft messages of another node.
    Frame {
        /// Which.
        from: NodeId,
        /// Undecoded.
        bytes: Bytes,
    },
    /// A participant answered, or could not be asked for a while (`None`).
    StepAnswered {
        /// The coordinating partition, led here when the step was sent.
        partition: PartitionId,
        /// The operation.
        operation: OperationId,
        /// The step.
        number: u32,
        /// What the participant said.
        outcome: Option<Result<StepOutcome, MetaError>>,
    },
    /// A coordinator was asked whether it still knows an operation; `None` when nobody could say.
    Inquired {
        /// The participant, led here.
        partition: PartitionId,
        /// The operation.
        operation: OperationId,
        /// What the coordinator said.
        known: Option<bool>,
    },
    /// Where the replicas are that have bytes to free.
    ReplicasFound {
        /// The partition that has the orders, led here when it was asked.
        partition: PartitionId,
        /// Its volume, if anybody could say.
        view: Option<Rc<VolumeView>>,
    },
    /// A data node was asked to free bytes.
    Freed {
        /// The partition that has the orders, led here when the node was asked.
        partition: PartitionId,
        /// What it was asked.
        batch: Batch,
        /// What its replicas said; empty if it is silent.
        answers: BTreeMap<PartitionId, Answer>,
    },
    /// A new partition's definition is on disk.
    Defined {
        /// The definition.
        definition: CreateMetaPartition,
        /// Whether it really is.
        result: std::io::Result<()>,
        /// The manager.
        responder: Responder,
    },
    /// That a replica has caught up with its group is noted on disk, or will be after the next start.
    JoinNoted {
        /// Of which partition.
        partition: PartitionId,
    },
    /// A partition's deletion is noted on disk.
    DeletionNoted {
        /// Which.
        partition: PartitionId,
        /// Whether it really is.
        result: std::io::Result<()>,
        /// The manager.
        responder: Responder,
    },
    /// All of a deleted partition but the mark that says so is gone, or not: the reason was logged.
    DirectoryEmptied {
        /// Which.
        partition: PartitionId,
        /// Whether it is.
        is_empty: bool,
    },
    /// The files of a deleted partition are gone, or will be after the next start.
    DirectoryRemoved {
        /// Which.
        partition: PartitionId,
    },
    /// The node is about to stop.
    Leave,
    /// A snapshot was written, or not.
    SnapshotWritten {
        /// Of which partition.
        partition: PartitionId,
        /// Of which replica of it.
        identity: Rc<()>,
        /// Of what; the reason was logged when it failed.
        written: Option<SnapshotDescriptor>,
    },
    /// All snapshots of a partition were read again.
    SnapshotsScrubbed {
        /// Of which partition.
        partition: PartitionId,
        /// Of which replica of it.
        identity: Rc<()>,
        /// Those in whose place another has to be written; `None` if not all could be looked at. Why was logged.
        rotten: Option<Vec<LogPosition>>,
    },
    /// A snapshot was fetched from a peer, made durable and read, or not.
    SnapshotFetched {
        /// Of which partition.
        partition: PartitionId,
        /// For which replica of it.
        identity: Rc<()>,
        /// The state; the reason was logged when it failed.
        fetched: Option<Box<(FileHeader, Partition)>>,
    },
}

/// The queue.
#[derive(Default)]
pub(crate) struct Inbox {
    events: RefCell<VecDeque<Event>>,
    frame_bytes: Cell<usize>,
    wake: Notify,
}

impl Inbox {
    /// Adds an event of the node's own tasks, whose number is bounded where they are started.
    pub(crate) fn push(&self, event: Event) {
        self.events.borrow_mut().push_back(event);
        self.wake.notify_one();
    }

    /// Everything that waits.
    pub(crate) fn drain(&self) -> VecDeque<Event> {
        self.frame_bytes.set(0);
        self.events.take()
    }

    /// Waits until something was pushed since the last wait.
    pub(crate) async fn filled(&self) {
        self.wake.notified().await;
    }

    /// Whether a further request may wait.
    fn has_room(&self) -> bool {
        self.events.borrow().len() < REQUESTS_MAX
    }

    fn push_frame(&self, from: NodeId, bytes: Bytes) {
        let waiting = self.frame_bytes.get() + bytes.len();
        if waiting > FRAME_BYTES_MAX {
            return debug!(%from, "a Raft frame was dropped: too many wait");
        }
        self.frame_bytes.set(waiting);
        self.push(Event::Frame { from, bytes });
    }
}

/// The side of the inbox that faces the connections.
pub(crate) struct Front {
    /// Where requests go.
    pub inbox: Rc<Inbox>,
}

impl Service for Front {
    fn request(&self, peer: &Peer, body: Bytes, _payload: Bytes, reply: Reply) {
        let request: MetaRequest = match milpa_wire::decode(&body) {
            Ok(request) => request,
            Err(error) => {
                warn!(?peer, %error, "a request makes no sense");
                let refused: MetaReply = Err(MetaError::Invalid);
                return reply.send(&refused, Bytes::new());
            }
        };
        let responder = Responder::peer(reply, operation_of(&request));
        if !access::is_allowed(peer.role, &request) {
            warn!(?peer, operation = operation_of(&request), "a request is not for this role");
            return responder.fail(MetaError::NotPermitted);
        }
        let asker = Asker { role: peer.role, volume: peer.volume };
        if self.inbox.has_room() {
            self.inbox.push(Event::Request { asker, request, responder });
        } else {
            responder.fail(MetaError::Busy);
        }
    }

    fn one_way(&self, peer: &Peer, channel: u16, body: Bytes) {
        if peer.role == Role::Meta && peer.node.0 != 0 && channel == 0 {
            self.inbox.push_frame(peer.node, body);
        } else {
            warn!(?peer, channel, "a Raft frame from somebody who is no meta node");
        }
    }
}

/// The answer of a request that tells nothing but success.
pub(crate) fn done() -> MetaReply {
    Ok(MetaAnswer::Done)
}
