//! Mutates valid inputs of one target and looks whether the decoder keeps its promises.

use std::panic::{AssertUnwindSafe, catch_unwind};

use milpa_wire::decoder::{Decoder, Random};

use crate::coverage::Coverage;
use crate::{finding, memory, mutate};

/// Memory that a decoder may take whatever it was given: a log zeroes a new segment, redb has a cache.
const BASE_BYTES: usize = 4 << 20;
/// And for each byte that it was given: an item of a list may take one byte, and some hundred in memory.
const BYTES_FOR_EACH: usize = 256;
/// Inputs kept because they reached something new.
const KEPT_MAX: usize = 4096;

/// The state of one target's fuzzing.
pub struct Fuzzer {
    /// What is fuzzed.
    pub decoder: Decoder,
    random: Random,
    kept: Vec<Vec<u8>>,
    /// Calls so far.
    pub executions: u64,
    /// Inputs that were decoded, not refused.
    pub decoded: u64,
    /// Broken promises.
    pub findings: u64,
    /// The most memory of one call.
    pub memory_max: usize,
}

impl Fuzzer {
    /// Starts from the target's samples.
    pub fn new(decoder: Decoder, seed: u64) -> Fuzzer {
        let random =
            Random::new(seed ^ u64::from(milpa_wire::frame::crc32c(decoder.name.as_bytes())));
        let kept = (0..16).map(decoder.sample).collect();
        let (executions, decoded, findings, memory_max) = (0, 0, 0, 0);
        Fuzzer { decoder, random, kept, executions, decoded, findings, memory_max }
    }

    /// Inputs that are kept.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Makes an input and tries it.
    pub fn step(&mut self, coverage: &mut Coverage) {
        let input = self.input();
        coverage.clear();
        if let Err(problem) = self.check(&input) {
            self.findings += 1;
            finding::report(&problem);
        } else if coverage.is_new() {
            self.keep(input);
        }
    }

    fn keep(&mut self, input: Vec<u8>) {
        if self.kept.len() < KEPT_MAX {
            self.kept.push(input);
        } else {
            let at = self.random.below(KEPT_MAX as u64) as usize;
            self.kept[at] = input;
        }
    }

    fn pick(&mut self) -> Vec<u8> {
        let at = self.random.below(self.kept.len() as u64) as usize;
        self.kept[at].clone()
    }

    fn input(&mut self) -> Vec<u8> {
        let mut input = match self.random.below(8) {
            0 => (self.decoder.sample)(self.random.draw()),
            _ => self.pick(),
        };
        let other = self.pick();
        for _ in 0..self.random.below(6) {
            mutate::mutate(&mut self.random, &mut input, &other);
        }
        if self.random.below(4) > 0 {
            (self.decoder.seal)(&mut input);
        }
        input
    }

    /// Decodes one input.
    ///
    /// # Errors
    ///
    /// Which promise was broken.
    pub fn check(&mut self, input: &[u8]) -> Result<(), String> {
        finding::note(self.decoder.name, input);
        self.executions += 1;
        let again = self.decoder.again;
        let call = || catch_unwind(AssertUnwindSafe(|| again(input)));
        let (first, bytes) = memory::measured(call);
        let first = first.map_err(|panic| format!("panics: {}", message(&*panic)))?;
        self.memory_max = self.memory_max.max(bytes);
        let bound = BASE_BYTES + BYTES_FOR_EACH * input.len();
        if bytes > bound {
            return Err(format!("takes {bytes} bytes of memory, the bound is {bound}"));
        }
        let Some(first) = first else { return Ok(()) };
        self.decoded += 1;
        let second = catch_unwind(AssertUnwindSafe(|| again(&first)));
        match second.map_err(|panic| format!("panics: {}", message(&*panic)))? {
            None => Err("what it decoded and encoded is refused".to_owned()),
            Some(second) if second != first => Err("what it decoded encodes otherwise".to_owned()),
            Some(_) => Ok(()),
        }
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
