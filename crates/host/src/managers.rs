//! The managers as one: finds their leader and follows it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{ManagerError, Next, Role};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};

use crate::clock::Instant;
use crate::rpc::{CallError, Pool};

/// One try with one manager takes at most this long, so that a dead one costs little.
const TRY_WAIT: Duration = Duration::from_secs(1);
/// Creating a volume waits for its partitions' leaders.
const LONG_TRY_WAIT: Duration = Duration::from_secs(30);
/// Pause between tries when no manager leads.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// A client of the replicated manager. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Managers {
    pool: Pool,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    addresses: Vec<SocketAddr>,
    next: AtomicUsize,
    leader: Mutex<Option<SocketAddr>>,
}

/// Failure of a request to the managers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManagersError {
    /// An answer: the leader said no.
    #[error(transparent)]
    Answered(#[from] ManagerError),
    /// The handshake failed: wrong key, wrong cluster, wrong volume name.
    #[error("{address} refused: {reason}")]
    Refused {
        /// Who.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// Nobody answered in time.
    #[error("no manager answered within {waited_ms} ms (asked {asked}; last: {last})")]
    Unreachable {
        /// How long.
        waited_ms: u64,
        /// Whom, comma-separated.
        asked: String,
        /// Last failure.
        last: String,
    },
    /// The request was sent and the answer lost; it is not one that may be repeated.
    #[error("the answer was lost; look whether it was done, then repeat it if not")]
    OutcomeUnknown,
}

impl Managers {
    /// Managers at these addresses; one answering address is enough.
    #[must_use]
    pub fn new(pool: Pool, addresses: Vec<SocketAddr>) -> Managers {
        let shared = Shared { addresses, next: AtomicUsize::new(0), leader: Mutex::new(None) };
        Managers { pool, shared: Arc::new(shared) }
    }

    /// The pool in use.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Asks the leader, looking for it as long as `wait` allows.
    ///
    /// # Errors
    ///
    /// [`ManagersError`]. Requests that change something are repeated only while it is certain
    /// that they were not carried out.
    pub async fn call(
        &self,
        request: &ManagerRequest,
        wait: Duration,
    ) -> Result<ManagerAnswer, ManagersError> {
        let started = Instant::now();
        let mut last = String::from("nobody was asked");
        let mut refusals = 0;
        while started.elapsed() < wait {
            let address = self.target();
            let one_try = try_wait(request).min(wait.saturating_sub(started.elapsed()));
            let called =
                self.pool.call(address, Role::Manager, request, Bytes::new(), one_try).await;
            match called {
                Ok((ManagerReply::Ok(answer), _)) => {
                    self.set_leader(Some(address));
                    return Ok(answer);
                }
                Ok((Err(ManagerError::NotLeader { leader }), _)) => {
                    last = format!("{address} does not lead");
                    self.set_leader(leader.filter(|l| *l != address));
                }
                Ok((Err(error), _)) if error.next() == Next::RetrySame => {
                    last = error.to_string();
                    self.set_leader(None);
                }
                Ok((Err(error), _)) => return Err(error.into()),
                // One that lags behind may not know a new volume yet: ask every one of them.
                Err(CallError::Refused { address, reason }) => {
                    refusals += 1;
                    if refusals >= self.shared.addresses.len() {
                        return Err(ManagersError::Refused { address, reason });
                    }
                    last = format!("{address} refused: {reason}");
                    self.set_leader(None);
                }
                Err(error) if error.outcome_unknown() && !may_be_repeated(request) => {
                    return Err(ManagersError::OutcomeUnknown);
                }
                Err(error) => {
                    last = error.to_string();
                    self.set_leader(None);
                }
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        let asked: Vec<String> = self.shared.addresses.iter().map(ToString::to_string).collect();
        let waited_ms = started.elapsed().as_millis() as u64;
        Err(ManagersError::Unreachable { waited_ms, asked: asked.join(", "), last })
    }

    fn target(&self) -> SocketAddr {
        let leader = *self.shared.leader.lock().unwrap_or_else(PoisonError::into_inner);
        leader.unwrap_or_else(|| {
            let turn = self.shared.next.fetch_add(1, Ordering::Relaxed);
            let count = self.shared.addresses.len().max(1);
            let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
            self.shared.addresses.get(turn % count).copied().unwrap_or(unspecified)
        })
    }

    fn set_leader(&self, leader: Option<SocketAddr>) {
        *self.shared.leader.lock().unwrap_or_else(PoisonError::into_inner) = leader;
    }
}

fn try_wait(request: &ManagerRequest) -> Duration {
    match request {
        ManagerRequest::CreateVolume { .. } | ManagerRequest::GrowVolume { .. } => LONG_TRY_WAIT,
        _ => TRY_WAIT,
    }
}

/// Whether carrying out the request twice is the same as once.
fn may_be_repeated(request: &ManagerRequest) -> bool {
    use ManagerRequest as R;
    match request {
        R::CreateVolume { .. }
        | R::DeleteVolume { .. }
        | R::GrowVolume { .. }
        | R::RemoveNode { .. } => false,
        R::Register(_)
        | R::Heartbeat(_)
        | R::GetVolume { .. }
        | R::GetVolumeById { .. }
        | R::ListVolumes
        | R::SetVolume { .. }
        | R::ListNodes
        | R::ListPartitions { .. }
        | R::Status
        | R::GetNodes
        | R::GetVolumeKey { .. }
        | R::FetchSnapshot { .. }
        | R::DrainNode { .. }
        | R::DrainDisk { .. }
        | R::ListTasks
        | R::GetMetaReplicas
        | R::Leave { .. }
        | R::IsFounded
        | R::RenewLife { .. } => true,
    }
}
