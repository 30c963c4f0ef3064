//! The statx part of the protocol (7.39) and the headers of the io_uring transport (7.42).

use super::plain::plain;

plain! {
    struct SxTime = 16 { tv_sec: i64, tv_nsec: u32, reserved: i32, }
    /// Bit for bit the kernel's `struct statx`.
    struct StatxRaw = 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16,
        spare0: u16, ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    struct StatxOut = 288 {
        attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: StatxRaw,
    }
    /// Per-entry part of a ring request's header.
    struct UringEntInOut = 32 {
        flags: u64, commit_id: u64, payload_size: u32, padding: u32, reserved: u64,
    }
    /// In the 80-byte command area of a submission.
    struct UringCmdReq = 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6], }
}
