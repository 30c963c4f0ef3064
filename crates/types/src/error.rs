//! Failures that travel between processes, what their receiver may do next, and their errno.

use serde::{Deserialize, Serialize};

use crate::{Epoch, NodeId};

/// What a caller may do after a failure. Policy reads this, never a variant or a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The same request, to the same or the hinted node, after a short wait. Safe: requests are
    /// applied once.
    RetrySame,
    /// The route is stale: fetch it anew from the manager, then retry.
    RefreshRoute,
    /// Another partition may take the bytes.
    RetryElsewhere,
    /// An answer: pass it on.
    GiveUp,
}

/// Failure of a metadata request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MetaError {
    /// The name or inode does not exist.
    #[error("no such file or directory")]
    NotFound,
    /// The name is taken.
    #[error("name exists")]
    Exists,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory,
    /// A directory cannot be used here.
    #[error("is a directory")]
    IsDirectory,
    /// The directory has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// The inode was deleted, perhaps by another client.
    #[error("stale file handle")]
    Stale,
    /// Names, lengths or flags that make no sense.
    #[error("invalid argument")]
    Invalid,
    /// The operation is not permitted on this kind of inode (link to a directory, say).
    #[error("operation not permitted")]
    NotPermitted,
    /// Link count would overflow.
    #[error("too many links")]
    TooManyLinks,
    /// A directory would become its own ancestor.
    #[error("a directory cannot be moved below itself")]
    Loop,
    /// The volume's capacity is used up, or a meta node's memory is.
    #[error("no space left")]
    NoSpace,
    /// Size beyond the largest file.
    #[error("file too large")]
    TooLarge,
    /// A truncation came between: publish again with this generation.
    #[error("truncated meanwhile: generation is {current}")]
    StaleTruncation {
        /// The inode's truncation generation.
        current: u64,
    },
    /// Somebody else changed content that this replaces as a whole, or was put over in place: load it,
    /// lay the own bytes over it, and publish again.
    #[error("changed meanwhile: content version is {current}")]
    StaleContent {
        /// The inode's content version.
        current: u64,
    },
    /// The file has other bytes where these are to go, and whoever wrote those may have synced them: have
    /// these flushed first, and publish again.
    #[error("would replace bytes by others that may not be on disk")]
    ReplacesBytes,
    /// This partition takes no new inodes: place the inode elsewhere.
    #[error("partition takes no new inodes")]
    PartitionFull,
    /// The name or inode takes part in an unfinished cross-partition operation.
    #[error("locked by an unfinished operation")]
    Locked,
    /// The session expired or was never opened here. Its requests are never executed again.
    #[error("session expired")]
    UnknownSession,
    /// Another replica leads.
    #[error("not the leader (leader: {leader:?})")]
    NotLeader {
        /// Who does, if known.
        leader: Option<NodeId>,
    },
    /// The partition is not on this node, or the inode not in this partition.
    #[error("partition or inode is not here")]
    WrongPartition,
    /// A queue is full, or the partition has no majority just now.
    #[error("busy")]
    Busy,
    /// The request may or may not have been applied. Repeat it with the same id.
    #[error("outcome unknown")]
    OutcomeUnknown,
    /// The log's disk failed.
    #[error("disk of the metadata log failed")]
    DiskFailed,
}

impl MetaError {
    /// What the caller may do.
    #[must_use]
    pub fn next(&self) -> Next {
        use MetaError as E;
        match self {
            E::NotLeader { .. } | E::Locked | E::Busy | E::OutcomeUnknown | E::DiskFailed => {
                Next::RetrySame
            }
            E::WrongPartition => Next::RefreshRoute,
            E::PartitionFull
            | E::StaleTruncation { .. }
            | E::StaleContent { .. }
            | E::ReplacesBytes => Next::RetryElsewhere,
            E::NotFound
            | E::Exists
            | E::NotDirectory
            | E::IsDirectory
            | E::NotEmpty
            | E::Stale
            | E::Invalid
            | E::NotPermitted
            | E::TooManyLinks
            | E::Loop
            | E::NoSpace
            | E::TooLarge
            | E::UnknownSession => Next::GiveUp,
        }
    }

    /// The errno that a program sees (errno.h numbers of Linux).
    #[must_use]
    pub fn errno(&self) -> i32 {
        use MetaError as E;
        match self {
            E::NotFound => 2,
            E::Exists => 17,
            E::NotDirectory => 20,
            E::IsDirectory => 21,
            E::NotEmpty => 39,
            E::Stale | E::UnknownSession => 116,
            E::Invalid | E::Loop => 22,
            E::NotPermitted => 1,
            E::TooManyLinks => 31,
            E::NoSpace | E::PartitionFull => 28,
            E::TooLarge => 27,
            E::Locked | E::Busy => 16,
            E::StaleTruncation { .. }
            | E::StaleContent { .. }
            | E::ReplacesBytes
            | E::NotLeader { .. }
            | E::WrongPartition
            | E::OutcomeUnknown
            | E::DiskFailed => 5,
        }
    }
}

/// Failure of a request for file content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DataError {
    /// The partition is not on this node.
    #[error("partition is not here")]
    WrongPartition,
    /// The request's epoch is older than ours, or ours is older than the request's.
    #[error("epoch is {current}")]
    StaleEpoch {
        /// The replica's epoch.
        current: Epoch,
    },
    /// Another member orders appends, or leads the Raft group.
    #[error("not the primary or leader (it is {hint:?})")]
    NotPrimary {
        /// Who does, if known.
        hint: Option<NodeId>,
    },
    /// The extent takes no more bytes; bytes below `length` are there.
    #[error("extent is sealed at {length} bytes")]
    Sealed {
        /// Committed bytes.
        length: u64,
    },
    /// The append's offset is not the extent's end.
    #[error("append is out of order: extent ends at {expected}")]
    OutOfOrder {
        /// Where the next append must go.
        expected: u64,
    },
    /// The extent never existed or was deleted.
    #[error("no such extent")]
    NoExtent,
    /// This replica does not hold the bytes (yet): another does.
    #[error("bytes are not on this replica")]
    NotHere,
    /// The bytes do not match their checksum.
    #[error("checksum mismatch in block {block}")]
    Corrupt {
        /// Index of the block within the extent.
        block: u64,
    },
    /// The bytes that arrived do not match the checksum that came with them.
    #[error("bytes were damaged on the way")]
    DamagedInTransit,
    /// No space on a disk of a member.
    #[error("no space left on the disk")]
    NoSpace,
    /// The partition has too few members to accept writes.
    #[error("too few replicas to write")]
    ReadOnly,
    /// A disk of a member failed and is out of service.
    #[error("disk failed")]
    DiskFailed,
    /// A queue is full; try again after a short wait.
    #[error("busy")]
    Busy,
    /// A member did not answer in time.
    #[error("a replica did not answer")]
    MemberSilent {
        /// Which.
        node: NodeId,
    },
    /// Offsets or lengths that make no sense.
    #[error("invalid request")]
    Invalid,
    /// No replica has the bytes: they were never flushed, and power failed everywhere.
    #[error("bytes that were never synced were lost when power failed on all replicas")]
    Lost {
        /// The extent's bytes below this are there.
        length: u64,
    },
    /// A crash left the block torn, and what completes it proves nothing of the rest: the members
    /// are finding out which of them has it whole.
    #[error("block {block} is being compared with other replicas")]
    Doubtful {
        /// Index of the block within the extent.
        block: u64,
    },
    /// The block is damaged, and that may pass: its replica has yet to repeat its log, or may read it
    /// the next time.
    #[error("block {block} is damaged now, and may be whole soon")]
    Unsettled {
        /// Index of the block within the extent.
        block: u64,
    },
    /// The leader leads in another term than the one that the request is for.
    #[error("the leader's term is {term}")]
    OtherTerm {
        /// Which.
        term: u64,
    },
}

impl DataError {
    /// What the caller may do.
    #[must_use]
    pub fn next(&self) -> Next {
        use DataError as E;
        match self {
            E::Busy
            | E::Doubtful { .. }
            | E::Unsettled { .. }
            | E::DamagedInTransit
            | E::OtherTerm { .. } => Next::RetrySame,
            E::WrongPartition | E::StaleEpoch { .. } | E::NotPrimary { .. } => Next::RefreshRoute,
            E::Sealed { .. }
            | E::OutOfOrder { .. }
            | E::NotHere
            | E::Corrupt { .. }
            | E::NoSpace
            | E::ReadOnly
            | E::DiskFailed
            | E::MemberSilent { .. } => Next::RetryElsewhere,
            E::NoExtent | E::Invalid | E::Lost { .. } => Next::GiveUp,
        }
    }

    /// The errno that a program sees.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            DataError::NoSpace => 28,
            DataError::ReadOnly => 30,
            DataError::NoExtent => 116,
            DataError::Invalid => 22,
            _ => 5,
        }
    }
}

/// Failure of a request to the manager.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ManagerError {
    /// Another replica leads.
    #[error("not the leader (leader: {leader:?})")]
    NotLeader {
        /// Where the leader listens, if known.
        leader: Option<std::net::SocketAddr>,
    },
    /// No majority just now.
    #[error("the managers have no majority just now")]
    Busy,
    /// The volume does not exist.
    #[error("no volume named {name:?}")]
    NoVolume {
        /// As asked.
        name: String,
    },
    /// The volume's name is taken.
    #[error("volume {name:?} exists")]
    VolumeExists {
        /// As asked.
        name: String,
    },
    /// A name or an option is out of bounds: every problem, one line each.
    #[error("{}", problems.join("; "))]
    Invalid {
        /// The lines.
        problems: Vec<String>,
    },
    /// The placement rules cannot be met.
    #[error("cannot place {wanted}: {shortage}")]
    NoPlacement {
        /// What was to be placed.
        wanted: String,
        /// The rule and what is missing.
        shortage: String,
    },
    /// The caller's role or credential does not allow the request.
    #[error("not allowed: {reason}")]
    NotAllowed {
        /// Why.
        reason: String,
    },
    /// Another running node has this identity, or the directory belongs to somebody else.
    #[error("node refused: {reason}")]
    NodeRefused {
        /// Why, and what to do.
        reason: String,
    },
    /// What an operator asked for would break a rule, which is named.
    #[error("refused: {reason}")]
    Refused {
        /// The rule, and what to do instead.
        reason: String,
    },
    /// A node that had to act did not.
    #[error("node {node} did not do it: {reason}")]
    NodeFailed {
        /// Which.
        node: NodeId,
        /// What it said.
        reason: String,
    },
}

impl ManagerError {
    /// What the caller may do.
    #[must_use]
    pub fn next(&self) -> Next {
        match self {
            ManagerError::NotLeader { .. } | ManagerError::Busy => Next::RetrySame,
            _ => Next::GiveUp,
        }
    }
}
