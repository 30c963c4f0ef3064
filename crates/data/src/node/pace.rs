//! The pace of repair on each disk: how many chunks are under way at once, how many bytes a second, and
//! how much of what was copied stays in memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use milpa_host::clock::now_us;
use milpa_host::disk::Advice;
use milpa_types::ExtentId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::store::ExtentStore;

use super::shared::Shared;

/// Chunks of extents that are fetched at once to fill replicas on one disk: enough to keep a disk busy, and no
/// more than clients' requests can pass between.
const TURNS: usize = 2;
/// A repair that was held up makes up for so much of the time: a busy machine wakes a sleeper late, each time.
const CATCH_UP_US: u64 = 50_000;
/// Bytes of the newest copies to a disk that stay in memory: the device has written what is older, and
/// nobody reads it soon. A new page of memory costs the kernel, and the host of a virtual machine, up to ten times
/// one that was in use just now.
const KEPT_BYTES: u64 = 4 << 20;

/// The pace on all disks of a node, by disk.
#[derive(Default)]
pub(crate) struct Paces(RefCell<BTreeMap<usize, Pace>>);

/// The pace on one disk.
struct Pace {
    turns: Arc<Semaphore>,
    /// When the bytes so far have had their time, in microseconds.
    due_us: u64,
    /// Oldest first.
    copies: VecDeque<Copied>,
    /// Of all copies.
    bytes: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        let turns = Arc::new(Semaphore::new(TURNS));
        Pace { turns, due_us: 0, copies: VecDeque::new(), bytes: 0 }
    }
}

/// A part of an extent that was copied here.
pub(super) struct Copied {
    store: Weak<ExtentStore>,
    extent: ExtentId,
    range: Range<u64>,
}

impl Copied {
    pub(super) fn new(store: &Arc<ExtentStore>, extent: ExtentId, range: Range<u64>) -> Copied {
        Copied { store: Arc::downgrade(store), extent, range }
    }

    /// Gives its memory back.
    pub(super) fn release(&self) {
        if let Some(store) = self.store.upgrade() {
            store.advise(self.extent, Advice::Release, self.range.start, self.length());
        }
    }

    fn length(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }
}

impl Pace {
    /// When more may come, after bytes that take `cost_us`.
    fn spend(&mut self, now_us: u64, cost_us: u64) -> u64 {
        let from = self.due_us.max(now_us.saturating_sub(CATCH_UP_US));
        self.due_us = from.saturating_add(cost_us);
        self.due_us
    }

    fn copied(&mut self, copy: Copied) {
        self.bytes = self.bytes.saturating_add(copy.length());
        self.copies.push_back(copy);
    }

    fn take_old(&mut self) -> Vec<Copied> {
        let mut old = Vec::new();
        while self.bytes > KEPT_BYTES
            && let Some(copy) = self.copies.pop_front()
        {
            self.bytes = self.bytes.saturating_sub(copy.length());
            old.push(copy);
        }
        old
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

    /// Notes what has landed on a disk, and is on its way to the device.
    pub(super) fn note_copy(&self, disk: usize, copy: Copied) {
        self.pace(disk, |pace| pace.copied(copy));
    }

    /// What was copied to a disk so long ago that its memory is to be given back.
    pub(super) fn old_copies(&self, disk: usize) -> Vec<Copied> {
        self.pace(disk, Pace::take_old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(length: u64) -> Copied {
        Copied { store: Weak::new(), extent: ExtentId(1), range: 0..length }
    }

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

    #[test]
    fn the_oldest_copies_are_given_back_and_the_newest_kept() {
        let mut pace = Pace::default();
        for _ in 0..KEPT_BYTES >> 18 {
            pace.copied(copied(1 << 18));
        }
        assert!(pace.take_old().is_empty());
        pace.copied(copied(1));
        pace.copied(copied(1 << 18));
        let lengths = |old: Vec<Copied>| old.iter().map(Copied::length).collect::<Vec<_>>();
        assert_eq!(lengths(pace.take_old()), [1 << 18, 1 << 18]);
        assert!(pace.take_old().is_empty());
        // One that is greater than all that is kept goes with the next.
        pace.copied(copied(2 * KEPT_BYTES));
        pace.copied(copied(1));
        assert_eq!(pace.take_old().len(), 17);
        assert_eq!(pace.bytes, 1);
    }
}
