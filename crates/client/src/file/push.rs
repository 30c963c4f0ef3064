//! From the buffer to the data nodes, and from there into the file.

use std::sync::Arc;

use milpa_types::{DataError, MetaError, SessionId};
use milpa_wire::meta::{MetaAnswer, MetaWrite, Publish};
use tokio::time::Instant;

use super::content::{Placing, Push, Scope};
use super::{FileState, InDoubt, Io};
use crate::core::Retry;
use crate::data::append::{AppendFor, Packet};
use crate::error::FsError;
use crate::inner::Inner;
use crate::session::Ticket;

/// How often a push starts over because the file's bytes were deleted meanwhile.
const RELOADS_MAX: u32 = 3;
/// Changes by others that a publish is redone for.
pub(super) const REDOS_MAX: u32 = 16;

/// How far a publish came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Published {
    /// Everything that was pushed is part of the file.
    All,
    /// Somebody else changed the content that ours was to replace as a whole: push again, which
    /// loads theirs and lays ours over it, and publish that.
    Behind,
}

/// What became of one publish.
enum Outcome {
    Applied,
    /// As [`Published::Behind`].
    Behind,
    /// It would have replaced bytes that may have been synced by some that are not.
    Unflushed,
}

impl Inner {
    /// Pushes and publishes everything that was written before.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        io: &mut Io,
    ) -> Result<(), FsError> {
        for _ in 0..REDOS_MAX {
            let began = Instant::now();
            self.push(file, io, Scope::All, false).await?;
            if self.publish(file).await? == Published::All {
                file.shared().published_until(began);
                return Ok(());
            }
        }
        Err(FsError::Meta(MetaError::Busy))
    }

    /// Sends buffered bytes to data nodes. True if there were any. A failure is remembered for every
    /// handle; what may still succeed stays in the buffer.
    pub(crate) async fn push(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        io: &mut Io,
        scope: Scope,
        sync: bool,
    ) -> Result<bool, FsError> {
        let may_append = {
            let content = &file.shared().content;
            content.is_dirty() || content.is_stale()
        };
        let current = match may_append {
            true => self.meta.session_for(file.inode).await,
            false => Ok(self.meta.sessions.current()),
        };
        let (session, generation) = current.inspect_err(|error| self.send_failed(file, error))?;
        self.check_session(file, io, session, generation)?;
        self.settle_doubt(file).await?;
        let inline_bytes_max = self.inline_bytes_max();
        let (mut reloads, mut placing) = (0, Placing::InPlace);
        let mut retry = Retry::new(&self.core, "overwrite");
        let result = loop {
            if file.shared().content.is_stale() {
                self.reload_for_push(file).await?;
            }
            let push = file.shared().content.begin_push(scope, placing, inline_bytes_max);
            let Some(push) = push else { return Ok(reloads > 0) };
            let is_over_others = !push.replacements.is_empty();
            match self.send(file, io, push, session, sync).await {
                // Where the bytes lie there is no room to log what replaces them, or nobody could read it, as the rest of
                // its block is lost; elsewhere it may be.
                Err(FsError::Data(DataError::NoSpace | DataError::Corrupt { .. }))
                    if is_over_others =>
                {
                    placing = Placing::Anew;
                    let released = file.shared().content.push_failed();
                    self.budget.give(released);
                }
                // Truncated or replaced by somebody, who had the bytes deleted that these were to
                // lie on: as the file is now, they go elsewhere.
                Err(FsError::Data(DataError::NoExtent)) if reloads < RELOADS_MAX => {
                    reloads += 1;
                    self.push_as_loaded_anew(file);
                }
                // On no member yet, or on none any more.
                Err(FsError::Data(DataError::NotHere)) => {
                    retry.note(DataError::NotHere);
                    match retry.pause().await {
                        Ok(()) => self.push_as_loaded_anew(file),
                        Err(gave_up) => break Err(gave_up),
                    }
                }
                result => break result,
            }
        };
        if let Err(error) = &result {
            self.send_failed(file, error);
            if !error.may_pass() {
                // Its own failure is remembered too; this one is what the caller is told.
                let _ = self.publish(file).await;
            }
        }
        result.map(|()| true)
    }

    /// The next push goes by the file as it is then.
    fn push_as_loaded_anew(&self, file: &FileState) {
        let mut shared = file.shared();
        let released = shared.content.push_failed();
        shared.content.becomes_stale();
        drop(shared);
        self.budget.give(released);
    }

    async fn send(
        &self,
        file: &FileState,
        io: &mut Io,
        push: Push,
        session: SessionId,
        sync: bool,
    ) -> Result<(), FsError> {
        let Push { appends, replacements } = push;
        let total: u64 = appends.iter().map(|(_, data)| data.len() as u64).sum();
        let small = !io.has_piece && io.extent.is_none() && total <= self.small_file_bytes_max();
        io.has_piece |= small && !appends.is_empty();
        let one_packet = appends.len() == 1;
        // The disks flush once for all packets, at the end, unless there is just one.
        let sync_appends = sync && one_packet;
        let purpose = AppendFor { inode: file.inode, session, sync: sync_appends, small };
        let packets = appends.into_iter().map(|(at, data)| Packet::new(at, data)).collect();
        let mut open = io.extent.take().map(|(extent, _)| extent);
        let mut appended = |done| {
            let mut shared = file.shared();
            shared.progress += 1;
            let released = shared.content.appended(done, sync_appends);
            drop(shared);
            self.budget.give(released);
        };
        let mut replaced = |done: &_| {
            let mut shared = file.shared();
            shared.progress += 1;
            let released = shared.content.overwrote(done);
            drop(shared);
            self.budget.give(released);
        };
        let (appended, replaced) = tokio::join!(
            self.data.append(purpose, packets, &mut open, &mut appended),
            self.data.overwrite(replacements, &mut replaced),
        );
        io.extent = open.map(|extent| (extent, session));
        appended.and(replaced)
    }

    /// Makes everything that was pushed part of the file. Call after a push of all.
    pub(crate) async fn publish(
        self: &Arc<Self>,
        file: &Arc<FileState>,
    ) -> Result<Published, FsError> {
        debug_assert!(!file.is_in_doubt(), "a push finds out first");
        let inline_bytes_max = self.inline_bytes_max();
        // The inode's partition keeps these bytes in synced logs, and lets them go with the publish.
        let mut may_replace = file.shared().content.leaves_inode();
        if may_replace && !self.flush_before_publish(file).await? {
            return Ok(Published::Behind);
        }
        loop {
            let begun = {
                let content = &mut file.shared().content;
                if content.is_behind(inline_bytes_max) {
                    return Ok(Published::Behind);
                }
                content.begin_publish(inline_bytes_max, may_replace)
            };
            let Some(publish) = begun else { break };
            match self.publish_one(file, publish, None).await? {
                Outcome::Applied => {}
                Outcome::Behind => return Ok(Published::Behind),
                Outcome::Unflushed if may_replace => return Err(FsError::Broken("publish")),
                Outcome::Unflushed => {
                    if !self.flush_before_publish(file).await? {
                        return Ok(Published::Behind);
                    }
                    may_replace = true;
                    continue;
                }
            }
            // What was written meanwhile is for the next push, not for this loop.
            if !file.shared().content.has_unpublished() {
                break;
            }
        }
        file.shared().settle_age();
        Ok(Published::All)
    }

    /// False if bytes were deleted meanwhile that the file no longer has, as it is loaded now.
    async fn flush_before_publish(&self, file: &FileState) -> Result<bool, FsError> {
        let flushed = match self.flush_content(file).await {
            Err(FsError::Data(DataError::NoExtent)) => {
                self.reload_for_push(file).await?;
                if self.gone_extents(file).await.is_empty() {
                    return Ok(false);
                }
                Err(DataError::Lost { length: 0 }.into())
            }
            flushed => flushed.map(|()| true),
        };
        flushed.inspect_err(|error| self.push_failed(file, error))
    }

    /// Finds out what became of a publish whose answer never came. Call with the file's `io` locked, before
    /// anything else of it is sent.
    pub(super) async fn settle_doubt(
        self: &Arc<Self>,
        file: &Arc<FileState>,
    ) -> Result<(), FsError> {
        let in_doubt = file.shared().in_doubt.take();
        let Some(InDoubt { publish, ticket }) = in_doubt else { return Ok(()) };
        // What it was not applied for, the next one finds out as well.
        self.publish_one(file, publish, Some(ticket)).await.map(|_| ())
    }

    /// `ticket` is that of the same publish, if it was sent before.
    async fn publish_one(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        mut publish: Publish,
        mut ticket: Option<Ticket>,
    ) -> Result<Outcome, FsError> {
        let is_late = ticket.is_some();
        match self.send_publish(file, &mut publish, &mut ticket).await {
            Ok((attributes, before)) => {
                let mut shared = file.shared();
                let released = shared.content.published(publish, attributes, before);
                // The answer is perhaps of a time before others' changes.
                shared.content.becomes_stale_if(is_late);
                self.tell_outgrown(&mut shared.content);
                shared.progress += 1;
                shared.settle_age();
                drop(shared);
                self.budget.give(released);
                if is_late {
                    self.attributes.forget(&file.inode);
                } else {
                    self.attributes.put(file.inode, attributes, Instant::now());
                }
                self.advance_pages(file.inode, before, attributes.content_version);
                Ok(Outcome::Applied)
            }
            Err(FsError::Meta(MetaError::StaleContent { .. })) => {
                let released = file.shared().content.publish_was_behind(&publish);
                self.budget.give(released);
                Ok(Outcome::Behind)
            }
            Err(FsError::Meta(MetaError::ReplacesBytes)) => {
                let released = file.shared().content.publish_failed(&publish);
                self.budget.give(released);
                Ok(Outcome::Unflushed)
            }
            Err(error) => {
                match ticket {
                    Some(ticket) => {
                        let mut shared = file.shared();
                        shared.failures.failed(&error);
                        shared.in_doubt = Some(InDoubt { publish, ticket });
                    }
                    None => {
                        let released = file.shared().content.publish_failed(&publish);
                        self.budget.give(released);
                        self.push_failed(file, &error);
                    }
                }
                Err(error)
            }
        }
    }

    /// Gives the attributes, and the content version that the publish found.
    async fn send_publish(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        publish: &mut Publish,
        ticket: &mut Option<Ticket>,
    ) -> Result<(milpa_types::Attributes, u64), FsError> {
        let generation = Some(file.shared().generation);
        for _ in 0..REDOS_MAX {
            let write = MetaWrite::Publish(publish.clone());
            match self.meta.write_under(generation, file.inode, write, ticket).await {
                Ok(MetaAnswer::Changed { attributes, before }) => return Ok((attributes, before)),
                Ok(_) => return Err(FsError::Broken("publish")),
                // Somebody else truncated: our bytes come after that.
                Err(FsError::Meta(MetaError::StaleTruncation { current })) => {
                    publish.truncation = current;
                    file.shared().content.becomes_stale();
                }
                Err(error) => return Err(error.by_inode()),
            }
        }
        Err(FsError::Meta(MetaError::Busy))
    }

    /// After data nodes did not take all: bytes that they may still take go back to the buffer,
    /// others are dropped; every handle will be told.
    fn send_failed(&self, file: &FileState, error: &FsError) {
        let mut shared = file.shared();
        let released = if error.may_pass() {
            shared.failures.failed(error);
            shared.content.push_failed()
        } else {
            shared.failures.lost(error);
            self.pages.are_stale(file.inode);
            shared.content.discard_unsent()
        };
        drop(shared);
        self.budget.give(released);
    }

    /// After a failure: bytes that may still be saved go back to the buffer, others are dropped;
    /// every handle will be told.
    fn push_failed(&self, file: &FileState, error: &FsError) {
        if !error.may_pass() {
            self.give_up_buffer(file, error);
            return;
        }
        let mut shared = file.shared();
        shared.failures.failed(error);
        let released = shared.content.push_failed();
        shared.settle_age();
        drop(shared);
        self.budget.give(released);
    }

    /// Drops what is not published; every handle will be told. Gives how many bytes that were.
    pub(crate) fn give_up_buffer(&self, file: &FileState, error: &FsError) -> u64 {
        let mut shared = file.shared();
        shared.failures.lost(error);
        self.pages.are_stale(file.inode);
        let released = shared.discard();
        shared.settle_age();
        drop(shared);
        self.budget.give(released);
        released
    }

    /// Bytes that were written under a session that expired are dropped.
    fn check_session(
        &self,
        file: &FileState,
        io: &mut Io,
        session: SessionId,
        generation: u64,
    ) -> Result<(), FsError> {
        if io.extent.as_ref().is_some_and(|(_, opened_by)| *opened_by != session) {
            io.extent = None;
        }
        let mut shared = file.shared();
        if shared.generation == generation {
            return Ok(());
        }
        shared.generation = generation;
        let dirty = shared.content.is_dirty();
        drop(shared);
        if !dirty {
            return Ok(());
        }
        let error = FsError::Stale("our session expired before the bytes were saved");
        self.push_failed(file, &error);
        Err(error)
    }

    /// Of a file that was deleted nothing can be saved: it would stay in the buffer for ever. Whatever else keeps
    /// its content from being loaded may pass.
    async fn reload_for_push(&self, file: &FileState) -> Result<(), FsError> {
        self.reload(file).await.inspect_err(|error| {
            if matches!(error, FsError::Stale(_)) {
                self.push_failed(file, error);
            }
        })
    }

    /// Loads the content anew, after somebody else changed it.
    pub(crate) async fn reload(&self, file: &FileState) -> Result<(), FsError> {
        let asked = file.shared().content.asks();
        let (attributes, content) = self.fetch_layout(file.inode).await?;
        file.shared().content.refresh(attributes, content, asked)
    }
}
