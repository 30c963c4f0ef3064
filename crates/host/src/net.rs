//! Byte streams between nodes: TCP, or the simulation's.
//!
//! A [`Stream`] knows from its birth which it is, so the hot calls cost one branch. They are those of
//! tokio's `TcpStream`, taken by reference: one task reads while others write.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::world;

/// After a failure to accept an HTTP connection: what was lacking (descriptors, memory) may come back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection whose peer has confirmed nothing for this long is over. Four retransmissions are lost by
/// then; calls on it learn so earlier than by their own time-outs, and the next ones get a new one.
pub const VANISHED_AFTER: Duration = Duration::from_secs(3);
/// An idle connection is probed this often.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// A connection that the simulation is making.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn SimulatedStream>>> + Send>>;

/// The network interface of a simulated machine.
pub trait Network {
    /// Connects from this machine.
    fn connect(&self, address: SocketAddr) -> Connecting;

    /// Listens on this machine; port 0 asks for any.
    ///
    /// # Errors
    ///
    /// As bind(2).
    fn bind(&self, address: SocketAddr) -> io::Result<Box<dyn SimulatedListener>>;
}

/// One end of a simulated byte stream. Dropping it closes both directions.
pub trait SimulatedStream: std::fmt::Debug + Send + Sync {
    /// Takes what has arrived, as much as there is room for; 0 at the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing has; else as read(2).
    fn try_read(&self, buffer: &mut dyn BufMut) -> io::Result<usize>;

    /// Sends as much as there is room for.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is none; else as writev(2).
    fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Ready when [`try_read`](Self::try_read) would not block, also at the end and after an
    /// error. A reader and a writer may wait at once.
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when [`try_write`](Self::try_write) would not block.
    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Nothing more will be written.
    ///
    /// # Errors
    ///
    /// As shutdown(2).
    fn close_write(&self) -> io::Result<()>;

    /// Who is at the other end.
    ///
    /// # Errors
    ///
    /// As getpeername(2).
    fn peer_address(&self) -> io::Result<SocketAddr>;
}

/// A simulated listening socket.
pub trait SimulatedListener: std::fmt::Debug + Send + Sync {
    /// The next connection.
    fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(Box<dyn SimulatedStream>, SocketAddr)>>;

    /// Where it listens.
    fn local_address(&self) -> SocketAddr;
}

/// Connects to a server.
///
/// # Errors
///
/// As connect(2). There is no deadline: bound it.
#[allow(clippy::disallowed_methods)]
pub async fn connect(address: SocketAddr) -> io::Result<Stream> {
    let connecting = world::current().map(|world| world.network().connect(address));
    match connecting {
        Some(connecting) => Ok(Stream(Kind::Simulated(connecting.await?))),
        None => Ok(Stream(Kind::Tcp(TcpStream::connect(address).await?))),
    }
}

/// Listens.
///
/// # Errors
///
/// As bind(2).
#[allow(clippy::disallowed_methods)]
pub async fn bind(address: SocketAddr) -> io::Result<Listener> {
    let bound = world::current().map(|world| world.network().bind(address));
    match bound {
        Some(listener) => Ok(Listener(ListenerKind::Simulated(listener?))),
        None => Ok(Listener(ListenerKind::Tcp(TcpListener::bind(address).await?))),
    }
}

/// A connected byte stream.
#[derive(Debug)]
pub struct Stream(Kind);

#[derive(Debug)]
enum Kind {
    Tcp(TcpStream),
    Simulated(Box<dyn SimulatedStream>),
}

impl Stream {
    /// Who is at the other end.
    ///
    /// # Errors
    ///
    /// As getpeername(2).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Kind::Tcp(stream) => stream.peer_addr(),
            Kind::Simulated(stream) => stream.peer_address(),
        }
    }

    /// What all our connections want: that what is written is sent at once, and that a peer that vanished
    /// without a word (a cable, a one-way route) is noticed within [`VANISHED_AFTER`].
    ///
    /// Left alone, TCP sends again after ever longer pauses, for a quarter of an hour: so long a
    /// connection is dead, and for as long again as the network was away nothing goes through it when
    /// the network is back.
    ///
    /// # Errors
    ///
    /// As setsockopt(2).
    pub fn tune(&self) -> io::Result<()> {
        let Kind::Tcp(stream) = &self.0 else { return Ok(()) };
        stream.set_nodelay(true)?;
        let socket = SockRef::from(stream);
        // The first for who has sent something, the second for who waits for something.
        socket.set_tcp_user_timeout(Some(VANISHED_AFTER))?;
        let probes = TcpKeepalive::new().with_time(PROBE_EVERY).with_interval(PROBE_EVERY);
        socket.set_tcp_keepalive(&probes)
    }

    /// Appends what has arrived to `buffer`, as far as it has room; 0 at the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when nothing has; then wait for [`readable`](Self::readable).
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        match &self.0 {
            Kind::Tcp(stream) => stream.try_read_buf(buffer),
            Kind::Simulated(stream) => {
                let room = buffer.capacity() - buffer.len();
                stream.try_read(&mut buffer.limit(room))
            }
        }
    }

    /// One writev(2).
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is no room; then wait for [`writable`](Self::writable).
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.0 {
            Kind::Tcp(stream) => stream.try_write_vectored(slices),
            Kind::Simulated(stream) => stream.try_write(slices),
        }
    }

    /// Waits until reading would not block.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub async fn readable(&self) -> io::Result<()> {
        match &self.0 {
            Kind::Tcp(stream) => stream.readable().await,
            Kind::Simulated(stream) => poll_fn(|cx| stream.poll_readable(cx)).await,
        }
    }

    /// Waits until writing would not block.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub async fn writable(&self) -> io::Result<()> {
        match &self.0 {
            Kind::Tcp(stream) => stream.writable().await,
            Kind::Simulated(stream) => poll_fn(|cx| stream.poll_writable(cx)).await,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Kind::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Kind::Simulated(stream) => {
                let read = retried(cx, |cx| stream.poll_readable(cx), || stream.try_read(buffer));
                read.map_ok(|_| ())
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Kind::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Kind::Simulated(stream) => {
                retried(cx, |cx| stream.poll_writable(cx), || stream.try_write(slices))
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Neither side keeps anything back.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Kind::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Kind::Simulated(stream) => Poll::Ready(stream.close_write()),
        }
    }
}

/// Tries until it works or there is something to wait for.
fn retried(
    cx: &mut Context<'_>,
    poll_ready: impl Fn(&mut Context<'_>) -> Poll<io::Result<()>>,
    mut attempt: impl FnMut() -> io::Result<usize>,
) -> Poll<io::Result<usize>> {
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(poll_ready(cx))?,
            done => return Poll::Ready(done),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener(ListenerKind);

#[derive(Debug)]
enum ListenerKind {
    Tcp(TcpListener),
    Simulated(Box<dyn SimulatedListener>),
}

impl Listener {
    /// The next connection, and who makes it. Cancel-safe.
    ///
    /// # Errors
    ///
    /// As accept(2).
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match &self.0 {
            ListenerKind::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Ok((Stream(Kind::Tcp(stream)), address))
            }
            ListenerKind::Simulated(listener) => {
                let (stream, address) = poll_fn(|cx| listener.poll_accept(cx)).await?;
                Ok((Stream(Kind::Simulated(stream)), address))
            }
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// As getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            ListenerKind::Tcp(listener) => listener.local_addr(),
            ListenerKind::Simulated(listener) => Ok(listener.local_address()),
        }
    }
}

/// So that HTTP is served on either side.
impl axum::serve::Listener for Listener {
    type Io = Stream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Stream, SocketAddr) {
        loop {
            match Listener::accept(self).await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Listener::local_addr(self)
    }
}
