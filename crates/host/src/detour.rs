//! The way around a broken link: a manager carries a connection to a server that the caller does not reach.
//!
//! Networks break between two machines that all others reach (Alquraan et al., OSDI 2018, call it a partial partition). A client
//! needs every member of a partition to know that its bytes are on disk, and the leader of a group to change anything,
//! so it would wait until somebody mends the cable. A caller that cannot connect asks a manager, in its handshake, to carry
//! what follows to the server's address, and then meets the server as if it had connected itself: what is proved, is
//! proved end to end, and the manager sees bytes.
//!
//! The direct way is tried first, and again while a detour is in use.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use milpa_types::Role;
use tracing::{debug, info};

use crate::handshake::{self, HandshakeError};
use crate::net::{self, Stream};
use crate::rpc::{Identity, Peer, Service};

/// Without a direct connection after this long another way is looked for.
const PATIENCE: Duration = Duration::from_millis(700);
/// What one manager gets to make one.
const TRY_WAIT: Duration = Duration::from_millis(600);
/// Connections that one server carries at most.
const CARRIED_MAX: usize = 256;
/// Bytes of a carried connection that wait in each direction.
const BUFFER_BYTES: usize = 64 * 1024;
/// How often the direct way is tried while there is a detour.
const PROBE_EVERY: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 5_000 });
/// How long such a try may take.
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// How many connections one server carries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Carried(Rc<Cell<usize>>);

impl Carried {
    fn one_more(&self) -> Option<CarriedOne> {
        let count = self.0.get();
        (count < CARRIED_MAX).then(|| {
            self.0.set(count + 1);
            CarriedOne(self.clone())
        })
    }
}

/// One of them.
struct CarriedOne(Carried);

impl Drop for CarriedOne {
    fn drop(&mut self) {
        let Carried(count) = &self.0;
        count.set(count.get().saturating_sub(1));
    }
}

/// A connection, and how it came about.
pub(crate) struct Opened {
    pub stream: Stream,
    pub is_around: bool,
}

/// Connects and introduces itself, through one of the `managers` if there is no direct way to be found. There is no
/// deadline: bound it.
pub(crate) async fn open(
    address: SocketAddr,
    identity: &Identity,
    expects: Role,
    managers: &[SocketAddr],
) -> Result<Opened, HandshakeError> {
    let direct = directly(address, identity, expects);
    tokio::pin!(direct);
    let is_there = |stream| Opened { stream, is_around: false };
    if managers.is_empty() || managers.contains(&address) {
        return direct.await.map(is_there);
    }
    match tokio::time::timeout(PATIENCE, &mut direct).await {
        Ok(Err(error)) if is_cut(&error) => {
            let around = around(address, identity, expects, managers).await;
            return around.ok_or(error);
        }
        Ok(opened) => return opened.map(is_there),
        Err(_) => {}
    }
    tokio::select! {
        biased;
        opened = direct => opened.map(is_there),
        Some(opened) = around(address, identity, expects, managers) => Ok(opened),
    }
}

/// Whether nobody answered: the way may be broken. A refusal came from the machine itself.
fn is_cut(error: &HandshakeError) -> bool {
    let HandshakeError::Io(error) = error else { return false };
    let answered = [std::io::ErrorKind::ConnectionRefused, std::io::ErrorKind::ConnectionReset];
    !answered.contains(&error.kind())
}

async fn directly(
    address: SocketAddr,
    identity: &Identity,
    expects: Role,
) -> Result<Stream, HandshakeError> {
    let mut stream = net::connect(address).await?;
    stream.tune()?;
    handshake::call(&mut stream, identity, expects).await?;
    Ok(stream)
}

/// Asks one manager after the other, each caller in another order.
async fn around(
    address: SocketAddr,
    identity: &Identity,
    expects: Role,
    managers: &[SocketAddr],
) -> Option<Opened> {
    let first = crate::entropy::u128().unwrap_or_default() as usize % managers.len().max(1);
    for manager in managers.iter().cycle().skip(first).take(managers.len()) {
        let through = through(*manager, address, identity, expects);
        match tokio::time::timeout(TRY_WAIT, through).await {
            Ok(Ok(stream)) => {
                info!(%address, %manager, "no direct way: connected through a manager");
                return Some(Opened { stream, is_around: true });
            }
            Ok(Err(error)) => debug!(%address, %manager, %error, "no way through this manager"),
            Err(_) => debug!(%address, %manager, "no way through this manager in time"),
        }
    }
    None
}

async fn through(
    manager: SocketAddr,
    address: SocketAddr,
    identity: &Identity,
    expects: Role,
) -> Result<Stream, HandshakeError> {
    let mut stream = net::connect(manager).await?;
    stream.tune()?;
    handshake::call_onward(&mut stream, identity, address).await?;
    handshake::call(&mut stream, identity, expects).await?;
    Ok(stream)
}

/// Returns when the direct way is open again.
pub(crate) async fn wait_for_direct(address: SocketAddr, identity: &Identity, expects: Role) {
    loop {
        tokio::time::sleep(PROBE_EVERY).await;
        let probe = directly(address, identity, expects);
        if let Ok(Ok(_)) = tokio::time::timeout(PROBE_WAIT, probe).await {
            info!(%address, "the direct way is open again");
            return;
        }
    }
}

/// Carries the caller's bytes to `to` and back until one of the two ends the connection.
pub(crate) async fn carry(
    mut stream: Stream,
    peer: &Peer,
    to: SocketAddr,
    service: &dyn Service,
    carried: &Carried,
) {
    let (mut onward, _one) = match reach(to, service, carried).await {
        Ok(reached) => reached,
        Err(reason) => {
            debug!(?peer, %to, reason, "a connection is not carried");
            return handshake::refuse(&mut stream, reason).await;
        }
    };
    if handshake::welcome(&mut stream).await.is_err() {
        return;
    }
    debug!(?peer, %to, "carrying a connection");
    let (bytes, more) = (BUFFER_BYTES, BUFFER_BYTES);
    let ended =
        tokio::io::copy_bidirectional_with_sizes(&mut stream, &mut onward, bytes, more).await;
    debug!(?peer, %to, ?ended, "a carried connection ended");
}

async fn reach(
    to: SocketAddr,
    service: &dyn Service,
    carried: &Carried,
) -> Result<(Stream, CarriedOne), String> {
    if !service.carries_to(to) {
        return Err(format!("no server that is heard here is at {to}"));
    }
    let full = || format!("{CARRIED_MAX} connections are carried here already");
    let one = carried.one_more().ok_or_else(full)?;
    let connecting = tokio::time::timeout(TRY_WAIT, net::connect(to));
    let stream = connecting.await.map_err(|_| format!("{to} does not answer"))?;
    let stream = stream.map_err(|error| format!("{to} cannot be reached: {error}"))?;
    stream.tune().map_err(|error| error.to_string())?;
    Ok((stream, one))
}

#[cfg(test)]
mod tests;
