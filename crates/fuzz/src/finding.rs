//! A broken promise, written down so that it can be repeated.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// One call may take this long. A hundred times what the slowest one takes.
const CALL_SECONDS_MAX: u64 = 20;

/// What is being decoded: target and bytes.
static CURRENT: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));
/// Counts the calls, so that one that never ends is noticed.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Notes what the next call gets.
pub fn note(target: &'static str, input: &[u8]) {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    current.0 = target;
    current.1.clear();
    current.1.extend_from_slice(input);
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// Writes the input of the current call to a file and says how to repeat it.
pub fn report(problem: &str) {
    let (target, input) = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let digest = milpa_wire::frame::crc32c(&input);
    let path = PathBuf::from(format!("fuzz-{target}-{digest:08x}"));
    let written = std::fs::write(&path, &input);
    eprintln!("FINDING in {target} ({} bytes): {problem}", input.len());
    match written {
        Ok(()) => eprintln!("  milpa-fuzz --target {target} --replay {}", path.display()),
        Err(error) => eprintln!("  cannot write {}: {error}", path.display()),
    }
}

/// Reports, and ends the process: the call cannot be ended.
pub fn stop(problem: &str) {
    report(problem);
    std::process::exit(3);
}

/// Ends the process when a call takes too long.
pub fn watch() {
    std::thread::spawn(|| {
        let (mut before, mut same) = (0, 0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let now = CALLS.load(Ordering::Relaxed);
            same = if now == before { same + 1 } else { 0 };
            before = now;
            if same > CALL_SECONDS_MAX {
                stop("does not end");
            }
        }
    });
}
