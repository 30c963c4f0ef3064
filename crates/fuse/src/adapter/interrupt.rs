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

/// Most flushes are done within this time, and cost no look at the process. One that died waits so long for each
/// file that it left open.
const QUICK_FLUSH: Duration = Duration::from_millis(10);

/// `PF_EXITING` of the kernel's `sched.h`, in the flags of proc(5)'s `stat`.
const EXITING: u64 = 4;

/// Completes when the thread that waits for a request is being killed.
pub(super) async fn killed(watch: InterruptWatch, thread: u32) {
    watch.await;
    while !is_being_killed(thread) {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Completes when this thread is at its end because a signal killed it. The flush that the kernel sends for what
/// it leaves open is interrupted by nothing any more, not by another SIGKILL either: the process would be there,
/// and could not be got rid of, until the servers answer. Who may not be looked at waits.
pub(super) async fn died_of_a_signal(thread: u32) {
    tokio::time::sleep(QUICK_FLUSH).await;
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    if !ends_by_a_signal(&stat).unwrap_or(false) {
        std::future::pending().await
    }
}

/// Fields 9, `flags`, and 52, `exit_code` as in wait(2), of a thread's `stat` (proc(5)); the name in parentheses
/// may hold anything.
fn ends_by_a_signal(stat: &str) -> Option<bool> {
    let (_, from_state) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = from_state.split_ascii_whitespace().collect();
    let flags: u64 = fields.get(9 - 3)?.parse().ok()?;
    let exit_code: u32 = fields.get(52 - 3)?.parse().ok()?;
    Some(flags & EXITING != 0 && exit_code & 0x7f != 0)
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
    fn only_an_end_by_a_signal_counts() {
        let stat = |flags: u32, exit_code: u32| {
            let between = "0 ".repeat(42);
            format!("7 (a ) b) D 1 7 7 0 -1 {flags} {between}{exit_code}\n")
        };
        let killed = libc::SIGTERM as u32;
        assert_eq!(ends_by_a_signal(&stat(0x0040_0004, killed)), Some(true));
        assert_eq!(ends_by_a_signal(&stat(0x0040_0004, 1 << 8)), Some(false), "exit(1)");
        assert_eq!(ends_by_a_signal(&stat(0x0040_0000, killed)), Some(false));
        assert_eq!(ends_by_a_signal("7 (nonsense) D"), None);
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert_eq!(ends_by_a_signal(&own), Some(false));
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
