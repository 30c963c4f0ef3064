//! Failures that are meant for one file, while the disk ([`Platter`]) knows those of its next call only.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use milpa_sim::disk::{Ordered, Platter};

/// Failures ordered for files with a part in their path.
#[derive(Debug, Default)]
pub(crate) struct Aimed {
    orders: Mutex<Vec<(Ordered, String)>>,
}

impl Aimed {
    /// The next call of this kind, of a file with `part` in its path, fails.
    pub fn add(&self, failure: Ordered, part: &str) {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders.push((failure, part.to_owned()));
    }

    /// Carries out a call that may meet one of these failures, if it was ordered for its file, which is looked up
    /// only then. No other one meets it: they wait for each other here, as at the disk.
    pub fn meet<T>(
        &self,
        platter: &Mutex<Platter>,
        path: impl FnOnce() -> Option<PathBuf>,
        kinds: &[Ordered],
        call: impl FnOnce() -> T,
    ) -> T {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if orders.is_empty() {
            return call();
        }
        let path = path().unwrap_or_default();
        let path = path.to_string_lossy();
        let is_met = |(kind, part): &(Ordered, String)| kinds.contains(kind) && path.contains(part);
        if let Some(place) = orders.iter().position(is_met) {
            let (failure, _) = orders.remove(place);
            // Before those that any call may meet.
            platter.lock().unwrap_or_else(PoisonError::into_inner).ordered.push_front(failure);
        }
        call()
    }
}
