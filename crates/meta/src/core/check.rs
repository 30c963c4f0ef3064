//! What `milpa fsck` asks: is this partition's state what its invariants say?
//!
//! Asked of a frozen copy ([`Partition::freeze`]), so that an answer is of one log index however long
//! it takes, and takes that time on a thread of its own. All tables but the requests' are in the order of
//! inode ids: they are walked side by side, and a page needs no memory but its answer.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::RangeInclusive;

use milpa_types::{ExtentId, FileKind, InodeId, MetaError, Name, PartitionId, SessionId};
use milpa_wire::check::{
    CHECK_EXAMPLES_MAX, CHECK_FAULTS_MAX, CHECK_INODES_MAX, CHECK_RECORDS_MAX, CheckedInode, Fault,
    FaultKind, Looked, LookedInode, MetaCheck, MetaChecked, names_wanted,
};
use milpa_wire::meta::{MetaAnswer, MetaReply};

use super::Partition;
use super::content::segment_of;
use super::inode::{Body, Inode};
use super::table::{Dentry, Key, Number, Records, SegmentRecord};
use super::tree::hash_bytes;

impl Partition {
    /// A copy of the state as it is now. Takes microseconds whatever the size, and costs memory only
    /// for what changes while it lives.
    #[must_use]
    pub fn freeze(&self) -> Partition {
        Partition {
            setup: self.setup.clone(),
            applied: self.applied,
            tables: self.tables.clone(),
            counters: self.counters.clone(),
        }
    }

    /// Answers one question. May take seconds: ask a frozen copy, on a thread.
    ///
    /// # Errors
    ///
    /// `Invalid` for a question that is too large.
    pub fn check(&self, check: &MetaCheck) -> MetaReply {
        let checked = match check {
            MetaCheck::Inodes { from } => self.check_inodes(*from),
            MetaCheck::Dentries { after, first, last } => {
                self.check_dentries(after.as_ref(), (*first, *last))
            }
            MetaCheck::Names { inodes } if inodes.len() <= CHECK_INODES_MAX => {
                MetaChecked::Names(self.look(inodes))
            }
            MetaCheck::Segments { after, first, last } => {
                self.check_segments(*after, *first..=*last)
            }
            MetaCheck::Offers { offers } if offers.len() <= CHECK_INODES_MAX => {
                MetaChecked::Offers(offers.iter().map(|offer| self.judge(offer)).collect())
            }
            MetaCheck::Names { .. } | MetaCheck::Offers { .. } => return Err(MetaError::Invalid),
        };
        Ok(MetaAnswer::Checked(checked))
    }

    fn check_inodes(&self, from: InodeId) -> MetaChecked {
        let tables = &self.tables;
        let mut walk = Walk {
            partition: self,
            names: tables.dentries.range(&from).peekable(),
            segments: tables.segments.range(&from).peekable(),
            holders: tables.held.range(&from).peekable(),
            inodes: Vec::new(),
            faults: Vec::new(),
            unlisted: 0,
            dentries: 0,
            segments_seen: 0,
        };
        let mut next = None;
        for (id, record) in tables.inodes.range(&from) {
            if walk.records() >= CHECK_RECORDS_MAX as u64 {
                next = Some(id);
                break;
            }
            walk.strays_below(Some(id));
            walk.inode(id, &record);
        }
        walk.strays_below(next);
        MetaChecked::Inodes {
            inodes: walk.inodes,
            faults: walk.faults,
            unlisted: walk.unlisted,
            dentries: walk.dentries,
            segments: walk.segments_seen,
            next,
        }
    }

    fn check_dentries(
        &self,
        after: Option<&(InodeId, Name)>,
        (first, last): (InodeId, InodeId),
    ) -> MetaChecked {
        let records = match after {
            Some(after) => self.tables.dentries.range(after),
            None => self.tables.dentries.iter(),
        };
        let mut records = records.skip_while(|(key, _)| Some(key) == after).peekable();
        let (mut named, mut at) = (Vec::new(), None);
        for _ in 0..CHECK_RECORDS_MAX {
            let Some((key, dentry)) = records.next() else { break };
            if (first..=last).contains(&dentry.inode) {
                named.push((dentry.inode, dentry.kind));
            }
            at = Some(key);
        }
        MetaChecked::Dentries { named, next: at.filter(|_| records.peek().is_some()) }
    }

    /// What is known here of each of `inodes`.
    fn look(&self, inodes: &[InodeId]) -> Vec<Looked> {
        let mut found: BTreeMap<InodeId, Looked> =
            inodes.iter().map(|id| (*id, self.look_at(*id))).collect();
        for (_, intent) in self.tables.intents.iter() {
            let looked = intent.what.inode().and_then(|inode| found.get_mut(&inode));
            if let Some(inode) = looked.and_then(|looked| looked.inode.as_mut()) {
                inode.is_in_operation = true;
            }
        }
        for (key, dentry) in self.tables.dentries.iter() {
            let Some(looked) = found.get_mut(&dentry.inode) else { continue };
            looked.names += 1;
            looked.digest = looked.digest.wrapping_add(hash_bytes(0, &key.bytes()));
            looked.is_locked |= self.tables.locked_names.contains(&key);
            if looked.examples.len() < CHECK_EXAMPLES_MAX {
                looked.examples.push((key.0, key.1, dentry.kind));
            }
        }
        inodes.iter().map(|id| found.get(id).cloned().unwrap_or_default()).collect()
    }

    fn look_at(&self, id: InodeId) -> Looked {
        let inode = self.tables.inodes.get(&id).map(|record| LookedInode {
            kind: record.kind,
            link_count: record.link_count,
            size: record.size,
            changed: record.changed,
            is_in_operation: false,
            is_held: self.is_held(id),
        });
        Looked { inode, ..Looked::default() }
    }

    fn check_segments(
        &self,
        after: Option<(InodeId, u64)>,
        asked: RangeInclusive<(PartitionId, ExtentId)>,
    ) -> MetaChecked {
        let after = after.map(|(inode, end)| (inode, Number(end)));
        let records = match &after {
            Some(after) => self.tables.segments.range(after),
            None => self.tables.segments.iter(),
        };
        let mut records = records.skip_while(|(key, _)| Some(*key) == after).peekable();
        let (mut found, mut at) = (Vec::new(), None);
        for _ in 0..CHECK_RECORDS_MAX {
            let Some(((inode, end), record)) = records.next() else { break };
            let segment = segment_of(end, record);
            let column = segment.column();
            if column.is_some_and(|column| asked.contains(&(column.partition, column.extent))) {
                found.push((inode, segment));
            }
            at = Some((inode, end.0));
        }
        MetaChecked::Segments { found, next: at.filter(|_| records.peek().is_some()) }
    }
}

/// All tables side by side, at the same inode.
struct Walk<'a> {
    partition: &'a Partition,
    names: Peekable<Records<'a, (InodeId, Name), Dentry>>,
    segments: Peekable<Records<'a, (InodeId, Number), SegmentRecord>>,
    holders: Peekable<Records<'a, (InodeId, SessionId), ()>>,
    inodes: Vec<CheckedInode>,
    faults: Vec<Fault>,
    unlisted: u64,
    dentries: u64,
    segments_seen: u64,
}

impl Walk<'_> {
    fn records(&self) -> u64 {
        self.inodes.len() as u64 + self.dentries + self.segments_seen
    }

    fn fault(&mut self, inode: InodeId, what: FaultKind) {
        if self.faults.len() < CHECK_FAULTS_MAX {
            self.faults.push(Fault { inode, what });
        } else {
            self.unlisted += 1;
        }
    }

    /// Records of inodes below `end` that are still in front: these inodes do not exist.
    fn strays_below(&mut self, end: Option<InodeId>) {
        let is_below = |id: InodeId| end.is_none_or(|end| id < end);
        while let Some(id) = self.names.peek().map(|(key, _)| key.0).filter(|id| is_below(*id)) {
            let (names, _) = self.take_names(id);
            self.fault(id, FaultKind::NamesInNone { names });
        }
        while let Some(id) = self.segments.peek().map(|(key, _)| key.0).filter(|id| is_below(*id)) {
            let of_it = std::iter::from_fn(|| self.segments.next_if(|(key, _)| key.0 == id));
            let segments = of_it.count() as u64;
            self.segments_seen += segments;
            self.fault(id, FaultKind::ContentOfNone { segments });
        }
        while let Some((key, ())) = self.holders.next_if(|(key, ())| is_below(key.0)) {
            self.fault(key.0, FaultKind::HeldButGone);
        }
    }

    fn inode(&mut self, id: InodeId, record: &Inode) {
        let (kind, names) = (record.kind, names_wanted(id, record.kind, record.link_count));
        self.inodes.push(CheckedInode { inode: id, kind, names });
        if !self.partition.owns(id) || id >= self.partition.counters.next_inode {
            self.fault(id, FaultKind::WrongId);
        }
        self.directory(id, record);
        self.content(id, record);
        self.holders(id, record);
    }

    fn directory(&mut self, id: InodeId, record: &Inode) {
        let (entries, directories) = self.take_names(id);
        let links = directories + 2;
        let (size, link_count) = (record.size, record.link_count);
        if !record.is_directory() {
            if entries > 0 {
                self.fault(id, FaultKind::NamesInNone { names: entries });
            }
        } else if (size, u64::from(link_count)) != (entries, links) {
            self.fault(id, FaultKind::WrongCounts { size, entries, link_count, links });
        }
    }

    /// Counts the entries of a directory, and the directories among them.
    fn take_names(&mut self, directory: InodeId) -> (u64, u64) {
        let (mut entries, mut directories) = (0, 0);
        while let Some((_, dentry)) = self.names.next_if(|(key, _)| key.0 == directory) {
            entries += 1;
            directories += u64::from(dentry.kind == FileKind::Directory);
        }
        self.dentries += entries;
        (entries, directories)
    }

    fn content(&mut self, id: InodeId, record: &Inode) {
        let (mut counted, mut end, mut segments) = (0_u64, 0, 0);
        while let Some(((_, at), segment)) = self.segments.next_if(|(key, _)| key.0 == id) {
            let segment = segment_of(at, segment);
            if segments > 0 && segment.offset < end {
                self.fault(id, FaultKind::SegmentsOverlap { offset: segment.offset });
            }
            segments += 1;
            counted = counted.saturating_add(segment.length);
            end = segment.end();
        }
        self.segments_seen += segments;
        let is_file = record.kind == FileKind::File;
        if let Body::Inline(content) = &record.body {
            (counted, end) = (content.len() as u64, content.len() as u64);
            if segments > 0 || !is_file {
                self.fault(id, FaultKind::WrongContent);
            }
        } else if segments > 0 && !is_file {
            self.fault(id, FaultKind::WrongContent);
        }
        if is_file && end > record.size {
            self.fault(id, FaultKind::ContentBeyondSize { size: record.size, end });
        }
        if counted != record.allocated {
            let allocated = record.allocated;
            self.fault(id, FaultKind::WrongAllocation { allocated, counted });
        }
    }

    fn holders(&mut self, id: InodeId, record: &Inode) {
        let mut is_held = false;
        while let Some(((_, session), ())) = self.holders.next_if(|(key, ())| key.0 == id) {
            is_held = true;
            if !self.partition.has_session(session) {
                self.fault(id, FaultKind::HeldByNobody { session });
            }
        }
        if record.link_count == 0 && !is_held {
            self.fault(id, FaultKind::Abandoned);
        }
    }
}
