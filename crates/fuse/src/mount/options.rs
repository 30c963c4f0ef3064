//! What a mount looks like from outside, and how many threads serve it.

use std::num::NonZeroUsize;

use crate::init::{WRITE_BYTES_MAX, WRITE_BYTES_MIN};

/// More threads than this only compete for the kernel's queue.
const THREADS_MAX: usize = 256;

/// Options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// First column of `df`, such as `milpa:volume`. The type is always `fuse.milpa`.
    pub fsname: String,
    /// Other users than the one who mounted may use it. Not root: see fuse.conf(5).
    pub allow_other: bool,
    /// The kernel checks permissions by mode, uid and gid of the attributes. Without it every
    /// operation must check for itself.
    pub default_permissions: bool,
    /// No writes.
    pub read_only: bool,
    /// suid and sgid bits have no effect.
    pub no_suid: bool,
    /// Device nodes have no effect.
    pub no_devices: bool,
    /// Programs cannot be started from it.
    pub no_exec: bool,
    /// Access times are not updated by reads.
    pub no_atime: bool,
    /// Largest read in bytes, when it shall be smaller than the largest write.
    pub max_read: Option<u32>,
    /// Read-ahead of cached files in bytes. INIT can only lower the kernel's 128 KiB; more is set
    /// in /sys/class/bdi, which needs root. If that fails the mount is slower, and a line is logged.
    pub read_ahead_bytes: Option<u32>,
    /// Threads that read requests, 1 to 256. Methods do not block, so a few are enough.
    pub threads: usize,
    /// Each thread's buffer holds a write of so many bytes: the bound of
    /// [`Config::max_write`](crate::Config). 4 KiB to 16 MiB.
    pub buffer_bytes: u32,
}

impl Default for MountOptions {
    /// A mount by root for everybody, with the kernel's permission checks.
    fn default() -> MountOptions {
        let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        MountOptions {
            fsname: "milpa".to_owned(),
            allow_other: true,
            default_permissions: true,
            read_only: false,
            no_suid: true,
            no_devices: true,
            no_exec: false,
            no_atime: false,
            max_read: None,
            read_ahead_bytes: None,
            threads: cpus.clamp(2, 16),
            buffer_bytes: 1 << 20,
        }
    }
}

impl MountOptions {
    /// Every violated bound, not just the first.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.fsname.is_empty() || self.fsname.contains(['\0', '\n']) {
            problems.push("fsname: must not be empty or contain NUL or newline".to_owned());
        }
        if !(1..=THREADS_MAX).contains(&self.threads) {
            let threads = self.threads;
            problems.push(format!("threads: value is {threads}, allowed 1 to {THREADS_MAX}"));
        }
        let bytes = self.buffer_bytes;
        if !(WRITE_BYTES_MIN..=WRITE_BYTES_MAX).contains(&bytes) {
            let allowed = format!("{WRITE_BYTES_MIN} to {WRITE_BYTES_MAX}");
            problems.push(format!("buffer_bytes: value is {bytes}, allowed {allowed}"));
        }
        problems
    }

    /// Options that the kernel's FUSE code reads, for mount(2).
    pub(super) fn kernel_words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.allow_other.then(|| "allow_other".to_owned()));
        words.extend(self.default_permissions.then(|| "default_permissions".to_owned()));
        words.extend(self.max_read.map(|bytes| format!("max_read={bytes}")));
        words
    }

    /// The option string for fusermount3, which knows the generic options by name.
    pub(super) fn fusermount_words(&self) -> String {
        let escaped = self.fsname.replace('\\', "\\\\").replace(',', "\\,");
        let mut words = vec![format!("fsname={escaped}"), "subtype=milpa".to_owned()];
        words.extend(self.kernel_words());
        let generic = [
            ("ro", self.read_only),
            ("nosuid", self.no_suid),
            ("nodev", self.no_devices),
            ("noexec", self.no_exec),
            ("noatime", self.no_atime),
        ];
        words.extend(generic.iter().filter(|(_, on)| *on).map(|(word, _)| (*word).to_owned()));
        words.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_named() {
        assert_eq!(MountOptions::default().problems(), Vec::<String>::new());
        let bad = MountOptions {
            fsname: "a\nb".to_owned(),
            threads: 0,
            buffer_bytes: 1,
            ..MountOptions::default()
        };
        assert_eq!(bad.problems().len(), 3, "{:?}", bad.problems());
    }

    #[test]
    fn fusermount_words_are_escaped() {
        let options = MountOptions {
            fsname: "a,b\\c".to_owned(),
            read_only: true,
            max_read: Some(65_536),
            ..MountOptions::default()
        };
        let expected = "fsname=a\\,b\\\\c,subtype=milpa,allow_other,default_permissions,\
                        max_read=65536,ro,nosuid,nodev";
        assert_eq!(options.fusermount_words(), expected);
    }
}
