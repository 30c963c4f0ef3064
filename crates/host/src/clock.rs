//! Clocks: the monotonic one, which leases and deadlines rest on, and the one on the wall.

use std::sync::OnceLock;
use std::time::SystemTime;

use crate::world;

/// A moment on the clock that tokio's timers follow: inside of a runtime whose clock is paused that
/// one, anywhere else the system's. Never goes back, and stands still for nobody: a process that was
/// stopped sees the gap when it wakes, which is what leases rest on.
pub use tokio::time::Instant;

/// The time of day. May jump; nothing is ordered by it.
#[must_use]
#[allow(clippy::disallowed_methods)]
pub fn wall() -> SystemTime {
    world::current().map_or_else(SystemTime::now, |world| world.wall())
}

/// Milliseconds since this process (or this life of a simulated node) began to ask.
#[must_use]
pub fn now_ms() -> u64 {
    now_us() / 1000
}

/// Microseconds since this process (or this life of a simulated node) began to ask.
#[must_use]
pub fn now_us() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = match world::current() {
        Some(world) => world.started(),
        None => *START.get_or_init(Instant::now),
    };
    start.elapsed().as_micros() as u64
}
