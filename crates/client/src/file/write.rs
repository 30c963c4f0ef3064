//! write(2): into the buffer.

use std::pin::pin;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::content::{FILE_BYTES_MAX, Scope};
use super::turn::LOOK;
use super::{FileState, Handle, Shared};
use crate::call::Call;
use crate::core::{Retry, now};
use crate::error::FsError;
use crate::flights::detach;
use crate::handle::HandleId;
use crate::inner::Inner;

/// A stream of this many bytes is sent while it is being written. Above it a file is no small one.
const STREAM_BYTES: u64 = 512 * 1024;
/// Pieces of one file beyond which they are sent…
const PIECES_SEND: usize = 4096;
/// …and beyond which writers wait for that.
const PIECES_MAX: usize = 16_384;
/// How many files are pushed when the buffer is full, the oldest first.
const PUSHES_MAX: usize = 32;

/// Where written bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    At(u64),
    /// To the file's end, wherever that is then.
    End,
    /// A page of a mapping: no program waits for it, and msync asks for its sync.
    Page(u64),
}

/// What a write has left in the buffer.
struct Buffered {
    /// One past its last byte.
    end: u64,
    /// Of the file, all that is to be sent.
    pieces: usize,
    /// It is part of a stream that is worth sending.
    is_stream: bool,
}

impl Inner {
    /// Writes, in pieces that the buffer can take. Gives where the last one ends.
    pub(crate) async fn write(
        self: &Arc<Self>,
        handle: HandleId,
        mut place: Place,
        mut data: Bytes,
        clear_set_id: bool,
    ) -> Result<u64, FsError> {
        let handle = self.files.handle(handle)?;
        if !handle.flags.write {
            return Err(FsError::BadHandle);
        }
        let is_page = matches!(place, Place::Page(_));
        let is_synced = handle.flags.sync && !is_page;
        let (began, failure) = handle.told(|told, failures| {
            let began = failures.before();
            let failure = match is_synced {
                true => told.fsync(failures, began),
                // The kernel would drop the page, which may well be saved by now.
                false if is_page => None,
                false => told.write(failures),
            };
            (began, failure)
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        self.core.stats.written_bytes.inc_by(data.len() as u64);
        let mut end = 0;
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(self.budget.piece_bytes_max()));
            end = self.write_piece(&handle, place, piece, clear_set_id).await?;
            if let Place::At(at) | Place::Page(at) = &mut place {
                *at = end;
            }
        }
        if is_synced {
            let (inner, file) = (Arc::clone(self), Arc::clone(&handle.file));
            let synced =
                detach(&self.core.runtime, async move { inner.sync_write(&file).await }).await;
            // Who sent in the background meanwhile may have had to give up these bytes.
            handle.synced(began, synced)?;
        }
        Ok(end)
    }

    async fn write_piece(
        self: &Arc<Self>,
        handle: &Handle,
        place: Place,
        data: Bytes,
        clear_set_id: bool,
    ) -> Result<u64, FsError> {
        let file = &handle.file;
        self.check_generation(handle)?;
        let length = data.len() as u32;
        let Buffered { end, pieces, is_stream } = loop {
            if place == Place::End && file.shared().content.is_stale() {
                // Others have changed where it ends.
                self.reload(file).await?;
            }
            if !self.budget.try_take(length) {
                self.wait_for_room(length).await?;
            }
            {
                let shared = file.shared();
                if !shared.is_truncating {
                    break self.buffer(file, shared, place, data, clear_set_id)?;
                }
            }
            // Who is killed while he waits has taken no room.
            self.budget.give(u64::from(length));
            self.truncation_ends(file).await?;
        };
        if is_stream {
            self.push_in_background(file, Scope::FullPackets);
        } else if pieces > PIECES_SEND {
            self.push_in_background(file, Scope::All);
            if pieces > PIECES_MAX {
                drop(self.turn(file).await?);
            }
        }
        Ok(end)
    }

    /// Waits for the end of a truncation, and not for others that wait to send bytes of the file.
    async fn truncation_ends(&self, file: &FileState) -> Result<(), FsError> {
        let mut retry = Retry::new(&self.core, "write");
        retry.waits_for("a truncation of the file");
        loop {
            let ended = file.truncated.notified();
            if !file.shared().is_truncating {
                return Ok(());
            }
            if tokio::time::timeout(retry.cap(LOOK), ended).await.is_err() {
                retry.check(Duration::from_millis(1))?;
            }
        }
    }

    /// Into the room that was taken for it.
    fn buffer(
        &self,
        file: &Arc<FileState>,
        mut shared: MutexGuard<'_, Shared>,
        place: Place,
        data: Bytes,
        clear_set_id: bool,
    ) -> Result<Buffered, FsError> {
        let length = data.len() as u64;
        let offset = match place {
            Place::At(offset) | Place::Page(offset) => offset,
            Place::End => shared.content.size(),
        };
        let end = offset.checked_add(length).filter(|end| *end <= FILE_BYTES_MAX);
        let Some(end) = end else {
            drop(shared);
            self.budget.give(length);
            return Err(FsError::TooLarge);
        };
        let replaced = shared.content.write(offset, data, now(), clear_set_id);
        let (last, run) = shared.sequential;
        let run = if offset == last { run } else { 0 } + length;
        let is_stream = run >= STREAM_BYTES && !shared.is_pushing;
        shared.sequential = (end, if is_stream { 0 } else { run });
        let pieces = shared.content.buffered_pieces();
        let is_first = shared.dirty_since.is_none();
        shared.dirty_since.get_or_insert_with(Instant::now);
        drop(shared);
        if is_first {
            self.files.mark_dirty(file);
        }
        self.budget.give(replaced);
        Ok(Buffered { end, pieces, is_stream })
    }

    /// The buffer is full: has everything sent, and waits for what becomes free, as long as anything does.
    async fn wait_for_room(self: &Arc<Self>, bytes: u32) -> Result<(), FsError> {
        let mut retry = Retry::new(&self.core, "write");
        retry.waits_for("room in the write buffer");
        // One future all along: it keeps its place in the queue.
        let mut room = pin!(self.budget.take(bytes));
        loop {
            for file in self.files.dirty_for(Duration::ZERO).iter().take(PUSHES_MAX) {
                self.settle_in_background(file);
            }
            let seen = self.budget.given();
            if tokio::time::timeout(retry.cap(LOOK), &mut room).await.is_ok() {
                return Ok(());
            }
            if self.budget.given() != seen {
                retry.progressed();
            }
            retry.check(Duration::from_millis(1))?;
        }
    }

    /// Sends what `scope` says, unless somebody does so already.
    pub(crate) fn push_in_background(self: &Arc<Self>, file: &Arc<FileState>, scope: Scope) {
        if std::mem::replace(&mut file.shared().is_pushing, true) {
            return;
        }
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        drop(self.core.runtime.spawn(async move {
            // A writer that keeps up with us finds the next packets taken along, and those before become
            // part of the file in time. Whoever waits for his turn has it in between.
            loop {
                let mut io = file.io.lock().await;
                let pushed = Call::run(inner.push(&file, &mut io, scope, false)).await;
                if !matches!(pushed, Ok(true)) || scope == Scope::All {
                    break;
                }
                let is_overdue = file.shared().is_overdue(inner.core.config.dirty_age_max);
                if is_overdue && Call::run(inner.settle(&file, &mut io)).await.is_err() {
                    break;
                }
            }
            file.shared().is_pushing = false;
        }));
    }

    /// Sends and publishes everything, unless somebody is to do so already.
    pub(crate) fn settle_in_background(self: &Arc<Self>, file: &Arc<FileState>) {
        {
            // Who sends a stream makes it part of the file in time, and would keep this one's place in the line.
            let mut shared = file.shared();
            if shared.is_pushing || std::mem::replace(&mut shared.is_settling, true) {
                return;
            }
        }
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        drop(self.core.runtime.spawn(async move {
            if let Err(error) = inner.settle_in_line(&file).await {
                tracing::debug!(inode = %file.inode, %error, "writing in the background failed");
            }
            file.shared().is_settling = false;
        }));
    }

    async fn settle_in_line(self: &Arc<Self>, file: &Arc<FileState>) -> Result<(), FsError> {
        if file.is_in_doubt() {
            // Outside of the line: those that stand in it may wait for the number that this one holds.
            let _io = file.io.lock().await;
            Call::run(self.settle_doubt(file)).await?;
        }
        // Never closed, so there is always a turn to wait for.
        let _turn = self.settling.acquire().await;
        let mut io = file.io.lock().await;
        Call::run(self.settle(file, &mut io)).await
    }
}
