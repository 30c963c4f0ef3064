//! Reference models: what a file system may answer, in the fewest lines.
//!
//! A run of the whole cluster is a history of calls by several clients, some of them without an
//! answer. The models here say which answers are possible, and nothing of how they come about:
//!
//! * [`dentry`]: one name of one directory, a register that must be linearizable.
//! * [`linear`]: the search for an order of calls that explains their answers.
//! * [`content`]: the bytes of one file: close-to-open between clients, read-your-writes within
//!   one, and what fsync promised survives power cuts.
//! * [`tree`]: a whole name space at rest: link counts, sizes of directories, no orphans.
//!
//! # What is deliberately absent
//!
//! Everything that is implementation: partitions, replicas, caches, layouts. A model imports the
//! types that clients see and nothing else, so it cannot share a mistake with what it judges.

pub mod content;
pub mod dentry;
pub mod linear;
pub mod tree;

/// A moment of a run: rises by one with each begin and each end of a call.
pub type Moment = u64;
