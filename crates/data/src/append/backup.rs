//! The receiving side of an append.

use std::collections::BTreeMap;

use milpa_types::{DataError, Epoch, ExtentId, NodeId};
use milpa_wire::data::{Configuration, ExtentState};

use super::RequestNumber;

/// What the backup needs to know of a [`Replicate`](milpa_wire::data::Replicate).
#[derive(Clone, Copy, Debug)]
pub struct ReplicateHead {
    /// Who sent it.
    pub from: NodeId,
    /// The sender's epoch.
    pub epoch: Epoch,
    /// Which extent.
    pub extent: ExtentId,
    /// Where.
    pub offset: u64,
    /// Bytes; 0 only flushes or tells the commit offset.
    pub length: u64,
    /// The sender's commit offset.
    pub committed: u64,
    /// Flush before answering.
    pub sync: bool,
}

/// An order to the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupEffect {
    /// Write the request's bytes, flush if asked, and call [`Backup::written`]. Writes of one
    /// extent are performed in the order in which they were ordered.
    Write {
        /// Which request.
        request: RequestNumber,
        /// The extent is new here.
        create: bool,
    },
    /// Nothing to write: flush if asked, note the commit offset, then answer.
    Confirm {
        /// Which request.
        request: RequestNumber,
    },
    /// Answer, and forget the request.
    Answer {
        /// Which request.
        request: RequestNumber,
        /// How it went.
        result: Result<(), DataError>,
    },
}

/// How far one extent of this epoch has come here.
#[derive(Debug, Default)]
struct Progress {
    /// One past the last byte that was ordered to be written.
    ordered: u64,
    /// One past the last byte that is written.
    written: u64,
    /// A write failed: what follows it cannot be accepted.
    failed: Option<DataError>,
    /// Repeats that wait until `written` reaches their end.
    waiting: Vec<(u64, RequestNumber)>,
}

/// The replica's own view of an extent, asked of the store before the first bytes arrive.
pub type Replica = Option<ExtentState>;

/// Receives bytes from the primary of the present epoch.
#[derive(Debug)]
pub struct Backup {
    node: NodeId,
    configuration: Configuration,
    extents: BTreeMap<ExtentId, Progress>,
}

impl Backup {
    /// A member of `configuration`, or not.
    #[must_use]
    pub fn new(node: NodeId, configuration: Configuration) -> Backup {
        Backup { node, configuration, extents: BTreeMap::new() }
    }

    /// A new epoch fences the old one's appends: its extents take no more.
    pub fn configure(&mut self, configuration: Configuration, effects: &mut Vec<BackupEffect>) {
        let current = configuration.epoch;
        self.configuration = configuration;
        for progress in std::mem::take(&mut self.extents).into_values() {
            for (_, request) in progress.waiting {
                effects.push(refuse(request, DataError::StaleEpoch { current }));
            }
        }
    }

    /// Bytes arrived, their checksums not yet looked at. `replica` tells what the store holds;
    /// it is asked once for each extent.
    pub fn replicate(
        &mut self,
        request: RequestNumber,
        head: &ReplicateHead,
        replica: impl FnOnce() -> Replica,
        effects: &mut Vec<BackupEffect>,
    ) {
        if let Err(error) = self.admit(head) {
            effects.push(refuse(request, error));
            return;
        }
        let progress = match self.extents.entry(head.extent) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(free) => {
                match first_sight(head, replica(), self.configuration.epoch) {
                    Ok(progress) => free.insert(progress),
                    Err(error) => {
                        effects.push(refuse(request, error));
                        return;
                    }
                }
            }
        };
        effects.extend(progress.accept(request, head));
    }

    fn admit(&self, head: &ReplicateHead) -> Result<(), DataError> {
        if head.epoch != self.configuration.epoch {
            return Err(DataError::StaleEpoch { current: self.configuration.epoch });
        }
        if head.from != self.configuration.primary {
            return Err(DataError::NotPrimary { hint: Some(self.configuration.primary) });
        }
        let member = self.configuration.members.contains(&self.node);
        if !member || self.configuration.primary == self.node {
            return Err(DataError::Invalid);
        }
        Ok(())
    }

    /// A write ordered by [`BackupEffect::Write`] is done.
    pub fn written(
        &mut self,
        request: RequestNumber,
        extent: ExtentId,
        end: u64,
        result: Result<(), DataError>,
        effects: &mut Vec<BackupEffect>,
    ) {
        let Some(progress) = self.extents.get_mut(&extent) else {
            // A new epoch, or a seal, came between. The bytes may be here, but whoever decided
            // about the extent's length may not have seen them, so they do not count.
            let current = self.configuration.epoch;
            effects
                .push(refuse(request, result.err().unwrap_or(DataError::StaleEpoch { current })));
            return;
        };
        match &result {
            Ok(()) => progress.written = progress.written.max(end),
            Err(error) => progress.failed = Some(error.clone()),
        }
        progress.release(effects);
        effects.push(BackupEffect::Answer { request, result });
    }

    /// The extent was sealed or deleted here.
    pub fn forget(&mut self, extent: ExtentId) {
        self.extents.remove(&extent);
    }
}

/// What is known of an extent when the first bytes of it arrive since the start of the process or
/// of the epoch.
fn first_sight(
    head: &ReplicateHead,
    replica: Replica,
    epoch: Epoch,
) -> Result<Progress, DataError> {
    match replica {
        None if head.offset == 0 => Ok(Progress::default()),
        None => Err(DataError::OutOfOrder { expected: 0 }),
        Some(state) if state.sealed || state.epoch != epoch => {
            Err(DataError::Sealed { length: state.length })
        }
        Some(state) => {
            Ok(Progress { ordered: state.length, written: state.length, ..Progress::default() })
        }
    }
}

impl Progress {
    fn accept(&mut self, request: RequestNumber, head: &ReplicateHead) -> Option<BackupEffect> {
        if let Some(error) = &self.failed {
            return Some(refuse(request, error.clone()));
        }
        let Some(end) = head.offset.checked_add(head.length) else {
            return Some(refuse(request, DataError::Invalid));
        };
        if head.length > 0 && head.offset == self.ordered {
            let create = self.ordered == 0;
            self.ordered = end;
            return Some(BackupEffect::Write { request, create });
        }
        if end > self.ordered {
            return Some(refuse(request, DataError::OutOfOrder { expected: self.ordered }));
        }
        if end <= self.written {
            return Some(BackupEffect::Confirm { request });
        }
        self.waiting.push((end, request));
        None
    }

    fn release(&mut self, effects: &mut Vec<BackupEffect>) {
        let (written, failed) = (self.written, self.failed.clone());
        self.waiting.retain(|&(end, request)| {
            match &failed {
                Some(error) => effects.push(refuse(request, error.clone())),
                None if end <= written => effects.push(BackupEffect::Confirm { request }),
                None => return true,
            }
            false
        });
    }
}

fn refuse(request: RequestNumber, error: DataError) -> BackupEffect {
    BackupEffect::Answer { request, result: Err(error) }
}
