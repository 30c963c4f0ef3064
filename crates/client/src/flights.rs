//! Several calls at once within one task: ordered starts, any order of arrival, nothing spawned.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::transport::Boxed;

/// A future that was started: polled once, so that its request is on the way.
pub(crate) enum Flight<'a, T> {
    Flying(Boxed<'a, T>),
    Landed(Option<T>),
}

impl<T> std::fmt::Debug for Flight<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Flight")
    }
}

impl<'a, T: Unpin> Flight<'a, T> {
    /// Polls `future` once before returning.
    pub(crate) async fn launch(mut future: Boxed<'a, T>) -> Flight<'a, T> {
        let mut landed = None;
        poll_fn(|context| {
            if let Poll::Ready(value) = future.as_mut().poll(context) {
                landed = Some(value);
            }
            Poll::Ready(())
        })
        .await;
        if landed.is_some() { Flight::Landed(landed) } else { Flight::Flying(future) }
    }

    fn poll_landing(&mut self, context: &mut Context<'_>) -> Poll<T> {
        match self {
            Flight::Flying(future) => future.as_mut().poll(context),
            Flight::Landed(value) => match value.take() {
                Some(value) => Poll::Ready(value),
                None => Poll::Pending,
            },
        }
    }

    /// Lets the future go on, and tells whether it has landed.
    fn poll_flight(&mut self, context: &mut Context<'_>) -> bool {
        if let Flight::Flying(future) = self
            && let Poll::Ready(value) = future.as_mut().poll(context)
        {
            *self = Flight::Landed(Some(value));
        }
        matches!(self, Flight::Landed(_))
    }

    /// Waits for the answer, once only. The caller's other flights stand still meanwhile: they must hold no
    /// lock that this one may need.
    pub(crate) async fn land(&mut self) -> T {
        poll_fn(|context| self.poll_landing(context)).await
    }
}

/// A bounded number of flights, whichever lands first comes first.
#[derive(Debug)]
pub(crate) struct Flights<'a, T> {
    flying: Vec<Flight<'a, T>>,
}

impl<'a, T: Unpin> Flights<'a, T> {
    pub(crate) fn new() -> Flights<'a, T> {
        Flights { flying: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.flying.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.flying.is_empty()
    }

    pub(crate) async fn launch(&mut self, future: Boxed<'a, T>) {
        self.flying.push(Flight::launch(future).await);
    }

    /// The next answer; `None` when nothing flies.
    pub(crate) async fn next(&mut self) -> Option<T> {
        if self.flying.is_empty() {
            return None;
        }
        poll_fn(|context| {
            for at in 0..self.flying.len() {
                let Some(flight) = self.flying.get_mut(at) else { break };
                if let Poll::Ready(value) = flight.poll_landing(context) {
                    drop(self.flying.swap_remove(at));
                    return Poll::Ready(Some(value));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Runs all futures at once and gives their results in order. All go on until the last has landed: one
/// that is not polled may have been given a lock that another one waits for.
pub(crate) async fn join_all<'a, T: Unpin + Send + 'a>(futures: Vec<Boxed<'a, T>>) -> Vec<T> {
    let mut flying = Vec::with_capacity(futures.len());
    for future in futures {
        flying.push(Flight::launch(future).await);
    }
    poll_fn(|context| {
        let mut have_landed = true;
        for flight in &mut flying {
            have_landed &= flight.poll_flight(context);
        }
        if have_landed { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let results = flying.into_iter().filter_map(|flight| match flight {
        Flight::Landed(result) => result,
        Flight::Flying(_) => None,
    });
    results.collect()
}

/// Runs `future` in the caller's task, without a hop; if the caller goes away, hands it to the
/// runtime, which finishes it. So a change is never half-forgotten: its outcome is always awaited
/// and its effect on the caches always recorded.
pub(crate) fn detach<T: Send + 'static>(
    runtime: &tokio::runtime::Handle,
    future: impl Future<Output = T> + Send + 'static,
) -> Detached<T> {
    Detached { future: Some(Box::pin(future)), runtime: runtime.clone() }
}

/// See [`detach`].
pub(crate) struct Detached<T: Send + 'static> {
    future: Option<Boxed<'static, T>>,
    runtime: tokio::runtime::Handle,
}

impl<T: Send + 'static> Future for Detached<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        let polled = future.as_mut().poll(context);
        if polled.is_ready() {
            self.future = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Detached<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            drop(self.runtime.spawn(future));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn launch_polls_at_once_and_in_order() {
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut flights = Flights::new();
        for i in 0..3 {
            let order = Arc::clone(&order);
            flights.launch(Box::pin(async move { order.lock().unwrap().push(i) })).await;
        }
        assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
        while flights.next().await.is_some() {}
        assert!(flights.is_empty());
    }

    /// Story (power cuts, seeds 105 and 201): after a cut of all data nodes an fsync of a file in two
    /// partitions asked for a new view for each of them. The second was given the lock while only
    /// the first was polled, which then waited for the lock too: for ever, and with it every call of
    /// the client that needed a new view.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_several_at_once_lets_all_of_them_go_on() {
        let lock = tokio::sync::Mutex::new(());
        let calls = (0..3).map(|_| -> Boxed<'_, ()> {
            Box::pin(async {
                for _ in 0..3 {
                    let _held = lock.lock().await;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            })
        });
        let joined =
            tokio::time::timeout(std::time::Duration::from_secs(1), join_all(calls.collect()));
        assert_eq!(joined.await.unwrap().len(), 3);
    }

    #[tokio::test]
    async fn a_dropped_change_is_finished_in_the_background() {
        let (go, gone) = oneshot::channel::<()>();
        let (done, finished) = oneshot::channel::<()>();
        let started = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&started);
        let mut change = detach(&tokio::runtime::Handle::current(), async move {
            flag.store(true, Ordering::Relaxed);
            let _ = gone.await;
            let _ = done.send(());
        });
        poll_fn(|context| {
            assert!(Pin::new(&mut change).poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        assert!(started.load(Ordering::Relaxed), "polled in the caller's task");
        drop(change);
        go.send(()).unwrap();
        finished.await.unwrap();
    }
}
