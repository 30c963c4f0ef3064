//! From a future of the client to an answer for the kernel.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use milpa_client::FsError;
use tokio::runtime::Handle;

use super::interrupt::killed;
use super::parked::park;
use crate::{
    Delivery, InterruptWatch, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};

/// A reply handle, whatever it answers.
pub(super) trait Answer {
    fn refuse(self, errno: i32);
    fn watch_interrupt(&self) -> InterruptWatch;
}

macro_rules! answers {
    ($( $reply:ty ),* $(,)?) => { $(
        impl Answer for $reply {
            fn refuse(self, errno: i32) {
                self.error(errno);
            }

            fn watch_interrupt(&self) -> InterruptWatch {
                self.watch()
            }
        }
    )* };
}

answers!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr,
);

/// Polls `work` here; if it has to wait, the runtime goes on with it when it is woken. `pid` is the thread
/// that waits for the answer.
pub(super) fn serve<T, R>(
    runtime: &Handle,
    pid: u32,
    reply: R,
    work: impl Future<Output = Result<T, FsError>> + Send + 'static,
    deliver: impl FnOnce(R, T) -> Delivery + Send + 'static,
) where
    T: Send + 'static,
    R: Answer + Send + 'static,
{
    let _inside = runtime.enter();
    let mut work: Pin<Box<dyn Future<Output = Result<T, FsError>> + Send>> = Box::pin(work);
    // The waker does nothing: whatever wakes the future before the runtime polls it again is seen
    // by that poll.
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => finish(reply, result, deliver),
        Poll::Pending => {
            let watch = reply.watch_interrupt();
            let waiting = async move {
                tokio::select! {
                    biased;
                    result = work => finish(reply, result, deliver),
                    () = killed(watch, pid) => reply.refuse(libc::EINTR),
                }
            };
            park(runtime, Box::pin(waiting));
        }
    }
}

fn finish<T, R: Answer>(
    reply: R,
    result: Result<T, FsError>,
    deliver: impl FnOnce(R, T) -> Delivery,
) {
    match result {
        Ok(value) => {
            deliver(reply, value);
        }
        Err(error) => {
            let errno = error.errno();
            // An answer to a question is no news; a failure of the system is.
            if matches!(errno, libc::EIO | libc::EROFS) {
                tracing::warn!(%error, "an operation failed");
            }
            reply.refuse(errno);
        }
    }
}
