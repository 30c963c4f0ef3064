//! One established connection: an outbox that many threads fill, and a task that empties it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::{Buf, Bytes, BytesMut};
use milpa_wire::frame::{Frame, HEADER_BYTES, Taken};
use tokio::sync::Notify;

use crate::disk::{DIRECT_BYTES_MIN, aligned_behind};
use crate::net::Stream;

/// Bytes that may wait for a slow peer. Past it frames are refused, so memory stays bounded.
const OUTBOX_BYTES_MAX: usize = 64 << 20;
/// Buffers in one writev(2).
const SLICES_MAX: usize = 64;
/// What the receive buffer grows by.
const RECEIVE_BYTES: usize = 64 * 1024;
/// Reads in a row before others on this thread get their turn: one busy peer starves nobody.
const READS_PER_TURN: u32 = 16;

/// Frames that wait to be sent. Shared by all who send on the connection.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    wake: Notify,
    closed: AtomicBool,
    /// Set once the handshake is done; before that frames wait.
    stream: OnceLock<Arc<Stream>>,
}

#[derive(Debug, Default)]
struct Queue {
    buffers: VecDeque<Bytes>,
    bytes: usize,
}

/// The outbox takes no more frames: full, or the connection is gone.
#[derive(Debug)]
pub(crate) struct OutboxClosed;

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a frame; the connection's task sends it together with whatever else waits by then.
    /// Servers answer this way: the answers of one turn leave in one system call.
    pub(crate) fn push(&self, frame: &Frame) -> Result<(), OutboxClosed> {
        self.enqueue(frame, &mut self.lock())?;
        self.wake.notify_one();
        Ok(())
    }

    /// Sends a frame from this very thread if nothing waits before it, saving a wake-up of the
    /// connection's task. Callers who wait for the answer send this way.
    pub(crate) fn push_now(&self, frame: &Frame) -> Result<(), OutboxClosed> {
        let mut queue = self.lock();
        let idle = queue.buffers.is_empty();
        self.enqueue(frame, &mut queue)?;
        if let Some(stream) = self.stream.get().filter(|_| idle) {
            // Whatever goes wrong here, the connection's task meets again and reports.
            let _ = queue.write_some(stream);
        }
        if !queue.buffers.is_empty() {
            self.wake.notify_one();
        }
        Ok(())
    }

    fn enqueue(&self, frame: &Frame, queue: &mut Queue) -> Result<(), OutboxClosed> {
        if self.closed.load(Ordering::Acquire) || queue.bytes > OUTBOX_BYTES_MAX {
            return Err(OutboxClosed);
        }
        for buffer in [frame.encode_head(), frame.payload.clone()] {
            if !buffer.is_empty() {
                queue.bytes += buffer.len();
                queue.buffers.push_back(buffer);
            }
        }
        Ok(())
    }

    /// Opens the way: frames that waited for the handshake go out.
    pub(crate) fn open(&self, stream: Arc<Stream>) {
        let _ = self.stream.set(stream);
        self.wake.notify_one();
    }

    /// No more frames. Idempotent.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Sends until the outbox is closed or the socket fails.
    pub(crate) async fn drain(&self, stream: &Stream) -> io::Result<()> {
        while !self.is_closed() {
            let written = self.lock().write_some(stream);
            match written {
                Ok(0) => self.wake.notified().await,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Queue {
    /// One writev(2) of what waits; 0 when nothing does.
    fn write_some(&mut self, stream: &Stream) -> io::Result<usize> {
        if self.buffers.is_empty() {
            return Ok(0);
        }
        let slices: Vec<IoSlice<'_>> =
            self.buffers.iter().take(SLICES_MAX).map(|b| IoSlice::new(b)).collect();
        let written = stream.try_write_vectored(&slices)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.advance(written);
        Ok(written)
    }

    fn advance(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some(front) = self.buffers.front_mut() {
            if front.len() > written {
                front.advance(written);
                return;
            }
            written -= front.len();
            self.buffers.pop_front();
        }
    }
}

/// Receives frames and hands each to `consume` until the peer closes or misbehaves.
///
/// # Errors
///
/// The socket's, or `InvalidData` when the peer sends what is not a frame.
pub(crate) async fn receive(stream: &Stream, mut consume: impl FnMut(Frame)) -> io::Result<()> {
    let mut buffer = BytesMut::with_capacity(RECEIVE_BYTES);
    let mut reads = 0_u32;
    loop {
        match Frame::take(&mut buffer) {
            Ok(Taken::Frame(frame)) => {
                consume(frame);
                continue;
            }
            Ok(Taken::NeedsBytes { total, payload }) => reserve(&mut buffer, total, payload),
            Err(e) => return Err(io::Error::new(io::ErrorKind::InvalidData, e)),
        }
        match stream.try_read_buf(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {
                reads = reads.wrapping_add(1);
                if reads.is_multiple_of(READS_PER_TURN) {
                    tokio::task::yield_now().await;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => stream.readable().await?,
            Err(e) => return Err(e),
        }
    }
}

/// Room for the rest of a frame of `total` bytes, in one piece: the payload, the last of them, is then used where it
/// lies, and begins where a page does if it is large. A buffer that is nearly used up is replaced, not grown byte by byte. How
/// much room there is then depends on the frame alone, and not on where in memory the buffer lies: what is received at
/// once has the same course each time.
fn reserve(buffer: &mut BytesMut, total: usize, payload: usize) {
    let missing = total.saturating_sub(buffer.len());
    let room = buffer.capacity() - buffer.len();
    if room >= missing.max(HEADER_BYTES) {
        return;
    }
    let mut larger = match payload {
        DIRECT_BYTES_MIN.. => aligned_behind(total - payload, payload),
        _ => BytesMut::with_capacity(total.max(buffer.len() + RECEIVE_BYTES)),
    };
    larger.extend_from_slice(buffer);
    *buffer = larger;
}

#[cfg(test)]
mod tests {
    use milpa_wire::frame::FrameKind;

    use super::*;

    /// Takes frames from bytes that arrive as fast as there is room; gives them, and how much came at once.
    fn taken(mut bytes: &[u8]) -> (Vec<Frame>, Vec<usize>) {
        let (mut frames, mut pieces) = (Vec::new(), Vec::new());
        let mut buffer = BytesMut::with_capacity(RECEIVE_BYTES);
        loop {
            match Frame::take(&mut buffer).unwrap() {
                Taken::Frame(frame) => frames.push(frame),
                Taken::NeedsBytes { .. } if bytes.is_empty() => return (frames, pieces),
                Taken::NeedsBytes { total, payload } => {
                    reserve(&mut buffer, total, payload);
                    let room = buffer.capacity() - buffer.len();
                    let (piece, rest) = bytes.split_at(room.min(bytes.len()));
                    buffer.extend_from_slice(piece);
                    pieces.push(piece.len());
                    bytes = rest;
                }
            }
        }
    }

    #[test]
    fn large_payloads_are_aligned_and_how_much_is_received_at_once_is_no_matter_of_addresses() {
        let sizes =
            [0, 100, 70_000, DIRECT_BYTES_MIN, 10, 512 << 10, 512 << 10, 1 << 20, 5, 60_000];
        let mut bytes = Vec::new();
        for (number, size) in sizes.into_iter().enumerate() {
            let payload = vec![number as u8; size].into();
            let body = vec![7; number * 1_001].into();
            let frame =
                Frame { kind: FrameKind::Reply, channel: 0, id: 1, wait_ms: 0, body, payload };
            bytes.extend_from_slice(&frame.encode_head());
            bytes.extend_from_slice(&frame.payload);
        }
        let (frames, pieces) = taken(&bytes);
        for (number, (frame, size)) in frames.iter().zip(sizes).enumerate() {
            assert_eq!(frame.payload, vec![number as u8; size]);
            let is_aligned = frame.payload.as_ptr().addr().is_multiple_of(4096);
            assert!(is_aligned || size < DIRECT_BYTES_MIN, "{size} bytes");
        }
        // Others lie elsewhere.
        let elsewhere: Vec<_> = (0..20_u32).map(|n| vec![n; 1_237 * n as usize]).collect();
        assert_eq!(taken(&bytes).1, pieces, "{} vectors", elsewhere.len());
    }
}
