//! How much memory a call takes: an allocator that counts, for each thread.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// More than this at once is stopped on the spot: the machine would be out of memory otherwise.
const STOP_BYTES: usize = 1 << 30;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static IS_MEASURED: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, with a count.
#[derive(Debug)]
pub struct Counting;

fn count(bytes: isize) {
    // A thread that ends has no counters any more; nobody measures it.
    let _ = LIVE.try_with(|live| {
        live.set(live.get().saturating_add(bytes));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
        let is_measured = IS_MEASURED.try_with(Cell::get).unwrap_or(false);
        if is_measured && live.get() > STOP_BYTES as isize {
            let _ = IS_MEASURED.try_with(|measured| measured.set(false));
            crate::finding::stop("takes more than 1 GiB of memory");
        }
    });
}

// SAFETY: every call is passed on as it is; counting touches nothing but this thread's numbers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Calls, and gives the most memory that the call had at once.
pub fn measured<T>(call: impl FnOnce() -> T) -> (T, usize) {
    LIVE.set(0);
    PEAK.set(0);
    IS_MEASURED.set(true);
    let value = call();
    IS_MEASURED.set(false);
    (value, PEAK.get().max(0) as usize)
}
