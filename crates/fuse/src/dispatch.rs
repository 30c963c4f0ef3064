//! From bytes to a method of the file system.

use std::sync::Arc;

use crate::abi::{
    AccessIn, BatchForgetIn, BmapIn, ForgetIn, GetxattrIn, InterruptIn, LinkIn, MkdirIn, Opcode,
};
use crate::decode::{Malformed, Message, MessageError, Reader, split_message};
use crate::filesystem::Filesystem;
use crate::reply::{
    Reply, ReplyAttr, ReplyBmap, ReplyCopy, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen,
    ReplyPoll, ReplySink, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr,
};
use crate::request::{
    CopyFileRange, Create, Fallocate, Flush, Forget, Forgets, Fsync, Ioctl, Lock, Lseek, Mkdir,
    Mknod, Open, PollArgs, Read, Release, Rename, Request, SetAttr, Setxattr, StatxArgs, Write,
    decode_getattr,
};

/// Longest answer to readlink: the kernel gives it one page and needs the last byte.
const READLINK_BYTES_MAX: u32 = 4095;

/// What dispatch must know of the session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    /// setxattr has its long form.
    pub(crate) setxattr_extended: bool,
}

/// Serves one message that was read from the device.
pub(crate) fn dispatch<F: Filesystem>(
    filesystem: &F,
    dialect: Dialect,
    sink: &Arc<dyn ReplySink>,
    bytes: &[u8],
) {
    match split_message(bytes) {
        Ok(message) => route(filesystem, dialect, sink, message),
        Err(MessageError::Malformed { unique, reason }) => {
            Reply::new(unique, Arc::clone(sink)).malformed(reason);
        }
        Err(MessageError::NoHeader) => {
            tracing::warn!(length = bytes.len(), "message from the kernel has no header");
        }
    }
}

fn route<F: Filesystem>(
    filesystem: &F,
    dialect: Dialect,
    sink: &Arc<dyn ReplySink>,
    message: Message<'_>,
) {
    let Message { request, opcode, mut body } = message;
    let opcode = Opcode::from_code(opcode);
    // These have no answer: a handle would send one when dropped.
    match opcode {
        Some(Opcode::Forget | Opcode::BatchForget | Opcode::NotifyReply) => {
            return drop_references(filesystem, opcode, &request, &mut body);
        }
        Some(Opcode::Interrupt) => return interrupt(filesystem, sink, &mut body),
        _ => {}
    }
    let call = Call {
        filesystem,
        request: &request,
        body,
        reply: Reply::new(request.unique, Arc::clone(sink)),
    };
    match opcode {
        Some(opcode) => call.serve(opcode, dialect),
        None => call.reply.error(libc::ENOSYS),
    }
}

fn drop_references<F: Filesystem>(
    filesystem: &F,
    opcode: Option<Opcode>,
    request: &Request,
    body: &mut Reader<'_>,
) {
    match opcode {
        Some(Opcode::Forget) => {
            if let Ok(raw) = body.take::<ForgetIn>() {
                filesystem.forget(Forget { nodeid: request.nodeid, count: raw.nlookup });
            }
        }
        Some(Opcode::BatchForget) => {
            if let Ok(raw) = body.take::<BatchForgetIn>() {
                filesystem.batch_forget(Forgets::new(*body, raw.count));
            }
        }
        // NOTIFY_REPLY answers a retrieve, which this crate never sends.
        _ => {}
    }
}

fn interrupt<F: Filesystem>(filesystem: &F, sink: &Arc<dyn ReplySink>, body: &mut Reader<'_>) {
    if let Ok(raw) = body.take::<InterruptIn>() {
        sink.interrupts().interrupt(raw.unique);
        filesystem.interrupt(raw.unique);
    }
}

/// A request on its way to the file system.
struct Call<'a, F> {
    filesystem: &'a F,
    request: &'a Request,
    body: Reader<'a>,
    reply: Reply,
}

impl<'a, F: Filesystem> Call<'a, F> {
    /// Decodes, then calls; a decoding error is answered EINVAL.
    fn with<T>(
        mut self,
        decode: impl FnOnce(&mut Reader<'a>) -> Result<T, Malformed>,
        call: impl FnOnce(&F, &Request, T, Reply),
    ) {
        match decode(&mut self.body) {
            Ok(arguments) => call(self.filesystem, self.request, arguments, self.reply),
            Err(reason) => self.reply.malformed(reason),
        }
    }

    /// One arm for each opcode, by what it works on.
    fn serve(self, opcode: Opcode, dialect: Dialect) {
        use Opcode as O;
        match opcode {
            O::Lookup
            | O::Symlink
            | O::Mknod
            | O::Mkdir
            | O::Unlink
            | O::Rmdir
            | O::Rename
            | O::Rename2
            | O::Link
            | O::Create
            | O::Tmpfile => self.serve_names(opcode),
            O::Getattr
            | O::Setattr
            | O::Readlink
            | O::Statfs
            | O::Statx
            | O::Access
            | O::Setxattr
            | O::Getxattr
            | O::Listxattr
            | O::Removexattr => self.serve_attributes(opcode, dialect),
            O::Opendir | O::Readdir | O::Readdirplus | O::Releasedir | O::Fsyncdir => {
                self.serve_directory(opcode);
            }
            O::Open
            | O::Read
            | O::Write
            | O::Release
            | O::Fsync
            | O::Flush
            | O::Fallocate
            | O::Lseek
            | O::CopyFileRange
            | O::CopyFileRange64 => self.serve_file(opcode),
            O::Getlk | O::Setlk | O::Setlkw | O::Bmap | O::Ioctl | O::Poll | O::Syncfs => {
                self.serve_rest(opcode);
            }
            // Block-device mounts only. The session calls `destroy` when its threads have ended.
            O::Destroy => drop(ReplyEmpty::new(self.reply).ok()),
            // INIT was answered before the threads started; DAX is not negotiated; the others have
            // no answer and never come here.
            O::Init
            | O::Setupmapping
            | O::Removemapping
            | O::Forget
            | O::BatchForget
            | O::NotifyReply
            | O::Interrupt => self.reply.error(libc::ENOSYS),
        }
    }

    fn serve_names(self, opcode: Opcode) {
        match opcode {
            Opcode::Lookup => self
                .with(Reader::name, |f, r, name, reply| f.lookup(r, name, ReplyEntry::new(reply))),
            Opcode::Symlink => self.with(decode_symlink, |f, r, (name, target), reply| {
                f.symlink(r, name, target, ReplyEntry::new(reply));
            }),
            Opcode::Mknod => {
                self.with(Mknod::decode, |f, r, a, reply| f.mknod(r, &a, ReplyEntry::new(reply)))
            }
            Opcode::Mkdir => {
                self.with(decode_mkdir, |f, r, a, reply| f.mkdir(r, &a, ReplyEntry::new(reply)))
            }
            Opcode::Unlink => self
                .with(Reader::name, |f, r, name, reply| f.unlink(r, name, ReplyEmpty::new(reply))),
            Opcode::Rmdir => self
                .with(Reader::name, |f, r, name, reply| f.rmdir(r, name, ReplyEmpty::new(reply))),
            Opcode::Rename => {
                self.with(Rename::decode, |f, r, a, reply| f.rename(r, &a, ReplyEmpty::new(reply)))
            }
            Opcode::Rename2 => {
                self.with(Rename::decode2, |f, r, a, reply| f.rename(r, &a, ReplyEmpty::new(reply)))
            }
            Opcode::Link => self.with(decode_link, |f, r, (nodeid, name), reply| {
                f.link(r, nodeid, name, ReplyEntry::new(reply));
            }),
            Opcode::Create => {
                self.with(Create::decode, |f, r, a, reply| f.create(r, &a, ReplyCreate::new(reply)))
            }
            _ => self.with(Create::decode_tmpfile, |f, r, a, reply| {
                f.tmpfile(r, &a, ReplyCreate::new(reply));
            }),
        }
    }

    fn serve_attributes(self, opcode: Opcode, dialect: Dialect) {
        match opcode {
            Opcode::Getattr => {
                self.with(decode_getattr, |f, r, fh, reply| f.getattr(r, fh, ReplyAttr::new(reply)))
            }
            Opcode::Setattr => {
                self.with(SetAttr::decode, |f, r, a, reply| f.setattr(r, &a, ReplyAttr::new(reply)))
            }
            Opcode::Readlink => self
                .filesystem
                .readlink(self.request, ReplyData::new(self.reply, READLINK_BYTES_MAX)),
            Opcode::Statfs => self.filesystem.statfs(self.request, ReplyStatfs::new(self.reply)),
            Opcode::Statx => self
                .with(StatxArgs::decode, |f, r, a, reply| f.statx(r, &a, ReplyStatx::new(reply))),
            Opcode::Access => self.with(Reader::take::<AccessIn>, |f, r, raw, reply| {
                f.access(r, raw.mask, ReplyEmpty::new(reply));
            }),
            Opcode::Setxattr => self.with(
                |body| Setxattr::decode(body, dialect.setxattr_extended),
                |f, r, a, reply| f.setxattr(r, &a, ReplyEmpty::new(reply)),
            ),
            Opcode::Getxattr => self.with(decode_getxattr, |f, r, (size, name), reply| {
                f.getxattr(r, name, ReplyXattr::new(reply, size));
            }),
            Opcode::Listxattr => self.with(Reader::take::<GetxattrIn>, |f, r, raw, reply| {
                f.listxattr(r, ReplyXattr::new(reply, raw.size));
            }),
            _ => self.with(Reader::text, |f, r, name, reply| {
                f.removexattr(r, name, ReplyEmpty::new(reply));
            }),
        }
    }

    fn serve_directory(self, opcode: Opcode) {
        match opcode {
            Opcode::Opendir => {
                self.with(Open::decode, |f, r, a, reply| f.opendir(r, &a, ReplyOpen::new(reply)))
            }
            Opcode::Readdir => self.with(Read::decode, |f, r, a, reply| {
                f.readdir(r, &a, ReplyDirectory::new(reply, a.size));
            }),
            Opcode::Readdirplus => self.with(Read::decode, |f, r, a, reply| {
                f.readdirplus(r, &a, ReplyDirectoryPlus::new(reply, a.size));
            }),
            Opcode::Releasedir => self.with(Release::decode, |f, r, a, reply| {
                f.releasedir(r, &a, ReplyEmpty::new(reply));
            }),
            _ => self.with(Fsync::decode, |f, r, a, reply| {
                f.fsyncdir(r, &a, ReplyEmpty::new(reply));
            }),
        }
    }

    fn serve_file(self, opcode: Opcode) {
        match opcode {
            Opcode::Open => {
                self.with(Open::decode, |f, r, a, reply| f.open(r, &a, ReplyOpen::new(reply)))
            }
            Opcode::Read => self.with(Read::decode, |f, r, a, reply| {
                f.read(r, &a, ReplyData::new(reply, a.size));
            }),
            Opcode::Write => self.with(Write::decode, |f, r, a, reply| {
                let size = u32::try_from(a.data.len()).unwrap_or(u32::MAX);
                f.write(r, &a, ReplyWrite::new(reply, size));
            }),
            Opcode::Release => self.with(Release::decode, |f, r, a, reply| {
                f.release(r, &a, ReplyEmpty::new(reply));
            }),
            Opcode::Fsync => {
                self.with(Fsync::decode, |f, r, a, reply| f.fsync(r, &a, ReplyEmpty::new(reply)))
            }
            Opcode::Flush => {
                self.with(Flush::decode, |f, r, a, reply| f.flush(r, &a, ReplyEmpty::new(reply)))
            }
            Opcode::Fallocate => self.with(Fallocate::decode, |f, r, a, reply| {
                f.fallocate(r, &a, ReplyEmpty::new(reply));
            }),
            Opcode::Lseek => {
                self.with(Lseek::decode, |f, r, a, reply| f.lseek(r, &a, ReplyLseek::new(reply)))
            }
            _ => self.with(CopyFileRange::decode, |f, r, a, reply| {
                let is_64_bit = opcode == Opcode::CopyFileRange64;
                f.copy_file_range(r, &a, ReplyCopy::new(reply, is_64_bit));
            }),
        }
    }

    fn serve_rest(self, opcode: Opcode) {
        match opcode {
            Opcode::Getlk => self.with(
                |body| Lock::decode(body, false),
                |f, r, a, reply| f.getlk(r, &a, ReplyLock::new(reply)),
            ),
            Opcode::Setlk | Opcode::Setlkw => self.with(
                |body| Lock::decode(body, opcode == Opcode::Setlkw),
                |f, r, a, reply| f.setlk(r, &a, ReplyEmpty::new(reply)),
            ),
            Opcode::Bmap => self.with(Reader::take::<BmapIn>, |f, r, raw, reply| {
                f.bmap(r, raw.block, raw.blocksize, ReplyBmap::new(reply));
            }),
            Opcode::Ioctl => self.with(Ioctl::decode, |f, r, a, reply| {
                f.ioctl(r, &a, ReplyIoctl::new(reply, a.output_size));
            }),
            Opcode::Poll => {
                self.with(PollArgs::decode, |f, r, a, reply| f.poll(r, &a, ReplyPoll::new(reply)))
            }
            _ => self.filesystem.syncfs(self.request, ReplyEmpty::new(self.reply)),
        }
    }
}

type Name<'a> = &'a std::ffi::OsStr;

fn decode_symlink<'a>(body: &mut Reader<'a>) -> Result<(Name<'a>, Name<'a>), Malformed> {
    Ok((body.name()?, body.text()?))
}

fn decode_mkdir<'a>(body: &mut Reader<'a>) -> Result<Mkdir<'a>, Malformed> {
    let raw: MkdirIn = body.take()?;
    Ok(Mkdir { name: body.name()?, mode: raw.mode, umask: raw.umask })
}

fn decode_link<'a>(body: &mut Reader<'a>) -> Result<(u64, Name<'a>), Malformed> {
    let raw: LinkIn = body.take()?;
    Ok((raw.oldnodeid, body.name()?))
}

fn decode_getxattr<'a>(body: &mut Reader<'a>) -> Result<(u32, Name<'a>), Malformed> {
    let raw: GetxattrIn = body.take()?;
    Ok((raw.size, body.text()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{InHeader, Plain};
    use crate::interrupt::lock;
    use crate::reply::tests::FakeSink;

    struct Nothing;
    impl Filesystem for Nothing {}

    const DIALECT: Dialect = Dialect { setxattr_extended: true };

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
        let header = InHeader { len, opcode, unique: 4, nodeid: 1, ..InHeader::default() };
        [header.as_bytes(), body].concat()
    }

    fn answers(opcode: u32, body: &[u8]) -> Vec<(u64, i32, Vec<u8>)> {
        let sink = Arc::new(FakeSink::default());
        let target: Arc<dyn ReplySink> = sink.clone();
        dispatch(&Nothing, DIALECT, &target, &message(opcode, body));
        lock(&sink.answers).drain(..).collect()
    }

    #[test]
    fn unknown_opcodes_answer_enosys() {
        for opcode in [0, 7, 19, 54, 4096, u32::MAX] {
            assert_eq!(answers(opcode, &[]), [(4, -libc::ENOSYS, vec![])], "{opcode}");
        }
    }

    #[test]
    fn names_without_nul_or_overlong_answer_einval() {
        let overlong = [vec![b'x'; 5000], vec![0]].concat();
        for body in [&b""[..], b"abc", b"a/b\0", &overlong] {
            for opcode in [Opcode::Lookup, Opcode::Unlink, Opcode::Rmdir] {
                assert_eq!(
                    answers(opcode.code(), body),
                    [(4, -libc::EINVAL, vec![])],
                    "{opcode:?}"
                );
            }
        }
    }

    /// Goal: bytes of any opcode, length and content give one answer (or none, where the protocol
    /// has none) and never a panic. Method: every opcode, body lengths up to beyond the largest
    /// struct, three fillings.
    #[test]
    fn any_bytes_are_answered_exactly_once() {
        let silent = [Opcode::Forget, Opcode::BatchForget, Opcode::NotifyReply, Opcode::Interrupt];
        for opcode in (0..64).chain([u32::MAX]) {
            let is_silent = Opcode::from_code(opcode).is_some_and(|code| silent.contains(&code));
            for length in 0..200 {
                for filling in [0, b'a', 0xff] {
                    let count = answers(opcode, &vec![filling; length]).len();
                    assert_eq!(count, usize::from(!is_silent), "{opcode} {length} {filling}");
                }
            }
        }
    }
}
