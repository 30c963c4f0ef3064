//! close, fsync, and writes that return from the disks.

use std::sync::Arc;

use milpa_types::InodeId;

use super::content::Scope;
use super::{FileState, Io};
use crate::error::FsError;
use crate::flights::detach;
use crate::handle::HandleId;
use crate::inner::Inner;

impl Inner {
    /// close(2): everything sent and published, no disk flushed.
    pub(crate) async fn flush(self: &Arc<Self>, handle: HandleId) -> Result<(), FsError> {
        let handle = self.files.handle(handle)?;
        let must = handle.flags.write && handle.file.shared().content.is_dirty();
        let mut settled = Ok(());
        if must {
            let (inner, file) = (Arc::clone(self), Arc::clone(&handle.file));
            settled = detach(&self.core.runtime, async move {
                let mut io = Arc::clone(&file.io).lock_owned().await;
                inner.settle(&file, &mut io).await
            })
            .await;
        }
        handle.untold_failure().map_or(settled, Err)
    }

    /// fsync(2) on a handle.
    pub(crate) async fn fsync(self: &Arc<Self>, handle: HandleId) -> Result<(), FsError> {
        let handle = self.files.handle(handle)?;
        let synced = self.fsync_file(&handle.file).await;
        // What this call reports is not to be reported again.
        let earlier = handle.untold_failure();
        synced.and(earlier.map_or(Ok(()), Err))
    }

    /// fsync(2) by inode. Without a state here the layout tells what may not be on disk.
    pub(crate) async fn fsync_inode(self: &Arc<Self>, inode: InodeId) -> Result<(), FsError> {
        if let Some(file) = self.files.get(inode) {
            return self.fsync_file(&file).await;
        }
        let (attributes, content) = self.fetch_layout(inode).await?;
        let content = super::content::Content::new(attributes, content)?;
        if !self.flushes_disks() {
            return Ok(());
        }
        self.data.flush(content.unflushed()).await
    }

    async fn fsync_file(self: &Arc<Self>, file: &Arc<FileState>) -> Result<(), FsError> {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        detach(&self.core.runtime, async move {
            let mut io = Arc::clone(&file.io).lock_owned().await;
            inner.push(&file, &mut io, Scope::All, false).await?;
            inner.make_durable(&file, &mut io).await
        })
        .await
    }

    /// A write that must be on disk when it returns.
    pub(crate) async fn sync_write(self: &Arc<Self>, file: &Arc<FileState>) -> Result<(), FsError> {
        let mut io = Arc::clone(&file.io).lock_owned().await;
        self.push(file, &mut io, Scope::All, self.flushes_disks()).await?;
        self.make_durable(file, &mut io).await
    }

    /// Has all members flush what they may not have on disk, and publishes, both at once.
    async fn make_durable(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        _io: &mut Io,
    ) -> Result<(), FsError> {
        if !self.flushes_disks() {
            return self.publish(file).await;
        }
        let unflushed = file.shared().content.unflushed();
        let (flushed, published) =
            tokio::join!(self.data.flush(unflushed.clone()), self.publish(file));
        if let Err(error) = &flushed {
            file.shared().failed(error);
        } else {
            file.shared().content.flushed(unflushed);
        }
        flushed.and(published)
    }
}
