//! Choices that look random and are decided by a seed, so that a plan can be made twice.

/// SplitMix64 (Steele, Lea, Flood 2014): one multiplication chain, good enough to choose nodes by.
#[derive(Clone, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// All choices follow from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> SplitMix {
        SplitMix(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is positive. The bias of the remainder is below 2^-40 here.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % (bound.max(1) as u64)) as usize
    }

    /// Moves `count` chosen items to the front and drops the rest.
    pub fn sample<T>(&mut self, items: &mut Vec<T>, count: usize) {
        if items.len() <= count {
            return;
        }
        for place in 0..count {
            let chosen = place + self.below(items.len() - place);
            items.swap(place, chosen);
        }
        items.truncate(count);
    }
}
