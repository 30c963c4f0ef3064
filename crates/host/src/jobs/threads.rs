//! Threads over one queue of jobs.

// The real threads, and setpriority(2), which is not in the standard library.
#![allow(unsafe_code, clippy::disallowed_methods)]

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::pause;
use crate::world;

type Report = Box<dyn FnOnce() + Send>;
/// A job that has not begun.
pub(super) type Job = Box<dyn FnOnce() -> Report + Send>;

/// Who waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A client.
    Foreground,
    /// Nobody soon: what threads for clients have to do goes first, on a processor that both want.
    Background,
}

/// What threads for the background add to their nice(2) value: a third of the processor time of a thread for clients, if
/// both want all of it. Not less: who copies may hold a lock that a client's job wants.
const BACKGROUND_NICE: libc::c_int = 5;

/// Threads over one queue. One thread runs jobs in the order of their submission; several begin
/// them in that order. They end when this is dropped and the queue is empty.
pub struct Threads(Queue);

enum Queue {
    System(Arc<Jobs>),
    Simulated(UnboundedSender<Job>),
}

impl Threads {
    /// Starts `count` threads, named `name` and their number if there are several. In a simulated
    /// world, call it inside of the node's `LocalSet`.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn spawn(name: &str, count: usize, urgency: Urgency) -> io::Result<Threads> {
        let named = |number| if count == 1 { name.to_owned() } else { format!("{name}{number}") };
        if world::current().is_some() {
            let (sender, receiver) = unbounded_channel();
            let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
            for number in 0..count {
                tokio::task::spawn_local(run_simulated(named(number), Arc::clone(&receiver)));
            }
            return Ok(Threads(Queue::Simulated(sender)));
        }
        let jobs = Arc::<Jobs>::default();
        let threads = Threads(Queue::System(Arc::clone(&jobs)));
        for number in 0..count {
            let jobs = Arc::clone(&jobs);
            let run = move || {
                if urgency == Urgency::Background {
                    yield_to_others();
                }
                while let Some(job) = jobs.next() {
                    job()();
                }
            };
            thread::Builder::new().name(named(number)).spawn(run)?;
        }
        Ok(threads)
    }

    /// Queues a job. Never blocks; bounding the queue is the caller's business.
    pub fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
        report: impl FnOnce(T) + Send + 'static,
    ) {
        let job = job(work, report);
        match &self.0 {
            Queue::System(jobs) => jobs.push(job),
            // A queue whose tasks are gone exists only while the node ends.
            Queue::Simulated(queue) => drop(queue.send(job)),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Queue::System(jobs) = &self.0 {
            jobs.locked().is_closed = true;
            jobs.came.notify_all();
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Threads")
    }
}

pub(super) fn job<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
    report: impl FnOnce(T) + Send + 'static,
) -> Job {
    Box::new(move || {
        let done = work();
        Box::new(move || report(done))
    })
}

/// Jobs that wait for a thread. A job wakes one thread, and only if one sleeps: a channel whose receiver the threads
/// take in turn wakes a second one each time, to take its place.
#[derive(Default)]
struct Jobs {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Threads that sleep, or have been woken and have not run yet.
    sleeping: usize,
    is_closed: bool,
}

impl Jobs {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        let mut state = self.locked();
        state.waiting.push_back(job);
        let sleeps_one = state.sleeping > 0;
        drop(state);
        if sleeps_one {
            self.came.notify_one();
        }
    }

    /// Waits for a job. `None` if there will be none.
    fn next(&self) -> Option<Job> {
        let mut state = self.locked();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state.sleeping += 1;
            state = self.came.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.sleeping -= 1;
        }
    }
}

/// Makes this thread give way to those of clients. One that the system does not let is as urgent as they.
fn yield_to_others() {
    // SAFETY: takes no pointers; 0 is the calling thread (setpriority(2), "C library/kernel differences").
    unsafe {
        let nice = libc::getpriority(libc::PRIO_PROCESS, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, nice + BACKGROUND_NICE);
    }
}

async fn run_simulated(name: String, jobs: Arc<tokio::sync::Mutex<UnboundedReceiver<Job>>>) {
    loop {
        let next = jobs.lock().await.recv().await;
        let Some(job) = next else { return };
        pause(&name).await;
        let report = job();
        pause(&name).await;
        report();
    }
}
