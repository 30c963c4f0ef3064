//! A partition with a record in each table of a snapshot, and in the tables of operations and intents one of each kind.

use milpa_types::{
    Column, ExtentId, FileKind, InodeId, MetaSlot, Name, PartitionId, Segment, SessionId, Timestamp,
};
use milpa_wire::meta::{
    FlushedFile, LostExtent, MetaWrite, NewInode, OperationId, Publish, Step, StepOutcome,
};

use super::{SESSION, client, create, create_partition, tree};
use crate::core::Command;

/// Inodes of [`tree`], and the one after them.
const DIRECTORY: InodeId = InodeId(2);
const FILE: InodeId = InodeId(3);
const LARGE: InodeId = InodeId(5);
/// In the volume's next partition, which takes part in operations and coordinates some.
const ELSEWHERE: InodeId = InodeId(1 << 40 | 2);
const OTHER: PartitionId = PartitionId(4);

/// Its log. `None` stands in for a name that is none.
pub(super) fn filled() -> Option<Vec<Command>> {
    let mut log = tree();
    content(&mut log)?;
    coordinated(&mut log)?;
    prepared(&mut log)?;
    Some(log)
}

/// Appends a change; gives its log index, which is its sequence too.
fn write(log: &mut Vec<Command>, write: MetaWrite) -> u64 {
    let index = log.len() as u64 + 1;
    log.push(client(index, write));
    index
}

fn segment(offset: u64, extent: u64) -> Segment {
    let column = Column { partition: PartitionId(9), extent: ExtentId(extent), offset: 0 };
    Segment::plain(offset, 8192, column)
}

fn publish(segments: Vec<Segment>, truncation: u64) -> MetaWrite {
    MetaWrite::Publish(Publish {
        inode: LARGE,
        truncation,
        base: None,
        size: 0,
        segments,
        inline: None,
        overwritten: Vec::new(),
        may_replace: true,
        modified: Timestamp(1_700_000_001_000_000_000),
        clear_set_id: false,
    })
}

/// Segments, of which one is flushed; freed bytes; a file that is unlinked and held; a session that ended; a reply of
/// each kind.
fn content(log: &mut Vec<Command>) -> Option<()> {
    write(log, create(FileKind::File, b"large", None)?);
    write(log, publish(vec![segment(0, 1), segment(20_000, 1)], 0));
    let files = vec![FlushedFile { inode: LARGE, segments: vec![segment(0, 1)] }];
    write(log, MetaWrite::MarkFlushed { files });
    write(log, publish(vec![segment(4096, 2)], 0));
    write(log, publish(Vec::new(), 1));
    let lost = vec![LostExtent { partition: PartitionId(9), extent: ExtentId(1), length: 8192 }];
    write(log, MetaWrite::CutLostExtents { inode: LARGE, lost });
    write(log, MetaWrite::GrantInodes { count: 1 });
    write(log, create(FileKind::File, b"held", None)?);
    let (parent, name) = (InodeId::ROOT, Name::new(b"held").ok()?);
    write(log, MetaWrite::Unlink { parent, name, held: true });
    log.push(Command::ExpireSession { session: SessionId(6) });
    Some(())
}

/// Operations that this partition coordinates, with the names that they lock: one that prepares, one that is rolled
/// back, one that finishes.
fn coordinated(log: &mut Vec<Command>) -> Option<()> {
    let partition = create_partition().partition;
    write(log, create(FileKind::File, b"prepares", Some(MetaSlot(1)))?);
    let index = write(log, create(FileKind::Directory, b"aborts", Some(MetaSlot(1)))?);
    log.push(Command::AbortOperation { operation: OperationId { partition, index } });
    let rename = MetaWrite::Rename {
        source_parent: ELSEWHERE,
        source_name: Name::new(b"there").ok()?,
        target_parent: InodeId::ROOT,
        target_name: Name::new(b"here").ok()?,
        no_replace: true,
        held: false,
    };
    let operation = OperationId { partition, index: write(log, rename) };
    let taken = StepOutcome::Taken { inode: InodeId(ELSEWHERE.0 + 1), kind: FileKind::File };
    log.push(Command::Advance { operation, number: 0, outcome: Ok(taken) });
    Some(())
}

/// One intent of each kind, with the directory and the name that they lock; and an operation that has ended.
fn prepared(log: &mut Vec<Command>) -> Option<()> {
    let (kind, target) = (FileKind::File, Vec::new());
    let inode = NewInode { kind, mode: 0o644, uid: 1000, gid: 100, device: 0, target };
    let steps = [
        Step::PrepareInode { inode, parent: ELSEWHERE },
        Step::PrepareLink { inode: FILE },
        Step::PrepareRemoveDirectory { inode: DIRECTORY },
        Step::PrepareTake { parent: InodeId::ROOT, name: Name::new(b"symlink").ok()? },
        Step::DropLink { inode: FILE, held: Some(SESSION) },
        Step::Finish,
    ];
    log.extend((1..).zip(steps).map(|(index, step)| Command::Participate {
        operation: OperationId { partition: OTHER, index },
        now: Timestamp(1_700_000_002_000_000_000),
        step,
    }));
    Some(())
}
