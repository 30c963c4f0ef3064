//! Who waits for the answer to a request, and how it is told.

use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::rpc::Reply;
use milpa_types::MetaError;
use milpa_wire::frame::BODY_BYTES_MAX;
use milpa_wire::meta::{Content, MetaAnswer, MetaReply};
use tokio::sync::oneshot;

use super::metrics::{Metrics, Operation};

/// Answers leave this long before the caller stops waiting, so that they still arrive.
const MARGIN: Duration = Duration::from_millis(30);

/// The right and duty to answer one request.
#[derive(Debug)]
pub(crate) struct Responder {
    to: Target,
    operation: Operation,
    started: Instant,
    deadline: Instant,
}

#[derive(Debug)]
enum Target {
    /// A connection.
    Peer(Reply),
    /// A task of this node: a batch, or a coordinator whose participant is led here too.
    Task(oneshot::Sender<MetaReply>),
}

impl Responder {
    /// For a request that arrived on a connection.
    pub(crate) fn peer(reply: Reply, operation: Operation) -> Responder {
        let deadline = reply.deadline();
        let deadline = deadline.checked_sub(MARGIN).unwrap_or(deadline);
        Responder { to: Target::Peer(reply), operation, started: Instant::now(), deadline }
    }

    /// For a request of this node to itself.
    pub(crate) fn task(
        operation: Operation,
        wait: Duration,
    ) -> (Responder, oneshot::Receiver<MetaReply>) {
        let (sender, receiver) = oneshot::channel();
        let started = Instant::now();
        let to = Target::Task(sender);
        (Responder { to, operation, started, deadline: started + wait }, receiver)
    }

    /// Until when an answer is of use.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Answers.
    pub(crate) fn send(self, reply: &MetaReply) {
        self.send_with(reply, Bytes::new());
    }

    /// Answers with a payload, which only a connection can carry.
    pub(crate) fn send_with(self, reply: &MetaReply, payload: Bytes) {
        Metrics::get().answered(self.operation, self.started.elapsed(), reply);
        match self.to {
            Target::Peer(peer) if is_too_large(reply) => {
                peer.send(&MetaReply::Err(MetaError::TooLarge), Bytes::new());
            }
            Target::Peer(peer) => peer.send(reply, payload),
            // A task that no longer waits is not an error.
            Target::Task(task) => drop(task.send(reply.clone())),
        }
    }

    /// Refuses.
    pub(crate) fn fail(self, error: MetaError) {
        self.send(&Err(error));
    }
}

/// Whether the reply would not fit a frame. Encoding it to see is left out where its length in
/// entries rules that out.
fn is_too_large(reply: &MetaReply) -> bool {
    reply.as_ref().is_ok_and(|answer| size_max(answer) > BODY_BYTES_MAX)
        && milpa_wire::encode(reply).len() > BODY_BYTES_MAX
}

/// An upper bound of an answer's encoded bytes: 512 for an entry with a long name and all
/// attributes, 64 for a plain segment.
fn size_max(answer: &MetaAnswer) -> usize {
    let content_max = |content: &Content| match content {
        Content::Inline(bytes) => bytes.len(),
        Content::Segments(segments) => 64 * segments.len(),
    };
    512 + match answer {
        MetaAnswer::AttributesBatch(all) => 512 * all.len(),
        MetaAnswer::Page { entries, .. } => 512 * entries.len(),
        MetaAnswer::Layout { content, .. } => content_max(content),
        MetaAnswer::EntryLayout { content, .. } => content.as_ref().map_or(0, content_max),
        MetaAnswer::Batch(all) => {
            all.iter().map(|one| one.as_ref().map_or(512, size_max)).sum::<usize>()
        }
        MetaAnswer::Verdicts(verdicts) => verdicts.len(),
        MetaAnswer::Report(report) => 512 * report.partitions.len(),
        _ => 4096,
    }
}
