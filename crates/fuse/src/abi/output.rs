//! What we send: answers, and the bodies of notifications.

use super::input::FileLockRaw;
use super::plain::plain;

plain! {
    /// In front of every answer (`error` 0 or negative) and notification (`unique` 0).
    struct OutHeader = 16 { len: u32, error: i32, unique: u64, }
    struct AttrRaw = 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32,
        rdev: u32, blksize: u32, flags: u32,
    }
    struct EntryOut = 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: AttrRaw,
    }
    struct AttrOut = 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: AttrRaw, }
    struct OpenOut = 16 { fh: u64, open_flags: u32, backing_id: i32, }
    struct CreateOut = 144 { entry: EntryOut, open: OpenOut, }
    struct WriteOut = 8 { size: u32, padding: u32, }
    struct StatfsOut = 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32, padding: u32, spare: [u32; 6],
    }
    struct GetxattrOut = 8 { size: u32, padding: u32, }
    struct LkOut = 24 { lk: FileLockRaw, }
    struct InitOut = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16,
        congestion_threshold: u16, max_write: u32, time_gran: u32, max_pages: u16,
        map_alignment: u16, flags2: u32, max_stack_depth: u32, request_timeout: u16,
        unused: [u16; 11],
    }
    struct BmapOut = 8 { block: u64, }
    struct IoctlOut = 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32, }
    struct PollOut = 8 { revents: u32, padding: u32, }
    struct LseekOut = 8 { offset: u64, }
    struct CopyFileRangeOut = 8 { bytes_copied: u64, }
    /// Followed by the name, padded to eight bytes.
    struct Dirent = 24 { ino: u64, off: u64, namelen: u32, kind: u32, }
    struct Direntplus = 152 { entry_out: EntryOut, dirent: Dirent, }

    struct NotifyPollOut = 8 { kh: u64, }
    struct NotifyInvalInodeOut = 24 { ino: u64, off: i64, len: i64, }
    struct NotifyInvalEntryOut = 16 { parent: u64, namelen: u32, flags: u32, }
    struct NotifyDeleteOut = 24 { parent: u64, child: u64, namelen: u32, padding: u32, }
    struct NotifyStoreOut = 24 { nodeid: u64, offset: u64, size: u32, padding: u32, }
    struct NotifyRetrieveOut = 32 {
        notify_unique: u64, nodeid: u64, offset: u64, size: u32, padding: u32,
    }
    struct NotifyPruneOut = 16 { count: u32, padding: u32, spare: u64, }
}
