//! Bounded memory of what servers said, for a second or so.

use std::hash::{BuildHasher, Hash};
use std::sync::Mutex;
use std::time::Duration;

use milpa_host::entropy::{HashMap, Hashing};
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
        Bounded { young: HashMap::default(), old: HashMap::default(), half: (entries / 2).max(1) }
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
    /// Answers to requests that began before this are old: a newer one is here, or the thing was changed meanwhile.
    fence: Instant,
    /// When a change of ours was last answered.
    changed: Option<Instant>,
}

/// Answers by key, each usable for a while after it was asked for.
///
/// An answer that was under way while this client changed the same thing is not remembered: its
/// request began before the change.
#[derive(Debug)]
pub(crate) struct Timed<K, V> {
    shards: Vec<Mutex<Bounded<K, Known<V>>>>,
    hasher: Hashing,
    timeout: Duration,
}

impl<K: Hash + Eq + Clone, V: Clone> Timed<K, V> {
    pub(crate) fn new(entries: usize, timeout: Duration) -> Timed<K, V> {
        let shard = || Mutex::new(Bounded::new(entries.div_ceil(SHARDS)));
        let shards = (0..SHARDS).map(|_| shard()).collect();
        Timed { shards, hasher: Hashing::default(), timeout }
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

    /// Remembers the answer to a request that began at `asked`. False if the thing was changed here meanwhile: the
    /// answer may be of before.
    pub(crate) fn put(&self, key: K, value: V, asked: Instant) -> bool {
        let Some(shard) = self.shard(&key) else { return true };
        let mut shard = lock(shard);
        let known = shard.get(&key);
        let is_current = known.as_ref().is_none_or(|known| known.fence <= asked);
        if is_current {
            let changed = known.and_then(|known| known.changed);
            shard.insert(key, Known { value: Some(value), as_of: asked, fence: asked, changed });
        }
        is_current
    }

    /// Remembers what a change of ours has just been answered with: nothing that was asked for before is newer.
    pub(crate) fn put_own(&self, key: K, value: V) {
        let Some(shard) = self.shard(&key) else { return };
        let now = Instant::now();
        let known = Known { value: Some(value), as_of: now, fence: now, changed: Some(now) };
        lock(shard).insert(key, known);
    }

    /// Whether no change of ours was answered since `asked`.
    pub(crate) fn is_unchanged(&self, key: &K, asked: Instant) -> bool {
        let Some(shard) = self.shard(key) else { return true };
        let changed = lock(shard).get(key).and_then(|known| known.changed);
        changed.is_none_or(|changed| changed <= asked)
    }

    /// Remembers what a change of ours left behind, which was asked for at `asked`. Several may be
    /// under way at once: the newest stays, whichever is answered last.
    pub(crate) fn put_changed(
        &self,
        key: K,
        value: V,
        asked: Instant,
        is_newer: impl Fn(&V, &V) -> bool,
    ) {
        let Some(shard) = self.shard(&key) else { return };
        let mut shard = lock(shard);
        let fence = Instant::now();
        let (value, as_of) = match shard.get(&key) {
            Some(Known { value: Some(known), as_of, .. }) if !is_newer(&value, &known) => {
                (Some(known), as_of)
            }
            // Changed in another way meanwhile: nobody can tell whether this is before or after.
            Some(Known { value: None, fence: changed, .. }) if changed > asked => (None, fence),
            _ => (Some(value), asked),
        };
        shard.insert(key, Known { value, as_of, fence, changed: Some(fence) });
    }

    /// Forgets, also what is still under way.
    pub(crate) fn forget(&self, key: &K) {
        let Some(shard) = self.shard(key) else { return };
        let fence = Instant::now();
        let known = Known { value: None, as_of: fence, fence, changed: Some(fence) };
        lock(shard).insert(key.clone(), known);
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
    async fn of_our_own_changes_the_newest_is_remembered() {
        let cache: Timed<u32, u32> = Timed::new(1000, Duration::from_secs(1));
        let newer = |new: &u32, known: &u32| new > known;
        let step = || tokio::time::advance(Duration::from_millis(10));
        let first = Instant::now();
        step().await;
        let second = Instant::now();
        cache.put_changed(1, 8, second, newer);
        cache.put_changed(1, 7, first, newer);
        assert_eq!(cache.get(&1), Some(8), "answered in the other order");
        step().await;
        cache.put_changed(1, 9, first, newer);
        cache.put(1, 6, second);
        assert_eq!(cache.get(&1), Some(9), "asked before the change was answered");
        cache.forget(&1);
        cache.put_changed(1, 10, second, newer);
        assert_eq!(cache.get(&1), None, "before or after what made us forget?");
        step().await;
        cache.put_changed(1, 11, Instant::now(), newer);
        assert_eq!(cache.get(&1), Some(11));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_expire_and_late_ones_are_not_remembered() {
        let cache: Timed<u32, u32> = Timed::new(1000, Duration::from_secs(1));
        let asked = Instant::now();
        tokio::time::advance(Duration::from_millis(10)).await;
        cache.forget(&1);
        assert!(!cache.put(1, 7, asked) && !cache.is_unchanged(&1, asked));
        assert_eq!(cache.get(&1), None, "asked before the change");
        let later = Instant::now();
        assert!(cache.put(1, 8, Instant::now()) && cache.is_unchanged(&1, later));
        cache.put_own(1, 8);
        assert_eq!(cache.get(&1), Some(8));
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert_eq!(cache.get(&1), None);
        assert_eq!(cache.get_within(&1, Duration::from_secs(5)), Some(8));
    }
}
