//! System calls that the standard library has no words for.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// Changes a byte of the first page through a shared mapping, and has it written back.
#[allow(unsafe_code)]
pub fn change_mapped(file: &File, at: usize, byte: u8) -> Result<()> {
    assert!(at < PAGE_BYTES);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of one page that is in the file, used by nobody else and unmapped at the end.
    unsafe {
        let descriptor = file.as_raw_fd();
        let no_hint = std::ptr::null_mut();
        let page = libc::mmap(no_hint, PAGE_BYTES, access, libc::MAP_SHARED, descriptor, 0);
        if page == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        page.cast::<u8>().add(at).write_volatile(byte);
        let synced = libc::msync(page, PAGE_BYTES, libc::MS_SYNC);
        let result = if synced == 0 { Ok(()) } else { Err(Error::last_os_error()) };
        libc::munmap(page, PAGE_BYTES);
        result
    }
}

/// fcntl(F_SETFL): sets the flags of an open file anew.
#[allow(unsafe_code)]
pub fn set_status_flags(file: &File, flags: i32) -> Result<()> {
    // SAFETY: a number for an open descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// From now on this thread uses files as that user does.
#[allow(unsafe_code)]
pub fn become_user(uid: u32) {
    // SAFETY: numbers only; the thread's own credentials (setfsuid(2)), which also lose root's rights to files.
    unsafe {
        libc::setfsgid(uid);
        libc::setfsuid(uid);
    }
}
