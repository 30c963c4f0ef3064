//! What `milpa fsck` asks meta partitions, and what they find out about themselves.
//!
//! A partition answers from a frozen copy of its state: all of one answer is of one log index, and
//! nothing waits for it. What one partition can judge alone it judges there ([`Fault`]): that is
//! certain at the first look. What needs several (who names whom, which bytes are where) is put
//! together by the asker, in pages, and looked at again before it is believed.

use milpa_types::{ExtentId, FileKind, InodeId, Name, PartitionId, Segment, SessionId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::meta::{ExtentOffer, Verdict};

/// Records that a partition looks at for one answer; a directory or a file is looked at whole.
pub const CHECK_RECORDS_MAX: usize = 65_536;
/// Inodes in one `Names`, and offers in one `Offers`, at most.
pub const CHECK_INODES_MAX: usize = 1024;
/// Names told of one inode, and faults told in one answer, at most; the others are counted.
pub const CHECK_EXAMPLES_MAX: usize = 4;
/// See [`CHECK_EXAMPLES_MAX`].
pub const CHECK_FAULTS_MAX: usize = 1024;

/// A question about a partition's state. Answered by its leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaCheck {
    /// The partition's own inodes, their directories and content maps: are they sound?
    Inodes {
        /// The first.
        from: InodeId,
    },
    /// Which inodes from `first` to `last` do the names here name? In the order of directory and
    /// name.
    Dentries {
        /// Directory and name after which to begin.
        after: Option<(InodeId, Name)>,
        /// The lowest inode asked for.
        first: InodeId,
        /// The highest.
        last: InodeId,
    },
    /// All that is known here of a few inodes: the second look.
    Names {
        /// Of any partition, at most [`CHECK_INODES_MAX`].
        inodes: Vec<InodeId>,
    },
    /// Which bytes of these extents do the files here refer to? In the order of inode and offset.
    Segments {
        /// Inode and end within it after which to begin.
        after: Option<(InodeId, u64)>,
        /// The lowest data partition and extent asked for.
        first: (PartitionId, ExtentId),
        /// The highest.
        last: (PartitionId, ExtentId),
    },
    /// What would become of these bytes if a data node offered them? Decides nothing.
    Offers {
        /// At most [`CHECK_INODES_MAX`].
        offers: Vec<ExtentOffer>,
    },
}

/// A repair: what was found, so that it is refused when that is not so any more. Part of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRepair {
    /// An inode's sums (a directory's size and link count, a file's allocated bytes) become what it
    /// holds.
    Recount {
        /// Which.
        inode: InodeId,
    },
    /// The link count becomes the number of names that were counted in all partitions.
    SetLinks {
        /// Which; no directory.
        inode: InodeId,
        /// When it was last changed, as seen.
        changed: Timestamp,
        /// The names, at least one.
        links: u32,
    },
    /// An inode that no name names, in any partition, is deleted: one without links, or one that
    /// holds nothing. Its bytes go as those of every deleted file do.
    DeleteInode {
        /// Which.
        inode: InodeId,
        /// When it was last changed, as seen.
        changed: Timestamp,
    },
    /// A name of an inode that its partition does not have is removed.
    RemoveName {
        /// The directory.
        directory: InodeId,
        /// The name in it.
        name: Name,
        /// What it names.
        inode: InodeId,
    },
}

/// The answer to a [`MetaCheck`], by question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaChecked {
    /// Inodes.
    Inodes {
        /// By id.
        inodes: Vec<CheckedInode>,
        /// What is wrong with them.
        faults: Vec<Fault>,
        /// Further faults that had no room here.
        unlisted: u64,
        /// Dentries looked at.
        dentries: u64,
        /// Segments looked at.
        segments: u64,
        /// Where to go on; `None` at the end.
        next: Option<InodeId>,
    },
    /// Dentries.
    Dentries {
        /// What each names.
        named: Vec<(InodeId, FileKind)>,
        /// Where to go on; `None` at the end.
        next: Option<(InodeId, Name)>,
    },
    /// Names: in the order of the question.
    Names(Vec<Looked>),
    /// Segments.
    Segments {
        /// Plain segments.
        found: Vec<(InodeId, Segment)>,
        /// Where to go on; `None` at the end.
        next: Option<(InodeId, u64)>,
    },
    /// Offers: in the order of the question.
    Offers(Vec<Verdict>),
}

/// An inode as names are counted against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedInode {
    /// Which.
    pub inode: InodeId,
    /// Its type.
    pub kind: FileKind,
    /// How many names it should have: its link count; 1 for a directory, 0 for the root.
    pub names: u32,
}

/// What a partition knows of one inode, its own or another's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looked {
    /// The inode itself, if it is here.
    pub inode: Option<LookedInode>,
    /// Names for it here.
    pub names: u64,
    /// Over all these names, in any order: another one if any of them changed.
    pub digest: u64,
    /// One of the names takes part in an operation that is not over.
    pub is_locked: bool,
    /// Some of the names: directory, name, and the type that the dentry says.
    pub examples: Vec<(InodeId, Name, FileKind)>,
}

/// An inode in a second look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookedInode {
    /// Its type.
    pub kind: FileKind,
    /// Its link count.
    pub link_count: u32,
    /// Its size; of a directory, its entries.
    pub size: u64,
    /// When it was last changed: moves with every change of its link count.
    pub changed: Timestamp,
    /// An operation that is not over has prepared something for it.
    pub is_in_operation: bool,
    /// A session holds it open.
    pub is_held: bool,
}

impl LookedInode {
    /// How many names it should have.
    #[must_use]
    pub fn names(&self, inode: InodeId) -> u32 {
        names_wanted(inode, self.kind, self.link_count)
    }
}

/// How many names an inode should have.
#[must_use]
pub fn names_wanted(inode: InodeId, kind: FileKind, link_count: u32) -> u32 {
    match kind {
        FileKind::Directory => u32::from(inode != InodeId::ROOT),
        _ => link_count,
    }
}

/// Something that a partition holds and must not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Of which inode.
    pub inode: InodeId,
    /// What.
    pub what: FaultKind,
}

/// What is wrong. Each breaks an invariant of one partition at one log index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// The partition never gave this id.
    WrongId,
    /// A directory's size or link count is not what it holds.
    WrongCounts {
        /// Its size.
        size: u64,
        /// Its entries.
        entries: u64,
        /// Its link count.
        link_count: u32,
        /// 2 and one for each subdirectory.
        links: u64,
    },
    /// It has no links, and nobody holds it open.
    Abandoned,
    /// A session that does not live holds it open.
    HeldByNobody {
        /// Which.
        session: SessionId,
    },
    /// A session holds it open, and it is not there.
    HeldButGone,
    /// Its allocated bytes are not those of its content.
    WrongAllocation {
        /// What it says.
        allocated: u64,
        /// What it has.
        counted: u64,
    },
    /// Its content reaches beyond its size.
    ContentBeyondSize {
        /// Its size.
        size: u64,
        /// Where the content ends.
        end: u64,
    },
    /// Two segments overlap.
    SegmentsOverlap {
        /// Within the file.
        offset: u64,
    },
    /// It has segments and content in the inode, or is no file and has either.
    WrongContent,
    /// There are segments, and no inode.
    ContentOfNone {
        /// How many.
        segments: u64,
    },
    /// There are names in it, and it is no directory, or not there.
    NamesInNone {
        /// How many.
        names: u64,
    },
}
