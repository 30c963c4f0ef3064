//! The adapter: a mounted [`Filesystem`] on a [`Client`].
//!
//! It translates and nothing more. Nodeids are inode ids, which are never reused, so there is
//! nothing to count and forget is free. File handles are the client's.
//!
//! # Who does the work
//!
//! A method makes a future of the client's operation and polls it once, in the FUSE thread: by then
//! its request is on the wire, or the answer was in a cache and goes back to the kernel at once.
//! What has to wait is the runtime's from when its answer comes.
//!
//! # Coherence
//!
//! The kernel invalidates nothing by itself (explicit invalidation): each open asks the servers, and keeps
//! the cached pages and attributes only if the content version is the one they are of. Of a file that others
//! change while it is open, no size goes to the kernel before it has forgotten the page in which the file ended.

mod answer;
mod convert;
mod create;
mod directory;
mod interrupt;
mod location;
mod parked;
mod stale;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use bytes::Bytes;
use milpa_client::{Client, Creation, FsError, HandleId, OpenFile, OpenFlags};
use milpa_types::{Attributes, FileKind, InodeId};
use tokio::runtime::Handle;

use crate::flags::open as open_bits;
use crate::{
    Config, Create, DataInvalidation, Delivery, Filesystem, Flush, Fsync, KernelInfo,
    KillPrivileges, Lseek, Mkdir, Mknod, Negotiated, Notifier, Open, Opened, Read, Release, Rename,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, SetAttr, Setxattr, Write,
};
use answer::{Answer, serve};
use convert::{attr, entry, name, statfs};
use create::create_or_open;
use directory::{Directories, Wanted};
use interrupt::died_of_a_signal;
use stale::Stale;

/// Virtual extended attribute: where the bytes of a file lie, as JSON. `milpa info` reads it.
pub const INFO_XATTR: &str = "milpa.info";
/// Virtual extended attribute of every inode: who serves this mount, as JSON.
pub const MOUNT_XATTR: &str = "milpa.mount";

/// A volume as a mounted file system.
pub struct Adapter {
    client: Client,
    runtime: Handle,
    directories: Arc<Directories>,
    stale: Arc<Stale>,
    description: Bytes,
}

impl Adapter {
    /// A file system on `client`, whose waiting is done on `runtime`. `description` is what
    /// [`MOUNT_XATTR`] answers.
    #[must_use]
    pub fn new(client: Client, runtime: Handle, description: Bytes) -> Adapter {
        let stale = Arc::new(Stale::new(runtime.clone()));
        Adapter { client, runtime, directories: Arc::default(), stale, description }
    }

    /// Answers `reply` with what `work` gives, through `deliver`.
    fn answer<T, R>(
        &self,
        request: &Request,
        reply: R,
        work: impl Future<Output = Result<T, FsError>> + Send + 'static,
        deliver: impl FnOnce(R, T) -> Delivery + Send + 'static,
    ) where
        T: Send + 'static,
        R: Answer + Send + 'static,
    {
        serve(&self.runtime, request.pid, reply, work, deliver);
    }

    /// Answers with what a name names.
    fn answer_entry(
        &self,
        request: &Request,
        reply: ReplyEntry,
        work: impl Future<Output = Result<Attributes, FsError>> + Send + 'static,
    ) {
        let (timeouts, stale) = (self.client.timeouts(), Arc::clone(&self.stale));
        let work = async move { stale.sized(work.await?).await };
        self.answer(request, reply, work, move |reply, attributes| {
            reply.entry(&entry(&attributes, timeouts))
        });
    }
}

/// Ends a method with the errno of a bad name.
macro_rules! name_or_answer {
    ($text:expr, $reply:ident) => {
        match name($text) {
            Ok(name) => name,
            Err(error) => return $reply.error(error.errno()),
        }
    };
}

fn inode(request: &Request) -> InodeId {
    InodeId(request.nodeid)
}

fn creation(request: &Request, mode: u32) -> Creation {
    // Permission, set-id and sticky bits are the low twelve by definition.
    let mode = (mode & 0o7777) as u16;
    Creation { mode, uid: request.uid, gid: request.gid }
}

/// How the kernel shall treat an open file.
fn opened(file: &OpenFile, flags: OpenFlags) -> Opened {
    let mut bits = open_bits::PARALLEL_DIRECT_WRITES;
    if file.keep_cache {
        bits |= open_bits::KEEP_CACHE;
    }
    if !flags.write {
        // Nothing can be buffered for it: close(2) needs no round trip into this process.
        bits |= open_bits::NOFLUSH;
    }
    Opened { fh: file.handle.0, flags: bits }
}

impl Filesystem for Adapter {
    fn init(&self, _kernel: &KernelInfo, config: &mut Config) -> Result<(), i32> {
        config.data_invalidation = DataInvalidation::Explicit;
        config.kill_privileges = KillPrivileges::Flagged;
        Ok(())
    }

    fn ready(&self, _negotiated: &Negotiated, notifier: Notifier) {
        self.stale.begin(notifier);
        let stale = Arc::clone(&self.stale);
        self.client.on_stale_pages(move |inode, from| stale.pages(inode.0, from));
    }

    fn lookup(&self, request: &Request, text: &OsStr, reply: ReplyEntry) {
        let name = name_or_answer!(text, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let work = async move { client.lookup(parent, &name).await };
        self.answer_entry(request, reply, work);
    }

    fn getattr(&self, request: &Request, _fh: Option<u64>, reply: ReplyAttr) {
        let (client, inode) = (self.client.clone(), inode(request));
        let (timeout, stale) = (self.client.timeouts().attributes, Arc::clone(&self.stale));
        let work = async move { stale.sized(client.getattr(inode).await?).await };
        self.answer(request, reply, work, move |reply, attributes| {
            reply.attr(&attr(&attributes), timeout)
        });
    }

    fn setattr(&self, request: &Request, set: &SetAttr, reply: ReplyAttr) {
        let (client, inode) = (self.client.clone(), inode(request));
        let changes = convert::changes(set);
        let timeout = self.client.timeouts().attributes;
        // ftruncate(2): as a write through that descriptor.
        let truncated = set.fh.filter(|_| set.size.is_some()).map(HandleId);
        let work = async move {
            match truncated {
                Some(handle) => client.setattr_through(handle, changes).await,
                None => client.setattr(inode, changes).await,
            }
        };
        self.answer(request, reply, work, move |reply, attributes| {
            reply.attr(&attr(&attributes), timeout)
        });
    }

    fn readlink(&self, request: &Request, reply: ReplyData) {
        let (client, inode) = (self.client.clone(), inode(request));
        let work = async move { client.readlink(inode).await };
        self.answer(request, reply, work, |reply, target| reply.data(&target));
    }

    fn symlink(&self, request: &Request, text: &OsStr, target: &OsStr, reply: ReplyEntry) {
        let name = name_or_answer!(text, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let (creation, target) = (creation(request, 0o777), target.as_bytes().to_vec());
        let work = async move { client.symlink(parent, &name, &target, creation).await };
        self.answer_entry(request, reply, work);
    }

    fn mknod(&self, request: &Request, node: &Mknod<'_>, reply: ReplyEntry) {
        let name = name_or_answer!(node.name, reply);
        let Some(kind) = FileKind::from_mode(node.mode) else { return reply.error(libc::EINVAL) };
        let (client, parent) = (self.client.clone(), inode(request));
        let (creation, device) = (creation(request, node.mode), node.rdev);
        let work = async move { client.mknod(parent, &name, kind, device, creation).await };
        self.answer_entry(request, reply, work);
    }

    fn mkdir(&self, request: &Request, directory: &Mkdir<'_>, reply: ReplyEntry) {
        let name = name_or_answer!(directory.name, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let creation = creation(request, directory.mode);
        let work = async move { client.mkdir(parent, &name, creation).await };
        self.answer_entry(request, reply, work);
    }

    fn unlink(&self, request: &Request, text: &OsStr, reply: ReplyEmpty) {
        let name = name_or_answer!(text, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let work = async move { client.unlink(parent, &name).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn rmdir(&self, request: &Request, text: &OsStr, reply: ReplyEmpty) {
        let name = name_or_answer!(text, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let work = async move { client.rmdir(parent, &name).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn rename(&self, request: &Request, rename: &Rename<'_>, reply: ReplyEmpty) {
        let source = name_or_answer!(rename.name, reply);
        let target = name_or_answer!(rename.new_name, reply);
        if rename.flags & !libc::RENAME_NOREPLACE != 0 {
            return reply.error(libc::EINVAL);
        }
        let no_replace = rename.flags & libc::RENAME_NOREPLACE != 0;
        let (client, from, to) = (self.client.clone(), inode(request), InodeId(rename.new_parent));
        let work = async move { client.rename(from, &source, to, &target, no_replace).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn link(&self, request: &Request, nodeid: u64, new_name: &OsStr, reply: ReplyEntry) {
        let name = name_or_answer!(new_name, reply);
        let (client, parent) = (self.client.clone(), inode(request));
        let work = async move { client.link(InodeId(nodeid), parent, &name).await };
        self.answer_entry(request, reply, work);
    }

    fn open(&self, request: &Request, open: &Open, reply: ReplyOpen) {
        let flags = OpenFlags {
            clear_set_id: open.kill_suidgid,
            ..OpenFlags::from_bits(open.flags as i32)
        };
        let (client, inode) = (self.client.clone(), inode(request));
        let work = async move { client.open(inode, flags).await };
        let (client, stale, nodeid) =
            (self.client.clone(), Arc::clone(&self.stale), request.nodeid);
        self.answer(request, reply, work, move |reply, file| {
            if !file.keep_cache {
                stale.attributes(nodeid);
            }
            let delivery = reply.opened(opened(&file, flags));
            if !delivery.is_delivered() {
                release_unseen(client, file.handle);
            }
            delivery
        });
    }

    fn create(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        let name = name_or_answer!(create.name, reply);
        let flags = OpenFlags {
            clear_set_id: create.kill_suidgid,
            ..OpenFlags::from_bits(create.flags as i32)
        };
        let (client, parent) = (self.client.clone(), inode(request));
        let creation = creation(request, create.mode);
        let work = async move { create_or_open(&client, parent, &name, creation, flags).await };
        let (client, timeouts) = (self.client.clone(), self.client.timeouts());
        self.answer(request, reply, work, move |reply, file| {
            let entry = entry(&file.attributes, timeouts);
            let delivery = reply.created(&entry, opened(&file, flags));
            if !delivery.is_delivered() {
                release_unseen(client, file.handle);
            }
            delivery
        });
    }

    fn read(&self, request: &Request, read: &Read, reply: ReplyData) {
        let (client, handle) = (self.client.clone(), HandleId(read.fh));
        let (offset, size) = (read.offset, read.size);
        let work = async move { client.read(handle, offset, size).await };
        self.answer(request, reply, work, |reply, parts| {
            let slices: Vec<_> = parts.iter().map(|part| std::io::IoSlice::new(part)).collect();
            reply.data_vectored(&slices)
        });
    }

    fn write(&self, request: &Request, write: &Write<'_>, reply: ReplyWrite) {
        // The one copy on the way: out of the thread's buffer, into the write buffer.
        let data = Bytes::copy_from_slice(write.data);
        let (client, handle) = (self.client.clone(), HandleId(write.fh));
        let (offset, clear_set_id) = (write.offset, write.kill_suidgid);
        let length = data.len() as u32;
        // A page of a mapping has its place, through whatever descriptor it comes.
        let is_page = write.from_page_cache;
        // As the flags are now.
        let appends = write.flags & libc::O_APPEND as u32 != 0;
        let expected = offset.saturating_add(u64::from(length));
        let work = async move {
            if is_page {
                client.write_page(handle, offset, data, clear_set_id).await.map(|()| expected)
            } else if appends {
                client.append(handle, data, clear_set_id).await
            } else {
                client.write(handle, offset, data, clear_set_id).await.map(|()| expected)
            }
        };
        let (client, stale, inode) = (self.client.clone(), Arc::clone(&self.stale), inode(request));
        self.answer(request, reply, work, move |reply, end| {
            if end == expected {
                return reply.written(length);
            }
            // The kernel has put it into its pages where it believes the end to be, and may have others from where
            // it is.
            client.forget_pages(inode);
            stale.pages(inode.0, offset.min(end.saturating_sub(u64::from(length))));
            reply.written(length)
        });
    }

    fn statfs(&self, request: &Request, reply: ReplyStatfs) {
        let client = self.client.clone();
        let work = async move { client.statfs().await };
        self.answer(request, reply, work, |reply, space| reply.statfs(&statfs(&space)));
    }

    fn flush(&self, request: &Request, flush: &Flush, reply: ReplyEmpty) {
        let (client, handle, thread) = (self.client.clone(), HandleId(flush.fh), request.pid);
        let work = async move {
            tokio::select! {
                biased;
                done = client.flush(handle) => done,
                // Nobody is there to hear of it; what is buffered is sent after the release.
                () = died_of_a_signal(thread) => Ok(()),
            }
        };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn release(&self, request: &Request, release: &Release, reply: ReplyEmpty) {
        let (client, handle) = (self.client.clone(), HandleId(release.fh));
        let work = async move { client.release(handle).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn fsync(&self, request: &Request, fsync: &Fsync, reply: ReplyEmpty) {
        let (client, handle) = (self.client.clone(), HandleId(fsync.fh));
        let data_only = fsync.data_only;
        let work = async move { client.fsync(handle, data_only).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn fsyncdir(&self, request: &Request, _fsync: &Fsync, reply: ReplyEmpty) {
        let (client, inode) = (self.client.clone(), inode(request));
        let work = async move { client.fsyncdir(inode).await };
        self.answer(request, reply, work, |reply, ()| reply.ok());
    }

    fn opendir(&self, request: &Request, _open: &Open, reply: ReplyOpen) {
        let fh = self.directories.open(inode(request));
        if !reply.opened(Opened { fh, flags: 0 }).is_delivered() {
            self.directories.close(fh);
        }
    }

    fn readdir(&self, request: &Request, read: &Read, reply: ReplyDirectory) {
        let (fh, offset, wanted) = (read.fh, read.offset, Wanted::names(read.size));
        let work = directory::stream(&self.directories, self.client.clone(), fh, offset, wanted);
        self.answer(request, reply, work, |mut reply, mut stream| {
            stream.fill(|entry, next| reply.add(entry.inode, next, entry.mode, entry.name()));
            reply.ok()
        });
    }

    fn readdirplus(&self, request: &Request, read: &Read, reply: ReplyDirectoryPlus) {
        let (fh, offset) = (read.fh, read.offset);
        let (timeouts, wanted) = (self.client.timeouts(), Wanted::names_and_attributes(read.size));
        let work = directory::stream(&self.directories, self.client.clone(), fh, offset, wanted);
        let (client, parent) = (self.client.clone(), inode(request));
        let stale = Arc::clone(&self.stale);
        self.answer(request, reply, work, move |mut reply, mut stream| {
            let known = |item: &directory::Item| {
                let attributes = item.attributes(&client, parent)?;
                (!stale.is_forgetting(item.inode)).then_some(attributes)
            };
            stream.fill(|item, next| match known(item) {
                Some(attributes) => reply.add(&entry(&attributes, timeouts), next, item.name()),
                None => reply.add_bare(item.inode, next, item.mode, item.name()),
            });
            reply.ok()
        });
    }

    fn releasedir(&self, _request: &Request, release: &Release, reply: ReplyEmpty) {
        self.directories.close(release.fh);
        reply.ok();
    }

    fn getxattr(&self, request: &Request, text: &OsStr, reply: ReplyXattr) {
        match text.to_str() {
            Some(INFO_XATTR) => {
                let (client, inode) = (self.client.clone(), inode(request));
                let work = async move { client.locate(inode).await };
                self.answer(request, reply, work, |reply, found| {
                    reply.value(location::to_json(&found).as_bytes())
                });
            }
            Some(MOUNT_XATTR) => {
                reply.value(&self.description);
            }
            // Not "no such attribute": ls(1) and others then ask for no other file's ACL or label.
            // ENOSYS would keep the kernel from asking at all, but for the virtual ones too.
            _ => reply.error(libc::EOPNOTSUPP),
        }
    }

    // The kernel asks for these once, and answers EOPNOTSUPP by itself from then on.

    fn setxattr(&self, _request: &Request, _set: &Setxattr<'_>, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    fn listxattr(&self, _request: &Request, reply: ReplyXattr) {
        reply.error(libc::ENOSYS);
    }

    fn removexattr(&self, _request: &Request, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(libc::ENOSYS);
    }

    fn tmpfile(&self, _request: &Request, _create: &Create<'_>, reply: ReplyCreate) {
        reply.error(libc::EOPNOTSUPP);
    }

    fn lseek(&self, _request: &Request, _lseek: &Lseek, reply: ReplyLseek) {
        reply.error(libc::ENOSYS);
    }
}

/// The kernel gave up an open before our answer: it will never release it.
fn release_unseen(client: Client, handle: HandleId) {
    tokio::spawn(async move {
        if let Err(error) = client.release(handle).await {
            tracing::debug!(%error, "release of an abandoned open failed");
        }
    });
}
