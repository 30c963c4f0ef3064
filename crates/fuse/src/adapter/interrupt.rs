//! Which interrupts end a request.
//!
//! The kernel tells us of every signal that a waiting thread gets, also of those that it handles:
//! timers, children, a language runtime's preemption. No local file system answers EINTR for those,
//! and programs are not written for it. A signal that *kills* is another matter: the process cannot
//! end before we answer. So we answer EINTR if and only if SIGKILL is pending for the thread, which
//! is what the kernel turns every fatal signal into.

use std::io;
use std::time::Duration;

use crate::InterruptWatch;

/// After the first interrupt the kernel tells us of no further one: we look ourselves.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Completes when the thread that waits for a request is being killed.
pub(super) async fn killed(watch: InterruptWatch, thread: u32) {
    watch.await;
    while !is_being_killed(thread) {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

fn is_being_killed(thread: u32) -> bool {
    judge(thread, std::fs::read_to_string(format!("/proc/{thread}/status")))
}

/// Whether SIGKILL is pending for the thread of this status. One that is gone counts as killed. Thread 0 is one
/// outside of our pid namespace; of it, and of one that we may not look at, nothing is known: it waits.
fn judge(thread: u32, status: io::Result<String>) -> bool {
    match status {
        Ok(status) => has_pending_kill(&status),
        Err(error) => {
            thread != 0 && matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
        }
    }
}

/// `SigPnd` are the thread's pending signals, `ShdPnd` the process's (proc(5)).
fn has_pending_kill(status: &str) -> bool {
    const SIGKILL_BIT: u64 = 1 << (libc::SIGKILL - 1);
    status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")))
        .filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .any(|mask| mask & SIGKILL_BIT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pending_kill_counts() {
        let status = |own: &str, shared: &str| {
            format!("Name:\tcat\nThreads:\t1\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0\n")
        };
        assert!(!has_pending_kill(&status("0000000000000000", "0000000000000000")));
        assert!(!has_pending_kill(&status("0000000000002000", "0000000000010000")));
        assert!(has_pending_kill(&status("0000000000000100", "0000000000000000")));
        assert!(has_pending_kill(&status("0000000000000000", "0000000000000100")));
        assert!(!has_pending_kill("nonsense"));
    }

    #[test]
    fn we_are_not_being_killed_and_nobody_is_gone() {
        assert!(!is_being_killed(std::process::id()));
        assert!(is_being_killed(u32::MAX));
        assert!(!is_being_killed(0), "a thread that our /proc does not show");
    }

    /// The story: a caller in a container, whose thread is 0 to us, got EINTR for every signal.
    #[test]
    fn who_is_not_known_to_be_killed_waits() {
        for (thread, errno, killed) in [
            (7, libc::ENOENT, true),
            (7, libc::ESRCH, true),
            (7, libc::EACCES, false),
            (7, libc::EPERM, false),
            (7, libc::EMFILE, false),
            (0, libc::ENOENT, false),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(judge(thread, Err(error)), killed, "thread {thread}, errno {errno}");
        }
    }
}
