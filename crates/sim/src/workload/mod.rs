//! What the clients do: random operations on shared directories, judged as they are answered.

mod files;
mod names;
mod quota;
mod walk;
mod worker;

pub(crate) use quota::Quota;
pub(crate) use walk::{delete_all, verify};
pub(crate) use worker::{Plan, run_client};

/// All that they do.
pub(crate) const OPERATIONS: [&str; 19] = [
    "create",
    "open",
    "write",
    "read",
    "fsync",
    "flush",
    "truncate",
    "close",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "rename directory",
    "link",
    "symlink",
    "readlink",
    "readdir",
    "lookup",
    "getattr",
];
