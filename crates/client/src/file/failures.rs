//! What failed in the background, and who has heard of it.
//!
//! fsync tells a failure as in Linux (errseq_t): once to each descriptor that was open, and to who opens the
//! file later if no fsync has told anybody. Where bytes are gone nothing else stands for that: of a close nobody
//! may see the result, as a child that a program starts closes its copies of the program's descriptors.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::FsError;

/// How long reads go on failing after the first one. The kernel takes the first failure for its readahead's, and
/// asks once more before it tells the program.
const WARNING: Duration = Duration::from_secs(1);

/// What went wrong with a file, counted.
#[derive(Debug, Default)]
pub(super) struct Failures {
    count: u64,
    last: Option<FsError>,
    /// Which of them was the last after which no later call may succeed in full: bytes are gone, here or on the
    /// servers…
    gone: u64,
    /// … and the last that had bytes given up here, which readers had seen.
    lost: u64,
    /// Up to which one some fsync or write with O_SYNC has told, …
    told: u64,
    /// … and some writer's close.
    heard: u64,
}

/// A moment in a file's history: what was gone by then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before(u64);

/// What the user of one descriptor knows of the file's failures.
#[derive(Debug)]
pub(super) struct Listener {
    /// Told by fsync, or somebody was before its time.
    told: u64,
    /// Of no interest to its close: somebody else's was told of them before its time.
    heard: u64,
    /// Told by a write, or before its time: none of its writes' business.
    refused: u64,
    /// Told by any call but a close, or somebody was before its time.
    warned: u64,
    /// When a read began to tell.
    warned_at: Option<Instant>,
}

impl Failures {
    /// What every descriptor that is open now is to be told.
    pub(super) fn failed(&mut self, error: &FsError) {
        self.count += 1;
        self.last = Some(error.clone());
        if !error.may_pass() {
            self.gone = self.count;
        }
    }

    /// The same, and acknowledged bytes are gone: to be told to readers too.
    pub(super) fn lost(&mut self, error: &FsError) {
        self.failed(error);
        (self.gone, self.lost) = (self.count, self.count);
    }

    /// To be asked for before the bytes are written whose fate a call will tell.
    pub(super) fn before(&self) -> Before {
        Before(self.gone)
    }

    /// For a descriptor that is opened now.
    pub(super) fn listener(&self) -> Listener {
        let heard = self.heard.max(self.told);
        let refused = self.count;
        Listener { told: self.told, heard, refused, warned: heard, warned_at: None }
    }
}

impl Listener {
    /// For fsync, at its end: what was not told yet, and what is gone since it began, whoever was told of that.
    pub(super) fn fsync(&mut self, failures: &mut Failures, began: Before) -> Option<FsError> {
        let is_new = self.told < failures.count || began.0 < failures.gone;
        self.told = failures.count;
        (self.warned, self.warned_at) = (failures.count, None);
        failures.told = failures.count;
        failures.last.clone().filter(|_| is_new)
    }

    /// For a writer's close, at its end: the same, and what is gone as often as it is asked.
    pub(super) fn close(&mut self, failures: &mut Failures, began: Before) -> Option<FsError> {
        let known = self.told.max(self.heard);
        let is_new = known < failures.count || began.0 < failures.gone;
        failures.heard = failures.count;
        if failures.gone <= self.told {
            self.told = failures.count;
        }
        failures.last.clone().filter(|_| is_new)
    }

    /// For a write, at its begin, once: the sooner a program knows, the better. fsync and close tell it again.
    pub(super) fn write(&mut self, failures: &Failures) -> Option<FsError> {
        let is_new = self.told.max(self.refused) < failures.count;
        self.refused = failures.count;
        if is_new {
            self.warned = failures.count;
        }
        failures.last.clone().filter(|_| is_new)
    }

    /// For a read that began then, at its end. A reader may have seen what was lost, or counts on it: without this
    /// it would take what the file had before for what it has now.
    pub(super) fn read(&mut self, failures: &Failures, began: Instant) -> Option<FsError> {
        if self.warned < failures.lost {
            self.warned = failures.lost;
            self.warned_at = Some(Instant::now());
        }
        let is_warned = self.warned_at.is_some_and(|at| began < at + WARNING);
        let last = failures.last.clone().filter(|_| is_warned)?;
        Some(FsError::Lost(Box::new(last)))
    }
}
