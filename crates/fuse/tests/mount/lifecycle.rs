//! Mounting, its errors, and every way in which a mount ends.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use milpa_fuse::{
    Config, MountError, MountOptions, ROOT_ID, Session, Unmount, UnmountError, mount,
};

use crate::memory::{Event, MemoryFs};
use crate::{Mounted, errno_of, is_mounted, require_fuse};

#[test]
fn unmounting_leaves_nothing_behind() {
    let mounted = Mounted::new();
    let path = mounted.directory.path().to_owned();
    let file = File::create(mounted.path("file")).unwrap();
    assert!(is_mounted(&path));
    let busy = mounted.session.unmount(Unmount::Clean).unwrap_err();
    assert!(matches!(busy, UnmountError::Busy { .. }), "{busy}");
    assert!(is_mounted(&path), "a busy mount stays as it was");
    drop(file);
    unmount_when_released(&mounted.session);
    assert!(!is_mounted(&path));
    assert_eq!(mounted.memory.next_event(), Event::Destroyed);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "the directory below is back");
    mounted.session.unmount(Unmount::Clean).expect("a second unmount has nothing to do");
}

/// close(2) may return before the kernel has dropped its last reference; that ends by itself.
fn unmount_when_released(session: &Session) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(error) = session.unmount(Unmount::Clean) {
        assert!(matches!(error, UnmountError::Busy { .. }), "{error}");
        assert!(std::time::Instant::now() < deadline, "busy for 10 s");
        std::thread::yield_now();
    }
}

#[test]
fn dropping_the_session_with_open_files_aborts_them() {
    let Mounted { session, memory, directory } = Mounted::new();
    let mut file = File::create(directory.path().join("direct-open")).unwrap();
    drop(session);
    assert!(!is_mounted(directory.path()));
    assert_eq!(memory.next_event(), Event::Destroyed);
    let errno = errno_of(file.write(b"x"));
    assert!([libc::ENOTCONN, libc::ECONNABORTED].contains(&errno), "{errno}");
}

#[test]
fn detaching_serves_open_files_to_the_end() {
    let mounted = Mounted::new();
    let mut file = File::create(mounted.path("direct-open")).unwrap();
    mounted.session.unmount(Unmount::Detach).unwrap();
    assert!(!is_mounted(mounted.directory.path()));
    file.write_all(b"still served").unwrap();
    drop(file);
    mounted.session.wait();
    assert_eq!(mounted.memory.next_event(), Event::Destroyed);
}

#[test]
fn a_copy_in_another_mount_namespace_is_served_until_it_ends() {
    let mounted = Mounted::new();
    mounted.plant("file", b"served in a container");
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .args(["echo ready; read go; cat \"$1/file\"", "sh"])
        .arg(mounted.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    mounted.session.unmount(Unmount::Detach).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    line.clear();
    output.read_to_string(&mut line).unwrap();
    assert_eq!(line, "served in a container");
    assert!(child.wait().unwrap().success());
    mounted.session.wait();
    assert_eq!(mounted.memory.next_event(), Event::Destroyed);
}

#[test]
fn an_unmount_by_somebody_else_ends_the_session() {
    let mounted = Mounted::new();
    let status = Command::new("umount").arg(mounted.directory.path()).status().unwrap();
    assert!(status.success());
    mounted.session.wait();
    assert_eq!(mounted.memory.next_event(), Event::Destroyed);
}

#[test]
fn read_only_mounts_refuse_writes() {
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let mounted = Mounted::with(Config::default(), &options);
    assert_eq!(errno_of(File::create(mounted.path("file"))), libc::EROFS);
}

#[track_caller]
fn mount_error(path: &Path) -> MountError {
    require_fuse();
    let memory = Arc::new(MemoryFs::new(Config::default()));
    mount(memory, path, &MountOptions::default()).expect_err("must not mount")
}

#[test]
fn mount_errors_name_their_cause() {
    let directory = tempfile::tempdir().unwrap();
    let missing = mount_error(&directory.path().join("missing"));
    assert!(matches!(missing, MountError::MountPointMissing { .. }), "{missing}");

    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let not_a_directory = mount_error(&file);
    assert!(matches!(not_a_directory, MountError::NotADirectory { .. }), "{not_a_directory}");

    let mounted = Mounted::new();
    let again = mount_error(mounted.directory.path());
    assert!(
        matches!(&again, MountError::AlreadyMounted { kind, .. } if kind == "fuse.milpa"),
        "{again}"
    );

    let options = MountOptions { threads: 0, fsname: String::new(), ..MountOptions::default() };
    let invalid = mount(Arc::clone(&mounted.memory), directory.path(), &options).unwrap_err();
    assert!(matches!(&invalid, MountError::InvalidOptions { problems } if problems.len() == 2));
}

/// Where [`helper_that_dies_mounted`] mounts.
const HELPER_PATH: &str = "MILPA_FUSE_TEST_PATH";

/// Unmounts with the system's program, whatever happens.
struct Leftover(PathBuf);

impl Drop for Leftover {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "umount of the leftover");
    }
}

#[test]
#[ignore = "part of a_mount_whose_process_died_is_called_stale, which starts it"]
fn helper_that_dies_mounted() {
    let path = std::env::var_os(HELPER_PATH).expect("started by its test");
    let memory = Arc::new(MemoryFs::new(Config::default()));
    let _session = mount(memory, path, &MountOptions::default()).unwrap();
    std::process::abort();
}

#[test]
fn a_mount_whose_process_died_is_called_stale() {
    require_fuse();
    let directory = tempfile::tempdir().unwrap();
    let helper = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lifecycle::helper_that_dies_mounted", "--ignored"])
        .env(HELPER_PATH, directory.path())
        .output()
        .unwrap();
    assert!(!helper.status.success());
    assert!(is_mounted(directory.path()), "{}", String::from_utf8_lossy(&helper.stdout));
    let leftover = Leftover(directory.path().to_owned());
    let stale = mount_error(directory.path());
    assert!(matches!(stale, MountError::StaleMount { .. }), "{stale}");
    drop(leftover);
    assert!(!is_mounted(directory.path()));
}

#[test]
fn a_file_system_that_refuses_to_start_is_not_left_mounted() {
    require_fuse();
    let directory = tempfile::tempdir().unwrap();
    let memory = Arc::new(MemoryFs::new(Config::default()));
    memory.refuse_init.store(true, Ordering::SeqCst);
    let error = mount(memory, directory.path(), &MountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::InitRefused(_)), "{error}");
    assert!(!is_mounted(directory.path()));
}

#[test]
#[ignore = "needs a user other than root and a setuid fusermount3 in PATH"]
fn without_root_fusermount3_mounts() {
    let directory = tempfile::tempdir().unwrap();
    let memory = Arc::new(MemoryFs::new(Config::default()));
    let options =
        MountOptions { allow_other: false, fsname: "a,b".to_owned(), ..MountOptions::default() };
    memory.state().nodes.get_mut(&ROOT_ID).unwrap().attr.mode = libc::S_IFDIR | 0o777;
    let session = mount(memory, directory.path(), &options).expect("mount");
    fs::write(directory.path().join("file"), "works").unwrap();
    assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"works");
    let file = File::open(directory.path().join("file")).unwrap();
    let busy = session.unmount(Unmount::Clean).unwrap_err();
    assert!(matches!(busy, UnmountError::Busy { .. }), "{busy}");
    drop(file);
    unmount_when_released(&session);
    assert!(!is_mounted(directory.path()));
}
