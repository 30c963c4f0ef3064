//! Content maps: publish, truncate, delete; and what goes to the free list.

use milpa_types::{AttributeChanges, FreedRange};
use milpa_wire::meta::{Content, FlushedFile, LAYOUT_SEGMENTS_MAX, LostExtent, LostRange};
use proptest::prelude::*;

use super::*;

const LARGE: ExtentId = ExtentId(5);

fn small() -> ExtentId {
    ExtentId::small(1)
}

fn freed(extent: ExtentId, offset: u64, length: u64) -> FreedRange {
    FreedRange { partition: PartitionId(9), extent, offset, length }
}

struct OneFile {
    solo: Solo,
    file: InodeId,
}

impl OneFile {
    fn new() -> OneFile {
        let mut solo = Solo::new();
        let file = solo.make(ROOT, "f", FileKind::File);
        OneFile { solo, file }
    }

    fn publish(&mut self, segments: Vec<Segment>) -> MetaReply {
        let base = self.solo.stat(self.file).unwrap().content_version;
        self.publish_over(Some(base), segments)
    }

    /// A publish that builds on the version `base`, if on any.
    fn publish_over(&mut self, base: Option<u64>, segments: Vec<Segment>) -> MetaReply {
        let truncation = self.solo.stat(self.file).unwrap().truncation;
        let MetaWrite::Publish(publish) = publish(self.file, truncation, segments) else {
            unreachable!()
        };
        self.solo.write(MetaWrite::Publish(Publish { base, ..publish }))
    }

    fn mark_flushed(&mut self, segments: Vec<Segment>) -> MetaReply {
        let file = FlushedFile { inode: self.file, segments };
        self.solo.write(MetaWrite::MarkFlushed { files: vec![file] })
    }

    fn set_size(&mut self, size: u64) {
        let changes = AttributeChanges { size: Some(size), ..Default::default() };
        self.solo.write(MetaWrite::SetAttributes { inode: self.file, changes }).unwrap();
    }

    fn content(&self) -> Content {
        match self.solo.partition.read(None, &MetaRead::GetLayout { inode: self.file, from: 0 }) {
            Ok(MetaAnswer::Layout { content, .. }) => content,
            other => panic!("not a layout: {other:?}"),
        }
    }

    fn segments(&self) -> Vec<Segment> {
        match self.content() {
            Content::Segments(segments) => segments,
            Content::Inline(_) => panic!("inline"),
        }
    }

    fn freed(&self) -> Vec<FreedRange> {
        self.solo.partition.free_orders(0, 1000).iter().map(|order| order.range).collect()
    }
}

#[test]
fn adjacent_segments_of_one_extent_become_one() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0), segment(200, 100, LARGE, 200)]).unwrap();
    assert_eq!(f.segments().len(), 2);
    f.publish(vec![segment(100, 100, LARGE, 100)]).unwrap();
    assert_eq!(f.segments(), [segment(0, 300, LARGE, 0)]);
    let attributes = f.solo.stat(f.file).unwrap();
    assert_eq!((attributes.size, attributes.allocated), (300, 300));
    assert_eq!(f.freed(), []);
}

#[test]
fn the_last_publish_wins_and_the_losers_bytes_are_freed() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    f.publish(vec![segment(40, 20, small(), 7)]).unwrap();
    let left = [segment(0, 40, LARGE, 0), segment(40, 20, small(), 7), segment(60, 40, LARGE, 60)];
    assert_eq!(f.segments(), left);
    assert_eq!(f.freed(), [freed(LARGE, 40, 20)]);
    f.publish(vec![segment(0, 200, ExtentId(6), 0)]).unwrap();
    assert_eq!(f.segments(), [segment(0, 200, ExtentId(6), 0)]);
    assert_eq!(f.freed().len(), 4);
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 200);
}

#[test]
fn publishing_the_same_bytes_again_frees_nothing_and_may_mark_them_flushed() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    let before = f.solo.stat(f.file).unwrap();
    let flushed = Segment { flushed: true, ..segment(0, 60, LARGE, 0) };
    f.publish(vec![flushed.clone()]).unwrap();
    assert_eq!(f.segments(), [flushed.clone(), segment(60, 40, LARGE, 60)]);
    // Without the mark: what is known to be flushed stays so.
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    assert_eq!(f.segments(), [flushed, segment(60, 40, LARGE, 60)]);
    f.publish(vec![Segment { flushed: true, ..segment(0, 100, LARGE, 0) }]).unwrap();
    assert_eq!(f.segments(), [Segment { flushed: true, ..segment(0, 100, LARGE, 0) }]);
    assert_eq!(f.freed(), []);
    assert_eq!(f.solo.stat(f.file), Ok(before), "no content changed, no time either");
}

#[test]
fn marks_reach_what_the_file_still_has_and_nothing_else() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0), segment(200, 50, LARGE, 200)]).unwrap();
    f.publish(vec![segment(40, 20, small(), 7)]).unwrap();
    let (before, free) = (f.solo.stat(f.file).unwrap(), f.freed());
    let on_disk = |segment| Segment { flushed: true, ..segment };
    f.mark_flushed(vec![segment(0, 230, LARGE, 0)]).unwrap();
    let marked = [
        on_disk(segment(0, 40, LARGE, 0)),
        segment(40, 20, small(), 7),
        on_disk(segment(60, 40, LARGE, 60)),
        on_disk(segment(200, 30, LARGE, 200)),
        segment(230, 20, LARGE, 230),
    ];
    assert_eq!(f.segments(), marked);
    f.mark_flushed(vec![segment(230, 20, LARGE, 230), segment(40, 20, small(), 7)]).unwrap();
    assert_eq!(f.segments().len(), 4, "marked neighbours become one key again");
    assert_eq!(f.solo.stat(f.file), Ok(before), "no content changed, no time either");
    assert_eq!(f.freed(), free);
    f.solo.write(unlink(ROOT, "f")).unwrap();
    assert_eq!(f.mark_flushed(vec![segment(0, 10, LARGE, 0)]), Ok(MetaAnswer::Done), "too late");
    assert_eq!(f.mark_flushed(vec![segment(0, 0, LARGE, 0)]), Err(MetaError::Invalid));
}

#[test]
fn growing_in_place_frees_nothing() {
    let mut f = OneFile::new();
    for end in [100, 250, 4000] {
        f.publish(vec![segment(0, end, LARGE, 0)]).unwrap();
    }
    assert_eq!(f.segments(), [segment(0, 4000, LARGE, 0)]);
    assert_eq!(f.freed(), []);
}

#[test]
fn truncation_cuts_frees_and_fences_older_publishes() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0), segment(100, 50, small(), 9)]).unwrap();
    f.set_size(30);
    assert_eq!(f.segments(), [segment(0, 30, LARGE, 0)]);
    assert_eq!(f.freed(), [freed(LARGE, 30, 70), freed(small(), 9, 50)]);
    let late = f.solo.write(publish(f.file, 0, vec![segment(50, 10, LARGE, 200)]));
    assert_eq!(late, Err(MetaError::StaleTruncation { current: 1 }));
    f.set_size(1000);
    assert_eq!(f.segments(), [segment(0, 30, LARGE, 0)], "the rest is a hole");
    let attributes = f.solo.stat(f.file).unwrap();
    assert_eq!((attributes.size, attributes.allocated, attributes.truncation), (1000, 30, 2));
}

fn cut_lost(f: &mut OneFile, lost: &[(ExtentId, u64)]) {
    let lost = lost.iter().map(|(extent, length)| LostExtent {
        partition: PartitionId(9),
        extent: *extent,
        length: *length,
    });
    let (inode, lost) = (f.file, lost.collect());
    f.solo.write(MetaWrite::CutLostExtents { inode, lost }).unwrap();
}

/// Found by the simulation (seed 5182): one after the other, the first left a hole before the second,
/// which then was the file's end.
#[test]
fn a_file_ends_before_lost_bytes_of_several_extents_that_take_turns() {
    let mut f = OneFile::new();
    let there = segment(0, 100, LARGE, 0);
    let turns = [segment(100, 50, LARGE, 100), segment(150, 70, small(), 0)];
    f.publish([vec![there.clone()], turns.to_vec(), vec![segment(220, 30, LARGE, 150)]].concat())
        .unwrap();
    cut_lost(&mut f, &[(LARGE, 100), (small(), 0)]);
    assert_eq!(f.segments(), [there]);
    assert_eq!(f.solo.stat(f.file).unwrap().size, 100);
}

/// Found by the simulation (seed 755893): a block in the middle of an extent was lost, and what had been written
/// behind it since was cut off with it.
#[test]
fn what_lies_behind_lost_bytes_of_an_extent_stays() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0), segment(100, 50, small(), 0)]).unwrap();
    let range = |from, until| {
        let (partition, extent) = (PartitionId(9), LARGE);
        LostRange { partition, extent, from, until }
    };
    // In any order, and one over the other: who says so may not be sure of where they begin.
    let lost = vec![range(70, 80), range(20, 40), range(30, 45)];
    f.solo.write(MetaWrite::CutLostRanges { inode: f.file, lost }).unwrap();
    let left = [segment(0, 20, LARGE, 0), segment(45, 25, LARGE, 45), segment(80, 20, LARGE, 80)];
    assert_eq!(f.segments(), [&left[..], &[segment(100, 50, small(), 0)]].concat());
    let attributes = f.solo.stat(f.file).unwrap();
    assert_eq!((attributes.size, attributes.allocated), (150, 115));
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 115);
}

#[test]
fn a_file_is_cut_where_unflushed_bytes_are_lost() {
    let mut f = OneFile::new();
    let flushed = Segment { flushed: true, ..segment(0, 100, LARGE, 0) };
    f.publish(vec![flushed.clone(), segment(100, 50, LARGE, 100)]).unwrap();
    f.publish(vec![segment(150, 70, small(), 0), segment(220, 30, ExtentId(6), 0)]).unwrap();
    let before = f.solo.stat(f.file).unwrap();
    let cut = |f: &mut OneFile, extent, length| {
        cut_lost(f, &[(extent, length)]);
        f.solo.stat(f.file).unwrap()
    };
    assert_eq!(cut(&mut f, ExtentId(7), 0), before, "not of this file");
    assert_eq!(cut(&mut f, ExtentId(6), 30), before, "nothing lost");
    let after = cut(&mut f, ExtentId(6), 10);
    assert_eq!((after.size, after.allocated), (230, 230), "the end is cut off");
    assert_eq!(after.content_version, before.content_version + 1);
    // Behind it there is more: a hole.
    assert_eq!(cut(&mut f, small(), 0).size, 230);
    // Flushed bytes stay, whoever says that they are lost.
    assert_eq!(cut(&mut f, LARGE, 40).size, 230);
    assert_eq!(f.segments(), [flushed, segment(220, 10, ExtentId(6), 0)]);
    let lost = [freed(ExtentId(6), 10, 20), freed(small(), 0, 70), freed(LARGE, 100, 50)];
    assert_eq!(f.freed(), lost);
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 110);
}

#[test]
fn deletion_frees_large_extents_whole_and_pieces_exactly() {
    let mut f = OneFile::new();
    let parts =
        [segment(0, 100, LARGE, 0), segment(100, 50, small(), 9), segment(200, 9, LARGE, 200)];
    f.publish(parts.to_vec()).unwrap();
    f.solo.write(unlink(ROOT, "f")).unwrap();
    assert_eq!(f.freed(), [freed(small(), 9, 50), freed(LARGE, 0, u64::MAX)]);
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 0);
    let orders: Vec<_> =
        f.solo.partition.free_orders(0, 10).iter().map(|order| order.order).collect();
    assert_eq!(f.solo.partition.free_orders(orders[0], 10).len(), 1);
    for _ in 0..2 {
        f.solo.apply(&Command::ConfirmFreed { orders: orders.clone() });
        assert_eq!(f.freed(), [], "confirmed orders are forgotten");
    }
}

fn inline(f: &OneFile, content: &[u8]) -> MetaWrite {
    MetaWrite::Publish(Publish {
        inode: f.file,
        truncation: f.solo.stat(f.file).unwrap().truncation,
        base: Some(f.solo.stat(f.file).unwrap().content_version),
        segments: Vec::new(),
        size: content.len() as u64,
        inline: Some(content.to_vec()),
        overwritten: Vec::new(),
        may_replace: true,
        modified: Timestamp(60),
        clear_set_id: false,
    })
}

#[test]
fn content_moves_into_the_inode_and_out_again() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 5, small(), 3)]).unwrap();
    f.solo.write(inline(&f, b"hello")).unwrap();
    assert_eq!(f.content(), Content::Inline(b"hello".to_vec()));
    assert_eq!(f.freed(), [freed(small(), 3, 5)]);
    f.set_size(2);
    f.set_size(4);
    assert_eq!(f.content(), Content::Inline(b"he\0\0".to_vec()), "no old byte comes back");
    let partly = f.publish(vec![segment(2, 100, LARGE, 0)]);
    assert_eq!(partly, Err(MetaError::Invalid), "inline bytes would be lost");
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    assert_eq!(f.segments(), [segment(0, 100, LARGE, 0)]);
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 100);
    // More than the volume's option: its writer may not have heard of another one yet.
    f.set_size(0);
    f.solo.write(inline(&f, &[0; 4096])).unwrap();
    assert_eq!(f.solo.write(inline(&f, &[0; 4097])), Err(MetaError::Invalid));
}

/// The story: the same bytes written again left the time of the last change as it was, and a client that had shown
/// the new one went back: make(1) did not see the write.
#[test]
fn the_same_bytes_written_again_show_when() {
    let mut f = OneFile::new();
    f.solo.write(inline(&f, b"hello")).unwrap();
    let changes = AttributeChanges { modified: Some(Timestamp(7)), ..AttributeChanges::default() };
    f.solo.write(MetaWrite::SetAttributes { inode: f.file, changes }).unwrap();
    let before = f.solo.stat(f.file).unwrap();
    f.solo.write(inline(&f, b"hello")).unwrap();
    let after = f.solo.stat(f.file).unwrap();
    assert_eq!(after.modified, Timestamp(60));
    assert_eq!(after.content_version, before.content_version, "pages stay good");
}

/// A regression: two clients write into one small file. Each publishes all of it, and the second,
/// which had not seen the first one's bytes, took them away.
#[test]
fn content_in_the_inode_is_replaced_only_by_who_has_seen_it() {
    let mut f = OneFile::new();
    let late = inline(&f, b"......second");
    let late_and_large = segment(0, 4096, LARGE, 0);
    f.solo.write(inline(&f, b"first.......")).unwrap();
    let refused = Err(MetaError::StaleContent { current: 1 });
    assert_eq!(f.solo.write(late), refused);
    assert_eq!(f.publish_over(Some(0), vec![late_and_large.clone()]), refused);
    assert_eq!(f.publish_over(None, vec![late_and_large.clone()]), refused);
    let elsewhere = segment(4096, 10, LARGE, 0);
    assert_eq!(
        f.publish_over(Some(0), vec![elsewhere]),
        refused,
        "not seen that it is in the inode"
    );
    assert_eq!(f.content(), Content::Inline(b"first.......".to_vec()));
    f.publish_over(Some(1), vec![late_and_large]).unwrap();
    f.publish_over(None, vec![segment(4096, 10, LARGE, 4096)]).unwrap();
    assert_eq!(f.segments(), [segment(0, 4106, LARGE, 0)], "keys need not have seen each other");
    // Found by the simulation: the content had left the inode by another client's publish, and one
    // that carried its old bytes along was taken.
    let late = f.publish_over(Some(1), vec![segment(0, 12, LARGE, 9000)]);
    assert_eq!(late, Err(MetaError::StaleContent { current: 3 }), "bytes that it carried along");
}

/// Found by the simulation (seed 195): a client that did not know of another one's synced bytes put its
/// own over them, and the next power cut took these: the file had neither.
#[test]
fn bytes_that_power_may_take_do_not_replace_others() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    let send = |f: &mut OneFile, segment: Segment, may_replace| {
        let MetaWrite::Publish(publish) = publish(f.file, 0, vec![segment]) else { panic!() };
        f.solo.write(MetaWrite::Publish(Publish { may_replace, ..publish }))
    };
    let refused = Err(MetaError::ReplacesBytes);
    assert_eq!(send(&mut f, segment(50, 100, LARGE, 500), false), refused);
    assert_eq!(f.segments(), [segment(0, 100, LARGE, 0)]);
    send(&mut f, segment(100, 50, LARGE, 100), false).expect("nothing is replaced");
    send(&mut f, segment(20, 30, LARGE, 20), false).expect("the same bytes");
    let flushed = Segment { flushed: true, ..segment(50, 10, LARGE, 700) };
    send(&mut f, flushed, false).expect("on disk");
    send(&mut f, segment(90, 60, LARGE, 500), true).expect("flushed as the volume wants it");

    f.solo.write(inline(&f, b"small")).unwrap();
    assert_eq!(f.content(), Content::Inline(b"small".to_vec()));
    let base = Some(f.solo.stat(f.file).unwrap().content_version);
    let MetaWrite::Publish(leaving) = publish(f.file, 0, vec![segment(0, 200, LARGE, 0)]) else {
        panic!()
    };
    let leaving = Publish { base, may_replace: false, ..leaving };
    assert_eq!(f.solo.write(MetaWrite::Publish(leaving)), refused);
}

/// Found by power cuts on real processes (seed 102): a file was extended by truncation and synced; bytes
/// that were written there and not synced went with the next power cut, and the length with them.
#[test]
fn bytes_that_power_may_take_do_not_replace_zeros() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0)]).unwrap();
    f.set_size(1000);
    let truncation = f.solo.stat(f.file).unwrap().truncation;
    let mut send = |start, length, may_replace| {
        let segments = vec![segment(start, length, LARGE, start)];
        let MetaWrite::Publish(publish) = publish(f.file, truncation, segments) else { panic!() };
        f.solo.write(MetaWrite::Publish(Publish { may_replace, ..publish }))
    };
    assert_eq!(send(900, 200, false), Err(MetaError::ReplacesBytes));
    send(1000, 200, false).expect("behind the end");
    send(900, 200, true).expect("on disk");
    send(900, 300, false).expect("the same bytes");
}

/// A regression, found by the simulation: bytes were overwritten in place after another client had
/// replaced or cut off what they lay on, and the publish that told of it was taken.
#[test]
fn what_was_overwritten_in_place_must_still_be_part_of_the_file() {
    let mut f = OneFile::new();
    f.publish(vec![segment(0, 100, LARGE, 0), segment(100, 50, small(), 9)]).unwrap();
    let overwrite = |f: &mut OneFile, places: Vec<Segment>| {
        let truncation = f.solo.stat(f.file).unwrap().truncation;
        let MetaWrite::Publish(publish) = publish(f.file, truncation, Vec::new()) else { panic!() };
        f.solo.write(MetaWrite::Publish(Publish { overwritten: places, ..publish }))
    };
    overwrite(&mut f, vec![segment(20, 80, LARGE, 20), segment(100, 1, small(), 9)]).unwrap();
    let version = f.solo.stat(f.file).unwrap().content_version;
    assert_eq!(version, 2, "others must load it anew");
    let refused = Err(MetaError::StaleContent { current: 2 });
    assert_eq!(overwrite(&mut f, vec![segment(20, 10, LARGE, 21)]), refused, "another place");
    assert_eq!(overwrite(&mut f, vec![segment(90, 20, LARGE, 90)]), refused, "only a part of it");
    assert_eq!(overwrite(&mut f, vec![segment(150, 1, small(), 59)]), refused, "a hole");
    f.publish(vec![segment(50, 10, LARGE, 200)]).unwrap();
    let refused = Err(MetaError::StaleContent { current: 3 });
    assert_eq!(overwrite(&mut f, vec![segment(40, 20, LARGE, 40)]), refused, "replaced");
    overwrite(&mut f, vec![segment(40, 10, LARGE, 40)]).unwrap();
    f.set_size(30);
    let refused = Err(MetaError::StaleContent { current: 5 });
    assert_eq!(overwrite(&mut f, vec![segment(20, 20, LARGE, 20)]), refused, "cut off");
}

#[test]
fn extending_far_leaves_a_hole_behind_inline_content() {
    let mut f = OneFile::new();
    f.solo.write(inline(&f, b"hello")).unwrap();
    f.set_size(1 << 40);
    assert_eq!(f.content(), Content::Inline(b"hello".to_vec()));
    f.set_size(3);
    assert_eq!(f.content(), Content::Inline(b"hel".to_vec()));
    f.set_size(0);
    assert_eq!(f.content(), Content::Segments(vec![]));
    assert_eq!(f.solo.partition.statistics().allocated_bytes, 0);
}

#[test]
fn hostile_segments_are_refused() {
    let max = i64::MAX as u64;
    for (bad, error) in [
        (segment(0, 0, LARGE, 0), MetaError::Invalid),
        (segment(u64::MAX, 2, LARGE, 0), MetaError::TooLarge),
        (segment(max, 1, LARGE, 0), MetaError::TooLarge),
        (segment(0, 1, LARGE, u64::MAX), MetaError::Invalid),
    ] {
        let mut f = OneFile::new();
        assert_eq!(f.publish(vec![bad]), Err(error));
    }
}

/// What one byte of the file is made of: its extent and the offset there.
type Bytes = std::collections::BTreeMap<u64, (ExtentId, u64)>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Random publishes and truncations, against a map of single bytes: content, size, allocated
    /// bytes and the free list are exact to the byte.
    #[test]
    fn content_is_exact_to_the_byte(
        changes in prop::collection::vec(
            (0u64..60, 1u64..30, any::<bool>(), 0u8..10), 1..40),
    ) {
        let mut f = OneFile::new();
        let (mut bytes, mut size, mut lost, mut tail) = (Bytes::new(), 0, Vec::new(), [0u64; 3]);
        let mut last = None;
        for (offset, length, flushed, choice) in changes {
            if choice == 0 {
                f.set_size(offset);
                size = offset;
                lost.extend(bytes.split_off(&offset).into_values());
                last = None;
                continue;
            }
            // Extents are only appended to; now and then a segment is published again.
            let which = usize::from(choice % 3);
            let new = match (choice, last.take()) {
                (9, Some(old)) => Segment { flushed, ..old },
                _ => {
                    let new = segment(offset, length, ExtentId(which as u64), tail[which]);
                    tail[which] += length;
                    Segment { flushed, ..new }
                }
            };
            f.publish(vec![new.clone()]).unwrap();
            let milpa_types::Columns::One(column) = &new.columns else { unreachable!() };
            for i in 0..new.length {
                let place = (column.extent, column.offset + i);
                lost.extend(bytes.insert(new.offset + i, place).filter(|old| *old != place));
            }
            size = size.max(new.end());
            last = Some(new);
        }
        let mut found = Bytes::new();
        for part in f.segments() {
            let milpa_types::Columns::One(column) = &part.columns else { unreachable!() };
            for i in 0..part.length {
                let twice = found.insert(part.offset + i, (column.extent, column.offset + i));
                prop_assert_eq!(twice, None, "segments do not overlap");
            }
        }
        prop_assert_eq!(&found, &bytes);
        let attributes = f.solo.stat(f.file).unwrap();
        prop_assert_eq!((attributes.size, attributes.allocated), (size, bytes.len() as u64));
        let mut freed: Vec<_> =
            f.freed().iter().flat_map(|r| (0..r.length).map(|i| (r.extent, r.offset + i))).collect();
        freed.sort_unstable();
        lost.sort_unstable();
        prop_assert_eq!(freed, lost);
    }
}

/// Found by a reader: a file of some 400,000 pieces could be written, and never be opened again.
#[test]
fn a_map_of_any_length_is_had_in_parts() {
    let mut f = OneFile::new();
    let count = LAYOUT_SEGMENTS_MAX + 10;
    let all: Vec<Segment> = (0..count as u64).map(|i| segment(i * 10, 5, LARGE, i * 7)).collect();
    for part in all.chunks(4096) {
        f.publish(part.to_vec()).unwrap();
    }
    let (mut got, mut from, mut answers) = (Vec::new(), 0, 0);
    loop {
        let read = MetaRead::GetLayout { inode: f.file, from };
        let Ok(MetaAnswer::Layout { content: Content::Segments(part), end, .. }) =
            f.solo.partition.read(None, &read)
        else {
            panic!("no layout");
        };
        got.extend(part);
        from = got.last().unwrap().end();
        answers += 1;
        if end {
            break;
        }
    }
    assert!(answers == 2 && got == all);
}
