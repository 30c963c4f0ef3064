//! Randomness: the kernel's, or the simulation's seed.

use std::hash::{BuildHasher, DefaultHasher, Hasher};
use std::io;

use crate::world;

/// Fills `bytes`, fit for keys.
///
/// # Errors
///
/// When the kernel gives none.
#[allow(clippy::disallowed_methods)]
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    match world::current() {
        Some(world) => {
            world.fill(bytes);
            Ok(())
        }
        None => getrandom::fill(bytes).map_err(|error| io::Error::other(error.to_string())),
    }
}

/// A random number.
///
/// # Errors
///
/// As [`fill`].
pub fn u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// A random number that nobody draws twice.
///
/// # Errors
///
/// As [`fill`].
pub fn u128() -> io::Result<u128> {
    let mut bytes = [0; 16];
    fill(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

/// A hash map that a stranger who chooses keys cannot slow down, and that is the same at equal seeds.
#[allow(clippy::disallowed_types)]
pub type HashMap<K, V> = std::collections::HashMap<K, V, Hashing>;

/// Hashes for maps whose keys a stranger chooses, in place of the standard library's `RandomState`:
/// nobody can guess which keys collide, and equal seeds give equal maps, down to the order of their
/// entries.
#[derive(Clone, Debug)]
pub struct Hashing {
    key: u64,
}

impl Default for Hashing {
    fn default() -> Hashing {
        Hashing { key: u64().unwrap_or_default() }
    }
}

impl BuildHasher for Hashing {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.key);
        hasher
    }
}
