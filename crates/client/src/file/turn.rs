//! Whose turn it is to send a file's bytes. Work in the background simply waits for it: whoever comes
//! before it ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use super::{FileState, Io};
use crate::core::Retry;
use crate::error::FsError;
use crate::inner::Inner;

/// How often one who waits looks whether anything goes on.
pub(super) const LOOK: Duration = Duration::from_millis(500);

impl Inner {
    /// Waits until nobody else sends bytes of the file. Not for ever: a call whose turn does not come
    /// ends like one whose servers do not answer. As long as servers take bytes of the file, it waits.
    ///
    /// # Errors
    ///
    /// [`FsError::TimedOut`].
    pub(crate) async fn turn(&self, file: &FileState) -> Result<OwnedMutexGuard<Io>, FsError> {
        let mut retry = Retry::new(&self.core, "wait for an earlier call on the file");
        retry.waits_for("others that send bytes of it");
        // One future all along: it keeps its place in the queue.
        let mut turn = pin!(Arc::clone(&file.io).lock_owned());
        loop {
            let seen = file.shared().progress;
            if let Ok(turn) = tokio::time::timeout(retry.cap(LOOK), &mut turn).await {
                return Ok(turn);
            }
            if file.shared().progress != seen {
                retry.progressed();
            }
            retry.check(Duration::from_millis(1))?;
        }
    }
}
