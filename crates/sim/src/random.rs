//! Seeded randomness. Every part of the simulation draws from a stream of its own, so that one
//! more draw in one part does not change what the others see.

/// xoshiro256** (Blackman and Vigna), seeded by splitmix64.
#[derive(Clone, Debug)]
pub struct Random([u64; 4]);

/// One step of splitmix64: also how a seed and a label become another seed.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Random {
    /// The stream called `label` of this seed.
    pub fn new(seed: u64, label: &str) -> Random {
        let mut state = seed;
        for byte in label.bytes() {
            state = mix(&mut state) ^ u64::from(byte);
        }
        Random([mix(&mut state), mix(&mut state), mix(&mut state), mix(&mut state)])
    }

    pub fn draw(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Evenly from `0..bound`; 0 for an empty range.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// Evenly from `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True `numerator` times in `denominator`.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// True with this many parts in a million.
    pub fn per_million(&mut self, parts: u32) -> bool {
        parts > 0 && self.below(1_000_000) < u64::from(parts)
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len() as u64) as usize)
    }

    /// Small far more often than large: a power of two below the bound first, then within it.
    pub fn skewed(&mut self, bound: u64) -> u64 {
        let bits = u64::from(u64::BITS - bound.leading_zeros());
        let limit = 1_u64 << self.below(bits.max(1));
        self.below(limit.min(bound).max(1))
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.draw().to_le_bytes();
            chunk.iter_mut().zip(word).for_each(|(byte, drawn)| *byte = drawn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_differ_by_label() {
        let draw = |seed, label| Random::new(seed, label).draw();
        assert_eq!(draw(1, "disk"), draw(1, "disk"));
        assert_ne!(draw(1, "disk"), draw(2, "disk"));
        assert_ne!(draw(1, "disk"), draw(1, "net"));
    }

    #[test]
    fn bounds_hold() {
        let mut random = Random::new(7, "bounds");
        for bound in [1, 2, 3, 1000] {
            assert!((0..1000).all(|_| random.below(bound) < bound));
            assert!((0..1000).all(|_| random.skewed(bound) < bound));
        }
        assert_eq!(random.below(0), 0);
    }
}
