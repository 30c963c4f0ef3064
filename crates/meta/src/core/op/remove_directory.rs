//! rmdir: an empty directory goes.

use milpa_types::{FileKind, InodeId, MetaError, Name};
use milpa_wire::meta::{MetaAnswer, MetaReply, Step};

use super::super::Partition;
use super::super::engine::{Context, Plan};

impl Partition {
    pub(crate) fn plan_remove_directory(
        &self,
        context: Context<'_>,
        parent: InodeId,
        name: &Name,
    ) -> Result<Plan, MetaError> {
        self.directory(parent)?;
        self.check_unlocked(parent, name, context.operation)?;
        let dentry = self.tables.dentries.get(&(parent, name.clone()));
        let dentry = dentry.ok_or(MetaError::NotFound)?;
        if dentry.kind != FileKind::Directory {
            return Err(MetaError::NotDirectory);
        }
        if self.owns(dentry.inode) {
            return self.check_removable(dentry.inode, context.operation).map(|()| Plan::Commit);
        }
        if !context.prepared.is_empty() {
            return Ok(Plan::Commit);
        }
        let step = Step::PrepareRemoveDirectory { inode: dentry.inode };
        Ok(Plan::Prepare(dentry.inode.slot(), step))
    }

    pub(crate) fn commit_remove_directory(
        &mut self,
        context: Context<'_>,
        parent: InodeId,
        name: &Name,
    ) -> MetaReply {
        let key = (parent, name.clone());
        let dentry = self.tables.dentries.get(&key).ok_or(MetaError::NotFound)?;
        let directory = self.remove_dentry(&key, dentry.kind, context.request.now);
        if self.owns(dentry.inode) {
            self.delete_inode(dentry.inode);
        }
        Ok(MetaAnswer::Removed { directory: directory.ok_or(MetaError::Stale)? })
    }
}
