//! Meta nodes: one namespace behind two partitions with a leader each.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use milpa_types::{
    Attributes, Columns, FileKind, InodeId, MetaError, MetaSlot, Name, NodeId, PartitionId,
    Segment, SessionId, Timestamp,
};
use milpa_wire::meta::{
    Content, Entry, LostRange, MetaAnswer, MetaRead, MetaReply, MetaRequest, MetaStatistics,
    MetaWrite, NewInode, Publish, RequestId,
};

use crate::cluster::META;

/// Segments in one answer: few, so that a file takes several.
const LAYOUT_SEGMENTS: usize = 3;

pub struct MetaNodes {
    /// Leader of each partition.
    pub leaders: BTreeMap<PartitionId, NodeId>,
    pub sessions: BTreeSet<(PartitionId, SessionId)>,
    answers: HashMap<(PartitionId, SessionId, u64), MetaReply>,
    pub inodes: BTreeMap<InodeId, Inode>,
    dentries: BTreeMap<(InodeId, Name), InodeId>,
    next: BTreeMap<MetaSlot, u64>,
    pub full: BTreeSet<MetaSlot>,
    /// Writes that were executed, by kind.
    pub counts: HashMap<&'static str, u64>,
    pub keep_alives: u64,
}

pub struct Inode {
    pub attributes: Attributes,
    target: Vec<u8>,
    inline: Option<Vec<u8>>,
    pub segments: Vec<Segment>,
    pub held: BTreeSet<SessionId>,
}

fn inode(id: InodeId, new: &NewInode, now: Timestamp) -> Inode {
    let directory = new.kind == FileKind::Directory;
    let attributes = Attributes {
        inode: id,
        kind: new.kind,
        mode: new.mode,
        link_count: if directory { 2 } else { 1 },
        uid: new.uid,
        gid: new.gid,
        device: new.device,
        size: new.target.len() as u64,
        allocated: 0,
        accessed: now,
        modified: now,
        changed: now,
        content_version: 0,
        truncation: 0,
    };
    let target = new.target.clone();
    Inode { attributes, target, inline: None, segments: vec![], held: BTreeSet::new() }
}

impl MetaNodes {
    pub fn new() -> MetaNodes {
        let kind = FileKind::Directory;
        let new = NewInode { kind, mode: 0o755, uid: 0, gid: 0, device: 0, target: vec![] };
        let root = inode(InodeId::ROOT, &new, Timestamp(0));
        MetaNodes {
            leaders: [(PartitionId(100), META[0]), (PartitionId(101), META[1])].into(),
            sessions: BTreeSet::new(),
            answers: HashMap::new(),
            inodes: [(InodeId::ROOT, root)].into(),
            dentries: BTreeMap::new(),
            next: [(MetaSlot(0), 2), (MetaSlot(1), MetaSlot(1).first_inode().0)].into(),
            full: BTreeSet::new(),
            counts: HashMap::new(),
            keep_alives: 0,
        }
    }

    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    pub fn answer(&mut self, node: NodeId, request: &MetaRequest) -> MetaReply {
        match request {
            MetaRequest::Read { partition, read, .. } => {
                self.check_leader(node, *partition)?;
                *self.counts.entry("read").or_default() += 1;
                self.read(*partition, read)
            }
            MetaRequest::Write { partition, id, now, write } => {
                self.check_leader(node, *partition)?;
                self.write_once(*partition, id, *now, write)
            }
            MetaRequest::KeepAlive { .. } => {
                self.keep_alives += 1;
                Ok(MetaAnswer::Done)
            }
            other => panic!("a client does not send {other:?}"),
        }
    }

    fn check_leader(&self, node: NodeId, partition: PartitionId) -> Result<(), MetaError> {
        let leader = self.leaders.get(&partition).copied();
        if leader == Some(node) { Ok(()) } else { Err(MetaError::NotLeader { leader }) }
    }

    fn write_once(
        &mut self,
        partition: PartitionId,
        id: &RequestId,
        now: Timestamp,
        write: &MetaWrite,
    ) -> MetaReply {
        assert!(id.unanswered <= id.sequence && id.sequence - id.unanswered <= 256, "{id:?}");
        if matches!(write, MetaWrite::OpenSession) {
            self.sessions.insert((partition, id.session));
            return Ok(MetaAnswer::Done);
        }
        if !self.sessions.contains(&(partition, id.session)) {
            return Err(MetaError::UnknownSession);
        }
        let key = (partition, id.session, id.sequence);
        if let Some(reply) = self.answers.get(&key) {
            return reply.clone();
        }
        let reply = self.write(partition, id.session, now, write);
        self.answers.insert(key, reply.clone());
        reply
    }

    fn write(
        &mut self,
        partition: PartitionId,
        session: SessionId,
        now: Timestamp,
        write: &MetaWrite,
    ) -> MetaReply {
        let mut count = |what| *self.counts.entry(what).or_default() += 1;
        match write {
            MetaWrite::Create { parent, name, inode, placement, open_existing, .. } => {
                let home = slot(partition);
                assert_eq!(parent.slot(), home, "sent to the directory's partition");
                if let Some(found) = self.dentries.get(&(*parent, name.clone())) {
                    let kind = self.inodes[found].attributes.kind;
                    let opens = *open_existing && kind == FileKind::File;
                    return if opens {
                        self.entry(*parent, name, *found)
                    } else {
                        Err(MetaError::Exists)
                    };
                }
                let at = placement.unwrap_or(home);
                if self.full.contains(&at) {
                    return Err(MetaError::PartitionFull);
                }
                count("create");
                let next = self.next.get_mut(&at).unwrap();
                let id = InodeId(*next);
                *next += 1;
                self.inodes.insert(id, self::inode(id, inode, now));
                self.dentries.insert((*parent, name.clone()), id);
                self.made_entry(*parent, name, id)
            }
            MetaWrite::Link { inode, parent, name } => {
                count("link");
                self.inode(*inode)?.attributes.link_count += 1;
                self.dentries.insert((*parent, name.clone()), *inode);
                self.made_entry(*parent, name, *inode)
            }
            MetaWrite::Unlink { parent, name, held } => {
                count("unlink");
                let id = self.dentries.remove(&(*parent, name.clone()));
                self.drop_link(id.ok_or(MetaError::NotFound)?, held.then_some(session));
                Ok(MetaAnswer::Removed { directory: self.directory_changed(*parent) })
            }
            MetaWrite::RemoveDirectory { parent, name } => {
                let key = (*parent, name.clone());
                let id = *self.dentries.get(&key).ok_or(MetaError::NotFound)?;
                if self.dentries.keys().any(|(directory, _)| *directory == id) {
                    return Err(MetaError::NotEmpty);
                }
                self.dentries.remove(&key);
                self.inodes.remove(&id);
                Ok(MetaAnswer::Removed { directory: self.directory_changed(*parent) })
            }
            MetaWrite::Rename {
                source_parent,
                source_name,
                target_parent,
                target_name,
                no_replace,
                held,
            } => {
                let target = (*target_parent, target_name.clone());
                if *no_replace && self.dentries.contains_key(&target) {
                    return Err(MetaError::Exists);
                }
                let moved = self.dentries.remove(&(*source_parent, source_name.clone()));
                let moved = moved.ok_or(MetaError::NotFound)?;
                if let Some(replaced) = self.dentries.insert(target, moved) {
                    self.drop_link(replaced, held.then_some(session));
                }
                Ok(MetaAnswer::Done)
            }
            MetaWrite::SetAttributes { inode, changes } => {
                count("setattr");
                let it = self.inode(*inode)?;
                let before = it.attributes.content_version;
                if let Some(size) = changes.size {
                    it.resize(size);
                    it.attributes.modified = now;
                }
                let attributes = &mut it.attributes;
                if changes.clear_set_id {
                    attributes.mode = milpa_types::without_set_id(attributes.mode);
                }
                attributes.mode = changes.mode.unwrap_or(attributes.mode);
                attributes.modified = changes.modified.unwrap_or(attributes.modified);
                Ok(MetaAnswer::Changed { attributes: *attributes, before })
            }
            MetaWrite::Publish(publish) => {
                count("publish");
                self.inode(publish.inode)?.publish(publish)
            }
            MetaWrite::MarkFlushed { files } => {
                count("mark_flushed");
                for file in files {
                    self.inode(file.inode)?.mark_flushed(&file.segments);
                }
                Ok(MetaAnswer::Done)
            }
            MetaWrite::CutLostRanges { inode, lost } => {
                count("cut_lost");
                let it = self.inode(*inode)?;
                it.cut_lost(lost);
                Ok(MetaAnswer::Attributes(it.attributes))
            }
            MetaWrite::Release { inode } => {
                count("release");
                self.inode(*inode)?.held.remove(&session);
                self.collect(*inode);
                Ok(MetaAnswer::Done)
            }
            MetaWrite::CloseSession => {
                count("close_session");
                self.sessions.remove(&(partition, session));
                Ok(MetaAnswer::Done)
            }
            other => panic!("not used yet: {other:?}"),
        }
    }

    fn drop_link(&mut self, id: InodeId, held: Option<SessionId>) {
        let inode = self.inodes.get_mut(&id).unwrap();
        inode.attributes.link_count -= 1;
        inode.held.extend(held);
        self.collect(id);
    }

    fn collect(&mut self, id: InodeId) {
        let gone = |inode: &Inode| inode.attributes.link_count == 0 && inode.held.is_empty();
        if self.inodes.get(&id).is_some_and(gone) {
            self.inodes.remove(&id);
        }
    }

    fn inode(&mut self, id: InodeId) -> Result<&mut Inode, MetaError> {
        self.inodes.get_mut(&id).ok_or(MetaError::NotFound)
    }

    /// Attributes only of inodes in the parent's partition, as the protocol says.
    fn entry(&self, parent: InodeId, name: &Name, inode: InodeId) -> MetaReply {
        let attributes = self.inodes[&inode].attributes;
        let here = inode.slot() == parent.slot();
        let name = name.clone();
        let (kind, attributes) = (attributes.kind, here.then_some(attributes));
        Ok(MetaAnswer::Entry(Entry { name, inode, kind, attributes, directory: None }))
    }

    fn made_entry(&mut self, parent: InodeId, name: &Name, inode: InodeId) -> MetaReply {
        let directory = Some(Box::new(self.directory_changed(parent)));
        let MetaAnswer::Entry(entry) = self.entry(parent, name, inode)? else { unreachable!() };
        Ok(MetaAnswer::Entry(Entry { directory, ..entry }))
    }

    fn directory_changed(&mut self, parent: InodeId) -> Attributes {
        let directory = &mut self.inodes.get_mut(&parent).unwrap().attributes;
        directory.content_version += 1;
        *directory
    }

    fn read(&mut self, partition: PartitionId, read: &MetaRead) -> MetaReply {
        match read {
            MetaRead::Lookup { parent, name } => {
                let found = self.dentries.get(&(*parent, name.clone()));
                self.entry(*parent, name, *found.ok_or(MetaError::NotFound)?)
            }
            MetaRead::GetAttributes { inode } => {
                Ok(MetaAnswer::Attributes(self.inode(*inode)?.attributes))
            }
            MetaRead::GetAttributesBatch { inodes } => {
                let all = |id: &InodeId| id.slot() == slot(partition);
                assert!(inodes.iter().all(all), "a batch for one partition");
                let found = inodes.iter().filter_map(|id| self.inodes.get(id));
                Ok(MetaAnswer::AttributesBatch(found.map(|inode| inode.attributes).collect()))
            }
            MetaRead::ReadLink { inode } => {
                Ok(MetaAnswer::Target(self.inode(*inode)?.target.clone()))
            }
            MetaRead::GetLayout { inode, from } => {
                let it = self.inode(*inode)?;
                let mut rest = it.segments.iter().filter(|segment| segment.end() > *from).cloned();
                let content = match &it.inline {
                    Some(inline) => Content::Inline(inline.clone()),
                    None => Content::Segments(rest.by_ref().take(LAYOUT_SEGMENTS).collect()),
                };
                let end = it.inline.is_some() || rest.next().is_none();
                Ok(MetaAnswer::Layout { attributes: it.attributes, content, end })
            }
            MetaRead::ReadDirectory { parent, after, limit, with_attributes } => {
                let names = self.dentries.iter().filter(|((directory, name), _)| {
                    directory == parent && after.as_ref().is_none_or(|after| name > after)
                });
                let all: Vec<Entry> = names
                    .map(|((_, name), inode)| {
                        let attributes = self.inodes[inode].attributes;
                        let here = *with_attributes && inode.slot() == slot(partition);
                        let (name, kind) = (name.clone(), attributes.kind);
                        let attributes = here.then_some(attributes);
                        Entry { name, inode: *inode, kind, attributes, directory: None }
                    })
                    .collect();
                let end = all.len() <= *limit as usize;
                let entries = all.into_iter().take(*limit as usize).collect();
                Ok(MetaAnswer::Page { entries, end })
            }
            MetaRead::Statistics => {
                let here = self.inodes.keys().filter(|id| id.slot() == slot(partition));
                let inodes = here.count() as u64;
                Ok(MetaAnswer::Statistics(MetaStatistics { inodes, ..MetaStatistics::default() }))
            }
            other @ MetaRead::LookupLayout { .. } => panic!("not used yet: {other:?}"),
        }
    }
}

impl Inode {
    fn publish(&mut self, publish: &Publish) -> MetaReply {
        let attributes = &mut self.attributes;
        if publish.truncation != attributes.truncation {
            return Err(MetaError::StaleTruncation { current: attributes.truncation });
        }
        let leaves_inode = self.inline.is_some() && !publish.segments.is_empty();
        let replaces_all = publish.inline.is_some() || leaves_inode;
        let is_based = publish.base == Some(attributes.content_version);
        if !is_based && (replaces_all || publish.base.is_some()) {
            return Err(MetaError::StaleContent { current: attributes.content_version });
        }
        let is_hit = |s: &Segment| {
            self.segments.iter().any(|old| old.clip(s.offset, s.end()).is_some_and(|o| o != *s))
        };
        if !publish.may_replace && publish.segments.iter().any(|s| !s.flushed && is_hit(s)) {
            return Err(MetaError::ReplacesBytes);
        }
        if let Some(inline) = &publish.inline {
            self.segments.clear();
            self.inline = Some(inline.clone());
        }
        for segment in &publish.segments {
            self.inline = None;
            let cut = |s: &Segment| [s.clip(0, segment.offset), s.clip(segment.end(), u64::MAX)];
            self.segments = self.segments.iter().flat_map(cut).flatten().collect();
            self.segments.push(segment.clone());
            self.segments.sort_by_key(|s| s.offset);
            attributes.size = attributes.size.max(segment.end());
        }
        attributes.size = attributes.size.max(publish.size);
        attributes.allocated = self.segments.iter().map(|s| s.length).sum();
        let before = attributes.content_version;
        attributes.content_version += 1;
        attributes.modified = publish.modified;
        if publish.clear_set_id {
            attributes.mode = milpa_types::without_set_id(attributes.mode);
        }
        Ok(MetaAnswer::Changed { attributes: *attributes, before })
    }

    /// Whole keys only: that is what these tests flush.
    fn mark_flushed(&mut self, marked: &[Segment]) {
        for segment in &mut self.segments {
            segment.flushed |= marked
                .iter()
                .any(|mark| mark.offset <= segment.offset && segment.end() <= mark.end());
        }
    }

    fn cut_lost(&mut self, lost: &[LostRange]) {
        let is_twice = |(at, one): (usize, &LostRange)| lost[..at].contains(one);
        assert!(!lost.iter().enumerate().any(is_twice), "each member says the same");
        let is_lost = |segment: &Segment, at: u64| {
            let Columns::One(column) = segment.columns else { panic!("striped") };
            let place = (column.partition, column.extent);
            lost.iter().any(|lost| {
                place == (lost.partition, lost.extent)
                    && (lost.from..lost.until).contains(&(column.offset + at))
            })
        };
        let segments = std::mem::take(&mut self.segments);
        for segment in segments.iter().filter(|segment| !segment.flushed).rev() {
            for at in (0..segment.length).rev().filter(|at| is_lost(segment, *at)) {
                let is_last = segment.offset + at + 1 == self.attributes.size;
                self.attributes.size -= u64::from(is_last);
            }
        }
        for segment in segments {
            // Byte by byte, which nobody can get wrong.
            let is_left = |at: &u64| segment.flushed || !is_lost(&segment, *at);
            let mut left: Vec<Segment> = Vec::new();
            for at in (0..segment.length).filter(is_left).map(|at| segment.offset + at) {
                let begin = match left.pop_if(|last| last.end() == at) {
                    Some(last) => last.offset,
                    None => at,
                };
                left.extend(segment.clip(begin, at + 1));
            }
            self.segments.extend(left);
        }
        self.attributes.content_version += 1;
        self.attributes.truncation += 1;
    }

    fn resize(&mut self, size: u64) {
        self.segments = self.segments.iter().filter_map(|s| s.clip(0, size)).collect();
        if let Some(inline) = &mut self.inline {
            inline.resize(size as usize, 0);
        }
        self.attributes.content_version += u64::from(self.attributes.size != size);
        self.attributes.truncation += 1;
        self.attributes.size = size;
    }
}

fn slot(partition: PartitionId) -> MetaSlot {
    MetaSlot((partition.0 - 100) as u32)
}
