//! Requests as a file system sees them: who asks, and the decoded arguments of each opcode.

mod locks;
mod space;

use std::ffi::OsStr;

pub use locks::{FileLock, Lock, LockKind};
pub use space::{CopyFileRange, Fallocate, Lseek};

use crate::abi::{
    CreateIn, FlushIn, ForgetOne, FsyncIn, GetattrIn, IoctlIn, MknodIn, OpenIn, PollIn, ReadIn,
    ReleaseIn, Rename2In, RenameIn, SetattrIn, SetxattrCompatIn, SetxattrIn, StatxIn, WriteIn,
};
use crate::attr::Time;
use crate::decode::{Malformed, Reader};
use crate::flags::{self, request as bits, setattr as valid};

/// Who asks, and about which inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The kernel's name for this request; not reused while the mount lives.
    pub unique: u64,
    /// The inode; for requests with a name, the directory. [`ROOT_ID`](crate::ROOT_ID) is the root.
    pub nodeid: u64,
    /// Filesystem user id of the caller.
    pub uid: u32,
    /// Filesystem group id of the caller.
    pub gid: u32,
    /// Thread id of the caller in the mount's pid namespace; 0 when it comes from the page cache.
    pub pid: u32,
    /// With creations, when negotiated: the caller's group that equals the parent's group.
    pub supplementary_gid: Option<u32>,
}

impl Request {
    /// The kernel sent this request before (after [`Notifier::resend`](crate::Notifier::resend)).
    #[must_use]
    pub fn is_resend(&self) -> bool {
        self.unique & flags::UNIQUE_RESEND != 0
    }
}

/// One element of a forget: the kernel dropped `count` of its references to `nodeid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forget {
    /// The inode.
    pub nodeid: u64,
    /// How much its lookup count falls.
    pub count: u64,
}

/// The elements of a batch forget, read from the request's buffer.
#[derive(Clone, Debug)]
pub struct Forgets<'a> {
    reader: Reader<'a>,
    left: u32,
}

impl<'a> Forgets<'a> {
    pub(crate) fn new(reader: Reader<'a>, count: u32) -> Forgets<'a> {
        Forgets { reader, left: count }
    }
}

impl Iterator for Forgets<'_> {
    type Item = Forget;

    fn next(&mut self) -> Option<Forget> {
        self.left = self.left.checked_sub(1)?;
        let one: ForgetOne = self.reader.take().ok()?;
        Some(Forget { nodeid: one.nodeid, count: one.nlookup })
    }
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The server's clock.
    Now,
    /// A time of the caller's choice.
    At(Time),
}

/// Arguments of setattr: what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permissions (the type bits do not change).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// New size in bytes: truncate or extend.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Change time; only with a writeback cache, which this crate never asks for.
    pub ctime: Option<Time>,
    /// The open file, when this is ftruncate or comes through one.
    pub fh: Option<u64>,
    /// Lock owner of a truncation (mandatory locks).
    pub lock_owner: Option<u64>,
    /// Drop suid and sgid (HANDLE_KILLPRIV_V2).
    pub kill_suidgid: bool,
}

impl SetAttr {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<SetAttr, Malformed> {
        let raw: SetattrIn = body.take()?;
        let has = |bit: u32| raw.valid & bit != 0;
        let time = |set: u32, now: u32, seconds: u64, nanoseconds: u32| match (has(set), has(now)) {
            (false, _) => None,
            (true, true) => Some(SetTime::Now),
            (true, false) => Some(SetTime::At(Time::from_wire(seconds, nanoseconds))),
        };
        Ok(SetAttr {
            mode: has(valid::MODE).then_some(raw.mode),
            uid: has(valid::UID).then_some(raw.uid),
            gid: has(valid::GID).then_some(raw.gid),
            size: has(valid::SIZE).then_some(raw.size),
            atime: time(valid::ATIME, valid::ATIME_NOW, raw.atime, raw.atimensec),
            mtime: time(valid::MTIME, valid::MTIME_NOW, raw.mtime, raw.mtimensec),
            ctime: has(valid::CTIME).then(|| Time::from_wire(raw.ctime, raw.ctimensec)),
            fh: has(valid::FH).then_some(raw.fh),
            lock_owner: has(valid::LOCKOWNER).then_some(raw.lock_owner),
            kill_suidgid: has(valid::KILL_SUIDGID),
        })
    }
}

pub(crate) fn decode_getattr(body: &mut Reader<'_>) -> Result<Option<u64>, Malformed> {
    let raw: GetattrIn = body.take()?;
    Ok((raw.getattr_flags & bits::GETATTR_FH != 0).then_some(raw.fh))
}

/// Arguments of mknod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mknod<'a> {
    /// Name in the request's directory.
    pub name: &'a OsStr,
    /// Type and permissions, the umask already applied (unless DONT_MASK was agreed).
    pub mode: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Device number of a device node.
    pub rdev: u32,
}

impl<'a> Mknod<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>) -> Result<Mknod<'a>, Malformed> {
        let raw: MknodIn = body.take()?;
        Ok(Mknod { name: body.name()?, mode: raw.mode, umask: raw.umask, rdev: raw.rdev })
    }
}

/// Arguments of mkdir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mkdir<'a> {
    /// Name in the request's directory.
    pub name: &'a OsStr,
    /// Permissions without type bits, the umask already applied (unless DONT_MASK was agreed).
    pub mode: u32,
    /// The caller's umask.
    pub umask: u32,
}

/// Arguments of rename and rename2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rename<'a> {
    /// Name in the request's directory.
    pub name: &'a OsStr,
    /// The directory that gets it.
    pub new_parent: u64,
    /// Its name there.
    pub new_name: &'a OsStr,
    /// `RENAME_NOREPLACE`, `RENAME_EXCHANGE`, `RENAME_WHITEOUT`; an unknown one is EINVAL.
    pub flags: u32,
}

impl<'a> Rename<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>) -> Result<Rename<'a>, Malformed> {
        let raw: RenameIn = body.take()?;
        Rename::names(body, raw.newdir, 0)
    }

    pub(crate) fn decode2(body: &mut Reader<'a>) -> Result<Rename<'a>, Malformed> {
        let raw: Rename2In = body.take()?;
        Rename::names(body, raw.newdir, raw.flags)
    }

    fn names(body: &mut Reader<'a>, new_parent: u64, flags: u32) -> Result<Rename<'a>, Malformed> {
        Ok(Rename { name: body.name()?, new_parent, new_name: body.name()?, flags })
    }
}

/// Arguments of open and opendir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// `O_*` flags. O_TRUNC is among them only when ATOMIC_O_TRUNC was agreed.
    pub flags: u32,
    /// Drop suid and sgid if the file is truncated (HANDLE_KILLPRIV_V2).
    pub kill_suidgid: bool,
}

impl Open {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Open, Malformed> {
        let raw: OpenIn = body.take()?;
        let kill_suidgid = raw.open_flags & bits::OPEN_KILL_SUIDGID != 0;
        Ok(Open { flags: raw.flags, kill_suidgid })
    }
}

/// Arguments of create and tmpfile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create<'a> {
    /// Name in the request's directory; empty for tmpfile, which makes a file without a name.
    pub name: &'a OsStr,
    /// Type and permissions, the umask already applied (unless DONT_MASK was agreed).
    pub mode: u32,
    /// The caller's umask.
    pub umask: u32,
    /// `O_*` flags. With O_EXCL an existing name is EEXIST.
    pub flags: u32,
    /// Drop suid and sgid if the file existed and is truncated (HANDLE_KILLPRIV_V2).
    pub kill_suidgid: bool,
}

impl<'a> Create<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>) -> Result<Create<'a>, Malformed> {
        let create = Create::decode_tmpfile(body)?;
        Ok(Create { name: body.name()?, ..create })
    }

    /// The kernel sends a name with tmpfile too, but a made-up one.
    pub(crate) fn decode_tmpfile(body: &mut Reader<'a>) -> Result<Create<'a>, Malformed> {
        let raw: CreateIn = body.take()?;
        Ok(Create {
            name: OsStr::new(""),
            mode: raw.mode,
            umask: raw.umask,
            flags: raw.flags,
            kill_suidgid: raw.open_flags & bits::OPEN_KILL_SUIDGID != 0,
        })
    }
}

/// Arguments of read, readdir and readdirplus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The open file or directory.
    pub fh: u64,
    /// Where to start: bytes in a file; in a directory the `next_offset` of the last entry seen.
    pub offset: u64,
    /// At most so many bytes of answer.
    pub size: u32,
    /// `O_*` flags of the open file as they are now.
    pub flags: u32,
    /// Lock owner (mandatory locks).
    pub lock_owner: Option<u64>,
}

impl Read {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Read, Malformed> {
        let raw: ReadIn = body.take()?;
        Ok(Read {
            fh: raw.fh,
            offset: raw.offset,
            size: raw.size,
            flags: raw.flags,
            lock_owner: (raw.read_flags & bits::READ_LOCKOWNER != 0).then_some(raw.lock_owner),
        })
    }
}

/// Arguments of write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Write<'a> {
    /// The open file. With `from_page_cache` only a guess: any handle open for writing.
    pub fh: u64,
    /// Where to write, in bytes.
    pub offset: u64,
    /// What to write. It lives in the FUSE thread's buffer, page-aligned: copy or send it before
    /// the method returns.
    pub data: &'a [u8],
    /// `O_*` flags of the open file as they are now.
    pub flags: u32,
    /// Lock owner (mandatory locks).
    pub lock_owner: Option<u64>,
    /// A dirty page of a shared mapping comes back; no process waits for it.
    pub from_page_cache: bool,
    /// Drop suid and sgid (HANDLE_KILLPRIV_V2).
    pub kill_suidgid: bool,
}

impl std::fmt::Debug for Write<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Never the bytes: they are the user's.
        write!(
            formatter,
            "Write {{ fh: {}, {} bytes at {} }}",
            self.fh,
            self.data.len(),
            self.offset
        )
    }
}

impl<'a> Write<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>) -> Result<Write<'a>, Malformed> {
        let raw: WriteIn = body.take()?;
        Ok(Write {
            fh: raw.fh,
            offset: raw.offset,
            data: body.data(raw.size)?,
            flags: raw.flags,
            lock_owner: (raw.write_flags & bits::WRITE_LOCKOWNER != 0).then_some(raw.lock_owner),
            from_page_cache: raw.write_flags & bits::WRITE_CACHE != 0,
            kill_suidgid: raw.write_flags & bits::WRITE_KILL_SUIDGID != 0,
        })
    }
}

/// Arguments of release and releasedir: the last descriptor of an open file was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// The open file.
    pub fh: u64,
    /// `O_*` flags it was opened with.
    pub flags: u32,
    /// Flush first.
    pub flush: bool,
    /// The flock of this owner ends with the file.
    pub flock_unlock: Option<u64>,
}

impl Release {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Release, Malformed> {
        let raw: ReleaseIn = body.take()?;
        let has = |bit: u32| raw.release_flags & bit != 0;
        Ok(Release {
            fh: raw.fh,
            flags: raw.flags,
            flush: has(bits::RELEASE_FLUSH),
            flock_unlock: has(bits::RELEASE_FLOCK_UNLOCK).then_some(raw.lock_owner),
        })
    }
}

/// Arguments of flush: one descriptor of an open file was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// The open file.
    pub fh: u64,
    /// The POSIX locks of this owner on the inode end now.
    pub lock_owner: u64,
}

impl Flush {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Flush, Malformed> {
        let raw: FlushIn = body.take()?;
        Ok(Flush { fh: raw.fh, lock_owner: raw.lock_owner })
    }
}

/// Arguments of fsync and fsyncdir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fsync {
    /// The open file or directory.
    pub fh: u64,
    /// fdatasync(2): attributes that are not needed to read the data back may stay behind.
    pub data_only: bool,
}

impl Fsync {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<Fsync, Malformed> {
        let raw: FsyncIn = body.take()?;
        Ok(Fsync { fh: raw.fh, data_only: raw.fsync_flags & bits::FSYNC_FDATASYNC != 0 })
    }
}

/// Arguments of setxattr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setxattr<'a> {
    /// Name with its namespace, such as `user.colour`.
    pub name: &'a OsStr,
    /// Value, up to 64 KiB.
    pub value: &'a [u8],
    /// `XATTR_CREATE` or `XATTR_REPLACE`.
    pub flags: u32,
    /// Drop sgid: an ACL was set by someone outside the group.
    pub kill_sgid: bool,
}

impl<'a> Setxattr<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>, extended: bool) -> Result<Setxattr<'a>, Malformed> {
        let raw = if extended {
            body.take::<SetxattrIn>()?
        } else {
            let compat: SetxattrCompatIn = body.take()?;
            SetxattrIn { size: compat.size, flags: compat.flags, ..SetxattrIn::default() }
        };
        Ok(Setxattr {
            name: body.text()?,
            value: body.data(raw.size)?,
            flags: raw.flags,
            kill_sgid: raw.setxattr_flags & bits::SETXATTR_ACL_KILL_SGID != 0,
        })
    }
}

/// Arguments of ioctl (restricted form: sizes come from the command number).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ioctl<'a> {
    /// The open file or directory.
    pub fh: u64,
    /// Bits of [`flags::request`](crate::flags::request), `IOCTL_*`.
    pub flags: u32,
    /// The command.
    pub command: u32,
    /// The caller's third argument. Never a pointer that we could follow.
    pub argument: u64,
    /// What the caller passed in.
    pub input: &'a [u8],
    /// At most so many bytes of answer.
    pub output_size: u32,
}

impl<'a> Ioctl<'a> {
    pub(crate) fn decode(body: &mut Reader<'a>) -> Result<Ioctl<'a>, Malformed> {
        let raw: IoctlIn = body.take()?;
        Ok(Ioctl {
            fh: raw.fh,
            flags: raw.flags,
            command: raw.cmd,
            argument: raw.arg,
            input: body.data(raw.in_size)?,
            output_size: raw.out_size,
        })
    }
}

/// Arguments of poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollArgs {
    /// The open file.
    pub fh: u64,
    /// Names the waiting side in [`Notifier::poll`](crate::Notifier::poll).
    pub kernel_handle: u64,
    /// The events asked for (`POLL*`).
    pub events: u32,
    /// Notify when something changes.
    pub notify: bool,
}

impl PollArgs {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<PollArgs, Malformed> {
        let raw: PollIn = body.take()?;
        let notify = raw.flags & bits::POLL_SCHEDULE_NOTIFY != 0;
        Ok(PollArgs { fh: raw.fh, kernel_handle: raw.kh, events: raw.events, notify })
    }
}

/// Arguments of statx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatxArgs {
    /// The open file, when the call came through one.
    pub fh: Option<u64>,
    /// `AT_STATX_*`.
    pub flags: u32,
    /// `STATX_*`: what the caller wants to know.
    pub mask: u32,
}

impl StatxArgs {
    pub(crate) fn decode(body: &mut Reader<'_>) -> Result<StatxArgs, Malformed> {
        let raw: StatxIn = body.take()?;
        let fh = (raw.getattr_flags & bits::GETATTR_FH != 0).then_some(raw.fh);
        Ok(StatxArgs { fh, flags: raw.sx_flags, mask: raw.sx_mask })
    }
}

#[cfg(test)]
mod tests;
