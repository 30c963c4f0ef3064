//! The trait: content and directories here, names by the module beside.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use milpa_fuse::{
    Config, Create, Fallocate, FileLock, Filesystem, Flush, Forget, Fsync, KernelInfo, Lock,
    LockKind, Lseek, Mkdir, Mknod, Negotiated, Notifier, Open, Opened, Read, Release, Rename,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr, Request,
    SetAttr, Setxattr, Statfs, Statx, StatxArgs, Write, flags,
};

use super::{Event, MemoryFs, TIMEOUT};

/// Files whose name starts with "direct" bypass the page cache; the others keep it.
pub fn open_flags(name: &OsStr) -> u32 {
    if name.as_bytes().starts_with(b"direct") {
        flags::open::DIRECT_IO
    } else {
        flags::open::KEEP_CACHE
    }
}

impl MemoryFs {
    fn name_of(&self, id: u64) -> std::ffi::OsString {
        let state = self.state();
        let names = state.nodes.values().flat_map(|node| &node.children);
        names
            .filter(|(_, child)| **child == id)
            .map(|(name, _)| name.clone())
            .next()
            .unwrap_or_default()
    }

    /// Holds the answer back until the kernel asks to give the request up.
    fn block(&self, reply: ReplyData) {
        let watch = reply.watch();
        let (sender, receiver) = std::sync::mpsc::channel();
        watch.on_interrupt(move || sender.send(()).unwrap());
        self.tell(Event::ReadBlocks);
        let events = self.events();
        std::thread::spawn(move || {
            receiver.recv().unwrap();
            assert!(watch.is_interrupted());
            reply.error(libc::EINTR);
            let _ = events.send(Event::ReadInterrupted);
        });
    }

    fn answer_attr(&self, id: u64, reply: ReplyAttr) {
        let attr = self.state().node(id).map(|node| node.attr);
        match attr {
            Ok(attr) => drop(reply.attr(&attr, TIMEOUT)),
            Err(errno) => reply.error(errno),
        }
    }

    fn names_from(&self, read: &Read) -> Vec<(u64, std::ffi::OsString, u64)> {
        let state = self.state();
        let skip = usize::try_from(read.offset).unwrap();
        let names = state.snapshots[&read.fh].iter().enumerate().skip(skip);
        names.map(|(index, (name, id))| (index as u64 + 1, name.clone(), *id)).collect()
    }
}

impl Filesystem for MemoryFs {
    fn init(&self, kernel: &KernelInfo, config: &mut Config) -> Result<(), i32> {
        self.state().kernel = *kernel;
        *config = self.config;
        if self.refuse_init.load(Ordering::SeqCst) { Err(libc::EACCES) } else { Ok(()) }
    }

    fn ready(&self, _: &Negotiated, notifier: Notifier) {
        self.state().notifier = Some(notifier);
    }

    fn destroy(&self) {
        self.tell(Event::Destroyed);
    }

    fn lookup(&self, request: &Request, name: &OsStr, reply: ReplyEntry) {
        self.do_lookup(request.nodeid, name, reply);
    }

    fn forget(&self, forget: Forget) {
        self.state().forget(forget);
    }

    fn getattr(&self, request: &Request, _: Option<u64>, reply: ReplyAttr) {
        self.answer_attr(request.nodeid, reply);
    }

    fn setattr(&self, request: &Request, set: &SetAttr, reply: ReplyAttr) {
        let result = self.state().set_attr(request.nodeid, set);
        match result {
            Ok(()) => self.answer_attr(request.nodeid, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn statx(&self, request: &Request, _: &StatxArgs, reply: ReplyStatx) {
        let attr = self.state().nodes[&request.nodeid].attr;
        reply.statx(&Statx { attr, btime: Some(attr.ctime), ..Statx::default() });
    }

    fn readlink(&self, request: &Request, reply: ReplyData) {
        reply.data(self.state().nodes[&request.nodeid].target.as_bytes());
    }

    fn symlink(&self, request: &Request, name: &OsStr, target: &OsStr, reply: ReplyEntry) {
        self.do_symlink(request, name, target, reply);
    }

    fn mknod(&self, request: &Request, node: &Mknod<'_>, reply: ReplyEntry) {
        self.do_mknod(request, node, reply);
    }

    fn mkdir(&self, request: &Request, directory: &Mkdir<'_>, reply: ReplyEntry) {
        self.do_mkdir(request, directory, reply);
    }

    fn unlink(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        self.do_remove(request.nodeid, name, false, reply);
    }

    fn rmdir(&self, request: &Request, name: &OsStr, reply: ReplyEmpty) {
        self.do_remove(request.nodeid, name, true, reply);
    }

    fn rename(&self, request: &Request, rename: &Rename<'_>, reply: ReplyEmpty) {
        self.do_rename(request, rename, reply);
    }

    fn link(&self, request: &Request, nodeid: u64, new_name: &OsStr, reply: ReplyEntry) {
        self.do_link(request, nodeid, new_name, reply);
    }

    fn create(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        self.do_create(request, create, reply);
    }

    fn tmpfile(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        self.do_create(request, create, reply);
    }

    fn open(&self, request: &Request, open: &Open, reply: ReplyOpen) {
        let open_flags = open_flags(&self.name_of(request.nodeid));
        if open.flags & libc::O_TRUNC.unsigned_abs() != 0 {
            self.state().nodes.get_mut(&request.nodeid).unwrap().set_data(Vec::new());
        }
        reply.opened(Opened { fh: request.nodeid, flags: open_flags });
    }

    fn read(&self, request: &Request, read: &Read, reply: ReplyData) {
        self.largest_read.fetch_max(read.size, Ordering::SeqCst);
        let fails = |left: u32| left.checked_sub(1);
        if self.failing_reads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails).is_ok() {
            return reply.error(libc::EIO);
        }
        match self.name_of(request.nodeid).as_bytes() {
            b"direct-blocked" => return self.block(reply),
            b"direct-dropped" => return drop(reply),
            b"direct-panic" => panic!("a panic on purpose"),
            b"direct-late" => {
                // From another thread, after this method has returned.
                std::thread::spawn(move || reply.data(b"late"));
                return;
            }
            b"direct-too-much" => {
                reply.data(&vec![0; read.size as usize + 1]);
                return;
            }
            _ => {}
        }
        let state = self.state();
        let data = &state.nodes[&request.nodeid].data;
        let start = usize::try_from(read.offset).unwrap().min(data.len());
        let end = (start + read.size as usize).min(data.len());
        reply.data(&data[start..end]);
    }

    fn write(&self, request: &Request, write: &Write<'_>, reply: ReplyWrite) {
        let size = u32::try_from(write.data.len()).unwrap();
        self.largest_write.fetch_max(size, Ordering::SeqCst);
        if !(write.data.as_ptr() as usize).is_multiple_of(4096) {
            self.unaligned_writes.fetch_add(1, Ordering::SeqCst);
        }
        let mut state = self.state();
        let node = state.nodes.get_mut(&request.nodeid).unwrap();
        let start = usize::try_from(write.offset).unwrap();
        let end = start + write.data.len();
        if node.data.len() < end {
            node.data.resize(end, 0);
        }
        node.data[start..end].copy_from_slice(write.data);
        node.resized();
        drop(state);
        reply.written(size);
    }

    fn statfs(&self, _: &Request, reply: ReplyStatfs) {
        reply.statfs(&Statfs {
            blocks: 1000,
            blocks_free: 600,
            blocks_available: 500,
            files: 77,
            files_free: 33,
            block_bytes: 4096,
            name_bytes_max: 255,
            fragment_bytes: 4096,
        });
    }

    fn flush(&self, _: &Request, _: &Flush, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(&self, _: &Request, _: &Release, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, request: &Request, fsync: &Fsync, reply: ReplyEmpty) {
        assert_eq!(fsync.fh, request.nodeid);
        match self.name_of(request.nodeid).as_bytes() {
            b"unsyncable" => reply.error(libc::EIO),
            _ => drop(reply.ok()),
        }
    }

    fn setxattr(&self, request: &Request, set: &Setxattr<'_>, reply: ReplyEmpty) {
        let mut state = self.state();
        let xattrs = &mut state.nodes.get_mut(&request.nodeid).unwrap().xattrs;
        xattrs.insert(set.name.to_owned(), set.value.to_vec());
        reply.ok();
    }

    fn getxattr(&self, request: &Request, name: &OsStr, reply: ReplyXattr) {
        match self.state().nodes[&request.nodeid].xattrs.get(name) {
            Some(value) => drop(reply.value(value)),
            None => reply.error(libc::ENODATA),
        }
    }

    fn listxattr(&self, request: &Request, reply: ReplyXattr) {
        let state = self.state();
        let names = state.nodes[&request.nodeid].xattrs.keys();
        let list: Vec<u8> = names.flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect();
        reply.value(&list);
    }

    fn opendir(&self, request: &Request, _: &Open, reply: ReplyOpen) {
        let mut state = self.state();
        let names = state.nodes[&request.nodeid].children.clone().into_iter().collect();
        let fh = state.snapshots.len() as u64;
        state.snapshots.insert(fh, names);
        reply.opened(Opened { fh, flags: 0 });
    }

    fn readdir(&self, _: &Request, read: &Read, mut reply: ReplyDirectory) {
        for (offset, name, id) in self.names_from(read) {
            let mode = self.state().nodes[&id].attr.mode;
            if !reply.add(id, offset, mode, &name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(&self, _: &Request, read: &Read, mut reply: ReplyDirectoryPlus) {
        self.readdirplus_calls.fetch_add(1, Ordering::SeqCst);
        for (offset, name, id) in self.names_from(read) {
            let mut state = self.state();
            if !reply.add(&state.entry(id), offset, &name) {
                break;
            }
            state.count_lookup(id);
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: &Release, reply: ReplyEmpty) {
        reply.ok();
    }

    fn getlk(&self, _: &Request, lock: &Lock, reply: ReplyLock) {
        reply.lock(&FileLock { kind: LockKind::Unlock, ..lock.lock });
    }

    fn setlk(&self, _: &Request, lock: &Lock, reply: ReplyEmpty) {
        self.state().locks.push(*lock);
        reply.ok();
    }

    fn fallocate(&self, request: &Request, fallocate: &Fallocate, reply: ReplyEmpty) {
        let end = usize::try_from(fallocate.offset + fallocate.length).unwrap();
        let mut state = self.state();
        let node = state.nodes.get_mut(&request.nodeid).unwrap();
        node.data.resize(end.max(node.data.len()), 0);
        node.resized();
        reply.ok();
    }

    fn lseek(&self, request: &Request, lseek: &Lseek, reply: ReplyLseek) {
        let size = self.state().nodes[&request.nodeid].data.len() as u64;
        match i32::try_from(lseek.whence) {
            Ok(libc::SEEK_HOLE) => drop(reply.offset(size)),
            _ => drop(reply.offset(lseek.offset)),
        }
    }
}
