//! What fsck asks: damaged tables are found out, sound ones never accused.

use milpa_wire::check::{Fault, FaultKind, Looked, MetaCheck, MetaChecked, MetaRepair};
use milpa_wire::meta::{OperationId, Step};

use super::*;
use crate::core::inode::Inode;
use crate::core::table::{Dentry, Number, SegmentRecord};

fn checked(partition: &Partition, check: &MetaCheck) -> MetaChecked {
    match partition.freeze().check(check) {
        Ok(MetaAnswer::Checked(checked)) => checked,
        other => panic!("not checked: {other:?}"),
    }
}

/// Everything that the partition finds out about itself, page by page.
pub(super) fn faults(partition: &Partition) -> Vec<Fault> {
    let (mut all, mut from) = (Vec::new(), InodeId(0));
    loop {
        let page = checked(partition, &MetaCheck::Inodes { from });
        let MetaChecked::Inodes { faults, next, .. } = page else { panic!("not a page") };
        all.extend(faults);
        match next {
            Some(next) => from = next,
            None => return all,
        }
    }
}

pub(super) fn look(partition: &Partition, inodes: &[InodeId]) -> Vec<Looked> {
    match checked(partition, &MetaCheck::Names { inodes: inodes.to_vec() }) {
        MetaChecked::Names(looked) => looked,
        other => panic!("not names: {other:?}"),
    }
}

/// A directory with a file of two names and two segments, one held open without a name, a symlink
/// and a file with its content in the inode.
struct Volume {
    solo: Solo,
    directory: InodeId,
    file: InodeId,
    held: InodeId,
}

fn volume() -> Volume {
    let mut solo = Solo::new();
    let directory = solo.make(ROOT, "d", FileKind::Directory);
    let file = solo.make(directory, "file", FileKind::File);
    let segments = vec![segment(0, 100, ExtentId(1), 0), segment(100, 50, ExtentId(2), 0)];
    solo.write(publish(file, 0, segments)).unwrap();
    let (inode, parent, name_of_it) = (file, ROOT, name("other"));
    solo.write(MetaWrite::Link { inode, parent, name: name_of_it }).unwrap();
    let held = solo.make(ROOT, "held", FileKind::File);
    solo.write(MetaWrite::Unlink { parent: ROOT, name: name("held"), held: true }).unwrap();
    solo.make(ROOT, "link", FileKind::Symlink);
    Volume { solo, directory, file, held }
}

#[track_caller]
fn check_fault(
    damage: impl FnOnce(&mut Partition, &Volume),
    inode: impl Fn(&Volume) -> InodeId,
    what: FaultKind,
) {
    let mut volume = volume();
    let mut damaged = volume.solo.partition.freeze();
    damage(&mut damaged, &volume);
    let expected = Fault { inode: inode(&volume), what };
    let found = faults(&damaged);
    assert!(found.contains(&expected), "{expected:?} is not among {found:?}");
    // The copy was damaged; the partition goes on, and is as it was.
    volume.solo.make(ROOT, "more", FileKind::File);
    assert_eq!(faults(&volume.solo.partition), []);
}

fn change(partition: &mut Partition, id: InodeId, change: impl FnOnce(&mut Inode)) {
    let mut inode = partition.tables.inodes.get(&id).unwrap();
    change(&mut inode);
    partition.tables.inodes.insert(&id, &inode);
}

#[test]
fn each_damage_is_found_out() {
    let root = |_: &Volume| ROOT;
    let file = |volume: &Volume| volume.file;
    let directory = |volume: &Volume| volume.directory;
    let ghost = InodeId(77);
    let dentry = Dentry { inode: ghost, kind: FileKind::File };

    check_fault(
        |p, v| change(p, v.directory, |it| it.size = 9),
        directory,
        FaultKind::WrongCounts { size: 9, entries: 1, link_count: 2, links: 2 },
    );
    check_fault(
        |p, _| change(p, ROOT, |it| it.link_count = 2),
        root,
        FaultKind::WrongCounts { size: 3, entries: 3, link_count: 2, links: 3 },
    );
    check_fault(|p, v| change(p, v.file, |it| it.link_count = 0), file, FaultKind::Abandoned);
    check_fault(
        |p, v| change(p, v.file, |it| it.allocated += 1),
        file,
        FaultKind::WrongAllocation { allocated: 151, counted: 150 },
    );
    check_fault(
        |p, v| change(p, v.file, |it| it.size = 120),
        file,
        FaultKind::ContentBeyondSize { size: 120, end: 150 },
    );
    check_fault(
        |p, v| change(p, v.file, |it| it.kind = FileKind::Fifo),
        file,
        FaultKind::WrongContent,
    );
    check_fault(
        |p, _| p.tables.dentries.insert(&(ghost, name("x")), &dentry),
        |_| ghost,
        FaultKind::NamesInNone { names: 1 },
    );
    check_fault(
        |p, v| p.tables.dentries.insert(&(v.file, name("x")), &dentry),
        file,
        FaultKind::NamesInNone { names: 1 },
    );
    let record = |length| SegmentRecord {
        length,
        columns: segment(0, 1, ExtentId(3), 0).columns,
        flushed: false,
    };
    check_fault(
        |p, v| p.tables.segments.insert(&(v.file, Number(140)), &record(60)),
        file,
        FaultKind::SegmentsOverlap { offset: 80 },
    );
    check_fault(
        |p, _| p.tables.segments.insert(&(ghost, Number(9)), &record(9)),
        |_| ghost,
        FaultKind::ContentOfNone { segments: 1 },
    );
    check_fault(
        |p, v| assert!(p.tables.held.remove(&(v.held, ME))),
        |v| v.held,
        FaultKind::Abandoned,
    );
    check_fault(
        |p, v| p.tables.held.insert(&(v.held, SessionId(9)), &()),
        |v| v.held,
        FaultKind::HeldByNobody { session: SessionId(9) },
    );
    check_fault(|p, _| p.tables.held.insert(&(ghost, ME), &()), |_| ghost, FaultKind::HeldButGone);
    check_fault(|p, v| p.counters.next_inode = v.held, |v| v.held, FaultKind::WrongId);
}

fn mend(partition: &mut Partition, repair: MetaRepair) -> MetaReply {
    let command = Command::Repair { now: Timestamp(99), repair };
    // Through the log's encoding, as in life.
    let command = Command::decode(&command.encode()).unwrap();
    match partition.apply(partition.applied() + 1, &command).outcome {
        Outcome::Reply(reply) => reply,
        Outcome::Deferred(_) => panic!("deferred"),
    }
}

fn changed(partition: &Partition, inode: InodeId) -> Timestamp {
    partition.tables.inodes.get(&inode).unwrap().changed
}

#[test]
fn what_is_safe_is_repaired_and_the_partition_is_sound_again() {
    let Volume { mut solo, directory, file, held } = volume();
    let p = &mut solo.partition;
    let ghost = InodeId(77);

    // Sums.
    change(p, directory, |it| (it.size, it.link_count) = (9, 9));
    change(p, file, |it| it.allocated = 7);
    let allocated = p.statistics().allocated_bytes;
    for inode in [directory, file] {
        assert_eq!(mend(p, MetaRepair::Recount { inode }), Ok(MetaAnswer::Done));
    }
    assert_eq!(p.statistics().allocated_bytes, allocated + 150 - 7);
    assert_eq!(faults(p), []);

    // Links, unless the inode has changed since.
    change(p, file, |it| it.link_count = 5);
    let links = |changed| MetaRepair::SetLinks { inode: file, changed, links: 2 };
    assert_eq!(mend(p, links(Timestamp(1))), Err(MetaError::Stale));
    let seen = changed(p, file);
    assert_eq!(mend(p, links(seen)), Ok(MetaAnswer::Done));
    assert_eq!(p.tables.inodes.get(&file).unwrap().link_count, 2);

    // A dangling name; not one whose inode is there.
    let key = (directory, name("ghost"));
    p.add_dentry(&key, Dentry { inode: ghost, kind: FileKind::Directory }, Timestamp(5));
    let remove = |text: &str, inode| MetaRepair::RemoveName { directory, name: name(text), inode };
    assert_eq!(mend(p, remove("file", file)), Err(MetaError::Stale));
    assert_eq!(mend(p, remove("ghost", ghost)), Ok(MetaAnswer::Done));
    assert_eq!(faults(p), []);

    // An inode without links that nobody holds; its bytes go to the free list. Not one that is held,
    // nor one that has content and a link.
    let delete =
        |p: &Partition, inode| MetaRepair::DeleteInode { inode, changed: changed(p, inode) };
    let repair = delete(p, held);
    assert_eq!(mend(p, repair.clone()), Err(MetaError::Invalid));
    p.tables.held.remove(&(held, ME));
    assert_eq!(mend(p, repair), Ok(MetaAnswer::Done));
    let repair = delete(p, file);
    assert_eq!(mend(p, repair), Err(MetaError::NotEmpty));
    p.tables.dentries.remove(&(directory, name("file")));
    p.tables.dentries.remove(&(ROOT, name("other")));
    change(p, file, |it| it.link_count = 0);
    let repair = delete(p, file);
    assert_eq!(mend(p, repair), Ok(MetaAnswer::Done));
    assert_eq!(p.statistics().freed_waiting, 2);
    for inode in [directory, ROOT] {
        assert_eq!(mend(p, MetaRepair::Recount { inode }), Ok(MetaAnswer::Done));
    }
    assert_eq!(faults(p), []);
}

#[test]
fn nothing_is_repaired_in_the_middle_of_an_operation() {
    let Volume { mut solo, file, .. } = volume();
    let operation = OperationId { partition: PartitionId(7), index: 3 };
    let step = Step::DropLink { inode: file, held: None };
    solo.apply(&Command::Participate { operation, now: Timestamp(9), step });
    let p = &mut solo.partition;
    let seen = changed(p, file);
    let repair = MetaRepair::SetLinks { inode: file, changed: seen, links: 1 };
    assert_eq!(mend(p, repair), Err(MetaError::Locked));
}

#[test]
fn names_are_told_with_what_is_known_of_the_inode() {
    let Volume { solo, directory, file, held } = volume();
    let found = look(&solo.partition, &[file, held, InodeId(99)]);
    assert_eq!(found[0].names, 2);
    let mut examples =
        vec![(directory, name("file"), FileKind::File), (ROOT, name("other"), FileKind::File)];
    examples.sort();
    assert_eq!(found[0].examples, examples);
    assert_eq!(found[0].inode.map(|inode| (inode.link_count, inode.is_held)), Some((2, false)));
    assert_eq!((found[1].names, found[1].inode.map(|inode| inode.is_held)), (0, Some(true)));
    assert_eq!(found[2], Looked::default());
}

#[test]
fn pages_of_all_kinds_together_hold_everything_once() {
    let mut solo = Solo::new();
    let count = 70_000;
    for i in 0..count {
        let file = solo.make(ROOT, &format!("{i}"), FileKind::File);
        if i % 2 == 0 {
            solo.write(publish(file, 0, vec![segment(0, 10, ExtentId(i % 9), i * 10)])).unwrap();
        }
    }
    let partition = &solo.partition;
    assert_eq!(faults(partition), []);
    let (mut inodes, mut from, mut pages) = (Vec::new(), Some(InodeId(0)), 0);
    while let Some(at) = from {
        let page = checked(partition, &MetaCheck::Inodes { from: at });
        let MetaChecked::Inodes { inodes: some, next, .. } = page else { panic!("not a page") };
        inodes.extend(some.iter().map(|inode| inode.inode.0));
        (from, pages) = (next, pages + 1);
    }
    assert!(inodes.iter().copied().eq(1..=count + 1) && pages > 1, "{pages} pages");

    let (mut named, mut after) = (Vec::new(), None);
    loop {
        let (first, last) = (InodeId(100), InodeId(60_000));
        let page = checked(partition, &MetaCheck::Dentries { after, first, last });
        let MetaChecked::Dentries { named: some, next } = page else { panic!("not a page") };
        named.extend(some.iter().map(|(inode, _)| inode.0));
        after = next;
        if after.is_none() {
            break;
        }
    }
    named.sort_unstable();
    assert!(named.iter().copied().eq(100..=60_000));

    let (first, last) = ((PartitionId(9), ExtentId(2)), (PartitionId(9), ExtentId(3)));
    let check = MetaCheck::Segments { after: None, first, last };
    let MetaChecked::Segments { found, next } = checked(partition, &check) else { panic!() };
    assert_eq!(next, None);
    let extent = |found: &(InodeId, Segment)| found.1.column().unwrap().extent.0;
    assert!(found.iter().all(|found| (2..=3).contains(&extent(found))));
    assert_eq!(
        found.len(),
        (0..count).filter(|i| i % 2 == 0 && (2..=3).contains(&(i % 9))).count()
    );
}
