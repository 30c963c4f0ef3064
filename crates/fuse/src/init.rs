//! The terms of a mount: what the kernel offers, what the file system wants, what was agreed.
//!
//! Pure: INIT's bytes in, the answer's struct out.

use crate::abi::{InitIn, InitOut, KERNEL_MINOR_VERSION, KERNEL_MINOR_VERSION_MIN, KERNEL_VERSION};
use crate::flags::init as bits;

/// Page size that `max_pages` counts in.
const PAGE_BYTES: u32 = 4096;

/// Smallest `max_write` that the kernel takes.
pub(crate) const WRITE_BYTES_MIN: u32 = 4096;

/// Largest `max_write` that we ask for: one buffer per thread has this size. The kernel's own
/// bound is `fs.fuse.max_pages_limit`, 256 pages by default.
pub(crate) const WRITE_BYTES_MAX: u32 = 16 << 20;

/// What the kernel said in INIT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelInfo {
    /// Protocol version, 7.
    pub major: u32,
    /// Minor version of the protocol.
    pub minor: u32,
    /// Largest read-ahead in bytes that the kernel would do.
    pub max_readahead: u32,
    /// What it offers: bits of [`flags::init`](crate::flags::init).
    pub flags: u64,
}

impl KernelInfo {
    pub(crate) fn from_wire(raw: &InitIn) -> KernelInfo {
        let high = if u64::from(raw.flags) & bits::INIT_EXT != 0 { raw.flags2 } else { 0 };
        KernelInfo {
            major: raw.major,
            minor: raw.minor,
            max_readahead: raw.max_readahead,
            flags: u64::from(raw.flags) | (u64::from(high) << 32),
        }
    }

    /// Whether all these bits are offered.
    #[must_use]
    pub fn offers(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }
}

/// Who decides that cached pages of a file are stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataInvalidation {
    /// The kernel, when size or mtime in an attribute answer differ from what it knew.
    Auto,
    /// Only the file system: open without `KEEP_CACHE`, or
    /// [`Notifier::inval_inode`](crate::Notifier::inval_inode).
    Explicit,
}

/// Whether directories are read with attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readdirplus {
    /// Names only.
    Off,
    /// Always with attributes.
    Always,
    /// With attributes where the kernel expects that they are used.
    Auto,
}

/// Who drops suid, sgid and capabilities when a file is written, truncated or given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillPrivileges {
    /// The kernel, with an extra setattr (and a getxattr before every write). The safe default.
    Kernel,
    /// The file system, always (HANDLE_KILLPRIV).
    Always,
    /// The file system, where the request says so (HANDLE_KILLPRIV_V2). Saves the getxattr.
    Flagged,
}

/// What a file system asks for. [`Filesystem::init`](crate::Filesystem::init) changes the defaults.
///
/// A wish that the kernel does not offer is dropped silently; [`Negotiated`] tells. There is no
/// writeback cache: with several clients on one file the kernel would keep their data apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Largest read and write in bytes: 4 KiB to what the session's buffers hold (default 1 MiB,
    /// which is also the kernel's bound unless `fs.fuse.max_pages_limit` was raised).
    pub max_write: u32,
    /// Largest read-ahead in bytes; the kernel's own bound (usually 128 KiB) applies too.
    pub max_readahead: u32,
    /// Requests without a waiting process (read-ahead, direct I/O) that may be under way at once.
    pub max_background: u16,
    /// Number of those at which the kernel calls the mount congested; at most `max_background`.
    pub congestion_threshold: u16,
    /// Resolution of timestamps in nanoseconds.
    pub time_granularity_ns: u32,
    /// The kernel aborts the connection when a request takes longer, in seconds; 0 for never.
    pub request_timeout_seconds: u16,
    /// Who invalidates cached pages.
    pub data_invalidation: DataInvalidation,
    /// Directories with attributes.
    pub readdirplus: Readdirplus,
    /// Who drops suid and sgid.
    pub kill_privileges: KillPrivileges,
    /// Several reads of a file at once.
    pub async_read: bool,
    /// O_TRUNC within open.
    pub atomic_truncate: bool,
    /// Lookups and readdir of a directory in parallel.
    pub parallel_directory_operations: bool,
    /// Direct I/O in parallel pieces.
    pub async_direct_io: bool,
    /// fcntl(2) locks come to the file system; else the kernel keeps them, for this mount only.
    pub posix_locks: bool,
    /// flock(2) locks come to the file system.
    pub flock_locks: bool,
    /// The kernel caches the targets of symbolic links.
    pub cache_symlinks: bool,
    /// The kernel enforces POSIX ACLs kept as xattrs. Implies default_permissions.
    pub posix_acl: bool,
    /// The umask is left to the file system.
    pub dont_mask: bool,
    /// Lookups of "." and ".." are handled, so that NFS can export the mount.
    pub export_support: bool,
    /// Shared mmap of files opened for direct I/O.
    pub direct_io_allow_mmap: bool,
    /// The caller's group that matches the parent's comes with creations.
    pub supplementary_group: bool,
}

impl Default for Config {
    /// What a network file system wants, and nothing that needs its help.
    fn default() -> Config {
        Config {
            max_write: 1 << 20,
            max_readahead: 1 << 20,
            // The kernel's defaults are 12 and 9: too few for a file system with network latency.
            max_background: 128,
            congestion_threshold: 96,
            time_granularity_ns: 1,
            request_timeout_seconds: 0,
            data_invalidation: DataInvalidation::Auto,
            readdirplus: Readdirplus::Auto,
            kill_privileges: KillPrivileges::Kernel,
            async_read: true,
            atomic_truncate: true,
            parallel_directory_operations: true,
            async_direct_io: true,
            posix_locks: false,
            flock_locks: false,
            cache_symlinks: false,
            posix_acl: false,
            dont_mask: false,
            export_support: false,
            direct_io_allow_mmap: false,
            supplementary_group: false,
        }
    }
}

impl Config {
    /// The bits to ask for.
    fn wanted(&self) -> u64 {
        let always = bits::BIG_WRITES
            | bits::MAX_PAGES
            | bits::INIT_EXT
            | bits::SETXATTR_EXT
            | bits::ABORT_ERROR
            | bits::HAS_IOCTL_DIR;
        let chosen = [
            (bits::ASYNC_READ, self.async_read),
            (bits::ATOMIC_O_TRUNC, self.atomic_truncate),
            (bits::PARALLEL_DIROPS, self.parallel_directory_operations),
            (bits::ASYNC_DIO, self.async_direct_io),
            (bits::POSIX_LOCKS, self.posix_locks),
            (bits::FLOCK_LOCKS, self.flock_locks),
            (bits::CACHE_SYMLINKS, self.cache_symlinks),
            (bits::POSIX_ACL, self.posix_acl),
            (bits::DONT_MASK, self.dont_mask),
            (bits::EXPORT_SUPPORT, self.export_support),
            (bits::DIRECT_IO_ALLOW_MMAP, self.direct_io_allow_mmap),
            (bits::CREATE_SUPP_GROUP, self.supplementary_group),
            (bits::REQUEST_TIMEOUT, self.request_timeout_seconds > 0),
        ];
        let chosen = chosen.iter().filter(|(_, on)| *on).fold(0, |all, (bit, _)| all | bit);
        always | chosen | self.wanted_by_choice()
    }

    fn wanted_by_choice(&self) -> u64 {
        let invalidation = match self.data_invalidation {
            DataInvalidation::Auto => bits::AUTO_INVAL_DATA,
            DataInvalidation::Explicit => bits::EXPLICIT_INVAL_DATA,
        };
        let readdirplus = match self.readdirplus {
            Readdirplus::Off => 0,
            Readdirplus::Always => bits::DO_READDIRPLUS,
            Readdirplus::Auto => bits::DO_READDIRPLUS | bits::READDIRPLUS_AUTO,
        };
        let kill = match self.kill_privileges {
            KillPrivileges::Kernel => 0,
            KillPrivileges::Always => bits::HANDLE_KILLPRIV,
            KillPrivileges::Flagged => bits::HANDLE_KILLPRIV_V2,
        };
        invalidation | readdirplus | kill
    }
}

/// What was agreed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// Minor version of the protocol that both sides speak.
    pub minor: u32,
    /// Bits of [`flags::init`](crate::flags::init) that are on.
    pub flags: u64,
    /// Largest read and write in bytes. A kernel with a lower `max_pages_limit` sends less.
    pub max_write: u32,
    /// Largest read-ahead in bytes.
    pub max_readahead: u32,
}

impl Negotiated {
    /// Whether all these bits are on.
    #[must_use]
    pub fn has(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }
}

/// The kernel speaks no version that this crate serves.
pub(crate) fn is_too_old(kernel: &KernelInfo) -> bool {
    kernel.major < KERNEL_VERSION
        || (kernel.major == KERNEL_VERSION && kernel.minor < KERNEL_MINOR_VERSION_MIN)
}

/// Asks a kernel of a later major version to send INIT again, in ours.
pub(crate) fn answer_newer_major() -> InitOut {
    InitOut { major: KERNEL_VERSION, minor: KERNEL_MINOR_VERSION, ..InitOut::default() }
}

/// Makes the answer to INIT. `buffer_bytes` is the largest write that the buffers hold.
pub(crate) fn negotiate(
    kernel: &KernelInfo,
    config: &Config,
    buffer_bytes: u32,
) -> (InitOut, Negotiated) {
    let flags = config.wanted() & kernel.flags;
    let max_write = config.max_write.clamp(WRITE_BYTES_MIN, buffer_bytes.max(WRITE_BYTES_MIN));
    let max_readahead = config.max_readahead.min(kernel.max_readahead);
    let minor = kernel.minor.min(KERNEL_MINOR_VERSION);
    let (low, high) = split(flags);
    let answer = InitOut {
        major: KERNEL_VERSION,
        minor: KERNEL_MINOR_VERSION,
        max_readahead,
        flags: low,
        flags2: high,
        max_background: config.max_background.max(1),
        congestion_threshold: config.congestion_threshold.clamp(1, config.max_background.max(1)),
        max_write,
        time_gran: config.time_granularity_ns.max(1),
        max_pages: u16::try_from(max_write.div_ceil(PAGE_BYTES)).unwrap_or(u16::MAX),
        request_timeout: config.request_timeout_seconds,
        ..InitOut::default()
    };
    (answer, Negotiated { minor, flags, max_write, max_readahead })
}

/// Low and high word.
fn split(flags: u64) -> (u32, u32) {
    ((flags & u64::from(u32::MAX)) as u32, (flags >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODERN: KernelInfo =
        KernelInfo { major: 7, minor: 45, max_readahead: 128 << 10, flags: u64::MAX };

    #[test]
    fn only_what_is_offered_and_wanted_is_agreed() {
        let (answer, agreed) = negotiate(&MODERN, &Config::default(), 1 << 20);
        assert!(agreed.has(bits::ASYNC_READ | bits::PARALLEL_DIROPS | bits::ATOMIC_O_TRUNC));
        assert!(agreed.has(bits::DO_READDIRPLUS | bits::READDIRPLUS_AUTO | bits::MAX_PAGES));
        for never in [bits::WRITEBACK_CACHE, bits::OVER_IO_URING, bits::PASSTHROUGH] {
            assert!(!agreed.has(never));
        }
        assert_eq!((answer.max_write, answer.max_pages), (1 << 20, 256));
        assert_eq!((answer.max_readahead, answer.time_gran), (128 << 10, 1));

        let bare = KernelInfo { flags: bits::ASYNC_READ, minor: 31, ..MODERN };
        let (answer, agreed) = negotiate(&bare, &Config::default(), 1 << 20);
        assert_eq!((agreed.flags, agreed.minor), (bits::ASYNC_READ, 31));
        assert_eq!(answer.flags2, 0);
    }

    #[test]
    fn choices_exclude_each_other() {
        let explicit = Config {
            data_invalidation: DataInvalidation::Explicit,
            kill_privileges: KillPrivileges::Flagged,
            readdirplus: Readdirplus::Always,
            ..Config::default()
        };
        let (_, agreed) = negotiate(&MODERN, &explicit, 1 << 20);
        assert!(agreed.has(bits::EXPLICIT_INVAL_DATA | bits::HANDLE_KILLPRIV_V2));
        assert!(!agreed.has(bits::AUTO_INVAL_DATA) && !agreed.has(bits::HANDLE_KILLPRIV));
        assert!(!agreed.has(bits::READDIRPLUS_AUTO));
    }

    #[test]
    fn sizes_stay_within_the_buffer() {
        for (wish, expected) in [(0, 4096), (1 << 30, 1 << 20), (64 << 10, 64 << 10)] {
            let config = Config { max_write: wish, ..Config::default() };
            assert_eq!(negotiate(&MODERN, &config, 1 << 20).1.max_write, expected);
        }
    }

    #[test]
    fn the_high_word_counts_only_with_its_flag() {
        let raw = InitIn { major: 7, minor: 45, flags: 1, flags2: 1 << 10, ..InitIn::default() };
        assert_eq!(KernelInfo::from_wire(&raw).flags, 1);
        let extended = InitIn { flags: 1 | (1 << 30), ..raw };
        assert!(KernelInfo::from_wire(&extended).offers(bits::REQUEST_TIMEOUT));
    }

    #[test]
    fn old_kernels_are_refused() {
        for (major, minor, old) in [(6, 99, true), (7, 30, true), (7, 31, false), (8, 0, false)] {
            assert_eq!(is_too_old(&KernelInfo { major, minor, ..MODERN }), old, "{major}.{minor}");
        }
    }
}
