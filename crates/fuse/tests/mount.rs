//! The crate on a real mount, with a file system in memory behind it.
//!
//! Needs root and /dev/fuse and says so when they are missing: a suite that skips proves nothing.
//! Every mount is a [`Session`] in a [`Mounted`], whose drop unmounts also when a test fails.

// A test, on the real thing (clippy.toml).
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(unsafe_code)]
// Helpers outside of #[test] functions panic as well: that is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "mount/lifecycle.rs"]
mod lifecycle;
mod memory;

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::{Event, MemoryFs};
use milpa_fuse::{
    Config, MountOptions, Notified, NotifyError, ROOT_ID, Session, Unmount, flags, mount,
};

/// Fields drop in order: first the mount, then its directory.
struct Mounted {
    session: Session,
    memory: Arc<MemoryFs>,
    directory: tempfile::TempDir,
}

impl Mounted {
    fn new() -> Mounted {
        Mounted::with(Config::default(), &MountOptions { threads: 4, ..MountOptions::default() })
    }

    fn with(config: Config, options: &MountOptions) -> Mounted {
        require_fuse();
        let directory = tempfile::tempdir().unwrap();
        let memory = Arc::new(MemoryFs::new(config));
        let session = mount(Arc::clone(&memory), directory.path(), options).expect("mount");
        Mounted { session, memory, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn plant(&self, name: &str, data: &[u8]) -> u64 {
        self.memory.state().plant(ROOT_ID, name, data)
    }
}

fn require_fuse() {
    assert!(Path::new("/dev/fuse").exists(), "these tests need /dev/fuse, which is missing here");
    // SAFETY: geteuid takes nothing and cannot fail.
    let uid = unsafe { libc::geteuid() };
    assert_eq!(uid, 0, "these tests mount with mount(2) and must run as root");
}

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

#[track_caller]
fn errno_of<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.expect_err("must fail").raw_os_error().expect("an errno")
}

/// A page-aligned part of `memory`: direct I/O of 1 MiB then touches 256 pages, not 257.
fn aligned(memory: &mut [u8], length: usize) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(4096);
    &mut memory[start..start + length]
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

#[test]
fn this_kernel_agrees_to_what_we_ask() {
    let mounted = Mounted::new();
    let negotiated = mounted.session.negotiated();
    println!("kernel: {:?}, negotiated: {negotiated:x?}", mounted.memory.state().kernel);
    assert!(negotiated.minor >= 31);
    assert_eq!(negotiated.max_write, 1 << 20);
    assert!(negotiated.has(flags::init::ASYNC_READ | flags::init::PARALLEL_DIROPS));
    assert!(negotiated.has(flags::init::DO_READDIRPLUS | flags::init::MAX_PAGES));
    assert!(!negotiated.has(flags::init::WRITEBACK_CACHE));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(mounted.directory.path().to_str().unwrap()));
    let line = line.expect("in the mount table");
    for part in ["fuse.milpa milpa", "nosuid", "nodev", "default_permissions", "allow_other"] {
        assert!(line.contains(part), "{part} in {line}");
    }
}

#[test]
fn files_are_created_written_read_truncated_and_synced() {
    let mounted = Mounted::new();
    let path = mounted.path("file");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"hello world").unwrap();
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    file.set_len(5).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    fs::write(&path, "new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new", "O_TRUNC within open");
    file.write_at(b"x", 1_000_000).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1_000_001);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    let time = std::time::UNIX_EPOCH - std::time::Duration::from_millis(1500);
    file.set_modified(time).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), time);
    let error = OpenOptions::new().write(true).create_new(true).open(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

#[test]
fn a_failed_fsync_reaches_the_caller() {
    let mounted = Mounted::new();
    let file = File::create(mounted.path("unsyncable")).unwrap();
    assert_eq!(errno_of(file.sync_all()), libc::EIO);
}

/// What the client's warnings of a loss rest on: a failure reaches the program if the kernel, which asks once
/// more after its readahead has failed, hears of it a second time.
#[test]
fn a_read_that_fails_once_is_asked_for_again() {
    let mounted = Mounted::new();
    mounted.plant("file", &[7; 100_000]);
    let file = File::open(mounted.path("file")).unwrap();
    let mut page = [0; 4096];
    mounted.memory.failing_reads.store(1, Ordering::SeqCst);
    file.read_exact_at(&mut page, 0).unwrap();
    assert_eq!(page, [7; 4096]);
    mounted.memory.failing_reads.store(2, Ordering::SeqCst);
    assert_eq!(errno_of(file.read_at(&mut page, 50_000)), libc::EIO);
    file.read_exact_at(&mut page, 50_000).unwrap();
    assert_eq!(page, [7; 4096]);
}

#[test]
fn names_are_made_linked_renamed_and_removed() {
    let mounted = Mounted::new();
    fs::create_dir(mounted.path("dir")).unwrap();
    fs::write(mounted.path("dir/a"), "a").unwrap();
    fs::hard_link(mounted.path("dir/a"), mounted.path("b")).unwrap();
    assert_eq!(fs::metadata(mounted.path("b")).unwrap().nlink(), 2);
    fs::rename(mounted.path("dir/a"), mounted.path("dir/c")).unwrap();
    assert!(!mounted.path("dir/a").exists());
    assert_eq!(fs::read(mounted.path("dir/c")).unwrap(), b"a");
    std::os::unix::fs::symlink("dir/c", mounted.path("link")).unwrap();
    assert_eq!(fs::read_link(mounted.path("link")).unwrap(), Path::new("dir/c"));
    assert_eq!(fs::read(mounted.path("link")).unwrap(), b"a");
    assert_eq!(errno_of(fs::remove_dir(mounted.path("dir"))), libc::ENOTEMPTY);
    fs::remove_file(mounted.path("dir/c")).unwrap();
    assert_eq!(fs::metadata(mounted.path("b")).unwrap().nlink(), 1);
    fs::remove_dir(mounted.path("dir")).unwrap();
    assert_eq!(errno_of(fs::metadata(mounted.path("dir"))), libc::ENOENT);
    let long = "n".repeat(256);
    assert_eq!(errno_of(fs::metadata(mounted.path(&long))), libc::ENAMETOOLONG);
}

#[test]
fn rename_flags_arrive() {
    let mounted = Mounted::new();
    fs::write(mounted.path("one"), "1").unwrap();
    fs::write(mounted.path("two"), "2").unwrap();
    let rename = |flags| {
        let (from, to) = (c_path(&mounted.path("one")), c_path(&mounted.path("two")));
        // SAFETY: two NUL-terminated paths that live until the call returns.
        unsafe {
            libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags)
        }
    };
    assert_eq!(rename(libc::RENAME_NOREPLACE), -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EEXIST));
    assert_eq!(rename(libc::RENAME_EXCHANGE), 0);
    assert_eq!(fs::read(mounted.path("one")).unwrap(), b"2");
    assert_eq!(fs::read(mounted.path("two")).unwrap(), b"1");
}

#[test]
fn ten_thousand_entries_are_listed_once_each_with_attributes() {
    let mounted = Mounted::new();
    fs::create_dir(mounted.path("many")).unwrap();
    let mut state = mounted.memory.state();
    let directory = state.child(ROOT_ID, OsStr::new("many")).unwrap();
    for index in 0..10_000 {
        state.plant(directory, &format!("entry-{index:05}"), b"1234");
    }
    drop(state);
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(mounted.path("many")).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().len(), 4);
        assert!(names.insert(entry.file_name()), "{:?} twice", entry.file_name());
    }
    assert_eq!(names.len(), 10_000);
    let calls = mounted.memory.readdirplus_calls.load(Ordering::SeqCst);
    println!("readdirplus requests for 10,000 entries: {calls}");
    assert!(calls > 1);
}

#[test]
fn plain_readdir_lists_as_well() {
    let config = Config { readdirplus: milpa_fuse::Readdirplus::Off, ..Config::default() };
    let mounted = Mounted::with(config, &MountOptions::default());
    for index in 0..1000 {
        mounted.plant(&format!("entry-{index}"), b"");
    }
    assert_eq!(fs::read_dir(mounted.directory.path()).unwrap().count(), 1000);
    assert_eq!(mounted.memory.readdirplus_calls.load(Ordering::SeqCst), 0);
}

#[test]
fn requests_of_one_mebibyte_arrive_whole() {
    const LENGTH: usize = 1 << 20;
    let mounted = Mounted::new();
    let mut memory = vec![0; LENGTH + 4096];
    let buffer = aligned(&mut memory, LENGTH);
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % 251) as u8);
    let expected = buffer.to_vec();
    let path = mounted.path("direct-large");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    assert_eq!(file.write_at(buffer, 0).unwrap(), LENGTH);
    buffer.fill(0);
    assert_eq!(file.read_at(buffer, 0).unwrap(), LENGTH);
    assert!(buffer == expected, "content differs");
    let largest = |value: &std::sync::atomic::AtomicU32| value.load(Ordering::SeqCst) as usize;
    assert_eq!(largest(&mounted.memory.largest_write), LENGTH, "largest write request");
    assert_eq!(largest(&mounted.memory.largest_read), LENGTH, "largest read request");
    assert_eq!(mounted.memory.unaligned_writes.load(Ordering::SeqCst), 0);
}

#[test]
fn buffered_data_survives_the_page_cache() {
    let mounted = Mounted::new();
    let data: Vec<u8> = (0..5_000_003_u32).map(|index| (index % 253) as u8).collect();
    fs::write(mounted.path("file"), &data).unwrap();
    let id = mounted.memory.state().child(ROOT_ID, OsStr::new("file")).unwrap();
    assert!(mounted.memory.state().nodes[&id].data == data, "content at the server differs");
    mounted.session.notifier().inval_inode(id, 0, 0).unwrap();
    assert!(fs::read(mounted.path("file")).unwrap() == data, "content read back differs");
}

#[test]
fn threads_work_in_parallel() {
    let mounted = Mounted::new();
    std::thread::scope(|scope| {
        for worker in 0..8_u8 {
            let root = mounted.path(&format!("worker-{worker}"));
            scope.spawn(move || {
                fs::create_dir(&root).unwrap();
                for round in 0..100_usize {
                    let (path, moved) = (root.join("file"), root.join(format!("moved-{round}")));
                    let data = vec![worker; 1 + round * 997];
                    fs::write(&path, &data).unwrap();
                    fs::rename(&path, &moved).unwrap();
                    assert!(fs::read(&moved).unwrap() == data);
                }
                assert_eq!(fs::read_dir(&root).unwrap().count(), 100);
                fs::remove_dir_all(&root).unwrap();
            });
        }
    });
    assert_eq!(fs::read_dir(mounted.directory.path()).unwrap().count(), 0);
}

#[test]
fn lookups_and_forgets_balance() {
    let mounted = Mounted::new();
    for index in 0..500 {
        fs::write(mounted.path(&format!("file-{index}")), "x").unwrap();
        fs::remove_file(mounted.path(&format!("file-{index}"))).unwrap();
    }
    // The last forgets are sent in the background; unmounting drains them.
    assert!(mounted.memory.state().lookups.len() < 500, "no forget arrived");
}

extern "C" fn ignore_signal(_: libc::c_int) {}

#[test]
fn a_signal_interrupts_a_blocked_read() {
    let mounted = Mounted::new();
    mounted.plant("direct-blocked", b"never read");
    // SAFETY: a handler that does nothing, without SA_RESTART, for a signal nobody else uses.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore_signal as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    let path = mounted.path("direct-blocked");
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut file = File::open(path).unwrap();
        // SAFETY: pthread_self takes nothing and cannot fail.
        sender.send(unsafe { libc::pthread_self() }).unwrap();
        file.read(&mut [0; 16])
    });
    let thread = receiver.recv().unwrap();
    assert_eq!(mounted.memory.next_event(), Event::ReadBlocks);
    // SAFETY: the thread is not joined yet, so its id is valid.
    assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
    assert_eq!(mounted.memory.next_event(), Event::ReadInterrupted);
    assert_eq!(errno_of(reader.join().unwrap()), libc::EINTR);
}

#[test]
fn a_killed_process_does_not_hang_in_a_read() {
    let mounted = Mounted::new();
    mounted.plant("direct-blocked", b"never read");
    let mut child = Command::new("cat").arg(mounted.path("direct-blocked")).spawn().unwrap();
    assert_eq!(mounted.memory.next_event(), Event::ReadBlocks);
    child.kill().unwrap();
    assert_eq!(mounted.memory.next_event(), Event::ReadInterrupted);
    assert!(!child.wait().unwrap().success());
}

#[test]
fn broken_answers_are_eio_and_the_mount_goes_on() {
    let mounted = Mounted::new();
    for name in ["direct-dropped", "direct-panic", "direct-too-much"] {
        mounted.plant(name, b"data");
        for _ in 0..10 {
            assert_eq!(errno_of(fs::read(mounted.path(name))), libc::EIO, "{name}");
        }
    }
    fs::write(mounted.path("file"), "works").unwrap();
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"works");
}

#[test]
fn an_answer_may_come_from_another_thread() {
    let mounted = Mounted::new();
    mounted.plant("direct-late", b"data");
    let file = File::open(mounted.path("direct-late")).unwrap();
    for _ in 0..100 {
        let mut buffer = [0; 16];
        assert_eq!(file.read_at(&mut buffer, 0).unwrap(), 4);
        assert_eq!(&buffer[..4], b"late");
    }
}

#[test]
fn flock_and_posix_locks_are_told_apart() {
    let config = Config { posix_locks: true, flock_locks: true, ..Config::default() };
    let mounted = Mounted::with(config, &MountOptions::default());
    let file = File::create(mounted.path("locked")).unwrap();
    file.lock().unwrap();
    let mut range = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 10,
        l_len: 5,
        l_pid: 0,
    };
    // SAFETY: `range` is a whole flock struct that lives until the call returns.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw mut range) };
    assert_eq!(result, 0);
    let locks = mounted.memory.state().locks.clone();
    assert_eq!(locks.len(), 2, "{locks:?}");
    assert!(locks[0].is_flock && locks[0].wait);
    assert!(!locks[1].is_flock && !locks[1].wait);
    assert_eq!((locks[1].lock.start, locks[1].lock.end), (10, 14));
    assert_ne!(locks[0].owner, locks[1].owner);
}

#[test]
fn notifications_make_the_kernel_look_again() {
    let config =
        Config { data_invalidation: milpa_fuse::DataInvalidation::Explicit, ..Config::default() };
    let mounted = Mounted::with(config, &MountOptions::default());
    let id = mounted.plant("file", b"old");
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"old");
    mounted.memory.state().nodes.get_mut(&id).unwrap().set_data(b"new".to_vec());
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"old", "cached pages");
    let notifier = mounted.memory.notifier();
    assert_eq!(notifier.inval_inode(id, 0, 0).unwrap(), Notified::Done);
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"new");

    assert_eq!(notifier.store(id, 0, b"sto").unwrap(), Notified::Done);
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"sto", "stored into the page cache");

    let name = OsStr::new("file");
    mounted.memory.state().nodes.get_mut(&ROOT_ID).unwrap().children.remove(name);
    assert!(mounted.path("file").exists(), "cached name");
    assert_eq!(notifier.inval_entry(ROOT_ID, name).unwrap(), Notified::Done);
    assert!(!mounted.path("file").exists());
    assert_eq!(notifier.inval_inode(999_999, 0, 0).unwrap(), Notified::NotCached);

    let other = mounted.plant("other", b"");
    assert!(mounted.path("other").exists());
    assert_eq!(notifier.delete(ROOT_ID, other, OsStr::new("other")).unwrap(), Notified::Done);
    if mounted.session.negotiated().minor >= 45 {
        assert_eq!(notifier.increment_epoch().unwrap(), Notified::Done);
        assert_eq!(notifier.resend().unwrap(), Notified::Done);
        assert_eq!(notifier.prune(&[other]).unwrap(), Notified::Done);
    }
    mounted.session.unmount(Unmount::Clean).unwrap();
    // With the caches gone there is nothing to invalidate: never an error worth a retry.
    let late = notifier.inval_inode(id, 0, 0);
    assert!(matches!(late, Ok(Notified::NotCached) | Err(NotifyError::Unmounted)), "{late:?}");
}

#[test]
fn the_rarer_calls_arrive() {
    let mounted = Mounted::new();
    let path = mounted.path("file");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    // SAFETY: the descriptor is open; below: NUL-terminated strings, buffers with their lengths.
    assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 10_000) }, 0);
    assert_eq!(file.metadata().unwrap().len(), 10_000);
    // SAFETY: see above.
    assert_eq!(unsafe { libc::lseek(file.as_raw_fd(), 5, libc::SEEK_HOLE) }, 10_000);
    assert!(file.metadata().unwrap().created().is_ok(), "statx brings the time of birth");

    let (path, name) = (c_path(&path), c"user.colour");
    // SAFETY: see above.
    let set =
        unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), c"green".as_ptr().cast(), 5, 0) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    let mut value = [0_u8; 16];
    // SAFETY: see above.
    let length = unsafe {
        libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
    };
    assert_eq!((length, &value[..5]), (5, &b"green"[..]));
    // SAFETY: see above; a null buffer asks for the length.
    assert_eq!(unsafe { libc::listxattr(path.as_ptr(), std::ptr::null_mut(), 0) }, 12);

    let mut temporary = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(mounted.directory.path())
        .unwrap();
    temporary.write_all(b"nameless").unwrap();
    assert_eq!(fs::read_dir(mounted.directory.path()).unwrap().count(), 1);

    // SAFETY: a statvfs of zeroes is valid and filled by the call.
    let figures = unsafe {
        let mut figures: libc::statvfs = std::mem::zeroed();
        assert_eq!(libc::statvfs(path.as_ptr(), &raw mut figures), 0);
        figures
    };
    assert_eq!((figures.f_blocks, figures.f_bavail, figures.f_files), (1000, 500, 77));
    assert_eq!((figures.f_bsize, figures.f_namemax), (4096, 255));
}

#[test]
fn a_larger_read_ahead_makes_larger_reads_of_cached_files() {
    let options = MountOptions { read_ahead_bytes: Some(1 << 20), ..MountOptions::default() };
    let mounted = Mounted::with(Config::default(), &options);
    let data: Vec<u8> = (0..16_u32 << 20).map(|index| (index % 249) as u8).collect();
    mounted.plant("file", &data);
    assert!(fs::read(mounted.path("file")).unwrap() == data, "content differs");
    let largest = mounted.memory.largest_read.load(Ordering::SeqCst);
    assert_eq!(largest, 1 << 20, "largest read of a cached file");
}
