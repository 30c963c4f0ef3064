//! Decoding tables.

use super::*;
use crate::abi::{FileLockRaw, LkIn, Plain};

#[test]
fn setattr_takes_only_what_is_valid() {
    let raw = SetattrIn {
        valid: valid::SIZE | valid::MTIME | valid::ATIME | valid::ATIME_NOW | valid::FH,
        fh: 7,
        size: 99,
        mtime: 5,
        mtimensec: 6,
        mode: 0o777,
        ..SetattrIn::default()
    };
    let expected = SetAttr {
        size: Some(99),
        fh: Some(7),
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::At(Time { seconds: 5, nanoseconds: 6 })),
        ..SetAttr::default()
    };
    assert_eq!(SetAttr::decode(&mut Reader::new(raw.as_bytes())), Ok(expected));
}

#[test]
fn flock_and_posix_locks_are_told_apart() {
    for (lk_flags, is_flock) in [(0, false), (bits::LK_FLOCK, true)] {
        let raw = LkIn { fh: 1, owner: 2, lk_flags, ..LkIn::default() };
        let lock = Lock::decode(&mut Reader::new(raw.as_bytes()), true).unwrap();
        assert_eq!((lock.is_flock, lock.wait), (is_flock, true));
        assert_eq!(lock.lock.kind, LockKind::Read);
    }
}

#[test]
fn an_unknown_lock_type_is_refused() {
    let lk = FileLockRaw { kind: 3, ..FileLockRaw::default() };
    let raw = LkIn { lk, ..LkIn::default() };
    assert!(Lock::decode(&mut Reader::new(raw.as_bytes()), false).is_err());
}

#[test]
fn write_refuses_data_of_another_length() {
    let raw = WriteIn { size: 4, ..WriteIn::default() };
    for length in [0_usize, 3, 5] {
        let body = [raw.as_bytes(), &vec![1; length]].concat();
        assert!(Write::decode(&mut Reader::new(&body)).is_err(), "{length}");
    }
    let body = [raw.as_bytes(), b"data"].concat();
    assert_eq!(Write::decode(&mut Reader::new(&body)).unwrap().data, b"data");
}

#[test]
fn setxattr_has_two_forms() {
    let long = [SetxattrIn { size: 2, ..SetxattrIn::default() }.as_bytes(), b"user.a\0vv"].concat();
    let short = [SetxattrCompatIn { size: 2, flags: 1 }.as_bytes(), b"user.a\0vv"].concat();
    for (body, extended) in [(long, true), (short, false)] {
        let decoded = Setxattr::decode(&mut Reader::new(&body), extended).unwrap();
        assert_eq!((decoded.name, decoded.value), (OsStr::new("user.a"), &b"vv"[..]));
    }
}

#[test]
fn rename_reads_two_names() {
    let raw = Rename2In { newdir: 9, flags: libc::RENAME_NOREPLACE, padding: 0 };
    let body = [raw.as_bytes(), b"from\0to\0"].concat();
    let rename = Rename::decode2(&mut Reader::new(&body)).unwrap();
    assert_eq!((rename.name, rename.new_name), (OsStr::new("from"), OsStr::new("to")));
    assert_eq!((rename.new_parent, rename.flags), (9, libc::RENAME_NOREPLACE));
    let cut = [raw.as_bytes(), b"from\0"].concat();
    assert!(Rename::decode2(&mut Reader::new(&cut)).is_err());
}

#[test]
fn a_forget_list_ends_with_the_bytes_even_if_the_count_lies() {
    let body = [ForgetOne { nodeid: 1, nlookup: 2 }.as_bytes(), &[0; 15]].concat();
    let forgets: Vec<Forget> = Forgets::new(Reader::new(&body), u32::MAX).collect();
    assert_eq!(forgets, [Forget { nodeid: 1, count: 2 }]);
}
