//! Answers to readdir and readdirplus: a buffer that is filled until it is full.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::typed::common;
use super::{Delivery, Reply};
use crate::abi::{Dirent, Direntplus, Plain, align_record};
use crate::attr::{Attr, Entry};
use crate::interrupt::InterruptWatch;

/// Buffers start with at most this capacity and grow: the kernel may ask for much more than a
/// small directory needs.
const CAPACITY_FIRST: usize = 64 << 10;

/// Bytes of whole records, never more than the kernel asked for.
struct Records {
    bytes: Vec<u8>,
    size: usize,
}

impl Records {
    fn new(size: u32) -> Records {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        Records { bytes: Vec::with_capacity(size.min(CAPACITY_FIRST)), size }
    }

    /// Appends a record unless it does not fit.
    fn push(&mut self, head: &[u8], name: &OsStr) -> bool {
        let length = align_record(head.len() + name.len());
        let end = self.bytes.len() + length;
        if end > self.size {
            return false;
        }
        self.bytes.extend_from_slice(head);
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.resize(end, 0);
        true
    }
}

fn dirent(ino: u64, next_offset: u64, mode: u32, name: &OsStr) -> Dirent {
    Dirent {
        ino,
        off: next_offset,
        namelen: u32::try_from(name.len()).unwrap_or(u32::MAX),
        // The kernel's d_type is the file type's four bits of the mode.
        kind: (mode & libc::S_IFMT) >> 12,
    }
}

/// Answers readdir. An answer without entries means the end of the directory.
pub struct ReplyDirectory {
    reply: Reply,
    records: Records,
}
common!(ReplyDirectory);

impl ReplyDirectory {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyDirectory {
        ReplyDirectory { reply, records: Records::new(size) }
    }

    /// Appends one entry; false when the buffer is full and the entry was not taken.
    ///
    /// `next_offset` is what the next request carries to go on behind this entry: unequal to 0,
    /// and valid while the directory changes. Of `mode` only the type counts.
    #[must_use = "when the buffer is full, stop and answer"]
    pub fn add(&mut self, ino: u64, next_offset: u64, mode: u32, name: &OsStr) -> bool {
        self.records.push(dirent(ino, next_offset, mode, name).as_bytes(), name)
    }

    /// Sends what was added.
    pub fn ok(self) -> Delivery {
        self.reply.success(&self.records.bytes)
    }
}

/// Answers readdirplus: entries with their attributes, so that no lookup need follow.
pub struct ReplyDirectoryPlus {
    reply: Reply,
    records: Records,
}
common!(ReplyDirectoryPlus);

impl ReplyDirectoryPlus {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyDirectoryPlus {
        ReplyDirectoryPlus { reply, records: Records::new(size) }
    }

    /// Appends one entry; false when the buffer is full and the entry was not taken.
    ///
    /// Every taken entry adds one to its inode's lookup count when the answer is delivered, as a
    /// lookup would. For "." and ".." use [`add_bare`](ReplyDirectoryPlus::add_bare): the kernel
    /// never counts those. `next_offset` is as in [`ReplyDirectory::add`].
    #[must_use = "when the buffer is full, stop and answer"]
    pub fn add(&mut self, entry: &Entry, next_offset: u64, name: &OsStr) -> bool {
        let record = Direntplus {
            entry_out: entry.to_wire(),
            dirent: dirent(entry.attr.ino, next_offset, entry.attr.mode, name),
        };
        self.records.push(record.as_bytes(), name)
    }

    /// Appends an entry without attributes, which counts no lookup; false when it does not fit.
    #[must_use = "when the buffer is full, stop and answer"]
    pub fn add_bare(&mut self, ino: u64, next_offset: u64, mode: u32, name: &OsStr) -> bool {
        let attr = Attr { ino, mode, ..Attr::default() };
        self.add(&Entry { attr, ..Entry::default() }, next_offset, name)
    }

    /// Sends what was added.
    pub fn ok(self) -> Delivery {
        self.reply.success(&self.records.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FakeSink, reply_to};
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_full_buffer_takes_no_entry_and_keeps_the_earlier_ones() {
        let sink = Arc::new(FakeSink::default());
        // Each record is 24 bytes and a name padded to 8.
        let mut reply = ReplyDirectory::new(reply_to(&sink), 71);
        assert!(reply.add(1, 1, libc::S_IFDIR, OsStr::new("a")));
        assert!(reply.add(2, 2, libc::S_IFREG, OsStr::new("12345678")));
        assert!(!reply.add(3, 3, libc::S_IFREG, OsStr::new("c")));
        reply.ok();
        let (_, error, body) = sink.only();
        assert_eq!((error, body.len()), (0, 64));
        let second = Dirent { ino: 2, off: 2, namelen: 8, kind: u32::from(libc::DT_REG) };
        assert_eq!(Dirent::read_prefix(&body[32..]), Some(second));
    }

    #[test]
    fn bare_entries_have_no_nodeid() {
        let sink = Arc::new(FakeSink::default());
        let mut reply = ReplyDirectoryPlus::new(reply_to(&sink), 4096);
        assert!(reply.add_bare(1, 1, libc::S_IFDIR, OsStr::new(".")));
        reply.ok();
        let record = Direntplus::read_prefix(&sink.only().2).unwrap();
        assert_eq!((record.entry_out.nodeid, record.dirent.ino), (0, 1));
        assert_eq!(record.dirent.kind, u32::from(libc::DT_DIR));
    }
}
