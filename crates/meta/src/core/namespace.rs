//! The moves that operations are made of: on one inode, or one dentry with its directory.

use milpa_types::SYMLINK_BYTES_MAX;
use milpa_types::{Attributes, FileKind, InodeId, MetaError, MetaSlot, Name, SessionId, Timestamp};
use milpa_wire::meta::NewInode;

use super::Partition;
use super::inode::{Body, Inode, LINKS_MAX};
use super::table::Dentry;

/// Directories that the check for loops climbs, at most. Deeper trees than this are not reachable
/// by any path that the kernel accepts in one call.
const DEPTH_MAX: usize = 4096;

impl Partition {
    /// Whether the inode, if it exists, lives here.
    pub(crate) fn owns(&self, inode: InodeId) -> bool {
        inode.slot() == self.setup.slot
    }

    pub(crate) fn check_owned(&self, inode: InodeId) -> Result<(), MetaError> {
        if self.owns(inode) { Ok(()) } else { Err(MetaError::WrongPartition) }
    }

    /// The slot to which a client's placement leads, if it is not this partition.
    pub(crate) fn elsewhere(&self, placement: Option<MetaSlot>) -> Option<MetaSlot> {
        placement.filter(|slot| *slot != self.setup.slot)
    }

    /// An inode of this partition, unlinked ones included.
    pub(crate) fn inode(&self, inode: InodeId) -> Result<Inode, MetaError> {
        self.check_owned(inode)?;
        self.tables.inodes.get(&inode).ok_or(MetaError::Stale)
    }

    /// A directory of this partition.
    pub(crate) fn directory(&self, inode: InodeId) -> Result<Inode, MetaError> {
        let record = self.inode(inode)?;
        if record.is_directory() { Ok(record) } else { Err(MetaError::NotDirectory) }
    }

    /// An inode as `session` may change it: an unlinked one only if that session holds it open.
    pub(crate) fn writable(&self, inode: InodeId, session: SessionId) -> Result<Inode, MetaError> {
        let record = self.inode(inode)?;
        if record.link_count == 0 && !self.tables.held.contains(&(inode, session)) {
            return Err(MetaError::Stale);
        }
        Ok(record)
    }

    /// Whether what a client wants to create makes sense.
    pub(crate) fn check_new(new: &NewInode) -> Result<(), MetaError> {
        let target = new.target.len();
        let fits = match new.kind {
            FileKind::Symlink => (1..=SYMLINK_BYTES_MAX).contains(&target),
            _ => target == 0,
        };
        if fits { Ok(()) } else { Err(MetaError::Invalid) }
    }

    /// Whether this partition may give another inode id.
    pub(crate) fn check_room(&self) -> Result<(), MetaError> {
        let has_room = self.counters.next_inode < self.counters.end_inode;
        if has_room { Ok(()) } else { Err(MetaError::PartitionFull) }
    }

    /// Makes an inode that no dentry names yet and gives it the next id.
    pub(crate) fn make_inode(
        &mut self,
        new: &NewInode,
        parent: InodeId,
        now: Timestamp,
    ) -> Result<InodeId, MetaError> {
        Self::check_new(new)?;
        self.check_room()?;
        let mut inode = Inode::new(new.kind, new.mode, new.uid, new.gid, now);
        match new.kind {
            FileKind::Directory => inode.parent = self.known_parent(parent),
            FileKind::CharDevice | FileKind::BlockDevice => inode.device = new.device,
            FileKind::Symlink => {
                inode.size = new.target.len() as u64;
                inode.body = Body::Target(new.target.clone());
            }
            FileKind::File | FileKind::Fifo | FileKind::Socket => {}
        }
        let id = self.counters.next_inode;
        self.counters.next_inode = InodeId(id.0 + 1);
        self.tables.inodes.insert(&id, &inode);
        Ok(id)
    }

    /// Adds a dentry. The directory's size, times and link count go with it; gives what it is then.
    pub(crate) fn add_dentry(
        &mut self,
        key: &(InodeId, Name),
        dentry: Dentry,
        now: Timestamp,
    ) -> Option<Attributes> {
        self.tables.dentries.insert(key, &dentry);
        self.change_directory(key.0, dentry.kind, now, |count| count.saturating_add(1))
    }

    /// Removes a dentry that was found under `key`. Gives what its directory is then.
    pub(crate) fn remove_dentry(
        &mut self,
        key: &(InodeId, Name),
        kind: FileKind,
        now: Timestamp,
    ) -> Option<Attributes> {
        self.tables.dentries.remove(key);
        self.change_directory(key.0, kind, now, |count| count.saturating_sub(1))
    }

    fn change_directory(
        &mut self,
        id: InodeId,
        entry: FileKind,
        now: Timestamp,
        step: impl Fn(u64) -> u64,
    ) -> Option<Attributes> {
        let found = self.tables.inodes.get(&id);
        debug_assert!(found.is_some(), "the plan looked at the directory");
        let mut directory = found?;
        directory.size = step(directory.size);
        if entry == FileKind::Directory {
            let links = step(u64::from(directory.link_count));
            directory.link_count = u32::try_from(links).unwrap_or(u32::MAX);
        }
        directory.modified = now;
        directory.changed = now;
        directory.content_version += 1;
        self.tables.inodes.insert(&id, &directory);
        Some(directory.attributes(id))
    }

    /// What an inode's record may keep of its directory's id.
    fn known_parent(&self, parent: InodeId) -> InodeId {
        if self.owns(parent) { parent } else { InodeId(0) }
    }

    /// After a rename: what was moved changed, and a directory has a new parent (0: unknown).
    pub(crate) fn moved(&mut self, dentry: Dentry, parent: InodeId, now: Timestamp) {
        if let Some(mut inode) = self.tables.inodes.get(&dentry.inode) {
            inode.changed = now;
            if inode.is_directory() {
                inode.parent = self.known_parent(parent);
            }
            self.tables.inodes.insert(&dentry.inode, &inode);
        }
    }

    /// Whether `directory` is `ancestor` or lies below it, as far as this partition can see: up to
    /// the first directory whose parent is elsewhere. Never true by mistake.
    pub(crate) fn is_below(&self, directory: InodeId, ancestor: InodeId) -> bool {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            if at == ancestor {
                return true;
            }
            match self.tables.inodes.get(&at) {
                Some(record) if record.parent != InodeId(0) => at = record.parent,
                _ => return false,
            }
        }
        false
    }

    /// Whether another name may be given to the inode.
    pub(crate) fn check_linkable(&self, inode: InodeId) -> Result<(), MetaError> {
        let record = self.inode(inode)?;
        match record.link_count {
            _ if record.is_directory() => Err(MetaError::NotPermitted),
            0 => Err(MetaError::Stale),
            LINKS_MAX.. => Err(MetaError::TooManyLinks),
            _ => Ok(()),
        }
    }

    pub(crate) fn add_link(&mut self, inode: InodeId, now: Timestamp) {
        if let Some(mut record) = self.tables.inodes.get(&inode) {
            record.link_count = record.link_count.saturating_add(1);
            record.changed = now;
            self.tables.inodes.insert(&inode, &record);
        }
    }

    /// Takes a link away from an inode that is no directory. The session `held`, if it lives,
    /// holds the inode from now on, also while other links remain: whoever takes the last one, the
    /// holder keeps its open file. Without links and holders the inode is deleted.
    pub(crate) fn drop_link(&mut self, inode: InodeId, held: Option<SessionId>, now: Timestamp) {
        let Some(mut record) = self.tables.inodes.get(&inode) else {
            return;
        };
        record.link_count = record.link_count.saturating_sub(1);
        record.changed = now;
        if let Some(session) = held.filter(|session| self.tables.sessions.contains(session)) {
            self.tables.held.insert(&(inode, session), &());
        }
        if record.link_count > 0 || self.is_held(inode) {
            self.tables.inodes.insert(&inode, &record);
        } else {
            self.delete_inode(inode);
        }
    }

    pub(crate) fn is_held(&self, inode: InodeId) -> bool {
        self.tables.held.range(&inode).next().is_some_and(|(key, ())| key.0 == inode)
    }

    /// Removes an inode; its bytes go to the free list.
    pub(crate) fn delete_inode(&mut self, inode: InodeId) {
        let Some(record) = self.tables.inodes.get(&inode) else {
            return;
        };
        self.free_content(inode);
        self.counters.allocated_bytes =
            self.counters.allocated_bytes.saturating_sub(record.allocated);
        self.tables.inodes.remove(&inode);
    }

    /// A session lets an inode go that it held. Letting go again is harmless.
    pub(crate) fn release(&mut self, inode: InodeId, session: SessionId) {
        if !self.tables.held.remove(&(inode, session)) {
            return;
        }
        let record = self.tables.inodes.get(&inode);
        if record.is_some_and(|record| record.link_count == 0) && !self.is_held(inode) {
            self.delete_inode(inode);
        }
    }
}
