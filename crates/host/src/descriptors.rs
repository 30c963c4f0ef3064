//! How many files and sockets this process may have open, and who gets how many of them.
//!
//! Without descriptors nothing can be read, accepted or made durable, and what lacks them cannot tell for how long. So
//! each kind of use has a bound, and together they stay below what the process may have (`RLIMIT_NOFILE`, setrlimit(2)).

// getrlimit(2) and setrlimit(2) are not in the standard library.
#![allow(unsafe_code)]

use std::io;

use crate::world;

/// Below this a server works, and slowly: it says so at its start.
const COMFORTABLE: u64 = 10_000;

/// Raises the limit of the process as far as the system lets it: the usual soft limit of 1,024 is for programs that use
/// select(2).
///
/// # Errors
///
/// As setrlimit(2). The limit is as before then.
pub fn raise_limit() -> io::Result<()> {
    let limit = limit()?;
    if limit.rlim_cur < limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        // SAFETY: reads a struct that lives through the call.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if limit.rlim_max < COMFORTABLE {
        tracing::warn!(
            limit = limit.rlim_max,
            wanted = COMFORTABLE,
            "few files may be open at a time (LimitNOFILE=, ulimit -n): fewer connections and open extents"
        );
    }
    Ok(())
}

/// What one kind of use may have: so many parts out of a hundred of all descriptors of the process, and no more than
/// `at_most`.
#[must_use]
pub fn share(percent: u64, at_most: usize) -> usize {
    // A simulated process has as many as it likes.
    let allowed = match world::current() {
        Some(_) => u64::MAX,
        None => limit().map_or(1024, |limit| limit.rlim_cur),
    };
    usize::try_from(allowed / 100 * percent).unwrap_or(usize::MAX).min(at_most)
}

fn limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a struct that is ours.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_bounded_by_both() {
        raise_limit().unwrap();
        let all = limit().unwrap();
        assert_eq!(all.rlim_cur, all.rlim_max);
        assert_eq!(share(50, 7), 7);
        assert!(share(50, usize::MAX) <= usize::try_from(all.rlim_cur / 2).unwrap());
    }
}
