//! What failed in the background, and who has heard of it.
//!
//! fsync tells a failure as in Linux (errseq_t): once to each descriptor that was open, and, where bytes are
//! gone, to who opens the file later if no fsync has told anybody. Nothing else stands for that: of a close
//! nobody may see the result, as a child that a program starts closes its copies of the program's descriptors.

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
    /// Up to which one some fsync or write with O_SYNC has told…
    told: u64,
    /// … and any call.
    heard: u64,
}

/// A moment in a file's history: what was gone by then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before(u64);

/// What the user of one descriptor knows of the file's failures.
#[derive(Debug)]
pub(super) struct Listener {
    /// Which fsync has told, here or to somebody before its time. A close too, where nothing is gone.
    told: u64,
    /// Which somebody was told of before its time: its close does not repeat them.
    heard: u64,
    /// Which a write has told, or were before its time: none of its writes' business.
    refused: u64,
    /// Of which a reader knows.
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

    /// For a descriptor that is opened now. What cost nothing is none of its business.
    pub(super) fn listener(&self) -> Listener {
        let known = |by: u64| if self.gone <= by { self.count } else { by };
        let (told, heard) = (known(self.told), known(self.heard));
        Listener { told, heard, refused: self.count, warned: heard, warned_at: None }
    }

    /// The last one, if it is for the caller to tell.
    fn told_if(&self, is_new: bool) -> Option<FsError> {
        self.last.as_ref().filter(|_| is_new).cloned()
    }

    /// Whether bytes are gone of which no fsync has told anybody.
    pub(super) fn is_owed(&self) -> bool {
        self.told < self.gone
    }
}

impl Listener {
    /// For fsync, at its end: what was not told yet, and what is gone since it began, whoever was told of that.
    pub(super) fn fsync(&mut self, failures: &mut Failures, began: Before) -> Option<FsError> {
        let is_new = self.told < failures.count || began.0 < failures.gone;
        self.told = failures.count;
        (self.warned, self.warned_at) = (failures.count, None);
        (failures.told, failures.heard) = (failures.count, failures.count);
        failures.told_if(is_new)
    }

    /// For a writer's close, at its end: the same, and what is gone as often as it is asked.
    pub(super) fn close(&mut self, failures: &mut Failures, began: Before) -> Option<FsError> {
        let known = self.told.max(self.heard);
        let is_new = known < failures.count || began.0 < failures.gone;
        failures.heard = failures.count;
        for told in [&mut self.told, &mut self.heard] {
            if failures.gone <= *told {
                *told = failures.count;
            }
        }
        failures.told_if(is_new)
    }

    /// For a write, at its begin, once: the sooner a program knows, the better. fsync and close tell it again.
    pub(super) fn write(&mut self, failures: &mut Failures) -> Option<FsError> {
        let is_new = self.told.max(self.refused) < failures.count;
        self.refused = failures.count;
        if is_new {
            (self.warned, failures.heard) = (failures.count, failures.count);
        }
        failures.told_if(is_new)
    }

    /// For a read that began then, at its end. A reader may have seen what was lost, or counts on it: without this
    /// it would take what the file had before for what it has now.
    pub(super) fn read(&mut self, failures: &mut Failures, began: Instant) -> Option<FsError> {
        if self.warned < failures.lost {
            self.warned = failures.lost;
            self.warned_at = Some(Instant::now());
            failures.heard = failures.heard.max(failures.lost);
        }
        let is_warned = self.warned_at.is_some_and(|at| began < at + WARNING);
        failures.told_if(is_warned).map(|last| FsError::Lost(Box::new(last)))
    }
}
