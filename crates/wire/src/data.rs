//! Messages to and between data nodes.
//!
//! Bytes travel in the frame's payload; `checksums` holds one CRC32C for each 4 KiB of the payload,
//! counted from the payload's first byte (the last may be shorter). They are computed in the
//! client's buffer, checked by every receiver before it answers, and returned with reads.

use milpa_types::{
    DataError, Deletion, DiskId, Epoch, ExtentId, FreedRange, InodeId, LogEnd, NodeId, PartitionId,
    SessionId, VolumeId,
};
use serde::{Deserialize, Serialize};

/// Largest append, overwrite or read in bytes.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Extents in one answer to `ExtentInfo`, at most.
pub const EXTENT_STATES_MAX: usize = 8192;
/// Ranges in one answer to `Freed` and in one `Free`, at most.
pub const FREED_RANGES_MAX: usize = 65_536;

/// Everything that a data node answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataRequest {
    /// Client to primary: add the payload to an extent (CFS 2.2.4).
    Append(Append),
    /// Primary to backup: the same bytes at the place that the primary gave them.
    Replicate(Replicate),
    /// Client to any member: bytes of an extent, below the length that the key licenses.
    Read(Read),
    /// Client to every member: answer when these extents are on disk.
    Flush {
        /// Which partition.
        partition: PartitionId,
        /// The client's epoch.
        epoch: Epoch,
        /// Which extents, and how many bytes of each must be there.
        extents: Vec<(ExtentId, u64)>,
    },
    /// Client to Raft leader: replace bytes below the commit offset, in place.
    Overwrite(Overwrite),
    /// Client to primary: the writer appends no more to this extent.
    Close {
        /// Which partition.
        partition: PartitionId,
        /// Which extent.
        extent: ExtentId,
    },
    /// Meta leader to every member, and a primary that passes its word on: no file refers to these
    /// bytes any more. Idempotent.
    Free {
        /// What to free.
        ranges: Vec<FreedRange>,
    },
    /// Primary to member: an extent's state, for sealing and repair. From `milpa fsck` too.
    ExtentInfo {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch: a member that has not adopted it yet could still accept appends
        /// of an older one, so it refuses.
        epoch: Epoch,
        /// Which; all of them if empty, in pages.
        extents: Vec<ExtentId>,
        /// Only those above this id, at most [`EXTENT_STATES_MAX`] of them.
        after: Option<ExtentId>,
    },
    /// Primary to member: cut the extent to this length and take no more appends.
    Seal {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch.
        epoch: Epoch,
        /// Which extent.
        extent: ExtentId,
        /// Its final length.
        length: u64,
        /// The epoch in which it was appended, for a replica that has to make it.
        appended: Epoch,
        /// For which file (0 for an extent of small files), for the same.
        inode: InodeId,
        /// By whom, for the same.
        session: SessionId,
        /// Who has all of it, for a replica that lacks bytes: another one from extent to extent,
        /// so that all survivors share the work.
        source: NodeId,
    },
    /// Member to member: bytes of an extent for a replica that lacks them, holes left out.
    Fetch {
        /// Which partition.
        partition: PartitionId,
        /// Which extent.
        extent: ExtentId,
        /// First byte.
        offset: u64,
        /// At most this many bytes.
        length: u64,
        /// The sender has applied the group's log up to here: an answer must contain as much, or
        /// overwrites would be lost. A replica that is behind answers `Busy`.
        applied: u64,
    },
    /// From the manager: hold a replica of a new partition.
    CreatePartition(CreateDataPartition),
    /// From the manager: drop a replica. `Busy` if another one is there than is meant.
    DeletePartition {
        /// Of which partition.
        partition: PartitionId,
        /// Which replica.
        deletion: Deletion,
    },
    /// From the manager to the Raft leader: commit this configuration in the partition's group.
    Configure {
        /// Which partition.
        partition: PartitionId,
        /// The new configuration; it [follows](Configuration::follows) the present one.
        configuration: Configuration,
        /// Who of the members, as they are and as they shall be, will not come back with what it had: a change that
        /// keeps one of these is not begun, and one that is under way does not wait for them.
        lost: Vec<NodeId>,
    },
    /// From the manager, an operator or a member: what is held here.
    Report,
    /// From an operator: hashes of one partition's extents, to compare replicas byte by byte.
    Digest {
        /// Which partition.
        partition: PartitionId,
        /// How many bytes of which extents to hash; of others up to the commit offset that this
        /// replica knows. A backup learns of a commit with the next append only, so the primary is
        /// asked first and its lengths are given to the others.
        lengths: Vec<(ExtentId, u64)>,
    },
    /// Primary to member, or `milpa fsck`: what is freed of these extents there, at most [`EXTENT_STATES_MAX`] of
    /// them. Members that were away when something was freed are told by the primary.
    Freed {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch.
        epoch: Epoch,
        /// Which.
        extents: Vec<ExtentId>,
    },
    /// From the manager: all partitions of a volume acknowledge from memory from now on, or from the
    /// disk. Answered when that is written down; and, for the disk, when all that they hold is on it.
    SetRelaxed {
        /// Which volume.
        volume: VolumeId,
        /// Whether its owner chose `durability = memory`.
        relaxed: bool,
    },
    /// Member to primary: its process was started again, after a power cut perhaps. It may lack bytes
    /// that it had acknowledged: compare it with the others. Answered when that is going to happen.
    Returned {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch.
        epoch: Epoch,
    },
    /// Member to member: a block that nobody has whole, and about which the receiver is in doubt like
    /// the sender. If what both made of it is the same, it is right. Answered with its bytes.
    Doubtful {
        /// Which partition.
        partition: PartitionId,
        /// Which extent.
        extent: ExtentId,
        /// Which block.
        block: u64,
        /// As of this index of the group's log, as far as the extent is concerned: a replica that is
        /// behind, or further, answers `Busy`.
        applied: u64,
    },
    /// Member to leader: may readers be answered here? If this configuration is in force, they may.
    Licence {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch.
        epoch: Epoch,
    },
    /// To a data node that was slow for the sender: answer when a block is on each of its disks.
    Probe,
    /// From `milpa fsck`: which blocks of these extents, at most [`EXTENT_STATES_MAX`] of them, are damaged there, and
    /// were found whole nowhere else.
    LostBlocks {
        /// Which partition.
        partition: PartitionId,
        /// The sender's epoch.
        epoch: Epoch,
        /// Which.
        extents: Vec<ExtentId>,
    },
}

/// Who takes part in a data partition, decided by the manager, committed by the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// Version.
    pub epoch: Epoch,
    /// Members: each holds every byte that this epoch acknowledges.
    pub members: Vec<NodeId>,
    /// The member that orders appends.
    pub primary: NodeId,
    /// New replicas that are being filled. They receive the group's log without a vote and no
    /// appends, are read by nobody, and become members when they hold what the members hold.
    pub learners: Vec<NodeId>,
}

impl Configuration {
    /// Who shall hold every byte: the members, and the replicas that are to become members.
    pub fn holders(&self) -> impl Iterator<Item = NodeId> {
        self.members.iter().chain(&self.learners).copied()
    }

    /// Whether a group whose configuration is `present` may take this one next. Who becomes a member has learned
    /// in the configuration just before. One that was decided and never taken may be left out, for one that only
    /// takes members out: who remains has taken part in all that was acknowledged, whatever lies between.
    #[must_use]
    pub fn follows(&self, present: &Configuration) -> bool {
        let is_next = self.epoch.0 == present.epoch.0.saturating_add(1);
        let was_member = |node: &NodeId| present.members.contains(node);
        let has_learned = |node: &NodeId| is_next && present.learners.contains(node);
        self.epoch > present.epoch
            && self.members.iter().all(|it| was_member(it) || has_learned(it))
    }
}

/// Adds bytes to an extent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Append {
    /// Which partition.
    pub partition: PartitionId,
    /// The client's epoch.
    pub epoch: Epoch,
    /// For which file.
    pub inode: InodeId,
    /// By whom.
    pub session: SessionId,
    /// Where within the file the payload starts; kept in the record of a small piece.
    pub file_offset: u64,
    /// Where to.
    pub target: AppendTarget,
    /// Answer when the bytes are on the disks of all members, not only in their memory.
    pub sync: bool,
    /// Of the payload.
    pub checksums: Vec<u32>,
}

/// Where an append goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AppendTarget {
    /// A new extent of the file's own, from offset 0. The primary gives the id. Give the same
    /// `token` in a repeat: it returns the same extent.
    New {
        /// Chosen by the client, unique in its session.
        token: u64,
    },
    /// The end of an extent that this session opened.
    Extent {
        /// Which.
        extent: ExtentId,
        /// Must be its end, or below it for a repeat of bytes that are there.
        offset: u64,
    },
    /// The primary's current extent for small files; all of the payload is one piece. Give the
    /// same `token` in a repeat.
    Small {
        /// Chosen by the client, unique in its session.
        token: u64,
    },
}

/// An append at the place that the primary gave it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicate {
    /// Which partition.
    pub partition: PartitionId,
    /// The primary's epoch: any other is refused.
    pub epoch: Epoch,
    /// Which extent; created at offset 0.
    pub extent: ExtentId,
    /// Where; must be the backup's end.
    pub offset: u64,
    /// Bytes below this are on all members: the commit offset as of the last answer.
    pub committed: u64,
    /// For which file (of a large extent; a small piece has it in its record).
    pub inode: InodeId,
    /// By whom.
    pub session: SessionId,
    /// Flush before answering.
    pub sync: bool,
    /// Of the payload.
    pub checksums: Vec<u32>,
}

/// A read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Which partition.
    pub partition: PartitionId,
    /// Which extent.
    pub extent: ExtentId,
    /// First byte.
    pub offset: u64,
    /// Bytes, at most [`TRANSFER_BYTES_MAX`].
    pub length: u32,
    /// The client has seen bytes of this extent overwritten in place: only the group's leader may
    /// answer.
    pub at_leader: bool,
}

/// Replaces bytes in place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overwrite {
    /// Which partition.
    pub partition: PartitionId,
    /// The client's epoch.
    pub epoch: Epoch,
    /// Which extent.
    pub extent: ExtentId,
    /// First byte; the whole range lies below the commit offset.
    pub offset: u64,
    /// The leader's term, as it said; 0 to ask. A copy that the network held back is carried out in no later
    /// term, in which newer bytes may lie there.
    pub term: u64,
    /// Of the payload.
    pub checksums: Vec<u32>,
}

/// Answers to requests, by request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataAnswer {
    /// Done; nothing to tell.
    Done,
    /// Append.
    Appended {
        /// The extent.
        extent: ExtentId,
        /// Where the payload's first byte went.
        offset: u64,
        /// Bytes below this are on all members.
        committed: u64,
    },
    /// Read, Fetch: the bytes are the payload.
    Bytes {
        /// Of the payload. The first covers bytes up to the next 4 KiB boundary *of the extent*,
        /// as stored blocks do.
        checksums: Vec<u32>,
        /// Fetch: how many bytes of hole precede the payload.
        hole: u64,
    },
    /// ExtentInfo.
    Extents(Vec<ExtentState>),
    /// Report.
    Report(DataNodeReport),
    /// Digest.
    Digest(Vec<ExtentDigest>),
    /// Freed: at most [`FREED_RANGES_MAX`].
    Freed(Vec<FreedRange>),
    /// LostBlocks: blocks of 4 KiB, by number.
    LostBlocks(Vec<(ExtentId, u64)>),
    /// Flush: the bytes are in memory only, which is what the volume's owner asked for
    /// (`durability = memory`).
    InMemory,
    /// Flush: done, but for blocks that no member has any more.
    DoneBut {
        /// Of the extents that were to be flushed, below the lengths that were: blocks of 4 KiB, by number.
        lost: Vec<(ExtentId, u64)>,
        /// The rest is in memory only, as with [`InMemory`](DataAnswer::InMemory).
        in_memory: bool,
    },
}

/// The reply body of every data node.
pub type DataReply = Result<DataAnswer, DataError>;

/// One extent on one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentState {
    /// Which.
    pub extent: ExtentId,
    /// The epoch in which it is or was appended.
    pub epoch: Epoch,
    /// The inode that owns it; 0 for a small extent.
    pub inode: InodeId,
    /// The session that writes it; 0 for a small extent.
    pub session: SessionId,
    /// Bytes held whose checksums are valid.
    pub length: u64,
    /// Bytes known to be on all members.
    pub committed: u64,
    /// Whether it takes no more appends.
    pub sealed: bool,
    /// Whether bytes of it were overwritten in place.
    pub overwritten: bool,
}

/// A hash of one extent's live bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentDigest {
    /// Which.
    pub extent: ExtentId,
    /// Bytes hashed: up to the commit offset.
    pub length: u64,
    /// CRC32C over the checksums of its blocks; freed blocks count as zeros.
    pub hash: u32,
}

/// What a data node needs to hold a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateDataPartition {
    /// Id and Raft group.
    pub partition: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// The disk to use, of those that the node reported.
    pub disk: DiskId,
    /// First configuration.
    pub configuration: Configuration,
    /// Acknowledge flushes from memory (`durability = memory`).
    pub relaxed: bool,
}

/// What a data node holds, for the manager's placement and for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataNodeReport {
    /// One line a partition.
    pub partitions: Vec<DataPartitionReport>,
}

/// One replica of a data partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPartitionReport {
    /// Which.
    pub partition: PartitionId,
    /// On which of the node's disks.
    pub disk: DiskId,
    /// The configuration that this replica has adopted.
    pub configuration: Configuration,
    /// Raft leader that this replica knows.
    pub leader: Option<NodeId>,
    /// Raft term.
    pub term: u64,
    /// Bytes allocated on disk.
    pub allocated_bytes: u64,
    /// Extents.
    pub extents: u64,
    /// Extents whose replicas are not known to be equal: waiting for alignment or repair.
    pub unaligned: u64,
    /// The last entry of its log; none if it takes no part.
    pub log_end: Option<LogEnd>,
    /// All entries of the log up to this index are applied.
    pub applied: u64,
    /// No entry behind this index and up to `applied` is an overwrite.
    pub overwritten: u64,
    /// Raft leader, while there are learners: the other replicas that have nearly all of the log.
    pub current: Vec<NodeId>,
    /// An overwrite found bytes missing here that have not come since.
    pub lacks_overwritten: bool,
    /// It goes on alone, and is given by its learner what it never had.
    pub is_given_rest: bool,
    /// Blocks of 4 KiB that are damaged here, and that no other replica has whole.
    pub lost_blocks: u64,
}

impl DataPartitionReport {
    /// The part that a decision of the managers may be waiting for: a change of it is told, and acted upon, at once.
    #[must_use]
    pub fn decisive(&self) -> impl PartialEq {
        let DataPartitionReport { partition, disk, configuration, leader, current, .. } = self;
        (partition, disk, configuration, leader, current, self.unaligned == 0, self.is_given_rest)
    }
}
