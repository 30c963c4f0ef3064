//! Names and attributes of the file system in memory.

use std::ffi::OsStr;

use milpa_fuse::{Create, Mkdir, Mknod, Opened, Rename, Request, SetAttr, SetTime, Time};
use milpa_fuse::{ReplyCreate, ReplyEmpty, ReplyEntry};

use super::{MemoryFs, State};

/// POSIX's usual limit, which the kernel leaves to the file system.
const NAME_MAX: usize = 255;

impl MemoryFs {
    pub fn do_lookup(&self, parent: u64, name: &OsStr, reply: ReplyEntry) {
        if name.len() > NAME_MAX {
            return reply.error(libc::ENAMETOOLONG);
        }
        let found = self.state().child(parent, name);
        self.answer_entry(found, reply);
    }

    pub fn do_make(&self, request: &Request, name: &OsStr, mode: u32, reply: ReplyEntry) {
        let made = self.state().make(request, name, mode);
        self.answer_entry(made, reply);
    }

    pub fn do_mknod(&self, request: &Request, node: &Mknod<'_>, reply: ReplyEntry) {
        self.do_make(request, node.name, node.mode, reply);
    }

    pub fn do_mkdir(&self, request: &Request, directory: &Mkdir<'_>, reply: ReplyEntry) {
        self.do_make(request, directory.name, directory.mode | libc::S_IFDIR, reply);
    }

    pub fn do_symlink(&self, request: &Request, name: &OsStr, target: &OsStr, reply: ReplyEntry) {
        let mut state = self.state();
        let made = state.make(request, name, libc::S_IFLNK | 0o777).inspect(|id| {
            let node = state.nodes.get_mut(id).unwrap();
            node.target = target.to_owned();
            node.attr.size = target.len() as u64;
        });
        drop(state);
        self.answer_entry(made, reply);
    }

    pub fn do_link(&self, request: &Request, id: u64, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.state();
        let linked = state.add_name(request.nodeid, name, id);
        if linked.is_ok() {
            state.nodes.get_mut(&id).unwrap().attr.nlink += 1;
        }
        drop(state);
        self.answer_entry(linked.map(|()| id), reply);
    }

    pub fn do_create(&self, request: &Request, create: &Create<'_>, reply: ReplyCreate) {
        let mut state = self.state();
        let created = if create.name.is_empty() {
            Ok(state.new_node(create.mode, request.uid, request.gid))
        } else {
            state.make(request, create.name, create.mode)
        };
        match created {
            Ok(id) => {
                let entry = state.entry(id);
                let opened = Opened { fh: id, flags: super::content::open_flags(create.name) };
                // Counted before the answer: a forget may follow it at once.
                state.count_lookup(id);
                drop(state);
                assert!(reply.created(&entry, opened).is_delivered());
            }
            Err(errno) => reply.error(errno),
        }
    }

    pub fn do_remove(&self, parent: u64, name: &OsStr, is_directory: bool, reply: ReplyEmpty) {
        match self.state().remove(parent, name, is_directory) {
            Ok(()) => drop(reply.ok()),
            Err(errno) => reply.error(errno),
        }
    }

    pub fn do_rename(&self, request: &Request, rename: &Rename<'_>, reply: ReplyEmpty) {
        match self.state().rename(request.nodeid, rename) {
            Ok(()) => drop(reply.ok()),
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_entry(&self, found: Result<u64, i32>, reply: ReplyEntry) {
        match found {
            Ok(id) => {
                let mut state = self.state();
                let entry = state.entry(id);
                state.count_lookup(id);
                drop(state);
                assert!(reply.entry(&entry).is_delivered());
            }
            Err(errno) => reply.error(errno),
        }
    }
}

impl State {
    fn add_name(&mut self, parent: u64, name: &OsStr, id: u64) -> Result<(), i32> {
        if self.child(parent, name).is_ok() {
            return Err(libc::EEXIST);
        }
        self.node(parent)?.children.insert(name.to_owned(), id);
        Ok(())
    }

    fn make(&mut self, request: &Request, name: &OsStr, mode: u32) -> Result<u64, i32> {
        if self.child(request.nodeid, name).is_ok() {
            return Err(libc::EEXIST);
        }
        let id = self.new_node(mode, request.uid, request.gid);
        self.add_name(request.nodeid, name, id)?;
        Ok(id)
    }

    fn remove(&mut self, parent: u64, name: &OsStr, is_directory: bool) -> Result<(), i32> {
        let id = self.child(parent, name)?;
        let node = self.node(id)?;
        if is_directory && !node.children.is_empty() {
            return Err(libc::ENOTEMPTY);
        }
        node.attr.nlink = node.attr.nlink.saturating_sub(1);
        self.node(parent)?.children.remove(name);
        Ok(())
    }

    fn rename(&mut self, parent: u64, rename: &Rename<'_>) -> Result<(), i32> {
        let id = self.child(parent, rename.name)?;
        let other = self.child(rename.new_parent, rename.new_name).ok();
        match (rename.flags, other) {
            (libc::RENAME_NOREPLACE, Some(_)) => return Err(libc::EEXIST),
            (libc::RENAME_EXCHANGE, None) => return Err(libc::ENOENT),
            (libc::RENAME_EXCHANGE, Some(other)) => {
                self.node(parent)?.children.insert(rename.name.to_owned(), other);
            }
            (0 | libc::RENAME_NOREPLACE, _) => {
                self.node(parent)?.children.remove(rename.name);
            }
            _ => return Err(libc::EINVAL),
        }
        self.node(rename.new_parent)?.children.insert(rename.new_name.to_owned(), id);
        Ok(())
    }

    pub fn set_attr(&mut self, id: u64, set: &SetAttr) -> Result<(), i32> {
        let now = Time::from(std::time::SystemTime::now());
        let node = self.node(id)?;
        if let Some(size) = set.size {
            node.data.resize(usize::try_from(size).map_err(|_| libc::EFBIG)?, 0);
            node.resized();
        }
        let resolve = |time: SetTime| match time {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        let attr = &mut node.attr;
        attr.mode = set.mode.map_or(attr.mode, |mode| attr.mode & libc::S_IFMT | mode & 0o7777);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, resolve);
        attr.mtime = set.mtime.map_or(attr.mtime, resolve);
        attr.ctime = now;
        Ok(())
    }
}
