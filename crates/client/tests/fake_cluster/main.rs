//! The whole client against a cluster of vectors and maps, on a clock that only moves when all
//! wait: failovers that take seconds are tested in milliseconds, and always alike.
//!
//! The fake servers are honest: they refuse what the real ones refuse (stale epochs, unknown
//! sessions, wrong leaders, appends out of order, publishes behind a truncation), apply each request
//! id once, and remember what each data node has flushed.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used, clippy::panic)] // a test crate: clippy sees its functions as any

mod cluster;
mod data;
mod failures;
mod files;
mod loopback;
mod losses;
mod meta;
mod names;
mod outgrown;
mod sharing;
mod slow;
mod told;
mod unanswered;
