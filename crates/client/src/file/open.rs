//! Open and release.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use milpa_types::{AttributeChanges, Attributes, FileKind, InodeId, MetaError, Segment};
use milpa_wire::meta::{Content as WireContent, MetaAnswer, MetaRead, MetaWrite};
use tokio::time::Instant;

use super::content::Content;
use super::staleness::Asked;
use super::under_way::UnderWay;
use super::{FileState, Handle, Io};
use crate::call::Call;
use crate::core::{Retry, lock};
use crate::error::FsError;
use crate::handle::{HandleId, OpenFile, OpenFlags};
use crate::inner::Inner;
use crate::segments::SegmentMap;

/// Deleted files that are let go at once after an outage.
const RELEASES_MAX: usize = 64;

/// Files of more segments are asked for again.
const KEPT_SEGMENTS_MAX: usize = 256;

/// What is kept of a closed file: the content map of one version.
#[derive(Clone)]
pub(crate) struct KeptLayout {
    version: u64,
    segments: SegmentMap,
    inline: Option<bytes::Bytes>,
}

/// What an open found out.
enum Found {
    /// The content is still the one that is known here.
    Unchanged(Attributes),
    /// The content as the servers have it.
    Fresh(Attributes, WireContent),
}

/// The content of a file that was just made, or truncated: it need not be asked for.
pub(crate) fn empty() -> WireContent {
    WireContent::Segments(Vec::new())
}

impl Inner {
    /// Opens an existing file. Asks its partition what the content is now (close-to-open): by
    /// version only, if the layout of some version is known here.
    pub(crate) async fn open(
        self: &Arc<Self>,
        inode: InodeId,
        flags: OpenFlags,
    ) -> Result<OpenFile, FsError> {
        let _under_way = UnderWay::open(self, inode).await;
        if flags.truncate {
            let attributes = self.truncate_for_open(inode, flags.clear_set_id).await?;
            return self.open_fresh(inode, flags, attributes, empty(), Instant::now());
        }
        let asked = Instant::now();
        let (attributes, content) = match self.fetch(inode).await? {
            Found::Fresh(attributes, content) => (attributes, content),
            Found::Unchanged(attributes) => {
                match self.open_found(inode, flags, attributes, None, asked)? {
                    Some(opened) => return Ok(opened),
                    // Its last close came in between, and of this file no layout is kept.
                    None => self.fetch_layout(inode).await?,
                }
            }
        };
        self.open_fresh(inode, flags, attributes, content, asked)
    }

    /// Before there is a handle: who is killed meanwhile would leave it behind. In any case: times and set-id
    /// bits change with a file that is empty already, too.
    async fn truncate_for_open(
        self: &Arc<Self>,
        inode: InodeId,
        clear_set_id: bool,
    ) -> Result<Attributes, FsError> {
        let changes =
            AttributeChanges { size: Some(0), clear_set_id, ..AttributeChanges::default() };
        self.setattr(inode, changes).await
    }

    /// Attributes, and the content unless the version that is known here is still the newest.
    async fn fetch(&self, inode: InodeId) -> Result<Found, FsError> {
        let asked = Instant::now();
        if let Some(version) = self.known_version(inode) {
            let read = MetaRead::GetAttributes { inode };
            let answer = self.meta.read(inode, read).await.map_err(|e| self.by_inode(inode, e))?;
            let MetaAnswer::Attributes(attributes) = answer else {
                return Err(FsError::Broken("getattr"));
            };
            self.attributes.put(inode, attributes, asked);
            if attributes.content_version == version {
                return Ok(Found::Unchanged(attributes));
            }
        }
        let (attributes, content) = self.fetch_layout(inode).await?;
        Ok(Found::Fresh(attributes, content))
    }

    pub(crate) async fn fetch_layout(
        &self,
        inode: InodeId,
    ) -> Result<(Attributes, WireContent), FsError> {
        let mut retry = Retry::new(&self.core, "get_layout");
        loop {
            let asked = Instant::now();
            if let Some((attributes, content)) = self.fetch_layout_once(inode).await? {
                self.attributes.put(inode, attributes, asked);
                return Ok((attributes, content));
            }
            retry.note("the file was changed while its map was read");
            retry.pause().await?;
        }
    }

    /// One part after the other; `None` if the content was changed meanwhile.
    async fn fetch_layout_once(
        &self,
        inode: InodeId,
    ) -> Result<Option<(Attributes, WireContent)>, FsError> {
        let (mut segments, mut from, mut version) = (Vec::new(), 0, None);
        loop {
            let read = MetaRead::GetLayout { inode, from };
            let answer = self.meta.read(inode, read).await.map_err(|e| self.by_inode(inode, e))?;
            let MetaAnswer::Layout { attributes, content, end } = answer else {
                return Err(FsError::Broken("get_layout"));
            };
            if *version.get_or_insert(attributes.content_version) != attributes.content_version {
                return Ok(None);
            }
            let WireContent::Segments(part) = content else {
                return Ok(Some((attributes, content)));
            };
            segments.extend(part);
            if end {
                return Ok(Some((attributes, WireContent::Segments(segments))));
            }
            match segments.last().map(Segment::end).filter(|end| *end > from) {
                Some(end) => from = end,
                None => return Err(FsError::Broken("get_layout")),
            }
        }
    }

    fn known_version(&self, inode: InodeId) -> Option<u64> {
        match self.files.get(inode) {
            Some(file) => file.shared().content.version(),
            None => lock(&self.layouts).get(&inode).map(|kept| kept.version),
        }
    }

    /// Makes a handle of what the servers have, which was asked for at `asked`.
    pub(crate) fn open_fresh(
        &self,
        inode: InodeId,
        flags: OpenFlags,
        attributes: Attributes,
        content: WireContent,
        asked: Instant,
    ) -> Result<OpenFile, FsError> {
        let opened = self.open_found(inode, flags, attributes, Some(content), asked)?;
        opened.ok_or(FsError::Broken("open"))
    }

    /// The same; without `content` of what is known here, `None` if that went away meanwhile.
    fn open_found(
        &self,
        inode: InodeId,
        flags: OpenFlags,
        attributes: Attributes,
        content: Option<WireContent>,
        asked: Instant,
    ) -> Result<Option<OpenFile>, FsError> {
        match attributes.kind {
            FileKind::File => {}
            FileKind::Directory => return Err(MetaError::IsDirectory.into()),
            _ => return Err(FsError::Invalid("only files are opened here")),
        }
        let generation = self.meta.sessions.current().1;
        let mut broken = None;
        let make = || match content.clone() {
            Some(content) => Content::new(attributes, content).map_err(|e| broken = Some(e)).ok(),
            None => {
                let kept = lock(&self.layouts).get(&inode)?;
                let same = kept.version == attributes.content_version;
                same.then(|| Content::from_parts(attributes, kept.segments, kept.inline))
            }
        };
        let Some(file) = self.files.attach(inode, generation, make) else {
            return broken.map_or(Ok(None), Err);
        };
        let mut shared = file.shared();
        if let Some(content) = content
            && shared.content.version() != Some(attributes.content_version)
            && let Err(error) = shared.content.refresh(attributes, content, Asked::default())
        {
            drop(shared);
            self.files.detach(&file);
            return Err(error);
        }
        // While it was not open here, its truncation through the path had nobody to tell: it notes that it is done, and
        // looks who has it open then. Who opens does both in the other order.
        shared.content.becomes_stale_if(!self.attributes.is_unchanged(&inode, asked));
        let mut attributes = attributes;
        shared.content.overlay(&mut attributes);
        self.tell_outgrown(&mut shared.content);
        drop(shared);
        let handle = self.files.next_handle();
        let drop = self.pages.opened(inode, attributes.content_version, handle);
        self.files.add_handle(handle, file, flags, generation, drop);
        Ok(Some(OpenFile { handle, attributes, keep_cache: drop.is_none() }))
    }

    /// What is known here of a file that was opened under an expired session may be nobody's any more: bytes that
    /// were not published never will be, and one that was deleted is not held.
    pub(crate) fn check_generation(&self, handle: &Handle) -> Result<(), FsError> {
        match handle.generation == self.meta.sessions.current().1 {
            true => Ok(()),
            false => Err(FsError::Stale("our session expired after the file was opened")),
        }
    }

    /// The user's program came back from open(2).
    pub(crate) fn note_use(&self, handle: &Handle) {
        if let Some(drop) = handle.drop
            && !handle.is_dropped.load(Ordering::Relaxed)
        {
            handle.is_dropped.store(true, Ordering::Relaxed);
            self.pages.dropped(handle.file.inode, drop);
        }
    }

    /// The kernel is to forget what others have changed: before it hears of a size, as it keeps zeros behind the end
    /// that it knows.
    pub(crate) fn tell_outgrown(&self, content: &mut Content) {
        if let Some(from) = content.take_outgrown() {
            self.pages.are_stale_from(content.attributes.inode, from);
        }
    }

    /// Our own change made this version.
    pub(crate) fn advance_pages(&self, inode: InodeId, before: u64, version: u64) {
        self.pages.advance(inode, before, version);
    }

    /// Drops a handle; the last one sends, publishes and lets go in the background.
    pub(crate) fn release(self: &Arc<Self>, handle: HandleId) -> Result<(), FsError> {
        let handle = self.files.remove_handle(handle)?;
        self.note_use(&handle);
        if self.files.detach(&handle.file) {
            let (inner, file) = (Arc::clone(self), Arc::clone(&handle.file));
            let (held, dirty) = {
                let shared = file.shared();
                (shared.held, shared.content.is_dirty())
            };
            if held || dirty {
                drop(self.core.runtime.spawn(async move { inner.close_out(file).await }));
            } else {
                self.retire(&file);
            }
        }
        Ok(())
    }

    /// After the last close: everything to the servers, or given up with a word in the log.
    pub(crate) async fn close_out(self: &Arc<Self>, file: Arc<FileState>) {
        let mut io = Arc::clone(&file.io).lock_owned().await;
        let settled = Call::run(self.settle(&file, &mut io)).await;
        if file.shared().handles > 0 {
            return;
        }
        if let Err(error) = settled {
            let lost = self.give_up_buffer(&file, &error);
            tracing::error!(
                inode = %file.inode, %error, lost_bytes = lost,
                "bytes that were written and never synced could not be saved; they are lost"
            );
        }
        let held = std::mem::take(&mut file.shared().held);
        if held {
            self.let_go(file.inode).await;
        }
        self.drop_extent(&mut io);
        drop(io);
        self.retire(&file);
    }

    /// A deleted file that the servers kept for us may go, unless it is in use again. Without an answer they are told
    /// again later: they keep it for as long as this client lives.
    pub(super) async fn let_go(&self, inode: InodeId) {
        let Some(mut release) = self.files.begin_release(inode) else { return };
        let told = self.meta.write(inode, MetaWrite::Release { inode }).await;
        if let Err(error) = &told {
            tracing::debug!(%inode, %error, "a deleted file could not be let go");
        }
        release.is_to_repeat = told.is_err_and(|error| error.may_pass());
    }

    /// Forgets a file that nobody has open. One that was appended to is kept for a while, so that
    /// a program that opens, appends and closes goes on in the same extent, and one that has lost bytes, so that
    /// who opens it only to sync it is told.
    fn retire(&self, file: &Arc<FileState>) {
        let has_extent = file.io.try_lock().map_or(true, |io| io.extent.is_some());
        let is_owed = file.shared().failures.is_owed();
        if !has_extent && !is_owed {
            self.forget_file(file);
        }
    }

    /// Moves the content map to the kept layouts and drops the state.
    pub(crate) fn forget_file(&self, file: &Arc<FileState>) {
        let kept = {
            let shared = file.shared();
            let version = shared.content.attributes.content_version;
            let parts = shared.content.parts(KEPT_SEGMENTS_MAX);
            parts.map(|(segments, inline)| KeptLayout { version, segments, inline })
        };
        if self.files.forget(file) {
            if let Some(kept) = kept {
                lock(&self.layouts).insert(file.inode, kept);
            }
            if let Ok(mut io) = file.io.try_lock() {
                self.drop_extent(&mut io);
            }
        }
    }

    /// Closes the extent that the file was appended to.
    pub(crate) fn drop_extent(&self, io: &mut Io) {
        if let Some((extent, _)) = io.extent.take() {
            self.data.close_extent(extent);
        }
    }

    /// Lets go of deleted files that could not be let go before, some of them each time.
    pub(crate) fn let_go_again(self: &Arc<Self>) {
        for _ in 0..RELEASES_MAX {
            let Some(inode) = lock(&self.files.unreleased).pop_first() else { return };
            let inner = Arc::clone(self);
            drop(self.core.runtime.spawn(async move { inner.let_go(inode).await }));
        }
    }

    /// Forgets files that were closed a while ago.
    pub(crate) fn forget_idle(&self, age: std::time::Duration) {
        for file in self.files.all() {
            let idle = file.shared().idle_since;
            if idle.is_some_and(|since| since.elapsed() >= age) {
                self.forget_file(&file);
            }
        }
    }
}
