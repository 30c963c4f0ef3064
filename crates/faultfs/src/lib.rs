//! Disks that fail on command, for real processes: the simulation's disk ([`milpa_sim::disk`]) as a
//! file system that can be mounted.
//!
//! A kill -9 loses no page cache, so it is no power cut. Put the data directories of a real cluster on
//! these disks, say `freeze`, kill the processes, say `cut`: what was written but not synced is lost,
//! kept, or torn at sectors, as drawn from a seed; names that were not synced in their directory are
//! lost or kept, each by itself. The other commands make a disk lie or fail in the ways of
//! docs/reliability.md: EIO, lost and misdirected writes, syncs that do nothing, flipped bits, delays,
//! no space.
//!
//! Contents are in this process's memory, 4 KiB blocks shared between the volatile and the durable
//! version, and end with it. Above 64 MiB of unsynced bytes a file is written back, as a kernel does.
//!
//! # What is deliberately absent
//!
//! Everything that MilpaFS's servers do not use: links, owners, modes, times, extended attributes,
//! shared mappings, preallocation. Locks are the kernel's.
//!
//! In use: the testbed's `e2e power::`, `slow::`, `lies::` and `repair::`.

mod aimed;
mod command;
mod disks;
mod filesystem;
mod nodes;

pub use command::{COMMANDS, Command};
pub use disks::{Disks, Options};
