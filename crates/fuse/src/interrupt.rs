//! Which requests the kernel wants us to give up.
//!
//! When a process that waits for a request gets a signal, the kernel sends INTERRUPT with the
//! request's unique id. The request must still be answered, usually with EINTR.
//!
//! Only requests that ask for it are in the table ([`Reply::watch`](crate::Reply::watch)), so a
//! request that never watches pays nothing: no lock, no allocation, no look at a counter.
//!
//! # The race
//!
//! Another thread may handle INTERRUPT before the request's own thread came to register it. The
//! protocol's way out is to answer EAGAIN so that the kernel queues the INTERRUPT again. We do not
//! use it, for two reasons. The kernel finds the request only through the descriptor on which the
//! request was read: an EAGAIN on another cloned descriptor is refused with ENOENT and the
//! interrupt is lost. And for a request that never registers it turns into a busy loop between us
//! and the kernel. Instead the table remembers the newest [`EARLY_MAX`] interrupts that found
//! nobody; registering looks there first. Unique ids are not reused, so a stale one is harmless.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Interrupts remembered for requests that have not registered. A request that registers when its
/// method starts is overtaken by a handful at most; 4,096 ids are 32 KiB.
const EARLY_MAX: usize = 4096;

type Callback = Box<dyn FnOnce() + Send>;

/// Locks a mutex whose data stays consistent even when a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table: watched requests by unique id, and interrupts that came too early.
#[derive(Default)]
pub(crate) struct Interrupts {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    watched: HashMap<u64, Arc<WatchState>>,
    early: BTreeSet<u64>,
}

#[derive(Default)]
struct WatchState {
    interrupted: AtomicBool,
    wake: Mutex<Wake>,
}

#[derive(Default)]
struct Wake {
    waker: Option<Waker>,
    callback: Option<Callback>,
}

impl Interrupts {
    /// The kernel asks to give up request `unique`.
    pub(crate) fn interrupt(&self, unique: u64) {
        let state = {
            let mut table = lock(&self.table);
            let state = table.watched.get(&unique).cloned();
            if state.is_none() {
                table.remember(unique);
            }
            state
        };
        // Callbacks run without the table's lock: they may register or answer requests.
        if let Some(state) = state {
            state.fire();
        }
    }

    /// Starts to watch `unique`.
    pub(crate) fn watch(self: &Arc<Interrupts>, unique: u64) -> InterruptWatch {
        let state = Arc::new(WatchState::default());
        let mut table = lock(&self.table);
        if table.early.remove(&unique) {
            state.interrupted.store(true, Ordering::Release);
        }
        table.watched.insert(unique, Arc::clone(&state));
        drop(table);
        InterruptWatch { unique, state, interrupts: Arc::clone(self) }
    }

    fn unwatch(&self, unique: u64, state: &Arc<WatchState>) {
        let mut table = lock(&self.table);
        // A second watch of the same request may have replaced ours.
        if table.watched.get(&unique).is_some_and(|found| Arc::ptr_eq(found, state)) {
            table.watched.remove(&unique);
        }
    }
}

impl Table {
    fn remember(&mut self, unique: u64) {
        self.early.insert(unique);
        if self.early.len() > EARLY_MAX {
            self.early.pop_first();
        }
    }
}

impl WatchState {
    fn fire(&self) {
        self.interrupted.store(true, Ordering::Release);
        let wake = std::mem::take(&mut *lock(&self.wake));
        if let Some(waker) = wake.waker {
            waker.wake();
        }
        if let Some(callback) = wake.callback {
            callback();
        }
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Acquire)
    }
}

/// Tells whether one request was interrupted, and wakes whoever waits for that.
///
/// It is a future that completes when the request is interrupted (never, if it is not): an async
/// file system selects between its work and the watch. Blocking code polls
/// [`is_interrupted`](InterruptWatch::is_interrupted) or leaves a callback. Dropping it ends the
/// watch. One request has one watch; a second one replaces the first, which then never fires.
pub struct InterruptWatch {
    unique: u64,
    state: Arc<WatchState>,
    interrupts: Arc<Interrupts>,
}

impl InterruptWatch {
    /// True once the kernel asked to give this request up. One atomic load.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.state.is_interrupted()
    }

    /// Calls `callback` once, when the interrupt comes; now, if it came already.
    ///
    /// It runs in a FUSE thread, so it must not block. A later callback replaces an earlier one.
    pub fn on_interrupt(&self, callback: impl FnOnce() + Send + 'static) {
        let mut wake = lock(&self.state.wake);
        // Checked under the lock: `fire` sets the flag before it takes this lock.
        if self.is_interrupted() {
            drop(wake);
            callback();
        } else {
            wake.callback = Some(Box::new(callback));
        }
    }
}

impl Future for InterruptWatch {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.is_interrupted() {
            return Poll::Ready(());
        }
        let mut wake = lock(&self.state.wake);
        if self.is_interrupted() {
            return Poll::Ready(());
        }
        wake.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for InterruptWatch {
    fn drop(&mut self) {
        self.interrupts.unwatch(self.unique, &self.state);
    }
}

impl std::fmt::Debug for InterruptWatch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("InterruptWatch")
            .field("unique", &self.unique)
            .field("interrupted", &self.is_interrupted())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake as TaskWake;

    struct Count(AtomicUsize);
    impl TaskWake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_watched_request_hears_of_its_interrupt_only() {
        let interrupts = Arc::new(Interrupts::default());
        let watch = interrupts.watch(10);
        interrupts.interrupt(12);
        assert!(!watch.is_interrupted());
        interrupts.interrupt(10);
        assert!(watch.is_interrupted());
    }

    #[test]
    fn an_interrupt_before_the_watch_is_not_lost() {
        let interrupts = Arc::new(Interrupts::default());
        interrupts.interrupt(10);
        let watch = interrupts.watch(10);
        assert!(watch.is_interrupted());
        let called = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&called);
        watch.on_interrupt(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(called.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn waker_and_callback_run_once() {
        let interrupts = Arc::new(Interrupts::default());
        let mut watch = interrupts.watch(10);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert_eq!(Pin::new(&mut watch).poll(&mut context), Poll::Pending);
        let called = Arc::clone(&count);
        watch.on_interrupt(move || called.wake());
        interrupts.interrupt(10);
        interrupts.interrupt(10);
        assert_eq!(count.0.load(Ordering::SeqCst), 2, "one by the waker, one by the callback");
        assert_eq!(Pin::new(&mut watch).poll(&mut context), Poll::Ready(()));
    }

    #[test]
    fn dropping_the_watch_empties_the_table_and_early_ones_are_bounded() {
        let interrupts = Arc::new(Interrupts::default());
        drop(interrupts.watch(10));
        assert!(lock(&interrupts.table).watched.is_empty());
        for unique in 0..10_000 {
            interrupts.interrupt(unique);
        }
        assert_eq!(lock(&interrupts.table).early.len(), EARLY_MAX);
        assert!(interrupts.watch(9_999).is_interrupted());
    }
}
