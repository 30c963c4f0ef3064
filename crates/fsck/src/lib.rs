//! `milpa fsck`: is a volume what its invariants say, while it is in use?
//!
//! # How, without stopping anybody
//!
//! What one meta partition can judge alone it judges itself, from a frozen copy of its state
//! (`milpa_wire::check`): a directory's counts, a file's content map, who holds what open. That is of one
//! log index, and certain.
//!
//! What needs several partitions is put together here, in pages, from answers of different moments: how
//! many names an inode has (`links`), which replicas have the bytes of a file (`extents`). Operations are in flight meanwhile, so whatever looks wrong is only *suspected*. A suspect is looked at again, by
//! all partitions at once, until three looks in a row are the same in every detail, none of them in the
//! middle of an operation (`suspects`). What two looks have in common was all true at one moment
//! between them; the third is for what changes forth and back.
//!
//! Extents to which no file refers are given the time that deletion takes: what is there longer, and is on
//! nobody's list, is a stray (`strays`).
//!
//! # Memory
//!
//! Names are counted for 524,288 inodes at a time, each time over all names of the volume (12 MiB), and
//! content maps compared with extents for 524,288 references at a time, each time over all content
//! maps (24 MiB). Of extents without a file 65,536 are looked at (5 MiB). However large the volume is, that is all.
//!
//! # What is deliberately absent
//!
//! Comparing the replicas' bytes (`milpa partition compare`, and the scrub) and their states (the
//! managers do that all the time). Cycles of directories: each has one name, and none is reached.

mod ask;
mod bytes;
mod check;
mod extents;
mod finding;
mod links;
mod names;
mod paths;
mod repair;
mod strays;
mod suspects;

pub use check::{Counts, Options, Report, Stage, check};
pub use finding::{Code, Finding};
pub use strays::PATIENCE;
