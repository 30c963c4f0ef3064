//! Several disks, each mounted on a directory, and the one who gives them their commands.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use milpa_fuse::{MountError, MountOptions, Session, mount};
use milpa_sim::disk::{DiskCounts, DiskOptions, NameLoss, Platter};
use milpa_sim::random::Random;

use crate::command::Command;
use crate::filesystem::FaultyFs;

/// Threads of each disk. More than one: a frozen or slow call must not hide the others.
const THREADS: usize = 4;
/// Files drawn for a bit to flip.
const DRAWS_MAX: usize = 1000;

/// What the disks are like.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Size of each; the contents are in memory.
    pub capacity_bytes: u64,
    /// Decides what power cuts take.
    pub seed: u64,
    /// Unsynced names are lost newest first, as on a file system with a journal, not any of them.
    pub keeps_order_of_names: bool,
}

/// The disks, mounted. Dropping them unmounts them and forgets what they held.
#[derive(Debug)]
pub struct Disks {
    all: Vec<FaultyDisk>,
    capacity_bytes: u64,
}

#[derive(Debug)]
struct FaultyDisk {
    path: PathBuf,
    filesystem: Arc<FaultyFs>,
    _session: Session,
}

impl Disks {
    /// Mounts an empty disk on each directory.
    ///
    /// # Errors
    ///
    /// As [`milpa_fuse::mount`]; nothing stays mounted.
    pub fn mount(directories: &[PathBuf], options: Options) -> Result<Disks, MountError> {
        let mounted = directories.iter().map(|path| FaultyDisk::mount(path, options));
        let all = mounted.collect::<Result<_, _>>()?;
        Ok(Disks { all, capacity_bytes: options.capacity_bytes })
    }

    /// Carries out `DISK,… COMMAND`, and tells people what came of it. DISK is a directory, its last
    /// component, or `all`.
    ///
    /// # Errors
    ///
    /// When there is no such disk or command, or nothing fitted it.
    pub fn obey(&self, line: &str) -> Result<String, String> {
        let (names, command) = line.trim().split_once(' ').ok_or("DISK COMMAND is expected")?;
        let command: Command = command.parse()?;
        let chosen = self.named(names)?;
        let before = sum(&chosen);
        let done = chosen.iter().map(|disk| disk.obey(&command, self.capacity_bytes));
        let answers = done.collect::<io::Result<Vec<_>>>().map_err(|e| e.to_string())?;
        Ok(match command {
            Command::Cut => taken(&before, &sum(&chosen)),
            Command::Counts => shown(&before),
            _ => answers.join("; "),
        })
    }

    fn named(&self, names: &str) -> Result<Vec<&FaultyDisk>, String> {
        if names == "all" {
            return Ok(self.all.iter().collect());
        }
        let mut chosen = Vec::new();
        for name in names.split(',') {
            let fit: Vec<&FaultyDisk> = self.all.iter().filter(|d| d.is_named(name)).collect();
            match &*fit {
                [] => return Err(format!("no disk {name:?}")),
                [disk] => chosen.push(*disk),
                _ => return Err(format!("several disks are named {name:?}")),
            }
        }
        Ok(chosen)
    }
}

impl FaultyDisk {
    fn mount(path: &Path, options: Options) -> Result<FaultyDisk, MountError> {
        let names = if options.keeps_order_of_names { NameLoss::Newest } else { NameLoss::Any };
        let disk = DiskOptions {
            capacity_bytes: options.capacity_bytes,
            name_loss: names,
            read_errors: 0,
            may_be_hit: |_| false,
        };
        // By its name, not its place in a temporary directory: a seed must mean the same again.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let platter = Platter::new(disk, Random::new(options.seed, &name));
        let filesystem = Arc::new(FaultyFs::new(Arc::new(Mutex::new(platter))));
        let how = MountOptions {
            fsname: "faultfs".to_owned(),
            threads: THREADS,
            ..MountOptions::default()
        };
        let session = mount(Arc::clone(&filesystem), path, &how)?;
        Ok(FaultyDisk { path: path.to_owned(), filesystem, _session: session })
    }

    fn is_named(&self, name: &str) -> bool {
        self.path == Path::new(name) || self.path.file_name().is_some_and(|last| last == name)
    }

    fn obey(&self, command: &Command, capacity_bytes: u64) -> io::Result<String> {
        let disk = &self.filesystem;
        let done = match command {
            Command::Freeze(is_frozen) => {
                disk.freeze(*is_frozen);
                if *is_frozen { "frozen" } else { "thawed" }
            }
            Command::Cut => {
                disk.cut_power();
                "cut"
            }
            Command::Sync => {
                disk.platter().sync_everything();
                "synced"
            }
            Command::Order(failure, part) => {
                disk.order(*failure, part);
                "ordered"
            }
            Command::DropSyncs(are_dropped) => {
                disk.platter().drops_syncs = *are_dropped;
                if *are_dropped { "syncs are dropped" } else { "syncs work" }
            }
            Command::Flip(part) => return self.flip(part),
            Command::Delay(ms) => {
                disk.delay_ms.store(*ms, Ordering::Relaxed);
                return Ok(format!("writes and syncs take {ms} ms longer"));
            }
            Command::DelayReads(ms) => {
                disk.read_delay_ms.store(*ms, Ordering::Relaxed);
                return Ok(format!("reads take {ms} ms longer"));
            }
            Command::Fill(is_full) => {
                let mut platter = disk.platter();
                let used = platter.allocated();
                platter.options.capacity_bytes = if *is_full { used } else { capacity_bytes };
                return Ok(format!("{used} bytes used of {}", platter.options.capacity_bytes));
            }
            Command::Counts => "",
        };
        Ok(done.to_owned())
    }

    fn flip(&self, part: &str) -> io::Result<String> {
        let is_victim = |path: &Path| path.to_string_lossy().contains(part);
        // A file that is drawn may be empty.
        let mut draws = (0..DRAWS_MAX).map(|_| self.filesystem.platter().rot(is_victim));
        match draws.find_map(|flipped| flipped) {
            Some((path, offset)) => Ok(format!("flipped a bit of {} at {offset}", path.display())),
            None => Err(io::Error::other(format!("no file with {part:?} in its path has bytes"))),
        }
    }
}

fn sum(disks: &[&FaultyDisk]) -> DiskCounts {
    let mut all = DiskCounts::default();
    disks.iter().for_each(|disk| all.add(&disk.filesystem.platter().counts));
    all
}

fn shown(counts: &DiskCounts) -> String {
    let shown = counts.by_name().map(|(name, count)| format!("{count} {name}"));
    shown.join(", ")
}

fn taken(before: &DiskCounts, after: &DiskCounts) -> String {
    let writes = after.lost_writes - before.lost_writes;
    let torn = after.torn_writes - before.torn_writes;
    let names = after.lost_names - before.lost_names;
    format!("lost {writes} writes and {names} names, tore {torn} writes")
}
