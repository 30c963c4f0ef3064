//! End-to-end: real processes, real mounts, the shipped program.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used, clippy::panic)] // In a test a panic is how failure is told.

mod crash;
mod errors;
mod files;
mod flush;
mod hostile;
mod machines;
mod names;
mod power;
mod repair;
mod space;

use milpa_testbed::load::{pattern, write_synced};
