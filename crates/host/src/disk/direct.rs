//! Direct I/O (open(2), `O_DIRECT`): between a caller's memory and the device, past the page cache.
//!
//! For bytes that nobody reads soon: copies for the sake of redundancy, and what is read only to see that the medium still
//! has it. Through the cache each byte would be copied once more, and push out what the server's other services read.
//!
//! The kernel sees to it that both ways show the same bytes: what is dirty is written before a direct read, and what is
//! cached is dropped after a direct write.

// mmap(2) and mincore(2) are not in the standard library.
#![allow(unsafe_code, clippy::disallowed_methods)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use bytes::{Buf, BytesMut};

use super::system;

/// Less than this goes through the cache, but where the device is asked: a file is opened once more for each direct call.
pub const DIRECT_BYTES_MIN: usize = 64 << 10;
/// What offsets, lengths and addresses are multiples of: at least the logical block of any disk.
const PAGE: usize = 4096;

/// So many zeros, where a device can put bytes by itself.
#[must_use]
pub fn page_aligned(length: usize) -> BytesMut {
    let mut bytes = BytesMut::zeroed(length + PAGE);
    bytes.advance(bytes.as_ptr().align_offset(PAGE).min(PAGE));
    bytes.truncate(length);
    bytes
}

/// Room for `head` bytes, and behind them for `length` that begin where [`page_aligned`] ones do, and for no more.
pub(crate) fn aligned_behind(head: usize, length: usize) -> BytesMut {
    let mut bytes = BytesMut::with_capacity(PAGE + head + length);
    let unaligned = bytes.as_ptr().addr().wrapping_add(head) % PAGE;
    let skipped = PAGE - unaligned;
    bytes.resize(skipped, 0);
    bytes.advance(skipped);
    let _ = bytes.split_off(head + length);
    bytes
}

/// From the device, whatever is in memory.
pub(super) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let is_aligned = whole_pages(buffer, offset).is_some();
    let Some(direct) = reopen(file).filter(|_| is_aligned) else {
        return system::read_at(file, buffer, offset);
    };
    match read_pages(&direct, buffer, offset) {
        Err(error) if is_refusal(&error) => system::read_at(file, buffer, offset),
        read => read,
    }
}

fn read_pages(direct: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let whole = buffer.len() / PAGE * PAGE;
    let (pages, rest) = buffer.split_at_mut(whole);
    let filled = system::read_at(direct, pages, offset)?;
    if filled < whole || rest.is_empty() {
        return Ok(filled);
    }
    let mut last = page_aligned(PAGE);
    let count = system::read_at(direct, &mut last, offset + whole as u64)?.min(rest.len());
    for (byte, read) in rest.iter_mut().zip(last.iter().take(count)) {
        *byte = *read;
    }
    Ok(whole + count)
}

/// From memory what is there, else from the device.
pub(super) fn read_unkept(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    if buffer.len() < DIRECT_BYTES_MIN || is_resident(file, offset, buffer.len()) {
        system::read_at(file, buffer, offset)
    } else {
        read_at(file, buffer, offset)
    }
}

pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let whole = whole_pages(bytes, offset).filter(|whole| *whole >= DIRECT_BYTES_MIN);
    let Some((direct, whole)) = whole.and_then(|whole| Some((reopen(file)?, whole))) else {
        return system::write_at(file, bytes, offset);
    };
    let (pages, rest) = bytes.split_at(whole);
    match system::write_at(&direct, pages, offset) {
        Err(error) if is_refusal(&error) => system::write_at(file, pages, offset)?,
        written => written?,
    }
    system::write_at(file, rest, offset + whole as u64)
}

/// Whether all of a range is in memory. By mincore(2): preadv2(2) with `RWF_NOWAIT` begins to read what is not.
pub(super) fn is_resident(file: &File, offset: u64, length: usize) -> bool {
    let Ok(offset) = libc::off_t::try_from(offset / PAGE as u64 * PAGE as u64) else {
        return false;
    };
    if length == 0 {
        return true;
    }
    let mut pages = vec![0_u8; length.div_ceil(PAGE)];
    // SAFETY: a new mapping of an open file, at a place that the kernel chooses. Nothing reads it.
    let mapped = unsafe {
        let (access, kind) = (libc::PROT_READ, libc::MAP_SHARED);
        libc::mmap(std::ptr::null_mut(), length, access, kind, file.as_raw_fd(), offset)
    };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the range is the mapping that was just made; there is a byte for each of its pages, and nobody else knows it.
    let is_known = unsafe {
        let looked = libc::mincore(mapped, length, pages.as_mut_ptr());
        libc::munmap(mapped, length);
        looked == 0
    };
    is_known && pages.iter().all(|page| page & 1 == 1)
}

/// How many of the bytes are of whole pages, if they begin where a page does.
fn whole_pages(bytes: &[u8], offset: u64) -> Option<usize> {
    let is_aligned = bytes.as_ptr().align_offset(PAGE) == 0 && offset.is_multiple_of(PAGE as u64);
    is_aligned.then_some(bytes.len() / PAGE * PAGE)
}

/// The same file with its cache bypassed, if the file system can. By its descriptor, as its name may be gone.
fn reopen(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

/// Whether it is the way that the file system refuses, not the bytes.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}
