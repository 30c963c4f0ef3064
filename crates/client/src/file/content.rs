//! One file as this client sees it: what the servers have, with what is written here laid over it.
//!
//! Pure: no network, no clock, no lock. From the newest to the oldest a byte is looked for in
//!
//! 1. `dirty`: written, not sent;
//! 2. `sending`: on its way to the data nodes, or in a publish as inline content;
//! 3. `kept`: overwritten in place on the data nodes, until the inode's partition has confirmed that
//!    the file still has its bytes there;
//! 4. `segments`: on the data nodes, published or (`unpublished`) not yet;
//! 5. `inline`: in the inode;
//!
//! and is zero if it is nowhere. Bytes leave 1 to 3 only when they are part of the file or all members
//! have them, so a failure at any moment loses nothing: [`Content::push_failed`] puts them back.

mod flushed;

use std::collections::BTreeMap;

use bytes::Bytes;
use milpa_types::{
    Attributes, Column, ExtentId, PACKET_BYTES, PartitionId, Segment, Timestamp, without_set_id,
};
use milpa_wire::meta::{Content as WireContent, Publish};

use super::staleness::{Asked, Staleness};
use crate::data::append::Committed;
use crate::data::overwrite::Replacement;
use crate::error::FsError;
use crate::ranges::{RangeMap, packets};
use crate::segments::SegmentMap;
use flushed::{is_on_disk, note};

/// The largest file: what off_t can express.
pub(crate) const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// Segments in one publish: applying it must not hold up a partition. More go in several.
const PUBLISH_SEGMENTS_MAX: usize = 4096;

/// A file's bytes and what is known of them.
#[derive(Debug)]
pub(crate) struct Content {
    /// As the servers last said.
    pub attributes: Attributes,
    staleness: Staleness,
    /// The newest version of others that was heard of.
    heard_version: u64,
    /// From where on others have changed what readers were shown: where the file ended then. Readers keep zeros
    /// behind that.
    outgrown: Option<u64>,
    /// Bytes of ours lie over a newer version of others, and perhaps came before it: the servers know, and say so
    /// when they are published.
    is_over_newer: bool,
    /// The length, unpublished bytes included.
    size: u64,
    segments: SegmentMap,
    inline: Option<Bytes>,
    unpublished: SegmentMap,
    /// Bytes of the inode that a push took along to the data nodes though nobody wrote them here:
    /// no use once somebody else has replaced what is in the inode.
    carried: RangeMap,
    /// What was carried and is outdated: if it is still on its way to the data nodes, it is nobody's
    /// when it arrives.
    outdated: RangeMap,
    dirty: RangeMap,
    sending: RangeMap,
    kept: RangeMap,
    /// The last push left what was written to the publish, as the file fitted into its inode.
    left_to_publish: bool,
    /// Where the kept bytes were put.
    overwritten: SegmentMap,
    untold: Untold,
    /// What a publish tells that is on its way, or of which it is not known whether it arrived.
    telling: Option<Untold>,
    /// Extents not known to be on all disks, and how many bytes of them matter.
    unflushed: BTreeMap<(PartitionId, ExtentId), u64>,
    /// Extents known to be, since this state was made.
    flushed: BTreeMap<(PartitionId, ExtentId), u64>,
}

/// What the next publish must tell besides segments.
#[derive(Clone, Copy, Debug, Default)]
struct Untold {
    end: u64,
    modified: Option<Timestamp>,
    clear_set_id: bool,
}

/// Where a part of a read comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Bytes(Bytes),
    Zeros(u64),
    Extent { column: Column, length: u64 },
}

/// Which buffered bytes to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All.
    All,
    /// Whole packets of long runs: a stream is being written.
    FullPackets,
}

/// Where bytes go that lie over committed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placing {
    /// Over them (CFS section 4).
    InPlace,
    /// Elsewhere: the disks that they lie on are full.
    Anew,
}

/// What a push sends.
#[derive(Debug, Default)]
pub(crate) struct Push {
    pub appends: Vec<(u64, Bytes)>,
    pub replacements: Vec<Replacement>,
}

impl Content {
    /// A file as the servers have it.
    pub(crate) fn new(attributes: Attributes, content: WireContent) -> Result<Content, FsError> {
        let (segments, inline) = taken_apart(content)?;
        Ok(Content::from_parts(attributes, segments, inline))
    }

    /// [`new`](Content::new) from what [`parts`](Content::parts) gave.
    pub(crate) fn from_parts(
        attributes: Attributes,
        segments: SegmentMap,
        inline: Option<Bytes>,
    ) -> Content {
        let mut content = Content {
            size: attributes.size,
            attributes,
            staleness: Staleness::default(),
            heard_version: 0,
            outgrown: None,
            is_over_newer: false,
            segments,
            inline,
            unpublished: SegmentMap::default(),
            carried: RangeMap::default(),
            outdated: RangeMap::default(),
            dirty: RangeMap::default(),
            sending: RangeMap::default(),
            kept: RangeMap::default(),
            left_to_publish: false,
            overwritten: SegmentMap::default(),
            untold: Untold::default(),
            telling: None,
            unflushed: BTreeMap::new(),
            flushed: BTreeMap::new(),
        };
        content.find_unflushed();
        content
    }

    /// The content map, if it is as published, of at most so many segments, and can be kept over a close.
    pub(crate) fn parts(&self, segments_max: usize) -> Option<(SegmentMap, Option<Bytes>)> {
        let kept = !self.is_stale() && !self.is_dirty() && self.segments.pieces() <= segments_max;
        kept.then(|| (self.segments.clone(), self.inline.clone()))
    }

    /// The servers changed the content by other hands than ours: load it anew before use.
    pub(crate) fn is_stale(&self) -> bool {
        self.staleness.is_stale()
    }

    pub(crate) fn becomes_stale(&mut self) {
        self.staleness.heard_of_a_change();
    }

    pub(crate) fn becomes_stale_if(&mut self, has_changed: bool) {
        if has_changed {
            self.becomes_stale();
        }
    }

    /// The servers were heard to have this. What a publish of ours may have made is no news: its answer will tell
    /// whether others changed the file before it.
    pub(crate) fn hears_of(&mut self, attributes: &Attributes) {
        let known = self.heard_version.max(self.attributes.content_version);
        if attributes.content_version > known && self.telling.is_none() {
            self.becomes_stale();
            self.is_outgrown_by(attributes.content_version, attributes.size);
        }
    }

    /// Others have made this version of the file. What readers have up to its end, as it was, stays good until an open.
    fn is_outgrown_by(&mut self, version: u64, size: u64) {
        if version > self.heard_version {
            self.heard_version = version;
            // Not where bytes end that nobody else has: what others wrote may lie before that.
            let from = self.attributes.size.min(size);
            self.outgrown = Some(self.outgrown.map_or(from, |earlier| earlier.min(from)));
        }
    }

    /// From where on readers are to forget what they were shown, before they are told the size.
    pub(crate) fn take_outgrown(&mut self) -> Option<u64> {
        self.outgrown.take()
    }

    /// To be told to [`refresh`](Content::refresh) with what the servers answer.
    pub(crate) fn asks(&self) -> Asked {
        self.staleness.asks()
    }

    /// What the servers say, who were asked then. Our own changes stay on top.
    pub(crate) fn refresh(
        &mut self,
        attributes: Attributes,
        content: WireContent,
        asked: Asked,
    ) -> Result<(), FsError> {
        if attributes.content_version < self.attributes.content_version {
            return Ok(());
        }
        let (mut segments, inline) = taken_apart(content)?;
        if self.is_stale() || attributes.content_version != self.attributes.content_version {
            for (at, bytes) in self.carried.take(0, u64::MAX) {
                self.unpublished.cut(at, at + bytes.len() as u64);
                self.outdated.insert(at, bytes);
            }
        }
        if attributes.content_version != self.attributes.content_version {
            self.is_outgrown_by(attributes.content_version, attributes.size);
            self.is_over_newer |= self.is_perhaps_applied();
        }
        for own in self.unpublished.iter() {
            segments.overlay(own.clone());
        }
        (self.segments, self.inline) = (segments, inline);
        self.staleness.answered(asked);
        self.attributes = attributes;
        self.size = attributes.size.max(self.written_end());
        self.find_unflushed();
        Ok(())
    }

    /// Attributes after a change of ours, which found the content version `before`. Another one than is
    /// known here means that somebody else wrote. An answer that is older than what was loaded meanwhile has
    /// laid ours over what others wrote later.
    pub(crate) fn learn(&mut self, attributes: Attributes, before: u64) {
        let known = self.attributes.content_version;
        if attributes.content_version < known {
            self.becomes_stale();
            return;
        }
        if before != known && attributes.content_version != known {
            self.becomes_stale();
            self.is_outgrown_by(before, attributes.size);
            self.is_over_newer |= self.is_perhaps_applied();
        }
        self.attributes = attributes;
        self.size = self.size.max(attributes.size);
    }

    /// The version of what is held here, if it is whole.
    pub(crate) fn version(&self) -> Option<u64> {
        (!self.is_stale()).then_some(self.attributes.content_version)
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Where what was written here and is not published ends.
    pub(crate) fn written_end(&self) -> u64 {
        self.untold.end.max(self.telling.map_or(0, |telling| telling.end))
    }

    /// Whether bytes may be part of the file, or lie where it has others', without our knowing it.
    fn is_perhaps_applied(&self) -> bool {
        self.telling.is_some() || !self.sending.is_empty() || !self.kept.is_empty()
    }

    /// Where what is to become part of the file ends.
    fn remaining_end(&self) -> u64 {
        let buffered =
            [&self.dirty, &self.sending, &self.kept].map(|map| map.runs().last().copied());
        let sent = self.unpublished.iter().last().map(Segment::end);
        buffered.into_iter().flatten().map(|(_, end)| end).chain(sent).max().unwrap_or(0)
    }

    /// Bytes that are only here.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        self.unsent_bytes() + self.kept.bytes()
    }

    fn unsent_bytes(&self) -> u64 {
        self.dirty.bytes() + self.sending.bytes()
    }

    /// Pieces that are only here.
    pub(crate) fn buffered_pieces(&self) -> usize {
        self.dirty.pieces()
    }

    /// Whether anything is not yet part of the published file.
    pub(crate) fn is_dirty(&self) -> bool {
        let is_sent = self.dirty.is_empty() && self.sending.is_empty() && self.telling.is_none();
        self.has_untold() || !is_sent
    }

    /// Whether bytes on the data nodes are not part of the file yet, or not known to be.
    pub(crate) fn has_unpublished(&self) -> bool {
        !self.unpublished.is_empty() || !self.overwritten.is_empty()
    }

    fn has_untold(&self) -> bool {
        self.untold.modified.is_some() || self.has_unpublished()
    }

    /// Shows in attributes from a server what it cannot know yet.
    pub(crate) fn overlay(&self, attributes: &mut Attributes) {
        let told = self.telling.and_then(|telling| telling.modified);
        let Some(modified) = self.untold.modified.or(told) else { return };
        attributes.size = self.size;
        attributes.modified = attributes.modified.max(modified);
        attributes.changed = attributes.changed.max(modified);
        let clears = self.untold.clear_set_id || self.telling.is_some_and(|it| it.clear_set_id);
        if clears {
            attributes.mode = without_set_id(attributes.mode);
        }
        let here = self.segments.bytes() + self.dirty.bytes() + self.sending.bytes();
        attributes.allocated = attributes.allocated.max(here);
    }

    /// Takes written bytes. Gives how many older ones in the buffer they replaced.
    pub(crate) fn write(
        &mut self,
        offset: u64,
        data: Bytes,
        now: Timestamp,
        clear_set_id: bool,
    ) -> u64 {
        let end = offset + data.len() as u64;
        self.size = self.size.max(end);
        self.untold.end = self.untold.end.max(end);
        self.untold.modified = Some(now);
        self.untold.clear_set_id |= clear_set_id;
        self.dirty.insert(offset, data)
    }

    /// Where the bytes of a read come from, in order; cut at the file's end.
    pub(crate) fn sources(&self, offset: u64, length: u64) -> Vec<Source> {
        let end = offset.saturating_add(length).min(self.size);
        let mut sources = Vec::new();
        let mut at = offset;
        for (start, bytes) in self.buffered(offset, end) {
            self.stored(at, start, &mut sources);
            at = start + bytes.len() as u64;
            sources.push(Source::Bytes(bytes));
        }
        self.stored(at, end, &mut sources);
        sources
    }

    fn buffered(&self, start: u64, end: u64) -> Vec<(u64, Bytes)> {
        let mut found = self.dirty.read(start, end);
        if self.sending.is_empty() && self.kept.is_empty() {
            return found;
        }
        for (low, high) in self.dirty.gaps(start, end) {
            found.extend(self.sending.read(low, high));
            for (low, high) in self.sending.gaps(low, high) {
                found.extend(self.kept.read(low, high));
            }
        }
        found.sort_by_key(|(at, _)| *at);
        found
    }

    fn stored(&self, start: u64, end: u64, sources: &mut Vec<Source>) {
        if start >= end {
            return;
        }
        for part in self.segments.parts(start, end) {
            match (part.column, &self.inline) {
                (Some(column), _) => sources.push(Source::Extent { column, length: part.length }),
                (None, None) => sources.push(Source::Zeros(part.length)),
                (None, Some(inline)) => {
                    let low = part.offset.min(inline.len() as u64) as usize;
                    let high = (part.offset + part.length).min(inline.len() as u64) as usize;
                    if low < high {
                        sources.push(Source::Bytes(inline.slice(low..high)));
                    }
                    let rest = part.length - (high - low) as u64;
                    if rest > 0 {
                        sources.push(Source::Zeros(rest));
                    }
                }
            }
        }
    }

    /// Whether the whole file fits into its inode, so that nothing need go to data nodes.
    fn fits_inline(&self, inline_bytes_max: u64) -> bool {
        self.segments.is_empty() && (1..=inline_bytes_max).contains(&self.size)
    }

    /// Moves buffered bytes to `sending` and tells what to do with them; `None` when nothing is to
    /// be sent.
    pub(crate) fn begin_push(
        &mut self,
        scope: Scope,
        placing: Placing,
        inline_bytes_max: u64,
    ) -> Option<Push> {
        debug_assert!(self.sending.is_empty(), "one push at a time");
        let leaving_inode = self.inline.is_some() && !self.segments.is_empty();
        let nothing_to_send = self.dirty.is_empty() && !leaving_inode;
        self.left_to_publish = !nothing_to_send && self.fits_inline(inline_bytes_max);
        if nothing_to_send || self.left_to_publish {
            return None;
        }
        // Nothing is on its way.
        self.outdated = RangeMap::default();
        // Content that leaves the inode leaves it whole, or a later publish would lose a part.
        let scope = if self.inline.is_some() { Scope::All } else { scope };
        let mut pieces = Vec::new();
        for (start, end) in self.dirty.runs() {
            let end = match scope {
                Scope::All => end,
                Scope::FullPackets => end - (end - start) % PACKET_BYTES as u64,
            };
            pieces.extend(self.dirty.take(start, end));
        }
        for (at, bytes) in &pieces {
            self.carried.remove(*at, *at + bytes.len() as u64);
            self.sending.insert(*at, bytes.clone());
        }
        for (at, bytes) in self.inline_below() {
            self.carried.insert(at, bytes.clone());
            pieces.push((at, bytes));
        }
        pieces.sort_by_key(|(at, _)| *at);
        let push = self.split(&pieces, placing);
        (!push.appends.is_empty() || !push.replacements.is_empty()).then_some(push)
    }

    /// Whether the next publish moves content from the inode to extents.
    pub(crate) fn leaves_inode(&self) -> bool {
        self.inline.is_some() && !self.unpublished.is_empty()
    }

    /// What of the inline content no newer byte covers.
    fn inline_below(&self) -> Vec<(u64, Bytes)> {
        let Some(inline) = &self.inline else { return Vec::new() };
        let mut below = Vec::new();
        for (start, end) in self.sending.gaps(0, inline.len() as u64) {
            for part in self.segments.parts(start, end) {
                let range = part.offset as usize..(part.offset + part.length) as usize;
                if part.column.is_none() {
                    below.push((part.offset, inline.slice(range)));
                }
            }
        }
        below
    }

    /// CFS section 4: what lies on committed bytes is overwritten, the rest appended.
    fn split(&self, pieces: &[(u64, Bytes)], placing: Placing) -> Push {
        let mut push = Push::default();
        let mut appends = Vec::new();
        for (at, data) in packets(pieces, PACKET_BYTES) {
            for part in self.segments.parts(at, at + data.len() as u64) {
                let low = (part.offset - at) as usize;
                let data = data.slice(low..low + part.length as usize);
                match part.column.filter(|_| placing == Placing::InPlace) {
                    None => appends.push((part.offset, data)),
                    Some(column) => {
                        let file_offset = part.offset;
                        push.replacements.push(Replacement { file_offset, column, data });
                    }
                }
            }
        }
        push.appends = packets(&appends, PACKET_BYTES);
        push
    }

    /// Appended bytes are on all members (on their disks if `synced`). Gives how many bytes left
    /// the buffer.
    pub(crate) fn appended(&mut self, done: Committed, synced: bool) -> u64 {
        let mut released = 0;
        for (start, end) in self.outdated.gaps(done.file_offset, done.file_offset + done.length) {
            let offset = done.column.offset + (start - done.file_offset);
            let column = Column { offset, ..done.column };
            let mut segment = Segment::plain(start, end - start, column);
            segment.flushed = synced;
            if !synced {
                note(&mut self.unflushed, &segment);
            }
            self.segments.overlay(segment.clone());
            self.unpublished.overlay(segment);
            released += self.sending.remove(start, end) + self.confirmed(start, end);
        }
        released
    }

    /// Overwritten bytes are in the synced logs of a majority. They are kept: the bytes below them
    /// may have been cut off or replaced by another client, and be nobody's. Gives how many older
    /// ones left the buffer.
    pub(crate) fn overwrote(&mut self, done: &Replacement) -> u64 {
        let end = done.file_offset + done.data.len() as u64;
        let mut released = 0;
        for (at, bytes) in self.sending.take(done.file_offset, end) {
            for part in self.unpublished.parts(at, at + bytes.len() as u64) {
                if part.column.is_some() {
                    // Put over bytes of our own that nobody else can reach yet.
                    released += part.length;
                    continue;
                }
                let column = Column {
                    offset: done.column.offset + (part.offset - done.file_offset),
                    ..done.column
                };
                self.overwritten.overlay(Segment::plain(part.offset, part.length, column));
                let low = (part.offset - at) as usize;
                let piece = bytes.slice(low..low + part.length as usize);
                released += self.kept.insert(part.offset, piece);
            }
        }
        released
    }

    /// Bytes that were overwritten in place need not be kept any longer. Gives how many they were.
    fn confirmed(&mut self, start: u64, end: u64) -> u64 {
        self.overwritten.cut(start, end);
        self.kept.remove(start, end)
    }

    /// A push or publish failed: what was not sent goes back below newer writes. Gives how many
    /// bytes left the buffer.
    pub(crate) fn push_failed(&mut self) -> u64 {
        let mut released = 0;
        for (at, bytes) in self.sending.take(0, u64::MAX) {
            released += self.dirty.insert_below(at, &bytes);
        }
        released
    }

    /// Gives up what cannot be sent. What the data nodes have stays to be published, so that a file
    /// that did not fit is as long as what did, and deleting it gives the space back. Gives how many
    /// bytes left the buffer.
    pub(crate) fn discard_unsent(&mut self) -> u64 {
        let released = self.unsent_bytes();
        (self.dirty, self.sending) = (RangeMap::default(), RangeMap::default());
        let sent = self.unpublished.iter().map(Segment::end).max().unwrap_or(0);
        self.untold.end = self.untold.end.min(sent);
        self.size = self.attributes.size.max(sent);
        released
    }

    /// Gives up everything that is not published. Gives how many bytes left the buffer.
    pub(crate) fn discard(&mut self) -> u64 {
        let released = self.buffered_bytes();
        (self.dirty, self.sending) = (RangeMap::default(), RangeMap::default());
        self.kept = RangeMap::default();
        (self.unpublished, self.overwritten) = Default::default();
        self.carried = RangeMap::default();
        (self.untold, self.telling) = (Untold::default(), None);
        self.becomes_stale();
        self.size = self.attributes.size;
        released
    }

    /// Whether a publish must wait for another push: what is known here of the content is old, a part
    /// of it that leaves the inode is not on the data nodes yet, or what was to go into the inode no longer fits.
    pub(crate) fn is_behind(&self, inline_bytes_max: u64) -> bool {
        let leaves_inode = self.leaves_inode();
        let has_grown = self.left_to_publish && !self.fits_inline(inline_bytes_max);
        let is_unsent = leaves_inode && !self.inline_below().is_empty();
        self.has_untold() && (self.is_stale() || is_unsent || has_grown)
    }

    /// The publish of everything that is on the data nodes, or fits into the inode. Call when a
    /// push of all has succeeded. `may_replace` says that everything was flushed by all members before.
    pub(crate) fn begin_publish(
        &mut self,
        inline_bytes_max: u64,
        may_replace: bool,
    ) -> Option<Publish> {
        debug_assert!(self.sending.is_empty(), "one push at a time");
        let modified = match self.untold.modified {
            Some(modified) => modified,
            None if !self.has_unpublished() => return None,
            None => self.attributes.modified,
        };
        let inline = if self.fits_inline(inline_bytes_max) { Some(self.whole()) } else { None };
        if inline.is_some() {
            for (at, bytes) in self.dirty.take(0, u64::MAX) {
                self.sending.insert(at, bytes);
            }
        }
        let segments = self.next_segments();
        let overwritten: Vec<Segment> =
            self.overwritten.iter().take(PUBLISH_SEGMENTS_MAX).cloned().collect();
        let untold = self.take_untold(&segments, &overwritten);
        let leaves_inode = self.leaves_inode();
        let is_based = inline.is_some() || leaves_inode;
        Some(Publish {
            inode: self.attributes.inode,
            truncation: self.attributes.truncation,
            base: is_based.then_some(self.attributes.content_version),
            segments,
            size: untold.end,
            inline,
            overwritten,
            may_replace,
            modified,
            clear_set_id: untold.clear_set_id,
        })
    }

    /// What a publish of these tells besides. The rest is kept for the next one.
    fn take_untold(&mut self, segments: &[Segment], overwritten: &[Segment]) -> Untold {
        let mut untold = std::mem::take(&mut self.untold);
        let is_all = self.dirty.is_empty() && segments.len() == self.unpublished.pieces();
        if !is_all {
            // Others would read zeros up to the end of what is still to come, and find them there if it never does.
            let told = segments.iter().chain(overwritten).map(Segment::end).max().unwrap_or(0);
            self.untold = Untold { clear_set_id: false, ..untold };
            untold.end = untold.end.min(told);
        }
        self.telling = Some(untold);
        untold
    }

    /// Unpublished segments, as many as one publish takes, marked if they are on all disks by now.
    fn next_segments(&self) -> Vec<Segment> {
        let unpublished = self.unpublished.iter().take(PUBLISH_SEGMENTS_MAX);
        let marked = unpublished.map(|segment| {
            let flushed = segment.flushed || is_on_disk(&self.flushed, segment);
            Segment { flushed, ..segment.clone() }
        });
        marked.collect()
    }

    /// The whole file from memory: only for what fits inline.
    fn whole(&self) -> Vec<u8> {
        let mut whole = Vec::with_capacity(self.size as usize);
        for source in self.sources(0, self.size) {
            match source {
                Source::Bytes(bytes) => whole.extend_from_slice(&bytes),
                Source::Zeros(length) => whole.resize(whole.len() + length as usize, 0),
                Source::Extent { length, .. } => {
                    debug_assert!(false, "inline content has no extents");
                    whole.resize(whole.len() + length as usize, 0);
                }
            }
        }
        whole
    }

    /// The publish was applied, to content of the version `before`. Gives how many bytes left the buffer.
    pub(crate) fn published(
        &mut self,
        publish: Publish,
        attributes: Attributes,
        before: u64,
    ) -> u64 {
        for segment in &publish.segments {
            self.unpublished.cut(segment.offset, segment.end());
        }
        match publish.inline {
            Some(inline) => self.inline = Some(inline.into()),
            None if !self.segments.is_empty() => {
                self.inline = None;
                self.carried = RangeMap::default();
            }
            None => {}
        }
        self.telling = None;
        let mut released = self.sending.remove(0, u64::MAX);
        for place in &publish.overwritten {
            released += self.confirmed(place.offset, place.end());
        }
        if self.is_over_newer {
            // What readers were shown of these, others may have replaced.
            self.outgrown = Some(0);
            self.is_over_newer = self.is_perhaps_applied();
        }
        self.learn(attributes, before);
        released
    }

    /// The publish was not applied: all that it told is to be told again. Gives how many bytes left
    /// the buffer.
    pub(crate) fn publish_failed(&mut self, publish: &Publish) -> u64 {
        self.telling = None;
        let untold = &mut self.untold;
        untold.end = untold.end.max(publish.size);
        untold.clear_set_id |= publish.clear_set_id;
        untold.modified = Some(untold.modified.unwrap_or(publish.modified));
        self.push_failed()
    }

    /// Somebody else changed content that the publish builds on: it is to be loaded, what was
    /// overwritten in place is to be laid over it anew, and all that the publish told is to be told
    /// again. Gives how many bytes left the buffer.
    pub(crate) fn publish_was_behind(&mut self, publish: &Publish) -> u64 {
        self.becomes_stale();
        let mut released = self.publish_failed(publish);
        self.overwritten = SegmentMap::default();
        for (at, bytes) in self.kept.take(0, u64::MAX) {
            released += self.dirty.insert_below(at, &bytes);
        }
        released
    }

    /// The servers cut or extended the file, found as of version `before`, to `size`. Gives how many
    /// bytes left the buffer.
    pub(crate) fn truncated(&mut self, size: u64, attributes: Attributes, before: u64) -> u64 {
        self.segments.cut(size, u64::MAX);
        self.unpublished.cut(size, u64::MAX);
        self.carried.remove(size, u64::MAX);
        let has_inline = self.inline.is_some();
        if size == 0 {
            self.inline = None;
        } else if let Some(inline) = &mut self.inline {
            inline.truncate(usize::try_from(size).unwrap_or(usize::MAX));
        }
        let released = self.dirty.remove(size, u64::MAX)
            + self.sending.remove(size, u64::MAX)
            + self.confirmed(size, u64::MAX);
        // Not the new size: that the servers know, and others may have changed it again.
        self.untold.end = self.remaining_end();
        self.size = size;
        self.learn(attributes, before);
        self.size = self.size.min(size.max(attributes.size));
        // The server may have filled inline content with zeros, which must then be replaced whole.
        self.becomes_stale_if(has_inline && size > 0);
        self.find_unflushed();
        released
    }
}

fn taken_apart(content: WireContent) -> Result<(SegmentMap, Option<Bytes>), FsError> {
    Ok(match content {
        WireContent::Inline(bytes) => (SegmentMap::default(), Some(bytes.into())),
        WireContent::Segments(segments) => (SegmentMap::from_server(segments)?, None),
    })
}

#[cfg(test)]
#[path = "content_tests.rs"]
pub(super) mod tests;
