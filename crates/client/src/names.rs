//! Names: lookup, create, link, unlink, rename. What changes a directory goes to its partition as
//! one request; what the change makes untrue in our caches is forgotten with it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use milpa_types::{Attributes, FileKind, InodeId, MetaError, MetaSlot, Name};
use milpa_wire::meta::{Entry, MetaAnswer, MetaRead, MetaWrite, NewInode};
use tokio::time::Instant;

use crate::core::lock;
use crate::error::FsError;
use crate::file::open::empty;
use crate::file::under_way::UnderWay;
use crate::flights::detach;
use crate::handle::{Creation, OpenFile, OpenFlags};
use crate::inner::Inner;
use crate::placement::Placement;

/// What a name named this long ago is believed when it only decides whether an unlinked file must
/// be held for our own handles. The kernel looked the name up just before.
const HINT_AGE: Duration = Duration::from_secs(5);

/// How often attributes are asked for while they change here.
const ASKS_MAX: u32 = 4;

/// An answer that took longer may have been given before, and lost, and be as old as that.
const FRESH: Duration = Duration::from_secs(1);

/// As of when a name is what our change made of it: it is forgotten when the change is answered, so it has to be
/// later than that to be remembered.
fn named_by_us(asked: Instant) -> Instant {
    if asked.elapsed() < FRESH { Instant::now() } else { asked }
}

/// What is to be created.
pub(crate) struct NewEntry {
    pub kind: FileKind,
    pub creation: Creation,
    pub device: u32,
    pub target: Vec<u8>,
    pub open_existing: bool,
}

impl NewEntry {
    pub(crate) fn of(kind: FileKind, creation: Creation) -> NewEntry {
        NewEntry { kind, creation, device: 0, target: Vec::new(), open_existing: false }
    }
}

impl Inner {
    pub(crate) async fn lookup(&self, parent: InodeId, name: &Name) -> Result<Attributes, FsError> {
        if let Some(Some((inode, _))) = self.names.get(&(parent, name.clone()))
            && let Some(attributes) = self.attributes.get(&inode)
        {
            return Ok(self.with_buffered(attributes));
        }
        let asked = Instant::now();
        let read = MetaRead::Lookup { parent, name: name.clone() };
        match self.meta.read(parent, read).await {
            Ok(MetaAnswer::Entry(entry)) => self.learn_entry(parent, entry, asked, asked).await,
            Ok(_) => Err(FsError::Broken("lookup")),
            Err(error) => {
                if error.is_not_found() {
                    // Not to answer from, that is the kernel's business: only a hint for rename.
                    self.names.put((parent, name.clone()), None, asked);
                }
                Err(error)
            }
        }
    }

    /// What is known of a name and what it names, without asking.
    pub(crate) fn remembered(
        &self,
        parent: InodeId,
        name: &Name,
        inode: InodeId,
    ) -> Option<Attributes> {
        let named = self.names.get(&(parent, name.clone())).flatten();
        named.filter(|(named, _)| *named == inode)?;
        self.attributes.get(&inode).map(|attributes| self.with_buffered(attributes))
    }

    /// Remembers an entry and completes it with the attributes of an inode in another partition. `named` is when
    /// the name was certainly so.
    async fn learn_entry(
        &self,
        parent: InodeId,
        entry: Entry,
        asked: Instant,
        named: Instant,
    ) -> Result<Attributes, FsError> {
        let inode = entry.inode;
        self.note_name(parent, entry.name, inode, entry.kind, named);
        let attributes = match entry.attributes {
            Some(attributes) => attributes,
            None => match self.meta.read(inode, MetaRead::GetAttributes { inode }).await? {
                MetaAnswer::Attributes(attributes) => attributes,
                _ => return Err(FsError::Broken("getattr")),
            },
        };
        if self.attributes.put(inode, attributes, asked) {
            return Ok(self.with_buffered(attributes));
        }
        // The entry is so, whatever became of the inode since.
        Ok(self.getattr(inode).await.unwrap_or(attributes))
    }

    pub(crate) fn note_name(
        &self,
        parent: InodeId,
        name: Name,
        inode: InodeId,
        kind: FileKind,
        asked: Instant,
    ) {
        if parent == InodeId::ROOT && kind == FileKind::Directory {
            lock(&self.tops).insert(inode, ());
        }
        self.names.put((parent, name), Some((inode, kind)), asked);
    }

    pub(crate) async fn getattr(&self, inode: InodeId) -> Result<Attributes, FsError> {
        let mut asks = 0;
        loop {
            if let Some(attributes) = self.attributes.get(&inode) {
                return Ok(self.with_buffered(attributes));
            }
            let (asked, read) = (Instant::now(), MetaRead::GetAttributes { inode });
            let answer = self.meta.read(inode, read).await.map_err(|e| self.by_inode(inode, e))?;
            let MetaAnswer::Attributes(attributes) = answer else {
                return Err(FsError::Broken("getattr"));
            };
            asks += 1;
            // One that a change of ours has overtaken would take back from its caller what he has done.
            if self.attributes.put(inode, attributes, asked) || asks == ASKS_MAX {
                return Ok(self.with_buffered(attributes));
            }
        }
    }

    /// Why an operation by id failed. What is known of a deleted inode is forgotten: the kernel looks the name
    /// up again, and is to hear what it names now.
    pub(crate) fn by_inode(&self, inode: InodeId, error: FsError) -> FsError {
        let error = error.by_inode();
        if matches!(error, FsError::Stale(_)) {
            self.attributes.forget(&inode);
        }
        error
    }

    /// Shows what is buffered here and cannot be known elsewhere, and what was published since.
    pub(crate) fn with_buffered(&self, mut attributes: Attributes) -> Attributes {
        if attributes.kind == FileKind::File
            && let Some(file) = self.files.get(attributes.inode)
        {
            let content = &mut file.shared().content;
            content.hears_of(&attributes);
            self.tell_outgrown(content);
            if content.attributes.content_version > attributes.content_version {
                attributes = content.attributes;
            }
            content.overlay(&mut attributes);
        }
        attributes
    }

    pub(crate) async fn readlink(&self, inode: InodeId) -> Result<Bytes, FsError> {
        let read = MetaRead::ReadLink { inode };
        match self.meta.read(inode, read).await.map_err(|e| self.by_inode(inode, e))? {
            MetaAnswer::Target(target) => Ok(target.into()),
            _ => Err(FsError::Broken("readlink")),
        }
    }

    /// Creates an inode and its name.
    pub(crate) async fn make(
        self: &Arc<Self>,
        parent: InodeId,
        name: &Name,
        new: NewEntry,
    ) -> Result<Attributes, FsError> {
        let (inner, name) = (Arc::clone(self), name.clone());
        detach(&self.core.runtime, async move {
            let asked = Instant::now();
            let made = inner.send_create(parent, &name, new).await;
            inner.names.forget(&(parent, name));
            inner.directory_changed(parent, made.as_ref().ok().and_then(directory_of), asked);
            inner.learn_entry(parent, made?, asked, named_by_us(asked)).await
        })
        .await
    }

    /// A change of ours, asked for at `asked`, made this of a directory; `None` if that is unknown.
    fn directory_changed(&self, parent: InodeId, now: Option<Attributes>, asked: Instant) {
        let Some(attributes) = now else { return self.attributes.forget(&parent) };
        let is_newer =
            |new: &Attributes, known: &Attributes| new.content_version > known.content_version;
        self.attributes.put_changed(parent, attributes, asked, is_newer);
    }

    async fn send_create(
        &self,
        parent: InodeId,
        name: &Name,
        new: NewEntry,
    ) -> Result<Entry, FsError> {
        let mut placement =
            if new.kind == FileKind::Directory { self.place_directory(parent) } else { None };
        let mut full: Vec<MetaSlot> = Vec::new();
        let Creation { mode, uid, gid } = new.creation;
        let NewEntry { kind, device, target, open_existing, .. } = new;
        loop {
            let write = MetaWrite::Create {
                parent,
                name: name.clone(),
                inode: NewInode { kind, mode, uid, gid, device, target: target.clone() },
                placement,
                open_existing,
                content: None,
            };
            match self.meta.write(parent, write).await {
                Ok(MetaAnswer::Entry(entry)) => return Ok(entry),
                Ok(_) => return Err(FsError::Broken("create")),
                Err(FsError::Meta(MetaError::PartitionFull)) => {
                    full.push(placement.unwrap_or(parent.slot()));
                    let view = self.meta.view();
                    let other = Placement::elsewhere(&view.volume.meta, &full);
                    // Each slot is tried once, so this ends.
                    placement = Some(other.ok_or(FsError::Meta(MetaError::NoSpace))?);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn place_directory(&self, parent: InodeId) -> Option<MetaSlot> {
        let is_top = parent == InodeId::ROOT || lock(&self.tops).get(&parent).is_some();
        let view = self.meta.view();
        self.placement.directory(&view.volume.meta, parent, is_top, self.core.chance.next())
    }

    /// Creates a file, or takes the one that is there, and opens it.
    pub(crate) async fn create(
        self: &Arc<Self>,
        parent: InodeId,
        name: &Name,
        creation: Creation,
        flags: OpenFlags,
    ) -> Result<OpenFile, FsError> {
        let mut new = NewEntry::of(FileKind::File, creation);
        new.open_existing = !flags.exclusive;
        let asked = Instant::now();
        let made = self.make(parent, name, new).await?;
        let is_empty = made.kind == FileKind::File && made.size == 0 && made.allocated == 0;
        let is_open_here = self.files.get(made.inode).is_some();
        // Since the answer was made: here by whom it was open for and is not any more, or by others, as it took so long.
        let may_be_written =
            is_open_here || self.pages.knows(made.inode) || asked.elapsed() >= FRESH;
        if is_empty && !may_be_written {
            return self.open_fresh(made.inode, flags, made, empty(), asked);
        }
        // What was empty then is not to lose what came later.
        let truncate = flags.truncate && !flags.exclusive && (!is_empty || is_open_here);
        match self.open(made.inode, OpenFlags { truncate, ..flags }).await {
            // It is made: who is told otherwise tries again, and hears that somebody else has made it.
            Err(error) if flags.exclusive && error.may_pass() => {
                self.open_unseen(made, flags, asked)
            }
            opened => opened,
        }
    }

    /// Opens a file of which no more is known than that it was made: what it holds is asked for by whoever reads it.
    fn open_unseen(
        &self,
        made: Attributes,
        flags: OpenFlags,
        asked: Instant,
    ) -> Result<OpenFile, FsError> {
        let opened = self.open_fresh(made.inode, flags, made, empty(), asked)?;
        if let Some(file) = self.files.get(made.inode) {
            file.shared().content.becomes_stale();
        }
        Ok(opened)
    }

    pub(crate) async fn link(
        self: &Arc<Self>,
        inode: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> Result<Attributes, FsError> {
        let (inner, name) = (Arc::clone(self), name.clone());
        detach(&self.core.runtime, async move {
            let write = MetaWrite::Link { inode, parent, name: name.clone() };
            let asked = Instant::now();
            let linked = inner.meta.write(parent, write).await;
            inner.attributes.forget(&inode);
            inner.names.forget(&(parent, name));
            let entry = match linked {
                Ok(MetaAnswer::Entry(entry)) => Ok(entry),
                Ok(_) => Err(FsError::Broken("link")),
                Err(error) => Err(error),
            };
            inner.directory_changed(parent, entry.as_ref().ok().and_then(directory_of), asked);
            let answered = named_by_us(asked);
            inner.learn_entry(parent, entry?, answered, answered).await
        })
        .await
    }

    pub(crate) async fn unlink(
        self: &Arc<Self>,
        parent: InodeId,
        name: &Name,
    ) -> Result<(), FsError> {
        let (inner, name) = (Arc::clone(self), name.clone());
        detach(&self.core.runtime, async move {
            let under_way = inner.begin_removal(parent, &name).await?;
            let held = under_way.as_ref().is_some_and(UnderWay::holds);
            let write = MetaWrite::Unlink { parent, name: name.clone(), held };
            inner.send_remove(parent, name, write).await
        })
        .await
    }

    pub(crate) async fn rmdir(
        self: &Arc<Self>,
        parent: InodeId,
        name: &Name,
    ) -> Result<(), FsError> {
        let (inner, name) = (Arc::clone(self), name.clone());
        detach(&self.core.runtime, async move {
            let write = MetaWrite::RemoveDirectory { parent, name: name.clone() };
            inner.send_remove(parent, name, write).await
        })
        .await
    }

    async fn send_remove(
        &self,
        parent: InodeId,
        name: Name,
        write: MetaWrite,
    ) -> Result<(), FsError> {
        let asked = Instant::now();
        let removed = self.meta.write(parent, write).await;
        self.forget_name(parent, name);
        match removed {
            Ok(MetaAnswer::Removed { directory }) => {
                self.directory_changed(parent, Some(directory), asked);
                Ok(())
            }
            other => {
                self.directory_changed(parent, None, asked);
                other.and(Err(FsError::Broken("unlink")))
            }
        }
    }

    pub(crate) async fn rename(
        self: &Arc<Self>,
        source: (InodeId, &Name),
        target: (InodeId, &Name),
        no_replace: bool,
    ) -> Result<(), FsError> {
        let inner = Arc::clone(self);
        let (source_parent, source_name) = (source.0, source.1.clone());
        let (target_parent, target_name) = (target.0, target.1.clone());
        detach(&self.core.runtime, async move {
            let under_way = match no_replace {
                true => None,
                false => inner.begin_removal(target_parent, &target_name).await?,
            };
            let write = MetaWrite::Rename {
                source_parent,
                source_name: source_name.clone(),
                target_parent,
                target_name: target_name.clone(),
                no_replace,
                held: under_way.as_ref().is_some_and(UnderWay::holds),
            };
            let renamed = inner.meta.write(target_parent, write).await;
            inner.forget_name(source_parent, source_name);
            inner.forget_name(target_parent, target_name);
            inner.attributes.forget(&source_parent);
            inner.attributes.forget(&target_parent);
            renamed.map(drop)
        })
        .await
    }

    /// A name changed: it and the attributes of what it named are no more.
    fn forget_name(&self, parent: InodeId, name: Name) {
        let key = (parent, name);
        if let Some(Some((inode, _))) = self.names.get_within(&key, Duration::MAX) {
            self.attributes.forget(&inode);
        }
        self.names.forget(&key);
    }

    /// The removal of a name, to be kept until it is answered. Asks a server what the name names only if some file
    /// is in use and the name was not seen lately.
    async fn begin_removal(
        self: &Arc<Self>,
        parent: InodeId,
        name: &Name,
    ) -> Result<Option<UnderWay>, FsError> {
        let hint = self.names.get_within(&(parent, name.clone()), HINT_AGE);
        let inode = match hint {
            Some(Some((inode, _))) => inode,
            Some(None) => return Ok(None),
            None if self.files.is_empty() => return Ok(None),
            None => match self.lookup(parent, name).await {
                Ok(attributes) => attributes.inode,
                Err(error) if error.is_not_found() => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        Ok(Some(UnderWay::removal(self, inode).await))
    }
}

/// What the change that made an entry made of its directory.
fn directory_of(entry: &Entry) -> Option<Attributes> {
    entry.directory.as_deref().copied()
}
