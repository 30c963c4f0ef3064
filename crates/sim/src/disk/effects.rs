//! All that leaves a machine: changes of its disk, and packets. Its power may go after any of them (F1).

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the effects of a machine, and ends them. Its disk and the network share it.
#[derive(Debug)]
pub struct Effects {
    done: AtomicU64,
    /// None happens beyond so many.
    end: AtomicU64,
}

impl Default for Effects {
    fn default() -> Effects {
        Effects { done: AtomicU64::new(0), end: AtomicU64::new(u64::MAX) }
    }
}

impl Effects {
    /// Counts one more, if it may happen.
    #[must_use]
    pub fn happens(&self) -> bool {
        if self.are_over() {
            return false;
        }
        self.done.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// How many have happened in all lives.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Nothing works any more until the machine is restarted.
    pub fn are_over(&self) -> bool {
        self.done() >= self.end.load(Ordering::Relaxed)
    }

    /// So many more may happen.
    pub fn end_after(&self, further: u64) {
        self.end.store(self.done().saturating_add(further), Ordering::Relaxed);
    }

    /// They do not end.
    pub fn go_on(&self) {
        self.end.store(u64::MAX, Ordering::Relaxed);
    }
}
