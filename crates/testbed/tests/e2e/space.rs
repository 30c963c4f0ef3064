//! Space: what is deleted comes back, what is full says so.

use std::io::Write;
use std::time::Duration;

use milpa_testbed::{Testbed, tree};

use crate::{pattern, write_synced};

/// A file system of its own for the cluster, on a loop device. Dropping it leaves nothing behind.
struct SmallDisk {
    path: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl SmallDisk {
    fn new(mib: u32) -> SmallDisk {
        let directory = tempfile::tempdir().unwrap();
        let (image, path) = (directory.path().join("image"), directory.path().join("disk"));
        std::fs::create_dir(&path).unwrap();
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(u64::from(mib) << 20).unwrap();
        run("mkfs.ext4", &["-q", &image.display().to_string()]);
        run("mount", &["-o", "loop", &image.display().to_string(), &path.display().to_string()]);
        SmallDisk { path, _directory: directory }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        run("umount", &["--lazy", &self.path.display().to_string()]);
    }
}

#[track_caller]
fn run(program: &str, words: &[&str]) {
    let output = std::process::Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

#[test]
fn a_full_disk_says_so_and_deleting_gives_the_space_back() {
    let disk = SmallDisk::new(2048);
    let mut bed = Testbed::start_in(&disk.path, &[]).unwrap();
    let mount = bed.mount("default").unwrap();
    let path = mount.path.join("too large");
    let mut file = std::fs::File::create(&path).unwrap();
    let chunk = pattern(1, 1 << 20);
    let mut written = 0;
    let failure = loop {
        match file
            .write_all(&chunk)
            .and_then(|()| if written % 64 == 63 { file.sync_all() } else { Ok(()) })
        {
            Ok(()) if written > 4096 => panic!("4 GiB fit on a disk of 2 GiB"),
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(failure.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    // Names still work; what fitted is there; a restart still works.
    std::fs::create_dir(mount.path.join("directory")).unwrap();
    let kept = std::fs::metadata(&path).unwrap().len();
    assert!(kept >= (written / 64 * 64) << 20, "{kept} bytes kept of {written} MiB written");
    bed.kill_all().unwrap();
    bed.up(&[]).unwrap();
    std::fs::remove_file(&path).unwrap();
    // Bytes that only some replicas could take belong to no file: they are offered to the inode's
    // partition when their writer has been silent for a minute.
    bed.wait_until("space given back", Duration::from_secs(180), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes < 64 << 20)
    })
    .unwrap();
    bed.wait_until("writing works again", Duration::from_secs(20), |_| {
        write_synced(&mount.path.join("fits"), &chunk).is_ok()
    })
    .unwrap();
}

/// The owner of the servers fills their disk to the last byte, below every reserve of ours
/// (RELIABILITY.md F8). Everything starts again, what was acknowledged is there, what is deleted comes
/// back, and nothing waits for a person.
#[test]
fn a_disk_filled_to_the_last_byte_by_its_owner_is_no_lasting_damage() {
    let disk = SmallDisk::new(2048);
    let mut bed = Testbed::start_in(&disk.path, &[]).unwrap();
    let mount = bed.mount("default").unwrap();
    let (kept, large) = (pattern(2, 3 << 20), pattern(3, 150 << 20));
    write_synced(&mount.path.join("kept"), &kept).unwrap();
    write_synced(&mount.path.join("large"), &large).unwrap();
    let filler = disk.path.join("of the owner");
    fill(&filler);

    // Somebody goes on writing, as far as he is let.
    let mut refused = None;
    for number in 0..2000 {
        let path = mount.path.join(format!("f{number}"));
        if let Err(error) = write_synced(&path, &kept[..200_000]) {
            refused = Some(error);
            break;
        }
    }
    let refused = refused.map(|error| error.raw_os_error());
    assert_eq!(refused, Some(Some(libc::ENOSPC)), "a full disk is said to be full");
    fill(&filler);
    bed.kill_all().unwrap();
    bed.up(&[]).unwrap();
    assert_eq!(std::fs::read(mount.path.join("kept")).unwrap(), kept);
    std::fs::remove_file(mount.path.join("large")).unwrap();
    let given_back = bed.wait_until("space given back", Duration::from_secs(60), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes < 400 << 20)
    });
    given_back.unwrap();

    std::fs::remove_file(&filler).unwrap();
    bed.wait_until("writing works again", Duration::from_secs(20), |_| {
        write_synced(&mount.path.join("fits"), &kept).is_ok()
    })
    .unwrap();
    let again = bed.mount("default").unwrap();
    assert_eq!(std::fs::read(again.path.join("kept")).unwrap(), kept);
    assert_eq!(std::fs::read(again.path.join("fits")).unwrap(), kept);
    let status = bed.json(&["node", "list"]).unwrap();
    assert!(!status.to_string().contains("a write or flush failed"), "no disk is fenced: {status}");
}

/// Writes until not one byte more has room, also not for root.
fn fill(path: &std::path::Path) {
    let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap();
    for size in [1 << 20, 4096] {
        let chunk = vec![0x5a; size];
        while file.write_all(&chunk).is_ok() {}
    }
    file.sync_all().unwrap();
}

#[test]
fn deleted_files_leave_no_inode_and_give_their_space_back() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let before = bed.allocated_bytes().unwrap();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    tree::copy(&source, &mount.path.join("tree"), |_, _| {}).unwrap();
    write_synced(&mount.path.join("large"), &pattern(1, 40 << 20)).unwrap();
    bed.wait_until("allocated", Duration::from_secs(10), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes > before + (120 << 20))
    })
    .unwrap();
    std::fs::remove_dir_all(mount.path.join("tree")).unwrap();
    std::fs::remove_file(mount.path.join("large")).unwrap();
    bed.wait_until("space given back", Duration::from_secs(60), |bed| {
        bed.allocated_bytes().is_ok_and(|bytes| bytes < before + (1 << 20))
    })
    .unwrap();
    let volumes = bed.json(&["volume", "list"]).unwrap();
    assert_eq!(volumes[0]["inodes"], 1, "only the root directory remains: {volumes}");
}
