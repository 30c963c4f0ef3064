//! The threads of one disk.
//!
//! Jobs of one extent that must stay in order are a strand, on whichever thread is free; so are reads, in no order.
//! Both have threads of their own for what is copied, that give way to those for clients. What may take long (flushes,
//! digests) has threads too, so that nothing waits behind it; and frees, which come by the thousand and for which nobody
//! waits, have one, so that no flush waits behind them. A job returns what is to be done next on the node's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use milpa_host::jobs::{Strands, Threads, Urgency};
use milpa_types::{ExtentId, PartitionId};
use tokio::sync::mpsc::UnboundedSender;

use super::disk::{Disk, DiskEvent};

/// What a job hands to the node's thread.
pub(crate) type Continuation = Box<dyn FnOnce(&mut Disk) + Send>;

/// Threads for flushes and other long jobs.
const SLOW_THREADS: usize = 4;

/// The threads of one disk. They end when this is dropped and their queues are empty.
pub(crate) struct Workers {
    ordered: Strands<(PartitionId, ExtentId)>,
    reads: Threads,
    copies: Threads,
    slow: Threads,
    frees: Threads,
    depth: Arc<AtomicUsize>,
    depth_max: usize,
    events: UnboundedSender<DiskEvent>,
}

impl Workers {
    /// Starts the threads.
    pub fn spawn(
        name: &str,
        threads: usize,
        depth_max: usize,
        events: UnboundedSender<DiskEvent>,
    ) -> std::io::Result<Workers> {
        let spawn =
            |what, count, urgency| Threads::spawn(&format!("{name}-{what}"), count, urgency);
        let ordered = Strands::spawn(name, threads)?;
        let reads = spawn("r", threads, Urgency::Foreground)?;
        let copies = spawn("c", threads, Urgency::Background)?;
        let slow = spawn("s", SLOW_THREADS, Urgency::Foreground)?;
        let frees = spawn("f", 1, Urgency::Foreground)?;
        let depth = Arc::new(AtomicUsize::new(0));
        Ok(Workers { ordered, reads, copies, slow, frees, depth, depth_max, events })
    }

    /// Whether requests should be refused until the queues are shorter. Jobs that follow from
    /// accepted requests are always taken: their number is bounded by those requests.
    pub fn is_full(&self) -> bool {
        self.depth.load(Ordering::Relaxed) >= self.depth_max
    }

    /// Jobs waiting or running.
    pub fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    /// A job that runs after all earlier ones of the same extent.
    pub fn ordered<T: Send + 'static>(
        &self,
        extent: (PartitionId, ExtentId),
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        let report = self.report(then);
        self.ordered.submit(extent, Urgency::Foreground, job, report);
    }

    /// The same, for what is copied here.
    pub fn ordered_copy<T: Send + 'static>(
        &self,
        extent: (PartitionId, ExtentId),
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        let report = self.report(then);
        self.ordered.submit(extent, Urgency::Background, job, report);
    }

    /// A job in no order that answers by itself.
    pub fn read(&self, job: impl FnOnce() + Send + 'static) {
        self.submit(&self.reads, job, |_, ()| {});
    }

    /// A job that reads what is copied, or verified, and for which no client waits.
    pub fn copy<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        self.submit(&self.copies, job, then);
    }

    /// A job that may take long.
    pub fn slow<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        self.submit(&self.slow, job, then);
    }

    /// A job that gives space back.
    pub fn free<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        self.submit(&self.frees, job, then);
    }

    fn submit<T: Send + 'static>(
        &self,
        queue: &Threads,
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        queue.submit(job, self.report(then));
    }

    /// Counts a job that is about to be submitted, and gives what it does at its end.
    fn report<T: Send + 'static>(
        &self,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) -> impl FnOnce(T) + Send + 'static {
        self.depth.fetch_add(1, Ordering::Relaxed);
        let (depth, events) = (Arc::clone(&self.depth), self.events.clone());
        move |result| {
            depth.fetch_sub(1, Ordering::Relaxed);
            let _ = events.send(DiskEvent::Then(Box::new(move |disk| then(disk, result))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_flush_waits_for_frees() {
        let (events, _nobody) = tokio::sync::mpsc::unbounded_channel();
        let workers = Workers::spawn("test", 1, 100, events).unwrap();
        let gate = Arc::new(Mutex::new(()));
        let shut = gate.lock().unwrap();
        for _ in 0..2 * SLOW_THREADS {
            let gate = Arc::clone(&gate);
            workers.free(move || drop(gate.lock()), |_, ()| {});
        }
        let (sender, flushed) = mpsc::channel();
        workers.slow(move || sender.send(()).unwrap(), |_, ()| {});
        flushed.recv_timeout(Duration::from_secs(10)).unwrap();
        drop(shut);
    }
}
