//! The replicated state machine: what the managers have agreed on.
//!
//! Every manager applies the same [`Command`]s in the same order and so holds the same [`State`].
//! Decisions are taken before a command is proposed, by the planners on the leader; applying one
//! only checks that what it rests on still holds, gives out ids, and writes it down. A command
//! that lost its race is refused and changes nothing.
//!
//! # Invariants
//!
//! * Ids of nodes, volumes and partitions are given once and never reused.
//! * A data partition's epoch rises by one with each configuration, and no configuration has fewer
//!   than two members.
//! * Equal commands give equal states, byte for byte ([`State::encode`]).
//!
//! # What is deliberately absent
//!
//! Clock, randomness, loads. Whether a node is silent is the leader's judgement; here it is a fact
//! that was committed.

mod command;
mod holders;
mod node;
mod partition;
mod snapshot;
mod state;
mod task;
mod volume;

pub use command::{Applied, Command, CommandV1, NewDataPartition, NewMetaPartition, Registration};
pub(crate) use node::unknown_node;
pub use node::{Drain, NodeRecord};
pub use partition::{
    DataRecord, MEMBERS_MIN, MetaRecord, PartitionKind, Removal, Replica, SplitState,
};
pub use snapshot::SnapshotError;
pub use state::State;
pub use task::{NewTask, Task, TaskReason};
pub(crate) use volume::volume_problems;
pub use volume::{VolumeRecord, VolumeState};

#[cfg(test)]
pub(crate) mod tests;
