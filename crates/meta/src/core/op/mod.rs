//! The operations, one file each.
//!
//! Those on names have a `plan_…`, which only reads, and a `commit_…`, which only writes (see
//! [`engine`](super::engine)). Those on one inode are done in one step.

mod attributes;
mod create;
mod cut_lost;
mod grant;
mod link;
mod publish;
mod remove_directory;
mod rename;
mod unlink;

use milpa_types::MetaError;
use milpa_wire::meta::{LostExtent, LostRange, MetaAnswer, MetaReply, MetaWrite};

use super::Partition;
use super::engine::{Context, Plan};

pub(crate) use rename::Rename;

impl Partition {
    /// What stands in the way of a change of the namespace, or what it needs.
    pub(crate) fn plan(&self, context: Context<'_>) -> Result<Plan, MetaError> {
        match &context.request.write {
            MetaWrite::Create { parent, name, inode, placement, open_existing, content } => {
                let create = create::Create {
                    parent: *parent,
                    name,
                    inode,
                    placement: *placement,
                    open_existing: *open_existing,
                    content: content.as_deref(),
                };
                self.plan_create(context, create)
            }
            MetaWrite::Link { inode, parent, name } => {
                self.plan_link(context, *inode, *parent, name)
            }
            MetaWrite::Unlink { parent, name, held } => {
                self.plan_unlink(context, *parent, name, *held)
            }
            MetaWrite::RemoveDirectory { parent, name } => {
                self.plan_remove_directory(context, *parent, name)
            }
            write => match Rename::of(write) {
                Some(rename) => self.plan_rename(context, rename),
                None => Err(MetaError::Invalid),
            },
        }
    }

    /// Makes a change whose plan said that all is ready, in the same entry.
    pub(crate) fn commit(&mut self, context: Context<'_>) -> MetaReply {
        match &context.request.write {
            MetaWrite::Create { parent, name, inode, placement, open_existing, content } => {
                let create = create::Create {
                    parent: *parent,
                    name,
                    inode,
                    placement: *placement,
                    open_existing: *open_existing,
                    content: content.as_deref(),
                };
                self.commit_create(context, create)
            }
            MetaWrite::Link { inode, parent, name } => {
                self.commit_link(context, *inode, *parent, name)
            }
            MetaWrite::Unlink { parent, name, held } => {
                self.commit_unlink(context, *parent, name, *held)
            }
            MetaWrite::RemoveDirectory { parent, name } => {
                self.commit_remove_directory(context, *parent, name)
            }
            write => match Rename::of(write) {
                Some(rename) => self.commit_rename(context, rename),
                None => Err(MetaError::Invalid),
            },
        }
    }

    /// Executes a client's change.
    pub(crate) fn execute(
        &mut self,
        index: u64,
        request: &super::engine::Request,
    ) -> super::Outcome {
        let session = request.id.session;
        super::Outcome::Reply(match &request.write {
            MetaWrite::Create { .. }
            | MetaWrite::Link { .. }
            | MetaWrite::Unlink { .. }
            | MetaWrite::RemoveDirectory { .. }
            | MetaWrite::Rename { .. } => return self.begin(index, request),
            MetaWrite::SetAttributes { inode, changes } => {
                self.set_attributes(session, *inode, changes, request.now)
            }
            MetaWrite::Publish(publish) => self.publish(session, publish, request.now),
            MetaWrite::MarkFlushed { files } => self.mark_flushed(files),
            MetaWrite::Release { inode } => self.check_owned(*inode).map(|()| {
                self.release(*inode, session);
                MetaAnswer::Done
            }),
            MetaWrite::GrantInodes { count } => self.grant_inodes(*count),
            MetaWrite::CutLost { inode, partition, extent, length } => {
                let (partition, extent, length) = (*partition, *extent, *length);
                let lost = LostExtent { partition, extent, length };
                self.cut_lost(session, *inode, vec![lost.into()], request.now)
            }
            MetaWrite::CutLostExtents { inode, lost } => {
                let lost = lost.iter().copied().map(LostRange::from).collect();
                self.cut_lost(session, *inode, lost, request.now)
            }
            MetaWrite::CutLostRanges { inode, lost } => {
                self.cut_lost(session, *inode, lost.clone(), request.now)
            }
            // Handled before, as they need no request id.
            MetaWrite::OpenSession | MetaWrite::CloseSession => Err(MetaError::Invalid),
        })
    }
}
