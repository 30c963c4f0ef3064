//! The monotonic clock of a process.

use std::sync::OnceLock;
use std::time::Instant;

/// Milliseconds since this process first asked. Never goes back, and stands still for nobody: a
/// process that was stopped sees the gap when it wakes, which is what leases rest on.
#[must_use]
pub fn now_ms() -> u64 {
    now_us() / 1000
}

/// Microseconds since this process first asked.
#[must_use]
pub fn now_us() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_micros() as u64
}
