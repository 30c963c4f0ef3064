//! `check` against servers that answer what a test wants them to, at the moment that it wants.

// Tests: the world outside the nodes (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
// Test code: a panic is how a check fails, and helpers check too.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use milpa_fsck::Code;
use milpa_types::{ExtentId, FileKind, FreedRange, InodeId, MetaSlot};
use milpa_wire::check::{Fault, FaultKind, MetaCheck, MetaRepair};
use milpa_wire::meta::{MetaRequest, Verdict};

use fake::{DATA, Volume, check};

/// The first inode that the partition of slot 1 gives.
fn first_of_slot_1() -> InodeId {
    MetaSlot(1).first_inode()
}

fn is_dentries(request: &MetaRequest) -> bool {
    matches!(request, MetaRequest::Check { check: MetaCheck::Dentries { .. }, .. })
}

fn is_look(request: &MetaRequest) -> bool {
    matches!(request, MetaRequest::Check { check: MetaCheck::Names { .. }, .. })
}

/// A meta partition became full while the volume was checked, and a new one opened. A directory that was
/// placed there was looked for in the partitions of before only: `missing-inode`, and `--repair` took its
/// name away from everything below it.
#[test]
fn a_directory_in_a_partition_that_opens_during_the_check_keeps_its_name() {
    let (report, left) = check(Volume::new(), |request, volume| {
        if is_dentries(request) && volume.partitions == 1 {
            volume.partitions = 2;
            volume.inodes.insert(first_of_slot_1(), FileKind::Directory);
            volume.name("new", first_of_slot_1());
        }
    });
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(left.repairs, []);
}

/// The same for what moves: its only name is in a directory of the new partition.
#[test]
fn a_name_that_moves_to_a_partition_that_opens_during_the_check_is_found() {
    let (old, mut volume) = (InodeId(InodeId::ROOT.0 + 1), Volume::new());
    volume.inodes.insert(old, FileKind::Directory);
    volume.name("old", old);
    let (report, left) = check(volume, move |request, volume| {
        if is_dentries(request) && volume.partitions == 1 {
            volume.partitions = 2;
            volume.inodes.insert(first_of_slot_1(), FileKind::Directory);
            let named = std::mem::take(&mut volume.names);
            volume.name("new", first_of_slot_1());
            let moved = named.into_iter().map(|((_, name), it)| ((first_of_slot_1(), name), it));
            volume.names.extend(moved);
        }
    });
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(left.repairs, []);
}

/// Nobody can say of an inode that it is not there but its own partition.
#[test]
fn an_inode_of_a_partition_that_nobody_knows_is_not_judged() {
    let mut volume = Volume::new();
    volume.name("far", first_of_slot_1());
    let (report, left) = check(volume, |_, _| {});
    assert_eq!((report.findings.len(), report.unjudged), (0, 1), "{report:?}");
    assert_eq!(left.repairs, []);
}

#[test]
fn a_name_of_an_inode_that_is_gone_is_removed_unless_the_last_look_finds_another_state() {
    let gone = InodeId(InodeId::ROOT.0 + 1);
    let ruined = || {
        let mut volume = Volume::new();
        volume.inodes.insert(InodeId(gone.0 + 1), FileKind::Directory);
        volume.name("there", InodeId(gone.0 + 1));
        volume.name("gone", gone);
        volume
    };
    let (report, left) = check(ruined(), |_, _| {});
    assert_eq!(report.findings[0].code, Code::MissingInode, "{report:?}");
    assert_eq!(report.findings[0].repair.as_deref(), Some("repaired: name removed"));
    assert_eq!(left.repairs.len(), 1);

    let looks = Rc::new(Cell::new(0));
    let (report, left) = check(ruined(), move |request, volume| {
        looks.set(looks.get() + u32::from(is_look(request)));
        // Three of the judgement, one for the path.
        if looks.get() > 4 {
            volume.inodes.insert(gone, FileKind::Directory);
        }
    });
    assert_eq!(report.findings[0].code, Code::MissingInode, "{report:?}");
    assert_eq!(report.findings[0].repair.as_deref(), Some("not repaired: it is not so any more"));
    assert_eq!(left.repairs, []);
}

/// An hour of findings was thrown away, and what was repaired not told, when a server did not answer one of
/// the later questions.
#[test]
fn what_was_found_before_the_check_was_cut_off_is_reported_and_repaired() {
    let mut volume = Volume::new();
    let inode = InodeId::ROOT;
    let what = FaultKind::WrongAllocation { allocated: 1, counted: 2 };
    volume.faults.push(Fault { inode, what });
    volume.has_strange_content = true;
    let (report, left) = check(volume, |_, _| {});
    assert!(!report.is_clean());
    assert_eq!(report.incomplete.as_deref(), Some("partition 1 answered something else"));
    assert_eq!(report.findings.len(), 1, "{report:?}");
    assert_eq!(report.findings[0].path.as_deref(), Some("/"));
    assert_eq!(report.findings[0].repair.as_deref(), Some("repaired: counted anew"));
    assert_eq!(left.repairs, [MetaRepair::Recount { inode }]);
}

/// The others of several volumes are checked all the same.
#[test]
fn a_volume_whose_managers_say_no_has_a_report_that_says_so() {
    let mut volume = Volume::new();
    volume.partitions = 0;
    let (report, _) = check(volume, |_, _| {});
    assert_eq!((report.volume.as_str(), report.findings.len()), ("home", 0));
    let why = report.incomplete.unwrap();
    assert!(why.starts_with("the managers did not answer: "), "{why}");
}

/// Three replicas of five are few, whatever is usual.
#[test]
fn a_meta_partition_has_as_many_replicas_as_the_managers_want() {
    let mut volume = Volume::new();
    volume.meta_replicas = 5;
    let (report, _) = check(volume, |_, _| {});
    assert_eq!(report.findings.len(), 1, "{report:?}");
    assert_eq!(report.findings[0].code, Code::FewReplicas);
    assert_eq!(report.findings[0].text, "meta partition 1 has 3 of 5 replicas");
}

fn is_offers(request: &MetaRequest) -> bool {
    matches!(request, MetaRequest::Check { check: MetaCheck::Offers { .. }, .. })
}

/// Extents 1 and 2 of an inode that was deleted, extent 3 of one that nobody could have given.
fn with_strays() -> Volume {
    let mut volume = Volume::new();
    let gone = InodeId(InodeId::ROOT.0 + 1);
    volume.extent(1, gone, 1000);
    volume.extent(2, gone, 100);
    volume.freed.push(FreedRange { partition: DATA, extent: ExtentId(2), offset: 0, length: 40 });
    volume.extent(3, first_of_slot_1(), 7);
    volume.patience = Duration::from_secs(1);
    volume
}

/// Bytes that no file refers to, and that were on nobody's list, took space for ever; no check said so.
#[test]
fn bytes_that_no_file_refers_to_and_nobody_frees_are_found() {
    let (report, left) = check(with_strays(), |_, _| {});
    let counts = report.counts;
    assert_eq!((counts.extents, counts.unreferenced, counts.unreferenced_bytes), (3, 3, 1107));
    let found: Vec<_> = report.findings.iter().map(|it| (it.code, it.inode)).collect();
    let gone = InodeId(InodeId::ROOT.0 + 1);
    let expected = [(Code::StrayBytes, Some(gone)), (Code::StrayBytes, Some(first_of_slot_1()))];
    assert_eq!(found, expected, "{report:?}");
    let [deleted, never] = &report.findings[..] else { panic!("{report:?}") };
    assert!(deleted.text.starts_with("1060 bytes in 2 extents (first extent "), "{deleted}");
    assert!(deleted.text.contains("on nodes 4, 5, 6) that no file refers to"), "{deleted}");
    assert!(deleted.text.contains("nobody has freed them in "), "{deleted}");
    assert!(never.text.contains("no meta partition for this inode"), "{never}");
    for finding in &report.findings {
        let repair = finding.repair.as_deref().unwrap();
        assert!(repair.starts_with("not repaired: "), "{repair}");
    }
    assert_eq!(left.repairs, []);
}

/// What the ways out of a data node look like from outside, each while it is open.
#[test]
fn bytes_that_somebody_may_use_or_free_are_no_findings() {
    // Files refer to them by now, or a writer that lives may make them part of one.
    let mut volume = with_strays();
    volume.partitions = 2;
    volume.wanted.insert(ExtentId(1), Verdict::Wait);
    volume.wanted.insert(ExtentId(2), Verdict::Keep);
    volume.wanted.insert(ExtentId(3), Verdict::Wait);
    let (report, _) = check(volume, |_, _| {});
    assert!(report.is_clean() && report.counts.unreferenced == 3, "{report:?}");

    // They wait to be freed, longer than anybody waits for an offer.
    let mut volume = with_strays();
    volume.partitions = 2;
    volume.freed_waiting = 1;
    let (report, _) = check(volume, |_, _| {});
    assert!(report.is_clean(), "{report:?}");

    // Data nodes offer them within the usual time, and they go; of one the bytes, and not the extent.
    let mut volume = with_strays();
    volume.partitions = 2;
    volume.patience = Duration::from_secs(600);
    let looks = Cell::new(0);
    let (report, _) = check(volume, move |request, volume| {
        looks.set(looks.get() + u32::from(is_offers(request)));
        if looks.get() == 6 {
            volume.extents.retain(|state| state.extent == ExtentId(1));
            let extent = ExtentId(1);
            volume.freed.push(FreedRange { partition: DATA, extent, offset: 0, length: u64::MAX });
        }
    });
    assert!(report.is_clean(), "{report:?}");
}
