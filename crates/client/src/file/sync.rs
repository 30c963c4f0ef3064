//! close, fsync, and writes that return from the disks.

use std::sync::Arc;

use milpa_types::{DataError, MetaError};

use super::content::Scope;
use super::push::{Published, REDOS_MAX};
use super::{FileState, Io};
use crate::error::FsError;
use crate::flights::detach;
use crate::handle::HandleId;
use crate::inner::Inner;

impl Inner {
    /// close(2): everything sent and published, no disk flushed. A reader's close says nothing of what
    /// writers lost: nobody looks at its result, and somebody else has to hear of it.
    pub(crate) async fn flush(self: &Arc<Self>, handle: HandleId) -> Result<(), FsError> {
        let handle = self.files.handle(handle)?;
        if !handle.flags.write {
            return Ok(());
        }
        let (began, is_dirty) = {
            let shared = handle.file.shared();
            (shared.failures.before(), shared.content.is_dirty())
        };
        let mut settled = Ok(());
        if is_dirty {
            let (inner, file) = (Arc::clone(self), Arc::clone(&handle.file));
            settled = detach(&self.core.runtime, async move {
                let mut io = inner.turn(&file).await?;
                inner.settle(&file, &mut io).await
            })
            .await;
        }
        let failure = handle.told(|told, failures| told.close(failures, began));
        failure.map_or(settled, Err)
    }

    /// fsync(2) on a handle.
    pub(crate) async fn fsync(self: &Arc<Self>, handle: HandleId) -> Result<(), FsError> {
        let handle = self.files.handle(handle)?;
        let began = handle.file.shared().failures.before();
        let synced = self.fsync_file(&handle.file).await;
        handle.synced(began, synced)
    }

    async fn fsync_file(self: &Arc<Self>, file: &Arc<FileState>) -> Result<(), FsError> {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        detach(&self.core.runtime, async move {
            let mut io = inner.turn(&file).await?;
            inner.push_durably(&file, &mut io, false).await
        })
        .await
    }

    /// A write that must be on disk when it returns.
    pub(crate) async fn sync_write(self: &Arc<Self>, file: &Arc<FileState>) -> Result<(), FsError> {
        let mut io = self.turn(file).await?;
        self.push_durably(file, &mut io, self.flushes_disks()).await
    }

    /// Sends everything, has all members flush it, and publishes.
    async fn push_durably(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        io: &mut Io,
        sync: bool,
    ) -> Result<(), FsError> {
        for _ in 0..REDOS_MAX {
            let pushed = match self.push(file, io, Scope::All, sync).await {
                Ok(_) => self.make_durable(file).await,
                Err(error) => Err(error),
            };
            match pushed {
                Ok(Published::All) => return Ok(()),
                Ok(Published::Behind) => {}
                // The caller hears of it. From then on the file is what is left of it.
                Err(FsError::Data(error @ (DataError::Lost { .. } | DataError::NoExtent))) => {
                    self.reload(file).await?;
                    match (self.cut_lost(file).await?, error) {
                        (_, lost @ DataError::Lost { .. }) => return Err(lost.into()),
                        (true, _) => {
                            let lost = FsError::from(DataError::Lost { length: 0 });
                            file.shared().failures.failed(&lost);
                            return Err(lost);
                        }
                        // Not lost: somebody else had replaced it.
                        (false, _) => {}
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(FsError::Meta(MetaError::Busy))
    }

    /// Has all members flush what they may not have on disk, and publishes, both at once. Call
    /// with the file's `io` locked, after a push of all. With `durability = memory` the members answer
    /// without a flush: they know the volume's options at any time, this client perhaps only older
    /// ones.
    async fn make_durable(self: &Arc<Self>, file: &Arc<FileState>) -> Result<Published, FsError> {
        let (flushed, published) = tokio::join!(self.flush_content(file), self.publish(file));
        match &flushed {
            // Perhaps of bytes that somebody else had replaced.
            Ok(()) | Err(FsError::Data(DataError::NoExtent)) => {}
            Err(error) => file.shared().failures.failed(error),
        }
        match (flushed, published) {
            // Who is told that an extent is gone looks whether the file still has it, and begins anew: that
            // must not hide a publish that failed, as what it was about has been given up.
            (Err(FsError::Data(DataError::NoExtent)), Err(failure)) => Err(failure),
            (flushed, published) => flushed.and(published),
        }
    }

    /// Has all members flush what was appended before and they may not have on disk.
    pub(super) async fn flush_content(&self, file: &FileState) -> Result<(), FsError> {
        let torn = self.flush_but_lost(file).await?;
        match torn.values().flatten().map(|range| range.start).min() {
            Some(length) => Err(DataError::Lost { length }.into()),
            None => Ok(()),
        }
    }
}
