//! create, mkdir, mknod and symlink: a new inode and its dentry.

use milpa_types::{FileKind, InodeId, MetaError, MetaSlot, Name, VolumeOptions};
use milpa_wire::meta::{Entry, MetaAnswer, MetaReply, NewInode, Step, StepOutcome};

use super::super::Partition;
use super::super::engine::{BAD_OUTCOME, Context, Plan};
use super::super::inode::Inode;
use super::super::table::Dentry;

/// The fields of `MetaWrite::Create`.
#[derive(Clone, Copy)]
pub(crate) struct Create<'a> {
    pub parent: InodeId,
    pub name: &'a Name,
    pub inode: &'a NewInode,
    pub placement: Option<MetaSlot>,
    pub open_existing: bool,
    pub content: Option<&'a [u8]>,
}

/// What a set-group-id directory makes of its children (inode(7)): they take its group, and
/// directories its set-group-id bit as well.
fn inherit(new: &NewInode, directory: &Inode) -> NewInode {
    let mut new = new.clone();
    if directory.mode & 0o2000 != 0 {
        new.gid = directory.gid;
        if new.kind == FileKind::Directory {
            new.mode |= 0o2000;
        }
    }
    new
}

impl Partition {
    pub(crate) fn plan_create(
        &self,
        context: Context<'_>,
        create: Create<'_>,
    ) -> Result<Plan, MetaError> {
        let directory = self.directory(create.parent)?;
        self.check_unlocked(create.parent, create.name, context.operation)?;
        let key = (create.parent, create.name.clone());
        if let Some(dentry) = self.tables.dentries.get(&key) {
            if create.open_existing && dentry.kind == FileKind::File {
                return Ok(Plan::Nothing(MetaAnswer::Entry(self.entry(create.name, dentry))));
            }
            return Err(MetaError::Exists);
        }
        Self::check_new(create.inode)?;
        let elsewhere = self.elsewhere(create.placement);
        self.check_content(create, elsewhere)?;
        if create.inode.kind == FileKind::Directory && directory.link_count == u32::MAX {
            return Err(MetaError::TooManyLinks);
        }
        match (elsewhere, context.prepared) {
            (None, _) => self.check_room().map(|()| Plan::Commit),
            (Some(_), [StepOutcome::Inode(_)]) => Ok(Plan::Commit),
            (Some(slot), []) => {
                let inode = inherit(create.inode, &directory);
                Ok(Plan::Prepare(slot, Step::PrepareInode { inode, parent: create.parent }))
            }
            (Some(_), _) => Err(BAD_OUTCOME),
        }
    }

    /// Content that comes along is small, and goes only with a file that is born here: the step
    /// that makes an inode elsewhere has no room for it.
    fn check_content(
        &self,
        create: Create<'_>,
        elsewhere: Option<MetaSlot>,
    ) -> Result<(), MetaError> {
        let Some(content) = create.content else {
            return Ok(());
        };
        let fits = content.len() <= VolumeOptions::INLINE_BYTES_MAX as usize;
        if fits && elsewhere.is_none() && create.inode.kind == FileKind::File {
            Ok(())
        } else {
            Err(MetaError::Invalid)
        }
    }

    pub(crate) fn commit_create(&mut self, context: Context<'_>, create: Create<'_>) -> MetaReply {
        let now = context.request.now;
        let attributes = match context.prepared.first() {
            Some(StepOutcome::Inode(attributes)) => *attributes,
            _ => {
                let inode = inherit(create.inode, &self.directory(create.parent)?);
                let id = self.make_inode(&inode, create.parent, now)?;
                self.fill(id, create.content)?
            }
        };
        let dentry = Dentry { inode: attributes.inode, kind: attributes.kind };
        let directory = self.add_dentry(&(create.parent, create.name.clone()), dentry, now);
        Ok(MetaAnswer::Entry(Entry {
            name: create.name.clone(),
            inode: attributes.inode,
            kind: attributes.kind,
            attributes: Some(attributes),
            directory: directory.map(Box::new),
        }))
    }

    /// Puts the content that came along into a new file.
    fn fill(
        &mut self,
        id: InodeId,
        content: Option<&[u8]>,
    ) -> Result<milpa_types::Attributes, MetaError> {
        let mut inode = self.inode(id)?;
        if let Some(content) = content.filter(|content| !content.is_empty()) {
            self.set_inline(&mut inode, Some(content.to_vec()));
            inode.size = content.len() as u64;
            inode.content_version = 1;
            self.tables.inodes.insert(&id, &inode);
        }
        Ok(inode.attributes(id))
    }
}
