//! Both sides of the handshake (`milpa_wire::handshake` says what is sent and why).

use std::io;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use milpa_types::{Role, VolumeId};
use milpa_wire::frame::{Frame, FrameKind, Taken};
use milpa_wire::handshake::{Challenge, Claim, Handshake, Hello, Mac, Nonce};
use milpa_wire::{DecodeError, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, decode, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::entropy;
use crate::keys::Key;
use crate::net::Stream;
use crate::rpc::{Credential, Identity, Peer, Service};

/// Largest handshake frame: a stranger makes us allocate no more.
const HANDSHAKE_BYTES_MAX: usize = 64 * 1024;

/// Who proves: without it a proof could be sent back to its author.
const SERVER: &[u8] = b"server";
const CALLER: &[u8] = b"caller";

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    /// The socket failed.
    #[error("connection failed during the handshake")]
    Io(#[from] io::Error),
    /// Not our protocol.
    #[error("peer does not speak the MilpaFS protocol")]
    Protocol(#[from] DecodeError),
    /// One side said no; the text is for a person.
    #[error("{0}")]
    Refused(String),
}

fn refused(reason: impl Into<String>) -> HandshakeError {
    HandshakeError::Refused(reason.into())
}

/// The caller's side. Gives what the server proved to be.
pub(crate) async fn call(
    stream: &mut Stream,
    me: &Identity,
    expects: Role,
) -> Result<Peer, HandshakeError> {
    introduce(stream, me, expects, None).await
}

/// The same with a manager that is to carry what follows to another server.
pub(crate) async fn call_onward(
    stream: &mut Stream,
    me: &Identity,
    to: SocketAddr,
) -> Result<Peer, HandshakeError> {
    introduce(stream, me, Role::Manager, Some(to)).await
}

async fn introduce(
    stream: &mut Stream,
    me: &Identity,
    expects: Role,
    onward: Option<SocketAddr>,
) -> Result<Peer, HandshakeError> {
    let hello = Hello {
        version_min: PROTOCOL_VERSION_MIN,
        version_max: PROTOCOL_VERSION,
        cluster: me.cluster(),
        role: me.role(),
        expects,
        node: me.node(),
        claim: me.claim(),
        nonce: nonce()?,
    };
    send(stream, &Handshake::Hello(hello.clone())).await?;
    let mut buffer = BytesMut::new();
    let challenge = match receive(stream, &mut buffer).await? {
        Handshake::Challenge(challenge) => challenge,
        Handshake::Refused(reason) => return Err(HandshakeError::Refused(reason)),
        _ => return Err(refused("peer answered out of turn")),
    };
    let key = me.key();
    if !key.verify(&[SERVER, &transcript(&hello, &challenge)], &challenge.proof) {
        return Err(refused(match me.credential() {
            Credential::Cluster(_) => "the server does not have our cluster's secret",
            Credential::Volume { .. } => "wrong access key for this volume",
        }));
    }
    let proof = key.mac(&[CALLER, &said(&hello, &challenge, onward)]);
    let last = match onward {
        None => Handshake::Proof(proof),
        Some(to) => Handshake::Onward { proof, to },
    };
    send(stream, &last).await?;
    match receive(stream, &mut buffer).await? {
        Handshake::Welcome => {}
        Handshake::Refused(reason) => return Err(HandshakeError::Refused(reason)),
        _ => return Err(refused("peer answered out of turn")),
    }
    let address = stream.peer_addr()?;
    Ok(Peer { role: challenge.role, node: challenge.node, volume: None, address })
}

/// Whom the server has let in.
pub(crate) struct Admitted {
    /// What the caller proved to be.
    pub peer: Peer,
    /// Where it wants to be carried to. Then it has not been welcomed yet.
    pub onward: Option<SocketAddr>,
}

/// The server's side. A refusal has been sent to the caller.
pub(crate) async fn answer(
    stream: &mut Stream,
    me: &Identity,
    service: &dyn Service,
) -> Result<Admitted, HandshakeError> {
    let result = admit(stream, me, service).await;
    if let Err(HandshakeError::Refused(reason)) = &result {
        refuse(stream, reason.clone()).await;
    }
    result
}

/// The connection is open.
pub(crate) async fn welcome(stream: &mut Stream) -> io::Result<()> {
    send(stream, &Handshake::Welcome).await
}

/// Tells the caller why not. It may be gone already.
pub(crate) async fn refuse(stream: &mut Stream, reason: String) {
    let _ = send(stream, &Handshake::Refused(reason)).await;
}

async fn admit(
    stream: &mut Stream,
    me: &Identity,
    service: &dyn Service,
) -> Result<Admitted, HandshakeError> {
    let mut buffer = BytesMut::new();
    let Handshake::Hello(hello) = receive(stream, &mut buffer).await? else {
        return Err(refused("the first message must be a hello"));
    };
    let version = common_version(&hello)?;
    let cluster = me.cluster().ok_or_else(|| refused("this node has not joined a cluster yet"))?;
    if hello.cluster.is_some_and(|theirs| theirs != cluster) {
        return Err(refused(format!("this is cluster {cluster}, not yours")));
    }
    if hello.expects != me.role() {
        let (is, wanted) = (me.role(), hello.expects);
        return Err(refused(format!("this is a {is} node, not a {wanted} node")));
    }
    let (key, volume) = claimed_key(&hello, me, service)?;
    let mut challenge = Challenge {
        version,
        cluster,
        role: me.role(),
        node: me.node(),
        nonce: nonce()?,
        proof: Mac::default(),
    };
    challenge.proof = key.mac(&[SERVER, &transcript(&hello, &challenge)]);
    send(stream, &Handshake::Challenge(challenge.clone())).await?;
    let (proof, onward) = match receive(stream, &mut buffer).await? {
        Handshake::Proof(proof) => (proof, None),
        Handshake::Onward { proof, to } => (proof, Some(to)),
        _ => return Err(refused("expected a proof")),
    };
    if !key.verify(&[CALLER, &said(&hello, &challenge, onward)], &proof) {
        return Err(refused("the proof is wrong: not the right key"));
    }
    if onward.is_none() {
        welcome(stream).await?;
    }
    let peer = Peer { role: hello.role, node: hello.node, volume, address: stream.peer_addr()? };
    Ok(Admitted { peer, onward })
}

fn common_version(hello: &Hello) -> Result<u16, HandshakeError> {
    let version = hello.version_max.min(PROTOCOL_VERSION);
    if version < hello.version_min || version < PROTOCOL_VERSION_MIN {
        return Err(refused(format!(
            "protocol versions do not meet: yours are {} to {}, ours {} to {}; upgrade the older side",
            hello.version_min, hello.version_max, PROTOCOL_VERSION_MIN, PROTOCOL_VERSION
        )));
    }
    Ok(version)
}

/// The key that the caller must prove, and the volume that it then may use. A client proves a
/// volume's key and everybody else the cluster's secret, so a client can never pass for a server.
fn claimed_key(
    hello: &Hello,
    me: &Identity,
    service: &dyn Service,
) -> Result<(Key, Option<VolumeId>), HandshakeError> {
    let Credential::Cluster(secret) = me.credential() else {
        return Err(refused("this process serves nobody"));
    };
    let volume = match (&hello.claim, hello.role) {
        (Claim::Cluster, Role::Client) => return Err(refused("a client must name its volume")),
        (Claim::Cluster, _) => return Ok((secret.clone(), None)),
        (_, role) if role != Role::Client => {
            return Err(refused(format!("a {role} must prove the cluster's secret")));
        }
        (Claim::Volume(volume), _) => *volume,
        (Claim::VolumeNamed(name), _) => service
            .volume_named(name)
            .ok_or_else(|| refused(format!("no volume named {name:?}")))?,
    };
    Ok((secret.volume_key(volume), Some(volume)))
}

/// All that was said before the proofs.
fn transcript(hello: &Hello, challenge: &Challenge) -> Vec<u8> {
    encode(&(hello, Challenge { proof: Mac::default(), ..challenge.clone() }))
}

/// The same with what the caller says beside its proof.
fn said(hello: &Hello, challenge: &Challenge, onward: Option<SocketAddr>) -> Vec<u8> {
    let mut said = transcript(hello, challenge);
    if let Some(to) = onward {
        said.extend(encode(&to));
    }
    said
}

fn nonce() -> Result<Nonce, HandshakeError> {
    let mut nonce = Nonce::default();
    entropy::fill(&mut nonce).map_err(|e| refused(format!("no randomness: {e}")))?;
    Ok(nonce)
}

async fn send(stream: &mut Stream, message: &Handshake) -> io::Result<()> {
    let frame = Frame {
        kind: FrameKind::Handshake,
        channel: 0,
        id: 0,
        wait_ms: 0,
        body: encode(message).into(),
        payload: Bytes::new(),
    };
    stream.write_all(&frame.encode_head()).await
}

async fn receive(stream: &mut Stream, buffer: &mut BytesMut) -> Result<Handshake, HandshakeError> {
    loop {
        match Frame::take(buffer)? {
            Taken::Frame(frame) if frame.kind == FrameKind::Handshake => {
                return Ok(decode(&frame.body)?);
            }
            Taken::Frame(_) => return Err(refused("expected a handshake")),
            Taken::NeedsBytes { total, .. } if total > HANDSHAKE_BYTES_MAX => {
                return Err(refused("handshake is too long"));
            }
            Taken::NeedsBytes { .. } => {}
        }
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}
