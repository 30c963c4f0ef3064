//! The other side of an operation: steps that another partition's leader asks for.
//!
//! | step | prepared | `Finish` | `Abort` |
//! |---|---|---|---|
//! | `PrepareInode` | the inode is made; no dentry names it | nothing | it is deleted |
//! | `PrepareLink` | one link more | nothing | one link less |
//! | `PrepareRemoveDirectory` | empty, and takes no entries | it is deleted | it takes entries again |
//! | `PrepareTake` | the name is locked | the dentry is removed | the name is unlocked |
//! | `DropLink` | it is remembered | one link less | nothing |
//!
//! Each prepare leaves an [`Intent`], so that asked again it gives the same answer. `Finish` and
//! `Abort` turn all intents of the operation here into one remembered end: a prepare that a paused
//! leader sends after it is refused. The memory is bounded ([`ENDED_MAX`]); should a step be later
//! than that, its intent is found old, its coordinator does not know it (`Step::Inquire`), and it
//! is aborted. That is why `DropLink`, too, changes nothing before `Finish`: a late one would
//! otherwise take a link that is not its own.

use milpa_types::{FileKind, InodeId, MetaError, Name, SessionId, Timestamp};
use milpa_wire::meta::{MetaAnswer, MetaReply, OperationId, Step, StepOutcome};
use serde::{Deserialize, Serialize};

use super::Partition;
use super::sessions::SESSIONS_MAX;
use super::table::{IntentKind, Session};

/// Ended operations (and sessions) remembered, at most; the older half is then forgotten.
pub(crate) const ENDED_MAX: u64 = 4096;
/// Intents held, at most: above it coordinators are told `Busy`.
const INTENTS_MAX: u64 = 65_536;

/// A prepared step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Intent {
    pub what: Prepared,
    /// The answer, should it be asked for again.
    pub outcome: StepOutcome,
}

/// What must be finished or undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Prepared {
    Inode { inode: InodeId },
    Link { inode: InodeId },
    RemoveDirectory { inode: InodeId },
    Take { parent: InodeId, name: Name },
    Drop { inode: InodeId, held: Option<SessionId> },
}

impl Prepared {
    /// The inode whose link count or existence it is about.
    pub(crate) fn inode(&self) -> Option<InodeId> {
        match self {
            Prepared::Inode { inode }
            | Prepared::Link { inode }
            | Prepared::RemoveDirectory { inode }
            | Prepared::Drop { inode, .. } => Some(*inode),
            Prepared::Take { .. } => None,
        }
    }
}

fn kind(step: &Step) -> Option<IntentKind> {
    Some(IntentKind(match step {
        Step::PrepareInode { .. } => 0,
        Step::PrepareLink { .. } => 1,
        Step::PrepareRemoveDirectory { .. } => 2,
        Step::PrepareTake { .. } => 3,
        Step::DropLink { .. } => 4,
        Step::Finish | Step::Abort | Step::Inquire => return None,
    }))
}

impl Partition {
    /// Does one step of another partition's operation.
    pub(crate) fn participate(
        &mut self,
        index: u64,
        operation: OperationId,
        now: Timestamp,
        step: &Step,
    ) -> MetaReply {
        let outcome = match step {
            Step::Inquire => StepOutcome::Known(self.tables.operations.contains(&operation)),
            Step::Finish => {
                self.end_operation(index, operation, |partition, what| partition.carry(what, now));
                StepOutcome::Done
            }
            Step::Abort => {
                self.end_operation(index, operation, |partition, what| partition.undo(what));
                StepOutcome::Done
            }
            prepare => self.prepare(operation, now, prepare)?,
        };
        Ok(MetaAnswer::Step(outcome))
    }

    fn prepare(
        &mut self,
        operation: OperationId,
        now: Timestamp,
        step: &Step,
    ) -> Result<StepOutcome, MetaError> {
        let Some(kind) = kind(step) else {
            return Err(MetaError::Invalid);
        };
        if let Some(intent) = self.tables.intents.get(&(operation, kind)) {
            return Ok(intent.outcome);
        }
        if self.tables.ended_operations.contains(&operation) {
            return Err(MetaError::Stale);
        }
        if self.tables.intents.count() >= INTENTS_MAX {
            return Err(MetaError::Busy);
        }
        let (what, outcome) = match step {
            Step::PrepareInode { inode, parent } => {
                let id = self.make_inode(inode, *parent, now)?;
                (Prepared::Inode { inode: id }, self.inode_outcome(id))
            }
            Step::PrepareLink { inode } => {
                self.check_linkable(*inode)?;
                self.add_link(*inode, now);
                (Prepared::Link { inode: *inode }, self.inode_outcome(*inode))
            }
            Step::PrepareRemoveDirectory { inode } => {
                self.check_removable(*inode, None)?;
                self.tables.locked_directories.insert(inode, &operation);
                (Prepared::RemoveDirectory { inode: *inode }, StepOutcome::Done)
            }
            Step::PrepareTake { parent, name } => {
                self.directory(*parent)?;
                self.check_unlocked(*parent, name, None)?;
                let key = (*parent, name.clone());
                let dentry = self.tables.dentries.get(&key).ok_or(MetaError::NotFound)?;
                self.tables.locked_names.insert(&key, &operation);
                let outcome = StepOutcome::Taken { inode: dentry.inode, kind: dentry.kind };
                (Prepared::Take { parent: *parent, name: name.clone() }, outcome)
            }
            Step::DropLink { inode, held } => {
                self.check_owned(*inode)?;
                (Prepared::Drop { inode: *inode, held: *held }, StepOutcome::Done)
            }
            Step::Finish | Step::Abort | Step::Inquire => return Err(MetaError::Invalid),
        };
        self.tables.intents.insert(&(operation, kind), &Intent { what, outcome: outcome.clone() });
        Ok(outcome)
    }

    fn inode_outcome(&self, inode: InodeId) -> StepOutcome {
        match self.tables.inodes.get(&inode) {
            Some(record) => StepOutcome::Inode(record.attributes(inode)),
            None => StepOutcome::Done,
        }
    }

    fn end_operation(
        &mut self,
        index: u64,
        operation: OperationId,
        end: impl Fn(&mut Partition, Prepared),
    ) {
        let from = (operation, IntentKind(0));
        let of_operation =
            self.tables.intents.range(&from).take_while(|(key, _)| key.0 == operation);
        for (key, intent) in of_operation.collect::<Vec<_>>() {
            self.tables.intents.remove(&key);
            end(self, intent.what);
        }
        self.tables.ended_operations.insert(&operation, &index);
        forget_oldest(&mut self.tables.ended_operations);
    }

    /// The commit point is passed: makes what was prepared final.
    fn carry(&mut self, what: Prepared, now: Timestamp) {
        match what {
            Prepared::Inode { .. } | Prepared::Link { .. } => {}
            Prepared::RemoveDirectory { inode } => {
                self.tables.locked_directories.remove(&inode);
                self.delete_inode(inode);
            }
            Prepared::Take { parent, name } => {
                let key = (parent, name);
                self.tables.locked_names.remove(&key);
                if let Some(dentry) = self.tables.dentries.get(&key) {
                    self.remove_dentry(&key, dentry.kind, now);
                    // Its directory is in another partition from now on.
                    self.moved(dentry, InodeId(0), now);
                }
            }
            Prepared::Drop { inode, held } => {
                if let Some(session) = held {
                    self.note_holder(session);
                }
                self.drop_link(inode, held, now);
            }
        }
    }

    /// Makes as if it had not been prepared.
    fn undo(&mut self, what: Prepared) {
        match what {
            Prepared::Inode { inode } => self.delete_inode(inode),
            Prepared::Link { inode } => {
                // The time stays that of the prepare: who aborts after an inquiry has no clock.
                let changed = self.tables.inodes.get(&inode).map(|record| record.changed);
                self.drop_link(inode, None, changed.unwrap_or_default());
            }
            Prepared::RemoveDirectory { inode } => {
                self.tables.locked_directories.remove(&inode);
            }
            Prepared::Take { parent, name } => {
                self.tables.locked_names.remove(&(parent, name));
            }
            Prepared::Drop { .. } => {}
        }
    }

    /// A session that never opened here may hold an inode all the same; its lease is watched from
    /// now on. One that ended may not.
    fn note_holder(&mut self, session: SessionId) {
        let sessions = &self.tables.sessions;
        let is_new = !sessions.contains(&session) && sessions.count() < SESSIONS_MAX;
        if is_new && !self.tables.ended_sessions.contains(&session) {
            let holder = Session { is_opened: false, unanswered: 0 };
            self.tables.sessions.insert(&session, &holder);
        }
    }

    /// Whether entries may be added to or removed from `parent` under `name`: `Locked` if an
    /// operation other than `own` holds the name or is about to remove the directory.
    pub(crate) fn check_unlocked(
        &self,
        parent: InodeId,
        name: &Name,
        own: Option<OperationId>,
    ) -> Result<(), MetaError> {
        let holder = self.tables.locked_names.get(&(parent, name.clone()));
        if holder.is_some_and(|holder| Some(holder) != own) {
            return Err(MetaError::Locked);
        }
        if self.tables.locked_directories.contains(&parent) {
            return Err(MetaError::Locked);
        }
        Ok(())
    }

    /// Whether this directory of ours can be removed now. Names that are locked below it may
    /// become entries: it counts as in use.
    pub(crate) fn check_removable(
        &self,
        inode: InodeId,
        own: Option<OperationId>,
    ) -> Result<(), MetaError> {
        let record = self.inode(inode)?;
        if record.kind != FileKind::Directory {
            return Err(MetaError::NotDirectory);
        }
        if self.tables.dentries.range(&inode).next().is_some_and(|(key, _)| key.0 == inode) {
            return Err(MetaError::NotEmpty);
        }
        let locked = self.tables.locked_names.range(&inode).take_while(|(key, _)| key.0 == inode);
        let in_use = locked.map(|(_, holder)| holder).any(|holder| Some(holder) != own);
        if in_use || self.tables.locked_directories.contains(&inode) {
            return Err(MetaError::Locked);
        }
        Ok(())
    }
}

/// Keeps a memory of ends bounded: forgets the older half when it is over [`ENDED_MAX`].
pub(crate) fn forget_oldest<K: super::table::Key + Ord>(table: &mut super::table::Table<K, u64>) {
    if table.count() <= ENDED_MAX {
        return;
    }
    let mut ends: Vec<_> = table.iter().map(|(key, index)| (index, key)).collect();
    ends.sort_unstable();
    for (_, key) in ends.iter().take(ends.len() / 2) {
        table.remove(key);
    }
}
