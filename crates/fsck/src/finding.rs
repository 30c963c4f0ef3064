//! What is wrong, in words.

use std::fmt;
use std::time::Duration;

use milpa_types::{FileKind, InodeId, Name, NodeId};
use milpa_wire::check::{Fault, FaultKind, LookedInode, MetaRepair};
use serde::Serialize;

use crate::extents::{Reference, What};
use crate::strays::Candidate;
use crate::suspects::{Look, Wrong};

/// The kind of a finding. docs/operations.md has a row for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// Inode ranges of the meta partitions have gaps, or overlap.
    PartitionRanges,
    /// A partition has fewer replicas than it should.
    FewReplicas,
    /// An inode with an id that its partition never gave.
    WrongId,
    /// A directory's size or link count is not what it holds.
    WrongCounts,
    /// An inode without links that nobody holds open.
    Abandoned,
    /// A hold without session or without inode.
    StrayHold,
    /// Allocated bytes that are not those of the content.
    WrongAllocation,
    /// A content map that cannot be.
    WrongContent,
    /// Segments or names of an inode that is not there.
    StrayRecords,
    /// A name of an inode that is not there.
    MissingInode,
    /// A name that says another type than its inode.
    WrongKind,
    /// An inode without a name.
    NoName,
    /// A directory with several names.
    ManyNames,
    /// A link count that is not the number of names.
    WrongLinks,
    /// Synced bytes of a file that no replica has whole.
    LostBytes,
    /// Bytes of a file that were never synced, and that no replica has whole.
    UnsyncedLost,
    /// Bytes of a file that some replica does not have.
    ReplicaLacks,
    /// Bytes to which two files refer.
    SharedBytes,
    /// Bytes in another file's extent, or in none of the volume's data partitions.
    ForeignBytes,
    /// Bytes to which no file refers, and that nobody frees.
    StrayBytes,
}

impl Code {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Code::PartitionRanges => "partition-ranges",
            Code::FewReplicas => "few-replicas",
            Code::WrongId => "wrong-id",
            Code::WrongCounts => "wrong-counts",
            Code::Abandoned => "abandoned",
            Code::StrayHold => "stray-hold",
            Code::WrongAllocation => "wrong-allocation",
            Code::WrongContent => "wrong-content",
            Code::StrayRecords => "stray-records",
            Code::MissingInode => "missing-inode",
            Code::WrongKind => "wrong-kind",
            Code::NoName => "no-name",
            Code::ManyNames => "many-names",
            Code::WrongLinks => "wrong-links",
            Code::LostBytes => "lost-bytes",
            Code::UnsyncedLost => "unsynced-lost",
            Code::ReplicaLacks => "replica-lacks",
            Code::SharedBytes => "shared-bytes",
            Code::ForeignBytes => "foreign-bytes",
            Code::StrayBytes => "stray-bytes",
        }
    }
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its kind.
    pub code: Code,
    /// The inode that it is about, if it is about one.
    pub inode: Option<InodeId>,
    /// A path of that inode below the volume's root, if one was found.
    pub path: Option<String>,
    /// What is wrong.
    pub text: String,
    /// What was done about it, or why nothing was; `None` if nobody asked for it.
    pub repair: Option<String>,
    /// What can be done about it.
    #[serde(skip)]
    pub(crate) remedy: Remedy,
}

/// What can be done about a finding without losing anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Nothing.
    #[default]
    None,
    /// Nothing from here; this helps.
    Elsewhere(&'static str),
    /// These, each by the partition of this inode.
    Repairs(Vec<(InodeId, MetaRepair)>),
    /// To delete the inode, if no partition has a name for it.
    Delete(InodeId),
    /// These removals of its names, if its partition still does not have the inode.
    RemoveNames(InodeId, Vec<(InodeId, MetaRepair)>),
}

impl Finding {
    pub(crate) fn new(code: Code, inode: impl Into<Option<InodeId>>, text: String) -> Finding {
        let (inode, path, repair) = (inode.into(), None, None);
        Finding { code, inode, path, text, repair, remedy: Remedy::None }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.code.as_str())?;
        match (&self.path, self.inode) {
            (Some(path), Some(inode)) => write!(f, "{path} (inode {inode}): ")?,
            (None, Some(inode)) => write!(f, "inode {inode}: ")?,
            (_, None) => {}
        }
        f.write_str(&self.text)?;
        match &self.repair {
            Some(repair) => write!(f, ": {repair}"),
            None => Ok(()),
        }
    }
}

/// A name as a person can read it.
pub(crate) fn shown(name: &Name) -> String {
    String::from_utf8_lossy(name.as_bytes()).into_owned()
}

/// What a partition found out about itself.
pub(crate) fn of_fault(fault: &Fault) -> Finding {
    let (code, text) = match &fault.what {
        FaultKind::WrongId => (Code::WrongId, "its partition never gave this id".to_owned()),
        FaultKind::WrongCounts { size, entries, link_count, links } => (
            Code::WrongCounts,
            format!(
                "size {size} and link count {link_count}, but {entries} entries and {links} links"
            ),
        ),
        FaultKind::Abandoned => (Code::Abandoned, "no links, and nobody holds it open".to_owned()),
        FaultKind::HeldByNobody { session } => {
            (Code::StrayHold, format!("held open by session {session}, which does not live"))
        }
        FaultKind::HeldButGone => (Code::StrayHold, "held open, but not there".to_owned()),
        FaultKind::WrongAllocation { allocated, counted } => {
            (Code::WrongAllocation, format!("{allocated} bytes allocated, but {counted} held"))
        }
        FaultKind::ContentBeyondSize { size, end } => {
            (Code::WrongContent, format!("content up to {end}, but size {size}"))
        }
        FaultKind::SegmentsOverlap { offset } => {
            (Code::WrongContent, format!("segments overlap at {offset}"))
        }
        FaultKind::WrongContent => {
            (Code::WrongContent, "content of two kinds, or of no file".to_owned())
        }
        FaultKind::ContentOfNone { segments } => {
            (Code::StrayRecords, format!("{segments} segments of an inode that is not there"))
        }
        FaultKind::NamesInNone { names } => {
            (Code::StrayRecords, format!("{names} names in what is no directory"))
        }
    };
    let inode = fault.inode;
    let remedy = match code {
        Code::WrongCounts | Code::WrongAllocation => {
            Remedy::Repairs(vec![(inode, MetaRepair::Recount { inode })])
        }
        Code::Abandoned => Remedy::Delete(inode),
        _ => Remedy::None,
    };
    Finding { remedy, ..Finding::new(code, inode, text) }
}

/// What several looks agreed upon.
pub(crate) fn of_look(id: InodeId, look: &Look, wrong: Wrong) -> Finding {
    let what = look.inode.map_or("missing", |inode| word(inode.kind));
    let links = look.inode.map_or(0, |inode| inode.link_count);
    let size = look.inode.map_or(0, |inode| inode.size);
    let names = look.names;
    let (code, text) = match wrong {
        Wrong::Missing => (Code::MissingInode, format!("not there, but {names} names name it")),
        Wrong::Nameless => (
            Code::NoName,
            format!("{what} of size {size} with link count {links} that no name names"),
        ),
        Wrong::ManyNames => (Code::ManyNames, format!("{what} with {names} names")),
        Wrong::Links => (Code::WrongLinks, format!("link count {links}, but {names} names")),
        Wrong::OtherKind => (Code::WrongKind, format!("{what} with a name of another type")),
    };
    Finding { remedy: of_wrong(id, look, wrong), ..Finding::new(code, id, text) }
}

fn of_wrong(id: InodeId, look: &Look, wrong: Wrong) -> Remedy {
    match (wrong, look.inode) {
        (Wrong::Missing, _) => {
            let names = look.examples.iter().cloned();
            let remove = names.map(|(directory, name, _)| {
                (directory, MetaRepair::RemoveName { directory, name, inode: id })
            });
            Remedy::RemoveNames(id, remove.collect())
        }
        (Wrong::Nameless, _) => Remedy::Delete(id),
        (Wrong::Links, Some(LookedInode { changed, .. })) => {
            let Ok(links) = u32::try_from(look.names) else { return Remedy::None };
            Remedy::Repairs(vec![(id, MetaRepair::SetLinks { inode: id, changed, links })])
        }
        _ => Remedy::None,
    }
}

/// What is wrong with bytes of a file.
pub(crate) fn of_bytes(inode: InodeId, what: What, references: &[Reference]) -> Finding {
    let (code, text) = match what {
        What::Lost => {
            (Code::LostBytes, "are whole on no replica, though they were synced".to_owned())
        }
        What::LostUnsynced => {
            (Code::UnsyncedLost, "are whole on no replica; they were never synced".to_owned())
        }
        What::Lacks(node) => (Code::ReplicaLacks, format!("are not on node {node}")),
        What::Shared(other) => (Code::SharedBytes, format!("are bytes of inode {other} too")),
        What::Owned(owner) => {
            (Code::ForeignBytes, format!("are in an extent that was made for inode {owner}"))
        }
        What::NoPartition => {
            (Code::ForeignBytes, "are in a data partition that the volume does not have".to_owned())
        }
    };
    let bytes: u64 = references.iter().map(|reference| reference.length).sum();
    let place = references.first().map(|reference| {
        let (partition, extent) = reference.place;
        format!("from {} on (data partition {partition}, extent {extent})", reference.file_offset)
    });
    let place = place.unwrap_or_default();
    Finding::new(
        code,
        inode,
        format!("{bytes} bytes in {} ranges, {place}, {text}", references.len()),
    )
}

/// Extents of an inode that are strays, at least one.
pub(crate) fn of_strays(inode: InodeId, strays: &[Candidate], waited: Duration) -> Finding {
    let bytes: u64 = strays.iter().map(|stray| stray.held.bytes).sum();
    let is_homeless = strays.iter().any(Candidate::is_homeless);
    let place = strays.first().map(|first| {
        let (partition, extent) = first.place;
        let nodes: Vec<String> = first.held.nodes.iter().map(NodeId::to_string).collect();
        format!("extent {extent} of data partition {partition} on nodes {}", nodes.join(", "))
    });
    let (why, remedy) = if is_homeless {
        let why = "the volume has no meta partition for this inode that could have them freed";
        (why.to_owned(), "nobody may free them")
    } else {
        let why = format!("nobody has freed them in {} s", waited.as_secs());
        (why, "data nodes that are restarted have such bytes freed")
    };
    let text = format!(
        "{bytes} bytes in {} extents (first {}) that no file refers to or ever will, and {why}",
        strays.len(),
        place.unwrap_or_default(),
    );
    Finding { remedy: Remedy::Elsewhere(remedy), ..Finding::new(Code::StrayBytes, inode, text) }
}

fn word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::CharDevice => "character device",
        FileKind::BlockDevice => "block device",
    }
}
