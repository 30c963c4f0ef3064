//! What the clients do: random operations on shared directories, judged as they are answered.

mod files;
mod names;
mod quota;
mod walk;
mod worker;

pub(crate) use quota::Quota;
pub(crate) use walk::{delete_all, verify};
pub(crate) use worker::{Plan, run_client};
