//! rename: a name moves, and replaces what its destination names (rename(2)).
//!
//! The destination's partition coordinates. It may need the source dentry from another partition
//! (`PrepareTake`), and then the word of the replaced inode's (`PrepareRemoveDirectory` or
//! `DropLink`). The commit sets the destination's dentry; the source's goes with `Finish`. Between
//! the two both names are visible, and locked: full isolation comes with the POSIX work.

use milpa_types::{FileKind, InodeId, MetaError, Name};
use milpa_wire::meta::{MetaAnswer, MetaReply, MetaWrite, Step, StepOutcome};

use super::super::Partition;
use super::super::engine::{BAD_OUTCOME, Context, Plan};
use super::super::table::Dentry;

/// The fields of `MetaWrite::Rename`.
#[derive(Clone, Copy)]
pub(crate) struct Rename<'a> {
    source_parent: InodeId,
    source_name: &'a Name,
    target_parent: InodeId,
    target_name: &'a Name,
    no_replace: bool,
    held: bool,
}

impl Rename<'_> {
    pub(crate) fn of(write: &MetaWrite) -> Option<Rename<'_>> {
        match write {
            MetaWrite::Rename {
                source_parent,
                source_name,
                target_parent,
                target_name,
                no_replace,
                held,
            } => Some(Rename {
                source_parent: *source_parent,
                source_name,
                target_parent: *target_parent,
                target_name,
                no_replace: *no_replace,
                held: *held,
            }),
            _ => None,
        }
    }

    fn source(&self) -> (InodeId, Name) {
        (self.source_parent, self.source_name.clone())
    }

    fn target(&self) -> (InodeId, Name) {
        (self.target_parent, self.target_name.clone())
    }
}

impl Partition {
    pub(crate) fn plan_rename(
        &self,
        context: Context<'_>,
        rename: Rename<'_>,
    ) -> Result<Plan, MetaError> {
        let directory = self.directory(rename.target_parent)?;
        self.check_unlocked(rename.target_parent, rename.target_name, context.operation)?;
        let Some(moved) = self.source_of(context, rename)? else {
            let name = rename.source_name.clone();
            let step = Step::PrepareTake { parent: rename.source_parent, name };
            return Ok(Plan::Prepare(rename.source_parent.slot(), step));
        };
        let replaced = self.tables.dentries.get(&rename.target());
        if replaced.is_some() && rename.no_replace {
            return Err(MetaError::Exists);
        }
        if moved.kind == FileKind::Directory {
            if self.is_below(rename.target_parent, moved.inode) {
                return Err(MetaError::Loop);
            }
            if rename.source_parent != rename.target_parent && directory.link_count == u32::MAX {
                return Err(MetaError::TooManyLinks);
            }
        }
        match replaced {
            None => Ok(Plan::Commit),
            Some(replaced) if replaced.inode == moved.inode => Ok(Plan::Nothing(MetaAnswer::Done)),
            Some(replaced) => self.plan_replace(context, rename, moved, replaced),
        }
    }

    /// What is to be moved; `None` if another partition must be asked first.
    fn source_of(
        &self,
        context: Context<'_>,
        rename: Rename<'_>,
    ) -> Result<Option<Dentry>, MetaError> {
        if self.owns(rename.source_parent) {
            self.directory(rename.source_parent)?;
            self.check_unlocked(rename.source_parent, rename.source_name, context.operation)?;
            let dentry = self.tables.dentries.get(&rename.source());
            return dentry.ok_or(MetaError::NotFound).map(Some);
        }
        match context.prepared.first() {
            None => Ok(None),
            Some(StepOutcome::Taken { inode, kind }) => {
                Ok(Some(Dentry { inode: *inode, kind: *kind }))
            }
            Some(_) => Err(BAD_OUTCOME),
        }
    }

    fn plan_replace(
        &self,
        context: Context<'_>,
        rename: Rename<'_>,
        moved: Dentry,
        replaced: Dentry,
    ) -> Result<Plan, MetaError> {
        let is_directory = |dentry: Dentry| dentry.kind == FileKind::Directory;
        match (is_directory(moved), is_directory(replaced)) {
            (true, false) => return Err(MetaError::NotDirectory),
            (false, true) => return Err(MetaError::IsDirectory),
            _ => {}
        }
        let asked = if self.owns(rename.source_parent) { 0 } else { 1 };
        let slot = replaced.inode.slot();
        match (self.owns(replaced.inode), is_directory(replaced)) {
            (true, true) => {
                self.check_removable(replaced.inode, context.operation).map(|()| Plan::Commit)
            }
            (true, false) => Ok(Plan::Commit),
            (false, _) if context.prepared.len() > asked => Ok(Plan::Commit),
            (false, true) => {
                Ok(Plan::Prepare(slot, Step::PrepareRemoveDirectory { inode: replaced.inode }))
            }
            (false, false) => {
                let held = rename.held.then_some(context.request.id.session);
                Ok(Plan::Prepare(slot, Step::DropLink { inode: replaced.inode, held }))
            }
        }
    }

    pub(crate) fn commit_rename(&mut self, context: Context<'_>, rename: Rename<'_>) -> MetaReply {
        let now = context.request.now;
        let moved = self.source_of(context, rename)?.ok_or(BAD_OUTCOME)?;
        if let Some(replaced) = self.tables.dentries.get(&rename.target()) {
            self.remove_dentry(&rename.target(), replaced.kind, now);
            if !self.owns(replaced.inode) {
                // Its own partition has prepared for this.
            } else if replaced.kind == FileKind::Directory {
                self.delete_inode(replaced.inode);
            } else {
                let held = rename.held.then_some(context.request.id.session);
                self.drop_link(replaced.inode, held, now);
            }
        }
        if self.owns(rename.source_parent) {
            self.remove_dentry(&rename.source(), moved.kind, now);
        }
        self.add_dentry(&rename.target(), moved, now);
        self.moved(moved, rename.target_parent, now);
        Ok(MetaAnswer::Done)
    }
}
