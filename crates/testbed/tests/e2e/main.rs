//! End-to-end: real processes, real mounts, the shipped program.

#![allow(clippy::unwrap_used, clippy::panic)] // In a test a panic is how failure is told.

mod crash;
mod errors;
mod files;
mod flush;
mod machines;
mod names;
mod space;

use milpa_testbed::load::{pattern, write_synced};
