//! Tests of the whole state machine: what the modules' own tests cannot see.

mod across;
mod check;
mod content;
mod memory;
mod model;
mod operations;
mod sessions;
mod snapshots;

use milpa_types::{
    Attributes, Column, ExtentId, FileKind, InodeId, MetaError, MetaSlot, Name, PartitionId,
    Segment, SessionId, Timestamp, VolumeId, VolumeOptions,
};
use milpa_wire::meta::{
    Entry, MetaAnswer, MetaRead, MetaReply, MetaWrite, NewInode, Publish, RequestId,
};

use super::{Applied, Command, Outcome, Partition, PartitionSetup};

const ROOT: InodeId = InodeId::ROOT;
const ME: SessionId = SessionId(1);

fn partition(slot: u32) -> Partition {
    Partition::new(PartitionSetup {
        partition: PartitionId(100 + u64::from(slot)),
        volume: VolumeId(1),
        slot: MetaSlot(slot),
        options: VolumeOptions::default(),
    })
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn new_inode(kind: FileKind) -> NewInode {
    let target = if kind == FileKind::Symlink { b"there".to_vec() } else { Vec::new() };
    NewInode { kind, mode: 0o644, uid: 10, gid: 20, device: 0, target }
}

fn create(parent: InodeId, text: &str, kind: FileKind) -> MetaWrite {
    MetaWrite::Create {
        parent,
        name: name(text),
        inode: new_inode(kind),
        placement: None,
        open_existing: false,
        content: None,
    }
}

fn unlink(parent: InodeId, text: &str) -> MetaWrite {
    MetaWrite::Unlink { parent, name: name(text), held: false }
}

fn remove_directory(parent: InodeId, text: &str) -> MetaWrite {
    MetaWrite::RemoveDirectory { parent, name: name(text) }
}

fn rename(source: (InodeId, &str), target: (InodeId, &str)) -> MetaWrite {
    MetaWrite::Rename {
        source_parent: source.0,
        source_name: name(source.1),
        target_parent: target.0,
        target_name: name(target.1),
        no_replace: false,
        held: false,
    }
}

/// A plain segment of data partition 9.
fn segment(offset: u64, length: u64, extent: ExtentId, at: u64) -> Segment {
    Segment::plain(offset, length, Column { partition: PartitionId(9), extent, offset: at })
}

fn publish(inode: InodeId, truncation: u64, segments: Vec<Segment>) -> MetaWrite {
    MetaWrite::Publish(Publish {
        inode,
        truncation,
        base: None,
        size: segments.iter().map(Segment::end).max().unwrap_or(0),
        segments,
        inline: None,
        overwritten: Vec::new(),
        may_replace: true,
        modified: Timestamp(50),
        clear_set_id: false,
    })
}

/// One partition and clients that make one request after the other.
struct Solo {
    partition: Partition,
    sequence: u64,
}

impl Solo {
    fn new() -> Solo {
        let mut solo = Solo { partition: partition(0), sequence: 0 };
        solo.open(ME);
        solo
    }

    fn open(&mut self, session: SessionId) {
        assert_eq!(self.write_as(session, MetaWrite::OpenSession), Ok(MetaAnswer::Done));
    }

    fn apply(&mut self, command: &Command) -> Applied {
        self.partition.apply(self.partition.applied() + 1, command)
    }

    fn write_as(&mut self, session: SessionId, write: MetaWrite) -> MetaReply {
        self.sequence += 1;
        let id = RequestId { session, sequence: self.sequence, unanswered: self.sequence };
        let now = Timestamp(1000 + self.sequence as i64);
        match self.apply(&Command::Client { id, now, write }).outcome {
            Outcome::Reply(reply) => reply,
            Outcome::Deferred(operation) => panic!("deferred as {operation:?}"),
        }
    }

    fn write(&mut self, write: MetaWrite) -> MetaReply {
        self.write_as(ME, write)
    }

    fn entry(&mut self, write: MetaWrite) -> Entry {
        match self.write(write) {
            Ok(MetaAnswer::Entry(entry)) => entry,
            other => panic!("not an entry: {other:?}"),
        }
    }

    fn make(&mut self, parent: InodeId, text: &str, kind: FileKind) -> InodeId {
        self.entry(create(parent, text, kind)).inode
    }

    fn stat(&self, inode: InodeId) -> Result<Attributes, MetaError> {
        match self.partition.read(None, &MetaRead::GetAttributes { inode })? {
            MetaAnswer::Attributes(attributes) | MetaAnswer::Changed { attributes, .. } => {
                Ok(attributes)
            }
            other => panic!("not attributes: {other:?}"),
        }
    }

    fn find(&self, parent: InodeId, text: &str) -> Result<InodeId, MetaError> {
        match self.partition.read(None, &MetaRead::Lookup { parent, name: name(text) })? {
            MetaAnswer::Entry(entry) => Ok(entry.inode),
            other => panic!("not an entry: {other:?}"),
        }
    }
}
