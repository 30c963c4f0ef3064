//! The world of a thread: real, or simulated.
//!
//! Everything outside of a process is reached through the ports of this crate ([`net`](crate::net),
//! [`clock`](crate::clock), [`disk`](crate::disk), [`jobs`](crate::jobs),
//! [`entropy`](crate::entropy)). A port asks which world its thread is in. In production the answer
//! is always none, and the port is the system call; in the simulation whole nodes, unchanged, share
//! one thread, and each is polled inside of its own world, which stands for its machine.
//!
//! A thread's world rather than a type parameter: a parameter would run through every struct of every
//! shell, and the shells would be compiled twice and read worse (docs/decisions/0004). The price is one
//! thread-local read where a connection or a file is opened or a job begins; what is opened then
//! remembers on which side it is.
//!
//! # Invariant
//!
//! Nothing above this crate reaches the outside otherwise: `clippy.toml` forbids the calls of the
//! standard library and of tokio that would.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use crate::clock::Instant;
use crate::disk::Disk;
use crate::net::Network;

/// A simulated machine, as the one node on it sees it. One value for each life of a node.
pub trait World {
    /// Its network interface.
    fn network(&self) -> &dyn Network;

    /// Its disks.
    fn disk(&self) -> &dyn Disk;

    /// The zero of [`clock::now_us`](crate::clock::now_us), on the paused clock of the node's
    /// runtime.
    fn started(&self) -> Instant;

    /// Its wall clock.
    fn wall(&self) -> SystemTime;

    /// Random bytes: all chance in the node comes from here.
    fn fill(&self, bytes: &mut [u8]);

    /// How long a job of a thread of this name waits for its turn, and again how long it takes the
    /// news of its end to arrive.
    fn job_pause(&self, thread: &str) -> Duration;

    /// Its memory.
    fn memory(&self) -> Memory;
}

/// Memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Resident in this process.
    pub used: u64,
    /// Of the machine.
    pub total: u64,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<dyn World>>> = const { RefCell::new(None) };
}

/// Enters a world until the guard is dropped. Enter a node's world around every poll of its
/// runtime, and around dropping it.
pub fn enter(world: Rc<dyn World>) -> Entered {
    Entered { before: CURRENT.replace(Some(world)), stays_on_its_thread: PhantomData }
}

/// The world of this thread; `None` is the real one.
#[must_use]
pub fn current() -> Option<Rc<dyn World>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Leads back to the world before when it is dropped.
#[must_use]
pub struct Entered {
    before: Option<Rc<dyn World>>,
    stays_on_its_thread: PhantomData<Rc<()>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
    }
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entered")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine without network and disk, whose jobs take a second each way.
    pub(crate) struct Lonely;

    impl World for Lonely {
        fn network(&self) -> &dyn Network {
            unreachable!("nobody connects")
        }

        fn disk(&self) -> &dyn Disk {
            unreachable!("nobody opens a file")
        }

        fn started(&self) -> Instant {
            Instant::now()
        }

        fn wall(&self) -> SystemTime {
            SystemTime::UNIX_EPOCH
        }

        fn fill(&self, bytes: &mut [u8]) {
            bytes.fill(7);
        }

        fn job_pause(&self, _thread: &str) -> Duration {
            Duration::from_secs(1)
        }

        fn memory(&self) -> Memory {
            Memory { used: 1, total: 2 }
        }
    }

    /// The same with a disk.
    pub(crate) struct WithDisk<D>(pub D);

    impl<D: Disk> World for WithDisk<D> {
        fn network(&self) -> &dyn Network {
            unreachable!("nobody connects")
        }

        fn disk(&self) -> &dyn Disk {
            &self.0
        }

        fn started(&self) -> Instant {
            Lonely.started()
        }

        fn wall(&self) -> SystemTime {
            Lonely.wall()
        }

        fn fill(&self, bytes: &mut [u8]) {
            Lonely.fill(bytes);
        }

        fn job_pause(&self, thread: &str) -> Duration {
            Lonely.job_pause(thread)
        }

        fn memory(&self) -> Memory {
            Lonely.memory()
        }
    }

    #[test]
    fn worlds_nest_and_are_left() {
        assert!(current().is_none());
        let outer = enter(Rc::new(Lonely));
        drop(enter(Rc::new(Lonely)));
        assert!(current().is_some());
        assert_eq!(crate::clock::wall(), SystemTime::UNIX_EPOCH);
        assert_eq!(crate::entropy::u64().unwrap(), 0x0707_0707_0707_0707);
        assert_eq!(crate::telemetry::machine_memory_bytes(), Some(2));
        drop(outer);
        assert!(current().is_none());
        assert!(crate::clock::wall() > SystemTime::UNIX_EPOCH);
    }
}
