//! End-to-end: real processes, real mounts, the shipped program.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used, clippy::panic)] // In a test a panic is how failure is told.

mod crash;
mod drain;
mod errors;
mod files;
mod flush;
mod fsck;
mod fsck_repair;
mod ground;
mod hard;
mod hostile;
mod lies;
mod machines;
mod names;
mod power;
mod repair;
mod slow;
mod soak;
mod space;
mod system;

use milpa_testbed::load::{pattern, write_synced};

/// A number from the environment. Anything else there is not what was meant: the test says so.
fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{name} is a whole number, and not {value:?}")))
}
