//! Space on the disk of the node's directory.
// statvfs(3) is not in the standard library.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskSpace {
    /// All of it.
    pub total: u64,
    /// What an unprivileged process can still use.
    pub free: u64,
    /// What is in use.
    pub used: u64,
}

/// Space on the disk that holds `path`.
///
/// # Errors
///
/// As statvfs(3).
pub(crate) fn disk_space(path: &Path) -> io::Result<DiskSpace> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: statvfs is plain numbers, for which zeros are valid.
    let mut raw: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with NUL and lives through the call; `raw` is ours to be written.
    if unsafe { libc::statvfs(path.as_ptr(), &raw mut raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes = |blocks: u64| blocks.saturating_mul(raw.f_frsize);
    Ok(DiskSpace {
        total: bytes(raw.f_blocks),
        free: bytes(raw.f_bavail),
        used: bytes(raw.f_blocks.saturating_sub(raw.f_bfree)),
    })
}
