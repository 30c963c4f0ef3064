//! Randomness that nobody asked the ports for.
//!
//! The standard library seeds its hash maps, and tokio the order in which `select!` polls, from
//! getrandom(2) through libc. A thread that runs a seed gets these bytes from that seed; every other
//! thread gets the kernel's. So the course of a run depends on the seed also where library code
//! iterates over a hash map.

// The one place where a symbol of libc is replaced; nothing but the simulator links this crate.
#![allow(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_types, clippy::disallowed_methods))]

use std::cell::RefCell;

use crate::random::Random;

thread_local! {
    static SEEDED: RefCell<Option<Random>> = const { RefCell::new(None) };
}

/// From now on this thread's randomness comes from the seed.
pub(crate) fn seed_thread(seed: u64) {
    SEEDED.set(Some(Random::new(seed, "libc")));
}

/// Replaces getrandom(3) of libc for the whole program.
///
/// # Safety
///
/// As getrandom(3): `buffer` must have room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(
    buffer: *mut libc::c_void,
    length: libc::size_t,
    flags: libc::c_uint,
) -> libc::ssize_t {
    let seeded = SEEDED.try_with(|seeded| match seeded.try_borrow_mut() {
        Ok(mut seeded) => seeded.as_mut().is_some_and(|random| {
            // SAFETY: the caller vouches for `length` bytes at `buffer`; they need not be
            // initialized before, as `fill` only writes.
            random.fill(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), length) });
            true
        }),
        Err(_) => false,
    });
    match seeded {
        Ok(true) => length as libc::ssize_t,
        // SAFETY: the same arguments, handed on to the kernel.
        _ => unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) as libc::ssize_t },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, RandomState};

    fn draw(seed: u64) -> u64 {
        let drawn = std::thread::spawn(move || {
            seed_thread(seed);
            RandomState::new().hash_one(0)
        });
        drawn.join().unwrap()
    }

    #[test]
    fn hash_maps_are_seeded() {
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
