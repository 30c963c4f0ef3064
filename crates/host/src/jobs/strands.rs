//! Strands: jobs of one key one after the other, those of different keys on whichever thread is free.
//!
//! As in Asio (`strand`). What takes long on one key keeps no other waiting, and each job runs on the threads of its
//! own urgency.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::threads::{Job, Threads, Urgency, job};

/// Threads, and the jobs that wait for an earlier one of their key. Dropped as [`Threads`] are.
pub struct Strands<K>(Arc<Shared<K>>);

struct Shared<K> {
    /// Keys with a job that was handed to a thread and has not reported; behind it, those that wait.
    busy: Mutex<BTreeMap<K, VecDeque<(Urgency, Job)>>>,
    foreground: Threads,
    background: Threads,
}

impl<K: Ord + Copy + Send + 'static> Strands<K> {
    /// Starts `count` threads for each urgency.
    ///
    /// # Errors
    ///
    /// As [`Threads::spawn`].
    pub fn spawn(name: &str, count: usize) -> io::Result<Strands<K>> {
        let foreground = Threads::spawn(&format!("{name}-w"), count, Urgency::Foreground)?;
        let background = Threads::spawn(&format!("{name}-b"), count, Urgency::Background)?;
        Ok(Strands(Arc::new(Shared { busy: Mutex::default(), foreground, background })))
    }

    /// Queues a job, to begin when all earlier ones of its key have reported. Never blocks; bounding the queue is the
    /// caller's business.
    pub fn submit<T: Send + 'static>(
        &self,
        key: K,
        urgency: Urgency,
        work: impl FnOnce() -> T + Send + 'static,
        report: impl FnOnce(T) + Send + 'static,
    ) {
        let job = job(work, report);
        let mut busy = self.0.busy();
        if let Some(waiting) = busy.get_mut(&key) {
            waiting.push_back((urgency, job));
            return;
        }
        busy.insert(key, VecDeque::new());
        drop(busy);
        self.0.start(key, urgency, job);
    }
}

impl<K: Ord + Copy + Send + 'static> Shared<K> {
    fn busy(&self) -> MutexGuard<'_, BTreeMap<K, VecDeque<(Urgency, Job)>>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Self>, key: K, urgency: Urgency, job: Job) {
        let threads = match urgency {
            Urgency::Foreground => &self.foreground,
            Urgency::Background => &self.background,
        };
        let shared = Arc::clone(self);
        threads.submit(job, move |report| {
            report();
            shared.go_on(key);
        });
    }

    fn go_on(self: &Arc<Self>, key: K) {
        let mut busy = self.busy();
        let next = busy.get_mut(&key).and_then(VecDeque::pop_front);
        if next.is_none() {
            busy.remove(&key);
        }
        drop(busy);
        if let Some((urgency, job)) = next {
            self.start(key, urgency, job);
        }
    }
}

impl<K> fmt::Debug for Strands<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Strands")
    }
}
