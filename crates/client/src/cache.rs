//! Bounded memory of what servers said, for a second or so.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::core::lock;

const SHARDS: usize = 16;

/// A map that forgets: two generations, of which the older goes when the younger is half the bound.
/// What was used lately survives; nothing is ever moved entry by entry.
#[derive(Debug)]
pub(crate) struct Bounded<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    half: usize,
}

impl<K: Hash + Eq + Clone, V: Clone> Bounded<K, V> {
    /// Holds at most `entries`.
    pub(crate) fn new(entries: usize) -> Bounded<K, V> {
        Bounded { young: HashMap::new(), old: HashMap::new(), half: (entries / 2).max(1) }
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.young.len() >= self.half && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    pub(crate) fn get(&mut self, key: &K) -> Option<V> {
        if let Some(value) = self.young.get(key) {
            return Some(value.clone());
        }
        let value = self.old.remove(key)?;
        self.insert(key.clone(), value.clone());
        Some(value)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let old = self.old.remove(key);
        self.young.remove(key).or(old)
    }
}

/// What a server said, and the moment before which it cannot have been otherwise.
#[derive(Clone, Debug)]
struct Known<V> {
    value: Option<V>,
    as_of: Instant,
}

/// Answers by key, each usable for a while after it was asked for.
///
/// An answer that was under way while this client changed the same thing is not remembered: its
/// request began before the change.
#[derive(Debug)]
pub(crate) struct Timed<K, V> {
    shards: Vec<Mutex<Bounded<K, Known<V>>>>,
    hasher: RandomState,
    timeout: Duration,
}

impl<K: Hash + Eq + Clone, V: Clone> Timed<K, V> {
    pub(crate) fn new(entries: usize, timeout: Duration) -> Timed<K, V> {
        let shard = || Mutex::new(Bounded::new(entries.div_ceil(SHARDS)));
        let shards = (0..SHARDS).map(|_| shard()).collect();
        Timed { shards, hasher: RandomState::new(), timeout }
    }

    /// What is known and not too old.
    pub(crate) fn get(&self, key: &K) -> Option<V> {
        self.get_within(key, self.timeout)
    }

    /// What was known at most `age` ago.
    pub(crate) fn get_within(&self, key: &K, age: Duration) -> Option<V> {
        let known = lock(self.shard(key)?).get(key)?;
        (known.as_of.elapsed() < age).then_some(known.value)?
    }

    /// Remembers the answer to a request that began at `asked`.
    pub(crate) fn put(&self, key: K, value: V, asked: Instant) {
        let Some(shard) = self.shard(&key) else { return };
        let mut shard = lock(shard);
        if shard.get(&key).is_none_or(|known| known.as_of <= asked) {
            shard.insert(key, Known { value: Some(value), as_of: asked });
        }
    }

    /// Forgets, also what is still under way.
    pub(crate) fn forget(&self, key: &K) {
        let Some(shard) = self.shard(key) else { return };
        lock(shard).insert(key.clone(), Known { value: None, as_of: Instant::now() });
    }

    fn shard(&self, key: &K) -> Option<&Mutex<Bounded<K, Known<V>>>> {
        self.shards.get(self.hasher.hash_one(key) as usize % SHARDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_map_keeps_what_is_used() {
        let mut map = Bounded::new(100);
        map.insert(0, "kept");
        for key in 1..10_000 {
            map.insert(key, "other");
            assert_eq!(map.get(&0), Some("kept"));
            assert!(map.young.len() + map.old.len() <= 100);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_expire_and_late_ones_are_not_remembered() {
        let cache: Timed<u32, u32> = Timed::new(1000, Duration::from_secs(1));
        let asked = Instant::now();
        tokio::time::advance(Duration::from_millis(10)).await;
        cache.forget(&1);
        cache.put(1, 7, asked);
        assert_eq!(cache.get(&1), None, "asked before the change");
        cache.put(1, 8, Instant::now());
        assert_eq!(cache.get(&1), Some(8));
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(cache.get(&1), None);
        assert_eq!(cache.get_within(&1, Duration::from_secs(5)), Some(8));
    }
}
