//! link: another name for an inode.

use milpa_types::{InodeId, MetaError, Name};
use milpa_wire::meta::{Entry, MetaAnswer, MetaReply, Step, StepOutcome};

use super::super::Partition;
use super::super::engine::{BAD_OUTCOME, Context, Plan};
use super::super::table::Dentry;

impl Partition {
    pub(crate) fn plan_link(
        &self,
        context: Context<'_>,
        inode: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> Result<Plan, MetaError> {
        self.directory(parent)?;
        self.check_unlocked(parent, name, context.operation)?;
        if self.tables.dentries.contains(&(parent, name.clone())) {
            return Err(MetaError::Exists);
        }
        if self.owns(inode) {
            return self.check_linkable(inode).map(|()| Plan::Commit);
        }
        match context.prepared {
            [] => Ok(Plan::Prepare(inode.slot(), Step::PrepareLink { inode })),
            [StepOutcome::Inode(attributes)] if attributes.inode == inode => Ok(Plan::Commit),
            _ => Err(BAD_OUTCOME),
        }
    }

    pub(crate) fn commit_link(
        &mut self,
        context: Context<'_>,
        inode: InodeId,
        parent: InodeId,
        name: &Name,
    ) -> MetaReply {
        let now = context.request.now;
        let attributes = match context.prepared.first() {
            Some(StepOutcome::Inode(attributes)) => *attributes,
            _ => {
                self.add_link(inode, now);
                self.inode(inode)?.attributes(inode)
            }
        };
        let kind = attributes.kind;
        let directory = self.add_dentry(&(parent, name.clone()), Dentry { inode, kind }, now);
        let (name, attributes) = (name.clone(), Some(attributes));
        let directory = directory.map(Box::new);
        Ok(MetaAnswer::Entry(Entry { name, inode, kind, attributes, directory }))
    }
}
