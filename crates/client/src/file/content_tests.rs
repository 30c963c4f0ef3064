//! A file's content against a plain vector, with data nodes and a meta node that are vectors too.

use std::collections::BTreeMap;

use bytes::Bytes;
use milpa_types::{
    Attributes, Column, ExtentId, FileKind, InodeId, PACKET_BYTES, PartitionId, Timestamp,
};
use milpa_wire::meta::{Content as WireContent, Publish};
use proptest::prelude::*;

use super::*;
use crate::segments::SegmentMap;

const INLINE: u64 = 64;

/// What the servers hold.
struct Servers {
    attributes: Attributes,
    inline: Option<Vec<u8>>,
    segments: SegmentMap,
    extents: BTreeMap<ExtentId, Vec<u8>>,
}

/// Of an empty file.
pub(in crate::file) fn attributes() -> Attributes {
    Attributes {
        inode: InodeId(9),
        kind: FileKind::File,
        mode: 0o644,
        link_count: 1,
        uid: 0,
        gid: 0,
        device: 0,
        size: 0,
        allocated: 0,
        accessed: Timestamp(0),
        modified: Timestamp(0),
        changed: Timestamp(0),
        content_version: 0,
        truncation: 0,
    }
}

impl Servers {
    fn new() -> Servers {
        let (segments, extents) = (SegmentMap::default(), BTreeMap::new());
        Servers { attributes: attributes(), inline: None, segments, extents }
    }

    fn content(&self) -> WireContent {
        match &self.inline {
            Some(inline) => WireContent::Inline(inline.clone()),
            None => WireContent::Segments(self.segments.iter().cloned().collect()),
        }
    }

    /// All appends go to one extent, as in one session of writing.
    fn append(&mut self, file_offset: u64, data: &Bytes) -> Committed {
        let extent = self.extents.entry(ExtentId(1)).or_default();
        let offset = extent.len() as u64;
        extent.extend_from_slice(data);
        let column = Column { partition: PartitionId(1), extent: ExtentId(1), offset };
        Committed { file_offset, length: data.len() as u64, column }
    }

    fn overwrite(&mut self, it: &Replacement) {
        let extent = self.extents.get_mut(&it.column.extent).expect("only what is there");
        let at = it.column.offset as usize;
        extent[at..at + it.data.len()].copy_from_slice(&it.data);
    }

    /// As the meta partition applies it: content in the inode goes only when all of it is covered.
    /// `None`: content in the inode would be replaced by somebody who had not seen it, or bytes were
    /// overwritten that are no part of the file any more.
    fn publish(&mut self, publish: &Publish) -> Option<Attributes> {
        assert_eq!(publish.truncation, self.attributes.truncation);
        let leaves_inode = self.inline.is_some() && !publish.segments.is_empty();
        let replaces_all = publish.inline.is_some() || leaves_inode;
        let is_based = publish.base == Some(self.attributes.content_version);
        if !is_based && (replaces_all || publish.base.is_some()) {
            return None;
        }
        let is_there = |place: &Segment| {
            let mut at = place.offset;
            self.segments.parts(place.offset, place.end()).iter().all(|part| {
                let here = std::mem::replace(&mut at, part.offset + part.length) - place.offset;
                Some(here)
                    == part.column.and_then(|c| c.offset.checked_sub(column_of(place).offset))
                    && part.column.is_some_and(|c| c.extent == column_of(place).extent)
            })
        };
        if !publish.overwritten.iter().all(is_there) {
            return None;
        }
        if let Some(inline) = &publish.inline {
            assert!(publish.segments.is_empty() && inline.len() as u64 <= INLINE);
            self.segments = SegmentMap::default();
            self.inline = Some(inline.clone());
        }
        for segment in &publish.segments {
            self.segments.overlay(segment.clone());
            self.attributes.size = self.attributes.size.max(segment.end());
        }
        if !publish.segments.is_empty()
            && let Some(inline) = self.inline.take()
        {
            let holes = self.segments.parts(0, inline.len() as u64);
            assert!(holes.iter().all(|part| part.column.is_some()), "inline bytes were lost");
        }
        self.attributes.size = self.attributes.size.max(publish.size);
        self.attributes.content_version += 1;
        Some(self.attributes)
    }

    /// Another client writes into a file that lives in its inode. False if it does not.
    fn write_inline(&mut self, at: u64, data: &[u8]) -> bool {
        let end = at + data.len() as u64;
        if !self.segments.is_empty() || self.attributes.size.max(end) > INLINE {
            return false;
        }
        let mut whole = self.inline.take().unwrap_or_default();
        self.attributes.size = self.attributes.size.max(end);
        whole.resize(self.attributes.size as usize, 0);
        whole[at as usize..end as usize].copy_from_slice(data);
        self.inline = Some(whole);
        self.attributes.content_version += 1;
        true
    }

    /// Another client replaces bytes on the data nodes by some of its own. What was there is nobody's
    /// from now on.
    fn write_elsewhere(&mut self, at: u64, data: &[u8]) -> bool {
        if self.attributes.size == 0 {
            return false;
        }
        let whole = self.inline.take();
        let moved = whole.iter().filter(|whole| !whole.is_empty()).map(|whole| (0, &whole[..]));
        for (at, data) in moved.chain([(at, data)]) {
            let extent = self.extents.entry(ExtentId(2)).or_default();
            let offset = extent.len() as u64;
            extent.extend_from_slice(data);
            let column = Column { partition: PartitionId(1), extent: ExtentId(2), offset };
            self.segments.overlay(Segment::plain(at, data.len() as u64, column));
        }
        self.attributes.size = self.attributes.size.max(at + data.len() as u64);
        self.attributes.content_version += 1;
        true
    }

    fn truncate(&mut self, size: u64) -> Attributes {
        self.segments.cut(size, u64::MAX);
        if let Some(inline) = &mut self.inline
            && (size <= INLINE || size < inline.len() as u64)
        {
            inline.resize(size as usize, 0);
        }
        if size == 0 {
            self.inline = None;
        }
        self.attributes.content_version += u64::from(self.attributes.size != size);
        self.attributes.truncation += 1;
        self.attributes.size = size;
        self.attributes
    }

    fn read(&self, sources: Vec<Source>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for source in sources {
            match source {
                Source::Bytes(piece) => bytes.extend_from_slice(&piece),
                Source::Zeros(length) => bytes.resize(bytes.len() + length as usize, 0),
                Source::Extent { column, length } => {
                    let extent = &self.extents[&column.extent];
                    let at = column.offset as usize;
                    bytes.extend_from_slice(&extent[at..at + length as usize]);
                }
            }
        }
        bytes
    }
}

fn column_of(segment: &Segment) -> Column {
    let milpa_types::Columns::One(column) = segment.columns else { panic!("striped") };
    column
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize),
    /// To so many bytes; what somebody else wrote and a reader had loaded before the answer came.
    Truncate(u64, Meanwhile),
    /// Sends what the scope says; the connection breaks after so many operations.
    /// Meanwhile the program may write more, or another client, which we learn of at once.
    Push(Scope, usize, Meanwhile, Meanwhile),
    /// Publishes; or the answer is "no". Meanwhile the program may write more, or the answer comes after
    /// another client has written, too.
    Publish(bool, Meanwhile, Meanwhile),
    Reload,
    Reopen,
    /// Another client writes; whether we hear of it at once.
    Other(u64, usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let place = prop_oneof![0..80u64, 0..3000u64, 0..400_000u64];
    let length = prop_oneof![1..50usize, 1..2000usize, 1..300_000usize];
    let scope = prop_oneof![Just(Scope::All), Just(Scope::FullPackets)];
    let meanwhile = prop::option::of((place.clone(), 1..2000usize));
    let other = prop::option::weighted(0.3, (prop_oneof![0..50u64, 0..5000u64], 1..2000usize));
    prop_oneof![
        5 => (place.clone(), length).prop_map(|(at, length)| Step::Write(at, length)),
        1 => (prop_oneof![Just(0), place], other.clone())
            .prop_map(|(size, other)| Step::Truncate(size, other)),
        2 => (
            scope,
            prop_oneof![Just(usize::MAX), 0..4usize],
            meanwhile.clone(),
            other.clone(),
        )
            .prop_map(|(scope, n, write, other)| Step::Push(scope, n, write, other)),
        2 => (any::<bool>(), meanwhile, other)
            .prop_map(|(ok, write, other)| Step::Publish(ok, write, other)),
        1 => Just(Step::Reload),
        1 => Just(Step::Reopen),
        2 => (prop_oneof![0..50u64, 0..5000u64], prop_oneof![1..30usize, 1..3000usize], any::<bool>())
            .prop_map(|(at, length, heard)| Step::Other(at, length, heard)),
    ]
}

type Meanwhile = Option<(u64, usize)>;

struct World {
    servers: Servers,
    content: Content,
    model: Vec<u8>,
    /// Which bytes were written here and not published.
    own: Vec<bool>,
    /// Somebody else wrote, and we have not heard of it.
    is_behind: bool,
    /// Bytes that the buffer's budget thinks are held.
    budget: u64,
    clock: i64,
}

impl World {
    fn new() -> World {
        let servers = Servers::new();
        let content = Content::new(servers.attributes, servers.content()).unwrap();
        let (model, own) = (Vec::new(), Vec::new());
        World { servers, content, model, own, is_behind: false, budget: 0, clock: 0 }
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        self.clock += 1;
        (0..length).map(|i| (self.clock as usize + i) as u8).collect()
    }

    fn grow(&mut self, end: usize) {
        self.model.resize(self.model.len().max(end), 0);
        self.own.resize(self.model.len(), false);
    }

    /// What is not published here yet is the later write.
    fn other(&mut self, at: u64, length: usize, heard: bool) {
        let data = self.bytes(length);
        if !self.servers.write_inline(at, &data) && !self.servers.write_elsewhere(at, &data) {
            return;
        }
        let end = at as usize + length;
        self.grow(end);
        for (at, byte) in (at as usize..end).zip(data) {
            if !self.own[at] {
                self.model[at] = byte;
            }
        }
        self.content.becomes_stale_if(heard);
        self.is_behind |= !heard;
    }

    fn write(&mut self, at: u64, length: usize) {
        let data = self.bytes(length);
        let end = at as usize + length;
        self.grow(end);
        self.model[at as usize..end].copy_from_slice(&data);
        self.own[at as usize..end].fill(true);
        let replaced = self.content.write(at, data.into(), Timestamp(self.clock), false);
        self.budget = self.budget + length as u64 - replaced;
    }

    /// True if everything was sent.
    fn push(
        &mut self,
        scope: Scope,
        breaks_after: usize,
        write: Meanwhile,
        other: Meanwhile,
    ) -> bool {
        if self.content.is_stale() {
            self.reload();
        }
        let Some(push) = self.content.begin_push(scope, Placing::InPlace, INLINE) else {
            return true;
        };
        write.into_iter().for_each(|(at, length)| self.write(at, length));
        if let Some((at, length)) = other {
            self.other(at, length, true);
            self.reload();
        }
        let mut left = breaks_after;
        let mut next = || {
            left = left.wrapping_sub(1);
            left < usize::MAX / 2 || breaks_after == usize::MAX
        };
        for it in &push.replacements {
            assert!(it.data.len() <= PACKET_BYTES);
            if !next() {
                self.budget -= self.content.push_failed();
                return false;
            }
            self.servers.overwrite(it);
            self.budget -= self.content.overwrote(it);
        }
        for (at, data) in &push.appends {
            assert!(data.len() <= PACKET_BYTES);
            if !next() {
                self.budget -= self.content.push_failed();
                return false;
            }
            let done = self.servers.append(*at, data);
            self.budget -= self.content.appended(done, false);
        }
        true
    }

    fn publish(&mut self, succeeds: bool, write: Meanwhile, other: Meanwhile) {
        let mut meanwhile = write;
        for _ in 0..4 {
            if !self.push(Scope::All, usize::MAX, None, None) {
                return;
            }
            if self.content.is_behind(INLINE) {
                continue;
            }
            let Some(publish) = self.content.begin_publish(INLINE, false) else { return };
            if !succeeds {
                self.budget -= self.content.publish_failed(&publish);
                return;
            }
            let later = meanwhile.take();
            later.into_iter().for_each(|(at, length)| self.write(at, length));
            let before = self.servers.attributes.content_version;
            let Some(attributes) = self.servers.publish(&publish) else {
                self.budget -= self.content.publish_was_behind(&publish);
                continue;
            };
            self.own.fill(false);
            if let Some((at, length)) = later {
                self.own[at as usize..at as usize + length].fill(true);
            }
            if let Some((at, length)) = other {
                // A reader may have had the file loaded while the publish was in doubt.
                self.other(at, length, true);
                self.reload();
            }
            self.budget -= self.content.published(publish, attributes, before);
            return;
        }
        panic!("never up to date");
    }

    fn truncate(&mut self, size: u64, other: Meanwhile) {
        let before = self.servers.attributes.content_version;
        let attributes = self.servers.truncate(size);
        self.model.resize(size as usize, 0);
        self.own.resize(size as usize, false);
        if let Some((at, length)) = other {
            self.other(at, length, true);
            self.reload();
        }
        self.budget -= self.content.truncated(size, attributes, before);
    }

    fn reload(&mut self) {
        self.is_behind = false;
        let asked = self.content.asks();
        self.content.refresh(self.servers.attributes, self.servers.content(), asked).unwrap();
    }

    fn check(&mut self) {
        if self.content.is_stale() {
            self.reload();
        }
        assert_eq!(self.content.buffered_bytes(), self.budget, "budget");
        if self.is_behind {
            return;
        }
        let seen = self.servers.read(self.content.sources(0, 1 << 30));
        assert_eq!(seen.len(), self.model.len(), "length");
        assert!(seen == self.model, "bytes differ at {:?}", differs(&seen, &self.model));
    }
}

fn differs(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Goal: whatever is written, cut, sent in part, refused and loaded anew, this client reads what
    /// it wrote, and after the last publish so does everybody else; and the budget is exact.
    #[test]
    fn a_file_reads_as_written_through_every_failure(steps in prop::collection::vec(step(), 1..30)) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Write(at, length) => world.write(at, length),
                Step::Truncate(size, other) => world.truncate(size, other),
                Step::Push(scope, breaks_after, write, other) => {
                    world.push(scope, breaks_after, write, other);
                }
                Step::Publish(succeeds, write, other) => world.publish(succeeds, write, other),
                Step::Reload => world.reload(),
                Step::Other(at, length, heard) => world.other(at, length, heard),
                Step::Reopen => {
                    world.publish(true, None, None);
                    if world.is_behind {
                        world.reload();
                    }
                    if let Some((segments, inline)) = world.content.parts(usize::MAX) {
                        let attributes = world.servers.attributes;
                        world.content = Content::from_parts(attributes, segments, inline);
                    }
                }
            }
            world.check();
        }
        world.publish(true, None, None);
        world.publish(true, None, None);
        prop_assert!(!world.content.is_dirty());
        prop_assert_eq!(world.budget, 0);
        let other = Content::new(world.servers.attributes, world.servers.content()).unwrap();
        let seen = world.servers.read(other.sources(0, 1 << 30));
        prop_assert!(seen == world.model, "another client sees something else");
        // What everybody refers to is what an fsync must flush.
        let flush = other.unflushed();
        prop_assert_eq!(flush.is_empty(), other.parts(usize::MAX).unwrap().0.is_empty());
    }
}

#[test]
fn a_write_over_committed_bytes_and_beyond_is_split() {
    let mut world = World::new();
    world.write(0, 1000);
    world.publish(true, None, None);
    world.write(900, 300);
    let push = world.content.begin_push(Scope::All, Placing::InPlace, INLINE).unwrap();
    let replaced: Vec<_> =
        push.replacements.iter().map(|r| (r.file_offset, r.data.len())).collect();
    let appended: Vec<_> = push.appends.iter().map(|(at, data)| (*at, data.len())).collect();
    assert_eq!((replaced, appended), (vec![(900, 100)], vec![(1000, 200)]));
}

/// Story (found by the simulation): another client replaced a range, and before its old bytes were
/// freed this one overwrote them in place. That was acknowledged and published, and in no file.
#[test]
fn bytes_put_over_what_somebody_replaced_are_laid_over_the_replacement() {
    let mut world = World::new();
    world.write(0, 1000);
    world.publish(true, None, None);
    world.other(200, 300, false);
    world.write(100, 300);
    world.push(Scope::All, usize::MAX, None, None);
    assert_eq!(world.content.buffered_bytes(), 300, "kept until the inode's partition agrees");
    world.publish(true, None, None);
    assert_eq!(world.content.buffered_bytes(), 0);
    world.reload();
    world.check();
}

#[test]
fn a_stream_sends_whole_packets_and_keeps_the_rest() {
    let mut world = World::new();
    world.write(0, 3 * PACKET_BYTES + 5);
    let push = world.content.begin_push(Scope::FullPackets, Placing::InPlace, INLINE).unwrap();
    assert_eq!(push.appends.len(), 3);
    assert!(push.appends.iter().all(|(_, data)| data.len() == PACKET_BYTES));
    world.check();
}

#[test]
fn somebody_elses_change_makes_the_content_stale() {
    let mut world = World::new();
    world.write(0, 1000);
    world.push(Scope::All, usize::MAX, None, None);
    let publish = world.content.begin_publish(INLINE, false).unwrap();
    world.servers.attributes.content_version += 1;
    let before = world.servers.attributes.content_version;
    let attributes = world.servers.publish(&publish).unwrap();
    world.content.published(publish, attributes, before);
    assert!(world.content.is_stale());
    assert_eq!(world.content.version(), None);
}

/// Found by a reader: an answer from before a truncation through the path, taken after it, made the old content pass for the
/// new.
#[test]
fn an_answer_makes_fresh_only_what_was_heard_before_it_was_asked_for() {
    let mut world = World::new();
    world.write(0, 1000);
    world.push(Scope::All, usize::MAX, None, None);
    let (asked, answer) = (world.content.asks(), world.servers.content());
    world.content.becomes_stale();
    world.content.refresh(world.servers.attributes, answer, asked).unwrap();
    assert!(world.content.is_stale());
    world.reload();
    assert!(!world.content.is_stale());
}

/// Found by the simulation (seed 148): a publish changed nothing, so the version that came back was another
/// client's. It was one above the known one and passed for this client's own.
#[test]
fn a_version_is_ours_only_if_we_knew_the_one_before() {
    let mut world = World::new();
    world.write(0, 1000);
    world.push(Scope::All, usize::MAX, None, None);
    let publish = world.content.begin_publish(INLINE, false).unwrap();
    let attributes = world.servers.publish(&publish).unwrap();
    let known = world.content.attributes.content_version;
    assert_eq!(attributes.content_version, known + 1);
    world.content.published(publish, attributes, known + 1);
    assert!(world.content.is_stale());
}

/// Found by the simulation (seed 199): somebody opened the file while a publish was on its way, and
/// until it had arrived the file ended where the servers had it.
#[test]
fn the_file_does_not_shrink_while_a_publish_is_on_its_way() {
    let mut world = World::new();
    world.write(0, 1000);
    world.push(Scope::All, usize::MAX, None, None);
    let publish = world.content.begin_publish(INLINE, false).unwrap();
    world.servers.attributes.content_version += 1;
    world.reload();
    world.check();
    let before = world.servers.attributes.content_version;
    let attributes = world.servers.publish(&publish).unwrap();
    world.content.published(publish, attributes, before);
    world.check();
}

/// Found by a reader: the bytes of another client, learned of later, counted as flushed over a block that was lost.
#[test]
fn of_an_extent_with_lost_blocks_only_what_is_known_is_flushed() {
    let mut world = World::new();
    world.write(0, 1000);
    world.publish(true, None, None);
    let all: Vec<_> = world.servers.segments.iter().cloned().collect();
    let extents = BTreeMap::from([(PartitionId(1), vec![(ExtentId(1), 9000)])]);
    let block = Column { partition: PartitionId(1), extent: ExtentId(1), offset: 4096 };
    assert_eq!(world.content.flushed(extents.clone(), &[block]), all);
    assert!(world.content.unflushed().is_empty());
    world.write(1000, 8000);
    world.publish(true, None, None);
    world.reload();
    assert_eq!(world.content.unflushed()[&PartitionId(1)], [(ExtentId(1), 9000)]);
    assert_eq!(world.content.unflushed_in(block), [(block, 4096)]);
    assert_eq!(world.content.flushed(extents, &[block]), [], "it is not there");
}

#[test]
fn flushed_extents_are_not_flushed_again() {
    let mut world = World::new();
    world.write(0, 1000);
    world.publish(true, None, None);
    let unflushed = world.content.unflushed();
    assert_eq!(unflushed[&PartitionId(1)], [(ExtentId(1), 1000)]);
    let news = world.content.flushed(unflushed.clone(), &[]);
    let all: Vec<_> = world.servers.segments.iter().cloned().collect();
    assert_eq!(news, all, "told to the servers");
    assert_eq!(world.content.flushed(unflushed, &[]), [], "once");
    assert!(world.content.unflushed().is_empty());
    world.reload();
    assert!(world.content.unflushed().is_empty(), "known to be on disk, whatever the layout says");
    world.write(1000, 10);
    world.publish(true, None, None);
    assert_eq!(world.content.unflushed()[&PartitionId(1)], [(ExtentId(1), 1010)]);
}

#[test]
fn more_segments_than_one_publish_takes_go_in_several() {
    let mut world = World::new();
    for i in 0..5000u64 {
        let column = Column { partition: PartitionId(1), extent: ExtentId(2), offset: i * 7 };
        world.content.appended(Committed { file_offset: i * 10, length: 5, column }, false);
    }
    let mut publishes = 0;
    while let Some(publish) = world.content.begin_publish(INLINE, false) {
        assert!(publish.segments.len() <= 4096);
        let before = world.servers.attributes.content_version;
        let attributes = world.servers.publish(&publish).unwrap();
        world.content.published(publish, attributes, before);
        publishes += 1;
    }
    assert_eq!(publishes, 2);
    assert_eq!(world.servers.segments.iter().count(), 5000);
}

/// Story: small content was on its way from the inode to the data nodes, because a write made the file
/// larger, when another client's change was loaded. What arrived then passed for this client's own
/// bytes: the next publish put the old content over the other one's write.
#[test]
fn content_on_its_way_out_of_the_inode_is_not_put_over_a_newer_one() {
    let mut world = World::new();
    world.write(0, 30);
    world.publish(true, None, None);
    world.write(200, 100);
    world.push(Scope::All, usize::MAX, None, Some((10, 10)));
    world.check();
    world.publish(true, None, None);
    world.check();
    let other = Content::new(world.servers.attributes, world.servers.content()).unwrap();
    assert_eq!(world.servers.read(other.sources(0, 1 << 30)), world.model);
}

/// Story: a push left a small file to its publish, to go into the inode. Before that began another thread made
/// the file large: the publish took none of the bytes, and fsync succeeded over it.
#[test]
fn what_no_longer_fits_into_the_inode_is_pushed_before_it_is_published() {
    let mut world = World::new();
    world.write(0, 30);
    let push = |world: &mut World| world.content.begin_push(Scope::All, Placing::InPlace, INLINE);
    assert!(push(&mut world).is_none(), "it fits");
    assert!(!world.content.is_behind(INLINE));
    world.write(30, 200_000);
    assert!(world.content.is_behind(INLINE));
    world.publish(true, None, None);
    let there = Content::new(world.servers.attributes, world.servers.content()).unwrap();
    assert_eq!(world.servers.read(there.sources(0, 1 << 30)), world.model);
}
