use super::*;

#[test]
fn files_are_opened_as_asked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let kind = |how| File::open(&path, how).map(|_| ()).map_err(|error| error.kind());
    assert_eq!(kind(Open::Existing), Err(io::ErrorKind::NotFound));
    assert_eq!(kind(Open::Read), Err(io::ErrorKind::NotFound));
    assert_eq!(kind(Open::Private), Ok(()));
    assert_eq!(kind(Open::New), Err(io::ErrorKind::AlreadyExists));
    let file = File::open(&path, Open::Existing).unwrap();
    file.write_at(b"abc", 2).unwrap();
    assert_eq!(read(&path).unwrap(), b"\0\0abc");
    assert!(File::open(&path, Open::Read).unwrap().write_at(b"x", 0).is_err());
    assert_eq!(kind(Open::Empty), Ok(()));
    assert_eq!(file.length().unwrap(), 0);
}

#[test]
fn reads_end_at_the_end_and_holes_are_zeros() {
    let directory = tempfile::tempdir().unwrap();
    let file = File::open(&directory.path().join("a"), Open::New).unwrap();
    file.write_at(&[7; 64 << 10], 0).unwrap();
    let before = file.status().unwrap();
    file.punch(4096, 32 << 10).unwrap();
    file.sync().unwrap();
    let mut bytes = vec![1; 70_000];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 64 << 10);
    assert_eq!((bytes[4095], bytes[4096], bytes[36_864]), (7, 0, 7));
    let after = file.status().unwrap();
    assert_eq!((after.length, after.device), (before.length, before.device));
    assert!(after.allocated < before.allocated || before.allocated == 0);
}

#[test]
fn a_lock_has_one_holder() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("LOCK");
    let held = lock(&path).unwrap();
    assert_eq!(lock(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(held);
    lock(&path).unwrap();
}

#[test]
fn a_replaced_file_leaves_nothing_beside() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    for bytes in [&b"first"[..], b"2"] {
        replace(&path, bytes).unwrap();
        assert_eq!(read(&path).unwrap(), bytes);
    }
    assert_eq!(list(directory.path()).unwrap(), ["a"]);
    let status = status(&path).unwrap();
    assert_eq!(
        (status.length, status.device),
        (1, super::status(directory.path()).unwrap().device)
    );
}

#[test]
fn space_adds_up() {
    let directory = tempfile::tempdir().unwrap();
    let space = space(directory.path()).unwrap();
    assert!(space.total > 0 && space.free <= space.total && space.used <= space.total);
    assert!(super::space(&directory.path().join("absent")).is_err());
}
