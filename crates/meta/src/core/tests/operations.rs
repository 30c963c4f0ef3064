//! Each operation's errno and effects, as Linux has them.

use milpa_types::AttributeChanges;

use super::*;
use FileKind::{Directory, File, Symlink};
use MetaError as E;

/// A tree with one of everything: `d/` (with `d/f`), `e/` (empty), `f`, `s`.
struct Tree {
    solo: Solo,
    d: InodeId,
    e: InodeId,
    f: InodeId,
}

fn tree() -> Tree {
    let mut solo = Solo::new();
    let d = solo.make(ROOT, "d", Directory);
    let e = solo.make(ROOT, "e", Directory);
    let f = solo.make(ROOT, "f", File);
    solo.make(ROOT, "s", Symlink);
    solo.make(d, "f", File);
    Tree { solo, d, e, f }
}

#[track_caller]
fn refused(write: impl Fn(&Tree) -> MetaWrite, expected: MetaError) {
    let mut tree = tree();
    let before = tree.solo.partition.statistics();
    let write = write(&tree);
    assert_eq!(tree.solo.write(write.clone()), Err(expected), "{write:?}");
    assert_eq!(tree.solo.partition.statistics(), before, "a refusal changes nothing");
}

#[test]
fn refusals_table() {
    let link = |inode, parent, text: &str| MetaWrite::Link { inode, parent, name: name(text) };
    refused(|_| create(ROOT, "f", File), E::Exists);
    refused(|_| create(ROOT, "d", Directory), E::Exists);
    refused(|t| create(t.f, "x", File), E::NotDirectory);
    refused(|_| create(InodeId(999), "x", File), E::Stale);
    refused(|_| create(InodeId(1 << 40), "x", File), E::WrongPartition);
    refused(|t| link(t.f, ROOT, "s"), E::Exists);
    refused(|t| link(t.d, ROOT, "x"), E::NotPermitted);
    refused(|_| link(InodeId(999), ROOT, "x"), E::Stale);
    refused(|_| unlink(ROOT, "x"), E::NotFound);
    refused(|_| unlink(ROOT, "d"), E::IsDirectory);
    refused(|t| unlink(t.f, "x"), E::NotDirectory);
    refused(|_| remove_directory(ROOT, "x"), E::NotFound);
    refused(|_| remove_directory(ROOT, "f"), E::NotDirectory);
    refused(|_| remove_directory(ROOT, "d"), E::NotEmpty);
    refused(|_| rename((ROOT, "x"), (ROOT, "y")), E::NotFound);
    refused(|_| rename((ROOT, "e"), (ROOT, "d")), E::NotEmpty);
    refused(|_| rename((ROOT, "f"), (ROOT, "e")), E::IsDirectory);
    refused(|_| rename((ROOT, "e"), (ROOT, "f")), E::NotDirectory);
    refused(|t| rename((ROOT, "d"), (t.d, "x")), E::Loop);
    refused(|t| rename((ROOT, "d"), (t.d, "f")), E::Loop);
    refused(|_| MetaWrite::GrantInodes { count: 0 }, E::Invalid);
    let size = |inode, size| MetaWrite::SetAttributes {
        inode,
        changes: AttributeChanges { size: Some(size), ..Default::default() },
    };
    refused(|t| size(t.d, 0), E::IsDirectory);
    refused(|t| size(t.f, u64::MAX), E::TooLarge);
    refused(|_| size(InodeId(999), 0), E::Stale);
}

#[test]
fn malformed_inodes_are_refused() {
    for (kind, target, content) in [
        (File, 1, None),
        (Symlink, 0, None),
        (Symlink, 4096, None),
        (Directory, 0, Some(1)),
        (File, 0, Some(4097)),
    ] {
        let mut solo = Solo::new();
        let inode = NewInode { target: vec![b'x'; target], ..new_inode(kind) };
        let content = content.map(|length| vec![0; length]);
        let write = MetaWrite::Create {
            parent: ROOT,
            name: name("x"),
            inode,
            placement: None,
            open_existing: false,
            content,
        };
        assert_eq!(solo.write(write), Err(E::Invalid), "{kind:?} with a target of {target}");
        assert_eq!(solo.partition.statistics().inodes, 1);
    }
}

#[test]
fn directories_count_their_entries_and_subdirectories() {
    let mut t = tree();
    let root = t.solo.stat(ROOT).unwrap();
    assert_eq!((root.size, root.link_count), (4, 4));
    t.solo.write(rename((ROOT, "e"), (t.d, "e"))).unwrap();
    let (root, d) = (t.solo.stat(ROOT).unwrap(), t.solo.stat(t.d).unwrap());
    assert_eq!((root.size, root.link_count, d.size, d.link_count), (3, 3, 2, 3));
    assert_eq!((root.modified, d.changed), (d.modified, d.modified), "one clock, one entry");
    t.solo.write(remove_directory(t.d, "e")).unwrap();
    let d = t.solo.stat(t.d).unwrap();
    assert_eq!((d.size, d.link_count), (1, 2));
    assert_eq!(t.solo.stat(t.e), Err(E::Stale));
}

#[test]
fn rename_replaces() {
    let mut t = tree();
    let inner = t.solo.find(t.d, "f").unwrap();
    t.solo.write(rename((ROOT, "f"), (t.d, "f"))).unwrap();
    assert_eq!(t.solo.find(t.d, "f"), Ok(t.f));
    assert_eq!(t.solo.find(ROOT, "f"), Err(E::NotFound));
    assert_eq!(t.solo.stat(inner), Err(E::Stale), "what was replaced is gone");
    t.solo.write(rename((ROOT, "d"), (ROOT, "e"))).unwrap();
    assert_eq!(t.solo.find(ROOT, "e"), Ok(t.d));
    assert_eq!(t.solo.stat(t.e), Err(E::Stale));
    assert_eq!(t.solo.stat(ROOT).unwrap().link_count, 3);
}

#[test]
fn rename_onto_another_name_of_the_same_inode_does_nothing() {
    let mut t = tree();
    t.solo.entry(MetaWrite::Link { inode: t.f, parent: t.d, name: name("g") });
    let before = t.solo.stat(t.f).unwrap();
    assert_eq!(t.solo.write(rename((ROOT, "f"), (t.d, "g"))), Ok(MetaAnswer::Done));
    assert_eq!(t.solo.stat(t.f), Ok(before));
    assert_eq!(t.solo.find(ROOT, "f"), Ok(t.f), "rename(2): both names remain");
}

#[test]
fn rename_without_replacing_is_refused_if_the_name_exists() {
    let mut t = tree();
    let write = |target: &str| MetaWrite::Rename {
        source_parent: ROOT,
        source_name: name("f"),
        target_parent: ROOT,
        target_name: name(target),
        no_replace: true,
        held: false,
    };
    assert_eq!(t.solo.write(write("s")), Err(E::Exists));
    assert_eq!(t.solo.write(write("n")), Ok(MetaAnswer::Done));
}

#[test]
fn loops_are_seen_however_deep() {
    let mut solo = Solo::new();
    let mut path = vec![(ROOT, solo.make(ROOT, "a", Directory))];
    for _ in 0..20 {
        let parent = path.last().unwrap().1;
        path.push((parent, solo.make(parent, "a", Directory)));
    }
    let deepest = path.last().unwrap().1;
    for (parent, _) in &path {
        assert_eq!(solo.write(rename((*parent, "a"), (deepest, "x"))), Err(E::Loop));
    }
    // After a move to the top, its old ancestors may go below it.
    solo.write(rename((path[19].0, "a"), (ROOT, "b"))).unwrap();
    assert_eq!(solo.write(rename((ROOT, "a"), (deepest, "x"))), Ok(MetaAnswer::Done));
}

#[test]
fn links_are_counted_and_bounded() {
    let mut solo = Solo::new();
    let f = solo.make(ROOT, "f", File);
    for i in 2..=super::super::inode::LINKS_MAX {
        solo.entry(MetaWrite::Link { inode: f, parent: ROOT, name: name(&format!("l{i}")) });
    }
    let one_more = MetaWrite::Link { inode: f, parent: ROOT, name: name("x") };
    assert_eq!(solo.write(one_more), Err(E::TooManyLinks));
    assert_eq!(solo.stat(f).unwrap().link_count, 65_535);
}

#[test]
fn open_with_create_returns_what_exists() {
    let mut t = tree();
    let open = |text: &str| MetaWrite::Create {
        parent: ROOT,
        name: name(text),
        inode: new_inode(File),
        placement: None,
        open_existing: true,
        content: None,
    };
    assert_eq!(t.solo.entry(open("f")).inode, t.f);
    assert_eq!(t.solo.write(open("d")), Err(E::Exists));
    assert_eq!(t.solo.write(open("s")), Err(E::Exists), "the kernel follows it");
}

#[test]
fn children_of_a_set_group_id_directory_take_its_group() {
    let mut t = tree();
    let changes =
        AttributeChanges { mode: Some(0o2775), gid: Some(77), ..AttributeChanges::default() };
    t.solo.write(MetaWrite::SetAttributes { inode: t.d, changes }).unwrap();
    let (file, sub) = (t.solo.make(t.d, "x", File), t.solo.make(t.d, "y", Directory));
    let (file, sub) = (t.solo.stat(file).unwrap(), t.solo.stat(sub).unwrap());
    assert_eq!((file.gid, file.mode), (77, 0o644));
    assert_eq!((sub.gid, sub.mode), (77, 0o2644));
}

#[test]
fn set_attributes_changes_what_is_named_and_the_change_time() {
    let mut t = tree();
    let changes = AttributeChanges { uid: Some(5), clear_set_id: true, ..Default::default() };
    let mode = AttributeChanges { mode: Some(0o6755), ..Default::default() };
    t.solo.write(MetaWrite::SetAttributes { inode: t.f, changes: mode }).unwrap();
    let before = t.solo.stat(t.f).unwrap();
    t.solo.write(MetaWrite::SetAttributes { inode: t.f, changes }).unwrap();
    let after = t.solo.stat(t.f).unwrap();
    assert_eq!((after.uid, after.gid, after.mode), (5, before.gid, 0o755));
    assert!(after.changed > before.changed);
    assert_eq!((after.modified, after.accessed), (before.modified, before.accessed));
}

#[test]
fn directories_are_read_in_pages() {
    let mut solo = Solo::new();
    for i in 0..1000 {
        solo.make(ROOT, &format!("{i:04}"), File);
    }
    let (mut names, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let read =
            MetaRead::ReadDirectory { parent: ROOT, after, limit: 64, with_attributes: true };
        let Ok(MetaAnswer::Page { entries, end }) = solo.partition.read(None, &read) else {
            panic!("not a page")
        };
        assert!(entries.len() <= 64 && entries.iter().all(|entry| entry.attributes.is_some()));
        names.extend(entries.iter().map(|entry| entry.name.to_string()));
        after = entries.last().map(|entry| entry.name.clone());
        pages += 1;
        if end {
            break;
        }
    }
    assert_eq!(pages, 16);
    assert!(
        names.iter().map(String::as_str).eq((0..1000)
            .map(|i| format!("{i:04}"))
            .collect::<Vec<_>>()
            .iter()
            .map(String::as_str))
    );
}

#[test]
fn a_split_partition_takes_no_new_inodes() {
    let mut t = tree();
    let highest = t.solo.partition.statistics().inode_highest;
    t.solo.apply(&Command::Split { end: InodeId(highest.0 + 1) });
    t.solo.make(ROOT, "last", File);
    assert_eq!(t.solo.write(create(ROOT, "x", File)), Err(E::PartitionFull));
    assert_eq!(t.solo.write(MetaWrite::GrantInodes { count: 1 }), Err(E::PartitionFull));
    t.solo.apply(&Command::Split { end: InodeId(highest.0 + 100) });
    assert_eq!(t.solo.write(create(ROOT, "x", File)), Err(E::PartitionFull), "never widened");
    assert!(t.solo.write(unlink(ROOT, "f")).is_ok());
}

#[test]
fn granted_ids_are_given_to_nobody_else() {
    let mut solo = Solo::new();
    let granted = solo.write(MetaWrite::GrantInodes { count: 10 });
    assert_eq!(granted, Ok(MetaAnswer::Granted { first: InodeId(2) }));
    assert_eq!(solo.make(ROOT, "f", File), InodeId(12));
}
