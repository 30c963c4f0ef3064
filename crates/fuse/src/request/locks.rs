//! Locks on ranges of bytes.

use crate::abi::{FileLockRaw, LkIn};
use crate::decode::{Malformed, Reader};
use crate::flags::request as bits;

/// What a lock does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// Gives the range up; as an answer to getlk: nothing is in the way.
    Unlock,
}

/// A lock on a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLock {
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` for "to the end". A flock has the whole range.
    pub end: u64,
    /// What it does.
    pub kind: LockKind,
    /// Process that holds it (getlk) or asks for it.
    pub pid: u32,
}

impl FileLock {
    fn from_wire(raw: FileLockRaw) -> Result<FileLock, Malformed> {
        let kind = match i32::try_from(raw.kind) {
            Ok(libc::F_RDLCK) => LockKind::Read,
            Ok(libc::F_WRLCK) => LockKind::Write,
            Ok(libc::F_UNLCK) => LockKind::Unlock,
            _ => return Err(Malformed("unknown lock type")),
        };
        Ok(FileLock { start: raw.start, end: raw.end, kind, pid: raw.pid })
    }

    pub(crate) fn to_wire(self) -> FileLockRaw {
        let kind = match self.kind {
            LockKind::Read => libc::F_RDLCK,
            LockKind::Write => libc::F_WRLCK,
            LockKind::Unlock => libc::F_UNLCK,
        };
        FileLockRaw { start: self.start, end: self.end, kind: kind.unsigned_abs(), pid: self.pid }
    }
}

/// Arguments of getlk, setlk and setlkw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The open file.
    pub fh: u64,
    /// Who owns the lock: a process for POSIX locks, an open file for flock and OFD locks.
    pub owner: u64,
    /// Range and kind.
    pub lock: FileLock,
    /// flock(2), not fcntl(2). The two kinds do not see each other.
    pub is_flock: bool,
    /// setlkw: wait until the lock is free. Watch for interrupts: this may take for ever.
    pub wait: bool,
}

impl Lock {
    pub(crate) fn decode(body: &mut Reader<'_>, wait: bool) -> Result<Lock, Malformed> {
        let raw: LkIn = body.take()?;
        Ok(Lock {
            fh: raw.fh,
            owner: raw.owner,
            lock: FileLock::from_wire(raw.lk)?,
            is_flock: raw.lk_flags & bits::LK_FLOCK != 0,
            wait,
        })
    }
}
