//! The manager: who takes part in a cluster, where each partition lives, and by which policy.
//!
//! CFS's resource manager (section 2.3), InterFS's master and ZoneFS's zone map in their first
//! common form. A handful of managers form one Raft group; the leader answers, a follower names
//! the leader. The manager is never on the path of a byte, nor on that of an ordinary metadata
//! operation: clients cache what it says and carry on without it.
//!
//! # Parts
//!
//! * [`core`]: the replicated state machine. A committed [`core::Command`] changes
//!   [`core::State`]; nothing else does.
//! * [`loads`]: what the leader heard in heartbeats. In its memory only: a new leader hears it all
//!   again within one heartbeat.
//! * [`planner`]: pure functions from state and loads to *plans*: commands to commit and steps
//!   for nodes to take.
//! * [`view`]: state and loads merged into what callers are told.
//! * [`shell`]: Raft, sockets, the checkpoint on disk, the loop that runs the planners and
//!   performs their steps.
//!
//! # How nothing is lost
//!
//! An intent is committed before a node hears of it, and every step that a node takes is
//! idempotent. Each pass of the planners compares what the state wants with what the nodes report
//! and asks for the difference again; so a lost answer, a restarted node or a new leader delays a
//! step and never loses one. Steps carry ids and epochs that are given once: what a deposed leader
//! still sends is refused, or does what was decided anyway.
//!
//! # What is deliberately absent
//!
//! Replicas that move because others are fuller, zones beyond placement, and dodging: they come as further planners
//! over the same state.

// Unit tests use the real thing (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod avoided;
pub mod config;
pub mod core;
#[cfg(any(test, feature = "decoders"))]
pub mod decoders;
pub mod loads;
pub mod planner;
pub mod shell;
pub mod view;

pub use config::{CheckpointConfig, ConfigError, ManagerConfig, Policy};
pub use shell::{RunError, run};
