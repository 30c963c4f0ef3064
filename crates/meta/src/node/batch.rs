//! Several requests in one: in order, each with its own answer.

use std::rc::Rc;
use std::time::Duration;

use milpa_host::clock::Instant;
use milpa_types::MetaError;
use milpa_wire::meta::{BATCH_REQUESTS_MAX, MetaAnswer, MetaReply, MetaRequest};
use tokio::sync::oneshot;

use super::context::Context;
use super::inbox::{Asker, Event};
use super::metrics::operation_of;
use super::responder::Responder;
use crate::access;

/// Runs a batch. Neighbours of the same kind go together, as writes are applied in the order in
/// which they are proposed; a read waits for the writes before it, and the other way round.
pub(crate) async fn run_batch(
    ctx: Rc<Context>,
    asker: Asker,
    requests: Vec<MetaRequest>,
    responder: Responder,
) {
    if requests.len() > BATCH_REQUESTS_MAX {
        return responder.fail(MetaError::Invalid);
    }
    let wait = responder.deadline().saturating_duration_since(Instant::now());
    let mut answers: Vec<MetaReply> = Vec::with_capacity(requests.len());
    let mut waiting: Vec<(usize, oneshot::Receiver<MetaReply>)> = Vec::new();
    let mut kind_before = None;
    for (position, request) in requests.into_iter().enumerate() {
        // Stands until the true answer comes.
        answers.push(Err(MetaError::OutcomeUnknown));
        let kind = std::mem::discriminant(&request);
        if kind_before.replace(kind) != Some(kind) {
            settle(&mut waiting, &mut answers, wait).await;
        }
        if let Err(error) = check(asker, &request) {
            fill(&mut answers, position, Err(error));
            continue;
        }
        let (responder, answer) = Responder::task(operation_of(&request), wait);
        ctx.inbox.push(Event::Request { asker, request, responder });
        waiting.push((position, answer));
    }
    settle(&mut waiting, &mut answers, wait).await;
    responder.send(&Ok(MetaAnswer::Batch(answers)));
}

fn check(asker: Asker, request: &MetaRequest) -> Result<(), MetaError> {
    match request {
        // Batches do not nest, and a snapshot's bytes have no place in one.
        MetaRequest::Batch(_) | MetaRequest::FetchSnapshot { .. } => Err(MetaError::Invalid),
        request if access::is_allowed(asker.role, request) => Ok(()),
        _ => Err(MetaError::NotPermitted),
    }
}

/// Waits for the answers; each request has its own deadline, so this ends.
async fn settle(
    waiting: &mut Vec<(usize, oneshot::Receiver<MetaReply>)>,
    answers: &mut [MetaReply],
    wait: Duration,
) {
    let end = Instant::now() + wait;
    for (position, answer) in waiting.drain(..) {
        if let Ok(Ok(answer)) = tokio::time::timeout_at(end, answer).await {
            fill(answers, position, answer);
        }
    }
}

fn fill(answers: &mut [MetaReply], position: usize, answer: MetaReply) {
    if let Some(place) = answers.get_mut(position) {
        *place = answer;
    }
}
