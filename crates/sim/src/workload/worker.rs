//! One client of the volume and its workers.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use milpa_client::{Client, ClientConfig, FsError, HandleId};
use milpa_model::Moment;
use milpa_types::{InodeId, Name};

use crate::history::SharedHistory;
use crate::random::Random;
use crate::stalls::Ended;
use crate::trace;

use super::quota::Quota;

/// Directories that are known to have been made, and are used by everybody.
pub(crate) type Directories = Rc<RefCell<Vec<InodeId>>>;

/// What one client is to do.
#[derive(Clone)]
pub(crate) struct Plan {
    pub config: ClientConfig,
    /// Names the client in one of its lives.
    pub client: u32,
    pub workers: u32,
    pub quota: Rc<Quota>,
    pub history: SharedHistory,
    pub directories: Directories,
    pub seed: u64,
    /// Lookups are judged: the client caches no names.
    pub judges_lookups: bool,
    /// Milliseconds that a worker rests between operations, at most.
    pub pause_max_ms: u64,
}

/// A file that a worker has open.
pub(super) struct Opened {
    pub handle: HandleId,
    pub inode: InodeId,
    pub opened: Moment,
    pub writes: bool,
    /// With O_SYNC.
    pub syncs: bool,
    /// Its close has said that bytes are gone: nobody may have looked, so its fsync has to say so too.
    pub owes: bool,
}

/// One program that uses the volume.
pub(super) struct Worker {
    pub client: Client,
    pub plan: Plan,
    pub random: Random,
    pub files: Vec<Opened>,
}

/// Files that a worker has open at once.
const FILES_OPEN_MAX: usize = 4;
/// Between two tries to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

/// Connects and works until the quota is met. Gives how it ended.
pub(crate) async fn run_client(plan: Plan) -> String {
    let client = loop {
        match Client::connect(plan.config.clone()).await {
            Ok(client) => break client,
            Err(error) => {
                trace::note(&format!("cannot connect: {error}"));
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
        }
    };
    trace::note("connected");
    let mut workers = Vec::new();
    for number in 0..plan.workers {
        let random = Random::new(plan.seed, &format!("worker {} {number}", plan.client));
        let (client, plan) = (client.clone(), plan.clone());
        let worker = Worker { client, plan, random, files: Vec::new() };
        workers.push(tokio::task::spawn_local(worker.work()));
    }
    for worker in workers {
        if worker.await.is_err() {
            return "a worker panicked".to_owned();
        }
    }
    match client.shutdown().await {
        Ok(()) => "done".to_owned(),
        Err(error) => format!("done; shutdown: {error}"),
    }
}

impl Worker {
    async fn work(mut self) {
        while !self.plan.quota.is_met() {
            self.step().await;
            let pause = self.random.below(self.plan.pause_max_ms + 1);
            if pause > 0 {
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        }
        while !self.files.is_empty() {
            self.close(0).await;
        }
    }

    async fn step(&mut self) {
        // Open files are used most; names are made, moved and removed now and then.
        let has_files = !self.files.is_empty();
        match self.random.below(100) {
            0..12 => self.create().await,
            12..18 => self.open_existing().await,
            18..38 if has_files => self.write().await,
            38..56 if has_files => self.read().await,
            56..62 if has_files => self.fsync().await,
            62..64 if has_files => self.flush().await,
            64..67 if has_files => self.truncate().await,
            67..71 if has_files => {
                let place = self.random.below(self.files.len() as u64) as usize;
                self.close(place).await;
            }
            71..74 => self.mkdir().await,
            74..76 => self.rmdir().await,
            76..80 => self.unlink().await,
            80..83 => self.rename().await,
            83 => self.rename_directory().await,
            84..86 => self.link().await,
            86..88 => self.symlink().await,
            88..91 => self.readdir().await,
            91..96 => self.lookup().await,
            _ => self.getattr().await,
        }
        if self.files.len() > FILES_OPEN_MAX {
            self.close(0).await;
        }
    }

    /// Counts a call and says in the trace how it ended. `began` is a clock reading.
    pub(super) fn ended<T>(
        &self,
        operation: &'static str,
        what: &str,
        began: tokio::time::Instant,
        result: &Result<T, FsError>,
    ) {
        self.plan.quota.operation_ended();
        let took_ms = began.elapsed().as_millis() as u64;
        let error = result.as_ref().err();
        let end = error.map_or("ok".to_owned(), ToString::to_string);
        trace::note(&format!("{operation} {what}: {end} ({took_ms} ms)"));
        let mut history = self.plan.history.borrow_mut();
        history.count(operation, took_ms, error);
        let (what, at_ms) = (what.to_owned(), trace::now_ms());
        history.calls.push(Ended { operation, what, at_ms, took_ms });
    }

    pub(super) fn directory(&mut self) -> InodeId {
        let directories = self.plan.directories.borrow();
        self.random.pick(&directories).copied().unwrap_or(InodeId::ROOT)
    }

    /// One of a few names of a kind, so that clients meet.
    pub(super) fn name(&mut self, kind: char, count: u64) -> Option<Name> {
        let number = self.random.below(count);
        Name::new(format!("{kind}{number}").as_bytes()).ok()
    }
}
