//! Real clusters for tests and the demonstration: real processes, real mounts, real kills.
//!
//! A [`Testbed`] is an embedded cluster in a temporary directory, driven through the `milpa` program
//! as a user drives it. Dropping it unmounts, stops every process that it started and
//! removes its files; when the test is killed before, that is done behind it.
//!
//! # What is deliberately absent
//!
//! Our libraries: what is tested here is what is shipped, through its command line.

// Around the nodes, not in them: the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod bed;
pub mod faults;
mod faulty;
mod ground;
pub mod ledger;
pub mod load;
mod machines;
mod network;
mod process;
mod random;
pub mod trace;
pub mod tree;

pub use bed::{Mounted, Testbed, program};
pub use faulty::FaultyDisks;
pub use machines::{Layout, Machines, Role};
pub use network::Cut;
pub use process::{ServerProcess, kill, memory_bytes, metric, signal_pid};

/// What goes wrong in a test bed is told to a person at once.
pub type Outcome<T = ()> = Result<T, String>;
