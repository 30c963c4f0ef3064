//! File content: what was written is what is read, by everybody.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use milpa_testbed::{Testbed, tree};

use crate::{pattern, system, write_synced};

#[test]
fn sizes_around_every_threshold_are_read_back_by_another_mount() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    // Empty, inline, small extent, one packet, several, more than one extent's first megabyte.
    let sizes =
        [0, 1, 511, 512, 513, 4095, 4096, 4097, 131_071, 131_072, 131_073, 1 << 20, 5_000_001];
    for (seed, size) in sizes.iter().enumerate() {
        write_synced(&one.path.join(format!("f{size}")), &pattern(seed as u64, *size)).unwrap();
    }
    for (seed, size) in sizes.iter().enumerate() {
        let read = std::fs::read(two.path.join(format!("f{size}"))).unwrap();
        assert!(read == pattern(seed as u64, *size), "{size} bytes came back differently");
    }
    let compared = bed.milpa(&["partition", "compare"]).unwrap();
    assert!(compared.contains("all equal"), "{compared}");
}

#[test]
fn random_writes_truncations_and_holes_follow_a_plain_file() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let path = mount.path.join("random");
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(&path).unwrap();
    let mut model: Vec<u8> = Vec::new();
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for step in 0..400 {
        match random(10) {
            0 => {
                let size = random(900_000);
                file.set_len(size).unwrap();
                model.resize(size as usize, 0);
            }
            1 => file.sync_all().unwrap(),
            2 | 3 => {
                let offset = random(model.len() as u64 + 1) as usize;
                let mut read = vec![0; random(200_000) as usize];
                let length = read_full(&file, &mut read, offset as u64);
                let end = (offset + read.len()).min(model.len());
                assert!(read[..length] == model[offset..end], "step {step}: read at {offset}");
            }
            _ => {
                let (offset, length) = (random(800_000) as usize, random(150_000) as usize + 1);
                let bytes = pattern(step, length);
                file.write_all_at(&bytes, offset as u64).unwrap();
                if model.len() < offset + length {
                    model.resize(offset + length, 0);
                }
                model[offset..offset + length].copy_from_slice(&bytes);
            }
        }
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64, "step {step}");
    }
    drop(file);
    let other = bed.mount("default").unwrap();
    assert!(std::fs::read(other.path.join("random")).unwrap() == model);
}

fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> usize {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64).unwrap() {
            0 => break,
            length => done += length,
        }
    }
    done
}

#[test]
fn an_append_by_another_mount_is_seen_at_the_next_open() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let path = |mount: &milpa_testbed::Mounted| mount.path.join("log");
    std::fs::write(path(&one), "first\n").unwrap();
    assert_eq!(std::fs::read_to_string(path(&two)).unwrap(), "first\n");
    for round in 0..20 {
        let writer = if round % 2 == 0 { &two } else { &one };
        let mut file = OpenOptions::new().append(true).open(path(writer)).unwrap();
        writeln!(file, "line {round}").unwrap();
        drop(file);
        let reader = if round % 2 == 0 { &one } else { &two };
        let text = std::fs::read_to_string(path(reader)).unwrap();
        assert!(text.ends_with(&format!("line {round}\n")), "round {round}: {text:?}");
        assert_eq!(text.lines().count(), round + 2);
    }
}

/// The story: an open had the kernel drop its pages, and it kept the size for the rest of the second. The other
/// mount's bytes were not read, and what was put at the end lay over them.
#[test]
fn a_size_that_another_mount_changed_is_seen_at_the_next_open() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut model = pattern(1, 100);
    write_synced(&two.path.join("f"), &model).unwrap();
    for round in 0..10 {
        std::fs::metadata(one.path.join("f")).unwrap();
        assert!(std::fs::read(one.path.join("f")).unwrap() == model, "round {round}");
        let mut file = OpenOptions::new().append(true).open(two.path.join("f")).unwrap();
        let bytes = pattern(round, 100);
        file.write_all(&bytes).unwrap();
        drop(file);
        model.extend(bytes);
        let mut file = File::open(one.path.join("f")).unwrap();
        assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), model.len() as u64, "round {round}");
    }
}

/// The kernel puts what is appended into its pages where it believes the end to be.
#[test]
fn what_is_appended_behind_another_mounts_bytes_does_not_hide_them() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut model = pattern(1, 4096);
    write_synced(&two.path.join("f"), &model).unwrap();
    for round in 0..10 {
        assert!(std::fs::read(one.path.join("f")).unwrap() == model, "round {round}");
        for (mount, seed) in [(&two, 2 * round), (&one, 2 * round + 1)] {
            let mut file = OpenOptions::new().append(true).open(mount.path.join("f")).unwrap();
            let bytes = pattern(seed, 4096);
            file.write_all(&bytes).unwrap();
            model.extend(bytes);
        }
        assert!(std::fs::read(one.path.join("f")).unwrap() == model, "round {round}");
    }
}

/// The story: a log was followed on one mount and written on another one. The page in which it had ended stayed in
/// the follower's kernel, with zeros behind the end, and was shown as soon as the kernel knew the new size. What was
/// appended through a descriptor that was open then lay over the other mount's bytes.
#[test]
fn what_another_mount_appends_to_a_file_that_is_open_never_reads_as_zeros() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut model = pattern(1, 100);
    write_synced(&two.path.join("log"), &model).unwrap();
    let path = one.path.join("log");
    let follower = OpenOptions::new().read(true).append(true).open(path).unwrap();
    for round in 2..12 {
        let mut buffer = vec![0; 10_000];
        let length = read_full(&follower, &mut buffer, 0);
        assert!(buffer[..length] == model, "round {round}: {length} bytes");
        let old = model.len();
        let mut file = OpenOptions::new().append(true).open(two.path.join("log")).unwrap();
        let bytes = pattern(round, 100);
        file.write_all(&bytes).unwrap();
        drop(file);
        model.extend(bytes);
        // Every other time nobody asks for the size, but who reads at the end.
        while round % 2 == 0 && follower.metadata().unwrap().len() < model.len() as u64 {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let length = loop {
            match read_full(&follower, &mut buffer, old as u64) {
                0 => std::thread::sleep(std::time::Duration::from_millis(10)),
                length => break length,
            }
        };
        assert!(buffer[..length] == model[old..], "round {round}: {length} bytes");
        (&follower).write_all(&[round as u8; 100]).unwrap();
        model.extend([round as u8; 100]);
        let length = read_full(&follower, &mut buffer, 0);
        assert!(buffer[..length] == model, "round {round}, appended: {length} bytes");
        follower.sync_all().unwrap();
        assert!(std::fs::read(two.path.join("log")).unwrap() == model, "round {round}");
    }
}

/// The story: whether a write goes to the end was taken from the flags of the open. The pages of a mapping
/// come back through any descriptor, and landed at the end of the file; so did writes after O_APPEND was
/// taken off.
#[test]
fn a_write_goes_to_the_end_only_if_its_writer_appends() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut model = pattern(1, 10_000);
    write_synced(&one.path.join("f"), &model).unwrap();
    let file = OpenOptions::new().read(true).append(true).open(one.path.join("f")).unwrap();
    system::change_mapped(&file, 100, !model[100]).unwrap();
    model[100] = !model[100];
    assert_eq!(file.metadata().unwrap().len(), 10_000, "nothing was appended");
    (&file).write_all(b"end").unwrap();
    model.extend(b"end");
    system::set_status_flags(&file, 0).unwrap();
    file.write_all_at(b"start", 0).unwrap();
    model[..5].copy_from_slice(b"start");
    system::set_status_flags(&file, libc::O_APPEND).unwrap();
    (&file).write_all(b"again").unwrap();
    model.extend(b"again");
    drop(file);
    for mount in [&one, &two] {
        assert!(std::fs::read(mount.path.join("f")).unwrap() == model);
    }
}

#[test]
fn overwritten_bytes_are_seen_by_another_mount() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let mut model = pattern(1, 3 << 20);
    write_synced(&one.path.join("db"), &model).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(one.path.join("db")).unwrap();
    for round in 0..50_u64 {
        let (offset, length) = ((round * 61_441) as usize, 5_000 + round as usize);
        let bytes = pattern(100 + round, length);
        file.write_all_at(&bytes, offset as u64).unwrap();
        model[offset..offset + length].copy_from_slice(&bytes);
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(std::fs::read(two.path.join("db")).unwrap() == model);
    assert!(std::fs::read(one.path.join("db")).unwrap() == model);
    bed.milpa(&["partition", "compare"]).unwrap();
}

#[test]
fn holes_take_no_space_and_read_as_zeros() {
    let mut bed = Testbed::start().unwrap();
    let mount = bed.mount("default").unwrap();
    let path = mount.path.join("sparse");
    let mut file = File::create_new(&path).unwrap();
    file.seek(SeekFrom::Start(600 << 30)).unwrap();
    file.write_all(b"end").unwrap();
    file.sync_all().unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), (600 << 30) + 3);
    assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    let file = File::open(&path).unwrap();
    let mut hole = vec![1; 4096];
    file.read_exact_at(&mut hole, 300 << 30).unwrap();
    assert_eq!(hole, vec![0; 4096]);
    let mut end = vec![0; 4];
    assert_eq!(file.read_at(&mut end, 600 << 30).unwrap(), 3);
    assert_eq!(&end[..3], b"end");
}

#[test]
fn an_unlinked_file_lives_while_its_client_has_it_open() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let bytes = pattern(3, 300_000);
    write_synced(&one.path.join("f"), &bytes).unwrap();
    let other = File::open(two.path.join("f")).unwrap();
    let mut file = OpenOptions::new().read(true).write(true).open(one.path.join("f")).unwrap();
    std::fs::remove_file(one.path.join("f")).unwrap();
    assert!(!one.path.join("f").exists());
    file.write_all_at(b"still here", 0).unwrap();
    let mut read = Vec::new();
    file.read_to_end(&mut read).unwrap();
    assert_eq!(&read[..10], b"still here");
    assert!(read[10..] == bytes[10..]);
    // For everybody else it is gone at once: after the second that attributes are kept.
    bed.wait_until("ESTALE for others", std::time::Duration::from_secs(5), |_| {
        other.metadata().is_err_and(|error| error.raw_os_error() == Some(libc::ESTALE))
    })
    .unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert_eq!(file.read_at(&mut [0; 10], 0).unwrap(), 10, "its own client still reads it");
    drop(file);
    bed.wait_until("its inode is gone", std::time::Duration::from_secs(10), |bed| {
        bed.json(&["volume", "list"]).is_ok_and(|volumes| volumes[0]["inodes"] == 1)
    })
    .unwrap();
}

#[test]
fn a_tree_is_copied_and_verified_and_memory_is_mapped() {
    let mut bed = Testbed::start().unwrap();
    let (one, two) = (bed.mount("default").unwrap(), bed.mount("default").unwrap());
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
    tree::copy(&source, &one.path.join("tree"), |_, _| {}).unwrap();
    let expected = tree::read(&source).unwrap();
    let found = tree::read(&two.path.join("tree")).unwrap();
    assert_eq!(tree::differences(&expected, &found), Vec::<String>::new());
    bed.umount(&two).unwrap();
    bed.umount(&one).unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let left = bed.scratch().display().to_string();
    assert!(!mounts.contains(&left), "a mount is left behind:\n{mounts}");
}
