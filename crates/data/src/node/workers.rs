//! The threads of one disk.
//!
//! Four queues: jobs of one extent that must stay in order go to one thread, chosen by the
//! extent; reads go to whichever thread is free; what may take long (flushes, digests) has
//! threads of its own, so that nothing waits behind it; and frees, which come by the thousand and
//! for which nobody waits, have one, so that no flush waits behind them. A job returns what is to be done next on
//! the node's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use milpa_host::jobs::Threads;
use milpa_types::{ExtentId, PartitionId};
use tokio::sync::mpsc::UnboundedSender;

use super::disk::{Disk, DiskEvent};

/// What a job hands to the node's thread.
pub(crate) type Continuation = Box<dyn FnOnce(&mut Disk) + Send>;

/// Threads for flushes and other long jobs.
const SLOW_THREADS: usize = 4;

/// The threads of one disk. They end when this is dropped and their queues are empty.
pub(crate) struct Workers {
    ordered: Vec<Threads>,
    reads: Threads,
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
        let one = |number| Threads::spawn(&format!("{name}-w{number}"), 1);
        let ordered = (0..threads).map(one).collect::<std::io::Result<_>>()?;
        let reads = Threads::spawn(&format!("{name}-r"), threads)?;
        let slow = Threads::spawn(&format!("{name}-s"), SLOW_THREADS)?;
        let frees = Threads::spawn(&format!("{name}-f"), 1)?;
        let depth = Arc::new(AtomicUsize::new(0));
        Ok(Workers { ordered, reads, slow, frees, depth, depth_max, events })
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
        (partition, extent): (PartitionId, ExtentId),
        job: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Disk, T) + Send + 'static,
    ) {
        let mixed = (partition.0 ^ extent.0.rotate_left(17)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let threads = self.ordered.len().max(1) as u64;
        let thread = usize::try_from((mixed >> 32) % threads).unwrap_or(0);
        if let Some(queue) = self.ordered.get(thread) {
            self.submit(queue, job, then);
        }
    }

    /// A job in no order that answers by itself.
    pub fn read(&self, job: impl FnOnce() + Send + 'static) {
        self.submit(&self.reads, job, |_, ()| {});
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
        self.depth.fetch_add(1, Ordering::Relaxed);
        let (depth, events) = (Arc::clone(&self.depth), self.events.clone());
        queue.submit(job, move |result| {
            depth.fetch_sub(1, Ordering::Relaxed);
            let _ = events.send(DiskEvent::Then(Box::new(move |disk| then(disk, result))));
        });
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
