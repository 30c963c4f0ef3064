//! The program on real mounts: what a disk does, and how it fails.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A running `milpa-faultfs` with disks `a` and `b`.
struct Layer {
    program: Child,
    answers: BufReader<ChildStdout>,
    directory: tempfile::TempDir,
}

impl Layer {
    fn start(seed: u64) -> Layer {
        let directory = tempfile::tempdir().unwrap();
        let disks = ["a", "b"].map(|name| directory.path().join(name));
        disks.iter().for_each(|disk| fs::create_dir(disk).unwrap());
        let mut program = Command::new(env!("CARGO_BIN_EXE_milpa-faultfs"))
            .args(&disks)
            .args(["--seed", &seed.to_string(), "--capacity-mib", "64"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(program.stdout.take().unwrap());
        let mut layer = Layer { program, answers, directory };
        assert_eq!(layer.answer(), "ready");
        layer
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn order(&mut self, line: &str) -> String {
        writeln!(self.program.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.answer()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        drop(self.program.stdin.take());
        self.program.wait().unwrap();
    }
}

fn create(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap()
}

fn sync_directory(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

#[test]
fn it_is_a_disk_as_long_as_nothing_is_ordered() {
    let layer = Layer::start(1);
    let (path, other) = (layer.path("a/f"), layer.path("a/g"));
    let file = create(&path);
    file.write_all_at(&[7; 3 << 20], 100).unwrap();
    let status = file.metadata().unwrap();
    assert_eq!((status.len(), status.blocks()), ((3 << 20) + 100, 8 * 769));
    assert_ne!(status.dev(), fs::metadata(layer.path("b")).unwrap().dev());
    let mut bytes = [1; 200];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 200);
    assert_eq!((bytes[99], bytes[100]), (0, 7));
    file.set_len(150).unwrap();
    assert_eq!(fs::read(&path).unwrap().len(), 150);

    file.try_lock().unwrap();
    assert!(File::open(&path).unwrap().try_lock().is_err());
    fs::rename(&path, &other).unwrap();
    assert!(!path.exists());
    let mut log = OpenOptions::new().append(true).open(&other).unwrap();
    log.write_all(b"more").unwrap();
    assert_eq!(fs::read(&other).unwrap()[150..], *b"more");
    File::create(&other).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 0, "emptied");
    fs::remove_file(&other).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 0, "unlinked, and open");

    // More names than one readdir answers, removed while they are listed.
    fs::create_dir_all(layer.path("a/d/e")).unwrap();
    for number in 0..2000 {
        File::create(layer.path(&format!("a/d/e/a-name-of-some-length-{number}"))).unwrap();
    }
    assert_eq!(fs::read_dir(layer.path("a/d/e")).unwrap().count(), 2000);
    fs::remove_dir_all(layer.path("a/d")).unwrap();
    assert_eq!(fs::read_dir(layer.path("a")).unwrap().count(), 0);
}

#[test]
fn a_cut_takes_what_is_not_synced_and_nothing_else() {
    let (mut lost, mut kept, mut torn, mut nameless) = (0, 0, 0, 0);
    for seed in 0..12 {
        let mut layer = Layer::start(seed);
        let directory = layer.path("a/d");
        fs::create_dir(&directory).unwrap();
        let synced = create(&directory.join("synced"));
        synced.write_all_at(&[1; 10_000], 0).unwrap();
        synced.sync_data().unwrap();
        sync_directory(&directory);
        sync_directory(&layer.path("a"));
        synced.write_all_at(&[2; 10_000], 0).unwrap();
        create(&directory.join("nameless")).sync_all().unwrap();
        let elsewhere = layer.path("b/elsewhere");
        fs::write(&elsewhere, "not cut").unwrap();

        assert!(layer.order("a cut").starts_with("lost "));
        assert_eq!(errno(synced.write_at(&[3], 0)), Some(libc::EIO), "opened before the cut");
        let bytes = fs::read(directory.join("synced")).unwrap();
        assert_eq!(bytes.len(), 10_000);
        assert!(bytes.iter().all(|byte| [1, 2].contains(byte)));
        match (bytes.contains(&1), bytes.contains(&2)) {
            (true, true) => torn += 1,
            (true, false) => lost += 1,
            _ => kept += 1,
        }
        nameless += u32::from(!directory.join("nameless").exists());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"not cut");
    }
    assert!(lost > 0 && kept > 0 && torn > 0, "{lost} lost, {kept} kept, {torn} torn");
    assert!((1..12).contains(&nameless), "{nameless} of 12 names lost");
}

#[test]
fn what_waits_when_the_power_goes_fails() {
    let mut layer = Layer::start(1);
    let path = layer.path("a/f");
    let file = create(&path);
    file.sync_all().unwrap();
    sync_directory(&layer.path("a"));
    layer.order("all freeze");
    let (answer, answered) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = answer.send(file.write_at(b"late", 0).and_then(|_| file.sync_all()));
    });
    assert!(answered.recv_timeout(Duration::from_millis(200)).is_err(), "it was to wait");
    layer.order("all cut");
    assert_eq!(errno(answered.recv().unwrap()), Some(libc::EIO));
    assert_eq!(fs::read(&path).unwrap(), b"");
}

#[test]
fn it_fails_and_lies_on_command() {
    let mut layer = Layer::start(1);
    let file = create(&layer.path("a/f"));
    let write = |byte: u8| file.write_at(&[byte; 4096], 0);
    let first = |block: u64| {
        let mut byte = [0];
        file.read_at(&mut byte, block * 4096).map(|_| byte[0])
    };
    write(1).unwrap();
    layer.order("a fail-write");
    assert_eq!(errno(write(2)), Some(libc::EIO));
    layer.order("a fail-read");
    assert_eq!(errno(first(0)), Some(libc::EIO));
    assert_eq!(first(0).unwrap(), 1);
    layer.order("a lose-write");
    write(3).unwrap();
    assert_eq!(first(0).unwrap(), 1);
    file.write_at(&[9; 4096], 4096).unwrap();
    layer.order("a misdirect-write");
    write(4).unwrap();
    assert_eq!((first(0).unwrap(), first(1).unwrap()), (1, 4));

    file.sync_all().unwrap();
    write(5).unwrap();
    layer.order("a fail-sync");
    assert_eq!(errno(file.sync_all()), Some(libc::EIO));
    assert_eq!(first(0).unwrap(), 1, "what the sync did not write is gone");
    let flipped = layer.order("a flip f");
    assert!(flipped.starts_with("flipped a bit of /f at "), "{flipped}");
    let bytes = fs::read(layer.path("a/f")).unwrap();
    let expected = [[1; 4096], [4; 4096]].concat();
    let bits = bytes.iter().zip(&expected).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
    assert_eq!(bits, 1);

    layer.order("a fill on");
    assert_eq!(errno(file.write_at(&[6; 4096], 1 << 20)), Some(libc::ENOSPC));
    layer.order("a fill off");
    file.write_all_at(&[6; 4096], 1 << 20).unwrap();
}

/// A failure that is meant for one file passes by all calls of others, also those of its own kind.
#[test]
fn what_is_ordered_for_one_file_happens_to_no_other() {
    let mut layer = Layer::start(1);
    let files = ["meant", "other"].map(|name| create(&layer.path("a").join(name)));
    let [meant, other] = &files;
    let first = |file: &File| {
        let mut byte = [0];
        file.read_at(&mut byte, 0).map(|_| byte[0])
    };
    for file in &files {
        file.write_all_at(&[1; 8192], 0).unwrap();
        file.sync_all().unwrap();
    }
    for order in ["fail-read", "fail-write", "fail-sync", "lose-write"] {
        layer.order(&format!("a {order} meant"));
    }
    other.write_all_at(&[2; 4096], 0).unwrap();
    other.sync_all().unwrap();
    assert_eq!(first(other).unwrap(), 2);
    assert_eq!(errno(meant.write_at(&[3; 4096], 0)), Some(libc::EIO));
    meant.write_all_at(&[4; 4096], 0).unwrap();
    assert_eq!(errno(first(meant)), Some(libc::EIO));
    assert_eq!(first(meant).unwrap(), 1, "a lost write");
    meant.write_all_at(&[5; 4096], 0).unwrap();
    assert_eq!(errno(meant.sync_all()), Some(libc::EIO));
    assert_eq!(first(meant).unwrap(), 1, "what the sync did not write is gone");
    layer.order("a misdirect-write meant");
    other.write_all_at(&[6; 4096], 0).unwrap();
    meant.write_all_at(&[7; 4096], 0).unwrap();
    assert_eq!(fs::read(layer.path("a/meant")).unwrap(), [[1; 4096], [7; 4096]].concat());
    assert_eq!(fs::read(layer.path("a/other")).unwrap(), [[6; 4096], [1; 4096]].concat());
}

#[test]
fn a_slow_disk_takes_longer_for_what_was_said_and_nothing_else() {
    const SLOW: Duration = Duration::from_millis(500);
    let mut layer = Layer::start(1);
    let (file, elsewhere) = (create(&layer.path("a/f")), create(&layer.path("b/f")));
    let took = |call: &dyn Fn()| {
        let started = Instant::now();
        call();
        started.elapsed()
    };
    let write = || file.write_all_at(&[1; 4096], 0).unwrap();
    let sync = || file.sync_all().unwrap();
    let read = || assert!(file.read_at(&mut [0; 4096], 0).is_ok());
    let read_elsewhere = || assert!(elsewhere.read_at(&mut [0], 0).is_ok());
    layer.order("a delay-reads 500");
    assert!(took(&read) >= SLOW);
    assert!(
        took(&|| [&write as &dyn Fn(), &sync, &read_elsewhere].iter().for_each(|f| f())) < SLOW
    );
    layer.order("a delay-reads 0");
    layer.order("a delay 500");
    assert!(took(&write) >= SLOW && took(&sync) >= SLOW);
    assert!(took(&read) < SLOW);
    layer.order("a delay 0");
    assert!(took(&write) < SLOW);
}

#[test]
fn a_disk_that_drops_syncs_loses_what_was_synced() {
    let lost = (0..8).filter(|seed| {
        let mut layer = Layer::start(*seed);
        layer.order("a drop-syncs on");
        let file = create(&layer.path("a/f"));
        file.write_all_at(b"promised", 0).unwrap();
        file.sync_all().unwrap();
        sync_directory(&layer.path("a"));
        layer.order("all cut");
        fs::read(layer.path("a/f")).is_ok_and(|bytes| bytes == b"promised")
    });
    assert!(lost.count() < 8);
}

#[test]
fn wrong_commands_are_refused_and_change_nothing() {
    let mut layer = Layer::start(1);
    for bad in ["cut", "c cut", "a explode", "a flip nothing"] {
        assert!(layer.order(bad).starts_with("error: "), "{bad}");
    }
}
