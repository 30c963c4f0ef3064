//! How a node reaches the network: the ports of `milpa-host`, bound to one life of the machine.

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::BufMut;
use milpa_host::net::{Connecting, Network, SimulatedListener, SimulatedStream};

use super::wires::{ConnectionId, Wires};

/// The network as one life of a machine sees it.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    wires: Arc<Mutex<Wires>>,
    address: IpAddr,
    life: u64,
}

fn lock(wires: &Mutex<Wires>) -> MutexGuard<'_, Wires> {
    wires.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// Wakes, or drops, wakers with no lock held: either may run a task's destructors.
fn wake_all(wakers: Vec<Waker>) {
    wakers.into_iter().for_each(Waker::wake);
}

impl Card {
    pub fn new(wires: Arc<Mutex<Wires>>, address: IpAddr, life: u64) -> Card {
        Card { wires, address, life }
    }
}

impl Network for Card {
    fn connect(&self, address: SocketAddr) -> Connecting {
        let call = lock(&self.wires).call(self.address, self.life, address);
        Box::pin(Calling { wires: Arc::clone(&self.wires), call })
    }

    fn bind(&self, address: SocketAddr) -> io::Result<Box<dyn SimulatedListener>> {
        let address = lock(&self.wires).bind(address, self.life).map_err(errno)?;
        Ok(Box::new(Listener { wires: Arc::clone(&self.wires), address, life: self.life }))
    }
}

/// A connection attempt.
struct Calling {
    wires: Arc<Mutex<Wires>>,
    call: u64,
}

impl Future for Calling {
    type Output = io::Result<Box<dyn SimulatedStream>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut wires = lock(&self.wires);
        let Some(call) = wires.call_mut(self.call) else {
            return Poll::Ready(Err(errno(libc::ENETDOWN)));
        };
        let Some(outcome) = call.outcome else {
            call.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        wires.forget_call(self.call);
        drop(wires);
        let stream = |connection| {
            let wires = Arc::clone(&self.wires);
            Box::new(Stream { wires, connection, side: 0 }) as Box<dyn SimulatedStream>
        };
        Poll::Ready(outcome.map(stream).map_err(errno))
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        let mut dropped = Vec::new();
        lock(&self.wires).hang_up(self.call, &mut dropped);
    }
}

#[derive(Debug)]
struct Listener {
    wires: Arc<Mutex<Wires>>,
    address: SocketAddr,
    life: u64,
}

impl SimulatedListener for Listener {
    fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(Box<dyn SimulatedStream>, SocketAddr)>> {
        let accepted = lock(&self.wires).accept(self.address, self.life, cx.waker());
        let Some((connection, from)) = accepted else { return Poll::Pending };
        let stream = Stream { wires: Arc::clone(&self.wires), connection, side: 1 };
        Poll::Ready(Ok((Box::new(stream), from)))
    }

    fn local_address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        lock(&self.wires).unbind(self.address, self.life);
    }
}

#[derive(Debug)]
struct Stream {
    wires: Arc<Mutex<Wires>>,
    connection: ConnectionId,
    side: usize,
}

impl SimulatedStream for Stream {
    fn try_read(&self, buffer: &mut dyn BufMut) -> io::Result<usize> {
        let mut woken = Vec::new();
        let read = lock(&self.wires).read(self.connection, self.side, buffer, &mut woken);
        wake_all(woken);
        read.unwrap_or(Err(libc::EAGAIN)).map_err(errno)
    }

    fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = lock(&self.wires).write(self.connection, self.side, slices);
        written.unwrap_or(Err(libc::EAGAIN)).map_err(errno)
    }

    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_ready = lock(&self.wires).is_readable(self.connection, self.side, cx.waker());
        if is_ready { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_ready = lock(&self.wires).is_writable(self.connection, self.side, cx.waker());
        if is_ready { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn close_write(&self) -> io::Result<()> {
        lock(&self.wires).close_write(self.connection, self.side);
        Ok(())
    }

    fn peer_address(&self) -> io::Result<SocketAddr> {
        let address = lock(&self.wires).peer_address(self.connection, self.side);
        address.ok_or_else(|| errno(libc::ENOTCONN))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut dropped = Vec::new();
        lock(&self.wires).close(self.connection, self.side, &mut dropped);
    }
}
