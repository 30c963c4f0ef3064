//! The shell of a data node.

use std::future::Future;

use milpa_host::keys::Key;
use milpa_types::ClusterId;

use crate::DataNodeConfig;

/// Why a data node ended or could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The settings are out of bounds: every problem, one line each.
    #[error("bad settings: {}", problems.join("; "))]
    Config {
        /// The lines.
        problems: Vec<String>,
    },
    /// The node's directory cannot be used.
    #[error("cannot use the node's directory")]
    Directory(#[from] milpa_host::node_directory::DirectoryError),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: std::net::SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The managers refused the node, or none answered.
    #[error("cannot register with the managers")]
    Register(#[from] milpa_host::managers::ManagersError),
    /// A disk cannot be opened. (One that fails later is fenced, and the node goes on.)
    #[error("cannot use disk {path:?}: {problem}")]
    Disk {
        /// Its directory.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Runs a data node until `stop` is ready. Call it on a tokio `current_thread` runtime; it makes
/// its own `LocalSet`.
///
/// # Errors
///
/// [`NodeError`] when the node cannot start, or its listening socket fails.
pub async fn run(
    config: DataNodeConfig,
    cluster: ClusterId,
    secret: Key,
    stop: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    config.validate().map_err(|problems| NodeError::Config { problems })?;
    let _ = (cluster, secret);
    stop.await;
    Ok(())
}
