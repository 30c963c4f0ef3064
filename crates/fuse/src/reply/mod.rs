//! Answers: one handle per request, usable from any thread, consumed by answering.
//!
//! A handle knows where its answer goes ([`ReplySink`]): today the descriptor on which the request
//! came in, later a ring. The kernel finds a request only there, so a handle never changes sides.

mod directory;
mod typed;

use std::io::{self, IoSlice};
use std::sync::Arc;

pub use directory::{ReplyDirectory, ReplyDirectoryPlus};
pub use typed::{
    ReplyAttr, ReplyBmap, ReplyCopy, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyStatx, ReplyWrite, ReplyXattr,
};

use crate::decode::Malformed;
use crate::interrupt::{InterruptWatch, Interrupts};

/// Largest errno that the kernel takes in an answer; others leave the request unanswered.
const ERRNO_MAX: i32 = 511;

/// Where answers go. One implementation per transport; tests have their own.
pub(crate) trait ReplySink: Send + Sync {
    /// Sends one answer whole: `error` is 0 or a negative errno, `body` follows the header.
    ///
    /// # Errors
    ///
    /// What the kernel said. ENOENT: it no longer waits for this request.
    fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> io::Result<()>;

    /// The table of the session.
    fn interrupts(&self) -> &Arc<Interrupts>;
}

/// Whether the kernel took an answer.
///
/// It matters for [`Entry`](crate::Entry) answers: one that was dropped did not raise the lookup
/// count, so the file system must not count it either (nor an open file in it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The caller has it.
    Delivered,
    /// The request was aborted or the file system is unmounted; nobody waits any more.
    Dropped,
}

impl Delivery {
    /// True if the kernel took the answer.
    #[must_use]
    pub fn is_delivered(self) -> bool {
        self == Delivery::Delivered
    }
}

/// The handle without a type: what the typed handles are made of.
pub(crate) struct Reply {
    unique: u64,
    sink: Arc<dyn ReplySink>,
    answered: bool,
}

impl Reply {
    pub(crate) fn new(unique: u64, sink: Arc<dyn ReplySink>) -> Reply {
        Reply { unique, sink, answered: false }
    }

    pub(crate) fn unique(&self) -> u64 {
        self.unique
    }

    pub(crate) fn watch(&self) -> InterruptWatch {
        self.sink.interrupts().watch(self.unique)
    }

    /// Answers success with `body`.
    pub(crate) fn success(self, body: &[u8]) -> Delivery {
        self.success_vectored(&[IoSlice::new(body)])
    }

    /// Answers success with the concatenation of `body`.
    pub(crate) fn success_vectored(mut self, body: &[IoSlice<'_>]) -> Delivery {
        self.answered = true;
        match self.sink.send(self.unique, 0, body) {
            Ok(()) => Delivery::Delivered,
            Err(error) => self.not_delivered(&error),
        }
    }

    /// Answers an errno (positive, as in libc).
    pub(crate) fn error(mut self, errno: i32) {
        self.answered = true;
        self.send_error(errno);
    }

    /// Answers a request whose bytes make no sense.
    pub(crate) fn malformed(self, reason: Malformed) {
        tracing::warn!(unique = self.unique, reason = reason.0, "request is malformed");
        self.error(libc::EINVAL);
    }

    /// Answers EIO because the file system broke the contract of its handle.
    pub(crate) fn broken(self, what: &'static str) -> Delivery {
        tracing::error!(unique = self.unique, what, "file system gave an impossible answer");
        self.error(libc::EIO);
        Delivery::Dropped
    }

    fn send_error(&self, errno: i32) {
        let errno = if (1..=ERRNO_MAX).contains(&errno) {
            errno
        } else {
            tracing::error!(unique = self.unique, errno, "file system answered an invalid errno");
            libc::EIO
        };
        if let Err(error) = self.sink.send(self.unique, -errno, &[])
            && !is_gone(&error)
        {
            tracing::error!(unique = self.unique, %error, "kernel refused an error answer");
        }
    }

    /// An answer that the kernel refuses leaves the caller waiting: EIO is better than for ever.
    fn not_delivered(&self, error: &io::Error) -> Delivery {
        if !is_gone(error) {
            tracing::error!(unique = self.unique, %error, "kernel refused an answer");
            self.send_error(libc::EIO);
        }
        Delivery::Dropped
    }
}

/// Nobody waits for the answer any more: aborted, or unmounted.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED))
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            tracing::error!(unique = self.unique, "request was dropped without an answer");
            self.send_error(libc::EIO);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::interrupt::lock;
    use std::sync::Mutex;

    /// Remembers what was answered; refuses answers with a body if told so.
    #[derive(Default)]
    pub(crate) struct FakeSink {
        pub(crate) answers: Mutex<Vec<(u64, i32, Vec<u8>)>>,
        pub(crate) refuse: Option<i32>,
        interrupts: Arc<Interrupts>,
    }

    impl ReplySink for FakeSink {
        fn send(&self, unique: u64, error: i32, body: &[IoSlice<'_>]) -> io::Result<()> {
            if let (Some(errno), 0) = (self.refuse, error) {
                return Err(io::Error::from_raw_os_error(errno));
            }
            let body = body.iter().flat_map(|part| part.iter().copied()).collect();
            lock(&self.answers).push((unique, error, body));
            Ok(())
        }

        fn interrupts(&self) -> &Arc<Interrupts> {
            &self.interrupts
        }
    }

    impl FakeSink {
        /// Takes the only answer there is.
        #[track_caller]
        pub(crate) fn only(&self) -> (u64, i32, Vec<u8>) {
            let mut answers = lock(&self.answers);
            assert_eq!(answers.len(), 1, "{answers:?}");
            answers.remove(0)
        }
    }

    pub(crate) fn reply_to(sink: &Arc<FakeSink>) -> Reply {
        let sink: Arc<FakeSink> = Arc::clone(sink);
        Reply::new(6, sink)
    }

    #[test]
    fn a_dropped_handle_answers_eio() {
        let sink = Arc::new(FakeSink::default());
        drop(ReplyEmpty::new(reply_to(&sink)));
        assert_eq!(sink.only(), (6, -libc::EIO, vec![]));
    }

    #[test]
    fn an_impossible_errno_becomes_eio() {
        for errno in [0, -1, 512, i32::MIN, i32::MAX] {
            let sink = Arc::new(FakeSink::default());
            reply_to(&sink).error(errno);
            assert_eq!(sink.only(), (6, -libc::EIO, vec![]), "{errno}");
        }
    }

    #[test]
    fn a_refused_answer_is_followed_by_eio_unless_nobody_waits() {
        let refusing = Arc::new(FakeSink { refuse: Some(libc::EINVAL), ..FakeSink::default() });
        assert_eq!(reply_to(&refusing).success(b"body"), Delivery::Dropped);
        assert_eq!(refusing.only(), (6, -libc::EIO, vec![]));

        let gone = Arc::new(FakeSink { refuse: Some(libc::ENOENT), ..FakeSink::default() });
        assert_eq!(reply_to(&gone).success(b"body"), Delivery::Dropped);
        assert!(lock(&gone.answers).is_empty());
    }

    #[test]
    fn handles_are_send() {
        fn is_send<T: Send + 'static>() {}
        is_send::<ReplyData>();
        is_send::<ReplyDirectoryPlus>();
        is_send::<InterruptWatch>();
    }
}
