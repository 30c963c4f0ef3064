//! What stat(2) shows of an inode, and what a client may change of it.

use serde::{Deserialize, Serialize};

use crate::InodeId;

/// Nanoseconds since the Unix epoch, as the client's kernel counts them. Negative before 1970.
/// Times are shown to users; nothing is ever ordered by them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Splits into the seconds and nanoseconds of `struct timespec`; the nanoseconds are in
    /// `0..1_000_000_000` also before 1970.
    #[must_use]
    pub fn to_timespec(self) -> (i64, u32) {
        (self.0.div_euclid(1_000_000_000), self.0.rem_euclid(1_000_000_000) as u32)
    }

    /// The inverse of [`to_timespec`](Timestamp::to_timespec). Saturates in the year 2262.
    #[must_use]
    pub fn from_timespec(seconds: i64, nanoseconds: u32) -> Timestamp {
        Timestamp(seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(nanoseconds)))
    }
}

/// The file types of POSIX (`S_IFMT` in inode(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// The `S_IFMT` bits of inode(7).
    #[must_use]
    pub fn mode_bits(self) -> u32 {
        match self {
            FileKind::Fifo => 0o010_000,
            FileKind::CharDevice => 0o020_000,
            FileKind::Directory => 0o040_000,
            FileKind::BlockDevice => 0o060_000,
            FileKind::File => 0o100_000,
            FileKind::Symlink => 0o120_000,
            FileKind::Socket => 0o140_000,
        }
    }

    /// The kind that the `S_IFMT` bits of `mode` name; `None` for an unknown one. No bits at all
    /// mean a regular file, as mknod(2) says.
    #[must_use]
    pub fn from_mode(mode: u32) -> Option<FileKind> {
        Some(match mode & 0o170_000 {
            0 | 0o100_000 => FileKind::File,
            0o010_000 => FileKind::Fifo,
            0o020_000 => FileKind::CharDevice,
            0o040_000 => FileKind::Directory,
            0o060_000 => FileKind::BlockDevice,
            0o120_000 => FileKind::Symlink,
            0o140_000 => FileKind::Socket,
            _ => return None,
        })
    }
}

/// The attributes of one inode, as its partition's leader knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// The inode.
    pub inode: InodeId,
    /// Its type, fixed at creation.
    pub kind: FileKind,
    /// The permission bits, set-id and sticky bits: `mode & 0o7777`.
    pub mode: u16,
    /// How many dentries name it; for a directory 2 and one more for each subdirectory.
    pub link_count: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file, else 0.
    pub device: u32,
    /// Bytes: the length of a file or of a symlink's target; for a directory its entry count.
    pub size: u64,
    /// Bytes that the segments cover, for `st_blocks`: holes do not count.
    pub allocated: u64,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of content.
    pub modified: Timestamp,
    /// Last change of content or attributes.
    pub changed: Timestamp,
    /// Raised at every change of content. A client keeps its cached pages over an open only if
    /// this is unchanged.
    pub content_version: u64,
    /// Raised at every truncation. A publish that carries an older one is refused and redone.
    pub truncation: u64,
}

/// A requested time: utimensat(2)'s `UTIME_NOW` is resolved by the client, so that all times of a
/// volume come from clients and none from servers.
pub type NewTime = Timestamp;

/// The changes of one setattr: `None` leaves a field as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttributeChanges {
    /// New permission bits.
    pub mode: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// Truncate or extend to this many bytes.
    pub size: Option<u64>,
    /// New access time.
    pub accessed: Option<NewTime>,
    /// New modification time.
    pub modified: Option<NewTime>,
    /// Clear the set-user-id bit, and the set-group-id bit where the group may execute, as a write
    /// or chown by an unprivileged process must (FUSE's `HANDLE_KILLPRIV_V2`).
    pub clear_set_id: bool,
}

/// Permission bits after a write, truncation or chown by an unprivileged process.
#[must_use]
pub fn without_set_id(mode: u16) -> u16 {
    let group_executes = mode & 0o010 != 0;
    mode & if group_executes { !0o6000 } else { !0o4000 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_before_1970_have_positive_nanoseconds() {
        assert_eq!(Timestamp(-1).to_timespec(), (-1, 999_999_999));
        assert_eq!(Timestamp::from_timespec(-1, 999_999_999), Timestamp(-1));
        assert_eq!(Timestamp(1_500_000_000).to_timespec(), (1, 500_000_000));
    }

    #[test]
    fn kinds_survive_the_mode_bits() {
        for kind in [
            FileKind::File,
            FileKind::Directory,
            FileKind::Symlink,
            FileKind::Fifo,
            FileKind::Socket,
            FileKind::CharDevice,
            FileKind::BlockDevice,
        ] {
            assert_eq!(FileKind::from_mode(kind.mode_bits() | 0o644), Some(kind));
        }
        assert_eq!(FileKind::from_mode(0o110_000), None);
    }
}
