//! Which code an input reached, where the build was instrumented (see `scripts/fuzz-rustc`): the compiler puts
//! a counter on every edge and gives them to us at the start. In other builds there are none, and
//! inputs are mutated without guidance.

#![allow(unsafe_code)]

use std::sync::Mutex;

/// Where the counters of each library are.
static REGIONS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called by every instrumented library before `main`.
///
/// # Safety
///
/// `start` and `stop` bound an array of bytes that lives as long as the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    if let Ok(mut regions) = REGIONS.lock() {
        let region = (start as usize, stop as usize);
        if !regions.contains(&region) {
            regions.push(region);
        }
    }
}

/// All that was ever reached.
#[derive(Debug)]
pub struct Coverage {
    counters: Vec<&'static mut [u8]>,
    /// For each counter, the classes of counts that were seen, a bit each.
    seen: Vec<Vec<u8>>,
    reached: usize,
}

impl Coverage {
    /// Takes the counters. Only one may exist.
    pub fn take() -> Coverage {
        let mut regions = REGIONS.lock().map(|mut r| std::mem::take(&mut *r)).unwrap_or_default();
        regions.retain(|(start, stop)| start < stop);
        // SAFETY: the compiler promises that these are arrays of bytes that live as long as the
        // process and do not overlap; taking the list makes this the only reference of ours.
        let counters: Vec<&mut [u8]> = regions
            .iter()
            .map(|&(start, stop)| unsafe {
                std::slice::from_raw_parts_mut(start as *mut u8, stop - start)
            })
            .collect();
        let seen = counters.iter().map(|region| vec![0; region.len()]).collect();
        Coverage { counters, seen, reached: 0 }
    }

    /// Whether the build is instrumented.
    pub fn is_there(&self) -> bool {
        !self.counters.is_empty()
    }

    /// Edges that were ever reached.
    pub fn reached(&self) -> usize {
        self.reached
    }

    /// Forgets what was reached since the last look.
    pub fn clear(&mut self) {
        self.counters.iter_mut().for_each(|region| region.fill(0));
    }

    /// Whether anything new was reached since the last [`clear`](Coverage::clear).
    pub fn is_new(&mut self) -> bool {
        let mut is_new = false;
        for (region, seen) in self.counters.iter().zip(&mut self.seen) {
            let words = region.chunks(8).zip(seen.chunks_mut(8));
            for (counts, classes) in words.filter(|(counts, _)| **counts != [0; 8]) {
                for (count, seen) in counts.iter().zip(classes).filter(|(count, _)| **count > 0) {
                    // 1, 2, 3 to 4, …: powers of two.
                    let class = 1 << count.ilog2();
                    self.reached += usize::from(*seen == 0);
                    is_new |= *seen & class == 0;
                    *seen |= class;
                }
            }
        }
        is_new
    }
}
