//! The handshake: who is there, of which cluster, and can they prove it.
//!
//! ```text
//! client                                          server
//!   Hello{versions, cluster, role, nonce} ──────────▶
//!   ◀─────────── Challenge{version, nonce, proof of the server}
//!   Proof{proof of the client} ─────────────────────▶
//!   ◀─────────── Welcome          or at any step  Refused{reason}
//! ```
//!
//! A caller may end its handshake with a manager with a wish instead: to be carried on to another server, with which it then
//! begins anew on the same connection.
//!
//! Both proofs are HMAC-SHA256 under a shared key, over both nonces and all that was said, so
//! neither side reveals the key, neither can be replayed, and a version cannot be downgraded
//! unnoticed. The key is the cluster's secret, or for a client the access key of its volume, which
//! every server derives from the secret.

use std::net::SocketAddr;

use milpa_types::{ClusterId, NodeId, Role, VolumeId};
use serde::{Deserialize, Serialize};

/// Random bytes from either side.
pub type Nonce = [u8; 32];
/// An HMAC-SHA256.
pub type Mac = [u8; 32];

/// Which key the caller proves to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// The cluster's secret: servers and operators.
    Cluster,
    /// The access key of one volume: clients.
    Volume(VolumeId),
    /// The access key of the volume of this name: a client's first call to a manager.
    VolumeNamed(String),
}

/// The caller's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest protocol version that the caller speaks.
    pub version_min: u16,
    /// Newest protocol version that the caller speaks.
    pub version_max: u16,
    /// The cluster that the caller means; `None` when it only knows addresses (a first mount).
    pub cluster: Option<ClusterId>,
    /// What the caller is.
    pub role: Role,
    /// What the caller takes the callee for.
    pub expects: Role,
    /// The caller's node id; 0 for clients, operators and nodes not yet registered.
    pub node: NodeId,
    /// Which key it will prove.
    pub claim: Claim,
    /// Fresh randomness.
    pub nonce: Nonce,
}

/// The callee's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The protocol version of this connection.
    pub version: u16,
    /// The callee's cluster.
    pub cluster: ClusterId,
    /// What the callee is.
    pub role: Role,
    /// The callee's node id; 0 if it has none.
    pub node: NodeId,
    /// Fresh randomness.
    pub nonce: Nonce,
    /// The callee's proof.
    pub proof: Mac,
}

/// All handshake messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Handshake {
    /// First, from the caller.
    Hello(Hello),
    /// Second, from the callee.
    Challenge(Challenge),
    /// Third, from the caller.
    Proof(Mac),
    /// Fourth, from the callee: the connection is open.
    Welcome,
    /// Instead of any answer: why not, for both logs.
    Refused(String),
    /// Third, from a caller that does not reach this server: what follows the welcome is to be carried to it. The
    /// proof is over where to as well.
    Onward {
        /// The proof.
        proof: Mac,
        /// Where that server listens.
        to: SocketAddr,
    },
}
