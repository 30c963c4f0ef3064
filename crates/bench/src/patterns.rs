//! fio's four patterns, and the one that databases care about.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use milpa_testbed::Outcome;

use crate::cpu::CpuMeter;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Operations of each random pattern; with fsync each costs a flush on three replicas.
const RANDOM_OPERATIONS: u64 = 4096;
const SYNCED_OPERATIONS: u64 = 512;

struct Pattern {
    name: &'static str,
    block: u64,
    operations: fn(u64) -> u64,
    random: bool,
    write: bool,
    sync_each: bool,
}

const PATTERNS: [Pattern; 5] = [
    Pattern {
        name: "sequential write + fsync",
        block: MIB,
        operations: |bytes| bytes / MIB,
        random: false,
        write: true,
        sync_each: false,
    },
    Pattern {
        name: "sequential read, cold",
        block: MIB,
        operations: |bytes| bytes / MIB,
        random: false,
        write: false,
        sync_each: false,
    },
    Pattern {
        name: "4 KiB random read, cold",
        block: BLOCK,
        operations: |_| RANDOM_OPERATIONS,
        random: true,
        write: false,
        sync_each: false,
    },
    Pattern {
        name: "4 KiB random overwrite",
        block: BLOCK,
        operations: |_| RANDOM_OPERATIONS,
        random: true,
        write: true,
        sync_each: false,
    },
    Pattern {
        name: "4 KiB overwrite + fsync",
        block: BLOCK,
        operations: |_| SYNCED_OPERATIONS,
        random: true,
        write: true,
        sync_each: true,
    },
];

/// Runs all patterns on a file here and there.
pub fn compare(plain: &Path, mount: &Path, mib: u32, meter: &CpuMeter) -> Outcome {
    let bytes = u64::from(mib) * MIB;
    for pattern in &PATTERNS {
        let (ext4, _) = pattern.measure(&plain.join("large"), bytes, meter)?;
        let (milpa, cpu) = pattern.measure(&mount.join("large"), bytes, meter)?;
        println!("{:<28}{ext4:>10.1}{milpa:>12.1}{:>9.3}{cpu:>14.0}", pattern.name, milpa / ext4);
    }
    for directory in [plain, mount] {
        std::fs::remove_file(directory.join("large")).map_err(|e| e.to_string())?;
    }
    Ok(())
}

impl Pattern {
    /// MB/s and CPU microseconds an operation.
    fn measure(&self, path: &Path, bytes: u64, meter: &CpuMeter) -> Outcome<(f64, f64)> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(self.write).create(self.write).open(path);
        let file = file.map_err(|e| format!("{}: {e}", path.display()))?;
        if !self.write {
            forget_cached_pages(&file);
        }
        let operations = (self.operations)(bytes);
        let before = meter.used_us();
        let started = Instant::now();
        self.work(&file, bytes, operations).map_err(|e| format!("{}: {e}", self.name))?;
        let seconds = started.elapsed().as_secs_f64();
        let cpu = (meter.used_us() - before) as f64 / operations as f64;
        Ok(((operations * self.block) as f64 / 1e6 / seconds, cpu))
    }

    fn work(&self, file: &File, bytes: u64, operations: u64) -> std::io::Result<()> {
        let mut buffer = vec![0x5A_u8; self.block as usize];
        let mut state = 0x2545_F491_4F6C_DD1D_u64;
        for n in 0..operations {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let block = if self.random { state % (bytes / self.block) } else { n };
            if self.write {
                buffer
                    .first_chunk_mut::<8>()
                    .into_iter()
                    .for_each(|head| *head = state.to_le_bytes());
                file.write_all_at(&buffer, block * self.block)?;
            } else {
                file.read_exact_at(&mut buffer, block * self.block)?;
            }
            if self.sync_each {
                file.sync_data()?;
            }
        }
        if self.write { file.sync_all() } else { Ok(()) }
    }
}

/// Makes the kernel forget the file's pages, so that reads reach the file system.
#[allow(unsafe_code)]
fn forget_cached_pages(file: &File) {
    use std::os::fd::AsRawFd;
    // SAFETY: an open descriptor and numbers; the advice cannot touch our memory.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}
