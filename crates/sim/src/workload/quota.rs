//! What a seed must see before its clients may rest.

use std::cell::Cell;

/// Operations and faults that are still to come, for all clients together.
#[derive(Debug)]
pub(crate) struct Quota {
    operations: Cell<u64>,
    faults: Cell<u64>,
}

impl Quota {
    pub fn new(operations: u64, faults: u64) -> Quota {
        Quota { operations: Cell::new(operations), faults: Cell::new(faults) }
    }

    pub fn operation_ended(&self) {
        self.operations.set(self.operations.get().saturating_sub(1));
    }

    pub fn fault_happened(&self) {
        self.faults.set(self.faults.get().saturating_sub(1));
    }

    /// The time of harm is over, whatever happened in it.
    pub fn no_more_faults(&self) {
        self.faults.set(0);
    }

    pub fn is_met(&self) -> bool {
        self.operations.get() == 0 && self.faults.get() == 0
    }
}
