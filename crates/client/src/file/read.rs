//! read(2).

use std::sync::Arc;

use bytes::Bytes;
use milpa_types::{Column, DataError};
use milpa_wire::data::TRANSFER_BYTES_MAX;

use super::FileState;
use super::content::Source;
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
        let pieces = self.read_file(&handle.file, offset, length).await?;
        // Asked last: what was lost before this read began to look for its bytes is known by now.
        if let Some(loss) = handle.loss_to_tell() {
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
        let mut reloads = 0;
        let mut retry = Retry::new(&self.core, "read");
        loop {
            if file.shared().content.stale {
                self.reload(file).await?;
            }
            let sources = file.shared().content.sources(offset, u64::from(length));
            match self.gather(sources).await {
                // Truncated or replaced by somebody, who had the old bytes deleted.
                Err(FsError::Data(DataError::NoExtent)) if reloads < RELOADS_MAX => {
                    reloads += 1;
                    file.shared().content.stale = true;
                }
                Err(FsError::Data(DataError::NoExtent)) => {
                    return Err(FsError::Stale("the file's bytes were deleted"));
                }
                // On no member yet, or on none any more.
                Err(FsError::Data(DataError::NotHere)) => {
                    retry.note(DataError::NotHere);
                    retry.pause().await?;
                    file.shared().content.stale = true;
                }
                result => return result,
            }
        }
    }

    /// Fetches what is not here, all of it at once.
    async fn gather(&self, sources: Vec<Source>) -> Result<Vec<Bytes>, FsError> {
        let mut pieces = Vec::with_capacity(sources.len());
        let mut calls: Vec<Boxed<'_, Result<Bytes, FsError>>> = Vec::new();
        let mut places = Vec::new();
        for source in sources {
            match source {
                Source::Bytes(bytes) => pieces.push(bytes),
                Source::Zeros(length) => push_zeros(&mut pieces, length),
                Source::Extent { column, length } => {
                    for (column, length) in transfers(column, length) {
                        places.push(pieces.len());
                        pieces.push(Bytes::new());
                        calls.push(Box::pin(self.data.read(column, length)));
                    }
                }
            }
        }
        for (place, fetched) in places.into_iter().zip(join_all(calls).await) {
            let fetched = fetched?;
            if let Some(piece) = pieces.get_mut(place) {
                *piece = fetched;
            }
        }
        Ok(pieces)
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
