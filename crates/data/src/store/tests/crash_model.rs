//! Random lives with crashes, against a plain vector of bytes.
//!
//! Goal: whatever is lost or torn, flushed bytes are there, what is there is a prefix of what was
//! appended, no read returns a byte that was never there, overwrites repeated from a log end in the
//! same bytes.

use milpa_types::BLOCK_BYTES;
use proptest::prelude::*;

use super::super::memory_files::{Call, Fault};
use super::*;

#[derive(Clone, Debug)]
enum Step {
    Append {
        length: usize,
        zeros: bool,
    },
    /// The n-th write of the append finds the disk full.
    AppendFull {
        length: usize,
        write: u64,
    },
    Overwrite {
        offset: usize,
        length: usize,
    },
    Free {
        offset: usize,
        length: usize,
    },
    Flush,
    /// Bytes are appended while the flush is in flight.
    FlushWhileAppending {
        length: usize,
    },
    Seal {
        cut: usize,
    },
    Kill,
    Crash {
        seed: u64,
    },
    /// Power fails in the middle of a flush or a cut: at the n-th write or sync.
    CrashInside {
        at: u64,
        sync: bool,
        cut: Option<usize>,
        seed: u64,
    },
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        1..200usize,
        1..9_000usize,
        Just(4_096),
        Just(8_192),
        4_000..4_200usize,
        10_000..70_000usize,
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (lengths(), prop::bool::weighted(0.1))
            .prop_map(|(length, zeros)| Step::Append { length, zeros }),
        1 => (lengths(), 0..2u64).prop_map(|(length, write)| Step::AppendFull { length, write }),
        3 => (0..100_000usize, lengths())
            .prop_map(|(offset, length)| Step::Overwrite { offset, length }),
        2 => (0..100_000usize, lengths()).prop_map(|(offset, length)| Step::Free { offset, length }),
        4 => Just(Step::Flush),
        3 => lengths().prop_map(|length| Step::FlushWhileAppending { length }),
        1 => prop_oneof![Just(0), 0..10_000usize].prop_map(|cut| Step::Seal { cut }),
        1 => Just(Step::Kill),
        4 => any::<u64>().prop_map(|seed| Step::Crash { seed }),
        2 => (0..8u64, any::<bool>(), prop::option::of(0..9_000usize), any::<u64>())
            .prop_map(|(at, sync, cut, seed)| Step::CrashInside { at, sync, cut, seed }),
    ]
}

/// What must be, and what may be.
#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    dead: Vec<bool>,
    /// Bytes that a flush has confirmed, if any flush has.
    flushed: Option<usize>,
    sealed: bool,
    /// Whether a crash must find it sealed.
    sealed_flushed: bool,
    /// The Raft log since the last flush, and all contents that blocks had since then.
    log: Vec<(usize, Vec<u8>)>,
    states: Vec<Vec<u8>>,
    /// The log was repeated since the last flush: blocks may have been half old, half new on the
    /// way, which nobody reads before the log has been repeated to its end.
    repeated: bool,
    removed: bool,
    seed: u64,
}

impl Model {
    fn fresh(&mut self, length: usize) -> Vec<u8> {
        self.seed += 1;
        pattern(self.seed, length)
    }

    fn flush(&mut self, length: usize) {
        self.flushed = Some(length);
        self.log.clear();
        self.states.clear();
        self.repeated = false;
        self.sealed_flushed = self.sealed;
    }

    fn cut(&mut self, length: usize) {
        self.bytes.truncate(length);
        // As the node does: entries of the log say nothing about bytes that were cut.
        self.log.retain(|(offset, _)| *offset < length);
        for (offset, bytes) in &mut self.log {
            bytes.truncate(length - *offset);
        }
        self.flushed = self.flushed.map(|flushed| flushed.min(length));
    }

    /// Freed once, freed for ever: bytes that come to lie there again are dead at once.
    fn note_length(&mut self) {
        let length = self.dead.len().max(self.bytes.len());
        self.dead.resize(length, false);
    }

    /// Whether the block reads as zeros.
    fn is_freed(&self, block: usize) -> bool {
        let (start, full) = (block * 4_096, (block + 1) * 4_096);
        let end = full.min(self.bytes.len());
        (end == full || self.sealed) && self.dead[start..end].iter().all(|dead| *dead)
    }

    fn note_removal(&mut self) {
        let dead = self.dead.iter().take(self.bytes.len());
        let all_dead = !self.bytes.is_empty() && dead.into_iter().all(|dead| *dead);
        self.removed |= self.sealed && all_dead;
    }

    /// Reads everything, block by block and as a whole, and compares.
    fn check(&self, world: &World) {
        assert_eq!(world.length(LARGE), self.bytes.len() as u64);
        for (block, expected) in self.bytes.chunks(4_096).enumerate() {
            let read = world.read(block as u64 * BLOCK_BYTES, expected.len()).unwrap();
            if self.is_freed(block) {
                assert!(read.iter().all(|byte| *byte == 0), "freed block {block}");
                continue;
            }
            for (index, (byte, wanted)) in read.iter().zip(expected).enumerate() {
                let at = block * 4_096 + index;
                assert!(byte == wanted || self.dead[at], "byte {at} of {}", self.bytes.len());
            }
        }
        assert_eq!(world.store.verify(LARGE, 0, u64::MAX).unwrap().damaged, [0u64; 0]);
    }

    /// Before the log is repeated: a torn block is refused, any other is one that once was.
    fn check_torn(&self, world: &World) {
        let length = world.length(LARGE) as usize;
        for block in 0..length.div_ceil(4_096) {
            let (start, end) = (block * 4_096, length.min((block + 1) * 4_096));
            let Ok(read) = world.read(start as u64, end - start) else {
                assert!(self.is_in_log(start, end), "block {block} is damaged, not overwritten");
                continue;
            };
            let states = self.states.iter().chain(std::iter::once(&self.bytes));
            let was = states.into_iter().any(|state| {
                let state = state.get(start..end);
                state.is_some_and(|state| {
                    (0..end - start).all(|i| read[i] == state[i] || self.dead[start + i])
                })
            });
            let on_the_way = self.repeated && self.is_in_log(start, end);
            assert!(was || on_the_way || self.is_freed(block), "block {block} never was like this");
        }
    }

    fn is_in_log(&self, start: usize, end: usize) -> bool {
        self.log.iter().any(|(offset, bytes)| *offset < end && offset + bytes.len() > start)
    }

    /// Takes over what a crash left, after checking that it may.
    fn recover(&mut self, world: &World, power: bool) {
        if self.removed {
            assert!(matches!(world.read(0, 1), Err(StoreError::Removed)));
            return;
        }
        if matches!(world.read(0, 1), Err(StoreError::Removed)) {
            let held = self.flushed.unwrap_or(0);
            let is_dead = self.dead.iter().take(held).all(|dead| *dead);
            assert!(self.sealed && is_dead, "removed, though it lives");
            self.removed = true;
            return;
        }
        let Some(state) = world.store.states(&[LARGE]).first().copied() else {
            assert!(power && self.flushed.is_none(), "a flushed extent is gone");
            world.store.create_extent(new_extent(LARGE)).unwrap();
            let dead = std::mem::take(&mut self.dead);
            *self = Model { seed: self.seed, dead, ..Model::default() };
            return;
        };
        let length = state.length as usize;
        assert!(length <= self.bytes.len(), "{length} of {}", self.bytes.len());
        assert!(length >= self.flushed.unwrap_or(0), "{length}, flushed {:?}", self.flushed);
        assert!(power || length == self.bytes.len(), "a kill loses nothing");
        let report = world.report.extents.iter().find(|found| found.extent == LARGE).unwrap();
        let sealed_at = report.sealed_at.map(|sealed_at| sealed_at as usize);
        assert!(sealed_at.is_some() || !self.sealed_flushed, "a durable seal is gone");
        assert!(self.sealed || sealed_at.is_none(), "a seal out of nowhere");
        assert_eq!(state.sealed, sealed_at == Some(length), "sealed means whole");
        self.sealed = sealed_at.is_some();
        self.cut(length);
        self.check_torn(world);
        self.repeated |= !self.log.is_empty();
        for (offset, bytes) in &self.log {
            let sums = checksums_of(bytes);
            let sums = Checksums::of_payload(&sums);
            let offset = *offset as u64;
            world.store.overwrite(LARGE, offset, bytes, sums, Overwriting::Repeated).unwrap();
        }
        // As if another replica had made the same of it.
        for block in world.store.verify(LARGE, 0, u64::MAX).unwrap().damaged {
            let own = world.store.doubtful_bytes(LARGE, block).unwrap().unwrap();
            world.store.settle_doubtful(LARGE, block, &[own.into()]).unwrap();
        }
        if sealed_at.is_some_and(|sealed_at| sealed_at > length) {
            // Sealed, but not all of it was on the disk: the peers decide, here for what is there.
            world.store.seal(LARGE, state.length).unwrap();
            self.flushed = Some(length);
            self.note_removal();
        }
    }
}

struct Life {
    world: Option<World>,
    model: Model,
}

impl Life {
    fn world(&self) -> &World {
        self.world.as_ref().unwrap()
    }

    fn step(&mut self, step: &Step) {
        let length = self.model.bytes.len();
        match step {
            Step::Kill => self.crash(None),
            Step::Crash { seed } => self.crash(Some(*seed)),
            _ if self.model.removed => {
                assert!(matches!(self.world().read(0, 1), Err(StoreError::Removed)));
            }
            Step::Append { length, zeros } => {
                let bytes = if *zeros { vec![0; *length] } else { self.model.fresh(*length) };
                self.append(&bytes);
            }
            Step::AppendFull { length, write } => {
                let bytes = self.model.fresh(*length);
                let fault = Fault { call: Call::Write, after: *write, errno: 28 };
                self.world().files.fail(fault);
                self.append(&bytes);
                self.world().files.fail_no_more();
            }
            Step::Overwrite { offset, length: wanted } if length > 0 => {
                let start = offset % length;
                let bytes = self.model.fresh((*wanted).min(length - start));
                self.overwrite(start, bytes);
            }
            Step::Free { offset, length: wanted } if length > 0 => {
                let start = offset % length;
                let end = length.min(start + wanted);
                self.world().free(start as u64, (end - start) as u64);
                self.model.dead[start..end].fill(true);
                self.model.note_removal();
            }
            Step::Flush => {
                self.world().flush().unwrap();
                self.model.flush(length);
            }
            Step::FlushWhileAppending { length } => self.flush_while_appending(*length),
            Step::Seal { cut } => {
                let cut_to = length.saturating_sub(*cut);
                self.world().store.seal(LARGE, cut_to as u64).unwrap();
                self.model.sealed = true;
                self.model.cut(cut_to);
                if cut_to < length {
                    self.model.flush(cut_to);
                }
                self.model.note_removal();
            }
            Step::CrashInside { at, sync, cut, seed } => {
                self.crash_inside(*at, *sync, *cut, *seed);
            }
            Step::Overwrite { .. } | Step::Free { .. } => {}
        }
        if !self.model.removed {
            self.model.check(self.world());
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        match self.world().append(bytes) {
            Ok(_) => {
                self.model.bytes.extend_from_slice(bytes);
                self.model.note_length();
            }
            Err(StoreError::NoSpace) => {}
            Err(StoreError::Sealed { .. }) if self.model.sealed => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn overwrite(&mut self, start: usize, bytes: Vec<u8>) {
        self.world().overwrite(start as u64, &bytes).unwrap();
        // The first one since the bytes were appended has flushed them.
        self.model.states.push(self.model.bytes.clone());
        let end = start + bytes.len();
        for block in start / 4_096..end.div_ceil(4_096) {
            let low = start.max(block * 4_096);
            let high = end.min((block + 1) * 4_096);
            if !self.model.is_freed(block) {
                self.model.bytes[low..high].copy_from_slice(&bytes[low - start..high - start]);
            }
        }
        self.model.log.push((start, bytes));
        let reached = end.next_multiple_of(4_096).min(self.model.bytes.len());
        self.model.flushed = Some(self.model.flushed.unwrap_or(0).max(reached));
    }

    fn flush_while_appending(&mut self, length: usize) {
        let bytes = self.model.fresh(length);
        let before = self.model.bytes.len();
        let (store, late) = (Arc::clone(&self.world().store), bytes.clone());
        self.world().files.during_sync(move || {
            let sums = checksums_of(&late);
            let _sealed = store.append(LARGE, before as u64, &late, Checksums::of_payload(&sums));
        });
        self.world().flush().unwrap();
        if self.world().length(LARGE) as usize > before {
            self.model.bytes.extend_from_slice(&bytes);
            self.model.note_length();
        }
        self.world().files.during_sync(|| {});
        self.model.flush(before);
    }

    /// Starts a flush, or a cut, and lets the power fail at one of its calls.
    fn crash_inside(&mut self, at: u64, sync: bool, cut: Option<usize>, seed: u64) {
        let call = if sync { Call::Sync } else { Call::Write };
        self.world().files.fail(Fault { call, after: at, errno: 5 });
        let length = self.model.bytes.len();
        let done = match cut {
            None => self.world().flush(),
            Some(cut) => self.world().store.seal(LARGE, length.saturating_sub(cut) as u64),
        };
        self.world().files.fail_no_more();
        match cut {
            None if done.is_ok() => self.model.flush(length),
            None => {}
            Some(cut) => {
                // Cut or not, sealed or not: both may be. Only what lies below must be.
                let below = length.saturating_sub(cut);
                self.model.flushed = self.model.flushed.map(|flushed| flushed.min(below));
                self.model.sealed = true;
                if done.is_ok() {
                    self.model.cut(below);
                    if cut > 0 && below < length {
                        self.model.flush(below);
                    }
                    self.model.note_removal();
                }
            }
        }
        if !self.model.removed && self.world().disk.is_fenced() && done.is_err() && cut.is_some() {
            // A removal that follows the seal may have happened too.
            self.world().files.cut_power(seed);
            let world = self.world.take().unwrap().kill();
            self.model.removed = matches!(world.read(0, 1), Err(StoreError::Removed));
            self.model.recover(&world, true);
            self.world = Some(world);
            return;
        }
        self.crash(Some(seed));
    }

    fn crash(&mut self, power: Option<u64>) {
        let world = self.world.take().unwrap();
        let world = match power {
            Some(seed) => world.crash(seed),
            None => world.kill(),
        };
        self.model.recover(&world, power.is_some());
        self.world = Some(world);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn crashes_take_only_what_was_not_flushed(
        steps in prop::collection::vec(steps(), 1..40),
    ) {
        let mut life = Life { world: Some(World::with_extent()), model: Model::default() };
        for step in &steps {
            life.step(step);
        }
    }
}
