//! The handles with a type: each can only be answered in the way its request understands.

use std::io::IoSlice;
use std::time::Duration;

use super::{Delivery, Reply};
use crate::abi::{
    BmapOut, CopyFileRangeOut, CreateOut, GetxattrOut, IoctlOut, LkOut, LseekOut, OpenOut, Plain,
    PollOut, WriteOut,
};
use crate::attr::{Attr, Entry, Opened, Statfs, Statx};
use crate::interrupt::InterruptWatch;
use crate::request::FileLock;

/// What every handle can do.
macro_rules! common {
    ($( $name:ident ),* $(,)?) => { $(
        impl $name {
            /// Answers an errno: positive, as in libc.
            pub fn error(self, errno: i32) {
                self.reply.error(errno);
            }

            /// Starts to watch for an interrupt of this request. Ask for it only where a request
            /// may take long: it costs a mutex and an allocation.
            #[must_use]
            pub fn watch(&self) -> InterruptWatch {
                self.reply.watch()
            }

            /// The kernel's name for this request.
            #[must_use]
            pub fn unique(&self) -> u64 {
                self.reply.unique()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(formatter, concat!(stringify!($name), "({})"), self.reply.unique())
            }
        }
    )* };
}
pub(super) use common;

/// Declares handles that have no state of their own.
macro_rules! handles {
    ($( $(#[$meta:meta])* $name:ident, )*) => { $(
        $(#[$meta])*
        pub struct $name { reply: Reply }

        impl $name {
            pub(crate) fn new(reply: Reply) -> $name {
                $name { reply }
            }
        }

        common!($name);
    )* };
}

handles! {
    /// Answers with success and nothing else.
    ReplyEmpty,
    /// Answers lookup, mknod, mkdir, symlink and link.
    ReplyEntry,
    /// Answers getattr and setattr.
    ReplyAttr,
    /// Answers statx.
    ReplyStatx,
    /// Answers open and opendir.
    ReplyOpen,
    /// Answers create and tmpfile.
    ReplyCreate,
    /// Answers statfs.
    ReplyStatfs,
    /// Answers getlk.
    ReplyLock,
    /// Answers lseek.
    ReplyLseek,
    /// Answers bmap.
    ReplyBmap,
    /// Answers poll.
    ReplyPoll,
}

impl ReplyEmpty {
    /// Success.
    pub fn ok(self) -> Delivery {
        self.reply.success(&[])
    }
}

impl ReplyEntry {
    /// The name exists (or does not: [`Entry::negative`]).
    ///
    /// A delivered answer with a nodeid adds one to that inode's lookup count.
    pub fn entry(self, entry: &Entry) -> Delivery {
        self.reply.success(entry.to_wire().as_bytes())
    }
}

impl ReplyAttr {
    /// The attributes, which the kernel may trust for `timeout`.
    pub fn attr(self, attr: &Attr, timeout: Duration) -> Delivery {
        self.reply.success(attr.to_attr_out(timeout).as_bytes())
    }
}

impl ReplyStatx {
    /// The attributes.
    pub fn statx(self, statx: &Statx) -> Delivery {
        self.reply.success(statx.to_wire().as_bytes())
    }
}

fn open_out(opened: Opened) -> OpenOut {
    OpenOut { fh: opened.fh, open_flags: opened.flags, backing_id: 0 }
}

impl ReplyOpen {
    /// The file is open. If this is dropped, no release will come.
    pub fn opened(self, opened: Opened) -> Delivery {
        self.reply.success(open_out(opened).as_bytes())
    }
}

impl ReplyCreate {
    /// The file exists and is open. Counts as a lookup of `entry` as well.
    pub fn created(self, entry: &Entry, opened: Opened) -> Delivery {
        let out = CreateOut { entry: entry.to_wire(), open: open_out(opened) };
        self.reply.success(out.as_bytes())
    }
}

impl ReplyStatfs {
    /// The figures.
    pub fn statfs(self, statfs: &Statfs) -> Delivery {
        self.reply.success(statfs.to_wire().as_bytes())
    }
}

impl ReplyLock {
    /// The lock that is in the way, or the asked one with
    /// [`LockKind::Unlock`](crate::LockKind::Unlock) if none is.
    pub fn lock(self, lock: &FileLock) -> Delivery {
        self.reply.success(LkOut { lk: lock.to_wire() }.as_bytes())
    }
}

impl ReplyLseek {
    /// The position found, in bytes.
    pub fn offset(self, offset: u64) -> Delivery {
        self.reply.success(LseekOut { offset }.as_bytes())
    }
}

impl ReplyBmap {
    /// The block on the device.
    pub fn block(self, block: u64) -> Delivery {
        self.reply.success(BmapOut { block }.as_bytes())
    }
}

impl ReplyPoll {
    /// The events (`POLL*`) that are there now.
    pub fn events(self, revents: u32) -> Delivery {
        self.reply.success(PollOut { revents, padding: 0 }.as_bytes())
    }
}

/// Answers read and readlink.
pub struct ReplyData {
    reply: Reply,
    size: u32,
}
common!(ReplyData);

impl ReplyData {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyData {
        ReplyData { reply, size }
    }

    /// The bytes. Fewer than asked mean end of file, more are a bug and answered EIO.
    pub fn data(self, data: &[u8]) -> Delivery {
        self.data_vectored(&[IoSlice::new(data)])
    }

    /// The concatenation of `parts`, without copying them together first.
    pub fn data_vectored(self, parts: &[IoSlice<'_>]) -> Delivery {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        match u32::try_from(length) {
            Ok(length) if length <= self.size => self.reply.success_vectored(parts),
            _ => self.reply.broken("more data than the request asked for"),
        }
    }
}

/// Answers write.
pub struct ReplyWrite {
    reply: Reply,
    size: u32,
}
common!(ReplyWrite);

impl ReplyWrite {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyWrite {
        ReplyWrite { reply, size }
    }

    /// So many bytes were taken. Fewer than sent make a short write, more are a bug.
    pub fn written(self, size: u32) -> Delivery {
        if size > self.size {
            return self.reply.broken("more bytes written than sent");
        }
        self.reply.success(WriteOut { size, padding: 0 }.as_bytes())
    }
}

/// Answers copy_file_range.
pub struct ReplyCopy {
    reply: Reply,
    is_64_bit: bool,
}
common!(ReplyCopy);

impl ReplyCopy {
    pub(crate) fn new(reply: Reply, is_64_bit: bool) -> ReplyCopy {
        ReplyCopy { reply, is_64_bit }
    }

    /// So many bytes were copied.
    pub fn copied(self, bytes_copied: u64) -> Delivery {
        if self.is_64_bit {
            return self.reply.success(CopyFileRangeOut { bytes_copied }.as_bytes());
        }
        // Before 7.45 the answer has 32 bits and the kernel asks for less than 4 GiB at once.
        match u32::try_from(bytes_copied) {
            Ok(size) => self.reply.success(WriteOut { size, padding: 0 }.as_bytes()),
            Err(_) => self.reply.broken("more bytes copied than asked for"),
        }
    }
}

/// Answers getxattr and listxattr.
pub struct ReplyXattr {
    reply: Reply,
    size: u32,
}
common!(ReplyXattr);

impl ReplyXattr {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyXattr {
        ReplyXattr { reply, size }
    }

    /// 0 when the caller asks for the length only.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The value, or the names each with its NUL. Does what the caller's size demands: the length
    /// alone for 0, ERANGE when it is too small.
    pub fn value(self, value: &[u8]) -> Delivery {
        let Ok(length) = u32::try_from(value.len()) else {
            return self.reply.broken("extended attribute above 4 GiB");
        };
        match self.size {
            0 => self.reply.success(GetxattrOut { size: length, padding: 0 }.as_bytes()),
            size if size < length => {
                self.reply.error(libc::ERANGE);
                Delivery::Delivered
            }
            _ => self.reply.success(value),
        }
    }

    /// The length, when [`size`](ReplyXattr::size) is 0 and the value is not at hand.
    pub fn length(self, length: u32) -> Delivery {
        if self.size != 0 {
            return self.reply.broken("length answered where the value was asked for");
        }
        self.reply.success(GetxattrOut { size: length, padding: 0 }.as_bytes())
    }
}

/// Answers ioctl.
pub struct ReplyIoctl {
    reply: Reply,
    size: u32,
}
common!(ReplyIoctl);

impl ReplyIoctl {
    pub(crate) fn new(reply: Reply, size: u32) -> ReplyIoctl {
        ReplyIoctl { reply, size }
    }

    /// The call's return value and its output.
    pub fn result(self, result: i32, output: &[u8]) -> Delivery {
        if usize::try_from(self.size).is_ok_and(|size| output.len() > size) {
            return self.reply.broken("more ioctl output than asked for");
        }
        let out = IoctlOut { result, ..IoctlOut::default() };
        self.reply.success_vectored(&[IoSlice::new(out.as_bytes()), IoSlice::new(output)])
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FakeSink, reply_to};
    use super::*;
    use std::sync::Arc;

    #[test]
    fn xattr_answers_follow_the_size_asked() {
        for (size, error, body) in [
            (0, 0, GetxattrOut { size: 3, padding: 0 }.as_bytes().to_vec()),
            (2, -libc::ERANGE, vec![]),
            (3, 0, b"abc".to_vec()),
            (9, 0, b"abc".to_vec()),
        ] {
            let sink = Arc::new(FakeSink::default());
            ReplyXattr::new(reply_to(&sink), size).value(b"abc");
            assert_eq!(sink.only(), (6, error, body), "{size}");
        }
    }

    #[test]
    fn more_than_asked_is_eio() {
        let sink = Arc::new(FakeSink::default());
        ReplyData::new(reply_to(&sink), 2).data(b"abc");
        assert_eq!(sink.only().1, -libc::EIO);
        ReplyWrite::new(reply_to(&sink), 2).written(3);
        assert_eq!(sink.only().1, -libc::EIO);
        ReplyCopy::new(reply_to(&sink), false).copied(1 << 32);
        assert_eq!(sink.only().1, -libc::EIO);
    }

    #[test]
    fn copies_have_two_answer_forms() {
        for (is_64_bit, body) in
            [(false, vec![5, 0, 0, 0, 0, 0, 0, 0]), (true, 5_u64.to_ne_bytes().to_vec())]
        {
            let sink = Arc::new(FakeSink::default());
            ReplyCopy::new(reply_to(&sink), is_64_bit).copied(5);
            assert_eq!(sink.only(), (6, 0, body));
        }
    }

    #[test]
    fn vectored_data_is_concatenated() {
        let sink = Arc::new(FakeSink::default());
        let parts = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cd")];
        assert!(ReplyData::new(reply_to(&sink), 4).data_vectored(&parts).is_delivered());
        assert_eq!(sink.only(), (6, 0, b"abcd".to_vec()));
    }
}
