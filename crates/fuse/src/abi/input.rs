//! What the kernel sends: one struct per opcode, followed by names or data where it has any.

use super::plain::plain;

plain! {
    /// In front of every request.
    struct InHeader = 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    }
    struct InitIn = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
    }
    /// INIT as kernels before 7.36 send it.
    struct InitCompatIn = 16 { major: u32, minor: u32, max_readahead: u32, flags: u32, }
    struct ForgetIn = 8 { nlookup: u64, }
    struct ForgetOne = 16 { nodeid: u64, nlookup: u64, }
    struct BatchForgetIn = 8 { count: u32, dummy: u32, }
    struct GetattrIn = 16 { getattr_flags: u32, dummy: u32, fh: u64, }
    struct MknodIn = 16 { mode: u32, rdev: u32, umask: u32, padding: u32, }
    struct MkdirIn = 8 { mode: u32, umask: u32, }
    struct RenameIn = 8 { newdir: u64, }
    struct Rename2In = 16 { newdir: u64, flags: u32, padding: u32, }
    struct LinkIn = 8 { oldnodeid: u64, }
    struct SetattrIn = 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    struct OpenIn = 8 { flags: u32, open_flags: u32, }
    struct CreateIn = 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    struct ReleaseIn = 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    struct FlushIn = 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64, }
    struct ReadIn = 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    struct WriteIn = 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    }
    struct FsyncIn = 16 { fh: u64, fsync_flags: u32, padding: u32, }
    /// Without SETXATTR_EXT the kernel sends only the first eight bytes: [`SetxattrCompatIn`].
    struct SetxattrIn = 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32, }
    struct SetxattrCompatIn = 8 { size: u32, flags: u32, }
    struct GetxattrIn = 8 { size: u32, padding: u32, }
    struct FileLockRaw = 24 { start: u64, end: u64, kind: u32, pid: u32, }
    struct LkIn = 48 { fh: u64, owner: u64, lk: FileLockRaw, lk_flags: u32, padding: u32, }
    struct AccessIn = 8 { mask: u32, padding: u32, }
    struct InterruptIn = 8 { unique: u64, }
    struct BmapIn = 16 { block: u64, blocksize: u32, padding: u32, }
    struct IoctlIn = 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32, }
    struct PollIn = 24 { fh: u64, kh: u64, flags: u32, events: u32, }
    struct FallocateIn = 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }
    struct LseekIn = 24 { fh: u64, offset: u64, whence: u32, padding: u32, }
    struct CopyFileRangeIn = 56 {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    struct StatxIn = 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32, }
    struct SyncfsIn = 8 { padding: u64, }
    /// In front of each extension at the end of a request (`total_extlen`).
    struct ExtHeader = 8 { size: u32, kind: u32, }
    struct SuppGroups = 4 { nr_groups: u32, }
    struct NotifyRetrieveIn = 40 {
        dummy1: u64, offset: u64, size: u32, dummy2: u32, dummy3: u64, dummy4: u64,
    }
}

/// Extension type of [`SuppGroups`]. Types up to 31 are security contexts.
pub(crate) const EXT_GROUPS: u32 = 32;
