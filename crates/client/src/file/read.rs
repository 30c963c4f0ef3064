//! read(2).

use std::sync::Arc;

use bytes::Bytes;
use milpa_types::{Column, DataError};
use milpa_wire::data::TRANSFER_BYTES_MAX;
use tokio::time::Instant;

use super::FileState;
use super::content::Source;
use super::lost::Gone;
use crate::core::Retry;
use crate::error::FsError;
use crate::flights::join_all;
use crate::handle::HandleId;
use crate::inner::Inner;
use crate::transport::Boxed;

/// Holes are shown by references to these.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
/// How often a read starts over because the file's bytes moved meanwhile.
const RELOADS_MAX: u32 = 3;

impl Inner {
    /// Reads up to `length` bytes; fewer only at the file's end.
    pub(crate) async fn read(
        self: &Arc<Self>,
        handle: HandleId,
        offset: u64,
        length: u32,
    ) -> Result<Vec<Bytes>, FsError> {
        let handle = self.files.handle(handle)?;
        if !handle.flags.read {
            return Err(FsError::BadHandle);
        }
        self.note_use(&handle);
        self.check_generation(&handle)?;
        let began = Instant::now();
        let pieces = self.read_file(&handle.file, offset, length).await?;
        // Asked last: what was lost before this read began to look for its bytes is known by now.
        if let Some(loss) = handle.told(|told, failures| told.read(failures, began)) {
            return Err(loss);
        }
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        self.core.stats.read_bytes.inc_by(bytes as u64);
        Ok(pieces)
    }

    async fn read_file(
        &self,
        file: &FileState,
        offset: u64,
        length: u32,
    ) -> Result<Vec<Bytes>, FsError> {
        let (mut reloads, mut gone) = (0, Gone::new());
        let mut retry = Retry::new(&self.core, "read");
        loop {
            if file.shared().content.is_stale() {
                self.reload(file).await?;
            }
            let sources = file.shared().content.sources(offset, u64::from(length));
            match self.gather(file, offset, sources, &gone).await {
                // Truncated or replaced by somebody, who had the old bytes deleted.
                Err(FsError::Data(DataError::NoExtent)) if reloads < RELOADS_MAX => {
                    reloads += 1;
                    file.shared().content.becomes_stale();
                }
                Err(FsError::Data(DataError::NoExtent)) => {
                    let known = gone.len();
                    gone = self.gone_extents(file).await;
                    if gone.len() == known {
                        // The file, as it is now, refers to them.
                        return Err(FsError::Lost(Box::new(DataError::NoExtent.into())));
                    }
                }
                // On no member yet, or on none any more.
                Err(FsError::Data(DataError::NotHere)) => {
                    retry.note(DataError::NotHere);
                    retry.pause().await?;
                    file.shared().content.becomes_stale();
                }
                result => return result,
            }
        }
    }

    /// Fetches what is not here, all of it at once: the bytes from `offset` on. Bytes that were never
    /// synced and are lost are zeros, or the file ends before them.
    async fn gather(
        &self,
        file: &FileState,
        offset: u64,
        sources: Vec<Source>,
        gone: &Gone,
    ) -> Result<Vec<Bytes>, FsError> {
        let mut pieces = Vec::with_capacity(sources.len());
        let mut calls: Vec<Boxed<'_, Result<Present, FsError>>> = Vec::new();
        let mut places = Vec::new();
        for source in sources {
            match source {
                Source::Bytes(bytes) => pieces.push(bytes),
                Source::Zeros(length) => push_zeros(&mut pieces, length),
                Source::Extent { column, length } => {
                    for (column, length) in transfers(column, length) {
                        places.push((pieces.len(), column));
                        pieces.push(Bytes::new());
                        calls.push(match gone.contains(&(column.partition, column.extent)) {
                            true => Box::pin(std::future::ready(Ok(Present::nothing(length)))),
                            false => Box::pin(self.read_present(column, length)),
                        });
                    }
                }
            }
        }
        let mut lost_parts = Vec::new();
        for ((place, column), fetched) in places.into_iter().zip(join_all(calls).await) {
            let told = fetched.inspect_err(|error| tell_damaged(file, column, error));
            let Present { bytes, lost } = told?;
            if lost > 0 {
                let offset = column.offset + bytes.len() as u64;
                lost_parts.push((Column { offset, ..column }, u64::from(lost)));
            }
            if let Some(piece) = pieces.get_mut(place) {
                *piece = padded(bytes, lost);
            }
        }
        if !lost_parts.is_empty() {
            self.check_unflushed(file, &lost_parts).await?;
            let end = self.end_without_lost(file).await;
            shorten(&mut pieces, end.saturating_sub(offset));
        }
        Ok(pieces)
    }

    /// Fails if the file counts on lost bytes to be on disk. Asks for its map first: that they were
    /// flushed since it was loaded changes no version.
    ///
    /// Fails as well if they were written here and are not published: they lie over what the others see, and that
    /// may be synced. When they are given up, it is seen here again.
    async fn check_unflushed(
        &self,
        file: &FileState,
        lost: &[(Column, u64)],
    ) -> Result<(), FsError> {
        self.reload(file).await?;
        let is_own =
            |(column, length): &&(Column, u64)| file.shared().content.is_own(*column, *length);
        if let Some((column, _)) = lost.iter().find(is_own) {
            return Err(FsError::Lost(Box::new(DataError::Lost { length: column.offset }.into())));
        }
        let is_flushed =
            |(column, length): &&(Column, u64)| file.shared().content.is_flushed(*column, *length);
        let Some((column, length)) = lost.iter().find(is_flushed) else { return Ok(()) };
        let Column { partition, extent, offset } = *column;
        tracing::error!(
            inode = %file.inode, %partition, %extent, offset, length,
            "bytes that were synced are on no replica any more"
        );
        Err(FsError::Lost(Box::new(DataError::Lost { length: offset }.into())))
    }

    /// Reads what there is of bytes of which the end may be lost.
    async fn read_present(&self, column: Column, length: u32) -> Result<Present, FsError> {
        let there = match self.data.read(column, length).await {
            Ok(bytes) => return Ok(Present { bytes, lost: 0 }),
            Err(FsError::Data(DataError::Lost { length })) => length,
            Err(error) => return Err(error),
        };
        let left = there.saturating_sub(column.offset).min(u64::from(length) - 1) as u32;
        let bytes = match left {
            0 => Bytes::new(),
            left => self.data.read(column, left).await?,
        };
        Ok(Present { bytes, lost: length - left })
    }
}

/// Bytes of an extent, and how many behind them are lost.
struct Present {
    bytes: Bytes,
    lost: u32,
}

impl Present {
    fn nothing(lost: u32) -> Present {
        Present { bytes: Bytes::new(), lost }
    }
}

/// Cuts pieces to so many bytes in all.
fn shorten(pieces: &mut Vec<Bytes>, mut left: u64) {
    for piece in pieces.iter_mut() {
        let kept = left.min(piece.len() as u64);
        piece.truncate(kept as usize);
        left -= kept;
    }
    pieces.retain(|piece| !piece.is_empty());
}

/// With zeros in the place of what is lost.
fn padded(bytes: Bytes, lost: u32) -> Bytes {
    if lost == 0 {
        return bytes;
    }
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len() + lost as usize, 0);
    padded.into()
}

/// That no replica has a block whole ends a read with EIO: this is where one sees of which file.
fn tell_damaged(file: &FileState, column: Column, error: &FsError) {
    if let FsError::Data(DataError::Corrupt { block }) = error {
        let Column { partition, extent, .. } = column;
        tracing::error!(
            inode = %file.inode, %partition, %extent, block,
            "a block of this file is whole on no replica"
        );
    }
}

fn push_zeros(pieces: &mut Vec<Bytes>, mut length: u64) {
    while length > 0 {
        let part = length.min(ZEROS.len() as u64);
        pieces.push(Bytes::from_static(&ZEROS).slice(..part as usize));
        length -= part;
    }
}

/// Cuts at what one request can carry.
fn transfers(column: Column, length: u64) -> impl Iterator<Item = (Column, u32)> {
    let unit = TRANSFER_BYTES_MAX as u64;
    (0..length.div_ceil(unit)).map(move |i| {
        let start = i * unit;
        let column = Column { offset: column.offset + start, ..column };
        (column, (length - start).min(unit) as u32)
    })
}
