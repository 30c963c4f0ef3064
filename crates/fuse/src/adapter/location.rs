//! Where a file lies, as JSON: the value of the virtual attribute behind `milpa info`.

use milpa_client::{FileLocation, SegmentLocation};
use serde_json::{Value, json};

pub(super) fn to_json(found: &FileLocation) -> String {
    let attributes = &found.attributes;
    json!({
        "inode": attributes.inode,
        "kind": attributes.kind,
        "size": attributes.size,
        "allocated": attributes.allocated,
        "links": attributes.link_count,
        "content_version": attributes.content_version,
        "truncation": attributes.truncation,
        "meta": {
            "slot": found.meta_slot,
            "partition": found.meta_partition,
            "members": found.meta_members,
        },
        "inline_bytes": found.inline_bytes,
        "segments": found.segments.iter().map(segment).collect::<Vec<Value>>(),
    })
    .to_string()
}

fn segment(segment: &SegmentLocation) -> Value {
    json!({
        "offset": segment.offset,
        "length": segment.length,
        "flushed": segment.flushed,
        "partition": segment.partition,
        "extent": segment.extent,
        "small": segment.extent.is_small(),
        "extent_offset": segment.extent_offset,
        "epoch": segment.epoch,
        "primary": segment.primary,
        "members": segment.members,
    })
}
