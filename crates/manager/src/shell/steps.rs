//! Asking nodes to take the planners' steps.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::rpc::Pool;
use milpa_types::{DataError, Durability, MetaError, NodeId, Role};
use milpa_wire::data::{DataReply, DataRequest};
use milpa_wire::meta::{MetaReply, MetaRequest};

use crate::core::PartitionKind;
use crate::planner::Step;

/// One node out of several candidates gets this share of the deadline at least.
const TRY_WAIT_MIN: Duration = Duration::from_millis(300);

/// What a node answered, in as far as it matters here.
enum Answer {
    Done,
    /// Another member leads; who, if known.
    Elsewhere(Option<NodeId>),
    Failed(String),
}

/// Performs one step by its deadline, which counts from when it was planned: a manager that was stopped in between is
/// not to delete what another one has had made since. Where several nodes may lead, they are asked in turn.
///
/// # Errors
///
/// What the last node said. The step is planned again while it is needed.
pub(super) async fn perform(
    pool: Pool,
    addresses: BTreeMap<NodeId, SocketAddr>,
    step: Step,
    deadline: Instant,
) -> Result<(), String> {
    let caller = Caller { pool, addresses, deadline };
    match step {
        Step::CreateMeta { node, create } => {
            caller.ask_meta(vec![node], &MetaRequest::CreatePartition(create)).await
        }
        Step::CreateData { node, create } => {
            caller.ask_data(vec![node], &DataRequest::CreatePartition(create)).await
        }
        Step::Configure { partition, configuration, lost, ask } => {
            let request = DataRequest::Configure { partition, configuration, lost };
            caller.ask_data(ask, &request).await
        }
        Step::Split { partition, end, ask } => {
            caller.ask_meta(ask, &MetaRequest::Split { partition, end }).await
        }
        Step::SetMembers { partition, voters, learners, ask } => {
            let request = MetaRequest::Configure { partition, voters, learners };
            caller.ask_meta(ask, &request).await
        }
        Step::TransferLeader { partition, from, to } => {
            caller.ask_meta(vec![from], &MetaRequest::TransferLeader { partition, to }).await
        }
        Step::Refuse { node, partition, mark } => {
            caller.ask_meta(vec![node], &MetaRequest::RefuseReplica { partition, mark }).await
        }
        Step::SetOptions { node, role: Role::Data, volume, options, .. } => {
            let relaxed = options.durability == Durability::Memory;
            caller.ask_data(vec![node], &DataRequest::SetRelaxed { volume, relaxed }).await
        }
        Step::SetOptions { node, volume, options, .. } => {
            caller.ask_meta(vec![node], &MetaRequest::SetVolumeOptions { volume, options }).await
        }
        Step::Delete { node, kind: PartitionKind::Meta, partition, deletion } => {
            let request = MetaRequest::DeletePartition { partition, deletion };
            caller.ask_meta(vec![node], &request).await
        }
        Step::Delete { node, kind: PartitionKind::Data, partition, deletion } => {
            let request = DataRequest::DeletePartition { partition, deletion };
            caller.ask_data(vec![node], &request).await
        }
    }
}

struct Caller {
    pool: Pool,
    addresses: BTreeMap<NodeId, SocketAddr>,
    deadline: Instant,
}

impl Caller {
    async fn ask_meta(&self, ask: Vec<NodeId>, request: &MetaRequest) -> Result<(), String> {
        let mut asking = Asking::new(ask);
        while let Some((node, wait)) = asking.next(self.deadline) {
            let Some(address) = self.addresses.get(&node) else { continue };
            let called = self.pool.call(*address, Role::Meta, request, Bytes::new(), wait).await;
            let answer = match called {
                Ok((MetaReply::Ok(_), _)) => Answer::Done,
                Ok((Err(MetaError::NotLeader { leader }), _)) => Answer::Elsewhere(leader),
                Ok((Err(MetaError::WrongPartition), _)) if is_meta_deletion(request) => {
                    Answer::Done
                }
                Ok((Err(error), _)) => Answer::Failed(error.to_string()),
                Err(error) => Answer::Failed(error.to_string()),
            };
            if asking.took(node, answer) {
                return Ok(());
            }
        }
        Err(asking.last)
    }

    async fn ask_data(&self, ask: Vec<NodeId>, request: &DataRequest) -> Result<(), String> {
        let mut asking = Asking::new(ask);
        while let Some((node, wait)) = asking.next(self.deadline) {
            let Some(address) = self.addresses.get(&node) else { continue };
            let called = self.pool.call(*address, Role::Data, request, Bytes::new(), wait).await;
            let answer = match called {
                Ok((DataReply::Ok(_), _)) => Answer::Done,
                Ok((Err(DataError::NotPrimary { hint }), _)) => Answer::Elsewhere(hint),
                Ok((Err(DataError::WrongPartition), _)) if is_data_deletion(request) => {
                    Answer::Done
                }
                Ok((Err(error), _)) => Answer::Failed(error.to_string()),
                Err(error) => Answer::Failed(error.to_string()),
            };
            if asking.took(node, answer) {
                return Ok(());
            }
        }
        Err(asking.last)
    }
}

/// A replica that is not there is as good as deleted.
fn is_meta_deletion(request: &MetaRequest) -> bool {
    matches!(request, MetaRequest::DeletePartition { .. })
}

fn is_data_deletion(request: &DataRequest) -> bool {
    matches!(request, DataRequest::DeletePartition { .. })
}

/// Whom to ask next. Each node is asked once, so this ends.
struct Asking {
    left: Vec<NodeId>,
    asked: Vec<NodeId>,
    last: String,
}

impl Asking {
    fn new(mut ask: Vec<NodeId>) -> Asking {
        ask.reverse();
        Asking {
            left: ask,
            asked: Vec::new(),
            last: "no member of the partition is heard".to_owned(),
        }
    }

    fn next(&mut self, deadline: Instant) -> Option<(NodeId, Duration)> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        let share = left / u32::try_from(self.left.len().max(1)).unwrap_or(u32::MAX);
        let node = self.left.pop()?;
        self.asked.push(node);
        Some((node, share.max(TRY_WAIT_MIN).min(left)))
    }

    /// Whether that was it.
    fn took(&mut self, node: NodeId, answer: Answer) -> bool {
        match answer {
            Answer::Done => return true,
            Answer::Elsewhere(leader) => {
                self.last = format!("node {node} does not lead the partition");
                if let Some(leader) = leader.filter(|leader| !self.asked.contains(leader)) {
                    self.left.retain(|other| *other != leader);
                    self.left.push(leader);
                }
            }
            Answer::Failed(reason) => self.last = format!("node {node}: {reason}"),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_followed_once_and_nobody_is_asked_twice() {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut asking = Asking::new([1, 2, 3].map(NodeId).into());
        let mut order = Vec::new();
        while let Some((node, _)) = asking.next(deadline) {
            order.push(node.0);
            // Everybody names node 3, which names node 1.
            let hint = if node.0 == 3 { 1 } else { 3 };
            assert!(!asking.took(node, Answer::Elsewhere(Some(NodeId(hint)))));
        }
        assert_eq!(order, [1, 3, 2]);
        assert_eq!(asking.last, "node 2 does not lead the partition");
    }
}
