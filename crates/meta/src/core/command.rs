//! What stands in one Raft entry, and what applying it yields.

use milpa_types::{InodeId, MetaError, SessionId, Timestamp, VolumeOptions};
use milpa_wire::DecodeError;
use milpa_wire::check::MetaRepair;
use milpa_wire::meta::{
    ExtentOffer, MetaReply, MetaWrite, OperationId, RequestId, Step, StepOutcome,
};
use serde::{Deserialize, Serialize};

/// The encoding's first byte. Raised when a variant changes its meaning; new variants are appended.
const COMMAND_VERSION: u8 = 1;

/// One entry of a partition's log. Everything that changes the state is one of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// A client's change, applied once.
    Client {
        /// Who asks, and which of their requests it is.
        id: RequestId,
        /// The client's clock.
        now: Timestamp,
        /// What.
        write: MetaWrite,
    },
    /// The leader saw the session's lease run out: all that it holds is let go.
    ExpireSession {
        /// Whose.
        session: SessionId,
    },
    /// A step that another partition coordinates.
    Participate {
        /// The operation.
        operation: OperationId,
        /// The coordinating client's clock.
        now: Timestamp,
        /// What.
        step: Step,
    },
    /// A participant answered a step of an operation that this partition coordinates. Only
    /// definite answers: what says [`milpa_types::Next::RetrySame`] other than `Locked`, or
    /// `RefreshRoute`, is for the shell to retry, and changes nothing here. Where the volume has no
    /// such slot at all, the shell answers `NotFound` in the participant's place.
    Advance {
        /// The operation.
        operation: OperationId,
        /// [`PendingStep::number`] of the step that was answered. Any other than the present one
        /// is ignored: two leaders may both have asked.
        number: u32,
        /// The answer.
        outcome: Result<StepOutcome, MetaError>,
    },
    /// The shell gives a participant up. Rolls the operation back if it is not committed yet;
    /// the client is told `Busy` and may repeat the request. One that is being rolled back is
    /// forgotten: a participant with an intent finds out by inquiring. A committed one goes on.
    AbortOperation {
        /// The operation.
        operation: OperationId,
    },
    /// Every replica of the data partitions has freed these.
    ConfirmFreed {
        /// [`FreeOrder::order`] of each.
        orders: Vec<u64>,
    },
    /// CFS's split task: `end` is the last inode id ever given here.
    Split {
        /// That id.
        end: InodeId,
    },
    /// The volume's options changed.
    SetOptions {
        /// All of them.
        options: VolumeOptions,
    },
    /// A data node offers unpublished bytes. Answered with `Verdicts`. A session that is told
    /// `Delete` can never be opened here afterwards, so that nothing refers to the bytes later.
    JudgeOffers {
        /// What is offered.
        offers: Vec<ExtentOffer>,
    },
    /// An operator mends what `milpa fsck` found.
    Repair {
        /// The operator's clock.
        now: Timestamp,
        /// What.
        repair: MetaRepair,
    },
}

impl Command {
    /// Encodes for the log.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        milpa_wire::encode(&(COMMAND_VERSION, self))
    }

    /// Decodes a log entry's bytes.
    ///
    /// # Errors
    ///
    /// When the bytes are not exactly one command of a version that this build knows.
    pub fn decode(bytes: &[u8]) -> Result<Command, DecodeError> {
        let refused =
            DecodeError::Body { length: bytes.len(), expected: "meta command of version 1" };
        if bytes.first() != Some(&COMMAND_VERSION) {
            return Err(refused);
        }
        milpa_wire::decode::<(u8, Command)>(bytes).map(|(_, command)| command)
    }
}

/// What one entry yields: to be told by the leader, and dropped by everybody else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// For whoever proposed the entry.
    pub outcome: Outcome,
    /// Operations whose client can be answered since this entry. Their requests were
    /// [`Outcome::Deferred`] before; one entry finishes at most one.
    pub finished: Option<Finished>,
}

impl Applied {
    pub(crate) fn reply(reply: MetaReply) -> Applied {
        Applied { outcome: Outcome::Reply(reply), finished: None }
    }
}

/// The immediate result of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Final.
    Reply(MetaReply),
    /// The request became a cross-partition operation, or repeats one that runs: its reply comes
    /// with the [`Applied::finished`] of that operation. The shell sends
    /// [`Partition::operation_step`](super::Partition::operation_step) now.
    Deferred(OperationId),
}

/// The end of an operation, as its client sees it. Rolling forward may still go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which.
    pub operation: OperationId,
    /// The request that began it.
    pub id: RequestId,
    /// What to tell everybody who waits for it.
    pub reply: MetaReply,
}

/// The next message of an unfinished operation. Sent again and again, with pauses, until the
/// participant gives a definite answer; steps are idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingStep {
    /// The operation.
    pub operation: OperationId,
    /// Which step of it, for [`Command::Advance`].
    pub number: u32,
    /// To the partition of this slot of the volume.
    pub slot: milpa_types::MetaSlot,
    /// The coordinating client's clock.
    pub now: Timestamp,
    /// The message.
    pub step: Step,
    /// Whether the commit point is passed: then it is rolled forward, however long that takes,
    /// and [`Command::AbortOperation`] has no effect.
    pub committed: bool,
}

/// Bytes to free on every replica of their data partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeOrder {
    /// Names it for [`Command::ConfirmFreed`]. Rising, never reused.
    pub order: u64,
    /// What to free. Freeing twice is harmless, as bytes of an extent are never used again.
    pub range: milpa_types::FreedRange,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_survive_the_log_and_other_versions_are_refused() {
        let command = Command::ExpireSession { session: SessionId(7) };
        let mut bytes = command.encode();
        assert_eq!(Command::decode(&bytes), Ok(command));
        bytes[0] = 2;
        assert!(Command::decode(&bytes).is_err());
        assert!(Command::decode(&[]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_mean_something(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
        ) {
            let bytes = [&[COMMAND_VERSION][..], &bytes].concat();
            if let Ok(command) = Command::decode(&bytes) {
                assert!(Command::decode(&command.encode()) == Ok(command));
            }
        }
    }
}
