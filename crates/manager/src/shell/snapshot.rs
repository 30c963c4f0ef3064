//! The state of a leader for a manager that is too far behind: fetched piece by piece, made
//! durable here, then taken over.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use milpa_host::clock::Instant;
use milpa_host::jobs;
use milpa_host::rpc::Pool;
use milpa_raft::SnapshotDescriptor;
use milpa_types::{ClusterId, ManagerError, Role};
use milpa_wire::manager::{ManagerAnswer, ManagerReply, ManagerRequest};

use super::checkpoint::CheckpointStore;
use crate::core::State;

/// Bytes of one piece.
const PIECE_BYTES: usize = 1 << 20;
/// Largest state that is taken from a peer: far above 20,000 nodes and a million partitions.
const SNAPSHOT_BYTES_MAX: u64 = 1 << 30;
/// One piece may take this long.
const PIECE_WAIT: Duration = Duration::from_secs(2);
/// All of it may take this long; the leader offers it again.
const FETCH_WAIT: Duration = Duration::from_secs(60);

/// A state that was fetched, checked and made durable.
pub(super) struct Fetched {
    /// The state.
    pub(super) state: State,
    /// Where it stands.
    pub(super) descriptor: SnapshotDescriptor,
    /// Its encoding, to serve to others.
    pub(super) bytes: Bytes,
}

/// Serves one piece of an encoded state.
pub(super) fn piece(bytes: &Bytes, offset: u64) -> (ManagerReply, Bytes) {
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
    let end = start.saturating_add(PIECE_BYTES).min(bytes.len());
    (Ok(ManagerAnswer::SnapshotPiece { total: bytes.len() as u64 }), bytes.slice(start..end))
}

/// Fetches the state at `descriptor` from a peer and writes it to the checkpoint.
///
/// # Errors
///
/// What went wrong, for the log.
pub(super) async fn fetch(
    pool: Pool,
    from: SocketAddr,
    descriptor: SnapshotDescriptor,
    cluster: ClusterId,
    store: CheckpointStore,
) -> Result<Box<Fetched>, String> {
    let bytes = fetch_bytes(&pool, from, descriptor.position.index).await?;
    let state = State::decode(&bytes).map_err(|error| error.to_string())?;
    if state.cluster() != cluster {
        return Err(format!("the state is of cluster {}", state.cluster()));
    }
    if state.applied() != descriptor.position.index {
        return Err(format!(
            "the state is as of entry {}, not {}",
            state.applied(),
            descriptor.position.index
        ));
    }
    let (kept, position) = (bytes.clone(), descriptor.clone());
    let saved = jobs::run("checkpoint", move || store.save(&kept, &position)).await;
    match saved {
        Ok(Ok(())) => Ok(Box::new(Fetched { state, descriptor, bytes })),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

async fn fetch_bytes(pool: &Pool, from: SocketAddr, index: u64) -> Result<Bytes, String> {
    let started = Instant::now();
    let mut bytes: Vec<u8> = Vec::new();
    while started.elapsed() < FETCH_WAIT {
        let request = ManagerRequest::FetchSnapshot { index, offset: bytes.len() as u64 };
        let called = pool.call(from, Role::Manager, &request, Bytes::new(), PIECE_WAIT).await;
        let (reply, piece): (ManagerReply, Bytes) = called.map_err(|error| error.to_string())?;
        let total = match reply {
            Ok(ManagerAnswer::SnapshotPiece { total }) => total,
            Ok(_) => return Err("the answer is not a piece of a snapshot".to_owned()),
            Err(ManagerError::Busy) => return Err("that snapshot is no longer kept".to_owned()),
            Err(error) => return Err(error.to_string()),
        };
        if total > SNAPSHOT_BYTES_MAX {
            return Err(format!(
                "the state has {total} bytes, at most {SNAPSHOT_BYTES_MAX} are taken"
            ));
        }
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 >= total {
            return Ok(bytes.into());
        }
        if piece.is_empty() {
            return Err("the snapshot ends early".to_owned());
        }
    }
    Err(format!("not fetched within {} s", FETCH_WAIT.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_state_once_and_end() {
        let bytes: Bytes = vec![7; PIECE_BYTES + 10].into();
        let lengths: Vec<usize> = [0, PIECE_BYTES as u64, PIECE_BYTES as u64 + 10, u64::MAX]
            .map(|offset| piece(&bytes, offset).1.len())
            .into();
        assert_eq!(lengths, [PIECE_BYTES, 10, 0, 0]);
    }
}
