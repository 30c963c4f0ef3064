//! unlink: a name of something that is not a directory goes.

use milpa_types::{FileKind, InodeId, MetaError, Name};
use milpa_wire::meta::{MetaAnswer, MetaReply, Step};

use super::super::Partition;
use super::super::engine::{Context, Plan};

impl Partition {
    pub(crate) fn plan_unlink(
        &self,
        context: Context<'_>,
        parent: InodeId,
        name: &Name,
        held: bool,
    ) -> Result<Plan, MetaError> {
        self.directory(parent)?;
        self.check_unlocked(parent, name, context.operation)?;
        let dentry = self.tables.dentries.get(&(parent, name.clone()));
        let dentry = dentry.ok_or(MetaError::NotFound)?;
        if dentry.kind == FileKind::Directory {
            return Err(MetaError::IsDirectory);
        }
        if self.owns(dentry.inode) || !context.prepared.is_empty() {
            return Ok(Plan::Commit);
        }
        let held = held.then_some(context.request.id.session);
        let step = Step::DropLink { inode: dentry.inode, held };
        Ok(Plan::Prepare(dentry.inode.slot(), step))
    }

    pub(crate) fn commit_unlink(
        &mut self,
        context: Context<'_>,
        parent: InodeId,
        name: &Name,
        held: bool,
    ) -> MetaReply {
        let now = context.request.now;
        let key = (parent, name.clone());
        let dentry = self.tables.dentries.get(&key).ok_or(MetaError::NotFound)?;
        let directory = self.remove_dentry(&key, dentry.kind, now);
        if self.owns(dentry.inode) {
            self.drop_link(dentry.inode, held.then_some(context.request.id.session), now);
        }
        Ok(MetaAnswer::Removed { directory: directory.ok_or(MetaError::Stale)? })
    }
}
