//! Values that file systems answer with, and their form on the wire.

use std::time::{Duration, SystemTime};

use crate::abi::{AttrOut, AttrRaw, EntryOut, StatfsOut, StatxOut, StatxRaw, SxTime};

/// A point in time: seconds since 1970 (before it: negative) and nanoseconds after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Whole seconds since 1970, rounded down.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

impl Time {
    pub(crate) fn from_wire(seconds: u64, nanoseconds: u32) -> Time {
        // The kernel casts its signed seconds to u64; cast back.
        Time { seconds: seconds as i64, nanoseconds: nanoseconds.min(999_999_999) }
    }

    fn wire_seconds(self) -> u64 {
        self.seconds as u64
    }
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Time {
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => Time {
                seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                nanoseconds: after.subsec_nanos(),
            },
            Err(error) => Time::before_epoch(error.duration()),
        }
    }
}

impl Time {
    fn before_epoch(before: Duration) -> Time {
        let seconds = i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
        match before.subsec_nanos() {
            0 => Time { seconds: -seconds, nanoseconds: 0 },
            nanos => {
                Time { seconds: (-seconds).saturating_sub(1), nanoseconds: 1_000_000_000 - nanos }
            }
        }
    }
}

/// Attributes of one inode, as stat(2) shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// Number that stat shows; usually the nodeid.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Used space in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of content.
    pub mtime: Time,
    /// Last change of content or attributes.
    pub ctime: Time,
    /// Type (`S_IFMT` bits) and permissions. The kernel refuses an answer without a valid type.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Preferred size of I/O in bytes; 0 lets the kernel choose.
    pub blksize: u32,
    /// Bits of [`flags::attr`](crate::flags::attr).
    pub flags: u32,
}

impl Attr {
    fn to_wire(self) -> AttrRaw {
        AttrRaw {
            ino: self.ino,
            size: self.size,
            blocks: self.blocks,
            atime: self.atime.wire_seconds(),
            mtime: self.mtime.wire_seconds(),
            ctime: self.ctime.wire_seconds(),
            atimensec: self.atime.nanoseconds,
            mtimensec: self.mtime.nanoseconds,
            ctimensec: self.ctime.nanoseconds,
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            blksize: self.blksize,
            flags: self.flags,
        }
    }

    pub(crate) fn to_attr_out(self, timeout: Duration) -> AttrOut {
        AttrOut {
            attr_valid: timeout.as_secs(),
            attr_valid_nsec: timeout.subsec_nanos(),
            dummy: 0,
            attr: self.to_wire(),
        }
    }
}

/// Answer to lookup and to everything that creates a name.
///
/// Each one that reaches the kernel adds one to the lookup count of `nodeid` (see the crate
/// documentation); [`Delivery`](crate::Delivery) tells whether it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The id by which the kernel will name this inode. 0 in an answer to lookup means: there is
    /// no such name, and remember that for `entry_timeout`.
    pub nodeid: u64,
    /// Makes (nodeid, generation) unique when nodeids are reused. Only NFS export looks at it.
    pub generation: u64,
    /// How long the kernel may trust the name without asking.
    pub entry_timeout: Duration,
    /// How long the kernel may trust the attributes without asking.
    pub attr_timeout: Duration,
    /// The attributes.
    pub attr: Attr,
}

impl Entry {
    /// "No such name", to be remembered by the kernel. Cheaper for it than ENOENT every time.
    #[must_use]
    pub fn negative(timeout: Duration) -> Entry {
        Entry { entry_timeout: timeout, ..Entry::default() }
    }

    pub(crate) fn to_wire(self) -> EntryOut {
        EntryOut {
            nodeid: self.nodeid,
            generation: self.generation,
            entry_valid: self.entry_timeout.as_secs(),
            attr_valid: self.attr_timeout.as_secs(),
            entry_valid_nsec: self.entry_timeout.subsec_nanos(),
            attr_valid_nsec: self.attr_timeout.subsec_nanos(),
            attr: self.attr.to_wire(),
        }
    }
}

/// Answer to open, opendir, create and tmpfile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Comes back in every request on this open file. Any value.
    pub fh: u64,
    /// Bits of [`flags::open`](crate::flags::open).
    pub flags: u32,
}

/// Answer to statfs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statfs {
    /// Total blocks, in units of `fragment_bytes`.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for users other than root.
    pub blocks_available: u64,
    /// Total inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Preferred size of I/O in bytes.
    pub block_bytes: u32,
    /// Longest name in bytes.
    pub name_bytes_max: u32,
    /// Unit of the block counts in bytes.
    pub fragment_bytes: u32,
}

impl Statfs {
    pub(crate) fn to_wire(self) -> StatfsOut {
        StatfsOut {
            blocks: self.blocks,
            bfree: self.blocks_free,
            bavail: self.blocks_available,
            files: self.files,
            ffree: self.files_free,
            bsize: self.block_bytes,
            namelen: self.name_bytes_max,
            frsize: self.fragment_bytes,
            ..StatfsOut::default()
        }
    }
}

/// Answer to statx: the attributes and what only statx shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statx {
    /// The attributes that stat shows too.
    pub attr: Attr,
    /// Time of creation, when known.
    pub btime: Option<Time>,
    /// `STATX_ATTR_*` bits that are set.
    pub attributes: u64,
    /// `STATX_ATTR_*` bits that this file system knows.
    pub attributes_mask: u64,
    /// How long the kernel may trust the attributes without asking.
    pub attr_timeout: Duration,
}

impl Statx {
    pub(crate) fn to_wire(self) -> StatxOut {
        let attr = self.attr;
        let btime_bit = if self.btime.is_some() { libc::STATX_BTIME } else { 0 };
        StatxOut {
            attr_valid: self.attr_timeout.as_secs(),
            attr_valid_nsec: self.attr_timeout.subsec_nanos(),
            stat: StatxRaw {
                mask: libc::STATX_BASIC_STATS | btime_bit,
                blksize: attr.blksize,
                attributes: self.attributes,
                nlink: attr.nlink,
                uid: attr.uid,
                gid: attr.gid,
                // Type and permissions are the low 16 bits by definition.
                mode: (attr.mode & 0xffff) as u16,
                ino: attr.ino,
                size: attr.size,
                blocks: attr.blocks,
                attributes_mask: self.attributes_mask,
                atime: statx_time(attr.atime),
                btime: statx_time(self.btime.unwrap_or_default()),
                ctime: statx_time(attr.ctime),
                mtime: statx_time(attr.mtime),
                rdev_major: libc::major(u64::from(attr.rdev)),
                rdev_minor: libc::minor(u64::from(attr.rdev)),
                ..StatxRaw::default()
            },
            ..StatxOut::default()
        }
    }
}

fn statx_time(time: Time) -> SxTime {
    SxTime { tv_sec: time.seconds, tv_nsec: time.nanoseconds, reserved: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_a_positive_nanosecond_part() {
        let time = SystemTime::UNIX_EPOCH - Duration::from_millis(1_250);
        assert_eq!(Time::from(time), Time { seconds: -2, nanoseconds: 750_000_000 });
        let whole = SystemTime::UNIX_EPOCH - Duration::from_secs(3);
        assert_eq!(Time::from(whole), Time { seconds: -3, nanoseconds: 0 });
    }

    #[test]
    fn negative_seconds_survive_the_wire() {
        let time = Time { seconds: -2, nanoseconds: 7 };
        assert_eq!(Time::from_wire(time.wire_seconds(), 7), time);
    }

    #[test]
    fn statx_says_whether_it_knows_the_birth_time() {
        let without = Statx::default().to_wire();
        assert_eq!(without.stat.mask & libc::STATX_BTIME, 0);
        let with = Statx { btime: Some(Time { seconds: 5, nanoseconds: 6 }), ..Statx::default() };
        assert_eq!(with.to_wire().stat.mask & libc::STATX_BTIME, libc::STATX_BTIME);
        assert_eq!(with.to_wire().stat.btime.tv_sec, 5);
    }
}
