//! The whole cluster in one deterministic process: production nodes and clients on simulated
//! machines, under faults, with checkers.
//!
//! Managers, meta nodes, data nodes and clients run as they are: the same `run` functions that the
//! program calls. What is simulated lies below the ports of `milpa-host`: time, network, disks,
//! threads and randomness. All machines share one thread and run one after the other in ticks of a
//! millisecond, each on a tokio runtime of its own whose paused clock jumps from timer to timer. So a
//! run is a function of its seed: same seed, same course, byte for byte.
//!
//! | module | what it is |
//! |---|---|
//! | `machine` | a server: lives of one node, its clock, pauses, power |
//! | `disk` | volatile and durable contents, torn and lost writes, failures |
//! | `network` | connections with TCP's promises, partitions, resets, corruption |
//! | `entropy`, `random`, `trace` | what makes a run repeatable, and shows that it was |
//! | `cluster` | settings of the production nodes |
//! | `options`, `nemesis` | what a seed draws; who does harm |
//! | `workload`, `history` | what clients do, and what `milpa-model` says about the answers |
//! | `crash_points` | every point at which a machine can crash or stand still in a calm course |
//! | `old_disks` | copies of disks that come back, and must be refused |
//! | `stalls` | how long calls may take, given what was broken |
//! | `observer` | leaders, configurations, equality of replicas, space |
//! | `simulation` | the course of a run; `harm` does what the nemesis wants |
//!
//! # What is deliberately absent
//!
//! FUSE and the kernel, HTTP callers, real threads: nothing here shows races between threads of the
//! client, or between the kernel and us. The tests on real mounts do.

mod cluster;
mod crash_points;
// Public for the fault layer under real processes (milpa-faultfs); the names tell.
#[allow(missing_docs)]
pub mod disk;
mod entropy;
mod history;
mod machine;
mod nemesis;
mod network;
mod observer;
mod old_disks;
mod options;
mod outcome;
#[allow(missing_docs)]
pub mod random;
mod simulation;
mod stalls;
mod trace;
mod workload;

pub use crash_points::{Crash, CrashPoint, Effectful, crash_points};
pub use options::fault_kinds;
pub use outcome::{Outcome, Settings, run_seed};
