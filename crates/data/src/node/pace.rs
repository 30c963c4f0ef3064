//! The pace of repair on each disk: how many chunks are under way at once, and how many bytes a second.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use milpa_host::clock::now_us;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::shared::Shared;

/// Chunks of extents that are fetched at once to fill replicas on one disk: enough to keep a disk busy, and no
/// more than clients' requests can pass between.
const TURNS: usize = 2;
/// A repair that was held up makes up for so much of the time: a busy machine wakes a sleeper late, each time.
const CATCH_UP_US: u64 = 50_000;

/// The pace on all disks of a node, by disk.
#[derive(Default)]
pub(crate) struct Paces(RefCell<BTreeMap<usize, Pace>>);

/// The pace on one disk.
struct Pace {
    turns: Arc<Semaphore>,
    /// When the bytes so far have had their time, in microseconds.
    due_us: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        let turns = Arc::new(Semaphore::new(TURNS));
        Pace { turns, due_us: 0 }
    }
}

impl Pace {
    /// When more may come, after bytes that take `cost_us`.
    fn spend(&mut self, now_us: u64, cost_us: u64) -> u64 {
        let from = self.due_us.max(now_us.saturating_sub(CATCH_UP_US));
        self.due_us = from.saturating_add(cost_us);
        self.due_us
    }
}

impl Shared {
    fn pace<T>(&self, disk: usize, of: impl FnOnce(&mut Pace) -> T) -> T {
        of(self.paces.0.borrow_mut().entry(disk).or_default())
    }

    /// Waits until few enough chunks are on their way to a disk. One that hangs stops no other.
    pub(super) async fn repair_turn(&self, disk: usize) -> Option<OwnedSemaphorePermit> {
        let turns = self.pace(disk, |pace| Arc::clone(&pace.turns));
        // Never closed.
        turns.acquire_owned().await.ok()
    }

    /// Waits until a disk may take more, after `bytes` from other replicas.
    pub(super) async fn throttle_repair(&self, disk: usize, bytes: u64) {
        let now = now_us();
        let cost = bytes.saturating_mul(1_000_000) / self.config.repair_bytes_per_second.max(1);
        let due = self.pace(disk, |pace| pace.spend(now, cost));
        tokio::time::sleep(Duration::from_micros(due.saturating_sub(now))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_that_was_held_up_catches_up_a_little_and_no_more() {
        let mut pace = Pace { due_us: 1_000_000, ..Pace::default() };
        assert_eq!(pace.spend(1_000_000, 2_500), 1_002_500);
        // Woken late by less than is made up for: the next is due as if it had been in time.
        assert_eq!(pace.spend(1_009_000, 2_500), 1_005_000);
        // After a pause only so much is made up for.
        assert_eq!(pace.spend(9_000_000, 2_500), 9_000_000 - CATCH_UP_US + 2_500);
        // One after the other, however many wait.
        assert_eq!(pace.spend(9_000_000, 100_000), 9_052_500);
        assert_eq!(pace.spend(9_000_000, 2_500), 9_055_000);
    }
}
