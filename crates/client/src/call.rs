//! The time of a whole call. Its parts, one after the other, share one deadline: a call that first waits
//! for its turn and then for a server waits as long as either would alone.

use std::future::Future;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use crate::core::lock;

tokio::task_local! {
    static CURRENT: Call;
}

/// One call of a user of this library.
#[derive(Clone)]
pub(crate) struct Call {
    /// When it began, or last achieved something.
    since: Arc<Mutex<Instant>>,
}

impl Call {
    /// Runs `call`. What it tries belongs to it; what is done in the background does not.
    pub(crate) async fn run<T>(call: impl Future<Output = T>) -> T {
        let since = Arc::new(Mutex::new(Instant::now()));
        CURRENT.scope(Call { since }, call).await
    }

    /// The call that is running; one of its own for work in the background.
    pub(crate) fn current() -> Call {
        let background = |_| Call { since: Arc::new(Mutex::new(Instant::now())) };
        CURRENT.try_with(Call::clone).unwrap_or_else(background)
    }

    pub(crate) fn since(&self) -> Instant {
        *lock(&self.since)
    }

    /// Something was achieved: the deadline counts from here.
    pub(crate) fn progressed(&self) {
        *lock(&self.since) = Instant::now();
    }
}
