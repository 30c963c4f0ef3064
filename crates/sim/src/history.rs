//! What the clients asked and were told, in one order, and what the models say about it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use milpa_client::FsError;
use milpa_model::Moment;
use milpa_model::content::{Client, Content};
use milpa_model::dentry::{Call, Dentry, Named};
use milpa_model::linear::{Timed, Verdict, check};
use milpa_types::{InodeId, MetaError, Name};

use crate::stalls::Ended;
use crate::trace;

/// A broken promise.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    /// Which check found it.
    pub check: &'static str,
    /// What it saw.
    pub detail: String,
}

/// One name of one directory.
pub(crate) type Key = (InodeId, Name);

/// Calls by kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallCounts {
    pub done: u64,
    pub failed: u64,
    pub unknown: u64,
    pub longest_ms: u64,
}

/// The history of a run.
#[derive(Debug, Default)]
pub(crate) struct History {
    moment: Moment,
    pub names: BTreeMap<Key, Vec<Timed<Call>>>,
    pub contents: BTreeMap<InodeId, Content>,
    pub linked: BTreeSet<InodeId>,
    pub violations: Vec<Violation>,
    pub counts: BTreeMap<&'static str, CallCounts>,
    /// How long each took.
    pub calls: Vec<Ended>,
    /// Errors that clients saw: operation and text.
    pub errors: BTreeMap<String, u64>,
    pub next_pattern: u64,
    /// Writes that an fsync confirmed.
    pub synced_writes: u64,
    /// Reads whose bytes were judged.
    pub judged_reads: u64,
}

/// Shared by the workers of all clients.
pub(crate) type SharedHistory = Rc<RefCell<History>>;

/// What became of a call that changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It surely did nothing.
    Refused,
    Unknown,
}

/// What an error says about a change.
pub(crate) fn outcome_of(error: &FsError) -> Outcome {
    match error {
        FsError::Meta(
            MetaError::NotFound
            | MetaError::Exists
            | MetaError::NotDirectory
            | MetaError::IsDirectory
            | MetaError::NotEmpty
            | MetaError::Invalid
            | MetaError::Loop
            | MetaError::NotPermitted
            | MetaError::TooManyLinks
            | MetaError::NoSpace
            | MetaError::PartitionFull
            | MetaError::TooLarge
            | MetaError::Locked,
        )
        | FsError::BadHandle
        | FsError::Invalid(_)
        | FsError::TooLarge
        | FsError::Name(_) => Outcome::Refused,
        // A session that ended may have done it in an earlier try.
        _ => Outcome::Unknown,
    }
}

impl History {
    pub fn moment(&mut self) -> Moment {
        self.moment += 1;
        self.moment
    }

    pub fn violated(&mut self, check: &'static str, detail: String) {
        trace::note(&format!("VIOLATION {check}: {detail}"));
        self.violations.push(Violation { check, detail });
    }

    /// A change of a name begins. Until it ends its outcome is unknown.
    pub fn begin_name(&mut self, key: &Key, unknown: Call) -> usize {
        let begin = self.moment();
        let calls = self.names.entry(key.clone()).or_default();
        calls.push(Timed { begin, end: None, call: unknown });
        calls.len() - 1
    }

    /// It has ended: as this call, or with no effect that could be judged.
    pub fn end_name(&mut self, key: &Key, place: usize, call: Option<Call>) {
        let now = self.moment();
        let Some(timed) = self.names.get_mut(key).and_then(|calls| calls.get_mut(place)) else {
            return;
        };
        match call {
            Some(call) => (timed.end, timed.call) = (Some(now), call),
            // Places of others must not move: a call that cannot have mattered to anybody.
            None => (timed.end, timed.begin) = (None, Moment::MAX),
        }
    }

    /// Something was seen under a name.
    pub fn saw(&mut self, key: &Key, begin: Moment, call: Call) {
        let end = Some(self.moment());
        self.names.entry(key.clone()).or_default().push(Timed { begin, end, call });
    }

    pub fn content(&mut self, inode: InodeId) -> &mut Content {
        self.contents.entry(inode).or_default()
    }

    /// Power was cut at a data server.
    pub fn power_cut(&mut self, server: u32) {
        self.contents.values_mut().for_each(|content| content.power_cut(server));
    }

    /// A client's life is over.
    pub fn client_died(&mut self, client: Client) {
        self.contents.values_mut().for_each(|content| content.client_failed(client));
    }

    /// Counts a call that has ended.
    pub fn count(&mut self, operation: &'static str, took_ms: u64, error: Option<&FsError>) {
        let counts = self.counts.entry(operation).or_default();
        counts.longest_ms = counts.longest_ms.max(took_ms);
        match error.map(outcome_of) {
            None => counts.done += 1,
            Some(Outcome::Refused) => counts.failed += 1,
            Some(Outcome::Unknown) => counts.unknown += 1,
        }
        if let Some(error) = error {
            *self.errors.entry(format!("{operation}: {error}")).or_default() += 1;
        }
    }

    /// How many calls have ended.
    pub fn operations(&self) -> u64 {
        self.counts.values().map(|counts| counts.done + counts.failed + counts.unknown).sum()
    }

    /// Judges every name. Gives how many searches were given up.
    pub fn judge_names(&mut self) -> u64 {
        let judge = Dentry { linked: std::mem::take(&mut self.linked) };
        let (mut found, mut given_up) = (Vec::new(), 0);
        for ((parent, name), calls) in &self.names {
            let calls: Vec<_> = calls.iter().filter(|c| c.begin != Moment::MAX).cloned().collect();
            match check(&judge, Named::Nothing, &calls) {
                Verdict::Linearizable => {}
                Verdict::Unknown => given_up += 1,
                Verdict::Violated { explained } => {
                    let mut detail = format!(
                        "name {name} of directory {parent}: {explained} of its calls can be explained"
                    );
                    for call in &calls {
                        let end = call.end.map_or("?".to_owned(), |end| end.to_string());
                        detail += &format!("\n    {}..{end} {:?}", call.begin, call.call);
                    }
                    found.push(detail);
                }
            }
        }
        self.linked = judge.linked;
        found.into_iter().for_each(|detail| self.violated("linearizable names", detail));
        given_up
    }
}
