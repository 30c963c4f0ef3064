//! Reads and writes of one `/dev/fuse` descriptor.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::abi::{DEV_IOC_CLONE, OutHeader, Plain};
use crate::interrupt::Interrupts;
use crate::reply::ReplySink;

/// Answers with up to this many parts are sent without an allocation.
const PARTS_INLINE: usize = 8;

/// Most parts that writev(2) takes (`IOV_MAX`).
const PARTS_MAX: usize = 1024;

/// One descriptor and the session's interrupt table.
pub(crate) struct Channel {
    device: File,
    interrupts: Arc<Interrupts>,
}

/// What a read from the device brought.
#[derive(Debug)]
pub(crate) enum Received {
    /// A message of so many bytes.
    Message(usize),
    /// The file system is unmounted or the connection was aborted.
    Ended,
}

impl Channel {
    pub(crate) fn new(device: OwnedFd, interrupts: Arc<Interrupts>) -> Arc<Channel> {
        Arc::new(Channel { device: File::from(device), interrupts })
    }

    /// Opens the device again and binds it to this connection.
    ///
    /// # Errors
    ///
    /// The device cannot be opened, or the kernel has no clone (before 4.2).
    pub(crate) fn try_clone(&self) -> io::Result<Arc<Channel>> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let source = self.device.as_raw_fd().unsigned_abs();
        // SAFETY: FUSE_DEV_IOC_CLONE reads one u32, the descriptor to clone; `source` lives.
        let result =
            unsafe { libc::ioctl(device.as_raw_fd(), DEV_IOC_CLONE, std::ptr::from_ref(&source)) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Arc::new(Channel { device, interrupts: Arc::clone(&self.interrupts) }))
    }

    /// Waits for the next message.
    ///
    /// # Errors
    ///
    /// An errno that the protocol does not know; the descriptor is of no more use.
    pub(crate) fn receive(&self, space: &mut [u8]) -> io::Result<Received> {
        loop {
            match (&self.device).read(space) {
                Ok(0) => return Ok(Received::Ended),
                Ok(length) => return Ok(Received::Message(length)),
                Err(error) => match error.raw_os_error() {
                    // A signal; another thread was faster; the request was aborted meanwhile.
                    Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(Received::Ended),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Writes a header and `body` as one message.
    ///
    /// # Errors
    ///
    /// What the kernel said; see [`ReplySink::send`].
    pub(crate) fn write_message(
        &self,
        unique: u64,
        error: i32,
        body: &[IoSlice<'_>],
    ) -> io::Result<()> {
        let length = size_of::<OutHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
        let len =
            u32::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let header = OutHeader { len, error, unique };
        let header = IoSlice::new(header.as_bytes());
        if body.len() < PARTS_INLINE {
            let mut parts = [IoSlice::new(&[]); PARTS_INLINE];
            let count = parts.iter_mut().zip(std::iter::once(&header).chain(body));
            let count = count.map(|(part, source)| *part = *source).count();
            return self.write_once(parts.get(..count).unwrap_or_default(), length);
        }
        if body.len() < PARTS_MAX {
            let parts: Vec<IoSlice<'_>> =
                std::iter::once(header).chain(body.iter().copied()).collect();
            return self.write_once(&parts, length);
        }
        let joined: Vec<u8> = body.iter().flat_map(|part| part.iter().copied()).collect();
        self.write_once(&[header, IoSlice::new(&joined)], length)
    }

    /// The device takes a message whole or not at all.
    fn write_once(&self, parts: &[IoSlice<'_>], length: usize) -> io::Result<()> {
        loop {
            match (&self.device).write_vectored(parts) {
                Ok(written) if written == length => return Ok(()),
                Ok(_) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl ReplySink for Channel {
    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> io::Result<()> {
        self.write_message(unique, error, body)
    }

    fn interrupts(&self) -> &Arc<Interrupts> {
        &self.interrupts
    }
}
