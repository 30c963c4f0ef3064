//! Work that blocks: on threads, or as tasks of a simulated node.
//!
//! A job is two closures. The *work* may block and takes as long as it takes; the *report*
//! says that it is done. In production both run on a thread, one after the other. In a simulated
//! world both run on the node's one thread, each after a pause that the world draws: between them lies
//! what makes storage hard, the time in which something has happened to the disk and nobody has been
//! told. Jobs of one queue begin in order on both sides.
//!
//! A simulated job is a task of the node's `LocalSet`. So dropping a node drops its jobs, those that
//! wait and those that have not reported, and runs none of them.

// The real threads.
#![allow(clippy::disallowed_methods)]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use crate::world;

mod strands;
mod threads;

pub use strands::Strands;
pub use threads::{Threads, Urgency};

async fn pause(name: &str) {
    let pause = world::current().map(|world| world.job_pause(name));
    tokio::time::sleep(pause.unwrap_or_default()).await;
}

/// What a step of a [`Routine`] leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is more to do.
    Again,
    /// Nothing, until somebody calls [`Routine::wake`].
    Idle,
    /// Nothing for so long, or until somebody calls [`Routine::wake`].
    Later(Duration),
    /// The routine is over.
    Ended,
}

/// A thread of its own that takes step after step of one routine.
pub struct Routine(Runner);

enum Runner {
    System { is_closing: Arc<AtomicBool>, thread: Option<JoinHandle<()>> },
    Simulated { woken: Arc<Notify>, task: tokio::task::JoinHandle<()> },
}

impl Routine {
    /// Starts it. `step` is told whether the routine is being dropped: it then finishes what
    /// counts and ends.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn spawn(
        name: &str,
        mut step: impl FnMut(bool) -> Step + Send + 'static,
    ) -> io::Result<Routine> {
        if world::current().is_some() {
            let (woken, name) = (Arc::new(Notify::new()), name.to_owned());
            let wakes = Arc::clone(&woken);
            let task = tokio::task::spawn_local(async move {
                loop {
                    pause(&name).await;
                    match step(false) {
                        Step::Again => {}
                        Step::Idle => wakes.notified().await,
                        // Woken or not, it takes its next step.
                        Step::Later(wait) => drop(timeout(wait, wakes.notified()).await),
                        Step::Ended => return,
                    }
                }
            });
            return Ok(Routine(Runner::Simulated { woken, task }));
        }
        let is_closing = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&is_closing);
        let run = move || {
            loop {
                match step(asked.load(Ordering::Acquire)) {
                    Step::Again => {}
                    // A wake-up that came during the step lets this return at once.
                    Step::Idle => thread::park(),
                    Step::Later(wait) => thread::park_timeout(wait),
                    Step::Ended => return,
                }
            }
        };
        let thread = Some(thread::Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(Routine(Runner::System { is_closing, thread }))
    }

    /// There is something to do.
    pub fn wake(&self) {
        match &self.0 {
            Runner::System { thread, .. } => {
                if let Some(thread) = thread {
                    thread.thread().unpark();
                }
            }
            Runner::Simulated { woken, .. } => woken.notify_one(),
        }
    }
}

/// In production it waits until the routine has ended. A simulated one takes no further step: its
/// machine has stopped.
impl Drop for Routine {
    fn drop(&mut self) {
        match &mut self.0 {
            Runner::System { is_closing, thread } => {
                is_closing.store(true, Ordering::Release);
                if let Some(thread) = thread.take() {
                    thread.thread().unpark();
                    // A panic of the thread was printed by it; the routine is over either way.
                    let _ = thread.join();
                }
            }
            Runner::Simulated { task, .. } => task.abort(),
        }
    }
}

impl fmt::Debug for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Routine")
    }
}

/// Runs one job on a thread that may block. It runs also when nobody waits for it. Call it inside
/// of a runtime; in a simulated world, inside of the node's `LocalSet`.
pub fn run<T: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    if world::current().is_none() {
        return tokio::task::spawn_blocking(work);
    }
    tokio::task::spawn_local(async move {
        pause(name).await;
        let done = work();
        pause(name).await;
        done
    })
}

/// Runs `work` on as many threads as there are processors, and waits for all of them. It must
/// share out what is to be done by itself. A simulated machine has one processor.
pub fn on_all_processors(work: impl Fn() + Sync) {
    if world::current().is_some() {
        return work();
    }
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(&work);
        }
        work();
    });
}

/// Does two things at once, `own` on this thread; simulated, one after the other.
///
/// # Errors
///
/// When the system gives no thread, or `other` panicked.
pub fn beside<A: Send, B>(
    name: &str,
    other: impl FnOnce() -> A + Send,
    own: impl FnOnce() -> B,
) -> io::Result<(A, B)> {
    if world::current().is_some() {
        return Ok((other(), own()));
    }
    thread::scope(|scope| {
        let other = thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, other)?;
        let own = own();
        let failed = |_| io::Error::other(format!("{name} panicked"));
        Ok((other.join().map_err(failed)?, own))
    })
}

#[cfg(test)]
mod tests;
