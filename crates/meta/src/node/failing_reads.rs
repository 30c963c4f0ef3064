//! For tests: the system's disk, as who starts uses it, that fails to read one file for a while.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use milpa_host::clock::Instant;
use milpa_host::disk::{Disk, Held, Open, SimulatedFile, Space, Status};
use milpa_host::net::Network;
use milpa_host::world::{self, Entered, Memory, World};

/// Reads of this file fail so many times.
pub(super) struct FailingReads {
    path: PathBuf,
    left: Arc<AtomicU32>,
}

/// This thread's reads of a file fail so many times, until the guard is dropped.
pub(super) fn fail_reads(path: PathBuf, times: u32) -> Entered {
    world::enter(Rc::new(FailingReads { path, left: Arc::new(times.into()) }))
}

#[derive(Debug)]
struct Opened {
    file: fs::File,
    failures: Option<Arc<AtomicU32>>,
}

impl SimulatedFile for Opened {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let less = |left: u32| left.checked_sub(1);
        let fails = |it: &Arc<AtomicU32>| {
            it.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        };
        if self.failures.as_ref().is_some_and(fails) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file.read_at(buffer, offset)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        unreachable!("nothing is written")
    }

    fn sync(&self) -> io::Result<()> {
        unreachable!("nothing is written")
    }

    fn punch(&self, _: u64, _: u64) -> io::Result<()> {
        unreachable!("nothing is written")
    }

    fn truncate(&self, _: u64) -> io::Result<()> {
        unreachable!("nothing is written")
    }

    fn status(&self) -> io::Result<Status> {
        Ok(Status { length: self.file.metadata()?.len(), ..Status::default() })
    }

    fn release(&self) {}
}

impl Disk for FailingReads {
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn SimulatedFile>> {
        assert_eq!(how, Open::Read);
        let failures = (path == self.path).then(|| Arc::clone(&self.left));
        Ok(Arc::new(Opened { file: fs::File::open(path)?, failures }))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn rename(&self, source: &Path, target: &Path) -> io::Result<()> {
        fs::rename(source, target)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(directory)?.flatten();
        Ok(names.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    fn sync_directory(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn remove_tree(&self, _: &Path) -> io::Result<()> {
        unreachable!("no directory goes")
    }

    fn create_directory(&self, _: &Path) -> io::Result<()> {
        unreachable!("none is made")
    }

    fn status(&self, _: &Path) -> io::Result<Status> {
        unreachable!("nobody asks")
    }

    fn space(&self, _: &Path) -> io::Result<Space> {
        unreachable!("nobody asks")
    }

    fn lock(&self, _: &Path) -> io::Result<Box<dyn Held>> {
        unreachable!("nothing is locked")
    }
}

impl World for FailingReads {
    fn network(&self) -> &dyn Network {
        unreachable!("nobody connects")
    }

    fn disk(&self) -> &dyn Disk {
        self
    }

    fn started(&self) -> Instant {
        Instant::now()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
    }

    fn fill(&self, _: &mut [u8]) {
        unreachable!("nothing is left to chance")
    }

    fn job_pause(&self, _: &str) -> Duration {
        Duration::ZERO
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }
}
