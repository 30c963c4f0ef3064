//! Names: directories, links and renames, also across partitions and mounts.

use std::collections::BTreeSet;
use std::fs::{OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;

use milpa_testbed::Testbed;

use crate::system;

fn errno(result: std::io::Result<()>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn the_usual_operations_and_their_errors() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let at = |name: &str| mount.path.join(name);
    std::fs::create_dir(at("d")).unwrap();
    assert_eq!(errno(std::fs::create_dir(at("d"))), Some(libc::EEXIST));
    std::fs::write(at("d/f"), "f").unwrap();
    assert_eq!(errno(std::fs::remove_dir(at("d"))), Some(libc::ENOTEMPTY));
    assert_eq!(errno(std::fs::remove_file(at("d"))), Some(libc::EISDIR));
    assert_eq!(errno(std::fs::remove_dir(at("d/f"))), Some(libc::ENOTDIR));
    assert_eq!(std::fs::read(at("none")).unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::hard_link(at("d/f"), at("g")).unwrap();
    assert_eq!(std::fs::metadata(at("g")).unwrap().nlink(), 2);
    std::os::unix::fs::symlink("d/f", at("s")).unwrap();
    assert_eq!(std::fs::read_to_string(at("s")).unwrap(), "f");
    std::fs::rename(at("g"), at("h")).unwrap();
    std::fs::write(at("i"), "i").unwrap();
    std::fs::rename(at("i"), at("h")).unwrap();
    assert_eq!(std::fs::read_to_string(at("h")).unwrap(), "i");
    assert_eq!(std::fs::metadata(at("d/f")).unwrap().nlink(), 1);
    std::fs::create_dir(at("e")).unwrap();
    assert_eq!(errno(std::fs::rename(at("e"), at("d"))), Some(libc::ENOTEMPTY));
    assert_eq!(errno(std::fs::rename(at("d"), at("d/x"))), Some(libc::EINVAL));
    std::fs::rename(at("d"), at("e")).unwrap();
    assert_eq!(std::fs::read_to_string(at("e/f")).unwrap(), "f");
    assert_eq!(errno(std::fs::write(at(&"n".repeat(256)), "")), Some(libc::ENAMETOOLONG));
    std::fs::write(at(&"n".repeat(255)), "").unwrap();
}

#[test]
fn directories_spread_over_partitions_and_renames_cross_them() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut slots = BTreeSet::new();
    for n in 0..12 {
        let directory = one.path.join(format!("d{n}"));
        std::fs::create_dir(&directory).unwrap();
        slots.insert(std::fs::metadata(&directory).unwrap().ino() >> 40);
        std::fs::write(directory.join("file"), format!("{n}")).unwrap();
    }
    assert!(slots.len() > 1, "all directories went to partition {slots:?}");
    // Files and directories move round the ring of directories.
    for n in 0..12 {
        let (from, to) =
            (one.path.join(format!("d{n}")), one.path.join(format!("d{}", (n + 1) % 12)));
        std::fs::rename(from.join("file"), to.join(format!("from{n}"))).unwrap();
        std::fs::create_dir(from.join("sub")).unwrap();
        std::fs::rename(from.join("sub"), to.join(format!("sub{n}"))).unwrap();
    }
    for n in 0..12 {
        let directory = two.path.join(format!("d{}", (n + 1) % 12));
        assert_eq!(
            std::fs::read_to_string(directory.join(format!("from{n}"))).unwrap(),
            n.to_string()
        );
        assert!(directory.join(format!("sub{n}")).is_dir());
        assert_eq!(std::fs::metadata(&directory).unwrap().nlink(), 3, "d{n}");
    }
    std::fs::remove_dir_all(one.path.join("d0")).unwrap();
    assert_eq!(std::fs::read_dir(&two.path).unwrap().count(), 11);
}

#[test]
fn a_large_directory_lists_every_name_once() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("large");
    std::fs::create_dir(&directory).unwrap();
    let count = 5_000;
    for n in 0..count {
        std::fs::File::create(directory.join(format!("name-{n:06}"))).unwrap();
    }
    let names: BTreeSet<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), count);
    assert_eq!(list_long(&directory), count);
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(!directory.exists());
}

/// The story: who removes names while it lists them has the kernel ask for attributes from the middle of a page on.
/// The page was read again from its start and counted through to there; as many names as were gone from it were
/// left out, and the directory was not empty in the end.
#[test]
fn names_that_are_removed_while_they_are_listed_hide_no_others() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    std::fs::create_dir(one.path.join("large")).unwrap();
    let count = 2_000;
    // Long, so that a page does not fit into what one system call takes.
    let path = &|n: usize| one.path.join(format!("large/{n:0250}"));
    std::thread::scope(|scope| {
        for thread in 0..10 {
            let mine = (thread..count).step_by(10);
            scope.spawn(move || mine.for_each(|n| drop(std::fs::File::create(path(n)).unwrap())));
        }
    });
    // Where the kernel knows none of the names.
    let directory = two.path.join("large");
    let mut left = BTreeSet::new();
    for (n, entry) in std::fs::read_dir(&directory).unwrap().enumerate() {
        let name = entry.unwrap().file_name();
        // The first page is left alone, so that the second is asked for without attributes.
        if n >= 1_200 && n % 2 == 0 {
            std::fs::remove_file(directory.join(name)).unwrap();
        } else {
            left.insert(name);
        }
    }
    assert_eq!(left.len(), 1_200 + (count - 1_200) / 2, "seen and still there");
    for name in left {
        std::fs::remove_file(directory.join(name)).unwrap();
    }
    std::fs::remove_dir(&directory).unwrap();
}

/// Found by a reader: the kernel was told of an entry what had been so when its page was read. A file that was written to
/// meanwhile, through the same mount, ended where it had ended then.
#[test]
fn a_listing_that_takes_long_takes_back_no_change() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let directory = mount.path.join("large");
    std::fs::create_dir(&directory).unwrap();
    // Long, so that a page does not fit into what one system call takes.
    let path = |n: usize| directory.join(format!("{n:0250}"));
    (0..900).for_each(|n| std::fs::write(path(n), "old").unwrap());
    let mut entries = std::fs::read_dir(&directory).unwrap();
    for entry in entries.by_ref().take(20) {
        entry.unwrap().metadata().unwrap();
    }
    std::fs::write(path(800), vec![7; 10_000]).unwrap();
    std::fs::rename(path(801), path(802)).unwrap();
    let renamed = std::fs::metadata(path(802)).unwrap().ino();
    for entry in entries {
        // Attributes are wanted, so the kernel asks for them with the names.
        std::fs::metadata(entry.unwrap().path()).ok();
        assert_eq!(std::fs::metadata(path(800)).unwrap().len(), 10_000);
        assert!(std::fs::metadata(path(801)).is_err());
        assert_eq!(std::fs::metadata(path(802)).unwrap().ino(), renamed);
    }
    assert_eq!(std::fs::read(path(800)).unwrap(), vec![7; 10_000]);
}

fn list_long(directory: &Path) -> usize {
    let output = std::process::Command::new("ls").arg("-l").arg(directory).output().unwrap();
    assert!(output.status.success());
    // The first line is the total.
    String::from_utf8_lossy(&output.stdout).lines().count() - 1
}

#[test]
fn a_name_that_another_mount_made_is_there_at_once() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    for n in 0..10 {
        let name = format!("f{n}");
        assert!(!one.path.join(&name).exists());
        std::fs::write(two.path.join(&name), &name).unwrap();
        assert_eq!(std::fs::read_to_string(one.path.join(&name)).unwrap(), name);
    }
}

/// As git does with its refs. A file that is replaced while it is read is stale: another mount's descriptors do
/// not hold it.
#[test]
fn a_file_that_another_mount_replaces_can_always_be_opened() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    std::fs::write(two.path.join("ref"), "0").unwrap();
    let (mut last, mut seen) = (0, BTreeSet::new());
    for n in 1..100_u32 {
        std::fs::write(two.path.join("ref.lock"), n.to_string()).unwrap();
        std::fs::rename(two.path.join("ref.lock"), two.path.join("ref")).unwrap();
        let file = std::fs::File::open(one.path.join("ref")).unwrap();
        let value: u32 = std::io::read_to_string(file).unwrap().parse().unwrap();
        assert!(value >= last && value <= n, "{value} after {last}, in round {n}");
        last = value;
        seen.insert(value);
    }
    assert!(seen.len() > 50, "{} of the values were seen", seen.len());
}

/// The story: the kernel asks for no permission to make a file that it believes not to be there, and we opened
/// the one that another mount had made meanwhile. Here root makes files for itself alone, while a user makes
/// them on another mount.
#[test]
fn a_file_that_appears_while_it_is_made_is_opened_with_permission_only() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    std::fs::set_permissions(&one.path, Permissions::from_mode(0o777)).unwrap();
    std::fs::set_permissions(bed.scratch(), Permissions::from_mode(0o755)).unwrap();
    let (user, mut refused) = (12_345, 0);
    for n in 0..200 {
        let (name, start) = (format!("f{n}"), Barrier::new(2));
        let make = |mount: &Path| {
            start.wait();
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600).open(mount.join(&name))
        };
        let (by_root, by_user) = std::thread::scope(|scope| {
            let by_root = scope.spawn(|| make(&two.path));
            let by_user = scope.spawn(|| {
                system::become_user(user);
                make(&one.path)
            });
            (by_root.join().unwrap(), by_user.join().unwrap())
        });
        by_root.unwrap();
        match by_user {
            Ok(file) => assert_eq!(file.metadata().unwrap().uid(), user, "round {n}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EACCES), "round {n}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "the user was always first");
}

#[test]
fn two_mounts_that_make_one_file_both_open_it() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    for n in 0..100 {
        let (name, start) = (format!("f{n}"), Barrier::new(2));
        let make = |mount: &Path| {
            start.wait();
            let mut options = OpenOptions::new();
            let made = options.read(true).write(true).create(true).open(mount.join(&name));
            made.unwrap().metadata().unwrap().ino()
        };
        std::thread::scope(|scope| {
            let by_two = scope.spawn(|| make(&two.path));
            assert_eq!(make(&one.path), by_two.join().unwrap(), "round {n}");
        });
    }
}

#[test]
fn a_split_volume_goes_on() {
    let mut bed = Testbed::start().unwrap();
    bed.milpa(&["volume", "create", "small", "--meta-partition-entries-max", "1000"]).unwrap();
    let mount = bed.mount("small").unwrap();
    let before = meta_partitions(&bed);
    for n in 0..40 {
        let directory = mount.path.join(format!("d{n}"));
        std::fs::create_dir(&directory).unwrap();
        for m in 0..100 {
            std::fs::write(directory.join(format!("f{m}")), format!("{n}/{m}")).unwrap();
        }
    }
    bed.wait_until("split", std::time::Duration::from_secs(20), |bed| {
        meta_partitions(bed) > before
    })
    .unwrap();
    for n in 40..60 {
        let directory = mount.path.join(format!("d{n}"));
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("after"), "split").unwrap();
    }
    let other = bed.mount("small").unwrap();
    for n in 0..40 {
        for m in 0..100 {
            let text = std::fs::read_to_string(other.path.join(format!("d{n}/f{m}"))).unwrap();
            assert_eq!(text, format!("{n}/{m}"));
        }
    }
}

fn meta_partitions(bed: &Testbed) -> usize {
    let list = bed.json(&["partition", "list", "small"]).unwrap();
    list["Partitions"]["meta"].as_array().map_or(0, Vec::len)
}
