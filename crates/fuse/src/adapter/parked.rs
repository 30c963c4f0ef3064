//! Work that waits, at no thread's expense.
//!
//! Handing a future to the runtime wakes one of its threads, which polls it, finds that there is no
//! answer yet, and sleeps again. Here the future is polled in the FUSE thread and stays behind; the
//! runtime gets it when what it waits for wakes it. That is mostly the runtime's thread that the
//! answer came to, which goes on with it at once.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

use tokio::runtime::Handle;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future and who shall go on with it.
struct Parked {
    runtime: Handle,
    state: Mutex<State>,
}

enum State {
    /// Being polled for the first time.
    Polled { is_woken: bool },
    /// Nobody polls it before it is woken.
    Waiting(Work),
    /// It has ended, or the runtime has it.
    Gone,
}

/// Polls `work` once here; `runtime` goes on with it when it is woken. Call inside the runtime's
/// context.
pub(super) fn park(runtime: &Handle, mut work: Work) {
    let state = Mutex::new(State::Polled { is_woken: false });
    let parked = Arc::new(Parked { runtime: runtime.clone(), state });
    let waker = Waker::from(Arc::clone(&parked));
    if work.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
        return;
    }
    let mut state = parked.lock();
    if matches!(*state, State::Polled { is_woken: true }) {
        *state = State::Gone;
        drop(state);
        drop(runtime.spawn(work));
    } else {
        *state = State::Waiting(work);
    }
}

impl Parked {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Polled { .. } => *state = State::Polled { is_woken: true },
            State::Waiting(work) => {
                drop(state);
                drop(self.runtime.spawn(work));
            }
            State::Gone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_is_the_runtimes_only_once_it_is_woken() {
        let runtime = Handle::current();
        let before = runtime.metrics().num_alive_tasks();
        let (go, gone) = oneshot::channel::<u32>();
        let (done, finished) = oneshot::channel::<u32>();
        park(&runtime, Box::pin(async move { done.send(gone.await.unwrap() + 1).unwrap() }));
        assert_eq!(runtime.metrics().num_alive_tasks(), before, "nobody was woken for it");
        go.send(41).unwrap();
        assert_eq!(runtime.metrics().num_alive_tasks(), before + 1);
        assert_eq!(finished.await, Ok(42));
    }

    #[tokio::test]
    async fn work_that_is_woken_while_it_is_polled_goes_on() {
        let (done, finished) = oneshot::channel();
        park(
            &Handle::current(),
            Box::pin(async move {
                tokio::task::yield_now().await;
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                done.send(()).unwrap();
            }),
        );
        assert_eq!(finished.await, Ok(()));
    }

    #[tokio::test]
    async fn work_that_ends_at_once_and_work_that_nobody_wakes_leave_nothing_behind() {
        let runtime = Handle::current();
        park(&runtime, Box::pin(std::future::ready(())));
        let (kept, forgotten) = (Arc::new(()), oneshot::channel::<()>());
        let held = Arc::clone(&kept);
        park(
            &runtime,
            Box::pin(async move {
                drop(forgotten.1.await);
                drop(held);
            }),
        );
        drop(forgotten.0);
        tokio::task::yield_now().await;
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
