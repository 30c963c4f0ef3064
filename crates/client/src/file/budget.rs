//! The memory that written bytes may take, over all files of a client.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Semaphore;

use crate::stats::Stats;

/// Bytes that may still be buffered.
pub(crate) struct Budget {
    free: Semaphore,
    total: u64,
    /// How often bytes have left.
    given: AtomicU64,
    stats: &'static Stats,
}

impl Budget {
    pub(crate) fn new(total: u64, stats: &'static Stats) -> Budget {
        let permits = usize::try_from(total).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Budget {
            free: Semaphore::new(permits),
            total: permits as u64,
            given: AtomicU64::new(0),
            stats,
        }
    }

    /// The most that one writer takes at once, so that it can always be had.
    pub(crate) fn piece_bytes_max(&self) -> usize {
        (self.total / 4).clamp(1, 1 << 30) as usize
    }

    /// Takes room for `bytes` if there is.
    pub(crate) fn try_take(&self, bytes: u32) -> bool {
        let Ok(permit) = self.free.try_acquire_many(bytes) else { return false };
        permit.forget();
        self.stats.buffer_bytes.inc_by(i64::from(bytes));
        true
    }

    /// Waits for room for `bytes`, in the order of asking.
    pub(crate) async fn take(&self, bytes: u32) {
        // Never closed, so this fails never.
        if let Ok(permit) = self.free.acquire_many(bytes).await {
            permit.forget();
            self.stats.buffer_bytes.inc_by(i64::from(bytes));
        }
    }

    /// Bytes have left the buffer.
    pub(crate) fn give(&self, bytes: u64) {
        if bytes > 0 {
            self.given.fetch_add(1, Ordering::Relaxed);
            self.free.add_permits(usize::try_from(bytes).unwrap_or(0));
            self.stats.buffer_bytes.dec_by(bytes as i64);
        }
    }

    /// Counts up whenever bytes leave the buffer.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }

    /// Bytes in the buffer.
    pub(crate) fn used(&self) -> u64 {
        self.total - self.free.available_permits() as u64
    }
}
