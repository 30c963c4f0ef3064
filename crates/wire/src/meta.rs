//! Messages to and between meta nodes.

use milpa_types::{
    AttributeChanges, Attributes, Deletion, ExtentId, FileKind, FreedRange, InodeId, LogEnd,
    MetaError, MetaSlot, Name, NodeId, PartitionId, Segment, SessionId, Timestamp, VolumeId,
    VolumeOptions,
};
use serde::{Deserialize, Serialize};

use crate::check::{MetaCheck, MetaChecked, MetaRepair};

/// Entries in one readdir page, at most.
pub const READDIR_ENTRIES_MAX: u32 = 4096;

/// Segments in one answer to GetLayout: 64 bytes each at most, so half of what a frame takes.
pub const LAYOUT_SEGMENTS_MAX: usize = 65_536;

/// Requests in one batch, at most.
pub const BATCH_REQUESTS_MAX: usize = 1024;

/// Files and segments in one `MarkFlushed`, at most.
pub const MARKS_MAX: usize = 4096;
/// Ranges in a [`MetaWrite::CutLostRanges`] at most, and extents in a [`MetaWrite::CutLostExtents`].
pub const LOST_RANGES_MAX: usize = 1024;

/// What makes a mutating request one that is applied once (DESIGN.md section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestId {
    /// The client's lease.
    pub session: SessionId,
    /// Rises by one with each request of the session to this partition.
    pub sequence: u64,
    /// The lowest sequence to this partition that the client has no answer for: replies below it
    /// are forgotten. At most 256 below `sequence`.
    pub unanswered: u64,
}

/// Everything that a meta node answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRequest {
    /// A read of one partition, answered by its leader.
    Read {
        /// Which.
        partition: PartitionId,
        /// Who asks; `None` for operators. An unlinked inode exists only for the session that
        /// holds it open: to everybody else it is stale.
        reader: Option<SessionId>,
        /// What.
        read: MetaRead,
    },
    /// A change of one partition, applied once.
    Write {
        /// Which.
        partition: PartitionId,
        /// Who asks, and which of their requests it is.
        id: RequestId,
        /// The client's clock, for the times of the inodes.
        now: Timestamp,
        /// What.
        write: MetaWrite,
    },
    /// Several requests in order, each with its own answer. Not nested.
    Batch(Vec<MetaRequest>),
    /// The client lives: renews its lease in every partition led here.
    KeepAlive {
        /// Whose.
        session: SessionId,
    },
    /// A step of a cross-partition operation, from the coordinating leader.
    Participate {
        /// The participant.
        partition: PartitionId,
        /// The operation, unique in the volume.
        operation: OperationId,
        /// The coordinating client's clock.
        now: Timestamp,
        /// What.
        step: Step,
    },
    /// From a data node: may these unpublished bytes be deleted?
    OfferExtents {
        /// The inode's partition.
        partition: PartitionId,
        /// What is offered.
        offers: Vec<ExtentOffer>,
    },
    /// From the manager: hold a replica of a new partition.
    CreatePartition(CreateMetaPartition),
    /// From the manager: drop a replica. `Busy` if another one is there than is meant.
    DeletePartition {
        /// Of which partition.
        partition: PartitionId,
        /// Which replica.
        deletion: Deletion,
    },
    /// From the manager: CFS's split task (Algorithm 1). The partition takes no new inodes.
    Split {
        /// Which.
        partition: PartitionId,
        /// The last inode id it may ever give.
        end: InodeId,
    },
    /// From another replica: a piece of a snapshot file.
    FetchSnapshot {
        /// Which partition.
        partition: PartitionId,
        /// Log index of the snapshot.
        index: u64,
        /// First byte.
        offset: u64,
    },
    /// From the manager or an operator: what is held here.
    Report,
    /// From the manager: a volume's options changed.
    SetVolumeOptions {
        /// Which volume.
        volume: VolumeId,
        /// Its options.
        options: VolumeOptions,
    },
    /// From the manager to the Raft leader: commit these members in the partition's group, as one
    /// change. Answered when it is under way; the report shows when it is done.
    Configure {
        /// Which partition.
        partition: PartitionId,
        /// Who shall vote.
        voters: Vec<NodeId>,
        /// Who shall receive the log without voting.
        learners: Vec<NodeId>,
    },
    /// From the manager to the Raft leader: let this member lead.
    TransferLeader {
        /// Which partition.
        partition: PartitionId,
        /// To whom.
        to: NodeId,
    },
    /// From an operator: replicas compare this hash of the state at a log index.
    StateHash {
        /// Which partition.
        partition: PartitionId,
    },
    /// From an operator: `milpa fsck` looks at the state, which it does not change.
    Check {
        /// Which partition.
        partition: PartitionId,
        /// What it wants to know.
        check: MetaCheck,
    },
    /// From an operator: `milpa fsck --repair` mends what it found.
    Repair {
        /// Which partition.
        partition: PartitionId,
        /// The operator's clock.
        now: Timestamp,
        /// What.
        repair: MetaRepair,
    },
    /// From the manager: most other replicas have another state at this log index than this one.
    /// It takes part no more.
    RefuseReplica {
        /// Which partition.
        partition: PartitionId,
        /// What this replica said of itself.
        mark: StateMark,
    },
}

/// Reads, linearizable at the leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRead {
    /// The dentry, and its inode's attributes when it lives in the same partition.
    Lookup {
        /// Directory.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Attributes of one inode.
    GetAttributes {
        /// Which.
        inode: InodeId,
    },
    /// Attributes of many inodes (CFS's batchInodeGet); the missing ones are left out.
    GetAttributesBatch {
        /// Which.
        inodes: Vec<InodeId>,
    },
    /// Target of a symlink.
    ReadLink {
        /// Which.
        inode: InodeId,
    },
    /// A page of a directory in name order.
    ReadDirectory {
        /// Which.
        parent: InodeId,
        /// Names above this one; `None` from the start.
        after: Option<Name>,
        /// At most this many entries, and at most [`READDIR_ENTRIES_MAX`].
        limit: u32,
        /// Send the attributes of inodes that live in the same partition.
        with_attributes: bool,
    },
    /// Attributes and content map of a file: what an open for reading needs.
    GetLayout {
        /// Which.
        inode: InodeId,
        /// The map from this place in the file on: where the last part ended, if it did not come whole. If the content
        /// version is another one then, the parts do not belong together.
        from: u64,
    },
    /// The dentry, attributes and content map in one (compound of version 1).
    LookupLayout {
        /// Directory.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Counts of this partition, for statfs.
    Statistics,
}

/// Changes, each one Raft entry, or for several partitions one logged operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaWrite {
    /// Begins a session in this partition. Repeating it is harmless while the session lives.
    OpenSession,
    /// Ends it: held inodes are let go. The client unmounts.
    CloseSession,
    /// A new inode and its dentry.
    Create {
        /// Directory, in this partition.
        parent: InodeId,
        /// Name in it.
        name: Name,
        /// What to create.
        inode: NewInode,
        /// Where the inode shall live; `None` for this partition.
        placement: Option<MetaSlot>,
        /// If the name exists and is a file, return it instead of `Exists` (open with O_CREAT
        /// and without O_EXCL).
        open_existing: bool,
        /// Whole content, at most the volume's inline limit (compound create + content + close).
        content: Option<Vec<u8>>,
    },
    /// Another name for an inode that is not a directory.
    Link {
        /// The inode, in any partition.
        inode: InodeId,
        /// Directory, in this partition.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Removes a name of something that is not a directory.
    Unlink {
        /// Directory, in this partition.
        parent: InodeId,
        /// Name in it.
        name: Name,
        /// The client has it open: keep a last-link inode until `Release` or the session's end.
        held: bool,
    },
    /// Removes an empty directory.
    RemoveDirectory {
        /// Its parent, in this partition.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Moves a name, replacing what the destination names (rename(2)). Sent to the partition of
    /// the destination directory.
    Rename {
        /// Source directory, in any partition.
        source_parent: InodeId,
        /// Name in it.
        source_name: Name,
        /// Destination directory, in this partition.
        target_parent: InodeId,
        /// Name in it.
        target_name: Name,
        /// RENAME_NOREPLACE of renameat2(2).
        no_replace: bool,
        /// The client has what is replaced open.
        held: bool,
    },
    /// Changes attributes; truncation and extension among them.
    SetAttributes {
        /// Which.
        inode: InodeId,
        /// What.
        changes: AttributeChanges,
    },
    /// Makes written bytes part of the file (DESIGN.md section 4).
    Publish(Publish),
    /// Published bytes are on the disks of all members by now. What a file no longer refers to is
    /// passed over: this changes marks, never content.
    MarkFlushed {
        /// The files, at most [`MARKS_MAX`].
        files: Vec<FlushedFile>,
    },
    /// The client closed an inode that it had unlinked while open.
    Release {
        /// Which.
        inode: InodeId,
    },
    /// A block of inode ids for the session, to create with later (used by directory leases).
    GrantInodes {
        /// How many, at most 65,536.
        count: u32,
    },
    /// [`CutLostExtents`](MetaWrite::CutLostExtents) with a single one: kept for logs that have it.
    CutLost {
        /// The file.
        inode: InodeId,
        /// Partition of the extent.
        partition: PartitionId,
        /// The extent.
        extent: ExtentId,
        /// Its bytes from here on are lost.
        length: u64,
    },
    /// [`CutLostRanges`](MetaWrite::CutLostRanges) of all behind some bytes of an extent: kept for logs that have it.
    CutLostExtents {
        /// The file.
        inode: InodeId,
        /// All that it lacks, at most [`LOST_RANGES_MAX`].
        lost: Vec<LostExtent>,
    },
    /// No replica has these bytes any more: they were never flushed, and power failed everywhere. They leave
    /// the file, which ends earlier if it ended with them. Bytes that are marked flushed stay.
    CutLostRanges {
        /// The file.
        inode: InodeId,
        /// All that it lacks, at most [`LOST_RANGES_MAX`].
        lost: Vec<LostRange>,
    },
}

/// An extent that is shorter than a file believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostExtent {
    /// Its partition.
    pub partition: PartitionId,
    /// The extent.
    pub extent: ExtentId,
    /// Its bytes from here on are lost.
    pub length: u64,
}

/// Bytes of an extent that a file refers to, and that are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRange {
    /// Its partition.
    pub partition: PartitionId,
    /// The extent.
    pub extent: ExtentId,
    /// The first byte.
    pub from: u64,
    /// One past the last byte; 2^64 - 1 for all behind the first.
    pub until: u64,
}

impl From<LostExtent> for LostRange {
    fn from(lost: LostExtent) -> LostRange {
        let LostExtent { partition, extent, length } = lost;
        LostRange { partition, extent, from: length, until: u64::MAX }
    }
}

/// Bytes that become part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publish {
    /// The file.
    pub inode: InodeId,
    /// Truncation generation that the client last saw.
    pub truncation: u64,
    /// Content version that the client last saw, if this publish holds bytes that were there and
    /// that it did not write: content in the inode is only ever replaced whole, and leaves it whole.
    /// The content must be of this version then, or bytes of somebody else would be lost.
    pub base: Option<u64>,
    /// New keys, in order of writing: where they overlap older ones, they win.
    pub segments: Vec<Segment>,
    /// The size becomes at least this.
    pub size: u64,
    /// Whole content, when it is small enough to live in the inode: replaces all segments.
    pub inline: Option<Vec<u8>>,
    /// Where bytes were overwritten in place: the content changed though no key did. The file must
    /// still have its bytes there, or what was overwritten is nobody's any more.
    pub overwritten: Vec<Segment>,
    /// All members were asked to flush the bytes of `segments`, and answered as the volume's durability
    /// wants it. Only then may they take the place of others, which may have been synced.
    pub may_replace: bool,
    /// Time of the last write.
    pub modified: Timestamp,
    /// The process that wrote was not privileged: set-id bits go.
    pub clear_set_id: bool,
}

/// Bytes of a file that are on all disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushedFile {
    /// The file.
    pub inode: InodeId,
    /// The bytes, by their keys.
    pub segments: Vec<Segment>,
}

/// What a new inode is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewInode {
    /// Type.
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file.
    pub device: u32,
    /// Target of a symlink, 1 to 4095 bytes; else empty.
    pub target: Vec<u8>,
}

/// A dentry with what is known of its inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name; in answers to a lookup, as asked.
    pub name: Name,
    /// The inode it names.
    pub inode: InodeId,
    /// Its type, kept in the dentry.
    pub kind: FileKind,
    /// Attributes, if the inode lives in the partition that answered.
    pub attributes: Option<Attributes>,
    /// Its directory's attributes after the change, in the answer to what made the entry.
    pub directory: Option<Box<Attributes>>,
}

/// Where a file's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// In the inode.
    Inline(Vec<u8>),
    /// In extents: sorted by file offset, not overlapping; what they leave out are holes.
    Segments(Vec<Segment>),
}

/// Answers to requests, by request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaAnswer {
    /// Done; nothing to tell.
    Done,
    /// Lookup, Create, Link.
    Entry(Entry),
    /// Unlink, RemoveDirectory.
    Removed {
        /// The directory's attributes after the change.
        directory: Attributes,
    },
    /// GetAttributes, CutLostRanges.
    Attributes(Attributes),
    /// SetAttributes, Publish.
    Changed {
        /// The inode after the change.
        attributes: Attributes,
        /// The content version that the change found: who knows that one knows the content.
        before: u64,
    },
    /// GetAttributesBatch.
    AttributesBatch(Vec<Attributes>),
    /// ReadLink.
    Target(Vec<u8>),
    /// ReadDirectory.
    Page {
        /// In name order.
        entries: Vec<Entry>,
        /// Whether the directory ends here.
        end: bool,
    },
    /// GetLayout.
    Layout {
        /// The file's attributes.
        attributes: Attributes,
        /// Its content map: at most [`LAYOUT_SEGMENTS_MAX`] segments.
        content: Content,
        /// Whether the map ends here.
        end: bool,
    },
    /// LookupLayout: the layout is there when the inode is a file of the same partition.
    EntryLayout {
        /// The dentry.
        entry: Entry,
        /// The content map.
        content: Option<Content>,
    },
    /// Statistics.
    Statistics(MetaStatistics),
    /// Batch: one answer for each request, in order.
    Batch(Vec<Result<MetaAnswer, MetaError>>),
    /// Participate.
    Step(StepOutcome),
    /// OfferExtents: one verdict for each offer, in order.
    Verdicts(Vec<Verdict>),
    /// FetchSnapshot: the bytes are the payload; `total` tells when to stop.
    SnapshotPiece {
        /// Bytes of the whole file.
        total: u64,
    },
    /// Report.
    Report(MetaNodeReport),
    /// GrantInodes: the first of the granted ids.
    Granted {
        /// First id; the others follow.
        first: InodeId,
    },
    /// StateHash.
    StateHash {
        /// Log index.
        index: u64,
        /// Hash of the state there.
        hash: u64,
    },
    /// Check.
    Checked(MetaChecked),
}

/// The reply body of every meta node.
pub type MetaReply = Result<MetaAnswer, MetaError>;

/// Counts of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaStatistics {
    /// Inodes held, deleted ones that still wait for their bytes to be freed excepted.
    pub inodes: u64,
    /// Dentries held.
    pub dentries: u64,
    /// Bytes in all files, holes excepted.
    pub allocated_bytes: u64,
    /// Highest inode id given.
    pub inode_highest: InodeId,
    /// Ranges that wait to be freed on data nodes.
    pub freed_waiting: u64,
    /// Unlinked inodes that a session holds open.
    pub held: u64,
    /// Unfinished cross-partition operations.
    pub operations: u64,
}

/// Names one cross-partition operation: the coordinating partition and the log index at which it
/// began there. Unique for ever, as log indexes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OperationId {
    /// The coordinating partition.
    pub partition: PartitionId,
    /// Log index of its first entry.
    pub index: u64,
}

/// What a participant is asked. Each is idempotent by operation id: asked again it gives the same
/// answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Prepare: make an inode that no dentry names yet.
    PrepareInode {
        /// What.
        inode: NewInode,
        /// Its directory, counted as its first link.
        parent: InodeId,
    },
    /// Prepare: add a link to this inode, which must not be a directory.
    PrepareLink {
        /// Which.
        inode: InodeId,
    },
    /// Prepare: this directory must be empty and takes no entries from now on.
    PrepareRemoveDirectory {
        /// Which.
        inode: InodeId,
    },
    /// Prepare: this dentry must exist; nobody else may change it until the operation ends.
    PrepareTake {
        /// Directory.
        parent: InodeId,
        /// Name in it.
        name: Name,
    },
    /// Commit point passed: make the prepared step final and forget the operation.
    Finish,
    /// Roll back: undo the prepared step and forget the operation.
    Abort,
    /// Prepare: a dentry of this inode is gone; `Finish` drops the link, so that a late duplicate
    /// cannot drop it twice.
    DropLink {
        /// Which.
        inode: InodeId,
        /// Session that holds it open, if it does.
        held: Option<SessionId>,
    },
    /// Does the coordinator still know this operation? Asked by a participant whose intent is old.
    Inquire,
}

/// What a participant answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepOutcome {
    /// Done.
    Done,
    /// PrepareInode, PrepareLink: the inode.
    Inode(Attributes),
    /// PrepareTake: what the dentry names.
    Taken {
        /// The inode.
        inode: InodeId,
        /// Its type.
        kind: FileKind,
    },
    /// Inquire: whether it is unfinished. If not known, it was aborted or finished long ago.
    Known(bool),
}

/// Unpublished bytes on a data node whose writer has fallen silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentOffer {
    /// For whom they were written.
    pub inode: InodeId,
    /// By whom.
    pub session: SessionId,
    /// Where they lie.
    pub range: FreedRange,
}

/// What becomes of offered bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The file refers to them.
    Keep,
    /// The writer may still publish them: offer again later.
    Wait,
    /// Nobody can ever refer to them.
    Delete,
}

/// What a meta node needs to hold a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateMetaPartition {
    /// Id and Raft group.
    pub partition: PartitionId,
    /// The volume.
    pub volume: VolumeId,
    /// Its options.
    pub options: VolumeOptions,
    /// Which inode ids it owns.
    pub slot: MetaSlot,
    /// All replicas; the first campaigns at once.
    pub members: Vec<NodeId>,
    /// The group exists: wait for its leader's snapshot, vote for nobody before that.
    pub joins: bool,
}

/// What a meta node holds, for the manager's placement and for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaNodeReport {
    /// One line a partition.
    pub partitions: Vec<MetaPartitionReport>,
}

/// One replica of a meta partition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPartitionReport {
    /// Which.
    pub partition: PartitionId,
    /// Leader that this replica knows.
    pub leader: Option<NodeId>,
    /// Raft term.
    pub term: u64,
    /// Applied log index.
    pub applied: u64,
    /// The last entry of its log; none if it takes no part.
    pub log_end: Option<LogEnd>,
    /// Counts.
    pub statistics: MetaStatistics,
    /// Who votes in the group, as far as this replica knows.
    pub voters: Vec<NodeId>,
    /// Who receives the log without voting.
    pub learners: Vec<NodeId>,
    /// Leader: the other replicas that have nearly all of the log.
    pub current: Vec<NodeId>,
    /// Its node makes no inodes: its disk or its memory is full.
    pub is_full: bool,
    /// Its state at some log indexes, for the managers to compare.
    pub marks: Vec<StateMark>,
    /// It takes no part and nothing else is said of it: it is on disk, until the managers know that
    /// it is not needed and delete it.
    pub is_damaged: bool,
    /// It led, held the group up, and was relieved, not long ago: others lead better.
    pub declines_lead: bool,
}

/// The state of a replica at a log index, in a number: the same for all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateMark {
    /// How the state is kept: hashes of different formats are not comparable.
    pub format: u16,
    /// Log index.
    pub index: u64,
    /// Hash of the state after that entry.
    pub hash: u64,
}
