//! File content to and from data nodes.
//!
//! * [`append`]: packets to the primary of a partition, a window of them in flight (CFS 2.2.4);
//! * [`overwrite`]: bytes in place, to the Raft leader;
//! * [`read`]: from any member, a second one when the first is slow or lacks the bytes;
//! * [`flush`]: every member's disk.
//!
//! Nothing here knows a file's layout: callers give and get columns.

pub(crate) mod append;
pub(crate) mod checksums;
pub(crate) mod flush;
pub(crate) mod overwrite;
pub(crate) mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use milpa_host::rpc::CallError;
use milpa_types::{DataError, DataPartition, ExtentId, Next, NodeId, PartitionId};
use milpa_wire::data::{DataAnswer, DataRequest};
use tokio::time::Instant;

use crate::core::{Core, lock};
use crate::view::View;

/// A partition that failed an append is chosen last for this long.
const AVOIDANCE: Duration = Duration::from_secs(2);
/// Latencies of appends that differ by less, or by a factor of two, say nothing about nodes.
const SLOWER_BY: Duration = Duration::from_millis(20);
/// Extents remembered as overwritten; beyond it all are forgotten, and the members tell again.
const OVERWRITTEN_MAX: usize = 100_000;

/// The data client.
pub(crate) struct DataClient {
    core: Arc<Core>,
    /// Raft leaders, which need not be the primaries.
    leaders: Mutex<BTreeMap<PartitionId, NodeId>>,
    /// The terms in which they lead, as they said.
    terms: Mutex<BTreeMap<PartitionId, u64>>,
    overwritten: Mutex<BTreeSet<(PartitionId, ExtentId)>>,
    avoided: Mutex<BTreeMap<PartitionId, Instant>>,
    tokens: AtomicU64,
}

/// Why one try did not succeed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// The node answered so.
    #[error("{node}: {error}")]
    Answered { node: NodeId, error: DataError },
    /// The call failed.
    #[error("{node}: {error}")]
    Call { node: NodeId, error: CallError },
    /// The answer does not fit the question.
    #[error("{node}: answer does not fit the request")]
    Nonsense { node: NodeId },
    /// Nobody to ask.
    #[error("{0}")]
    NoRoute(&'static str),
}

impl Trouble {
    /// What the node answered, if it did.
    pub(crate) fn answer(&self) -> Option<&DataError> {
        match self {
            Trouble::Answered { error, .. } => Some(error),
            _ => None,
        }
    }

    /// What may be done; a failed call is like a silent member.
    pub(crate) fn next(&self) -> Next {
        match self {
            Trouble::Answered { error, .. } => error.next(),
            Trouble::Call { .. } | Trouble::Nonsense { .. } => Next::RetryElsewhere,
            Trouble::NoRoute(_) => Next::RefreshRoute,
        }
    }
}

impl DataClient {
    pub(crate) fn new(core: Arc<Core>) -> DataClient {
        DataClient {
            core,
            leaders: Mutex::default(),
            terms: Mutex::default(),
            overwritten: Mutex::default(),
            avoided: Mutex::default(),
            tokens: AtomicU64::new(1),
        }
    }

    /// One try with one node.
    async fn call(
        &self,
        view: &View,
        node: NodeId,
        request: &DataRequest,
        payload: Bytes,
        wait: Duration,
    ) -> Result<(DataAnswer, Bytes), Trouble> {
        let address = view.address(node).ok_or(Trouble::NoRoute("node is not in the view"))?;
        match self.core.transport.data(address, request, payload, wait).await {
            Ok((reply, payload)) => {
                self.core.health.answered(node);
                if self.core.transport.is_around(address) {
                    self.core.health.reached_around(node);
                }
                match reply {
                    Ok(answer) => Ok((answer, payload)),
                    Err(error) => Err(Trouble::Answered { node, error }),
                }
            }
            Err(error) => {
                self.core.health.suspect(node, address, &error);
                Err(Trouble::Call { node, error })
            }
        }
    }

    /// A token for an append that may be repeated; unique in this client, and so in its session.
    fn token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    /// A partition for new bytes: any that takes extents, at random among the best: with all members
    /// well, else not failed lately, else whatever there is (CFS 2.3.1); of these, none with a member that
    /// has been much slower of late than others.
    fn choose<'v>(&self, view: &'v View) -> Option<&'v DataPartition> {
        let mut best: Vec<&DataPartition> = Vec::new();
        let mut best_rank = u8::MAX;
        for partition in view.volume.data.iter().filter(|p| p.takes_extents) {
            let rank = self.rank(view, partition);
            if rank < best_rank {
                best_rank = rank;
                best.clear();
            }
            if rank == best_rank {
                best.push(partition);
            }
        }
        let latency = |of: &DataPartition| self.core.health.append_latency(&of.members);
        let timed: Vec<_> =
            best.into_iter().map(|partition| (latency(partition), partition)).collect();
        let limit = timed.iter().map(|(latency, _)| *latency).min()? * 2 + SLOWER_BY;
        let fast: Vec<_> = timed.into_iter().filter(|(latency, _)| *latency <= limit).collect();
        fast.get(self.core.chance.below(fast.len())).map(|(_, partition)| *partition)
    }

    fn rank(&self, view: &View, partition: &DataPartition) -> u8 {
        let avoided = lock(&self.avoided).get(&partition.id).copied();
        if avoided.is_some_and(|since| since.elapsed() < AVOIDANCE) {
            return 3;
        }
        let unwell = |m: &NodeId| self.core.health.is_suspect(*m) || !view.is_active(*m);
        if self.core.health.is_suspect(partition.primary) {
            return 2;
        }
        u8::from(partition.members.iter().any(unwell))
    }

    fn avoid(&self, partition: PartitionId) {
        lock(&self.avoided).insert(partition, Instant::now());
    }

    /// Whom to ask as the Raft leader first.
    fn leader(&self, partition: &DataPartition) -> NodeId {
        let known = lock(&self.leaders).get(&partition.id).copied();
        known.filter(|l| partition.members.contains(l)).unwrap_or(partition.primary)
    }

    fn set_leader(&self, partition: PartitionId, leader: NodeId) {
        lock(&self.leaders).insert(partition, leader);
    }

    fn term(&self, partition: PartitionId) -> u64 {
        lock(&self.terms).get(&partition).copied().unwrap_or_default()
    }

    fn set_term(&self, partition: PartitionId, term: u64) {
        lock(&self.terms).insert(partition, term);
    }

    fn forget_leader(&self, partition: PartitionId) {
        lock(&self.leaders).remove(&partition);
    }

    fn is_overwritten(&self, partition: PartitionId, extent: ExtentId) -> bool {
        lock(&self.overwritten).contains(&(partition, extent))
    }

    fn set_overwritten(&self, partition: PartitionId, extent: ExtentId) {
        let mut overwritten = lock(&self.overwritten);
        if overwritten.len() >= OVERWRITTEN_MAX {
            overwritten.clear();
        }
        overwritten.insert((partition, extent));
    }
}
