//! The `/dev/fuse` transport: one blocking thread per descriptor.
//!
//! Each thread reads requests from a descriptor of its own, cloned from the mount's
//! (`FUSE_DEV_IOC_CLONE`): the kernel then keeps the requests of each in a list of their own
//! instead of one list behind one lock. The price: an answer must go to the descriptor on which
//! its request came in, so a [`Channel`] is what a reply handle holds.
//!
//! A transport over io_uring can stand beside this one: it implements
//! [`ReplySink`](crate::reply::ReplySink) for its queues and feeds
//! [`dispatch`](crate::dispatch::dispatch); nothing above knows the difference.

mod buffer;
mod device;

pub(crate) use buffer::Buffer;
pub(crate) use device::{Channel, Received};
