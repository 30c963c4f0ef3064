//! Our words and the kernel's.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::SystemTime;

use milpa_client::{FsError, Timeouts};
use milpa_types::{AttributeChanges, Attributes, Name, Timestamp};

use crate::{Attr, Entry, SetAttr, SetTime, Statfs, Time};

/// What `st_blksize` says: a packet, so that stdio and cp write in pieces that suit us.
const PREFERRED_IO_BYTES: u32 = 128 * 1024;

/// The unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

/// The unit of statfs.
const STATFS_BLOCK_BYTES: u32 = 4096;

pub(super) fn name(text: &OsStr) -> Result<Name, FsError> {
    Name::new(text.as_bytes()).map_err(FsError::from)
}

pub(super) fn attr(attributes: &Attributes) -> Attr {
    Attr {
        ino: attributes.inode.0,
        size: attributes.size,
        blocks: attributes.allocated.div_ceil(STAT_BLOCK_BYTES),
        atime: time(attributes.accessed),
        mtime: time(attributes.modified),
        ctime: time(attributes.changed),
        mode: attributes.kind.mode_bits() | u32::from(attributes.mode),
        nlink: attributes.link_count,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.device,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

pub(super) fn entry(attributes: &Attributes, timeouts: Timeouts) -> Entry {
    Entry {
        nodeid: attributes.inode.0,
        generation: 0,
        entry_timeout: timeouts.entry,
        attr_timeout: timeouts.attributes,
        attr: attr(attributes),
    }
}

pub(super) fn changes(set: &SetAttr) -> AttributeChanges {
    AttributeChanges {
        mode: set.mode.map(|mode| (mode & 0o7777) as u16),
        uid: set.uid,
        gid: set.gid,
        size: set.size,
        accessed: set.atime.map(resolve),
        modified: set.mtime.map(resolve),
        clear_set_id: set.kill_suidgid,
    }
}

pub(super) fn statfs(space: &milpa_client::Statfs) -> Statfs {
    let unit = u64::from(STATFS_BLOCK_BYTES);
    Statfs {
        blocks: space.capacity_bytes / unit,
        blocks_free: space.free_bytes / unit,
        blocks_available: space.free_bytes / unit,
        files: space.inodes.saturating_add(space.inodes_free),
        files_free: space.inodes_free,
        block_bytes: STATFS_BLOCK_BYTES,
        name_bytes_max: milpa_types::NAME_BYTES_MAX as u32,
        fragment_bytes: STATFS_BLOCK_BYTES,
    }
}

fn time(timestamp: Timestamp) -> Time {
    let (seconds, nanoseconds) = timestamp.to_timespec();
    Time { seconds, nanoseconds }
}

fn resolve(time: SetTime) -> Timestamp {
    let time = match time {
        SetTime::Now => Time::from(SystemTime::now()),
        SetTime::At(time) => time,
    };
    Timestamp::from_timespec(time.seconds, time.nanoseconds)
}
