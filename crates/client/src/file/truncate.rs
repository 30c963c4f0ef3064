//! setattr(2) of files, truncation among it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use milpa_types::{AttributeChanges, Attributes, InodeId};
use milpa_wire::meta::{MetaAnswer, MetaWrite};

use super::FileState;
use super::content::FILE_BYTES_MAX;
use crate::core::lock;
use crate::error::FsError;
use crate::flights::detach;
use crate::handle::HandleId;
use crate::inner::Inner;

/// A truncation whose caller may be gone before it is answered: the kernel's pages are as they were then.
struct Unheard {
    inner: Arc<Inner>,
    inode: InodeId,
    is_gone: Arc<AtomicBool>,
    is_heard: bool,
}

impl Drop for Unheard {
    fn drop(&mut self) {
        if !self.is_heard {
            // First the word for who may note just now that the pages are of the new version.
            self.is_gone.store(true, Ordering::SeqCst);
            self.inner.pages.are_stale(self.inode);
        }
    }
}

impl Inner {
    /// Changes attributes. What is buffered of the file is taken into account: a truncation cuts it
    /// exactly, and times or modes set now are not undone by bytes that were written before.
    pub(crate) async fn setattr(
        self: &Arc<Self>,
        inode: InodeId,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        self.setattr_under(None, inode, changes).await
    }

    /// The same through an open file, under the session of its open only: as for a write, what is known through it may
    /// be nobody's any more, and others have gone on.
    pub(crate) async fn setattr_through(
        self: &Arc<Self>,
        handle: HandleId,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        let handle = self.files.handle(handle)?;
        self.check_generation(&handle)?;
        self.setattr_under(Some(handle.generation), handle.file.inode, changes).await
    }

    async fn setattr_under(
        self: &Arc<Self>,
        generation: Option<u64>,
        inode: InodeId,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        if changes.size.is_some_and(|size| size > FILE_BYTES_MAX) {
            return Err(FsError::TooLarge);
        }
        let (inner, is_gone) = (Arc::clone(self), Arc::new(AtomicBool::new(false)));
        let is_heard = changes.size.is_none();
        let mut unheard =
            Unheard { inner: Arc::clone(self), inode, is_gone: Arc::clone(&is_gone), is_heard };
        let file = self.files.get(inode);
        let changed = detach(&self.core.runtime, async move {
            let changed = match file {
                Some(file) => inner.setattr_of_open(&file, generation, changes).await,
                None => inner.setattr_of_closed(inode, generation, changes).await,
            };
            if is_gone.load(Ordering::SeqCst) {
                inner.pages.are_stale(inode);
            }
            changed
        })
        .await;
        unheard.is_heard |= changed.is_ok();
        changed
    }

    async fn setattr_of_closed(
        &self,
        inode: InodeId,
        generation: Option<u64>,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        if changes.size.is_some() {
            lock(&self.layouts).remove(&inode);
        }
        let (attributes, before) = self.send_setattr(inode, generation, changes).await?;
        if let Some(file) = self.files.get(inode) {
            let content = &mut file.shared().content;
            // It was opened meanwhile, and what it holds may be asked for before.
            content.becomes_stale_if(content.version() != Some(attributes.content_version));
        }
        self.advance_pages(inode, before, attributes.content_version);
        Ok(attributes)
    }

    async fn setattr_of_open(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        generation: Option<u64>,
        changes: AttributeChanges,
    ) -> Result<Attributes, FsError> {
        let mut io = self.turn(file).await?;
        self.settle_doubt(file).await?;
        // A later publish would set the time of the last write, and clear set-id bits.
        let sets_others = changes.mode.is_some()
            || changes.uid.is_some()
            || changes.gid.is_some()
            || changes.modified.is_some();
        if sets_others && file.shared().content.is_dirty() {
            self.settle(file, &mut io).await?;
        }
        file.shared().is_truncating = changes.size.is_some();
        let sent = self.send_setattr(file.inode, generation, changes).await;
        let mut shared = file.shared();
        shared.is_truncating = false;
        file.truncated.notify_waiters();
        // Without an answer it may have been cut all the same.
        shared.content.becomes_stale_if(sent.is_err() && changes.size.is_some());
        let (mut attributes, before) = sent?;
        let released = match changes.size {
            Some(size) => shared.content.truncated(size, attributes, before),
            None => {
                shared.content.learn(attributes, before);
                0
            }
        };
        shared.content.overlay(&mut attributes);
        shared.settle_age();
        drop(shared);
        self.budget.give(released);
        self.advance_pages(file.inode, before, attributes.content_version);
        Ok(attributes)
    }

    /// Gives the attributes, and the content version that the change found.
    async fn send_setattr(
        &self,
        inode: InodeId,
        generation: Option<u64>,
        changes: AttributeChanges,
    ) -> Result<(Attributes, u64), FsError> {
        self.attributes.forget(&inode);
        let write = MetaWrite::SetAttributes { inode, changes };
        let sent = self.meta.write_under(generation, inode, write, &mut None).await;
        let answer = sent.map_err(|e| self.by_inode(inode, e))?;
        let MetaAnswer::Changed { attributes, before } = answer else {
            return Err(FsError::Broken("setattr"));
        };
        self.attributes.put_own(inode, attributes);
        Ok((attributes, before))
    }
}
